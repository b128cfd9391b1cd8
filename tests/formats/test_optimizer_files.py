"""Optimizer state of releases that are not installed here, from files that they saved; and the
rules by which flat state is found.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mckpt import mapping
from mckpt.checkpoint import masters
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import Reader
from mckpt.conversion.optimizer import prove
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Names
from mckpt.formats.megatron.interface import Common
from mckpt.formats.megatron.optimizer import flat, group_of, torch_reading
from mckpt.formats.megatron.optimizer import state as links
from mckpt.formats.megatron.optimizer.flat import places
from mckpt.formats.megatron.optimizer.state import (
    groups_of,
    regrouped,
    rescaled,
    scalers_of,
    unkept,
)
from mckpt.geometry.box import Box, Layout, Piece, Stored, range_boxes
from mckpt.geometry.parallel import Parallel
from mckpt.mapping.registration import Registration
from mckpt.trainer.optimizer_order import same_order
from mckpt.values.dtypes import numpy_dtype
from tests.helpers.commands import Pt, good, refused
from tests.helpers.judged_models import MOE, QWEN3
from tests.helpers.tiny import unpack

FORMS = ("fully_sharded_model_space", "dp_zero_gather_scatter")


@pytest.fixture(params=FORMS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(f"optimizer/{request.param}", tmp_path / request.param)


def test_the_form_of_an_old_release_is_known(saved: Path) -> None:
    found = Checkpoint.open(saved).optimizer
    assert found is not None and (found.form, found.portable) == (saved.name, False)
    assert found.groups[0][0]["step"] == 1


def test_run_config_states_whether_there_is_optimizer_state(saved: Path, tmp_path: Path) -> None:
    """The state of an embedding must have the rows of the model that Megatron-Bridge builds."""
    rows = Checkpoint.open(saved).opened.padded_vocab(Checkpoint.open(saved).mapping)
    wanted = ("--keep-padding", "--run-config", "--transformer-impl", "transformer_engine")
    for options in ((), ("--no-optimizer",)):
        out = tmp_path / f"out{len(options)}"
        good("reshard", saved, out, "--target-tp", 1, *wanted, *options)
        (path,) = out.rglob("run_config.yaml")
        found = yaml.safe_load(path.read_text())
        assert found["checkpoint"]["save_optim"] is not bool(options)
        assert found["model"]["should_pad_vocab"] is bool(options)
        if not options:
            assert found["model"]["vocab_size"] == rows


def test_repair_twice_changes_nothing(saved: Path, tmp_path: Path) -> None:
    good("repair", saved)
    first = saved.with_name(f"{saved.name}-portable")
    stamps = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    assert "is done already" in good("repair", saved).out
    assert "is portable already" in good("repair", first).out
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == stamps


def test_a_master_copy_that_is_not_its_weight_is_named(saved: Path, tmp_path: Path) -> None:
    row = Checkpoint.open(saved)["layers.0.mlp.down.weight"].numpy()[0, :4].tobytes()
    path = next(path for path in sorted(saved.glob("*.distcp")) if row in path.read_bytes())
    data = bytearray(path.read_bytes())
    where = data.index(row)
    data[where + 1] ^= 0x40
    path.write_bytes(data)
    args = ("reshard", saved, tmp_path / "out", "--target-tp", 1)
    text = refused(3, "layers.0.mlp.down.weight", "1 of ", "--no-optimizer", args=args)
    assert "layers.1" not in text and not (tmp_path / "out").exists()
    good(*args, "--no-optimizer")


@pytest.mark.parametrize("saved", FORMS[:1], indirect=True)
def test_torch_files_are_those_of_megatron(saved: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    good("reshard", saved, tmp_path / "out", "--target-format", "torch", "--target-tp", 2)
    for rank in range(2):
        (unit,) = (tmp_path / "out").glob(f"iter_*/mp_rank_{rank:02d}")
        model = torch.load(unit / "model_optim_rng.pt", weights_only=False)
        assert {len(group) > 5 for group in model["optimizer"]["optimizer"]["param_groups"]}
        assert list(model["optimizer"]) == ["optimizer"]
        flat = torch.load(unit / "distrib_optim.pt", weights_only=False)
        buffer = flat[0][torch.bfloat16, torch.float32]
        assert list(flat) == ["buckets_coalesced", 0] and flat["buckets_coalesced"] is True
        assert list(buffer) == ["param", "exp_avg", "exp_avg_sq", "numel_unpadded"]
        at = 0  # the last parameter is the first one, and each is from a multiple of 64 on
        for key, weight in reversed(model["model"].items()):
            if weight is not None:
                at = -(-at // 64) * 64
                master = buffer["param"][at : at + weight.numel()].view(weight.shape)
                assert torch.equal(master.bfloat16(), weight), key
                at += weight.numel()
        assert buffer["numel_unpadded"] == at == len(buffer["exp_avg"])


@pytest.mark.parametrize("saved", FORMS[:1], indirect=True)
def test_the_classes_of_an_offloaded_optimizer_are_left_out(saved: Path, tmp_path: Path) -> None:
    """A run with --optimizer-cpu-offload saves classes, and torch.load, which Megatron-Core calls
    for common.pt and for the files of `torch`, refuses them.
    """
    torch = pytest.importorskip("torch")
    common = torch.load(saved / "common.pt", weights_only=False)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group |= {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.Adam}
        group |= {"offload_fraction": 0.5}
    torch.save(common, saved / "common.pt")
    for form, name in (("torch_dist", "common.pt"), ("torch", "model_optim_rng.pt")):
        args = ("--target-format", form, "--target-tp", 1)
        good("reshard", saved, tmp_path / form, *args)
        (path,) = (tmp_path / form).rglob(name)
        with torch.serialization.safe_globals([argparse.Namespace]):
            groups = torch.load(path)["optimizer"]["optimizer"]["param_groups"]
        assert [group["offload_fraction"] for group in groups] == [0.5] * 2


@pytest.mark.parametrize("saved", FORMS[:1], indirect=True)
def test_weight_decay_is_kept_under_the_names_of_nemo(saved: Path, tmp_path: Path) -> None:
    """Megatron's OptimizerParamScheduler multiplies weight decay by group.get("wd_mult", 1.0)."""
    torch = pytest.importorskip("torch")
    common = torch.load(saved / "common.pt", weights_only=False)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group |= {f"pre_{name}": group.pop(name) for name in ("lr_mult", "wd_mult")}
    torch.save(common, saved / "common.pt")
    good("reshard", saved, tmp_path / "out", "--target-tp", 1)
    (path,) = (tmp_path / "out").rglob("common.pt")
    groups = torch.load(path, weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [group.get("wd_mult", 1.0) for group in groups] == [1.0, 0.0]
    assert [group["pre_wd_mult"] for group in groups] == [1.0, 0.0]


@pytest.mark.parametrize("saved", FORMS[:1], indirect=True)
def test_steps_and_rates_that_are_tensors_are_read(saved: Path, tmp_path: Path) -> None:
    """Transformer Engine's FusedAdam has these with --optimizer-cuda-graph."""
    torch = pytest.importorskip("torch")

    def change(path: Path, *steps: int) -> None:
        common = torch.load(path, weights_only=False)
        for group in common["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = torch.tensor(steps, dtype=torch.int32)
            group["lr"] = torch.tensor(0.125)
        torch.save(common, path)

    change(saved / "common.pt", 7)
    args = ("--target-format", "torch", "--target-tp", 1)
    good("reshard", saved, tmp_path / "files", *args)
    (path,) = (tmp_path / "files").rglob("model_optim_rng.pt")
    groups = torch.load(path, weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [(group["step"], group["lr"]) for group in groups] == [(7, 0.125)] * 2
    change(path, 8)
    (path.parents[1] / "mckpt.json").unlink()
    good("reshard", tmp_path / "files", tmp_path / "out", "--target-format", "torch_dist")
    (path,) = (tmp_path / "out").rglob("common.pt")
    groups = torch.load(path, weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [(group["step"], group["lr"]) for group in groups] == [(8, 0.125)] * 2
    change(saved / "common.pt", 7, 7)
    words = "has step in a group, which is a tensor"
    refused(2, words, args=("reshard", saved, tmp_path / "not", *args))


def test_the_optimizers_of_a_rank_follow_the_sizes() -> None:
    order = Registration(experts_apart=(0, 17))
    both = Parallel(tp=2, ep=2, etp=1)
    assert order.num_optimizers(both, 0, [0, 19]) == 1
    assert order.num_optimizers(both, 4, [0, 16]) == 2
    assert order.num_optimizers(Parallel(tp=2, etp=1), 4, [0, 16]) == 1
    assert order.num_optimizers(Parallel(tp=2, etp=1), 4, [0, 17]) == 2
    assert order.num_optimizers(Parallel(tp=2), 4, [0, 17]) == 1
    dense = [{"wd_mult": 1.0, "is_expert_parallel": False}]
    experts = [{"wd_mult": 1.0, "is_expert_parallel": True}]
    assert regrouped([dense], 2) == [dense, experts]
    assert regrouped([dense, experts], 1) == [dense]
    assert regrouped([dense, experts], 2) == [dense, experts]
    with pytest.raises(UsageError, match="a rank of the source has 2 optimizers"):
        regrouped([dense, dense], 2)


def test_the_optimizers_of_muon_follow_the_sizes() -> None:
    """Megatron-Core 0.19 has them in this order, with and without experts on ranks of their own."""
    muon = {"wd_mult": 1.0, "is_expert_parallel": False}
    experts = {"wd_mult": 1.0, "is_expert_parallel": True}
    adam = [{**muon, "optimizer": "adam"}, {**muon, "wd_mult": 0.0, "optimizer": "adam"}]
    apart, together, by_layers = [[muon], [experts], adam], [[muon], adam], [[muon, experts], adam]
    dialect = mapping.load("megatron", "gpt")
    for biases in (False, True):
        args = MOE | QWEN3 | {"add_bias_linear": biases}
        dims = dialect.read(args, source="args")
        chosen = dict.fromkeys(("keys", "transformer_impl"), "local") | {"layers": "stacked"}
        chosen |= {"experts": "sequential", "pp": 1, **dialect.choices_for([0, 19])}
        names = Names(dialect, dims, chosen, Parallel(ep=2))
        for source in (apart, together, by_layers):
            more = [[{**adam[1], "is_expert_parallel": True}]] * (biases and source is together)
            assert links.muon_groups(source, names, True, False) == [*apart, *more]
            assert links.muon_groups(source, names, False, False) == together
        assert links.muon_groups(apart, names, True, True) == by_layers
    assert links.is_muon(apart) and not links.is_muon([[muon], [experts]])
    rules = {b.rule.of[0]: b for b in names.bound if b.rule.of}
    found = [link.updates for link in links.links(apart)]
    for name, axes, wanted in (
        ("layers.{layer}.attn.o.weight", 2, [True, False, False]),
        ("layers.{layer}.moe.experts.{expert}.down.weight", 2, [False, True, False]),
        ("layers.{layer}.attn.q_norm.weight", 1, [False, False, True]),
        ("embed.weight", 2, [False, False, True]),
    ):
        assert [updates(rules[name], axes) for updates in found] == wanted
    links.refuse_target(True, False, [0, 19])
    with pytest.raises(UsageError, match=r"for megatron-core 0\.19 and later"):
        links.refuse_target(False, False, [0, 16])
    with pytest.raises(UsageError, match="distributed by layers"):
        links.refuse_target(True, True, [0, 19])


def test_groups_that_differ_in_more_than_decay_are_refused() -> None:
    norm = "decoder.layers.0.self_attention.q_layernorm.weight", 1
    weight = "output_layer.weight", 2
    both = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    assert [group_of(*p, both, {}) for p in (weight, norm)] == [0, 1]
    assert [group_of(*p, both[::-1], {}) for p in (weight, norm)] == [1, 0]
    assert group_of(*norm, both, {"apply_wd_to_qk_layernorm": True}) == 0
    assert group_of(*norm, both[:1], {}) == 0
    with pytest.raises(UsageError, match="3 param_groups, 2 of them with weight decay"):
        group_of(*weight, [*both, {"wd_mult": 1.0, "lr_mult": 2.0}], {})


def change_args(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    """Adds args to those of every checkpoint that is read."""
    plain = Common.__init__

    def init(self: Common, fields: dict[str, Any], where: str, **how: Any) -> None:
        plain(self, fields, where, **how)
        self.args = (self.args or {}) | more

    monkeypatch.setattr(Common, "__init__", init)


def test_optimizers_of_other_kinds_are_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("reshard", saved, tmp_path / "out", "--target-tp", 1)
    change_args(monkeypatch, {"optimizer": "soap"})
    refused(2, "the optimizer soap;", "adam, sgd and muon", "--no-optimizer", args=args)
    good(*args, "--no-optimizer")


def test_low_bits_of_master_copies_are_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precise = {"use_precision_aware_optimizer": True}
    source = Checkpoint.open(saved).with_optimizer()
    assert source.args is not None
    source.args.update(precise, bf16=False)
    prove(source)
    good("repair", saved)
    apart = "{}: 1 element differs".format
    monkeypatch.setattr(masters, "apart", lambda source, name, half: apart(name))
    with pytest.raises(SourceError, match="are not of one step"):
        prove(source)
    source.args["bf16"] = True
    with pytest.raises(UsageError, match="--use-precision-aware-optimizer"):
        prove(source)
    portable = saved.with_name(f"{saved.name}-portable")
    assert "is portable already" in good("repair", portable).out
    change_args(monkeypatch, precise | {"bf16": True})
    refused(2, "low 16 bits", "--no-optimizer", args=("repair", portable))
    buffers = flat.buffers

    def short(*given: Any) -> flat.Extents:
        found = buffers(*given)
        return {place: [e._replace(dtype="int16") for e in found[place]] for place in found}

    if saved.name == "dp_zero_gather_scatter":
        monkeypatch.setattr(flat, "buffers", short)
        args = ("reshard", saved, tmp_path / "out", "--target-tp", 1)
        refused(2, "low 16 bits", "--no-optimizer", args=args)


class Tensor:
    """A tensor in memory, as a checkpoint gives it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.nbytes = array, array.shape, array.nbytes
        self.dtype = str(array.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        return Tensor(self.array[rows])

    def numpy(self) -> np.ndarray:
        return self.array


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_copies_in_fp16_are_near_their_weight_and_no_other(dtype: str) -> None:
    random = np.random.default_rng(0)

    def apart(copy: np.ndarray, weight: np.ndarray) -> str | None:
        scale = 2**15 / np.abs(copy).max()  # as Transformer Engine stores it
        stored = ((copy * scale).astype("f2") / scale).astype("f4")
        held: Any = {"w": Tensor(weight), "w@master": Tensor(stored)}
        return masters.apart(held, "w", half=True)

    kind = numpy_dtype(dtype)
    norms = [1 + random.uniform(-0.02, 0.02, 4096) for _ in range(2)]
    matrix = random.normal(0, 0.02, (64, 64))
    for exact in (*norms, matrix, matrix[:1, :1], np.zeros((3, 4)) + 1e-30):
        assert apart(exact, exact.astype(kind)) is None
    assert apart(norms[0], norms[1].astype(kind)) is not None
    assert apart(matrix * 1.003, matrix.astype(kind)) is not None
    other = random.normal(0, 0.02, (64, 64))
    infinite = other.astype(kind)
    infinite[0, 0] = np.inf
    assert apart(matrix, infinite) is not None


def test_master_copies_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    """With 1 added, some weights and their master copies round to two numbers."""
    master = np.random.default_rng(0).normal(0, 0.05, 64).astype("f4")
    weight, path = master.astype(numpy_dtype("bfloat16")), tmp_path / "values"
    path.write_bytes(weight.tobytes() + master.tobytes())
    stored = [
        Stored(name, dtype, (64,), (Piece(name, Box((0,), (64,)), 0, (1,), -1.0),), *where)
        for name, dtype, at in (("w", "bfloat16", 0), ("w@master", "float32", weight.nbytes))
        for where in [np.array([[0], [0], [0], [at]])]
    ]
    layout = Layout([str(path)], stored, {"w": (64,), "w@master": (64,)})
    assert masters.apart(Reader(layout), "w", half=False) is not None
    assert masters.apart(Reader(masters.as_stored(layout)), "w", half=False) is None


def test_ranks_without_experts_have_one_optimizer_in_old_releases(tmp_path: Path) -> None:
    chain = links.links([[], []])
    for listed, wanted in (([1], [None]), ([1, 2], [False, True])):
        found = torch_reading._optimizers("x", listed, [], chain)
        assert [one for one, _ in found] == listed
        assert [link.experts for link in links.links([[]] * len(listed))] == wanted
    with pytest.raises(SourceError, match="x: has 3 optimizers, and the first rank has 2; copy"):
        list(torch_reading._optimizers("x", [1, 2, 3], [], chain))


def test_the_trainer_refuses_another_order_of_parameters() -> None:
    same_order(["a", "buffer", "b"], ["a", "b", "tied"], "x")
    with pytest.raises(SourceError, match="has b where this model has a"):
        same_order(["b", "a"], ["a", "b"], "x")


def test_steps_of_each_parameter_are_refused() -> None:
    groups = [{"lr": 1.0, "step": 3, "params": [0]}]
    assert groups_of({"optimizer": {"param_groups": groups}}, "x") == [[{"lr": 1.0, "step": 3}]]
    for state in ({"common_step": 3}, {0: {"exp_avg": None, "step": 3}}):
        with pytest.raises(UsageError, match="counts the steps of each parameter"):
            groups_of({"optimizer": {"param_groups": groups, "state": state}}, "x")


def test_groups_have_the_steps_of_those_with_parameters() -> None:
    """FusedAdam of Transformer Engine leaves out groups without parameters when it counts."""

    def steps(*found: dict[str, Any]) -> list[Any]:
        groups = [{"lr": 1.0, **group} for group in found]
        (own,) = groups_of({"optimizer": {"param_groups": groups}}, "x")
        return [group["step"] for group in own]

    assert steps({"step": 4}, {"step": 2}, {}) == [4, 4, 4]
    assert steps({"step": 4, "params": [0]}, {"step": 2, "params": []}) == [4, 4]
    with pytest.raises(
        SourceError, match=r"group 0 of optimizer 0: 4\n.*group 1 of optimizer 0: 2"
    ):
        steps({"step": 4, "params": [0]}, {"step": 2, "params": [1]})


@pytest.mark.parametrize("change", [{}, {"step": 1}, {"step": None}])
@pytest.mark.parametrize("saved", FORMS[:1], indirect=True)
def test_the_steps_of_another_rank_are_those_of_the_first(
    saved: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    good("reshard", saved, made, "--target-format", "torch", "--target-tp", 2)
    for rank, own in enumerate(({**change}, {"step": 7})):
        file = Pt(next(made.rglob(f"mp_rank_{rank:02d}/model_optim_rng.pt")))
        for group in file.value["optimizer"]["optimizer"]["param_groups"]:
            del group["step"]
            group |= own
        file.save()
    good("reshard", made, out, "--target-tp", 1)
    found = Checkpoint.open(out).optimizer
    assert found is not None
    assert [group["step"] for own in found.groups for group in own] == [7, 7]


def test_the_group_of_a_parameter_is_refused_where_two_fit() -> None:
    """As with other learning rates for some layers: both groups decay, and have the same shapes."""
    groups = [(8, 8), (8, 8), (8,)]
    place = ("layers.0.mlp.weight", (8, 8), groups)
    assert links.next_group(*place, [True, True, False], proved=True) == 0
    assert links.next_group(*place, [True, False, False], proved=False) == 0
    assert links.next_group("norm.weight", (8,), groups, [True, True, False], proved=False) == 2
    with pytest.raises(UsageError, match="groups 0 and 1 of the optimizer both have a state of"):
        links.next_group(*place, [True, True, False], proved=False)


def test_missing_state_of_one_weight_is_named(saved: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(saved, short)
    files = sorted(short.glob("*.distcp"), key=lambda path: path.stat().st_size)
    files[-1].write_bytes(files[-1].read_bytes()[:-400])
    refused(3, files[-1].name, args=("reshard", short, tmp_path / "out", "--target-tp", 1))


def test_what_an_optimizer_has_beside_its_states_is_listed() -> None:
    inner = {"optimizer": {"param_groups": []}, "param_state_sharding_type": "x"}
    assert unkept(inner) == unkept({0: inner, 1: inner}) == unkept(None) == []
    assert unkept([inner, {**inner, "grad_scaler": {}, "more": 1}]) == ["more"]


def test_loss_scalers_are_numbers() -> None:
    known = {"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": -1}
    assert scalers_of({"grad_scaler": known}, {}, "x") == [known]
    assert scalers_of({0: {"grad_scaler": known}, 1: {}}, {}, "x") == [known, {}]
    assert scalers_of({"optimizer": {}}, {}, "x") == scalers_of(None, {}, "x") == []
    assert rescaled([known], 2) == rescaled([known, known], 2) == [known, known]
    assert rescaled([], 2) == []
    with pytest.raises(UsageError, match="has scale, which is not a number"):
        scalers_of({"grad_scaler": {"scale": "large"}}, {}, "x")


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
