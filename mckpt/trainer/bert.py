"""BertModel of megatron-core with the layers that pretrain_bert.py of Megatron-LM chooses."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

DIALECT = "bert"
TOKEN_TYPES = 2  # kinds of tokens that pretrain_bert.py gives a model with the head for sentences


def chosen(args: Namespace) -> bool:
    """Returns whether these args describe a BertModel. Megatron's own args have no entry for that,
    so the reader of the args adds the checkpoint's dialect to them.
    """
    return getattr(args, "dialect", None) == DIALECT


def build(args: Namespace, uses_te: bool, **options: Any) -> Any:
    """Builds one chunk; `options` are those that BertModel has in common with GPTModel."""
    from megatron.core.models.bert import bert_layer_specs as specs
    from megatron.core.models.bert.bert_model import BertModel

    local = specs.bert_layer_local_spec
    spec = specs.get_bert_layer_with_transformer_engine_spec() if uses_te else local
    del options["rotary_base"]  # BertModel has 10000 alone
    return BertModel(
        transformer_layer_spec=spec,
        num_tokentypes=TOKEN_TYPES if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        **options,
    )


def run(chunk: Any, args: Namespace, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the output of the chunk: hidden states, or after the last layer the logits of all
    positions. Tokens after `length` are padding, and all others are of the first kind.
    """
    seen, kinds = torch.zeros_like(tokens), torch.zeros_like(tokens)
    seen[:, :length] = 1
    out = chunk(tokens, seen, kinds if args.bert_binary_head else None)
    # the second output scores pairs of sentences
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return hidden
