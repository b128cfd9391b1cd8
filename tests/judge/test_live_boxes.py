"""Ranks that hold boxes of tensors receive these bits of a live model, and no other bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mckpt import launching
from tests.helpers.tiny import TinyModel
from tests.judge.test_live import live

pytestmark = [pytest.mark.judge, pytest.mark.newest]

# name -> sizes of the receivers, their ranks, keywords of Sync
DENSE: dict[str, Any] = {
    "tp 4": [{"tp": 4}, [0, 1, 2, 3], {}],
    "tp 1": [{}, [3], {"bucket_bytes": "96KiB"}],
    "pp 2": [{"pp": 2}, [2, 1], {"dtype": "fp32", "snapshot": True}],
    "model": [{"model": {"tp": 2}}, [0, 1, 2, 3], {}],
}
EXPERTS: dict[str, Any] = {
    "ep 2 tp 2": [{"tp": 2, "ep": 2}, [0, 3], {}],
    "ep 4": [{"ep": 4}, [3, 2, 1, 0], {"bucket_bytes": "300KiB"}],
    "model": [{"model": {"tp": 2, "pp": 2, "etp": 2}}, [0, 1, 2, 3], {}],
}


@pytest.mark.parametrize(
    ("case", "size", "boxes"),
    [
        ("qwen3", {"tp": 2, "pp": 2}, DENSE),
        ("qwen3-moe", {"ep": 4, "etp": 1}, EXPERTS),
        ("qwen3-moe-raw", {"tp": 2, "ep": 2, "etp": 1}, EXPERTS),
        pytest.param(  # one tensor has q, k and v, so each rank holds three boxes of it
            "phi3", {"tp": 2}, {"tp 2": [{"tp": 2}, [1, 0], {}]}, marks=pytest.mark.slow
        ),
    ],
)
def test_each_rank_receives_its_slices_of_the_whole_tensors(
    case: str, size: dict[str, Any], boxes: dict[str, Any], work: Path, tiny_model: TinyModel
) -> None:
    source = tiny_model(case)
    found = live(source, work, size, like=source, boxes=boxes)
    assert len(found["wrong"]) == 2 * len(boxes)
    assert not any(found["wrong"].values()), found["wrong"]
    for name, (received, held, whole) in found["bytes"].items():
        # experts of ep 2 may be where they are needed
        assert received <= held and bool(received) == (
            case != "qwen3-moe-raw" or name != "ep 2 tp 2"
        )
        assert received < whole, name  # a whole Sync gives all tensors to four ranks


def test_engines_in_other_processes_receive_their_boxes(work: Path, tiny_model: TinyModel) -> None:
    source = tiny_model("qwen3")
    ports = {"boxes": {}, "engines": launching.free_port(), "world": 2}
    found = live(source, work, {"tp": 2}, like=source, **ports)
    assert len(found["wrong"]) == 2 * 5
    assert not any(found["wrong"].values()), found["wrong"]
    assert all(received == held for received, held in found["bytes"])
    said = {
        "other boxes": "rank 2: states [((0, 1),)] of model.norm.weight, and `to` has",
        "another shape": "a rank has stopped before it had all tensors",
        "early": "a rank has stopped before it had all tensors",
        "changed": "was bfloat16 [",
        "lost": "the ranks of the model lost each other",
    }
    refused = found["errors"]["another shape"]
    assert "and there is no such tensor to fill" in refused.pop(3)
    for name, text in said.items():
        errors = found["errors"][name]
        assert all(text in error for error in errors if error), errors
        assert [bool(error) for error in errors].count(True) >= 3, errors
    assert found["seconds"] < 25
