"""Runs many cases on the real megatron-core, on CPU (gloo) or GPU (NCCL): a program of
tests/helpers/session.py. The ranks are forks of its process.

A case is a dict. It has `kind`, a `name`, and further entries by kind. The entries are listed
first, and the results behind the arrow:

    forward  checkpoint
             tokens: [[...]]
             args: entries that replace those of the checkpoint's own args
             format: the format that the checkpoint must have
             impl: replaces args.transformer_impl
             training: true builds the model as for training (sequence parallelism)
             -> NAME.npy: fp32 logits [batch, seq, vocab]
             -> unread: model keys of the checkpoint that no rank asked for
             -> forgiven: the _extra_state that it lacks
    encode   checkpoint, args, tokens
             seen: [[...]], 0 for a token that is padding
             kinds: [[...]], the kind of each token
             -> NAME.npy: fp32 logits [batch, seq, vocab] of an encoder, at tp 1 and pp 1
             -> sentence: its scores of two sentences [[...]]
    mtp      as forward, on one rank
             -> NAME.npy: fp32 logits [batch, seq, vocab] of the first layer of multi-token
                prediction
    save     args, destination, format, seed, with_args, iteration (null: release), tokens
             format: also nemo_dist, nemo_torch and nemo_o2, as NeMo 1 saves
             -> a model with random weights, the same for every parallel size, which megatron-core
                saved in args.params_dtype
             -> NAME.npy, as above
    keys     args; runs at any size without the processes
             -> torch_dist: {key: [global shape, dtype]}, with [] and "object" for an object
             -> torch: {mp_rank directory: [{key: shape, or null for an object}]}, with one dict
                for each virtual stage
    shards   args, world, ranks; runs at any size without the processes
             -> shards: [[[key, dtype, global shape, offset, shape] of each shard] of each rank]
    train    checkpoint and the other entries of a job of mckpt.trainer.train
             -> steps: what train() returns
             frozen: optional patterns of the names of parameters that are not trained
             verl: saves in the layout of verl
    t5       the entries of tests/helpers/t5_model.py
    live     checkpoint, args, and the entries of tests/helpers/live_cases.py
    grid     cp; runs at any size without the processes
             -> files: {mp_rank directory: [[rank, tp, pp, ep, etp] of each rank that writes it]}
             -> reads: the same of each rank that reads it

All kinds take sizes: tp, pp, vpp, ep, etp (default 1; etp defaults to tp) and world (default: the
fewest ranks). A case runs on the first `world` of the W ranks in process groups of its own, so that
a case that fails cannot harm the next one. `timeout` is seconds for one collective (60). A case
that takes 3 times as long is stuck: it ends the launch and prints the stacks of its ranks.

out_dir/NAME.json: ok, seconds, error {rank: traceback} (the first to fail first), and the results.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from argparse import Namespace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from mckpt import launching
from mckpt.trainer import build, cpu, forked, load, save, train, worker
from tests.helpers import bert_model

TIMEOUT_S = 60  # limit of one collective, after which a rank stops waiting for one that failed


def prepare() -> None:
    for needed in forked.NEEDED:
        importlib.import_module(needed)
    cpu.install()
    bert_model.install()


def run(cases: list[dict[str, Any]], out: Path) -> int:
    os.environ["WORLD_SIZE"] = str(max(ranks_of(case) for case in cases))
    return forked.fork_ranks(lambda: main(cases, out))


def main(cases: list[dict[str, Any]], out: Path) -> None:
    """Runs all cases on one rank."""
    watch_parent()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, num_ranks = next(
        dist.rendezvous("env://", timeout=datetime.timedelta(seconds=5 * TIMEOUT_S))
    )
    for case in cases:
        patience = case.get("patience", 3 * case.get("timeout", TIMEOUT_S))
        faulthandler.dump_traceback_later(patience, exit=True)
        run_case(case, dist.PrefixStore(case["name"], store), rank, out)
        faulthandler.cancel_dump_traceback_later()
    store.set(f"bye{rank}", "")
    if rank == 0:  # this rank may host the store
        store.wait([f"bye{r}" for r in range(num_ranks)], datetime.timedelta(seconds=TIMEOUT_S))


def watch_parent() -> None:
    """Ends this process group once the tests have ended (a test run that was killed)."""
    parent = int(os.environ["JUDGE_PARENT"])
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


def die_with(parent: int) -> None:
    while True:
        time.sleep(1)
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)


def run_case(case: dict[str, Any], store: dist.Store, rank: int, out: Path) -> None:
    """Runs one case on this rank. Rank 0 gathers the results of the others through the store, which
    outlives their process groups.
    """
    limit = datetime.timedelta(seconds=5 * case.get("timeout", TIMEOUT_S))
    world = ranks_of(case)
    started = time.time()
    if rank < world:
        try:
            report = {"result": KINDS[case["kind"]](Case(case, store, rank, out))}
        except BaseException:
            report = {"error": traceback.format_exc(), "failed_after_s": time.time() - started}
        finally:
            # with NCCL, a group whose rank is lost never ends
            lost = case.get("fault") and dist.is_initialized() and dist.get_backend() == "nccl"
            if not lost:
                tear_down()
        store.set(f"report{rank}", json.dumps(report))
    if rank == 0:
        ranks = range(world)
        store.wait([f"report{r}" for r in ranks], limit)
        reports = [json.loads(store.get(f"report{r}")) for r in ranks]
        failed = sorted(
            (r for r in ranks if "error" in reports[r]), key=lambda r: reports[r]["failed_after_s"]
        )
        verdict = {
            "name": case["name"],
            "kind": case["kind"],
            "ok": not failed,
            "seconds": round(time.time() - started, 2),
        }
        if failed:
            verdict["error"] = {str(r): reports[r]["error"] for r in failed}
        else:
            verdict |= reports[0]["result"]
            if case["kind"] == "forward":
                verdict["unread"] = sorted(
                    set.intersection(*(set(report["result"]["unread"]) for report in reports))
                )
                verdict["forgiven"] = sorted(
                    set.union(*(set(report["result"]["forgiven"]) for report in reports))
                )
        (out / f"{case['name']}.json").write_text(json.dumps(verdict))
        store.set("end", "")
    store.wait(["end"], limit)


class Case(dict[str, Any]):
    """The entries of a case, on one rank of `world`."""

    def __init__(self, entries: dict[str, Any], store: dist.Store, rank: int, out: Path) -> None:
        super().__init__(entries)
        self.store, self.rank, self.out = store, rank, out
        self.world = ranks_of(entries)

    def join(self) -> float:
        """Joins the process group of the case; returns the limit of one collective, in seconds."""
        timeout_s: float = self.get("timeout", TIMEOUT_S)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        return timeout_s

    def start(self, args: Namespace) -> None:
        """Starts all process groups of a model."""
        trains = bool(self.get("trains") or self.get("resumes") is not None)
        build.initialize(args, self.join(), gloo_groups=trains)

    def sizes(self) -> dict[str, Any]:
        given = {name: self[name] for name in ("tp", "pp", "vpp", "ep", "etp") if self.get(name)}
        return given | ({"transformer_impl": self["impl"]} if self.get("impl") else {})

    def keep(self, logits: torch.Tensor) -> None:
        """Saves the logits as those of the case."""
        if self.rank == 0:
            np.save(self.out / f"{self['name']}.npy", logits.cpu().numpy())


def tear_down() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def ranks_of(case: dict[str, Any]) -> int:
    """Returns the number of processes that a case needs: one may play all ranks in turn."""
    alone = case["kind"] in ("grid", "keys", "buckets", "shards")
    return 1 if alone else case.get("world") or smallest_world(case)


def smallest_world(case: dict[str, Any]) -> int:
    given = {name: case.get(name) or 1 for name in ("tp", "pp", "ep", "cp")}
    return launching.world({**given, "etp": case.get("etp") or given["tp"]})


def forward_case(case: Case) -> dict[str, Any]:
    found = load.format_of(case["checkpoint"]).name
    if case.get("format", found) != found:
        raise ValueError(f"{case['checkpoint']} is {found}, not {case['format']}")
    stored = load.read_common(case["checkpoint"]).get("args")
    args = build.at_sizes(stored or {}, **case.get("args", {}) | case.sizes())
    case.start(args)
    chunks = build.build(args, training=case.get("training", False))
    state = load.load(chunks, args, case["checkpoint"])
    keep_logits(chunks, args, case)
    return {
        "format": found,
        "unread": state["unread"],
        "forgiven": state["forgiven"],
        "iteration": state.get("iteration"),
    }


@torch.no_grad()
def encode_case(case: Case) -> dict[str, Any]:
    args = build.at_sizes(load.read_args(case["checkpoint"]), **case["args"] | case.sizes())
    case.start(args)
    chunks = build.build(args)
    load.load(chunks, args, case["checkpoint"])
    inputs = (torch.tensor(case[name]) for name in ("tokens", "seen", "kinds"))
    logits, sentence = chunks[0](*inputs)
    case.keep(logits)
    return {"sentence": sentence.tolist()}


@torch.no_grad()
def mtp_case(case: Case) -> dict[str, Any]:
    stored = load.read_common(case["checkpoint"]).get("args")
    args = build.at_sizes(stored or {}, **case.get("args", {}) | case.sizes())
    case.start(args)
    (chunk,) = build.build(args)
    state = load.load([chunk], args, case["checkpoint"])
    hidden: list[torch.Tensor] = []  # of the decoder and of each layer, one after the other
    chunk.mtp.register_forward_hook(lambda module, given, found: hidden.append(found))
    tokens = torch.tensor(case["tokens"])
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    chunk(tokens, positions, mask, labels=tokens)
    weight = chunk.shared_embedding_or_output_weight()
    if not chunk.share_embeddings_and_output_weights:
        weight = chunk.output_layer.weight
    logits = (hidden[0][length : 2 * length] @ weight.T).transpose(0, 1)
    case.keep(logits[..., : args.vocab_size].float())
    return {"unread": state["unread"]}


def save_case(case: Case) -> dict[str, Any]:
    args = build.at_sizes({}, **case["args"] | case.sizes())
    case.start(args)
    chunks = build.build(args)
    dtype = getattr(args, "params_dtype", torch.float32)
    fill(chunks, case.get("seed", 0), dtype)
    keep_logits(chunks, args, case)
    for chunk in chunks:
        build.cast(chunk, dtype)
    if case["format"].startswith("nemo"):
        return {"unit": str(save_nemo(chunks, args, case["format"], Path(case["destination"])))}
    unit = save.save(
        chunks,
        args,
        case["destination"],
        case["format"],
        case.get("iteration", 1),
        case.get("with_args", True),
    )
    return {"unit": str(unit)}


def save_nemo(chunks: list[Any], args: Namespace, form: str, place: Path) -> Path:
    """Saves a model as NeMo 1 does, without model_config.yaml (parts/nlp_overrides.py,
    NLPSaveRestoreConnector.save_to).
    """
    from megatron.core import dist_checkpointing, parallel_state

    if form == "nemo_dist":
        metadata = load.with_group({})
        place = place / "model_weights"
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        dist.barrier()
        state: dict[str, Any] = {}
        for chunk in chunks:
            state |= chunk.sharded_state_dict(prefix="model.", metadata=metadata)
        dist_checkpointing.save(state, str(place))
        return place
    t = parallel_state.get_tensor_model_parallel_rank()
    p = parallel_state.get_pipeline_model_parallel_rank()
    if args.pipeline_model_parallel_size > 1:
        place = place / f"tp_rank_{t:02d}_pp_rank_{p:03d}"
    elif args.tensor_model_parallel_size > 1:
        place = place / f"mp_rank_{t:02d}"
    place.mkdir(parents=True, exist_ok=True)
    # megatron_amp_O2 wraps the model into a Float16Module
    start = "model.module." if form == "nemo_o2" else "model."
    weights = {f"{start}{key}": value for key, value in chunks[0].state_dict().items()}
    torch.save(weights, place / "model_weights.ckpt")
    return place


def train_case(case: Case) -> dict[str, Any]:
    timeout_s = case.join()
    whole, patterns = build.build, case.pop("frozen", ())

    def partly_frozen(*args: Any, **options: Any) -> Any:
        chunks = whole(*args, **options)
        for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
            parameter.requires_grad = not any(fnmatch(name, pattern) for pattern in patterns)
        return chunks

    from megatron.core import dist_checkpointing

    whole_save = dist_checkpointing.save
    saves = functools.partial(save_as_verl, whole_save) if case.pop("verl", False) else whole_save
    with (
        mock.patch.object(build, "build", partly_frozen),
        mock.patch.object(dist_checkpointing, "save", saves),
    ):
        return {"steps": train.run(case, timeout_s)}


def save_as_verl(save: Any, state: dict[str, Any], place: str, content_metadata: Any) -> None:
    """Saves in the layout of verl (verl/utils/checkpoint/megatron_checkpoint_manager.py)."""
    role = Path(place).parent / f"global_step_{state['iteration']}/actor"
    parts = {
        "model": {key: value for key, value in state.items() if key.startswith("model")},
        "optimizer": {
            "optimizer": state["optimizer"],
            "lr_scheduler": state["opt_param_scheduler"],
        },
        "extra": {"rng_state": state["rng_state"]},
    }
    for part, own in parts.items():
        if dist.get_rank() == 0:
            (role / part / "dist_ckpt").mkdir(parents=True)
        dist.barrier()
        save(own, str(role / part / "dist_ckpt"), content_metadata=content_metadata)
    if dist.get_rank() == 0:
        Path(place).rmdir()
        sizes = {k: v for k, v in vars(state["args"]).items() if "_parallel_" in k}
        (role / "transformer_config.json").write_text(json.dumps(sizes, default=str))


def keep_logits(chunks: list[Any], args: Namespace, case: Case) -> None:
    if case.get("tokens"):
        bert_model.take_inputs_of_a_decoder(chunks, args)
        logits = worker.logits(chunks, args, torch.tensor(case["tokens"]))
        case.keep(logits)


@torch.no_grad()
def fill(chunks: list[Any], seed: int, dtype: torch.dtype) -> None:
    """Fills every weight from a seeded normal, biases and norms (about 1) too, rounded to `dtype`.
    The values are the same at all parallel sizes.

    Each whole tensor is drawn under its torch_dist key, and this rank's part is cut out, so
    replicas and tied copies agree as well.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    load.mark(chunks)
    for tensor in load.sharded_values(load.sharded_state(chunks, save.CONTENT_METADATA)):
        if not isinstance(tensor, ShardedTensor):
            continue  # _extra_state
        # the key of this norm depends on transformer_impl
        key = tensor.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        whole = (
            torch.randn(
                tensor.global_shape,
                generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode())),
            )
            * 0.15
        )
        if "norm" in key and key.endswith("weight"):
            whole += 1
        # the layer and expert axes of stacked keys, which the module's own tensor lacks
        axes = tensor.prepend_axis_num
        part = whole[tuple(tensor.global_offset[:axes])]
        part = part[
            tuple(
                slice(o, o + n)
                for o, n in zip(tensor.global_offset[axes:], tensor.local_shape, strict=True)
            )
        ]
        tensor.data.copy_(part if key.endswith("expert_bias") else part.to(dtype))
    left = load.marked(chunks)
    assert not left, f"sharded_state_dict does not cover {left}"


def keys_case(case: Case) -> dict[str, Any]:
    """Returns the keys that the model of every rank would save. With torch's fake process group,
    one process plays all ranks in turn.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = case.get("world") or smallest_world(case)
    args = build.at_sizes({}, **case["args"] | case.sizes())
    found = Names({}, {})
    for played in range(world):
        dist.init_process_group("fake", rank=played, world_size=world, store=FakeStore())
        build.initialize(args)
        found.add(build.build(args), args)
        tear_down()
    return found._asdict()


def shards_case(case: Case) -> dict[str, Any]:
    """Returns the shards that `sharded_state_dict()` names on some ranks of a large world. The
    weights have no memory.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    args = build.at_sizes({}, **case["args"] | case.sizes())
    found = []
    for played in case["ranks"]:
        dist.init_process_group("fake", rank=played, world_size=case["world"], store=FakeStore())
        build.initialize(args)
        with torch.device("meta"):
            chunks = build.build(args, torch.bfloat16)
        values = load.sharded_values(load.sharded_state(chunks, save.CONTENT_METADATA))
        shards = [v for v in values if isinstance(v, ShardedTensor) and v.data.numel()]
        shapes = [(1,) * v.prepend_axis_num + v.local_shape for v in shards]
        found.append(
            [
                [v.key, str(v.dtype), v.global_shape, v.global_offset, shape]
                for v, shape in zip(shards, shapes, strict=True)
            ]
        )
        tear_down()
    return {"shards": found}


class Names(NamedTuple):
    """The result of a `keys` case: the names and shapes under which the ranks store a model."""

    torch_dist: dict[str, Any]
    torch: dict[str, Any]

    def add(self, chunks: list[Any], args: Namespace) -> None:
        """Adds those of this rank."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        for value in load.sharded_values(load.sharded_state(chunks, save.CONTENT_METADATA)):
            if isinstance(value, ShardedTensor):
                dtype = str(value.dtype).removeprefix("torch.")
                self.torch_dist[value.key] = [list(value.global_shape), dtype]
            else:
                self.torch_dist[value.unique_key] = [[], "object"]
        if save.writes_torch_file():
            states = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
            self.torch[load.rank_directory(args)] = [
                {
                    name: list(v.shape) if isinstance(v, torch.Tensor) else None
                    for name, v in state.items()
                }
                for state in states
            ]


def grid_case(case: Case) -> dict[str, Any]:
    """Returns which rank reads and which writes which legacy file, by megatron-core's own
    RankGenerator.
    """
    from megatron.core.parallel_state import RankGenerator

    tp, pp, cp, ep = (case.get(name) or 1 for name in ("tp", "pp", "cp", "ep"))
    etp = case.get("etp") or tp
    world = case.get("world") or smallest_world(case)
    order = "tp-cp-ep-dp-pp"  # initialize_model_parallel's default
    dense = RankGenerator(tp=tp, ep=1, dp=world // (tp * cp * pp), pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order)

    def position(generator: Any, token: str, played: int) -> int:
        return next(group.index(played) for group in generator.get_ranks(token) if played in group)

    reads: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for played in range(world):
        t, p, e = (
            position(dense, "tp", played),
            position(dense, "pp", played),
            position(expert, "ep", played),
        )
        name = (
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        )
        reads.setdefault(name, []).append([played, t, p, e, position(expert, "tp", played)])
        if position(dense, "dp", played) and position(expert, "dp", played):
            continue  # only a rank with 0 in one of them writes
        files.setdefault(name, []).append([played, t, p, e, position(expert, "tp", played)])
    return {"files": files, "reads": reads}


def live_case(case: Case) -> dict[str, Any]:
    from tests.helpers import box_cases, live_cases, rl_cases

    stored = load.read_args(case["checkpoint"])
    args = build.at_sizes(stored, **case.get("args", {}) | case.sizes())
    case.start(args)
    if case.get("trains"):
        return live_cases.run_training(case, args)
    if "resumes" in case:
        return live_cases.run_resumed(case, args)
    if "whole" in case:
        return live_cases.run_whole(case, build.build(args, args.params_dtype), args)
    if "lora" in case:
        return live_cases.run_lora(case, build.build(args, args.params_dtype), args)
    if "boxes" in case:
        return box_cases.run(case, args)
    if "memory" in case:
        return live_cases.run_memory(case, build.build(args, args.params_dtype), args)
    if "deltas" in case:
        return live_cases.run_deltas(case, build.build(args, args.params_dtype), args)
    if "updates" in case:
        return rl_cases.run_updates(case, build.build(args, args.params_dtype), args)
    if "rl" in case:
        return rl_cases.run(case, build.build(args, args.params_dtype), args)
    return live_cases.run(case, build.build(args, args.params_dtype), args)


def t5_case(case: Case) -> dict[str, Any]:
    from tests.helpers import t5_model

    args = load.read_args(case["checkpoint"])
    case.start(args)
    with load.safe_pickles():
        return t5_model.run(case, args)


def buckets_case(case: Case) -> dict[str, Any]:
    """Returns where DistributedDataParallel keeps the parameters of every rank, by its own
    param_index_map. One process plays all ranks in turn.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = case.get("world") or smallest_world(case)
    args = build.at_sizes({}, **case["args"] | case.sizes())
    found = []
    for played in range(world):
        dist.init_process_group("fake", rank=played, world_size=world, store=FakeStore())
        build.initialize(args)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=bool(case.get("bucket_size")),
            bucket_size=case.get("bucket_size"),
        )
        with cpu.as_cuda():
            for v, model in enumerate(build.build(args, torch.bfloat16, training=True)):
                chunk = DistributedDataParallel(
                    model.config, config, model, disable_bucketing=v > 0
                )
                names = {p: name for name, p in model.named_parameters()}
                for chain, buffers in enumerate((chunk.buffers, chunk.expert_parallel_buffers)):
                    tp, ep = ps.get_tensor_model_parallel_rank(), None
                    if chain:
                        tp = ps.get_expert_tensor_parallel_rank()
                        ep = ps.get_expert_model_parallel_rank()
                    for buffer in buffers:
                        rows = [[names[p], *at] for p, at in buffer.param_index_map.items()]
                        numels = [bucket.numel_unpadded for bucket in buffer.buckets]
                        where = [chain, tp, ps.get_pipeline_model_parallel_rank(), ep, v]
                        size = buffer.data_parallel_world_size
                        shapes = [list(p.shape) for p in buffer.param_index_map]
                        found.append([where, rows, numels, size, shapes])
        tear_down()
    return {"buffers": found}


KINDS = {
    "buckets": buckets_case,
    "forward": forward_case,
    "encode": encode_case,
    "mtp": mtp_case,
    "save": save_case,
    "train": train_case,
    "keys": keys_case,
    "live": live_case,
    "grid": grid_case,
    "shards": shards_case,
    "t5": t5_case,
}


if __name__ == "__main__":  # a rank that torchrun started for tests/gpu/live.py
    prepare()
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
