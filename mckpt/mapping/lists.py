"""The keys of config.json, and the args of Megatron, that are lists (mappings/lists.yaml). Their
lengths and items are checked once, before any expression of a mapping looks at an item.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mckpt.mapping.expression import Expression, ExpressionError
from mckpt.mapping.forms import lookup
from mckpt.mapping.nodes import FOLDER, parse

SHOWN = 80  # characters of a value in an error
_MOST = 2**31  # above any number of layers or positions
_CURES = {
    "config": "compare it with config.json in the repository of the model",
    "args": "Megatron builds no such model, so take the value of another checkpoint of the run",
}


def problems(kind: str, config: Mapping[str, Any], scope: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each list of a config that has another length than its model needs, or
    an item of another form.

    kind: config or args, the part of mappings/lists.yaml. scope: the dims. A list whose length they
        do not tell is not checked.
    """
    for key, entry in _listed()[kind].items():
        value = lookup(config, key)
        if value is None or not _counts(entry, scope):
            continue
        for wrong in _wrong(key, value, entry, scope):
            yield f"{wrong}; {_CURES[kind]}"


def by_layer() -> list[str]:
    """Returns the keys of config.json that are lists with an item for each layer."""
    return [key for key, one in _listed()["config"].items() if one["length"] == "num_layers"]


def _wrong(
    key: str, value: Any, entry: Mapping[str, Any], scope: Mapping[str, Any]
) -> Iterator[str]:
    if "json" in entry:
        if not value:
            return
        try:
            value = json.loads(value)[entry["json"]]
        except (ValueError, TypeError, LookupError, RecursionError):
            yield f"{key} is {_short(value)}, and must be JSON with {entry['json']}"
            return
        key = f"{entry['json']} of {key}"
    if entry.get("number") and _is_number(value):
        return
    if (least := entry.get("whole")) is not None and not isinstance(value, (list, tuple)):
        if not _is_whole(value, least):
            yield f"{key} is {_short(value)}, and must be a list or a whole number from {least} on"
    elif not isinstance(value, (list, tuple)):
        yield f"{key} is {_short(value)}, and must be a list{' or a number' * ('number' in entry)}"
    elif value or not entry.get("empty"):
        wrong = list(_wrong_length(key, len(value), entry, scope))
        yield from wrong or _wrong_items(key, value, entry.get("items"))


def _counts(entry: Mapping[str, Any], scope: Mapping[str, Any]) -> bool:
    """Returns whether the model depends on a list."""
    try:
        return bool(Expression(entry["when"])(scope)) if "when" in entry else True
    except ExpressionError:  # reported where the dim is read
        return False


def _wrong_length(
    key: str, found: int, entry: Mapping[str, Any], scope: Mapping[str, Any]
) -> Iterator[str]:
    lengths = [str(entry[name]) for name in ("length", "or") if name in entry]
    try:
        wanted = {text: Expression(text)(scope) for text in lengths}
    except ExpressionError:  # reported where the dim is read
        return
    if found not in wanted.values():
        text, number = next(iter(wanted.items()))
        why = f"{text} is {number}" if text.isidentifier() else f"it must have {number}"
        yield f"{key} has {found} item{'s' * (found != 1)}, and {why}"


def _wrong_items(key: str, value: Any, form: Any) -> Iterator[str]:
    if isinstance(form, str):
        is_right, wanted = _FORMS[form]
        wrong = [i for i, item in enumerate(value) if not is_right(item)]
        if wrong:
            others = f" ({len(wrong) - 1} other items too)" * (len(wrong) > 1)
            yield f"{key}[{wrong[0]}] is {_short(value[wrong[0]])}, and must be {wanted}{others}"
        return
    for i, item in enumerate(value if form else ()):
        where = f"{key}[{i}]"
        if not isinstance(item, Mapping) or item.keys() != form.keys():
            found = sorted(map(str, item)) if isinstance(item, Mapping) else _short(item)
            yield f"{where} is {found}, and must have {' and '.join(form)}"
        else:
            for name, keys in form.items():
                yield from _wrong_object(f"{where}.{name}", item[name], keys)


def _wrong_object(where: str, found: Any, keys: Mapping[str, list[str]]) -> Iterator[str]:
    if not isinstance(found, Mapping):
        yield f"{where} is {_short(found)}, and must be an object"
        return
    needed, either = keys.get("needed", []), keys.get("either", [])
    for name in found.keys() - {*needed, *either, *keys["known"]}:
        if found[name] not in (None, False):
            yield f"{where} has {name} {_short(found[name])}, which mckpt does not know"
    if found.get("no_op"):
        return
    stated = [name for name in either if found.get(name) is not None]
    for name in [*needed, *(stated or either[:1])]:
        if not _is_number(found.get(name)):
            state = f"{name} {_short(found[name])}" if name in found else f"no {name}"
            yield f"{where} has {state}, and no_op is not true: it must be a number"


def _is_number(value: Any) -> bool:
    is_nan = value != value
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not is_nan


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


# form of an item -> the test, and the words for it
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_is_number, "a number"),
    "whole": (_is_whole, "a whole number from 0 on"),
    "flag": (lambda item: isinstance(item, (int, float)) and item in (0, 1), "0 or 1"),
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


@functools.cache
def _listed() -> Mapping[str, Any]:
    return parse(FOLDER / "lists.yaml")[0]
