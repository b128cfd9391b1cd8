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

from mckpt.containers import safe_pickle, torch_file, torch_spans
from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Entry, Span, entry_of
from mckpt.containers.torch_file import Ranges
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError
from mckpt.formats import foreign
from mckpt.formats.base import FAMILY, Format
from mckpt.formats.hf_pieces import sizes_of
from mckpt.formats.megatron.chunked import Chunked, Files
from mckpt.formats.megatron.optimizer import MASTER_KEYS
from mckpt.formats.megatron.torch_adam import NOTE, TorchAdam, step_of
from mckpt.geometry.box import Box, range_boxes
from mckpt.mapping import MappingFile
from mckpt.storage.files import opened
from mckpt.values.dtypes import itemsize

STATES = ("fp32", "exp_avg", "exp_avg_sq")
STEP, SETTINGS = "step.pt", "zero/optimizer_state.pt"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "*zero_pp_rank_*_optim_states.pt"
# the files of the experts of a MoE layer of DeepSpeed, and of their optimizer
EXPERTS = ("*expert_*_model_states.pt", "*expp_rank_*_optim_states.pt")
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states\.pt")
CURE = "copy the checkpoint again"
# of a checkpoint that this module does not read
OTHERWISE = (
    "make one that mckpt reads, with DeepSpeed: `ds_to_universal.py --input_folder SRC"
    " --output_folder DST` or `python zero_to_fp32.py . OUT --safe_serialization`"
)

Name = tuple[str, str]  # a state, and the weight that has it


def detect(path: Path) -> bool:
    patterns = ("zero/*/fp32.pt", f"*{MODEL}", OPTIMIZER)
    return any(next(path.glob(pattern), None) for pattern in patterns)


class _Reader:
    """Reads the files of a checkpoint, and collects the parts of its tensors."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # by state and name; the state of what is not trained is ""
        self.parts: dict[Name, list[tuple[str, Entry]]] = {}
        self.shapes: dict[Name, tuple[int, ...]] = {}
        self.settings: list[dict[str, Any]] = []
        self.steps = set[float]()
        self.files: list[str] = []

    def read(self, path: Path) -> tuple[Any, Ranges]:
        """Returns the value of a file, and the places of its storages."""
        if not path.is_file():
            raise SourceError(f"{path}: is not there; {CURE}")
        self.files.append(str(path.relative_to(self.root)))
        with opened(str(path)) as fd:
            return torch_file.read(fd, str(path))

    def dict_of(self, path: Path) -> tuple[dict[str, Any], Ranges]:
        value, data = self.read(path)
        return _dict(value, path), data

    def entry(self, record: Any, data: Ranges, path: Path, what: str) -> Entry:
        """Returns the place of a tensor. Raises SourceError for anything else, and for a view that
        is not dense.
        """
        view = safe_pickle.as_tensor(record)
        entry = view and entry_of(view, data, 0)
        if view is None or entry is None or entry.strides is not None:
            raise SourceError(f"{path}: {what} is not a dense tensor, but {_short(record)}; {CURE}")
        room = sum(data[view.storage]) - entry.at
        if math.prod(entry.shape) * itemsize(entry.dtype) > room:
            raise SourceError(f"{path}: {what} reaches past the end of its storage; {CURE}")
        return entry

    def add(self, name: Name, path: Path, entry: Entry, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape
        self.parts.setdefault(name, []).append((str(path.relative_to(self.root)), entry))

    def universal(self, shapes: list[dict[str, tuple[int, ...]]]) -> None:
        """Collects the tensors of files of one weight each, which are flat after ZeRO 3.

        shapes: of the weights of each group.
        """
        stated = {name: shape for group in shapes for name, shape in group.items()}
        for folder in sorted(p for p in (self.root / "zero").iterdir() if p.is_dir()):
            for state in STATES:
                path = folder / f"{state}.pt"
                value, data = self.read(path)
                value = value.get("param") if isinstance(value, dict) else value
                entry = self.entry(value, data, path, "its tensor")
                flat = len(entry.shape) == 1
                shape = stated.get(folder.name, entry.shape) if flat else entry.shape
                self.add((state, folder.name), path, entry, shape)
            if (folder / STEP).is_file():
                self.steps.add(step_of(*self.read(folder / STEP), str(folder / STEP)))
        path = self.root / SETTINGS
        own, data = self.dict_of(path)
        self._adam(_dict(own.get("optimizer_state_dict", own), path), data, path)

    def _adam(self, base: dict[str, Any], data: Ranges, path: Path) -> dict[Any, Any]:
        """Collects the settings, and the steps that groups and states count; returns the states."""
        groups = _known(base.get("param_groups"), list, path)
        states = _dict(base.get("state", {}), path)
        self.settings += [_dict(group, path) for group in groups]
        for one in (*groups, *(_dict(state, path) for state in states.values())):
            if "step" in one:
                self.steps.add(step_of(one["step"], data, str(path)))
        return states

    def zero(self, shapes: list[dict[str, tuple[int, ...]]]) -> None:
        """Collects the parts of all ranks. shapes: of the weights of each group."""
        ranks = _ranks(self.root, OPTIMIZER)
        for rank, path in enumerate(ranks):
            value, data = self.dict_of(path)
            own = _dict(value.get("optimizer_state_dict"), path)
            counts = own.get("partition_count")
            for count in counts if isinstance(counts, list) else [counts]:
                _refuse_lost([path], len(ranks), count)
            whole = "fp32_flat_groups" in own
            base = own.get("optimizer_state_dict" if whole else "base_optimizer_state")
            flat = own.get("fp32_flat_groups" if whole else "single_partition_of_fp32_groups")
            states = self._adam(_dict(base, path), data, path)
            slices = own.get("param_slice_mappings")
            if whole:
                slices = [_equal(group, rank, len(ranks)) for group in shapes]
            flat, slices = (_known(value, list, path) for value in (flat, slices))
            if not len(flat) == len(slices) == len(shapes) == len(states):
                raise SourceError(f"{path}: its groups are not those of the model; {CURE}")
            for g, ranges in enumerate(slices):
                state = {**_dict(states.get(g), path), "fp32": flat[g]}
                for kind in STATES:
                    all_of = self.entry(state.get(kind), data, path, f"{kind} of group {g}")
                    for name, place in _dict(ranges, path).items():
                        shape = shapes[g].get(name)
                        self._range((kind, str(name)), shape, place, all_of, path)

    def _range(
        self, name: Name, shape: tuple[int, ...] | None, place: Any, whole: Entry, path: Path
    ) -> None:
        """Adds a range of a flat tensor."""
        found = place if isinstance(place, dict) else safe_pickle.fields(place, str(path))
        start, count = found.get("start"), found.get("numel")
        if (
            shape is None
            or not (type(start) is type(count) is int and start >= 0 and count >= 0)
            or start + count > math.prod(whole.shape)
        ):
            raise SourceError(f"{path}: {' of '.join(name)} is not in the range stated; {CURE}")
        at = whole.at + start * itemsize(whole.dtype)
        self.add(name, path, whole._replace(shape=(count,), at=at), shape)

    def untrained(
        self, model: dict[str, Any], data: Ranges, path: Path, rank: int, of: int
    ) -> None:
        """Collects weights that are not trained, of which ranks may have parts, and buffers.

        model: the content of the file of a rank.
        """
        shapes = _shapes(model.get("frozen_param_shapes") or {}, path)
        fragments = _dict(model.get("frozen_param_fragments") or {}, path)
        for name, place in _equal(shapes, rank, of).items():
            entry = self.entry(fragments.get(name), data, path, name)
            self._range(("", name), shapes[name], {**place, "start": 0}, entry, path)
        # by ZeRO 1, weights that are not trained are in the module alone
        module, tied = (_dict(model.get(k) or {}, path) for k in ("module", "shared_params"))
        known = {name for _, name in self.parts} | tied.keys()
        for name in sorted(map(str, module.keys() - known)) if rank == 0 else ():
            view = safe_pickle.as_tensor(module[name])
            if view is not None and 0 not in view.shape:  # ZeRO 3 leaves them empty
                entry = self.entry(module[name], data, path, name)
                self.add(("", name), path, entry, entry.shape)

    def metadata(self) -> tuple[Metadata, list[str]]:
        """Returns the index of all tensors, whose parts are ranges of their elements, and the parts
        of their names that a wrapper added.
        """
        stored = list(dict.fromkeys(name for _, name in self.parts))
        names, wrappers = foreign.unwrapped(stored)
        plain = dict(zip(stored, names, strict=True))
        tensors, items = dict[str, Any](), dict[Any, tuple[str, int, int]]()
        for (state, name), parts in self.parts.items():
            counts = [math.prod(entry.shape) for _, entry in parts]
            kinds = sorted({entry.dtype for _, entry in parts})
            shape = self.shapes[state, name]
            if sum(counts) != math.prod(shape) or len(kinds) > 1:
                raise SourceError(
                    f"{self.root}: {state} of {name} {list(shape)}: its parts, in {parts[0][0]} and"
                    f" others, have {sum(counts):,} elements of {' and '.join(kinds)}; {CURE}"
                )
            starts = itertools.accumulate(counts[:-1], initial=0)
            ranges = [((at,), (count,)) for at, count in zip(starts, counts, strict=True) if count]
            places = [
                (file, entry.at, count * itemsize(entry.dtype))
                for (file, entry), count in zip(parts, counts, strict=True)
                if count
            ]
            for key in _keys(state, plain[name]):
                tensors[key] = (kinds[0], shape, ranges)
                offsets = [(key, offset) for offset, _ in ranges]
                items |= dict(zip(offsets, places, strict=True))
        return Metadata(tensors, [], items, {}), wrappers


def _keys(state: str, name: str) -> list[str]:
    """Returns the keys of a tensor in torch_dist. A weight in fp32 is its own master copy."""
    if state == "fp32":
        return [name, f"optimizer.state.{MASTER_KEYS[0]}.{name}"]
    return [f"optimizer.state.{state}.{name}" if state else name]


def _short(value: Any) -> str:
    return str(safe_pickle.short(value))[:80]


def _shapes(group: Any, path: Path) -> dict[str, tuple[int, ...]]:
    try:
        return {str(name): sizes_of(size) for name, size in _dict(group, path).items()}
    except ValueError as e:
        raise SourceError(f"{path}: {e}; {CURE}") from None


def _known(value: Any, kind: type, path: Path) -> Any:
    """Returns a value that has the kind that DeepSpeed writes."""
    if not isinstance(value, kind):
        raise SourceError(
            f"{path}: has {_short(value)} where DeepSpeed has a {kind.__name__}; {OTHERWISE}"
        )
    return value


def _dict(value: Any, path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = _known(value, dict, path)
    return found


def _equal(group: dict[str, tuple[int, ...]], rank: int, ranks: int) -> dict[str, Any]:
    """Returns the ranges of weights of which each rank has as much."""
    out, start = dict[str, Any](), 0
    for name, shape in group.items():
        numel = math.prod(shape)
        each = -(-numel // ranks)
        out[name] = {"start": start, "numel": max(0, min(each, numel - rank * each))}
        start += each
    return out


def _ranks(root: Path, pattern: str) -> list[Path]:
    """Returns the files of all ranks, in their order. Raises SourceError if one is not there."""
    found = {match: path for path in root.glob(pattern) if (match := _RANK.fullmatch(path.name))}
    if any(int(match[2]) for match in found):
        raise SourceError(
            f"{root}: is of a training by DeepSpeed with tensor parallelism; {OTHERWISE}"
        )
    numbers = {int(match[1]): path for match, path in found.items()}
    if not numbers:
        raise SourceError(
            f"{root}: has no {pattern}, of which ZeRO saves one for each rank; {CURE}. Of a"
            f" training without ZeRO, torch.load(FILE)['module'] of its {MODEL} are the weights:"
            " save them as pytorch_model.bin beside config.json"
        )
    ranks = list(itertools.takewhile(numbers.__contains__, range(len(numbers))))
    _refuse_lost([*found.values()], len(ranks), len(found))
    return [numbers[rank] for rank in ranks]


def _refuse_lost(paths: list[Path], count: int, stated: Any) -> None:
    """Raises SourceError if there are not as many files of ranks, one after the other, as stated.

    paths: of some ranks.
    """
    if stated != count:
        name = re.sub(r"rank_\d+", f"rank_{count}", paths[0].name, count=1)
        raise SourceError(
            f"{paths[0]}: is of a training with {_short(stated)} ranks, or of another one than"
            f" other files; {count} ranks have files, and {name} is not there; {CURE}"
        )


class _Directory(Chunked):
    """The ranges of all tensors, in the files of torch.save."""

    def __init__(self, root: Path) -> None:
        reader = _Reader(root)
        if any(next(root.glob(pattern), None) for pattern in EXPERTS):
            raise SourceError(
                f"{root}: has experts in files of their own, as DeepSpeed's MoE layers are saved,"
                " whose names no model of transformers has; mckpt does not read them"
            )
        paths = [root / MODEL]
        if not paths[0].exists() and any(root.glob(f"zero_pp_rank_*_{MODEL}")):
            paths = _ranks(root, f"zero_pp_rank_*_{MODEL}")  # by ZeRO 3
        models = [reader.dict_of(path) for path in paths]
        model, path = models[0][0], paths[0]
        if path.name != MODEL:
            _refuse_lost(paths, len(paths), model.get("dp_world_size"))
        shapes = [_shapes(group, path) for group in _known(model.get("param_shapes"), list, path)]
        if (root / "zero").is_dir():
            reader.universal(shapes)
        else:
            reader.zero(shapes)
        stated = {name for group in shapes for name in group}
        if lost := sorted(name for name in stated if ("fp32", name) not in reader.shapes):
            what = f"{root}: has no file of weights whose names are in {path.name}:"
            raise SourceError.of(what, lost, f"{CURE[0].upper()}{CURE[1:]}")
        for rank, (own, data) in enumerate(models):
            reader.untrained(own, data, paths[rank], rank, len(models))
        steps = model.get("global_steps")
        self.iteration = steps if type(steps) is int else None
        self.settings, self.steps, self.every = reader.settings, reader.steps, reader.files
        metadata, wrappers = reader.metadata()
        super().__init__(root, metadata)
        read = (f"the names of the tensors are read without {part}" for part in wrappers)
        self.notes = (NOTE, *read)

    def check_sizes(self) -> None:
        """Does nothing, because the directory of each file is read, and lies at its end."""

    def place(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], files: Files
    ) -> tuple[int, int]:
        file, at, _ = self.metadata.items[key, offsets]
        return self.number[file], at

    def _boxes(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Box]:
        whole = self.metadata.tensors[key][1]
        return range_boxes(whole, offsets[0], offsets[0] + sizes[0])

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        """Returns the records and tensors of all files."""
        yield from torch_spans.spans([Item(str(self.root / file)) for file in self.every], problems)


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
