"""The checkpoints of DeepSpeed, in the names of Hugging Face. They are only read.

    global_stepN/                                     as a training by ZeRO saves it
      mp_rank_00_model_states.pt                      its count of steps, the shapes of the weights;
                                                      zero_pp_rank_R_mp_rank_00_... by ZeRO 3
      [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's part of the fp32 weights, and of
                                                      the state of Adam
    global_stepN_universal/                           as ds_to_universal.py writes it
      zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt     one weight
      zero/optimizer_state.pt                         the settings of Adam

ZeRO flattens the weights of a group. By ZeRO 1 and 2 each rank has a range of that, which may begin
and end inside of a weight; the file states the range of each weight (`param_slice_mappings`). By
ZeRO 3 each rank has an equal range of each weight, the last one filled up:

    ZeRO 1, 2    rank 0 | a a a a b b |    rank 1 | b b c c c - |
    ZeRO 3       rank 0 | a a b b c c |    rank 1 | a a b b c - |

So a weight is its parts in the order of the ranks. They are read as a `torch_dist` whose weights
are their own master copies, as those of torchtitan.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mckpt.containers import torch_file, torch_spans
from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Entry, Span, entry_of
from mckpt.containers.safe_pickle import as_tensor, fields, short
from mckpt.containers.torch_spans import Item
from mckpt.errors import PickleError, SourceError
from mckpt.formats import foreign
from mckpt.formats.base import FAMILY, Format
from mckpt.formats.hf_pieces import sizes_of
from mckpt.formats.megatron.chunked import Chunked
from mckpt.formats.megatron.torch_adam import NOTE, TorchAdam, adam_of, step_of, with_masters
from mckpt.geometry.box import Box, range_boxes
from mckpt.mapping import MappingFile
from mckpt.storage.files import opened
from mckpt.values.dtypes import itemsize

STATES = ("fp32", "exp_avg", "exp_avg_sq")
STEP, SETTINGS = "step.pt", "zero/optimizer_state.pt"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "*zero_pp_rank_*_optim_states.pt"
FLAT = "single_partition_of_fp32_groups"  # the key of a rank's parts by ZeRO 1 and 2
MODELS = f"zero_pp_rank_*_{MODEL}"  # by ZeRO 3
# the files of the experts of a MoE layer of DeepSpeed, and of their optimizer
EXPERTS = ("*expert_*_model_states.pt", "*expp_rank_*_optim_states.pt")
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states\.pt")
CURE = "copy the checkpoint again"
# of a checkpoint that this module does not read
OTHERWISE = (
    "make one that mckpt reads, with DeepSpeed: `ds_to_universal.py --input_folder SRC"
    " --output_folder DST` or `python zero_to_fp32.py . OUT --safe_serialization`"
)

# the name of a state and of its weight; the state of a weight that is not trained is ""
Name = tuple[str, str]
Shapes = dict[str, tuple[int, ...]]  # of weights
Range = tuple[Any, Any]  # the first element in a flat tensor, and the number of elements


def detect(path: Path) -> bool:
    patterns = ("zero/*/fp32.pt", f"*{MODEL}", OPTIMIZER)
    return any(next(path.glob(pattern), None) for pattern in patterns)


class _File:
    """A file of torch.save, of which the tensors are not read. The methods raise SourceError for a
    value that DeepSpeed does not write.
    """

    def __init__(self, path: Path, number: int) -> None:
        if not path.is_file():
            raise SourceError(f"{path}: is not there; {CURE}")
        self.path, self.number = path, number
        with opened(str(path)) as fd:
            self.value, self.data = torch_file.read(fd, str(path))
            saved_as = torch_file.stem_of(fd)
        # nothing else in a file shows the rank or the state of its elements
        if _content(saved_as) not in (None, _content(path.stem)):
            raise self.error(f"was saved as {saved_as}.pt, and so is of another rank or state")

    def error(self, text: str) -> SourceError:
        return SourceError(f"{self.path}: {text}; {CURE}")

    def known(self, value: Any, kind: type = dict) -> Any:
        """Returns a value of this type."""
        if not isinstance(value, kind):
            raise SourceError(
                f"{self.path}: has {short(value)} where DeepSpeed has a {kind.__name__};"
                f" {OTHERWISE}"
            )
        return value

    def shapes(self, group: Any) -> Shapes:
        try:
            return {str(name): sizes_of(size) for name, size in self.known(group).items()}
        except ValueError as e:
            raise self.error(f"{e}") from None

    def entry(self, record: Any, what: str) -> Entry:
        """Returns the place of a tensor, which is dense. what: names it in an error."""
        try:
            view = as_tensor(record)
        except PickleError as e:
            raise self.error(f"{what}: {e}") from None
        entry = view and entry_of(view, self.data, self.number)
        if entry is None or entry.strides is not None:
            raise self.error(f"{what} is not a dense tensor, but {short(record)}")
        return entry


class _Directory(Chunked):
    """The ranges of all tensors, in the files of torch.save."""

    def __init__(self, root: Path) -> None:
        if any(next(root.glob(pattern), None) for pattern in EXPERTS):
            raise SourceError(
                f"{root}: has experts in files of their own, as DeepSpeed's MoE layers are saved,"
                " whose names no model of transformers has; mckpt does not read them"
            )
        self.root = root
        self.every: list[Path] = []  # all files; an Entry has the number of one of them
        self.parts: dict[Name, list[Entry]] = {}  # flat
        self.sizes: dict[Name, tuple[int, ...]] = {}
        self.settings: list[dict[str, Any]] = []
        self.steps = set[float]()
        zero3 = not (root / MODEL).exists() and any(root.glob(MODELS))
        paths = _ranks(root, MODELS) if zero3 else [root / MODEL]
        models = [self._read(path) for path in paths]
        model = (first := models[0]).known(first.value)
        if zero3:
            _refuse_lost(paths, model.get("dp_world_size"), first.path)
        shapes = [first.shapes(group) for group in first.known(model.get("param_shapes"), list)]
        if (root / "zero").is_dir():
            self._universal({name: shape for group in shapes for name, shape in group.items()})
        else:
            self._zero(shapes)
        if lost := sorted({n for group in shapes for n in group if ("fp32", n) not in self.parts}):
            what = f"{root}: has no file of weights whose names are in {first.path.name}:"
            raise SourceError.of(what, lost, CURE.capitalize())
        for rank, file in enumerate(models):
            self._untrained(file, rank, len(models))
        steps = model.get("global_steps")
        self.iteration = steps if type(steps) is int else None
        names, wrappers = foreign.unwrapped(list(dict.fromkeys(n for _, n in self.parts)))
        read = (f"the names of the tensors are read without {part}" for part in wrappers)
        self.notes = (NOTE, *read)
        super().__init__(root, self._as_torch_dist(names))

    # ------------------------------------------------------------------------------- collecting

    def _read(self, path: Path) -> _File:
        self.every.append(path)
        return _File(path, len(self.every) - 1)

    def _universal(self, shapes: Shapes) -> None:
        """Collects the tensors of files of one weight each, which are flat after ZeRO 3."""
        for folder in sorted(p for p in (self.root / "zero").iterdir() if p.is_dir()):
            for state in STATES:
                file = self._read(folder / f"{state}.pt")
                value = file.value.get("param") if isinstance(file.value, dict) else file.value
                entry = file.entry(value, "its tensor")
                flat = len(entry.shape) == 1
                shape = shapes.get(folder.name, entry.shape) if flat else entry.shape
                self._add((state, folder.name), shape, entry)
            if (folder / STEP).is_file():
                file = self._read(folder / STEP)
                self.steps.add(step_of(file.value, file.data, str(file.path)))
        file = self._read(self.root / SETTINGS)
        own = file.known(file.value)
        self._adam(file, own.get("optimizer_state_dict", own))

    def _adam(self, file: _File, base: Any) -> tuple[dict[Any, Any], set[float]]:
        """Collects the settings, and the steps that groups and states count; returns the states and
        these steps.
        """
        groups, states, counted = adam_of(base, file.data, str(file.path), OTHERWISE)
        self.settings += groups
        self.steps |= (steps := set(counted))
        return states, steps

    def _zero(self, shapes: list[Shapes]) -> None:
        """Collects the parts of all ranks. shapes: of the weights of each group."""
        paths = _ranks(self.root, OPTIMIZER)
        for rank, file in enumerate(map(self._read, paths)):
            own = file.known(file.known(file.value).get("optimizer_state_dict"))
            counts = own.get("partition_count")
            for count in counts if isinstance(counts, list) else [counts]:
                _refuse_lost(paths, count, file.path)
            if "fp32_flat_groups" in own:  # by ZeRO 3
                base, flat = own.get("optimizer_state_dict"), own["fp32_flat_groups"]
                ranges = [_equal(group, rank, len(paths)) for group in shapes]
            else:
                base, flat = own.get("base_optimizer_state"), own.get(FLAT)
                slices = file.known(own.get("param_slice_mappings"), list)
                ranges = [{n: _range(p, file) for n, p in file.known(s).items()} for s in slices]
            states, steps = self._adam(file, base)
            if steps != self.steps:
                counts = ", ".join(f"{step:g}" for step in sorted(self.steps))
                raise file.error(f"counts other steps than the other ranks, {counts} in all")
            if not len(file.known(flat, list)) == len(ranges) == len(shapes) == len(states):
                raise file.error("its groups are not those of the model")
            for g, own_ranges in enumerate(ranges):
                state = {**(states.get(g) or {}), "fp32": flat[g]}
                for kind in STATES:
                    whole = file.entry(state.get(kind), f"{kind} of group {g}")
                    for name, place in own_ranges.items():
                        self._add((kind, str(name)), shapes[g].get(name), whole, place)

    def _untrained(self, file: _File, rank: int, ranks: int) -> None:
        """Collects weights that are not trained, of which ranks may have parts, and buffers.

        file: of the model, by a rank.
        """
        model = file.known(file.value)
        shapes = file.shapes(model.get("frozen_param_shapes") or {})
        fragments = file.known(model.get("frozen_param_fragments") or {})
        for name, (_, count) in _equal(shapes, rank, ranks).items():
            whole = file.entry(fragments.get(name), name)
            self._add(("", name), shapes[name], whole, (0, count))
        # by ZeRO 1, weights that are not trained are in the module alone
        module, tied = (file.known(model.get(k) or {}) for k in ("module", "shared_params"))
        known = {name for _, name in self.parts} | tied.keys()
        for name in sorted(map(str, module.keys() - known)) if rank == 0 else ():
            view = as_tensor(module[name])
            if view is not None and 0 not in view.shape:  # ZeRO 3 leaves them empty
                self._add(("", name), view.shape, file.entry(module[name], name))

    def _add(
        self, name: Name, shape: tuple[int, ...] | None, whole: Entry, place: Range | None = None
    ) -> None:
        """Adds the next elements of a tensor, which are a range of a flat one, or all of it."""
        numel = math.prod(whole.shape)
        start, count = place or (0, numel)
        if (
            shape is None
            or not type(start) is type(count) is int
            or not 0 <= start <= start + count <= numel
        ):
            path = self.every[whole.file]
            raise SourceError(f"{path}: {' of '.join(name)} is not in the range stated; {CURE}")
        self.sizes[name] = shape
        if count:
            at = whole.at + start * itemsize(whole.dtype)
            part = whole._replace(shape=(count,), at=at)
            self.parts.setdefault(name, []).append(part)

    def _as_torch_dist(self, names: list[str]) -> Metadata:
        """Returns the index of all tensors, whose chunks are ranges of their elements.

        names: those of the weights without the parts that a wrapper added.
        """
        plain = dict(zip(dict.fromkeys(name for _, name in self.parts), names, strict=True))
        tensors, items = dict[str, Any](), dict[Any, tuple[str, int, int]]()
        files = [str(path.relative_to(self.root)) for path in self.every]
        for (state, name), parts in self.parts.items():
            *starts, end = itertools.accumulate((part.shape[0] for part in parts), initial=0)
            kinds, shape = sorted({part.dtype for part in parts}), self.sizes[state, name]
            if end != math.prod(shape) or len(kinds) > 1:
                raise SourceError(
                    f"{self.root}: {state} of {name} {list(shape)}: its parts, in"
                    f" {files[parts[0].file]} and others, have {end:,} elements of"
                    f" {' and '.join(kinds)}; {CURE}"
                )
            ranges = [((at,), part.shape) for at, part in zip(starts, parts, strict=True)]
            key = plain[name] if state in ("", "fp32") else f"optimizer.state.{state}.{plain[name]}"
            tensors[key] = (kinds[0], shape, ranges)
            for (offset, (count,)), part in zip(ranges, parts, strict=True):
                items[key, offset] = (files[part.file], part.at, count * itemsize(part.dtype))
        trained = {plain[name] for state, name in self.parts if state == "fp32"}
        return with_masters(Metadata(tensors, [], items, {}), trained)

    # ----------------------------------------------------------------------- reading, as Chunked

    def _boxes(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Box]:
        whole = self.metadata.tensors[key][1]
        return range_boxes(whole, offsets[0], offsets[0] + sizes[0])

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        """Returns the records and tensors of all files."""
        yield from torch_spans.spans((Item(str(path)) for path in self.every), problems)


def _content(stem: str) -> tuple[str, ...] | None:
    """Returns the ranks or the state in a file of this name; None for other names."""
    found = _RANK.fullmatch(f"{stem}.pt")
    return found.groups() if found else (stem,) if stem in STATES else None


def _range(place: Any, file: _File) -> Range:
    found = fields(place, str(file.path))
    return found.get("start"), found.get("numel")


def _equal(shapes: Shapes, rank: int, ranks: int) -> dict[str, Range]:
    """Returns the ranges of weights of which each rank has as much."""
    out, start = dict[str, Range](), 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        each = -(-numel // ranks)
        out[name] = start, max(0, min(each, numel - rank * each))
        start += each
    return out


def _ranks(root: Path, pattern: str) -> list[Path]:
    """Returns the files of all ranks, in their order."""
    found = {match: path for path in root.glob(pattern) if (match := _RANK.fullmatch(path.name))}
    if any(int(match[2]) for match in found):
        raise SourceError(
            f"{root}: is of a training by DeepSpeed with tensor parallelism; {OTHERWISE}"
        )
    if not found:
        raise SourceError(
            f"{root}: has no {pattern}, of which ZeRO saves one for each rank; {CURE}. Of a"
            f" training without ZeRO, torch.load(FILE)['module'] of its {MODEL} are the weights:"
            " save them as pytorch_model.bin beside config.json"
        )
    return [found[match] for match in sorted(found, key=lambda match: int(match[1]))]


def _refuse_lost(paths: list[Path], stated: Any, by: Path) -> None:
    """Raises SourceError if files, in the order of their ranks, are not those of all ranks.

    stated: the number of ranks, as the file `by` states it.
    """
    there = [int(match[1]) for path in paths if (match := _RANK.fullmatch(path.name))]
    if stated != len(there) or there != [*range(len(there))]:
        lost = next(n for n in itertools.count() if n not in there)
        name = re.sub(r"rank_\d+", f"rank_{lost}", by.name, count=1)
        raise SourceError(
            f"{by}: is of a training with {short(stated)} ranks, or of another one than other"
            f" files; {len(there)} ranks have files, and {name} is not there; {CURE}"
        )


class DeepSpeed(TorchAdam):
    """An opened checkpoint of DeepSpeed."""

    def __init__(self, path: Path) -> None:
        self.saved = _Directory(path)
        self.iteration = self.saved.iteration
        super().__init__(self.saved, FORMAT)

    def settings(self) -> tuple[list[dict[str, Any]], set[float]]:
        return self.saved.settings, self.saved.steps

    def padded_vocab(self, mapping: MappingFile) -> None:
        """Returns None, because there is no padding here."""

    def beside(self, dialect: MappingFile) -> list[str]:
        """Returns the names of what is stored beside the weights."""
        return ["optimizer"]


FORMAT = Format(
    "deepspeed",
    "zero/NAME/fp32.pt or zero_pp_rank_*_optim_states.pt of DeepSpeed",
    megatron=True,
    detect=detect,
    open=DeepSpeed,
    parts=(f"*{MODEL}", OPTIMIZER, "zero/*"),
    trainer=FAMILY,
    torch_optimizer=True,
    global_keys=True,
)
