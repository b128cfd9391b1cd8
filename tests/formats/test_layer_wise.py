"""The files `layer_wise_optimizer_N.pt` of a `torch` checkpoint, in which megatron-core keeps the
state of Muon, distributed by layers: each data-parallel rank has whole parameters, without names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import SourceError
from mckpt.formats.megatron.optimizer import layer_wise
from mckpt.geometry.parallel import Parallel
from tests.formats.test_optimizer_files import change_args
from tests.helpers.commands import Pt, good, refused
from tests.helpers.tiny import unpack

PORTABLE = ("--target-tp", 1, "--target-format", "torch_dist")
FILE = "mp_rank_01_001/layer_wise_optimizer_1.pt"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with the checkpoints `torch` and `torch_dist` of one training."""
    return unpack("muon/moe-tp2-ep2-by-layers", tmp_path / "saved")


def test_states_are_those_that_megatron_core_stored_by_name(saved: Path, tmp_path: Path) -> None:
    own, same = Checkpoint.open(saved / "torch"), Checkpoint.open(saved / "torch_dist")
    difference = mckpt.diff(own, same)
    assert not difference and difference.same == 146
    assert own.optimizer is not None and same.optimizer is not None
    assert own.optimizer.groups == same.optimizer.groups
    assert own.optimizer.states == ["exp_avg", "exp_avg_sq", "master", "momentum_buffer"]
    said = good("reshard", saved / "torch", tmp_path / "out", *PORTABLE).err
    assert "of 45 weights the master copy" in said
    assert mckpt.diff(saved / "torch_dist", tmp_path / "out").same == 146
    assert good("check", saved / "torch").out.count("sound")


def test_parameters_are_dealt_out_there_and_back() -> None:
    """The first example is that of _shard_params_ping_pong."""
    assert layer_wise.deal(range(10), 4) == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1]
    assert layer_wise.deal([5, 1, 4, 3, 2], 2) == [0, 0, 0, 1, 1]
    assert layer_wise.deal([7, 7, 7], 2) == [0, 1, 1]
    assert layer_wise.deal([3, 1], 1) == [0, 0]


def test_expert_ranks_are_numbered_as_megatron_core_does() -> None:
    sizes = Parallel(tp=2, ep=2, etp=1)
    found = [layer_wise.expert_rank(sizes, tp, data) for data in range(2) for tp in range(2)]
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1)]
    sizes = Parallel(tp=2, ep=2, etp=2)
    found = [layer_wise.expert_rank(sizes, tp, data) for data in range(4) for tp in range(2)]
    assert found == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1)]


def test_another_order_is_found_by_the_values(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal sizes make the wrong file fit, and the master copies then differ from the weights."""
    plain = layer_wise._placed
    monkeypatch.setattr(layer_wise, "_placed", lambda *a: plain(a[0][::-1], *a[1:]))
    args = ("reshard", saved / "torch", tmp_path / "out", *PORTABLE)
    refused(3, "master copies of", "rounded, are not the weights", args=args)


def without(unit: Path) -> None:
    (unit / FILE).unlink()


def stranger(unit: Path) -> None:
    (unit / FILE).with_name("layer_wise_optimizer_7.pt").write_bytes((unit / FILE).read_bytes())


def exchanged(unit: Path) -> None:
    other = unit / FILE.replace("_1.pt", "_0.pt")
    shutil.copy(other, unit / FILE)


def edited(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Returns what changes the value of a file."""

    def damage(unit: Path) -> None:
        file = Pt(unit / FILE)
        change(file.value)
        file.save()

    return damage


def first_state(value: Any) -> Any:
    return next(iter(value[0]["optimizer"]["state"].values()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without, ("mp_rank_01_001: layer_wise_optimizer_1.pt is missing",)),
        (stranger, ("layer_wise_optimizer_7.pt belongs to none of 2 data-parallel ranks",)),
        (exchanged, (FILE, "group", "of optimizer")),
        (lambda unit: (unit / FILE).write_bytes(b""), (FILE,)),
        (edited(lambda v: v[0].pop("fp32_from_fp16_params")), (FILE, "is not the state")),
        (edited(lambda v: v[0]["fp32_from_fp16_params"].pop()), (FILE, "is not the state")),
        (edited(lambda v: v[0]["optimizer"].update(state=[])), (FILE, "is not the state")),
        (edited(lambda v: v[0]["optimizer"]["state"].update({0: 1})), (FILE, "is not the state")),
        (
            edited(lambda v: v[0]["optimizer"]["param_groups"][0].update(params=[[]])),
            (FILE, "is not the state"),
        ),
        (
            edited(lambda v: first_state(v).update({"}": first_state(v)["momentum_buffer"]})),
            ("in the optimizer is named '}', which is not a word",),
        ),
    ],
)
def test_damage_is_named(damage: Any, words: tuple[str, ...], saved: Path, tmp_path: Path) -> None:
    damage(saved / "torch" / "iter_0000002")
    args = ("reshard", saved / "torch", tmp_path / "out", *PORTABLE)
    refused(3, *words, args=args)
    good(*args, "--no-optimizer")


def test_ranks_that_wrote_over_each_other_are_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("reshard", saved / "torch", tmp_path / "out", *PORTABLE)
    words = ("the format torch has a file", "does not write them", "--target-format torch_dist")
    refused(2, *words, args=args[:3])
    change_args(monkeypatch, {"context_parallel_size": 2})
    refused(2, "context_parallel_size 2", "over each other", args=args)


def test_files_with_other_numbers_of_groups_are_refused() -> None:
    def file(name: str, groups: int) -> Any:
        return SimpleNamespace(path=name, value=[{"optimizer": {"param_groups": [{}] * groups}}])

    with pytest.raises(SourceError, match=r"^b: its optimizers have \[1\] groups.* a have \[2\]"):
        layer_wise._combined([file("a", 2), file("b", 1)])
