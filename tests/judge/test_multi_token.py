"""Layers of multi-token prediction that transformers does not save.

Each model gets one such layer, with random tensors under the names of the published files and the
shapes of its last decoder layer. Megatron's own trainer has all tensors under the names and shapes
that mckpt wrote, and Megatron-Core computes the logits of a reference in torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.geometry.parallel import Parallel
from tests.helpers import made_models, tiny
from tests.helpers.judging import expect_multi_token
from tests.helpers.tiny import TinyModel
from tests.judge.test_family_models import VERSION
from tests.judge.test_stock import expect_keys

pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),  # of what torch and transformers import
]
if VERSION < [0, 19]:
    pytest.skip("HybridModel of megatron-core 0.19 is the judge", allow_module_level=True)

MIMO = "mimo"
PLAIN = "seed_oss"  # published without such a layer, which only a training can have added
INDEXED = ("deepseek_v32", "glm_moe_dsa")
DENSE = "joyai"  # GPTModel has experts in such a layer if the last layer has them
CASES = (MIMO, "hy_v3", PLAIN, *INDEXED, DENSE)
LOGITS = (*CASES, "glm4_moe", "glm4_moe_lite")
# pretrain_gpt.py cannot build such layers beside an indexer, or dense ones beside experts
LAYOUTS = [(case, "hybrid") for case in CASES] + [(case, "gpt") for case in (MIMO, "hy_v3", PLAIN)]
# case -> another one with the names of its decoder, and what its config has in place of that one's
MADE_OF: dict[str, tuple[str, dict[str, Any]]] = {
    # its own case shares indexers between layers, which is refused beside such a layer
    "glm_moe_dsa": (
        "deepseek_v32",
        {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "rope_scaling": None,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def decoder(case: str) -> dict[str, Any]:
    """Returns the config.json of a model without the layer."""
    source, other = MADE_OF.get(case, (case, {}))
    return made_models.config(source) | other | {"num_nextn_predict_layers": 0}


def sizes_of(case: str) -> Parallel:
    return Parallel(tp=2, pp=2) if case in (MIMO, PLAIN) else Parallel(tp=2, pp=2, ep=2, etp=1)


def published_names(case: str, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Any:
    """Yields the name and the shape of each tensor of the layer, as in the published files. Its
    own layer has the tensors of the last decoder layer, or of a dense one, and an indexer in any
    case.
    """
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    at = "model.mtp_layers.0." if case == MIMO else f"model.layers.{layers}."
    last = 0 if case == DENSE else layers - 1
    for like in (f"model.layers.{last}.", "model.layers.0.self_attn.indexer."):
        for name, tensor in tensors.items():
            if name.startswith(like):
                yield at + name.split(".", 3)[3], tensor.shape
    if case == MIMO:
        norms, proj = ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj"
    else:
        final = "final_layernorm" if case == "hy_v3" else "shared_head.norm"
        norms, proj = ("enorm", "hnorm", final), "eh_proj"
    for norm in norms:
        yield f"{at}{norm}.weight", (hidden,)
    yield f"{at}{proj}.weight", (hidden, 2 * hidden)


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def with_layer(case: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of a model and those of its layer of multi-token prediction."""
    config = decoder(case)
    # With seed 5, two keys of one query have the score 0 at the edge of the indexer's choice, and
    # the two programs choose different ones.
    drawn = np.random.RandomState(6)
    added = {
        name: np.float32(0.3 if len(shape) == 1 else 1.1 / shape[-1] ** 0.5)
        * drawn.standard_normal(shape).astype(np.float32)
        for name, shape in dict(published_names(case, tensors, config)).items()
    }
    if case not in (MIMO, "hy_v3", PLAIN):  # the published files have a copy of these two
        at = f"model.layers.{config['num_hidden_layers']}."
        added[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        added[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"]
    return tensors | added


@pytest.fixture(scope="module")
def made(work: Path, tiny_model: TinyModel) -> Path:
    for case in LOGITS:
        source = tiny_model(MADE_OF.get(case, (case,))[0], "float32")
        tensors = load_file(source / "model.safetensors")
        write(work / "decoder" / case, decoder(case), tensors)
        described = decoder(case) | {"num_nextn_predict_layers": 1}
        write(work / "hf" / case, described, with_layer(case, tensors))
    return work / "hf"


def tokens(case: str) -> np.ndarray:
    return made_models.tokens(MADE_OF.get(case, (case,))[0])


@pytest.mark.parametrize(("case", "dialect"), LAYOUTS)
def test_the_layer_has_the_keys_of_the_real_model_and_comes_back_bit_for_bit(
    case: str, dialect: str, made: Path, tmp_path: Path
) -> None:
    written = expect_keys(
        made / case, tmp_path, sizes_of(case), dialect, dtypes=False, objects=False
    )
    before = load_file(made / case / "model.safetensors")
    for form, out in written.items():
        mckpt.plan(out, back := tmp_path / f"{form}-back", format="hf").run()
        after = load_file(back / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("case", LOGITS)
def test_multi_token_prediction_has_the_logits_of_the_reference(
    case: str, work: Path, made: Path, tmp_path: Path
) -> None:
    reference = {MIMO: of_mimo, DENSE: of_dense}.get(case, of_transformers)
    wanted = reference(work / "decoder" / case, made / case, tokens(case))
    assert np.abs(wanted).max() > 0.5
    given = {"te": True, "impl": "transformer_engine" if case in INDEXED else "local"}
    expect_multi_token(made / case, tmp_path / "out", tokens(case), wanted, **given)


def causal(state: Any) -> Any:
    """Returns the mask [1, 1, length, length] that is added to scores."""
    import torch

    length = state.shape[1]
    return torch.full((1, 1, length, length), float("-inf")).triu(1)


def of_mimo(main: Path, directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of MiMo's layer for all tokens but the last, as the code beside its
    weights computes them: the projection takes [hidden state | embedding].
    """
    import torch
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    model = tiny.load(main)
    stored = load_file(directory / "model.safetensors")
    at = "model.mtp_layers.0."
    of = {k.removeprefix(at): torch.from_numpy(v) for k, v in stored.items() if k.startswith(at)}

    def norm(name: str, state: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return state * scale * of.pop(f"{name}.weight")

    given = torch.from_numpy(tokens)
    with torch.no_grad():
        hidden = model.model(given).last_hidden_state[:, :-1]
        embedded = model.model.embed_tokens(given[:, 1:])
        joined = [norm("hidden_layernorm", hidden), norm("token_layernorm", embedded)]
        state = torch.cat(joined, -1) @ of.pop("input_proj.weight").T
        final = of.pop("final_layernorm.weight")
        layer = Qwen2DecoderLayer(model.config, 0).eval()
        layer.load_state_dict(of)
        places = torch.arange(state.shape[1]).expand_as(given[:, 1:])
        rotated = model.model.rotary_emb(state, places)
        state = layer(state, attention_mask=causal(state), position_embeddings=rotated)
        of["final.weight"] = final
        logits: np.ndarray = model.lm_head(norm("final", state)).numpy()
    return logits


def of_dense(main: Path, directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of a dense layer of DeepSeek-V3 for all tokens but the last. transformers'
    MtpModel has experts in each.
    """
    import torch

    model = tiny.load(main)
    stored = load_file(directory / "model.safetensors")
    at = f"model.layers.{model.config.num_hidden_layers}."
    of = {k.removeprefix(at): torch.from_numpy(v) for k, v in stored.items() if k.startswith(at)}

    def norm(name: str, state: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return state * scale * of.pop(f"{name}.weight")

    given = torch.from_numpy(tokens)
    with torch.no_grad():
        hidden = model.model(given).last_hidden_state[:, :-1]
        embedded = torch.nn.functional.embedding(given[:, 1:], of.pop("embed_tokens.weight"))
        joined = [norm("enorm", embedded), norm("hnorm", hidden)]
        state = torch.cat(joined, -1) @ of.pop("eh_proj.weight").T
        after = {k: of.pop(f"shared_head.{k}.weight") for k in ("norm", "head")}
        layer = type(model.model.layers[0])(model.config, 0).eval()
        layer.load_state_dict(of)
        places = torch.arange(state.shape[1]).expand_as(given[:, 1:])
        rotated = model.model.rotary_emb(state, places)
        state = layer(state, attention_mask=causal(state), position_embeddings=rotated)
        of["norm.weight"] = after["norm"]
        logits: np.ndarray = (norm("norm", state) @ after["head"].T).numpy()
    return logits


def of_transformers(main: Path, directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of transformers' MtpModel for all tokens but the last."""
    import torch
    from transformers.modeling_layers import MtpModel

    model = tiny.load(main)
    config, layers = model.config, model.config.num_hidden_layers
    config.num_mtp_layers = 1
    config.mtp_layer_types = getattr(config, "layer_types", None) and config.layer_types[-1:]
    config.mtp_mlp_layer_types = ["sparse"]
    # the names, which transformers knows of the published models only
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]
    named = directory.parent / f"{directory.name}-for-transformers"
    named.mkdir()
    stored = load_file(directory / "model.safetensors")
    as_known = {
        k.replace(f"{layers}.final_layernorm", f"{layers}.post_norm"): v for k, v in stored.items()
    }
    save_file(as_known, named / "model.safetensors", {"format": "pt"})
    (named / "config.json").write_bytes((directory / "config.json").read_bytes())
    config.name_or_path = str(named)
    given = torch.from_numpy(tokens)
    positions = torch.arange(1, given.shape[1]).expand_as(given[:, 1:])
    with torch.no_grad():
        mtp = MtpModel.from_pretrained(model).eval()
        hidden = model.model(given).last_hidden_state[:, :-1]
        # not by MtpModel.forward_layer, which makes no mask for an attention with an indexer
        (layer,), embedded = mtp.layers, mtp.embed_tokens(given[:, 1:])
        layer.mtp_block.register_forward_hook(
            lambda module, given, found: found[0] if isinstance(found, tuple) else found
        )
        rotated = mtp.rotary_emb(embedded, position_ids=positions)
        found = layer(embedded, hidden, rotated, causal(hidden), positions, None)
        logits: np.ndarray = model.lm_head(found).numpy()
    return logits
