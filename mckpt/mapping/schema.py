"""The schema, mappings/logical.yaml: every dim and every logical tensor that a mapping can name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mckpt.errors import MappingError
from mckpt.mapping.expression import Expression, ExpressionError
from mckpt.mapping.nodes import FOLDER, Node, parse

FACTORS = ("lora_A", "lora_B")  # of an adapter, behind the name of the weight
CARRIED = (
    "carried."  # starts the names of tensors that no mapping describes, such as those of towers
)
TOWER = "tower"  # in a scope: the shapes of those tensors of them that Megatron has, by name
MAGNITUDE = "lora_magnitude"  # of an adapter with DoRA
_TYPES: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "list": (list, tuple),
}


# Ends the template of a logical tensor that has several shapes, once for the layers with the first
# shape, twice for those with the second. A template that is formatted loses it, so that all layers
# have the same name.
SHAPE = "{layer!s:.0}"


class DimSpec(NamedTuple):
    type: str
    optional: bool
    neutral: Expression | None
    about: str
    low: float  # values outside the bounds can only be damage
    high: float
    by_layer: str | None  # the dim with its value for each layer, where layers differ


class TensorSpec(NamedTuple):
    shape: tuple[Expression, ...]
    about: str


class Schema(NamedTuple):
    """Every dim and every logical tensor."""

    dims: dict[str, DimSpec]
    tensors: dict[str, TensorSpec]
    # the tensors that a quantised export quantises -> the number of the list that each is in
    quantised: dict[str, int]
    not_in_4_bits: frozenset[str]  # those of them that such forms do not quantise
    digest: str  # of logical.yaml
    added: dict[str, Any]  # name -> entry, of the user's files

    def shape(self, name: str, dims: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape of a logical tensor (by template), in elements.

        An optimizer's state of a weight, such as `final_norm.weight@exp_avg`, has the weight's. The
        factors of an adapter of rank 8 are `WEIGHT:lora_A.8` [8, in] and `WEIGHT:lora_B.8` [out,
        8], and its magnitudes `WEIGHT:lora_magnitude.8` [out].
        """
        dims, name = self.of_shape(name, dims), plain(name)
        weight, _, factor = name.partition("@")[0].partition(":")
        if weight.startswith(CARRIED):
            shape = tuple(dims[TOWER][weight])
        else:
            shape = tuple(e(dims) for e in self.tensors[weight].shape)
        if not factor:
            return shape
        side, _, rank = factor.rpartition(".")
        if side == MAGNITUDE:
            return shape[:1]
        return (int(rank), shape[1]) if side == FACTORS[0] else (shape[0], int(rank))

    def of_shape(self, name: str, dims: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the dims of the layers in which a logical tensor has the shape that its template
        numbers.
        """
        number = name.count(SHAPE)
        if not number:
            return dims
        sizes = self.kinds(dims)[number - 1]
        return {**dims, **dict(zip(self.by_layer(), sizes, strict=True))}

    def kinds(self, dims: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Returns the values of the dims of `by_layer` that layers have, in the order in which
        templates number them; none if those of all layers are those of the model.
        """
        found = sorted(set(self.sizes(dims)))
        return [] if found == [tuple(dims[name] for name in self.by_layer())] else found

    def by_layer(self) -> dict[str, str]:
        """Returns the dims whose values may differ between layers, each with the dim that has the
        list of them.
        """
        return {name: dim.by_layer for name, dim in self.dims.items() if dim.by_layer}

    def sizes(self, dims: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Returns the values of the dims of `by_layer` for each layer."""
        return list(zip(*(dims[name] for name in self.by_layer().values()), strict=True))

    def differs(self, name: str) -> bool:
        """Returns whether the shape of a logical tensor depends on a dim of `by_layer`."""
        spec = self.tensors.get(plain(name))  # none for a tensor of a tower
        return spec is not None and any(e.names & self.by_layer().keys() for e in spec.shape)

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


def plain(name: str) -> str:
    """Returns the template of a logical tensor without the number of its shape."""
    return name.replace(SHAPE, "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint with the known names that are most like an unknown one; empty if none is."""
    from difflib import get_close_matches

    found = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; the nearest names are {', '.join(found)}" if found else ""


@functools.cache
def schema() -> Schema:
    """Returns the dims and tensors of logical.yaml, and those that the user's files have added."""
    node, digest = parse(FOLDER / "logical.yaml")
    dims = {name: _dim(entry, later=True) for name, entry in node["dims"].items()}
    tensors = {name: _tensor(entry, later=True) for name, entry in node["tensors"].items()}
    quantised = {name: i for i, listed in enumerate(node["quantised"]) for name in listed}
    return Schema(dims, tensors, quantised, frozenset(node["not_in_4_bits"]), digest, {})


def extend(added: Node) -> None:
    """Adds the dims and logical tensors of a user's file to the schema, for this process.

    Raises MappingError for an entry that is not complete, and for a name that already has another
    definition. A dim needs a `neutral` value, because no other mapping mentions it.
    """
    known = schema()
    readers: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
        "dims": (_dim, known.dims),
        "tensors": (_tensor, known.tensors),
    }
    for kind, (read, there) in readers.items():
        for name, entry in (added.get(kind) or {}).items():
            where = f"{added[kind].lines[name]}: {name}"
            if known.added.get(name) == entry:
                continue
            if name in there:
                raise MappingError(f"{where} has another definition already; rename it")
            try:
                if kind == "dims" and "neutral" not in entry:
                    raise ValueError("it needs `neutral`, its value in all other models")
                there[name] = read(entry)
            except KeyError as e:
                raise MappingError(f"{where}: it needs `{e.args[0]}`") from None
            except (TypeError, ValueError, ExpressionError) as e:
                raise MappingError(f"{where}: {e}") from None
            known.added[name] = entry


def _dim(entry: Mapping[str, Any], later: bool = False) -> DimSpec:
    """Returns a dim. later: its expression is parsed when it is first used."""
    if entry["type"] not in _TYPES:
        raise ValueError(f"its type is {entry['type']!r}, and must be one of {', '.join(_TYPES)}")
    return DimSpec(
        entry["type"],
        entry.get("optional", False),
        Expression(entry["neutral"], later) if "neutral" in entry else None,
        entry["about"],
        entry.get("min", 0),
        entry.get("max", math.inf),
        entry.get("by_layer"),
    )


def _tensor(entry: Mapping[str, Any], later: bool = False) -> TensorSpec:
    return TensorSpec(tuple(Expression(e, later) for e in entry["shape"]), entry["about"])
