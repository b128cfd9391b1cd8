"""Looks values up in configs, and compares them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})(?:[.+-]\w+)*")


class LazyScope(dict):
    """A scope that calls `resolve` for a name that it lacks."""

    def __init__(self, resolve: Callable[[str], Any], **known: Any) -> None:
        super().__init__(known)
        self.resolve = resolve

    def __missing__(self, name: str) -> Any:
        return self.resolve(name)


ABSENT = object()


def lookup(config: Mapping[str, Any], path: str, absent: Any = None) -> Any:
    """Returns config["a"]["b"] for the path "a.b", or `absent` if the config has no such key.

    Raises ValueError if "a" is not an object.
    """
    value: Any = config
    for part in path.split("."):
        if value is None:
            return absent
        if not isinstance(value, Mapping):
            raise ValueError(f"{path.rpartition('.')[0]} is {value!r}, and must be an object")
        if part not in value:
            return absent
        value = value[part]
    return value


def equal(a: Any, b: Any) -> bool:
    """Compares two values of a dim; a list equals a tuple of the same items."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return bool(a == b)


def major_minor(text: str) -> list[int]:
    """Returns [0, 19] for "0.19" and for "0.19.2".

    Raises ValueError if the text is not a version.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a version such as 0.19")
    return [int(found[1]), int(found[2])]
