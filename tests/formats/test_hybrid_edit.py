"""Hybrids made by an edit: what is kept beside the source, and new values beside their formulas."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.editing import edits, steps
from mckpt.values import drawing
from tests.formats.test_edit import made
from tests.helpers import tiny
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as run

SIZES = "mamba_head_dim: 8, mamba_num_groups: 2, mamba_state_dim: 12"
# a tied model, experts, latent attention with dense mlps, experts and multi-token prediction, and
# layer norms with biases whose weights are stored less 1
PATTERNS = {
    "qwen3-tied": "M*-M*-MM-**-M-**-",
    "qwen3-moe": "*EM*E*EM*EM",
    "deepseek-v3": "M*M-*E*MEM*E",
    "nemotron": "-*M*-*-M*M-",
}


def recipe(pattern: str, seed: int = 7, sizes: str = SIZES) -> list[str]:
    return [f'hybrid: {{pattern: "{pattern}", {sizes}, seed: {seed}}}']


def old_layers(pattern: str) -> dict[tuple[int, str], int]:
    """Returns of each new layer and kind of part the number of the part: M, * or mlp."""
    found, layer, counts = dict[tuple[int, str], int](), -1, {"M": 0, "*": 0, "mlp": 0}
    for at, symbol in enumerate(pattern):
        kind = "mlp" if symbol in "-E" else symbol
        layer += not (kind == "mlp" and at and pattern[at - 1] in "M*")
        found[layer, kind] = counts[kind]
        counts[kind] += 1
    return found


def number(seed: int, name: str, index: int) -> float:
    """Returns the drawn number of 0 .. 1 of an element, as docs/surgery.md has it."""
    mask = (1 << 64) - 1
    start = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    z = int.from_bytes(start, "little") + index * 0x9E3779B97F4A7C15 & mask
    for _ in range(2):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z ^= z >> 31
    return (z >> 11) / 2**53


def fresh(seed: int, name: str, shape: tuple[int, ...], dims: dict[str, Any]) -> np.ndarray:
    """Returns a new tensor in float32."""
    kind, inner = name.split(".", 2)[2], 2 * dims["hidden_size"]
    u = np.array([number(seed, name, i) for i in range(int(np.prod(shape)))]).reshape(shape)
    if kind == "mamba.a_log":
        return np.log(1 + 15 * u).astype("f4")
    if kind == "mamba.dt_bias":  # softplus of it is the step
        return np.log(np.expm1(np.exp(np.log(0.001) + u * np.log(100)))).astype("f4")
    if kind.endswith(".bias") or (kind == "attn_norm.weight" and dims["norm_offset"]):
        return np.zeros(shape, "f4")
    if "norm" in kind or kind == "mamba.d":
        return np.ones(shape, "f4")
    inputs = 4 if "conv" in kind else inner if "out" in kind else dims["hidden_size"]
    return ((2 * u - 1) / np.sqrt(inputs)).astype("f4")


def expect(before: mckpt.Checkpoint, after: mckpt.Checkpoint, pattern: str) -> dict[str, int]:
    """Fails unless each tensor is that of the source or a new one with the seed 7. Returns how many
    new ones there are, by the name of their state.
    """
    old, new, end = old_layers(pattern), dict[str, int](), before.dims["num_layers"]
    count = 1 + max(layer for layer, _ in old)
    for name in after:
        found = re.fullmatch(r"layers\.(\d+)\.(mlp|moe)?.*", name)
        values, source, (weight, _, state) = after[name][:].numpy(), name, name.partition("@")
        if found:
            layer, kind = int(found[1]), "mlp" if found[2] else "*"
            # layers behind the decoder's are of multi-token prediction
            at = old.get((layer, kind), -1) if layer < count else layer - count + end
            source = name.replace(f"layers.{layer}.", f"layers.{at}.", 1)
            if at < 0:
                assert (layer, "M") in old, name
                wanted = fresh(7, weight, values.shape, before.dims)
                wanted = np.zeros_like(wanted) if state.startswith("exp_") else wanted
                assert values.tobytes() == wanted.astype(values.dtype).tobytes(), name
                new[state] = new.get(state, 0) + 1
                continue
        assert values.tobytes() == before[source][:].numpy().tobytes(), name
    return new


@pytest.mark.parametrize("case", PATTERNS)
def test_kept_tensors_have_their_bits_and_new_ones_the_formula(case: str, tmp_path: Path) -> None:
    source, pattern = made(case, tmp_path), PATTERNS[case]
    mckpt.convert(source, tmp_path / "gpt", format="torch", tp=2)
    many: dict[str, Any] = {"format": "torch_dist", "tp": 2, "pp": 2 - len(pattern) % 2}
    edit = recipe(pattern)
    mckpt.edit(source, tmp_path / "one", edit, format="torch_dist")
    mckpt.edit(tmp_path / "gpt", tmp_path / "many", edit, **many)
    mckpt.edit(tmp_path / "gpt", tmp_path / "torch", edit, format="torch", tp=2, pp=1)
    for name in ("one", "many", "torch"):
        assert mckpt.check(tmp_path / name).verdict == "sound"
    after = mckpt.open(tmp_path / "one")
    written = (after.args or {})["hybrid_layer_pattern"].split("/")[0]
    assert written.replace("+", "*") == pattern
    new = (17 + (case == "nemotron")) * pattern.count("M")  # with the bias of the norm
    assert expect(mckpt.open(source), after, pattern) == {"": new}
    for name in ("many", "torch"):
        assert not mckpt.diff(tmp_path / "one", tmp_path / name)
    mckpt.edit(source, tmp_path / "other", recipe(pattern, 8), format="torch_dist")
    apart = mckpt.diff(tmp_path / "one", tmp_path / "other").changed
    assert len(apart) == 11 * pattern.count("M")  # the matrices, dt_bias and A_log


def test_the_states_of_an_optimizer_follow_and_new_ones_are_zero(tmp_path: Path) -> None:
    source = tiny.unpack("optimizer/fully_sharded_model_space", tmp_path / "source")
    mckpt.edit(source, tmp_path / "out", recipe("M*-*M-"), format="torch_dist", tp=1)
    before, after = (mckpt.open(p).with_optimizer() for p in (source, tmp_path / "out"))
    states = ("", "master", "exp_avg", "exp_avg_sq")
    assert expect(before, after, "M*-*M-") == dict.fromkeys(states, 34)
    good("verify", source, tmp_path / "out", "--contract", "--level", "bytes")


def test_the_values_are_spread_as_those_of_megatron(tmp_path: Path) -> None:
    """The ranges and moments of MambaMixer and of torch's kaiming_uniform_(a=sqrt(5))."""
    plain = mckpt.open(made("qwen3-tied", tmp_path))
    of = recipe(PATTERNS["qwen3-tied"].replace("M", "MMMMM"), sizes="mamba_head_dim: 1")
    out = edits.edited(plain, steps.read(None, plain.dims, of))
    hidden, tensor = plain.dims["hidden_size"], out["layers.0.mamba.out.weight"]
    box = tensor[3:9, 5:7].numpy()
    assert box.tobytes() == tensor[:].numpy()[3:9, 5:7].tobytes()
    found: dict[str, list[np.ndarray]] = {}
    for name in out:
        if ".mamba." in name:
            part = name.split(".mamba.")[1]
            found.setdefault(part, []).append(out[name][:].numpy().astype("f8").ravel())
    step = np.log(np.log1p(np.exp(np.concatenate(found["dt_bias"]))))
    ranges = {"dt_bias": (step, np.log(0.001), np.log(0.1))}
    ranges["a_log"] = np.exp(np.concatenate(found["a_log"])), 1, 16
    for part, inputs in (("z.weight", hidden), ("c_conv.weight", 4), ("out.weight", 2 * hidden)):
        ranges[part] = np.concatenate(found[part]), -(inputs**-0.5), inputs**-0.5
    for part, (values, low, high) in ranges.items():
        wide, rounding = high - low, 2.0**-7 * max(abs(low), high)
        assert low - rounding <= values.min() < low + 0.01 * wide + rounding, part
        assert high - 0.01 * wide - rounding < values.max() <= high + rounding, part
        assert abs(values.mean() - (low + high) / 2) < 5 * wide / np.sqrt(12 * values.size), part
        assert abs(values.std() * np.sqrt(12) / wide - 1) < 5 / np.sqrt(values.size), part
        apart = np.corrcoef(values[1:], values[:-1])[0, 1]
        assert abs(apart) < 5 / np.sqrt(values.size), part


def test_other_values_break_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, how = made("qwen3-moe", tmp_path), ("--format", "torch_dist", "--tp", 2)
    edit = ("--edit", recipe(PATTERNS["qwen3-moe"])[0], *how)
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "GOLDEN", 3)
        good("edit", source, tmp_path / "wrong", *edit)
    good("edit", source, tmp_path / "out", *edit)
    good("verify", source, tmp_path / "out", "--contract")
    said = run("verify", source, tmp_path / "wrong", "--contract")
    assert said.code == 1 and "layers.1.mamba.out.weight" in said.out, said.out


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source, out = made("qwen3-moe", tmp_path), tmp_path / "out"
    for pattern, sizes, code, words in (
        ("M*E*E*E", SIZES, 2, "has 3 attentions and 3 mlps (EEE), and the model has 4 attentions"),
        (
            "M*E*E*E*-",
            SIZES,
            2,
            "4 mlps (EEE-), and the model has 4 attentions and 4 mlps (EEEE",
        ),
        ("M*E*E*E*E", "mamba_head_dim: 36", 2, "2.66667 heads of mamba_head_dim 36"),
        ("*E*E*E*E", SIZES, 2, "pattern has M, one at least"),
        ("M*E*E*E*E", "mamba_num_heads: true", 2, "mamba_num_heads is a whole number, not True"),
        ("M*E*E*E*E", "heads: 3", 2, "heads is not one of pattern, mamba_state_dim"),
        ("M*E*E*E*E", SIZES, 2, "no class of transformers computes the edited model"),
    ):
        edit = recipe(pattern, sizes=sizes)[0]
        refused(code, words, args=("edit", source, out, "--edit", edit))
    both = ("--edit", recipe("M*E*E*E*E")[0], "--edit", "vocab: {size: 300}")
    refused(2, "must be the last edit", args=("edit", source, out, *both))
    hybrid = made("bamba", tmp_path)
    again = ("edit", hybrid, out, "--edit", recipe("M*-*-*-*-")[0])
    refused(2, "has Mamba-2 layers already", args=again)
