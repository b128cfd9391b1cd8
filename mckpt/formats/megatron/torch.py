"""Megatron's `torch` format: one model_optim_rng.pt for each tensor, pipeline and expert rank.

    iter_0000123/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt
        {args, checkpoint_version, iteration, model | model0..N: {key: shard}}

Layer and expert numbers in keys are local to the file (and to its virtual stage); shards of tensor
parallelism are whole tensors. The models from before megatron-core are dicts of dicts; their keys
are joined with dots. A file of one rank may also lie in the directory itself.

NeMo 1 writes model_weights.ckpt, the state dict alone with keys that begin with `model.`, and names
the directories of a pipeline tp_rank_TT_pp_rank_PPP.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle, torch_file, torch_spans
from mckpt.containers.entries import Entry, Span, entry_of
from mckpt.containers.torch_file import Ranges
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError
from mckpt.formats import foreign
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
from mckpt.formats.megatron.chunked import unwrapped
from mckpt.formats.megatron.interface import Common, has_tensors
from mckpt.formats.megatron.optimizer import (
    LAYER_WISE,
    Optimizer,
    buckets,
    layer_wise,
    torch_reading,
)
from mckpt.formats.megatron.torch_shards import (
    FILE,
    FILES,
    OPTIMIZER,
    Shard,
    axes,
    directories,
    instances,
    places,
    shards,
)
from mckpt.formats.megatron.torch_writing import lay_out
from mckpt.geometry.box import Layout, Stored, row_major
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound, MappingFile
from mckpt.storage.files import opened
from mckpt.values.dtypes import itemsize

CHOICES = {"keys": ("local",)}  # of the dialects
# of the files, of which a checkpoint has those of one pattern
_PATTERNS = ("mp_rank_*/*.pt", "?p_rank_*/*.ckpt", "*.pt", "*.ckpt")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ADAPTER = "_adapter.pt"  # ends the name of a rank's file with adapters, of verl
_NEMO_RANK = re.compile(r"tp_rank_(\d{2,})_pp_rank_(\d{3,})")
_MAX_DEPTH = 8  # of dicts in a model; Megatron-LM has 4


def detect(path: Path) -> bool:
    ranks = any(path.glob("mp_rank_0*")) or any(path.glob("tp_rank_0*"))
    return ranks or _file_in(path) is not None


def _file_in(directory: Path) -> Path | None:
    """Returns the file with the weights of a rank; None without one."""
    return next((directory / name for name in FILES if (directory / name).is_file()), None)


class Rank(NamedTuple):
    """The content of one file."""

    # for each virtual stage, the tensors by key; None: an object, not a tensor
    models: list[dict[str, Entry | None]]
    beside: list[str]  # keys of the file that belong to no model


class Torch:
    """An opened `torch` checkpoint.

    The pickle of rank 0 is read at once, those of the other ranks when their tensors are needed.
    """

    quantised, notes = False, ()

    def __init__(self, path: Path) -> None:
        self.format = FORMAT
        self.root = path
        # Until 2022, Megatron-LM kept the distributed optimizer of each rank in a directory of its
        # own, which has an `optim.pt` and no weights.
        found = [p.name for p in path.iterdir() if p.is_dir() and os.listdir(p) != [OPTIMIZER]]
        # by Megatron's name of each
        self._stored = {_NEMO_RANK.sub(r"mp_rank_\1_\2", name): name for name in found}
        files = [p.name for p in path.glob(f"mp_rank_*{_ADAPTER}")]
        self._stored |= {name.removesuffix(_ADAPTER): name for name in files}
        self.directories = sorted(filter(_RANK.fullmatch, self._stored))
        self.alone = not self.directories and _file_in(path) is not None
        if self.alone:
            self.directories = [Parallel().directory(0, 0, 0)]
        if not self.directories:
            raise SourceError(f"{path}: has no mp_rank_* directories")
        self.files: list[str] = []
        self._ranks: dict[str, Rank] = {}
        self._pickles = (
            torch_file.TorchFileReader()
        )  # ranks of one stage mostly have the same pickle
        first = self.directories[0]
        fields = self._read(first)
        beside = set(self._ranks[first].beside)
        named = {key: value for key, value in fields.items() if key in beside}
        self.common = Common(named, self.files[0])
        self.vpp = len(self._ranks[first].models)

    def parallel(self) -> Parallel:
        """Returns the sizes of its args, else those that the names of its directories show."""
        args = self.common.args
        if args and args.get("tensor_model_parallel_size"):
            return self.common.parallel()
        found = [_RANK.fullmatch(d) for d in self.directories]
        ranks = [[int(x) for x in m.groups() if x is not None] for m in found if m]
        tp, *more = [1 + max(axis) for axis in itertools.zip_longest(*ranks, fillvalue=0)]
        if not more:
            return Parallel(tp=tp)
        if len(more) == 1:  # pipeline or expert ranks; each expert rank has the embedding
            last = self._rank(self.directories[-1])
            common = set(self._rank(self.directories[0]).models[0]) & set().union(*last.models)
            if any("embedding" in key for key in common):
                return Parallel(tp=tp, ep=more[0])
        return Parallel(tp, more[0], self.vpp, ep=more[1] if len(more) > 1 else 1)

    def keys(self) -> list[str]:
        """Returns the keys of the last rank and of a rank of each pipeline stage."""
        stages = {tuple(name.split("_")[3:4]): name for name in reversed(self.directories)}
        chosen = sorted({*stages.values(), self.directories[-1]})
        return [key for name in chosen for model in self._rank(name).models for key in model]

    def stages(self, parallel: Parallel) -> list[list[dict[str, tuple[int, ...]]]]:
        """Returns the shapes of the tensors of one rank of each [pipeline rank][virtual stage], by
        key.
        """
        ranks = (self._rank(parallel.directory(0, p, 0)) for p in range(parallel.pp))
        return [
            [{key: e.shape for key, e in model.items() if e is not None} for model in rank.models]
            for rank in ranks
        ]

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        """Rows of the embedding over all ranks, padding included. Without an embedding, as in a
        checkpoint of adapters alone, those that the args state.
        """
        entry = self._rank(self.directories[0]).models[0].get(mapping.vocabulary.key)
        if entry is None:
            stated = (self.common.args or {}).get("padded_vocab_size")
            return stated if isinstance(stated, int) else None
        return entry.shape[0] * self.parallel().tp

    def beside(self, dialect: MappingFile) -> list[str]:
        """Returns the keys of everything but the weights: optimizer, random states, and other
        values made of tensors (averaged weights).
        """
        fields = self.common.fields
        named = {
            k: fields[k] not in (None, [], {}) and (k in dialect.ignore or has_tensors(fields[k]))
            for k in self._ranks[self.directories[0]].beside
        }
        out = [k for k, counts in named.items() if counts]
        first = self.root / self.directories[0]
        files = (torch_reading.FILE, LAYER_WISE)
        return out + [name for name in files if any(first.glob(name))]

    def show(self, most: int | None) -> Shown:
        """Returns the tensors of the first rank; with virtual stages, `modelN/` precedes a key."""
        models = self._rank(self.directories[0]).models
        rows = [
            (f"model{v}/{key}" if len(models) > 1 else key, e.dtype, e.shape, dict[str, Any]())
            for v, model in enumerate(models)
            for key, e in model.items()
            if e is not None
        ]
        count = len(self.directories)
        shown = f"tensors of {self.directories[0]}, one of {count} ranks"
        kinds = Counter((dtype, shape) for _, dtype, shape, _ in rows)
        return Shown({"files": count, "shown": shown}, rows[:most], kinds)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        """Returns the records and tensors of the files of all ranks."""
        paths = next(filter(None, (sorted(self.root.glob(p)) for p in _PATTERNS)), [])
        return torch_spans.spans((Item(str(p)) for p in paths), problems, keep="model")

    def choices(self, names: Names) -> dict[str, Any]:
        """Returns the dialect's choices of this checkpoint: those whose keys fit one rank of each
        stage best.
        """
        parallel = names.parallel
        stored = {
            (p, v, key)
            for p in range(parallel.pp)
            if parallel.directory(0, p, 0) in self.directories
            for v, model in enumerate(self._rank(parallel.directory(0, p, 0)).models)
            for key, entry in model.items()
            if entry is not None
        }

        def mismatch(chosen: Names) -> int:
            bound, stages = chosen.bound, chosen.stages()
            wanted = {
                (p, v, key)
                for p in range(parallel.pp)
                for b in bound
                for v, _, _, key in instances(b, stages[p], p, parallel, names.dims, 0)
            }
            return len(wanted ^ stored)

        return best_choices(names, {**names.mapping.choices, **CHOICES}, mismatch)

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes, as `Opened.layout`."""
        dialect, dims, parallel = names.mapping, names.dims, names.parallel
        problems = Problems(f"the files of {self.root} do not match its args ({parallel}):")
        grid = self._grid(names, problems)
        scope, bound = names.scope(), names.bound
        padded = self.padded_vocab(dialect)
        if padded is not None and padded < dims["vocab_size"]:
            problems.missing(
                f"{dialect.vocabulary.key}: {padded} rows over all ranks, fewer than vocab_size"
                f" {dims['vocab_size']}"
            )
        left = {
            d: [
                dict.fromkeys(k for k, e in m.items() if e is not None)
                for m in self._rank(d).models
            ]
            for d in directories(parallel, grid)
        }
        for directory, models in left.items():
            if len(models) != parallel.vpp:
                problems.missing(
                    f"{directory} holds {len(models)} models, and vpp is {parallel.vpp}"
                )
        problems.check()
        stored: list[Stored] = []
        for b in bound:
            for shard in shards(b, packed(b.rule, scope, padded), parallel, grid):
                if found := self._found(b, shard, names, left, problems):
                    stored += group(
                        b.rule.key,
                        shard.shape,
                        shard.pieces,
                        found,
                        problems,
                        replica=shard.replica,
                        padding=b.rule.tp == "vocab",
                        carried=b.rule.carried,
                    )
        unknown = ((k, f"{d}: {k}") for d, models in left.items() for m in models for k in m)
        problems.unknown(unknown, dialect.path.name)
        problems.check()
        return Layout(
            self.files,
            stored,
            shapes_of(bound, scope),
            dict.fromkeys(self.beside(dialect), "not weights"),
        )

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none."""
        files = list(self.files)

        def contents(directory: str, name: str) -> torch_reading.Contents | None:
            path = str(self.root / directory / name)
            if not os.path.exists(path):
                return None
            if path not in files:
                files.append(path)
            return torch_reading.Contents(*self._parse(path), files.index(path), path)

        args = self.common.args or {}
        grid = self._grid(names, Problems(f"the files of {self.root} do not match its args:"))
        rows = self.padded_vocab(names.mapping)
        source = torch_reading.Source(
            names,
            grid,
            rows,
            lambda d: self._rank(d).models,
            contents,
            files,
            str(self.root),
            buckets.bucket_size(args),
        )
        if dealt := layer_wise.files(self.root, self.directories):
            return layer_wise.read(source, dealt, args)
        return torch_reading.read(source, args)

    def _grid(self, names: Names, problems: Problems) -> list[tuple[int, int]]:
        """Returns the tensor and expert ranks that have a file in each pipeline stage.

        Raises `problems` if the directories are not those of the parallel sizes.
        """
        parallel, present = names.parallel, set(self.directories)
        experts = bool(names.dims["num_experts"])
        grids = (parallel.files(experts, saved) for saved in (False, True))
        fit = next((grid for grid in grids if set(directories(parallel, grid)) == present), None)
        grid = parallel.files(experts) if fit is None else fit
        wanted = directories(parallel, grid)
        for name in wanted:
            if name not in present:
                problems.missing(f"{name} is missing")
        problems.extend(
            f"{name} belongs to no rank of these sizes"
            for name in self.directories
            if name not in wanted
        )
        problems.damaged = bool(problems)
        problems.check()
        return grid

    def _found(
        self,
        b: Bound,
        shard: Shard,
        names: Names,
        left: dict[str, list[dict[str, None]]],
        problems: Problems,
    ) -> list[tuple[int, int, Entry]]:
        """Returns the entries of one shard of a rule in all files: (layer, expert, entry).

        Takes their keys out of `left`, which has them for each directory and virtual stage. What is
        missing or of another shape becomes one of `problems`.
        """
        found: list[tuple[int, int, Entry]] = []
        stack = axes(b, names.parallel, names.dims)
        whole = (*stack, *shard.shape)
        for _, directory, v, layer, expert, key in places(b, shard, names):
            entry = self._rank(directory).models[v].get(key)
            left[directory][v].pop(key, None)
            if entry is None:
                if not b.rule.alias:
                    problems.missing(f"{directory}: {key} is missing; it should be {list(whole)}")
            elif entry.shape != whole:
                problems.missing(
                    f"{directory}: {key} is {list(entry.shape)}, and should be"
                    f" {list(whole)} by its dims"
                )
            else:
                found.append((layer, expert, _part(entry, expert % stack[0]) if stack else entry))
        return found

    # ---- files

    def _rank(self, directory: str) -> Rank:
        if directory not in self._ranks:
            self._read(directory)
        return self._ranks[directory]

    def _read(self, directory: str) -> dict[str, Any]:
        path = self._path(directory)
        if not os.path.exists(path):
            missing = (
                f"has no {FILE}"
                if os.path.isdir(self.root / directory)
                else f"is missing; there are {', '.join(self.directories[:20])}"
            )
            raise SourceError(f"{self.root / directory}: {missing}")
        value, data = self._parse(path)
        if not isinstance(value, dict):
            raise SourceError(f"{path}: holds {safe_pickle.short(value)}, not a dict")
        if "adapter_state_dict" in value:  # verl
            value = {"model": value["adapter_state_dict"]}
        if value and all(isinstance(k, str) and k.startswith("model.") for k in value):  # NeMo
            value = {"model": {unwrapped(key): found for key, found in value.items()}}
        names = (
            ["model"]
            if "model" in value
            else [f"model{i}" for i in range(len(value)) if f"model{i}" in value]
        )
        if not names:
            raise SourceError(
                f"{path}: has no `model`; its keys are {', '.join(map(str, list(value)[:20]))}"
            )
        number = len(self.files)
        self.files.append(path)
        models: list[dict[str, Entry | None]] = []
        for name in names:
            model: dict[str, Entry | None] = {}
            if not isinstance(value[name], dict):
                raise SourceError(
                    f"{path}: {name} holds {safe_pickle.short(value[name])}, not a state dict"
                )
            for stored_key, record in _flat(value[name]):
                key = foreign.without_adapter(stored_key)
                view = safe_pickle.as_tensor(record)
                if view is None and not key.endswith("_extra_state"):
                    raise SourceError(
                        f"{path}: {name}: {key!r} is not a tensor but {safe_pickle.short(record)}"
                    )
                model[key] = (
                    None
                    if view is None or key.endswith("_extra_state")
                    else entry_of(view, data, number)
                )
            models.append(model)
        beside = [key for key in value if isinstance(key, str) and key not in names]
        self._ranks[directory] = Rank(models, beside)
        return value

    def _path(self, directory: str) -> str:
        """Returns the path of the file with the weights of a rank, which may be missing."""
        stored = self._stored.get(directory, directory)
        if stored.endswith(_ADAPTER):
            return str(self.root / stored)
        folder = self.root if self.alone else self.root / stored
        return str(_file_in(folder) or folder / FILE)

    def _parse(self, path: str) -> tuple[Any, Ranges]:
        with opened(path) as fd:
            return self._pickles.read(fd, path)


def _part(entry: Entry, number: int) -> Entry:
    """Returns a part of a buffer along its first axis, by its number."""
    strides = entry.strides or row_major(entry.shape)
    skipped = number * strides[0] * itemsize(entry.dtype)
    inner = None if entry.strides is None else strides[1:]
    return entry._replace(shape=entry.shape[1:], at=entry.at + skipped, strides=inner)


def _flat(model: dict[Any, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a state dict and their values. The names of dicts in dicts are joined."""
    for name, value in model.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and depth < _MAX_DEPTH and not key.endswith("_extra_state"):
            yield from _flat(value, f"{key}.", depth + 1)
        else:
            yield key, value


FORMAT = Format(
    "torch",
    "mp_rank_*",
    megatron=True,
    detect=detect,
    open=Torch,
    lay_out=lay_out,
    parts=("mp_rank_*/model_optim_rng.pt", "mp_rank_*/distrib_optim.pt"),
    fixed_sizes=True,
    optimizer=True,
)
