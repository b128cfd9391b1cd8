"""The verdict on the stored values: copies, casts, padding, and results that it must call
incomplete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import SourceOptions
from mckpt.verification.verdict import compare_values
from tests.helpers import commands, tiny
from tests.helpers.lazy import torch
from tests.helpers.tiny import TinyModel
from tests.judge.test_verify import low_bit

pytestmark = pytest.mark.judge


def test_copies_of_one_tensor_must_agree(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Every rank of ep holds the output layer, and the logits come from only one of them."""
    source = tiny_model("qwen3-moe")
    mckpt.plan(
        source,
        tmp_path / "megatron",
        format="torch",
        parallel=mckpt.Parallel(ep=2),
        transformer_impl="local",
    ).run()
    path = tmp_path / "megatron" / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    saved["model"]["output_layer.weight"].zero_()
    torch.save(saved, path)
    commands.restate(path)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.exit_code == 1 and "lm_head.weight: its copy in" in found.reasons[0]
    right = Checkpoint.open(tmp_path / "megatron", SourceOptions(like=source))
    assert (
        compare_values(Checkpoint.open(source), right).difference.replicas
        == found.reasons
        == [f"{tmp_path / 'megatron'}: {text}" for text in right.reader.check_replicas()]
    )


def test_a_cast_passes_only_where_it_is_exact(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The manifest names the cast, and each value must be exactly that cast of the
    source's value.
    """
    source = tiny_model("deepseek-v3", "float32")
    mckpt.plan(source, tmp_path / "bf16", dtype="bf16", parallel=mckpt.Parallel(tp=2)).run()
    mckpt.plan(
        tmp_path / "bf16", tmp_path / "again", parallel=mckpt.Parallel(pp=2), format="torch"
    ).run()
    mckpt.plan(tmp_path / "again", tmp_path / "fp32", format="hf", dtype="fp32").run()
    for other in ("bf16", "again", "fp32"):
        for pair in ((source, tmp_path / other), (tmp_path / other, source)):
            found = mckpt.verify(*pair, level="bytes")
            assert (found.verdict, found.reasons) == ("pass", []), other
            assert found.facts["values"]["equal_after_cast"] > 100
    assert (
        mckpt.verify(tmp_path / "bf16", tmp_path / "again", level="bytes").facts["values"][
            "equal_after_cast"
        ]
        == 0
    )
    (path,) = (tmp_path / "again").glob("release/mp_rank_00_000/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    low_bit(saved["model"], saved["args"])
    torch.save(saved, path)
    commands.restate(path)
    found = mckpt.verify(source, tmp_path / "again", level="bytes")
    assert [reason.split(",")[0] for reason in found.reasons[1:]] == [
        "embed.weight: 1 element differs"
    ], "and the copy of the last stage"
    (tmp_path / "bf16" / "release" / "mckpt.json").unlink()
    found = mckpt.verify(source, tmp_path / "bf16", level="bytes")
    assert found.verdict == "fail" and "dtype float32 against bfloat16" in found.reasons[0], (
        "nothing names the cast"
    )


def test_copies_in_a_hugging_face_directory_must_agree(tmp_path: Path) -> None:
    """Multi-token prediction keeps copies of the embedding and of the output layer, which no
    forward pass of transformers uses.
    """
    source = tiny.tiny_random("deepseek-v3", tmp_path / "hf")
    mckpt.plan(source, tmp_path / "megatron").run()
    weights = tiny.tensors(tiny.config("deepseek-v3"))
    (name,) = [key for key in weights if key.endswith(".embed_tokens.weight") and ".layers." in key]
    weights[name] = weights[name] * 2
    tiny.write_weights(source, weights)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.verdict == "fail" and "embed.weight: its copy in" in found.reasons[0], (
        found.reasons
    )
    assert mckpt.diff(source, tmp_path / "megatron").replicas


def test_a_difference_that_was_allowed_makes_the_verdict_incomplete(tmp_path: Path) -> None:
    """The verdict is INCOMPLETE, and FAIL if an arg is not the one that the conversion wrote."""
    gemma = {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
    source = tiny.tiny_random("llama", tmp_path / "hf", **gemma)
    mckpt.plan(source, tmp_path / "megatron", format="torch", allow_inexact=["activation"]).run()
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.verdict == "incomplete" and found.reasons[0].startswith(
        "activation: the config says gelu_tanh, and the args mean silu"
    )
    (path,) = (tmp_path / "megatron").glob("release/mp_rank_*/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    saved["args"].swiglu, saved["args"].quick_geglu = False, True
    torch.save(saved, path)
    commands.restate(path)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.verdict == "fail" and "activation" in found.reasons[0], found.reasons


def test_values_that_a_cast_made_infinite_make_the_verdict_incomplete(tmp_path: Path) -> None:
    source = tiny.tiny_random("llama", tmp_path / "hf")
    weights = tiny.tensors(tiny.config("llama"))
    weights["model.norm.weight"][3] = 1e6
    tiny.write_weights(source, weights)
    mckpt.plan(source, tmp_path / "megatron", dtype="fp16").run(allow_overflow=True)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert (found.verdict, found.reasons) == (
        "incomplete",
        ["final_norm.weight: 1 value became infinite in the cast to float16"],
    )


def test_padding_that_is_not_zero_fails(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The rows of padding must be zero, because the softmax of a training run includes them."""
    source = tiny_model("llama")
    mckpt.plan(source, tmp_path / "megatron", format="torch").run()
    (path,) = (tmp_path / "megatron").glob("release/mp_rank_*/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    saved["model"]["output_layer.weight"][-1] = 50
    torch.save(saved, path)
    commands.restate(path)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert (
        found.verdict == "fail"
        and "output_layer.weight: 1 row beyond the vocabulary is not zero" in found.reasons[0]
    )


def test_dropped_weights_make_the_verdict_incomplete(tmp_path: Path) -> None:
    source = tiny.tiny_random("qwen3", tmp_path / "hf")
    family = tmp_path / "less.yaml"
    family.write_text(
        "extends: qwen3\narchitectures: [Qwen3ForCausalLM]\n"
        'drop:\n  "model.layers.{layer}.extra.weight": it is left out here\n'
    )
    weights = tiny.tensors(tiny.config("qwen3"))
    weights |= {
        f"model.layers.{layer}.extra.weight": weights["model.norm.weight"] for layer in range(4)
    }
    tiny.write_weights(source, weights)
    mckpt.plan(
        mckpt.Checkpoint.open(source, SourceOptions(mapping=str(family))), tmp_path / "megatron"
    ).run()
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes", mapping=str(family))
    assert (
        found.verdict == "incomplete"
        and "drops 4 weights" in found.reasons[0]
        and "layers.0.extra.weight" in found.reasons[0]
    )
    said = commands.mckpt(
        "diff", source, tmp_path / "megatron", "--mapping", family, "--like", source
    )
    assert said.code == 1 and "the same" not in said.out and "4 dropped" in said.out, said.out


def test_the_card_of_a_verdict(src: Path, torch_dir: Path, tmp_path: Path) -> None:
    """Its hashes are those that the command in its first lines prints."""
    card = tmp_path / "card.yaml"
    commands.good("verify", src, torch_dir, "--level", "bytes", "--card", card)
    text = card.read_text()
    found = yaml.safe_load(text)
    assert found["verdict"] == "pass" and found["reasons"] == []
    assert found["values"]["tensors_equal"] == len(mckpt.open(src))
    sides = found["checkpoints"]
    assert sides["megatron"]["parallel"] == "tp 2, pp 2" and sides["hf"]["name"] == src.name
    command = next(line[1:] for line in text.splitlines() if "sha256sum" in line)
    for side, folder in (("hf", src), ("megatron", torch_dir / "release")):
        printed = commands.run(["bash", "-c", command], cwd=folder).stdout.split()[0]
        assert sides[side]["sha256"] == printed
    other = tmp_path / "other"
    shutil.copytree(src, other)
    flip = other / "model.safetensors"
    flip.write_bytes(flip.read_bytes()[:-1] + b"\1")
    said = commands.mckpt("verify", other, torch_dir, "--level", "bytes", "--card", card)
    found = yaml.safe_load(card.read_text())
    assert said.code == 1 and found["verdict"] == "fail" and found["reasons"]
    assert found["checkpoints"]["hf"]["sha256"] != sides["hf"]["sha256"]
    nowhere = tmp_path / "no" / "card.yaml"
    args = ("verify", src, torch_dir, "--level", "bytes", "--card", nowhere)
    commands.refused(2, "cannot be written", args=args)
