"""compressed-tensors, ModelOpt and transformers as judges of quantised models, on CPU.

    QUANTISERS_PYTHON tests/helpers/quantised_peers.py cases.json OUT

It runs in an environment of its own, which CONTRIBUTING.md describes. cases.json is a list of dicts
with these entries:

    name     of the case
    program  compressed-tensors or modelopt: it quantises the model and saves it as OUT/NAME.
             transformers: it loads a quantised model and dequantises it
    how      the preset of compressed-tensors, or the algorithm of ModelOpt
    source   a Hugging Face directory

OUT/NAME values/model.safetensors has the values in bfloat16 that the program's own functions give
for the weights that it saved or loaded. OUT/errors.json has the traceback of each case that failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def compressed(source: str, preset: str, out: Path) -> Tensors:
    """Quantises all linear layers but the output layer with compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight, overall = module.weight.data.float(), None
        if hasattr(module, "weight_global_scale"):
            overall = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data.copy_(overall)
        grid = module.weight_scale.shape
        rows, columns = grid if len(grid) == 2 else (1, 1)
        blocks = weight.unflatten(0, (rows, -1)).unflatten(-1, (columns, -1))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        how = module.quantization_scheme.weights
        scales, _ = calculate_qparams(low, high, how, global_scale=overall)
        module.weight_scale.data.copy_(scales.reshape(grid))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
    compressor.decompress_model(model)
    return {key: value for key, value in model.state_dict().items() if key.endswith("weight")}


def optimised(source: str, algorithm: str, out: Path) -> Tensors:
    """The same with ModelOpt, whose scales of activations come from a few tokens."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokens = torch.arange(64)[None]
    mtq.quantize(model, getattr(mtq, f"{algorithm}_CFG"), lambda made: made(tokens))
    export_hf_checkpoint(model, export_dir=out)
    held = load_file(out / "model.safetensors")
    values = {}
    for key, codes in held.items():
        scales = held.get(f"{key}_scale")
        if not key.endswith("weight"):
            continue
        if scales is None:
            values[key] = codes
        elif f"{key}_scale_2" in held:
            made = NVFP4QTensor(
                torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.bfloat16, codes
            )
            how = {"double_scale": held[f"{key}_scale_2"], "block_sizes": {-1: 16}}
            values[key] = made.dequantize(torch.bfloat16, scale=scales, **how)
        else:
            kind = FP8QTensor if scales.numel() == 1 else MXFP8QTensor
            made = kind(codes.shape, torch.bfloat16, codes)
            values[key] = made.dequantize(torch.bfloat16, scale=scales)
    return values


def loaded(source: str, how: str, out: Path) -> Tensors:
    """Loads a quantised model in transformers, which dequantises it."""
    config = transformers.AutoConfig.from_pretrained(source).quantization_config
    options: dict[str, Any] = {
        "compressed-tensors": {"run_compressed": False},
        "fp8": {"dequantize": True},
    }[config["quant_method"]]
    kinds = {
        "compressed-tensors": transformers.CompressedTensorsConfig,
        "fp8": transformers.FineGrainedFP8Config,
    }
    if config["quant_method"] == "fp8":
        options |= config
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=kinds[config["quant_method"]](**options)
    )
    return {key: value for key, value in model.state_dict().items() if key.endswith("weight")}


PROGRAMS = {"compressed-tensors": compressed, "modelopt": optimised, "transformers": loaded}


def main() -> None:
    out, errors = Path(sys.argv[2]), {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            run = PROGRAMS[case["program"]]
            values = run(case["source"], case["how"], out / case["name"])
            found = {key: value.bfloat16().contiguous() for key, value in values.items()}
            (out / f"{case['name']} values").mkdir()
            save_file(found, out / f"{case['name']} values" / "model.safetensors")
        except Exception:
            errors[case["name"]] = traceback.format_exc()
    (out / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
