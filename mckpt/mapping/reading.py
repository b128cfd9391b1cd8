"""Reads mapping files into checked rules and dims. No other module reads `mappings/`."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mckpt.errors import MappingError, UsageError
from mckpt.mapping.expression import Expression, ExpressionError
from mckpt.mapping.file import Condition, Dim, MappingFile
from mckpt.mapping.forms import read_forms
from mckpt.mapping.heads import language_models
from mckpt.mapping.inert import inert_keys
from mckpt.mapping.nodes import FOLDER, Node, digest_of, merge, parse, plain
from mckpt.mapping.nodes import load as load_yaml
from mckpt.mapping.registration import read_registration
from mckpt.mapping.rule import COUNT, Parse, Rule, first_key, read_rules
from mckpt.mapping.schema import extend, nearest, schema
from mckpt.mapping.shorthand import expanded, with_defaults, with_second_names
from mckpt.mapping.towers import read_towers

# families, dialects, readers of a run_config.yaml, names of other trainers that are only read
KINDS = ("hf", "megatron", "run_config", "trainers")
_TOP: dict[str, type | tuple[type, ...]] = {
    "models": str,
    "special": str,
    "architectures": list,
    "model_type": str,
    "defaults": Node,
    "default_expressions": Node,
    "keys": Node,
    "constants": Node,
    "always": Node,
    "layers": Node,
    "same_as": Node,
    "extends": (str, list),
    "canonical": bool,
    "trainer": str,
    "dialect": str,
    "default": bool,
    "requires": str,
    "megatron": list,
    "choices": Node,
    "by_version": Node,
    "given": Node,
    "derive": Node,
    "dims": Node,
    "also": Node,
    "follow": Node,
    "flags": Node,
    "run_flags": Node,
    "by_args": Node,
    "upgrade": Node,
    "expect": Node,
    "values": Node,
    "inexact": Node,
    "inert": list,
    "ignore": Node,
    "drop": Node,
    "refuse": Node,
    "numbering": Node,
    "stage_sizes": str,
    "tensors": Node,
    "groups": Node,
    "blocks": Node,
    "objects": Node,
    "config": (str, list),
    "forms": Node,
    "towers": Node,
    "notes": list,
    "placeholders": list,
    "needs": list,
    "nested": list,
    "memory": Node,
    "verify": Node,
    "specs": list,
    "registration": Node,
    "logical": Node,
    "dialects": Node,
}
_RENAMED = {"computed": "ignore", "said": "by_args"}  # keys of mckpt 0.1
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)|\d+$")  # of layers and experts in a stored key
# what each key of a section holds
_INNER: dict[str, type] = {
    "blocks": Node,
    "groups": Node,
    "forms": Node,
    "inexact": Node,
    "expect": list,
    "values": list,
    "choices": list,
    "same_as": str,
    "logical": Node,
    "dialects": Node,
}
_RULES = ("tensors", "objects")
_NESTED = ("blocks", "groups")  # sections whose entries have _RULES of their own
# sections in which a null must remove an entry of the files that this one extends
_REMOVABLE = ("dims", *_RULES, *_NESTED, "inexact", "refuse")
# what a file that extends another does not take over from it
_OWN = (
    *("models", "special", "architectures", "canonical", "default"),
    *("defaults", "default_expressions", "model_type"),
)
# what a conversion supplies to the expressions of a dialect
_GIVEN = (
    "dtype",
    "padded_vocab_size",
    "divisible_by",
    "format",
    "transformer_impl",
    "experts",
    "tp",
    "stages",
)
_KINDS: dict[type, str] = {
    Node: "keys and values",
    list: "a list",
    str: "text",
    bool: "true or false",
}
_OF_DIM = ("default", "read", "write", "when", "write_when")  # expressions
_DIM = (
    *("key", "default", "values", "const", "read", "write", "when", "write_when", "free"),
    "tensor",
    "unstored",
)


def folder(kind: str) -> Path:
    return FOLDER / kind


@functools.cache
def names(kind: str) -> tuple[str, ...]:
    """Returns the names of the files of one of KINDS that come with mckpt."""
    return tuple(sorted(p.stem for p in folder(kind).glob("*.yaml")))


@functools.cache
def load(kind: str, name: str, own: str | None = None) -> MappingFile:
    """Returns the file of that name, or the user's own file if the name ends in .yaml.

    own: for a dialect, the user's family file, which may add rules to it.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder(kind) / f"{name}.yaml"
    if not path.is_file():
        if path == Path(name):
            raise MappingError(f"{name}: no such file")
        raise MappingError(
            f"no mapping {name!r}; known: {', '.join(names(kind))}, or the path of a file that"
            " ends in .yaml"
        )
    of_user = own is not None or path == Path(name)
    root, digest = _inherit(path, kind, ())
    extend(root.get("logical") or Node())
    for dialect in root.get("dialects") or ():
        if dialect not in names("megatron"):
            where, known = root["dialects"].lines[dialect], ", ".join(names("megatron"))
            raise MappingError(f"{where}: the dialect {dialect!r} is not known; known are {known}")
    if own is not None:
        load("hf", own)  # adds to the schema what the rules name
        above, above_digest = _inherit(Path(own), "hf", ())
        added = (above.get("dialects") or {}).get(name) or Node()
        _check_sections(added)
        root, digest = merge(root, added), digest_of(digest + above_digest)
    if useless := list(_useless_nulls(root)):
        raise MappingError.of(f"{path}: has mistakes:", useless)
    found = _read(path, root, digest, of_user, inert_keys() if kind == KINDS[0] else frozenset())
    return replace(found, rules=_in_order(found.rules)) if kind == KINDS[0] else found


def _in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns the rules of a family in the order of their tensors in logical.yaml, which is that of
    the tensors of a layer in the files of a model. The lines of a family may have any order.
    """
    places = {name: place for place, name in enumerate(schema().tensors)}
    return tuple(sorted(rules, key=lambda rule: (places[rule.of[0]], rule.key)))


@functools.cache
def family_with(architecture: str) -> str:
    """Returns the name of the family of an architecture of transformers, or of the causal language
    model with the same decoder.

    Raises MappingError for an architecture that no family has, or that Megatron-Core has no layers
    for.
    """
    # most names of classes begin with that of the family; the file of the longest is read first
    named = [name for name in names("hf") if architecture.lower().startswith(name.replace("_", ""))]
    named.sort(key=len, reverse=True)
    others = list(language_models(architecture))
    for wanted in (architecture, *others):
        for name in (*named, *names("hf")):
            # only a file that has the name in its text is worth parsing
            text = (folder("hf") / f"{name}.yaml").read_text(encoding="utf-8")
            if wanted in text and wanted in load("hf", name).architectures:
                return name
        if wanted == architecture:
            _refuse(architecture, wanted)
    for wanted in others:
        _refuse(architecture, wanted)
    known = [a for n in names("hf") for a in load("hf", n).architectures]
    near = nearest(architecture.partition("For")[0], {a.partition("For")[0] for a in known})
    raise MappingError(
        f"no family has the architecture {architecture}{near}; `mckpt mappings list`"
        f" prints all {len(known)}.",
        "A family is a file of names. `mckpt mappings new HF_DIR >"
        " my.yaml` drafts one from the checkpoint, `mckpt mappings check my.yaml HF_DIR` lists"
        " what is left, and `--mapping my.yaml` uses it. Names and shapes do not prove that a model"
        " computes the same: run `mckpt verify` on the result. docs/new-model.md is the guide.",
    )


def _refuse(architecture: str, language_model: str) -> None:
    """Raises MappingError if Megatron-Core has no layers for a language model.

    architecture: the class with its decoder.
    """
    if language_model in refused():
        raise MappingError(
            f"no dialect of Megatron can hold {architecture}: {refused()[language_model]}"
        )


@functools.cache
def refused() -> dict[str, str]:
    """Returns the architectures that Megatron-Core has no layers for, and what is missing."""
    return dict(parse(FOLDER / "refused.yaml")[0])


def _inherit(path: Path, kind: str, above: tuple[Path, ...]) -> tuple[Node, str]:
    """Returns the root of a file in the long form, merged with all that it extends, and a digest of
    their texts.
    """
    node, digest = parse(path)
    root, digests = _with_extended(node, path, kind, above)
    return root, digest_of(digests + digest) if digests else digest


def _with_extended(
    node: Node, path: Path, kind: str, above: tuple[Path, ...] = ()
) -> tuple[Node, str]:
    """Returns a root in the long form, merged with all that it extends, and their digests.

    path: the file of the root, beside which the files that it extends may lie.
    """
    _check_sections(node)
    node = expanded(node)
    merged, digests = Node(), ""
    for name in extended(node):
        base = path.parent / f"{name}.yaml"
        if not base.is_file():
            base = folder(kind) / f"{name}.yaml"
        if not base.is_file() or base in above:
            raise MappingError(
                f"{node.lines['extends']}: there is no mapping {name!r} to extend"
                + " (it extends itself)" * (base in above)
            )
        part, part_digest = _inherit(base, kind, (*above, path))
        part = with_defaults(part)
        for own in _OWN:
            part.pop(own, None)
        merged, digests = merge(merged, part), digests + part_digest
    return merge(merged, node), digests


def _useless_nulls(root: Node, sections: Iterable[str] = _REMOVABLE) -> Iterator[str]:
    """Yields a problem for each null that is left after a file was merged with those that it
    extends: they have no entry that it removes.
    """
    for section in sections:
        node = root.get(section)
        if not isinstance(node, Node):  # not there, or a mistake that `_read` reports
            continue
        named = [str(key) for key, value in node.items() if value is not None]
        for key, value in node.items():
            if value is None:
                yield (
                    f"{node.lines[key]}: {key}: null removes nothing, because no file that this one"
                    f" extends has this key under {section}{nearest(str(key), named)}"
                )
            elif section in _NESTED and isinstance(value, Node):
                yield from _useless_nulls(value, _RULES)


def _check_sections(node: Node) -> None:
    for key in node:
        if key in _RENAMED:
            raise MappingError(
                f"{node.lines[key]}: mckpt 0.2 renamed {key!r} to {_RENAMED[key]!r}, and the"
                " `ignore` of a family to `drop`: rename the keys in this file"
            )
        if key not in _TOP:
            raise MappingError(
                f"{node.lines[key]}: {key!r} is not a key of a mapping file; the keys"
                f" are {', '.join(_TOP)}"
            )
        _shaped(node, key, _TOP[key])
        listed = node[key] if isinstance(node[key], list) else ()
        for one in listed:  # a list in a list is an alias of YAML, such as that of keys in `inert`
            if not all(isinstance(text, str) for text in (one if isinstance(one, list) else [one])):
                raise MappingError(f"{node.lines[key]}: {key} holds texts, not {one!r}")
        for inner in (node[key] or ()) if key in _INNER else ():
            _shaped(node[key], inner, _INNER[key])


def extended(node: Node) -> list[str]:
    """Returns the names of the files that a file extends; a later one overrides an earlier."""
    if "extends" not in node:
        return []
    named = node["extends"]
    named = [named] if isinstance(named, str) else named
    if not named or not all(isinstance(name, str) for name in named):
        raise MappingError(
            f"{node.lines['extends']}: `extends` needs the name of a mapping file, or a list of"
            f" names, not {node['extends']!r}"
        )
    return list(named)


def dialect_for(
    family: MappingFile | None = None, named: str | None = None, own: str | None = None
) -> MappingFile:
    """Returns the dialect in which a checkpoint is written: the user's, else the one that the
    model's family names, else the default.

    own: the user's family file, which may add rules to dialects. Raises MappingError for a mistake
    in any of them, because a reader of the checkpoint will load all dialects with these rules.
    """
    named = named or (family and family.dialect) or _default_dialect()
    if named not in (known := names("megatron")):
        raise UsageError(f"no dialect {named!r}; known: {', '.join(known)}")
    if own is not None:
        for added in inherited(load("hf", own)).get("dialects") or ():
            load("megatron", added, own)
    return load("megatron", named, own)


@functools.cache
def _default_dialect() -> str:
    """Returns the name of the dialect with `default: true`, and parses none to find it."""
    for name in names("megatron"):
        text = (folder("megatron") / f"{name}.yaml").read_text(encoding="utf-8")
        if re.search("^default: true", text, re.MULTILINE):
            return name
    raise MappingError(f"{folder('megatron')}: no dialect has `default: true`")


def dialect_of(
    keys: Iterable[str], own: str | None = None, run_config: str = "", dist: bool = False
) -> MappingFile:
    """Returns the dialect that has most of the keys of a Megatron checkpoint; the default one if
    several have as many.

    own: the user's family file, which may add rules to the dialects. run_config: the text of
    run_config.yaml, in which one of the `specs` of a dialect decides before the keys. dist: the
    format is torch_dist, which has none of the keys that a dialect has `when: not dist`.
    """
    # layers and experts have the same names: each name is looked up once
    counts = Counter(_NUMBERS.sub("0", key) for key in keys)

    def score(name: str) -> tuple[bool, int, bool]:
        file = load("megatron", name, own)
        found = sum(counts[key] for key in _first_keys(name, own, dist) if key in counts)
        return any(spec in run_config for spec in file.specs), found, file.default

    return load("megatron", max(names("megatron"), key=score), own)


@functools.cache
def _first_keys(name: str, own: str | None, dist: bool) -> frozenset[str]:
    """Returns the keys of a dialect that `dialect_of` looks for, with 0 for each number."""
    rules = load("megatron", name, own).rules
    possible = (r for r in rules if not (dist and any(map(_never_dist, r.when))))
    return frozenset(_NUMBERS.sub("0", first_key(rule.key)) for rule in possible)


def _never_dist(when: Expression) -> bool:
    """Returns whether a condition is a list of `and` with `not dist` in it."""
    return " or " not in when.text and "not dist" in when.text.split(" and ")


def drafted(node: Node, whole: bool = True) -> tuple[MappingFile, Node]:
    """Returns the family that a root describes, whose file is not written yet, and the root merged
    with all that it inherits, in the long form. Raises the errors of `load`.

    whole: False for parts, whose nulls may remove entries of other parts.
    """
    path = folder("hf") / "draft.yaml"
    root, _ = _with_extended(node, path, "hf")
    if whole and (useless := list(_useless_nulls(root))):
        raise MappingError.of(f"{path}: has mistakes:", useless)
    for section in () if whole else ("dims", "tensors", "refuse"):
        for key in [key for key, value in (root.get(section) or {}).items() if value is None]:
            del root[section][key]
    return _read(path, root, "", True, inert_keys()), with_second_names(with_defaults(root))


def inherited(file: MappingFile) -> Node:
    """Returns the root of a family's YAML, merged with all that it inherits, in the long form."""
    return with_second_names(with_defaults(_inherit(file.path, "hf", ())[0]))


def merged(kind: str, name: str) -> str:
    """Returns a mapping file as one YAML text, with all that it inherits."""
    path = folder(kind) / f"{name}.yaml"
    return _dump(_inherit(path, kind, ())[0])


def _dump(root: Node) -> str:
    import yaml

    root.pop("extends", None)
    sections = {key: plain(root[key]) for key in _TOP if key in root}
    text: str = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=140)
    return text


def to_keep(name: str) -> str:
    """Returns the text of a family file that needs no other file of the user's. Files that it
    extends are merged in, unless they come with mckpt.
    """
    path = Path(name)
    node, _ = parse(path)
    if not any((path.parent / f"{base}.yaml").is_file() for base in extended(node)):
        return path.read_text(encoding="utf-8")
    text = _dump(_inherit(path, "hf", ())[0])
    return f"# {path.name}, merged by mckpt with the files that it extends.\n{text}"


def _shaped(node: Node, key: Any, wanted: type | tuple[type, ...]) -> None:
    """Raises MappingError unless the key holds a value of its type, or null."""
    if node[key] is not None and not isinstance(node[key], wanted):
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        allowed = " or ".join(_KINDS[kind] for kind in kinds)
        raise MappingError(f"{node.lines[key]}: {key} holds {allowed}, not {node[key]!r}")


def _read(path: Path, root: Node, digest: str, of_user: bool, inert: frozenset[str]) -> MappingFile:
    """Returns the content of a file.

    inert: keys that change nothing, beside those that the file lists.
    of_user: also checks all expressions and their names. Those of the files that come with mckpt
    are parsed when they are used; the tests check them.
    """
    problems: list[str] = []

    def expression(text: Any, where: str) -> Expression | None:
        if text is None:
            return None
        try:
            return Expression(text, later=not of_user)
        except ExpressionError as e:
            problems.append(f"{where}: {e}")
            return None

    def expressions(section: str) -> dict[str, Expression]:
        node = root.get(section) or Node()
        return {k: e for k, v in node.items() if (e := expression(v, node.lines[k])) is not None}

    root = with_second_names(with_defaults(root))
    dims = _read_dims(root, expression, problems)
    found = MappingFile(
        name=path.stem,
        path=path,
        digest=digest,
        models=root.get("models") or "",
        special=root.get("special") or "",
        architectures=tuple(root.get("architectures") or ()),
        canonical=bool(root.get("canonical", False)),
        dialect=root.get("dialect") or "",
        default=bool(root.get("default", False)),
        requires=expression(root.get("requires"), path.name),
        megatron=tuple(map(str, root.get("megatron") or ())),
        trainer=root.get("trainer") or "",
        numbering=expressions("numbering").get(COUNT),
        stage_sizes=expression(root.get("stage_sizes"), path.name),
        choices={k: tuple(v or ()) for k, v in (root.get("choices") or {}).items()},
        by_version=expressions("by_version"),
        given=dict(root.get("given") or {}),
        derive=expressions("derive"),
        dims=dims,
        also=expressions("also"),
        follow=expressions("follow"),
        flags=root.get("flags") or {},
        run_flags=root.get("run_flags") or {},
        by_args=expressions("by_args"),
        expect={k: tuple(v) for k, v in (root.get("expect") or {}).items() if v is not None},
        upgrade=expressions("upgrade"),
        values={k: tuple(v) for k, v in (root.get("values") or {}).items() if v is not None},
        refused=_read_conditions(root, "refuse", set(), expression, problems),
        warned=_read_conditions(root, "inexact", {"loads"}, expression, problems),
        # a key that a dim reads is inert only in the file that this one extends
        inert=inert.union(
            k for one in root.get("inert") or () for k in ([one] if isinstance(one, str) else one)
        ).difference(*(dim.keys for dim in dims.values())),
        ignore=dict(root.get("ignore") or {}),
        drop=dict(root.get("drop") or {}),
        rules=tuple(read_rules(root, "tensors", expression, problems)),
        objects=tuple(read_rules(root, "objects", expression, problems)),
        inside=_listed(root.get("config")),
        forms=dict(read_forms(root, problems)),
        notes=tuple(root.get("notes") or ()),
        placeholders=tuple(root.get("placeholders") or ()),
        needs=tuple(_listed(one) for one in root.get("needs") or ()),
        specs=tuple(root.get("specs") or ()),
        nested=tuple(root.get("nested") or ()),
        memory=dict(root.get("memory") or {}),
        verify=dict(root.get("verify") or {}),
        registration=read_registration(root.get("registration") or {}, problems),
        towers=dict(read_towers(root, problems)),
    )
    if of_user:
        problems += _undeclared(found, root)
    if problems:
        # a block is read for tensors and for objects
        raise MappingError.of(f"{path}: has mistakes:", list(dict.fromkeys(problems)))
    return found


def _listed(value: str | list[Any] | None) -> tuple[str, ...]:
    """Returns the texts of a key that has one of them or a list, which may contain lists."""
    if isinstance(value, str):
        return (value,)
    return tuple(text for one in value or () for text in _listed(one))


def _read_dims(root: Node, expression: Parse, problems: list[str]) -> dict[str, Dim]:
    """Returns the dims of a file; adds errors to `problems`."""
    dims: dict[str, Dim] = {}
    for name, spec in (root.get("dims") or Node()).items():
        where = root["dims"].lines[name]
        if name not in schema().dims:
            near = nearest(str(name), schema().dims)
            problems.append(f"{where}: logical.yaml has no dim {name!r}{near}")
            continue
        spec = {"key": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, dict) or spec.keys() - set(_DIM):
            problems.append(f"{where}: {name} may say {', '.join(_DIM)}, not {spec!r}")
            continue
        keys = spec.get("key", [])
        keys = [keys] if isinstance(keys, str) else keys
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            problems.append(f"{where}: the key of {name} is a text or a list of texts: {keys!r}")
            continue
        dims[name] = Dim(
            keys=tuple(keys),
            values=spec.get("values"),
            has_const="const" in spec,
            const=spec.get("const"),
            free=spec.get("free", False),
            tensor=spec.get("tensor"),
            unstored=spec.get("unstored"),
            where=where,
            **{k: expression(spec.get(k), where) for k in _OF_DIM},
        )
        if not keys and "const" not in spec and spec.get("read") is None:
            problems.append(f"{where}: {name} has no key, no const and no read")
    return dims


def _read_conditions(
    root: Node, section: str, optional: set[str], expression: Parse, problems: list[str]
) -> dict[str, Condition]:
    """Returns the entries of `refuse` or `inexact`; adds errors to `problems`."""
    entries, found = root.get(section) or Node(), dict[str, Condition]()
    required = {"when", "why"}
    for key, entry in entries.items():
        where = entries.lines[key]
        if not isinstance(entry, dict) or not required <= entry.keys() <= required | optional:
            more = "".join(f", and may have `{name}`" for name in optional)
            problems.append(f"{where}: {key} requires `when` and `why`{more}, not {entry!r}")
        elif (when := expression(entry["when"], where)) is not None:
            found[key] = Condition(**{**entry, "when": when})
    return found


def _undeclared(file: MappingFile, root: Node) -> Iterator[str]:
    """Returns problems: names that expressions use and that are not declared, and names that a
    dialect must declare and lacks.
    """
    dims, chosen = {*schema().dims}, {*file.choices, "pp"}
    read, written = dims | {"config", "value"}, dims | chosen | {*file.given}
    ruled = dims | chosen | {*file.derive} | ({"form"} if file.forms else set())
    top = file.path.name
    entries: list[tuple[str, str, Expression | None, set[str]]] = [  # file and line, key
        (top, "requires", file.requires, dims),
        (top, "stage_sizes", file.stage_sizes, {"config"}),
        (top, "numbering: count", file.numbering, dims),
    ]
    for section, declared, known in (
        ("derive", file.derive, ruled),
        ("by_version", file.by_version, {"megatron"}),
        ("by_args", file.by_args, {"config"}),
        ("upgrade", file.upgrade, {"config"}),
        ("refuse", {k: c.when for k, c in file.refused.items()}, {"config"}),
        ("also", file.also, written),
        ("follow", file.follow, written),
        ("inexact", {k: c.when for k, c in file.warned.items()}, written | {"megatron"}),
    ):
        for key, expression in declared.items():
            entries.append((root[section].lines[key], f"{section}: {key}", expression, known))
    for name, dim in file.dims.items():
        entries += [(dim.where, name, e, read) for e in (dim.default, dim.read, dim.when)]
        entries += [(dim.where, name, e, written) for e in (dim.write, dim.write_when)]
    of_layer, counting = ruled | {"layer"}, dims | {"layer"}
    for rule in (*file.rules, *file.objects):
        entries += [(rule.where, rule.key, when, of_layer) for when in rule.when]
        entries.append((rule.where, rule.key, rule.number, counting))
        entries += [(rule.where, rule.key, e, dims) for e in (rule.heads, rule.scale, *rule.shape)]
    for where, key, used, known in entries:
        for name in sorted(used.names - known if used else ()):
            yield f"{where}: {key}: {name!r} is not known here; {_where_known(name, file)}"
    if file.megatron and (lacks := [name for name in _GIVEN if name not in file.given]):
        yield f"{file.path.name}: a dialect must declare {', '.join(lacks)} under `given`"


def _where_known(name: str, file: MappingFile) -> str:
    """Returns the cure for a name that an expression cannot use."""
    if name in file.given:
        return "`given` names can be used under `dims` (write), `also` and `inexact` only"
    return "it is not a dim, and nothing in the file declares it (`given`, `choices`, `derive`)"


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses `name=value` of --set into (dim, value)."""
    name, equals, value = text.partition("=")
    if not equals or name not in schema().dims:
        raise UsageError(
            f"--set {text!r}: give DIM=VALUE with the name of a dim, of those that `mckpt mappings"
            f" show logical` lists{nearest(name, schema().dims)}"
        )
    try:
        return name, schema().check(name, load_yaml(value))
    except ValueError as e:
        raise UsageError(f"--set {text!r}: {e}") from None
