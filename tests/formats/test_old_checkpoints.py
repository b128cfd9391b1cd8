"""Checkpoints from before megatron-core: the names of every time, the rows of query_key_value of
every checkpoint_version, and nested dicts. The references are the converters of transformers 4,
whose results are kept as digests and files (tests/helpers/old_checkpoints.py).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt.errors import MappingError, MckptError, SourceError, UsageError
from mckpt.options import SourceOptions
from mckpt.verification.requirements import require_core
from tests.helpers import legacy_megatron
from tests.helpers import old_checkpoints as old
from tests.helpers.lazy import torch

KNOWN = SourceOptions(vocab_size=old.VOCAB)
# what the converters write beside the model's parameters
COMPUTED = (".attn.bias", ".masked_bias", "lm_head.weight", "cls.predictions.decoder.weight")


def hugging_face(source: Path, known: SourceOptions = KNOWN) -> dict[str, Any]:
    """Converts a checkpoint to Hugging Face beside it, and returns the tensors."""
    out = source.with_name(f"{source.name}-hf")
    mckpt.convert(mckpt.Checkpoint.open(source, known), out, format="hf")
    return old.load_file(out / "model.safetensors")


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the tensors of the GPT-2 of checkpoint_version 3."""
    work = tmp_path_factory.mktemp("old")
    return old.load_file(old.hugging_face(work) / "model.safetensors")


@pytest.mark.parametrize(("kind", "version"), old.CASES)
def test_the_tensors_are_those_of_the_converters(
    kind: str, version: float | None, tmp_path: Path
) -> None:
    """Every release is a file of torch before 1.6, with the names of 2019."""
    wanted = json.loads(old.DIGESTS.read_text())[f"{kind} {version}"]
    source = old.save(old.state_of(kind, version, old.args_of(kind)), tmp_path / "a")
    # the converters keep the padding of the vocabulary
    found = hugging_face(source, SourceOptions(vocab_size=old.PADDED))
    ours = old.digests(found)
    assert ours == {k: v for k, v in wanted.items() if not k.endswith(COMPUTED)}
    others = {v: json.loads(old.DIGESTS.read_text())[f"{kind} {v}"] for v in (0, 1.0, 2.0)}
    assert sum(all(them[k] == v for k, v in ours.items()) for them in others.values()) == 1


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_the_rows_of_two_tensor_ranks(version: int, tmp_path: Path) -> None:
    """Each rank has its own heads in the order of the version."""
    args = old.args_of("gpt2", model_parallel_size=2)
    whole = old.state_of("gpt2", version, args)
    source = old.save(whole, tmp_path / "one")
    args.model_parallel_size = 1
    for rank in range(2):
        half = old.state_of("gpt2", version, args)
        language = half["model"]["language_model"]
        words = language["embedding"]["word_embeddings"]
        words["weight"] = words["weight"].chunk(2)[rank].clone()
        for key, value in language["transformer"].items():
            if "query_key_value" in key:
                width = old.HIDDEN // old.HEADS
                shape, axis = {
                    0: ((3, old.HEADS, width), 1),
                    1: ((old.HEADS, width, 3), 0),
                    2: ((old.HEADS, 3, width), 0),
                    3: ((old.HEADS, 3, width), 0),
                }[version]
                rows = value.view(*shape, *value.shape[1:]).chunk(2, dim=axis)[rank]
                language["transformer"][key] = rows.reshape(-1, *value.shape[1:]).clone()
            elif "h_to_4h" in key:
                language["transformer"][key] = value.chunk(2)[rank].clone()
            elif key.endswith("weight") and ("dense" in key):
                language["transformer"][key] = value.chunk(2, dim=1)[rank].clone()
        old.save(half, tmp_path / "two", Path(f"release/mp_rank_0{rank}/model_optim_rng.pt"))
    assert equal(hugging_face(tmp_path / "two"), hugging_face(source))


NAMES = list(
    itertools.product(
        ("encoder", "transformer"), ("self_attention", "attention"), ("layernorm", "norm")
    )
)


@pytest.mark.parametrize("names", [n for n in NAMES if n[0] == "encoder" or n[2] == "layernorm"])
def test_the_names_of_every_time(
    names: tuple[str, str, str], weights: dict[str, Any], tmp_path: Path
) -> None:
    stack, attention, norm = names
    state = old.state_of(
        "gpt2", 3.0, old.args_of("gpt2"), stack=stack, attention=attention, norm=norm
    )
    assert equal(hugging_face(old.save(state, tmp_path / "a")), weights)


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in state.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        out.update(inner)
    return out


def test_other_places_and_forms_of_a_file(weights: dict[str, Any], tmp_path: Path) -> None:
    state = old.state_of("gpt2", 3.0, old.args_of("gpt2"))
    old.save(state, tmp_path / "alone", Path("model_optim_rng.pt"))
    old.save({**state, "model": flat(state["model"])}, tmp_path / "flat", old=False)
    old.save(state, tmp_path / "distributed", Path("release/mp_rank_00/model_rng.pt"))
    old.save({"optimizer": {}}, tmp_path / "distributed", Path("release/mp_rank_00_000/optim.pt"))
    for name in ("alone", "flat", "distributed"):
        assert equal(hugging_face(tmp_path / name), weights), name


def test_a_checkpoint_without_args_needs_a_config(weights: dict[str, Any], tmp_path: Path) -> None:
    """As NVIDIA released GPT-2, whose order of rows is that of version 0."""
    described = hugging_face(old.save(old.state_of("gpt2", 0, old.args_of("gpt2")), tmp_path / "a"))
    source = old.save(old.state_of("gpt2", None, None), tmp_path / "bare")
    with pytest.raises(UsageError, match=r"so its num_layers, .*num_heads"):
        hugging_face(source)
    found = hugging_face(source, SourceOptions(like=tmp_path / "a-hf"))
    assert equal(found, described) and not equal(found, weights)


# ---------------------------------------------------- the script of transformers for many ranks


def test_the_directory_of_the_script_for_many_ranks_is_read() -> None:
    checkpoint = mckpt.open(old.RESHAPED)
    assert (checkpoint.mapping.name, checkpoint.dims["vocab_size"]) == ("legacy", old.VOCAB)
    assert (checkpoint.parallel.tp, checkpoint.parallel.pp) == (2, 2)


def test_the_directory_of_the_script_converts_back(weights: dict[str, Any], tmp_path: Path) -> None:
    mckpt.convert(old.RESHAPED, tmp_path / "hf", format="hf")
    assert equal(old.load_file(tmp_path / "hf" / "model.safetensors"), weights)


def test_what_is_written_is_what_the_script_writes(tmp_path: Path) -> None:
    source, out = old.hugging_face(tmp_path), tmp_path / "out"
    parallel = mckpt.Parallel(tp=2, pp=2)
    wanted = {"format": "torch", "dialect": "legacy", "parallel": parallel, "divisible_by": 16}
    mckpt.convert(source, out, **wanted)
    tracker = "latest_checkpointed_iteration.txt"
    assert (out / tracker).read_text().strip() == (old.RESHAPED / tracker).read_text().strip()
    for path in old.RESHAPED.glob("release/*/*.pt"):
        with open(path, "rb") as file:
            theirs = torch.load(file, weights_only=False)
        ours = torch.load(out / path.relative_to(old.RESHAPED), weights_only=False)
        assert list(ours["model"]) == list(theirs["model"])
        one, other = flat(ours["model"]), flat(theirs["model"])
        assert one.keys() == other.keys()
        for key, tensor in other.items():
            rows = len(tensor)  # the script fills the padding with copies of the last row
            if "word_embeddings" in key and "01_" in path.parent.name:
                rows = old.VOCAB - len(tensor)
            assert one[key].shape == tensor.shape and torch.equal(one[key][:rows], tensor[:rows])
        for name, value in vars(theirs["args"]).items():
            if name not in ("data_parallel_size", "rank"):
                assert getattr(ours["args"], name) == value, name
        assert ours["checkpoint_version"] == theirs["checkpoint_version"]


# ------------------------------------------------------------- Megatron-LM's own old models


@pytest.mark.judge
@pytest.mark.parametrize("case", legacy_megatron.KEPT)
def test_the_logits_are_those_of_the_old_model(case: str, tmp_path: Path) -> None:
    """The checkpoints and logits are of megatron/legacy/model, run on CPU."""
    transformers = pytest.importorskip("transformers")
    mckpt.convert(old.FOLDER / case, tmp_path / "hf", format="hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokens, kinds = legacy_megatron.inputs()
    with torch.no_grad():
        if case == "bert":
            found = model(tokens, token_type_ids=kinds).prediction_logits
        else:
            found = model(tokens).logits
    wanted = torch.load(old.FOLDER / case / "logits.pt")
    assert wanted.std() > 0.5
    assert (found - wanted).abs().max() < 1e-5


def test_a_directory_that_accelerate_saves(weights: dict[str, Any], tmp_path: Path) -> None:
    """accelerate's save_state lets Megatron-LM save into the directory, whose args have
    orig_vocab_size, and adds files of its own.
    """
    args = old.args_of("gpt2", model_parallel_size=None, padded_vocab_size=None)
    vars(args).update(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    vars(args).update(orig_vocab_size=old.VOCAB, model_type_name="gpt", pretraining_flag=True)
    state = old.state_of("gpt2", 3.0, args, stack="encoder", attention="self_attention")
    old.save(state, tmp_path / "a", Path("iter_0000000/mp_rank_00/model_optim_rng.pt"), old=False)
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text("0")
    for name in ("random_states_0.pkl", "custom_checkpoint_0.pkl", "scheduler.bin"):
        (tmp_path / "a" / name).write_bytes(b"")
    assert equal(hugging_face(tmp_path / "a", SourceOptions()), weights)


# ------------------------------------------------------------------------------ other targets


@pytest.mark.parametrize(("kind", "dialect"), [("gpt2", "gpt"), ("bert", "bert")])
def test_it_becomes_a_checkpoint_of_megatron_core(kind: str, dialect: str, tmp_path: Path) -> None:
    source = old.save(old.state_of(kind, None, old.args_of(kind)), tmp_path / "a")
    wanted = hugging_face(source)
    for form in ("torch", "torch_dist"):
        out = tmp_path / form
        parallel = mckpt.Parallel(tp=2, pp=2)
        given = {"format": form, "dialect": dialect, "parallel": parallel}
        mckpt.convert(mckpt.Checkpoint.open(source, KNOWN), out, **given)
        made = mckpt.open(out, vocab_size=old.VOCAB)
        assert (made.mapping.name, made.names.choices["transformer_impl"]) == (
            dialect,
            "transformer_engine",
        )
        assert made.opened.common is not None
        assert made.opened.common.fields["checkpoint_version"] == 3.0
        assert not mckpt.diff(made, mckpt.open(source, vocab_size=old.VOCAB))
        assert equal(hugging_face(out), wanted)
    args = made.args or {}
    assert args["position_embedding_type"] == "learned_absolute"
    assert args["normalization"] == "LayerNorm" and args["ffn_hidden_size"] == 4 * old.HIDDEN
    assert args["untie_embeddings_and_output_weights"] is False
    assert args["bias_gelu_fusion"] is (kind == "gpt2")


def test_a_reshard_writes_the_names_and_the_order_of_today(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    source = old.save(old.state_of("gpt2", 1.0, old.args_of("gpt2")), tmp_path / "a")
    parallel = mckpt.Parallel(tp=2, pp=2)
    mckpt.convert(
        mckpt.Checkpoint.open(source, KNOWN), tmp_path / "b", format="torch", parallel=parallel
    )
    made = mckpt.open(tmp_path / "b", vocab_size=old.VOCAB)
    assert made.mapping.name == "legacy"
    assert made.names.choices["checkpoint_version"] == 3
    keys = list(made.opened.keys())
    assert "language_model.encoder.layers.0.self_attention.dense.weight" in keys
    assert equal(hugging_face(tmp_path / "b"), hugging_face(source))


# --------------------------------------------------------------------------------- bad input


def refused(state: dict[str, Any], folder: Path, kind: type[MckptError], match: str) -> None:
    with pytest.raises(kind, match=match):
        mckpt.plan(
            mckpt.Checkpoint.open(old.save(state, folder), KNOWN),
            folder.with_name("hf"),
            format="hf",
        )


def test_bad_old_checkpoints_are_refused(tmp_path: Path) -> None:
    args = old.args_of("gpt2")
    refused(
        old.state_of("gpt2", 7.0, args),
        tmp_path / "a",
        SourceError,
        r"checkpoint_version is 7\.0 in the checkpoint, and legacy\.yaml knows 3, 2, 1, 0 only",
    )
    refused(
        old.state_of("gpt2", None, old.args_of("gpt2", num_attention_heads=None)),
        tmp_path / "b",
        MappingError,
        r"num_attention_heads is missing \(query heads\)",
    )
    state = old.state_of("gpt2", None, args)
    state["model"]["language_model"]["decoder"] = {"layers.0.weight": torch.zeros(3)}
    refused(
        state,
        tmp_path / "c",
        MckptError,
        r"language_model\.decoder\.layers\.0\.weight is in no rule of legacy\.yaml",
    )
    state = old.state_of("gpt2", None, args)
    state["model"]["language_model"]["embedding"] = {"word_embeddings": {"weight": "lost"}}
    refused(
        state,
        tmp_path / "d",
        SourceError,
        "'language_model.embedding.word_embeddings.weight' is not a tensor but 'lost'",
    )


def test_options_that_the_dialect_does_not_have(tmp_path: Path) -> None:
    source = old.hugging_face(tmp_path)
    with pytest.raises(UsageError, match="the dialect legacy has the keys of each rank only"):
        mckpt.plan(source, tmp_path / "no", format="torch_dist", dialect="legacy")


def test_an_old_model_is_refused_before_it_runs() -> None:
    with pytest.raises(UsageError, match=r"before megatron-core, .* --target-dialect DIALECT"):
        require_core(mckpt.open(old.FOLDER / "llama"))
