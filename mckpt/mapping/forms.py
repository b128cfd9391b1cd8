"""Configs and names of text models that are part of a larger model, and look-ups in configs.

A vision-language model contains a text model. A family describes the text model with the names of
its own family; a *form* says how these names begin in the files of the larger model, and which
tensors of the larger model are carried unchanged because Megatron's model does not have them.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mckpt.errors import MappingError
from mckpt.mapping.nodes import Node
from mckpt.mapping.patterns import Pattern, pattern

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


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets config["a"]["b"] for the path "a.b"."""
    *outer, last = path.split(".")
    for step in outer:
        config = config.setdefault(step, {})
    config[last] = value


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


NESTED = "nested"  # the form of the names that transformers 5 has in memory, where others differ
OUTER = "/"  # starts a key of the whole config.json, not of the text model's part


class NameForm(NamedTuple):
    """One way in which files name the tensors of a family."""

    names: dict[str, str]  # start of a key in the family's rules -> start of the stored key
    carried: tuple[str, ...]  # patterns of stored keys; * stands for any text

    def rename(self, key: str) -> str:
        """Returns the stored key for a key of the family's rules."""
        start = max((s for s in self.names if key.startswith(s)), key=len, default="")
        return self.names.get(start, "") + key[len(start) :]

    def carries(self, key: str) -> bool:
        """Returns whether the tensor with this stored key is carried unchanged."""
        return any(_matches(name, key) for name in self.carried)

    def carried_as(self, key: str, other: NameForm) -> str:
        """Returns the key that another form gives to a tensor that this one carries."""
        for mine, theirs in zip(self.carried, other.carried, strict=False):
            if mine.endswith(".*") and theirs.endswith(".*") and _matches(mine, key):
                return theirs.removesuffix("*") + key.removeprefix(mine.removesuffix("*"))
        return key

    def is_of(self, keys: Iterable[str]) -> bool:
        """Returns whether the carried tensors of a model in this form can have these keys."""
        known = list(keys)
        return not self.unmatched(known) and all(map(self.carries, known))

    def unmatched(self, keys: Iterable[str]) -> list[str]:
        """Returns the patterns that match none of the keys."""
        known = list(keys)
        return [p for p in self.carried if not any(_matches(p, key) for key in known)]


def of_others(form: NameForm, forms: Mapping[str, NameForm], keys: Iterable[str]) -> list[str]:
    """Returns the patterns of other forms of a family that match keys which this one does not
    carry.
    """
    left = [key for key in keys if not form.carries(key)]
    patterns = {p for other in forms.values() for p in other.carried} - {*form.carried}
    return [p for p in sorted(patterns) if any(map(_compiled(p).fullmatch, left))]


def is_part(forms: Mapping[str, NameForm]) -> bool:
    """Returns whether the family is the text model of a larger one, whose other tensors are
    carried.
    """
    return any(form.carried for form in forms.values())


def _matches(name: str, key: str) -> bool:
    """Returns whether a key is one of a pattern. Most keys are not, and have another start."""
    start, _, _ = name.partition("*")
    return key.startswith(start) and _compiled(name).fullmatch(key)


@functools.cache
def _compiled(name: str) -> Pattern:
    return pattern(".*".join(map(re.escape, name.split("*"))))


def view(config: Mapping[str, Any], inside: Sequence[str]) -> dict[str, Any]:
    """Returns the part of a config.json that describes the text model, as a family reads it. The
    keys of the whole config.json follow with `/` before them.

    inside: the paths at which the part may be. If the config has none of them, the whole
    config.json describes the text model. Raises MappingError if the part is not an object.
    """
    if not inside:
        return dict(config)
    return {**part(config, inside), **{OUTER + key: value for key, value in config.items()}}


def part(config: Mapping[str, Any], inside: Sequence[str]) -> Mapping[str, Any]:
    """Returns the object of a config.json that has the text model's keys: that of the first path of
    `inside` that the config has, or the config itself if it has none.
    """
    return parts(config, inside)[-1]


def parts(config: Mapping[str, Any], inside: Sequence[str]) -> list[Mapping[str, Any]]:
    """Returns a config.json, and the objects in it on the way to the one that has the text model's
    keys, which is the last. Raises MappingError if one of them is not an object.
    """
    for path in inside:
        found = [config]
        steps = path.split(".")
        for number, step in enumerate(steps, 1):
            inner = found[-1].get(step)
            if inner is None:
                break
            if not isinstance(inner, Mapping):
                where = ".".join(steps[:number])
                raise MappingError(f"config.json: {where} is {inner!r}, and must be an object")
            found.append(inner)
        else:
            return found
    return [config]


def typed(config: Mapping[str, Any], inside: Sequence[str], dtype: str) -> dict[str, Any]:
    """Returns a copy of a config.json in which the text model has this dtype, if it has any."""
    out: Any = copy.deepcopy(dict(config))
    places: Any = parts(out, inside)
    for place in places:
        key = "dtype" if "dtype" in place else "torch_dtype"
        if place.get(key) is not None:
            place[key] = dtype
    return dict(out)


def whole(keys: Mapping[str, Any], inside: Sequence[str]) -> dict[str, Any]:
    """Returns the config.json that has the text model's keys at the first path of `inside`; the
    inverse of `view`.
    """
    if not inside:
        return dict(keys)
    out = {k.removeprefix(OUTER): v for k, v in keys.items() if k.startswith(OUTER)}
    put(out, inside[0], {k: v for k, v in keys.items() if not k.startswith(OUTER)})
    return out


def read_forms(root: Node, problems: list[str]) -> Iterator[tuple[str, NameForm]]:
    """Yields the entries of `forms`; adds errors to `problems`."""
    forms = root.get("forms") or Node()
    for name, form in forms.items():
        names, carried = (form or {}).get("names") or {}, (form or {}).get("carried") or ()
        if (
            not (carried or names)
            or form.keys() - {"names", "carried"}
            or not all(isinstance(text, str) for text in (*names, *names.values(), *carried))
        ):
            problems.append(
                f"{forms.lines[name]}: forms: {name} needs `names`, the starts of names, or"
                f" `carried`, a list of patterns, or both, not {form!r}"
            )
            continue
        yield name, NameForm(dict(names), tuple(carried))
