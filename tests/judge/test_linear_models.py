"""Models with gated delta nets: their layers of multi-token prediction, and Megatron's trainer.

transformers saves these models without the tensors mtp.*, so each model gets random ones here,
under the names of the published files. transformers' MtpModel reads them as it reads the published
ones, and is the reference of the logits. Megatron's own trainer loads them and saves them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.errors import MappingError
from mckpt.geometry.parallel import Parallel
from tests.helpers import made_models, tiny
from tests.helpers.judging import expect_multi_token, failure
from tests.helpers.tiny import TinyModel
from tests.judge.test_family_models import SINCE, VERSION
from tests.judge.test_stock import launch_line, through_the_trainer

pytestmark = pytest.mark.judge

CASES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
if any(SINCE[case] > VERSION for case in CASES):
    pytest.skip("these models need megatron-core 0.19", allow_module_level=True)
STOCK = [
    (case, dialect, form)
    for dialect in ("hybrid", "gpt")
    for case in CASES
    for form in ("torch", "torch_dist")
]
TIED = "qwen3_5"  # with tied embeddings


def mtp_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors mtp.*, as in the published files."""
    hidden, head = c["hidden_size"], c["head_dim"]
    rows, narrow = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (2 * rows, hidden),
        "layers.0.self_attn.k_proj": (narrow, hidden),
        "layers.0.self_attn.v_proj": (narrow, hidden),
        "layers.0.self_attn.o_proj": (hidden, rows),
        "layers.0.self_attn.q_norm": (head,),
        "layers.0.self_attn.k_norm": (head,),
    }

    def mlp(name: str, width: int) -> None:
        for part in ("gate_proj", "up_proj"):
            shapes[f"layers.0.mlp.{name}{part}"] = (width, hidden)
        shapes[f"layers.0.mlp.{name}down_proj"] = (hidden, width)

    if "num_experts" in c:
        shapes["layers.0.mlp.gate"] = (c["num_experts"], hidden)
        shapes["layers.0.mlp.shared_expert_gate"] = (1, hidden)
        mlp("shared_expert.", c["shared_expert_intermediate_size"])
        for expert in range(c["num_experts"]):
            mlp(f"experts.{expert}.", c["moe_intermediate_size"])
    else:
        mlp("", c["intermediate_size"])
    return {f"mtp.{name}.weight": shape for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def headless(tiny_model: TinyModel) -> dict[str, Path]:
    return {case: tiny_model(case, "float32") for case in CASES}


@pytest.fixture(scope="module")
def made(work: Path, headless: dict[str, Path]) -> Path:
    for case, source in headless.items():
        directory, drawn = work / "hf" / case, np.random.RandomState(5)
        added = {
            name: np.float32(0.3 if len(shape) == 1 else 1.1 / np.sqrt(shape[-1]))
            * drawn.standard_normal(shape).astype(np.float32)
            for name, shape in mtp_shapes(made_models.config(case)).items()
        }
        shutil.copytree(source, directory)
        path = directory / "model.safetensors"
        save_file(load_file(path) | added, path, {"format": "pt"})
    return work / "hf"


def reference(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of transformers' MtpModel for all tokens but the last."""
    import torch
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = tiny.load(directory)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    given = torch.from_numpy(tokens)
    positions = torch.arange(1, given.shape[1]).expand_as(given[:, 1:])
    with torch.no_grad():
        mtp = MtpModel.from_pretrained(model).eval()
        hidden = model.model(given).last_hidden_state[:, :-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        found = mtp.forward_layer(0, hidden, positions, cache, input_ids=given[:, 1:])
        logits: np.ndarray = model.lm_head(found).numpy()
    return logits


@pytest.mark.parametrize("case", CASES)
def test_multi_token_prediction_has_the_logits_of_transformers(
    case: str, made: Path, tmp_path: Path
) -> None:
    tokens = made_models.tokens(case)
    wanted = reference(made / case, tokens)
    assert np.abs(wanted).max() > 1
    expect_multi_token(made / case, tmp_path / "out", tokens, wanted, impl="local")


@pytest.mark.parametrize(("case", "dialect", "form"), STOCK)
def test_the_stock_trainer_loads_and_saves_gated_delta_nets(
    case: str, dialect: str, form: str, made: Path, headless: dict[str, Path], tmp_path: Path
) -> None:
    """The trainer has no multi-token prediction in GPTModel."""
    source = made / case if dialect == "hybrid" else headless[case]
    pp = 1 if (case, dialect, form) == (TIED, "hybrid", "torch_dist") else 2
    wanted = {"format": form, "dialect": dialect, "parallel": Parallel(tp=2, pp=pp)}
    mckpt.plan(source, tmp_path / "out", **wanted).run()
    through_the_trainer(source, tmp_path / "out", None, family=case, te=True, world=4)


def test_the_stock_trainer_has_no_multi_token_prediction_beside_gated_delta_nets_in_gpt(
    made: Path, headless: dict[str, Path], tmp_path: Path
) -> None:
    """mckpt refuses the model for this reason."""
    out = tmp_path / "headless"
    mckpt.convert(headless["qwen3_next"], out, dialect="gpt", tp=2, pp=2)
    with_mtp = [*launch_line(out), "--mtp-num-layers", "1"]
    said = failure("stock", te=True, world=4, flags=with_mtp, checkpoint=out)
    assert (
        "Experimental attention variant is not supported with get_gpt_decoder_layer_specs" in said
    )
    with pytest.raises(MappingError, match=r"cannot build multi-token prediction(?s:.*)hybrid"):
        mckpt.plan(made / "qwen3_5", tmp_path / "out", dialect="gpt")
    wanted = {"dialect": "gpt", "allow_inexact": ["mtp_layers"]}  # for a trainer that has it
    mckpt.plan(made / "qwen3_5", tmp_path / "out", **wanted).run()
    mckpt.plan(tmp_path / "out", tmp_path / "back", format="hf").run()
    assert not mckpt.diff(made / "qwen3_5", tmp_path / "back")


def test_tied_embeddings_and_multi_token_prediction_are_refused_on_several_stages(
    made: Path, tmp_path: Path
) -> None:
    wanted = {"dialect": "hybrid", "format": "torch_dist", "parallel": Parallel(pp=2)}
    with pytest.raises(MappingError, match=r"fails an assertion(?s:.*)--pp 1"):
        mckpt.plan(made / TIED, tmp_path / "out", **wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_weights_of_multi_token_prediction_come_back_bit_for_bit(
    case: str, form: str, made: Path, tmp_path: Path
) -> None:
    sizes = Parallel(tp=2, pp=2) if form == "torch" else Parallel()
    mckpt.plan(made / case, tmp_path / "there", format=form, parallel=sizes).run()
    mckpt.plan(tmp_path / "there", tmp_path / "again", format="hf").run()
    before = load_file(made / case / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    config = made / case / "config.json"
    assert (tmp_path / "again" / "config.json").read_bytes() == config.read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_the_tensors_has_no_layer_of_multi_token_prediction(
    case: str, headless: dict[str, Path], tmp_path: Path
) -> None:
    """As transformers saves it. The config.json of the copy agrees with the args."""
    opened = mckpt.open(headless[case])
    assert opened.dims["mtp_layers"] == 0
    (note,) = opened.model.notes
    assert "0 is used, because the tensor mtp.fc.weight is not there" in note
    plan = mckpt.plan(headless[case], tmp_path / "there", format="torch")
    assert note in plan.summary()
    plan.run()
    (key,) = opened.mapping.dims["mtp_layers"].keys
    assert json.loads((tmp_path / "there" / "hf" / "config.json").read_text())[key] == 0
    mckpt.plan(tmp_path / "there", tmp_path / "again", format="hf").run()
    assert not mckpt.diff(headless[case], tmp_path / "again")
    like = headless[case]  # whose config.json is that of the source
    assert mckpt.open(tmp_path / "there", like=like).dims["mtp_layers"] == 0


def stacked(tensors: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    """Returns the tensors with the experts of each layer under `start` in one tensor."""
    out, layers = (
        dict(tensors),
        {k.partition(".mlp.experts.")[0] for k in tensors if "experts." in k},
    )
    for layer in sorted(name for name in layers if name.startswith(start)):
        at, parts = f"{layer}.mlp.experts.", ("gate_proj", "up_proj", "down_proj")
        held = range(len([k for k in tensors if k.startswith(at) and parts[0] in k]))
        gate, up, down = ([out.pop(f"{at}{e}.{part}.weight") for e in held] for part in parts)
        out[f"{at}gate_up_proj"] = np.stack(
            [np.concatenate(both) for both in zip(gate, up, strict=True)]
        )
        out[f"{at}down_proj"] = np.stack(down)
    return out


@pytest.mark.parametrize("starts", [("model.",), ("mtp.",), ("model.", "mtp.")])
def test_experts_may_be_in_one_tensor(starts: tuple[str, ...], made: Path, tmp_path: Path) -> None:
    """Those of the decoder, those of multi-token prediction, or both."""
    source = made / "qwen3_5_moe"
    tensors = load_file(source / "model.safetensors")
    for start in starts:
        tensors = stacked(tensors, start)
    (tmp_path / "stacked").mkdir()
    save_file(tensors, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", tmp_path / "stacked")
    mckpt.plan(tmp_path / "stacked", tmp_path / "there", format="torch").run()
    mckpt.plan(tmp_path / "there", tmp_path / "again", format="hf").run()
    assert not mckpt.diff(source, tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name], tensors[name]) for name in after)
