"""Trains a checkpoint on real megatron-core, as pretrain_gpt does: DDP, distributed optimizer, 1F1B
or interleaved pipeline, sequence, expert and context parallelism.

    torchrun --nproc-per-node 8 -m mckpt.trainer.train job.json

The loss of a step is the mean over all tokens of its global batch. That batch has the same
sequences in the same order whatever the parallel sizes, so that the loss curves of one checkpoint
at several sizes differ by rounding alone.

job.json is one object: `checkpoint`, the fields of TrainOptions, the parallel sizes (tp, pp, vpp,
ep, etp, cp), `transformer_impl` (auto, transformer_engine, local), `args` (which replace or add to
the checkpoint's), `losses` (a file that gets one line of JSON for each step), and `json` (print
these lines too).
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mckpt import formats
from mckpt.errors import UsageError
from mckpt.options import TrainOptions
from mckpt.trainer import build, cpu, data, load, points, save


class Adam(torch.optim.Optimizer):
    """AdamW that keeps its state as Transformer Engine's FusedAdam does, for machines without it.

    Each parameter has exp_avg and exp_avg_sq, each group has `step`, the number of updates so far.
    Without FusedAdam megatron-core uses torch's AdamW, which counts the steps of each parameter: it
    saves other keys than a run on GPUs, and megatron-core 0.16 cannot load them again, because it
    looks for a state before the first step and gives all parameters one counter.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode, "weight decay as a part of the gradient is not built"
        # megatron-core passes `capturable` from 0.17 on
        assert not capturable, "an optimizer step in a CUDA graph is not built"
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    adam_step(parameter, self.state[parameter], group)


def adam_step(
    parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
) -> None:
    """Updates a parameter in place: Adam (Kingma and Ba 2015, algorithm 1) with the weight decay of
    Loshchilov and Hutter 2019.
    """
    if not state:
        state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    gradient, lr, step = parameter.grad, group["lr"], group["step"]
    beta1, beta2 = group["betas"]
    assert gradient is not None
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - beta1**step))


def install_adam() -> None:
    """Gives megatron-core this Adam where it found neither Transformer Engine's nor Apex's. May be
    called again.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp")


# step (from 1), loss, grad_norm (absent where a gradient in fp16 overflowed, so that the step was
# left out), lr, seconds, tokens_per_s, loss_scale (in fp16)
Step = dict[str, float]
# args of the checkpoint, by the beginnings of their names, that settle more of the optimizer: how
# the loss is scaled in fp16, and how Muon works
SETTINGS = (
    *("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    *("muon_", "adaptive_muon_", "use_layer_wise_"),
)


def main(job: dict[str, Any]) -> None:
    """Runs a job as one rank of torchrun. Raises UsageError for entries that are not known."""
    known = {"checkpoint", "losses", "json", "args", "transformer_impl", *SIZES}
    known |= {*TrainOptions.__struct_fields__}
    if unknown := sorted(set(job) - known):
        raise UsageError.of(
            "the job has entries that mean nothing here:",
            unknown,
            f"Known: {', '.join(sorted(known))}",
        )
    build.join()
    run(job)
    # Not in a `finally`: after a failure the other ranks wait here, and end when this process ends.
    dist.destroy_process_group()


def run(job: dict[str, Any], timeout_s: float = 1800) -> list[Step]:
    """Runs a job on the ranks of the default group. Each loss is written as soon as it is known."""
    options = TrainOptions.of(job)
    sizes = {name: job[name] for name in SIZES if job.get(name)}
    others = {"transformer_impl": job.get("transformer_impl", "auto")} | job.get("args", {})
    args = build.at_sizes(load.read_common(job["checkpoint"]).get("args") or {}, **sizes, **others)
    build.initialize(args, timeout_s, gloo_groups=True)
    on_step = partial(print_step, job.get("losses"), bool(job.get("json")))
    return train(args, job["checkpoint"], options, on_step)


def print_step(losses: str | None, as_json: bool, step: Step) -> None:
    """Prints a step, and adds it to the file `losses`."""
    if dist.get_rank() == 0:
        text = " ".join(f"{name} {value:.6g}" for name, value in step.items())
        print(json.dumps(step) if as_json else text, flush=True)
        if losses:
            with Path(losses).open("a") as file:
                file.write(json.dumps(step) + "\n")


def train(
    args: Namespace,
    checkpoint: str | Path,
    options: TrainOptions,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Trains for options.steps steps and returns every step, the same on every rank.

    Requires build.initialize with the same args and gloo_groups.
    """
    args = run_args(args, options)
    with cpu.as_cuda():
        chunks, optimizer, scheduler = set_up(args, options)
        models = [chunk.module for chunk in chunks]
        if options.resume:
            state = load.load(models, args, checkpoint, optimizer=optimizer, scheduler=scheduler)
            done = int(state["iteration"])
        else:
            load.load(models, args, checkpoint)
            optimizer.reload_model_params()  # the fp32 masters are older than the loaded weights
            done = 0
        source = data.open_source(
            options.data, args, args.seq_length, options.seed, options.tokenizer
        )
        steps = []
        for step in range(done + 1, options.steps + 1):
            steps.append(train_step(step, chunks, optimizer, scheduler, args, source))
            on_step(steps[-1])
            interval = options.save_interval
            if options.save and (step == options.steps or (interval and step % interval == 0)):
                args.iteration, args.consumed_train_samples = step, step * args.global_batch_size
                save.save(
                    models,
                    args,
                    options.save,
                    options.format,
                    step,
                    optimizer=optimizer,
                    scheduler=scheduler,
                    optimizer_format=(
                        options.optimizer_format
                        if options.distributed_optimizer
                        or getattr(args, "use_layer_wise_distributed_optimizer", False)
                        else None
                    ),
                )
    return steps


def run_args(args: Namespace, options: TrainOptions) -> Namespace:
    """Returns the args of this run as pretrain_gpt would save them, because a later run reads them.
    Raises UsageError if batch or sequence cannot be cut as the sizes require.
    """
    from megatron.core import parallel_state as ps

    out = build.namespace(args)
    num_ranks = ps.get_data_parallel_world_size()
    of_args = getattr(args, "seq_length", None) or args.max_position_embeddings
    seq_length = options.seq_length or of_args
    if options.global_batch_size % (options.micro_batch_size * num_ranks):
        raise UsageError(
            f"a global batch of {options.global_batch_size} sequences cannot be dealt to"
            f" {num_ranks} data-parallel ranks in micro batches of {options.micro_batch_size}"
        )
    parts = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    parts *= args.tensor_model_parallel_size
    if seq_length % parts:
        raise UsageError(
            f"--seq-length {seq_length} cannot be cut into {parts} equal parts, as these sizes of"
            " tp and cp ask; give another one"
        )
    vars(out).update(
        seq_length=seq_length,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_iters=options.warmup,
        lr_decay_style="cosine",
        train_iters=options.steps,
        lr_decay_iters=options.decay_steps or options.steps,
        seed=options.seed,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        optimizer=options.optimizer,
        use_distributed_optimizer=options.distributed_optimizer,
        # A checkpoint of Muon may have this arg. Adam must not use Muon's layout of the buffers.
        use_layer_wise_distributed_optimizer=options.optimizer not in ("adam", "sgd")
        and bool(getattr(args, "use_layer_wise_distributed_optimizer", False)),
        bf16=options.dtype == "bfloat16",
        fp16=options.dtype == "float16",
        accumulate_allreduce_grads_in_fp32=True,  # as `set_up` has it
        params_dtype=getattr(torch, options.dtype),
        world_size=dist.get_world_size(),
        data_parallel_size=num_ranks,
        no_save_optim=False,
        no_save_rng=False,
        ckpt_format=options.format,
        use_dist_ckpt=formats.get(options.format).global_keys,
        dist_ckpt_optim_fully_reshardable=options.distributed_optimizer
        and options.optimizer_format == "fully_reshardable",
    )
    return out


def set_up(args: Namespace, options: TrainOptions) -> tuple[list[Any], Any, Any]:
    """Returns the chunks in DistributedDataParallel, the optimizer, and the scheduler of the
    learning rate.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import (
        OptimizerConfig,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    install_adam()
    models = build.build(args, args.params_dtype, training=True)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=options.distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
    )
    by_layers = bool(getattr(args, "use_layer_wise_distributed_optimizer", False))
    laid_out = by_layers and getattr(args, "use_layer_wise_param_layout", True)
    if laid_out:
        from megatron.training.training import wrap_model_chunks_with_ddp

        chunks = wrap_model_chunks_with_ddp(
            [model.train() for model in models],
            models[0].config,
            ddp,
            use_layer_wise_distributed_optimizer=True,
        )
    else:
        chunks = [DistributedDataParallel(model.config, ddp, model.train()) for model in models]
    settings = {
        field.name: vars(args)[field.name]
        for field in fields(OptimizerConfig)
        if field.name.startswith(SETTINGS) and hasattr(args, field.name)
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=options.optimizer,
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            bf16=args.bf16,
            fp16=args.fp16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=options.distributed_optimizer,
            **settings,
        ),
        chunks,
        config_overrides=get_standard_config_overrides(OptimizerConfig()),  # no decay of norms
    )
    per_step = options.global_batch_size  # the scheduler counts sequences
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.warmup * per_step,
        lr_decay_steps=max(args.lr_decay_iters, options.warmup + 1) * per_step,
        lr_decay_style="cosine",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.steps * per_step,
        wd_incr_style="constant",
        # A resumed run takes the count of steps from the checkpoint, and all else from its options.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    for model in models:
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer, scheduler


def train_step(
    step: int,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    args: Namespace,
    source: data.Source,
) -> Step:
    """Runs forward and backward over the global batch, and one update; returns the step."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    started = time.perf_counter()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(step, args, source) for _ in chunks],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    lr = optimizer.param_groups[0]["lr"]  # before the scheduler changes it for the next update
    scale = optimizer.get_loss_scale().item()
    updated, grad_norm, _ = optimizer.step()
    if updated:
        scheduler.step(increment=args.global_batch_size)
    elif not args.fp16:
        raise FloatingPointError(f"step {step}: the gradient is not finite")

    total = torch.zeros(2, device=torch.cuda.current_device())
    if reports:  # the last pipeline stage alone has reports
        total = torch.stack(reports).sum(0)
    dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))
    last_stage = ps.get_pipeline_model_parallel_last_rank()
    dist.broadcast(total, last_stage, group=ps.get_pipeline_model_parallel_group())
    loss, num_tokens = total.tolist()
    seconds = time.perf_counter() - started
    return {
        "step": step,
        "loss": loss / num_tokens,
        **({"grad_norm": float(grad_norm)} if updated else {}),
        **({"loss_scale": scale} if args.fp16 else {}),
        "lr": lr,
        "seconds": seconds,
        "tokens_per_s": args.global_batch_size * args.seq_length / seconds,
    }


def batches(step: int, args: Namespace, source: data.Source) -> Iterator[dict[str, torch.Tensor]]:
    """Yields this rank's micro batches of a step: tokens, labels, positions, each [micro batch,
    part of the sequence].

    Micro batch m of the global batch begins with sequence m * micro_batch_size. Data-parallel rank
    r of n computes m = r, r + n, r + 2n ...
    """
    from megatron.core import parallel_state as ps
    from megatron.core.utils import get_batch_on_this_cp_rank

    # After 0.16 a call without cp_group cuts the sequence over all ranks of the run, and requires
    # is_hybrid_cp, which 0.16 does not have.
    cut: dict[str, Any] = {"cp_group": ps.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        cut["is_hybrid_cp"] = False
    size = args.micro_batch_size
    first, num = (step - 1) * args.global_batch_size, args.global_batch_size // size
    for micro in range(ps.get_data_parallel_rank(), num, args.data_parallel_size):
        rows = np.stack([source(first + micro * size + row) for row in range(size)])
        both = torch.from_numpy(rows).to(torch.cuda.current_device())
        positions = torch.arange(args.seq_length, device=both.device).expand(size, -1)
        batch = {
            "tokens": both[:, :-1].contiguous(),
            "labels": both[:, 1:].contiguous(),
            "positions": positions.contiguous(),
        }
        yield get_batch_on_this_cp_rank(batch, **cut)


def forward_step(
    iterator: Iterator[dict[str, torch.Tensor]], chunk: Any
) -> tuple[torch.Tensor, Any]:
    """Returns a chunk's output and the function of its loss. The schedule calls it for every chunk
    and micro batch.
    """
    batch = next(iterator)
    mask = None
    # Only Transformer Engine has context parallelism, and it makes its own mask.
    if chunk.module.config.context_parallel_size == 1:
        tokens = batch["tokens"]
        length = tokens.shape[1]
        # True hides a position.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return chunk(batch["tokens"], batch["positions"], mask, labels=batch["labels"]), sum_loss


def sum_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the sum of the losses of a micro batch [batch, seq], the number of its tokens, and
    both as one tensor for the report.
    """
    total = losses.float().sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, num_tokens, torch.stack([total.detach(), num_tokens.float()])


if __name__ == "__main__":
    with points.reporting(sys.argv[1]) as JOB:
        main(JOB)
