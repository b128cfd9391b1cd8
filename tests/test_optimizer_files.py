"""Optimizer state of releases that are not installed here, from files that they saved; and the
rules by which flat state is found.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.formats.megatron.flat_optimizer import places
from mckpt.formats.megatron.optimizer import unkept
from mckpt.geometry.box import range_boxes
from tests.door import good, refused
from tests.tiny import FIXTURES

FORMS = ("fully_sharded_model_space", "dp_zero_gather_scatter")


@pytest.fixture(params=FORMS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / request.param
    with tarfile.open(FIXTURES / "optimizer" / f"{request.param}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


def test_state_of_an_old_release_becomes_portable(saved: Path, tmp_path: Path) -> None:
    found = Checkpoint(saved).optimizer
    assert found is not None and (found.form, found.portable) == (saved.name, False)
    said = good("repair", saved, tmp_path / "out").err
    assert "of 25 weights the master copy" in said
    good("reshard", saved, tmp_path / "tp1", "--target-tp", 1)
    for other in ("out", "tp1"):
        difference = mckpt.diff(saved, tmp_path / other)
        # the gradients were random on every rank, so the ranks' copies of norms differ
        assert not difference.changed and not difference.missing and not difference.extra
        assert difference.same == 4 * 25
    assert mckpt.diff(saved, tmp_path / "out", no_optimizer=True).same == 25
    portable = Checkpoint(tmp_path / "tp1").optimizer
    assert portable is not None and portable.form == "fully_reshardable"
    assert portable.groups == found.groups and portable.groups[0][0]["step"] == 1


def test_repair_twice_changes_nothing(saved: Path, tmp_path: Path) -> None:
    good("repair", saved)
    first = saved.with_name(f"{saved.name}-portable")
    stamps = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    assert "is the repaired checkpoint already" in good("repair", saved).out
    assert "is portable already" in good("repair", first).out
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == stamps


def test_a_master_copy_that_is_not_its_weight_is_named(saved: Path, tmp_path: Path) -> None:
    row = Checkpoint(saved)["layers.0.mlp.down.weight"].numpy()[0, :4].tobytes()
    path = next(path for path in sorted(saved.glob("*.distcp")) if row in path.read_bytes())
    data = bytearray(path.read_bytes())
    where = data.index(row)
    data[where + 1] ^= 0x40
    path.write_bytes(data)
    args = ("reshard", saved, tmp_path / "out", "--target-tp", 1)
    text = refused(3, "layers.0.mlp.down.weight", "1 of ", "--no-optimizer", args=args)
    assert "layers.1" not in text and not (tmp_path / "out").exists()
    good(*args, "--no-optimizer")


def test_an_optimizer_is_not_written_as_torch(saved: Path, tmp_path: Path) -> None:
    args = ("reshard", saved, tmp_path / "out", "--target-format", "torch")
    refused(2, "optimizer", "torch_dist", "--no-optimizer", args=args)
    good(*args, "--no-optimizer")


def test_missing_state_of_one_weight_is_named(saved: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(saved, short)
    files = sorted(short.glob("*.distcp"), key=lambda path: path.stat().st_size)
    files[-1].write_bytes(files[-1].read_bytes()[:-400])
    refused(3, files[-1].name, args=("reshard", short, tmp_path / "out", "--target-tp", 1))


def test_what_an_optimizer_has_beside_its_states_is_listed() -> None:
    inner = {"optimizer": {"param_groups": []}, "param_state_sharding_type": "x"}
    assert unkept(inner) == unkept({0: inner, 1: inner}) == unkept(None) == []
    assert unkept([inner, {**inner, "grad_scaler": {}}]) == ["grad_scaler"]


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (4, 1)])
def test_the_boxes_of_a_range_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for low, high in itertools.combinations(range(numbers.size + 1), 2):
        parts = [
            numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel()
            for box in range_boxes(shape, low, high)
        ]
        assert np.concatenate(parts).tolist() == list(range(low, high))
        assert len(parts) <= 2 * len(shape) - 1


@pytest.mark.parametrize(
    "numels, buckets, expected",
    [
        ([10, 64, 3], [131], [(0, 0), (0, 64), (0, 128)]),
        ([10, 64, 3], [128, 3], [(0, 0), (0, 64), (1, 0)]),
        ([10, 60, 3], [128, 3], [(0, 0), (0, 64), (1, 0)]),  # padded in front of a bucket
        ([10, 64, 3], [130], None),
        ([10, 64, 3], [131, 64], None),
        ([10, 64], [131], None),
    ],
)
def test_the_places_of_parameters_in_buckets(
    numels: list[int], buckets: list[int], expected: list[tuple[int, int]] | None
) -> None:
    assert places(numels, buckets) == expected
