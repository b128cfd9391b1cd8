"""Archives of NeMo 1 for tests: the description of a model, and the tar file.

(NeMo, core/connectors/save_restore_connector.py: _make_nemo_file_from_folder)
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import yaml

import mckpt
from tests.helpers.tiny import unpack

# Entries of examples/nlp/language_modeling/conf/megatron_gpt_config.yaml that do not describe the
# model, with the values that published archives have.
TRAINING = {
    "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
    "nemo_version": "1.23.0",
    "micro_batch_size": 4,
    "global_batch_size": 128,
    "rampup_batch_size": None,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "init_method_std": 0.02,
    "use_scaled_init_method": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "ffn_dropout": 0.0,
    "apply_query_key_layer_scaling": True,
    "do_layer_norm_weight_decay": False,
    "make_vocab_size_divisible_by": 128,
    "pre_process": True,
    "post_process": True,
    "persist_layer_norm": True,
    "headscale": False,
    "transformer_block_type": "pre_ln",
    "openai_gelu": False,
    "normalize_attention_scores": True,
    "attention_type": "multihead",
    "overlap_p2p_comm": False,
    "batch_p2p_comm": True,
    "tokenizer": {"library": "sentencepiece", "type": None, "model": "nemo:a_tokenizer.model"},
    "native_amp_init_scale": 4294967296,
    "native_amp_growth_interval": 1000,
    "hysteresis": 2,
    "fp32_residual_connection": False,
    "fp16_lm_cross_entropy": False,
    "megatron_amp_O2": True,
    "grad_allreduce_chunk_size_mb": 125,
    "grad_div_ar_fusion": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_add_fusion": False,
    "masked_softmax_fusion": True,
    "get_attention_mask_from_fusion": True,
    "apply_rope_fusion": False,
    "seed": 1234,
    "resume_from_checkpoint": None,
    "use_cpu_initialization": False,
    "onnx_safe": False,
    "apex_transformer_log_level": 30,
    "gradient_as_bucket_view": True,
    "sync_batch_comm": False,
    "activations_checkpoint_granularity": None,
    "activations_checkpoint_method": None,
    "activations_checkpoint_num_layers": None,
    "num_micro_batches_with_partial_activation_checkpoints": None,
    "activations_checkpoint_layers_per_pipeline": None,
    "sequence_parallel": False,
    "transformer_engine": True,
    "fp8": False,
    "fp8_e4m3": False,
    "fp8_hybrid": True,
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "reduce_amax": True,
    "use_emha": False,
    "ub_tp_comm_overlap": False,
    "use_flash_attention": True,
    "data": {"data_prefix": None, "seq_length": 4096},
    "nsys_profile": {"enabled": False, "start_step": 10},
    "optim": {"name": "distributed_fused_adam", "lr": 2e-4, "sched": {"name": "CosineAnnealing"}},
    "gc_interval": 0,
    "precision": "bf16",
    "tensor_model_parallel_world_size": 2,
}


def of_nemo_2(c: dict[str, Any]) -> dict[str, Any]:
    """Returns what context/model.yaml of NeMo 2 says of a Llama with this config.json."""
    return {
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "ffn_hidden_size": c["intermediate_size"],
        "num_attention_heads": c["num_attention_heads"],
        "num_query_groups": c["num_key_value_heads"],
        "kv_channels": c.get("head_dim"),
        "seq_length": c["max_position_embeddings"],
        "rotary_base": c["rope_theta"],
        "layernorm_epsilon": c["rms_norm_eps"],
        "share_embeddings_and_output_weights": c["tie_word_embeddings"],
        "normalization": "RMSNorm",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
    }


def described(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the model_config.yaml of a Llama with this config.json."""
    return {
        **TRAINING,
        "mcore_gpt": True,
        "encoder_seq_length": config["max_position_embeddings"],
        "max_position_embeddings": config["max_position_embeddings"],
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim"),
        "normalization": "rmsnorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "bias": False,
        "activation": "fast-swiglu",
        "position_embedding_type": "rope",
        "rotary_percentage": 1.0,
        "rotary_base": config["rope_theta"],
        "seq_len_interpolation_factor": None,
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
    }


def zarr(work: Path, prefix: str, weights: str) -> tuple[Path, dict[str, Any]]:
    """Makes work/nemo/WEIGHTS of a sample, with the keys of NeMo; returns work/nemo, and the values
    of a config.json of the model.
    """
    sample = unpack("zarr/0.8-llama-float16", work / "sample")
    dims = mckpt.open(sample / "torch").dims
    folder = work / "nemo" / weights
    shutil.copytree(sample / "zarr" / "iter_0000001", folder)
    for path in list(folder.iterdir()):
        if path.name.startswith(("decoder.", "embedding.", "output_layer.")):
            path.rename(folder / f"{prefix}{path.name}")
        elif path.name.startswith("optimizer"):
            shutil.rmtree(path)
    (folder / "common.pt").unlink()
    names = {
        "max_position_embeddings": "max_positions",
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_size",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_query_groups",
        "head_dim": "head_dim",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_theta",
        "tie_word_embeddings": "tied",
    }
    return work / "nemo", {key: dims[name] for key, name in names.items()}


def pack(folder: Path, config: dict[str, Any], archive: Path, mode: str = "w:") -> Path:
    """Writes an archive of a folder, with a model_config.yaml; returns its path.

    mode: that of tarfile, "w:gz" for one of NeMo before 1.13.
    """
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    (folder / "a_tokenizer.model").write_bytes(b"tokenizer")
    with tarfile.open(archive, mode) as tar:
        tar.add(folder, arcname=".")
    return archive
