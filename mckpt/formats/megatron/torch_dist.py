"""Megatron's `torch_dist` format: chunks of whole, unsharded tensors in
torch.distributed.checkpoint's container.

    .metadata          which chunk of which key lies where (a pickle)
    __R_I.distcp       items one after the other, each a torch.save file of one chunk or object
    common.pt          all that is no tensor; megatron-core from 0.19 on keeps it as the object common_state/shard_0_1 instead
    metadata.json      names the format; a directory without it is no checkpoint

Keys name layers globally, or not at all: `decoder.layers.mlp.linear_fc2.weight` is [layers, hidden,
ffn].
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers import safe_pickle, torch_file
from mckpt.containers.dcp_metadata import Chunks, Items, emit_metadata, read_metadata
from mckpt.containers.entries import Entry
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Problems, dtype_of, group, packed, shapes_of
from mckpt.formats.megatron.save_directory import Common, has_tensors
from mckpt.geometry.box import Box, Layout, Stored, whole_box
from mckpt.geometry.packing import PackingError, buffer, shard
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, MappingFile, Scope
from mckpt.storage.files import TargetFile, read_file, unreadable
from mckpt.values.dtypes import itemsize

METADATA, COMMON, MARKER = ".metadata", "common.pt", "metadata.json"
COMMON_OBJECT = "common_state/shard_0_1"
MARKER_LONG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# bytes: larger chunks are cut by the target's tp, since a loader reads whole chunks
SPLIT_ABOVE = 64 << 20
# bytes of data for each .distcp file: enough files for many writers, few enough to list
FILE_BYTES = 256 << 20
MAX_FILES = 128
# .distcp files open at once while a layout is read; a save has one or two for each rank
MAX_OPEN = 32


def detect(path: Path) -> bool:
    return (path / METADATA).exists() or (path / MARKER).exists()


class Checkpoint:
    """An opened `torch_dist` checkpoint.

    `.metadata` is read, and of the items only what tells where a chunk's data begins.
    """

    format = "torch_dist"

    def __init__(self, path: Path) -> None:
        self.root = path
        if not (path / MARKER).exists():
            raise SourceError(
                f"{path}: has no {MARKER}: its save never finished, or it is a torch_dcp"
                " checkpoint, which mckpt does not read"
            )
        try:
            marker = json.loads(read_file(path / MARKER, 1 << 20))
            backend = marker["sharded_backend"]
        except (ValueError, KeyError, TypeError):
            raise SourceError(f"{path / MARKER}: names no sharded_backend") from None
        if backend != "torch_dist":
            raise SourceError(f"{path}: sharded_backend is {backend!r}; mckpt reads torch_dist")
        if not (path / METADATA).exists():
            raise SourceError(f"{path}: has {MARKER} and no {METADATA}")
        self.metadata = read_metadata(path / METADATA)
        self.files = sorted({item[0] for item in self.metadata.items.values()})
        self._number = {name: i for i, name in enumerate(self.files)}
        absent = [name for name in self.files if not (path / name).is_file()]
        if absent:
            raise SourceError.of(f"{path}: {METADATA} names files that are not there:", absent)

    @cached_property
    def common(self) -> Common:
        """From common.pt, else from the common_state object; empty where there is neither."""
        path = self.root / COMMON
        if path.exists():
            value, _ = self._read(str(path), 0, None)
            return Common(self._dict(value, str(path)), str(path))
        if COMMON_OBJECT in self.metadata.objects:
            file, offset, length = self.metadata.items[COMMON_OBJECT, None]
            value, _ = self._read(str(self.root / file), offset, length)
            inner = value[0] if isinstance(value, list) and value else value
            return Common(self._dict(inner, f"{self.root / file}: {COMMON_OBJECT}"), COMMON_OBJECT)
        return Common({}, str(path))

    @staticmethod
    def _dict(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SourceError(
                f"{where}: holds {safe_pickle.short(value)}, not a dict of args and the like"
            )
        return value

    def parallel(self) -> Parallel:
        """The sizes of the run that saved it, as its args say; they do not matter for reading."""
        return self.common.parallel()

    def padded_vocab(self, dialect: MappingFile, parallel: Parallel) -> int | None:
        """Rows of the embedding, padding included."""
        found = self.metadata.tensors.get(dialect.vocabulary.key)
        return found[1][0] if found and found[1] else None

    def beside(self, dialect: MappingFile) -> list[str]:
        """Keys of what is no weight (optimizer, random states), cut at their first dot or slash."""
        held = (k for k in (*self.metadata.tensors, *self.metadata.objects) if k != COMMON_OBJECT)
        names = [k for k in held if _ignored(k, dialect) and not k.endswith("_extra_state")]
        found = {k.replace("/", ".").split(".")[0] for k in names if "_extra_state" not in k}
        return sorted(
            found
            | {k for k, v in self.common.fields.items() if k in dialect.ignore or has_tensors(v)}
        )

    def choices(
        self, dialect: MappingFile, dims: Scope, parallel: Parallel, said: Scope
    ) -> dict[str, Any]:
        """How the dialect's choices were made here: those whose keys fit best, of these the ones
        that the args say.
        """
        keys = {k for k in self.metadata.tensors if not _ignored(k, dialect)}
        best: tuple[tuple[int, int], dict[str, Any]] | None = None
        choices = {**dialect.choices, "container": ("torch_dist",)}
        for picked in itertools.product(*choices.values()):
            chosen = {**dict(zip(choices, picked, strict=True)), "pp": parallel.pp}
            wanted = {
                key for b in dialect.bind(dialect.scope(dims, **chosen)) for key, _ in _keys(b)
            }
            score = (len(wanted ^ keys), sum(chosen[k] != value for k, value in said.items()))
            if best is None or score < best[0]:
                best = (score, chosen)
        assert best is not None
        return best[1]

    def layout(
        self, dialect: MappingFile, dims: Scope, parallel: Parallel, chosen: Scope
    ) -> Layout:
        """What is stored where, in logical boxes.

        Everything missing, left over or of another shape is one error.
        """
        self._check_sizes()
        with _Files(self.root) as files:
            return self._layout(dialect, dims, chosen, files)

    def _check_sizes(self) -> None:
        """SourceError for files that end before their last item does, though it be one that nothing
        reads.
        """
        ends = dict.fromkeys(self.files, 0)
        last: dict[str, str] = {}
        for (key, _), (file, at, length) in self.metadata.items.items():
            if at + length > ends[file]:
                ends[file], last[file] = at + length, key
        sizes = {file: os.path.getsize(self.root / file) for file in self.files}
        short = [
            f"{f}: {sizes[f]} bytes, and its last item, of {last[f]}, ends at {end}"
            for f, end in ends.items()
            if sizes[f] < end
        ]
        if short:
            raise SourceError.of(
                f"{self.root}: files are cut short, or {METADATA} is of other ones; copy them"
                " again:",
                short,
            )

    def _layout(self, dialect: MappingFile, dims: Scope, chosen: Scope, files: _Files) -> Layout:
        scope = dialect.scope(dims, **chosen)
        bound = dialect.bind(scope)
        problems = Problems(f"{self.root} is not the model that its args describe:")
        left = dict.fromkeys(k for k in self.metadata.tensors if not _ignored(k, dialect))
        stored: list[Stored] = []
        for b in bound:
            found: dict[Box, list[tuple[int, int, Entry]]] = {}
            whole = packed(b.rule, scope)
            for key, layer in _keys(b):
                if key not in self.metadata.tensors:
                    if not b.rule.alias:
                        problems.missing(f"{key} is missing")
                    continue
                left.pop(key, None)
                dtype, size, chunks = self.metadata.tensors[key]
                axes = _axes(b, scope)
                if (
                    b.rule.tp == "vocab"
                    and len(size) > len(axes)
                    and size[len(axes)] >= whole.shape[0]
                ):
                    whole = packed(b.rule, scope, size[len(axes)])
                if size != (*axes, *whole.shape):
                    problems.missing(
                        f"{key} is {list(size)}, and should be {[*axes, *whole.shape]} by its dims"
                    )
                    continue
                for _, offsets, sizes in sorted(
                    (self.metadata.items[key, offsets], offsets, sizes) for offsets, sizes in chunks
                ):
                    self._chunk(b, key, layer, dtype, offsets, sizes, len(axes), found, files)
            for region, entries in found.items():
                shape, pieces = buffer(whole, [region], b.rule.of)
                stored += group(
                    b.rule.key,
                    shape,
                    pieces,
                    entries,
                    problems,
                    replica=b.rule.alias,
                    padding=b.rule.tp == "vocab",
                )
        problems.extend(
            f"{k} {list(self.metadata.tensors[k][1])} is in no rule of {dialect.path.name}"
            for k in left
        )
        ignored = {
            k: _ignored(k, dialect) for k in (*self.metadata.tensors, *self.metadata.objects)
        }
        problems.extend(
            f"{k}: an object that {dialect.path.name} does not know"
            for k in self.metadata.objects
            if not ignored[k]
        )
        problems.check()
        return Layout(
            [str(self.root / f) for f in self.files],
            stored,
            shapes_of(bound, scope),
            {k: why for k, why in ignored.items() if why},
        )

    def _chunk(
        self,
        b: Bound,
        key: str,
        layer: int,
        dtype: str,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        axes: int,
        found: dict[Box, list[tuple[int, int, Entry]]],
        files: _Files,
    ) -> None:
        """One chunk as entries of single layers and experts: the leading axes are outermost, so
        each is a dense part of the chunk.
        """
        file, base, length = self.metadata.items[key, offsets]
        path = str(self.root / file)
        nbytes = math.prod(sizes) * itemsize(dtype)
        at = torch_file.item_data_offset(
            files.fd(file), base, length, nbytes, f"{path}: {key} at {list(offsets)}", dtype, sizes
        )
        region = Box(tuple(offsets[axes:]), tuple(sizes[axes:]))
        inner = math.prod(region.shape) * itemsize(dtype)
        for i, index in enumerate(
            itertools.product(
                *(range(o, o + n) for o, n in zip(offsets[:axes], sizes[:axes], strict=True))
            )
        ):
            named = dict(zip(b.rule.stacked(), index, strict=True))
            entry = Entry(dtype, region.shape, self._number[file], at + i * inner)
            found.setdefault(region, []).append(
                (named.get("layer", layer), named.get("expert", 0), entry)
            )

    @staticmethod
    def _read(path: str, base: int, length: int | None) -> tuple[Any, Any]:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise unreadable(path, e) from e
        try:
            return torch_file.read(fd, path, base, length)
        finally:
            os.close(fd)


class _Files:
    """Some files of a directory, open for reading: those asked for last."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fds: OrderedDict[str, int] = OrderedDict()

    def fd(self, file: str) -> int:
        """A descriptor, good until another file is asked for."""
        if file not in self.fds:
            if len(self.fds) == MAX_OPEN:
                os.close(self.fds.popitem(last=False)[1])
            try:
                self.fds[file] = os.open(self.root / file, os.O_RDONLY)
            except OSError as e:
                raise unreadable(self.root / file, e) from e
        self.fds.move_to_end(file)
        return self.fds[file]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self.fds.values():
            os.close(fd)


def _ignored(key: str, dialect: MappingFile) -> str | None:
    """Why a key is not a weight, or None."""
    if key == COMMON_OBJECT:
        return "common state"
    parts = key.split("/")[0].split(".")
    return next((why for word, why in dialect.ignore.items() if word in parts), None)


def _keys(b: Bound) -> list[tuple[str, int]]:
    """(key, layer) of each key of a rule; experts are never in a key."""
    layers = (
        [0] if "layer" in b.rule.stacked() or "layer" not in b.rule.indices else b.layers.tolist()
    )
    return [(b.key(layer), layer) for layer in layers]


def _axes(b: Bound, scope: Scope) -> tuple[int, ...]:
    """Sizes of the leading axes of a rule's keys."""
    return tuple(
        scope["num_layers"] if i == "layer" else scope["num_experts"] for i in b.rule.stacked()
    )


# ------------------------------------------------------------------------------------------ writing


def lay_out(
    dialect: MappingFile,
    dims: Scope,
    kinds: dict[str, str],
    parallel: Parallel,
    chosen: Scope,
    padded: int,
    common: dict[str, Any],
    common_as_object: bool,
) -> tuple[Layout, list[TargetFile]]:
    """The files of one checkpoint: a chunk for each layer and expert, cut by `parallel.tp` where it
    is large.
    """
    scope = dialect.scope(dims, **chosen)
    bound = dialect.bind(scope)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    containers: dict[tuple[str, tuple[int, ...]], torch_file.TorchFile] = {}
    # (rule, region, dtype, shape of a chunk with its leading axes of 1)
    rules: list[tuple[Bound, Box, str, tuple[int, ...]]] = []
    # for each of `rules` the container of one chunk: of 10**5 chunks all but a few are alike
    held: list[torch_file.TorchFile] = []
    columns = [np.empty((4, 0), "i8")]  # of each chunk: order, number of its rule, layer, expert
    for b in bound:
        whole, dtype = packed(b.rule, scope, padded), dtype_of(b.rule, kinds)
        axes = _axes(b, scope)
        for key, _ in _keys(b):
            if (known := tensors.get(key)) is not None and known[0] != dtype:
                raise UsageError(f"{key} would hold {known[0]} and {dtype}: say --dtype")
            tensors[key] = (dtype, (*axes, *whole.shape))
        layers, experts = b.instances()
        outside = 0 if b.rule.stage == "first" else dims["num_layers"] + 1
        for region in _regions(b, whole, dtype, parallel):
            shape = (*(1,) * len(axes), *region.shape)
            if (dtype, shape) not in containers:
                containers[dtype, shape] = torch_file.lay_out(
                    safe_pickle.tensor(dtype, shape, "0"), "archive"
                )
            order = layers + 1 if "layer" in b.rule.indices else outside
            columns.append(np.stack(np.broadcast_arrays(order, len(rules), layers, experts)))
            rules.append((b, region, dtype, shape))
            held.append(containers[dtype, shape])
    every = np.concatenate(columns, 1)
    _, number, layer, expert = every[:, np.argsort(every[0], kind="stable")]

    sizes = np.array([container.size for container in held], "i8")[number]
    file, at, cuts = _in_files(sizes)
    names = [f"__{i}_0.distcp" for i in range(len(cuts) - 1)]

    stored: list[Stored] = []
    chunks: list[Chunks] = []
    items: list[Items] = []
    for i, ((b, region, dtype, shape), container) in enumerate(zip(rules, held, strict=True)):
        rows = np.flatnonzero(number == i)
        index = {"layer": layer[rows], "expert": expert[rows]}
        offsets = np.empty((len(rows), len(shape)), "i8")
        for axis, offset in enumerate([*(index[i] for i in b.rule.stacked()), *region.offset]):
            offsets[:, axis] = offset
        starts = (
            np.flatnonzero(np.diff(layer[rows], prepend=-1)).tolist()
            if "{layer}" in b.rule.key
            else [0][: len(rows)]
        )
        firsts = [*starts, len(rows)]
        keys = [b.key(layer) for layer in index["layer"][starts].tolist()]
        chunks += [
            Chunks(key, offsets[begin:end], shape)
            for key, (begin, end) in zip(keys, itertools.pairwise(firsts), strict=True)
        ]
        items.append(
            Items(
                keys,
                np.repeat(np.arange(len(keys)), np.diff(firsts)),
                offsets,
                file[rows],
                at[rows],
                container.size,
            )
        )
        held_as, pieces = buffer(packed(b.rule, scope, padded), [region], b.rule.of)
        stored.append(
            Stored(
                b.rule.key,
                dtype,
                held_as,
                pieces,
                layer[rows].astype("i4"),
                expert[rows].astype("i4"),
                file[rows].astype("i4"),
                at[rows] + container.data["0"][0],
                replica=b.rule.alias,
                padding=b.rule.tp == "vocab",
            )
        )

    objects = [
        (
            torch_file.lay_out([None], "archive"),
            [key for b in dialect.bind(scope, dialect.objects) for key in _object_keys(b, scope)],
        )
    ]
    if common_as_object:
        objects.append((torch_file.lay_out([common], "archive"), [COMMON_OBJECT]))
    # of the files, in bytes
    ends = [int(sizes[begin:end].sum()) for begin, end in itertools.pairwise(cuts)]
    for container, named in objects:  # behind all else
        where = ends[-1] + np.arange(len(named)) * container.size
        items.append(
            Items(named, None, None, np.full(len(named), len(names) - 1), where, container.size)
        )
        at, number = np.append(at, where), np.append(number, np.full(len(named), len(held)))
        held.append(container)
        ends[-1] += len(named) * container.size
    cuts[-1] = len(at)

    outputs = [
        TargetFile(name, nbytes, _fixed(at[begin:end], number[begin:end], held))
        for name, nbytes, (begin, end) in zip(names, ends, itertools.pairwise(cuts), strict=True)
    ]
    outputs.append(
        TargetFile.pieces(
            METADATA,
            emit_metadata(
                tensors, [key for _, named in objects for key in named], chunks, items, names
            ),
        )
    )
    if not common_as_object:
        laid = torch_file.lay_out(common, "common")
        outputs.append(TargetFile(COMMON, laid.size, laid.fixed))
    marker = {
        k: v for k, v in MARKER_LONG.items() if not (common_as_object and k.startswith("common"))
    }
    outputs.append(TargetFile.whole(MARKER, json.dumps(marker).encode()))

    return Layout(names, stored, shapes_of(bound, scope)), outputs


def _in_files(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Items of these bytes, one behind the other in files of about the same size -> file [items],
    byte in it [items], cuts [files + 1].

    File i holds the items from cuts[i] to cuts[i + 1].
    """
    total = int(sizes.sum())
    count = max(1, min(MAX_FILES, math.ceil(total / FILE_BYTES)))
    start = np.append(0, np.cumsum(sizes))
    file = np.minimum(start[:-1] * count // max(1, total), count - 1)
    firsts = np.searchsorted(file, np.arange(count + 1))
    return file, start[:-1] - start[firsts][file], firsts.tolist()


def _regions(b: Bound, whole: Any, dtype: str, parallel: Parallel) -> list[Box]:
    """The chunks of one layer's tensor: the whole of it, or what each rank of the target holds
    where it is large.
    """
    ways = parallel.expert_tp if "expert" in b.rule.indices else parallel.tp
    try:
        shards = (
            [box for rank in range(ways) for box in shard(whole, b.rule.tp, rank, ways)]
            if b.rule.tp != "replicated"
            else []
        )
    except PackingError as e:
        raise UsageError(
            f"{b.rule.key} {list(whole.shape)}: {e}"
            f" ({'etp' if 'expert' in b.rule.indices else 'tp'})"
        ) from None
    return (
        shards
        if shards and math.prod(whole.shape) * itemsize(dtype) > SPLIT_ABOVE
        else [whole_box(whole.shape)]
    )


def _object_keys(b: Bound, scope: Scope) -> list[str]:
    """key/shard_I_N of a rule without tensors, once for each index that its key does not name
    (ShardedObject.unique_key).
    """
    sizes = _axes(b, scope) or (1,)
    of = ".".join(map(str, sizes))
    shards = [
        f"/shard_{'.'.join(index)}_{of}"
        for index in itertools.product(*(map(str, range(size)) for size in sizes))
    ]
    return [key + shard for key, _ in _keys(b) for shard in shards]


def _fixed(
    at: np.ndarray, number: np.ndarray, held: list[torch_file.TorchFile]
) -> Callable[[Callable[[int, int], int] | None], Iterable[tuple[int, bytes]]]:
    """What is no tensor data in a file of items, which begin `at` these bytes; `number` of each is
    the one of `held` that it is like.
    """

    def fixed(crc_of: Callable[[int, int], int] | None) -> Iterable[tuple[int, bytes]]:
        for base, container in zip(
            at.tolist(), map(held.__getitem__, number.tolist()), strict=True
        ):
            inner = None if crc_of is None else (lambda at, n, base=base: crc_of(base + at, n))
            for where, data in container.fixed(inner):
                yield base + where, data

    return fixed
