"""Published models, whole and at their full size: a family reads their config.json and the names
and shapes that transformers would save, and each dialect has a place for every tensor.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt import mapping
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests import published_page
from tests.helpers import published
from tests.helpers.published import (
    CONFIGS,
    DIALECTS,
    INEXACT,
    NAMES,
    REPOSITORIES,
    UNLOADABLE,
    UNTIL,
)

PAIRS = [
    (n, d) for n in NAMES for d in DIALECTS.get(n, ("gpt", "hybrid")) if (n, d) not in UNLOADABLE
]


PLANS_S = 120  # of processor time for all plans; 31 s on two cores, 66 s when they are loaded
spent: list[float] = []  # seconds of processor time for each plan


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, work: Path) -> Iterator[published.Writing]:
    """Yields the models of the chosen tests, while they are written."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {call.params.get("name") for call in calls if call}
    writing = published.Writing([n for n in NAMES if n in chosen], work / "published")
    yield writing
    writing.end()


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the byte at which its data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def assert_published(parameters: str, elements: int) -> None:
    """Fails if a model has other than the published number of parameters, such as 8.03B. One unit
    of the last digit or 1 % is allowed, and at most 3 %: some publishers do not round but cut.
    """
    number, power = parameters[:-1], {"M": 10**6, "B": 10**9, "T": 10**12}[parameters[-1]]
    unit = power / 10 ** len(number.partition(".")[2])
    stated = float(number) * power
    allowed = min(max(unit, stated / 100), 3 * stated / 100)
    assert abs(elements - stated) <= allowed, f"{elements:,} elements"


@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_every_tensor_of_a_published_model_has_a_place(
    name: str, dialect: str, models: published.Writing, tmp_path: Path
) -> None:
    model = models.wait(name)
    start = time.process_time()
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    # transformers has no layers of multi-token prediction, and saves none of their tensors
    known = SourceOptions(settings={"mtp_layers": 0} if family.read(config)["mtp_layers"] else {})
    plan = mckpt.plan(
        mckpt.Checkpoint.open(model, known),
        tmp_path / "out",
        format="torch_dist",
        dialect=dialect,
        parallel=Parallel(tp=published.TP.get(name, 2)),
        allow_inexact=INEXACT.get((name, dialect), ()),
        megatron_version=UNTIL.get(name),
    )
    copied = set(plan.joined.copies["src_at"].tolist())
    spent.append(time.process_time() - start)
    header, start_of_data = header_of(model / "model.safetensors")
    starts = {key: start_of_data + tensor["data_offsets"][0] for key, tensor in header.items()}
    assert not [tensor for tensor, at in starts.items() if at not in copied]
    if parameters := REPOSITORIES[name]["parameters"]:
        assert_published(parameters, sum(prod(tensor["shape"]) for tensor in header.values()))


def test_the_plans_of_all_of_them_take_less_than_two_minutes() -> None:
    assert sum(spent) < PLANS_S, f"{sum(spent):.1f} s for {len(spent)} plans"


def test_each_config_has_its_repository() -> None:
    assert sorted(REPOSITORIES) == list(NAMES)
    for name, facts in REPOSITORIES.items():
        for repository in (facts["repository"], *facts.get("also", ())):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository), name


def test_the_page_of_published_models_is_that_of_the_configs() -> None:
    """`python -m tests.published_page` writes it again."""
    assert published_page.PAGE.read_text() == published_page.page()
