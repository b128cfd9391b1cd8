"""The hub, mappings/logical.yaml: every dim and every logical tensor that a mapping can name."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.mapping.expression import Expression
from mckpt.mapping.nodes import parse

_PACKAGE = Path(__file__).parent.parent
# a wheel has them inside
FOLDER = _PACKAGE / "mappings" if (_PACKAGE / "mappings").is_dir() else _PACKAGE.parent / "mappings"
_TYPES: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "list": (list, tuple),
}


class DimSpec(NamedTuple):
    type: str
    optional: bool
    neutral: Expression | None
    about: str
    low: float  # values outside the bounds can only be damage
    high: float


class TensorSpec(NamedTuple):
    shape: tuple[Expression, ...]
    about: str


class Hub(NamedTuple):
    """logical.yaml: every dim and every logical tensor."""

    dims: dict[str, DimSpec]
    tensors: dict[str, TensorSpec]
    digest: str

    def shape(self, name: str, dims: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape of a logical tensor (by template), in elements."""
        return tuple(e(dims) for e in self.tensors[name].shape)

    def check(self, name: str, value: Any) -> Any:
        """Returns the value if the dim can have it; raises ValueError with the reason if not."""
        dim = self.dims[name]
        if value is None and dim.optional:
            return None
        wanted = _TYPES[dim.type]
        if not isinstance(value, wanted) or (
            isinstance(value, bool) and dim.type in ("int", "float")
        ):
            raise ValueError(f"{name} is {value!r}, and must be of type {dim.type}")
        if dim.type in ("int", "float") and not dim.low <= value <= dim.high:
            raise ValueError(f"{name} is {value}, and must be from {dim.low} to {dim.high}")
        return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint with the known names that are most like an unknown one; empty if none is."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; the nearest names are {', '.join(found)}" if found else ""


@functools.cache
def hub() -> Hub:
    node, digest = parse(FOLDER / "logical.yaml")
    dims = {
        k: DimSpec(
            v["type"],
            v.get("optional", False),
            Expression(v["neutral"]) if "neutral" in v else None,
            v["about"],
            v.get("min", 0),
            v.get("max", math.inf),
        )
        for k, v in node["dims"].items()
    }
    tensors = {
        k: TensorSpec(tuple(Expression(e) for e in v["shape"]), v["about"])
        for k, v in node["tensors"].items()
    }
    return Hub(dims, tensors, digest)
