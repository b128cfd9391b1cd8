"""Copies of a plan give the right files, and plans with seeded faults are refused. Nothing here
uses a format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mckpt.errors import CoverError
from mckpt.geometry.box import Box, Layout, Piece, Stored
from mckpt.geometry.join import COPY, Joined, join
from mckpt.geometry.packing import PACKINGS, buffer, padded, shard

LAYERS, EXPERTS = 3, 2
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (10, 6),
    "layers.{layer}.norm.weight": (6,),
    "layers.{layer}.q.weight": (12, 6),
    "layers.{layer}.k.weight": (4, 6),
    "layers.{layer}.v.weight": (4, 6),
    "layers.{layer}.o.weight": (6, 12),
    "layers.{layer}.experts.{expert}.gate.weight": (8, 6),
    "layers.{layer}.experts.{expert}.up.weight": (8, 6),
    "layers.{layer}.experts.{expert}.down.weight": (6, 8),
}
SIZES = {"float32": 4, "bfloat16": 2}


class Form:
    """Builds a layout. Each `add` puts stored tensors of one geometry into files, one buffer after
    the other.
    """

    def __init__(self, num_files: int) -> None:
        self.ends = [16] * num_files  # bytes before the first tensor of each file
        self.stored: list[Stored] = []

    def add(
        self,
        key: str,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        *,
        dtype: str = "float32",
        replica: bool = False,
        padding: bool = False,
        first: int = 0,
    ) -> None:
        names = "".join(p.tensor for p in pieces)
        layers = LAYERS if "{layer}" in names else 1
        experts = EXPERTS if "{expert}" in names else 1
        rows = []
        for n, (layer, expert) in enumerate(
            (la, e) for la in range(layers) for e in range(experts)
        ):
            f = (first + n) % len(self.ends)
            rows.append((layer, expert, f, self.ends[f]))
            self.ends[f] += math.prod(shape) * SIZES[dtype]
        layer, expert, file, at = (np.array(x) for x in zip(*rows, strict=True))
        self.stored.append(
            Stored(
                key,
                dtype,
                shape,
                tuple(pieces),
                layer.astype("i4"),
                expert.astype("i4"),
                file.astype("i4"),
                at.astype("i8"),
                replica=replica,
                padding=padding,
            )
        )

    def pack(
        self,
        key: str,
        pack: str,
        members: Sequence[str],
        kind: str,
        ways: int,
        *,
        rows: int = 0,
        transposed: bool = False,
        **more: Any,
    ) -> None:
        """Adds a packing of members, cut for `ways` ranks, with the buffers of a rank in files from
        `rank` on.
        """
        whole = PACKINGS[pack]([SHAPES[m] for m in members], 2)
        whole = padded(whole, rows) if rows else whole
        for rank in range(ways):
            shape, pieces = buffer(whole, shard(whole, kind, rank, ways), members, transposed)
            self.add(
                f"{key} of rank {rank}",
                shape,
                pieces,
                first=rank,
                replica=kind == "replicated" and rank > 0,
                padding=bool(rows),
                **more,
            )

    def layout(self) -> Layout:
        return Layout([f"file{i}" for i in range(len(self.ends))], self.stored, dict(SHAPES))


def plain(dtype: str = "float32") -> Form:
    """Returns every tensor on its own, as Hugging Face stores them."""
    form = Form(2)
    for i, name in enumerate(SHAPES):
        form.pack(name, "one", [name], "replicated", 1, dtype=dtype)
        form.ends[i % 2] += 4  # gaps between the tensors
    return form


def fused(
    ways: int = 2, dtype: str = "float32", qkv: Sequence[str] = "qkv", skip: str = ""
) -> Form:
    """Returns packed and cut tensors, as Megatron stores them: `down` transposed, the vocabulary
    padded, the norm on every rank.
    """
    form = Form(3)
    rules: dict[str, Callable[[], None]] = {
        "embed": lambda: form.pack(
            "embed", "one", ["embed.weight"], "vocab", ways, rows=16, dtype=dtype
        ),
        "norm": lambda: form.pack(
            "norm", "one", ["layers.{layer}.norm.weight"], "replicated", ways, dtype=dtype
        ),
        "qkv": lambda: form.pack(
            "qkv", "qkv", [f"layers.{{layer}}.{x}.weight" for x in qkv], "column", ways, dtype=dtype
        ),
        "o": lambda: form.pack("o", "one", ["layers.{layer}.o.weight"], "row", ways, dtype=dtype),
        "fc1": lambda: form.pack(
            "fc1",
            "gated",
            [f"layers.{{layer}}.experts.{{expert}}.{x}.weight" for x in ("gate", "up")],
            "column",
            ways,
            dtype=dtype,
        ),
        "fc2": lambda: form.pack(
            "fc2",
            "one",
            ["layers.{layer}.experts.{expert}.down.weight"],
            "row",
            ways,
            transposed=True,
            dtype=dtype,
        ),
    }
    for name, rule in rules.items():
        if name != skip:
            rule()
    return form


def fill(form: Form) -> list[bytearray]:
    """Returns files in which all stored elements differ; the padding is zero.

    A replica holds the same values as the first copy.
    """
    data = [bytearray(end) for end in form.ends]
    values = {}
    number = 1
    for name, shape in SHAPES.items():
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                values[name, layer, expert] = np.arange(
                    number, number + math.prod(shape), dtype="u4"
                ).reshape(shape)
                number += math.prod(shape)
    for s in form.stored:
        kind = np.dtype(f"u{SIZES[s.dtype]}")
        for layer, expert, file, at in zip(
            s.layer.tolist(), s.expert.tolist(), s.file.tolist(), s.at.tolist(), strict=True
        ):
            flat = np.frombuffer(data[file], kind, s.numel, at)
            for p in s.pieces:
                cut = tuple(slice(o, o + n) for o, n in zip(p.box.offset, p.box.shape, strict=True))
                for i, v in np.ndenumerate(
                    values[
                        p.tensor,
                        layer if "{layer}" in p.tensor else 0,
                        expert if "{expert}" in p.tensor else 0,
                    ][cut]
                ):
                    flat[p.start + sum(x * t for x, t in zip(i, p.strides, strict=True))] = (
                        v % 65521
                    )
    return data


def interpret(
    joined: Joined, source: Sequence[bytes | bytearray], ends: Sequence[int]
) -> list[bytearray]:
    """Executes copies element by element, without numpy; each target byte is written once."""
    out = [bytearray(end) for end in ends]
    written: list[set[int]] = [set() for _ in ends]
    for c in joined.copies:
        assert c.dtype == COPY
        row = {k: int(c[k]) for k in COPY.names or ()}
        a, b, *_ = joined.casts[row["cast"]]
        assert a == b, "casts are no bytes"
        size = SIZES[a]
        for r in range(row["rows"]):
            for i in range(row["run"]):
                src = row["src_at"] + r * row["src_pitch"] + i * row["src_step"]
                dst = row["dst_at"] + r * row["dst_pitch"] + i * row["dst_step"]
                assert dst not in written[row["dst_file"]]
                written[row["dst_file"]].add(dst)
                out[row["dst_file"]][dst : dst + size] = source[row["src_file"]][src : src + size]
    return out


# ------------------------------------------------------------------------------- correct joins


@pytest.mark.parametrize("form", [plain(), fused(1), fused(2)], ids=["plain", "fused", "shards"])
def test_a_join_with_itself_copies_whole(form: Form) -> None:
    joined = join(form.layout(), form.layout())
    data = fill(form)
    once = [s for s in form.stored if not s.replica]
    assert int((joined.copies["rows"] * joined.copies["run"]).sum()) == sum(
        sum(math.prod(p.box.shape) for p in s.pieces) * len(s) for s in form.stored
    )
    mine = joined.copies[joined.copies["src_file"] == joined.copies["dst_file"]]
    assert (mine["src_at"] == mine["dst_at"]).sum() >= sum(map(len, once))
    assert interpret(joined, data, form.ends) == data


def test_dense_tensors_are_one_copy_each() -> None:
    joined = join(plain().layout(), plain().layout())
    tensors = sum(len(s) for s in plain().stored)
    assert len(joined.copies) == tensors == 1 + 5 * LAYERS + 3 * LAYERS * EXPERTS
    assert (joined.copies["rows"] == 1).all()


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_to_fused_and_back_restores_every_byte(ways: int, dtype: str) -> None:
    """plain -> fused gives the files that `fill` makes directly, and the way back restores every
    byte.
    """
    a, b = plain(dtype), fused(ways, dtype)
    there = interpret(join(a.layout(), b.layout()), fill(a), b.ends)
    assert there == fill(b)
    assert interpret(join(b.layout(), a.layout()), there, a.ends) == fill(a)


def test_resharding_gives_the_files_of_the_other_size() -> None:
    a, b = fused(1), fused(2)
    assert interpret(join(a.layout(), b.layout()), fill(a), b.ends) == fill(b)
    assert interpret(join(b.layout(), a.layout()), fill(b), a.ends) == fill(a)


def test_copies_are_in_reading_order_and_have_names() -> None:
    joined = join(fused(2).layout(), plain().layout())
    where = list(
        zip(joined.copies["src_file"].tolist(), joined.copies["src_at"].tolist(), strict=True)
    )
    assert where == sorted(where)
    names = {joined.name(t) for t in joined.copies["tensor"].tolist()}
    assert names == {
        n.format(layer=la, expert=e) for n in SHAPES for la in range(LAYERS) for e in range(EXPERTS)
    }


def test_casts_are_listed() -> None:
    joined = join(plain("bfloat16").layout(), fused(2, "float32").layout())
    assert joined.casts == (("bfloat16", "float32", 0.0, ""),)
    assert set(joined.copies["cast"].tolist()) == {0}
    row = joined.copies[0]
    assert (row["src_step"], row["dst_step"]) == (2, 4)


@st.composite
def random_forms(draw: st.DrawFn) -> Form:
    """Draws layouts: each tensor is cut into random boxes, each box has a buffer of its own, and
    some are transposed, in a random order and file.
    """
    form = Form(draw(st.integers(1, 3)))
    todo = []
    for name, shape in SHAPES.items():
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        for i, at in enumerate(np.ndindex(*(len(c) - 1 for c in cuts))):
            low = tuple(c[k] for c, k in zip(cuts, at, strict=True))
            box = Box(low, tuple(c[k + 1] - c[k] for c, k in zip(cuts, at, strict=True)))
            todo.append((f"{name} {i}", name, box, draw(st.booleans())))
    for key, name, box, turned in draw(st.permutations(todo)):
        shape = box.shape[::-1] if turned else box.shape
        strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
        form.add(
            key,
            shape,
            [Piece(name, box, 0, tuple(strides[::-1] if turned else strides))],
            first=draw(st.integers(0, 2)),
        )
    return form


@settings(max_examples=15)
@given(random_forms(), random_forms())
def test_any_layout_converts_to_any_other_and_back(a: Form, b: Form) -> None:
    there = interpret(join(a.layout(), b.layout()), fill(a), b.ends)
    assert there == fill(b)
    assert interpret(join(b.layout(), a.layout()), there, a.ends) == fill(a)


# ------------------------------------------------------------------------------- plans with faults


def refused(source: Layout, target: Layout) -> str:
    with pytest.raises(CoverError) as caught:
        join(source, target)
    assert str(caught.value).startswith("the plan would not use each source element")
    return str(caught.value)


def changed(form: Form, key: str, **fields: Any) -> Layout:
    layout = form.layout()
    assert any(s.key == key for s in layout.stored)
    layout.stored = [replace(s, **fields) if s.key == key else s for s in layout.stored]
    return layout


@pytest.mark.parametrize("skip", ["embed", "norm", "o", "fc2"])
def test_a_missing_rule_is_refused(skip: str) -> None:
    name = {
        "embed": "embed.weight",
        "norm": "layers.0.norm.weight",
        "o": "layers.0.o.weight",
        "fc2": "layers.0.experts.0.down.weight",
    }[skip]
    assert f"{name}: the target has no place for it" in refused(
        plain().layout(), fused(2, skip=skip).layout()
    )
    assert f"{name}: the source does not have it" in refused(
        fused(2, skip=skip).layout(), plain().layout()
    )


def test_a_missing_layer_or_expert_is_refused() -> None:
    def without(layer: int, expert: int) -> Layout:
        s = next(
            s for s in plain().stored if s.key.startswith("layers.{layer}.experts.{expert}.up")
        )
        keep = ~((s.layer == layer) & (s.expert == expert))
        return changed(
            plain(), s.key, **{k: getattr(s, k)[keep] for k in ("layer", "expert", "file", "at")}
        )

    assert "layers.1.experts.1.up.weight: the source does not have it" in refused(
        without(1, 1), fused().layout()
    )
    assert "layers.2.experts.0.up.weight: the target has no place for it" in refused(
        fused().layout(), without(2, 0)
    )


def test_a_missing_shard_is_refused() -> None:
    layout = fused(2).layout()
    layout.stored = [s for s in layout.stored if s.key != "o of rank 1"]
    assert "target: layers.0.o.weight [6, 12]: 36 of 72 elements are covered" in refused(
        plain().layout(), layout
    )
    assert "source: layers.0.o.weight [6, 12]: 36 of 72 elements are covered" in refused(
        layout, plain().layout()
    )


def test_a_tensor_of_another_shape_is_refused() -> None:
    def of(shape: tuple[int, int]) -> Layout:
        form = Form(1)
        box, name = Box((0, 0), shape), "layers.{layer}.o.weight"
        form.add("o", shape, [Piece(name, box, 0, (shape[1], 1))])
        return replace(form.layout(), shapes={name: shape})

    for source, target in ((4, 8), (8, 4)):
        words = f"o.weight is [{source}, 3] in the source, and [{target}, 3] in the target"
        assert words in refused(of((source, 3)), of((target, 3)))


def test_a_duplicate_is_refused() -> None:
    layout = plain().layout()
    layout.stored.append(next(s for s in layout.stored if s.key.startswith("layers.{layer}.o")))
    text = refused(layout, fused().layout())
    assert (
        "source: layers.0.o.weight [6, 12]: boxes overlap: [6, 12] at [0, 0] and [6, 12] at [0, 0]"
        in text
    )
    s = next(s for s in plain().stored if s.key.startswith("layers.{layer}.o"))
    twice = changed(
        plain(),
        s.key,
        **{
            k: np.concatenate([getattr(s, k), getattr(s, k)[:1]])
            for k in ("layer", "expert", "file", "at")
        },
    )
    assert f"source: {s.key} is stored 2 times for layer 0, expert 0" in refused(
        twice, fused().layout()
    )


def test_a_replica_that_is_not_marked_is_refused() -> None:
    layout = changed(fused(2), "norm of rank 1", replica=False)
    assert "boxes overlap: [6] at [0] and [6] at [0]" in refused(layout, plain().layout())


def test_pieces_that_share_an_element_are_refused() -> None:
    s = next(s for s in fused(1).stored if s.key == "qkv of rank 0")
    pieces = (*s.pieces[:-1], s.pieces[-1]._replace(start=s.pieces[-1].start - 6))
    text = refused(plain().layout(), changed(fused(1), s.key, pieces=pieces))
    assert "target: qkv of rank 0 [20, 6]: two pieces share element 102 of the buffer" in text


def test_a_piece_outside_its_buffer_is_refused() -> None:
    s = next(s for s in fused(1).stored if s.key == "o of rank 0")
    text = refused(
        plain().layout(), changed(fused(1), s.key, pieces=(s.pieces[0]._replace(start=1),))
    )
    assert "o of rank 0 [6, 12]: a piece reaches outside the 72 elements of the buffer" in text


def test_a_hole_is_refused() -> None:
    """A forgotten piece leaves elements unwritten and a tensor uncovered; both are reported."""
    s = next(s for s in fused(1).stored if s.key == "qkv of rank 0")
    text = refused(plain().layout(), changed(fused(1), s.key, pieces=s.pieces[:-1]))
    assert (
        "target: qkv of rank 0 [20, 6]: 12 of 120 elements hold nothing that the mapping names"
        in text
    )
    assert "target: layers.0.v.weight [4, 6]: 12 of 24 elements are covered" in text


def test_padding_is_refused_where_it_is_not_allowed() -> None:
    text = refused(plain().layout(), changed(fused(2), "embed of rank 1", padding=False))
    assert "embed of rank 1 [8, 6]: 36 of 48 elements hold nothing that the mapping names" in text
    # elements that a view leaves out are not reported
    join(changed(fused(2), "embed of rank 1", padding=False, view=True), plain().layout())


def test_a_tensor_of_another_size_is_refused() -> None:
    """The k of the source is narrower than that of the target."""
    form = plain()
    name = "layers.{layer}.k.weight"
    layout = changed(
        form,
        f"{name} of rank 0",
        shape=(3, 6),
        pieces=(Piece(name, Box((0, 0), (3, 6)), 0, (6, 1)),),
    )
    assert "source: layers.0.k.weight [4, 6]: 18 of 24 elements are covered" in refused(
        layout, fused().layout()
    )


def test_one_error_lists_all_problems_of_a_plan() -> None:
    layout = changed(fused(2, skip="norm"), "o of rank 0", pieces=())
    text = refused(plain().layout(), layout)
    for part in (
        "o of rank 0",
        "layers.0.o.weight",
        "layers.0.norm.weight",
        "layers.2.norm.weight",
    ):
        assert part in text
