"""Makes checkpoints as Megatron-LM saved them before megatron-core, with random values, and records
what the converters of transformers 4 make of them:

    python -m tests.helpers.old_checkpoints TRANSFORMERS

TRANSFORMERS: the folder `transformers` of a release from 4.20 to 4.36. Later releases do not have
these converters. The names, shapes and dtypes are those of NVIDIA's releases of GPT-2 and BERT.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import types
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mckpt
from mckpt.options import SourceOptions
from tests.helpers.lazy import torch

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "old"
DIGESTS, RESHAPED = FOLDER / "digests.json", FOLDER / "reshaped"
RANK_0 = Path("release/mp_rank_00/model_optim_rng.pt")
HIDDEN, HEADS, LAYERS, POSITIONS, VOCAB, PADDED = 24, 4, 2, 16, 50, 64
VERSIONS = (None, 0, 1.0, 2.0, 3.0)
CASES = [(kind, version) for kind in ("gpt2", "bert") for version in VERSIONS]


def load_file(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


class Made:
    """Tensors of random values, the same on every machine."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def __call__(self, *shape: int, around: float = 0.0) -> torch.Tensor:
        values = around + 0.2 * self.random.standard_normal(shape).astype("f4")
        return torch.from_numpy(values.astype("f4")).half()


def model_of(
    kind: str,
    stack: str = "transformer",
    attention: str = "attention",
    norm: str = "layernorm",
    sizes: tuple[int, int, int, int] = (HIDDEN, LAYERS, POSITIONS, PADDED),
) -> dict[str, Any]:
    """Returns the state dict of a model of one rank, as dicts of dicts."""
    hidden, layers, positions, rows = sizes
    make = Made(len(kind))
    embedding = {
        "word_embeddings": {"weight": make(rows, hidden)},
        "position_embeddings": {"weight": make(positions, hidden)},
    }
    held: dict[str, torch.Tensor] = {}
    for i in range(layers):
        shapes = {
            f"{attention}.query_key_value": (3 * hidden, hidden),
            f"{attention}.dense": (hidden, hidden),
            f"post_attention_{norm}": (),
            "mlp.dense_h_to_4h": (4 * hidden, hidden),
            "mlp.dense_4h_to_h": (hidden, 4 * hidden),
        }
        for name, shape in {f"input_{norm}": (), **shapes}.items():
            weight = make(*shape) if shape else make(hidden, around=1)
            held[f"layers.{i}.{name}.weight"] = weight
            held[f"layers.{i}.{name}.bias"] = make(weight.shape[0])
    held[f"final_{norm}.weight"], held[f"final_{norm}.bias"] = make(hidden, around=1), make(hidden)
    language: dict[str, Any] = {"embedding": embedding, stack: held}
    model: dict[str, Any] = {"language_model": language}
    if kind == "bert":
        embedding["tokentype_embeddings"] = {"weight": make(2, hidden)}
        language["pooler"] = {"dense.weight": make(hidden, hidden), "dense.bias": make(hidden)}
        model["lm_head"] = {
            "bias": make(rows),
            "dense.weight": make(hidden, hidden),
            "dense.bias": make(hidden),
            f"{norm}.weight": make(hidden, around=1),
            f"{norm}.bias": make(hidden),
        }
        model["binary_head"] = {"weight": make(2, hidden), "bias": make(2)}
    return model


def args_of(kind: str, **changed: Any) -> argparse.Namespace:
    """Returns args of 2019 and 2020, which have no ffn_hidden_size and no vocab_size."""
    held = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": PADDED,
        "layernorm_epsilon": 1e-5,
        "openai_gelu": kind == "gpt2",
        "apply_query_key_layer_scaling": True,
        "model_parallel_size": 1,
        "fp16": True,
        "tokenizer_type": "GPT2BPETokenizer" if kind == "gpt2" else "BertWordPieceLowerCase",
    }
    held.update(changed)
    return argparse.Namespace(**{k: v for k, v in held.items() if v is not None})


def state_of(
    kind: str, version: float | None, args: argparse.Namespace | None, **model: Any
) -> dict[str, Any]:
    """Returns the content of a file of one rank."""
    state = {
        **({} if args is None else {"args": args}),
        "iteration": 100,
        "model": model_of(kind, **model),
        "random_rng_state": random.Random(0).getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    return state if version is None else {**state, "checkpoint_version": version}


def save(state: dict[str, Any], folder: Path, path: Path = RANK_0, old: bool = True) -> Path:
    """Saves the file of a rank. old: as torch before 1.6 wrote it."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / path, _use_new_zipfile_serialization=not old)
    return folder


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Returns name -> the beginning of the sha256 of shape and bytes."""
    out = {}
    for name, tensor in sorted(tensors.items()):
        data = tensor.contiguous().numpy().tobytes()
        said = f"{list(tensor.shape)} {tensor.dtype}".encode()
        out[name] = hashlib.sha256(said + data).hexdigest()[:16]
    return out


# --------------------------------------------------------- the converters of transformers 4


def converter(transformers: Path, name: str) -> Any:
    """Imports a converter by its path. What transformers 5 lacks, and what needs the network or
    Megatron-LM, is replaced; none of it touches a tensor.
    """
    import transformers.modeling_utils as utils

    utils.shard_checkpoint = lambda state, **_: ({"pytorch_model.bin": state}, None)
    utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME = "pytorch_model.bin", "index.json"
    padding = types.ModuleType("megatron.tokenizer.tokenizer")
    padding._vocab_size_with_padding = _padded  # type: ignore[attr-defined]
    sys.modules["megatron.tokenizer.tokenizer"] = padding
    sys.modules.setdefault("megatron.tokenizer", types.ModuleType("megatron.tokenizer"))
    spec = importlib.util.spec_from_file_location(Path(name).stem, transformers / "models" / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.AutoTokenizer = _NoTokenizer  # type: ignore[attr-defined]
    return module


class _NoTokenizer:
    @classmethod
    def from_pretrained(cls, *_: Any) -> _NoTokenizer:
        return cls()


def _padded(rows: int, args: Any) -> int:
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-rows // multiple) * multiple)


def converted(transformers: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields the name of each case, and the tensors that the converters make of it."""
    from transformers import GPT2Config, MegatronBertConfig

    files = {
        "gpt2": "megatron_gpt2/convert_megatron_gpt2_checkpoint.py",
        "bert": "megatron_bert/convert_megatron_bert_checkpoint.py",
    }
    for kind, version in CASES:
        ffn = {"ffn_hidden_size": 4 * HIDDEN}  # the converters need what args of 2019 lack
        state = state_of(kind, version, args_of(kind, **ffn))
        config = GPT2Config() if kind == "gpt2" else MegatronBertConfig()
        module = converter(transformers, files[kind])
        yield f"{kind} {version}", module.convert_megatron_checkpoint(None, state, config)


def hugging_face(work: Path) -> Path:
    """Writes the model of the case `gpt2 3.0` as a Hugging Face directory."""
    known = SourceOptions(vocab_size=VOCAB)
    save(state_of("gpt2", 3.0, args_of("gpt2")), work / "megatron")
    mckpt.convert(mckpt.Checkpoint.open(work / "megatron", known), work / "hf", format="hf")
    return work / "hf"


def interoperability(transformers: Path, work: Path) -> None:
    """Lets the script for many ranks write a checkpoint, which becomes a fixture, and lets it read
    the one that mckpt writes.
    """
    script = "megatron_gpt2/checkpoint_reshaping_and_interoperability.py"
    module, source = converter(transformers, script), hugging_face(work)
    weights = load_file(source / "model.safetensors")
    (work / "bin").mkdir()
    torch.save(weights, work / "bin" / "pytorch_model.bin")
    shutil.copy(source / "config.json", work / "bin")
    shutil.rmtree(RESHAPED, ignore_errors=True)
    sizes = {f"target_{name}_parallel_size": 2 for name in ("tensor_model", "pipeline_model")}
    common = {"megatron_path": None, "print_checkpoint_structure": False}
    module.convert_checkpoint_from_transformers_to_megatron(
        argparse.Namespace(
            load_path=str(work / "bin"),
            save_path=str(RESHAPED),
            **sizes,
            **common,
            target_data_parallel_size=1,
            target_params_dtype="fp16",
            make_vocab_size_divisible_by=16,
            use_distributed_optimizer=False,
        )
    )
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        ours, back = work / f"ours-{tp}-{pp}", work / f"back-{tp}-{pp}"
        parallel = mckpt.Parallel(tp=tp, pp=pp)
        mckpt.convert(source, ours, format="torch", dialect="legacy", parallel=parallel)
        back.mkdir()
        module.convert_checkpoint_from_megatron_to_transformers(
            argparse.Namespace(
                load_path=str(ours / "release"),
                save_path=str(back),
                tokenizer_name=None,
                max_shard_size="10GB",
                **common,
            )
        )
        found = torch.load(back / "pytorch_model.bin")
        same = all(torch.equal(found[name], tensor.float()) for name, tensor in weights.items())
        print(f"tp {tp} pp {pp}: {len(weights)} tensors", "equal" if same else "DIFFER")
        config = json.loads((back / "config.json").read_text())
        wanted = json.loads((source / "config.json").read_text())
        apart = {k: (v, config.get(k)) for k, v in wanted.items() if config.get(k) != v}
        print(f"    config.json differs in {apart}")


def main() -> None:
    transformers = Path(sys.argv[1])
    found = {case: digests(tensors) for case, tensors in converted(transformers)}
    DIGESTS.parent.mkdir(exist_ok=True)
    DIGESTS.write_text(json.dumps(found, indent=0) + "\n")
    with tempfile.TemporaryDirectory() as work, unittest.mock.patch("torch.load", _load):
        interoperability(transformers, Path(work))


def _load(path: Any, map_location: Any = None) -> Any:
    """torch.load as it was when the converters were written: it reads any pickle."""
    with open(path, "rb") as file:
        return torch.serialization.load(file, weights_only=False)


if __name__ == "__main__":
    main()
