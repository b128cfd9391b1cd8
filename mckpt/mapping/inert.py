"""The keys of config.json and the args of Megatron that change nothing about a model."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from mckpt.lazy import pattern
from mckpt.mapping.file import MappingFile
from mckpt.mapping.nodes import FOLDER, parse

# The args of ms-swift 4 have the first, and do not describe the model, which it builds from
# config.json. The others change it.
_SWIFT, _SWIFT_CHANGES = "swift_version", ("rope_scaling", "megatron_extra_kwargs")
_READ = pattern(r"\bconfig\.(\w+)")  # in an expression


@functools.cache
def inert_keys() -> frozenset[str]:
    """Returns the keys of config.json that are inert in every family (mappings/inert_keys.yaml)."""
    groups = parse(FOLDER / "inert_keys.yaml")[0].values()
    return frozenset(key for group in groups for key in group["names"].split())


def unknown_args(file: MappingFile, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the args that neither `file` nor mappings/inert_args.yaml knows, and their values.

    Args without a value are left out, and those whose value is a path. Of the args of ms-swift 4,
    those that change the model of config.json are returned.
    """
    if _SWIFT in args:
        return {name: args[name] for name in _SWIFT_CHANGES if _is_set(args.get(name))}
    known = known_args(file)
    given = {name: value for name, value in args.items() if name not in known and _is_set(value)}
    return {name: value for name, value in given.items() if not is_inert(name)}


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
    used += [*file.by_args.values(), *(entry.when for entry in file.refused.values())]
    used.append(file.stage_sizes)
    return keys.union(*(_READ.findall(e.text) for e in used if e is not None))


def is_inert(name: str) -> bool:
    """Returns whether mappings/inert_args.yaml lists this arg or a word of its name."""
    names, patterns, words = _listed()
    if name in names or not words.isdisjoint(name.lower().split("_")):
        return True
    return patterns.fullmatch(name) is not None


def _is_set(value: Any) -> bool:
    """Returns whether an arg has a value that is not a path."""
    if value is None or value is False or (hasattr(value, "__len__") and not len(value)):
        return False
    path = isinstance(value, str) and "/" in value and re.search("[A-Za-z]{2}", value)
    return not path


@functools.cache
def _listed() -> tuple[frozenset[str], re.Pattern[str], frozenset[str]]:
    """Returns the names of mappings/inert_args.yaml, its names with a * as one pattern, and its
    words.
    """
    groups = parse(FOLDER / "inert_args.yaml")[0].values()
    names = {name for group in groups for name in group["names"].split()}
    words = frozenset(word for group in groups for word in group.get("words", "").split())
    globs = sorted(name for name in names if "*" in name)
    patterns = re.compile("|".join(glob.replace("*", ".*") for glob in globs))
    return frozenset(names.difference(globs)), patterns, words
