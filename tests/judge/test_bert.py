"""BertModel of Megatron-Core: its names, its second head, padding, and the kinds of tokens. The
logits of all positions are judged with the other families (test_family_models.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.errors import MappingError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.verification.levels import verify
from tests.helpers import made_models, tiny
from tests.helpers.commands import refused
from tests.helpers.judging import ask
from tests.helpers.tiny import TinyModel
from tests.judge.test_dialect import expect_rules

pytestmark = pytest.mark.judge

CASE = "megatron_bert"
ATOL = 1e-4
PARALLEL = Parallel(tp=2, pp=2)
IMPLS = ("local", "transformer_engine")
LENGTH = 40  # of the second sequence; the rest of it is padding


@pytest.fixture(scope="module")
def made(tiny_model: TinyModel) -> Path:
    return tiny_model(CASE, "float32")


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_kinds_of_tokens_and_both_heads(impl: str, made: Path, tmp_path: Path) -> None:
    import torch

    tokens = made_models.tokens(CASE)
    seen, kinds = np.ones_like(tokens), np.zeros_like(tokens)
    seen[1, LENGTH:] = 0
    kinds[:, 15:] = 1
    mckpt.plan(made, tmp_path / "out", format="torch", transformer_impl=impl).run()
    given = {"args": {"dialect": "bert"}, "tokens": tokens, "seen": seen, "kinds": kinds}
    found = ask("encode", te=True, checkpoint=tmp_path / "out", impl=impl, **given)
    with torch.no_grad():
        wanted = tiny.load(made)(
            torch.tensor(tokens),
            attention_mask=torch.tensor(seen),
            token_type_ids=torch.tensor(kinds),
        )
    vocab_size = wanted.prediction_logits.shape[-1]
    apart = found["logits"][..., :vocab_size] - wanted.prediction_logits.numpy()
    assert np.abs(apart[seen == 1]).max() < ATOL
    assert np.abs(found["sentence"] - wanted.seq_relationship_logits.numpy()).max() < ATOL


@pytest.mark.parametrize("impl", IMPLS)
def test_every_tensor_of_the_model_has_a_rule(impl: str, made: Path) -> None:
    dialect, dims = mapping.load("megatron", "bert"), mckpt.open(made).dims
    chosen = {"transformer_impl": impl, "experts": "grouped", "latent_norms": "fused"}
    found = expect_rules("bert", dims, chosen, PARALLEL, dialect="bert")
    scope = dialect.scope(dims, keys="global", layers="stacked", pp=PARALLEL.pp, **chosen)
    objects = {key for b in dialect.bind(scope, dialect.objects) for key, _ in b.global_keys()}
    stored = {k.split("/")[0] for k, (_, kind) in found["torch_dist"].items() if kind == "object"}
    assert stored <= objects  # the stand-in for Transformer Engine lacks one


def test_a_model_without_the_head_for_sentences_is_refused(made: Path, tmp_path: Path) -> None:
    """pretrain_bert.py gives such a model no embeddings of kinds of tokens."""
    from safetensors.numpy import load_file, save_file

    model = tmp_path / "masked"
    shutil.copytree(made, model)
    config = made_models.config(CASE) | {"architectures": ["MegatronBertForMaskedLM"]}
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if ".pooler." not in k and "relationship" not in k}
    assert len(kept) == len(tensors) - 4
    save_file(kept, model / "model.safetensors")
    with pytest.raises(MappingError, match="--allow-inexact token_types"):
        mckpt.plan(model, tmp_path / "refused", format="torch")
    wanted = {"allow_inexact": ["token_types"], "parallel": PARALLEL, "format": "torch_dist"}
    mckpt.plan(model, tmp_path / "accepted", **wanted).run()
    mckpt.plan(tmp_path / "accepted", tmp_path / "back", format="hf").run()
    assert not mckpt.diff(model, tmp_path / "back")
    assert tiny.hf_logits(tmp_path / "back", made_models.tokens(CASE)).shape[-1] == 211


def test_a_decoder_cannot_hold_an_encoder(made: Path, tmp_path: Path) -> None:
    with pytest.raises(MappingError, match="causal is False, and gpt would compute with True"):
        mckpt.plan(made, tmp_path / "out", format="torch", dialect="gpt")


def test_verify_compares_the_tensors_of_an_encoder(made: Path, tmp_path: Path) -> None:
    mckpt.plan(made, tmp_path / "out", format="torch").run()
    assert verify(made, tmp_path / "out", level="bytes").verdict == "pass"
    with pytest.raises(UsageError, match="is an encoder"):
        verify(made, tmp_path / "out")


def test_train_refuses_an_encoder(made: Path, tmp_path: Path) -> None:
    mckpt.plan(made, tmp_path / "out", format="torch").run()
    said = refused(2, args=("train", tmp_path / "out", "--steps", 1))
    assert "is an encoder, and mckpt train trains decoders only" in said
    assert "train it with Megatron's pretrain_bert.py" in said
