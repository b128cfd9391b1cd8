"""A weight that has one state of its optimizer has all of them: a checkpoint of any format that
lost some is damaged, and no command converts it. A frozen weight has none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.formats.test_fsdp_formats import DCP, FSDP, index, renamed, unit, with_index, without
from tests.formats.test_optimizer_files import change_args
from tests.helpers.commands import PT, Pt, good, refused
from tests.helpers.commands import mckpt as run
from tests.helpers.tiny import unpack

PROJ, ROUTER = "self_attention.linear_proj.weight", "mlp.router.weight"
STATE = "optimizer.state."
STEPS = "the number of steps is missing in all groups"
Lose = Callable[[Path], object]


def keys_with(*words: str) -> Lose:
    """Returns what takes from an index the tensors and objects whose keys have all these words."""
    return lambda saved: with_index(saved, without(lambda key: all(word in key for word in words)))


def arrays(*words: str) -> Lose:
    """Returns the same for the arrays of the format zarr."""

    def lose(saved: Path) -> None:
        for path in list(saved.rglob("*optimizer.state.*")):
            if all(word in path.name for word in words):
                shutil.rmtree(path)

    return lose


def of_rank(name: str, change: Callable[[Any], object]) -> Lose:
    """Returns what changes the value of a file of the first rank."""

    def lose(saved: Path) -> None:
        file = Pt(next(saved.rglob(f"mp_rank_00*/{name}")))
        change(file.value)
        file.save()

    return lose


def flat(name: str) -> Lose:
    return of_rank("distrib_optim.pt", lambda v: next(iter(v[0].values())).pop(name))


def inner(change: Callable[[Any], object]) -> Lose:
    return of_rank(PT, lambda v: change(v["optimizer"]))


def state(number: int, name: str) -> Lose:
    return inner(lambda v: v["optimizer"]["state"][number].pop(name))


def uncounted(optimizer: Any) -> None:
    for group in optimizer["optimizer"]["param_groups"]:
        del group["step"]


def every_file(saved: Path) -> None:
    for path in saved.rglob("distrib_optim.pt"):
        path.unlink()
    next(saved.rglob("mckpt.json")).unlink()


# name -> the fixture, and the options with which it is resharded to this form
FORMS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "distributed": ("fsdp/qwen3-moe-ep2-distributed", ()),
    "plain": ("fsdp/qwen3-plain", ()),
    "written": ("fsdp/qwen3-plain", ("--target-tp", 1)),
    "muon": ("muon/moe-tp2-ep2-by-layers", ()),
    "dcp": (f"fsdp/{DCP}", ()),
    "fsdp": (f"fsdp/{FSDP}", ()),
    "zarr": ("zarr/0.8-llama-fully_sharded_model_space", ()),
    "torch": ("optimizer/dp_zero_gather_scatter", ("--target-format", "torch", "--target-tp", 1)),
    "torch plain": ("fsdp/qwen3-plain", ("--target-format", "torch")),
}
SECOND, FIRST = "exp_avg_sq", "exp_avg"
LOST: list[tuple[str, Lose, str]] = [
    ("distributed", keys_with(STATE + SECOND, PROJ), "exp_avg_sq of layers.0.attn.o.weight and 1"),
    ("distributed", keys_with(STATE + "exp_avg.", PROJ), "exp_avg of layers.0.attn.o.weight and"),
    ("distributed", keys_with(STATE + "param", PROJ), "master copy of layers.0.attn.o.weight and"),
    ("distributed", keys_with(STATE + SECOND), "exp_avg_sq of embed.weight is missing"),
    ("distributed", keys_with(STATE), "has no state of any weight"),
    ("plain", keys_with(STATE + SECOND, PROJ), "exp_avg_sq of layers.0.attn.o.weight and 1 more"),
    ("plain", keys_with(STATE + "fp32_param", PROJ), "master copy of layers.0.attn.o.weight and"),
    ("plain", keys_with(STATE + "fp32_param"), "master copy of embed.weight is missing"),
    ("plain", keys_with(STATE + "exp_avg"), "exp_avg of embed.weight is missing"),
    ("muon", keys_with("momentum_buffer", PROJ), "momentum_buffer of layers.0.attn.o.weight"),
    ("muon", keys_with(STATE + SECOND, "final_layernorm"), "exp_avg_sq of final_norm.weight is"),
    ("muon", keys_with("fp32_param", PROJ), "master copy of layers.0.attn.o.weight"),
    ("dcp", keys_with(SECOND), "exp_avg_sq of embed.weight is missing"),
    ("dcp", keys_with("state.3", SECOND), "is missing"),
    ("dcp", keys_with("fp32_from_fp16_params.0.2"), "master copy of"),
    ("dcp", lambda saved: [keys_with(w)(saved) for w in (".state.", ".fp32_from")], "no state of"),
    ("fsdp", keys_with(SECOND), "exp_avg_sq of embed.weight is missing"),
    ("fsdp", keys_with(STATE, "layers.1." + PROJ), "exp_avg of layers.1.attn.o.weight is missing"),
    ("fsdp", keys_with(STATE), "has no state of any weight"),
    ("zarr", arrays(SECOND, PROJ), "exp_avg_sq of layers.0.attn.o.weight and 1 more"),
    ("zarr", arrays("fp32_param", PROJ), "master copy of layers.0.attn.o.weight and 1 more"),
    ("torch", flat(SECOND), "exp_avg_sq of embed.weight is missing"),
    ("torch", flat("param"), "master copy of embed.weight is missing"),
    ("torch", every_file, "distrib_optim.pt is missing in every rank"),
    ("torch", inner(uncounted), STEPS),
    ("torch plain", state(3, SECOND), "exp_avg_sq of layers."),
    ("torch plain", inner(uncounted), STEPS),
    ("torch plain", inner(lambda v: v["optimizer"]["state"].clear()), "has no state of any weight"),
]


def made(form: str, tmp_path: Path) -> Path:
    fixture, options = FORMS[form]
    saved = unpack(fixture, tmp_path / "saved")
    saved = saved / {"muon": "torch_dist", "zarr": "zarr"}.get(form, ".")
    if options:
        good("reshard", saved, tmp_path / "made", *options)
        saved = tmp_path / "made"
    return saved


@pytest.mark.parametrize(("form", "lose", "words"), LOST)
def test_lost_state_is_damage(form: str, lose: Lose, words: str, tmp_path: Path) -> None:
    saved = made(form, tmp_path)
    assert run("check", saved).code == 0
    lose(saved)
    said = run("check", saved)
    assert said.code == 3 and words in said.out, said.out + said.err
    for command in ("reshard", "repair"):
        args = (command, saved, tmp_path / "out")
        refused(3, words, "give --no-optimizer", args=args)
    assert not (tmp_path / "out").exists()
    good("reshard", saved, tmp_path / "out", "--no-optimizer")


def test_an_object_that_lost_a_state_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of dp_zero_gather_scatter lie in objects, those of dp_reshardable in buckets."""
    from mckpt.formats.megatron.optimizer import flat as buffers

    saved, plain = unpack("optimizer/dp_zero_gather_scatter", tmp_path / "saved"), buffers.buffers
    monkeypatch.setattr(
        buffers,
        "buffers",
        lambda *a: {at: found for at, found in plain(*a).items() if at.state != SECOND},
    )
    refused(3, "exp_avg_sq of embed.weight", args=("reshard", saved, tmp_path / "out"))


def test_a_state_of_no_known_optimizer_is_named(tmp_path: Path) -> None:
    saved = made("distributed", tmp_path)
    old, new = STATE + SECOND, STATE + "max_exp_avg_sq"

    def another(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        tensors |= {k.replace(old, new): t for k, t in tensors.items() if k.startswith(old)}
        for at in [at for at in items if at.fqn.startswith(old)]:
            items[type(at)(at.fqn.replace(old, new), at.offset, at.index)] = items[at]

    with_index(saved, another)
    words = ("optimizer is adam by its args, which keeps exp_avg and exp_avg_sq", "max_exp_avg_sq")
    refused(2, *words, "--no-optimizer", args=("reshard", saved, tmp_path / "out"))
    said = run("check", saved)
    assert said.code == 1 and "max_exp_avg_sq" in said.out


def test_a_tensor_of_another_shape_beside_the_states_is_named(tmp_path: Path) -> None:
    saved = made("torch plain", tmp_path)
    file = Pt(next(saved.rglob(PT)))
    more = file.put("float32", (3,), bytes(12))
    file.value["optimizer"]["optimizer"]["state"][2]["row_factor"] = more
    file.save()
    args = ("reshard", saved, tmp_path / "out")
    refused(2, "the state row_factor of", "is [3], and the weight [", args=args)


@pytest.mark.parametrize("place", ["args", "run_config.yaml"])
def test_another_optimizer_than_the_states_show_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = made("distributed", tmp_path)
    args = ("reshard", saved, tmp_path / "out")
    for name, words in (("lion", "of the optimizer lion"), ("sgd", f"is sgd by its {place}")):
        if place == "args":
            change_args(monkeypatch, {"optimizer": name})
        else:
            text = f"model: {{}}\noptimizer:\n  _target_: a.OptimizerConfig\n  optimizer: {name}\n"
            (unit(saved) / place).write_text(text)
            change_args(monkeypatch, {"optimizer": None})
        refused(2, words, "--no-optimizer", args=args)


@pytest.mark.parametrize("form", ["distributed", "plain", "fsdp", "zarr"])
def test_a_frozen_weight_has_no_states(form: str, tmp_path: Path) -> None:
    """The routers of the mixture of experts, and the projections of the dense models."""
    dense = form in ("plain", "zarr")
    saved, word = made(form, tmp_path), PROJ if dense else ROUTER
    if form == "zarr":
        arrays(word)(saved)
    elif form == "fsdp":  # whose objects list the parameters of each group
        keys_with("optimizer.", word)(saved)
    else:
        keys_with(STATE, word)(saved)
    good("check", saved)
    name = "layers.{}.attn.o.weight" if dense else "layers.{}.moe.router.weight"
    frozen = [name.format(layer) for layer in range(2)]
    said = good("reshard", saved, tmp_path / "out", "--target-format", "torch_dist").err
    assert f"parameters without optimizer state: {', '.join(frozen)}" in said
    difference = mckpt.diff(saved, tmp_path / "out")
    num = len(Checkpoint.open(saved))
    assert not difference and difference.same == 4 * num - 3 * 2
    words = ("weights that the run did not train", *frozen, "--target-format torch_dist")
    refused(2, *words, args=("reshard", saved, tmp_path / "t", "--target-format", "torch"))


def test_weights_of_one_layer_that_are_frozen_are_named(tmp_path: Path) -> None:
    """torch_dist has one tensor for the states of all layers, which then has no values for one."""
    saved = made("fsdp", tmp_path)
    keys_with("optimizer.", "layers.1." + PROJ)(saved)
    good("check", saved)
    words = ("did not train", "layers.1.attn.o.weight", "for all layers or for none")
    refused(2, *words, args=("reshard", saved, tmp_path / "out"))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_has_its_momentum_or_none(momentum: float, tmp_path: Path) -> None:
    """megatron-core saves no `momentum_buffer` of a run without momentum."""
    saved = made("written", tmp_path)
    keys_with(STATE + SECOND)(saved)
    keys = [key for key in index(saved).state_dict_metadata if STATE + FIRST in key]
    for key in keys if momentum else ():

        def named(tensors: dict[str, Any], items: dict[Any, Any], old: str = key) -> None:
            tensors[old.replace(FIRST, "momentum_buffer")] = tensors[old]
            renamed(old, old.replace(FIRST, "momentum_buffer"))(tensors, items)

        with_index(saved, named)
    keys_with(STATE + FIRST)(saved)
    common = Pt(unit(saved) / "common.pt")
    for group in common.value["optimizer"]["optimizer"]["param_groups"]:
        del group["betas"]
        group["momentum"] = momentum
    common.value["args"].state["optimizer"] = "sgd"
    common.save()
    good("check", saved)
    good("reshard", saved, tmp_path / "out")
    kept = Checkpoint.open(tmp_path / "out").optimizer
    assert kept is not None
    assert kept.states == ["master", "momentum_buffer"] if momentum else ["master"]
    if momentum:
        keys_with("momentum_buffer", PROJ)(saved)
        said = run("check", saved)
        assert said.code == 3 and "momentum_buffer of layers.0.attn.o.weight" in said.out
