"""The examples of frameworks of reinforcement learning, with stand-ins for the frameworks: their
classes that the examples replace or extend, as they call them.

rl     like: a directory, out: of tests/helpers/rl_engine.py, which receives what rank 0 sends
       -> errors: {a fault: the error of each rank}
       updates: a directory, of which tests/helpers/vllm_generating.py takes the updates; steps: the
       names of its directories, which end in "full" or "delta"
"""

from __future__ import annotations

import pickle
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mckpt import live
from mckpt.live import buckets
from mckpt.trainer import load
from tests.helpers.live_cases import ROOT, change, read, refusal, unlike
from tests.helpers.rl_engine import NEMO_ALIGN, FlattenedTensorMetadata, handle_of

BUCKET = 1 << 16  # bytes, so that a tiny model has several
SCALE = 0.5


class Engine:
    """The engine, to which rank 0 speaks; elsewhere nothing."""

    def __init__(self, folder: str) -> None:
        self.process = None
        if dist.get_rank() == 0:
            command = [sys.executable, "-m", "tests.helpers.rl_engine", folder]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(command, **pipes)

    def ask(self, **message: Any) -> None:
        if self.process is not None:
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()
            if error := pickle.load(self.process.stdout):
                raise AssertionError(error)

    def end(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def module(name: str, **members: Any) -> Any:
    """Makes a module, and the packages above it."""
    path = name.split(".")
    for number in range(1, len(path) + 1):
        key = ".".join(path[:number])
        if key not in sys.modules:
            sys.modules[key] = types.ModuleType(key)
            sys.modules[key].__path__ = []
            if number > 1:
                setattr(
                    sys.modules[".".join(path[: number - 1])], path[number - 1], sys.modules[key]
                )
    sys.modules[name].__dict__.update(members)
    return sys.modules[name]


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "live" / f"{name}_weights.py"))


# ---------------------------------------------------------------------------------------- slime


def named_params_and_buffers(args: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """Slime's names, which count the layers of all stages."""
    for chunk in model:
        layers = {
            f"{path}.": f"{path.rpartition('.')[0]}.{inner.layer_number - 1}."
            for path, inner in chunk.named_modules()
            if path.startswith("decoder.layers.") and path.count(".") == 2
        }
        buffers = (pair for pair in chunk.named_buffers() if "expert_bias" in pair[0])
        for name, tensor in (*chunk.named_parameters(), *buffers):
            of = next((path for path in layers if name.startswith(path)), "")
            yield f"module.module.{layers.get(of, '')}{name.removeprefix(of)}", tensor


class HfWeightIteratorBase:
    create: Any = None

    def __init__(self, args: Any, model: Any, model_name: str, quantization_config: Any) -> None:
        self.args, self.model = args, model


def slime(chunks: list[Any], like: str, engine: Engine) -> None:
    """Sends the copies of the host, while the weights of the device are others."""
    slimes = "slime.backends.megatron_utils"
    weights = f"{slimes}.update_weight"
    module("sglang.srt.weight_sync.tensor_bucket", FlattenedTensorMetadata=FlattenedTensorMetadata)
    module(f"{slimes}.sglang", FlattenedTensorBucket=Some(supports_multi_dtypes=True))
    module(f"{weights}.common", named_params_and_buffers=named_params_and_buffers)
    module(f"{weights}.hf_weight_iterator_base", HfWeightIteratorBase=HfWeightIteratorBase)
    sends = module(f"{weights}.update_weight_from_tensor", _build_flattened_tensor_data=None)
    example("slime")
    args = Some(hf_checkpoint=like)
    given = {"model_name": "qwen3", "quantization_config": None}
    iterator = HfWeightIteratorBase.create(args=args, model=chunks, **given)
    host = {
        name: tensor.detach().clone() for name, tensor in named_params_and_buffers(args, chunks)
    }
    for tensor in host.values():
        tensor.mul_(2)
    count = 0
    for named in iterator.get_hf_weight_chunks(host, param_info_buckets=None):
        flat = handle_of(sends._build_flattened_tensor_data(named))
        every: Any = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(flat, every)
        more = {"load_format": "flattened_bucket", "weight_version": "1"}
        engine.ask(kind="slime", serialized_named_tensors=every, **more)
        dist.barrier()
        count += 1
    assert count > 1
    engine.ask(end="slime")


# ----------------------------------------------------------------------------------------- verl


class MegatronEngine:
    peft_cls = None

    def get_per_tensor_param(self, base_sync_done: bool = False, **keywords: Any) -> Any:
        return iter(()), {"peft_type": "LORA"}


def verl(chunks: list[Any], like: str, engine: Engine) -> None:
    """Packs the pairs into one buffer. Between two updates the weights are not on the device."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def offload() -> None:
        for _, weight in load.weights(chunks):
            kept.append((weight, weight.detach().clone()))
            weight.untyped_storage().resize_(0)

    def load_megatron_model_to_gpu(models: Any, load_grad: bool = True) -> None:
        assert models is chunks and not load_grad
        for weight, copy in kept:
            weight.untyped_storage().resize_(copy.nbytes)
            weight.copy_(copy)
        kept.clear()

    module("verl.utils.megatron_utils", load_megatron_model_to_gpu=load_megatron_model_to_gpu)
    module("verl.workers.engine.megatron.transformer_impl", MegatronEngine=MegatronEngine)
    example("verl")
    trainer = MegatronEngine()
    trainer.__dict__.update(module=chunks, model_config=Some(local_path=like, lora={}))
    device = next(chunks[0].parameters()).device
    buffer = torch.zeros(2 * BUCKET, dtype=torch.uint8, device=device)
    for update in range(2):
        offload()
        weights, peft_config = trainer.get_per_tensor_param(layered_summon=False)
        assert peft_config is None
        metas: dict[str, Any] = {}
        offset = 0
        for name, weight in weights:
            if offset + weight.nbytes > len(buffer):
                engine.ask(kind="verl", buffer=handle_of(buffer), bucket_meta=metas)
                metas, offset = {}, 0
            meta = {"name": name, "shape": weight.shape, "dtype": weight.dtype}
            metas[name] = {**meta, "offset": offset, "handle": None}
            place = buffer[offset : offset + weight.nbytes]
            place.copy_(weight.contiguous().view(-1).view(torch.uint8))
            offset += weight.nbytes + -weight.nbytes % 8
        engine.ask(kind="verl", buffer=handle_of(buffer), bucket_meta=metas)
        engine.ask(end=f"verl{update}")
    trainer.peft_cls = "lora"
    assert trainer.get_per_tensor_param()[1] == {"peft_type": "LORA"}


# -------------------------------------------------------------------------------------- NeMo-RL


class IPCProtocol(Enum):
    COMPLETE = "complete"


def scale_names(layer: int) -> dict[str, str]:
    names = {"q_scale": "attn.q_scale", "k_scale": "k_scale", "v_scale": "v_scale"}
    return {kind: f"model.layers.{layer}.self_attn.{name}" for kind, name in names.items()}


class MegatronPolicyWorkerImpl:
    def _calculate_refit_param_info(self) -> list[Any]:
        return []

    def maybe_init_zmq(self) -> None:
        assert self.zmq_socket.left is not None


class Socket:
    """Stands for the socket of a worker, which knows the names and forms that it will receive."""

    def __init__(self, engine: Engine, forms: dict[str, Any]) -> None:
        self.engine, self.forms, self.left, self.asked = engine, forms, set(forms), 0

    def send_pyobj(self, payload: Any) -> None:
        assert not self.asked, "a socket of REQ waits for an answer first"
        self.asked = 1
        if payload is IPCProtocol.COMPLETE:
            assert not self.left, self.left
            self.engine.ask(end="nemo_rl")
            return
        handle, names, used_bytes = payload
        assert set(names) <= self.left and len(set(names)) == len(names)
        self.left -= set(names)
        message = {"handle": handle, "names": names, "used_bytes": used_bytes, "forms": self.forms}
        self.engine.ask(kind="nemo_rl", **message)

    def recv(self) -> None:
        self.asked = 0


def nemo_rl(chunks: list[Any], like: str, engine: Engine) -> None:
    """Sends the scales of an fp8 cache beside the weights."""
    names = "nemo_rl.models.generation.vllm.quantization.fp8_train_utils"
    module(names, get_vllm_qkv_scale_names=scale_names)
    module(
        "nemo_rl.models.policy.utils",
        IPCProtocol=IPCProtocol,
        get_handle_from_tensor=handle_of,
        get_runtime_env_for_policy_worker=lambda name: {},
    )
    worker = "nemo_rl.models.policy.workers.megatron_policy_worker"
    module(worker, MegatronPolicyWorkerImpl=MegatronPolicyWorkerImpl)
    module("ray", remote=lambda **keywords: lambda cls: cls)
    made = example("nemo_rl")
    assert made["ALIGN"] == NEMO_ALIGN
    policy = made["MckptPolicyWorker"]()
    cache = {"backend": "vllm", "vllm_cfg": {"kv_cache_dtype": "fp8_e4m3"}}
    policy.model, policy.cfg = chunks[0], {"model_name": like, "generation": cache}
    forms = policy.prepare_refit_info()
    policy.zmq_socket = Socket(engine, forms)
    scales = {scale_names(1)["k_scale"]: SCALE}
    policy.stream_weights_via_ipc_zmq(1 << 20, kv_scales=scales)
    one_by_one = dict(policy._iter_params_with_optional_kv_scales(scales))
    assert {name: (t.shape, t.dtype) for name, t in one_by_one.items()} == forms
    assert float(one_by_one[scale_names(1)["k_scale"]]) == SCALE


# ---------------------------------------------------------------------------------------- SkyRL


class WeightChunk:
    def __init__(self, names: Any, dtypes: Any, shapes: Any, tensors: Any) -> None:
        assert len(names) == len(dtypes) == len(shapes) == len(tensors)
        self.names, self.dtypes, self.shapes, self.tensors = names, dtypes, shapes, tensors


def skyrl(chunks: list[Any], like: str, engine: Engine) -> None:
    """Packs each chunk by elements of one dtype, and compares the metadata that came before."""
    base = "skyrl.backends.skyrl_train"
    module(f"{base}.weight_sync", WeightChunk=WeightChunk, WeightExtractor=object)
    worker = module(f"{base}.workers.megatron.megatron_worker", MegatronWeightExtractor=None)
    example("skyrl")
    more = {"enable_bucketing": True, "bucket_size_threshold_GB": 1.0}
    bridge = Some(hf_pretrained=Some(model_name_or_path=like))
    extractor = worker.MegatronWeightExtractor(bridge=bridge, actor_module=chunks, **more)
    wanted, listed = extractor.get_weight_metadata(torch.bfloat16), list[Any]()
    for chunk in extractor.extract_weights(torch.bfloat16):
        assert set(chunk.dtypes) == {"torch.bfloat16"} == {str(t.dtype) for t in chunk.tensors}
        sizes = [tensor.numel() for tensor in chunk.tensors]
        packed = torch.cat([tensor.reshape(-1) for tensor in chunk.tensors])
        message = {"names": chunk.names, "shapes": chunk.shapes, "sizes": sizes}
        engine.ask(kind="skyrl", handle=handle_of(packed), **message)
        listed += zip(chunk.names, ["bfloat16"] * len(sizes), chunk.shapes, strict=True)
    engine.ask(end="skyrl")
    assert listed == list(zip(*(wanted[key] for key in wanted), strict=True))


# ------------------------------------------------------------------------------- what goes wrong


def faults(chunks: list[Any], like: str) -> dict[str, list[str]]:
    """Gives a call other weights, or other tensors beside them, on one rank or on all; behind each
    fault a call must be right.
    """
    rank, sync = dist.get_rank(), live.Sync(chunks, like=like)
    right, errors = read(Path(like)), dict[str, list[str]]()
    host = {n: t.detach().clone() for c in chunks for n, t in c.named_parameters()}
    host |= {n: t.detach().clone() for c in chunks for n, t in c.named_buffers()}
    last = max(name for name in host if name.endswith("linear_proj.weight"))
    scale, here = torch.tensor([SCALE]), rank == 1

    def all_but_one() -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in host.items() if not here or name != last}

    cases: dict[str, Callable[[], Any]] = {
        "missing": lambda: sync(weights=all_but_one()),
        "left over": lambda: sync(weights=host | ({"another": scale} if here else {})),
        "shape": lambda: sync(weights=host | {last: host[last][: len(host[last]) - here]}),
        "dtype": lambda: sync(weights=host | {last: host[last].float()}),
        "one rank": lambda: sync(weights=host if here else None),
        "clash": lambda: sync(extra={next(iter(right)): scale}),
        "extra": lambda: sync(extra={"scale": scale + here}),
        "name": lambda: sync.buckets(extra={f"scale{here}": scale}),
        "align": lambda: sync.buckets(24),
    }
    for name, fault in cases.items():
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, refusal(lambda f=fault: list(f())))
        errors[name] = every
        version = sync.version
        given = dict(sync(weights=host, extra={"scale": scale}))
        assert torch.equal(given.pop("scale"), scale) and sync.version == version + 1
        assert unlike(given, right) == [], name
    assert sync.memory is not None
    sync.memory._chunks = [*chunks, *chunks]
    errors["chunks"] = [refusal(lambda: list(sync(weights=host)))]
    sync, engine = live.Sync(chunks, like=like, delta="host"), dict[str, torch.Tensor]()
    device = next(chunks[0].parameters()).device
    forms = right | {"scale": scale}
    engine = {name: torch.zeros_like(tensor, device=device) for name, tensor in forms.items()}
    for factor in (1, 3):  # the deltas of copies, whose weights do not change
        doubled = {name: tensor * factor for name, tensor in host.items()}
        asked = sync(weights=doubled, extra={"scale": scale * factor})
        live.apply_delta(engine, asked, sync.version)
        wanted = {name: tensor * factor for name, tensor in right.items()}
        assert unlike(engine, wanted | {"scale": scale * factor}) == []
    return errors


@torch.no_grad()
def run(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    load.load(chunks, args, case["checkpoint"])
    kept, buckets.BUCKET = buckets.BUCKET, BUCKET
    engine = Engine(case["rl"])
    try:
        for framework in (slime, verl, nemo_rl, skyrl):
            framework(chunks, case["like"], engine)
        return {"errors": faults(chunks, case["like"])}
    finally:
        buckets.BUCKET = kept
        engine.end()


@torch.no_grad()
def run_updates(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Writes what an engine takes after each step: all tensors, or what changed."""
    load.load(chunks, args, case["checkpoint"])
    like, every = case["like"], live.Sync(chunks, like=case["like"], to=0)
    sync = live.Sync(chunks, like=like, to=0, delta="host")
    for number, step in enumerate(case["steps"]):
        if number:
            change(chunks, 0.1, number, flip=-(1 << 15))  # the signs of a tenth
        deltas = sync()
        listed = [tuple(delta) for delta in deltas]
        tensors = {name: tensor.clone() for name, tensor in every()}
        if dist.get_rank():
            continue
        update: dict[str, Any] = {"tensors": tensors}
        if step.endswith("delta"):
            assert all(delta[1] is not None for delta in listed)
            update = {"deltas": listed, "base_version": deltas.base_version}
        (Path(case["updates"]) / step).mkdir(parents=True)
        torch.save(update | {"version": sync.version}, Path(case["updates"]) / step / "update.pt")
        save_file(tensors, Path(case["updates"]) / step / "model.safetensors")
    return {}
