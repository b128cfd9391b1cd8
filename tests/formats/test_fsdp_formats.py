"""Checkpoints of models that Megatron's trainer sharded over its ranks: `torch_dcp` and
`fsdp_dtensor`. tests/helpers/fsdp_samples.py made them, and the checkpoints of the same runs
without sharding, which they must equal bit for bit.
"""

from __future__ import annotations

import io
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.formats.megatron import chunked, fsdp_writing
from tests.formats.test_optimizer_files import change_args
from tests.helpers import damages, made_models, tiny
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


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_settings_that_are_tensors_or_classes_are_read(saved: Path, tmp_path: Path) -> None:
    """A run with --optimizer-cuda-graph has tensors as `step` and `lr`, and one with
    --optimizer-cpu-offload has classes. torch saves them.
    """
    torch, dcp = (pytest.importorskip(f"torch{name}") for name in ("", ".distributed.checkpoint"))
    expected = Checkpoint.open(saved).optimizer
    keys = index(saved).state_dict_metadata
    found = filter(None, (re.match(r"optimizer\.(.*param_.*)\.[^.]+$", key) for key in keys))
    groups = dict.fromkeys(match[1] for match in found)
    new = {"lr": torch.tensor(0.75), "step": torch.tensor([7], dtype=torch.int32)}
    classes = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.Adam}
    values = {f"{group}.{name}": v for group in groups for name, v in (new | classes).items()}
    dcp.save({"optimizer": values}, checkpoint_id=tmp_path / "new", no_dist=True)
    (file,) = (tmp_path / "new").glob("*.distcp")
    file.rename(unit(saved) / "new.distcp")
    made = index(tmp_path / "new")
    items = {k: replace(v, relative_path="new.distcp") for k, v in made.storage_data.items()}
    with_index(saved, without(made.state_dict_metadata.__contains__))
    with_index(
        saved, lambda old, places: (old.update(made.state_dict_metadata), places.update(items))
    )
    read = Checkpoint.open(saved).optimizer
    assert expected is not None and read is not None
    numbers = {"lr": 0.75, "step": 7}
    assert read.groups == [[{**group, **numbers} for group in own] for own in expected.groups]
    assert {type(group["step"]) for own in read.groups for group in own} == {int}
    good("reshard", saved, tmp_path / "out", "--target-format", "torch", "--keep-padding")


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


# ------------------------------------------------------------------------------------------ writing


@pytest.fixture
def written(saved: Path, tmp_path: Path) -> Path:
    """Returns what mckpt writes from the run without sharding, with the rows of the trainer."""
    source, form = unpacked(EQUAL[saved.name], tmp_path), saved.name.rpartition("-")[2]
    args = (source, tmp_path / "written", "--target-format", form, "--keep-padding")
    said = good("reshard", *args).err
    assert ("its master copy is the weight" in said) == (form == "fsdp_dtensor")
    return tmp_path / "written"


def stored(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the dtype and shape of each tensor, and the value of each object, with args left out,
    and random states, which mckpt does not keep. An _extra_state is a tensor without elements or
    None.
    """
    directory = chunked.Directory(unit(root))
    kept = re.compile(r"(?!rng_state|args|.*_extra_state).*").fullmatch
    tensors = {k: t[:2] for k, t in directory.metadata.tensors.items() if kept(k)}
    return tensors, {k: directory.object(k)[0] for k in directory.metadata.objects if kept(k)}


def test_mckpt_writes_the_tensors_and_objects_that_the_trainer_saves(
    saved: Path, written: Path
) -> None:
    own, theirs = stored(written), stored(saved)
    assert own[0] == theirs[0] and own[1] == theirs[1]
    assert not mckpt.diff(written, saved)
    everything = mckpt.diff(written, saved.parent / EQUAL[saved.name])
    assert not everything and everything.same == 4 * len(Checkpoint.open(written))
    groups = [Checkpoint.open(one).optimizer for one in (written, saved)]
    assert groups[0] and groups[1] and groups[0].groups == groups[1].groups
    same = {k for k in index(saved).state_dict_metadata if k.endswith("_extra_state")}
    assert same == {k for k in index(written).state_dict_metadata if k.endswith("_extra_state")}


def test_what_was_written_becomes_its_source_again(
    saved: Path, written: Path, tmp_path: Path
) -> None:
    good("reshard", written, tmp_path / "back", "--keep-padding")
    assert not mckpt.diff(tmp_path / "back", tmp_path / EQUAL[saved.name])
    good("megatron-to-hf", written, tmp_path / "hf")
    assert not mckpt.diff(tmp_path / "hf", tmp_path / "back")


V2 = "qwen3-moe-mfsdp_v2"


def of_torch(directory: Path) -> dict[str, Any]:
    """Returns the content of a directory as torch reads it, by key."""
    import torch
    from torch.distributed.checkpoint import _nested_dict, format_utils

    format_utils.dcp_to_torch_save(directory, directory / "all.pt")
    found = torch.load(directory / "all.pt", weights_only=False)
    (directory / "all.pt").unlink()
    flat: dict[str, Any] = _nested_dict.flatten_state_dict(found)[0]
    return flat


def test_megatron_fsdp_v2_becomes_a_run_and_is_written_again(tmp_path: Path) -> None:
    """save_checkpoint of Megatron-LM wrote the sample; one of its two ranks has no part of many
    weights. What mckpt writes of it has the same content for torch.
    """
    saved, hf = unpacked(V2, tmp_path) / "saved", tmp_path / V2 / "hf"
    assert "mfsdp_v2" in good("inspect", saved).out
    assert "sound" in good("check", saved, "--like", hf).out
    args = ("reshard", saved, tmp_path / "run", "--like", hf, "--dtype", "bf16", "--keep-padding")
    said = good(*args, "--target-format", "torch_dist", "--target-ep", 2)
    assert "every element of the source is used" in said.err
    whole = Checkpoint.open(tmp_path / "run")
    assert whole.optimizer is not None and whole.optimizer.form == "fully_reshardable"
    (group, *_), experts = whole.optimizer.groups
    assert (group["step"], group["lr"], group["betas"]) == (2, 1e-3, (0.9, 0.95))
    assert experts[0]["is_expert_parallel"]
    args = ("reshard", tmp_path / "run", tmp_path / "again", "--target-format", "mfsdp_v2")
    good(*args, "--target-ep", 1, "--keep-padding")
    theirs, ours = of_torch(saved), of_torch(unit(tmp_path / "again"))
    assert ours["iteration"] == 2
    assert {key for key in ours if key.startswith(("model.", "optimizer.state."))} <= theirs.keys()
    for key, value in theirs.items():
        if key.startswith(("model.", "optimizer.state.")):
            assert key.endswith("_extra_state") or value.equal(ours[key]), key
        else:  # a setting
            alike = set if key.endswith(".params") else lambda found: found
            assert alike(value) == alike(ours[key]), key
    good("megatron-to-hf", saved, tmp_path / "hf", "--like", hf)
    exported = Checkpoint.open(tmp_path / "hf")
    fc1 = theirs["model.decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"]
    halves = [exported[f"layers.1.moe.experts.3.{half}.weight"].numpy() for half in ("gate", "up")]
    assert (np.concatenate(halves) == fc1.numpy()).all()


def test_weights_of_megatron_fsdp_v2_alone_are_known_by_their_args(tmp_path: Path) -> None:
    out, hf = tmp_path / "out", tiny.tiny_random("qwen3-moe", tmp_path / "hf")
    good("hf-to-megatron", hf, out, "--format", "mfsdp_v2")
    assert "format: mfsdp_v2" in good("inspect", out).out
    assert "neither the schedule" not in good("megatron-to-hf", out, tmp_path / "back").err
    assert not mckpt.diff(out, hf) and not mckpt.diff(out, tmp_path / "back")
    good("reshard", out, tmp_path / "whole", "--target-tp", 2)
    assert not mckpt.diff(out, tmp_path / "whole")
    with_index(out, without(lambda key: key == "args"))
    like = ("--like", hf)
    assert "format: torch_dcp" in good("inspect", out).out
    assert good("diff", out, hf, *like).out.startswith("the same to the last bit")
    saved = unpacked(DCP, tmp_path)
    with_index(saved, without(lambda key: key.startswith("optimizer.")))
    assert "format: torch_dcp" in good("inspect", saved).out


def test_a_state_that_megatron_fsdp_v2_lost_is_named(tmp_path: Path) -> None:
    saved, hf = unpacked(V2, tmp_path) / "saved", tmp_path / V2 / "hf"
    lost = "optimizer.state.decoder.final_layernorm.weight.exp_avg"
    with_index(saved, without(lambda key: key == lost))
    args = ("reshard", saved, tmp_path / "out", "--like", hf, "--target-format", "torch_dist")
    refused(3, "exp_avg of final_norm.weight is missing", "--no-optimizer", args=args)
    good(*args, "--no-optimizer", "--dry-run")


def test_torch_loads_the_random_states_of_a_new_run(tmp_path: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    args = (unpacked(EQUAL[DCP], tmp_path), tmp_path / "out", "--target-format", "torch_dcp")
    good("reshard", *args, "--keep-padding")
    rng: dict[str, Any] = {"random_rng_state": None, "np_rng_state": None}
    rng["torch_rng_state"] = torch.zeros(5056, dtype=torch.uint8)
    state = {"rng_state": [rng], "iteration": None}
    checkpoint.load(state, checkpoint_id=unit(tmp_path / "out"))
    random.setstate(rng["random_rng_state"])
    np.random.set_state(rng["np_rng_state"])
    drawn, wanted = (random.random(), np.random.rand(2)), random.Random(1234).random()
    assert drawn[0] == wanted and (drawn[1] == np.random.RandomState(1234).rand(2)).all()
    assert torch.equal(rng["torch_rng_state"], torch.Generator().manual_seed(1234).get_state())


def test_weights_of_hugging_face_begin_a_run(tmp_path: Path) -> None:
    """Megatron-FSDP of megatron-core 0.19 loads weights alone from no release. It counts the steps
    of its optimizer from those that the checkpoint states.
    """
    config = tiny.config("qwen3-moe")
    (tmp_path / "hf").mkdir()
    tiny.write_json(tmp_path / "hf" / "config.json", config)
    tiny.write_weights(tmp_path / "hf", tiny.tensors(config))
    out = tmp_path / "out"
    good("hf-to-megatron", tmp_path / "hf", out, "--format", "fsdp_dtensor", "--ep", "2")
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "1"
    script = (out / "iter_0000001" / "megatron_args.sh").read_text()
    assert "--load DIR --no-strict-fsdp-dtensor-load --no-load-rng" in script
    own = Checkpoint.open(out)
    assert own.optimizer is None and not own.left_behind()
    tensors, objects = stored(out)
    steps = [key for key, value in objects.items() if key.endswith(".step") and value == 0]
    halves = [key for key in tensors if key.endswith("_v")]
    assert len(steps) == len(tensors) - len(halves)
    assert not mckpt.diff(out, tmp_path / "hf")
    good("reshard", out, tmp_path / "whole", "--target-ep", "1")
    good("megatron-to-hf", out, tmp_path / "back")
    for one in ("whole", "back"):
        assert not mckpt.diff(tmp_path / one, tmp_path / "hf")


@pytest.mark.parametrize("case", ["bamba", "llama_nemotron"])
def test_only_gate_and_up_are_stored_by_themselves(case: str, tmp_path: Path) -> None:
    made_models.write(case, tmp_path / "hf")
    for form in ("fsdp_dtensor", "torch_dist"):
        args = (tmp_path / "hf", tmp_path / form, "--format", form, "--dtype", "bf16")
        good("hf-to-megatron", *args)
    assert not mckpt.diff(tmp_path / "fsdp_dtensor", tmp_path / "torch_dist")
    halves = {key for key in stored(tmp_path / "fsdp_dtensor")[0] if key.endswith(("_w", "_v"))}
    assert halves and all(".linear_fc1." in key for key in halves)


def test_gated_delta_nets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_models.write("qwen3_next", tmp_path / "hf")
    args = ("hf-to-megatron", tmp_path / "hf", tmp_path / "out", "--dtype", "bf16")
    args += ("--format", "fsdp_dtensor", "--dialect", "gpt")
    refused(2, "a gated delta net in several ways", args=args)
    monkeypatch.setattr(fsdp_writing._Run, "refuse", lambda *_: None)
    good(*args)
    args = ("megatron-to-hf", tmp_path / "out", tmp_path / "back")
    said = refused(5, "a gated delta net in several ways", args=args)
    assert "save the run as torch_dist" in said


# ------------------------------------------------------------------------------------------- damage


def test_damage_of_what_was_written_is_found(written: Path, tmp_path: Path) -> None:
    path = next(written.glob("*/*.distcp"))
    good("check", written)
    data = bytearray(path.read_bytes())
    (_, at, length) = next(iter(chunked.Directory(unit(written)).metadata.items.values()))
    data[at + length // 2] ^= 1
    path.write_bytes(data)
    assert run("check", written).code == 3
    path.write_bytes(data[:-1000])
    refused(3, path.name, "truncated", args=("reshard", written, tmp_path / "out"))
    data[at + length // 2] ^= 1
    path.write_bytes(data)
    good("check", written)
    file = unit(written) / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"linear_proj", b"linear_prox"))
    assert run("check", written).code == 3
    (unit(written) / "mckpt.json").unlink()
    names = "linear_proj.weight is missing", "linear_prox.weight"
    refused(3, *names, args=("reshard", written, tmp_path / "out"))


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


@pytest.mark.parametrize("name", [FSDP, V2, DCP])
def test_damage_of_each_file_is_found(name: str, tmp_path: Path) -> None:
    saved = unpacked(name, tmp_path)
    source, like = (saved / "saved", saved / "hf") if name == V2 else (saved, None)
    damages.of_each_file(source, tmp_path / "out", like=like, commands=damages.BOTH)


def test_a_file_of_another_step_is_an_error(tmp_path: Path) -> None:
    """Each weight has the number of steps of its group."""
    saved = unpacked(FSDP, tmp_path)
    path, items = unit(saved) / "__1_0.distcp", read_metadata(unit(saved) / ".metadata").items
    data, two, three = bytearray(path.read_bytes()), b"K\x02.", b"K\x03."
    own = [i for (key, _), i in items.items() if key.endswith(".step") and i[0] == path.name]
    assert len(own) == 25
    for _, start, length in own:
        at = data.index(two, start, start + length)
        data[at : at + len(two)] = three
    path.write_bytes(data)
    refused(3, "different numbers of steps", "2", "3", args=("reshard", saved, tmp_path / "out"))


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("final_layernorm.", "other.", 5, ("decoder.other.weight: has settings", "gpt.yaml")),
        (".lr", ".lrs", 3, ("final_layernorm.weight: lr", "lrs")),
    ],
)
def test_settings_of_a_weight_under_another_name_are_an_error(
    old: str, new: str, code: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    saved = unpacked(FSDP, tmp_path)
    key = next(
        key
        for key in index(saved).state_dict_metadata
        if "group_meta" in key and key.endswith("decoder.final_layernorm.weight.lr")
    )

    def change(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        tensors[key.replace(old, new)] = tensors.pop(key)
        for place in [place for place in items if place.fqn == key]:
            items[type(place)(key.replace(old, new))] = items.pop(place)

    with_index(saved, change)
    args = ("reshard", saved, tmp_path / "out")
    refused(code, *words, "--no-optimizer", args=args)
    good(*args, "--no-optimizer")


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
