"""Which shard of which tensor lies in which rank's file of a `torch` checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mckpt.errors import UsageError
from mckpt.formats.base import Names
from mckpt.geometry.box import Piece
from mckpt.geometry.packing import Packed, PackingError, buffer, shard
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound, Scope

FILE = "model_optim_rng.pt"
# Until 2022 a checkpoint with a distributed optimizer had model_rng.pt and optim.pt instead.
# The last name is that of NeMo 1.
FILES, OPTIMIZER = (FILE, "model_rng.pt", "model_weights.ckpt"), "optim.pt"


def directories(parallel: Parallel, grid: list[tuple[int, int]]) -> list[str]:
    """Returns the directories of all ranks.

    grid: the tensor and expert ranks that have a file in each pipeline stage.
    """
    return [parallel.directory(t, p, e) for p in range(parallel.pp) for t, e in grid]


class Shard(NamedTuple):
    """One shard of a rule: its geometry, and the (tp, ep) files of a pipeline stage that
    hold it.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    files: list[tuple[int, int]]
    replica: bool


def axes(b: Bound, parallel: Parallel, dims: Scope) -> tuple[int, ...]:
    """Returns the leading axis of a rule's tensors that hold all experts of a rank; none if each
    tensor is that of one expert.
    """
    return (dims["num_experts"] // parallel.ep,) if "expert" in b.rule.stacked() else ()


def shards(b: Bound, whole: Packed, parallel: Parallel, grid: list[tuple[int, int]]) -> list[Shard]:
    """Returns the shards of a rule over the files of one stage.

    The first file that holds a shard is read, the others are replicas of it.
    """
    expert = "expert" in b.rule.indices
    ways = parallel.expert_tp if expert else parallel.tp
    holders: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for t, e in grid:
        holders.setdefault(
            (0 if b.rule.tp == "replicated" else t % ways, e if expert else 0), []
        ).append((t, e))
    first: dict[int, list[tuple[int, int]]] = {}
    others: dict[int, list[tuple[int, int]]] = {}
    for (rank, _), files in holders.items():
        first.setdefault(rank, []).append(files[0])
        others.setdefault(rank, []).extend(files[1:])
    out = []
    for rank in sorted(first):
        shape, pieces = local(b, whole, rank, ways)
        out.append(Shard(shape, pieces, first[rank], b.rule.alias))
        if others[rank]:
            out.append(Shard(shape, pieces, others[rank], True))
    return out


def local(
    b: Bound, whole: Packed, rank: int, ways: int
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Returns shape and pieces of the shard of one tensor rank of `ways`."""
    kind = b.rule.tp
    if b.rule.transposed:  # the packed tensor is the transpose of what the ranks share
        kind = {"column": "row", "row": "column"}.get(kind, kind)
    try:
        return buffer(whole, shard(whole, kind, rank, ways), b.rule.of, b.rule.transposed)
    except PackingError as e:
        which = "etp" if "expert" in b.rule.indices else "tp"
        raise UsageError(f"{b.rule.key} {list(whole.shape)}: {e} ({which})") from None


def places(b: Bound, shard: Shard, names: Names) -> Iterator[tuple[int, str, int, int, int, str]]:
    """Yields (pipeline rank, directory, virtual stage, layer, expert, key) of each tensor of a
    shard in all files that hold it.
    """
    parallel, stages = names.parallel, names.stages()
    for p in range(parallel.pp):
        for t, e in shard.files:
            directory = parallel.directory(t, p, e)
            for found in instances(b, stages[p], p, parallel, names.dims, e):
                yield p, directory, *found


def instances(
    b: Bound, stage: list[list[int]], p: int, parallel: Parallel, dims: Scope, ep: int
) -> list[tuple[int, int, int, str]]:
    """Returns (virtual stage, global layer, global expert, key) of each tensor that a rule has in
    the file of pipeline rank `p` and expert rank `ep`.
    """
    if "layer" not in b.rule.indices:
        here = {
            "first": (0, 0),
            "mtp": parallel.mtp_stage,
            "last": (parallel.pp - 1, parallel.vpp - 1),
        }[b.rule.stage or "first"]
        return [(here[1], 0, 0, b.rule.key)] if p == here[0] else []
    layer_of = dict(zip(b.numbers.tolist(), b.layers.tolist(), strict=True))
    if b.rule.mtp:
        placed = (
            [(parallel.mtp_stage[1], layer, layer) for layer in b.layers.tolist()]
            if p == parallel.mtp_stage[0]
            else []
        )
    elif b.rule.encoder:  # of a model that has one stage
        placed = [(0, layer, layer) for layer in b.layers.tolist()]
    else:
        placed = [
            (v, i, layer_of[number])
            for v, numbers in enumerate(stage)
            for i, number in enumerate(numbers)
            if number in layer_of
        ]
    local = dims["num_experts"] // parallel.ep if "expert" in b.rule.indices else 1
    out = []
    for v, i, layer in placed:  # a key counts the decoder's layers from the first of its stage
        for j in range(local):
            expert = ep * local + j if "expert" in b.rule.indices else 0
            out.append((v, layer, expert, b.key(i, j)))
    return out
