"""Merges by methods: beside the formulas of the papers, in all formats, and beside mergekit.

MERGEKIT_PYTHON is the Python of an environment with mergekit 0.1.5.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.errors import MappingError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.values import drawing, mixing
from tests.formats.test_merge import noisy
from tests.helpers import made_models, tiny
from tests.helpers.commands import good, refused, shard
from tests.helpers.commands import mckpt as run

MERGEKIT = os.environ.get("MERGEKIT_PYTHON", "")
Tensors = dict[str, np.ndarray]
WEIGHTS = (0.5, 0.75)  # whose products with bfloat16 are exact in float32


def models(tmp_path: Path, dtype: str = "float32", **changes: Any) -> list[Path]:
    """Returns a base model and two others."""
    model = tiny.tiny_random("qwen3", tmp_path / "model", dtype, **changes)
    return [noisy(model, tmp_path / f"hf{seed}", seed) for seed in range(3)]


# ---- the formulas, tensor by tensor, in float64


def angle(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.arccos(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)))


def slerp(a: np.ndarray, b: np.ndarray, t: float) -> np.ndarray:
    theta = angle(a, b)
    if abs(np.cos(theta)) > 0.9995:
        return (1 - t) * a + t * b
    return (np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta)


def model_stock(base: np.ndarray, one: np.ndarray, two: np.ndarray) -> np.ndarray:
    cosine = np.cos(angle(one - base, two - base))
    t = 2 * cosine / (1 + cosine)
    return t * (one + two) / 2 + (1 - t) * base


def on_sphere(vectors: Sequence[np.ndarray], weights: np.ndarray, steps: int) -> np.ndarray:
    """Returns the weighted mean of directions on the sphere, after `steps` steps by the tangent."""
    units = [v / np.linalg.norm(v) for v in vectors]
    mean = sum(w * u for w, u in zip(weights, units, strict=True))
    mean = mean / np.linalg.norm(mean)
    for _ in range(steps):
        tangent = np.zeros_like(mean)
        for w, u in zip(weights, units, strict=True):
            theta = angle(mean, u)
            tangent += w * theta / np.sin(theta) * (u - np.cos(theta) * mean)
        length = np.linalg.norm(tangent)
        if length < 1e-9:
            break
        mean = np.cos(length) * mean + np.sin(length) * tangent / length
    return np.asarray(mean)


def multislerp(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    weights = np.array(WEIGHTS) / sum(WEIGHTS)
    units = [v / np.linalg.norm(v) for v in (one, two)]
    mean = weights[0] * units[0] + weights[1] * units[1]
    mean /= np.linalg.norm(mean)
    tangent = sum(w * (u - np.vdot(u, mean) * mean) for w, u in zip(weights, units, strict=True))
    length = np.linalg.norm(tangent)
    mixed = mean * np.cos(length) + tangent * np.sin(length) / length
    return np.asarray(mixed * (weights[0] * np.linalg.norm(one) + weights[1] * np.linalg.norm(two)))


def karcher(*all_of: np.ndarray) -> np.ndarray:
    count = len(all_of)
    mean = on_sphere(all_of, np.full(count, 1 / count), steps=50)
    return np.asarray(mean * np.mean([np.linalg.norm(v) for v in all_of]))


def kept(change: np.ndarray, low: int, high: int) -> np.ndarray:
    """Returns the change with 0 for all but the elements of some ranks, by a sort of them all."""
    order = np.lexsort([np.arange(change.size), np.abs(change).ravel()])
    out = np.zeros(change.size)
    out[order[low:high]] = change.ravel()[order[low:high]]
    return out.reshape(change.shape)


def largest(change: np.ndarray, density: float) -> np.ndarray:
    return kept(change, change.size - max(1, int(density * change.size)), change.size)


def between(change: np.ndarray, density: float, gamma: float) -> np.ndarray:
    count, top = int(density * change.size), int(gamma * change.size)
    low = max(0, change.size - count - top)
    return kept(change, low, low + count)


def elected(changes: Sequence[np.ndarray], normalize: bool) -> np.ndarray:
    """Returns the weighted sum of those changes that have the sign of the weighted sum of all."""
    terms = [w * c for w, c in zip(WEIGHTS, changes, strict=True)]
    sign = np.where(sum(terms) >= 0, 1, -1)
    agree = [np.sign(term) == sign for term in terms]
    total = np.asarray(sum(np.where(a, t, 0) for a, t in zip(agree, terms, strict=True)))
    by = np.asarray(sum(np.where(a, w, 0) for a, w in zip(agree, WEIGHTS, strict=True)))
    return total / np.where(by == 0, 1, by) if normalize else total


# method, parameters, number of models, weights -> the expected tensor
Formula = Callable[..., np.ndarray]
CASES: dict[str, tuple[dict[str, Any], int, Sequence[float] | None, Formula]] = {
    "linear": (
        {},
        3,
        (0.5, 0.4, 0.9),
        lambda a, b, c: (0.5 * a + 0.4 * b + 0.9 * c) / 1.8,
    ),
    "task_arithmetic": (
        {"lambda": 0.8},
        3,
        WEIGHTS,
        lambda base, a, b: base + 0.8 * (0.5 * (a - base) + 0.75 * (b - base)),
    ),
    "slerp": ({"t": 0.3}, 2, None, lambda a, b: slerp(a, b, 0.3)),
    "nuslerp": (
        {},
        3,
        WEIGHTS,
        lambda base, a, b: base + slerp(a - base, b - base, 0.6),
    ),
    "model_stock": ({}, 3, None, model_stock),
    "multislerp": ({}, 2, WEIGHTS, multislerp),
    "karcher": ({}, 3, None, karcher),
    "ties": (
        {"density": 0.35},
        3,
        WEIGHTS,
        lambda base, a, b: (
            base + elected([largest(a - base, 0.35), largest(b - base, 0.35)], normalize=True)
        ),
    ),
    "breadcrumbs": (
        {"density": 0.35, "gamma": 0.1, "lambda": 1.1},
        3,
        WEIGHTS,
        lambda base, a, b: (
            base + 1.1 * (0.5 * between(a - base, 0.35, 0.1) + 0.75 * between(b - base, 0.35, 0.1))
        ),
    ),
    "breadcrumbs_ties": (
        {"density": 0.9, "gamma": 0.2},
        3,
        WEIGHTS,
        lambda base, a, b: (
            base
            + elected([between(a - base, 0.9, 0.2), between(b - base, 0.9, 0.2)], normalize=False)
        ),
    ),
}


def merge(
    inputs: Sequence[Path], out: Path, method: str, parameters: Any, weights: Any, **options: Any
) -> Path:
    mckpt.merge(inputs, out, method=method, parameters=parameters, weights=weights, **options)
    return out


def loaded(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", CASES)
def test_each_method_is_its_formula(method: str, dtype: str, tmp_path: Path) -> None:
    parameters, count, weights, formula = CASES[method]
    inputs = models(tmp_path, dtype)[:count]
    found = loaded(merge(inputs, tmp_path / "out", method, parameters, weights))
    tensors = [loaded(one) for one in inputs]
    changed = 0
    for name, tensor in found.items():
        # the changes are those of float32
        wide = [one[name].astype("f4") for one in tensors]
        if method.startswith(("ties", "bread")):
            wide = [wide[0], *(wide[0] + (w - wide[0]) for w in wide[1:])]
        expected = formula(*(w.astype("f8") for w in wide))
        assert tensor.dtype == tensors[0][name].dtype
        # half of the last bit of a result, and the roundings of float32 of terms of size 1
        rtol = 2.0**-8 if dtype == "bfloat16" else 0.0
        np.testing.assert_allclose(tensor.astype("f8"), expected, rtol, 1e-6, err_msg=name)
        same = (tensor == expected.astype(tensor.dtype)).mean()
        assert same > 0.99 or dtype == "float32" or tensor.size < 1000
        changed += not np.allclose(tensor.astype("f8"), wide[0], rtol=0, atol=1e-3)
    assert changed == len(found)


@pytest.mark.parametrize("case", ["qwen3-moe", "gemma", "gpt2"])
@pytest.mark.parametrize("method", ["slerp", "model_stock", "ties", "dare_ties", "breadcrumbs"])
def test_formats_sizes_and_threads_do_not_change_a_bit(
    case: str, method: str, tmp_path: Path
) -> None:
    """The norms of gemma are stored less 1, and the linears of gpt2 transposed and fused."""
    if case in tiny.CASES:
        model = tiny.tiny_random(case, tmp_path / "model")
    else:
        made_models.make([case], tmp_path)
        model = tmp_path / case
    hf = [noisy(model, tmp_path / f"hf{seed}", seed) for seed in range(3)]
    hf = hf[:2] if method == "slerp" else hf
    parameters = {"t": 0.3} if method == "slerp" else {"density": 0.4}
    parameters = {} if method == "model_stock" else parameters
    accepted = ("activation",) if case == "gemma" else ()
    wide = Parallel(tp=2, ep=2, etp=1) if case == "qwen3-moe" else Parallel(tp=2)
    megatron = [tmp_path / f"megatron{n}" for n in range(len(hf))]
    for number, (source, out) in enumerate(zip(hf, megatron, strict=True)):
        how: dict[str, Any] = {"format": "torch", "parallel": Parallel(pp=2)}
        how = {"parallel": wide} if number == 1 else how
        mckpt.convert(source, out, allow_inexact=accepted, **how)
    expected = merge(hf, tmp_path / "out", method, parameters, None, threads=1)
    found = loaded(expected)
    for number, inputs in enumerate(
        ([*hf[:1], *megatron[1:]], [megatron[0], *hf[1:2], *megatron[2:]])
    ):
        out = merge(inputs, tmp_path / f"out{number}", method, parameters, None, format="hf")
        assert {n for n, t in loaded(out).items() if t.tobytes() != found[n].tobytes()} == set()
    made = tmp_path / "made"
    how = {"format": "torch_dist", "tp": 2, "threads": 4, "allow_inexact": accepted}
    merge(hf, made, method, parameters, None, **how)
    if case != "gemma":  # rounded as it is stored, without the 1
        assert not mckpt.diff(expected, made)


def test_blocks_of_a_tensor_do_not_change_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = models(tmp_path, "bfloat16")
    for method, parameters in (("ties", {"density": 0.4}), ("breadcrumbs", {"density": 0.3})):
        whole = loaded(merge(inputs, tmp_path / f"{method}1", method, parameters, None))
        with monkeypatch.context() as small:
            small.setattr(mixing, "CHUNK", 40)  # less than a row, and 231 blocks of the largest
            cut = loaded(
                merge(inputs, tmp_path / f"{method}2", method, parameters, None, threads=4)
            )
        assert {n for n, t in whole.items() if t.tobytes() != cut[n].tobytes()} == set()
    with monkeypatch.context() as small:
        small.setattr(mixing, "CHUNK", 40)
        found = loaded(merge(inputs[:2], tmp_path / "slerp", "slerp", {"t": 0.3}, None, threads=4))
    for name, tensor in found.items():
        one, two = (loaded(path)[name].astype("f8") for path in inputs[:2])
        np.testing.assert_allclose(
            tensor.astype("f8"), slerp(one, two, 0.3), rtol=2.0**-8, atol=1e-6
        )


def test_of_equal_changes_the_first_are_left_out(tmp_path: Path) -> None:
    """Changes of bfloat16 weights are often equal, and still exactly the stated part is kept."""
    inputs = models(tmp_path, "bfloat16")[:2]
    found = loaded(merge(inputs, tmp_path / "out", "ties", {"density": 0.25}, None))
    base, other = map(loaded, inputs)
    equal = 0
    for name, tensor in found.items():
        change = other[name].astype("f4") - base[name].astype("f4")
        mask = largest(change, 0.25) != 0
        assert mask.sum() <= max(1, change.size // 4)
        cut = np.abs(change[mask]).min() if mask.any() else 0
        equal += int((np.abs(change[~mask]) == cut).sum())
        expected = np.where(mask, base[name].astype("f4") + change, base[name].astype("f4"))
        assert tensor.tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes(), name
    assert equal > 10


def test_dare_draws_by_seed_tensor_and_element(tmp_path: Path) -> None:
    inputs = models(tmp_path)[:2]
    base, other = map(loaded, inputs)
    density = {"density": 0.3}
    first = loaded(merge(inputs, tmp_path / "a", "dare_linear", density, None))
    seeded = loaded(merge(inputs, tmp_path / "b", "dare_linear", {**density, "seed": 1}, None))
    plain = loaded(merge(inputs, tmp_path / "c", "dare_linear", {**density, "rescale": 0}, None))
    drawn: list[np.ndarray] = []
    total = kept_of_all = 0
    for name, tensor in first.items():
        b, change = base[name], other[name] - base[name]
        mask = tensor != b
        np.testing.assert_allclose(tensor, np.where(mask, b + change / 0.3, b), atol=1e-6)
        np.testing.assert_allclose(plain[name], np.where(mask, b + change, b), atol=1e-6)
        total, kept_of_all = total + mask.size, kept_of_all + int(mask.sum())
        if mask.ndim == 2 and mask.shape == (64, 48):
            drawn.append(mask)
        if mask.size > 1000:
            both = ((seeded[name] != b) & mask).mean()
            assert abs(both - 0.09) < 0.05  # independent of the other seed's
    # 6 standard deviations
    assert abs(kept_of_all / total - 0.3) < 6 * (0.21 / total) ** 0.5
    for one, two in itertools.pairwise(drawn):
        assert (one != two).any()
    # the second model draws otherwise than the first
    same = loaded(merge([*inputs, inputs[1]], tmp_path / "d", "dare_linear", density, None))
    name = next(n for n, t in first.items() if t.ndim == 2)
    change = (other[name] - base[name]) / np.float32(0.3)
    times = np.round((same[name] - base[name]) / np.where(change == 0, 1, change))
    assert set(times.ravel()) == {0.0, 1.0, 2.0}


def test_splitmix64_draws_the_published_numbers() -> None:
    """The numbers of the reference implementation in C for the state 1234567."""
    states = (1234567 + np.arange(1, 4, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)).astype("u8")
    assert drawing.scrambled(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_an_unchanged_tensor_stays_as_it_is(tmp_path: Path) -> None:
    base = models(tmp_path, "bfloat16")[0]
    for method in ("task_arithmetic", "ties", "dare_ties", "breadcrumbs", "model_stock"):
        out = merge([base] * 3, tmp_path / method, method, {}, None)
        assert not mckpt.diff(base, out), method


def recipe(path: Path, text: str, inputs: Sequence[Path]) -> Path:
    path.write_text(text.format(*inputs))
    return path


GRADIENT = """\
merge_method: task_arithmetic
base_model: {0}
models:
  - model: {0}
  - model: {1}
    parameters:
      weight: [0.1, 0.7]
  - model: {2}
    parameters:
      weight: 0.3
parameters:
  lambda: 0.5
dtype: {{dtype}}
tokenizer_source: base
"""


def test_a_recipe_spreads_a_list_over_the_layers(tmp_path: Path) -> None:
    inputs = models(tmp_path)
    file = recipe(tmp_path / "r.yaml", GRADIENT.replace("{{dtype}}", "bfloat16"), inputs)
    good("merge", "--recipe", file, tmp_path / "out")
    found, tensors = loaded(tmp_path / "out"), [loaded(one) for one in inputs]
    for name, tensor in found.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        weight = 0.1 + 0.6 * layer / 3  # of 4 layers
        base, one, two = (t[name].astype("f8") for t in tensors)
        expected = base + 0.5 * (weight * (one - base) + 0.3 * (two - base))
        np.testing.assert_allclose(tensor.astype("f8"), expected, rtol=2.0**-8, atol=1e-6)
        assert tensor.dtype == ml_dtypes.bfloat16
    manifest = json.loads((tmp_path / "out" / "mckpt.json").read_text())["average"]
    assert manifest["method"] == "task_arithmetic" and len(manifest["inputs"]) == 3
    mckpt.merge([], tmp_path / "again", recipe=file)
    assert not mckpt.diff(tmp_path / "out", tmp_path / "again")


SLERP = """\
merge_method: slerp
base_model: {1}
slices:
  - sources:
      - model: {0}
        layer_range: [0, 4]
      - model: {1}
        layer_range: [0, 4]
parameters:
  t: 0.3
"""


def test_the_base_model_of_a_recipe_comes_first(tmp_path: Path) -> None:
    inputs = models(tmp_path)
    good("merge", "--recipe", recipe(tmp_path / "r.yaml", SLERP, inputs), tmp_path / "out")
    merge([inputs[1], inputs[0]], tmp_path / "own", "slerp", {"t": 0.3}, None)
    assert not mckpt.diff(tmp_path / "out", tmp_path / "own")


def test_a_recipe_leaves_the_rescaling_of_dare_out(tmp_path: Path) -> None:
    inputs = models(tmp_path)
    text = "merge_method: dare_linear\nbase_model: {0}\nmodels: [{{model: {1}}}]\n"
    text += "parameters: {{density: 0.3, rescale: false, int8_mask: true}}\n"
    good("merge", "--recipe", recipe(tmp_path / "r.yaml", text, inputs), tmp_path / "out")
    merge(inputs[:2], tmp_path / "own", "dare_linear", {"density": 0.3, "rescale": 0}, None)
    assert not mckpt.diff(tmp_path / "out", tmp_path / "own")


def test_the_arithmetic_of_mergekit_is_refused_for_models_that_it_would_cast(
    tmp_path: Path,
) -> None:
    inputs = models(tmp_path)
    text = "merge_method: linear\ndtype: bfloat16\nmodels: [{{model: {0}}}, {{model: {1}}}]\n"
    file = recipe(tmp_path / "r.yaml", text, inputs)
    with pytest.raises(UsageError, match="have float32, and the recipe casts them to bfloat16"):
        mckpt.merge([], tmp_path / "out", recipe=file, arithmetic="mergekit")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("merge_method: slerp", "merge_method: sce", "r.yaml:1: merge_method: 'sce'"),
        ("  t: 0.3", "  t: 0.3\n  eps: 2", "r.yaml:11: eps: slerp has the parameters t"),
        ("  t: 0.3", "  t: [{{filter: mlp, value: 1}}]", "r.yaml:10: t: .*without filters"),
        ("base_model: {1}", "chat_template: auto", "r.yaml:2: chat_template"),
        ("base_model: {1}\n", "", "r.yaml:1: slerp: needs base_model"),
        ("[0, 4]", "[0, 3]", "r.yaml:.: layer_range: ends at 3, and the models have 4"),
        ("[0, 4]", "[1, 4]", "r.yaml:.: layer_range: starts at 1"),
        ("parameters:", "dtype: int8\nparameters:", "r.yaml:9: dtype: 'int8'"),
        ("parameters:", "tokenizer_source: union\nparameters:", "r.yaml:9: tokenizer_source"),
        ("model: {0}", "model: {0}+lora", "r.yaml:5: model: give the path"),
        ("[0, 4]", "0-4", "r.yaml:.: layer_range: wants layer_range"),
        ("[0, 4]", "[0, 1000000000000]", "r.yaml:.: layer_range: num_layers is 1000000000000"),
        (
            SLERP,
            "slices: [{{sources: union}}]\nmerge_method: ties",
            "r.yaml:1: slices: must be a list",
        ),
        (SLERP, "models: [{{}}]\nmerge_method: ties", "model: give the path of a checkpoint"),
        (SLERP, "- untie", "a recipe has keys, such as merge_method: linear"),
        (SLERP, "models: [", "r.yaml: while parsing"),
    ],
)
def test_what_a_recipe_cannot_have_is_refused_with_its_line(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    inputs = models(tmp_path)
    file = recipe(tmp_path / "r.yaml", SLERP.replace(old, new), inputs)
    with pytest.raises(UsageError, match=words):
        mckpt.merge([], tmp_path / "out", recipe=file)
    assert not (tmp_path / "out").exists()


def test_wrong_methods_and_parameters_are_refused(tmp_path: Path) -> None:
    inputs = models(tmp_path)
    out, two = tmp_path / "out", [str(one) for one in inputs[:2]]

    def wrong(words: str, sources: Any = two, **options: Any) -> None:
        with pytest.raises(UsageError, match=words):
            mckpt.merge(sources, out, **options)

    wrong("slerp: merges 2 models, and 3", inputs, method="slerp", parameters={"t": 0.5})
    wrong("slerp: give its parameter t", method="slerp")
    wrong("merges at least 1 models beside the base", inputs[:1], method="ties")
    wrong("at least 2 models beside the base model, and 1", method="model_stock")
    for density in (0, 1.5, float("nan")):
        wrong("density is .* in \\(0, 1\\]", method="ties", parameters={"density": density})
    wrong("seed is -1", method="dare_ties", parameters={"seed": -1})
    wrong("t: ties has the parameters", method="ties", parameters={"t": 1})
    wrong("weights has 2 numbers, and 1", method="ties", weights=[1, 2])
    wrong("not ties", method="ties", arithmetic="mergekit")
    wrong("give it as well", arithmetic="mergekit")
    wrong("normalize is a list", method="ties", parameters={"normalize": [0, 1]})
    wrong("is of sums", method="ties", schedule="linear")
    wrong("give NAME=VALUE", method="ties", parameters="density")
    wrong("sum of the weights is 0", method="linear", weights=[1, -1])
    wrong("names the checkpoints", recipe=tmp_path / "r.yaml")
    other = tiny.tiny_random("qwen3", tmp_path / "other", "float32", num_hidden_layers=2)
    with pytest.raises(MappingError, match="num_layers: 2, and 4"):
        mckpt.merge([inputs[0], other], out, method="ties")
    refused(2, "give the checkpoints", args=("merge", out), untouched=None)
    assert not out.exists()


def test_the_plan_prints_the_formula(tmp_path: Path) -> None:
    inputs = models(tmp_path)
    said = good(
        *("merge", *inputs, tmp_path / "out", "--method", "ties"),
        *("--parameters", "density=0.5,lambda=1.2", "--weights", "0.5,0.7", "--dry-run"),
    )
    assert "formula: ties (normalize 1, lambda 1.2, weight 0.5 0.7, density 0.5)" in said.out
    assert not (tmp_path / "out").exists()


PASSTHROUGH = """\
merge_method: passthrough
slices:
  - sources:
      - model: {0}
        layer_range: [0, 3]
  - sources:
      - model: {1}
        layer_range: [1, 4]
  - sources:
      - model: {0}
        layer_range: [2, 3]
  - sources:
      - model: {2}
        layer_range: [3, 4]
dtype: {{dtype}}
"""
ORDER = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (0, 2), (2, 3)]


def test_passthrough_takes_each_layer_from_its_model(tmp_path: Path) -> None:
    """Before the layers, the tensors are those of the first model, and behind them of the last."""
    inputs = models(tmp_path, "bfloat16")
    held = [loaded(one) for one in inputs]
    mckpt.convert(inputs[1], tmp_path / "megatron", tp=2, pp=2)
    mixed = [inputs[0], tmp_path / "megatron", inputs[2]]
    file = recipe(tmp_path / "r.yaml", PASSTHROUGH.replace("{{dtype}}", "bfloat16"), mixed)
    said = good("merge", "--recipe", file, tmp_path / "out")
    assert "kept: 8 layers of 3 models" in said.err
    found = loaded(tmp_path / "out")
    expected = {
        name: held[0 if "embed" in name else 2][name] for name in held[0] if ".layers." not in name
    }
    for new, (model, old) in enumerate(ORDER):
        start = f"model.layers.{old}."
        own = (name for name in held[0] if name.startswith(start))
        expected |= {n.replace(start, f"model.layers.{new}."): held[model][n] for n in own}
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 8
    good("merge", "--recipe", file, tmp_path / "parallel", "--format", "torch_dist", "--tp", "2")
    assert not mckpt.diff(tmp_path / "out", tmp_path / "parallel")
    args = ("verify", inputs[0], tmp_path / "out", "--contract", "--level", "bytes")
    args += ("--with", mixed[1], "--with", inputs[2])
    assert f"{len(found)} logical tensors are equal to the last bit" in good(*args).out
    refused(2, "give it with --with", args=args[:-2])
    assert run(*args[:-1], inputs[1]).code == 1  # layers of another model
    name = "model.layers.6.mlp.down_proj.weight"  # layer 2 of the first model
    file = tmp_path / "out" / "model.safetensors"
    raw, (header, data) = bytearray(file.read_bytes()), shard(file)
    raw[len(raw) - len(data) + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(raw)
    said = run(*args)
    assert said.code == 1 and "layers.6.mlp.down.weight: 1 element differs" in said.out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[1, 4]", "[1, 5]", "layers: 4 of 4 layers"),
        ("[1, 4]", "[4, 1]", "r.yaml:8: layer_range: wants"),
        ("        layer_range: [2, 3]\n", "", "r.yaml:10: model: wants layer_range"),
        ("dtype:", "parameters: {{scale: 2}}\ndtype:", "r.yaml:15: parameters"),
        ("dtype:", "base_model: {1}\ndtype:", "r.yaml:15: base_model: config"),
        ("      - model: {2}", "      - model: {0}\n      - model: {2}", "one source"),
    ],
)
def test_what_passthrough_cannot_have_is_refused(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    text = PASSTHROUGH.replace(old, new).replace("{{dtype}}", "bfloat16")
    file = recipe(tmp_path / "r.yaml", text, models(tmp_path, "bfloat16"))
    with pytest.raises(UsageError, match=words):
        mckpt.merge([], tmp_path / "out", recipe=file)
    assert not (tmp_path / "out").exists()


# ---- mergekit


def by_mergekit(text: str, out: Path) -> Tensors:
    """Returns the tensors that mergekit merges by a recipe."""
    file = out.with_suffix(".yaml")
    file.write_text(text)
    command = [MERGEKIT, "-m", "mergekit.scripts.run_yaml", str(file), str(out)]
    command += ["--no-copy-tokenizer", "--no-write-model-card"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert ran.returncode == 0, ran.stderr
    return loaded(out)


def text_of(
    method: str, inputs: Sequence[Path], dtype: str, own: Sequence[float] | None = None
) -> str:
    """Returns the recipe of a case, or the same with other weights."""
    parameters, count, weights, _ = CASES[method]
    weights = own or weights
    based = method not in ("linear", "multislerp", "karcher")
    delta = based and method != "slerp"
    lines = [f"merge_method: {method}", f"dtype: {dtype}", "models:"]
    lines[2:2] = [f"base_model: {inputs[0]}"] if based else []
    numbers = iter(weights or ())
    for number, path in enumerate(inputs[:count]):
        lines.append(f"  - model: {path}")
        if weights and not (delta and number == 0):
            lines.append(f"    parameters: {{weight: {next(numbers)}}}")
    return "\n".join([*lines, f"parameters: {json.dumps(parameters)}"])


@pytest.mark.slow
@pytest.mark.skipif(not MERGEKIT, reason="MERGEKIT_PYTHON names no Python with mergekit")
@pytest.mark.parametrize("method", CASES)
def test_mergekit_computes_the_same_in_float32(method: str, tmp_path: Path) -> None:
    inputs = models(tmp_path)
    text = text_of(method, inputs, "float32")
    expected = by_mergekit(text, tmp_path / "theirs")
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    mckpt.merge([], tmp_path / "ours", recipe=file)
    found = loaded(tmp_path / "ours")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # mergekit ends the search for the mean where a step is shorter than 1e-5
        atol = 5e-5 if method == "karcher" else 2e-6
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(not MERGEKIT, reason="MERGEKIT_PYTHON names no Python with mergekit")
def test_passthrough_has_the_bits_of_mergekit(tmp_path: Path) -> None:
    """The models are Llamas, because mergekit writes a config.json for Qwen3 that transformers 5
    refuses.
    """
    model = tiny.tiny_random("llama", tmp_path / "model", "bfloat16")
    inputs = [noisy(model, tmp_path / f"llama{seed}", seed) for seed in range(3)]
    text = PASSTHROUGH.replace("{{dtype}}", "bfloat16")
    expected = by_mergekit(text.format(*inputs), tmp_path / "theirs")
    mckpt.merge([], tmp_path / "ours", recipe=recipe(tmp_path / "r.yaml", text, inputs))
    found = loaded(tmp_path / "ours")
    assert found.keys() == expected.keys()
    assert {n for n, t in found.items() if t.tobytes() != expected[n].tobytes()} == set()


@pytest.mark.slow
@pytest.mark.skipif(not MERGEKIT, reason="MERGEKIT_PYTHON names no Python with mergekit")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
def test_the_arithmetic_of_mergekit_has_its_bits(method: str, dtype: str, tmp_path: Path) -> None:
    inputs = models(tmp_path, dtype)
    weights = (0.4, 0.9, 0.6)[: 3 if method == "linear" else 2]  # none is one of bfloat16
    text = text_of(method, inputs, dtype, weights)
    expected = by_mergekit(text, tmp_path / "theirs")
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    mckpt.merge([], tmp_path / "ours", recipe=file, arithmetic="mergekit")
    found = loaded(tmp_path / "ours")
    assert {n for n, t in found.items() if t.tobytes() != expected[n].tobytes()} == set()
    # and it is needed
    mckpt.merge([], tmp_path / "better", recipe=file)
    better = loaded(tmp_path / "better")
    if (method, dtype) != ("linear", "bfloat16"):
        assert {n for n, t in better.items() if t.tobytes() != expected[n].tobytes()}
