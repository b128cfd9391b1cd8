"""Checks the reasons for which T5, MT5 and UMT5 are refused against both libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mckpt import mapping
from mckpt.errors import MappingError

TABLES = """
import sys, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as Block
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
parallel_state.initialize_model_parallel()
t5_spec.LNImpl = Norm
config = TransformerConfig(
    num_layers=3, hidden_size=48, num_attention_heads=8, kv_channels=10, ffn_hidden_size=56,
    add_bias_linear=False, normalization="RMSNorm", use_cpu_initialization=True,
)
stacks = [
    Block([spec()] * 3, layer_norm=Norm)
    for spec in (t5_spec.encoder_model_with_local_spec, t5_spec.decoder_model_with_local_spec)
]
for decoder, tied in ((True, True), (True, False), (False, False)):
    model = T5Model(
        config, config, *stacks, 208, 64, position_embedding_type="relative",
        share_embeddings_and_output_weights=tied, add_decoder=decoder,
    )
    names = [key for key in model.sharded_state_dict() if "extra_state" not in key]
    print(*sorted(k for k in names if "relative" in k or k.startswith("lm_head")))
"""

ENCODER = "encoder_relative_pos_emb.relative_attention_bias.weight"
DECODER = "decoder_relative_pos_emb.relative_attention_bias.weight"


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("T5ForConditionalGeneration", "neither relu nor a gated gelu"),
        ("MT5ForConditionalGeneration", "neither relu nor a gated gelu"),
        ("UMT5ForConditionalGeneration", "one in each layer"),
        ("T5EncoderModel", "an encoder alone"),
        ("MT5EncoderModel", "an encoder alone"),
        ("UMT5EncoderModel", "one in each layer"),
    ],
)
def test_t5_models_are_refused_with_what_megatron_lacks(architecture: str, words: str) -> None:
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


@pytest.mark.judge
def test_megatron_has_one_table_a_stack_and_always_an_output_layer(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TABLES, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert [line.split() for line in run.stdout.splitlines()][-3:] == [
        [DECODER, ENCODER, "lm_head.output_layer.bias"],
        [DECODER, ENCODER, "lm_head.output_layer.weight"],
        [DECODER, ENCODER, "lm_head.output_layer.weight"],
    ]
