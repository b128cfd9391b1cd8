"""Reads optimizer state from flat buffers, which name no parameter, in `torch_dist`.

    dp_reshardable           each bucket is a tensor of one axis, in chunks of the data-parallel
                             ranks: optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(D, D)
                             .bucket_idx_K.STATE
    fully_sharded_bucket_space
                             the same, with padding at the end (megatron-core up to 0.14)
    dp_zero_gather_scatter   each model-parallel rank has an object with the buffers of all its
                             states: optimizer.distributed.dp_group_idx_G.param_state

`buckets` computes which parameter lies where. A model with experts on ranks of their own has
two optimizers, whose keys begin with chained_0. and chained_1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle
from mckpt.containers.entries import Entry, entry_of
from mckpt.containers.torch_file import Ranges
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Names, Problems, group, shapes_of
from mckpt.formats.megatron.optimizer.buckets import PARAMETER_STEP as STEP
from mckpt.formats.megatron.optimizer.buckets import (
    Buffer,
    Parameter,
    StateKind,
    optimizers,
    rounded,
)
from mckpt.formats.megatron.optimizer.state import (
    CURE,
    LOW_BITS,
    MASTER,
    MASTER_KEYS,
    state_bound,
)
from mckpt.geometry.box import Layout, Piece, Stored
from mckpt.lazy import pattern
from mckpt.values.dtypes import itemsize

_GROUP = pattern(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = pattern(r"gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), .+\)\.bucket_idx_(\d+)\.(\w+)")


class BucketName(NamedTuple):
    """The name of one bucket's state: of which optimizer, rank, buffer and bucket."""

    chain: int
    group: int  # dp_group_idx
    chunk: int  # gbuf_idx
    dtype: str
    bucket: int
    state: str


class Extent(NamedTuple):
    """A stored range of a bucket."""

    low: int  # elements of the bucket
    high: int
    dtype: str
    file: int
    at: int  # byte of the file


Extents = dict[BucketName, list[Extent]]
_Key = tuple[int, int, int, str]  # optimizer, dp_group_idx, gbuf_idx and dtype of a buffer


# the errors of reading an object of another structure
_MISBUILT = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def group_of(key: str) -> tuple[int, int, str] | None:
    """Returns the optimizer, the dp_group_idx and the rest of a key of a flat optimizer."""
    found = _GROUP.fullmatch(key.partition("/")[0])
    return None if found is None else (int(found[1] or 0), int(found[2]), found[3])


def place_of(key: str) -> BucketName | None:
    """Returns the bucket that a key of dp_reshardable names."""
    if (outer := group_of(key)) is None or (inner := _BUCKET.fullmatch(outer[2])) is None:
        return None
    state = MASTER if inner[4] in MASTER_KEYS else inner[4]
    return BucketName(outer[0], outer[1], int(inner[1]), inner[2], int(inner[3]), state)


def buffers(value: Any, data: Ranges, file: int, chain: int, number: int) -> Extents:
    """Returns the buffers in the object `param_state` of one model-parallel rank.

    data: the places of its storages in the file with this number. chain, number: of its key.
    Raises SourceError if the object is not built as Megatron builds it.
    """
    out: Extents = {}
    try:
        for chunk, buffer in value.items():
            for dtypes, states in buffer.items() if isinstance(buffer, dict) else ():
                for name, record in states.items():
                    if (view := safe_pickle.as_tensor(record)) is not None:
                        entry = entry_of(view, data, file)
                        state = MASTER if name in MASTER_KEYS else name
                        place = BucketName(chain, number, chunk, dtypes[0].name, 0, state)
                        out[place] = [Extent(0, entry.shape[0], entry.dtype, file, entry.at)]
    except _MISBUILT as e:
        raise _misbuilt("param_state", chain, e) from None
    return out


def unpadded(extents: Extents, numels: Any, chain: int, number: int) -> Extents:
    """Returns the extents without the padding at the end of the buckets of one model-parallel rank.

    numels: the object `per_bucket_numel_unpadded`, which has the elements of each bucket without
    padding, by the number of the buffer and its dtypes. chain, number: of its key.
    Raises SourceError if the object is not built as Megatron builds it.
    """
    out = dict(extents)
    try:
        for place, found in extents.items():
            if (place.chain, place.group) == (chain, number):
                listed = {dtypes[0].name: n for dtypes, n in numels[place.chunk].items()}
                most = int(listed[place.dtype][place.bucket])
                out[place] = [e._replace(high=min(e.high, most)) for e in found if e.low < most]
    except _MISBUILT as e:
        raise _misbuilt("per_bucket_numel_unpadded", chain, e) from None
    return out


def _misbuilt(name: str, chain: int, error: Exception) -> SourceError:
    return SourceError(
        f"the object {name} of optimizer {chain} is not built as Megatron builds it:"
        f" {type(error).__name__}: {error}"
    )


def layout(
    extents: Extents,
    names: Names,
    dtypes: dict[str, str],
    rows: int | None,
    files: list[str],
    rest: bool = False,
) -> Layout:
    """Returns the states of all parameters.

    names: of the modules of each rank (the choice `keys` is local).
    dtypes: of each logical tensor, by template.
    rows: of the embedding with padding.
    rest: the buffers have no matrices, which another optimizer of the chain updates.
    Raises SourceError with every bucket that its parameters do not fill, and UsageError if master
    copies lack their high bits.
    """
    if bits := next((e for found in extents.values() for e in found if e.dtype == "int16"), None):
        raise UsageError(f"{files[bits.file]}: {LOW_BITS}")
    problems = Problems("the optimizer's buffers do not fit the parameters of the model:", CURE)
    if rest:
        extents = {place._replace(chain=0): found for place, found in extents.items()}
    chained = any(place.chain for place in extents)
    left: dict[_Key, dict[str, dict[int, list[Extent]]]] = {}
    for place, found in extents.items():
        states = left.setdefault(place[:4], {})
        states.setdefault(place.state, {})[place.bucket] = found
    kinds: dict[StateKind, list[tuple[int, int, Entry]]] = {}
    seen: set[tuple[tuple[Piece, ...], int, int]] = set()
    for one in optimizers(names, dtypes, rows, chained, rest=rest):
        for number, buffer in enumerate(one.buffers):
            states = left.pop((one.chain, one.group, number, buffer.dtype), {})
            where = f"dp_group_idx_{one.group}, chunk {buffer.chunk}, {buffer.dtype}"
            if not states:
                problems.missing(f"{where}: is missing")
            for state, buckets in states.items():
                for part in _parts(buffer, state, buckets, where, problems):
                    p, low, high = part.parameter, part.low, part.high
                    # the ranges of one copy of a parameter do not repeat each other
                    kind = StateKind.of(p, state, p.whole in seen, low, high)
                    entry = Entry(part.dtype, kind.shape, part.file, part.at)
                    kinds.setdefault(kind, []).append((p.layer, p.expert, entry))
            every = (one for placed in buffer.placed for one, _ in placed.parameter.of_experts())
            seen |= {parameter.whole for parameter in every}
    problems.extend(
        f"dp_group_idx_{group}, chunk {chunk}, {dtype} of optimizer {chain} belongs to no rank of"
        " these sizes"
        for chain, group, chunk, dtype in left
    )
    problems.check()
    stored: list[Stored] = []
    for kind, entries in kinds.items():
        stored += group(
            kind.key, kind.shape, kind.pieces, entries, problems, replica=kind.replica, padding=True
        )
    problems.check()
    states_here = {kind.state for kind in kinds}
    bound = [state_bound(b, state) for b in names.bound for state in states_here]
    shapes = shapes_of(bound, names.scope())
    used = {piece.tensor for kind in kinds for piece in kind.pieces}
    return Layout(files, stored, {name: shape for name, shape in shapes.items() if name in used})


class _ExtentPart(NamedTuple):
    """A range of a parameter that lies in one extent."""

    parameter: Parameter
    low: int  # elements of the parameter
    high: int
    dtype: str
    file: int
    at: int  # byte of the file


def _parts(
    buffer: Buffer,
    state: str,
    buckets: dict[int, list[Extent]],
    where: str,
    problems: Problems,
) -> Iterator[_ExtentPart]:
    """Yields the ranges of all parameters of one state of a buffer."""
    numels = [max(e.high for e in buckets[k]) for k in sorted(buckets)]
    starts = places([p.parameter.numel for p in buffer.placed], numels)
    if starts is None:
        total = sum(p.parameter.numel for p in buffer.placed)
        problems.missing(
            f"{where}: its {len(numels)} buckets of {state} have {sum(numels):,} elements, and its"
            f" {len(buffer.placed)} parameters {total:,}"
        )
        return
    order = {k: sorted(buckets[k]) for k in buckets}
    for placed, (bucket, start) in zip(buffer.placed, starts, strict=True):
        for parameter, first in placed.parameter.of_experts():
            begin = start + first
            end = begin + parameter.numel
            for e in order[sorted(buckets)[bucket]]:
                low, high = max(begin, e.low), min(end, e.high)
                if low < high:
                    at = e.at + (low - e.low) * itemsize(e.dtype)
                    yield _ExtentPart(parameter, low - begin, high - begin, e.dtype, e.file, at)


def places(numels: Iterable[int], buckets: list[int]) -> list[tuple[int, int]] | None:
    """Returns the (bucket, start) of each parameter; None if they do not fill the buckets.

    numels: of the parameters, in the order of the buffer. buckets: elements of each bucket, without
    the padding of its end, of which it may have some in front of a shared embedding. A parameter
    that does not fit into a bucket is the first one of the next.
    """
    out, bucket, end = [], 0, 0
    for numel in numels:
        start = rounded(end, STEP)
        if bucket < len(buckets) and start + numel > buckets[bucket]:
            if buckets[bucket] not in (end, start):
                return None
            bucket, start = bucket + 1, 0
        if bucket >= len(buckets) or start + numel > buckets[bucket]:
            return None
        out.append((bucket, start))
        end = start + numel
    return out if bucket == len(buckets) - 1 and end == buckets[bucket] else None
