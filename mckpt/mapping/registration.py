"""The order in which Megatron-Core registers parameters, as a dialect declares it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mckpt.errors import MappingError
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import pattern

_NUMBERED = pattern(r"(\D*)(\d+)")  # weight12, or the number of a layer or an expert

# (number, or -1 without one; index of the name) for each part of a key
Place = tuple[tuple[int, int], ...]


class Registration(NamedTuple):
    """The section `registration` of a dialect.

    `order` has the names of modules and parameters. Two names that stand side by side in a module
    are in the order in which the module registers them, its own parameters before its modules.
    """

    order: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()  # ends of keys of tensors that no optimizer updates
    # the first megatron-core in which experts have an optimizer of their own if etp differs from
    # tp; at ep > 1 they have one in every version
    experts_apart: tuple[int, ...] = (0,)

    def num_optimizers(self, parallel: Parallel, num_experts: int, megatron: list[int]) -> int:
        """Returns the number of optimizers of one rank: 2 if experts have one of their own."""
        differs = parallel.expert_tp != parallel.tp and tuple(megatron) >= self.experts_apart
        return 2 if num_experts and (parallel.ep > 1 or differs) else 1

    def is_parameter(self, key: str) -> bool:
        return not f".{key}".endswith(tuple(f".{name}" for name in self.buffers))

    def sorted(self, keys: Iterable[str]) -> list[str]:
        """Returns the keys of parameters of one module in the order in which
        `module.named_parameters()` returns them. Raises MappingError for a name that `order` lacks.
        """
        index = {name: i for i, name in enumerate(self.order)}
        return sorted(keys, key=lambda key: self._place(key, index))

    def _place(self, key: str, index: dict[str, int]) -> Place:
        """Returns the sort key of a parameter. Names with a number, such as weight0, bias0 and
        weight1, stand in the order of their numbers.
        """
        out = []
        for name in key.split("."):
            numbered = _NUMBERED.fullmatch(name)
            if name in index:
                out.append((-1, index[name]))
            elif numbered and (not numbered[1] or numbered[1] in index):
                out.append((int(numbered[2]), index.get(numbered[1], -1)))
            else:
                raise MappingError(
                    f"{key}: `registration` of the dialect does not have the name {name!r}, so the"
                    " place of this parameter in the optimizer's buffers is unknown"
                )
        return tuple(out)


def read_registration(section: dict[str, Any], problems: list[str]) -> Registration:
    """Returns the section `registration`; adds errors to `problems`."""
    lists = {key: section.get(key, []) for key in ("order", "buffers")}
    since = section.get("experts_apart", [0])
    for key in section:
        version = isinstance(since, list) and all(isinstance(part, int) for part in since)
        if key == "experts_apart" and version:
            continue
        if key not in lists or not all(isinstance(name, str) for name in lists[key]):
            problems.append(
                f"registration: {key} must be a list of names under order or buffers, or a version"
                " such as [0, 17] under experts_apart"
            )
            return Registration()
    return Registration(tuple(lists["order"]), tuple(lists["buffers"]), tuple(since))
