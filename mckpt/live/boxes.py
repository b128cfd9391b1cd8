"""Which boxes of the Hugging Face tensors a rank holds: of an engine, or of a model of Megatron.

The mapping files know both sides: a weight of Megatron's shard is a box of a logical tensor, and so
is a part of a Hugging Face tensor. Where two of them meet, the rank holds a box.

    linear_qkv of tp rank 1      q rows 8..16, k rows 4..8   -->   q_proj.weight ((8, 16), (0, 64))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mckpt import formats, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.refusals import refuse_sizes
from mckpt.conversion.to_megatron import padded_rows
from mckpt.errors import UsageError
from mckpt.formats.base import Names, packed
from mckpt.formats.hf_files import Row
from mckpt.formats.megatron.torch_shards import instances, local
from mckpt.geometry.box import Box, Layout, Piece, Stored, overlap, row_major
from mckpt.geometry.packing import Packed
from mckpt.geometry.parallel import Parallel
from mckpt.live.buckets import FILE, exported
from mckpt.live.direct import Bounds, bounds_of, index_of
from mckpt.live.memory import Memory
from mckpt.live.model import Described, collected, ranks_of, release, stated
from mckpt.live.together import own_result, rank_and_world
from mckpt.mapping import Bound
from mckpt.options import SourceOptions, TargetOptions
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    from typing_extensions import Unpack

VOCABULARY = 64  # vLLM and SGLang pad the vocabulary to a multiple of it
QKV = "qkv", "gated_qkv"  # packings
# Each rank of vLLM and SGLang holds the whole of these; Megatron cuts some of them.
UNCUT = "attn.q_down.weight", "attn.kv_down.weight", "mtp.proj.weight"
HeldBoxes = dict[str, list[Bounds]]


def engine_boxes(
    model: Checkpoint | str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vocab_multiple: int = VOCABULARY,
) -> list[HeldBoxes]:
    """Returns what each rank of an engine holds, as vLLM and SGLang share a model: linears by rows
    or columns over tp, experts over ep, layers over pp, the vocabulary over tp. With fewer heads of
    k and v than tp, several ranks hold the same one; all hold the narrow latents.

    The ranks are in the order of the engine's: tp first, then pp. With ep, a stage has lcm(tp, ep *
    etp) ranks, as an engine with several attention groups has.

    model: the directory of the model, or what `mckpt.open` or `describe` returns.
    etp: the ranks over which each expert is cut; without it 1 with ep, else tp.

    Raises UsageError for sizes by which heads, widths, layers or experts are not divisible.
    """
    source = model if isinstance(model, Checkpoint) else Checkpoint.open(model, SourceOptions())
    sizes = Parallel(tp=tp, pp=pp, ep=ep, etp=etp or (1 if ep > 1 else tp))
    # experts that have biases can be cut here, and not in Megatron-Core
    refuse_sizes(source.mapping, source.dims, replace(sizes, etp=1))
    divisible_by = max(vocab_multiple // math.gcd(vocab_multiple, tp), 1)
    dialect = source.mapping if source.is_megatron else mapping.dialect_for(source.mapping)
    # what an engine holds does not depend on how Megatron names it
    chosen = {"keys": "local", "pp": pp, **dialect.choices_for(dialect.version())}
    for name, value in (("transformer_impl", "local"), ("experts", "sequential")):
        known = dialect.choices[name]
        chosen[name] = value if value in known else known[0]
    names = Names(dialect, source.dims, {**source.names.choices, **chosen}, sizes)
    whole = [b for b in names.bound if b.rule.written]
    rows, scope = padded_rows(source.dims, divisible_by, tp), names.scope()
    packs = [packed(b.rule, scope, rows) for b in whole]
    hf = exported(source, TargetOptions(formats.HUGGING_FACE))
    holders, stages = _Holders(hf.layout, hf.rows), names.stages()
    etp, count = sizes.expert_tp, math.lcm(tp, sizes.expert_tp * ep)

    @cache
    def shards(tp: int, etp: int) -> list[tuple[Piece, ...]]:
        """Returns the pieces of each rule on a rank."""
        ways = [
            (etp, sizes.expert_tp) if "expert" in b.rule.indices else (tp, sizes.tp) for b in whole
        ]
        return [_pieces(b, p, *way) for b, p, way in zip(whole, packs, ways, strict=True)]

    @cache
    def held(stage: int, expert: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the layers and the experts of each rule on a rank."""
        every = (instances(b, stages[stage], stage, sizes, source.dims, expert) for b in whole)
        listed = ([(layer, one) for _, layer, one, _ in found] for found in every)
        return [tuple(np.array(one, "i8").reshape(-1, 2).T) for one in listed]

    found = []
    for stage in range(pp):
        for rank in range(count):
            pieces, where = shards(rank % tp, rank % etp), held(stage, rank // etp % ep)
            found.append(holders.boxes(zip(pieces, where, strict=True)))
    return found


def _pieces(b: Bound, whole: Packed, rank: int, ways: int) -> tuple[Piece, ...]:
    """Returns the pieces of a rule that a rank of an engine holds."""
    if b.rule.of[0].endswith(UNCUT):
        return local(b, whole, 0, 1)[1]
    groups = sum(one.member == len(b.rule.of) - 1 for one in whole.placed)
    if b.rule.pack not in QKV or ways <= groups:
        return local(b, whole, rank, ways)[1]
    found = []
    for number, name in enumerate(b.rule.of):
        boxes = [one.box for one in whole.placed if one.member == number]
        parts = groups if name in b.rule.of[-2:] else ways  # k and v are last
        (_, *rest), rows = boxes[0].shape, sum(box.shape[0] for box in boxes) // parts
        box = Box((rank * parts // ways * rows, *(0 for _ in rest)), (rows, *rest))
        found.append(Piece(name, box, 0, ()))
    return tuple(found)


def model_boxes(model_chunks: Sequence[Any], **described: Unpack[Described]) -> HeldBoxes:
    """Returns what this rank holds of a live model of Megatron. All of its ranks call it.

    described: the keywords of `Described`, such as `like`.
    """
    given = {"function": "model_boxes", **stated(described)}
    memory = own_result(lambda: Memory(model_chunks), lambda _: given)
    model = collected(memory, described, own=True)

    def found() -> HeldBoxes:
        hf = exported(model, TargetOptions(formats.HUGGING_FACE))
        own, ranks = rank_and_world()[0], ranks_of(model)
        mine = [n for n in range(len(ranks.files)) if ranks.rank_of(n) == own]
        here = ((s, np.isin(s.file, mine)) for s in model.layout.stored)
        held = ((s.pieces, (s.layer[rows], s.expert[rows])) for s, rows in here)
        return _Holders(hf.layout, hf.rows).boxes(held)

    boxes = own_result(found)
    release(model)
    return boxes


class _Holders:
    """The tensors of a Hugging Face directory, by the logical tensors that they hold. Tensors whose
    boxes are equal, such as those of most experts, share one list of them.
    """

    def __init__(self, layout: Layout, rows: list[tuple[Row, int]]) -> None:
        self.stored, self.rows = layout.stored, sorted(rows, key=lambda row: row[1])
        starts = np.array([at for _, at in self.rows], "i8")
        self.parts: dict[str, list[tuple[int, Piece]]] = {}
        # of each stored tensor: the rows that hold it, and how many of its size come before it
        self.places: list[tuple[np.ndarray, np.ndarray]] = []
        self.experts = 1 + max((int(s.expert.max(initial=0)) for s in layout.stored), default=0)
        layers = 1 + max((int(s.layer.max(initial=0)) for s in layout.stored), default=0)
        self.numbers = np.full((len(layout.stored), layers * self.experts), -1)
        for number, s in enumerate(layout.stored):
            for piece in s.pieces:
                self.parts.setdefault(piece.tensor, []).append((number, piece))
            place = (s.file.astype("i8") << FILE) + s.at
            row = np.searchsorted(starts, place, "right") - 1
            self.places.append((row, (place - starts[row]) // itemsize(s.dtype) // s.numel))
            self.numbers[number, s.layer * self.experts + s.expert] = np.arange(len(s))
        self.kinds: dict[tuple[Box, ...], int] = {}
        self.lists: dict[tuple[int, ...], list[Bounds]] = {}

    def boxes(
        self, held: Iterable[tuple[Sequence[Piece], tuple[np.ndarray, np.ndarray]]]
    ) -> HeldBoxes:
        """Returns the boxes whose elements a rank holds.

        held: the pieces of its tensors of one geometry, and the layer and the expert of each.
        """
        found: dict[int, tuple[int, ...]] = {}  # number of a row -> of some boxes
        for pieces, (layer, expert) in held:
            inside: dict[int, list[Box]] = {}  # number of a stored tensor -> its boxes
            for own in pieces if len(layer) else ():
                for number, piece in self.parts.get(own.tensor, ()):
                    if boxes := _boxes_in(piece, own.box, self.stored[number]):
                        inside.setdefault(number, []).extend(boxes)
            for number, boxes in inside.items():
                known = self.numbers[number]
                ids = layer.astype("i8") * self.experts + expert
                here = known[ids[ids < len(known)]]
                rows, skipped = (of[here[here >= 0]] for of in self.places[number])
                merged, rank = tuple(_merged(boxes)), len(self.stored[number].shape)
                for row, skip in zip(rows.tolist(), skipped.tolist(), strict=True):
                    shape = self.rows[row][0].shape
                    kind = merged
                    if axes := len(shape) - rank:  # of the experts in one tensor
                        at = index_of(skip, shape[:axes])
                        kind = tuple(Box(at + b.offset, (1,) * axes + b.shape) for b in merged)
                    one = self.kinds.setdefault(kind, len(self.kinds))
                    found[row] = (*found.get(row, ()), one)
        return {self.rows[row][0].key: self._list(found[row]) for row in sorted(found)}

    def _list(self, numbers: tuple[int, ...]) -> list[Bounds]:
        if (found := self.lists.get(numbers)) is None:
            kinds = list(self.kinds)
            every = {box for number in numbers for box in kinds[number]}
            found = self.lists[numbers] = [bounds_of(box) for box in _merged(every)]
        return found


def _boxes_in(piece: Piece, wanted: Box, stored: Stored) -> list[Box]:
    """Returns the boxes of a dense tensor that the elements of `wanted`, a box of the logical
    tensor of one of its pieces, fill. There are several where other elements lie between them.

    Raises UsageError if they fill no boxes.
    """
    common, shape = overlap(piece.box, wanted), stored.shape
    if common is None:
        return []
    skipped = (o - p for o, p in zip(common.offset, piece.box.offset, strict=True))
    start = piece.start + sum(n * s for n, s in zip(skipped, piece.strides, strict=True))
    offset, dense = index_of(start, shape), row_major(shape)
    places: list[list[tuple[int, int]]] = [[(at, 1)] for at in offset]  # of each axis
    for count, stride in zip(common.shape, piece.strides, strict=True):
        if count == 1:
            continue
        axis = next((d for d, s in enumerate(dense) if stride >= s and shape[d] > 1), 0)
        step, low = stride // dense[axis], offset[axis]
        if len(places[axis]) > 1 or stride % dense[axis] or low + (count - 1) * step >= shape[axis]:
            raise UsageError(
                f"{stored.key}: the part that a rank holds is not a box of {list(shape)}"
            )
        places[axis] = [(low, count)]
        if step > 1:
            places[axis] = [(low + n * step, 1) for n in range(count)]
    return [Box(*zip(*ends, strict=True)) if ends else Box((), ()) for ends in product(*places)]


def _merged(boxes: Iterable[Box]) -> list[Box]:
    """Returns fewer boxes of the same elements: those that touch each other along an axis, and are
    equal along all others, become one.
    """
    listed = sorted(boxes)
    for axis in range(len(listed[0].shape)):

        def others(box: Box, axis: int = axis) -> Any:
            rest = [pair for d, pair in enumerate(bounds_of(box)) if d != axis]
            return rest, box.offset[axis]

        out: list[Box] = []
        for box in sorted(listed, key=others):
            last = out[-1] if out else None
            if last and others(last)[0] == others(box)[0]:
                end = last.offset[axis] + last.shape[axis]
                if box.offset[axis] <= end:
                    low, high = last.offset[axis], max(end, box.offset[axis] + box.shape[axis])
                    sizes = [high - low if d == axis else n for d, n in enumerate(last.shape)]
                    out[-1] = Box(last.offset, tuple(sizes))
                    continue
            out.append(box)
        listed = out
    return sorted(listed)
