"""BertModel of megatron-core for the judges, with the layers that pretrain_bert.py of Megatron-LM
chooses. `mckpt train` and `mckpt verify` run decoders only.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from mckpt.trainer import gpt

DIALECT = "bert"
TOKEN_TYPES = 2  # kinds of tokens that pretrain_bert.py gives a model with the head for sentences


def install() -> None:
    """Lets the trainer build a BertModel for args with the dialect. Megatron's own args have no
    entry for that, so a case adds it to them.
    """
    module: Any = gpt
    build_gpt = gpt.build

    def build(args: Namespace, uses_te: bool, **options: Any) -> Any:
        make = _build if getattr(args, "dialect", None) == DIALECT else build_gpt
        return make(args, uses_te, **options)

    module.build = build


def _build(args: Namespace, uses_te: bool, **options: Any) -> Any:
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


def take_inputs_of_a_decoder(chunks: list[Any], args: Namespace) -> None:
    """Lets the chunks of a BertModel be called as those of a GPTModel. All tokens are seen, and are
    of the first kind.
    """
    if getattr(args, "dialect", None) != DIALECT:
        return
    for chunk in chunks:
        encode: Any = chunk.forward

        def forward(
            tokens: torch.Tensor, positions: torch.Tensor, mask: Any, encode: Any = encode
        ) -> Any:
            kinds = torch.zeros_like(tokens) if args.bert_binary_head else None
            out = encode(tokens, torch.ones_like(tokens), kinds)
            # the second output scores pairs of sentences
            return out[0] if isinstance(out, tuple) else out

        chunk.forward, chunk.mtp_process = forward, False
