"""Each published form of quantised weights is read with the values of its reference formula.

The references are transformers' own functions, and arithmetic written out here with numpy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mckpt as package
from mckpt.values.quantisation import ENCODINGS, SCALES, Grid, dequantise
from mckpt.values.quantisation import MXFP4 as MXFP4_CODES
from tests import tiny
from tests.door import edit_json, good, mckpt, refused

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
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
    """Writes a Hugging Face directory of several files."""
    directory.mkdir(parents=True)
    tiny.write_weights(directory, arrays, 60_000)
    named = {} if method is None else {"quantization_config": method}
    tiny.write_json(directory / "config.json", {**config, **named})
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt-oss")
    held, values = gpt_oss()
    write(root / "quantised", GPT_OSS, held, MXFP4)
    write(root / "plain", GPT_OSS, values)
    return root


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
        )
        same(out, np.ascontiguousarray(values[0].T[:, phase::2]))


TARGETS: dict[str, tuple[Any, ...]] = {
    "torch": ("--format", "torch", "--transformer-impl", "local"),
    "torch_dist ep5 pp2": ("--ep", 5, "--pp", 2),
    "torch tp2": ("--format", "torch", "--tp", 2, "--etp", 1),
}


def converts_like_its_values(root: Path, out: Path, *options: Any) -> None:
    """Asserts that both directories of `root` give the same bytes, and that diff and the way back
    agree.
    """
    small = ("--max-memory", "1MiB", "--threads", 2)
    good("hf-to-megatron", root / "quantised", out / "a", *options, *small)
    good("hf-to-megatron", root / "plain", out / "b", *options)
    left, right = (
        {str(p.relative_to(r)): p.read_bytes() for p in r.rglob("*") if p.is_file()}
        for r in (out / "a", out / "b")
    )
    apart = {name for name in left if left[name] != right.get(name)}
    assert apart == {"release/mckpt.json", "hf/config.json"} and left.keys() == right.keys()
    assert mckpt("diff", root / "quantised", out / "a").code == 0
    assert mckpt("diff", root / "quantised", root / "plain").code == 0
    good("megatron-to-hf", out / "a", out / "back")
    assert mckpt("diff", out / "back", root / "plain").code == 0
    config = json.loads((out / "back" / "config.json").read_text())
    assert config == json.loads((root / "plain" / "config.json").read_text())


@pytest.mark.parametrize("case", TARGETS)
def test_mxfp4_converts_like_its_values(published: Path, tmp_path: Path, case: str) -> None:
    converts_like_its_values(published, tmp_path, *TARGETS[case])


def test_the_plan_names_the_encoding(published: Path, tmp_path: Path) -> None:
    said = good("plan", published / "quantised", tmp_path / "out").out
    assert "cast mxfp4 -> bfloat16: " in said
    assert "20 tensors are mxfp4 with a scale for each 1 x 32, and are dequantised" in said


def test_mxfp4_is_dequantised_to_hugging_face(published: Path, tmp_path: Path) -> None:
    """The copy stores the transpose of the blocks. A tiny budget gives the same bytes."""
    plan = package.plan(published / "quantised", tmp_path / "copy", format="hf")
    plan.run(max_memory=60_000, threads=1)
    assert not package.diff(published / "plain", tmp_path / "copy")


def test_slices_of_mxfp4_are_read(published: Path) -> None:
    quantised, plain = (package.open(published / name) for name in ("quantised", "plain"))
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


def test_mxfp4_without_its_config_is_refused(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published / "quantised", tmp_path / "src")
    edit_json(tmp_path / "src" / "config.json", lambda c: c.pop("quantization_config"))
    args = ("hf-to-megatron", tmp_path / "src", tmp_path / "dst")
    refused(3, f"{GATE_UP} is missing", args=args)


def test_columns_that_do_not_fill_a_block_are_refused(tmp_path: Path) -> None:
    src = write(tmp_path / "src", {**GPT_OSS, "intermediate_size": 65}, gpt_oss()[0], MXFP4)
    args = ("hf-to-megatron", src, tmp_path / "dst")
    refused(3, "a row of 65 elements does not fill whole words of mxfp4", args=args)
