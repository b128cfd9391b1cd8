"""Checkpoints of other programs: wrappers around names are taken off, adapters and directories are
named with what to do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mckpt
from mckpt.containers import safe_pickle
from mckpt.formats import foreign
from tests.helpers import commands
from tests.helpers.commands import Pt, good, refused
from tests.helpers.tiny import FIXTURES, tensors, tiny_random, write_weights

QWEN3 = FIXTURES / "tiny-qwen3"
Rename = Callable[[str], str]


def renamed(path: Path, rename: Rename, case: str = "qwen3") -> Path:
    """Writes a model whose tensors have other names."""
    config = json.loads((tiny_random(case, path) / "config.json").read_text())
    (path / "model.safetensors").unlink()
    write_weights(path, {rename(key): array for key, array in tensors(config).items()})
    return path


WRAPPERS: dict[str, Rename] = {
    "module.": lambda key: f"module.{key}",
    "_orig_mod.": lambda key: f"_orig_mod.{key}",
    "base_model.model.": lambda key: f"base_model.model.{key}",
    "pretrained_model.": lambda key: f"pretrained_model.{key}",
    "_fsdp_wrapped_module.": lambda key: (
        "_fsdp_wrapped_module." + key.replace(".self_attn.", ".self_attn._fsdp_wrapped_module.")
    ),
    "_checkpoint_wrapped_module.": lambda key: key.replace(
        ".mlp.", ".mlp._checkpoint_wrapped_module."
    ),
    "_orig_mod., _fsdp_wrapped_module. and module.": lambda key: (
        "module._orig_mod.module." + key.replace(".mlp.", "._fsdp_wrapped_module.mlp._orig_mod.")
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_names_are_read_without_wrappers(name: str, tmp_path: Path) -> None:
    plain = tiny_random("qwen3", tmp_path / "plain")
    source = renamed(tmp_path / "hf", WRAPPERS[name])
    notes = " ".join(mckpt.open(source).model.notes)
    for part in name.replace(" and", ",").split(", "):
        assert f"read without {part} (" in notes
    assert not mckpt.diff(plain, source)


def test_a_wrapper_of_some_names_only_is_left_on_them() -> None:
    for names in (
        ["module.a", "b"],
        ["a._orig_mod.b", "a.b"],  # both would be a.b
        ["pretrained_model.a", "score.weight"],
        ["v_head.weight"],
        ["base_model.model.a.lora_A.weight", "base_model.model.a.base_layer.weight"],
        ["model.my_orig_mod.a"],
    ):
        assert foreign.unwrapped(names) == (names, [])
    names, parts = foreign.unwrapped(["module.pretrained_model.a", "module.v_head.b"])
    assert names == ["a", "v_head.b"] and len(parts) == 2


def test_the_names_of_the_file_come_before_what_is_missing(tmp_path: Path) -> None:
    source = renamed(tmp_path / "hf", lambda key: f"net.{key}")
    lines = refused(3, args=("plan", source, tmp_path / "ckpt")).splitlines()
    assert "net." in lines[1] and "is in no rule of qwen3.yaml" in lines[1]
    assert any("3 more of this name with other numbers" in line for line in lines)
    assert any("model.embed_tokens.weight is missing" in line for line in lines)


def lora(names: Iterable[str], of: str, parts: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns tensors whose names have these parts in the place of the last one."""
    return {
        name.replace(of, part): np.ones((2, 2), ml_dtypes.bfloat16)
        for name in names
        if name.endswith(of)
        for part in parts
    }


def test_an_adapter_in_the_files_is_an_error_with_its_cure(tmp_path: Path) -> None:
    source = tiny_random("qwen3", tmp_path / "hf")
    arrays = tensors(json.loads((source / "config.json").read_text()))
    parts = ("q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight")
    arrays |= lora(list(arrays), "q_proj.weight", parts)
    write_weights(source, {f"base_model.model.{key}": a for key, a in arrays.items()})
    words = ("base_model.model.model.layers.0", "merge_and_unload()")
    refused(3, *words, args=("plan", source, tmp_path / "ckpt"))


def test_lora_in_megatron_is_an_error_with_its_cure(tmp_path: Path) -> None:
    good("hf-to-megatron", tiny_random("qwen3", tmp_path / "hf"), tmp_path / "a", *TORCH)
    file = next((tmp_path / "a").glob(f"release/*/{commands.PT}"))
    pt = commands.Pt(file)
    model = pt.value["model"]
    for key in [key for key in model if key.endswith("linear_qkv.weight")]:
        start = key.removesuffix("weight")
        model[f"{start}to_wrap.weight"] = model.pop(key)
        model[f"{start}adapter.linear_in.weight"] = pt.put("bfloat16", (1, 2), bytes(4))
    pt.save()
    words = ("linear_qkv.adapter.linear_in.weight is in no rule", "mckpt megatron-to-hf")
    refused(5, *words, args=("reshard", tmp_path / "a", tmp_path / "b", "--tp", 2))
    words = ("has factors linear_in of adapters, and none that is linear_out",)
    refused(3, *words, args=("megatron-to-hf", tmp_path / "a", tmp_path / "b"))


TORCH = ("--format", "torch")


@pytest.mark.parametrize("inside", ["model/", ""])
def test_a_run_of_verl_is_read_with_its_hugging_face_directory(inside: str, tmp_path: Path) -> None:
    """The weights lie in actor/model since verl 0.9, and in actor before. They have no args."""
    good("hf-to-megatron", QWEN3, tmp_path / "a", "--tp", 2, "--format", "torch_dist")
    step = tmp_path / "run/global_step_7"
    weights = step / "actor" / inside / "dist_ckpt"
    shutil.copytree(tmp_path / "a/release", weights)
    (weights / "mckpt.json").unlink()
    common = Pt(weights / "common.pt")
    del common.value["args"]
    common.save()
    hf = weights.with_name("huggingface")
    hf.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(QWEN3 / name, hf)
    for part in ("optimizer", "extra", "model"):
        (step / "actor" / part / "dist_ckpt").mkdir(parents=True, exist_ok=True)
    (tmp_path / "run/global_step_8/actor").mkdir(parents=True)
    (tmp_path / "run" / commands.TRACKER).write_text("7")
    for number, source in enumerate(
        (weights, step / "actor" / inside, step / "actor", step, tmp_path / "run")
    ):
        out = tmp_path / f"out{number}"
        good("megatron-to-hf", source, out)
        assert good("diff", QWEN3, out).out.startswith("the same to the last bit")
        assert (out / "tokenizer.json").read_bytes() == (QWEN3 / "tokenizer.json").read_bytes()
    again = ("megatron-to-hf", tmp_path / "run", tmp_path / "more", "--iteration", 9)
    refused(3, "checkpoint of verl", args=again)
    shutil.rmtree(weights)
    shutil.copy(tmp_path / "out0/model.safetensors", hf)
    assert good("diff", step, QWEN3).out.startswith("the same to the last bit")
    refused(2, "is a Hugging Face directory already", args=("megatron-to-hf", step, tmp_path / "b"))


def test_a_checkpoint_whose_args_are_those_of_ms_swift_4(tmp_path: Path) -> None:
    """They do not describe the model, which config.json does, but for those that change it."""
    good("hf-to-megatron", QWEN3, tmp_path / "a", "--tp", 2)
    unit = tmp_path / "a/release"
    (unit / "mckpt.json").unlink()
    shutil.rmtree(tmp_path / "a/hf")
    common = Pt(unit / "common.pt")
    args = {
        "swift_version": "4.6.0",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "template": "qwen3",
        "apply_query_key_layer_scaling": True,
        "mtp_num_layers": None,
    }
    common.value["args"] = safe_pickle.namespace(**args)
    common.save()
    like = ("--like", QWEN3)
    refused(
        2,
        "no args with the sizes of the model",
        "--like",
        args=("megatron-to-hf", unit, tmp_path / "b"),
    )
    good("megatron-to-hf", unit, tmp_path / "b", *like)
    good("diff", QWEN3, tmp_path / "b")
    good("reshard", unit, tmp_path / "c", *like, "--tp", 1)
    good("diff", QWEN3, tmp_path / "c", *like)
    common.value["args"] = safe_pickle.namespace(**args, rope_scaling={"type": "linear"})
    common.save()
    refused(4, "args.rope_scaling", args=("megatron-to-hf", unit, tmp_path / "d", *like))
