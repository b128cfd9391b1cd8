"""Runs Megatron-Core with an adapter beside the weights, as Megatron-Bridge does. Each linear W
with an adapter returns

    W x + scale * B (A x)                                   LoRA
    m / ||W + scale * B A|| * (W x + scale * B (A x))       DoRA

The factors A [r, in] and B [out, r] come from a checkpoint of adapters alone, in torch_dist. Each
rank reads the part that it multiplies: the rows of B that are the rows of its W, and the columns of
A that are the columns of its W.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mckpt.errors import SourceError, UsageError
from mckpt.trainer import load


class FactorShards(NamedTuple):
    """The factors of one weight of a linear on this rank, as shards of the stored tensors.

    b has two shards if the rows of this rank are two parts of the stored rows.
    """

    name: str  # "", or the name of a canonical adapter, such as adapter_q
    a: Any
    b: list[Any]
    magnitude: list[Any]  # of DoRA, like b


class Linear(NamedTuple):
    """A linear of this rank with its adapter."""

    module: Any
    is_cut: bool  # in columns, over the tensor-parallel ranks
    is_gated: bool  # packs gate and up; else q, k and v, if it has canonical adapters
    parts: list[FactorShards]


def attach(chunks: list[Any], adapter: Mapping[str, Any]) -> list[str]:
    """Adds an adapter to the chunks, whose weights are loaded. Returns the stored keys that no
    linear of this rank has.

    adapter: path of the checkpoint, alpha, and names, the section `megatron` of
    mappings/adapters.yaml. Raises UsageError for a model of Transformer Engine.
    """
    from megatron.core import dist_checkpointing

    place, names = str(load.directory_of(adapter["path"])), adapter["names"]
    if chunks[0].config.sequence_parallel:
        raise UsageError(
            f"{place}: the model runs with sequence parallelism, with which mckpt does not run"
            " adapters beside the weights; give --tp 1"
        )
    stored = dist_checkpointing.load_tensors_metadata(place)
    common = load.read_common(place)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata.pop("singleton_local_shards", None)  # keys have no number of an expert
    linears = [
        linear
        for chunk, state in zip(chunks, load.sharded_state(chunks, metadata).values(), strict=True)
        for linear in _linears(chunk, state, stored, names)
    ]
    shards = {
        str(number): shard
        for number, shard in enumerate(
            shard
            for linear in linears
            for part in linear.parts
            for shard in (part.a, *part.b, *part.magnitude)
        )
    }
    read = {shard.key for shard in shards.values()}
    with load.safe_pickles():
        loaded = dist_checkpointing.load(shards, place, validate_access_integrity=False)
    values = (loaded[str(number)] for number in range(len(shards)))
    for linear in linears:
        factors = [
            (
                part.name,
                next(values),
                torch.cat([next(values) for _ in part.b]),
                torch.cat([next(values) for _ in part.magnitude]) if part.magnitude else None,
            )
            for part in linear.parts
        ]
        _hook(linear, factors, adapter["alpha"], list(names["canonical"].values()))
    return sorted(key for key in stored.keys() - read if f".{names['module']}." in key)


def _linears(
    chunk: Any, state: dict[str, Any], stored: Mapping[str, Any], names: Mapping[str, Any]
) -> Iterator[Linear]:
    """Yields the linears of a chunk that have an adapter in the checkpoint.

    state: the sharded state of the chunk's weights, whose keys and shards give those of the
    adapters. stored: the tensors of the checkpoint.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for name, value in state.items():
        if not name.endswith(".weight"):
            continue
        key = value.key
        shards = load.sharded_values({name: value})
        for stem, front in _stems(name, key, shards[0]):
            there = [
                part
                for part in ("", *names["canonical"].values())
                if _key(stem, names, part, "a") in stored
            ]
            if not there:
                continue
            module = chunk.get_submodule(name.removesuffix(".weight"))
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                raise UsageError(
                    f"{stem}: has an adapter, and mckpt runs adapters beside the linears of"
                    f" Megatron-Core's local spec only, and not beside {type(module).__name__}"
                )
            whole = all(shard.key == key for shard in shards)
            ends = len(shards[0].global_shape) - 2  # the axes before those of the matrix
            cuts = shards[0].axis_fragmentations[ends + 1]
            column = shards[0].global_offset[ends + 1] // shards[0].local_shape[1]
            tp, rank = module.tp_group.size(), module.tp_group.rank()
            rows = [
                (shard.global_offset[ends] // shard.local_shape[0], shard.axis_fragmentations[ends])
                for shard in shards
            ]
            is_gated = whole and len(shards) == 2
            parts = []
            for part in there:
                own = rows
                if part in names["halved"] and tp > 1:
                    own = [(rank, 2 * tp), (tp + rank, 2 * tp)]
                elif part or not whole:
                    own = [(rank, tp)]
                b = _key(stem, names, part, "b")
                if b not in stored:
                    raise SourceError(f"{b}: is missing, and {_key(stem, names, part, 'a')} is not")
                magnitude = f"{stem}.{names['module']}.{names['magnitude']}"
                parts.append(
                    FactorShards(
                        part,
                        _shard(stored, _key(stem, names, part, "a"), front, (0, 1), (column, cuts)),
                        [_shard(stored, b, front, row, (0, 1)) for row in own],
                        [_shard(stored, magnitude, front, row) for row in own]
                        if magnitude in stored
                        else [],
                    )
                )
            yield Linear(module, cuts > 1, is_gated, parts)


def _stems(name: str, key: str, shard: Any) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yields the keys that the module of a weight may have in the checkpoint, each with the place
    and number of parts of the axes before the matrix: of the layer and the expert, if the key
    names none.
    """
    ends = len(shard.global_shape) - 2
    front = list(zip(shard.global_offset[:ends], shard.global_shape[:ends], strict=True))
    stem = key.removesuffix(".weight")
    yield stem, front
    if front and re.search(r"\.layers\.\d+\.", name) and not re.search(r"\.layers\.\d+\.", key):
        yield stem.replace(".layers.", f".layers.{front[0][0]}.", 1), front[1:]


def _key(stem: str, names: Mapping[str, Any], part: str, side: str) -> str:
    return ".".join(filter(None, (stem, names["module"], part, names["factors"][side])))


def _shard(
    stored: Mapping[str, Any], key: str, front: list[tuple[int, int]], *cuts: tuple[int, int]
) -> Any:
    """Returns the part of a stored tensor that this rank reads.

    front: of the axes before the matrix, the place and the size. cuts: of the axes of the matrix,
    which part is read, and of how many.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    shape = tuple(stored[key].global_shape[len(front) :])
    if len(shape) != len(cuts) or any(n % of for n, (_, of) in zip(shape, cuts, strict=True)):
        raise SourceError(
            f"{key}: is {list(stored[key].global_shape)}, which does not fit the weight of its"
            " linear"
        )
    local = [n // of for n, (_, of) in zip(shape, cuts, strict=True)]
    offsets = [(axis, *cut) for axis, cut in enumerate((*front, *cuts))]
    data = torch.empty(local, dtype=stored[key].dtype)
    return ShardedTensor.from_rank_offsets(key, data, *offsets, prepend_axis_num=len(front))


def _hook(
    linear: Linear,
    factors: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]],
    alpha: float,
    order: list[str],
) -> None:
    """Makes a linear add the product of its adapter to its output.

    factors: name, A, B and the magnitudes of each part. alpha: divided by the rank of B, which
    experts may have of their own, it is the scale. order: of the canonical adapters: q, k, v,
    gate and up.
    """
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    module, weight, tp = linear.module, linear.module.weight, linear.module.tp_group.size()
    where = {"device": weight.device, "dtype": weight.dtype}
    pairs = {
        name: (a.to(**where), alpha / b.shape[-1] * b.to(**where)) for name, a, b, _ in factors
    }
    magnitudes = factors[0][3]
    times: torch.Tensor | None = None
    if magnitudes is not None:
        a, b = pairs[""]
        lengths = torch.linalg.vector_norm(weight.float() + b.float() @ a.float(), dim=1)
        times = (magnitudes.to(weight.device).float() / lengths).to(weight.dtype)

    # a linear of local_stack.py may normalise its input, which the adapter needs too
    normalised = getattr(module, "normalised", lambda x: x)

    def product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, a)
        # the products of an expert's ranks are added later, with its output
        if linear.is_cut and not module.explicit_expert_comm:
            inner = reduce_from_tensor_model_parallel_region(inner, group=module.tp_group)
        return F.linear(inner, b)

    def add(_: Any, args: tuple[Any, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        x, (out, bias) = args[0], output
        x = normalised(x)
        if "" in pairs:
            added = product(x, *pairs[""])
        else:
            # [q q k v | q q k v] with one part for each group of heads, or [gate | up]
            groups = 1 if linear.is_gated else max(1, module.config.num_query_groups // tp)
            heads = module.config.kv_channels * groups
            rows = out.shape[-1]
            sizes = [rows // 2] * 2 if linear.is_gated else [rows - 2 * heads, heads, heads]
            names = order[-2:] if linear.is_gated else order[:3]
            products = [
                product(x, *pairs[name]) if name in pairs else out.new_zeros(*out.shape[:-1], size)
                for name, size in zip(names, sizes, strict=True)
            ]
            split = [one.unflatten(-1, (groups, -1)) for one in products]
            added = torch.cat(split, -1).flatten(-2)
        if times is None:
            return out + added, bias
        inside = 0 if module.skip_bias_add or module.bias is None else module.bias
        return (out - inside + added) * times + inside, bias

    module.register_forward_hook(add)
