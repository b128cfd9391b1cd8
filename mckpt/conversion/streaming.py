"""Hugging Face tensors one at a time: reads those that any checkpoint would become, and writes a
checkpoint from a stream of them.

To write, the Hugging Face directory of the model is laid out first, from config.json, as files of
holes. Its plan is that of any other directory. Each tensor that comes is written to its place
there, the copies that read it are done, and the place becomes a hole again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from msgspec import structs

from mckpt import formats
from mckpt.checkpoint import description
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import LazyTensor
from mckpt.containers.entries import Entry
from mckpt.conversion.moving import RunSettings
from mckpt.conversion.plan_data import PlanData
from mckpt.conversion.run import Once
from mckpt.conversion.to_hf import export_of
from mckpt.errors import Cancelled, SourceError, UsageError, counted, show_again, show_as, shown
from mckpt.execute.files import write_at
from mckpt.execute.mover import naming
from mckpt.execute.piecewise import Batches, read, within
from mckpt.formats import places
from mckpt.formats.base import Names
from mckpt.formats.hf import HuggingFace, HuggingFaceRequest, lay_out
from mckpt.formats.hf_config import CONFIG, QUANTISED, quantised_by, read_config, side_files
from mckpt.formats.hf_files import Row, tensors_of
from mckpt.geometry.join import Joined, join
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound, is_of_head, key_pattern, without_mtp
from mckpt.mapping.forms import part
from mckpt.options import SourceOptions, TargetOptions
from mckpt.progress import Progress
from mckpt.storage import addresses, sparse_copy
from mckpt.values import dtypes
from mckpt.values.dtypes import itemsize

FILE = 44  # bits of an offset in a file, which has less than 16 TiB


class HfTensor(LazyTensor):
    """One tensor under its name in the Hugging Face directory, or rows of it. `tensor[2]` and
    `tensor[2:5]` choose along the first axis and read nothing.
    """

    def __init__(
        self, of: HfTensors, row: Row, rows: range | None = None, single: bool = False
    ) -> None:
        self._of, self._row, self._single = of, row, single
        self._rows = range(row.shape[0] if row.shape else 1) if rows is None else rows
        self.name, self.dtype = row.key, row.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the number of elements along each axis."""
        first = () if self._single or not self._row.shape else (len(self._rows),)
        return (*first, *self._row.shape[1:])

    def __getitem__(self, index: int | slice) -> HfTensor:
        """Returns one row, or the rows of a slice of step 1."""
        if not self.shape or self._single:
            raise IndexError(f"{self.name}: rows are chosen once, along the first axis")
        if isinstance(index, slice):
            rows = self._rows[index]
            if rows.step != 1:
                raise IndexError(f"{self.name}: slices have step 1 here, not {rows.step}")
            return HfTensor(self._of, self._row, rows)
        try:
            at = self._rows[index]
        except IndexError:
            raise IndexError(
                f"{self.name}: index {index} is outside of the {len(self._rows)} of axis 0"
            ) from None
        return HfTensor(self._of, self._row, range(at, at + 1), single=True)

    def _read(self, buffer: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(self.nbytes, "u1") if buffer is None else buffer.view("u1")[: self.nbytes]
        if len(out):
            width = self._row.nbytes // (self._row.shape[0] if self._row.shape else 1)
            self._of.fill(self.name, self._rows.start * width, out.data)
        return out


class HfTensors(Mapping[str, HfTensor]):
    """The tensors of the Hugging Face directory that a conversion would write, by name, in the
    order of its files. Only headers are read before the elements of a tensor are.
    """

    def __init__(self, source: Checkpoint) -> None:
        """Raises the errors of a conversion to Hugging Face, such as MappingError for a model that
        no family computes.
        """
        self._given = source
        export = export_of(source.borrowing(), TargetOptions(format=formats.HUGGING_FACE))
        self.config: dict[str, Any] = json.loads(export.config)
        self.source = export.source
        self._layout, outputs = formats.get(formats.HUGGING_FACE).lay_out(export.request)
        self._rows = {
            row.key: (row, number, at)
            for number, output in enumerate(outputs[: len(self._layout.files)])
            for row, at in tensors_of(output)
        }

    @property
    def rows(self) -> dict[str, Row]:
        """Returns the name, dtype and shape of each tensor."""
        return {name: row for name, (row, _, _) in self._rows.items()}

    @cached_property
    def _joined(self) -> tuple[Joined, np.ndarray, np.ndarray]:
        """The copies that fill all tensors, these copies in the order of the target, and the places
        at which they start: the number of the file, shifted by FILE, and the byte.
        """
        joined = join(self.source.layout, self._layout)
        at = (joined.copies["dst_file"].astype("i8") << FILE) + joined.copies["dst_at"]
        order = np.argsort(at)
        return joined, joined.copies[order], at[order]

    def fill(self, name: str, skipped: int, out: memoryview) -> None:
        """Reads into `out` the bytes of a tensor behind its first `skipped` bytes."""
        row, file, at = self._rows[name]
        joined, copies, starts = self._joined
        place, start = (file << FILE) + at, at + skipped
        first, last = np.searchsorted(starts, [place, place + row.nbytes])
        copies = copies[first:last]
        if len(out) < row.nbytes:
            copies = within(copies, itemsize(row.dtype), start, start + len(out))
        sources = list(map(str, self.source.layout.files))
        with naming(joined):
            read(structs.replace(joined, copies=copies), sources, start, out)

    def __getitem__(self, name: str) -> HfTensor:
        if name not in self._rows:
            raise KeyError(
                f"{name} is not a tensor of the Hugging Face directory. Its tensors have names such"
                f" as {next(iter(self), '')}; the checkpoint itself has logical tensors"
            )
        return HfTensor(self, self._rows[name][0])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        path, num = self._given.path, len(self)
        return shown(f"HfTensors({counted(num, 'tensor')} of {self._given.format} {path})")

    def __reduce__(self) -> tuple[Any, ...]:
        return HfTensors, (self._given,)


Named = tuple[str, Any]  # a tensor of the stream
_DTYPES = ("dtype", "torch_dtype")  # keys of config.json, in transformers 5 and 4


@contextmanager
def opened(
    config: Mapping[str, Any] | str | Path,
    tensors: Iterable[Named],
    options: SourceOptions,
    patterns: Mapping[str, str],
) -> Iterator[tuple[Checkpoint, Stream]]:
    """Yields the Hugging Face directory that the stream would be, whose tensors are holes, and the
    stream.

    config: the content of config.json, or the place of its directory. options: the user's
    description of the model. patterns: patterns of names of tensors -> their dtypes.

    Raises MappingError if config.json does not describe a model that mckpt knows, and UsageError
    if a stream cannot have all tensors of the model.
    """
    coming = iter(tensors)
    if (first := next(coming, None)) is None:
        raise SourceError("stream: has no tensors")
    with sparse_copy.scratch() as folder:
        show_as(str(folder), "stream")
        try:
            if isinstance(config, Mapping):
                (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            else:
                given = places.local(config, weights=False)
                read_config(given)  # raises the error of a file that is not there
                for name in (CONFIG, *side_files(given).kept):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(given / name, folder / name)
            names = _names(folder, first[0], options)
            _lay_out(folder, names, first, patterns)
            source = Checkpoint.open(folder, options.with_(trusted=True))
            yield source, Stream(source, itertools.chain([first], coming))
        finally:
            show_again(str(folder))


def _names(folder: Path, first: str, options: SourceOptions) -> Names:
    """Returns the names of the tensors of the model that a config.json describes.

    first: the name of the first tensor, which decides between several forms of names.
    """
    config, where = read_config(folder), str(folder / CONFIG)
    if quantised_by(config):
        raise UsageError(
            f"{where}: has {QUANTISED}, and the tensors of a stream are not quantised; leave it"
            " out, and give dequantised tensors, such as those of hf_tensors()"
        )
    flat = first.startswith(("embed_tokens.", "layers.", "norm."))  # as Qwen3-Embedding
    keys = ["embed_tokens.weight"] if flat else []
    family = description.family_for(config, options.family_name, where, keys)
    dims = family.read(config, options.dims, where, options.dims, "--set")
    dims = without_mtp(dims) if options.no_mtp else dims
    forms = [{"form": name} for name, form in family.forms.items() if not form.carried]
    if family.forms and not forms:
        carried = " or ".join(", ".join(form.carried) for form in family.forms.values())
        raise UsageError(
            f"{where}: describes a {family.architectures[0]}, whose tensors {carried} are not in"
            " Megatron's model, so a stream cannot have all of it; save the model as a directory,"
            " and convert that"
        )
    choices = [Names(family, dims, form, Parallel()) for form in forms or [{}]]
    return next((n for n in choices if _has(n.bound, first)), choices[0])


def _lay_out(folder: Path, names: Names, first: Named, patterns: Mapping[str, str]) -> None:
    """Makes the weight files of a directory that has a config.json."""
    for pattern in patterns:
        if not _has(names.bound, pattern):
            raise UsageError(f"dtypes: no tensor of the model has a name like {pattern!r}")
    config = read_config(folder)
    parts = (part(config, names.mapping.inside), config)
    texts = (place.get(key) for place in parts for key in _DTYPES)
    dtype = next((dtypes.parse(text) for text in texts if isinstance(text, str)), None)
    stored: dict[str, str] = {}
    for b in names.bound:
        given = next((d for pattern, d in patterns.items() if _has([b], pattern)), None)
        own = dtypes.parse(given) if given else dtype or _described(first[1])[0]
        stored.update(dict.fromkeys(b.rule.of, own))
    for output in lay_out(HuggingFaceRequest(names, stored, TargetOptions().max_shard_size))[1]:
        with open(folder / output.path, "wb") as file:
            file.truncate(output.size)
            for at, data in output.fixed(None):
                file.seek(at)
                file.write(data)


def _has(bound: Iterable[Bound], pattern: str) -> bool:
    """Returns whether a key of the rules matches a pattern, in which * stands for any text."""
    return any(fnmatchcase(key, pattern) for b in bound for key in b.keys())  # noqa: SIM118


def _described(array: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and the shape of an array, as mckpt names them."""
    if isinstance(array, LazyTensor):
        return array.dtype, array.shape
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    # the text of a dtype of numpy has its byte order too, such as >f4
    dtype = array.dtype.name if isinstance(array.dtype, np.dtype) else str(array.dtype)
    return dtype.removeprefix("torch."), tuple(array.shape)


def _bytes_of(array: Any) -> memoryview:
    """Returns the bytes of an array, row by row."""
    if isinstance(array, LazyTensor):
        array = array.numpy()
    elif hasattr(array, "detach"):  # torch, whose bfloat16 numpy does not take
        import torch

        array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view("u1").data


class Stream:
    """Tensors that come one by one, and the holes of the directory that they would be."""

    def __init__(self, source: Checkpoint, tensors: Iterable[Named]) -> None:
        self.tensors = tensors
        self.entries = cast("HuggingFace", source.opened).entries
        self.family = source.names.mapping  # with the keys of layers that are left out
        self._seen: set[str] = set()
        form = self.family.form(source.names.choices)
        ignored = (*self.family.ignore, *self.family.drop)
        self._ignored = [key_pattern(form.rename(pattern)) for pattern in ignored]
        # names that are copies of one logical tensor -> that tensor, its layer and expert
        self._of: dict[str, tuple[Any, ...]] = {}
        self._sums: dict[tuple[Any, ...], tuple[str, bytes]] = {}
        bound = source.names.bound
        copied = {b.rule.of for b in bound if b.rule.alias}
        for b in (b for b in bound if b.rule.of in copied):
            for key, *at in zip(b.keys(), *(n.tolist() for n in b.instances()), strict=True):
                self._of[key] = (b.rule.of, *at)

    def __iter__(self) -> Iterator[tuple[Entry, memoryview]]:
        """Yields the place of each tensor, and its bytes.

        Raises SourceError for a tensor that the model does not have, that came before or that has
        another shape or dtype, and at the end for those that are missing.
        """
        for name, array in self.tensors:
            dtype, shape = _described(array)
            if name in self._seen:
                raise SourceError(f"{name}: came twice in the stream")
            self._seen.add(name)
            if name in self.entries:
                self._check(name, dtype, shape)
            elif name not in self._of:
                if any(pattern.fullmatch(name) for pattern in self._ignored):
                    continue
                if is_of_head(name):
                    raise UsageError(
                        f"{name}: belongs to a head, which Megatron's model does not have; leave it"
                        " out, or save the model as a directory and convert that, which carries it"
                    )
                raise SourceError(
                    f"{name} {list(shape)}: is in no rule of {self.family.path.name}, so the model"
                    " that config.json describes does not have it"
                )
            data = _bytes_of(array)
            if name in self._of:
                self._compare(name, hashlib.sha256(data).digest())
            if name in self.entries:
                yield self.entries[name], data
        if missing := [name for name in self.entries.names if name not in self._seen]:
            raise SourceError.of(
                f"the stream ended without {counted(len(missing), 'tensor')} of the model that"
                " config.json describes:",
                missing,
                "If the model does not have them, give `settings` that leave them out, or"
                " no_mtp=True for layers of multi-token prediction.",
            )

    def _check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        entry = self.entries[name]
        if shape != entry.shape:
            raise SourceError(
                f"{name}: is {list(shape)} in the stream, and should be {list(entry.shape)} by"
                " config.json"
            )
        if dtype != entry.dtype:
            raise SourceError(
                f"{name}: is {dtype} in the stream, and should be {entry.dtype}; cast it, or give"
                f" dtypes={{{name!r}: {dtype!r}}}, in which * stands for any text"
            )

    def _compare(self, name: str, digest: bytes) -> None:
        other, first = self._sums.setdefault(self._of[name], (name, digest))
        if first != digest:
            raise SourceError(
                f"{name}: differs from {other}, and config.json says that both are one tensor;"
                " give settings={'tied': False} if they are an output layer and an embedding"
            )


def refuse_url(dst: str | Path) -> None:
    """Raises UsageError for a destination in an object store."""
    if addresses.url_of(dst) is not None:
        raise UsageError(
            f"{dst}: a stream is written to a directory of this machine; write it there, and"
            " convert or copy it to the store"
        )


def run(plan: PlanData, stream: Stream, settings: RunSettings) -> dict[str, Any]:
    """Runs the plan of the directory that the stream would be, and returns the manifest. If it
    fails, nothing is left in the destination.
    """
    root = plan.destination.root
    made = [p for p in (root, *root.parents) if not p.exists()]
    try:
        return Once(plan, settings, "stream", partial(_move, plan, settings, stream)).lead()
    except BaseException as error:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        if isinstance(error, Cancelled):
            raise Cancelled("cancelled; nothing was written") from None
        raise


def _move(plan: PlanData, settings: RunSettings, stream: Stream, data: Path) -> list[str]:
    """Writes the files of the plan into the directory `data`; returns their checksums."""
    copies, sources = plan.joined.copies, plan.transfer.sources
    at = np.ascontiguousarray(copies["src_at"])
    bounds = np.searchsorted(
        np.ascontiguousarray(copies["src_file"]), np.arange(len(sources) + 1)
    ).tolist()
    total = int(sum(s.numel * len(s) * dtypes.itemsize(s.dtype) for s in plan.source.layout.stored))
    done = waiting = 0
    todo: list[np.ndarray] = []
    # half of the memory holds tensors that wait, the other half is for buffers
    most = settings.max_memory // 2

    def tick() -> None:
        if settings.progress is not None:
            settings.progress(Progress(done, total, 0, len(plan.outputs)))

    batches = Batches(plan.transfer, data, replace(settings.copying(), max_memory=most))

    def move() -> None:
        nonlocal done, waiting
        tick()
        if todo:
            moved = np.concatenate(todo)
            batches.do(moved, tick)
            for file in set(moved["src_file"].tolist()):
                size = os.stat(sources[file]).st_size
                os.truncate(sources[file], 0)
                os.truncate(sources[file], size)
        done, waiting = done + waiting, 0
        todo.clear()

    with closing(batches):
        for entry, view in stream:
            first, last = bounds[entry.file : entry.file + 2]
            inside = np.searchsorted(at[first:last], [entry.at, entry.at + len(view)]) + first
            todo.append(copies[slice(*inside.tolist())])
            with open(sources[entry.file], "r+b") as file:
                write_at(file.fileno(), view, entry.at, str(sources[entry.file]))
            waiting += len(view)
            if waiting >= most:
                move()
        move()
        sums = batches.end(tick)
    if settings.progress is not None:
        settings.progress(Progress(total, total, len(sums), len(sums)))
    return sums
