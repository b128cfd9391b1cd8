"""The rules of a mapping file: reads them, expands blocks and braces, checks every word, and binds
them to the layers and experts of one model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.geometry.packing import PACKINGS, TP_KINDS
from mckpt.lazy import numpy as np
from mckpt.mapping.expression import Expression
from mckpt.mapping.nodes import BRACES, Node
from mckpt.mapping.schema import CARRIED, nearest, schema
from mckpt.values.dtypes import TABLE


class Rule(NamedTuple):
    """One stored key template and the logical tensors packed in it.

    An object rule has no members.
    """

    key: str
    of: tuple[str, ...]
    pack: str
    tp: str  # column, row, vocab or replicated
    stage: str | None  # first or last: the pipeline stage of a tensor that is in no layer
    when: tuple[Expression, ...]  # the rule applies to the layers for which all are true
    alias: bool  # a further copy of a tensor that another rule stores
    written: bool  # False: an alias that is read if it is present, and never written
    dtype: str | None  # the dtype in which it is always stored
    # True for layers of multi-token prediction. Their numbers follow the decoder's; in a key, {mtp}
    # counts them from 0.
    mtp: bool
    indices: tuple[str, ...]  # "layer", "expert", if its tensors or its key have them
    where: str
    number: Expression | None = None  # the number that stands for {layer} in its key; None: layer
    transposed: bool = False  # the stored tensor is the transpose of the packed one
    heads: Expression | None = None  # groups of the packings qkv and paired; None: num_query_groups
    offset: float = 0.0  # the stored values are the logical ones plus this number
    encoder: bool = False  # {layer} counts the layers of the encoder, not those of the decoder
    # the value of all elements where a source does not have the tensor; None: it must be there
    absent: float | None = None
    # the sizes of the axes of one layer's or expert's array, which has more axes than the packed
    # tensor; empty: the same axes
    shape: tuple[Expression, ...] = ()
    scale: Expression | None = None  # the stored values are the logical ones times this number
    # how many layers of a tower the stored tensor holds along a leading axis; the packed tensor has
    # their rows one after the other. 0: it has no such axis
    stack: int = 0

    @property
    def carried(self) -> bool:
        """Returns whether it is a tensor of a tower, which keeps its dtype; an adapter's factor of
        one, and the state of its optimizer, are none.
        """
        return self.of_tower and "@" not in self.of[0] and ":" not in self.of[0]

    @property
    def of_tower(self) -> bool:
        """Returns whether it is a tensor of a tower, or a factor or a state of one."""
        return bool(self.of) and self.of[0].startswith(CARRIED)

    @property
    def condition(self) -> str:
        """Returns `when` as one text."""
        if len(self.when) == 1:
            return self.when[0].text
        return " and ".join(f"({e.text})" for e in self.when)

    @property
    def shared(self) -> bool:
        """Returns whether several keys are copies of one tensor: the keys name a layer, and the
        tensor does not.
        """
        return "layer" in self.indices and bool(self.of) and "{layer}" not in self.of[0]

    def stacked(self) -> tuple[str, ...]:
        """Returns the indices that are leading axes of the stored tensor because the key does not
        name them.
        """
        return tuple(
            i
            for i in self.indices
            if f"{{{i}}}" not in self.key and not (i == "layer" and self.mtp)
        )


class Bound(NamedTuple):
    """A rule with the layers (or [0]) and experts (or [0]) of one model to which it applies."""

    rule: Rule
    layers: np.ndarray
    experts: np.ndarray
    numbers: np.ndarray  # of each layer: the number that stands for it in the key
    num_layers: int  # of the decoder
    # the layers that one stored tensor holds, in the order of its axis; empty: all of them
    stack: tuple[int, ...] = ()

    def key(self, number: int, expert: int = 0) -> str:
        """Returns the key of the tensor of the layer with this number."""
        return self.rule.key.format(layer=number, expert=expert, mtp=number - self.num_layers)

    def keys(self) -> list[str]:
        """Returns all keys that name layer and expert, layer by layer."""
        experts = list(map(str, self.experts.tolist()))
        out: list[str] = []
        for number in self.numbers.tolist():
            key = self.rule.key.replace("{expert}", "\0").format(
                layer=number, mtp=number - self.num_layers
            )
            out += [key.replace("\0", expert) for expert in experts]
        return out

    def instances(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the layers and the experts of the tensors that `keys` name."""
        return np.repeat(self.layers * (not self.rule.shared), len(self.experts)), np.tile(
            self.experts, len(self.layers)
        )

    def global_keys(self) -> list[tuple[str, int]]:
        """Returns the (key, layer) of each stored tensor whose axes are the indices that its key
        does not name. Such a key never has an expert.
        """
        if "layer" in self.rule.stacked() or "layer" not in self.rule.indices:
            return [(self.key(0), 0)]
        numbered = zip(self.numbers.tolist(), self.layers.tolist(), strict=True)
        return [(self.key(number), layer) for number, layer in numbered]

    def axes(self, scope: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the sizes of the axes that `Rule.stacked` names."""
        every = scope["encoder_layers" if self.rule.encoder else "num_layers"]
        size = {"layer": len(self.stack) or every, "expert": scope["num_experts"]}
        return tuple(size[index] for index in self.rule.stacked())

    def places(self, layers: np.ndarray) -> np.ndarray:
        """Returns the places of some layers on the axis of a tensor that holds several."""
        return np.searchsorted(self.stack, layers) if self.stack else layers


_INDEX = re.compile(r"\{(\w+)\}")
COUNT = "count"  # of `numbering`: how many numbers there are
_RULE = (
    *("of", "pack", "heads", "tp", "stage", "when", "alias", "dtype", "offset", "mtp", "expert"),
    *("transposed", "absent", "shape", "scale"),
)
ENCODER = "encoder.{layer}."  # of the logical names of an encoder's layers
_BLOCK = ("is", "when", "instead", "mtp", "groups", "tensors", "objects")

Parse = Callable[[Any, str], "Expression | None"]  # text, and where it stands


class _Scope(NamedTuple):
    """The rules of one node of a file, and the prefixes and conditions of all of them."""

    rules: object  # a Node, unless the file is wrong
    prefix: str = ""  # of the stored keys
    logical: str = ""  # the prefix of the logical tensors
    instead: tuple[str, Expression | None] | None = None  # another prefix, and when
    again: bool = False  # the rules of a block once more, for multi-token prediction
    number: Expression | None = None  # see Rule
    when: tuple[object, ...] = ()  # the texts of conditions on all rules


def read_rules(root: Node, section: str, expression: Parse, problems: list[str]) -> Iterator[Rule]:
    """Yields the rules of the top level, and of each block with its prefixes; braces are expanded.

    section: `tensors` or `objects`.
    """
    yield from _rules(_Scope(root.get(section) or Node()), expression, problems)
    for prefix, block in (root.get("blocks") or Node()).items():
        where = root["blocks"].lines[prefix]
        for scope in _scopes(root, section, prefix, block or Node(), where, expression, problems):
            yield from _rules(scope, expression, problems)


def _scopes(
    root: Node,
    section: str,
    prefix: str,
    block: Node,
    where: str,
    expression: Parse,
    problems: list[str],
) -> Iterator[_Scope]:
    """Yields each group of a block and its own rules.

    If a block has `mtp`, all of them come a second time, for the layers of multi-token prediction:
    `mtp` is their prefix, or the prefix as `key` with an `instead` of its own.
    """
    if strange := sorted(map(str, block.keys() - set(_BLOCK))):
        problems.append(
            f"{where}: the block {prefix} may have {', '.join(_BLOCK)}, not {', '.join(strange)}"
        )
    groups = block.get("groups") or []
    if not isinstance(prefix, str) or not isinstance(groups, list):
        problems.append(
            f"{where}: the block {prefix} needs a prefix as its key, and `groups` a list"
        )
        return
    rules = [
        (found.get(section), found.get("when"))
        for found in [_group(root, str(name), where, problems) for name in groups]
    ]
    rules.append((block.get(section), None))
    mtp = block.get("mtp")
    key = mtp.get("key") if isinstance(mtp, dict) else mtp
    if mtp is not None and not isinstance(key, str):
        problems.append(f"{where}: `mtp` of {prefix} needs a prefix, or `key` with the prefix")
        mtp = None
    mtp = {"key": mtp} if isinstance(mtp, str) else mtp
    prefix, number = _numbered(root, prefix, expression)
    prefixes = [(prefix, block.get("instead"), False)]
    if mtp:
        prefixes.append((mtp["key"], mtp.get("instead"), True))
    for start, other, again in prefixes:
        if other is not None and (not isinstance(other, dict) or {"key", "when"} - other.keys()):
            problems.append(f"{where}: `instead` of {start} wants `key` and `when`")
            other = None
        instead = (other["key"], expression(other["when"], where)) if other else None
        for node, own in rules:
            logical, counted = block.get("is", ""), None if again else number
            when = block.get("when"), own
            yield _Scope(node or Node(), start, logical, instead, again, counted, when)


def _group(root: Node, name: str, where: str, problems: list[str]) -> Node:
    groups = root.get("groups") or Node()
    if not isinstance(found := groups.get(name), Node):
        problems.append(
            f"{where}: {name!r} is not the name of a group; the groups are"
            f" {', '.join(map(str, groups))}"
        )
        return Node()
    return found


def _numbered(root: Node, prefix: str, expression: Parse) -> tuple[str, Expression | None]:
    """Returns the prefix with {layer} in place of a name of `numbering`, and the name's value."""
    numbering = root.get("numbering") or Node()
    for name in _INDEX.findall(prefix):
        if name in numbering and name != COUNT:
            number = expression(numbering[name], numbering.lines[name])
            return prefix.replace(f"{{{name}}}", "{layer}"), number
    return prefix, None


def _rules(scope: _Scope, expression: Parse, problems: list[str]) -> Iterator[Rule]:
    node, prefix, logical, instead, again, number, always = scope
    if not isinstance(node, Node):
        problems.append(f"the tensors of {prefix or 'the file'} are keys and values, not {node!r}")
        return
    for key, value in node.items():
        where = node.lines[key]
        if not isinstance(key, str):
            problems.append(f"{where}: {key!r} is not the name of a tensor")
            continue
        for spec in value if isinstance(value, list) else [value]:
            try:
                expanded = list(expand(key, spec))
            except ValueError as e:
                problems.append(f"{where}: {prefix + key}: {e}")
                continue
            for stored, one in expanded:
                if again and one.get("mtp"):
                    continue
                if again or "{mtp}" in prefix:
                    one = {**one, "mtp": True}
                try:
                    rule = _rule(prefix + stored, one, always, logical, number, where, expression)
                except (ValueError, TypeError) as e:
                    problems.append(f"{where}: {prefix + stored}: {e}")
                    continue
                if instead is None:
                    yield rule
                    continue
                other_prefix, condition = instead
                if condition is None:  # it is among the problems
                    continue
                if (elsewhere := expression(f"not ({condition.text})", where)) is not None:
                    yield rule._replace(when=(elsewhere, *rule.when))
                yield rule._replace(key=other_prefix + stored, when=(condition, *rule.when))


def expand(key: str, spec: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields one rule for each of the words in `{q,k,v}`, in the key, in `of` and in `when`."""
    spec = {"of": spec} if isinstance(spec, str) else {} if spec is None else spec
    if not isinstance(spec, dict):
        raise ValueError(f"wants a tensor, or {', '.join(_RULE)}, not {spec!r}")
    of = spec.get("of", [])
    of = [of] if isinstance(of, str) else of
    if not isinstance(of, list) or not all(isinstance(o, str) for o in of):
        raise ValueError(f"`of` names tensors, not {of!r}")
    found = BRACES.search(key)
    words = found[1].split(",") if found else []
    for inside in BRACES.findall(" ".join([*of, str(spec.get("when", ""))])):
        if len(inside.split(",")) != len(words):
            raise ValueError(
                f"{{{inside}}} has {len(inside.split(','))} words, and the key has {len(words)}"
            )
    if not found:
        yield key, {**spec, "of": of}
        return
    for i, word in enumerate(words):

        def pick(text: str, i: int = i) -> str:
            return BRACES.sub(lambda m: m[1].split(",")[i], text)

        when = {"when": pick(str(spec["when"]))} if "when" in spec else {}
        yield (
            key[: found.start()] + word + key[found.end() :],
            {**spec, "of": [pick(o) for o in of], **when},
        )


def _rule(
    key: str,
    spec: Mapping[str, Any],
    always: tuple[object, ...],
    prefix: str,
    number: Expression | None,
    where: str,
    expression: Parse,
) -> Rule:
    if spec.keys() - set(_RULE):
        raise ValueError(
            f"a rule may say {', '.join(_RULE)}, not {', '.join(sorted(spec.keys() - set(_RULE)))}"
        )
    # /embed.weight does not get the block's prefix
    of = tuple(o[1:] if o.startswith("/") else prefix + o for o in spec["of"])
    for name in of:
        if name not in schema().tensors:
            near = nearest(name, schema().tensors)
            raise ValueError(f"logical.yaml has no tensor {name!r}{near}")
    mtp, alias = bool(spec.get("mtp")), spec.get("alias", False)
    if alias not in (False, True, "read"):
        raise ValueError(f"alias is true, or `read` for one that is not written, not {alias!r}")
    asked = {"layer": mtp or (not of and "{layer}" in prefix), "expert": bool(spec.get("expert"))}
    indices = tuple(
        i for i in ("layer", "expert") if asked[i] or any(f"{{{i}}}" in n for n in of or (key,))
    )
    for index in _INDEX.findall(key):
        if index not in (*indices, *(["mtp"] if mtp else [])):
            raise ValueError(f"{{{index}}} is not an index of {', '.join(of) or 'an object'}")
    if set("{}") & set(_INDEX.sub("", key)):
        raise ValueError("has a brace that belongs to no index")
    if any(set(_INDEX.findall(n)) != set(_INDEX.findall(of[0])) for n in of):
        raise ValueError("its tensors do not have the same indices")
    pack = spec.get("pack", "one")
    if pack not in PACKINGS:
        raise ValueError(f"no packing {pack!r}; known: {', '.join(PACKINGS)}")
    if pack == "one" and len(of) > 1:
        raise ValueError("several tensors need a `pack`")
    tp = spec.get("tp", "replicated")
    if tp not in TP_KINDS:
        raise ValueError(f"no tp kind {tp!r}; known: {', '.join(TP_KINDS)}")
    when = [expression(text, where) for text in (*always, spec.get("when"))]
    dtype = spec.get("dtype")
    if dtype not in (None, *TABLE):
        raise ValueError(f"no dtype {dtype!r}; known: {', '.join(TABLE)}")
    heads, offset = expression(spec.get("heads"), where), spec.get("offset", 0)
    absent = spec.get("absent")
    if heads is not None and pack not in ("qkv", "paired"):
        raise ValueError("`heads` is for the packings qkv and paired only")
    if not isinstance(shape := spec.get("shape", []), list):
        raise ValueError(f"`shape` is a list of sizes, not {shape!r}")
    sizes = [expression(size, where) for size in shape]
    if type(offset) not in (int, float):
        raise ValueError(f"`offset` is a number, not {offset!r}")
    if type(absent) not in (int, float, type(None)) or (absent is not None and pack != "one"):
        raise ValueError(f"`absent` is a number, for one tensor, not {absent!r}")
    return Rule(
        key,
        of,
        pack,
        tp,
        spec.get("stage"),
        tuple(e for e in when if e is not None),
        bool(alias),
        alias != "read",
        dtype,
        mtp,
        indices,
        where,
        number,
        bool(spec.get("transposed")),
        heads,
        float(offset),
        (of or (prefix,))[0].startswith(ENCODER),
        None if absent is None else float(absent),
        tuple(e for e in sizes if e is not None),
        expression(spec.get("scale"), where),
    )


def key_pattern(key: str) -> re.Pattern[str]:
    """Returns a regular expression for a key template with its indices filled in."""
    return re.compile(_INDEX.sub(r"\\d+", re.escape(key).replace(r"\{", "{").replace(r"\}", "}")))


def first_key(key: str) -> str:
    """Returns a key template with 0 for each of its indices."""
    return _INDEX.sub("0", key)
