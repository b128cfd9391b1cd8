"""Layers of multi-token prediction that a conversion leaves out, and those that a training added to
a model which is published without any.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mckpt
from tests.helpers import tiny
from tests.helpers.commands import Pt, edit_json, good, refused

KEY = "num_nextn_predict_layers"
CASE = "deepseek-v3"
LEFT_OUT = "of multi-token prediction, which --no-mtp leaves out"


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def same(left: Path, right: Path, count: int) -> None:
    assert good("diff", left, right).out.startswith(
        f"the same to the last bit: {count} logical tensors equal, 0 differ"
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 with such a layer (`hf`), the same without (`plain`), and a Qwen3 (`qwen3`) to
    which a training added one (`trained`): no config.json has a key for it.
    """
    root = tmp_path_factory.mktemp("mtp")
    tiny.tiny_random(CASE, root / "hf")
    tensors = tiny.tensors(tiny.config(CASE))
    kept = tiny.decoder_only(tiny.config(CASE), tensors)
    (root / "plain").mkdir()
    tiny.write_weights(root / "plain", {name: tensors[name] for name in kept})
    tiny.write_json(root / "plain" / "config.json", {**tiny.config(CASE), KEY: 0})

    c = tiny.config("qwen3")
    layers, hidden = c["num_hidden_layers"], c["hidden_size"]
    tiny.tiny_random("qwen3", root / "qwen3")
    tensors = tiny.tensors(c)
    at, last = f"model.layers.{layers}.", f"model.layers.{layers - 1}."
    added = {at + k.removeprefix(last): v for k, v in tensors.items() if k.startswith(last)}
    shapes = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))
    for name, shape in {**shapes, "eh_proj": (hidden, 2 * hidden)}.items():
        added[f"{at}{name}.weight"] = tiny.values(name, shape).astype(
            tensors[f"{last}input_layernorm.weight"].dtype
        )
    shutil.copytree(root / "qwen3", root / "documented")
    for path in (root / "documented").glob("*.safetensors*"):
        path.unlink()
    tiny.write_weights(root / "documented", {**tensors, **added})
    edit_json(root / "documented" / "config.json", lambda c: c.update({KEY: 1}))
    good("hf-to-megatron", root / "documented", root / "trained", "--pp", 2)
    (root / "trained" / "release" / "mckpt.json").unlink()
    shutil.copy(root / "qwen3" / "config.json", root / "trained" / "hf" / "config.json")
    return root


def test_a_model_without_its_layers_is_verified_without_them(work: Path, tmp_path: Path) -> None:
    """tests/formats/test_round_trips.py converts such models."""
    out = tmp_path / "out"
    assert LEFT_OUT in good("hf-to-megatron", work / "hf", out, "--no-mtp").err
    said = good("verify", work / "hf", out, "--level", "bytes", "--no-mtp").out
    assert said.splitlines()[-1].startswith("PASS")
    args = mckpt.open(out).args
    assert args is not None and args["mtp_num_layers"] is None
    again = ("reshard", out, tmp_path / "again", "--no-mtp", "--target-tp", 2)
    refused(2, "--no-mtp", "has no layers of multi-token prediction", args=again)


@pytest.mark.parametrize("has_args", [True, False])
def test_a_run_that_left_them_out_is_converted(has_args: bool, work: Path, tmp_path: Path) -> None:
    """`--like` names the model as it is published, with these layers."""
    run, line = tmp_path / "run", ("megatron-to-hf", tmp_path / "run", tmp_path / "out")
    good("hf-to-megatron", work / "plain", run, "--format", "torch_dist")
    shutil.rmtree(run / "hf")
    (run / "release" / "mckpt.json").unlink()
    if not has_args:
        common = Pt(run / "release" / "common.pt")
        del common.value["args"]
        common.save()
    like = ("--like", work / "hf")
    refused(3, "training left these layers out, give --no-mtp", args=(*line, *like))
    note = "with mtp_layers changed to 0 (--no-mtp)"
    assert note in good(*line, *like, "--no-mtp").err
    same(tmp_path / "out", work / "plain", len(mckpt.open(work / "plain")))
    assert config_of(tmp_path / "out")[KEY] == 0
    good("reshard", run, tmp_path / "more", "--target-pp", 2, *like, "--no-mtp")
    same(tmp_path / "more", work / "plain", len(mckpt.open(work / "plain")))


def test_a_stream_may_have_the_layers_that_are_left_out(work: Path, tmp_path: Path) -> None:
    tensors = tiny.tensors(tiny.config(CASE))
    mckpt.write(tmp_path / "out", work / "hf", tensors.items(), no_mtp=True)
    same(tmp_path / "out", work / "plain", len(mckpt.open(work / "plain")))


def test_a_setting_that_would_leave_them_out_names_the_option(work: Path, tmp_path: Path) -> None:
    line = ("plan", work / "hf", tmp_path / "out", "--set", "mtp_layers=0")
    refused(4, "the tensors agree with it", "--no-mtp leaves out", args=line)
    good("hf-to-megatron", work / "hf", tmp_path / "ckpt", "--format", "torch")
    line = ("megatron-to-hf", tmp_path / "ckpt", tmp_path / "hf", "--set", "mtp_layers=0")
    refused(5, "is in no rule of gpt.yaml", "--no-mtp leaves out", args=line)


@pytest.mark.parametrize("described", [True, False])
def test_layers_that_a_training_added_are_exported(
    described: bool, work: Path, tmp_path: Path
) -> None:
    """Their names and their key are those of DeepSeek-V3, in any family with the names of Llama."""
    shutil.copytree(work / "trained", tmp_path / "ckpt")
    if not described:
        shutil.rmtree(tmp_path / "ckpt" / "hf")
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "hf")
    assert config_of(tmp_path / "hf")[KEY] == 1
    found, wanted = (mckpt.open(path).opened for path in (tmp_path / "hf", work / "documented"))
    assert set(found.keys()) == set(wanted.keys())
    same(tmp_path / "hf", work / "documented", len(mckpt.open(work / "documented")))
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "left", "--no-mtp")
    same(tmp_path / "left", work / "qwen3", len(mckpt.open(work / "qwen3")))
    assert not config_of(tmp_path / "left").get(KEY)


def test_a_family_without_a_place_for_them_names_the_option(work: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: qwen3\narchitectures: [Qwen3ForCausalLM]\ndims: {mtp_layers: null}\n")
    line = ("megatron-to-hf", work / "trained", tmp_path / "hf", "--mapping", own)
    text = refused(4, "mtp_layers is 1", "--no-mtp leaves out", args=line)
    assert "moe_layers" not in text
    good(*line, "--no-mtp")
    same(tmp_path / "hf", work / "qwen3", len(mckpt.open(work / "qwen3")))
