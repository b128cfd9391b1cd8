"""Mapping files: YAML -> rules and dims, and the expressions in them."""

from mckpt.mapping.expression import ExpressionError
from mckpt.mapping.file import NO_MTP, Dims, MappingFile, Scope, without_mtp
from mckpt.mapping.fit import misfits
from mckpt.mapping.forms import (
    NESTED,
    NameForm,
    equal,
    is_part,
    lookup,
    major_minor,
    of_others,
    typed,
)
from mckpt.mapping.heads import is_of_head, with_head
from mckpt.mapping.inert import (
    args_known_by_word,
    in_transformers,
    is_neutral,
    unknown_args,
    unread_keys,
)
from mckpt.mapping.nodes import digest_of
from mckpt.mapping.reading import (
    KINDS,
    dialect_for,
    dialect_of,
    family_with,
    folder,
    load,
    merged,
    names,
    parse_setting,
    refused,
    to_keep,
)
from mckpt.mapping.rule import Bound, Rule, key_pattern
from mckpt.mapping.schema import plain, schema
from mckpt.mapping.stacked import in_memory, renamed, with_stacked_experts
from mckpt.mapping.towers import Tower
from mckpt.mapping.whole import (
    LAYERS,
    SIGN,
    dialect_of_whole,
    of_whole_model,
    text_dialect,
    tower_rule,
    whole_dialect,
)

__all__ = [
    "KINDS",
    "LAYERS",
    "NESTED",
    "NO_MTP",
    "SIGN",
    "Bound",
    "Dims",
    "ExpressionError",
    "MappingFile",
    "NameForm",
    "Rule",
    "Scope",
    "Tower",
    "dialect_for",
    "dialect_of",
    "dialect_of_whole",
    "digest_of",
    "equal",
    "family_with",
    "folder",
    "in_memory",
    "in_transformers",
    "is_neutral",
    "is_of_head",
    "is_part",
    "key_pattern",
    "load",
    "lookup",
    "major_minor",
    "merged",
    "misfits",
    "names",
    "of_others",
    "of_whole_model",
    "parse_setting",
    "plain",
    "refused",
    "schema",
    "text_dialect",
    "to_keep",
    "tower_rule",
    "typed",
    "unknown_args",
    "unread_keys",
    "whole_dialect",
    "with_head",
    "with_stacked_experts",
    "without_mtp",
]
