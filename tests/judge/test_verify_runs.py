"""The runs of the verdict: their tokens, sizes, noise and coverage, and the runs that train."""

from __future__ import annotations

import json
import random
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import launching
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import VerifyOptions
from mckpt.verification import measuring, verdict
from mckpt.verification.levels import other_sizes, verify_all
from mckpt.verification.tokens import read_tokens
from mckpt.verification.verdict import CLEAN, FAULT
from tests.formats.test_quantised_checkpoints import tiny_quantised
from tests.helpers import commands, tiny
from tests.helpers.tiny import TinyModel

pytestmark = [pytest.mark.judge, pytest.mark.newest]


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama4", marks=pytest.mark.slow)])
def test_a_model_of_an_unusual_class_is_verified(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """GPT-2 has no linear layers of torch's class and other names of norms. The router of Llama 4
    gives weights of all experts, and its experts one axis less.
    """
    source = tiny_model(case, "float32")
    mckpt.plan(source, tmp_path / "out").run()
    options = VerifyOptions(device="cpu", sequences=1, length=64)
    (found,) = verify_all(source, [tmp_path / "out"], options)
    assert (found.verdict, found.reasons) == ("pass", [])
    # the embedding is compared where learned positions are in it
    first = found.facts["points"][0]
    assert first["point"] == "embed" and first["difference"] <= first["tolerance"]


@pytest.mark.usefixtures("forked_verify")
def test_logits_agree_when_the_hugging_face_side_was_cast(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Megatron checkpoint in fp32 was exported in bfloat16: Megatron-Core runs with its weights
    cast, and without that cast the logits differ.
    """
    megatron, exported = tmp_path / "megatron", tmp_path / "exported"
    mckpt.plan(tiny_model("deepseek-v3", "float32"), megatron).run()
    mckpt.plan(megatron, exported, format="hf", dtype="bf16").run()
    launch = launching.launch

    def without_the_second_cast(module: str, job: dict[str, Any], *others: Any) -> None:
        if module == "mckpt.trainer.worker":
            assert [one["casts"] for one in job["checkpoints"]] == [["bfloat16"]] * 2
            job["checkpoints"][1]["casts"] = []
        launch(module, job, *others)

    monkeypatch.setattr(launching, "launch", without_the_second_cast)
    options = VerifyOptions(device="cpu", sequences=1, length=64)
    cast, uncast = verify_all(exported, [megatron, megatron], options)
    assert (cast.verdict, cast.reasons) == ("pass", [])
    note = "Megatron-Core runs with its weights cast to bfloat16, as mckpt.json says"
    assert note in cast.facts["notes"]
    biases = sum(name.endswith("score_correction.bias") for name in Checkpoint.open(megatron))
    values = cast.facts["values"]
    assert biases > 0, "the mapping keeps these in fp32"
    assert values["equal_after_cast"] == values["tensors_equal"] - biases
    logits = uncast.facts["logits"]["float32"]
    assert uncast.verdict == "fail" and logits["max_abs"] > FAULT * logits["tolerance"]


def test_tokens_whose_experts_change_in_transformers_itself_are_left_out() -> None:
    class Kept(dict[str, np.ndarray]):
        files = property(lambda self: list(self))

    chosen = np.eye(4, dtype=bool)[[0, 1, 2, 3, 0]]
    other = chosen.copy()
    other[3] = chosen[2]
    steady = measuring.steady_positions
    changed = Kept(experts_0=chosen, noise_experts_0=other)
    assert steady(changed, 5).tolist() == [True, True, True, False, False]
    assert steady(Kept(experts_0=chosen, noise_experts_0=chosen), 5).all()
    assert measuring.too_far("float32", {"max_abs": float("nan"), "tolerance": 1.0}) is None


@pytest.mark.parametrize(("second", "kept"), [(1e-5, "second"), (0.5, "first")])
def test_a_suspicious_noise_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: float, kept: str
) -> None:
    """A noise a hundred times the usual one counts only if a second measurement finds it too."""
    from mckpt.trainer import reference

    found = [1.0, second]

    def base(model: Any, recorder: Any, tokens: list[int], out: Path, index: int) -> float:
        np.save(out / f"logits.{index}.npy", np.full((3, 4), 8.0, "f4"))
        np.savez(
            out / f"reference.{index}.npz", run=np.array("first" if len(found) == 2 else "second")
        )
        return 8.0

    monkeypatch.setattr(reference, "base", base)
    monkeypatch.setattr(reference, "noise", lambda *args: found.pop(0))
    base(None, None, [], tmp_path, 0)
    assert reference.measured_noise(None, None, [], tmp_path, 0) == [1.0, second]  # type: ignore[arg-type]
    with np.load(tmp_path / "reference.0.npz") as left:
        assert left["run"] == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.0.npy", "reference.0.npz"]
    found[:] = [1e-5]
    assert reference.measured_noise(None, None, [], tmp_path, 0) is None  # type: ignore[arg-type]


def test_an_expert_that_no_token_reaches_makes_the_verdict_incomplete(tmp_path: Path) -> None:
    """The verdict is INCOMPLETE, because the weights of that expert could be anything.

    The experts' width is not a multiple of 8, which grouped kernels refuse. The conversion casts to
    bfloat16, and transformers runs on the same cast.
    """
    width = {"moe_intermediate_size": 20}
    source = tiny.tiny_random(
        "qwen3-moe",
        tmp_path / "hf",
        "float32",
        num_experts_per_tok=1,
        norm_topk_prob=False,
        **width,
    )
    weights = tiny.tensors(
        {**tiny.config("qwen3-moe"), "num_experts_per_tok": 1, **width}, "float32"
    )
    weights["model.layers.2.mlp.gate.weight"][5] = 0  # one of the other 23 scores is above 0
    tiny.write_weights(source, weights)
    mckpt.plan(source, tmp_path / "megatron", format="torch_dist", dtype="bf16").run()
    command = [
        "verify",
        source,
        tmp_path / "megatron",
        "--ep",
        "2",
        "--device",
        "cpu",
        "--length",
        "64",
    ]
    said = commands.mckpt(*command, "--json", "--report", tmp_path / "report.html")
    assert said.code == 1, said.err
    found = json.loads(said.out)
    assert found["verdict"] == "incomplete", found["reasons"]
    assert found["values"]["equal_after_cast"] == found["values"]["tensors_equal"]
    assert found["coverage"]["experts"]["missing"] == {"2": [5]}
    assert "layer 2: 5" in found["reasons"][0]
    assert found["sizes"]["ep"] == found["ranks"] == 2
    assert "INCOMPLETE" in (tmp_path / "report.html").read_text()


LOGITS = {"noise": 1e-5, "spread": 1.0, "decisive": True, "probe": 1.0, "probe_above": 1e4}
FACTS = {
    "coverage": {"positions": {}},
    "logits": {"float32": LOGITS},
    "tokens": {"judged": 100, "positions": 100, "ties": 0},
}
WINDOW = {"window": 4096, "longest_sequence": 512, "exceeded": False}
WEAK_PROBE = {"noise": 0, "probe": 1e-4, "probe_above": 2.0}
NEAR = {"noise": 0, "probe_above": 99, "below": 1.92}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"coverage": {"window": WINDOW}}, "window of 4096"),
        (
            {"logits": {"bfloat16": {"noise": 0.4, "spread": 1.0, "decisive": False}}},
            "noise of bfloat16",
        ),
        ({"logits": {"float32": LOGITS | WEAK_PROBE}}, "could be missed"),
        ({"logits": {"float32": LOGITS | NEAR}}, "1/1.92 of the tolerance"),
        ({"tokens": {"judged": 10, "positions": 100, "ties": 3}}, "only 10 of 100"),
        (
            {"logits": {"float32": LOGITS, "float32, image": LOGITS | NEAR}},
            "logits (image) differ by 1/1.92",
        ),
        (
            {"image": {"judged": 9, "positions": 94, "ties": 3}},
            "only 9 of 94 positions of the sequence with the image",
        ),
    ],
)
def test_a_run_that_proves_too_little_is_incomplete(
    changes: dict[str, Any], why: str | None
) -> None:
    found = verdict.incomplete(FACTS | changes)
    assert len(found) == (why is not None)
    assert why is None or why in found[0]


def test_tokens_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('[1, 2, 3]\n{"tokens": [4, 5]}\n')
    assert read_tokens(path, 6) == [[1, 2, 3], [4, 5]]
    for text, rows in (
        ("[\n [1, 2],\n [3, 4]\n]", [[1, 2], [3, 4]]),
        ("[1, 2]", [[1, 2]]),
        ('{"tokens": [1, 2]}', [[1, 2]]),
    ):
        path.write_text(text)
        assert read_tokens(path, 6) == rows
    np.save(tmp_path / "tokens.npy", np.array([[1, 2], [3, 4]]))
    assert read_tokens(tmp_path / "tokens.npy", 6) == [[1, 2], [3, 4]]
    for wrong, why in (
        ("[1, 6]", "from 0 to 5"),
        ("[1]", "at least 2"),
        ("words", "expected one JSON list of token ids per line"),
        ('{"text": "a"}', "expected one JSON list of token ids per line"),
    ):
        path.write_text(wrong)
        with pytest.raises(mckpt.errors.UsageError, match=why):
            read_tokens(path, 6)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_second_run_has_other_parallel_sizes(num_ranks: int) -> None:
    dims = {
        "num_heads": 16,
        "num_query_groups": 8,
        "ffn_size": 160,
        "vocab_size": 256,
        "num_layers": 8,
        "num_experts": 24,
    }
    first = {"tp": num_ranks, "pp": 1, "vpp": 1, "ep": 1, "etp": num_ranks, "cp": 1}
    second = other_sizes(first, dims, {})
    assert launching.world(second) == max(2, num_ranks)
    assert second["tp"] != num_ranks or num_ranks == 1
    with pytest.raises(mckpt.errors.UsageError, match="no other sizes"):
        other_sizes(first, {**dims, "num_heads": 1, "num_layers": 1, "num_experts": 0}, {})


def test_a_port_that_is_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", launching.free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda ports, count: [port, port + 1, port + 2])
        assert launching.free_port() in (port + 1, port + 2)
        monkeypatch.setattr(random, "sample", lambda ports, count: [port])
        with pytest.raises(mckpt.errors.StorageError, match="no port"):
            launching.free_port()


QUICK = {"pp": 1, "sequences": 1, "length": 64, "steps": 2}
WHOLE = {"pp": 2}
SLOW = pytest.mark.slow


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.parametrize(
    ("case", "form", "options"),
    [
        pytest.param("llama", "torch", QUICK, id="llama, torch"),
        pytest.param("qwen3-moe", "torch", WHOLE, id="qwen3-moe, torch", marks=SLOW),
        pytest.param("qwen3-moe", "torch_dist", WHOLE, id="qwen3-moe, torch_dist", marks=SLOW),
    ],
)
def test_training_at_two_sizes_gives_the_same_losses(
    tiny_model: TinyModel, tmp_path: Path, case: str, form: str, options: dict[str, int]
) -> None:
    """`torch` files run at other sizes than those they were saved with, from a temporary copy."""
    source, megatron = tiny_model(case), tmp_path / "megatron"
    tp2 = mckpt.Parallel(tp=2)
    mckpt.plan(source, megatron, format=form, parallel=tp2, transformer_impl="local").run()
    found = mckpt.verify(source, megatron, level="train", tp=1, device="cpu", **options)
    assert (found.verdict, found.reasons, found.facts["level"]) == ("pass", [], "train")
    assert ("resharded" in found.facts) == (form == "torch")
    training = found.facts["training"]
    first, second = ((sizes["tp"], sizes["pp"]) for sizes in training["sizes"])
    assert first == (1, options["pp"]) != second
    assert [len(losses) for losses in training["losses"]] == [options.get("steps", 4)] * 2
    assert training["moved"] > 0 and training["max_abs"] <= training["tolerance"] / CLEAN


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.slow
def test_megatron_core_computes_the_logits_of_the_dequantised_values(tmp_path: Path) -> None:
    tiny_quantised("deepseek-v3", tmp_path / "hf", (16, 16))
    commands.good("hf-to-megatron", tmp_path / "hf", tmp_path / "megatron", "--tp", 2)
    said = commands.good("verify", tmp_path / "hf", tmp_path / "megatron").out
    assert "PASS" in said and "dequantised by mckpt" in said


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.slow  # docs/new-model.md, which is run each time, walks the same way once
@pytest.mark.parametrize("case", ["solar_open", "jais2"])
def test_from_an_unknown_architecture_to_a_verified_checkpoint(
    tiny_model: TinyModel, tmp_path: Path, case: str
) -> None:
    """The draft for a model whose class no family lists passes `verify` as it is."""
    hf, out, file = tmp_path / case, tmp_path / "megatron", tmp_path / "drafted.yaml"
    shutil.copytree(tiny_model(case, "float32"), hf)
    config = json.loads((hf / "config.json").read_text())
    config["architectures"] = [f"Our{config['architectures'][0]}"]
    (hf / "config.json").write_text(json.dumps(config))
    said = commands.refused(4, args=("hf-to-megatron", hf, out))
    assert "mappings new HF_DIR" in said
    text = commands.good("mappings", "new", hf).out
    file.write_text(text)
    assert len(text.splitlines()) < 60
    assert "every stored tensor has a rule" in commands.good("mappings", "check", file, hf).out
    commands.good("hf-to-megatron", hf, out, "--tp", 2, "--pp", 2, "--mapping", file)
    assert "PASS" in commands.good("verify", hf, out).out
