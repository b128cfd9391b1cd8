"""All classes of transformers around the decoders of families: models without an output layer, and
models with a head. Each comes back from Megatron with its own names and bytes, or is refused.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt import mapping
from mckpt.errors import MappingError, MckptError
from tests.helpers import made_models, tiny

# words of the error -> the classes that are refused with it
REFUSED = {
    "that of Megatron's model has further tensors": """
        MegatronBertForMultipleChoice MegatronBertForNextSentencePrediction
        MegatronBertForQuestionAnswering MegatronBertForSequenceClassification
        MegatronBertForTokenClassification MegatronBertModel""",
    "T5Model has an output bias": """
        MT5ForQuestionAnswering MT5ForSequenceClassification MT5Model
        T5ForQuestionAnswering T5ForSequenceClassification T5Model""",
    "BertModel sees the tokens before and after": "MegatronBertForCausalLM",
    "this model is an encoder alone": "MT5EncoderModel T5EncoderModel",
    "supports only True": "MT5ForTokenClassification T5ForTokenClassification",
    # a part of the published model, under names that no published model has
    "it is a part of MiniMaxM3SparseForConditionalGeneration": """
        MiniMaxM3VLForCausalLM MiniMaxM3VLModel MiniMaxM3VLTextModel""",
    # transformers writes names that it does not read
    "language_model.blocks.": "Kimi_K25Model",
}
WORKING = 170  # at least


def configs() -> dict[type, dict[str, Any]]:
    """Returns a tiny config.json for each class of configs that a family reads."""
    import transformers

    found: dict[type, dict[str, Any]] = {}
    cases = (*made_models.CASES, *made_models.ENCODER_DECODERS, *made_models.BRIDGE_MODELS)
    every = [tiny.config(case) for case in tiny.CASES]
    every += [made_models.config(case) for case in (*cases, *made_models.BRIDGE_IMAGES)]
    for config in every:
        kind = getattr(transformers, config["architectures"][0], None)
        if kind is not None:
            found.setdefault(kind.config_class, config)
    return found


def classes(known: dict[type, dict[str, Any]]) -> Iterator[tuple[type, Any]]:
    """Yields each public class of transformers that builds a model of one of these configs, or of
    the text model in it, and that no family lists; with its config.
    """
    import transformers

    listed = {a for name in mapping.names("hf") for a in mapping.load("hf", name).architectures}
    made = {kind: kind.from_dict(copy.deepcopy(config)) for kind, config in known.items()}
    texts = {type(text): text for c in made.values() if (text := c.get_text_config()) is not c}
    modules = {kind.__module__.rpartition(".")[0] for kind in made}
    for module in sorted(modules):
        for path in sorted(Path(importlib.import_module(module).__path__[0]).glob("modeling_*.py")):
            source = importlib.import_module(f"{module}.{path.stem}")
            for name, kind in sorted(vars(source).items()):
                if (
                    isinstance(kind, type)
                    and issubclass(kind, transformers.PreTrainedModel)
                    and kind.__module__ == source.__name__
                    and hasattr(transformers, name)
                    and name not in listed
                    and "PreTrainedModel" not in name
                ):
                    config = made.get(kind.config_class) or texts.get(kind.config_class)
                    yield kind, config


def without_mtp(config: Any) -> Any:
    """Returns a copy of a config without what transformers does not save: layers of multi-token
    prediction, and keys and values of layers that take those of others.
    """
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
            setattr(part, key, 0)
        if getattr(part, "num_kv_shared_layers", 0):
            part.num_kv_shared_layers = 0
    return config


def saved(path: Path, kind: Any, config: Any) -> Path:
    """Writes a model in bfloat16 with random weights that an offset of a norm does not round."""
    import torch

    torch.manual_seed(0)
    model = kind(without_mtp(config)).to(torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data = (torch.rand(tensor.shape) + 0.5).bfloat16()
        if name.endswith("e_score_correction_bias"):  # published files have it in this dtype
            tensor.data = tensor.data.float()
    model.save_pretrained(path)
    return path


def without_dtype(value: Any) -> Any:
    """Returns the content of a config.json without the dtypes that it states."""
    if isinstance(value, dict):
        return {k: without_dtype(v) for k, v in value.items() if k not in ("dtype", "torch_dtype")}
    return value


def back(source: Path, work: Path) -> None:
    """Converts a model to Megatron and back; raises AssertionError unless it is the same."""
    try:
        mckpt.plan(source, work / "megatron").run()
    except MckptError as error:
        accepted = re.findall(r"--allow-inexact (\w+)", str(error))
        if not accepted:
            raise
        mckpt.plan(source, work / "megatron", allow_inexact=accepted).run()
    mckpt.plan(work / "megatron", work / "back", format="hf").run(check_replicas=True)
    left, right = (load_file(p / "model.safetensors") for p in (source, work / "back"))
    if any(name.endswith("experts.down_proj") for name in left):
        # transformers writes the experts of some classes as they are in memory
        assert not mckpt.diff(source, work / "back")
    else:
        assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())[:4]
        assert all(left[name].tobytes() == right[name].tobytes() for name in left)
    texts = [json.loads((p / "config.json").read_text()) for p in (source, work / "back")]
    assert without_dtype(texts[0]) == without_dtype(texts[1])


def test_each_class_around_a_decoder_comes_back_or_is_refused(tmp_path: Path) -> None:
    works, parts, refused = list[str](), list[str](), dict[str, str]()
    for number, (kind, config) in enumerate(classes(configs())):
        name, work = kind.__name__, tmp_path / str(number)
        try:
            if config is None:  # a tower, a talker or another part that a family carries
                with pytest.raises(MappingError, match=f"(no family|can hold).* {name}"):
                    mapping.family_with(name)
                parts.append(name)
                continue
            back(saved(work / "hf", kind, config), work)
            works.append(name)
        except MckptError as error:
            refused[name] = str(error)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    print(f"{len(works)} classes work, {len(refused)} are refused, {len(parts)} are parts")
    expected = {name: words for words, names in REFUSED.items() for name in names.split()}
    assert refused.keys() == expected.keys()
    assert [name for name, words in expected.items() if words not in refused[name]] == []
    assert len(works) >= WORKING
