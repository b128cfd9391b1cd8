"""A plan for many ranks, and a sink that finds what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from benchmarks import models, syncs
from benchmarks.sink import Sink
from mckpt import live
from mckpt.geometry.parallel import Parallel
from mckpt.live.direct import PEERS, Links, plan_boxes
from mckpt.options import TargetOptions

WORLD = 16
ENGINES = {"tp 2": {"tp": 2}, "ep 4": {"ep": 4}, "tp 2 ep 2": {"tp": 2, "ep": 2}}


class Case:
    """A model of DeepSeek-V3's family at tp 2, pp 2 and ep 4."""

    def __init__(self, work: Path) -> None:
        smaller = {"num_hidden_layers": 4, "n_routed_experts": 8, "first_k_dense_replace": 1}
        self.config = syncs.config("deepseek-v3", 64) | smaller
        hf = models.write(self.config, work / "hf", sparse=True)
        trainer = syncs.Trainer(hf, Parallel(tp=2, pp=2, ep=4, etp=1), WORLD)
        self.model = trainer.model(work)
        self.parts = [trainer.parts(rank) for rank in range(WORLD)]

    def boxes(self, engine: str) -> dict[int, Any]:
        return dict(enumerate(live.engine_boxes(self.model, **ENGINES[engine]), WORLD))

    def links(self, boxes: dict[int, Any], most: int | None = None) -> Links:
        return plan_boxes(self.model, TargetOptions("hf"), most, boxes, range(WORLD))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("syncs"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_receiver_gets_the_elements_that_it_waits_for(case: Case, engine: str) -> None:
    boxes = case.boxes(engine)
    sink = Sink(case.links(boxes), boxes, case.parts, case.config)
    assert sink.proof() == sink.sampled(3) == sink.every() == []
    expected = sum(np.prod(np.diff(b, axis=1)) for of in boxes.values() for n in of for b in of[n])
    assert sink.num_checked == 3 * len(sink.copies) + expected


def gate_and_up(links: Links) -> tuple[int, int]:
    """Returns two copies to one rank: of gate and of up of one expert."""
    names = [links.held.tensor(n).name for n in links.box.tolist()]
    found = [f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up")]
    first, second = names.index(found[0]), names.index(found[1])
    assert links.receiver[first] == links.receiver[second]
    return first, second


def shifted_row(links: Links, copies: np.ndarray) -> None:
    copies["src_at"][gate_and_up(links)[0]] += 2 * 112


def swapped(links: Links, copies: np.ndarray) -> None:
    a, b = gate_and_up(links)
    copies["src_at"][[a, b]] = copies["src_at"][[b, a]]


def other_expert(links: Links, copies: np.ndarray) -> None:
    """Expert 4 lies before expert 5 on the same rank, and each has three matrices of a size."""
    first = gate_and_up(links)[0]
    copies["src_at"][first] -= 3 * 2 * 112 * 32


def other_sender(links: Links, copies: np.ndarray) -> None:
    """Ranks 0 to 7 have the first stage, and the ranks behind them the last one."""
    links.sender[gate_and_up(links)[0]] ^= 8


def shorter(links: Links, copies: np.ndarray) -> None:
    copies["run"][gate_and_up(links)[0]] -= 1


def other_pitch(links: Links, copies: np.ndarray) -> None:
    cut = np.flatnonzero((copies["rows"] > 1) & (copies["src_pitch"] > 2 * copies["run"]))
    copies["src_pitch"][cut[0]] -= 2


def other_box(links: Links, copies: np.ndarray) -> None:
    """A copy goes to the box beside its own, which then gets two copies."""
    copies["dst_at"][gate_and_up(links)[0]] = copies["dst_at"][gate_and_up(links)[1]]
    links.box[gate_and_up(links)[0]] = links.box[gate_and_up(links)[1]]


WRONG = [shifted_row, swapped, other_expert, other_sender, shorter, other_pitch, other_box]


@pytest.mark.parametrize("change", WRONG)
def test_the_sink_finds_a_wrong_copy(case: Case, change: Any) -> None:
    boxes = case.boxes("tp 2")
    links = case.links(boxes)
    change(links, links.joined.copies)
    for check in (Sink.proof, Sink.every):
        assert check(Sink(links, boxes, case.parts, case.config)), check


@pytest.mark.parametrize("lost", [0, -1, 100])
def test_the_sink_finds_a_transfer_that_is_missing(case: Case, lost: int) -> None:
    boxes = case.boxes("ep 4")
    links = case.links(boxes)
    copies = structs.replace(links.joined, copies=np.delete(links.joined.copies, lost))
    left = {name: np.delete(getattr(links, name), lost) for name in ("box", "sender", "receiver")}
    links = links._replace(joined=copies, **left)
    for check in (Sink.proof, Sink.every):
        assert check(Sink(links, boxes, case.parts, case.config)), check


@pytest.mark.parametrize("engine", ENGINES)
def test_all_receivers_go_on_at_the_same_pace(case: Case, engine: str) -> None:
    every = case.boxes(engine)
    boxes = {
        rank: {n: b for n, b in held.items() if ".experts." in n} for rank, held in every.items()
    }
    whole = case.links(boxes).transfers
    received = np.bincount(whole.receiver, whole.nbytes)[WORLD:]
    most = int(received.max()) // 4
    links = case.links(boxes, most)
    assert links.num_buckets <= 1.5 * received.max() / (most // 2)
    for bucket in range(links.num_buckets - 1):
        here = links.bucket == bucket
        assert len(set(links.receiver[here].tolist())) == len(boxes), bucket
    pairs = np.unique(np.stack([links.bucket, links.receiver, links.sender]), axis=1)
    _, messages = np.unique(pairs[:2], axis=1, return_counts=True)
    assert messages.mean() <= PEERS
    assert dict(links.transfers.links()) == links.of(WORLD - 1, all_transfers=True).links
