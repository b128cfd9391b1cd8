"""Mapping files: YAML -> rules and dims, and the expressions in them."""

from mckpt.mapping.file import (
    DIVISIBLE_BY,
    GIVEN,
    Bound,
    Dims,
    MappingFile,
    Rule,
    Scope,
    equal,
    lookup,
)
from mckpt.mapping.hub import hub
from mckpt.mapping.nodes import digest_of
from mckpt.mapping.reading import (
    family_of,
    folder,
    key_pattern,
    load,
    misfits,
    names,
    parse_setting,
    to_keep,
)

__all__ = [
    "DIVISIBLE_BY",
    "GIVEN",
    "Bound",
    "Dims",
    "MappingFile",
    "Rule",
    "Scope",
    "digest_of",
    "equal",
    "family_of",
    "folder",
    "hub",
    "key_pattern",
    "load",
    "lookup",
    "misfits",
    "names",
    "parse_setting",
    "to_keep",
]
