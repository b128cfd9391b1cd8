"""Runs the models of Megatron-LM from before megatron-core, on CPU, and keeps what they save:

    python -m tests.helpers.legacy_megatron MEGATRON_LM

MEGATRON_LM: a checkout of Megatron-LM that has megatron/legacy/model, such as core_v0.12.3. For
each case it writes a checkpoint and the logits of the model to fixtures/old. It also lets
Megatron's model load what mckpt writes for the same model, and compares the logits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import mckpt
from tests.helpers.lazy import torch
from tests.helpers.old_checkpoints import FOLDER

HIDDEN, HEADS, LAYERS, POSITIONS, VOCAB, PADDED = 24, 4, 1, 16, 50, 64
LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "ffn_hidden_size": 40,
}
QWEN = {**LLAMA, "group_query_attention": False, "num_query_groups": HEADS, "add_qkv_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"openai_gelu": True},
    "exact-gelu": {},
    "llama": LLAMA,
    "qwen": QWEN,
    "bert": {},
}
KEPT = ("llama", "bert")  # as fixtures


class Args(Namespace):
    """Megatron's args; one that is not set is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def args_of(case: str) -> Args:
    held = {
        **{"num_layers": LAYERS, "encoder_num_layers": LAYERS, "hidden_size": HIDDEN},
        **{"num_attention_heads": HEADS, "num_query_groups": HEADS, "kv_channels": HIDDEN // HEADS},
        **{"max_position_embeddings": POSITIONS, "seq_length": POSITIONS},
        **{"vocab_size": VOCAB, "padded_vocab_size": PADDED, "ffn_hidden_size": 4 * HIDDEN},
        **{"position_embedding_type": "learned_absolute", "rotary_percent": 1.0},
        **{"normalization": "LayerNorm", "norm_epsilon": 1e-5, "add_bias_linear": True},
        **{"params_dtype": torch.float32, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        **{"perform_initialization": True, "transformer_impl": "local", "drop_path_rate": 0.0},
        **dict.fromkeys(("swiglu", "squared_relu", "openai_gelu", "onnx_safe"), False),
        **dict.fromkeys(("bias_gelu_fusion", "add_qkv_bias", "group_query_attention"), False),
        **{"untie_embeddings_and_output_weights": False, "apply_layernorm_1p": False},
        **{"bert_binary_head": True, "use_legacy_models": True},
    }
    return Args(**{**held, **CASES[case]})


class Legacy:
    """Megatron's legacy models. Their GPU kernels and the arguments of a run are replaced by plain
    modules of torch and by our args.
    """

    def __init__(self, megatron_lm: str) -> None:
        sys.path.insert(0, megatron_lm)
        self.args = Args()
        training = types.ModuleType("megatron.training")
        training.get_args = lambda: self.args  # type: ignore[attr-defined]
        training.get_timers = lambda: None  # type: ignore[attr-defined]
        training.get_tokenizer = lambda: None  # type: ignore[attr-defined]
        sys.modules["megatron.training"] = training
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        tracker = types.SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
        random._CUDA_RNG_STATE_TRACKER = tracker
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        from megatron.core.enums import ModelType
        from megatron.legacy import model
        from megatron.legacy.model import transformer

        self.model_type, self.models = ModelType.encoder_or_decoder, model
        transformer.get_num_microbatches = lambda: 1
        for module in list(sys.modules.values()):
            if module.__name__.startswith("megatron.legacy") and hasattr(module, "LayerNorm"):
                module.LayerNorm = _layer_norm
        # With query groups, the models view a tensor that only a copy can have the shape of.
        torch.Tensor.view = torch.Tensor.reshape  # type: ignore[method-assign]

    def build(self, case: str) -> Any:
        from megatron.core.transformer import TransformerConfig

        self.args = args = args_of(case)
        args.model_type = self.model_type
        names = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")
        names += ("ffn_hidden_size", "num_query_groups", "add_bias_linear", "normalization")
        config = TransformerConfig(
            **{name: getattr(args, name) for name in names},
            gated_linear_unit=args.swiglu,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            masked_softmax_fusion=False,
            attention_softmax_in_fp32=True,
            layernorm_epsilon=args.norm_epsilon,
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
        )
        config.bias_dropout_fusion = False
        if case == "bert":
            model = self.models.BertModel(config, num_tokentypes=2, parallel_output=False)
        else:
            model = self.models.GPTModel(config, parallel_output=False)
        return model.eval()


def _layer_norm(hidden: int, eps: float, **_: Any) -> torch.nn.LayerNorm:
    return torch.nn.LayerNorm(hidden, eps=eps)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and their kinds [2, positions]."""
    made = torch.Generator().manual_seed(1)
    kinds = torch.zeros(2, POSITIONS, dtype=torch.long)
    kinds[:, POSITIONS // 2 :] = 1
    return torch.randint(0, VOCAB, (2, POSITIONS), generator=made), kinds


def logits_of(model: Any, case: str) -> torch.Tensor:
    tokens, kinds = inputs()
    with torch.no_grad():
        if case == "bert":
            found: torch.Tensor = model(tokens, torch.ones_like(tokens), tokentype_ids=kinds)[0]
            return found
        places = torch.arange(POSITIONS)[None].expand(2, -1)
        seen = torch.tril(torch.ones(1, 1, POSITIONS, POSITIONS)) < 0.5
        out: torch.Tensor = model(tokens, places, seen)
        return out


def run(legacy: Legacy, case: str, folder: Path, work: Path) -> None:
    model = legacy.build(case)
    made = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data = around + 0.2 * torch.randn(parameter.shape, generator=made)
    wanted = logits_of(model, case)
    args = Namespace(**{k: v for k, v in vars(legacy.args).items() if k != "model_type"})
    state = {
        **{"args": args, "checkpoint_version": 3.0, "iteration": 7},
        "model": model.state_dict_for_save_checkpoint(),
    }
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    torch.save(state, folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    torch.save(wanted[..., :VOCAB].clone(), folder / "logits.pt")

    dialect = mckpt.open(folder).mapping.name
    mckpt.convert(folder, work / "hf", format="hf")
    given = {"format": "torch", "dialect": dialect, "divisible_by": PADDED}
    mckpt.convert(work / "hf", work / "back", **given)
    (file,) = (work / "back").glob("*/*/*.pt")
    again = legacy.build(case)
    again.load_state_dict(torch.load(file, weights_only=False)["model"])
    found = logits_of(again, case)
    print(case, "equal" if torch.equal(found[..., :VOCAB], wanted[..., :VOCAB]) else "DIFFERS")


def main() -> None:
    legacy = Legacy(sys.argv[1])
    for case in CASES:
        with tempfile.TemporaryDirectory() as work:
            folder = FOLDER / case if case in KEPT else Path(work) / case
            run(legacy, case, folder, Path(work))
    os._exit(0)  # gloo's threads


if __name__ == "__main__":
    main()
