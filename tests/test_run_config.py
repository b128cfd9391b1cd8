"""The dims in a run_config.yaml of Megatron-Bridge, which has no args."""

from __future__ import annotations

from pathlib import Path

import pytest

from mckpt.formats.megatron.run_config import run_config_dims

PLAIN = """
model:
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 8
  num_query_groups: 4
  kv_channels: 16
  vocab_size: 200
  seq_length: 512
  share_embeddings_and_output_weights: false
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _partial_: true}
  add_bias_linear: false
  normalization: RMSNorm
  rotary_base: 10000
  rope_scaling: false
  rope_scaling_factor: 8.0
"""
LATENT = """
  multi_latent_attention: true
  q_lora_rank: 24
  kv_lora_rank: 32
  qk_head_dim: 16
  qk_pos_emb_head_dim: 8
  v_head_dim: 16
  rope_type: yarn
  rotary_scaling_factor: 40
  original_max_position_embeddings: 4096
  beta_fast: 32
  beta_slow: 1
  mscale: 1.0
  mscale_all_dim: 1.0
"""
YARN = """
  position_embedding_type: yarn
  yarn_rotary_scaling_factor: 32.0
  yarn_original_max_position_embeddings: 4096
  yarn_beta_fast: 32.0
  yarn_beta_slow: 1.0
"""


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("  position_embedding_type: rope\n", ("default", 1.0)),
        (LATENT, ("yarn", 40.0)),
        (LATENT.replace("rope_type: yarn", "rope_type: rope"), ("mscale", 40.0)),
        (YARN, ("yarn", 32.0)),
    ],
)
def test_the_rotary_scaling_is_read(more: str, wanted: tuple[str, float], tmp_path: Path) -> None:
    """Megatron-Bridge states it apart from `rope_scaling`, which is that of Llama 3 alone."""
    path = tmp_path / "run_config.yaml"
    path.write_text(PLAIN + more.strip("\n") + "\n")
    dims = run_config_dims(path, {}, {})
    assert (dims["rope_type"], dims["rope_factor"]) == wanted


def test_the_rotary_scaling_of_llama_3_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run_config.yaml"
    path.write_text(PLAIN.replace("rope_scaling: false", "rope_scaling: true"))
    dims = run_config_dims(path, {}, {})
    assert (dims["rope_type"], dims["rope_factor"]) == ("llama3", 8.0)
