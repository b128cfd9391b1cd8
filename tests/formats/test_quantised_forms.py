"""Each published form of quantised weights is read with the values of its reference formula.

The references are transformers' own functions, and arithmetic written out here with numpy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mckpt as package
from mckpt.values.quantisation import ENCODINGS, SCALES, Grid, dequantise
from mckpt.values.quantisation import MXFP4 as MXFP4_CODES
from tests.helpers import tiny
from tests.helpers.commands import edit_json, good, mckpt, refused

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E8M0 = ml_dtypes.float8_e8m0fnu
Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(11)


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Asserts equality bit for bit, except that any NaN equals any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = np.isnan(a.astype("f4"))
    np.testing.assert_array_equal(nan, np.isnan(b.astype("f4")))
    np.testing.assert_array_equal(np.where(nan, 0, a.view("u2")), np.where(nan, 0, b.view("u2")))


# ---- mxfp4, as GPT-OSS is published

HIDDEN, FFN, EXPERTS = 96, 64, 5
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 20,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "rms_norm_eps": 1e-05,
    "rope_theta": 15000.0,
    "rope_scaling": None,
    "sliding_window": 17,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 211,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def worth_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 values [experts, columns, rows] of blocks [experts, rows, blocks, 16],
    element by element: the low half of a byte is the first one.
    """
    experts, rows, groups, half = blocks.shape
    table = np.array(E2M1 + [-v for v in E2M1])
    out = np.empty((experts, rows, groups, 2 * half), "f8")
    out[..., 0::2], out[..., 1::2] = table[blocks % 16], table[blocks // 16]
    with np.errstate(all="ignore"):
        out *= np.exp2(scales.astype("f8") - 127)[..., None]
        return out.reshape(experts, rows, -1).transpose(0, 2, 1).astype("f4").astype(BF16)


def gpt_oss() -> tuple[Arrays, Arrays]:
    """Returns the tensors of a GPT-OSS model with experts in mxfp4, and all values in bfloat16."""
    heads, groups = 8 * 20, 4 * 20
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (211, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (211, HIDDEN),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (HIDDEN,)
        for name, rows, columns in (
            ("q", heads, HIDDEN),
            ("k", groups, HIDDEN),
            ("v", groups, HIDDEN),
            ("o", HIDDEN, heads),
        ):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, columns)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.sinks"] = (8,)
        shapes[f"{at}.mlp.router.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{at}.mlp.router.bias"] = (EXPERTS,)
        shapes[f"{at}.mlp.experts.gate_up_proj_bias"] = (EXPERTS, 2 * FFN)
        shapes[f"{at}.mlp.experts.down_proj_bias"] = (EXPERTS, HIDDEN)
    plain = {k: RNG.standard_normal(s).astype("f4").astype(BF16) for k, s in shapes.items()}
    held, values = dict(plain), dict(plain)
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = RNG.integers(0, 256, (EXPERTS, rows, columns // 32, 16), "u1")
            scales = RNG.integers(110, 130, blocks.shape[:-1], "u1")
            held[f"{key}_blocks"], held[f"{key}_scales"] = blocks, scales
            values[key] = worth_mxfp4(blocks, scales)
    return held, values


def write(directory: Path, config: dict[str, Any], arrays: Arrays, method: Any = None) -> Path:
    """Writes a Hugging Face directory of several files. A method with a producer is a file of its
    own, as ModelOpt writes it.
    """
    directory.mkdir(parents=True)
    tiny.write_weights(directory, arrays, 60_000)
    if method is not None and "producer" in method:
        tiny.write_json(directory / "hf_quant_config.json", method)
        method = None
    named = {} if method is None else {"quantization_config": method}
    tiny.write_json(directory / "config.json", {**config, **named})
    return directory


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("gpt-oss"), "GPT-OSS").parent


def test_transformers_computes_the_same_mxfp4_values() -> None:
    """Every byte under every scale. transformers' own function judges the reference above."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = np.tile(np.arange(256, dtype="u1").reshape(1, 1, 16, 16), (1, 256, 1, 1))
    scales = np.repeat(np.arange(256, dtype="u1").reshape(1, 256, 1), 16, 2)
    theirs = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    values = theirs.view(torch.int16).numpy().view(BF16)
    same(values, worth_mxfp4(blocks, scales))
    held = {True: blocks.tobytes(), False: scales.tobytes()}
    grid = Grid(0, 256, 1, 32, 0, 0, SCALES.index("uint8"), ENCODINGS.index(MXFP4_CODES))
    for phase in (0, 1):
        out = np.empty((256, 256), BF16)
        dequantise(
            grid._replace(phase=phase),
            np.frombuffer(held[True], "u1").reshape(256, 256),
            out,
            0,
            256,
            1,
            lambda file, at, nbytes: held[False][at : at + nbytes],
            allow_overflow=True,
        )
        same(out, np.ascontiguousarray(values[0].T[:, phase::2]))


def test_the_plan_names_the_encoding(mxfp4: Path, tmp_path: Path) -> None:
    said = good("plan", mxfp4 / "quantised", tmp_path / "out").out
    assert "cast mxfp4 -> bfloat16: " in said
    assert "20 tensors are mxfp4 with a scale for each 1 x 32, and are dequantised" in said


def test_slices_of_mxfp4_are_read(mxfp4: Path) -> None:
    quantised, plain = (package.open(mxfp4 / name) for name in ("quantised", "plain"))
    for name in ("moe.experts.3.gate.weight", "moe.experts.4.down.weight"):
        for box in (np.s_[:], np.s_[5:8], np.s_[:, 3:50], np.s_[1:64:, 33:34], np.s_[7, 9:]):
            a, b = (m[f"layers.1.{name}"][box].numpy() for m in (quantised, plain))
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), (name, box)


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
BAD_MXFP4: dict[str, tuple[Callable[[Arrays], Any], tuple[str, ...]]] = {
    "no scales": (
        lambda t: t.pop(f"{GATE_UP}_scales"),
        (f"{GATE_UP}_scales [5, 128, 3] is missing", f"{GATE_UP}_blocks"),
    ),
    "no blocks": (
        lambda t: t.pop(f"{GATE_UP}_blocks"),
        (f"{GATE_UP} is missing", f"{GATE_UP}_scales", "is not there"),
    ),
    "scales of another shape": (
        lambda t: t.update({f"{GATE_UP}_scales": np.zeros((5, 3, 128), "u1")}),
        (f"{GATE_UP}_scales is [5, 3, 128]", "should be [5, 128, 3]"),
    ),
    "scales of another dtype": (
        lambda t: t.update({f"{GATE_UP}_scales": np.zeros((5, 128, 3), "f4")}),
        (f"{GATE_UP}_scales holds float32", "uint8"),
    ),
    "blocks of another shape": (
        lambda t: t.update({f"{GATE_UP}_blocks": np.zeros((5, 128, 4, 16), "u1")}),
        (f"{GATE_UP}_blocks [5, 128, 4, 16]", "should be [5, 128, 3, 16] uint8"),
    ),
    "blocks of another dtype": (
        lambda t: t.update({f"{GATE_UP}_blocks": np.zeros((5, 128, 3, 16), "i4")}),
        (f"{GATE_UP}_blocks [5, 128, 3, 16]", "int32", "should be [5, 128, 3, 16] uint8"),
    ),
}


@pytest.mark.parametrize("case", BAD_MXFP4)
def test_bad_mxfp4_is_refused(tmp_path: Path, case: str) -> None:
    change, words = BAD_MXFP4[case]
    held, _ = gpt_oss()
    change(held)
    src = write(tmp_path / "src", GPT_OSS, held, MXFP4)
    said = refused(3, *words, args=("hf-to-megatron", src, tmp_path / "dst"), untouched=tmp_path)
    assert "layers.0" not in said


def test_mxfp4_without_its_config_is_refused(mxfp4: Path, tmp_path: Path) -> None:
    shutil.copytree(mxfp4 / "quantised", tmp_path / "src")
    edit_json(tmp_path / "src" / "config.json", lambda c: c.pop("quantization_config"))
    args = ("hf-to-megatron", tmp_path / "src", tmp_path / "dst")
    refused(3, f"{GATE_UP} is missing", args=args)


def test_columns_that_do_not_fill_a_block_are_refused(tmp_path: Path) -> None:
    src = write(tmp_path / "src", {**GPT_OSS, "intermediate_size": 65}, gpt_oss()[0], MXFP4)
    args = ("hf-to-megatron", src, tmp_path / "dst")
    refused(3, "a row of 65 elements does not fill whole words of mxfp4", args=args)


# ---- fp8 with one scale for each tensor or row, and packed integers


def linears(arrays: Arrays) -> Iterator[str]:
    """Yields the keys of the weights that published checkpoints quantise."""
    whole = ("embed_tokens.weight", "mlp.gate.weight", "head.weight", "eh_proj.weight")
    for name, array in arrays.items():
        if array.ndim == 2 and not name.endswith(whole):
            yield name


def times(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 products of two arrays, rounded once."""
    with np.errstate(all="ignore"):
        return (codes.astype("f8") * scale.astype("f8")).astype("f4").astype(BF16)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns integers [rows, columns] as int32, each with an offset, the first in the lowest
    bits.
    """
    rows, columns = codes.shape
    each = 32 // bits
    words = (codes.astype("i8") + (1 << bits - 1)).reshape(rows, columns // each, each)
    out: np.ndarray = (words << np.arange(each) * bits).sum(-1).astype("u4").view("i4")
    return out


def fp8_tensor(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    """As transformers: a scale for each tensor, and one of the activations."""
    codes, scale = numbers(shape), RNG.uniform(0.001, 0.01, 1).astype(BF16).reshape(())
    beside = {key.replace("weight", "activation_scale"): np.array(0.3, BF16)}
    return {key: codes, f"{key}_scale_inv": scale, **beside}, times(codes, scale)


def fp8_vllm(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    """As vLLM: other names."""
    codes, scale = numbers(shape), RNG.uniform(0.001, 0.01, 1).astype("f4")
    beside = {key.replace("weight", "input_scale"): np.array([0.3], "f4")}
    return {key: codes, f"{key}_scale": scale, **beside}, times(codes, scale)


def fp8_channel(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, scale = numbers(shape), RNG.uniform(0.001, 0.01, (shape[0], 1)).astype(BF16)
    return {key: codes, f"{key}_scale": scale}, times(codes, scale)


def fp8_block(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    rows, columns = (-(-n // b) for n, b in zip(shape, (16, 32), strict=True))
    codes, scale = numbers(shape), RNG.uniform(0.001, 0.01, (rows, columns)).astype(BF16)
    spread = scale.repeat(16, 0)[: shape[0]].repeat(32, 1)[:, : shape[1]]
    return {key: codes, f"{key}_scale": scale}, times(codes, spread)


def int8_channel(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes = RNG.integers(-128, 128, shape, "i1")
    scale = RNG.uniform(0.001, 0.01, (shape[0], 1)).astype(BF16)
    return {key: codes, f"{key}_scale": scale}, times(codes, scale)


def blocked(suffix: str, rows: int, kind: Any = None) -> Any:
    """With scales that are powers of two, of blocks of `rows` x 32; `kind` is their dtype."""

    def made(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
        codes, powers = numbers(shape), RNG.integers(100, 130, (shape[0] // rows, shape[1] // 32))
        scales = powers.astype("u1") if kind is None else powers.astype("u1").view(kind)
        spread = np.exp2(powers - 127.0).repeat(rows, 0).repeat(32, 1)
        return {key: codes, key + suffix: scales}, times(codes, spread)

    return made


def fp4_codes(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns random bytes of two E2M1 numbers each, the first in the lower half, and the numbers
    of `shape`.
    """
    held = RNG.integers(0, 256, (shape[0], shape[1] // 2), "u1")
    table = np.array([*E2M1, *(-v for v in E2M1)])
    return held, np.stack([table[held & 15], table[held >> 4]], 2).reshape(shape)


def mxfp4_packed(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    """As compressed-tensors."""
    (held, values), powers = fp4_codes(shape), RNG.integers(100, 130, (shape[0], shape[1] // 32))
    tensors = {f"{key}_packed": held, f"{key}_scale": powers.astype("u1")}
    return tensors, times(values, np.exp2(powers - 127.0).repeat(32, 1))


def nvfp4(packed: str, whole: str) -> Any:
    """As ModelOpt, where the scale of the whole weight multiplies those of its blocks of 16, or as
    compressed-tensors, where it divides them.
    """

    def made(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
        (held, values), divides = fp4_codes(shape), whole == "_global_scale"
        scales = np.abs(numbers((shape[0], shape[1] // 16)).astype("f4")).astype(E4M3)
        overall = np.float32(RNG.uniform(100, 9000) ** (1 if divides else -1))
        found = scales.astype("f4")
        each = found / overall if divides else found * overall
        assert each.dtype == np.float32
        beside = {key.replace("weight", "input_scale"): np.array(0.3, "f4")} if not divides else {}
        stored = np.array([overall] if divides else overall)
        tensors = {key + packed: held, f"{key}_scale": scales, key + whole: stored}
        return {**tensors, **beside}, times(values, each.repeat(16, 1))

    return made


def packed_groups(bits: int, group: int, kind: Any = BF16) -> Any:
    def made(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
        codes = RNG.integers(-(1 << bits - 1), 1 << bits - 1, shape)
        scale = RNG.uniform(0.001, 0.01, (shape[0], shape[1] // group)).astype(kind)
        held = {"_packed": packed(codes, bits), "_scale": scale, "_shape": np.array(shape)}
        values = times(codes, scale.repeat(group, 1))
        return {key + suffix: array for suffix, array in held.items()}, values

    return made


def packed_channel(key: str, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    made: tuple[Arrays, np.ndarray] = packed_groups(8, shape[1])(key, shape)
    return made


def numbers(shape: tuple[int, int]) -> np.ndarray:
    """Returns random 8-bit floats, none of which is NaN."""
    codes = RNG.integers(0, 256, shape, "u1")
    return np.where(codes & 0x7F == 0x7F, 0x11, codes).astype("u1").view(E4M3)


def group_of(targets: list[str], **weights: Any) -> dict[str, Any]:
    """Returns a group of config_groups, with the keys that llm-compressor writes."""
    said = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None}
    given = {"num_bits": 8, "observer": "minmax", "symmetric": True, "type": "float"}
    known = {"input_activations": None, "output_activations": None, "targets": targets}
    return {**known, "weights": {**said, **given, **weights}}


def compressed(form: str, *groups: dict[str, Any], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "format": form,
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


LINEAR = ["Linear"]
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
KIMI_IGNORE = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
)
GROUP = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
TENSOR_GROUP = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
NVFP4_MODELOPT = nvfp4("", "_scale_2")
WIDE = {"hidden_size": 96}  # of forms whose blocks have 32 elements
# case -> model, quantization_config, [(the keys that it is for, the form)], the said encoding
FORMS: dict[str, tuple[str, dict[str, Any], list[tuple[str, Any]], str]] = {
    "fp8 tensor": (
        "qwen3",
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        [("", fp8_tensor)],
        "float8_e4m3fn with a scale for each tensor",
    ),
    "fp8 tensor of vllm": (
        "qwen3",
        {"quant_method": "fp8", "activation_scheme": "static"},
        [("", fp8_vllm)],
        "float8_e4m3fn with a scale for each tensor",
    ),
    "fp8 channel": (
        "qwen3",
        compressed("float-quantized", group_of(LINEAR, strategy="channel")),
        [("", fp8_channel)],
        "float8_e4m3fn with a scale for each row",
    ),
    "fp8 tensor of compressed-tensors": (
        "qwen3",
        compressed("naive-quantized", group_of(LINEAR, strategy="tensor")),
        [("", fp8_vllm)],
        "float8_e4m3fn with a scale for each tensor",
    ),
    "fp8 block of compressed-tensors": (
        "qwen3-moe",
        compressed("float-quantized", group_of(LINEAR, strategy="block", block_structure=[16, 32])),
        [("", fp8_block)],
        "float8_e4m3fn with a scale for each 16 x 32",
    ),
    "int8": (
        "qwen3",
        compressed("int-quantized", group_of(LINEAR, strategy="channel", type="int")),
        [("", int8_channel)],
        "int8 with a scale for each row",
    ),
    "kimi": (
        "deepseek-v3",
        compressed("pack-quantized", group_of(LINEAR, **INT4), ignore=KIMI_IGNORE),
        [(".experts.", packed_groups(4, 16))],
        "packed_int4 with a scale for each 1 x 16",
    ),
    "packed int8": (
        "qwen3",
        compressed("pack-quantized", group_of(LINEAR, strategy="channel", type="int")),
        [("", packed_channel)],
        "packed_int8 with a scale for each row",
    ),
    "mxfp8": (
        "qwen3",
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        [("", blocked("_scale_inv", 1))],
        "float8_e4m3fn with a scale for each 1 x 32",
    ),
    "fp8 ue8m0": (
        "qwen3",
        {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"},
        [("", blocked("_scale_inv", 16, E8M0))],
        "float8_e4m3fn with a scale for each 16 x 32",
    ),
    "fp8 of modelopt without quant_method": (
        "qwen3",
        {
            "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8}}},
            "ignore": ["lm_head"],
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
            "producer": {"name": "modelopt", "version": "0.31.0"},
        },
        [("", fp8_vllm)],
        "float8_e4m3fn",
    ),
    "mxfp8 of modelopt": (
        "qwen3",
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
        [("", blocked("_scale", 1))],
        "float8_e4m3fn with a scale for each 1 x 32",
    ),
    "nvfp4 of modelopt": (
        "qwen3-moe",
        {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
            },
        },
        [(".experts.", NVFP4_MODELOPT)],
        "nvfp4 with a scale for each 1 x 16, and one for each tensor",
    ),
    "mixed modelopt": (
        "qwen3",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        [("self_attn", fp8_vllm), ("", NVFP4_MODELOPT)],
        "nvfp4 with a scale for each 1 x 16, and one for each tensor",
    ),
    "mxfp8 of compressed-tensors": (
        "qwen3",
        compressed("mxfp8-quantized", group_of(LINEAR, **GROUP)),
        [("", blocked("_scale", 1))],
        "float8_e4m3fn with a scale for each 1 x 32",
    ),
    "mxfp4 of compressed-tensors": (
        "qwen3",
        compressed("mxfp4-pack-quantized", group_of(LINEAR, **{**GROUP, "num_bits": 4})),
        [("", mxfp4_packed)],
        "mxfp4 with a scale for each 1 x 32",
    ),
    "nvfp4 of compressed-tensors": (
        "qwen3",
        compressed("nvfp4-pack-quantized", group_of(LINEAR, **TENSOR_GROUP)),
        [("", nvfp4("_packed", "_global_scale"))],
        "nvfp4 with a scale for each 1 x 16, and one for each tensor",
    ),
    "several groups": (
        "qwen3",
        compressed(
            "mixed-precision",
            {**group_of(["re:.*self_attn.*"], strategy="channel"), "format": "float-quantized"},
            {**group_of(LINEAR, **INT4), "format": "pack-quantized"},
            {
                **group_of(["model.layers.1.mlp.up_proj"], **{**INT4, "group_size": 24}),
                "format": "pack-quantized",
            },
        ),
        [
            ("self_attn", fp8_channel),
            ("model.layers.1.mlp.up_proj", packed_groups(4, 24)),
            ("", packed_groups(4, 16, "f4")),
        ],
        "packed_int4 with a scale for each 1 x 24",
    ),
}


def made(case: str, root: Path) -> tuple[Arrays, Arrays]:
    """Writes a quantised directory, and one of its values in bfloat16. Returns the tensors of
    both.
    """
    _, method, forms, _ = FORMS[case]
    arrays = tiny.tensors(config_of(case))
    held, values = dict(arrays), dict(arrays)
    for key in linears(arrays):
        form = next((make for part, make in forms if part in key), None)
        if form is not None:
            rows, columns = arrays[key].shape
            del held[key]
            stored, values[key] = form(key, (rows, columns))
            held.update(stored)
    write(root / "quantised", config_of(case), held, method)
    write(root / "plain", config_of(case), values)
    return held, values


def published(root: Path, form: str) -> Path:
    """Writes the directories `quantised` and `plain` of a form, and returns the first one."""
    if form == "GPT-OSS":
        held, values = gpt_oss()
        write(root / "plain", GPT_OSS, values)
        return write(root / "quantised", GPT_OSS, held, MXFP4)
    made(next(case for case in FORMS if case.replace(" ", "_") == form), root)
    return root / "quantised"


def config_of(case: str) -> dict[str, Any]:
    wide = WIDE if "mxfp" in case or "ue8m0" in case else {}
    return {**tiny.config(FORMS[case][0]), **wide, "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("form")
    return request.param, root, *made(request.param, root)


def test_the_plan_names_each_form_and_everything_that_it_drops(form: Any, tmp_path: Path) -> None:
    case, root, held, _ = form
    said = good("plan", root / "quantised", tmp_path / "out").out
    assert FORMS[case][3] in said
    plan = package.plan(root / "quantised", tmp_path / "out")
    dropped = {k for k in held if k.endswith(("activation_scale", "input_scale", "weight_shape"))}
    assert dropped == set(plan.source.layout.ignored)
    if dropped:
        assert "ignored: " in said and ("activations" in said or "packed weight" in said)
    assert bool(dropped) == (case in HAVE_DROPPED)


HAVE_DROPPED = {
    "fp8 tensor",
    "fp8 tensor of vllm",
    "fp8 tensor of compressed-tensors",
    "fp8 of modelopt without quant_method",
    "kimi",
    "mixed modelopt",
    "nvfp4 of modelopt",
    "packed int8",
    "several groups",
}


def test_compressed_tensors_computes_the_same_values(form: Any) -> None:
    """The package's own decompressors judge the references above."""
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    case, _, held, values = form
    method = FORMS[case][1]
    if method.get("quant_method") != "compressed-tensors":
        pytest.skip("not a form of compressed-tensors")
    groups = list(method["config_groups"].values())
    keys = [key for key in values if key not in held or held[key] is not values[key]]
    assert len(keys) > 10
    for key in keys:
        group = groups[0]
        if len(groups) > 1:
            group = groups[0 if "self_attn" in key else 2 if "layers.1.mlp.up_proj" in key else 1]
        scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"])
        state = state_of(held, key)
        kind = BaseCompressor.get_value_from_registry(group.get("format") or method["format"])
        found = kind.decompress(state, scheme)["weight"].to(torch.bfloat16)
        same(found.view(torch.int16).numpy().view(BF16), values[key])


def state_of(held: Arrays, key: str) -> dict[str, Any]:
    """Returns the tensors of one weight as those of torch, under its name in its module."""
    return {
        f"weight{k.removeprefix(key)}": torch_of(array)
        for k, array in held.items()
        if k.startswith(key)
    }


@pytest.mark.parametrize(
    "form", ["mxfp8 of modelopt", "nvfp4 of modelopt", "mixed modelopt"], indirect=True
)
def test_modelopt_computes_the_same_values(form: Any) -> None:
    torch = pytest.importorskip("torch")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    _, _, held, values = form
    for key in [key for key in values if f"{key}_scale" in held]:
        state, shape = state_of(held, key), torch.Size(values[key].shape)
        if f"{key}_scale_2" in held:
            made = qtensor.NVFP4QTensor(shape, torch.bfloat16, state["weight"])
            scales = {"double_scale": state["weight_scale_2"], "block_sizes": {-1: 16}}
        elif held[f"{key}_scale"].size == 1:
            continue  # FP8QTensor multiplies in bfloat16, and vLLM in float32, as mckpt does
        else:
            made, scales = qtensor.MXFP8QTensor(shape, torch.bfloat16, state["weight"]), {}
        found = made.dequantize(torch.bfloat16, scale=state["weight_scale"], **scales) + 0
        # its nvfp4 has no -0
        same(found.view(torch.int16).numpy().view(BF16), values[key] + BF16(0))


@pytest.mark.parametrize("form", ["fp8 tensor", "mxfp8", "fp8 ue8m0"], indirect=True)
def test_transformers_computes_the_same_values_of_fp8(form: Any) -> None:
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    _, _, held, values = form
    for key in [key for key in values if held[key] is not values[key]]:
        scale = torch_of(held[f"{key}_scale_inv"])
        found = fp8.Fp8Dequantize(None)._dequantize_one(torch_of(held[key]), scale)
        same(found.view(torch.int16).numpy().view(BF16), values[key])


def torch_of(array: np.ndarray) -> Any:
    import torch

    if array.dtype in (BF16, E4M3, E8M0):
        raw = torch.from_numpy(array.view("i2" if array.dtype == BF16 else "u1").copy())
        return raw.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.array(array))


GATE = "model.layers.1.mlp.gate_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def changed(**changes: Any) -> Callable[[Arrays, dict[str, Any]], Any]:
    """Returns a function that changes the weights' entry of the first group."""
    return lambda held, method: method["config_groups"]["group_0"]["weights"].update(changes)


BAD: dict[str, tuple[str, Callable[[Arrays, dict[str, Any]], Any], int, tuple[str, ...]]] = {
    "no scale of a tensor": (
        "fp8 tensor",
        lambda t, _: t.pop(f"{GATE}_scale_inv"),
        3,
        (f"{GATE} [64, 48] is float8_e4m3fn", f"{GATE}_scale_inv [] is missing"),
    ),
    "no scale of rows": (
        "fp8 channel",
        lambda t, _: t.pop(f"{GATE}_scale"),
        3,
        (f"{GATE}_scale [64, 1] is missing",),
    ),
    "scales of rows of another shape": (
        "fp8 channel",
        lambda t, _: t.update({f"{GATE}_scale": np.zeros((1, 64), "f4")}),
        3,
        (f"{GATE}_scale is [1, 64]", "should be [64, 1]"),
    ),
    "no scales of packed weights": (
        "packed int8",
        lambda t, _: t.pop(f"{GATE}_scale"),
        3,
        (f"{GATE}_packed [64, 48] is packed_int8", f"{GATE}_scale [64, 1] is missing"),
    ),
    "packed weights of another shape": (
        "packed int8",
        lambda t, _: t.update({f"{GATE}_packed": np.zeros((64, 6), "i4")}),
        3,
        (f"{GATE}_packed [64, 6]", "should be [64, 12] int32"),
    ),
    "zero points": (
        "packed int8",
        changed(symmetric=False),
        3,
        ("group_0 has symmetric false", "zero points", "dequantise"),
    ),
    "another order": (
        "packed int8",
        changed(actorder="group"),
        3,
        ("group_0 has actorder 'group'", "dequantise"),
    ),
    "three bits": ("packed int8", changed(num_bits=3), 3, ("pack-quantized", "num_bits 3")),
    "another format": (
        "packed int8",
        lambda _, method: method.update(format="marlin-24"),
        3,
        ("marlin-24", "are read: quant_method fp8"),
    ),
    "no scale of the whole weight": (
        "nvfp4 of compressed-tensors",
        lambda t, _: t.pop(f"{GATE}_global_scale"),
        3,
        (f"{GATE}_packed [64, 48] is nvfp4", f"{GATE}_global_scale [] is missing"),
    ),
    "scales of the whole weights of another dtype": (
        "nvfp4 of modelopt",
        lambda t, _: t.update({f"{EXPERT}_scale_2": np.array(1, "f8").astype(BF16)}),
        3,
        (f"{EXPERT}_scale_2 holds bfloat16", "these scales are float32"),
    ),
    "an algorithm of modelopt with smoothing": (
        "nvfp4 of modelopt",
        lambda _, method: method["quantization"].update(quant_algo="NVFP4_AWQ"),
        3,
        ("its quant_algo NVFP4_AWQ is not read", "W4A16_NVFP4", "dequantise it first"),
    ),
    "scales of float32 where powers of two belong": (
        "mxfp8 of compressed-tensors",
        lambda t, _: t.update({f"{GATE}_scale": np.ones((64, 3), "f4")}),
        3,
        (f"{GATE}_scale holds float32", "these scales are uint8, float8_e8m0fnu"),
    ),
    "a block of no elements": (
        "kimi",
        changed(group_size=0),
        3,
        ("group_size 0", "dequantise"),
    ),
    "a pattern that needs backtracking": (
        "several groups",
        lambda _, method: method["config_groups"]["group_0"].update(targets=["re:(.*)\\1x"]),
        3,
        ("targets ['re:(.*)",),
    ),
    "a pattern that is none": (
        "several groups",
        lambda _, method: method["config_groups"]["group_0"].update(targets=["re:("]),
        3,
        ("targets ['re:(']",),
    ),
    "no groups": (
        "packed int8",
        lambda _, method: method.pop("config_groups"),
        3,
        ("no config_groups",),
    ),
    "scales of float16": (
        "fp8 channel",
        lambda t, _: t.update({f"{GATE}_scale": np.zeros((64, 1), "f2")}),
        3,
        (f"{GATE}_scale holds float16", "bfloat16, float32"),
    ),
    "zero points beside symmetric weights": (
        "packed int8",
        lambda t, _: t.update({f"{GATE[:-7]}.weight_zero_point": np.zeros((8, 1), "i4")}),
        5,
        ("weight_zero_point [8, 1] is in no rule",),
    ),
    "weights that are rotated": (
        "several groups",
        lambda _, method: method.update(transform_config={"config_groups": {"R4": {}}}),
        3,
        ("its transform_config changes what the weights mean",),
    ),
    "no module is meant": (
        "several groups",
        lambda _, method: method["config_groups"].pop("group_1"),
        3,
        ("model.layers.0.mlp.gate_proj.weight is missing",),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_form_is_refused(tmp_path: Path, case: str) -> None:
    form, change, code, words = BAD[case]
    held, _ = made(form, tmp_path)
    method = json.loads(json.dumps(FORMS[form][1]))
    change(held, method)
    shutil.rmtree(tmp_path / "quantised")
    src = write(tmp_path / "quantised", config_of(form), held, method)
    args = ("hf-to-megatron", src, tmp_path / "dst")
    refused(code, *words, args=args, untouched=tmp_path)


# ---- scales with which values are not finite

INF, NAN = float("inf"), float("nan")
# form -> the suffix of the scales, one as it is stored, and the same as a number
LARGE: list[tuple[str, str, float, float]] = [
    ("fp8 tensor", "_scale_inv", 3e38, 3e38),
    ("fp8 tensor of vllm", "_scale", NAN, NAN),
    ("fp8 channel", "_scale", INF, INF),
    ("fp8 block of compressed-tensors", "_scale", 9e36, 9e36),
    ("int8", "_scale", 3e38, 3e38),
    ("kimi", "_scale", 1e38, 1e38),
    ("packed int8", "_scale", -1e37, -1e37),
    ("mxfp8", "_scale_inv", 254, 2.0**127),
    ("mxfp8 of modelopt", "_scale", 255, INF),
    ("fp8 ue8m0", "_scale_inv", NAN, NAN),
    ("mxfp4 of compressed-tensors", "_scale", 254, 2.0**127),
    ("mxfp4 of compressed-tensors", "_scale", 255, 2.0**128),
    ("nvfp4 of modelopt", "_scale_2", 3e38, 3e38),
    ("nvfp4 of compressed-tensors", "_global_scale", 0.0, 0.0),
]


def elements(held: Arrays, key: str) -> np.ndarray:
    """Returns the numbers of a quantised weight before they are scaled."""
    stored = held[key] if key in held else held[f"{key}_packed"]
    if stored.dtype == np.int32:
        bits = 4 if key == EXPERT else 8
        fields = stored.view("u4")[..., None] >> np.arange(0, 32, bits, "u4") & (1 << bits) - 1
        return fields.reshape(len(stored), -1).astype("f8") - (1 << bits - 1)
    if stored.dtype == np.uint8:
        table = np.array([*E2M1, *(-v for v in E2M1)])
        return np.stack([table[stored & 15], table[stored >> 4]], 2).reshape(len(stored), -1)
    return stored.astype("f8")


@pytest.mark.parametrize(("case", "suffix", "stored", "number"), LARGE)
def test_scales_that_make_values_infinite_are_refused(
    case: str, suffix: str, stored: float, number: float, tmp_path: Path
) -> None:
    """The last scale of one weight, and then all of them, whose values are those of `times`."""
    held, _ = made(case, tmp_path)
    experts = case in ("kimi", "nvfp4 of modelopt", "fp8 block of compressed-tensors")
    key = EXPERT if experts else GATE
    name = "layers.1.moe.experts.3.up.weight" if experts else "layers.1.mlp.gate.weight"
    scales = held[key + suffix]
    for where in (-1, slice(None)):
        flat = scales.reshape(-1)
        flat[where] = stored
        shutil.rmtree(tmp_path / "quantised")
        src = write(tmp_path / "quantised", config_of(case), held, FORMS[case][1])
        out = tmp_path / f"out {where}"
        args = ("hf-to-megatron", src, out)
        refused(2, name, "times its scale", "in bfloat16", "--allow-overflow", args=args)
        said = mckpt("check", src)
        assert said.code == 1 and f"{name}: " in said.out and "times its scale" in said.out
        tensor = package.open(src)[name]
        for read in (tensor.numpy, package.open(src).hf_tensors()[key].numpy):
            with pytest.raises(package.errors.UsageError, match="times its scale"):
                read()
        refused(
            2, name, "times its scale", "--allow-overflow", args=("diff", tmp_path / "plain", src)
        )
    good(*args, "--allow-overflow")
    good("diff", src, out, "--allow-overflow")
    said = mckpt("diff", tmp_path / "plain", src, "--allow-overflow", "--atol", 1e9)
    assert said.code == 1 and f"{name}: " in said.out and "max abs inf" in said.out
    with np.errstate(all="ignore"):
        if "nvfp4" in case:
            blocks, whole = held[f"{key}_scale"].astype("f4").repeat(16, 1), np.float32(number)
            each = blocks * whole if number else blocks / whole
        else:
            each = np.array(number if scales.dtype in ("u1", E8M0) else flat[0].astype("f8"))
    wanted = times(elements(held, key), each)
    assert not np.isfinite(wanted.astype("f4")).all()
    same(package.open(out)[name].numpy(), wanted)
