"""Makes a family of parts for a model that no family describes: the parts of the nearest family
that the model has, others of which it has all tensors, and the nearest family's own lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.errors import MappingError
from mckpt.mapping.expression import ExpressionError
from mckpt.mapping.file import Dims, MappingFile
from mckpt.mapping.nodes import Node, merge, parse
from mckpt.mapping.reading import drafted, extended, folder, inherited
from mckpt.mapping.rule import expand
from mckpt.mapping.shorthand import LAYERS, keys_of

_PART = "parts/"  # the folder of the parts, and the start of their names
# the sections that are taken over from the nearest family
_TAKEN = (
    *(
        "dialect",
        "forms",
        "notes",
        "keys",
        "defaults",
        "default_expressions",
        "constants",
        "always",
    ),
    *("dims", "refuse", "expect", "also", "follow", "inert", "ignore", "drop", "same_as"),
    *("numbering", "memory", "groups", "tensors", "blocks", "layers"),
)

Shape = tuple[int, ...]


class StoredNames(NamedTuple):
    """The stored names of a family, as its file writes them."""

    family: MappingFile
    root: Node  # of the file, merged with all that it extends
    # (block or "", key of the file) -> names of the model -> logical tensors and packing
    entries: dict[tuple[str, str], dict[str, tuple[list[str], str]]]

    def names(self) -> set[str]:
        return {name for names in self.entries.values() for name in names}


def names_of(family: MappingFile, root: Node | None = None) -> StoredNames:
    """root: the root of a family that has no file, as `drafted` returns it."""
    root = inherited(family) if root is None else root
    entries = dict[tuple[str, str], dict[str, tuple[list[str], str]]]()
    scopes = [("", "", root.get("tensors") or Node())]
    for prefix, block in (root.get("blocks") or Node()).items():
        logical = (block or {}).get("is", "")
        groups = [root["groups"][name] for name in (block or {}).get("groups") or ()]
        for node in (*groups, block or Node()):
            scopes.append((prefix, logical, node.get("tensors") or Node()))
    for prefix, logical, node in scopes:
        for key, value in node.items():
            stored_names = entries.setdefault((prefix, key), {})
            for spec in value if isinstance(value, list) else [value]:
                for stored, one in expand(key, spec):
                    of = [o[1:] if o.startswith("/") else logical + o for o in one["of"]]
                    stored_names.setdefault(prefix + stored, (of, one.get("pack", "one")))
    return StoredNames(family, root, entries)


def dims_of(family: MappingFile, config: Mapping[str, Any]) -> tuple[Dims | None, list[str]]:
    """Returns the dims as the family reads them, or None and the reasons why it cannot."""
    try:
        return family.read(config), []
    except MappingError as e:
        return None, list(e.problems)


def needed(family: MappingFile, dims: Dims) -> set[str]:
    """Returns the names that a model with these dims has; none if a rule cannot be evaluated."""
    try:
        return {b.rule.key for b in family.bind(family.scope(dims)) if not b.rule.alias}
    except (MappingError, ExpressionError):
        return set()


def missing(
    base: StoredNames, shapes: Mapping[str, Shape], dims: Dims | None
) -> dict[str, list[str]]:
    """Returns the names that the family needs and the model lacks, with their logical tensors."""
    wanted = (needed(base.family, dims) if dims is not None else None) or base.names()
    known = {name: of for entry in base.entries.values() for name, (of, _) in entry.items()}
    return {name: of for name, of in known.items() if name in wanted and name not in shapes}


def compose(
    base: StoredNames, shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> tuple[Node, StoredNames] | None:
    """Returns the root of a family of parts, as its file states it, and its names. Returns None if
    the nearest family, `base`, has just the names of the model, or if parts do not fit: `base`
    extends another family, or its own lines need a part that the model does not have.
    """
    node = parse(base.family.path)[0]
    listed = extended(node)
    dims, problems = dims_of(base.family, config)
    gone = missing(base, shapes, dims)
    if not (gone or shapes.keys() - base.names()):
        return None
    if not listed or not all(name.startswith(_PART) for name in listed):
        return None
    own = {name: _without(node[name], name, gone) for name in _TAKEN if name in node}
    parts = [part for part in listed if _is_used(_of_parts([part]), shapes, config)]
    try:
        made = _family(own, parts, shapes, config)
        for part, names in _others(base, shapes):
            if names - made[1].names():
                more = _family(own, [*parts, part], shapes, config)
                if len(dims_of(more[1].family, config)[1]) <= len(problems):
                    parts, made = [*parts, part], more
    except MappingError:
        return None
    return made


def _others(base: StoredNames, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, set[str]]]:
    """Yields the parts of which the model has all tensors and `base` none, and their names; those
    with the most tensors first.
    """
    stems = sorted(path.stem for path in (folder("hf") / _PART).glob("*.yaml"))
    named = [(_PART + stem, _of_parts([_PART + stem]).names()) for stem in stems]
    for part, names in sorted(named, key=lambda one: -len(one[1])):
        if names and names <= shapes.keys() and not names & base.names():
            yield part, names


def _of_parts(parts: list[str]) -> StoredNames:
    block = _node({"is": "layers.{layer}."})  # without parts/decoder, no part states it
    root = _node({"extends": parts, "blocks": _node({LAYERS: block})})
    return names_of(*drafted(root, whole=False))


def _node(entries: Mapping[str, Any]) -> Node:
    """Returns a node of no file."""
    node = Node()
    node.update(entries)
    node.lines.update(dict.fromkeys(entries, "the draft"))
    return node


def _is_used(part: StoredNames, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> bool:
    """Returns whether the model has a tensor or a config key of a part that has tensors."""
    names = part.names()
    keys = {key for spec in (part.root.get("dims") or {}).values() for key in keys_of(spec)}
    return not names or bool(names & shapes.keys() or keys & config.keys())


def _family(
    own: Mapping[str, Any],
    parts: list[str],
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
) -> tuple[Node, StoredNames]:
    """Returns the root of a family with these parts and sections of its own, and its names.

    If the model has a tensor and no config key tells so, the dim that the tensor needs is true.
    Raises MappingError if the sections do not fit the parts.
    """
    inner = _of_parts(parts)
    sections = {name: _fitting(name, entries, own, inner) for name, entries in own.items()}
    root = _node({"extends": parts, **sections})
    made = names_of(*drafted(root))
    dims, _ = dims_of(made.family, config)
    off = {
        rule.condition
        for rule in made.family.rules
        if rule.key in shapes and dims is not None and dims.get(rule.condition) is False
    }
    specs = made.root.get("dims") or {}
    undecided = {name for name in off if not config.keys() & {*keys_of(specs.get(name, {}))}}
    if undecided:
        true = dict.fromkeys(sorted(undecided), True)
        root["constants"] = _node({**(root.get("constants") or {}), **true})
        made = names_of(*drafted(root))
    return root, made


def _without(value: Any, section: str, gone: Mapping[str, Any]) -> Any:
    """Returns a section of the nearest family without its rules for names that are gone."""
    if section == "blocks":
        blocks = dict(value)
        for prefix, block in value.items():
            if isinstance(block, Node) and "tensors" in block:
                blocks[prefix] = _node({**block, "tensors": _less(block["tensors"], prefix, gone)})
        return _node(blocks)
    if section in ("tensors", "layers"):
        return _less(value, LAYERS if section == "layers" else "", gone)
    return value


def _less(rules: Node, prefix: str, gone: Mapping[str, Any]) -> Node:
    """Returns the rules of a block without those for names that are gone."""
    stored = {
        name
        for key, value in rules.items()
        if value is not None
        for spec in (value if isinstance(value, list) else [value])
        for name, _ in expand(key, spec)
    }
    return merge(rules, _node({name: None for name in sorted(stored) if prefix + name in gone}))


def _fitting(section: str, entries: Any, own: Mapping[str, Any], parts: StoredNames) -> Any:
    """Returns a section without defaults of keys that nothing reads, and without nulls for entries
    that the parts do not have.
    """
    if not isinstance(entries, Node):
        return entries
    if section in ("defaults", "default_expressions"):
        specs = [*(parts.root.get("dims") or {}).values(), *(own.get("dims") or {}).values()]
        specs += (own.get("keys") or {}).values()
        read = {key for spec in specs for key in keys_of(spec)}
        return _node({key: value for key, value in entries.items() if key in read})
    known = {*(parts.root.get(section) or {})}
    if section in ("tensors", "layers"):
        prefix = LAYERS if section == "layers" else ""
        known = {name.removeprefix(prefix) for name in parts.names()}
    kept = {
        key: value
        for key, value in entries.items()
        if value is not None or known & {name for name, _ in expand(str(key), None)}
    }
    return _node(kept)
