"""Drafts a family file for a model that no family describes, from its config and its tensors.

If the model has just the names of the nearest family, the draft extends it. Otherwise the draft is
made of parts, as families are (`composing`); of a nearest family that is not made of parts it
removes the names that the model does not have. Other tensors are recognised by their names in any
family, by names that many programs give, or by their shapes. The draft leaves lines for the user to
complete (MARK).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.errors import MappingError, printable
from mckpt.mapping.composing import (
    Shape,
    StoredNames,
    compose,
    dims_of,
    missing,
    names_of,
    needed,
)
from mckpt.mapping.expression import ExpressionError
from mckpt.mapping.file import Dims, MappingFile
from mckpt.mapping.fit import switches
from mckpt.mapping.forms import equal, is_part
from mckpt.mapping.nodes import Node, parse, plain
from mckpt.mapping.reading import dialect_for, inherited, load, names
from mckpt.mapping.schema import nearest, schema
from mckpt.mapping.shorthand import LAYERS

# Marks a line of the draft that its user completes: names and shapes do not show all that a family
# says, such as the order in which a fused tensor is cut.
MARK = "TODO"
_TEXT = "text_config"  # the key of config.json with the text model of a larger one
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# logical tensors that models store fused, in their usual order
_FUSED = (
    ["attn.q", "attn.k", "attn.v"],
    ["mlp.gate", "mlp.up"],
    ["moe.shared.gate", "moe.shared.up"],
    ["moe.experts.{expert}.gate", "moe.experts.{expert}.up"],
)
# the last words of names that many programs give, and the logical tensors that they stand for
_USUAL = tuple(
    (re.compile(rf"(.*\.)?{words}", re.IGNORECASE), parts.split())
    for words, parts in (
        (
            r"experts\.(.*\.)?(gate_up(_proj)?|w13)",
            "moe.experts.{expert}.gate moe.experts.{expert}.up",
        ),
        (r"experts\.(.*\.)?(w1|gate_proj)", "moe.experts.{expert}.gate"),
        (r"experts\.(.*\.)?(w2|down_proj)", "moe.experts.{expert}.down"),
        (r"experts\.(.*\.)?(w3|up_proj)", "moe.experts.{expert}.up"),
        (r"(w_?qkv|qkv(_proj)?|w_pack|c_attn|query_key_value)", "attn.q attn.k attn.v"),
        (r"(wq|q|query)", "attn.q"),
        (r"(wk|k|key)", "attn.k"),
        (r"(wv|v|value)", "attn.v"),
        (r"(wo|out_proj|(self_)?att(n|ention)\.(o|c_proj|dense|proj))", "attn.o"),
        (r"(gate_up(_proj)?|w13)", "mlp.gate mlp.up"),
        (r"(w1|gate_proj)", "mlp.gate"),
        (r"(w2|down_proj|fc2|c_proj|dense_4h_to_h)", "mlp.down"),
        (r"(w3|up_proj|fc1|c_fc|dense_h_to_4h)", "mlp.up"),
    )
)
_UNREAD = 0.1  # what a key of config.json that a family does not know counts against it
_WIDTH = 98
_LINES = 3  # lines of other families that are shown for one key
_RULES = ("tensors", "layers", "blocks")  # the sections with rules
_MOST = 12  # tensors and config keys of which nothing is known are listed up to this number


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
        names_of(load("hf", name)) for name in names("hf") if not is_part(load("hf", name).forms)
    ]
    stored, wrapper = len(shapes), _Wrapper()
    if isinstance(config.get(_TEXT), Mapping):
        wrapper, shapes = _unwrapped(known, shapes)
        config = config[_TEXT]
    # without model_type transformers cannot load an export
    kind = [f"model_type: {config.get('model_type', MARK)}"]
    base = max(
        known,
        key=lambda k: (
            _score(k, shapes, config) - _UNREAD * len(k.family.unknown(config)),
            -_own_entries(k.family),
        ),
    )
    near, found, own = base.family, len(base.names() & shapes.keys()), Node()
    lacking = missing(base, shapes, dims_of(near, config)[0])
    if composed := compose(base, shapes, config):
        own, base = composed
    dims, problems = dims_of(base.family, config)
    lines = [
        f"# A draft for {named[0]}, from {where}.",
        f"# The nearest family is {near.name}: it has {found} of the {stored} names.",
        f"# Complete the lines with {MARK} from the forward pass of the model in transformers.",
        f"architectures: [{named[0]}]",
        f"extends: {_flow(own.get('extends', near.name))}",
        "canonical: false",
        *(wrapper.lines() if wrapper.names else kind),
        *_computed_lines(near, base.family, config, dims),
        *_config_lines(near, base.family, known, config, problems),
    ]
    left = {of for gone in lacking.values() for of in gone}
    rules, gone, notes = _tensor_lines(base, known, shapes, dims, left)
    kept = {o for e in base.entries.values() for n, (of, _) in e.items() if n in shapes for o in of}
    lines += _section_lines(own, _switched_off(gone, kept, dims), near.name)
    lines += notes
    lines += _rule_lines(own, rules)
    return "\n".join(map(printable, lines)) + "\n"


def _flow(value: Any) -> str:
    """Returns a value as YAML in one line."""
    import yaml

    text = yaml.safe_dump(plain(value), default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _entry(key: Any, value: Any) -> str:
    """Returns a key and its value as YAML in one line of a block."""
    plainly = isinstance(key, str) and re.fullmatch(r"[\w./][\w./{},-]*", key)
    return f"{key if plainly else _flow(key)}: {_flow(value)}"


def _section_lines(own: Node, off: list[str], nearest_family: str) -> Iterator[str]:
    """Yields the sections of a draft that is made of parts, but for its rules.

    off: dims that are false.
    """
    constants = {**(own.get("constants") or {}), **dict.fromkeys(off, False)}
    for section, entries in {**own, "constants": constants}.items():
        if section in ("extends", *_RULES) or not entries:
            continue
        if section in ("defaults", "default_expressions"):
            yield f"# {MARK} those of {nearest_family}; take those of the model's class:"
        of_texts = isinstance(entries, dict) and any(isinstance(v, dict) for v in entries.values())
        if len(line := _entry(section, entries)) < _WIDTH or not isinstance(entries, dict):
            yield line
        elif not of_texts and section != "default_expressions":
            yield from textwrap.wrap(line, width=_WIDTH, subsequent_indent="  ")
        else:
            yield f"{section}:"
            yield from (f"  {_entry(key, value)}" for key, value in entries.items())


def _rule_lines(own: Node, rules: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields the sections with rules: those of `own`, and the lines of each block."""
    rules = dict(rules)
    short = not any(prefix == LAYERS for prefix in own.get("blocks") or ()) and bool(own)
    more = {"tensors": rules.pop("", []), "layers": rules.pop(LAYERS, []) if short else []}
    for section in ("tensors", "layers"):
        kept = [_entry(key, value) for key, value in (own.get(section) or {}).items()]
        if lines := [*kept, *more[section]]:
            yield from (f"{section}:", *_held("  ", lines))
    blocks = own.get("blocks") or Node()
    if rules or blocks:
        yield "blocks:"
    for prefix in dict.fromkeys([*blocks, *rules]):
        block = blocks.get(prefix, Node())
        if block is None:
            yield f"  {prefix}: null"
            continue
        yield f"  {prefix}:"
        yield from (f"    {_entry(k, v)}" for k, v in block.items() if k != "tensors")
        kept = [_entry(key, value) for key, value in (block.get("tensors") or {}).items()]
        if lines := [*kept, *rules.get(prefix, [])]:
            yield from ("    tensors:", *_held("      ", lines))


def _held(indent: str, lines: list[str]) -> list[str]:
    """Returns the lines of a section, which must have a value if all of them are comments."""
    empty = [f"{indent}{{}}"] if all(line.startswith("#") for line in lines) else []
    return [*(f"{indent}{line}" for line in lines), *empty]


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
    known: list[StoredNames], shapes: Mapping[str, Shape]
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


def _score(
    known: StoredNames, shapes: Mapping[str, Shape], config: Mapping[str, Any] | None = None
) -> float:
    """Returns how well a family fits. Each name in common adds to it. Three things subtract a
    little: names that the family needs and the model lacks, values that the family refuses, and
    features that the family computes and no key of the config mentions.
    """
    wanted = {rule.key for rule in known.family.rules if not rule.when}
    dims, problems = (None, []) if config is None else dims_of(known.family, config)
    if dims is not None:
        wanted = needed(known.family, dims) or wanted
    special = 0 if config is None else len(_undecided(known.family, config, dims))
    against = len(wanted - shapes.keys()) + 5 * len(problems) + special
    return len(known.names() & shapes.keys()) - 0.2 * against


def _own_entries(family: MappingFile) -> int:
    """Returns how many parts and lines a family consists of. The one with the fewest decides
    between equally near families.
    """
    sections = parse(family.path)[0].values()
    return sum(len(one) for one in sections if isinstance(one, (Node, list)))


def _undecided(family: MappingFile, config: Mapping[str, Any], dims: Dims | None) -> dict[str, Any]:
    """Returns the dims that no key of the config decides, and that are not neutral."""
    found: dict[str, Any] = {}
    for name, spec in family.dims.items():
        if dims is None or any(family.lookup(config, key) is not None for key in spec.keys):
            continue
        neutral = schema().dims[name].neutral
        if spec.has_const or (neutral and not equal(dims[name], neutral(dims))):
            found[name] = dims[name]
    return found


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
    near: MappingFile, family: MappingFile, config: Mapping[str, Any], dims: Dims | None
) -> Iterator[str]:
    """Yields comments on what the model would compute because `family`, the draft, does; near: the
    nearest family, of which it is made.
    """
    if near.special:
        special = " ".join(near.special.split())
        yield from _comment(f"What is special about {near.name}: {special}.")
    taken = [f"{name} {value}" for name, value in _undecided(family, config, dims).items()]
    if taken:
        yield from _comment(
            f"{MARK} config.json has no key for these dims, so they are those of {near.name}:"
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


def _read_elsewhere(key: str, dialect: str, known: list[StoredNames]) -> Iterator[str]:
    """Yields the lines by which other families read a key of config.json, those of the families
    with the fewest lines of their own first.
    """
    import yaml

    lines: dict[str, str] = {}
    others = [k.family for k in known if k.family.dialect == dialect]
    for other in sorted(others, key=_own_entries):
        for name, dim in other.dims.items():
            if key in dim.keys and name not in lines:
                entry = {name: plain(inherited(other)["dims"][name])}
                text = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10_000)
                line = f"{text.strip()[1:-1]}  # as {other.name} reads it"
                long = f"{name}: see `mckpt mappings show {other.name}`"
                lines[name] = line if len(line) < _WIDTH else long
    yield from list(lines.values())[:_LINES]


def _config_lines(
    near: MappingFile,
    family: MappingFile,
    known: list[StoredNames],
    config: Mapping[str, Any],
    problems: list[str],
) -> Iterator[str]:
    for problem in problems:
        yield f"# {MARK} {problem.removeprefix('config.json: ')}"
    if problems:
        yield "# dims:  # for each, the key of config.json, or {const: VALUE}"
    if unknown := family.unknown(config):
        yield f"# {MARK} {near.name} does not know these keys of config.json. A key that changes"
        yield "# the result belongs under `dims` or `expect`; `inert` is for the others:"
        for key, value in list(unknown.items())[:_MOST]:
            elsewhere = list(_read_elsewhere(key, family.dialect, known))
            hint = "" if elsewhere else nearest(key, schema().dims).replace("names are", "dims are")
            yield f"#   {key}: {str(value)[:60]}{hint}"
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
            yield f"# {MARK} For {near.name} {key} changes nothing, and other families read it:"
            yield f"#   {key}: {str(value)[:80]}"
            yield from (f"#     {line}" for line in elsewhere)


def _tensor_lines(
    base: StoredNames,
    known: list[StoredNames],
    shapes: Mapping[str, Shape],
    dims: Dims | None,
    left: set[str],
) -> tuple[dict[str, list[str]], set[str], list[str]]:
    """Returns the rules that differ from the base family, by the block's prefix; the logical
    tensors that the base family has and the draft does not; and comments on all rules.

    left: the logical tensors of the names that the nearest family has and the model lacks.
    """
    elsewhere = {
        name: of for one in known for entry in one.entries.values() for name, of in entry.items()
    }
    lacking = missing(base, shapes, dims)
    new = {name: shape for name, shape in shapes.items() if name not in base.names()}
    lines: dict[str, list[str]] = {}
    for (prefix, key), entry in base.entries.items():
        gone = [name for name in entry if name in lacking]
        if gone:
            lines.setdefault(prefix, []).append(_entry(key, None))
            kept = {name: of for name, of in entry.items() if name in shapes}
            lines[prefix] += [_rule(name.removeprefix(prefix), *of) for name, of in kept.items()]
    held = {
        of
        for entry in base.entries.values()
        for name, (members, _) in entry.items()
        if name in shapes
        for of in members
    }
    left = {*left, *(of for gone in lacking.values() for of in gone)} - held
    gone_for_good = {of for gone in lacking.values() for of in gone}
    blocks = [prefix for prefix, _ in base.entries if prefix]
    unknown, square = 0, list[str]()
    for name, shape in new.items():
        prefix = max((p for p in blocks if name.startswith(p)), key=len, default="")
        rule, note, members = _recognised(name, shape, elsewhere, left, dims, prefix)
        if rule and len(shape) == 2 and shape[0] == shape[1]:
            square.append(name.removeprefix(prefix))
        gone_for_good -= set(members)
        unknown += rule is None
        if rule is None and unknown > _MOST:
            continue
        if note:
            lines.setdefault(prefix, []).append(f"# {MARK} {note}")
        lines.setdefault(prefix, []).append(rule or f"# {name.removeprefix(prefix)}: ")
    if unknown > _MOST:
        lines.setdefault("", []).append(f"# {MARK} and {unknown - _MOST} more unknown names")
    notes = []
    if unknown:
        notes += _comment(
            f"{MARK} Give each unknown name below a logical tensor (`mckpt mappings show logical`"
            " lists all). If none stands for it, Megatron has no such part, and the model cannot"
            " be converted."
        )
    if square:
        notes += _comment(
            f"{MARK} The shapes of {', '.join(square)} are square, so they do not show whether a"
            " matrix is stored transposed (`transposed: true`). Run `mckpt verify` on the result."
        )
    return lines, gone_for_good, notes


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
        note, (members, pack) = f"{list(shape)}: another family has this name", elsewhere[name]
        transposed = len(shape) == 2 and dims is not None and _joined(members, dims) == shape[::-1]
        transposed = transposed and shape[0] != shape[1]
        return _rule(end, members, pack, transposed), note, members
    if dims is None:
        return None, f"{list(shape)}: nothing known has this name", []
    stem, _, kind = end.rpartition(".")
    usual = [parts for words, parts in _USUAL if words.fullmatch(stem)][:1]
    for parts in (*usual, *_FUSED):
        members = [f"layers.{{layer}}.{part}.{kind}" for part in parts]
        if not set(members) <= left:
            continue
        joined, order = _joined(members, dims), " | ".join(p.rpartition(".")[2] for p in parts)
        pack = "concat" if len(parts) > 1 else "one"
        if joined == shape and len(parts) == 1:
            return _rule(end, members, pack), f"{list(shape)}: the shape of {members[0]}", members
        if joined == shape:
            note = f"{list(shape)} has the shape of [ {order} ]: check the order"
            if parts == _FUSED[0]:
                note += "; `pack: qkv` is for one query group after the other"
            return _rule(end, members, pack), note, members
        if joined == shape[::-1]:
            note = f"{list(shape)} has the transposed shape of [ {order} ]: check the order"
            return _rule(end, members, pack, transposed=True), note, members
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


def _rule(key: str, of: list[str], pack: str, transposed: bool = False) -> str:
    """Returns one line of a block, with logical names without the block's own prefix."""
    short = [name.removeprefix("layers.{layer}.") for name in of]
    if pack == "one" and not transposed:
        return _entry(key, short[0])
    rule: dict[str, Any] = {"of": short[0]} if pack == "one" else {"pack": pack, "of": short}
    return _entry(key, {**rule, **({"transposed": True} if transposed else {})})
