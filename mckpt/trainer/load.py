"""Loads a checkpoint into the chunks, strictly.

`torch_dist` is loaded by dist_checkpointing, `torch` from this rank's own file. The load is
stricter than that of Megatron-LM, which retries with strict=False and drops what does not fit: the
checkpoint must have every key of the model but _extra_state, and every parameter is NaN before the
load and none after it. A checkpoint of a Transformer Engine model loads into a local one and the
other way round, although they name the same tensors differently.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from mckpt import formats
from mckpt.errors import SourceError
from mckpt.formats.base import Format
from mckpt.formats.megatron import save_directory
from mckpt.formats.megatron.optimizer import LAYER_WISE, loads_at_its_sizes
from mckpt.geometry.parallel import Parallel
from mckpt.trainer import optimizer_order, rng
from mckpt.trainer.build import rank_names

# One tensor has two names: one in a Transformer Engine layer, where the norm is part of the linear
# behind it and experts are grouped, and one in a local layer. The last pair are the names up to
# megatron-core 0.16 and from 0.17 on. `torch` files contain all of these; in the keys of
# `torch_dist` megatron-core renames some itself, and the norm before a MoE is left. Each side is a
# regular expression and the replacement that gives the other name.
TWO_NAMES = (
    (
        (r"self_attention\.linear_qkv\.layer_norm_(\w+)$", r"input_layernorm.\1"),
        (r"input_layernorm\.(weight|bias)$", r"self_attention.linear_qkv.layer_norm_\1"),
    ),
    (
        (r"mlp\.linear_fc1\.layer_norm_(\w+)$", r"pre_mlp_layernorm.\1"),
        (r"pre_mlp_layernorm\.(weight|bias)$", r"mlp.linear_fc1.layer_norm_\1"),
    ),
    (
        (r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"experts.local_experts.\3.\1.\2"),
        (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r"experts.\2.\3\1"),
    ),
    (
        (r"linear_(q|kv)_up_proj\.layer_norm_(\w+)$", r"\1_layernorm.\2"),
        (
            r"self_attention\.(q|kv)_layernorm\.(weight|bias)$",
            r"self_attention.linear_\1_up_proj.layer_norm_\2",
        ),
    ),
    (
        (r"^(mtp\.layers\.\d+)\.transformer_layer\.", r"\1.mtp_model_layer."),
        (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
    ),
)


def other_name(name: str, there: Collection[str]) -> str:
    """Returns the name of the tensor `name` in `there`, by one or several of TWO_NAMES; if none of
    them is there, `name` itself.
    """
    names = [name]
    for sides in TWO_NAMES:
        others = [
            re.sub(pattern, replacement, one) for one in names for pattern, replacement in sides
        ]
        names += [other for other in others if other not in names]
    return next((one for one in names if one in there), name)


MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
# Keys that are not weights of the model. A load of weights alone does not read them.
NOT_MODEL = ("optimizer", "chained_", "rng_state", "rerun_state_machine", "common_state")

# These are whole on every rank in a Transformer Engine layer, and in a local one cut in rows over
# the tensor-parallel ranks. In `torch_dist` both are stored alike.
TWO_CUTS = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.weight$")


def directory_of(checkpoint: str | Path) -> Path:
    """Returns `checkpoint`, or the iteration of it if it is a save directory."""
    return save_directory.find(Path(checkpoint)).path


def format_of(checkpoint: str | Path) -> Format:
    """Returns the format of a Megatron checkpoint. Raises SourceError if there is none."""
    place = directory_of(checkpoint)
    if (found := formats.detect(place, megatron=True)) is None:
        if formats.detect(place, megatron=False) is not None:
            raise SourceError(
                f"{place} is a Hugging Face directory; convert it first: mckpt hf-to-megatron"
                f" {place} DST"
            )
        raise SourceError(f"{place}: not a Megatron checkpoint that mckpt reads")
    listed = formats.FORMATS[found.name]
    if not listed.loads_anywhere:
        loads = (
            f"megatron-core loads up to {listed.until}"
            if listed.until
            else "only a sharded model can load"
        )
        raise SourceError(
            f"{place}: has the format {found}, which {loads}; write another:"
            f" mckpt reshard {checkpoint} DST --target-format torch_dist"
        )
    return found


def read_common(checkpoint: str | Path) -> dict[str, Any]:
    """Reads all but the weights: args, iteration, checkpoint_version, content_metadata ...

    `mckpt verify` and `mckpt train` have checked that this megatron-core can read them
    (verification/requirements.py).
    """
    place = directory_of(checkpoint)
    if format_of(checkpoint).global_keys:
        from megatron.core import dist_checkpointing

        with safe_pickles():
            return dist_checkpointing.load_common_state_dict(str(place))
    # the directory of rank 0 without PP and EP, with one of them, and with both
    names = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")
    for name in names:
        if (place / name / MODEL_FILE).exists():
            state = read_rank_file(place / name / MODEL_FILE)
            return {key: value for key, value in state.items() if not key.startswith("model")}
    raise SourceError(
        f"{place} has no file of rank 0: none of {', '.join(names)} holds {MODEL_FILE}"
    )


def read_args(checkpoint: str | Path) -> Namespace:
    """Reads the args of the run that wrote the checkpoint."""
    args = read_common(checkpoint).get("args")
    if args is None:
        raise SourceError(f"{directory_of(checkpoint)} holds no args: give those of the model")
    return args


# Element size in bytes -> bits of a NaN that no arithmetic gives.
MARKS = {2: (torch.int16, 0x7FD3), 4: (torch.int32, 0x7FD3_4B1D)}


@torch.no_grad()
def load(
    chunks: list[Any],
    args: Namespace,
    checkpoint: str | Path,
    optimizer: Any = None,
    scheduler: Any = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Loads the weights in place. Returns the common state with two lists of names:

    unread    model keys of the checkpoint that this rank's model does not have
    forgiven  _extra_state of this rank's model that the checkpoint lacks

    prefix: the start of the keys in the checkpoint of a larger model; keys without it are of other
        parts of that model, and not read.

    With `optimizer` and `scheduler` their states are loaded too, and those of the random generators
    if the checkpoint has the same parallel sizes. Raises SourceError when something is missing, on
    this rank alone; the caller must end the other ranks.
    """
    mark(chunks)
    read = load_torch_dist if format_of(checkpoint).global_keys else load_torch
    state = read(chunks, args, checkpoint, optimizer, prefix)
    if left := marked(chunks):
        raise SourceError.of(
            f"{directory_of(checkpoint)}: {rank_names()} has parameters that the load did not set:",
            left,
        )
    if scheduler is not None:
        if "opt_param_scheduler" not in state:
            raise SourceError(
                f"{directory_of(checkpoint)} has no opt_param_scheduler: it does not say how far"
                " its run was"
            )
        scheduler.load_state_dict(state["opt_param_scheduler"])
    if "rng_state" in state:
        rng.restore(state["rng_state"])
    return state


def load_torch_dist(
    chunks: list[Any],
    args: Namespace,
    checkpoint: str | Path,
    optimizer: Any = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Loads into sharded_state_dict(), as load_checkpoint of Megatron-LM does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.core.dist_checkpointing.validation import StrictHandling

    place = str(directory_of(checkpoint))
    common = read_common(checkpoint)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    stored = set(without(prefix, (v.key for v in load_sharded_metadata(place).values())))
    wanted = {
        value.key for value in sharded_values(stored_names(sharded_state(chunks, metadata), stored))
    }
    missing = sorted(key for key in wanted - stored if not key.endswith("_extra_state"))
    if missing:
        raise SourceError.of(
            f"{place}: {rank_names()} asks for keys that the checkpoint does not have:", missing
        )
    state = drop_extra_state(stored_names(sharded_state(chunks, metadata), stored), stored)
    for value in nested_values(state):
        if hasattr(value, "key"):
            value.key = prefix + value.key
    if optimizer is not None:
        check_optimizer(common, args, metadata, place)
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=True, metadata=with_group(metadata)
        )
        if "rng_state" in stored and same_sizes(common.get("args"), args):
            state["rng_state"] = rng.collect(sharded=True)
    with safe_pickles():
        loaded = dist_checkpointing.load(state, place, strict=StrictHandling.RAISE_UNEXPECTED)
    forgiven = []
    for key, chunk in zip(model_keys(chunks), chunks, strict=True):
        forgiven += load_into(chunk, loaded.pop(key), f"{place} ({key})")
    if optimizer is not None:
        optimizer.load_state_dict(regroup(loaded.pop("optimizer"), optimizer))
    unread = sorted(
        key
        for key in stored - wanted
        if not key.startswith(NOT_MODEL) and not key.endswith("_extra_state")
    )
    return loaded | {"unread": unread, "forgiven": forgiven}


def load_torch(
    chunks: list[Any],
    args: Namespace,
    checkpoint: str | Path,
    optimizer: Any = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Reads this rank's mp_rank file with torch.load, and calls load_state_dict."""
    path = directory_of(checkpoint) / rank_directory(args) / MODEL_FILE
    if not path.exists():
        raise SourceError(f"{rank_names()} needs {path}, which does not exist")
    state = read_rank_file(path)
    stored = getattr(state.get("args"), "virtual_pipeline_model_parallel_size", None) or 1
    keys = model_keys(chunks)
    present = [
        key for key in state if key == "model" or (key.startswith("model") and key[5:].isdigit())
    ]
    if sorted(present) != sorted(keys):
        raise SourceError(
            f"{path} holds {', '.join(sorted(present)) or 'no model'}, the model has"
            f" {', '.join(keys)}; its args say {stored} virtual stages"
        )
    forgiven = []
    for key, chunk in zip(keys, chunks, strict=True):
        weights = state.pop(key)
        wanted = chunk.state_dict()
        named = {}
        for name in without(prefix, weights):
            value = weights[prefix + name]
            here = name if name in wanted else other_name(name, wanted.keys())
            cut = TWO_CUTS.search(here) and here in wanted and value.shape != wanted[here].shape
            named[here] = other_cut(name, value, wanted[here], path, key) if cut else value
        if optimizer is not None:
            parameters = [name.replace("module.", "") for name, _ in chunk.named_parameters()]
            optimizer_order.same_order(list(named), parameters, str(path))
        forgiven += load_into(chunk, named, f"{path} ({key})")
    if optimizer is not None:
        file = path.with_name(OPTIMIZER_FILE)
        distributed = args.use_distributed_optimizer
        if "optimizer" not in state:
            raise no_optimizer(str(path.parent))
        if distributed != file.exists():
            raise other_optimizer(str(path.parent), distributed)
        if (layers := layer_wise_file(path)).exists():
            optimizer.load_state_dict_from_file(str(layers))
            state.pop("optimizer")
        else:
            optimizer.load_state_dict(state.pop("optimizer"))
        if distributed:
            optimizer.load_parameter_state(str(file))
    else:
        state.pop("rng_state", None)
    return state | {"unread": [], "forgiven": forgiven}


def without(prefix: str, names: Iterable[str]) -> list[str]:
    """Returns the names that begin with a prefix, without it."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def other_cut(
    name: str, value: torch.Tensor, wanted: torch.Tensor, path: Path, key: str
) -> torch.Tensor:
    """Returns this rank's rows of a tensor that is whole in its file, or the whole of a tensor that
    is cut over the files of the tensor-parallel ranks.
    """
    from megatron.core import parallel_state as ps

    rank, ranks = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    if len(value) == ranks * len(wanted):
        return value.chunk(ranks)[rank]
    sizes = Parallel(pp=ps.get_pipeline_model_parallel_world_size())
    stage, place = ps.get_pipeline_model_parallel_rank(), path.parent.parent
    names = [sizes.directory(other, stage, 0) for other in range(ranks)]
    # all expert ranks of a name have the same rows
    files = [min(place.glob(f"{name}*/{MODEL_FILE}")) for name in names]
    return torch.cat([read_rank_file(file)[key][name] for file in files])


def stored_names(state: dict[str, Any], stored: set[str]) -> dict[str, Any]:
    """Replaces keys of the sharded state by the checkpoint's names of them, in place."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for value in nested_values(state):
        if hasattr(value, "key") and value.key not in stored:
            value.key = other_name(value.key, stored)
    return state


def drop_extra_state(state: dict[str, Any], stored: set[str]) -> dict[str, Any]:
    """Removes the _extra_state that the checkpoint lacks, which load_into then reports."""
    for model in state.values():
        for name, value in list(model.items()):
            if name.endswith("_extra_state") and value.key not in stored:
                del model[name]
    return state


def regroup(state: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Converts the loaded state of a fully_reshardable optimizer to a chain of another length.

    Experts have an optimizer of their own only at ep > 1. The loaded tensors fit this chain
    already, and it gets the parameter groups of the first optimizer of the stored chain.
    """
    links = optimizer.chained_optimizers
    stored = [
        part
        for key, part in sorted(state.items(), key=str)
        if isinstance(key, int) and part.keys() & {"optimizer", "param_groups"}
    ] or [state]
    if len(stored) == len(links):
        return state
    groups = stored[0]["optimizer"]["param_groups"]
    parts = {}
    for index, link in enumerate(links):
        of_experts = any(group["is_expert_parallel"] for group in link.optimizer.param_groups)
        mine = [group | {"is_expert_parallel": of_experts} for group in groups]
        parts[index] = {
            "optimizer": {"param_groups": mine},
            "param_state": (state[index] if len(links) > 1 else state)["param_state"],
            "param_state_sharding_type": "fully_reshardable",
        }
    return parts if len(links) > 1 else parts[0]


def check_optimizer(
    common: dict[str, Any], args: Namespace, metadata: dict[str, Any], place: str
) -> None:
    """Raises SourceError if the checkpoint has no optimizer state, or one that fits other parallel
    sizes only.
    """
    kind = metadata.get("distrib_optim_sharding_type")
    if "optimizer" not in common:
        raise no_optimizer(place)
    saved = common.get("args")
    for name, is_default in (("optimizer", "adam"), ("fp16", False)):
        stored, wanted = getattr(saved, name, is_default), getattr(args, name)
        if stored != wanted:
            raise SourceError(
                f"{place} was saved by a run with {name} {stored}, and this run has {wanted}: it"
                " cannot be resumed, only trained from"
            )
    by_layers = getattr(args, "use_layer_wise_distributed_optimizer", False)
    if args.use_distributed_optimizer != (kind is not None) and not by_layers:
        raise other_optimizer(place, args.use_distributed_optimizer)
    if kind not in (None, "fully_reshardable") and not same_sizes(common.get("args"), args):
        raise loads_at_its_sizes(place, kind)


def no_optimizer(place: str) -> SourceError:
    return SourceError(f"{place} has no optimizer state: it cannot be resumed, only trained from")


def other_optimizer(place: str, distributed: bool) -> SourceError:
    """Returns the error that the stored optimizer is distributed and that of the run is not, or the
    other way round.
    """
    kinds = ("a distributed optimizer", "an optimizer that is not distributed")
    stored, wanted = reversed(kinds) if distributed else kinds
    flag = "without --no-distributed-optimizer" if not distributed else "--no-distributed-optimizer"
    return SourceError(
        f"{place} has the state of {stored}, and this run has {wanted}; resume it"
        f" {'with ' if distributed else ''}{flag}"
    )


def same_sizes(a: Any, b: Any) -> bool:
    names = ("tensor", "pipeline", "virtual_pipeline", "expert")
    keys = [*(f"{name}_model_parallel_size" for name in names), "expert_tensor_parallel_size"]
    return all((getattr(a, key, None) or 1) == (getattr(b, key, None) or 1) for key in keys)


def load_into(chunk: Any, state: dict[str, Any], source: str) -> list[str]:
    """Calls load_state_dict and raises SourceError for every wrong key but _extra_state.

    Returns the missing or unknown _extra_state, which Megatron-LM's strict=True would refuse.
    """
    # strict=False, because the error below lists all wrong keys at once
    result = chunk.load_state_dict(state, strict=False)
    wrong = [f"missing {key}" for key in result.missing_keys]
    wrong += [f"unknown {key}" for key in result.unexpected_keys]
    problems = [key for key in wrong if not key.endswith("_extra_state")]
    if problems:
        raise SourceError.of(f"{source} does not fit the model of {rank_names()}:", problems)
    return wrong


def rank_directory(args: Namespace) -> str:
    """Returns the name of this rank's directory in a `torch` checkpoint."""
    from megatron.core import parallel_state as ps

    sizes = Parallel(pp=args.pipeline_model_parallel_size, ep=args.expert_model_parallel_size)
    return sizes.directory(
        tp=ps.get_tensor_model_parallel_rank(),
        pp=ps.get_pipeline_model_parallel_rank(),
        ep=ps.get_expert_model_parallel_rank(),
    )


def layer_wise_file(path: Path) -> Path:
    """Returns the file beside a rank's `path` with the state of an optimizer that is distributed by
    layers.
    """
    from megatron.core import parallel_state as ps

    return path.with_name(LAYER_WISE.replace("*", str(ps.get_data_parallel_rank())))


def read_rank_file(path: Path) -> dict[str, Any]:
    """Reads one model_optim_rng.pt, by torch's weights_only rules and Megatron's safe classes."""
    # A mapped file is in memory once. Files of torch before 1.6 are no zip, and cannot be mapped.
    mapped = zipfile.is_zipfile(path)
    with safe_pickles():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


@contextlib.contextmanager
def safe_pickles() -> Iterator[None]:
    """Lets torch.load accept the classes that Megatron-LM allows, and no others."""
    from megatron.core.safe_globals import SAFE_GLOBALS

    with torch.serialization.safe_globals(SAFE_GLOBALS):
        yield


def model_keys(chunks: list[Any]) -> list[str]:
    """Returns `model`, or with virtual stages `model0`, `model1` ..."""
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def sharded_state(chunks: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the chunks' sharded_state_dict()s by `model_keys`, in the form that `metadata`
    (content_metadata) names.
    """
    metadata = with_group(metadata)
    return {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(model_keys(chunks), chunks, strict=True)
    }


def with_group(metadata: dict[str, Any]) -> dict[str, Any]:
    """Adds the process group that sharded_state_dict() requires to content_metadata."""
    from megatron.core import parallel_state as ps

    return metadata | {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}


def sharded_values(state: dict[str, Any]) -> list[Any]:
    """Returns every ShardedTensor and ShardedObject of a state, after applying its factories."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories

    apply_factories(state)
    return [value for value in nested_values(state) if isinstance(value, ShardedBase)]


def weights(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor of every parameter and floating buffer that a checkpoint stores.
    Rotary tables are not stored.
    """
    for key, chunk in zip(model_keys(chunks), chunks, strict=True):
        for name, value in chunk.state_dict().items():
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            if is_float and not name.endswith("_extra_state"):
                yield f"{key}.{name}", value


def mark(chunks: list[Any]) -> None:
    """Fills all weights with one certain NaN. A tensor that no load reaches then shows, and a
    loaded tensor that contains NaN is not mistaken for it.
    """
    for _, value in weights(chunks):
        kind, bits = MARKS[value.element_size()]
        value.view(kind).fill_(bits)


def marked(chunks: list[Any]) -> list[str]:
    """Returns the names of the weights that still contain that NaN."""
    out = []
    for name, value in weights(chunks):
        kind, bits = MARKS[value.element_size()]
        if (value.view(kind) == bits).any():
            out.append(name)
    return out
