"""The keys of config.json that are lists (mappings/lists.yaml). Their lengths and items are checked
once, before any expression of a mapping looks at an item.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from mckpt.mapping.expression import Expression, ExpressionError
from mckpt.mapping.nodes import FOLDER, parse

SHOWN = 80  # characters of a value in an error
_CURE = "compare it with config.json in the repository of the model"


def problems(config: Mapping[str, Any], scope: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each list of a config that has another length than its model needs, or
    an item of another form.

    scope: the dims. A list whose length they do not tell is not checked.
    """
    for key, entry in _listed().items():
        value = config.get(key)
        if value is None or (entry.get("number") and _is_number(value)):
            continue
        if not isinstance(value, (list, tuple)):
            yield f"{key} is {_short(value)}, and must be a list; {_CURE}"
        elif value or not entry.get("empty"):
            yield from _wrong_length(key, len(value), entry, scope)
            yield from _wrong_items(key, value, entry.get("items"))


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
        why = f"{text} is {number}" if text != str(number) else f"it must have {number}"
        yield f"{key} has {found} item{'s' * (found != 1)}, and {why}; {_CURE}"


def _wrong_items(key: str, value: Any, form: Any) -> Iterator[str]:
    for i, item in enumerate(value if form else ()):
        where = f"{key}[{i}]"
        if form == "number":
            if not _is_number(item):
                yield f"{where} is {_short(item)}, and must be a number; {_CURE}"
        elif not isinstance(item, Mapping) or item.keys() != form.keys():
            found = sorted(map(str, item)) if isinstance(item, Mapping) else _short(item)
            yield f"{where} is {found}, and must have {' and '.join(form)}; {_CURE}"
        else:
            for name, keys in form.items():
                yield from _wrong_object(f"{where}.{name}", item[name], keys)


def _wrong_object(where: str, found: Any, keys: Mapping[str, list[str]]) -> Iterator[str]:
    if not isinstance(found, Mapping):
        yield f"{where} is {_short(found)}, and must be an object; {_CURE}"
        return
    needed = keys["needed"]
    for name in found.keys() - {*needed, *keys["known"]}:
        if found[name] not in (None, False):
            yield f"{where} has {name} {_short(found[name])}, which mckpt does not know"
    for name in () if found.get("no_op") else needed:
        if not _is_number(found.get(name)):
            state = f"{name} {_short(found[name])}" if name in found else f"no {name}"
            yield f"{where} has {state}, and no_op is not true: it must be a number; {_CURE}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


@functools.cache
def _listed() -> Mapping[str, Any]:
    """Returns the entries of mappings/lists.yaml."""
    return parse(FOLDER / "lists.yaml")[0]
