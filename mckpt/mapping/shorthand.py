"""The short forms of a family file, each of which is turned into the long form:

keys: {num_heads: n_head}       dims: {num_heads: {key: n_head}}
constants: {gated: true}        dims: {gated: {const: true}}
always: {use_cla: false}        expect: {use_cla: [false]} and also: {use_cla: "False"}
layers: {RULES}                 blocks: {"model.layers.{layer}.": {tensors: {RULES}}}
defaults: {n_head: 12}          the default of each dim that has the key
default_expressions: {n_inner: 4 * hidden_size}   the same, computed from dims
model_type: gpt2                also: {model_type: "'gpt2'"}
same_as: {new: old}             new in each list of keys that has old, in expect and in refuse
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mckpt.errors import MappingError
from mckpt.mapping.nodes import Node

LAYERS = "model.layers.{layer}."  # the block of `layers`


def expanded(root: Node) -> Node:
    """Returns a file without `keys`, `constants`, `always` and `layers`. Raises MappingError for an
    entry that the file has in the long form too.
    """
    if not {"keys", "constants", "always", "layers"} & root.keys():
        return root
    found = {name: _section(root, name) for name in ("dims", "expect", "also", "blocks")}

    def add(short: str, target: Node, entry: Callable[[Any], Any]) -> None:
        entries = _section(root, short)
        for key, value in entries.items():
            if key in target:
                raise MappingError(
                    f"{entries.lines[key]}: {short}: {key!r} stands here twice (first in line"
                    f" {target.lines[key].rsplit(':', 1)[1]})"
                )
            target[key], target.lines[key] = entry(value), entries.lines[key]

    add("keys", found["dims"], lambda key: key)
    add("constants", found["dims"], lambda value: {"const": value})
    add("always", found["expect"], lambda value: [value])
    add("always", found["also"], repr)
    if layers := _section(root, "layers"):
        block = _section(found["blocks"], LAYERS)
        rules = _section(block, "tensors")
        add("layers", rules, lambda rule: rule)
        first = next(iter(layers.lines.values()))
        block["tensors"], block.lines["tensors"] = rules, first
        found["blocks"][LAYERS], found["blocks"].lines[LAYERS] = block, first
    long = _with_sections(root, found)
    for name in ("keys", "constants", "always", "layers"):
        long.pop(name, None)
    return long


def with_defaults(root: Node) -> Node:
    """Returns a file whose dims have the `defaults` and `default_expressions` of their keys, and
    which writes its `model_type`. Raises MappingError for a default of a key that no dim reads.
    """
    if not {"defaults", "default_expressions", "model_type"} & root.keys():
        return root
    dims, also = _section(root, "dims"), _section(root, "also")
    sections: dict[str, Callable[[Any], str]] = {"defaults": repr, "default_expressions": str}
    for section, expression in sections.items():
        given = _section(root, section)
        unread = set(given)
        for name, spec in dims.items():
            stated = [key for key in keys_of(spec) if key in given]
            if stated:
                unread -= set(stated)
                dims[name] = {**_long(spec), "default": expression(given[stated[0]])}
        for key in sorted(unread):
            raise MappingError(f"{given.lines[key]}: {section}: no dim has the key {key!r}")
    if "model_type" in root:
        also["model_type"] = repr(root["model_type"])
        also.lines["model_type"] = root.lines["model_type"]
    return _with_sections(root, {"dims": dims, "also": also})


def with_second_names(root: Node) -> Node:
    """Returns a file in which the dims and the entries of `expect` and `refuse` that are for a key
    of `same_as` are for its other name too.
    """
    names: Mapping[str, str] = {old: new for new, old in _section(root, "same_as").items()}
    if not names:
        return root

    def second(key: Any) -> Iterator[tuple[str, str, str]]:
        """Yields each other name of a key, and the parts of both that differ."""
        for old, new in names.items():
            if key == old or str(key).startswith(f"{old}."):
                yield new + key[len(old) :], old, new

    found = {section: _section(root, section) for section in ("dims", "expect", "refuse")}
    there = {new.partition(".")[0] for new in names.values()}
    for name, spec in found["dims"].items():
        keys = keys_of(spec)
        more = [new for key in keys for new, *_ in second(key)]
        if more and not there & {str(key).partition(".")[0] for key in keys}:
            stated = _long(spec)["key"]
            others = [] if isinstance(stated, str) else [k for k in stated if k not in keys]
            found["dims"][name] = {**_long(spec), "key": [*dict.fromkeys(keys + more), *others]}
    read = {key for spec in found["dims"].values() for key in keys_of(spec)}
    for section in ("expect", "refuse"):
        entries = found[section]
        for key, entry in [*entries.items()]:
            for other, old, new in second(key):
                if other not in entries and not (section == "expect" and other in read):
                    entries[other] = _about(entry, old, new)
                    entries.lines[other] = entries.lines[key]
    return _with_sections(root, found)


def keys_of(spec: Any) -> list[str]:
    """Returns the keys of config.json that the entry of a dim states, without those that are no
    text, which the reading of dims refuses.
    """
    keys = spec.get("key", []) if isinstance(spec, dict) else spec
    return [key for key in (keys if isinstance(keys, list) else [keys]) if isinstance(key, str)]


def _long(spec: Any) -> dict[str, Any]:
    return dict(spec) if isinstance(spec, dict) else {"key": spec}


def _about(entry: Any, old: str, new: str) -> Any:
    """Returns an entry of `refuse` whose condition is about another key."""
    if not isinstance(entry, dict) or not isinstance(entry.get("when"), str):
        return entry
    return {**entry, "when": entry["when"].replace(f"config.{old}", f"config.{new}")}


def _section(root: Node, name: str) -> Node:
    """Returns a copy of a section; an empty one if the file has none."""
    copy, known = Node(), root.get(name)
    if isinstance(known, Node):
        copy.update(known)
        copy.lines.update(known.lines)
    return copy


def _with_sections(root: Node, sections: Mapping[str, Node]) -> Node:
    """Returns a file with other sections, and without those that are empty."""
    found = Node()
    found.update(root)
    found.lines.update(root.lines)
    for name, section in sections.items():
        if section:
            found[name] = section
            found.lines.setdefault(name, next(iter(section.lines.values())))
    return found
