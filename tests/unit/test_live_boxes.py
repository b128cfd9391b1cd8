"""The plan of boxes of a live model, carried out with numpy: without torch and Megatron-Core."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import UsageError
from mckpt.formats.megatron.torch_dist import TorchDist
from mckpt.geometry.box import row_major
from mckpt.geometry.join import join
from mckpt.live import engine_boxes
from mckpt.live.boxes import HeldBoxes
from mckpt.live.buckets import OWN, exported
from mckpt.live.direct import Links, plan_boxes
from mckpt.live.memory import Part
from mckpt.live.model import ranks_of
from mckpt.options import TargetOptions
from tests.unit.test_live_model import model

HF = TargetOptions("hf")
TRAINERS = [2, 0, 3]  # the ranks of three trainers in a group of five
GROUP = 5


def random_model(rng: Random, dist_dir: Path, src: Path, root: Path) -> Checkpoint:
    """Returns a model whose tensors, or halves of them, lie on random ranks."""
    opened = mckpt.open(dist_dir).opened
    assert isinstance(opened, TorchDist)
    held: list[list[Part]] = [[] for _ in TRAINERS]
    ends = [rng.randrange(9) * 256 for _ in TRAINERS]
    for key, (dtype, whole, chunks) in opened.metadata.tensors.items():
        for offset, sizes in chunks:
            axis = sum(n == 1 for n in sizes) if len(sizes) > 1 and sizes[0] == 1 else 0
            fits = sizes[axis] % 2 == 0 and "norm" not in key and "qkv" not in key
            ways = rng.choice([1, 2]) if fits else 1
            for half in range(ways):
                own, at = list(sizes), list(offset)
                own[axis] //= ways
                at[axis] += half * own[axis]
                for rank in rng.sample(range(len(TRAINERS)), rng.randint(1, len(TRAINERS))):
                    given = dtype, whole, tuple(at), tuple(own), row_major(own), ends[rank]
                    held[rank].append(Part(key, *given))
                    ends[rank] += -(-held[rank][-1].nbytes // 256) * 256
    return model(root, held, src)


def random_boxes(rng: Random, shapes: dict[str, tuple[int, ...]]) -> HeldBoxes:
    found: HeldBoxes = {}
    for name, shape in shapes.items():
        for _ in range(rng.choice([0, 1, 1, 2])):
            ends = (sorted(rng.sample(range(n + 1), 2)) for n in shape)
            found.setdefault(name, []).append(tuple((a, b) for a, b in ends))
    return found


def view(memory: np.ndarray, at: int, shape: Any, pitch: int, step: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory[at // 2 :], shape, (pitch, step))


def memories(live: Checkpoint) -> list[np.ndarray]:
    """Returns the memory of each trainer; all copies of a part have the same bits."""
    rng, out = np.random.default_rng(0), [np.zeros(1 << 20, "i2") for _ in TRAINERS]
    for same in ranks_of(live).holders.values():
        bits = rng.integers(-(1 << 15), 1 << 15, same[0][1].nbytes // 2, "i2")
        for rank, part in same:
            out[rank][part.at // 2 :][: len(bits)] = bits
    return out


def whole_tensors(live: Checkpoint, held: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of the Hugging Face directory, by the join that a conversion makes."""
    _, layout, rows, _ = exported(live, HF)
    assert len(layout.files) == 1
    file = np.zeros(max(at + row.nbytes for row, at in rows) // 2, "i2")
    for c in join(live.layout, layout).copies:
        shape, rank = (c["rows"], c["run"]), ranks_of(live).rank_of(c["src_file"])
        source = view(held[rank], c["src_at"], shape, c["src_pitch"], c["src_step"])
        view(file, c["dst_at"], shape, c["dst_pitch"], c["dst_step"])[:] = source
    return {row.key: file[at // 2 :][: row.nbytes // 2].reshape(row.shape) for row, at in rows}


def received(links: Links, held: list[np.ndarray], most: int) -> dict[int, dict[Any, np.ndarray]]:
    """Returns what each rank of the group has after a call: its boxes, of which no element was
    written twice. Each message that a rank awaits is one that its sender sends.
    """
    plans = [links.of(rank) for rank in range(GROUP)]
    out: dict[int, dict[Any, np.ndarray]] = {rank: {} for rank in range(GROUP)}
    for buckets in zip(*(plan.listed for plan in plans), strict=True):
        messages: dict[tuple[int, int], np.ndarray] = {}
        for rank, bucket in enumerate(buckets):
            buffer = np.zeros(bucket.nbytes // 2 + 1, "i2")
            loads = [size for _, size in (*bucket.sent.items(), *bucket.segments.items())]
            assert sum(n for _, n in loads) <= most or len(bucket.tensors) == 1
            for c, sender, at in zip(bucket.copies, bucket.rank, bucket.at, strict=True):
                if sender == rank:
                    shape = c["rows"], c["run"]
                    source = held[TRAINERS.index(rank)]
                    source = view(source, c["src_at"], shape, c["src_pitch"], c["src_step"])
                    view(buffer, at, shape, 2 * c["run"], 2)[:] = source
            for to, (at, size) in bucket.sent.items():
                messages[rank, to] = buffer[at // 2 :][: size // 2].copy()
        for rank, bucket in enumerate(buckets):
            buffer = np.zeros(bucket.nbytes // 2 + 1, "i2")
            for sender, (at, size) in bucket.segments.items():
                buffer[at // 2 :][: size // 2] = messages.pop((sender, rank))
            made = [np.zeros(math.prod(t.shape), "i2") for t in bucket.tensors]
            counts = [np.zeros(math.prod(t.shape), "i2") for t in bucket.tensors]
            columns = bucket.copies, bucket.tensor, bucket.rank, bucket.at
            for c, number, sender, at in zip(*columns, strict=True):
                tensor, shape = bucket.tensors[number], (c["rows"], c["run"])
                if sender == rank:
                    continue
                source = view(buffer, at, shape, 2 * c["run"], 2)
                if sender == OWN:
                    source = held[TRAINERS.index(rank)]
                    source = view(source, c["src_at"], shape, c["src_pitch"], c["src_step"])
                place = c["dst_at"] - tensor.byte, shape, c["dst_pitch"], c["dst_step"]
                view(made[number], *place)[:] = source
                view(counts[number], *place)[:] += 1
            for tensor, values, count in zip(bucket.tensors, made, counts, strict=True):
                if rank in tensor.to:
                    assert (count == 1).all(), tensor
                    key = tensor.name, tensor.start, tensor.shape
                    out[rank][key] = values.reshape(tensor.shape)
        assert not messages
    return out


@settings(max_examples=8)
@given(st.randoms(use_true_random=False), st.sampled_from([1 << 20, 40_000]))
def test_each_receiver_gets_its_boxes_and_no_other_bytes(
    src: Path, dist_dir: Path, tmp_path_factory: pytest.TempPathFactory, rng: Random, most: int
) -> None:
    live = random_model(rng, dist_dir, src, tmp_path_factory.mktemp("live"))
    held = memories(live)
    wanted = whole_tensors(live, held)
    shapes = {name: tensor.shape for name, tensor in wanted.items()}
    receivers = rng.sample(range(GROUP), rng.randint(1, GROUP))
    boxes = {rank: random_boxes(rng, shapes) for rank in receivers}
    links = plan_boxes(live, HF, most, boxes, TRAINERS)
    found = received(links, held, most // 2)
    for rank in range(GROUP):
        listed = [(name, box) for name, of in boxes.get(rank, {}).items() for box in of]
        assert len(found[rank]) == len(set(listed))
        for name, box in listed:
            start, shape = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            right = wanted[name][tuple(slice(a, b) for a, b in box)]
            assert np.array_equal(found[rank][name, start, shape], right), (rank, name, box)
    expect_plan(links, live, boxes)


def expect_plan(links: Links, live: Checkpoint, boxes: dict[int, HeldBoxes]) -> None:
    """Fails unless the transfers have all bytes of the boxes, and a rank that holds an element does
    not receive it.
    """
    sizes = Counter[int]()
    for one in links.transfers:
        sizes[one.receiver] += one.nbytes
        offset = tuple(a for a, _ in one.source_box)
        holders = {TRAINERS[rank] for rank, _ in ranks_of(live).holders[one.source, offset]}
        assert one.sender in holders
        assert one.receiver not in holders or one.sender == one.receiver
    for rank, held in boxes.items():
        of_each = (math.prod(b - a for a, b in box) for of in held.values() for box in of)
        assert sizes[rank] == 2 * sum(of_each)
    whole = links.of(TRAINERS[0], all_transfers=True).links
    assert whole == {
        pair: sum(t.nbytes for t in links.transfers if (t.sender, t.receiver) == pair)
        for pair in {(t.sender, t.receiver) for t in links.transfers if t.sender != t.receiver}
    }


def test_replicas_send_the_same_number_of_bytes(src: Path, dist_dir: Path, tmp_path: Path) -> None:
    """Both ranks hold the whole model, and two others receive it."""
    opened = mckpt.open(dist_dir).opened
    assert isinstance(opened, TorchDist)
    held, end = list[Part](), 0
    for key, (dtype, whole, chunks) in opened.metadata.tensors.items():
        for offset, sizes in chunks:
            held.append(Part(key, dtype, whole, offset, sizes, row_major(sizes), end))
            end += held[-1].nbytes
    live = model(tmp_path, [held, held], src)
    boxes = {2: engine_boxes(src)[0], 3: engine_boxes(src)[0]}
    links = plan_boxes(live, HF, None, boxes, [0, 1]).of(0, all_transfers=True).links
    sent = [links[rank, 2] + links[rank, 3] for rank in (0, 1)]
    assert sum(sent) == 2 * sum(tensor.nbytes for tensor in mckpt.open(src).hf_tensors().values())
    assert max(sent) - min(sent) <= max(part.nbytes for part in held)


def test_boxes_that_do_not_exist_are_refused(src: Path, dist_dir: Path, tmp_path: Path) -> None:
    live = random_model(Random(1), dist_dir, src, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    for box, said in (
        ({"x": [((0, 1),)]}, "rank 1: the model has no x"),
        ({name: [((0, 1),)]}, "and a box"),
        ({name: [((0, 1), (3, 3))]}, "and a box"),
        ({name: [((0, 1000), (0, 1))]}, "and a box"),
    ):
        with pytest.raises(UsageError, match=said):
            plan_boxes(live, HF, None, {1: box}, TRAINERS)
    assert plan_boxes(live, HF, None, {}, TRAINERS).of(0).listed == []  # nobody receives
    with pytest.raises(UsageError, match="boxes are larger than bucket_bytes, 64;"):
        plan_boxes(live, HF, 64, {1: {name: [((0, 16), (0, 48))]}}, TRAINERS)
