"""The logits of every position, through tensor, pipeline, virtual pipeline and expert parallelism.

megatron-core's pipeline schedules allocate on "cuda" and keep only the loss; here activations are handed on by dist.send, chunk by
chunk, in the order in which the layers run: virtual stage 0 on every pipeline rank, then virtual stage 1, and so on.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist


@torch.no_grad()
def logits(chunks: list[Any], args: Namespace, tokens: torch.Tensor) -> torch.Tensor | None:
    """fp32 logits [batch, seq, vocab] of `tokens` [batch, seq] on pipeline rank 0, None on the others; vocabulary padding is cut off.

    Every rank passes the same tokens. `vocab` is args.vocab_size, or the padded size where args does not tell.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    config = chunks[0].config
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tokens = tokens.to(device)
    batch, seq = tokens.shape
    rows = args.tensor_model_parallel_size if config.sequence_parallel else 1  # the sequence is cut into this many parts
    tokens = torch.nn.functional.pad(tokens, (0, -seq % rows))  # on the right: a causal model does not look there
    length = tokens.shape[1]
    positions = torch.arange(length, device=device).expand(batch, -1)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]  # True: may not look

    first, last = ps.is_pipeline_first_stage(ignore_virtual=True), ps.is_pipeline_last_stage(ignore_virtual=True)
    hidden: Any = None
    for stage, chunk in enumerate(chunks):
        if not (first and stage == 0):
            hidden = torch.empty(length // rows, batch, config.hidden_size, dtype=config.params_dtype, device=device)
            dist.recv(hidden, ps.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(hidden)
        hidden = chunk(tokens, positions, mask)
        if not (last and stage == len(chunks) - 1):
            dist.send(hidden.contiguous(), ps.get_pipeline_model_parallel_next_rank())

    vocab = getattr(args, "vocab_size", None) or args.padded_vocab_size
    out = torch.empty(batch, seq, vocab, dtype=torch.float32, device=device)
    if last:
        out.copy_(gather_from_tensor_model_parallel_region(hidden.float())[:, :seq, :vocab])
        if not first:
            dist.send(out, ps.get_pipeline_model_parallel_first_rank())
    elif first:
        dist.recv(out, ps.get_pipeline_model_parallel_last_rank())
    return out if first else None
