"""Archives of NeMo 1, which mckpt reads: Megatron-Core saves a model under the keys of NeMo, and
transformers computes the logits of the export.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import nemo_archive, tiny
from tests.helpers.judging import ask, limit
from tests.helpers.tiny import TinyModel
from tests.judge.test_megatron import megatron_args

pytestmark = pytest.mark.judge

CASE = "llama"
# format -> (tp, pp) of the saves
SAVES = {
    "nemo_dist": [(2, 2)],
    "nemo_torch": [(1, 1), (2, 1), (2, 2)],
    "nemo_o2": [(1, 1)],
}


@pytest.fixture(
    scope="module", params=[(form, *one) for form in SAVES for one in SAVES[form]], ids=str
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel
) -> tuple[Path, np.ndarray]:
    """A directory that Megatron-Core saved, and the logits."""
    form, tp, pp = request.param
    out, tokens = tmp_path_factory.mktemp("nemo") / form, tiny.tokens(CASE)
    given = {"args": megatron_args(tiny_model(CASE)), "tokens": tokens, "tp": tp, "pp": pp}
    return out, ask("save", format=form, destination=out, **given)["logits"]


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_transformers_computes_the_logits_of_an_archive(
    mode: str, saved: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    place, wanted = saved
    config = tiny.config(CASE)
    described = nemo_archive.described(config)
    archive = nemo_archive.pack(place, described, tmp_path / "a.nemo", mode)
    ckpt = mckpt.Checkpoint.open(archive, SourceOptions(vocab_size=config["vocab_size"]))
    assert not ckpt.model.unknown_args
    mckpt.plan(ckpt, tmp_path / "out", format="hf").run()
    apart = np.abs(tiny.hf_logits(tmp_path / "out", tiny.tokens(CASE)) - wanted).max()
    assert apart < limit(wanted)
    # to Megatron too, from the directory that the archive was made of
    folder = mckpt.Checkpoint.open(place, ckpt.files.options)
    mckpt.plan(folder, tmp_path / "tp2", format="torch_dist", parallel=Parallel(tp=2)).run()
    assert not mckpt.diff(tmp_path / "tp2", tmp_path / "out")
