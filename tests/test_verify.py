"""The verdict: every seeded fault is found and named, and the clean twin passes."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mckpt
from mckpt import launching
from mckpt.checkpoint.checkpoint import Checkpoint, Known
from mckpt.geometry import packing
from mckpt.geometry.packing import Shape
from mckpt.trainer import reference
from mckpt.verification import measuring, verdict
from mckpt.verification.levels import Options, other_sizes, verify_all
from mckpt.verification.tokens import read_tokens
from mckpt.verification.values import compare_values
from mckpt.verification.verdict import CLEAN, FAULT
from tests import door, tiny
from tests.tiny import TinyModel

pytestmark = pytest.mark.judge

MODEL = "decoder.layers"
HEADS, GROUPS, HEAD_DIM = 16, 8, 40  # of the case below
State = dict[str, torch.Tensor]
# its name, what the verdict has to name, and how it is seeded
Fault = tuple[str, str, Callable[[State, Any], None]]


def conversion(directory: Path) -> None:
    """Writes a model that has all that the faults need.

    It is a mixture of experts whose first layer is dense, with a square down projection.
    """
    source = tiny.tiny_random(
        "qwen3-moe",
        directory / "hf",
        mlp_only_layers=[0],
        intermediate_size=48,
        decoder_sparse_step=1,
    )
    mckpt.plan(source, directory / "clean", format="torch", transformer_impl="local").run()


# --------------------------------------------------------------------------------------- the faults


def transpose(state: State, args: Any) -> None:
    name = f"{MODEL}.0.mlp.linear_fc2.weight"
    assert state[name].shape[0] == state[name].shape[1]
    state[name] = state[name].T.contiguous()


def shift_heads(state: State, args: Any) -> None:
    name = f"{MODEL}.1.self_attention.linear_qkv.weight"
    state[name] = state[name].roll(HEAD_DIM, 0)


def swap_k_and_v(state: State, args: Any) -> None:
    name = f"{MODEL}.2.self_attention.linear_qkv.weight"
    packed = state[name].unflatten(0, (GROUPS, HEADS // GROUPS + 2, HEAD_DIM))
    state[name] = packed[:, [*range(HEADS // GROUPS), -1, -2]].flatten(0, 2).contiguous()


def swap_gate_and_up(state: State, args: Any) -> None:
    name = f"{MODEL}.0.mlp.linear_fc1.weight"
    state[name] = torch.cat(state[name].chunk(2)[::-1])


def miss_norm_offset(state: State, args: Any) -> None:
    """The weight that zero-centered norms (--apply-layernorm-1p) want, in a model without them."""
    state[f"{MODEL}.1.input_layernorm.weight"] -= 1


def exchange_experts(state: State, args: Any) -> None:
    for fc in ("linear_fc1", "linear_fc2"):
        a, b = (f"{MODEL}.3.mlp.experts.local_experts.{e}.{fc}.weight" for e in (3, 11))
        state[a], state[b] = state[b], state[a]


def permute_router(state: State, args: Any) -> None:
    name = f"{MODEL}.2.mlp.router.weight"
    state[name] = state[name].roll(1, 0)


def change_rope_base(state: State, args: Any) -> None:
    args.rotary_base = 10000


def change_epsilon(state: State, args: Any) -> None:
    args.layernorm_epsilon = args.norm_epsilon = 1e-5


def take_next_layer(state: State, args: Any) -> None:
    for name in list(state):
        if name.startswith(f"{MODEL}.1."):
            state[name] = state[name.replace(f"{MODEL}.1.", f"{MODEL}.2.")]


def shift_vocabulary(state: State, args: Any) -> None:
    name = "embedding.word_embeddings.weight"
    state[name] = state[name].roll(1, 0)


def tie_output(state: State, args: Any) -> None:
    args.untie_embeddings_and_output_weights = False
    del state["output_layer.weight"]


def zero(state: State, args: Any) -> None:
    state[f"{MODEL}.3.self_attention.k_layernorm.weight"].zero_()


def flip_exponent(state: State, args: Any) -> None:
    bits = state[f"{MODEL}.0.self_attention.linear_proj.weight"].view(torch.int16)
    bits[5, 7] ^= 1 << 14


FAULTS: list[Fault] = [
    ("transposed square linear_fc2", "layers.0.mlp.down.weight", transpose),
    ("qkv interleave shifted by one head", "layers.1.attn.q.weight", shift_heads),
    ("k and v swapped", "layers.2.attn.k.weight", swap_k_and_v),
    ("gate and up swapped", "layers.0.mlp.gate.weight", swap_gate_and_up),
    ("norm offset missed", "layers.1.attn_norm.weight", miss_norm_offset),
    ("two experts exchanged", "layers.3.moe.experts.11.up.weight", exchange_experts),
    ("router rows permuted", "layers.2.moe.router.weight", permute_router),
    ("rope base wrong in the args", "rotary_base", change_rope_base),
    ("norm epsilon wrong", "layernorm_epsilon", change_epsilon),
    ("one layer's weights from the next", "layers.1.moe.experts.0.gate.weight", take_next_layer),
    ("vocabulary shifted by one row", "embed.weight", shift_vocabulary),
    ("output layer tied when it is not", "untie_embeddings_and_output_weights", tie_output),
    ("one tensor zeroed", "layers.3.attn.k_norm.weight", zero),
    ("top exponent bit of one weight", "layers.0.attn.o.weight", flip_exponent),
]


def seed(clean: Path, destination: Path, change: Callable[[State, Any], None]) -> Path:
    """A copy of a `torch` checkpoint with one fault in it."""
    shutil.copytree(clean, destination)
    (path,) = destination.glob("release/mp_rank_*/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    change(saved["model"], saved["args"])
    torch.save(saved, path)
    return destination


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf, clean, and fault0 to fault13."""
    directory = tmp_path_factory.mktemp("faults")
    conversion(directory)
    for index, (_, _, change) in enumerate(FAULTS):
        seed(directory / "clean", directory / f"fault{index}", change)
    return directory


@pytest.fixture(scope="module")
def verdicts(directory: Path) -> dict[str, mckpt.Verdict]:
    paths = [directory / "clean", *(directory / f"fault{index}" for index in range(len(FAULTS)))]
    found = verify_all(directory / "hf", paths, Options(device="cpu", keep=directory / "work"))
    return dict(zip(["clean", *(name for name, _, _ in FAULTS)], found, strict=True))


def test_clean_passes(verdicts: dict[str, mckpt.Verdict]) -> None:
    clean = verdicts["clean"]
    assert (clean.verdict, clean.reasons, clean.exit_code) == ("pass", [], 0)
    for found in clean.facts["logits"].values():
        assert found["below"] >= CLEAN
    assert clean.facts["logits"]["float32"]["probe_above"] >= FAULT
    assert clean.facts["coverage"]["experts"] == {
        "reached": 72,
        "of": 72,
        "missing": {},
        "per_layer": 24,
    }
    assert clean.facts["tokens"]["judged"] == clean.facts["tokens"]["positions"]


@pytest.mark.parametrize(
    ("name", "named"), [fault[:2] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_fault_is_found(verdicts: dict[str, mckpt.Verdict], name: str, named: str) -> None:
    found = verdicts[name]
    assert found.exit_code == 1
    expect(json.loads(json.dumps(found.json())), named)
    logits = found.facts["logits"]["float32"]
    assert logits["max_abs"] >= FAULT * logits["tolerance"]


def expect(said: dict[str, Any], named: str) -> None:
    """Asserts that the verdict fails and names the tensor or arg, both as data and in words."""
    assert said["verdict"] == "fail"
    where = said["where"]
    assert named in [*where.get("differ", []), *", ".join(where["args"]).split(", ")], where
    assert any(named in reason for reason in said["reasons"]), said["reasons"]


def test_a_fault_of_the_converter_itself(
    directory: Path, verdicts: dict[str, mckpt.Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict finds k and v that are exchanged in the packing itself.

    Reading then undoes what writing did, so no logical tensor differs. The verdict must name the
    stored tensor all the same.
    """
    right = packing.PACKINGS["qkv"]

    def wrong(shapes: Sequence[Shape], groups: int) -> packing.Packed:
        found = right(shapes, groups)
        return found._replace(
            placed=tuple(p._replace(member=(0, 2, 1)[p.member]) for p in found.placed)
        )

    index = [name for name, _, _ in FAULTS].index("k and v swapped")
    known = (
        Checkpoint(directory / "hf"),
        Checkpoint(directory / f"fault{index}", Known(like=directory / "hf")),
    )
    monkeypatch.setitem(packing.PACKINGS, "qkv", wrong)
    pair = verdict.Pair(
        f"checkpoint{index + 1}", *known, directory, verdicts["clean"].facts["sizes"], []
    )
    found = verdict.judge(pair, compare_values(*known), directory / "work", "cpu", 1)
    assert found.verdict == "fail"
    assert found.facts["where"]["point"] == "layers.2.attn"
    assert "layers.2.attn.k.weight" not in found.facts["where"]["differ"]
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in found.facts["where"]["stored"]


@pytest.mark.parametrize(
    ("index", "expected"), [(0, "pass"), (1, "fail")], ids=["clean", "transposed"]
)
def test_context_parallelism(
    directory: Path, verdicts: dict[str, mckpt.Verdict], index: int, expected: str
) -> None:
    """Context parallelism runs once more, in the checkpoint's dtype alone.

    Both runs have to agree with transformers.
    """
    for path in (directory / "work").glob(f"checkpoint{index}.[0-9].npz"):
        shutil.copy(
            path, path.with_name(path.name.replace(f"checkpoint{index}.", "checkpoint0.cp."))
        )
    left, right = (
        Checkpoint(directory / "hf"),
        Checkpoint(directory / "clean", Known(like=directory / "hf")),
    )
    sizes = {**verdicts["clean"].facts["sizes"], "cp": 2}
    same = compare_values(left, right)
    found = verdict.judge(
        verdict.Pair("checkpoint0", left, right, directory, sizes, []),
        same,
        directory / "work",
        "cpu",
        1,
    )
    assert found.verdict == expected, found.reasons
    assert list(found.facts["logits"]) == ["float32", "bfloat16", "bfloat16, cp 2"]
    if expected == "fail":
        assert found.reasons[0].startswith("logits in bfloat16, cp 2")
        assert found.facts["where"]["point"] == "logits"


def test_copies_of_one_tensor_must_agree(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Every rank of ep holds the output layer, and the logits come from only one of them."""
    source = tiny_model("qwen3-moe")
    mckpt.plan(
        source,
        tmp_path / "megatron",
        format="torch",
        parallel=mckpt.Parallel(ep=2),
        transformer_impl="local",
    ).run()
    path = tmp_path / "megatron" / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    saved["model"]["output_layer.weight"].zero_()
    torch.save(saved, path)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.exit_code == 1 and "lm_head.weight: its copy in" in found.reasons[0]
    right = Checkpoint(tmp_path / "megatron", Known(like=source))
    assert (
        compare_values(Checkpoint(source), right).difference.replicas
        == found.reasons
        == [f"{tmp_path / 'megatron'}: {text}" for text in right.reader.check_replicas()]
    )


def low_bit(state: State, args: Any) -> None:
    """Flips the last bit of one weight of the embedding, in a row that no token may reach."""
    bits = state["embedding.word_embeddings.weight"].view(torch.int16)
    bits[3, 5] ^= 1


def test_one_low_bit_fails_at_every_level(
    directory: Path, verdicts: dict[str, mckpt.Verdict], tmp_path: Path
) -> None:
    """One bit does not move the logits, so only the stored values can show it.

    The logits of the clean twin stand in for those of the damaged checkpoint.
    """
    path = seed(directory / "clean", tmp_path / "bit", low_bit)
    left, right = Checkpoint(directory / "hf"), Checkpoint(path, Known(like=directory / "hf"))
    x, y = (float(side["embed.weight"].numpy()[3, 5]) for side in (left, right))
    expected = f"embed.weight: 1 element differs, first at [3, 5] ({x:.6g} against {y:.6g})"
    pair = verdict.Pair("checkpoint0", left, right, directory, verdicts["clean"].facts["sizes"], [])
    found = verdict.judge(pair, compare_values(left, right), directory / "work", "cpu", 1)
    assert (
        found.exit_code == 1 and len(found.reasons) == 1 and found.reasons[0].startswith(expected)
    )
    found = mckpt.verify(directory / "hf", path, level="bytes")
    assert found.exit_code == 1 and found.reasons[0].startswith(expected)


def test_a_cast_passes_only_where_it_is_exact(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The manifest names the cast; each value must be exactly that cast of the source's."""
    source = tiny_model("deepseek-v3", "float32")
    mckpt.plan(source, tmp_path / "bf16", dtype="bf16", parallel=mckpt.Parallel(tp=2)).run()
    mckpt.plan(
        tmp_path / "bf16", tmp_path / "again", parallel=mckpt.Parallel(pp=2), format="torch"
    ).run()
    mckpt.plan(tmp_path / "again", tmp_path / "fp32", format="hf", dtype="fp32").run()
    for other in ("bf16", "again", "fp32"):
        for pair in ((source, tmp_path / other), (tmp_path / other, source)):
            found = mckpt.verify(*pair, level="bytes")
            assert (found.verdict, found.reasons) == ("pass", []), other
            assert found.facts["values"]["equal_after_cast"] > 100
    assert (
        mckpt.verify(tmp_path / "bf16", tmp_path / "again", level="bytes").facts["values"][
            "equal_after_cast"
        ]
        == 0
    )
    (path,) = (tmp_path / "again").glob("release/mp_rank_00_000/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    low_bit(saved["model"], saved["args"])
    torch.save(saved, path)
    found = mckpt.verify(source, tmp_path / "again", level="bytes")
    assert [reason.split(",")[0] for reason in found.reasons[1:]] == [
        "embed.weight: 1 element differs"
    ], "and the copy of the last stage"
    (tmp_path / "bf16" / "release" / "mckpt.json").unlink()
    found = mckpt.verify(source, tmp_path / "bf16", level="bytes")
    assert found.verdict == "fail" and "dtype float32 against bfloat16" in found.reasons[0], (
        "nothing names the cast"
    )


def test_logits_agree_when_the_hugging_face_side_was_cast(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Megatron checkpoint in fp32 was exported in bfloat16: Megatron-Core runs with its weights
    cast, and without that cast the logits differ.
    """
    megatron, exported = tmp_path / "megatron", tmp_path / "exported"
    mckpt.plan(tiny_model("deepseek-v3", "float32"), megatron).run()
    mckpt.plan(megatron, exported, format="hf", dtype="bf16").run()
    launch = launching.launch

    def without_the_second_cast(module: str, job: dict[str, Any], *others: Any) -> None:
        if module == "mckpt.trainer.worker":
            assert [one["casts"] for one in job["checkpoints"]] == [["bfloat16"]] * 2
            job["checkpoints"][1]["casts"] = []
        launch(module, job, *others)

    monkeypatch.setattr(launching, "launch", without_the_second_cast)
    options = Options(device="cpu", sequences=1, length=64)
    cast, uncast = verify_all(exported, [megatron, megatron], options)
    assert (cast.verdict, cast.reasons) == ("pass", [])
    note = "Megatron-Core runs with its weights cast to bfloat16, as mckpt.json says"
    assert note in cast.facts["notes"]
    biases = sum(name.endswith("score_correction.bias") for name in Checkpoint(megatron))
    values = cast.facts["values"]
    assert biases > 0, "the mapping keeps these in fp32"
    assert values["equal_after_cast"] == values["tensors_equal"] - biases
    logits = uncast.facts["logits"]["float32"]
    assert uncast.verdict == "fail" and logits["max_abs"] > FAULT * logits["tolerance"]


def test_copies_in_a_hugging_face_directory_must_agree(tmp_path: Path) -> None:
    """Multi-token prediction keeps copies of the embedding and of the output layer, which no
    forward pass of transformers uses.
    """
    source = tiny.tiny_random("deepseek-v3", tmp_path / "hf")
    mckpt.plan(source, tmp_path / "megatron").run()
    weights = tiny.tensors(tiny.config("deepseek-v3"))
    (name,) = [key for key in weights if key.endswith(".embed_tokens.weight") and ".layers." in key]
    weights[name] = weights[name] * 2
    tiny.write_weights(source, weights)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.verdict == "fail" and "embed.weight: its copy in" in found.reasons[0], (
        found.reasons
    )
    assert mckpt.diff(source, tmp_path / "megatron").replicas


def test_a_difference_that_was_allowed_makes_the_verdict_incomplete(tmp_path: Path) -> None:
    """The verdict is INCOMPLETE, and FAIL if an arg is not the one that the conversion wrote."""
    source = tiny.tiny_random("mistral", tmp_path / "hf", sliding_window=64)
    mckpt.plan(
        source, tmp_path / "megatron", format="torch", allow_inexact=["sliding_window"]
    ).run()
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.verdict == "incomplete" and found.reasons[0].startswith(
        "sliding_window: the config says 64, and the args mean None"
    )
    (path,) = (tmp_path / "megatron").glob("release/mp_rank_*/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    saved["args"].window_size = (31, 0)
    torch.save(saved, path)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert found.verdict == "fail" and "sliding_window" in found.reasons[0], found.reasons


def test_values_that_a_cast_made_infinite_make_the_verdict_incomplete(tmp_path: Path) -> None:
    source = tiny.tiny_random("llama", tmp_path / "hf")
    weights = tiny.tensors(tiny.config("llama"))
    weights["model.norm.weight"][3] = 1e6
    tiny.write_weights(source, weights)
    mckpt.plan(source, tmp_path / "megatron", dtype="fp16").run(allow_overflow=True)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert (found.verdict, found.reasons) == (
        "incomplete",
        ["final_norm.weight: 1 value became infinite in the cast to float16"],
    )


def test_padding_that_no_conversion_makes_fails(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The rows of padding must be zero, because the softmax of a training run includes them."""
    source = tiny_model("llama")
    mckpt.plan(source, tmp_path / "megatron", format="torch").run()
    (path,) = (tmp_path / "megatron").glob("release/mp_rank_*/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    saved["model"]["output_layer.weight"][-1] = 50
    torch.save(saved, path)
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes")
    assert (
        found.verdict == "fail"
        and "output_layer.weight: 1 row beyond the true vocabulary is not zero" in found.reasons[0]
    )


def test_ignored_weights_are_not_the_same(tmp_path: Path) -> None:
    source = tiny.tiny_random("qwen3", tmp_path / "hf")
    family = tmp_path / "less.yaml"
    family.write_text(
        "extends: qwen3\narchitectures: [Qwen3ForCausalLM]\n"
        'ignore:\n  "model.layers.{layer}.extra.weight": it is left out here\n'
    )
    weights = tiny.tensors(tiny.config("qwen3"))
    weights |= {
        f"model.layers.{layer}.extra.weight": weights["model.norm.weight"] for layer in range(4)
    }
    tiny.write_weights(source, weights)
    mckpt.plan(source, tmp_path / "megatron", known=Known(mapping=str(family))).run()
    found = mckpt.verify(source, tmp_path / "megatron", level="bytes", mapping=str(family))
    assert (
        found.verdict == "incomplete"
        and "ignores 4 weights" in found.reasons[0]
        and "layers.0.extra.weight" in found.reasons[0]
    )
    said = door.mckpt("diff", source, tmp_path / "megatron", "--mapping", family, "--like", source)
    assert said.code == 1 and "the same" not in said.out and "4 ignored" in said.out, said.out


def test_choices_that_transformers_itself_changes_are_left_out() -> None:
    class Kept(dict[str, np.ndarray]):
        files = property(lambda self: list(self))

    chosen = np.eye(4, dtype=bool)[[0, 1, 2, 3, 0]]
    other = chosen.copy()
    other[3] = chosen[2]
    steady = measuring.steady_positions
    changed = Kept(experts_0=chosen, noise_experts_0=other)
    assert steady(changed, 5).tolist() == [True, True, True, False, False]
    assert steady(Kept(experts_0=chosen, noise_experts_0=chosen), 5).all()
    assert measuring.too_far("float32", {"max_abs": float("nan"), "tolerance": 1.0}) is None


@pytest.mark.parametrize(("second", "kept"), [(1e-5, "second"), (0.5, "first")])
def test_a_suspicious_noise_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: float, kept: str
) -> None:
    """A noise a hundred times the usual one counts only if a second measurement finds it too."""
    found = [1.0, second]

    def base(model: Any, recorder: Any, tokens: list[int], out: Path, index: int) -> float:
        np.save(out / f"logits.{index}.npy", np.full((3, 4), 8.0, "f4"))
        np.savez(
            out / f"reference.{index}.npz", run=np.array("first" if len(found) == 2 else "second")
        )
        return 8.0

    monkeypatch.setattr(reference, "base", base)
    monkeypatch.setattr(reference, "noise", lambda *args: found.pop(0))
    base(None, None, [], tmp_path, 0)
    assert reference.measured_noise(None, None, [], tmp_path, 0) == [1.0, second]  # type: ignore[arg-type]
    with np.load(tmp_path / "reference.0.npz") as left:
        assert left["run"] == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.0.npy", "reference.0.npz"]
    found[:] = [1e-5]
    assert reference.measured_noise(None, None, [], tmp_path, 0) is None  # type: ignore[arg-type]


def test_args_of_another_shape_are_a_verdict(directory: Path, tmp_path: Path) -> None:
    """The error of megatron-core about such args becomes a FAIL, not a crash."""

    def widen(state: State, args: Any) -> None:
        args.num_query_groups = 4

    found = mckpt.verify(
        directory / "hf",
        seed(directory / "clean", tmp_path / "wide", widen),
        device="cpu",
        sequences=1,
        length=16,
    )
    assert found.exit_code == 1
    assert found.facts["where"]["args"] == ["num_query_groups"]
    assert "does not load" in found.reasons[-1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pp": 3}, "pipeline"),
        ({"tp": 3}, "attention heads"),
        ({"level": "train", "cp": 2}, "leave --cp out"),
        ({"level": "deep"}, "no level"),
        ({"device": "cuda"}, "GPUs"),
    ],
)
def test_sizes_that_cannot_run_are_refused_first(
    directory: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(mckpt.errors.UsageError, match=why):
        mckpt.verify(directory / "hf", directory / "clean", **options)


@pytest.mark.parametrize("index", [0, 13])
def test_bytes(directory: Path, index: int) -> None:
    assert mckpt.verify(directory / "hf", directory / "clean", level="bytes").verdict == "pass"
    found = mckpt.verify(directory / "hf", directory / f"fault{index}", level="bytes")
    assert found.exit_code == 1
    assert len(found.reasons) == 1 and FAULTS[index][1] in found.reasons[0]


def test_bytes_sees_dims_of_any_formats(directory: Path, tmp_path: Path) -> None:
    other = tiny.tiny_random(
        "qwen3-moe",
        tmp_path / "hf",
        mlp_only_layers=[0],
        intermediate_size=48,
        decoder_sparse_step=1,
        rope_theta=5000.0,
    )
    for left, right in (
        (directory / "hf", other),
        (other, directory / "clean"),
        (directory / "clean", other),
    ):
        found = mckpt.verify(left, right, level="bytes")
        assert found.exit_code == 1 and "rope_theta" in found.reasons[0], found.reasons


def test_bytes_sees_args(directory: Path) -> None:
    for index, (_, named, change) in enumerate(FAULTS):
        if change in (change_rope_base, change_epsilon, tie_output):
            found = mckpt.verify(directory / "hf", directory / f"fault{index}", level="bytes")
            assert found.exit_code == 1 and named in found.reasons[0]


def test_an_expert_that_no_token_reaches(tmp_path: Path) -> None:
    """The verdict is INCOMPLETE, because the weights of that expert could be anything.

    The experts' width is not a multiple of 8, which grouped kernels refuse. The conversion casts to
    bfloat16, and transformers runs on the same cast.
    """
    width = {"moe_intermediate_size": 20}
    source = tiny.tiny_random(
        "qwen3-moe",
        tmp_path / "hf",
        "float32",
        num_experts_per_tok=1,
        norm_topk_prob=False,
        **width,
    )
    weights = tiny.tensors(
        {**tiny.config("qwen3-moe"), "num_experts_per_tok": 1, **width}, "float32"
    )
    weights["model.layers.2.mlp.gate.weight"][5] = 0  # of 24 scores some other is above 0
    tiny.write_weights(source, weights)
    mckpt.plan(source, tmp_path / "megatron", format="torch_dist", dtype="bf16").run()
    command = [
        "verify",
        source,
        tmp_path / "megatron",
        "--ep",
        "2",
        "--device",
        "cpu",
        "--length",
        "64",
    ]
    said = door.mckpt(*command, "--json", "--report", tmp_path / "report.html")
    assert said.code == 1, said.err
    found = json.loads(said.out)
    assert found["verdict"] == "incomplete", found["reasons"]
    assert found["values"]["equal_after_cast"] == found["values"]["tensors_equal"]
    assert found["coverage"]["experts"]["missing"] == {"2": [5]}
    assert "layer 2: 5" in found["reasons"][0]
    assert found["sizes"]["ep"] == found["ranks"] == 2
    assert "INCOMPLETE" in (tmp_path / "report.html").read_text()


LOGITS = {"noise": 1e-5, "spread": 1.0, "decisive": True, "probe": 1.0, "probe_above": 1e4}
FACTS = {
    "coverage": {"positions": {}},
    "logits": {"float32": LOGITS},
    "tokens": {"judged": 100, "positions": 100, "ties": 0},
}
WINDOW = {"window": 4096, "longest_sequence": 512, "exceeded": False}
WEAK_PROBE = {"noise": 0, "probe": 1e-4, "probe_above": 2.0}
NEAR = {"noise": 0, "probe_above": 99, "below": 1.92}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"coverage": {"window": WINDOW}}, "window of 4096"),
        (
            {"logits": {"bfloat16": {"noise": 0.4, "spread": 1.0, "decisive": False}}},
            "noise of bfloat16",
        ),
        ({"logits": {"float32": LOGITS | WEAK_PROBE}}, "could be missed"),
        ({"logits": {"float32": LOGITS | NEAR}}, "only 1.9 times"),
        ({"tokens": {"judged": 10, "positions": 100, "ties": 3}}, "only 10 of 100"),
    ],
)
def test_a_run_that_proves_too_little_is_incomplete(
    changes: dict[str, Any], why: str | None
) -> None:
    found = verdict.incomplete(FACTS | changes)
    assert len(found) == (why is not None)
    assert why is None or why in found[0]


def test_tokens_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('[1, 2, 3]\n{"tokens": [4, 5]}\n')
    assert read_tokens(path, 6) == [[1, 2, 3], [4, 5]]
    for text, rows in (
        ("[\n [1, 2],\n [3, 4]\n]", [[1, 2], [3, 4]]),
        ("[1, 2]", [[1, 2]]),
        ('{"tokens": [1, 2]}', [[1, 2]]),
    ):
        path.write_text(text)
        assert read_tokens(path, 6) == rows
    np.save(tmp_path / "tokens.npy", np.array([[1, 2], [3, 4]]))
    assert read_tokens(tmp_path / "tokens.npy", 6) == [[1, 2], [3, 4]]
    for wrong, why in (
        ("[1, 6]", "from 0 to 5"),
        ("[1]", "at least 2"),
        ("words", "expected one JSON list of token ids per line"),
        ('{"text": "a"}', "expected one JSON list of token ids per line"),
    ):
        path.write_text(wrong)
        with pytest.raises(mckpt.errors.UsageError, match=why):
            read_tokens(path, 6)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_other_sizes_are_others(num_ranks: int) -> None:
    dims = {
        "num_heads": 16,
        "num_query_groups": 8,
        "ffn_size": 160,
        "vocab_size": 256,
        "num_layers": 8,
        "num_experts": 24,
    }
    first = {"tp": num_ranks, "pp": 1, "vpp": 1, "ep": 1, "etp": num_ranks, "cp": 1}
    second = other_sizes(first, dims, {})
    assert launching.world(second) == max(2, num_ranks)
    assert second["tp"] != num_ranks or num_ranks == 1
    with pytest.raises(mckpt.errors.UsageError, match="no other sizes"):
        other_sizes(first, {**dims, "num_heads": 1, "num_layers": 1, "num_experts": 0}, {})


def test_a_port_that_somebody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", launching.free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda ports, count: [port, port + 1, port + 2])
        assert launching.free_port() in (port + 1, port + 2)
        monkeypatch.setattr(random, "sample", lambda ports, count: [port])
        with pytest.raises(mckpt.errors.StorageError, match="no port"):
            launching.free_port()


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FAULTS)), ids=[fault[0] for fault in FAULTS])
def test_every_fault_through_the_command(directory: Path, index: int) -> None:
    both = (directory / "hf", directory / f"fault{index}")
    done = door.run(
        door.command_line("verify", *both, "--json", "--device", "cpu"), code=1, timeout=600
    )
    expect(json.loads(done.stdout), FAULTS[index][1])


QUICK = {"pp": 1, "sequences": 1, "length": 64, "steps": 2}
WHOLE = {"pp": 2}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "form", "options"),
    [
        pytest.param("llama", "torch", QUICK, id="llama, torch"),
        pytest.param("qwen3-moe", "torch", WHOLE, id="qwen3-moe, torch", marks=SLOW),
        pytest.param("qwen3-moe", "torch_dist", WHOLE, id="qwen3-moe, torch_dist", marks=SLOW),
    ],
)
def test_training_at_two_sizes_gives_the_same_losses(
    tiny_model: TinyModel, tmp_path: Path, case: str, form: str, options: dict[str, int]
) -> None:
    """`torch` files run at other sizes than those they were saved with, from a temporary copy."""
    source, megatron = tiny_model(case), tmp_path / "megatron"
    tp2 = mckpt.Parallel(tp=2)
    mckpt.plan(source, megatron, format=form, parallel=tp2, transformer_impl="local").run()
    found = mckpt.verify(source, megatron, level="train", tp=1, device="cpu", **options)
    assert (found.verdict, found.reasons, found.facts["level"]) == ("pass", [], "train")
    assert ("resharded" in found.facts) == (form == "torch")
    training = found.facts["training"]
    first, second = ((sizes["tp"], sizes["pp"]) for sizes in training["sizes"])
    assert first == (1, options["pp"]) != second
    assert [len(losses) for losses in training["losses"]] == [options.get("steps", 4)] * 2
    assert training["moved"] > 0 and training["max_abs"] <= training["tolerance"] / CLEAN
