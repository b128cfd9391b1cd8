"""Megatron-Bridge as a judge of adapters, on one or more ranks: a program of
tests/helpers/session.py.

It runs in the environment of bridge.py. A case is a dict with these entries; the results stand
behind the arrow:

    name     of the case
    source   Hugging Face directory of the base
    sizes    {"tp": 2, "pp": 1, "ep": 1}; its ranks must be all ranks of the run
    export   a directory of PEFT, optional, which Megatron-Bridge writes from the adapter in the
             model
    tokens   [[...]], optional -> NAME.npy: fp32 logits of Megatron-Core with the adapter, at pp 1
    save     a directory: the adapter gets random values, and Megatron-Bridge saves it there
    kind     with `save` or files: "lora", "canonical" or "dora"
    options  with `save` or files: the arguments of its class in Megatron-Bridge
    trained  fully_reshardable, dp_reshardable, or torch (files of that format, which
             Megatron-Bridge does not write): Adam makes a step, and its state is saved in this
             form; with `load`, Megatron-Core first loads the state of the checkpoint
    load     a checkpoint: Megatron-Bridge builds the adapter of its run_config.yaml and loads it,
             and with `save` saves it again.
             With `kind` and `options` it has files of the format torch, which lack that file, and
             each expert of the model has matrices of its own
    empty    true: the weights of the base stay as they are made; at tp 2, Megatron-Bridge 0.6.2
             hangs while it loads those of Qwen3-VL
    live     a directory to write: mckpt.live fills the model from `source` and saves it there. With
             `kind`, it then wraps the model, and saves it to the directories LIVE-merged and
             LIVE-only -> empty: parameters that were not filled
             -> apart: the tensors of mckpt.live.hf_tensors that differ from those of `source`
    whole    with `load`: the checkpoint has the weights too, and they are loaded as well

out_dir/NAME.json: ok, error {"0": traceback of the first rank}.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import peers
from mckpt.trainer import cpu, forked, local_stack, train
from tests.helpers import bridge


def prepare() -> None:
    """Imports Megatron-Bridge, before the ranks are forked."""
    sys.meta_path.append(peers.StandIns())
    peers.without_gpu()
    bridge.without_kernels()
    cpu.install()
    from megatron.core.ssm import gated_delta_net

    for name, module in list(sys.modules.items()):
        if name.startswith(gated_delta_net.__name__) and hasattr(module, "l2norm"):
            module.l2norm = local_stack.l2norm
    import megatron.bridge
    import megatron.bridge.peft.canonical_lora
    import megatron.bridge.peft.dora
    import megatron.bridge.peft.lora  # noqa: F401

    mend_shared_outer()


def mend_shared_outer() -> None:
    """Lets adapters with `experts_shared_outer_loras` be saved. Megatron-Bridge 0.6 fails there: it
    calls a function without the groups of ranks that this requires.
    """
    from megatron.bridge.peft import utils

    made = utils._make_grouped_expert_sharded_tensor

    def with_groups(*args: Any, pg_collection: Any = None, **options: Any) -> Any:
        groups = utils._get_pg_collection(pg_collection, required_pgs=["ep", "expt_tp", "expt_dp"])
        return made(*args, pg_collection=groups, **options)

    utils._make_grouped_expert_sharded_tensor = with_groups


def run(cases: list[dict[str, Any]], out: Path) -> int:
    return forked.fork_ranks(lambda: run_rank(cases, out))


def run_rank(cases: list[dict[str, Any]], out: Path) -> None:
    """Runs all cases on one rank."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    for case in cases:
        sizes = {"tp": 1, "pp": 1, "ep": 1, **case["sizes"]}
        parallel_state.initialize_model_parallel(
            sizes["tp"],
            sizes["pp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=1,
        )
        result: dict[str, Any] = {"name": case["name"], "ok": True}
        try:
            result |= judge(case, sizes, out)
        except Exception:
            result |= {"ok": False, "error": {str(dist.get_rank()): traceback.format_exc()}}
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        if dist.get_rank() == 0:
            worst = next((found for found in results if not found["ok"]), result)
            (out / f"{case['name']}.json").write_text(json.dumps(worst))
        parallel_state.destroy_model_parallel()
        gc.collect()


def judge(case: dict[str, Any], sizes: dict[str, int], out: Path) -> dict[str, Any]:
    """Saves or loads the adapter of one case and exports it. Returns further results."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.utils import load_peft_adapter_checkpoint
    from megatron.bridge.training.utils.checkpoint_utils import read_run_config
    from megatron.bridge.utils.instantiate_utils import instantiate
    from megatron.core.transformer.enums import AttnBackend

    from mckpt import live

    base = AutoBridge.from_hf_pretrained(Path(case["source"]), torch_dtype=torch.float32)
    provider = base.to_megatron_provider(load_weights=not case.get("empty"))
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.fp16 = False
    provider.moe_token_dispatcher_type = "alltoall"
    provider.deterministic_mode = True
    provider.attention_backend = AttnBackend.auto  # that of Nemotron-H is flash
    provider.should_pad_vocab = sizes["tp"] > 1
    provider.mtp_num_layers = None  # transformers has no such layers
    for fusion in ("apply_rope", "moe_permute", "moe_router", "bias_activation", "bias_dropout"):
        setattr(provider, f"{fusion}_fusion", False)  # these need kernels of a GPU
    provider.tensor_model_parallel_size = sizes["tp"]
    provider.pipeline_model_parallel_size = sizes["pp"]
    provider.expert_model_parallel_size = sizes["ep"]
    provider.expert_tensor_parallel_size = 1
    files = "load" in case and "kind" in case
    provider.moe_grouped_gemm = provider.moe_grouped_gemm and not files
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    if "live" in case:
        found = live_route(model, Path(case["source"]), case["live"])
        if "kind" in case:
            model = adapter_class(case["kind"])(**case["options"])(model, training=False)
            fill(model, sizes)
            for choice in ("merged", "only"):
                place = f"{case['live']}-{choice}"
                live.save_hf(model, place, like=case["source"], adapter=choice)
        return found
    if "kind" in case:
        peft = adapter_class(case["kind"])(**case["options"])
    else:
        path = next(Path(case["load"]).rglob("run_config.yaml"))
        peft = instantiate(read_run_config(str(path))["peft"])
    model, optimizer = peft(model, training=False), None
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if is_factor(name):
                parameter.requires_grad = True
                parameter.data.fill_(float("nan"))
    peft.set_params_to_save(model)
    if files:
        load_files(model, next(Path(case["load"]).glob("*/mp_rank_*")).parent)
    elif "load" in case:
        if "trained" in case:
            fill(model, sizes, 1)  # the load has to replace these values
            optimizer = optimizer_of(model)
            load_optimizer(model, optimizer, path.parent)
        if case.get("whole"):
            load_whole(model, path.parent)
        else:
            load_peft_adapter_checkpoint(model, path.parent, peft)
    else:
        fill(model, sizes)
        optimizer = optimizer_of(model) if "trained" in case else None
    if case.get("trained") == "torch":
        save_files(model, optimizer, Path(case["save"]))
    elif "save" in case:
        save(model, provider, peft, case, optimizer)
    if "export" in case:
        base.save_hf_adapter(model, case["export"], peft, show_progress=False)
    if "tokens" in case:
        logits = forward(model[0].eval(), torch.tensor(case["tokens"]), sizes["tp"])
        if dist.get_rank() == 0:
            np.save(out / f"{case['name']}.npy", logits.numpy())
    return {}


def live_route(model: list[Any], source: Path, saved: str) -> dict[str, Any]:
    """Returns what is wrong with a model that mckpt.live fills, and with what it gives."""
    from safetensors.torch import load_file

    from mckpt import live

    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    live.load(model, source)
    named = [one for chunk in model for one in chunk.named_parameters()]
    empty = [name for name, parameter in named if parameter.isnan().any()]
    wanted = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    given = {name: tensor.clone() for name, tensor in live.hf_tensors(model, like=source)}
    apart = sorted(given.keys() ^ wanted.keys())
    apart += [name for name in given.keys() & wanted.keys() if not given[name].equal(wanted[name])]
    live.save_hf(model, saved, like=source)
    return {"empty": empty, "apart": apart}


def adapter_class(kind: str) -> Any:
    from megatron.bridge.peft import canonical_lora, dora, lora

    return {
        "lora": lora.LoRA,
        "canonical": canonical_lora.CanonicalLoRA,
        "dora": dora.DoRA,
    }[kind]


def is_factor(name: str) -> bool:
    """Returns whether a parameter is one of an adapter, also of a module of torch in a tower."""
    return ".adapter." in name or name.endswith((".linear_in.weight", ".linear_out.weight"))


def fill(model: list[Any], sizes: dict[str, int], number: int = 0) -> None:
    """Gives the adapter random values. Ranks that hold copies of a tensor must agree, so the seed
    is the name, and the number of the rank that has another part. Each `number` gives other values.
    """
    from megatron.core import parallel_state as ps

    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if not is_factor(name):
                continue
            expert = ".experts." in name and ".shared_experts." not in name
            apart = ps.get_expert_model_parallel_rank() if expert and parameter.dim() == 3 else 0
            apart_by_tp = not expert and ".adapter." in name
            tensor = ps.get_tensor_model_parallel_rank() if apart_by_tp else 0
            if name.endswith("weight_magnitude") and ("linear_proj" in name or "fc2" in name):
                tensor = 0
            stage = ps.get_pipeline_model_parallel_rank()
            seed = [zlib.crc32(name.encode()), apart, tensor, stage, number]
            drawn = np.random.RandomState(seed).randn(*parameter.shape) / 8
            parameter.data.copy_(torch.from_numpy(drawn.astype(np.float32)))


def optimizer_of(model: list[Any]) -> Any:
    """Returns the distributed optimizer of an adapter, after a step with gradients that are made of
    its values.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    train.install_adam()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad = ".adapter." in name
    distributed = {"use_distributed_optimizer": True}
    config = DistributedDataParallelConfig(overlap_grad_reduce=False, **distributed)
    wrapped = [DistributedDataParallel(chunk.config, config, chunk) for chunk in model]
    for chunk in wrapped:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.main_grad.copy_(parameter.detach().float() * 3 + 0.25)
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    options = {"lr": 1e-2, "weight_decay": 0.01, "clip_grad": 0.0, **distributed}
    with cpu.as_cuda():
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), wrapped)
        optimizer.step()
    return optimizer


def load_whole(model: list[Any], directory: Path) -> None:
    """Loads the weights and the adapter of a checkpoint into wrapped modules. Fails if a tensor of
    either side is left over or a parameter gets no value.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    metadata = dist_checkpointing.load_content_metadata(str(directory))
    for number, chunk in enumerate(model):
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
        state = {f"model{number}": chunk.sharded_state_dict(metadata=metadata)}
        loaded, *left = dist_checkpointing.load(
            state, str(directory), strict=StrictHandling.RETURN_ALL
        )
        left = [key for keys in left for key in keys if not key.endswith("._extra_state")]
        assert not left, left
        for name, parameter in chunk.named_parameters():
            parameter.data.copy_(loaded[f"model{number}"][name.replace(".to_wrap.", ".")])
        empty = [name for name, one in chunk.named_parameters() if one.isnan().any()]
        assert not empty, empty


def load_optimizer(model: list[Any], optimizer: Any, directory: Path) -> None:
    """Loads the state of an optimizer with Megatron-Core's own functions."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(str(directory))
    weights = {"model": model[0].sharded_state_dict(metadata=metadata)}
    state = optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load({"optimizer": state}, str(directory))
    optimizer.load_state_dict(loaded["optimizer"])


def save(model: list[Any], provider: Any, peft: Any, case: dict[str, Any], optimizer: Any) -> None:
    """Saves the adapter with the function that Megatron-Bridge's training calls."""
    from megatron.bridge.training.checkpointing import save_checkpoint
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig
    from megatron.bridge.training.config import OptimizerConfig as Optimizer
    from megatron.bridge.training.state import GlobalState

    state = GlobalState()
    checkpoint = CheckpointConfig(
        async_save=False,
        save=case["save"],
        save_optim=optimizer is not None,
        save_rng=False,
        ckpt_format="torch_dist",
        dist_ckpt_optim_fully_reshardable=case.get("trained") == "fully_reshardable",
    )
    state.cfg = ConfigContainer(
        model=provider,
        train=None,
        optimizer=Optimizer(use_distributed_optimizer=optimizer is not None),
        ddp=None,
        scheduler=None,
        dataset=None,
        logger=LoggerConfig(),
        tokenizer=None,
        checkpoint=checkpoint,
        dist=None,
        peft=peft,
    )
    save_checkpoint(
        state=state,
        model=model,
        optimizer=optimizer,
        opt_param_scheduler=None,
        num_floating_point_operations_so_far=0,
    )


def save_files(model: list[Any], optimizer: Any, directory: Path) -> None:
    """Saves the adapter in the format torch, with Megatron-Core's state of the optimizer."""
    place = directory / "iter_0000001" / rank_directory()
    place.mkdir(parents=True)
    factors = {key: value for key, value in model[0].state_dict().items() if ".adapter." in key}
    with cpu.as_cuda():
        state = {"model": factors, "optimizer": optimizer.state_dict(), "iteration": 1}
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    torch.save(state, place / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("1")
    dist.barrier()


def load_files(model: list[Any], directory: Path) -> None:
    """Loads the adapter of the format torch. Fails unless its names and shapes are the model's."""
    place = directory / rank_directory() / "model_optim_rng.pt"
    stored, state = torch.load(place, weights_only=False)["model"], model[0].state_dict()
    own = {key: state[key] for key in state if ".adapter." in key and "_extra_state" not in key}
    assert stored.keys() == own.keys(), stored.keys() ^ own.keys()
    for key, value in own.items():
        assert value.shape == stored[key].shape, key
        value.copy_(stored[key])


def rank_directory() -> str:
    """Returns the name of the directory of this rank in the format torch."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if ps.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if ps.get_expert_model_parallel_world_size() > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return name


@torch.no_grad()
def forward(model: Any, tokens: torch.Tensor, tp: int) -> torch.Tensor:
    """Returns the logits [batch, seq, vocab] of a model that is not split into stages."""
    from megatron.core import parallel_state as ps

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, positions, None)
    if tp > 1:
        parts = [torch.empty_like(logits) for _ in range(tp)]
        dist.all_gather(parts, logits.contiguous(), group=ps.get_tensor_model_parallel_group())
        logits = torch.cat(parts, -1)
    return logits.float()
