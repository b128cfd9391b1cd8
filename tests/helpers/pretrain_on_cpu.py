"""A program of Megatron-LM, as far as it runs without a GPU: it parses the args, and sets up the
model and the optimizer. Each rank writes the weights and the master copies to FOLDER/RANK.pt, where
FOLDER is the argument of --save.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, initialize, training
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from mckpt.trainer import cpu


def model_provider(pre_process: bool = True, post_process: bool = True, **more: Any) -> GPTModel:
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


cpu.install()
dist.init_process_group("gloo")
torch.cuda.device_count = lambda: 1  # without one, Megatron-LM makes no groups
initialize._compile_dependencies = lambda: None  # of the dataset, which is not read
torch.cuda.get_device_properties = lambda *args: SimpleNamespace(major=9, minor=0)
with cpu.as_cuda():
    args = parse_and_validate_args()
    initialize.initialize_megatron(allow_no_cuda=True)
    chunks, optimizer, _ = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, model_provider
    )
    held = {name: p.detach() for chunk in chunks for name, p in chunk.module.named_parameters()}
    masters = [m.detach() for group in optimizer.param_groups for m in group["params"]]
    torch.save([held, masters], Path(args.save) / f"{dist.get_rank()}.pt")
