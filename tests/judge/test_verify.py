"""The verdict finds and names every seeded fault, and the clean twin passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.geometry import packing
from mckpt.geometry.packing import Shape
from mckpt.options import SourceOptions, VerifyOptions
from mckpt.verification import verdict
from mckpt.verification.levels import verify_all
from mckpt.verification.verdict import CLEAN, FAULT, compare_values
from tests.helpers import commands, tiny, verifying
from tests.helpers.lazy import torch

pytestmark = pytest.mark.judge

MODEL = "decoder.layers"
HEADS, GROUPS, HEAD_DIM = 16, 8, 40  # sizes of the case below
State = dict[str, Any]  # name -> torch.Tensor
# its name, the name that the verdict must contain, and the function that seeds it
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
    """Subtracts 1 from a norm, as if the model had zero-centered norms (--apply-layernorm-1p)."""
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
    """Makes a copy of a `torch` checkpoint with one fault in it."""
    shutil.copytree(clean, destination)
    (path,) = destination.glob("release/mp_rank_*/model_optim_rng.pt")
    saved = torch.load(path, weights_only=False)
    change(saved["model"], saved["args"])
    torch.save(saved, path)
    commands.restate(path)
    return destination


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hf, clean, and fault0 to fault13."""
    directory = tmp_path_factory.mktemp("faults")
    conversion(directory)
    for index, (_, _, change) in enumerate(FAULTS):
        seed(directory / "clean", directory / f"fault{index}", change)
    return directory


@pytest.fixture(scope="module")
def verdicts(directory: Path) -> dict[str, mckpt.Verdict]:
    paths = [directory / "clean", *(directory / f"fault{index}" for index in range(len(FAULTS)))]
    options = VerifyOptions(device="cpu", length=256, keep=directory / "work")
    with pytest.MonkeyPatch.context() as patch:
        verifying.use_session(patch)
        found = verify_all(directory / "hf", paths, options)
    return dict(zip(["clean", *(name for name, _, _ in FAULTS)], found, strict=True))


def test_a_clean_checkpoint_passes(verdicts: dict[str, mckpt.Verdict]) -> None:
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
def test_every_fault_is_found_and_named(
    verdicts: dict[str, mckpt.Verdict], name: str, named: str
) -> None:
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


def test_a_fault_of_the_converter_itself_is_found(
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
        Checkpoint.open(directory / "hf"),
        Checkpoint.open(directory / f"fault{index}", SourceOptions(like=directory / "hf")),
    )
    monkeypatch.setitem(packing.PACKINGS, "qkv", wrong)
    pair = verdict.Pair(
        f"checkpoint{index + 1}", *known, directory, verdicts["clean"].facts["sizes"], []
    )
    found = verdict.decide(pair, compare_values(*known), directory / "work", "cpu", 1)
    assert found.verdict == "fail"
    assert found.facts["where"]["point"] == "layers.2.attn"
    assert "layers.2.attn.k.weight" not in found.facts["where"]["differ"]
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in found.facts["where"]["stored"]


@pytest.mark.parametrize(
    ("index", "expected"), [(0, "pass"), (1, "fail")], ids=["clean", "transposed"]
)
def test_context_parallelism_is_verified_in_a_second_run(
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
        Checkpoint.open(directory / "hf"),
        Checkpoint.open(directory / "clean", SourceOptions(like=directory / "hf")),
    )
    sizes = {**verdicts["clean"].facts["sizes"], "cp": 2}
    same = compare_values(left, right)
    found = verdict.decide(
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
    left, right = (
        Checkpoint.open(directory / "hf"),
        Checkpoint.open(path, SourceOptions(like=directory / "hf")),
    )
    x, y = (float(side["embed.weight"].numpy()[3, 5]) for side in (left, right))
    expected = f"embed.weight: 1 element differs, first at [3, 5] ({x:.6g} against {y:.6g})"
    pair = verdict.Pair("checkpoint0", left, right, directory, verdicts["clean"].facts["sizes"], [])
    found = verdict.decide(pair, compare_values(left, right), directory / "work", "cpu", 1)
    assert (
        found.exit_code == 1 and len(found.reasons) == 1 and found.reasons[0].startswith(expected)
    )
    found = mckpt.verify(directory / "hf", path, level="bytes")
    assert found.exit_code == 1 and found.reasons[0].startswith(expected)


def test_args_of_another_shape_fail_without_a_crash(directory: Path, tmp_path: Path) -> None:
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
    assert found.facts["where"]["args"] == ["num_query_groups", "query_groups"]
    assert "does not load" in found.reasons[-1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pp": 3}, "pipeline"),
        ({"tp": 3}, "attention heads"),
        ({"level": "train", "cp": 2}, "leave --cp out"),
        ({"level": "deep"}, "level is .deep., and must be bytes"),
        ({"device": "cuda"}, "GPUs"),
    ],
)
def test_sizes_that_cannot_run_are_refused_first(
    directory: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(mckpt.errors.UsageError, match=why):
        mckpt.verify(directory / "hf", directory / "clean", **options)


@pytest.mark.parametrize("model_type", ["bailing_moe", "t5"])
def test_a_model_without_a_class_in_transformers_needs_the_level_bytes(
    model_type: str, tmp_path: Path
) -> None:
    from mckpt.trainer import reference

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(mckpt.errors.MappingError, match="--level bytes"):
        reference._loader_for(str(tmp_path))


@pytest.mark.parametrize("index", [0, 13])
def test_the_level_bytes_finds_every_fault(directory: Path, index: int) -> None:
    assert mckpt.verify(directory / "hf", directory / "clean", level="bytes").verdict == "pass"
    found = mckpt.verify(directory / "hf", directory / f"fault{index}", level="bytes")
    assert found.exit_code == 1
    assert len(found.reasons) == 1 and FAULTS[index][1] in found.reasons[0]


def test_the_level_bytes_compares_dims_of_all_formats(directory: Path, tmp_path: Path) -> None:
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


def test_the_level_bytes_finds_changed_args(directory: Path) -> None:
    for index, (_, named, change) in enumerate(FAULTS):
        if change in (change_rope_base, change_epsilon, tie_output):
            found = mckpt.verify(directory / "hf", directory / f"fault{index}", level="bytes")
            assert found.exit_code == 1 and named in found.reasons[0]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FAULTS)), ids=[fault[0] for fault in FAULTS])
def test_the_command_finds_every_fault(directory: Path, index: int) -> None:
    both = (directory / "hf", directory / f"fault{index}")
    done = commands.run(
        commands.command_line("verify", *both, "--json", "--device", "cpu"), code=1, timeout=600
    )
    expect(json.loads(done.stdout), FAULTS[index][1])
