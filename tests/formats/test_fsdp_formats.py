"""Checkpoints of models that Megatron's trainer sharded over its ranks: `torch_dcp` and
`fsdp_dtensor`. tests/helpers/fsdp_samples.py made them, and the checkpoints of the same runs
without sharding, which they must equal bit for bit.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.formats.test_optimizer_files import change_args
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as run
from tests.helpers.tiny import unpack

DCP, FSDP = "qwen3-torch_dcp", "qwen3-moe-ep2-fsdp_dtensor"
EQUAL = {DCP: "qwen3-plain", FSDP: "qwen3-moe-ep2-distributed"}
FORMS = {DCP: "not distributed", FSDP: "fsdp_dtensor"}


def unpacked(name: str, directory: Path) -> Path:
    return unpack(f"fsdp/{name}", directory / name)


@pytest.fixture(params=EQUAL)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


def test_weights_and_states_are_those_of_a_run_without_sharding(saved: Path) -> None:
    same = Checkpoint.open(unpacked(EQUAL[saved.name], saved.parent))
    own = Checkpoint.open(saved)
    assert own.optimizer is not None and same.optimizer is not None
    assert own.optimizer.form == FORMS[saved.name]
    assert own.optimizer.groups == same.optimizer.groups
    assert own.optimizer.groups[0][0]["step"] == 2
    states = [name for name in own.with_optimizer() if "@" in name]
    assert {name.partition("@")[2] for name in states} == {"master", "exp_avg", "exp_avg_sq"}
    assert len(states) == 3 * len(own)
    difference = mckpt.diff(own, same)
    assert not difference and difference.same == 4 * len(own)
    for common in (own.opened.common, same.opened.common):
        assert common is not None and common.fields["iteration"] == 1
        assert common.fields["opt_param_scheduler"]["num_steps"] == 8
    # training changed the weights by less than a step of bfloat16, so a master copy differs
    weight = own["layers.1.attn.q.weight"].numpy()
    master = own.with_optimizer()["layers.1.attn.q.weight@master"].numpy()
    assert master.dtype == np.float32 and (weight != master).any()
    assert (master.astype(weight.dtype) == weight).all()


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_plan_says_that_a_run_in_fp16_saved_no_loss_scaler(
    scale: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron does not save it in `fsdp_dtensor`. A constant scale needs none."""
    change_args(monkeypatch, {"fp16": True, "loss_scale": scale})
    said = good("reshard", unpacked(FSDP, tmp_path), tmp_path / "out", "--dry-run").out
    assert ("goes on with --initial-loss-scale" in said) == (scale is None)


def test_megatron_to_hf_writes_the_rounded_weights(saved: Path, tmp_path: Path) -> None:
    good("megatron-to-hf", saved, tmp_path / "hf")
    other = unpacked(EQUAL[saved.name], tmp_path)
    good("megatron-to-hf", other, tmp_path / "other")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "other")]
    assert files[0] == files[1]
    assert not mckpt.diff(saved, tmp_path / "hf")


def test_inspect_and_check_know_the_formats(saved: Path) -> None:
    said = good("inspect", saved).out
    assert saved.name.rpartition("-")[2] in said
    assert "not finite" not in good("check", saved).out


def test_master_copies_are_not_cast_twice(tmp_path: Path) -> None:
    saved = unpacked(FSDP, tmp_path)
    args = ("megatron-to-hf", saved, tmp_path / "hf", "--dtype", "fp32")
    refused(2, "--dtype fp32", "are bfloat16, and are stored in float32", args=args)
    good("megatron-to-hf", saved, tmp_path / "hf", "--dtype", "bf16")


# ------------------------------------------------------------------------------------------- damage


def unit(saved: Path) -> Path:
    """Returns the directory with the index of a checkpoint."""
    return next(saved.rglob(".metadata")).parent


def index(saved: Path) -> Any:
    return pickle.loads((unit(saved) / ".metadata").read_bytes())


def with_index(saved: Path, change: Callable[[dict[str, Any], dict[Any, Any]], None]) -> None:
    """Changes the tensors and the items in a .metadata."""
    metadata, out = index(saved), io.BytesIO()
    change(metadata.state_dict_metadata, metadata.storage_data)
    pickle.dump(metadata, out)
    (unit(saved) / ".metadata").write_bytes(out.getvalue())
    (unit(saved) / "mckpt.json").unlink(missing_ok=True)  # which states the size of the index


def renamed(old: str, new: str) -> Callable[[dict[str, Any], dict[Any, Any]], None]:
    """Returns a change that exchanges the names of two tensors."""

    def change(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        names = {old: new, new: old}
        tensors |= {names[key]: tensors.pop(key) for key in (old, new)}
        places = [place for place in items if place.fqn in names]
        held = {place: items.pop(place) for place in places}
        for place, item in held.items():
            items[type(place)(names[place.fqn], place.offset, place.index)] = item

    return change


def without(keys: Callable[[str], bool]) -> Callable[[dict[str, Any], dict[Any, Any]], None]:
    """Returns a change that takes tensors and objects away."""

    def change(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        for key in [key for key in tensors if keys(key)]:
            del tensors[key]
        for place in [place for place in items if keys(place.fqn)]:
            del items[place]

    return change


def test_a_truncated_file_is_named(saved: Path, tmp_path: Path) -> None:
    path = saved / "iter_0000001" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(3, "__0_0.distcp has", "truncated", args=("reshard", saved, tmp_path / "out"))
    assert run("check", saved).code == 3


def test_a_missing_state_is_named(saved: Path, tmp_path: Path) -> None:
    keys = [k for k in index(saved).state_dict_metadata if k.endswith(".exp_avg")]
    with_index(saved, without(lambda k: k == keys[1]))
    args = ("reshard", saved, tmp_path / "out")
    refused(3, "exp_avg of layers.0.", "is missing", "--no-optimizer", args=args)


def test_missing_groups_are_an_error(saved: Path, tmp_path: Path) -> None:
    with_index(saved, without(lambda k: "param_groups" in k or "param_to_group_meta" in k))
    args = ("reshard", saved, tmp_path / "out")
    refused(3, "optimizer", "--no-optimizer", args=args)
    good("reshard", saved, tmp_path / "out", "--no-optimizer")


def test_states_of_two_weights_that_are_exchanged_are_noticed(tmp_path: Path) -> None:
    """The states of torch_dcp have numbers instead of names."""
    saved = unpacked(DCP, tmp_path)
    masters = [f"optimizer.fp32_from_fp16_params.0.{i}" for i in (1, 5)]
    tensors = index(saved).state_dict_metadata
    assert tensors[masters[0]].size == tensors[masters[1]].size
    with_index(saved, renamed(*masters))
    words = ("master copies of 2 of", "layers.0.attn.o.weight", "layers.1.attn.o.weight")
    refused(3, *words, args=("reshard", saved, tmp_path / "out"))
