"""A rank of a thousand holds what benchmarks/syncs.py says without any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import models, syncs
from mckpt.geometry.parallel import Parallel
from tests.helpers.judging import ask

pytestmark = [pytest.mark.judge, pytest.mark.newest]
RANKS = [0, 517, 1023]


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
def test_ranks_hold_the_shards_that_megatron_core_names(model: str, tmp_path: Path) -> None:
    hf = models.write(syncs.config(model), tmp_path / "hf", sparse=True)
    sizes = Parallel(tp=8, pp=16, ep=32, etp=1, last_stage_layers=1)
    trainer = syncs.Trainer(hf, sizes, 1024)
    args = trainer.args() | {"decoder_last_pipeline_num_layers": 1}
    given: Any = {"tp": 8, "pp": 16, "ep": 32, "etp": 1, "world": 1024, "ranks": RANKS}
    real = ask("shards", te=True, name=model, args=args, **given)["shards"]
    for rank, shards in zip(RANKS, real, strict=True):
        own = [
            [p.key, f"torch.{p.dtype}", *map(list, (p.whole, p.offset, p.sizes))]
            for p in trainer.parts(rank)
        ]
        assert len(shards) > 20
        assert sorted(own) == sorted(shards), rank
