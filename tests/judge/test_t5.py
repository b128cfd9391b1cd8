"""T5 and mT5 on Megatron-Core's T5Model, and the models of their kind that it cannot stand for."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.errors import MappingError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from mckpt.verification.levels import verify
from tests.helpers import made_models
from tests.helpers.commands import refused
from tests.helpers.judging import ask, record

WORLD, ATOL = 2, 1e-4
CASES = made_models.ENCODER_DECODERS
# case -> what pretrain_t5.py has no flag for; the judge sets it
GIVEN: dict[str, dict[str, Any]] = {
    "mt5": {"activation_func": "gelu_tanh", "gated_linear_unit": True},
    "t5": {"activation_func": "gelu_tanh", "gated_linear_unit": True},
    "t5_gated_silu": {},
    "t5_relu": {"activation_func": "relu"},
}
READ = np.arange(2 * 30).reshape(2, 30) * 7 % 211
ANSWER = np.arange(2 * 23).reshape(2, 23) * 5 % 211


def megatron() -> list[int]:
    """Returns the version of the installed megatron-core, or that of the oldest one that has T5."""
    if importlib.util.find_spec("megatron") is None:
        return [0, 16]
    return [int(part) for part in version("megatron-core").split(".")[:2]]


def accepted(case: str) -> list[str]:
    """Returns the dims that stock Megatron does not compute exactly."""
    scale = ["score_scale"] if megatron() < [0, 19] else []
    return ["activation"] * bool(GIVEN[case]) + scale


@pytest.fixture(scope="module")
def made(work: Path) -> dict[str, np.ndarray]:
    """Every case, made and saved by transformers in work/hf, and its logits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    found = {}
    for case in CASES:
        config = made_models.config(case)
        kind = getattr(transformers, config["architectures"][0])
        torch.manual_seed(0)
        model = kind(kind.config_class.from_dict(config)).eval()
        # transformers 5 ties even a model whose file has both
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(work / "hf" / case)
        (work / "hf" / case / "config.json").write_text(json.dumps(config))
        found[case] = logits(model)
    return found


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        answer = torch.tensor(ANSWER)
        found = model(input_ids=torch.tensor(READ), decoder_input_ids=answer).logits
    return np.asarray(found)


def convert(case: str, work: Path, form: str) -> Path:
    out = work / form / case
    wanted = {"transformer_impl": "local", "megatron_version": ".".join(map(str, megatron()))}
    mckpt.plan(
        work / "hf" / case,
        out,
        format=form,
        parallel=Parallel(tp=WORLD),
        allow_inexact=[*accepted(case), "position_buckets"],  # the judge has its own attention
        **wanted,
    ).run()
    return out


@pytest.mark.judge
@pytest.mark.parametrize("case", CASES)
def test_megatron_core_computes_the_logits_of_transformers(
    case: str, work: Path, made: dict[str, np.ndarray]
) -> None:
    """The model of a rank has the keys, shapes and values of its `torch` file, too, and what
    Megatron-Core saves comes back bit for bit.
    """
    pytest.importorskip("megatron.core")
    given = GIVEN[case] | ({"softmax_scale": 1.0} if megatron() < [0, 19] else {})
    places = {"hf": work / "hf" / case, "saved": work / "saved" / case}
    places |= {
        "checkpoint": convert(case, work, "torch_dist"),
        "torch": convert(case, work, "torch"),
    }
    found = ask("t5", given=given, tokens=READ, answer=ANSWER, tp=WORLD, **places)["logits"]
    apart, largest = np.abs(found - made[case]).max(), np.abs(made[case]).max()
    assert apart < ATOL
    judge, sizes = "forward", str(Parallel(tp=WORLD))
    if accepted(case):  # weights and their order are right, and the stock program is another one
        judge, sizes = "accepted", f"`--allow-inexact {' '.join(accepted(case))}`"
    record(judge, case, "torch_dist", sizes, 0 if accepted(case) else apart, largest, "t5")
    config = made_models.config(case)
    settings = {"activation": "relu"} if config["feed_forward_proj"] == "relu" else {}
    settings |= {"activation": "gelu_tanh"} if config["feed_forward_proj"] == "gated-gelu" else {}
    known = SourceOptions(family=mapping.family_with(config["architectures"][0]), settings=settings)
    mckpt.plan(
        mckpt.Checkpoint.open(work / "saved" / case, known), work / "back" / case, format="hf"
    ).run()
    assert not mckpt.diff(work / "hf" / case, work / "back" / case)


@pytest.mark.judge
@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_back_bit_for_bit_and_with_its_config(
    case: str, work: Path, made: dict[str, np.ndarray]
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    out, back = work / "there" / case, work / "again" / case
    wanted = {"format": "torch", "parallel": Parallel(tp=4), "allow_inexact": ["activation"]}
    wanted["allow_inexact"] = wanted["allow_inexact"] * bool(GIVEN[case])
    mckpt.plan(work / "hf" / case, out, **wanted).run()
    (out / "hf" / "config.json").unlink()  # so that the args alone describe the model
    family = mapping.family_with(made_models.config(case)["architectures"][0])
    mckpt.plan(mckpt.open(out, family=family), back, format="hf").run(check_replicas=True)
    assert not mckpt.diff(work / "hf" / case, back)
    read = AutoModelForSeq2SeqLM.from_pretrained(back).eval()
    assert np.array_equal(logits(read), made[case])


@pytest.mark.judge
def test_pipelines_tied_output_layers_and_other_dialects_are_refused(
    work: Path, made: dict[str, np.ndarray], tmp_path: Path
) -> None:
    model, out = work / "hf" / "t5", tmp_path / "out"
    with pytest.raises(MappingError, match="T5Model has one pipeline stage: --pp 1"):
        mckpt.plan(model, out, format="torch", parallel=Parallel(pp=2))
    with pytest.raises(MappingError, match="--allow-inexact activation"):
        mckpt.plan(model, out, format="torch")
    with pytest.raises(MappingError, match="--allow-inexact position_buckets"):
        mckpt.plan(model, out, format="torch", transformer_impl="local")
    with pytest.raises(MappingError, match="encoder_layers is 3"):
        mckpt.plan(model, out, format="torch", dialect="gpt")
    tied = made_models.config("t5") | {"tie_word_embeddings": True}
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(json.dumps(tied))
    weights = work / "hf" / "t5" / "model.safetensors"
    (tmp_path / "tied" / "model.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(MappingError, match="T5Model has an output bias"):
        mckpt.plan(tmp_path / "tied", out, format="torch")
    assert not out.exists()


@pytest.mark.judge
def test_verify_compares_the_tensors_and_train_names_the_program(
    work: Path, made: dict[str, np.ndarray], tmp_path: Path
) -> None:
    model, out = work / "hf" / "t5_gated_silu", tmp_path / "out"
    mckpt.plan(model, out, format="torch").run()
    assert verify(model, out, level="bytes").verdict == "pass"
    with pytest.raises(UsageError, match=r"has an encoder, .* --level bytes"):
        verify(model, out)
    said = refused(2, args=("train", out, "--steps", 1))
    assert "has an encoder" in said
    assert "train it with Megatron's pretrain_t5.py" in said


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("UMT5ForConditionalGeneration", "one in each layer"),
        ("T5EncoderModel", "an encoder alone"),
        ("MT5EncoderModel", "an encoder alone"),
        ("UMT5EncoderModel", "one in each layer"),
    ],
)
def test_models_are_refused_with_what_megatron_lacks(architecture: str, words: str) -> None:
    with pytest.raises(MappingError, match=f"can hold {architecture}: .*{words}"):
        mapping.family_with(architecture)


def test_umt5_has_a_table_of_positions_in_each_layer_and_t5_one_in_each_stack() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 48, "d_kv": 10, "d_ff": 56, "num_layers": 3, "num_heads": 8}
    counts = {}
    for name in ("T5", "MT5", "UMT5"):
        config = getattr(transformers, f"{name}Config")(vocab_size=211, **sizes)
        with torch.device("meta"):
            model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        counts[name] = sum("relative_attention_bias" in key for key in model.state_dict())
    assert counts == {"T5": 2, "MT5": 2, "UMT5": 6}
