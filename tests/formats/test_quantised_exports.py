"""An export with `--quantize fp8` holds the codes and scales that a few lines of numpy compute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.errors import UsageError
from mckpt.formats.base import Names
from mckpt.formats.hf import HuggingFaceRequest, lay_out, unquantised
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import schema
from tests.formats.test_quantised_checkpoints import quantised
from tests.helpers import tiny
from tests.helpers.commands import good, refused, shard

# sizes of several blocks, whose last ones are not whole
WIDE = {"hidden_size": 208, "intermediate_size": 328}
CASES: dict[str, tuple[str, dict[str, Any], Parallel, str]] = {
    "one file": ("qwen3", WIDE, Parallel(), "torch_dist"),
    "sharded": ("qwen3", WIDE, Parallel(tp=4, pp=2), "torch_dist"),
    "sharded torch": ("qwen3", WIDE, Parallel(tp=2, pp=2, vpp=2), "torch"),
    "biases": ("qwen2", WIDE, Parallel(tp=2), "torch"),
    "experts": ("qwen3-moe", {"hidden_size": 144}, Parallel(tp=2, ep=2), "torch_dist"),
    "latent attention": ("deepseek-v3", {}, Parallel(tp=2, pp=2), "torch"),
}


ROUTERS = ("gate", "shared_expert_gate")


def published(model: str, form: str = "fp8") -> HuggingFaceRequest:
    """Returns a quantised export of a published model, of its config alone."""
    config = json.loads((tiny.FIXTURES / "configs" / f"{model}.json").read_text())
    return request_of(config, form)


def request_of(config: dict[str, Any], form: str) -> HuggingFaceRequest:
    """Returns a quantised export of a model, of its config alone."""
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    names = Names(family, family.read(config), {}, Parallel())
    dtypes = {name: "bfloat16" for b in names.bound for name in b.rule.of}
    return HuggingFaceRequest(names, dtypes, 10**13, quantize=form)


def arrays_of(directory: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a directory."""
    kinds = {letter: kind for kind, letter in tiny.LETTERS.items()}
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        header, data = shard(path)
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                held = np.frombuffer(data[begin:end], kinds[entry["dtype"]])
                out[key] = held.reshape(entry["shape"])
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales(tmp_path: Path, name: str, dtype: str) -> None:
    case, sizes, parallel, form = CASES[name]
    source = tiny.tiny_random(case, tmp_path / "hf", dtype, **sizes)
    mckpt.plan(source, tmp_path / "ckpt", format=form, parallel=parallel).run()
    plan = mckpt.plan(tmp_path / "ckpt", tmp_path / "out", format="hf", quantize="fp8")
    plan.run(max_memory="2MiB", threads=2)
    held = tiny.tensors(json.loads((source / "config.json").read_text()), dtype)
    wanted, _ = quantised({k: v for k, v in held.items() if "eh_proj" not in k})
    # published models keep the dtype of the projection in front of multi-token prediction
    wanted |= {k: v for k, v in held.items() if "eh_proj" in k}
    found = arrays_of(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype and found[key].shape == array.shape, key
        assert found[key].tobytes() == array.tobytes(), key
    config = json.loads((tmp_path / "out/config.json").read_text())
    kept = config["quantization_config"].pop("modules_to_not_convert")
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert set(kept) == {
        key.removesuffix(".weight")
        for key, array in wanted.items()
        if array.ndim == 2 and key.endswith(".weight") and array.dtype != ml_dtypes.float8_e4m3fn
    }


@pytest.mark.usefixtures("small_buffers")
def test_a_row_of_blocks_may_be_larger_than_the_buffer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 2300, "num_hidden_layers": 1}
    source = tiny.tiny_random("qwen3", tmp_path / "hf", **sizes)
    plan = mckpt.plan(source, tmp_path / "out", format="hf", quantize="fp8")
    plan.run(max_memory=128 * 128 * 16, threads=1)
    wanted, _ = quantised(tiny.tensors(json.loads((source / "config.json").read_text())))
    found = arrays_of(tmp_path / "out")
    assert {key: array.tobytes() for key, array in wanted.items()} == {
        key: array.tobytes() for key, array in found.items()
    }


def test_it_is_read_again(tmp_path: Path) -> None:
    """mckpt reads what it wrote; the values are the dequantised ones."""
    source = tiny.tiny_random("qwen3", tmp_path / "hf", **WIDE)
    good("megatron-to-hf", source, tmp_path / "out", "--quantize", "fp8")
    said = good("check", tmp_path / "out")
    assert ": sound; " in said.out
    good("hf-to-megatron", tmp_path / "out", tmp_path / "ckpt", "--tp", 2)
    assert "same to the last bit" in good("diff", tmp_path / "out", tmp_path / "ckpt").out
    _, values = quantised(tiny.tensors(json.loads((source / "config.json").read_text())))
    read = mckpt.open(tmp_path / "ckpt")
    key = "model.layers.1.mlp.down_proj.weight"
    assert read["layers.1.mlp.down.weight"].numpy().tobytes() == values[key].tobytes()


@pytest.mark.judge
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_it(tmp_path: Path) -> None:
    """With whole blocks only: transformers 5.23 takes the scales of others for smaller blocks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.integrations import finegrained_fp8

    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    source = tiny.tiny_random("llama", tmp_path / "hf", **sizes)
    good("megatron-to-hf", source, tmp_path / "out", "--quantize", "fp8")
    how = transformers.AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    config = transformers.FineGrainedFP8Config(**how, dequantize=True)
    assert config.weight_block_size == [128, 128] and "lm_head" in config.modules_to_not_convert
    reads = finegrained_fp8.Fp8Dequantize(None)._dequantize_one
    _, values = quantised(tiny.tensors(json.loads((source / "config.json").read_text())))
    found = arrays_of(tmp_path / "out")
    for key, value in values.items():
        if found[key].dtype == ml_dtypes.float8_e4m3fn:
            codes = torch.from_numpy(found[key].view("u1").copy()).view(torch.float8_e4m3fn)
            scales = torch.from_numpy(found[key + "_scale_inv"].copy())
            loaded = reads(codes, scales, torch.bfloat16).float().numpy()
            assert np.array_equal(loaded, value.astype("f4")), key


def test_zeros_and_the_smallest_values(tmp_path: Path) -> None:
    """A block of zeros has the scale 1, and a scale is never zero."""
    source = tiny.tiny_random("qwen3", tmp_path / "hf", "float32", **WIDE)
    arrays = tiny.tensors(json.loads((source / "config.json").read_text()), "float32")
    key = "model.layers.0.mlp.up_proj.weight"
    arrays[key] = arrays[key].copy()
    arrays[key][:128, :128] = 0
    arrays[key][:128, 128:] = 1e-44
    tiny.write_safetensors(source / "model.safetensors", arrays)
    good("megatron-to-hf", source, tmp_path / "out", "--quantize", "fp8")
    found = arrays_of(tmp_path / "out")
    assert found[key + "_scale_inv"][0].tolist() == [1, 1]
    assert not found[key][:128].view("u1").any()


def test_what_is_refused(tmp_path: Path) -> None:
    source = tiny.tiny_random("qwen3", tmp_path / "hf")
    fp8 = ("--quantize", "fp8")
    good("megatron-to-hf", source, tmp_path / "out", *fp8)
    refused(2, "quantised already", args=("megatron-to-hf", tmp_path / "out", tmp_path / "a", *fp8))
    with pytest.raises(UsageError, match="--quantize fp8: it is for a Hugging Face target"):
        mckpt.plan(source, tmp_path / "a", quantize="fp8")
    refused(
        2,
        "already, and none of its tensors is quantised",
        args=("megatron-to-hf", source, tmp_path / "a"),
    )


@pytest.mark.parametrize(
    ("model", "what"), [("gpt2", "the transpose of a matrix"), ("gpt-oss-20b", "of all experts")]
)
def test_weights_that_no_loader_reads_as_blocks_are_refused(model: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"--quantize fp8: .*{what}"):
        lay_out(published(model))


# as the weights of the published fp8 models: the small projections of a gated delta net, the
# weights of an indexer's heads and all routers keep their dtype, and wq_b, wk, in_proj_qkvz are fp8
ALWAYS = ["lm_head", "model.embed_tokens"]
UNQUANTISED = {
    "qwen3-next-80b-a3b": [
        "model.layers.N.linear_attn.in_proj_ba",
        *(f"{at}.layers.N.mlp.{gate}" for at in ("model", "mtp") for gate in ROUTERS),
        "mtp.fc",
    ],
    "qwen3.6-27b-text": [
        "model.layers.N.linear_attn.in_proj_a",
        "model.layers.N.linear_attn.in_proj_b",
        "mtp.fc",
    ],
    "deepseek-v3.2": [
        "model.layers.N.mlp.gate",
        "model.layers.N.self_attn.indexer.weights_proj",
        *(f"model.layers.N.{name}" for name in ("eh_proj", "embed_tokens", "shared_head.head")),
    ],
}


@pytest.mark.parametrize("model", UNQUANTISED)
def test_the_matrices_that_keep_their_dtype(model: str) -> None:
    kept = unquantised(published(model))
    assert {re.sub(r"\d+", "N", key) for key in kept} == {*ALWAYS, *UNQUANTISED[model]}
    lay_out(published(model))


def test_nvfp4_leaves_the_keys_of_an_indexer_alone() -> None:
    """vLLM loads them together with weights that are not quantised."""
    kept, fp8 = (unquantised(published("deepseek-v3.2", form)) for form in ("nvfp4", "fp8"))
    apart = {re.sub(r"\d+", "N", key) for key in {*kept} - {*fp8}}
    assert apart == {"model.layers.N.self_attn.indexer.wk"}


def test_the_listed_weights_are_logical_tensors() -> None:
    assert schema().quantised and schema().quantised.keys() <= schema().tensors.keys()
