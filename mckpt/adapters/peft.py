"""Reads the adapter directories of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mckpt.checkpoint.files import refuse_parent
from mckpt.containers import safetensors
from mckpt.containers.entries import Entries, Kind
from mckpt.errors import SourceError
from mckpt.formats import places
from mckpt.formats.hf_config import ADAPTER, parse_config
from mckpt.formats.hf_files import read_bin
from mckpt.geometry.box import row_major
from mckpt.lazy import numpy as np
from mckpt.mapping.nodes import FOLDER, Node, parse
from mckpt.mapping.patterns import Pattern, PatternError, pattern
from mckpt.options import AdapterOptions
from mckpt.storage.descriptors import pread
from mckpt.storage.files import opened
from mckpt.values.adding import FACTORS, Factor

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OF_EXPERT = re.compile(r"\.\d+(\.\w+)$")  # its number, and the end of its module's name
ROLES = ("a", "b", "magnitude", "bias")  # of a tensor of an adapter
NOT_FINITE = (
    "has tensors with values that are not finite in float32, with which whole rows or columns of"
    " the weights would not be finite either:",
    "The training diverged or the file is damaged; take an earlier save of it.",
)
BLOCK_NUMEL = 1 << 20  # values that are checked at a time
KIND = ("name", "rank", "stored_rank", "scale", "dtype", "modules")  # of modules that are alike
LARGEST = 2**31  # alpha and rank, so that scales are finite in float32


@functools.cache
def rules() -> Node:
    return parse(FOLDER / "adapters.yaml")[0]


@functools.cache
def _ends() -> re.Pattern[str]:
    """Returns an expression for the end of the key of an adapter's tensor, with its role."""
    ends: Mapping[str, list[str]] = rules()["peft"]["ends"]
    named = (f"(?P<{role}>{'|'.join(map(_pattern, ends[role]))})" for role in ROLES)
    return re.compile(rf"\.({'|'.join(named)})$")


@functools.cache
def _inside() -> re.Pattern[str]:
    """Returns an expression for the parts of a key that stand between a module and its weight."""
    return re.compile(rf"\.(?:{'|'.join(map(_pattern, rules()['peft']['inside']))})(?=\.)")


def _pattern(text: str) -> str:
    return re.escape(text).replace(r"\{name\}", r"[^.]+")


AS_STORED = AdapterOptions()  # as the files state it


@dataclass(frozen=True)
class PeftAdapter:
    """The adapter in a directory of PEFT. Opening it reads only the headers.

    Keys are those of the base: without the prefix of PEFT.
    """

    path: Path
    config: Mapping[str, Any]
    files: list[str]
    entries: Entries
    # module -> role -> row of `entries`; the module may have parts named `inside`
    modules: Mapping[str, Mapping[str, int]]
    whole: Mapping[str, int]  # key of a tensor that replaces one of the base -> row of `entries`
    made_of: tuple[str, ...] = ()  # the files of which temporary `files` were made
    experts: AdapterOptions = AS_STORED

    def key(self, row: int) -> str:
        """Returns the key of a stored tensor, as it is in the file."""
        return self.entries.names[row]

    def rank(self, module: str) -> int:
        return int(self._by_pattern("rank_pattern", module, self.config.get("r", 8)))

    def scale(self, module: str, rank: int) -> float:
        """Returns the number that multiplies the product of a module's factors."""
        alpha = self._by_pattern("alpha_pattern", module, self.config.get("lora_alpha", 8))
        return self._scale(alpha, rank)

    def older_scale(self, module: str, rank: int) -> float | None:
        """Returns the scale of a module by PEFT before 0.14; None if the configuration shows a
        newer release, or gives the module another rank by the older rule.

        The first key of rank_pattern and alpha_pattern together that matches gave both values, and
        `|` and `^` in a key had no parentheses around them (tuners/lora/model.py of 0.13).
        """
        if not self.config.keys().isdisjoint(rules()["peft"]["since_0_14"]):
            return None
        ranks, alphas = (self.config.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
        matching = (key for key in (*ranks, *alphas) if pattern(rf".*\.{key}$").match(module))
        key = next(matching, module)
        if ranks.get(key, self.config.get("r", 8)) != rank:
            return None
        return self._scale(alphas.get(key, self.config.get("lora_alpha", 8)), rank)

    def _scale(self, alpha: Any, rank: int) -> float:
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def check_finite(self) -> None:
        """Reads all factors and magnitudes. Raises SourceError with each that has a value which is
        not finite in float32.
        """
        found = []
        factors = [row for rows in self.modules.values() for row in rows.values()]
        for row in dict.fromkeys((*factors, *self.whole.values())):
            entry = self.entries.entry(row)
            shape = entry.shape
            if len(shape) == 3 and entry.strides is None:  # the matrices of experts
                shape = (shape[0] * shape[1], shape[2])
            if entry.dtype not in FACTORS or len(shape) > 2:
                continue
            rows, columns = (*shape, 1, 1)[:2]
            down, along = (*(entry.strides or row_major(shape)), 1, 1)[:2]
            matrix = Factor(entry.file, entry.at, down, along, FACTORS.index(entry.dtype))
            step = max(1, BLOCK_NUMEL // max(1, columns))
            with opened(self.files[entry.file]) as fd, np.errstate(over="ignore"):
                read = functools.partial(_read, fd)
                for first in range(0, rows, step):
                    values = matrix.block(first, min(step, rows - first), 0, columns, read)
                    if not (finite := np.isfinite(values)).all():
                        i, j = np.argwhere(~finite)[0].tolist()
                        flat = (first + i) * columns + j
                        place = list(map(int, np.unravel_index(flat, entry.shape)))
                        found.append(
                            f"{self.key(row)} {list(entry.shape)}: {place} is {values[i, j]}"
                        )
                        break
        if found:
            raise SourceError.of(f"{self.path}: {NOT_FINITE[0]}", found, NOT_FINITE[1])

    def show(self) -> dict[str, Any]:
        """Returns what `mckpt adapter inspect` prints."""
        kinds: dict[tuple[str, int, int, float, str], int] = {}
        for stored, rows in self.modules.items():
            if (row := rows.get("a")) is None:
                continue
            entry, module = self.entries.entry(row), without_inside(stored)
            rank = self.rank(module)
            stored_rank = entry.shape[-2] if len(entry.shape) > 1 else 0
            if stored_rank % rank == 0 and self._has_experts(module):  # rows of all experts
                stored_rank = rank
            name = NUMBER.sub("{}", module)
            kind = (name, rank, stored_rank, self.scale(module, rank), entry.dtype)
            kinds[kind] = kinds.get(kind, 0) + 1
        shapes = (self.entries.entry(row).shape for row in range(len(self.entries)))
        return {
            "path": str(self.path),
            "base": self.config.get("base_model_name_or_path"),
            "modules": sorted(self.modules),
            "parameters": sum(map(math.prod, shapes)),
            "kinds": [dict(zip(KIND, (*kind, n), strict=True)) for kind, n in kinds.items()],
            "replaced": sorted(self.whole),
        }

    def _has_experts(self, module: str) -> bool:
        """Returns whether `target_parameters` may name parameters of all experts of a module."""
        return any(self.lists(f"{module}.{name}") for name in rules()["peft"]["parameters"])

    def lists(self, parameter: str) -> bool:
        """Returns whether `target_parameters` has the path of a parameter, or its end."""
        listed = self.config.get("target_parameters") or ()
        return any(f".{parameter}".endswith(f".{one}") for one in listed)

    def alphas(self, module: str) -> list[Any]:
        """Returns the values of alpha_pattern that may give a module its alpha: several if PEFT
        sorted the patterns when it saved them, so that their order in the training is not known.
        """
        patterns: Mapping[str, Any] = self.config.get("alpha_pattern") or {}
        found = list(dict.fromkeys(self._matching("alpha_pattern", module)))
        return found if list(patterns) == sorted(patterns) else found[:1]

    def _by_pattern(self, name: str, module: str, default: Any) -> Any:
        """Returns the value of the first pattern that the end of a module's name matches."""
        return next(self._matching(name, module), default)

    def _matching(self, name: str, module: str) -> Iterator[Any]:
        """Yields the value of each pattern that the end of a module's name matches."""
        patterns: Mapping[str, Any] = self.config.get(name) or {}
        if patterns and self.lists(f"{module}.weight"):
            module += ".weight"  # PEFT matches the path of such a parameter
        try:
            yield from (value for key, value in patterns.items() if _of_key(key).match(module))
        except PatternError as e:
            raise SourceError(f"{self.path / ADAPTER[0]}: {name}: {e}") from None


def _of_key(key: str) -> Pattern:
    """Returns the expression that PEFT makes of a key of rank_pattern or alpha_pattern."""
    return pattern(rf"(.*\.)?({key})$")


def _read(fd: int, file: int, at: int, nbytes: int) -> bytes:
    """Returns bytes of an open file; `file` is its number."""
    return pread(fd, nbytes, at)


def is_adapter(path: Path) -> bool:
    return (path / ADAPTER[0]).is_file()


def is_peft(path: Path) -> bool:
    """Returns whether a directory that was given as an adapter is one of PEFT; else it is one of
    Megatron. Raises SourceError if it is one of PEFT that has lost its configuration.
    """
    if not is_adapter(path) and (found := [n for n in ADAPTER[1:] if (path / n).is_file()]):
        raise SourceError(
            f"{path}: has {found[0]} and no {ADAPTER[0]}, which states the rank and the scale; copy"
            " that file too"
        )
    return is_adapter(path)


def open_adapter(path: str | Path, experts: AdapterOptions | None = None) -> PeftAdapter:
    """Opens an adapter of PEFT: a directory, a name on the Hub or a URL.

    experts: how to read the factors of 3-D experts.

    Raises SourceError if it is damaged, or if it is of a kind that mckpt does not compute.
    """
    root = places.local(path)
    if not is_peft(root):
        refuse_parent(root)
        raise SourceError(f"{root}: has no {ADAPTER[0]}, so it is not the directory of an adapter")
    config = parse_config(root / ADAPTER[0])
    _refuse(root, config)
    file = next((root / name for name in ADAPTER[1:] if (root / name).is_file()), None)
    if file is None:
        raise SourceError(f"{root}: has neither {ADAPTER[1]} nor {ADAPTER[2]}; copy it again")
    if file.suffix == ".bin":
        entries = Entries.of(read_bin(str(file), 0))
    else:
        entries = safetensors.read([str(file)])
    modules, whole = _sorted(root, entries)
    if config.get("use_dora") and not any("magnitude" in rows for rows in modules.values()):
        raise SourceError(
            f"{root / ADAPTER[0]}: use_dora is true, and the adapter has no lora_magnitude_vector;"
            " the program that wrote it lost them (Megatron-Bridge 0.6 does), so export it again"
        )
    read = experts or AS_STORED
    return PeftAdapter(root, config, [str(file)], entries, modules, whole, experts=read)


def _refuse(root: Path, config: Mapping[str, Any]) -> None:
    """Raises SourceError for an adapter whose product mckpt does not compute."""
    where, known = root / ADAPTER[0], rules()["peft"]
    if (kind := config.get("peft_type")) != "LORA":
        raise SourceError(f"{where}: peft_type is {kind!r}, and mckpt reads LORA only")
    if wrong := _wrong_values(config):
        raise SourceError.of(f"{where}: has values that PEFT cannot have trained with:", wrong)
    problems = [
        f"{name} is {config[name]!r:.60}: {why}"
        for name, why in known["refuse"].items()
        if config.get(name)
    ]
    problems += [
        f"{name} is {value!r:.60}: mckpt does not know this key, which may change what the adapter"
        " computes; remove it from the file if it does not"
        for name, value in config.items()
        if value and name not in {*known["known"], *known["refuse"]}
    ]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(tuple(known["changed_base"])):
        problems.append(
            f"init_lora_weights is {start!r}: such a training changes the weights of the base too,"
            " so the adapter does not belong to the published base; save it with"
            " path_initial_model_for_weight_conversion of PEFT"
        )
    if problems:
        raise SourceError.of(
            f"{where}: describes an adapter that mckpt does not compute:", problems
        )


def _wrong_values(config: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the values of a configuration that give the scales."""
    wrong = [
        f"{name} is {config[name]!r:.60}, and must be true or false"
        for name in ("use_rslora", "use_dora", "fan_in_fan_out")
        if not isinstance(config.get(name, False), bool)
    ]
    if (bias := config.get("bias")) not in (None, "none", "all", "lora_only"):
        wrong.append(f"bias is {bias!r:.60}, and must be none, all or lora_only")
    if (order := config.get("lora_B_layout")) not in (None, *rules()["peft"]["columns"]):
        wrong.append(
            f"lora_B_layout is {order!r:.60}, and must be {' or '.join(rules()['peft']['columns'])}"
        )
    listed = config.get("target_parameters") or []
    if not (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
        wrong.append(f"target_parameters is {listed!r:.60}, and must be a list of names")
    for name in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"):
        value = config.get(name) or []
        if not (isinstance(value, str) or _is_list_of(str, value)):
            wrong.append(f"{name} is {value!r:.60}, and must be a text or a list of texts")
    layers = config.get("layers_to_transform") or []
    if not (isinstance(layers, int) or _is_list_of(int, layers)):
        wrong.append(f"layers_to_transform is {layers!r:.60}, and must be whole numbers")
    for name, patterned, read, wanted in (
        ("r", "rank_pattern", _is_rank, f"a whole number from 1 to {LARGEST}"),
        ("lora_alpha", "alpha_pattern", is_alpha, "a finite number that is not 0"),
    ):
        patterns = config.get(patterned) or {}
        if not isinstance(patterns, dict):
            wrong.append(f"{patterned} is {patterns!r:.60}, and must be an object")
            patterns = {}
        given = {name: config.get(name, 8)}
        for key, value in (given | {f"{patterned}[{k!r}]": v for k, v in patterns.items()}).items():
            if not read(value):
                wrong.append(f"{key} is {value!r:.60}, and must be {wanted}")
        for key in patterns:
            try:
                _of_key(key)
            except PatternError as e:
                wrong.append(f"{patterned}[{key!r:.60}]: {e}")
    return wrong


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


def is_alpha(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < abs(value) <= LARGEST


def _sorted(root: Path, entries: Entries) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Returns the tensors of an adapter by module and role, and those that replace the base's.

    Raises SourceError if two tensors have the same role.
    """
    known = rules()["peft"]
    modules: dict[str, dict[str, int]] = {}
    whole: dict[str, int] = {}
    twice = []
    adapters: dict[str, str] = {}  # the name of an adapter -> a key that has it
    for row, name in enumerate(entries.names):
        key = name
        while key.startswith(known["prefix"]):
            key = key.removeprefix(known["prefix"])
        if any(f".{part}." in key for part in known["ignore"]):
            continue
        place, role = whole, _inside().sub("", key)
        if (found := _ends().search(key)) is not None:
            place = modules.setdefault(key[: found.start()], {})
            role = next(role for role in ROLES if found[role])
            named = "".join(found[0].split(".")[2:3])
            if role in ("a", "b"):
                adapters.setdefault("" if named == "weight" else named, name)
        if (first := place.setdefault(role, row)) != row:
            twice.append(f"{entries.names[first]} and {name}")
    if len(adapters) > 1:
        raise SourceError.of(
            f"{root}: has the tensors of {len(adapters)} adapters, of which PEFT loads one:",
            list(adapters.values()),
            "Save each adapter in a directory of its own.",
        )
    if twice:
        raise SourceError.of(f"{root}: has two tensors for one place, so two adapters:", twice)
    _give_shared(entries, modules)
    return modules, whole


def _give_shared(entries: Entries, modules: dict[str, dict[str, int]]) -> None:
    """Gives each expert the factors that all experts of a layer share. SGLang and Megatron-Bridge
    (experts_shared_outer_loras) have these once, as [1, rows, columns] under the name of the
    module without the expert's number.
    """
    experts: dict[str, list[str]] = {}
    for module in modules:
        if found := _OF_EXPERT.search(module):
            experts.setdefault(module[: found.start()] + found[1], []).append(module)
    kinds = set[int]()
    for module in experts.keys() & modules.keys():
        rows = modules[module]
        shapes = [entries.entry(row).shape for row in rows.values()]
        alone = all(modules[one].keys().isdisjoint(rows) for one in experts[module])
        if alone and all(len(shape) == 3 and shape[0] == 1 for shape in shapes):
            for one in experts[module]:
                modules[one].update(rows)
            del modules[module]
            kinds.update(entries.columns.kind[row] for row in rows.values())
    for number in kinds:
        dtype, shape, strides = entries.kinds[number]
        entries.kinds[number] = Kind(dtype, shape[1:], strides and strides[1:])


def without_inside(module: str) -> str:
    """Returns a module's name without the parts `inside`."""
    return _inside().sub("", f"{module}.").removesuffix(".")
