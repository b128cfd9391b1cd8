"""Reads the YAML files of mergekit, which name a method, its parameters and the checkpoints.

Each key and each form that mckpt does not have is refused with its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import edited
from mckpt.editing.methods import METHODS, Chosen, Setting, merged
from mckpt.editing.pieces import loaded
from mckpt.editing.stacking import Stack
from mckpt.errors import UsageError
from mckpt.mapping.nodes import Node
from mckpt.mapping.schema import schema
from mckpt.options import AverageOptions

DTYPES: Mapping[str, Literal["bf16", "fp16", "fp32"]] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
# parameters that change nothing if they have this value, or any (None), and the method has them not
NEUTRAL = {"int8_mask": None, "nuslerp_flatten": True, "nuslerp_row_wise": False}
NEUTRAL |= {"filter_wise": False, "rescale": False}
PASSTHROUGH = "passthrough"
RENAMED = {"normalize_weights": "normalize"}


@dataclass(frozen=True)
class Recipe:
    """A merge that a file of mergekit describes: the checkpoints, the method and its parameters."""

    paths: tuple[str, ...]
    base: int  # the number of the checkpoint whose config the result has
    how: Chosen
    dtype: Literal["bf16", "fp16", "fp32"] | None  # of the result, as --dtype has it
    layers: Mapping[str, int]  # of each slice: the line, and the layers that it must have

    def made(self, inputs: Sequence[Checkpoint], options: AverageOptions) -> Checkpoint:
        """Returns the merge. Raises UsageError if a slice has not all layers of the models."""
        for line, count in self.layers.items():
            if count != (layers := inputs[self.base].dims["num_layers"]):
                raise UsageError(
                    f"{line}: layer_range: ends at {count}, and the models have {layers} layers;"
                    " mckpt merges whole models"
                )
        return merged(inputs, self.how, options.summed != "weights", self.base)


@dataclass(frozen=True)
class Passthrough:
    """Layers of several checkpoints, one after the other."""

    paths: tuple[str, ...]  # that of the first layer is the first one
    order: tuple[tuple[int, int], ...]  # for each new layer, the number of a path and of a layer
    dtype: Literal["bf16", "fp16", "fp32"] | None

    def made(self, inputs: Sequence[Checkpoint], options: AverageOptions) -> Checkpoint:
        """Returns the new model. Raises UsageError for models of other shapes."""
        return edited(inputs[0], [Stack.made(self.order, inputs[1:])])


def read(options: AverageOptions, sources: Sequence[Any]) -> Recipe | Passthrough:
    """Reads the file that --recipe names. Raises UsageError."""
    assert options.recipe is not None
    if sources:
        raise UsageError("--recipe: names the checkpoints; give DST alone")
    others = "method parameters weights schedule reverse normalize start end window min_interval"
    if given := [name for name in others.split() if getattr(options, name)]:
        raise UsageError(f"--{given[0].replace('_', '-')}: the recipe has it; leave it out")
    root = loaded(Path(options.recipe))
    if not isinstance(root, Node):
        raise UsageError(f"{options.recipe}: a recipe has keys, such as merge_method: linear")
    return (
        _passthrough(root)
        if root.get("merge_method") == PASSTHROUGH
        else _recipe(root, options.arithmetic)
    )


def _refuse(node: Node, key: str, why: str) -> NoReturn:
    raise UsageError(f"{node.lines.get(key, '--recipe')}: {key}: {why}")


def _known(node: Node, keys: str) -> None:
    for key in node:
        if key not in keys.split():
            _refuse(node, key, f"mckpt does not have it; known are {', '.join(keys.split())}")


def _recipe(root: Node, arithmetic: str) -> Recipe:
    _known(
        root, "merge_method models slices base_model parameters dtype out_dtype tokenizer_source"
    )
    name = root.get("merge_method")
    if not isinstance(name, str) or name not in METHODS:
        known = ", ".join((*METHODS, PASSTHROUGH))
        where = root.lines.get("merge_method", "--recipe")
        raise UsageError(f"{where}: merge_method: {name!r}; mckpt has {known}")
    if root.get("tokenizer_source", "base") != "base":
        _refuse(root, "tokenizer_source", "mckpt takes the tokenizer of the base; write base")
    layers: dict[str, int] = {}
    found = [(_path(node, "model"), _settings(node, name)) for node in _models(root, layers)]
    base = _path(root, "base_model") if "base_model" in root else None
    listed = [path for path, _ in found]
    if base is not None and base not in listed:
        if name == "linear":
            _refuse(root, "base_model", "is not among the models, so it has no weight")
        found, listed = [*found, (base, {})], [*listed, base]
    needs = METHODS[name].needs_base
    if base is None and (needs or name == "slerp"):
        raise UsageError(f"{root.lines['merge_method']}: {name}: needs base_model")
    has_base = bool(needs) or (needs is None and base is not None)
    if base is not None and (has_base or name == "slerp"):
        found.sort(key=lambda one: one[0] != base)  # the others keep their order
    each = [own for _, own in found[has_base:]]
    how = Chosen(name, _settings(root, name), each, has_base, arithmetic, root.get("dtype"))
    how.check(dict(_lines(root)))
    paths = tuple(path for path, _ in found)
    first = paths.index(base) if base is not None else 0
    return Recipe(paths, first, how, _dtype(root), layers)


def _dtype(root: Node) -> Literal["bf16", "fp16", "fp32"] | None:
    """Returns the dtype of the result."""
    kinds = [key for key in ("out_dtype", "dtype") if root.get(key) is not None]
    for key in kinds:
        if root[key] not in DTYPES:
            _refuse(root, key, f"{root[key]!r}; mckpt has {', '.join(DTYPES)}")
    return DTYPES[root[kinds[0]]] if kinds else None


def _passthrough(root: Node) -> Passthrough:
    """Reads slices, each of which has some layers of one checkpoint."""
    _known(root, "merge_method slices dtype out_dtype tokenizer_source base_model")
    paths, order = list[str](), list[tuple[int, int]]()
    slices = root.get("slices")
    if not isinstance(slices, list) or not slices:
        raise UsageError(f"{root.lines['merge_method']}: passthrough: wants slices of layers")
    for one in slices:
        sources = one.get("sources") if isinstance(one, Node) else None
        if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], Node):
            _refuse(root, "slices", "each slice of passthrough has one source")
        (node,) = sources
        _known(node, "model layer_range")
        path = _path(node, "model")
        paths += [path] * (path not in paths)
        order += [(paths.index(path), layer) for layer in range(*_span(node))]
    if root.get("base_model", paths[0]) != paths[0]:
        _refuse(
            root, "base_model", f"config and tokenizer are those of the first model, {paths[0]}"
        )
    return Passthrough(tuple(paths), tuple(order), _dtype(root))


def _models(root: Node, layers: dict[str, int]) -> Iterator[Node]:
    """Yields the entries of the models, or of the only slice, whose layers are noted."""
    key = "slices" if "slices" in root else "models"
    if "slices" in root and "models" in root:
        _refuse(root, "slices", "give models or slices, not both")
    entries = _listed(root, key, root.get(key))
    if key == "slices":
        if len(entries) != 1:
            _refuse(root, key, "mckpt merges whole models, so it takes one slice of all layers")
        _known(entries[0], "sources")
        entries = _listed(root, key, entries[0].get("sources"))
    for node in entries:
        _known(node, "model parameters" + " layer_range" * (key == "slices"))
        if key == "slices":
            start, end = _span(node)
            if start != 0:
                _refuse(node, "layer_range", f"starts at {start}; mckpt merges whole models")
            layers[node.lines["layer_range"]] = end
        yield node


def _listed(root: Node, key: str, entries: Any) -> list[Node]:
    """Returns a list of entries with keys. Raises UsageError for anything else."""
    if not isinstance(entries, list) or not all(isinstance(one, Node) for one in entries):
        _refuse(root, key, "must be a list of models")
    return entries


def _span(node: Node) -> tuple[int, int]:
    """Returns the layer_range of an entry: its first layer and the one behind its last."""
    span = node.get("layer_range")
    if isinstance(span, list) and [type(n) for n in span] == [int, int] and span[0] < span[1]:
        try:
            return span[0], schema().check("num_layers", span[1])
        except ValueError as e:
            _refuse(node, "layer_range", str(e))
    where = "layer_range" if "layer_range" in node else "model"
    _refuse(node, where, "wants layer_range: [FIRST, END]")


def _path(node: Node, key: str) -> str:
    path = node.get(key)
    if not isinstance(path, str) or "+" in path:
        _refuse(
            node, key if key in node else next(iter(node), key), "give the path of a checkpoint"
        )
    return path


def _settings(node: Node, method: str) -> dict[str, Setting]:
    """Returns the parameters of an entry."""
    known = METHODS[method].parameters
    stated = node.get("parameters") or Node()
    if not isinstance(stated, Node):
        _refuse(node, "parameters", "must be keys and values")
    found: dict[str, Setting] = {}
    for name, value in stated.items():
        if name not in known and name in NEUTRAL and NEUTRAL[name] in (None, value):
            continue
        numbers = value if isinstance(value, list) else [value]
        if not numbers or any(isinstance(one, dict) for one in numbers):
            _refuse(stated, name, "mckpt has numbers and lists of numbers, without filters")
        try:
            values = [float(one) for one in numbers]
        except (TypeError, ValueError):
            _refuse(stated, name, f"{value!r} is not a number")
        found[RENAMED.get(name, name)] = values if isinstance(value, list) else values[0]
    return found


def _lines(root: Node) -> Iterator[tuple[str, str]]:
    """Yields the last line of each parameter, for messages."""
    for node in (root, *_models(root, {})):
        for name, line in (node["parameters"].lines if node.get("parameters") else {}).items():
            yield RENAMED.get(name, name), f"{line}: "
