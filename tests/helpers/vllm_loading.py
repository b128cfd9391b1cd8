"""vLLM as a judge of quantised exports: its own model classes and loaders read them, on CPU.

    VLLM_PYTHON tests/helpers/vllm_loading.py cases.json results.json

It runs in an environment of its own, which CONTRIBUTING.md describes, and needs neither a GPU nor
the compiled part of vLLM: the choice of a kernel is replaced, because no weight is multiplied.
cases.json is a list of dicts with these entries:

    name    of the case
    source  the export, a Hugging Face directory
    values  a directory of the same model in bfloat16, as mckpt reads it from the export

results.json: for each name, either `error`, or these:

    unloaded   parameters that no tensor filled, without the scales of activations and of caches
    methods    how often vLLM chose each class for a layer
    compared   the number of matrices and experts whose values were compared
    different  the names of those that are not equal, and the largest relative difference
    apart      the names of those whose parts have different scales of the whole weight
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.model_loader import utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

# scales of activations and of caches, which no weight needs
NOT_OF_WEIGHTS = re.compile(r"attn\.(q|k|v|prob)_(scale|zero_point)$|_input_global_scale$")
BLOCK = 128


class Kernel:
    """Stands for the kernel of a linear layer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def input_quant_key(self) -> None:
        pass


def without_kernels() -> None:
    """Replaces the choices of kernels, which all need a GPU."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as moe_nvfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8 as moe_mxfp8,
    )

    linear_nvfp4 = sys.modules[schemes.CompressedTensorsW4A4Fp4.__module__]
    linear_mxfp8 = sys.modules[schemes.CompressedTensorsW8A8Mxfp8.__module__]
    for module, name in (
        (fp8, "init_fp8_linear_kernel"),
        (linear_nvfp4, "init_nvfp4_linear_kernel"),
        (linear_mxfp8, "init_mxfp8_linear_kernel"),
    ):
        assert hasattr(module, name), name
        setattr(module, name, Kernel)
    for module, name in (
        (fp8, "select_fp8_moe_backend"),
        (moe_nvfp4, "select_nvfp4_moe_backend"),
        (moe_mxfp8, "select_mxfp8_moe_backend"),
    ):
        assert hasattr(module, name), name
        setattr(module, name, lambda *args, **named: (None, None))
    moe_nvfp4.is_global_sf_supported_for_nvfp4_backend = lambda backend: True
    registry._run_in_subprocess = lambda inspect: inspect()
    # the CPU has no sparse attention, which changes no weight
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def dense(cls: Any, backend: Any, attn_selector_config: Any, **named: Any) -> Any:
        return choose(cls, backend, attn_selector_config._replace(use_sparse=False), **named)

    CpuPlatform.get_attn_backend_cls = classmethod(dense)
    make = MLACommonImpl.__init__
    MLACommonImpl.__init__ = (
        lambda self, *args, topk_indices_buffer=None, index_group_builder=None, **named: make(
            self, *args, **named
        )
    )


def fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The one formula of this file, because `scaled_dequantize` of vLLM takes whole blocks only."""
    spread = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return (codes.float() * spread[..., : codes.shape[-2], : codes.shape[-1]]).bfloat16()


def linear_values(layer: Any) -> torch.Tensor:
    """Returns the weight that a linear layer multiplies with."""
    if hasattr(layer, "weight_scale_inv"):
        return fp8_values(layer.weight, layer.weight_scale_inv)
    if hasattr(layer, "weight_packed"):
        layer.scheme.process_weights_after_loading(layer)  # inverts the scale of the whole weight
        scales = layer.weight_scale, layer.weight_global_scale
        return dequantize_to_dtype(layer.weight, *scales, torch.bfloat16, 16, swizzle=False)
    if hasattr(layer, "weight_scale"):
        return dequant_mxfp8_to_bf16(layer.weight, layer.weight_scale)
    return layer.weight


def expert_values(layer: Any) -> Any:
    """Returns the weights of all experts: gate and up [experts, ..], down [experts, ..]."""
    if hasattr(layer, "w13_weight_packed"):
        return layer.quant_method.dequantize_weight(layer)
    out = []
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        if hasattr(layer, f"{name}_scale_inv"):
            weight = fp8_values(weight, getattr(layer, f"{name}_scale_inv"))
        elif hasattr(layer, f"{name}_scale"):
            weight = dequant_mxfp8_to_bf16(weight, getattr(layer, f"{name}_scale"))
        out.append(weight)
    return out


def pairs(
    model: Any, values: dict[str, torch.Tensor], packed: dict[str, list[str]], apart: list[str]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields the name, the loaded and the wanted value of each matrix that has these values."""
    done = set()
    for name, layer in model.named_modules(remove_duplicate=False):
        at, _, end = name.rpartition(".")
        if getattr(layer, "quant_method", None) is None or id(layer) in done:
            continue
        if hasattr(layer, "w13_weight") or hasattr(layer, "w13_weight_packed"):
            at = name.removesuffix(".routed_experts")
            if f"{at}.0.down_proj.weight" not in values:
                continue
            done.add(id(layer))
            whole = getattr(layer, "w13_weight_global_scale", None)
            if whole is not None and not bool((whole[:, 0] == whole[:, -1]).all()):
                apart.append(name)
            for number, (joined, down) in enumerate(zip(*expert_values(layer), strict=True)):
                ends = [f"{at}.{number}.{end}_proj.weight" for end in ("gate", "up")]
                wanted = torch.cat([values[key] for key in ends if key in values])
                yield f"{at}.{number}.gate_up", joined, wanted
                yield f"{at}.{number}.down", down, values[f"{at}.{number}.down_proj.weight"]
        elif isinstance(layer, LinearBase):
            keys = [f"{at}.{part}.weight" for part in packed.get(end, [end])]
            if any(key not in values for key in keys):
                continue
            done.add(id(layer))
            whole = getattr(layer, "weight_global_scale", None)
            if whole is not None and torch.unique(whole).numel() > 1:
                apart.append(name)
            yield name, linear_values(layer), torch.cat([values[key] for key in keys])


def judged(case: dict[str, str]) -> dict[str, Any]:
    """Returns the results of one case."""
    args = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    source = EngineArgs(case["source"], dtype="bfloat16", load_format="safetensors", **args)
    config = source.create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = utils.initialize_model(config)
        finally:
            torch.set_default_dtype(torch.float32)
        loader = DefaultModelLoader(config.load_config)
        loaded = model.load_weights(loader.get_all_weights(config.model_config, model))
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        left = [known[0] for known in names.values() if not loaded.intersection(known)]
        methods = Counter(
            type(getattr(m, "scheme", None) or m.quant_method).__name__
            for m in model.modules()
            if getattr(m, "quant_method", None) is not None
        )
        values: dict[str, torch.Tensor] = {}
        for file in Path(case["values"]).glob("*.safetensors"):
            values |= load_file(file)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapped = {mapper._map_name(key): v for key, v in values.items()} if mapper else {}
        packed = dict(config.quant_config.packed_modules_mapping)
        compared, different, apart = 0, {}, list[str]()
        for name, found, wanted in pairs(model, {**mapped, **values}, packed, apart):
            compared += 1
            a, b = found.float(), wanted.to(found.dtype).float()
            if a.shape != b.shape:
                different[name] = f"{list(a.shape)}, and should be {list(b.shape)}"
            elif not torch.equal(a, b):
                different[name] = float(((a - b).abs() / b.abs().clamp_min(1e-30)).max())
    return {
        "unloaded": sorted(name for name in left if not NOT_OF_WEIGHTS.search(name)),
        "methods": dict(methods),
        "compared": compared,
        "different": different,
        "apart": apart,
    }


def main() -> None:
    without_kernels()
    results = {}
    with tempfile.TemporaryDirectory() as store:
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        for case in json.loads(Path(sys.argv[1]).read_text()):
            try:
                results[case["name"]] = judged(case)
            except Exception:
                results[case["name"]] = {"error": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
