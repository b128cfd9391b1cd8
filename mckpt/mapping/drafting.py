"""Drafts a family file for a model that no family describes, from its config and its tensors.

The draft extends the family that has most of the names. It removes the names that the model does
not have, and recognises tensors by their names in any family, or by their shapes. It leaves lines
for the user to complete (MARK).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.errors import MappingError, printable
from mckpt.mapping.expression import ExpressionError
from mckpt.mapping.file import Dims, MappingFile
from mckpt.mapping.fit import switches
from mckpt.mapping.forms import equal, is_part
from mckpt.mapping.nodes import Node, plain
from mckpt.mapping.reading import dialect_for, inherited, load, names
from mckpt.mapping.rule import expand
from mckpt.mapping.schema import nearest, schema

# Marks a line of the draft that its user completes: names and shapes do not show all that a family
# says, such as the order in which a fused tensor is cut.
MARK = "TODO"
_TEXT = "text_config"  # the key of config.json with the text model of a larger one
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# logical tensors that models store fused, in their usual order
_FUSED = (
    ("attn.q", "attn.k", "attn.v"),
    ("mlp.gate", "mlp.up"),
    ("moe.shared.gate", "moe.shared.up"),
    ("moe.experts.{expert}.gate", "moe.experts.{expert}.up"),
)
_UNREAD = 0.1  # what a key of config.json that a family does not know counts against it
_WIDTH = 98
_LINES = 3  # lines of other families that are shown for one key
_MOST = 12  # tensors and config keys of which nothing is known are listed up to this number

Shape = tuple[int, ...]


class _StoredNames(NamedTuple):
    """The stored names of a family, as its file writes them."""

    family: MappingFile
    # (block or "", key of the file) -> names of the model -> logical tensors and packing
    entries: dict[tuple[str, str], dict[str, tuple[list[str], str]]]

    def names(self) -> set[str]:
        return {name for names in self.entries.values() for name in names}


def draft(config: Mapping[str, Any], tensors: Mapping[str, Shape], where: str) -> str:
    """Returns the text of a family file.

    tensors: shape of every stored tensor. where: the checkpoint, for the first line.
    Raises MappingError for a config that names no architecture.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise MappingError(f"{where}: its config.json names no architectures")
    shapes = {_template(name): tuple(shape) for name, shape in tensors.items()}
    # a family with forms is another family inside of a larger model
    known = [
        _names_of(load("hf", name)) for name in names("hf") if not is_part(load("hf", name).forms)
    ]
    stored, wrapper = len(shapes), _Wrapper()
    if isinstance(config.get(_TEXT), Mapping):
        wrapper, shapes = _unwrapped(known, shapes)
        config = config[_TEXT]
    # without model_type transformers cannot load an export
    kind = ["also:", f"  model_type: \"'{config.get('model_type', MARK)}'\""]
    base = max(
        known,
        key=lambda k: (
            _score(k, shapes, config) - _UNREAD * len(k.family.unknown(config)),
            _times_extended(k.family.name),
        ),
    )
    found = len(base.names() & shapes.keys())
    dims, problems = _dims(base.family, config)
    lines = [
        f"# A draft for {named[0]}, from {where}.",
        f"# The nearest family is {base.family.name}: it has {found} of the {stored} names.",
        f"# Complete the lines with {MARK} from the forward pass of the model in transformers.",
        f"architectures: [{named[0]}]",
        f"extends: {base.family.name}",
        "canonical: false",
        *(wrapper.lines() if wrapper.names else kind),
        *_computed_lines(base.family, config, dims),
        *_config_lines(base.family, known, config, problems),
    ]
    rules, gone = _tensor_lines(base, known, shapes, dims)
    kept = {o for e in base.entries.values() for n, (of, _) in e.items() if n in shapes for o in of}
    if off := _switched_off(gone, kept, dims):
        lines += ["dims:", *(f"  {name}: {{const: false}}" for name in off)]
    lines += rules
    return "\n".join(map(printable, lines)) + "\n"


class _Wrapper(NamedTuple):
    """The parts of a larger model that surround its text model."""

    names: dict[str, str] = {}  # as those of a form: start of a family's name -> stored start
    carried: tuple[str, ...] = ()  # patterns of all other stored names

    def lines(self) -> Iterator[str]:
        """Yields the lines of the draft that describe these parts."""
        yield f"config: {_TEXT}"
        yield f"# {MARK} the keys of the tokens of images, and the key that ties the embeddings:"
        yield "# placeholders: [/image_token_id]"
        yield '# dims: {tied: {key: /tie_word_embeddings, default: "False"}}'
        yield "forms:"
        starts = ", ".join(f'"{start}": {stored}' for start, stored in self.names.items())
        yield f"  published: {{names: {{{starts}}}, carried: [{', '.join(self.carried)}]}}"


def _unwrapped(
    known: list[_StoredNames], shapes: Mapping[str, Shape]
) -> tuple[_Wrapper, dict[str, Shape]]:
    """Returns the parts around a text model, and the text model's shapes under the names of the
    family that has most of them. All other tensors, such as those of a vision tower, are carried.
    """
    anywhere = set[str]().union(*(one.names() for one in known))
    best: tuple[float, str, str, dict[str, str]] = (float("-inf"), "", "", {})
    for at in sorted({name.partition("layers.{")[0] for name in shapes if "layers.{" in name}):
        # the prefix is before every name, or in the place of `model.`
        whole = [("", at.removesuffix("model."))] if at.endswith(".model.") else []
        for start, stored in (*whole, ("model.", at)):
            inner = {n: start + n.removeprefix(stored) for n in shapes if n.startswith(stored)}
            if start:  # the names outside of `model.` stay as they are
                inner |= {n: n for n in anywhere & shapes.keys() if not n.startswith(start)}
            renamed = {name: shapes[n] for n, name in inner.items()}
            found = (max(_score(k, renamed) for k in known), start, stored, inner)
            best = max(best, found, key=lambda one: one[0])
    _, start, stored, inner = best
    others = [name.split(".") for name in shapes if name not in inner]
    towers = {".".join(parts[: 2 if parts[0] == "model" else 1]) for parts in others}
    carried = tuple(f"{tower}.*" for tower in sorted(towers))
    return _Wrapper({start: stored}, carried), {new: shapes[n] for n, new in inner.items()}


def _template(name: str) -> str:
    """Returns model.layers.{layer}.mlp.experts.{expert}.w1 for model.layers.3.mlp.experts.7.w1."""
    indices = iter(("{layer}", "{expert}"))
    return _NUMBER.sub(lambda found: next(indices, found[0]), name)


def _names_of(family: MappingFile) -> _StoredNames:
    root, entries = inherited(family), dict[tuple[str, str], dict[str, tuple[list[str], str]]]()
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
    return _StoredNames(family, entries)


def _score(
    known: _StoredNames, shapes: Mapping[str, Shape], config: Mapping[str, Any] | None = None
) -> float:
    """Names in common count. Names that the family needs, for this config if it can read it, and
    that the model does not have, and values that it refuses, count against it a little.
    """
    needed = {rule.key for rule in known.family.rules if not rule.when}
    dims, problems = (None, []) if config is None else _dims(known.family, config)
    if dims is not None:
        needed = _needed(known.family, dims) or needed
    return len(known.names() & shapes.keys()) - 0.2 * (len(needed - shapes.keys()) + len(problems))


def _needed(family: MappingFile, dims: Dims) -> set[str]:
    """Returns the names that a model with these dims has; none if a rule cannot be evaluated."""
    try:
        return {b.rule.key for b in family.bind(family.scope(dims)) if not b.rule.alias}
    except (MappingError, ExpressionError):
        return set()


def _times_extended(name: str) -> int:
    """Returns how many families extend this one. It decides between equally near families."""
    files = (load("hf", other).path.read_text(encoding="utf-8") for other in names("hf"))
    return sum(f"extends: {name}\n" in text for text in files)


def _dims(family: MappingFile, config: Mapping[str, Any]) -> tuple[Dims | None, list[str]]:
    """Returns the dims as the family reads them, or None and the reasons why it cannot."""
    try:
        return family.read(config), []
    except MappingError as e:
        return None, list(e.problems)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _computed_lines(
    family: MappingFile, config: Mapping[str, Any], dims: Dims | None
) -> Iterator[str]:
    """Yields comments on what the model would compute because its family does."""
    if family.special:
        special = " ".join(family.special.split())
        yield from _comment(f"What is special about {family.name}: {special}.")
    taken = []
    for name, spec in family.dims.items():
        if dims is None or any(family.lookup(config, key) is not None for key in spec.keys):
            continue
        neutral = schema().dims[name].neutral
        if spec.has_const or (neutral and not equal(dims[name], neutral(dims))):
            taken.append(f"{name} {dims[name]}")
    if taken:
        yield from _comment(
            f"{MARK} config.json has no key for these dims, so they are those of {family.name}:"
            f" {', '.join(taken)}. Where the model differs, write the right value under `dims`,"
            " such as `gated: {const: false}`; `mckpt mappings show logical` explains each dim."
        )


def _switched_off(gone: Iterable[str], kept: Iterable[str], dims: Dims | None) -> list[str]:
    """Returns the dims that must be false for Megatron to lack the logical tensors `gone`. A dim
    that a tensor of `kept` needs is true.
    """
    dialect = dialect_for()
    found = {name for of in gone for name in switches(dialect, of)}
    found -= {name for of in kept for name in switches(dialect, of)}
    return sorted(name for name in found if dims is not None and dims[name])


def _read_elsewhere(key: str, dialect: str, known: list[_StoredNames]) -> Iterator[str]:
    """Yields the lines by which other families read a key of config.json, those of the families
    that are extended most often first.
    """
    import yaml

    lines: dict[str, str] = {}
    others = [k.family for k in known if k.family.dialect == dialect]
    for other in sorted(others, key=lambda f: -_times_extended(f.name)):
        for name, dim in other.dims.items():
            if key in dim.keys and name not in lines:
                entry = {name: plain(inherited(other)["dims"][name])}
                text = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10_000)
                line = f"{text.strip()[1:-1]}  # as {other.name} reads it"
                long = f"{name}: see `mckpt mappings show {other.name}`"
                lines[name] = line if len(line) < _WIDTH else long
    yield from list(lines.values())[:_LINES]


def _config_lines(
    family: MappingFile, known: list[_StoredNames], config: Mapping[str, Any], problems: list[str]
) -> Iterator[str]:
    for problem in problems:
        yield f"# {MARK} {problem.removeprefix('config.json: ')}"
    if problems:
        yield "# dims:  # for each, the key of config.json, or {const: VALUE}"
    if unknown := family.unknown(config):
        yield f"# {MARK} {family.name} does not know these keys of config.json. A key that changes"
        yield "# the result belongs under `dims` or `expect`; `inert` is for the others:"
        for key, value in list(unknown.items())[:_MOST]:
            elsewhere = list(_read_elsewhere(key, family.dialect, known))
            near = "" if elsewhere else nearest(key, schema().dims).replace("names are", "dims are")
            yield f"#   {key}: {str(value)[:60]}{near}"
            yield from (f"#     {line}" for line in elsewhere)
        yield "# dims:"
        yield "#   DIM: KEY  # or a line of another family above"
        yield "# expect:"
        yield "#   KEY: [VALUE]  # any other value is refused"
        yield "# inert:"
        yield "#   - [KEY, KEY]"
    unread = {k: v for k in sorted(family.inert & config.keys()) if (v := config[k])}
    for key, value in unread.items():
        if elsewhere := list(_read_elsewhere(key, family.dialect, known)):
            yield f"# {MARK} For {family.name} {key} changes nothing, and other families read it:"
            yield f"#   {key}: {str(value)[:80]}"
            yield from (f"#     {line}" for line in elsewhere)


def _tensor_lines(
    base: _StoredNames, known: list[_StoredNames], shapes: Mapping[str, Shape], dims: Dims | None
) -> tuple[list[str], set[str]]:
    """Returns the rules that differ from the base family, block by block, and the logical tensors
    that the base family has and the draft does not.
    """
    elsewhere = {
        name: of for one in known for entry in one.entries.values() for name, of in entry.items()
    }
    missing = _missing(base, shapes, dims)
    new = {name: shape for name, shape in shapes.items() if name not in base.names()}
    lines: dict[str, list[str]] = {}
    for (prefix, key), entry in base.entries.items():
        gone = [name for name in entry if name in missing]
        if gone:
            lines.setdefault(prefix, []).append(f"{_quoted(key)}: null")
            kept = {name: of for name, of in entry.items() if name in shapes}
            lines[prefix] += [_rule(name.removeprefix(prefix), *of) for name, of in kept.items()]
    left = {of for gone in missing.values() for of in gone}
    gone_for_good = set(left)
    blocks = [prefix for prefix, _ in base.entries if prefix]
    unknown = 0
    for name, shape in new.items():
        prefix = max((p for p in blocks if name.startswith(p)), key=len, default="")
        rule, note, members = _recognised(name, shape, elsewhere, left, dims, prefix)
        gone_for_good -= set(members)
        unknown += rule is None
        if rule is None and unknown > _MOST:
            continue
        if note:
            lines.setdefault(prefix, []).append(f"# {MARK} {note}")
        lines.setdefault(prefix, []).append(rule or f"# {name.removeprefix(prefix)}: ")
    if unknown > _MOST:
        lines.setdefault("", []).append(f"# {MARK} and {unknown - _MOST} more unknown names")
    out = []
    if unknown:
        out += _comment(
            f"{MARK} Give each unknown name below a logical tensor (`mckpt mappings show logical`"
            " lists all). If none stands for it, Megatron has no such part, and the model cannot"
            " be converted."
        )
    if top := lines.pop("", []):
        out += ["tensors:", *(f"  {line}" for line in top)]
        if all(line.startswith("#") for line in top):
            out.append("  {}")
    if lines:
        out.append("blocks:")
    for prefix, rules in lines.items():
        out += [f"  {prefix}:", "    tensors:", *(f"      {rule}" for rule in rules)]
        if all(rule.startswith("#") for rule in rules):
            out.append("      {}")
    return out, gone_for_good


def _missing(
    base: _StoredNames, shapes: Mapping[str, Shape], dims: Dims | None
) -> dict[str, list[str]]:
    """Returns the names that the family needs and the model lacks, with their logical tensors."""
    needed = (_needed(base.family, dims) if dims is not None else None) or base.names()
    known = {name: of for entry in base.entries.values() for name, (of, _) in entry.items()}
    return {name: of for name, of in known.items() if name in needed and name not in shapes}


def _recognised(
    name: str,
    shape: Shape,
    elsewhere: Mapping[str, tuple[list[str], str]],
    left: set[str],
    dims: Dims | None,
    prefix: str,
) -> tuple[str | None, str | None, list[str]]:
    """Returns the rule of a name that the base family does not have, a note on what to check about
    it, and the logical tensors that it holds.
    """
    end = name.removeprefix(prefix)
    if name in elsewhere:
        note = f"{list(shape)}: another family has this name"
        return _rule(end, *elsewhere[name]), note, elsewhere[name][0]
    if dims is not None:
        kind = name.rpartition(".")[2]
        for parts in _FUSED:
            members = [f"layers.{{layer}}.{part}.{kind}" for part in parts]
            if set(members) <= left and _joined(members, dims) == shape:
                order = " | ".join(part.rpartition(".")[2] for part in parts)
                note = f"{list(shape)} has the shape of [ {order} ]: check the order"
                return _rule(end, members, "concat"), note, members
        alike = [of for of in sorted(left) if _shape(of, dims) == shape]
        if alike:
            note = f"{list(shape)}: the shape of {', '.join(alike[:4])}"
            return (_rule(end, alike, "one") if len(alike) == 1 else None), note, alike
    return None, f"{list(shape)}: nothing known has this name", []


def _joined(members: list[str], dims: Dims) -> Shape | None:
    shapes = [_shape(name, dims) for name in members]
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    return (sum(shape[0] for shape in known), *known[0][1:])


def _shape(name: str, dims: Dims) -> Shape | None:
    try:
        return schema().shape(name, dims) if name in schema().tensors else None
    except ExpressionError:
        return None


def _rule(key: str, of: list[str], pack: str) -> str:
    """Returns one line of a block, with logical names without the block's own prefix."""
    short = [name.removeprefix("layers.{layer}.") for name in of]
    plain = [f'"{name}"' if "{" in name else name for name in short]
    if pack == "one":
        return f"{_quoted(key)}: {plain[0]}"
    return f"{_quoted(key)}: {{pack: {pack}, of: [{', '.join(plain)}]}}"


def _quoted(key: str) -> str:
    return f'"{key}"' if key.startswith("{") else key
