"""The layout and the plans of a live model, from descriptions of its ranks: without torch, and
without Megatron-Core. tests/judge/test_live.py runs models.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import errors
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.files import CheckpointFiles
from mckpt.checkpoint.model import ModelDescription
from mckpt.errors import SourceError, UsageError
from mckpt.formats.hf_encodings import WRITTEN
from mckpt.formats.megatron.torch_dist import TorchDist
from mckpt.geometry.box import row_major
from mckpt.geometry.parallel import Parallel
from mckpt.live import buckets, loading
from mckpt.live import model as live_model
from mckpt.live.memory import Part, Weight
from mckpt.live.model import OpenedModel, RankParts
from mckpt.live.optimizer import State, parts_of
from mckpt.live.steps import Steps, View, even_rooms, runs
from mckpt.options import SourceOptions, TargetOptions
from mckpt.storage import sparse_copy
from mckpt.values.dtypes import itemsize
from tests.helpers import tiny

WORLD = 2


def parts(dist_dir: Path) -> list[list[Part]]:
    """Returns the parts of two ranks: each has a half of every tensor that has an even number of
    rows, and the others whole.
    """
    opened = mckpt.open(dist_dir).opened
    assert isinstance(opened, TorchDist)
    held: list[list[Part]] = [[] for _ in range(WORLD)]
    ends = [0] * WORLD
    for key, (dtype, whole, chunks) in opened.metadata.tensors.items():
        for offset, sizes in chunks:
            axis = sum(n == 1 for n in sizes) if len(sizes) > 1 and sizes[0] == 1 else 0
            cut = sizes[axis] % WORLD == 0 and "norm" not in key and "qkv" not in key
            for rank in range(WORLD):
                own, at = list(sizes), list(offset)
                if cut:
                    own[axis] //= WORLD
                    at[axis] += rank * own[axis]
                part = Part(key, dtype, whole, tuple(at), tuple(own), row_major(own), ends[rank])
                held[rank].append(part)
                ends[rank] += part.nbytes
    return held


def model(root: Path, held: list[list[Part]], like: Path, own: int | None = None) -> Checkpoint:
    opened = OpenedModel(RankParts(root, held, own), Parallel(tp=WORLD), None)
    files = CheckpointFiles(root, SourceOptions(like=like), None, opened)
    return Checkpoint(files, ModelDescription(files))


def test_each_rank_reads_its_own_elements(src: Path, dist_dir: Path, tmp_path: Path) -> None:
    held = parts(dist_dir)
    source = mckpt.open(src)
    for rank in range(WORLD):
        live = model(tmp_path, held, src, rank)
        joined, _ = loading.join_models(source, live)
        files = [live.opened.directory.rank_of(f) for f in joined.copies["dst_file"].tolist()]
        mine = joined.copies[np.array(files) == rank]
        nbytes = int((mine["rows"] * mine["run"]).sum()) * itemsize("bfloat16")
        padding = 2 * 48 * (256 - 193) * itemsize("bfloat16")  # of the vocabulary
        assert 0 < nbytes <= sum(part.nbytes for part in held[rank]) <= nbytes + padding


@pytest.mark.parametrize("most", [1 << 20, 30_000])
def test_buckets_have_every_tensor_once_and_are_small(
    most: int, src: Path, dist_dir: Path, tmp_path: Path
) -> None:
    live = model(tmp_path, parts(dist_dir), src)
    found = buckets.plan(live, TargetOptions("hf"), most, None, True, WORLD, 0)
    wanted = {name: tensor.shape for name, tensor in mckpt.open(dist_dir).hf_tensors().items()}
    rows: dict[str, int] = {}
    for bucket in found.listed:
        assert bucket.nbytes <= most + WORLD * buckets.ALIGN
        for tensor in bucket.tensors:
            assert tensor.whole == wanted[tensor.name]
            assert tensor.first == rows.get(tensor.name, 0)
            rows[tensor.name] = tensor.first + tensor.shape[0]
        ends = 0
        for at, size in bucket.segments.values():
            assert at == ends
            ends += size
        assert ends == bucket.nbytes
    assert rows == {name: shape[0] for name, shape in wanted.items()}


def test_a_tensor_that_no_bucket_takes_is_refused(
    src: Path, dist_dir: Path, tmp_path: Path
) -> None:
    live = model(tmp_path, parts(dist_dir), src)
    with pytest.raises(UsageError, match="or slices=True"):
        buckets.plan(live, TargetOptions("hf"), 1000, None, False, WORLD, 0)
    with pytest.raises(UsageError, match="its smallest slice has"):
        buckets.plan(live, TargetOptions("hf"), 100, None, True, WORLD, 0)


def test_receivers_must_exist(src: Path, dist_dir: Path, tmp_path: Path) -> None:
    live = model(tmp_path, parts(dist_dir), src)
    with pytest.raises(UsageError, match="the ranks are 0 to 1"):
        buckets.plan(live, TargetOptions("hf"), 1 << 20, 2, False, WORLD, 0)
    with pytest.raises(UsageError, match="no tensors of these names:\n  - x"):
        buckets.plan(live, TargetOptions("hf"), 1 << 20, lambda rank: ["x"], False, WORLD, 0)


def test_ranks_must_hold_parts_of_one_model(dist_dir: Path, tmp_path: Path) -> None:
    held = parts(dist_dir)
    held[1][0] = held[1][0]._replace(dtype="float32")
    with pytest.raises(SourceError, match="the ranks do not hold parts of one model"):
        RankParts(tmp_path, held, None)


def test_a_range_of_a_parameter_is_a_few_boxes_of_its_state() -> None:
    """Elements 2 to 9 of layer 1, which is [3, 4]: . . a b | c c c c | d . . ."""
    weight = Weight("weight", None, "", at=256, nbytes=24, expert=False, parameter=True)
    part = Part("weight", "bfloat16", (2, 3, 4), (1, 0, 0), (1, 3, 4), (1, 4, 1), at=256)
    parameter: Any = None
    tensor: Any = SimpleNamespace(dtype="torch.float32", numel=lambda: 7)
    state = State("exp_avg", parameter, 2, tensor)
    optimizer: Any = SimpleNamespace(states=lambda to_save: [state], distributed=True)
    memory: Any = SimpleNamespace(weights=[weight], number=lambda place: 0)
    memory.number_of, memory.add = lambda parameter: 0, lambda name, state, expert: 1024
    found = parts_of(memory, optimizer, [part], to_save=False)
    assert {(p.key, p.dtype, p.whole) for p in found} == {
        ("optimizer.state.exp_avg.weight", "float32", (2, 3, 4))
    }
    assert [(p.offset, p.sizes, p.at) for p in found] == [
        ((1, 0, 2), (1, 1, 2), 1024),
        ((1, 1, 0), (1, 1, 4), 1032),
        ((1, 2, 0), (1, 1, 1), 1048),
    ]
    memory.number_of = lambda parameter: None
    with pytest.raises(UsageError, match="the optimizer of this model, and all chunks"):
        parts_of(memory, optimizer, [part], to_save=False)


def test_a_released_model_leaves_no_state_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer describes its model many times."""
    monkeypatch.setattr(live_model, "gathered", lambda work: [work()])
    monkeypatch.setattr(live_model, "own_result", lambda work: work())
    monkeypatch.setattr(live_model, "sizes_of", lambda memory: Parallel())
    memory: Any = SimpleNamespace(parts=lambda: ([], []), alphas=dict, nbytes=0)
    before = dict(errors._shown), dict(sparse_copy._temporary)
    model = live_model.collected(memory)
    assert len(errors._shown) == len(before[0]) + 1
    live_model.release(model)
    assert (errors._shown, sparse_copy._temporary) == before


@pytest.mark.parametrize("to", [None, 1])
def test_a_part_that_all_receivers_hold_is_not_sent(
    to: int | None, src: Path, dist_dir: Path, tmp_path: Path
) -> None:
    held = parts(dist_dir)
    moved = 4096  # the places of rank 1 are others than those of rank 0
    held[1] = [part._replace(at=part.at + moved) for part in held[1]]
    other = {(part.key, part.offset) for part in held[1]}
    same = [part for part in held[0] if (part.key, part.offset) in other]
    found = {}
    for rank in range(WORLD):
        live = model(tmp_path, held, src)
        found[rank] = buckets.plan(live, TargetOptions("hf"), 1 << 20, to, False, WORLD, rank)
    for first, second in zip(found[0].listed, found[1].listed, strict=True):
        own = first.rank == buckets.OWN
        assert own.any() and not own.all()
        assert np.array_equal(own, second.rank == buckets.OWN)
        sizes = first.copies["rows"] * first.copies["run"] * itemsize("bfloat16")
        # segments may be padded to one size
        assert sizes[~own].sum() <= first.nbytes <= buckets.UNEVEN * sizes[~own].sum() + 16
        if to == 1:  # all that rank 1 holds stays there
            assert set(first.rank[~own].tolist()) == {0}
            continue
        assert np.array_equal(first.copies["src_at"][own] + moved, second.copies["src_at"][own])
        for at in first.copies["src_at"][own].tolist():
            assert any(part.at <= at < part.at + part.nbytes for part in same)


@pytest.mark.parametrize(
    ("form", "bits", "unit"), [("fp8", 8, 128 * 128), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_what_a_rank_quantises_is_sent_as_codes(
    form: str, bits: int, unit: int, tmp_path: Path
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    src = tiny.tiny_random("qwen3", tmp_path / "src", num_hidden_layers=2, **wide)
    mckpt.convert(src, tmp_path / "dist")
    live = model(tmp_path, parts(tmp_path / "dist"), src)
    made = buckets.plan(live, TargetOptions("hf", quantize=form), None, None, False, WORLD, 0)
    plain = buckets.plan(live, TargetOptions("hf"), None, None, False, WORLD, 0)
    (bucket,), (whole,) = made.listed, plain.listed
    scheme, tensors, elements = WRITTEN[form], bucket.tensors, 0
    for one in bucket.coded:
        codes, scales = (tensors[part.number].name for part in (one.codes, one.scales))
        name = codes.removesuffix(scheme.codes)
        assert scales == name + scheme.scales
        elements += int(np.prod(one.shape))
    coded = {tensors[one.codes.number].name.removesuffix(scheme.codes) for one in bucket.coded}
    assert elements == sum(int(np.prod(t.shape)) for t in whole.tensors if t.name in coded)
    later = {tensor.name.split(".")[-2] for tensor in tensors if tensor.quantised}
    assert later == {"q_proj", "k_proj", "v_proj"}  # which both ranks hold
    width = itemsize(scheme.dtypes[0])
    saved = elements * 2 - elements * bits // 8 - elements // unit * width
    assert abs(whole.nbytes - bucket.nbytes - saved) <= 6 * buckets.ALIGN * WORLD
    ends = sorted(
        (part.at, part.at + int(np.prod(part.shape)) * itemsize(tensors[part.number].dtype))
        for one in bucket.coded
        for part in (one.codes, one.scales)
    )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_views_at_even_distances_are_one_run() -> None:
    shape, strides = (2, 3), (3, 1)
    starts = [0, 10, 20, 5, 15, 40]
    views: list[View] = [(i, shape, strides, start) for i, start in enumerate(starts)]
    views.insert(2, (6, (4,), (1,), 7))
    found = runs(views)
    memory = np.arange(64)
    places = {}
    for run in found:
        for i, number in enumerate(run.numbers):
            at = run.start + i * run.step
            size = memory.itemsize
            places[number] = np.lib.stride_tricks.as_strided(
                memory[at:], run.shape, [stride * size for stride in run.strides]
            ).tolist()
    assert len(found) == 4
    assert places[6] == [7, 8, 9, 10]
    wanted = {i: [[s, s + 1, s + 2], [s + 3, s + 4, s + 5]] for i, s in enumerate(starts)}
    assert {number: place for number, place in places.items() if number != 6} == wanted


def test_two_buckets_fit_although_one_tensor_fills_a_bucket() -> None:
    """The embedding lies in its buffer as a whole and needs no other memory. It must not give the
    other buckets a buffer of its size: a second one could not be on its way beside them.
    """
    most = 1000
    embedding = Steps(990, 0, 0, [], [], [], [], [], {})
    layers = [Steps(500 - i, 400 + i, 0, [], [], [], [], [], {}) for i in range(5)]
    found = even_rooms([embedding, *layers, embedding], most)
    assert found[0] == embedding and found[-1] == embedding
    assert {(s.buffer, s.made) for s in found[1:-1]} == {(500, 404)}
    for before, after in itertools.pairwise(found[1:-1]):
        assert before.memory + after.buffer <= 2 * most
