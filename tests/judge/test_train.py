"""The bundled trainer gives the same losses at every parallel size, and its checkpoints resume."""

from __future__ import annotations

import copy
import itertools
import json
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# importing it here would cost every run 5 s, also a run that deselects this file
if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from mckpt.errors import SourceError, UsageError
from mckpt.trainer import data
from mckpt.verification.requirements import require_core
from tests.cli import test_json
from tests.cli.test_iterations import Watcher
from tests.helpers import commands
from tests.helpers.judged_models import DENSE as PLAIN
from tests.helpers.judged_models import LLAMA3, MOE, QWEN3, VOCAB
from tests.helpers.judging import explain, judge
from tests.helpers.tiny import TinyModel

pytestmark = [pytest.mark.judge, pytest.mark.newest]

# embeddings tied, so that two stages hold them
DENSE = PLAIN | LLAMA3 | {"use_rope_scaling": False}
MIXED = MOE | QWEN3 | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
STEPS = 4
JOB = {
    "kind": "train",
    "world": 4,
    "steps": STEPS,
    "lr": 1e-2,
    "warmup": 1,
    "global_batch_size": 4,
    "seq_length": 32,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def results(work: Path) -> dict[str, dict[str, Any]]:
    """Results of one launch of 4 ranks. The runs that save do so at step 2 of 4, and the resumed
    runs continue from there.
    """

    def run(name: str, checkpoint: str, **others: Any) -> dict[str, Any]:
        saves = (
            {"save": str(work / others["save"]), "steps": 2, "decay_steps": STEPS}
            if "save" in others
            else {}
        )
        return JOB | {"name": name, "checkpoint": str(work / checkpoint)} | others | saves

    def resumed(name: str, saved: str, **others: Any) -> dict[str, Any]:
        return run(name, saved, resume=True, **others)

    bf16 = {"dtype": "bfloat16"}
    cases = [
        {
            "name": tag,
            "kind": "save",
            "args": args,
            "format": "torch_dist",
            "destination": str(work / tag),
        }
        for tag, args in (("dense", DENSE), ("moe", MIXED))
    ]
    cases += [
        run("dense-one", "dense", world=1),
        run("dense-tp2", "dense", tp=2, world=2),
        run("dense-dp2", "dense", world=2),
        run("dense-dp4", "dense"),
        run("dense-tp2pp2", "dense", tp=2, pp=2, save="dense-dist"),
        run("dense-pp2vpp2", "dense", pp=2, vpp=2, save="dense-torch", format="torch"),
        run("dense-sequence", "dense", tp=2, args={"sequence_parallel": True}, micro_batch_size=2),
        run("bf16-whole", "dense", tp=2, **bf16),
        run(
            "bf16-saved",
            "dense",
            tp=2,
            save="dense-bf16",
            optimizer_format="dp_reshardable",
            **bf16,
        ),
        resumed("dense-resumed-tp2", "dense-dist", tp=2),
        resumed("dense-resumed-torch", "dense-torch", pp=2, vpp=2),
        resumed("bf16-resumed", "dense-bf16", tp=2, **bf16),
        resumed("refused", "dense-bf16", tp=4, **bf16),
        run("moe-one", "moe", world=1),
        run("moe-dp4", "moe"),
        run("moe-tp2ep2", "moe", tp=2, ep=2, save="moe-dist"),
        run("moe-pp2ep2", "moe", pp=2, ep=2, etp=1, save="moe-torch", format="torch"),
        resumed("moe-resumed-pp2", "moe-dist", pp=2),
        resumed("moe-resumed-torch", "moe-torch", pp=2, ep=2, etp=1),
    ]
    return judge(cases, work / "results")


def curve(results: dict[str, dict[str, Any]], name: str, key: str = "loss") -> list[float]:
    assert not explain(results[name])
    return [step[key] for step in results[name]["steps"]]


@pytest.mark.parametrize("tag", ["dense", "moe"])
@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_the_losses_are_the_same_at_every_parallel_size(
    results: dict[str, dict[str, Any]], tag: str, key: str
) -> None:
    # one rank has every token of every sequence, so nothing is cut
    expected = curve(results, f"{tag}-one", key)
    others = [name for name in results if name.startswith(f"{tag}-") and name != f"{tag}-one"]
    assert len(others) == {"dense": 8, "moe": 5}[tag]
    for name in others:
        mine = curve(results, name, key)
        same = expected[2:] if "resumed" in name else expected[: len(mine)]
        np.testing.assert_allclose(mine, same, rtol=1e-5, err_msg=name)


def test_the_loss_falls(results: dict[str, dict[str, Any]]) -> None:
    for name in ("dense-dp4", "moe-dp4"):
        losses = curve(results, name)
        assert len(losses) == STEPS
        assert min(losses) < losses[0] - 0.2, name


def test_a_run_in_bf16_resumes_exactly(results: dict[str, dict[str, Any]]) -> None:
    whole = curve(results, "bf16-whole")
    np.testing.assert_allclose(whole, curve(results, "dense-dp4"), rtol=5e-3)
    assert curve(results, "bf16-saved") + curve(results, "bf16-resumed") == whole
    assert "dp_reshardable" in explain(results["refused"])


def test_a_trained_checkpoint_converts_back(results: dict[str, dict[str, Any]], work: Path) -> None:
    for name in ("dense-dist", "dense-torch", "dense-bf16", "moe-dist", "moe-torch"):
        plan = mckpt.plan(work / name, work / f"{name}-hf", format="hf")
        plan.run()
        assert (work / f"{name}-hf" / "config.json").exists()
        assert (work / name / "latest_checkpointed_iteration.txt").read_text() == "2"
    # the masters of two runs that gave the same losses are the same weights
    a, b = mckpt.open(work / "moe-dist"), mckpt.open(work / "moe-torch-hf")
    assert set(a) == set(b)
    for key in a:
        np.testing.assert_allclose(a[key].numpy(), b[key].numpy(), atol=1e-4, err_msg=key)


def test_the_command_trains_on_jsonl(results: dict[str, dict[str, Any]], work: Path) -> None:
    random = np.random.RandomState(0)
    with (work / "text.jsonl").open("w") as file:
        for length in (7, 40, 3, 90):
            file.write(json.dumps({"tokens": random.randint(0, VOCAB, length).tolist()}) + "\n")
    options = [
        "--data",
        work / "text.jsonl",
        "--steps",
        2,
        "--seq-length",
        16,
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--json",
    ]
    command = commands.command_line("train", work / "dense", *options)
    done = commands.run(command)
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    for step in steps:
        test_json.compare("Train", step)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(np.isfinite(step["loss"]) and step["tokens_per_s"] > 0 for step in steps)


DOCUMENTS = [
    np.arange(start, start + length) for start, length in ((0, 5), (10, 1), (20, 9), (30, 14))
]


@pytest.mark.parametrize(
    ("changed", "fused"),
    [
        ({}, True),
        ({"bias_gelu_fusion": True}, True),
        ({"bias_gelu_fusion": False}, False),
        ({"add_bias_linear": False, "bias_gelu_fusion": False}, False),
    ],
)
@pytest.mark.filterwarnings("ignore")  # megatron-core's imports cause it
def test_gelu_is_the_form_that_megatron_core_runs_with_these_args(
    changed: dict[str, Any], fused: bool
) -> None:
    """Compares MLP.forward of megatron-core with the config of the trainer, and with the one that
    pretrain_gpt.py makes from these args.
    """
    import torch
    from megatron.core.transformer.mlp import MLP

    from mckpt.trainer import build

    args = build.at_sizes(
        PLAIN | {"swiglu": False, "add_bias_linear": True, "add_qkv_bias": True} | changed
    )
    mine = build.transformer_config(args)
    stock = copy.copy(mine)
    stock.activation_func, stock.bias_activation_fusion = torch.nn.functional.gelu, fused
    bias = torch.linspace(-1, 1, 64) if args.add_bias_linear else None
    x = torch.linspace(-4, 4, 64 * 3).view(3, 64)

    class Linear(torch.nn.Module):
        def __init__(self, bias: torch.Tensor | None) -> None:
            super().__init__()
            self.bias = bias

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return x, self.bias

    def forward(config: Any) -> torch.Tensor:
        layer = Namespace(
            config=config,
            activation_func=config.activation_func,
            linear_fc1=Linear(bias),
            linear_fc2=Linear(None),
        )
        with torch.compiler.set_stance("force_eager"):  # otherwise the fused function is compiled
            return MLP.forward(layer, x)[0]

    wrong = torch.nn.functional.gelu(
        x if bias is None else x + bias, approximate="none" if fused else "tanh"
    )
    assert (forward(stock) - wrong).abs().max() > 1e-4  # otherwise the next line could not fail
    torch.testing.assert_close(forward(mine), forward(stock), rtol=0, atol=1e-6)


def test_a_common_state_kept_as_an_object_is_read_or_refused_with_the_cure(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    from megatron.core import __version__

    from mckpt.trainer import load

    mckpt.plan(tiny_model("llama"), tmp_path / "ckpt", common_as_object=True).run()
    if int(__version__.split(".")[1]) >= 19:
        assert load.read_args(tmp_path / "ckpt").num_layers == 4
        return
    with pytest.raises(SourceError, match=r"as an object, .*0\.19.*--common-state file"):
        require_core(mckpt.open(tmp_path / "ckpt"))
    mckpt.plan(
        tmp_path / "ckpt", tmp_path / "file", format="torch_dist"
    ).run()  # the error gives this cure
    assert load.read_args(tmp_path / "file").num_layers == 4


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (
            "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
            "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight",
        ),
        (
            "mtp.layers.1.transformer_layer.self_attention.linear_qkv.layer_norm_weight",
            "mtp.layers.1.mtp_model_layer.input_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight11",
            "decoder.layers.3.mlp.experts.local_experts.11.linear_fc1.weight",
        ),
    ],
)
def test_a_tensor_is_found_under_its_other_name(name: str, other: str) -> None:
    from mckpt.trainer.load import other_name

    assert other_name(name, {other}) == other
    assert other_name(other, {name}) == name
    assert other_name(name, {name, other}) == name
    assert other_name(name, {"decoder.layers.3.mlp.linear_fc2.weight"}) == name


def test_every_token_is_a_label_once_an_epoch() -> None:
    lengths = np.array([len(document) for document in DOCUMENTS])
    source = data.pack(DOCUMENTS, lengths, 4, seed=3)
    for epoch in range(2):
        # 29 tokens: 7 sequences of 4, and the first token
        rows = np.stack([source(epoch * 7 + i) for i in range(7)])
        assert rows.shape == (7, 5)
        labels = rows[:, 1:].ravel()
        assert len(set(labels)) == 28
        assert set(labels) < set(np.concatenate(DOCUMENTS))
    assert [source(i).tolist() for i in range(7)] != [source(7 + i).tolist() for i in range(7)]


def test_bin_and_jsonl_give_the_same_tokens(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    for document in DOCUMENTS:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "text.idx"))
    lines = [json.dumps({"input_ids": document.tolist()}) for document in DOCUMENTS]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n\n")
    args = Namespace(**{"vocab_size": 50})
    sources = [
        data.open_source(str(tmp_path / name), args, 6, seed=1)
        for name in ("text", "text.bin", "text.jsonl")
    ]
    for number in range(9):
        rows = [source(number).tolist() for source in sources]
        assert rows[0] == rows[1] == rows[2]
        assert len(rows[0]) == 7


def test_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    args = Namespace(**{"vocab_size": 9})
    path = tmp_path / "text.jsonl"
    path.write_text('{"tokens": [1, 2, 3, 12]}\n')
    with pytest.raises(UsageError, match="token 12; the model's vocabulary ends at 8"):
        data.open_source(str(path), args, 3, 1)(0)
    with pytest.raises(UsageError, match="not one sequence of 4"):
        data.open_source(str(path), args, 4, 1)
    with pytest.raises(UsageError, match="does not exist"):
        data.open_source(str(tmp_path / "absent"), args, 4, 1)
    path.write_text('{"text": "a b"}\n')
    with pytest.raises(UsageError, match="tokenizer"):
        data.open_source(str(path), args, 4, 1)
    path.write_text('{"words": "a b"}\n')
    with pytest.raises(UsageError, match="line 1"):
        data.open_source(str(path), args, 4, 1)


def test_made_up_text_is_the_same_for_the_same_seed() -> None:
    first, second, other = (data.mock(50, 20, seed) for seed in (1, 1, 2))
    assert first(3).tolist() == second(3).tolist() != other(3).tolist()
    following: dict[int, set[int]] = {}
    for number in range(200):
        row = first(number)
        for a, b in itertools.pairwise(row):
            following.setdefault(a, set()).add(b)
    assert max(len(tokens) for tokens in following.values()) <= data.BRANCHES


def test_every_iteration_that_training_saves_is_exported(tmp_path: Path) -> None:
    """The watcher runs beside the trainer, and each export has the weights of its iteration."""
    commands.hf(tmp_path / "hf")
    commands.good("hf-to-megatron", tmp_path / "hf", tmp_path / "start")
    watcher = Watcher(tmp_path / "run", tmp_path / "out/{iteration}", "--until", 20)
    commands.run(
        commands.command_line(
            *("train", tmp_path / "start", "--steps", 20, "--save", tmp_path / "run"),
            *("--save-interval", 5, "--seq-length", 16, "--global-batch-size", 2),
            *("--device", "cpu", "--dtype", "fp32", "--lr", "0.01"),
        )
    )
    rows = watcher.end()["iterations"]
    assert [(row["iteration"], row["state"]) for row in rows] == [
        (n, "written") for n in (5, 10, 15, 20)
    ]
    for n in (5, 10, 15, 20):
        commands.good("diff", tmp_path / f"run/iter_{n:07d}", tmp_path / f"out/{n}")
    assert commands.mckpt("diff", tmp_path / "out/5", tmp_path / "out/10").code == 1
