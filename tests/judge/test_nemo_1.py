"""Archives of NeMo 1, which mckpt reads: Megatron-Core saves a model under the keys of NeMo, and
transformers computes the logits of the export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import nemo_archive, tiny
from tests.helpers.judging import explain, judge, limit
from tests.judge.test_megatron import megatron_args

pytestmark = pytest.mark.judge

CASE = "llama"
# format -> (tp, pp) of the saves
SAVES = {
    "nemo_dist": [(2, 2)],
    "nemo_torch": [(1, 1), (2, 1), (2, 2)],
    "nemo_o2": [(1, 1)],
}
NAMES = [f"{form}-{tp}-{pp}" for form, sizes in SAVES.items() for tp, pp in sizes]


@pytest.fixture(scope="module")
def saved(work: Path) -> dict[str, dict[str, Any]]:
    source = tiny.tiny_random(CASE, work / "nemo-hf")
    cases = [
        {
            "name": f"{form}-{tp}-{pp}",
            "kind": "save",
            "args": megatron_args(source),
            "format": form,
            "destination": str(work / "nemo" / f"{form}-{tp}-{pp}"),
            "tokens": tiny.tokens(CASE).tolist(),
            "tp": tp,
            "pp": pp,
        }
        for form, sizes in SAVES.items()
        for tp, pp in sizes
    ]
    return judge(cases, 4, work / "nemo-save", timeout=300)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_transformers_computes_the_logits_of_an_archive(
    name: str, mode: str, work: Path, saved: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert saved[name]["ok"], explain(saved[name])
    config = tiny.config(CASE)
    described = nemo_archive.described(config)
    archive = nemo_archive.pack(work / "nemo" / name, described, tmp_path / "a.nemo", mode)
    ckpt = mckpt.Checkpoint.open(archive, SourceOptions(vocab_size=config["vocab_size"]))
    assert not ckpt.model.unknown_args
    mckpt.plan(ckpt, tmp_path / "out", format="hf").run()
    wanted = saved[name]["logits"]
    apart = np.abs(tiny.hf_logits(tmp_path / "out", tiny.tokens(CASE)) - wanted).max()
    assert apart < limit(wanted)
    # to Megatron too, from the directory that the archive was made of
    folder = mckpt.Checkpoint.open(work / "nemo" / name, ckpt.files.options)
    mckpt.plan(folder, tmp_path / "tp2", format="torch_dist", parallel=Parallel(tp=2)).run()
    assert not mckpt.diff(tmp_path / "tp2", tmp_path / "out")
