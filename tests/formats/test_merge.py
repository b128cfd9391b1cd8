"""Weighted sums of checkpoints: each bit beside exact fractions and torch, in all formats."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.editing import schedules
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.values.dtypes import numpy_dtype
from mckpt.values.summing import add, inexact, total_of
from tests.helpers import made_models, tiny
from tests.helpers.commands import mckpt as command


def rounded(value: Fraction) -> np.float32:
    """Returns the float32 nearest to a fraction, of two the one with an even last bit."""
    near = np.float32(float(value))
    options = [
        np.nextafter(near, np.float32(-np.inf)),
        near,
        np.nextafter(near, np.float32(np.inf)),
    ]
    return min(options, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view("u4")) & 1))


def test_a_fused_multiply_add_has_one_rounding() -> None:
    import torch

    drawn = np.random.default_rng(0)
    total = drawn.standard_normal(3000).astype("f4")
    values = drawn.standard_normal(3000).astype("f4")
    # sums in the middle of two float32, but for a part that float64 cannot hold
    total[:1000] = np.float32(1.0) + drawn.integers(0, 1 << 20, 1000).astype("f4") * np.float32(
        2**-23
    )
    values[:1000] = np.float32(2**-24) * (1 + drawn.choice([-1, 0, 1], 1000) * np.float32(2**-23))
    total[1000:1500] *= np.float32(2.0**-140)  # subnormal
    values[1000:1500] *= np.float32(2.0**-139)
    for coefficient in (1.0, float(np.float32(0.3)), float(np.float32(1 + 2**-23)), -0.75):
        found = total.copy()
        add(found[None], values[None], coefficient)
        exact = [
            rounded(Fraction(float(t)) + Fraction(float(v)) * Fraction(coefficient))
            for t, v in zip(total, values, strict=True)
        ]
        assert found.tobytes() == np.array(exact, "f4").tobytes()
        alone = np.zeros_like(total)
        add(alone[None], values[None], coefficient, first=True)
        products = [rounded(Fraction(float(v)) * Fraction(coefficient)) for v in values]
        assert np.array_equal(alone, np.array(products, "f4"))
        assert found.tobytes() == (
            torch.from_numpy(total.copy()).add_(torch.from_numpy(values), alpha=coefficient)
        ).numpy().tobytes() or not torch.backends.cpu.get_cpu_capability().startswith("AVX")


@pytest.mark.parametrize(
    "weights",
    [(0.1, 0.2, 0.3, 0.4), (1.0, 10475530 / 2**24), (1.0, -2.5, 1e-9), (0.5, 0.25), (0.3,)],
)
def test_sums_of_bfloat16_have_the_bits_of_fused_multiply_adds(weights: tuple[float, ...]) -> None:
    """Most are computed together in float64; those that it would round twice are not. Where only
    the rounded sums count, most are computed in float32.
    """
    drawn = np.random.default_rng(0)
    coefficients, size = [float(np.float32(w)) for w in weights], (len(weights), 20_000)
    normal = (drawn.standard_t(2, size) * 0.02).astype("f4").view("u4") >> 16
    # 1 + 2**-24 * (1 + 2**-30) with the second weights; float64 has no bit for the last part
    normal[:2, 0] = (np.array([1, 205 * 2.0**-31], "f4").view("u4") >> 16)[: len(weights)]
    alone = np.zeros_like(normal)
    alone[:, 0] = normal[:, 0]
    far = drawn.choice([58, 90, 120, 170], size) << 7 | drawn.choice([0, 1, 127, 85], size)
    far |= drawn.choice([0, 1 << 15], size)
    anything = drawn.integers(0, 1 << 16, size)
    zeros = np.where(drawn.random(size) < 0.3, drawn.choice([0, 1 << 15], size), normal)
    steps = drawn.integers(-400, 400, size).astype("f4").view("u4") >> 16
    near = np.where(np.arange(len(weights))[:, None] == 1, normal ^ (1 << 15), normal)
    for bits in (normal, alone, far, anything, zeros, far % 128, steps, near):
        values = bits.astype("u2").view(numpy_dtype("bfloat16"))
        total = np.full((1, size[1]), 0.0 if len(weights) > 1 else -0.0, "f4")
        with np.errstate(all="ignore"):
            for number, coefficient in enumerate(coefficients):
                row = values[number, None].astype("f4")
                add(total, row, coefficient, first=number == 0)
            found = total_of(values, coefficients).copy()
            wanted, quick = (
                sums.astype(values.dtype)
                for sums in (total[0], total_of(values, coefficients, rounded=True))
            )
        assert np.array_equal(quick.astype("f4"), wanted.astype("f4"), equal_nan=True)
        assert np.array_equal(
            np.signbit(quick)[~np.isnan(quick)], np.signbit(wanted)[~np.isnan(wanted)]
        )
        assert np.array_equal(found, total[0], equal_nan=True)
        number = ~np.isnan(found)
        assert np.array_equal(found.view("u4")[number], total[0].view("u4")[number])
    few = inexact(normal.astype("u2").view(numpy_dtype("bfloat16")), coefficients)
    assert len(weights) != 4 or 0 < few.size < 100


def noisy(source: Path, directory: Path, seed: int) -> Path:
    """Returns a copy of a Hugging Face directory with other values."""
    shutil.copytree(source, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        # copies of one tensor stay equal
        drawn = np.random.default_rng([seed, zlib.crc32(tensor.tobytes())])
        noise = drawn.standard_normal(tensor.shape).astype("f4") * np.float32(0.1)
        tensors[name] = (tensor.astype("f4") + noise).astype(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def summed(directories: Iterable[Path], coefficients: Iterable[float]) -> dict[str, np.ndarray]:
    """Returns the sums as torch computes them, as Megatron-LM's weighted_merge.py does."""
    import torch
    from safetensors.torch import load_file as load

    total: dict[str, torch.Tensor] = {}
    for directory, coefficient in zip(directories, coefficients, strict=True):
        loaded = load(directory / "model.safetensors")
        kinds = {name: tensor.dtype for name, tensor in loaded.items()}
        for name, tensor in loaded.items():
            one = total.setdefault(name, torch.zeros(tensor.shape))
            one.add_(tensor.float(), alpha=coefficient)
    return {
        name: tensor.to(kinds[name]).contiguous().view(torch.uint8).numpy()
        for name, tensor in total.items()
    }


# dense and tied, experts, latent attention, a hybrid, gated delta nets, GPT-2's transposed linears,
# and norms that Megatron stores less 1
CASES = ("qwen3-tied", "qwen3-moe", "deepseek-v3", "nemotron_h", "qwen3_next", "gpt2", "gemma")


@pytest.mark.parametrize("case", CASES)
def test_inputs_of_all_formats_give_the_bits_of_torch(case: str, tmp_path: Path) -> None:
    if case in tiny.CASES:
        model = tiny.tiny_random(case, tmp_path / "model")
    else:
        made_models.make([case], tmp_path)
        model = tmp_path / case
    hf = [noisy(model, tmp_path / f"hf{seed}", seed) for seed in range(3)]
    coefficients = [0.7, -0.3, 0.6]
    expected = summed(hf, coefficients)
    dist, torch_files = tmp_path / "dist", tmp_path / "torch"
    accepted = ("activation",) if case == "gemma" else ()
    experts = bool(mckpt.open(model).dims["num_experts"])
    wide = Parallel(tp=2, ep=2, etp=1) if experts else Parallel(tp=2)
    mckpt.convert(hf[1], dist, parallel=wide, allow_inexact=accepted)
    mckpt.convert(
        hf[2], torch_files, format="torch", parallel=Parallel(pp=2), allow_inexact=accepted
    )
    for number, sources in enumerate((hf, [hf[0], dist, torch_files])):
        out = tmp_path / f"out{number}"
        mckpt.merge(sources, out, weights=coefficients)
        found = load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
        assert [n for n, t in found.items() if t.tobytes() != expected[n].tobytes()] == []
    made = tmp_path / "made"
    mckpt.merge([hf[0], dist, torch_files], made, weights=coefficients, base=1, tp=2, pp=2)
    if case != "gemma":  # rounded once as it is stored, without the 1
        assert not mckpt.diff(out, made)


def test_the_iterations_of_a_run_are_chosen_and_weighted(tmp_path: Path) -> None:
    model = tiny.tiny_random("qwen3", tmp_path / "model")
    run, hf = tmp_path / "run", list[Path]()
    for number in range(4):
        hf.append(noisy(model, tmp_path / f"hf{number}", number))
        mckpt.convert(hf[-1], run, target_iteration=100 * (number + 1), tp=2)
    said = command("merge", run, tmp_path / "out", "--schedule", "minus-sqrt", "--start", "150")
    assert said.code == 0, said.err
    # 1 - sqrt(i / 3) is left at the three iterations
    left = [1.0, 1.0 - (1 / 3) ** 0.5, 1.0 - (2 / 3) ** 0.5]
    coefficients = [left[0] - left[1], left[1] - left[2], left[2]]
    expected = summed(hf[1:], coefficients)
    out = mckpt.open(tmp_path / "out")
    assert out.path.name == "out" and out.parallel.tp == 2 and out.files.iteration == 400
    mckpt.convert(tmp_path / "out", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert [n for n, t in found.items() if t.tobytes() != expected[n].tobytes()] == []
    averaged = out.files.manifest["average"]
    assert [one["iteration"] for one in averaged["inputs"]] == [200, 300, 400]
    assert [float.fromhex(one["coefficient"]) for one in averaged["inputs"]] == coefficients
    verdict = command("verify", run, tmp_path / "out", "--contract")
    assert verdict.code == 0 and "computed again by other code" in verdict.out, verdict.out
    # the same command again finds its output; other coefficients are refused
    again = command("merge", run, tmp_path / "out", "--schedule", "minus-sqrt", "--start", "150")
    assert again.code == 0 and "already" in again.out + again.err
    other = command("merge", run, tmp_path / "out", "--schedule", "linear", "--start", "150")
    assert other.code == 6, other.err


def test_iterations_in_a_window() -> None:
    iterations = [10, 20, 30, 45, 50]
    assert schedules.in_window(iterations, start=20, end=45) == [20, 30, 45]
    # 2e9 tokens are 20 iterations of 1e8
    assert schedules.in_window(iterations, window=2.0, tokens=10**8) == [30, 45, 50]
    assert schedules.in_window(iterations, interval=15) == [10, 30, 50]
    assert schedules.tokens_of({"seq_length": 4096, "global_batch_size": 8}) == 32768
    with pytest.raises(UsageError, match="seq_length"):
        schedules.in_window(iterations, window=2.0)
    with pytest.raises(UsageError, match="no iteration is left"):
        schedules.in_window(iterations, start=60)


@pytest.mark.parametrize("schedule", schedules.DECAYS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_coefficients_are_the_decrease_of_the_schedule(schedule: str, count: int) -> None:
    found = schedules.coefficients(schedule, count)
    assert sum(found) == pytest.approx(1.0) and len(found) == count
    assert schedules.coefficients(schedule, count, reverse=True) == found[::-1]
    for first in range(count):  # the part of the learning rate that is left from here on
        share = first / count
        left = 1 - share if schedule == "linear" else 1 - share**0.5
        assert sum(found[first:]) == pytest.approx(left)


def test_what_cannot_be_summed_is_refused(tmp_path: Path) -> None:
    model = tiny.tiny_random("qwen3", tmp_path / "model")
    other = tiny.tiny_random("qwen3", tmp_path / "other", num_hidden_layers=2)
    out = tmp_path / "out"
    with pytest.raises(MappingError, match="num_layers: 2, and 4"):
        mckpt.merge([model, other], out)
    with pytest.raises(UsageError, match="1 numbers, and 2"):
        mckpt.merge([model, model], out, weights=[1.0])
    with pytest.raises(UsageError, match="finite"):
        mckpt.merge([model, model], out, weights=[1.0, float("nan")])
    with pytest.raises(UsageError, match="not both"):
        mckpt.merge([model, model], out, weights=[0.5, 0.5], schedule="linear")
    with pytest.raises(UsageError, match="master copies"):
        mckpt.merge([model, model], out, summed="masters")
    mckpt.convert(model, tmp_path / "megatron")
    with pytest.raises(UsageError, match="master copies"):
        mckpt.merge([tmp_path / "megatron"] * 2, out, summed="masters")
    short = noisy(model, tmp_path / "short", 1)
    tensors = load_file(short / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, short / "model.safetensors")
    for inputs in ([model, short], [short, model]):
        with pytest.raises(SourceError, match=r"up_proj|mlp\.up"):
            mckpt.merge(inputs, out)
    quantised = tmp_path / "fp8"
    mckpt.convert(tmp_path / "megatron", quantised, format="hf", quantize="fp8")
    with pytest.raises(UsageError, match="stored quantised"):
        mckpt.merge([model, quantised], out)
    assert not out.exists()
