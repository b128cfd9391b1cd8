"""The keys of config.json and the args of Megatron that change nothing about a model."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mckpt.mapping.file import CONFIG_KEY, MappingFile
from mckpt.mapping.forms import equal, part
from mckpt.mapping.nodes import FOLDER, parse

# The args of ms-swift 4 have the first, and do not describe the model, which it builds from
# config.json. The others change it.
_SWIFT, _SWIFT_CHANGES = "swift_version", ("rope_scaling", "megatron_extra_kwargs")
KEY = re.compile("[a-z][a-z0-9_]*")  # a key that mappings/read_keys.yaml can judge
_MODEL = "model"  # the group of mappings/inert_args.yaml whose words belong to parts of a model


@functools.cache
def inert_keys() -> frozenset[str]:
    """Returns the keys of config.json that are inert in every family (mappings/inert_keys.yaml)."""
    groups = parse(FOLDER / "inert_keys.yaml")[0].values()
    return frozenset(key for group in groups for key in group["names"].split())


def in_transformers(architecture: str) -> bool:
    """Returns whether transformers has this class, by mappings/read_keys.yaml."""
    models = parse(FOLDER / "read_keys.yaml")[0]["models"].values()
    return any(architecture in model["classes"].split() for model in models)


def unread_keys(
    family: MappingFile, config: Mapping[str, Any], keys: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the keys of a config.json that its class of transformers never reads, each with a
    note for the user, and the other keys, each with the reason why it may matter.

    keys: such as `MappingFile.unknown` returns.
    """
    if not (keys := list(keys)):
        return {}, {}  # without reading the table
    from difflib import get_close_matches

    table = parse(FOLDER / "read_keys.yaml")[0]
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, (list, tuple)) and named else "a class without a name"
    read, why = _names_read(table, name, config, part(config, family.inside))
    if why:
        return {}, dict.fromkeys(keys, why)
    patterns = [pattern for pattern in read if "*" in pattern]
    known = {key.rpartition(".")[2] for key in family.known_keys()}
    notes = {
        key: f"{key} in config.json changes nothing: transformers' {name} never reads it"
        + "".join(f"; nearest: {one}" for one in get_close_matches(key, known, 1, 0.8))
        for key in keys
        if KEY.fullmatch(key)
        and key not in read
        and not any(fnmatchcase(key, pattern) for pattern in patterns)
    }
    return notes, {k: f"transformers' {name} may read it" for k in keys if k not in notes}


def _names_read(
    table: Mapping[str, Any], name: str, *parts: Mapping[str, Any]
) -> tuple[set[str], str]:
    """Returns the names and patterns that a class of transformers may read from the parts of a
    config.json, the whole first; or why mckpt cannot tell.
    """
    if any("auto_map" in one for one in parts):
        return set(), "the code that `auto_map` names may read it"
    of_type = {kind: m for m in table["models"].values() for kind in m["types"].split()}
    types = [str(one.get("model_type")) for one in parts]
    models = [of_type[kind] for kind in types if kind in of_type]
    if len(models) < len(types) or name not in models[0]["classes"].split():
        return set(), f"mckpt does not know the keys that {name} reads"
    newest = table["transformers"]
    for written in filter(None, (one.get("transformers_version") for one in parts)):
        if not (numbers := _numbers(str(written))) or numbers > _numbers(newest):
            return set(), f"mckpt knows the keys that transformers {newest} reads, not {written}"
    return set(table["shared"].split()).union(*(m["names"].split() for m in models)), ""


def _numbers(version: str) -> list[int]:
    """Returns the numbers at the start of a version."""
    found = re.match(r"\d{1,9}(\.\d{1,9})*", version)
    return [int(number) for number in found[0].split(".")] if found else []


def unknown_args(file: MappingFile, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the args that neither `file` nor mappings/inert_args.yaml knows, and their values.

    Args without a value are left out, and those whose value is a path. Of the args of ms-swift 4,
    those that change the model of config.json are returned.
    """
    if _SWIFT in args:
        return {name: args[name] for name in _SWIFT_CHANGES if _is_set(args.get(name))}
    unlisted = _unlisted_args(file, args)
    return {name: value for name, value in unlisted.items() if inert_word(name) is None}


def args_known_by_word(file: MappingFile, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the args that only a word of their names explains as inert, and their values."""
    unlisted = {} if _SWIFT in args else _unlisted_args(file, args)
    return {name: value for name, value in unlisted.items() if inert_word(name) is not None}


def _unlisted_args(file: MappingFile, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the args that have a value, and that neither `file` nor mappings/inert_args.yaml
    lists by name. Of the args under `values`, `file` lists these values only.
    """
    known = known_args(file)
    return {
        name: value
        for name, value in args.items()
        if _is_set(value)
        and name not in known
        and not is_listed(name)
        and not any(equal(value, one) for one in file.values.get(name, ()))
    }


def is_neutral(value: Any) -> bool:
    """Returns whether an arg with this value most likely changes nothing: 0 adds nothing, and 1
    scales nothing.
    """
    return not isinstance(value, bool) and value in (0, 1)


def known_args(file: MappingFile) -> set[str]:
    """Returns the args that a dialect reads, checks or writes."""
    dims = file.dims.values()
    keys = {
        *(key.partition(".")[0] for dim in dims for key in dim.keys),
        *(key.partition(".")[0] for key in file.also),
        *(*file.expect, *file.refused, *file.inert, *file.flags, *file.run_flags),
    }
    used = [e for dim in dims for e in (dim.default, dim.read, dim.when)]
    used += [
        *file.by_args.values(),
        *file.upgrade.values(),
        *(entry.when for entry in file.refused.values()),
    ]
    used.append(file.stage_sizes)
    return keys.union(*(CONFIG_KEY.findall(e.text) for e in used if e is not None))


def is_listed(name: str) -> bool:
    """Returns whether mappings/inert_args.yaml lists this arg by its name."""
    return name in _listed()[0]


def inert_word(name: str) -> str | None:
    """Returns the word of mappings/inert_args.yaml that explains the arg of a fork as inert. None
    without one, and if the name has a word of a model.
    """
    _, words, of_model = _listed()
    parts = name.lower().strip("_").split("_")
    if not of_model.isdisjoint(parts):
        return None
    pairs = ["_".join(pair) for pair in itertools.pairwise(parts)]
    return next((part for part in [*parts, *pairs] if part in words), None)


def _is_set(value: Any) -> bool:
    """Returns whether an arg has a value that is not a path."""
    if value is None or value is False or (hasattr(value, "__len__") and not len(value)):
        return False
    path = isinstance(value, str) and "/" in value and re.search("[A-Za-z]{2}", value)
    return not path


@functools.cache
def _listed() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Returns the names of mappings/inert_args.yaml, its words, and the words of a model."""
    groups = dict(parse(FOLDER / "inert_args.yaml")[0])
    of_model = groups.pop(_MODEL)
    names = (name for group in groups.values() for name in group["names"].split())
    words = (word for group in groups.values() for word in group.get("words", "").split())
    return frozenset(names), frozenset(words), frozenset(of_model["words"].split())
