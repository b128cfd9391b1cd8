"""The stock trainer as a judge: megatron.training of the megatron-core wheel (0.17 and later)
loads, runs and saves checkpoints, on CPU. A program of tests/helpers/session.py. Every case is a
dict:

    name        of the case
    world       number of ranks
    flags       list of texts: the launch line of the checkpoint, and flags that the case appends
    checkpoint  directory for --load; without it, one rank checks the flags and makes the model's
                config, and nothing else is done
    keys        optional, without a checkpoint; true: one rank builds the model of every rank
                -> torch_dist, torch: as `keys` of tests/helpers/judge.py
    tokens      optional; [[...]] -> NAME.npy: fp32 logits [batch, seq, vocab]
    weights     optional; true -> weights: for each rank, {name: hash of the parameter's bytes}
    save        optional; directory for --save
    optimizer   optional; flags of an optimizer, whose state is then loaded and saved too
    shards      optional; torch_dcp or fsdp_dtensor: the model is loaded from torch_dist, sharded
                over the data-parallel ranks (tests/helpers/fsdp.py), and saved in this format. The
                flags must choose the same
    steps       optional; training steps with made-up gradients (tests/helpers/fsdp.py) before
                `save`, which then has the optimizer
    resume      optional; true: the optimizer is loaded too, and the steps go on from there
    torch_adam  optional; true: the steps are those of torch's AdamW, and not of a stand-in for
                Transformer Engine's FusedAdam

Each case runs, in this order, the code of pretrain_gpt.py or pretrain_hybrid.py: parse_args,
load_args_from_checkpoint if the flags ask for it, validate_args, set_global_variables,
initialize_megatron, gpt_config_from_args or hybrid_config_from_args, the builder's
build_distributed_models, load_checkpoint, save_checkpoint. Every parameter is NaN before the load
and none may be after it. load_checkpoint would try again with strict=False where names or shapes do
not fit, and go on; here that is an error.

out_dir/NAME.json: ok, seconds, error {rank: traceback}, args: values that the parser and
validate_args arrived at, and the results.

The ranks of each case are forks of the session's process, because megatron.training keeps global
state. Lines marked STUB replace what needs a GPU; so does mckpt.trainer.cpu.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

# the first one imports transformers, which would take 2 s on every rank
import megatron.core.tokenizers.text  # noqa: F401
import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from megatron.training import argument_utils, arguments, checkpointing, global_vars, initialize
from torch.testing._internal.distributed.fake_pg import FakeStore

from mckpt.trainer import build, cpu, load, mamba, train, worker
from tests.helpers.judge import Names, tear_down, watch_parent

TIMEOUT_S = 120  # limit of one collective; a case that takes twice as long is ended
# Flags of a run on this machine: they describe no model. The fusions need CUDA kernels, and --lr
# and --save-interval are demanded.
RUN = """--no-load-rng --no-save-rng --save-interval 1
    --train-iters 1 --lr 1e-4 --micro-batch-size 1 --global-batch-size 4
    --use-cpu-initialization --distributed-backend gloo
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion
    """.split()  # noqa: SIM905
NO_OPTIMIZER = ["--no-load-optim", "--no-save-optim"]
# what a case with `steps` and one with `resume` leave out
SAVED, LOADED = ("--no-save-optim", "--no-save-rng"), ("--no-load-optim",)
SHARDING = {"--use-torch-fsdp2", "--use-megatron-fsdp"}
# args that a test compares
SHOWN = ("seq_length", "max_position_embeddings", "apply_rope_fusion", "padded_vocab_size")


def run(cases: list[dict[str, Any]], out: Path) -> int:
    watch_parent()
    for case in cases:
        started = time.monotonic()
        ranks = [
            fork(case, rank, out) for rank in range(case["world"] if case.get("checkpoint") else 1)
        ]
        reports = [
            report(out / f"{case['name']}.rank{rank}", pid, started)
            for rank, pid in enumerate(ranks)
        ]
        failed = sorted(
            (r for r in range(len(ranks)) if "error" in reports[r]),
            key=lambda r: reports[r]["failed_after_s"],
        )
        verdict = {
            "name": case["name"],
            "ok": not failed,
            "seconds": round(time.monotonic() - started, 2),
        }
        verdict |= (
            {"error": {str(r): reports[r]["error"] for r in failed}} if failed else reports[0]
        )
        if "weights" in verdict:
            verdict["weights"] = [each["weights"] for each in reports]
        (out / f"{case['name']}.json").write_text(json.dumps(verdict))
    return 0


def fork(case: dict[str, Any], rank: int, out: Path) -> int:
    """Starts one rank of a case; returns its process id. The rank writes NAME.rankR."""
    if pid := os.fork():
        return pid
    started = time.monotonic()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case["world"]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if SHARDING & set(case["flags"]) else "1",
    }
    try:
        with cpu.as_cuda():
            found = run_rank(case, rank, out)
    except BaseException:  # SystemExit too, because argparse raises it for a bad flag
        found = {"error": traceback.format_exc(), "failed_after_s": time.monotonic() - started}
    (out / f"{case['name']}.rank{rank}").write_text(json.dumps(found))
    # saving torch_dist leaves a multiprocessing.Manager
    for child in psutil.Process().children(recursive=True):
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def report(path: Path, pid: int, started: float) -> dict[str, Any]:
    """Returns the result that a rank wrote. The rank is killed if it does not end in time."""
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() - started > 2 * TIMEOUT_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    lost = {
        "error": "the rank ended, or was ended after too long, without a word",
        "failed_after_s": 1e9,
    }
    return json.loads(path.read_text()) if path.exists() else lost


def prepare() -> None:
    """Replaces the answers of CUDA that megatron.training requests, before the ranks are forked."""
    cpu.install()
    # STUB: validate_args asks for the features of a GPU
    torch.cuda.get_device_capability = lambda *a, **k: (9, 0)
    # STUB: the same
    torch.cuda.get_device_properties = lambda *a, **k: Namespace(
        major=9, minor=0, name="none", multi_processor_count=1
    )
    # STUB: without devices no model-parallel groups are made
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device = torch.cuda.empty_cache = lambda *a, **k: None  # STUB
    # STUB: build_distributed_models moves the chunks
    torch.nn.Module.cuda = lambda self, *a, **k: self
    # STUB: it builds the C++ index helper of the data sets
    initialize._compile_dependencies = lambda: None
    # STUB: saving torch_dist spawns a manager for every rank, which would import torch again; a
    # fork has it
    multiprocessing.context.SpawnContext.Manager = lambda self: multiprocessing.get_context(
        "fork"
    ).Manager()
    # STUB: gated delta nets ask for the kernels of FLA when they are built
    for module in list(sys.modules.values()):
        if getattr(module, "HAVE_FLA", None) is False:
            module.HAVE_FLA = True
        if getattr(module, "chunk_gated_delta_rule", ...) is None:
            module.chunk_gated_delta_rule = module.torch_chunk_gated_delta_rule
    # STUB: a CUDA extension that only a backward pass calls
    layers._grad_accum_fusion_available = True


def run_rank(case: dict[str, Any], rank: int, out: Path) -> dict[str, Any]:
    """Runs one rank of one case."""
    optimizing = "optimizer" in case
    left_out = SAVED * bool(case.get("steps")) + LOADED * bool(case.get("resume"))
    run_flags = [*RUN, *case.get("optimizer", NO_OPTIMIZER)]
    run_flags = [flag for flag in run_flags if flag not in left_out]
    sys.argv = ["pretrain_gpt.py", *run_flags, *case["flags"]]
    for flag, directory in (("--load", case.get("checkpoint")), ("--save", case.get("save"))):
        sys.argv += [flag, directory] if directory else []
    args = arguments.parse_args()
    if args.use_checkpoint_args:
        checkpointing.load_args_from_checkpoint(args)
    arguments.validate_args(args)
    # only releases with HybridModel have this arg
    hybrid = getattr(args, "hybrid_layer_pattern", None)
    kind = "hybrid" if hybrid else "gpt"
    if "M" in (hybrid or ""):
        mamba.install()  # STUB: the kernels of mamba_ssm
    config = getattr(argument_utils, f"{kind}_config_from_args")(args)
    result: dict[str, Any] = {"args": {name: getattr(args, name) for name in SHOWN}}
    if not case.get("checkpoint"):
        return result | (keys(args, config, case["world"]) if case.get("keys") else {})
    global_vars.set_global_variables(args)
    store = dist.FileStore(str(out / f"{case['name']}.store"), case["world"])
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case["world"], timeout=limit
    )  # STUB: megatron's own asks for a device
    initialize.initialize_megatron(allow_no_cuda=True)
    chunks = models(config, args if optimizing else None)
    for chunk in chunks:
        chunk.eval()
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    refuse_second_try(chunks)
    optimizer, scheduler = optimizer_of(chunks, args) if optimizing else (None, None)
    if case.get("shards"):
        args.ckpt_format = "torch_dist"  # of the checkpoint that it loads
    if case.get("shards") or case.get("steps"):
        from tests.helpers import fsdp

        fsdp.TORCH_ADAM = case.get("torch_adam", False)
    if case.get("resume"):
        chunks = fsdp.wrapped(args, chunks)
        optimizer, scheduler = fsdp.optimizer_of(args, chunks)
    iteration, _ = checkpointing.load_checkpoint(chunks, optimizer, scheduler)
    left = [
        name
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.isnan().any()
    ]
    if left:
        raise ValueError(f"load_checkpoint did not set {left}")
    if case.get("weights"):
        result["weights"] = {
            name: hashlib.sha256(value.numpy().tobytes()).hexdigest()
            for name, value in load.weights(chunks)
        }
    if case.get("tokens"):
        if args.multi_latent_attention:
            # STUB: Triton kernels; the config was checked with the flags of the launch line
            config.apply_rope_fusion = False
        logits = worker.logits(
            [getattr(chunk, "module", chunk) for chunk in chunks],
            args,
            torch.tensor(case["tokens"]),
        )
        if rank == 0:
            np.save(out / f"{case['name']}.npy", logits.numpy())
    args.ckpt_format = case.get("shards") or args.ckpt_format
    if (case.get("shards") or case.get("steps")) and not case.get("resume"):
        chunks = fsdp.wrapped(args, chunks)
        if case.get("steps"):
            optimizer, scheduler = fsdp.optimizer_of(args, chunks)
    for _ in range(case.get("steps", 0)):
        fsdp.step(args, chunks, optimizer, scheduler)
    if case.get("save"):
        checkpointing.save_checkpoint(iteration or 1, chunks, optimizer, scheduler, 0)
    dist.barrier()
    dist.destroy_process_group()
    return result | {"tp": parallel_state.get_tensor_model_parallel_world_size()}


def models(config: Any, args: Namespace | None = None) -> list[Any]:
    """Builds the chunks of this rank, within DistributedDataParallel if `args` are given."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    options: dict[str, Any] = {"wrap_with_ddp": False}
    if args is not None:
        from megatron.training import training

        options = {"wrap_with_ddp": True, "ddp_config": training.get_megatron_ddp_config(args)}
    built: list[Any] = builder.build_distributed_models(groups, **options)
    return built


def optimizer_of(chunks: list[Any], args: Namespace) -> tuple[Any, Any]:
    """Returns the optimizer and the scheduler, as the trainer makes them."""
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training import training

    train.install_adam()  # STUB: Transformer Engine's FusedAdam
    config, overrides = training.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=overrides)
    return optimizer, training.get_optimizer_param_scheduler(optimizer)


def keys(args: Namespace, config: Any, world: int) -> dict[str, Any]:
    """Returns the names of the models of all ranks, which this process builds one after the other,
    in torch's fake process group.
    """
    found = Names({}, {})
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        build.initialize(args)
        found.add(models(config), args)
        tear_down()
    return found._asdict()


def refuse_second_try(chunks: list[Any]) -> None:
    """Makes a second load raise: load_checkpoint catches the error of a strict load, and loads
    again with strict=False.
    """
    model = type(getattr(chunks[0], "module", chunks[0]))
    strictly = model.load_state_dict

    def load_state_dict(self: Any, state: Any, strict: bool = True, **kwargs: Any) -> Any:
        if not strict:
            raise ValueError("load_checkpoint tries again with strict=False")
        return strictly(self, state, strict=True, **kwargs)

    model.load_state_dict = load_state_dict
