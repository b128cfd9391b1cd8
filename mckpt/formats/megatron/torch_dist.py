"""Megatron's `torch_dist` format: chunks of whole, unsharded tensors in
torch.distributed.checkpoint's container.

    .metadata          which chunk of which key lies where (a pickle)
    __R_I.distcp       items one after the other, each a torch.save file of one chunk or object
    common.pt          all that is no tensor; in place of it, megatron-core from 0.19 on has the
                       object common_state/shard_0_1
    metadata.json      names the format; a directory without it is no checkpoint

Keys name layers globally, or not at all: `decoder.layers.mlp.linear_fc2.weight` is [layers, hidden,
ffn].
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers import safe_pickle, torch_file
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.containers.entries import Entry
from mckpt.errors import SourceError
from mckpt.formats.base import (
    Format,
    Names,
    Problems,
    Shown,
    best_choices,
    group,
    packed,
    shapes_of,
)
from mckpt.formats.megatron import flat_optimizer, optimizer
from mckpt.formats.megatron.common_state import Common, has_tensors
from mckpt.formats.megatron.flat_optimizer import Extent
from mckpt.formats.megatron.optimizer import Optimizer
from mckpt.formats.megatron.run_config import RUN_CONFIG
from mckpt.formats.megatron.torch_dist_writing import (
    COMMON,
    COMMON_OBJECT,
    MARKER,
    METADATA,
    lay_out,
)
from mckpt.geometry.box import Box, Layout, Stored, range_boxes
from mckpt.geometry.packing import buffer
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound, MappingFile
from mckpt.storage.files import read_file, unreadable
from mckpt.values.dtypes import itemsize

CHOICES = {"keys": ("global",)}  # of the dialects
# .distcp files open at once while a layout is read; a save has one or two for each rank
MAX_OPEN = 32


def detect(path: Path) -> bool:
    return (path / METADATA).exists() or (path / MARKER).exists()


class TorchDist:
    """An opened `torch_dist` checkpoint.

    `.metadata` is read, and of the items only what tells where a chunk's data begins.
    """

    quantised = False

    def __init__(self, path: Path) -> None:
        self.format = FORMAT
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
        """Reads common.pt, else the object common_state; empty if there is neither."""
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
        """Returns the sizes of the run that saved it; reading does not depend on them."""
        return self.common.parallel()

    def keys(self) -> list[str]:
        """Returns the keys of all tensors."""
        return list(self.metadata.tensors)

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        """Rows of the embedding, padding included."""
        found = self.metadata.tensors.get(mapping.vocabulary.key)
        return found[1][0] if found and found[1] else None

    def beside(self, dialect: MappingFile) -> list[str]:
        """Keys of what is no weight (optimizer, random states), cut at their first dot or slash."""
        held = (k for k in (*self.metadata.tensors, *self.metadata.objects) if k != COMMON_OBJECT)
        names = [k for k in held if _ignored(k, dialect) and not k.endswith("_extra_state")]
        found = {
            "optimizer"
            if optimizer.split_key(k) or flat_optimizer.group_of(k)
            else k.replace("/", ".").split(".")[0]
            for k in names
            if "_extra_state" not in k
        }
        return sorted(
            found
            | {k for k, v in self.common.fields.items() if k in dialect.ignore or has_tensors(v)}
        )

    def show(self, most: int | None) -> Shown:
        """Returns every stored tensor, with the number of its chunks."""
        tensors = self.metadata.tensors
        rows = [
            (key, dtype, size, {"chunks": len(chunks)})
            for key, (dtype, size, chunks) in tensors.items()
        ]
        facts = {"files": len(self.files), "objects": len(self.metadata.objects)}
        return Shown(facts, rows[:most], Counter(t[:2] for t in tensors.values()))

    def choices(self, names: Names) -> dict[str, Any]:
        """Returns the dialect's choices of this checkpoint: those whose keys fit best."""
        held = {k for k in self.metadata.tensors if not _ignored(k, names.mapping)}

        def mismatch(chosen: Names) -> int:
            return len({key for b in chosen.bound() for key, _ in b.global_keys()} ^ held)

        return best_choices(names, {**names.mapping.choices, **CHOICES}, mismatch)

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes.

        One error lists every tensor that is missing, left over or of another shape.
        """
        self._check_sizes()
        dialect, bound = names.mapping, names.bound()
        problems = Problems(f"the tensors of {self.root} do not match its args:")
        stored = self._stored(bound, names, problems)
        known = {key for b in bound for key, _ in b.global_keys()}
        ignored = {
            k: _ignored(k, dialect) for k in (*self.metadata.tensors, *self.metadata.objects)
        }
        problems.extend(
            f"{k} {list(t[1])} is in no rule of {dialect.path.name}"
            for k, t in self.metadata.tensors.items()
            if not ignored[k] and k not in known
        )
        problems.extend(
            f"{k}: an object that {dialect.path.name} does not know"
            for k in self.metadata.objects
            if not ignored[k]
        )
        problems.check()
        return Layout(
            [str(self.root / f) for f in self.files],
            stored,
            shapes_of(bound, names.scope()),
            {k: why for k, why in ignored.items() if why},
        )

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none.

        Raises SourceError with every state that is missing, left over or of another shape.
        """
        held = optimizer.keys_of(self.metadata.tensors)
        if not held:
            return self._flat_optimizer(names)
        bound = []
        for b in names.bound():
            keys = [key for key, _ in b.global_keys()] if not b.rule.alias else []
            for state in dict.fromkeys(s for key in keys for s in held.get(key, ())):
                key = next(key for key in keys if state in held.get(key, ()))
                prefix = held[key][state].removesuffix(key)
                bound.append(optimizer.state_bound(b, state, prefix))
        problems = Problems(f"the optimizer's state of {self.root} does not match its weights:")
        problems.cure = optimizer.CURE
        stored = self._stored(bound, names, problems)
        known = {key for b in bound for key, _ in b.global_keys()}
        problems.extend(
            f"{key}: the state of a weight that {names.mapping.path.name} does not have"
            for states in held.values()
            for key in states.values()
            if key not in known
        )
        problems.check()
        files = [str(self.root / f) for f in self.files]
        layout = Layout(files, stored, shapes_of(bound, names.scope()))
        stored_keys = frozenset(key for states in held.values() for key in states.values())
        groups = optimizer.groups_of(self.common.fields.get("optimizer"), self.common.where)
        return Optimizer(self._form(), layout, groups, stored_keys)

    def _flat_optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state of flat buffers, None if there are none."""
        marks = self.common.fields.get("content_metadata") or {}
        form = str(marks.get("distrib_optim_sharding_type", "distributed"))
        objects = {k: found for k in self.metadata.objects if (found := flat_optimizer.group_of(k))}
        extents = {
            place: list(self._extents(key))
            for key in self.metadata.tensors
            if (place := flat_optimizer.place_of(key)) is not None
        }
        for key, (chain, number, what) in objects.items():
            if what == "param_state":
                (value, *_), data = self._object(key)
                file = self._number[self.metadata.items[key, None][0]]
                extents |= flat_optimizer.buffers(value, data, file, chain, number)
        if not extents:
            return None
        local = names._replace(choices={**names.choices, "keys": "local"})
        # other choices than the checkpoint's may name a key that it does not have
        most = self.metadata.tensors[names.mapping.vocabulary.key][0]
        dtypes = {name: most for b in local.bound() for name in b.rule.of}
        dtypes |= {
            name: self.metadata.tensors[key][0]
            for b in names.bound()
            for key, _ in b.global_keys()[:1]
            for name in b.rule.of
            if key in self.metadata.tensors
        }
        rows = self.padded_vocab(names.mapping)
        files = [str(self.root / f) for f in self.files]
        groups: dict[int, Any] = {}
        for key, (chain, _, what) in objects.items():
            if what == "optimizer" and chain not in groups:
                groups[chain] = self._object(key)[0][0]
        listed = [groups[chain] for chain in sorted(groups)]
        keys = frozenset(
            k for k in (*self.metadata.tensors, *objects) if flat_optimizer.group_of(k)
        )
        return Optimizer(
            form,
            flat_optimizer.layout(extents, local, dtypes, rows, files),
            optimizer.groups_of(listed, str(self.root)),
            keys,
        )

    def _extents(self, key: str) -> Iterator[Extent]:
        """Yields the chunks of a tensor of one axis."""
        dtype, _, chunks = self.metadata.tensors[key]
        with _Files(self.root) as files:
            for offsets, sizes in chunks:
                file, base, length = self.metadata.items[key, offsets]
                where = f"{self.root / file}: {key} at {list(offsets)}"
                at = torch_file.item_data_offset(
                    files.fd(file), base, length, sizes[0] * itemsize(dtype), where, dtype, sizes
                )
                low = offsets[0]
                yield Extent(low, low + sizes[0], dtype, self._number[file], at)

    def _object(self, key: str) -> tuple[Any, Any]:
        """Returns the value of an object, and the places of its storages."""
        file, offset, length = self.metadata.items[key, None]
        return self._read(str(self.root / file), offset, length)

    def _form(self) -> str:
        """Returns how the optimizer's state is stored. The common state names it from megatron-core
        0.13 on; without that name the keys tell.
        """
        marks = self.common.fields.get("content_metadata") or {}
        distributed = f"optimizer.state.{optimizer.MASTER_KEYS[0]}."
        if any(key.startswith(distributed) for key in self.metadata.tensors):
            supposed = optimizer.FULLY_RESHARDABLE
        else:
            flat = bool(self.metadata.flattened)
            supposed = "fully_sharded_model_space" if flat else optimizer.NOT_DISTRIBUTED
        return str(marks.get("distrib_optim_sharding_type", supposed))

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
            f"{f} has {sizes[f]:,} bytes, but its last item ({last[f]}) ends at byte {end:,}"
            for f, end in ends.items()
            if sizes[f] < end
        ]
        if short:
            raise SourceError.of(
                f"{self.root}: files are truncated, or {METADATA} belongs to another checkpoint;"
                " copy them again:",
                short,
            )

    def _stored(self, bound: list[Bound], names: Names, problems: Problems) -> list[Stored]:
        """Returns the chunks of these rules; what is missing or of another shape becomes one of
        `problems`.
        """
        scope = names.scope()
        stored: list[Stored] = []
        with _Files(self.root) as files:
            for b in bound:
                found: dict[Box, list[tuple[int, int, Entry]]] = {}
                whole = packed(b.rule, scope)
                for key, layer in b.global_keys():
                    if key not in self.metadata.tensors:
                        if not b.rule.alias:
                            problems.missing(f"{key} is missing")
                        continue
                    _, size, chunks = self.metadata.tensors[key]
                    size, axes = self.metadata.flattened.get(key, size), b.axes(scope)
                    if (
                        b.rule.tp == "vocab"
                        and len(size) > len(axes)
                        and size[len(axes)] >= whole.shape[0]
                    ):
                        whole = packed(b.rule, scope, size[len(axes)])
                    if size != (*axes, *whole.shape):
                        problems.missing(
                            f"{key} is {list(size)}, and should be {[*axes, *whole.shape]} by its"
                            " dims"
                        )
                        continue
                    for _, offsets, sizes in sorted(
                        (self.metadata.items[key, offsets], offsets, sizes)
                        for offsets, sizes in chunks
                    ):
                        for region, entries in self._chunk(b, key, layer, offsets, sizes, files):
                            found.setdefault(region, []).extend(entries)
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
        return stored

    def _chunk(
        self,
        b: Bound,
        key: str,
        layer: int,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        files: _Files,
    ) -> Iterator[tuple[Box, list[tuple[int, int, Entry]]]]:
        """Yields the parts of one chunk: a region, and the entries of the layers and experts that
        hold it. The leading axes are outermost, so each entry is a dense part of the chunk.
        """
        dtype, axes = self.metadata.tensors[key][0], len(b.rule.stacked())
        file, base, length = self.metadata.items[key, offsets]
        path, size = str(self.root / file), itemsize(dtype)
        nbytes = math.prod(sizes) * size
        at = torch_file.item_data_offset(
            files.fd(file), base, length, nbytes, f"{path}: {key} at {list(offsets)}", dtype, sizes
        )
        for box in self._boxes(key, offsets, sizes):
            region = Box(tuple(box.offset[axes:]), tuple(box.shape[axes:]))
            inner = math.prod(region.shape) * size
            entries = []
            for index in itertools.product(
                *(range(o, o + n) for o, n in zip(box.offset[:axes], box.shape[:axes], strict=True))
            ):
                named = dict(zip(b.rule.stacked(), index, strict=True))
                entry = Entry(dtype, region.shape, self._number[file], at)
                entries.append((named.get("layer", layer), named.get("expert", 0), entry))
                at += inner
            if entries and inner:
                yield region, entries

    def _boxes(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Box]:
        """Returns the boxes of a tensor whose elements a chunk holds, one box after the other.

        Up to megatron-core 0.14 a chunk of an optimizer's state may be a range of one rank's shard:
        its axes are the numbers of the shard along each axis, and a range of its elements.
        """
        whole = self.metadata.flattened.get(key)
        if whole is None:
            return [Box(offsets, sizes)]
        grid = self.metadata.tensors[key][1][:-1]
        shard = tuple(n // ways for n, ways in zip(whole, grid, strict=True))
        first = [o * n for o, n in zip(offsets[:-1], shard, strict=True)]
        return [
            Box(tuple(f + o for f, o in zip(first, box.offset, strict=True)), box.shape)
            for box in range_boxes(shard, offsets[-1], offsets[-1] + sizes[-1])
        ]

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
    """The files of a directory that were read last, kept open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fds: OrderedDict[str, int] = OrderedDict()

    def fd(self, file: str) -> int:
        """Returns a descriptor, which is valid until the next call."""
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
    """Returns why a key is not a weight, or None."""
    if key == COMMON_OBJECT:
        return "common state"
    parts = key.split("/")[0].split(".")
    return next((why for word, why in dialect.ignore.items() if word in parts), None)


FORMAT = Format(
    "torch_dist",
    ".metadata with metadata.json",
    megatron=True,
    detect=detect,
    open=TorchDist,
    lay_out=lay_out,
    parts=(METADATA, MARKER, COMMON, "*.distcp", RUN_CONFIG, "train_state.pt"),
    global_keys=True,
    layer_keys=True,
    common_object=True,
    optimizer=True,
    last=MARKER,
)
