"""Which logical tensors only one of two mappings has, and the dims that decide it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mckpt.mapping.file import MappingFile
from mckpt.mapping.schema import plain, schema


def switches(dialect: MappingFile, name: str) -> list[str]:
    """Returns the dims of type bool without which a dialect has no rule for a logical tensor."""
    whens = [rule.condition for rule in dialect.rules if name in rule.of and not rule.alias]
    needed = [set(re.split(r"\s+and\s+", when)) for when in whens]
    decisive = set.intersection(*needed) if needed else set()
    return sorted(n for n in decisive if n in schema().dims and schema().dims[n].type == "bool")


def misfits(
    source: str,
    here: set[str],
    target: str,
    there: set[str],
    dims: Mapping[str, Any],
    dialect: MappingFile,
) -> list[str]:
    """Returns a line for each logical tensor (by template) that only one of two mappings has for a
    model with these dims. It names the dims that decide whether the dialect has the tensor.
    """

    def described(name: str) -> str:
        about = schema().tensors[plain(name)].about
        return f"{plain(name)} {list(schema().shape(name, dims))} ({about})"

    lacking = [
        f"{described(n)}: {target} needs it, and {source} has no rule for it"
        + "".join(
            f"; a model without it has `{dim}: {{const: false}}` under `dims`"
            for dim in switches(dialect, n)
            if dims[dim]
        )
        for n in sorted(there - here)
    ]
    return lacking + [
        f"{described(n)}: {source} has it, and {target} has no place for it"
        + "".join(
            f"; it has one where the dim {dim} is true"
            for dim in switches(dialect, n)
            if not dims[dim]
        )
        for n in sorted(here - there)
    ]
