"""Parallel sizes: the placement of layers as in Megatron-Core, file names, args, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mckpt
from mckpt.errors import UsageError
from mckpt.geometry.parallel import Parallel
from tests.helpers import placement, tiny
from tests.helpers.tiny import TinyModel

ROWS = placement.rows()


def placed(num_layers: int, pp: int, said: dict[str, Any]) -> Any:
    """Returns the placement by mckpt, in the form of the rows; None where mckpt refuses."""
    try:
        stages = Parallel(pp=pp, **said).stages(num_layers)
    except UsageError:
        return None
    return [[[layers[0] if layers else 0, len(layers)] for layers in virtual] for virtual in stages]


def test_layers_lie_where_megatron_places_them() -> None:
    """mckpt accepts and refuses the same sizes as Megatron, and also refuses those at which
    Megatron would lose or double layers.
    """
    wrong = []
    for num_layers, pp, said, answer in ROWS:
        ours = placed(num_layers, pp, said)
        if ours != (None if answer == "lost" else answer):
            wrong.append(f"{num_layers} layers, pp {pp}, {said}: {ours} against {answer}")
    assert not wrong, "\n".join(wrong)
    assert len(ROWS) > 300
    assert sum(answer == "lost" for *_, answer in ROWS) > 20
    assert sum(answer is None for *_, answer in ROWS) > 100


def test_stages_of_small_models() -> None:
    assert Parallel(pp=2).stages(4) == [[[0, 1]], [[2, 3]]]
    assert Parallel(pp=2, vpp=2).stages(4) == [[[0], [2]], [[1], [3]]]
    assert Parallel(pp=3, first_stage_layers=1, last_stage_layers=1).stages(4) == [
        [[0]],
        [[1, 2]],
        [[3]],
    ]
    assert Parallel(pp=2, account_for_embedding=True, account_for_loss=True).stages(4) == [
        [[0, 1]],
        [[2, 3]],
    ]
    assert Parallel(pp=2, vpp=3, account_for_embedding=True, account_for_loss=True).stages(4) == [
        [[], [1], [3]],
        [[0], [2], []],
    ]
    assert Parallel(pp=2, layout="Et|tt|t|L").stages(4) == [[[0], [3]], [[1, 2], []]]


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_layer_lies_once(
    num_layers: int, pp: int, vpp: int, embedding: bool, loss: bool
) -> None:
    try:
        stages = Parallel(
            pp=pp, vpp=vpp, account_for_embedding=embedding, account_for_loss=loss
        ).stages(num_layers)
    except UsageError:
        return
    assert sorted(i for rank in stages for virtual in rank for i in virtual) == list(
        range(num_layers)
    )
    assert all(len(rank) == vpp for rank in stages) and len(stages) == pp


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("layout", "same"),
    [
        ("Et*3|tL", "Ettt|tL"),
        ("E,t*3|t,L", "Ettt|tL"),
        ("E(t|)*3tL", "Et|t|t|tL"),
        ("E(t*2|)*1ttL", "Ett|ttL"),
    ],
)
def test_short_and_long_forms_of_a_layout_are_equal(layout: str, same: str) -> None:
    assert Parallel(pp=2, layout=layout).stages(4) == Parallel(pp=2, layout=same).stages(4)
    assert (
        Parallel(pp=2, layout=layout).vpp
        == Parallel(pp=2, layout=same).vpp
        == (same.count("|") + 1) // 2
    )


def test_layers_of_multi_token_prediction_are_in_one_stage() -> None:
    assert Parallel(pp=2, vpp=2).mtp_stage == (1, 1)
    separate = Parallel(pp=2, layout="Et|tt|tm|L")
    assert separate.stages(4, mtp_layers=1) == [[[0], [3]], [[1, 2], []]]
    assert separate.mtp_stage == (0, 1)
    for layout, mtp_layers, message in (
        ("Ett|ttL", 1, r"has 0 MTP layers \(m\), but the model has 1; all MTP layers must"),
        ("Ett|ttmL", 2, r"has 1 MTP layer \(m\), but the model has 2; all MTP layers must"),
        ("Ettm|ttmL", 2, r"has MTP layers \(m\) in several stages; all 2 must be in one stage"),
    ):
        with pytest.raises(UsageError, match=message):
            Parallel(pp=2, layout=layout).stages(4, mtp_layers)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|t|tL", "has 3 stages, which is not a multiple of pp 2"),
        ("Ett|tttL", r"has 5 decoder layers \(t\), but the model has 4"),
        ("ttt|tL", "must begin with its only E"),
        ("Ett|tt", r"end with its only L \(loss\)"),
        ("EEtt|ttL", "must begin with its only E"),
        ("tEt|ttL", "must begin with its only E"),
        ("Ett|ttmL", r"has 1 MTP layer \(m\), but the model has 0"),
        ("Ett | ttL", "stage 'Ett ' contains other characters than E, t, m and L"),
        ("ett|ttl", "stage 'ett' contains other characters"),
        ("Etx|ttL", "stage 'Etx' contains other characters"),
        ("E((t|)*2)*2L|", "other characters than E, t, m and L"),
        ("", "has 1 stage,"),
        ("|", "has 0 decoder layers"),
        ("E(t|)*99999L", "has 100,000 stages, and at most 4,096 are read"),
        ("E(t*99999|)*99999L", "unrolls to more than 262,144 characters"),
        ("E(" + "t" * 4000 + ")*99999|L", "unrolls to more than 262,144 characters"),
        ("Et*99999999999999999999|L", "other characters than E, t, m and L|unrolls"),
        ("(" * 5000, "is not text of at most 4,096 characters"),
        ("(" * 4000, "other characters than E, t, m and L|has 1 stage,"),
        (7, "is not text"),
        (["Et", "tL"], "is not text"),
    ],
)
def test_hostile_layouts_are_refused_at_once(layout: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Parallel(pp=2, layout=layout).stages(4)


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tp": 0}, "tp is 0, and must be a whole number from 1"),
        ({"pp": -1}, "pp is -1"),
        ({"ep": 1.0}, r"ep is 1\.0"),
        ({"etp": "2"}, "etp is '2'"),
        ({"vpp": True}, "vpp is True"),
        ({"pp": "2", "layout": "Et|tL"}, "pp is '2'"),
        ({"first_stage_layers": 0, "pp": 2}, "first_stage_layers is 0"),
        ({"vpp": 2}, "vpp 2 needs pp > 1"),
        ({"pp": 2, "first_stage_layers": 1, "account_for_loss": True}, "choose one of"),
        ({"pp": 2, "layout": "Et|tL", "last_stage_layers": 1}, "choose one of"),
        ({"pp": 2, "layout": "Et|tL", "account_for_embedding": True}, "choose one of"),
        ({"tp": 10**9}, "from 1 to 65536"),
        ({"tp": 60000, "ep": 60000}, "more than 65536 ranks"),
        ({"pp": 60000, "vpp": 60000}, "more than 65536 ranks"),
    ],
)
def test_impossible_sizes_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Parallel(**said)


@pytest.mark.parametrize(
    ("said", "num_layers", "message"),
    [
        ({"pp": 3}, 4, "4 layers cannot be split evenly over 3 pipeline stages .pp 3.; choose"),
        ({"pp": 2, "vpp": 2}, 6, r"ranks have \[3, 3\] layers, which vpp 2 does not divide"),
        (
            {"pp": 2, "first_stage_layers": 5},
            4,
            "num-layers 5: more than the 4 layers of the model",
        ),
        (
            {"pp": 2, "first_stage_layers": 4},
            4,
            r"^--decoder-first-pipeline-num-layers 4 takes all 4 layers, so 1 pipeline stage"
            r" \(pp 2\) would be empty, .* give the first stage fewer layers$",
        ),
        (
            {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 3},
            4,
            "num-layers 1 and --decoder-last-pipeline-num-layers 3 take all 4 layers, so 1 pipel",
        ),
        (
            {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 2, "vpp": 2},
            4,
            "Megatron divides by zero",
        ),
        ({"pp": 1, "first_stage_layers": 1, "last_stage_layers": 2}, 4, "4 layers less 2"),
        (
            {"pp": 2, "account_for_embedding": True},
            4,
            "4 layers and 1 for embedding and loss cannot be split evenly",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    said: dict[str, Any], num_layers: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Parallel(**said).stages(num_layers)


def test_experts_must_be_divisible_by_ep() -> None:
    Parallel(ep=4).check(8)
    Parallel(tp=2).check(0)
    with pytest.raises(UsageError, match="ep 2: this model has no experts; leave --ep out"):
        Parallel(ep=2).check(0)
    with pytest.raises(UsageError, match="6 experts are not divisible by ep 4"):
        Parallel(ep=4).check(6)
    assert Parallel(tp=4).expert_tp == 4
    assert Parallel(tp=4, etp=1).expert_tp == 1


@pytest.mark.parametrize(
    ("case", "width", "etp"),
    [
        ("qwen3", "intermediate_size", None),
        ("qwen3-moe", "moe_intermediate_size", None),
        ("deepseek-v3", "intermediate_size", None),
        ("deepseek-v3", "moe_intermediate_size", 1),  # at etp 1, tp cuts only the shared expert
    ],
)
def test_a_wrong_tp_names_every_tp_that_can_be_planned(
    case: str, width: str, etp: int | None, tmp_path: Path
) -> None:
    """The heads, the MLP, its experts and the shared expert must all be divisible by tp."""
    config = {**tiny.config(case), width: 6}
    tiny.write_json(tmp_path / "config.json", config)
    tiny.write_weights(tmp_path, tiny.tensors(config))
    source, fit = mckpt.open(tmp_path), []
    refused: list[str] = []
    out = tmp_path.with_name(f"{tmp_path.name}_out")
    for tp in range(1, source.dims["num_heads"] + 1):
        try:
            sizes = Parallel(tp=tp, etp=etp)
            mckpt.plan(source, out, format="torch_dist", parallel=sizes)
            fit.append(tp)
        except UsageError as e:
            refused.append(str(e))
    assert len(fit) > 1
    assert any("_size " in message for message in refused)
    for message in refused:
        assert message.endswith(f"; choose a tp of {', '.join(map(str, fit))}")


def test_files_of_tensor_and_expert_ranks() -> None:
    """The files are (r % tp, r // etp % ep) over the ranks of a stage. With etp != tp they are not
    all of tp x ep.
    """
    assert Parallel(tp=2, ep=2).files(experts=False) == [(0, 0), (1, 0)]
    assert Parallel(tp=2, ep=2).files(experts=True) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Parallel(tp=2, ep=2, etp=1).files(experts=True) == [(0, 0), (1, 1)]
    assert Parallel(tp=4, ep=2, etp=1).files(experts=True) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert Parallel(tp=1, ep=4).files(experts=True) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_etp_that_does_not_divide_tp_has_no_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    for tp, etp in ((2, 4), (3, 2), (1, 2)):
        with pytest.raises(
            UsageError, match=f"etp {etp} does not divide tp {tp}.*use --format torch_dist"
        ):
            Parallel(tp=tp, ep=2, etp=etp).files(experts=True)
    source = tiny_model("mixtral")
    with pytest.raises(UsageError, match="etp 2 does not divide tp 1"):
        mckpt.plan(source, tmp_path / "out", format="torch", parallel=Parallel(etp=2))
    mckpt.plan(source, tmp_path / "out", format="torch_dist", parallel=Parallel(etp=2))


def test_directory_names_have_a_field_for_each_size() -> None:
    """The name is mp_rank_TT[_PPP][_EEE]. A number wider than its field is not cut (Megatron-LM,
    checkpointing.py, get_checkpoint_name).
    """
    assert Parallel(tp=2).directory(1, 0, 0) == "mp_rank_01"
    assert Parallel(tp=2, pp=2).directory(1, 1, 0) == "mp_rank_01_001"
    assert Parallel(tp=2, ep=2).directory(1, 0, 1) == "mp_rank_01_001"
    assert Parallel(tp=2, pp=2, ep=2).directory(0, 1, 1) == "mp_rank_00_001_001"
    assert Parallel(tp=128, pp=2, ep=2).directory(100, 1, 1) == "mp_rank_100_001_001"


# --------------------------------------------------------------------------------------------- args


EXAMPLES = [
    Parallel(),
    Parallel(tp=4, pp=2, vpp=3, ep=2),
    Parallel(tp=4, etp=1, ep=8),
    Parallel(pp=4, first_stage_layers=3),
    Parallel(pp=4, last_stage_layers=3, first_stage_layers=1),
    Parallel(pp=2, account_for_embedding=True, account_for_loss=True),
    Parallel(pp=2, layout="Ett|ttL"),
    Parallel(pp=2, layout="Et|t|t|tL"),
]


@pytest.mark.parametrize("one", EXAMPLES, ids=str)
def test_sizes_come_back_from_their_args(one: Parallel) -> None:
    assert Parallel.of_args(one.args()) == one
    assert Parallel.of_args({**one.args(), "unknown": 1}).args() == one.args()


def test_args_that_megatron_writes_are_read() -> None:
    assert Parallel.of_args({}) == Parallel()
    assert Parallel.of_args(
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    ) == Parallel(tp=2)
    # Megatron keeps this arg at pp 1
    assert Parallel.of_args({"virtual_pipeline_model_parallel_size": 4}) == Parallel()
    stages = [["embedding", "decoder"], ["decoder", "decoder"], ["decoder"], ["loss"]]
    assert (
        Parallel.of_args(
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": stages}
        ).layout
        == "Et|tt|t|L"
    )
    # its PipelineParallelLayerLayout object, as a pickle holds it
    kept = {"input_data": "Et|tt|t|L", "layout": [1, 2]}
    assert (
        Parallel.of_args(
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": kept}
        ).vpp
        == 2
    )


@pytest.mark.parametrize(
    "args",
    [
        {"tensor_model_parallel_size": "two"},
        {"pipeline_model_parallel_size": "two"},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": 5},
        {"expert_model_parallel_size": 2.5},
        {"pipeline_model_parallel_size": [2]},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [["decoder", 3]]},
    ],
)
def test_bad_args_of_sizes_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Parallel.of_args(args)


def test_with_replaces_only_given_sizes() -> None:
    """None keeps the present value. Another pipeline drops the uneven split of the old one."""
    even = Parallel(tp=2, pp=4, vpp=2, ep=2, etp=1)
    assert even.with_() == even
    assert even.with_(tp=8, pp=None, layout=None, account_for_loss=False) == Parallel(
        tp=8, pp=4, vpp=2, ep=2, etp=1
    )
    assert even.with_(pp=2) == Parallel(tp=2, pp=2, ep=2, etp=1)
    assert even.with_(pp=1) == Parallel(tp=2, ep=2, etp=1)
    uneven = Parallel(tp=2, pp=3, first_stage_layers=1)
    assert uneven.with_(tp=4) == Parallel(tp=4, pp=3, first_stage_layers=1)
    assert uneven.with_(pp=2) == Parallel(tp=2, pp=2)
    assert uneven.with_(last_stage_layers=2) == Parallel(tp=2, pp=3, last_stage_layers=2)
    assert uneven.with_(tp=2, pp=3) == uneven  # the same sizes given again change nothing
    laid = Parallel(tp=2, pp=2, layout="Et|t|t|tL")
    assert laid.with_(tp=1) == Parallel(pp=2, layout="Et|t|t|tL")
    assert laid.with_(pp=4) == Parallel(tp=2, pp=4)
    assert laid.with_(pp=4, layout="Et|t|t|tL") == Parallel(tp=2, pp=4, layout="Et|t|t|tL")
    assert laid.with_(layout="Ett|ttL") == Parallel(tp=2, pp=2, layout="Ett|ttL")
    with pytest.raises(UsageError, match="choose one of"):
        even.with_(first_stage_layers=1, account_for_loss=True)


def test_sizes_print_as_text() -> None:
    assert str(Parallel()) == "tp 1, pp 1"
    assert str(Parallel(tp=2, ep=4, etp=2)) == "tp 2, pp 1, ep 4"
    assert str(Parallel(tp=2, pp=2, etp=1, layout="Et|tL")) == "tp 2, pp 2, etp 1, layout Et|tL"
    ends = Parallel(pp=4, first_stage_layers=1, last_stage_layers=2)
    assert str(ends) == "tp 1, pp 4, 1 layer in the first stage, 2 layers in the last stage"
    assert str(Parallel(pp=2, vpp=2, account_for_loss=True)).endswith("the loss counts as a layer")
