"""What mckpt knows of megatron-core is true of the installed one: its args, the places of layers,
and the ranks that get the parameters of Muon.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mckpt import mapping
from mckpt.formats.megatron.optimizer import layer_wise
from mckpt.mapping import MappingFile
from mckpt.mapping.inert import is_inert, known_args
from tests.helpers import placement
from tests.helpers.commands import run
from tests.helpers.lazy import torch

pytestmark = pytest.mark.judge


def test_the_installed_megatron_core_gives_the_same_placement() -> None:
    """The installed megatron-core gives the answers of the rows. It accepts some sizes that
    validate_args has already refused.
    """
    rows = placement.rows()
    asked = [row for i, row in enumerate(rows) if i % 5 == 0 or "layout" in row[2]]
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.placement"]
    done = run(command, input=json.dumps([row[:3] for row in asked]))
    answers = json.loads(done.stdout.splitlines()[-1])
    apart = [
        (row, found)
        for row, found in zip(asked, answers, strict=True)
        if row[3] not in ("lost", None) and found != row[3]
    ]
    assert not apart


def test_every_arg_of_the_installed_megatron_is_known() -> None:
    """A new version's fields are carried by a dialect, refused by it away from one value
    (`expect`), or listed in mappings/inert_args.yaml with the reason why they change nothing.
    """
    found = importlib.util.find_spec("megatron.core")
    assert found and found.origin
    core = Path(found.origin).parent
    fields = fields_of(
        core / "model_parallel_config.py", core / "transformer/transformer_config.py"
    )
    assert len(fields) > 200
    for name in mapping.names("run_config"):
        assert unlisted(mapping.load("run_config", name), fields) == []
    trainer = core.parent / "training"  # megatron-core has it from 0.19 on
    text = (trainer / "arguments.py").read_text() if trainer.exists() else ""
    flags = re.findall(r"add_argument\(\s*['\"]--([\w-]+)", text)
    args = fields_of(*trainer.glob("config/*_config.py"))
    args |= {flag.replace("-", "_") for flag in flags if "no-" not in flag}  # these set another arg
    for name in ("gpt", "hybrid", "t5", "bert"):
        assert unlisted(mapping.load("megatron", name), args) == []


def fields_of(*paths: Path) -> set[str]:
    """Returns the fields of the dataclasses in some files of Python."""
    return {
        line.target.id
        for path in paths
        for made in ast.walk(ast.parse(path.read_text()))
        if isinstance(made, ast.ClassDef)
        for line in made.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def unlisted(file: MappingFile, names: set[str]) -> list[str]:
    return sorted(n for n in names - known_args(file) if not is_inert(n))


@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs megatron-core 0.19")
def test_megatron_core_deals_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import layer_wise_optimizer

    monkeypatch.setattr(layer_wise_optimizer, "get_pg_rank", lambda group: group)
    numels = np.random.default_rng(0).integers(1, 9, 23).tolist()
    parameters = [torch.empty(n) for n in numels]
    experts = [bool(i % 3 == 0) for i in range(23)]
    for data, expert_data in ((3, 2), (2, 1)):
        own = SimpleNamespace(dp_cp=0, expt_dp=0)
        groups = [
            {"params": [p for p, e in zip(parameters, experts, strict=True) if e == expert]}
            | {"is_expert_parallel": expert}
            for expert in (False, True)
        ]
        of = layer_wise_optimizer.LayerWiseDistributedOptimizer._shard_params_ping_pong
        of(own, [SimpleNamespace(param_groups=groups)], data, expert_data)
        for expert, ranks, lists in (
            (False, data, own.dp_cp_params_list),
            (True, expert_data, own.expt_dp_params_list),
        ):
            mine = [p for p, e in zip(parameters, experts, strict=True) if e == expert]
            dealt = layer_wise.deal([len(p) for p in mine], ranks)
            for rank, held in enumerate(lists or []):
                wanted = [id(p) for p, r in zip(mine, dealt, strict=True) if r == rank]
                assert sorted(map(id, held)) == sorted(wanted)
