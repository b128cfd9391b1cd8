"""The names of tensors that transformers 5 has in memory, where these are not those of published
files: the tensors of all experts of a layer are one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from mckpt.mapping.file import MappingFile
from mckpt.mapping.nodes import FOLDER, digest_of, parse
from mckpt.mapping.rule import Rule

_EXPERT = "experts.{expert}."
_DOWN = ".experts.down_proj"  # a tensor that each such model has


@functools.cache
def _stacked() -> tuple[dict[str, dict[str, Any]], str]:
    return parse(FOLDER / "stacked.yaml")


def with_stacked_experts(family: MappingFile, keys: Collection[str]) -> MappingFile:
    """Returns a family as it describes a model with these stored keys: itself, unless they have the
    names that transformers has in memory.
    """
    if not any(key.endswith(_DOWN) for key in keys):
        return family
    if any(rule.key.endswith(_DOWN) for rule in family.rules):
        return family  # its published files have such tensors
    return in_memory(family)


def in_memory(family: MappingFile, experts: bool = True) -> MappingFile:
    """Returns a family with the names that transformers has in memory.

    experts: False: but for the tensors of one expert each.
    """
    names, digest = _stacked()
    rules = list(family.rules)
    for name, spec in names.items() if experts else ():
        rules = _replaced(rules, name, tuple(spec["of"]), spec["pack"])
    for old, new in family.memory.items():
        rules = [
            rule._replace(key=rule.key.replace(old, new))
            if experts or _EXPERT not in rule.key
            else rule
            for rule in rules
        ]
    return replace(family, digest=digest_of(family.digest + digest), rules=tuple(rules))


def renamed(family: MappingFile, ends: Mapping[str, str]) -> MappingFile:
    """Returns a family with the tensors whose keys have one of these ends, under another end: that
    of a linear, whose weight is [out, in].
    """
    rules = [
        rule._replace(key=rule.key.removesuffix(end) + new, transposed=False)
        for rule in family.rules
        for end, new in ends.items()
        if rule.key.endswith(end)
    ]
    return replace(family, rules=tuple(rules))


def _replaced(rules: list[Rule], name: str, of: tuple[str, ...], pack: str) -> list[Rule]:
    """Returns the rules with one for the tensor `name` of all experts, in the place of those for
    the logical tensors `of`; the same rules if some of them have none.
    """
    apart = {rule.of: rule for rule in rules if _EXPERT in rule.key and not rule.mtp}
    parts = [apart[member,] for member in of if (member,) in apart]
    if len(parts) < len(of):
        return rules
    key = parts[0].key.partition(_EXPERT)[0] + name
    new = parts[0]._replace(key=key, of=of, pack=pack)
    return [new if rule is parts[0] else rule for rule in rules if rule not in parts[1:]]
