"""Which boxes of the Hugging Face tensors a rank holds: of an engine, or of a model of Megatron.

The mapping files know both sides: a weight of Megatron's shard is a box of a logical tensor, and so
is a part of a Hugging Face tensor. Where two of them meet, the rank holds a box.

    linear_qkv of tp rank 1      q rows 8..16, k rows 4..8   -->   q_proj.weight ((8, 16), (0, 64))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mckpt import formats
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.planning import form_of_weights
from mckpt.conversion.target import Destination
from mckpt.errors import UsageError
from mckpt.formats.hf_files import Row
from mckpt.geometry.box import Box, Layout, Piece, overlap, row_major
from mckpt.geometry.parallel import Parallel
from mckpt.live.buckets import FILE, exported
from mckpt.live.direct import Bounds, bounds_of, index_of
from mckpt.live.memory import Memory
from mckpt.live.model import Described, collected, ranks_of, release, stated
from mckpt.live.together import own_result, rank_and_world
from mckpt.options import SourceOptions, TargetOptions
from mckpt.storage import sparse_copy
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    from typing_extensions import Unpack

VOCABULARY = 64  # vLLM and SGLang pad the vocabulary to a multiple of it
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
    or columns over tp, experts over ep, layers over pp, the vocabulary over tp.

    The ranks are in the order of the engine's: tp first, then pp. With ep, a stage has lcm(tp, ep *
    etp) ranks, as an engine with several attention groups has.

    model: the directory of the model, or what `mckpt.open` or `describe` returns.
    etp: the ranks over which each expert is cut; without it 1 with ep, else tp.
    """
    source = model if isinstance(model, Checkpoint) else Checkpoint.open(model, SourceOptions())
    sizes = Parallel(tp=tp, pp=pp, ep=ep, etp=etp or (1 if ep > 1 else tp))
    divisible_by = max(vocab_multiple // math.gcd(vocab_multiple, tp), 1)
    target = TargetOptions(format="torch", parallel=sizes, divisible_by=divisible_by)
    with sparse_copy.scratch() as root:
        held = form_of_weights(
            source,
            lambda name, form: Destination(root / "engine", name, form, source.files.root),
            target,
        ).layout
    hf = exported(source, TargetOptions(formats.HUGGING_FACE))
    etp, count = sizes.expert_tp, math.lcm(tp, sizes.expert_tp * ep)
    found = []
    for stage in range(pp):
        for rank in range(count):
            expert = rank // etp % ep if source.dims["num_experts"] else 0
            name = sizes.directory(rank % tp, stage, expert)
            numbers = [n for n, file in enumerate(held.files) if file.startswith(f"{name}/")]
            found.append(_boxes(held, numbers, hf.layout, hf.rows))
    return found


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
        return _boxes(model.layout, mine, hf.layout, hf.rows)

    boxes = own_result(found)
    release(model)
    return boxes


def _boxes(
    held: Layout, files: Sequence[int], layout: Layout, rows: list[tuple[Row, int]]
) -> HeldBoxes:
    """Returns the boxes of Hugging Face tensors whose elements some files of a layout hold."""
    rows = sorted(rows, key=lambda row: row[1])
    starts = np.array([at for _, at in rows], "i8")
    parts: dict[str, list[tuple[int, Piece]]] = {}
    for number, s in enumerate(layout.stored):
        for piece in s.pieces:
            parts.setdefault(piece.tensor, []).append((number, piece))
    of_instance = [
        {key: i for i, key in enumerate(zip(s.layer.tolist(), s.expert.tolist(), strict=True))}
        for s in layout.stored
    ]
    found: dict[str, set[Box]] = {}
    for s in held.stored:
        here = np.flatnonzero(np.isin(s.file, files)).tolist()
        for own in s.pieces if here else ():
            for number, piece in parts.get(own.tensor, ()):
                hf = layout.stored[number]
                inner = _box_in(piece, own.box, hf.shape, hf.key)
                for i in here if inner else ():
                    at = of_instance[number].get((int(s.layer[i]), int(s.expert[i])))
                    if at is None or inner is None:
                        continue
                    place = (int(hf.file[at]) << FILE) + int(hf.at[at])
                    row, first = rows[int(np.searchsorted(starts, place, "right")) - 1]
                    axes = len(row.shape) - len(hf.shape)  # of the experts in one tensor
                    skipped = (place - first) // itemsize(hf.dtype) // hf.numel
                    index = index_of(skipped, row.shape[:axes])
                    box = Box(index + inner.offset, (1,) * axes + inner.shape)
                    found.setdefault(row.key, set()).add(box)
    return {
        row.key: [bounds_of(b) for b in _merged(found[row.key])]
        for row, _ in rows
        if row.key in found
    }


def _box_in(piece: Piece, wanted: Box, shape: tuple[int, ...], key: str) -> Box | None:
    """Returns the box of a dense buffer of this shape that the elements of `wanted`, a box of the
    logical tensor of a piece of the buffer, fill; None if none of them is in the piece.

    Raises UsageError if they fill no box.
    """
    common = overlap(piece.box, wanted)
    if common is None:
        return None
    skipped = (o - p for o, p in zip(common.offset, piece.box.offset, strict=True))
    start = piece.start + sum(n * s for n, s in zip(skipped, piece.strides, strict=True))
    sizes, offset, dense = [1] * len(shape), index_of(start, shape), row_major(shape)
    for count, stride in zip(common.shape, piece.strides, strict=True):
        axis = next((d for d, s in enumerate(dense) if s == stride and shape[d] > 1), None)
        if count > 1 and (axis is None or sizes[axis] > 1 or offset[axis] + count > shape[axis]):
            raise UsageError(f"{key}: what a rank holds of it is no box of {list(shape)}")
        if count > 1 and axis is not None:
            sizes[axis] = count
    return Box(offset, tuple(sizes))


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
