"""The plan of an export of a live model: its Hugging Face tensors in buckets, and their copies.

Every rank makes the same plan, from the join of the model's layout with that of the Hugging Face
directory. A bucket is what ranks send at once. Each rank that holds elements of its tensors packs
them into a segment, copy by copy:

    bucket   [segment of rank 0 | segment of rank 2]      --> tensors, by the same copies
              q rows 0..8, k rows 0..4    q rows 8..16

A part that all receivers hold is not sent: each of them copies it from its own memory. A rank
quantises what it holds before it sends it, if it holds whole blocks. The codes and the scales are
then two tensors of the bucket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from mckpt import formats
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.adapters.forms import peft_form
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.to_hf import export_of
from mckpt.errors import UsageError
from mckpt.formats.base import dtypes_of
from mckpt.formats.hf import HuggingFaceRequest, peers_of, quantises
from mckpt.formats.hf_encodings import WRITTEN, Scheme
from mckpt.formats.hf_files import Row, tensors_of
from mckpt.geometry.box import Layout, Stored, clip
from mckpt.geometry.join import Joined, join
from mckpt.live.model import RankParts, ranks_of
from mckpt.live.quantising import Rows, block_of, boxes_of, grid_of
from mckpt.mapping import Bound
from mckpt.options import TargetOptions
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

FILE = 44  # bits of a byte's place in a file of 16 TiB
BUCKET = 1 << 30  # bytes of a bucket by default; it grows to the size of the largest tensor
ALIGN = 16  # bytes; each segment begins at a multiple of this
OWN = -1  # in the place of a rank: each receiver holds the elements itself
UNEVEN = 1.25  # segments are padded to one size where a bucket grows by at most this factor

# which tensors a rank receives: None for every rank, the number of the only one, or a function
# that returns the names of a rank
To = int | Callable[[int], Iterable[str]] | None


class ExportedTensor(NamedTuple):
    """A tensor of the Hugging Face directory, or some of its rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int  # row of the whole tensor
    whole: tuple[int, ...]  # shape of the whole tensor
    at: int  # the place of its first byte: the number of the file, shifted by FILE, and the byte
    quantised: bool  # it is quantised when it is complete
    start: tuple[int, ...]  # of a box of a tensor (`live.direct`): its first index along each axis
    to: frozenset[int]  # the ranks that receive it

    @property
    def byte(self) -> int:
        """Returns the byte of the file at which it begins."""
        return self.at & ((1 << FILE) - 1)

    def coded(self, scheme: Scheme) -> list[ExportedTensor]:
        """Returns the codes and the scales of a matrix, as tensors, and for its first rows the
        scale of the whole matrix, if the form has one.
        """
        found = []
        kinds = scheme.encoding.dtype, scheme.dtypes[0]
        units = (1, scheme.encoding.per_byte), block_of(scheme)
        for suffix, kind, unit in zip((scheme.codes, scheme.scales), kinds, units, strict=True):
            shape, whole = grid_of(self.shape, unit), grid_of(self.whole, unit)
            given = self.name + suffix, kind, shape, self.first // unit[0], whole
            found.append(ExportedTensor(*given, self.at, False, self.start, self.to))
        if scheme.whole and not self.first:
            name = self.name + scheme.whole
            found.append(found[0]._replace(name=name, dtype="float32", shape=(1,), whole=(1,)))
        return found


class Part(NamedTuple):
    """A box of a tensor of two axes, whose elements follow each other in the bucket."""

    number: int  # of the tensor in the bucket
    start: tuple[int, int]
    shape: tuple[int, int]
    at: int  # the first byte in the bucket


class Coded(NamedTuple):
    """A box of a matrix that its rank quantises before it sends it."""

    rank: int
    dtype: str  # of the matrix
    shape: tuple[int, int]
    at: int  # its first byte where the rank packs the boxes that it quantises
    codes: Part
    scales: Part

    def behind(self, start: int) -> Coded:
        """Returns it with parts that lie `start` bytes further in the bucket."""
        codes, scales = (part._replace(at=part.at + start) for part in (self.codes, self.scales))
        return self._replace(codes=codes, scales=scales)

    @property
    def end(self) -> int:
        """Returns the byte behind its last one, where it is packed."""
        return self.at + math.prod(self.shape) * itemsize(self.dtype)


class Bucket(NamedTuple):
    """Tensors that are sent at once."""

    tensors: list[ExportedTensor]
    to: frozenset[int]
    copies: np.ndarray  # of COPY, in the order of the segments
    tensor: np.ndarray  # of each copy: the number of its tensor in the bucket
    rank: np.ndarray  # of each copy: the rank that sends its elements, or OWN
    # of each copy that is sent: its first byte in the bucket. Of a copy into a box of `coded`: its
    # first byte where the boxes are packed
    at: np.ndarray
    # of each copy: the bytes by which its elements lie behind their place on the rank in the plan
    shift: np.ndarray
    segments: dict[int, tuple[int, int]]  # rank -> the first byte of its segment, and its size
    nbytes: int
    # of a plan of boxes (`live.direct`), whose buckets are those of one rank: rank -> the first
    # byte of the message to it, and its size. `segments` then has the messages from other ranks.
    sent: dict[int, tuple[int, int]] | None = None
    coded: Sequence[Coded] = ()


class Transfer(NamedTuple):
    """The part of a receiver's box that one rank sends."""

    sender: int
    receiver: int  # the sender itself: it copies what it has
    name: str
    box: tuple[tuple[int, int], ...]  # (start, stop) along each axis of the tensor
    source: str  # the key of Megatron's tensor that has the elements
    source_box: tuple[tuple[int, int], ...]  # the part of it that the sender holds
    nbytes: int


class Buckets(NamedTuple):
    """The plan of an export."""

    config: dict[str, Any]  # of the Hugging Face directory
    joined: Joined  # source places of copies are those of this rank, where it holds the elements
    listed: list[Bucket]
    most: int  # bytes of a bucket
    transfers: Sequence[Transfer] = ()  # of boxes
    of_boxes: dict[tuple[int, int], int] = {}  # (sender, receiver) -> bytes of all transfers
    # by the names of matrices that are quantised in a form with a scale of the whole: a number,
    # which those have that share it
    peers: Mapping[str, int] = {}

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Returns the bytes of a call from each sender to each receiver."""
        found = dict(self.of_boxes)
        for bucket in () if self.transfers else self.listed:
            for sender, (_, nbytes) in bucket.segments.items():
                for receiver in bucket.to - {sender}:
                    found[sender, receiver] = found.get((sender, receiver), 0) + nbytes
        return found


class Exported(NamedTuple):
    """The Hugging Face files that a live model, or its adapters, become."""

    config: dict[str, Any]  # config.json, or adapter_config.json
    layout: Layout
    rows: list[tuple[Row, int]]  # each tensor, and the place of its first byte as in `Tensor.at`
    quantised: list[Bound]  # the rules whose tensors are quantised


def exported(model: Checkpoint, target: TargetOptions) -> Exported:
    """Returns what a live model becomes. Raises the errors of a conversion to Hugging Face."""
    if isinstance(model, AdapterCheckpoint):
        form = peft_form(model)
        return Exported(json.loads(form.config), form.layout, _rows(form.outputs), [])
    export = export_of(model, target)
    request, quantised = _unquantised(model, export.request)
    layout, outputs = formats.get(formats.HUGGING_FACE).lay_out(request)
    rows = _rows(outputs[: len(layout.files)])
    return Exported(json.loads(export.config), layout, rows, quantised)


def _rows(outputs: Sequence[TargetFile]) -> list[tuple[Row, int]]:
    return [
        (row, (number << FILE) + at)
        for number, output in enumerate(outputs)
        for row, at in tensors_of(output)
    ]


def plan(
    model: Checkpoint,
    target: TargetOptions,
    most: int | None,
    to: To,
    slices: bool,
    world: int,
    own: int,
    sent: bool = False,
    turns: bool = False,
) -> Buckets:
    """Returns the plan by which the rank `own` sends the model's tensors in buckets of at most
    `most` bytes, to which the alignment of the segments may add ALIGN for each rank.

    model: as `collected` returns it, also with an adapter merged into it; or its adapters.
    sent: parts that all receivers hold are sent too, and the elements of a bucket have one size.
    turns: buckets of different receivers and files take turns, so that all have work at once.

    Raises the errors of a conversion to Hugging Face, and UsageError for a tensor that is larger
    than a bucket, unless `slices` allows to cut it.
    """
    config, layout, rows, quantised = exported(model, target)
    # the factors B of all experts of a layer take turns in the columns of one tensor
    slices = slices and not isinstance(model, AdapterCheckpoint)
    if most is None:
        most = max(BUCKET, *(row.nbytes for row, _ in rows))
    receivers = _receivers([row.key for row, _ in rows], to, world)
    names = {key for b in quantised for key in b.keys()}  # noqa: SIM118
    scheme = WRITTEN[target.quantize] if target.quantize else None
    block = block_of(scheme)[0] if scheme else 1
    tensors: list[ExportedTensor] = []
    for row, at in rows:
        count, quantise = row.shape[0] if row.shape else 1, row.key in names
        width, unit = row.nbytes // max(count, 1), block if quantise else 1
        step = _step(count, width, unit, most)
        if step < count:
            _refuse_large(row, width * unit, most, slices, step)
        for first in range(0, count, step):
            shape = (min(step, count - first), *row.shape[1:]) if row.shape else ()
            place, ranks = at + first * width, receivers[row.key]
            tensors.append(
                ExportedTensor(
                    row.key, row.dtype, shape, first, row.shape, place, quantise, (), ranks
                )
            )
    tensors.sort(key=lambda t: t.at)
    units = {b.rule.key: block for b in quantised}
    joined = join(model.layout, _cut(layout, units, most))
    buckets = list(_buckets(tensors, joined, model, most // 2, own, sent, turns, scheme))
    peers = dict[str, int]()
    if scheme and scheme.whole:
        pairs = [
            pair for b in quantised for pair in zip(b.keys(), peers_of(b).tolist(), strict=True)
        ]
        number = {peer: i for i, peer in enumerate(dict.fromkeys(peer for _, peer in pairs))}
        peers = {name: number[peer] for name, peer in pairs}
    return Buckets(config, joined, buckets, most, peers=peers)


def _step(count: int, width: int, unit: int, most: int) -> int:
    """Returns the number of rows of a slice: all `count`, or as many as a bucket takes.

    width: bytes of a row. unit: a slice has a multiple of so many rows; 0 if that is too many.
    """
    return count if count * width <= most else most // width // unit * unit


def _unquantised(
    model: Checkpoint, request: HuggingFaceRequest
) -> tuple[HuggingFaceRequest, list[Bound]]:
    """Returns the request without its quantisation, and the rules whose tensors it quantises. These
    keep the dtype of the model, because a scale is computed from the values of the model.
    """
    rules = [b for b in request.names.bound if quantises(request, b)]
    if not rules:
        return request, []
    own = dtypes_of(model.layout)
    dtypes = {**request.dtypes, **{name: own[name] for b in rules for name in b.rule.of}}
    return structs.replace(request, quantize=None, dtypes=dtypes), rules


def _receivers(names: list[str], to: To, world: int) -> Mapping[str, frozenset[int]]:
    """Returns the ranks that receive each tensor. Raises UsageError for a rank or a name that does
    not exist.
    """
    if to is None:
        return dict.fromkeys(names, frozenset(range(world)))
    if isinstance(to, int):
        if not 0 <= to < world:
            raise UsageError(f"to is {to!r}, and the ranks are 0 to {world - 1}")
        return dict.fromkeys(names, frozenset([to]))
    wanted = {rank: set(to(rank)) for rank in range(world)}
    if unknown := set().union(*wanted.values()) - set(names):
        raise UsageError.of("to: the model has no tensors of these names:", sorted(unknown))
    return {
        name: frozenset(rank for rank, held in wanted.items() if name in held) for name in names
    }


def _refuse_large(row: Row, least: int, most: int, slices: bool, step: int) -> None:
    if not slices:
        raise UsageError(
            f"{row.key}: has {row.nbytes:,} bytes, and bucket_bytes is {most:,}; give bucket_bytes"
            f" of at least {row.nbytes:,}, or slices=True"
        )
    if not step:
        raise UsageError(
            f"{row.key}: its smallest slice has {least:,} bytes, and bucket_bytes is {most:,}; give"
            f" bucket_bytes of at least {least:,}"
        )


def _cut(layout: Layout, units: Mapping[str, int], most: int) -> Layout:
    """Returns the layout with the tensors cut that come in slices, so that no copy is for two of
    them. A tensor of all experts is stored expert by expert already.

    units: of the rules that have other units than one row; see `_step`.
    """
    stored: list[Stored] = []
    for s in layout.stored:
        size, count = itemsize(s.dtype), s.shape[0] if s.shape else 1
        width = s.numel // max(count, 1)
        step = _step(count, width * size, units.get(s.key, 1), most)
        for first in range(0, count, step):
            rows = min(step, count - first)
            if rows == count:
                stored.append(s)
                continue
            low = first * width
            pieces = tuple(part for p in s.pieces for part in clip(p, low, low + rows * width))
            shape = (rows, *s.shape[1:])
            stored.append(replace(s, shape=shape, pieces=pieces, at=s.at + low * size))
    return replace(layout, stored=stored)


def _buckets(
    tensors: list[ExportedTensor],
    joined: Joined,
    model: Checkpoint,
    most: int,
    own: int,
    sent: bool,
    turns: bool,
    scheme: Scheme | None,
) -> Iterator[Bucket]:
    """Yields the buckets: tensors of the same receivers, in the order of their places.

    most: bytes of a bucket of several tensors; two such are on their way at a time. sent, turns: as
    for `plan`.
    """
    copies = joined.copies
    where = (copies["dst_file"].astype("i8") << FILE) + copies["dst_at"]
    starts = np.array([t.at for t in tensors], "i8")
    tensor = np.searchsorted(starts, where, "right") - 1
    items = np.array([itemsize(cast.target) for cast in joined.casts], "i8")[copies["cast"]]
    nbytes = copies["rows"] * copies["run"] * items
    receivers = [frozenset([OWN]) if sent else t.to for t in tensors]  # no rank is OWN
    rank, shift = _senders(copies, receivers, tensor, model, own)
    order = np.lexsort((where, tensor))
    bounds = np.searchsorted(tensor[order], np.arange(len(tensors) + 1))
    sums = np.add.reduceat(np.append(nbytes[order], 0), bounds[:-1])  # bytes of each tensor
    coded = _coded(tensors, copies, rank, order, bounds, scheme) if scheme else {}
    found = _Sorted(tensors, copies, order, bounds, rank, shift, items, coded)
    sets: dict[tuple[frozenset[int], int, int], list[int]] = {}
    for number, one in enumerate(tensors):
        if one.to:
            key = one.to, itemsize(one.dtype) * sent, (one.at >> FILE) * turns
            sets.setdefault(key, []).append(number)
    of_sets: list[list[tuple[frozenset[int], list[int]]]] = []
    for (to, *_), numbers in sets.items():
        of_sets.append([(to, [])])
        size = 0
        for number in numbers:
            if of_sets[-1][-1][1] and size + int(sums[number]) > most:
                of_sets[-1].append((to, []))
                size = 0
            of_sets[-1][-1][1].append(number)
            size += int(sums[number])
    rounds = zip_longest(*of_sets) if turns else of_sets
    for to, chosen in (one for listed in rounds for one in listed if one is not None):
        yield _bucket(chosen, to, found, 2 * most)


def _senders(
    copies: np.ndarray,
    receivers: Sequence[frozenset[int]],
    tensor: np.ndarray,
    model: Checkpoint,
    own: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rank that sends the elements of each copy, or OWN if all that receive its tensor
    hold them; then the copy gets the place where the rank `own` has them, if it is one of these.
    Returns also the bytes by which that place is behind the one before.

    receivers: of each tensor. tensor: the number of each copy's tensor.
    """
    ranks = ranks_of(model)
    held, shifts = [], []
    for at, same in ranks.holders.items():
        start = ranks.metadata.items[at][1]
        held.append(frozenset(rank for rank, _ in same))
        shifts.append(next((part.at - start for rank, part in same if rank == own), 0))
    part = parts_of_copies(copies, ranks)
    every, wanted = dict.fromkeys(held), dict.fromkeys(receivers)
    covers = np.array([[to <= ranks for ranks in every] for to in wanted], bool)
    number = {ranks: i for i, ranks in enumerate(every)}
    of_part = np.array([number[ranks] for ranks in held], "i4")
    number = {to: i for i, to in enumerate(wanted)}
    of_tensor = np.array([number[to] for to in receivers], "i4")
    inside = covers[of_tensor[tensor], of_part[part]]
    receives = np.array([own in to for to in receivers], bool)[tensor]
    shift = np.where(inside & receives, np.array(shifts, "i8")[part], 0)
    copies["src_at"] += shift
    senders = np.array([ranks.rank_of(file) for file in range(len(ranks.files))], "i4")
    return np.where(inside, OWN, senders[copies["src_file"]]), shift


def parts_of_copies(copies: np.ndarray, ranks: RankParts) -> np.ndarray:
    """Returns the number of the part in `ranks.holders` that each copy reads."""
    items = (ranks.metadata.items[at] for at in ranks.holders)
    starts = np.array([(ranks.number[name] << FILE) + start for name, start, _ in items], "i8")
    order = np.argsort(starts)
    source = (copies["src_file"].astype("i8") << FILE) + copies["src_at"]
    found: np.ndarray = order[np.searchsorted(starts[order], source, "right") - 1]
    return found


class _Sorted(NamedTuple):
    """The copies of a plan, tensor by tensor."""

    tensors: list[ExportedTensor]
    copies: np.ndarray  # of COPY
    order: np.ndarray  # the copies of tensor i are order[bounds[i] : bounds[i + 1]]
    bounds: np.ndarray
    rank: np.ndarray  # of each copy: the rank that sends its elements
    shift: np.ndarray  # of each copy: as in `Bucket`
    items: np.ndarray  # of each copy: the bytes of an element
    # of the matrices that ranks quantise before they send them, by their numbers: the tensors that
    # they become, and the boxes, whose parts have no places yet
    coded: dict[int, tuple[list[ExportedTensor], list[_CodedBox]]]


class _CodedBox(NamedTuple):
    """A box that its rank quantises, before it has a place in a bucket."""

    copies: list[int]  # which read its elements in their order
    box: Coded


def _coded(
    tensors: list[ExportedTensor],
    copies: np.ndarray,
    rank: np.ndarray,
    order: np.ndarray,
    bounds: np.ndarray,
    scheme: Scheme,
) -> dict[int, tuple[list[ExportedTensor], list[_CodedBox]]]:
    """Returns `_Sorted.coded`. The other arguments are those of `_Sorted`."""
    names = ("rows", "run", "dst_at", "dst_pitch", "dst_step")
    columns = [copies[name][order].tolist() for name in names]
    rows = list(zip(order.tolist(), rank[order].tolist(), *columns, strict=True))
    ends, found, block = bounds.tolist(), {}, block_of(scheme)
    for number, tensor in enumerate(tensors):
        if not tensor.quantised:
            continue
        held, width = dict[int, list[Rows]](), itemsize(tensor.dtype)
        for copy, one, count, run, *places in rows[ends[number] : ends[number + 1]]:
            at, pitch, step = places[0] - tensor.byte, *places[1:]
            elements = at // width, pitch // width, step // width
            held.setdefault(one, []).append(Rows(copy, count, run, *elements))
        shape = tensor.shape[0], tensor.shape[1]
        if OWN in held or not (boxes := boxes_of(shape, block, held)):
            continue
        found[number] = tensor.coded(scheme), list[_CodedBox]()
        for box in boxes:
            units = (1, scheme.encoding.per_byte), block
            codes, scales = (
                Part(i, grid_of(box.start, unit), grid_of(box.shape, unit), 0)
                for i, unit in enumerate(units)
            )
            coded = Coded(box.rank, tensor.dtype, box.shape, 0, codes, scales)
            found[number][1].append(_CodedBox(box.copies, coded))
    return found


def _bucket(numbers: list[int], to: frozenset[int], of: _Sorted, most: int) -> Bucket:
    """Returns the bucket of some tensors. In each segment, copies of larger elements come first, so
    that each copy is aligned, and codes last. Tensors follow each other as in the weights that they
    are parts of, so that one copy sends a whole weight.

    most: bytes to which segments of one size may come.
    """
    copies, rank, items = of.copies, of.rank, of.items
    rows = [of.order[of.bounds[n] : of.bounds[n + 1]] for n in numbers]
    chosen, counts = np.concatenate(rows), [len(one) for one in rows]
    listed, firsts = list[ExportedTensor](), list[int]()
    boxes = list[tuple[int, _CodedBox]]()
    for n in numbers:
        firsts.append(len(listed))
        made, own = of.coded.get(n, ([of.tensors[n]], []))
        boxes += [(len(listed), box) for box in own]
        listed += made
    apart = np.repeat([n in of.coded for n in numbers], counts)
    tensor = np.repeat(firsts, counts)
    source = (copies["src_file"][chosen].astype("i8") << FILE) + copies["src_at"][chosen]
    _, group = np.unique(tensor * (rank.max() + 2) + rank[chosen], return_inverse=True)
    first = np.full(len(chosen), np.iinfo("i8").max)
    np.minimum.at(first, group, source)  # of the part of each tensor that a rank sends
    by_rank = np.lexsort((first[group], -items[chosen], rank[chosen], apart))
    chosen, tensor = chosen[by_rank], tensor[by_rank]
    held, sizes = rank[chosen], copies["rows"][chosen] * copies["run"][chosen] * items[chosen]
    at, plain = np.zeros(len(chosen), "i8"), len(chosen) - np.count_nonzero(apart)
    of_rank = {
        one: slice(*np.searchsorted(held[:plain], [one, one + 1]).tolist())
        for one in np.unique(held).tolist()
        if one != OWN
    }
    needed = {one: _aligned(int(sizes[part].sum())) for one, part in of_rank.items()}
    place = {copy: i for i, copy in enumerate(chosen.tolist())}
    boxes.sort(key=lambda pair: place[pair[1].copies[0]])
    coded = _placed(boxes, listed, needed)
    # one collective sends segments of one size, faster than others
    even = len(to) * max(needed.values(), default=0)
    if to == of_rank.keys() and even <= min(most, UNEVEN * sum(needed.values())):
        needed = dict.fromkeys(needed, max(needed.values()))
    segments, start = {}, 0
    for (one, part), size in zip(of_rank.items(), needed.values(), strict=True):
        at[part] = start + np.cumsum(sizes[part]) - sizes[part]
        segments[one] = start, size
        start += size
    end = plain
    for box, (_, given) in zip(coded, boxes, strict=True):
        part = slice(end, end := end + len(given.copies))
        at[part] = box.at + np.cumsum(sizes[part]) - sizes[part]
    coded = [box.behind(segments[box.rank][0]) for box in coded]
    places = tensor, held, at, of.shift[chosen], segments, start
    return Bucket(listed, to, copies[chosen], *places, coded=coded)


def _placed(
    boxes: list[tuple[int, _CodedBox]], listed: list[ExportedTensor], needed: dict[int, int]
) -> list[Coded]:
    """Returns boxes with their places in the segments of their ranks: the scales of all, and then
    the codes.

    boxes: each with the number of its codes in `listed`. needed: bytes of each segment, which grow.
    """
    found, packed = list[Coded](), dict.fromkeys(needed, 0)
    for number, (_, box) in boxes:
        parts = box.codes._replace(number=number), box.scales._replace(number=number + 1)
        found.append(Coded(*box[:3], packed[box.rank], *parts))
        packed[box.rank] = _aligned(found[-1].end)
    scales = _behind([(box.rank, box.scales) for box in found], listed, needed)
    codes = _behind([(box.rank, box.codes) for box in found], listed, needed)
    return [Coded(*box[:4], *parts) for box, *parts in zip(found, codes, scales, strict=True)]


def _behind(
    parts: list[tuple[int, Part]], listed: list[ExportedTensor], needed: dict[int, int]
) -> list[Part]:
    """Returns parts that lie behind what the segments of their ranks have.

    parts: each with its rank. listed, needed: as for `_placed`.
    """
    found = []
    for rank, part in parts:
        found.append(part._replace(at=needed[rank]))
        needed[rank] += math.prod(part.shape) * itemsize(listed[part.number].dtype)
    needed.update({rank: _aligned(size) for rank, size in needed.items()})
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
