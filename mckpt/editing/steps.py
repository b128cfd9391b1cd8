"""Reads recipes: lists of edits in YAML, as `mckpt edit --recipe` takes them.

- layers: {drop: 20-23}          keep, drop, order or silent_after, each a list of ranges
- untie
- kv_heads: {times: 2}
- vocab: {size: 151936, init: mean}
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mckpt.editing.edits import Edit, Layers, RepeatHeads, Untie, Vocabulary
from mckpt.errors import UsageError
from mckpt.mapping.nodes import Node, load


def read(path: Path, num_layers: int) -> list[Edit]:
    """Returns the edits of a recipe. num_layers: those of the source.

    Raises UsageError, with the line, for anything that is not an edit.
    """
    try:
        steps = load(path.read_text(), path.name)
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(steps, list) or not steps:
        raise UsageError(f"{path}: a recipe is a list of edits, such as `- untie`")
    found: list[Edit] = []
    for number, step in enumerate(steps, 1):
        named = {step: {}} if isinstance(step, str) else step
        where = f"{path}: edit {number}"
        if not isinstance(named, dict) or len(named) != 1:
            raise UsageError(f"{where}: wants one of {', '.join(EDITS)}, not {step!r}")
        ((name, given),) = named.items()
        if isinstance(step, Node):
            where = f"{path.name}:{step.lines[name]}"
        if name not in EDITS:
            raise UsageError(f"{where}: {name!r} is not an edit; they are {', '.join(EDITS)}")
        try:
            edit = EDITS[name](given or {}, num_layers)
        except (TypeError, ValueError, KeyError) as e:
            raise UsageError(f"{where}: {name}: {given!r}: {_why(e)}") from None
        if isinstance(edit, Layers):
            num_layers = len(edit.order)
        found.append(edit)
    return found


def ranges(value: Any) -> list[int]:
    """Returns the numbers of a list of ranges: "0-3,8" or [0-3, 8] are 0, 1, 2, 3 and 8."""
    parts = value if isinstance(value, list) else str(value).split(",")
    found: list[int] = []
    for part in parts:
        first, dash, last = str(part).strip().partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def layers(given: dict[str, Any], count: int) -> Layers:
    """Returns an edit of layers of a model that has `count` of them."""
    if len(given) != 1:
        raise ValueError("give one of keep, drop, order and silent_after")
    ((how, value),) = given.items()
    numbers = ranges(value)
    if wrong := [n for n in numbers if not 0 <= n < count]:
        raise ValueError(f"layer {wrong[0]} of {count}, which are numbered from 0")
    heard = [(n, False) for n in range(count)]
    if how == "order":
        return Layers(tuple((n, False) for n in numbers))
    if how in ("keep", "drop"):
        return Layers(tuple(one for one in heard if (one[0] in numbers) == (how == "keep")))
    if how != "silent_after":
        raise ValueError(f"{how!r} is not one of keep, drop, order and silent_after")
    return Layers(
        tuple(new for one in heard for new in (one, *([(one[0], True)] * numbers.count(one[0]))))
    )


def _vocabulary(given: dict[str, Any], count: int) -> Vocabulary:
    init = given.get("init", "mean")
    if isinstance(init, bool) or (isinstance(init, str) and init not in ("mean", "zero")):
        raise ValueError("init is mean, zero or the number of a row")
    if given.keys() - {"size", "init"} or not isinstance(given["size"], int):
        raise ValueError("wants size, a number of rows, and init")
    return Vocabulary(given["size"], init)


def _heads(given: dict[str, Any], count: int) -> RepeatHeads:
    if given.keys() != {"times"} or not isinstance(given["times"], int):
        raise ValueError("wants times, a number")
    return RepeatHeads(given["times"])


def _untie(given: dict[str, Any], count: int) -> Untie:
    if given:
        raise ValueError("has no parameters")
    return Untie()


def _why(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


EDITS: dict[str, Callable[[dict[str, Any], int], Edit]] = {
    "layers": layers,
    "untie": _untie,
    "kv_heads": _heads,
    "vocab": _vocabulary,
}
