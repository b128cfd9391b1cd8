"""Exports with `--quantize mxfp8` and `nvfp4` hold the codes and scales that their reference
quantisers compute: formulas of this file, ModelOpt and compressed-tensors.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mckpt
from mckpt.execute.engine import execute
from mckpt.execute.transfer import CopySettings
from mckpt.formats.hf import lay_out, unquantised
from mckpt.formats.hf_encodings import quantisation_config
from mckpt.geometry.parallel import Parallel
from mckpt.values.quantisation import encode
from tests.formats.test_quantised_exports import arrays_of, request_of
from tests.formats.test_quantised_forms import linears
from tests.helpers import made_models, tiny
from tests.helpers.commands import good, refused

E4M3, E2M1, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.bfloat16
Arrays = dict[str, np.ndarray]

# sizes whose rows are whole blocks, and whose shards end within blocks
WIDE = {"hidden_size": 96, "intermediate_size": 160}
CASES: dict[str, tuple[str, dict[str, Any], Parallel, str]] = {
    "one file": ("qwen3", WIDE, Parallel(), "torch_dist"),
    "sharded": ("qwen3", WIDE, Parallel(tp=8, pp=2), "torch_dist"),
    "sharded torch": ("qwen2", {**WIDE, "hidden_size": 64}, Parallel(tp=2, pp=2), "torch"),
    "experts": ("qwen3-moe", {"hidden_size": 96}, Parallel(tp=2, ep=2), "torch_dist"),
    "latent attention": (
        "deepseek-v3",
        {"hidden_size": 96, "kv_lora_rank": 32, "q_lora_rank": 64},
        Parallel(tp=2, pp=2),
        "torch",
    ),
}
# weights that vLLM puts into one matrix (packed_modules_mapping): the ends of their names
FUSED = (
    r"(?<=self_attn\.)(q|k|v)_proj\.weight",
    r"(?<=self_attn\.)(q_a_proj|kv_a_proj_with_mqa)\.weight",
    r"(gate|up)_proj\.weight",
)


def mxfp8(arrays: Arrays) -> Arrays:
    """Returns the tensors of the form: the scale of a block is the smallest power of two, at least
    2**-127, with which its largest value is not beyond 448.
    """
    out = dict(arrays)
    for key in linears(arrays):
        blocks = arrays[key].astype("f8").reshape(len(arrays[key]), -1, 32)
        most = np.abs(blocks).max(2)
        powers = np.full(most.shape, -127)
        while (short := np.ldexp(448.0, powers) < most).any():
            powers += short
        out[f"{key}_scale"] = (powers + 127).astype("u1")
        scaled = np.ldexp(blocks, -powers[..., None]).reshape(arrays[key].shape)
        out[key] = scaled.astype("f4").astype(E4M3)
    return out


def nvfp4(arrays: Arrays) -> Arrays:
    """Returns the tensors of the form, of which fused weights share the overall scale."""
    sets: dict[str, list[str]] = defaultdict(list)
    for key in linears(arrays):
        sets[next((x for p in FUSED if (x := re.sub(p + "$", p, key)) != key), key)].append(key)
    assert max(map(len, sets.values())) >= 2
    out = {key: array for key, array in arrays.items() if key not in set(linears(arrays))}
    for keys in sets.values():
        largest = max(np.abs(arrays[key].astype("f4")).max() for key in keys)
        with np.errstate(all="ignore"):
            overall = np.float32(2688) * (np.float32(1) / largest)
        for key in keys:
            values = arrays[key].astype("f4").reshape(len(arrays[key]), -1, 16)
            values = values + np.float32(0)  # -0 becomes 0
            scale = np.minimum(overall * (np.abs(values).max(2) / np.float32(6)), np.float32(448))
            scale = scale.astype(E4M3)
            scale[scale == 0] = 0.125
            with np.errstate(all="ignore"):
                scaled = values / (scale.astype("f4") / overall)[..., None]
            codes = np.clip(scaled, -6, 6).astype(E2M1).view("u1").reshape(arrays[key].shape)
            out[f"{key}_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
            out[f"{key}_scale"], out[f"{key}_global_scale"] = scale, overall.reshape(1)
    return out


FORMS = {"mxfp8": mxfp8, "nvfp4": nvfp4}


def exported(case: str, form: str, root: Path, dtype: str = "bfloat16") -> tuple[Arrays, Arrays]:
    """Writes a checkpoint and its export; returns the tensors of the model and of the export."""
    model, sizes, parallel, kind = CASES[case]
    source = tiny.tiny_random(model, root / "hf", dtype, **sizes)
    mckpt.plan(source, root / "ckpt", format=kind, parallel=parallel).run()
    plan = mckpt.plan(root / "ckpt", root / "out", format="hf", quantize=form)
    plan.run(max_memory="2MiB", threads=2)
    config = json.loads((source / "config.json").read_text())
    return tiny.tensors(config, dtype), arrays_of(root / "out")


def equal(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales(tmp_path: Path, case: str, form: str, dtype: str) -> None:
    held, found = exported(case, form, tmp_path, dtype)
    wanted = FORMS[form](held)
    equal(found, wanted)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {
        key.removesuffix(".weight")
        for key, array in wanted.items()
        if array.ndim == 2 and key.endswith(".weight") and array.dtype != E4M3
    }
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("form", FORMS)
def test_small_buffers_and_files_give_the_same_bytes(tmp_path: Path, form: str) -> None:
    held, _ = exported("sharded", form, tmp_path)
    plan = mckpt.plan(
        tmp_path / "ckpt", tmp_path / "small", format="hf", quantize=form, max_shard_size=9_000
    )
    plan.run(max_memory=20_000, threads=1)
    equal(arrays_of(tmp_path / "small"), FORMS[form](held))
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 40
    assert ": sound; " in good("check", tmp_path / "small").out


@pytest.mark.parametrize("form", FORMS)
def test_it_is_read_again(tmp_path: Path, form: str) -> None:
    """The values are within the error of the form, and quantising them again changes none."""
    held, _ = exported("one file", form, tmp_path)
    read = mckpt.plan(tmp_path / "out", tmp_path / "values", format="hf")
    read.run()
    values = arrays_of(tmp_path / "values")
    for key in linears(held):
        a, b = (x[key].astype("f8") for x in (held, values))
        blocks = np.abs(a).reshape(len(a), -1, 32 if form == "mxfp8" else 16).max(2)
        most = blocks.repeat(a.shape[1] // blocks.shape[1], 1)
        # half of the distance of two codes: of normal fp8 numbers, and of subnormal ones
        bound = np.maximum(np.abs(a) / 16, most * 2.0**-17)
        if form == "nvfp4":
            bound = most * (1 + 1 / 16) / 6
        assert (np.abs(a - b) <= bound * (1 + 2**-7)).all(), key
        assert np.abs(a - b).max() > 0
    good("megatron-to-hf", tmp_path / "values", tmp_path / "again", "--quantize", form)
    mckpt.plan(tmp_path / "again", tmp_path / "values2", format="hf").run()
    for key, array in arrays_of(tmp_path / "values2").items():
        assert np.array_equal(array, values[key]), key  # -0 becomes 0


def test_experts_apart_are_found_by_the_names_of_nvfp4(tmp_path: Path) -> None:
    """In a family whose experts may be in one tensor, they are found by X.weight_packed too."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "linear_value_head_dim": 16}
    config = made_models.config("qwen3_5_moe") | sizes | {"shared_expert_intermediate_size": 48}
    request = request_of(config, "nvfp4")
    how = quantisation_config("nvfp4", unquantised(request))
    source = tmp_path / "hf"
    source.mkdir()
    tiny.write_json(source / "config.json", {**config, "quantization_config": how})
    for output in lay_out(request)[1]:
        with (source / output.path).open("wb") as file:
            file.truncate(output.size)
            for at, raw in output.fixed(None):
                file.seek(at)
                file.write(raw)
    plan = mckpt.plan(source, tmp_path / "out", format="hf")
    assert "cast nvfp4 -> bfloat16: " in plan.summary()


def test_a_fused_matrix_of_a_vision_tower_has_both_names_of_vllm() -> None:
    how = quantisation_config("mxfp8", ["visual.blocks.0.attn.qkv", "visual.blocks.0.attn.proj"])
    assert how["ignore"] == [f"visual.blocks.0.attn.{end}" for end in ("proj", "qkv", "qkv_proj")]


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_zeros_and_of_tiny_values(tmp_path: Path, form: str) -> None:
    source = tiny.tiny_random("qwen3", tmp_path / "hf", "float32", **WIDE)
    arrays = tiny.tensors(json.loads((source / "config.json").read_text()), "float32")
    for key, value in (("up", 0), ("down", 1e-44)):
        name = f"model.layers.0.mlp.{key}_proj.weight"
        arrays[name] = np.full_like(arrays[name], value)
        arrays[name][1] = np.geomspace(1e-30, 1e-3, arrays[name].shape[1])
    name = "model.layers.1.self_attn.o_proj.weight"
    arrays[name] = np.full_like(arrays[name], 1e-44)
    arrays[name][0, 0] = -0.0
    tiny.write_safetensors(source / "model.safetensors", arrays)
    good("megatron-to-hf", source, tmp_path / "out", "--quantize", form)
    if form == "nvfp4":  # an overall scale of 1 stands for one that is too large for float32
        found = arrays_of(tmp_path / "out")
        assert found.pop(f"{name}_global_scale") == 1
        assert not (found.pop(f"{name}_packed") & 0x77).any()
        found.pop(f"{name}_scale")
        wanted = nvfp4(arrays)
        equal(found, {k: v for k, v in wanted.items() if name not in k})
    else:
        equal(arrays_of(tmp_path / "out"), mxfp8(arrays))


@pytest.mark.parametrize("form", ["fp8", *FORMS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, form: str, value: float) -> None:
    source = tiny.tiny_random("qwen3", tmp_path / "hf", **WIDE)
    arrays = tiny.tensors(json.loads((source / "config.json").read_text()))
    key = "model.layers.1.self_attn.q_proj.weight"
    arrays[key] = arrays[key].copy()
    arrays[key][3, 5] = value
    tiny.write_safetensors(source / "model.safetensors", arrays)
    args = ("megatron-to-hf", source, tmp_path / "out", "--quantize", form)
    refused(2, "layers.1.attn.q.weight", "infinite or not a number", args=args)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_rows_that_blocks_do_not_fill_are_refused(tmp_path: Path) -> None:
    source = tiny.tiny_random("qwen3", tmp_path / "hf")  # hidden size 48
    args = ("megatron-to-hf", source, tmp_path / "out", "--quantize", "mxfp8")
    words = ("q_proj.weight has rows of 48 elements, and a scale is for 32", "or use fp8")
    refused(2, *words, args=args, untouched=tmp_path)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_an_interrupted_export_goes_on(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bands that are written are not quantised again, and the bytes are the same."""
    from mckpt.execute import units

    monkeypatch.setattr(units, "SLAB", 1 << 11)
    monkeypatch.setattr(units, "UNIT", 1 << 13)
    source = tiny.tiny_random("qwen3", tmp_path / "hf", **WIDE)
    whole, again = (
        mckpt.plan(source, tmp_path / out, format="hf", quantize=form) for out in ("whole", "out")
    )
    whole.run()

    def stop(at: mckpt.Progress) -> None:
        if at.nbytes > at.total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again.run(progress=stop, threads=1)
    last: list[mckpt.Progress] = []
    again.run(threads=2, progress=last.append)
    assert (last[-1].nbytes, last[-1].files) == (last[-1].total_bytes, last[-1].total_files)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_groups_of_files_are_written_apart(tmp_path: Path) -> None:
    """As for an object store. The files of weights with one overall scale are in one group."""
    held, _ = exported("one file", "nvfp4", tmp_path)
    options: dict[str, Any] = {"format": "hf", "quantize": "nvfp4", "max_shard_size": 9_000}
    plan = mckpt.plan(tmp_path / "ckpt", tmp_path / "small", **options)
    found: Arrays = {}
    made = plan.transfer.groups(None, 1)
    assert 5 < len(made) < len(plan.outputs)
    for i, group in enumerate(made):
        folder = tmp_path / str(i)
        execute(plan.transfer.part(group), folder, CopySettings(threads=2))
        found |= arrays_of(folder)
    equal(found, nvfp4(held))


@pytest.mark.parametrize(("name", "kind"), [("float8_e4m3fn", E4M3), ("nvfp4", E2M1)])
def test_every_rounding(name: str, kind: Any) -> None:
    """All numbers, all middles of two numbers, and the float32 on both sides of each."""
    codes = np.arange(256 if kind == E4M3 else 16, dtype="u1").view(kind).astype("f4")
    numbers = np.unique(codes[np.isfinite(codes)])
    near = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [500, -1e9, 1e-30]])
    near = near.astype("f4")
    every = np.concatenate([near, np.nextafter(near, np.float32(9)), np.nextafter(near, -near)])
    every = every[every.view("u4") != 1 << 31]  # -0
    every = np.append(every, every[: len(every) % 2])[None]
    top = 448 if kind == E4M3 else 6
    wanted = np.clip(every, -top, top).astype(kind).view("u1")
    if kind == E2M1:
        wanted = wanted[:, ::2] | wanted[:, 1::2] << 4
    np.testing.assert_array_equal(encode(every, name), wanted)


def test_a_running_model_gives_the_same_mxfp8() -> None:
    torch = pytest.importorskip("torch")
    from mckpt.formats.hf_encodings import WRITTEN
    from mckpt.live.quantising import quantised

    values = (np.random.default_rng(7).standard_normal((1500, 96)) * 0.02).astype(BF16)
    values *= np.exp2(np.arange(1500) / 10 - 75).astype(BF16)[:, None]
    values[3, :64], values[4, 0], values[5, 0] = 0, 448, 449
    codes, scales, bad = quantised(torch_of(values)[None], WRITTEN["mxfp8"])
    found = mxfp8({"x.weight": values})
    assert codes.view(torch.uint8).numpy().tobytes() == found["x.weight"].tobytes()
    assert scales.numpy().tobytes() == found["x.weight_scale"].tobytes()
    values[9, 9] = np.inf
    assert not bad and quantised(torch_of(values)[None], WRITTEN["mxfp8"])[2]


# ---- the published quantisers and loaders


def torch_of(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    names = {BF16: "bfloat16", E4M3: "float8_e4m3fn"}
    if array.dtype.type not in names:
        return torch.from_numpy(array.copy())
    raw = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
    return raw.view(getattr(torch, names[array.dtype.type]))


def test_modelopt_computes_the_same_mxfp8() -> None:
    torch = pytest.importorskip("torch")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    values = (np.random.default_rng(5).standard_normal((64, 96)) * 0.02).astype(BF16)
    values *= np.exp2(np.arange(-40, 24)).astype(BF16)[:, None]
    values[3, :64], values[4, :2], values[5, 0] = 0, (448, 1e-3), 449
    codes, scales = qtensor.MXFP8QTensor.quantize(torch_of(values))
    found = mxfp8({"x.weight": values})
    assert codes._quantized_data.view(torch.uint8).numpy().tobytes() == found["x.weight"].tobytes()
    assert scales.numpy().tobytes() == found["x.weight_scale"].tobytes()


def compressed_scheme(form: str) -> Any:
    """Returns the scheme of the export's config.json, as compressed-tensors parses it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    how = QuantizationConfig.model_validate(quantisation_config(form, ["lm_head"]))
    return how.config_groups["group_0"], how.format


def test_compressed_tensors_computes_the_same_nvfp4() -> None:
    scheme, form = compressed_scheme("nvfp4")
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    draws = np.random.default_rng(6).standard_normal((64, 96)).astype("f4")
    draws *= np.exp2(np.arange(-30, 34) / 2).astype("f4")[:, None]
    draws[3, :64], draws[5, 0] = 0, -0.0
    wanted = nvfp4({f"mlp.{name}_proj.weight": draws * by for name, by in (("gate", 1), ("up", 3))})
    values = torch_of(draws * 3)
    overall = generate_gparam(values.min(), values.max())
    for name, by in (("gate", 1), ("up", 3)):
        key, values = f"mlp.{name}_proj.weight", torch_of(draws * by)
        blocks = values.unflatten(-1, (-1, 16))
        low, high = blocks.amin(-1), blocks.amax(-1)
        scales, _ = calculate_qparams(low, high, scheme.weights, global_scale=overall)
        state = {"weight": values, "weight_scale": scales, "weight_global_scale": overall}
        state = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
        for suffix in ("_packed", "_scale", "_global_scale"):
            found = state["weight" + suffix]
            raw = found.contiguous().view(torch.uint8)
            assert raw.numpy().tobytes() == wanted[key + suffix].tobytes(), suffix


@pytest.mark.judge
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_transformers_loads_it_with_compressed_tensors(tmp_path: Path, form: str) -> None:
    """All weights of the loaded model are those that mckpt reads."""
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    exported("one file", form, tmp_path)
    mckpt.plan(tmp_path / "out", tmp_path / "values", format="hf").run()
    how = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=how, dtype=torch.bfloat16
    )
    held = {name: p for name, p in model.named_parameters() if "scale" not in name}
    for key, value in arrays_of(tmp_path / "values").items():
        assert np.array_equal(held[key].detach().float().numpy(), value.astype("f4")), key
