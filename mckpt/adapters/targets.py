"""Decides which tensors of an adapter PEFT loads into a base."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mckpt.adapters.peft import NUMBER, PeftAdapter, rules, without_inside
from mckpt.errors import SourceError
from mckpt.formats.hf_config import ADAPTER
from mckpt.mapping.patterns import PatternError, pattern


@dataclass(frozen=True)
class Targets:
    """The modules of a base that PEFT adapts, by the configuration of an adapter (PEFT:
    tuners/tuners_utils.py, check_target_module_exists and inject_adapter).
    """

    adapter: PeftAdapter
    family: str
    base: Mapping[str, Collection[str]]  # module -> the names of its parameters
    not_linear: Collection[str]  # the modules that `all-linear` leaves out

    def refuse_others(self) -> None:
        """Raises SourceError for factors of modules that the configuration does not target. PEFT
        does not load them, so the model that was trained does not have them.

        If no module of the base is targeted, the configuration has the names of another program,
        and nothing is refused.
        """
        modules = self.adapter.modules
        try:
            outside = sorted(stored for stored in modules if not self.has(stored))
            if not outside or not any(map(self.has, self.base)):
                return
        except PatternError as e:
            raise SourceError(f"{self.adapter.path / ADAPTER[0]}: {e}") from None
        raise SourceError.of(
            f"{self.adapter.path}: has tensors of modules that its {ADAPTER[0]} does not target"
            " (target_modules, target_parameters, exclude_modules, modules_to_save,"
            " layers_to_transform), and PEFT does not load them:",
            [self.adapter.key(row) for stored in outside for row in modules[stored].values()],
            "Correct the configuration, or remove these tensors.",
        )

    def refuse_lost(self) -> None:
        """Raises SourceError if tensors were trained whole, and the adapter has none of them."""
        config, whole, lost = self.adapter.config, self.adapter.whole, list[str]()
        kept = config.get("modules_to_save") or []
        paths = {path for module in self.base for path in _paths(module)} if kept else set[str]()
        saved = {path for key in whole for path in _paths(key)}
        for one in kept:
            # PEFT takes every module whose path ends with the name, also inside a word
            modules = [path for path in paths if path.endswith(one)]
            if modules and saved.isdisjoint(modules):
                lost.append(f"modules_to_save has {one!r}: {min(modules)}")
        trained = {"all": self.base, "lora_only": map(without_inside, self.adapter.modules)}
        kind, some = config.get("bias", "none"), any(key.endswith(".bias") for key in whole)
        biases = [
            f"{module}.bias"
            for module in trained.get(kind, ())
            # the base has several names for a module, and the adapter one
            if "bias" in self.base.get(module, ())
            and not (some if kind == "all" else f"{module}.bias" in whole)
        ]
        if biases:
            lost.append(f"bias is {kind!r}: {min(biases)}")
        if lost:
            raise SourceError.of(
                f"{self.adapter.path}: lacks tensors that its {ADAPTER[0]} states to be trained:",
                lost,
                "The program that wrote it lost them (PEFT does, with bias lora_only): save it"
                " again, or set modules_to_save to null or bias to none there, to keep the tensors"
                " of the base.",
            )

    def without_factors(self) -> list[str]:
        """Returns the modules that the configuration targets and the adapter lacks, of the kinds
        that it has in other layers.
        """
        there = set(map(without_inside, self.adapter.modules))
        kinds = {NUMBER.sub("{}", module) for module in there}
        return [
            module
            for module in self.base
            if module not in there and NUMBER.sub("{}", module) in kinds and self.has(module)
        ]

    def has(self, stored: str) -> bool:
        """Returns whether PEFT loads the factors of a module.

        stored: the module with the parts `inside`. Several parameters of one module have a wrapper
        each, of which all but the outermost are named `base_layer`. No other module has that part.
        """
        module, config = without_inside(stored), self.adapter.config
        kept = config.get("modules_to_save") or ()
        if any(pattern(rf"(^|.*\.){one}($|\..*)").match(module) for one in kept):
            return False
        wrappers = sum(self.adapter.lists(f"{module}.{name}") for name in self.base.get(module, ()))
        if stored != module or wrappers:
            return stored in [module + ".base_layer" * around for around in range(wrappers)]
        if _named(config.get("exclude_modules"), module):
            return False
        listed = config.get("target_modules")
        if listed is None:
            listed = rules()["peft"]["defaults"].get(self.family)
            if not config.get("target_parameters"):
                return True
        if isinstance(listed, str) and listed.lower() == "all-linear":
            return module not in self.not_linear
        if isinstance(listed, str) or module in (listed or ()):
            return _named(listed, module)
        return _named(listed, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        """Returns whether a module lies in one of `layers_to_transform`."""
        config = self.adapter.config
        layers = config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        parents = config.get("layers_pattern") or [r".+\.[^.]*"]
        for parent in [parents] if isinstance(parents, str) else parents:
            for number in NUMBER.finditer(module):
                before = module[: number.start() - 1]
                if pattern(rf"(.*\.)?({parent})").fullmatch(before) and number.end() < len(module):
                    return int(number[0]) in (layers if isinstance(layers, list) else [layers])
        return False


def _paths(name: str) -> Iterator[str]:
    """Yields a dotted name and the names of all modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _named(names: Any, module: str) -> bool:
    """Returns whether a regular expression, or one of several names of modules or their ends,
    matches a module.
    """
    if not names:
        return False
    if isinstance(names, str):
        return pattern(names).fullmatch(module)
    return any(f".{module}".endswith(f".{one}") for one in names)
