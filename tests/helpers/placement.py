"""Records on which ranks Megatron-Core itself places layers, in tests/helpers/placement.json.

The file's rows are [num_layers, pp, other arguments, answer]. They come from a grid of 2,285
argument sets that was run through Megatron-LM core_v0.16.1: validate_args, TransformerConfig,
get_num_layers_to_build and get_transformer_layer_offset. An answer is [pipeline rank][virtual
stage] -> [first layer, number of layers], null where Megatron refuses, or "lost" where it accepts
and then loses or doubles layers. Of that grid the file has all layouts, eight rows of each other
kind of arguments and answer, and four that find each of 137 changes of one operator or number of
mckpt/geometry/parallel.py.

`python -m tests.helpers.placement` asks the installed megatron-core for the rows on stdin, without
validate_args, which is no part of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "placement.json"
Row = tuple[int, int, dict[str, Any], Any]  # num_layers, pp, fields of Parallel, answer


def rows() -> list[Row]:
    """Returns the committed rows."""
    return [(n, pp, said, answer) for n, pp, said, answer in json.loads(DATA.read_text())]


def ask(num_layers: int, pp: int, said: dict[str, Any]) -> Any:
    """Returns Megatron-Core's answer, as in the file except for "lost"."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    said = dict(said)
    vpp = said.pop("vpp", 1)
    names = {
        "first_stage_layers": "num_layers_in_first_pipeline_stage",
        "last_stage_layers": "num_layers_in_last_pipeline_stage",
        "account_for_embedding": "account_for_embedding_in_pipeline_split",
        "account_for_loss": "account_for_loss_in_pipeline_split",
        "layout": "pipeline_model_parallel_layout",
    }
    try:
        if "layout" in said:
            vpp = len(PipelineParallelLayerLayout.parse_str_to_list(said["layout"])) // pp
        virtual = vpp if vpp > 1 else None
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=64,
            num_attention_heads=8,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=virtual,
            **{names[k]: v for k, v in said.items()},
        )
        out: list[list[list[int]]] = []
        for p in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(p)
            parallel_state.set_pipeline_model_parallel_world_size(pp)
            parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
            out.append([])
            for v in range(vpp):
                stage = v if virtual else None
                count, first = (
                    get_num_layers_to_build(config, stage, p),
                    get_transformer_layer_offset(config, stage, p),
                )
                out[-1].append([first if count else 0, count])
        return out
    except (AssertionError, ValueError, ZeroDivisionError):
        return None


if __name__ == "__main__":
    import contextlib
    import io
    import logging

    logging.disable(logging.CRITICAL)
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        answers = [ask(*row) for row in asked]
    print(json.dumps(answers))
