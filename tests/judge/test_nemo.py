"""Checkpoints of NeMo 2.0, which mckpt reads.

    DIR/weights/              torch_dist; the keys of the model begin with `module.`
    DIR/context/model.yaml    `config`: the class and the values of a GPTConfig
(NeMo, lightning/ckpt_utils.py; lightning/io/pl.py; lightning/megatron_parallel.py)

torch writes the tensors here, with the keys that NeMo gives them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import mckpt
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import nemo_archive, tiny
from tests.helpers.bridge_facts import tensors

LLAMA = "nemo.collections.llm.gpt.model.llama"


def nemo(case: str, directory: Path, target: str, **more: Any) -> tuple[Path, Path]:
    """Writes a tiny model as Hugging Face and as NeMo have it; returns both directories."""
    import torch
    from torch.distributed import checkpoint as dcp

    source = tiny.tiny_random(case, directory / "hf")
    mckpt.plan(source, directory / "megatron", run_config=True).run()
    held = {f"module.{key}": value for key, value in tensors(directory / "megatron").items()}
    # the state of the optimizer has the same names
    first = next(iter(held))
    held[f"optimizer.state.exp_avg.{first}"] = torch.zeros(held[first].shape)
    held["module.decoder.final_layernorm._extra_state/shard_0_1"] = [b""]  # an object
    weights = directory / "nemo" / "weights"
    dcp.save(held, storage_writer=dcp.FileSystemWriter(weights), no_dist=True)
    (weights / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    torch.save({"epoch": 0, "global_step": 5, "state_dict": {}}, weights / "common.pt")
    c = tiny.config(case)
    config = {
        "_target_": target,
        **nemo_archive.of_nemo_2(c),
        "rotary_percent": 1.0,
        "seq_len_interpolation_factor": None,
        "make_vocab_size_divisible_by": 128,
        "vocab_size": None,
        "fp16_lm_cross_entropy": False,
        "forward_step_fn": {"_target_": "nemo.collections.llm.gpt.model.base.gpt_forward_step"},
        "transformer_layer_spec": {
            "_target_": "nemo.collections.llm.gpt.model.base.default_layer_spec"
        },
        **more,
    }
    context = directory / "nemo" / "context"
    context.mkdir()
    (context / "model.yaml").write_text(
        yaml.safe_dump({"_target_": f"{LLAMA}.LlamaModel", "config": config})
    )
    return source, directory / "nemo"


@pytest.mark.judge
def test_a_checkpoint_of_nemo_is_read(tmp_path: Path) -> None:
    """As NeMo stores Llama 3.1; its vocabulary is the tokenizer's."""
    rope = tiny.config("llama-rope-scaled")["rope_scaling"]
    scaled = {
        "scale_factor": rope["factor"],
        "low_freq_factor": rope["low_freq_factor"],
        "high_freq_factor": rope["high_freq_factor"],
        "old_context_len": rope["original_max_position_embeddings"],
    }
    source, found = nemo("llama-rope-scaled", tmp_path, f"{LLAMA}.Llama31Config8B", **scaled)
    with pytest.raises(
        UsageError, match=r"model\.yaml: does not contain the vocab_size; give --voc"
    ):
        mckpt.plan(found, tmp_path / "none", format="hf")
    rows = tiny.config("llama-rope-scaled")["vocab_size"]
    mckpt.plan(known(found, rows), tmp_path / "back", format="hf").run()
    assert not mckpt.diff(source, tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["rope_scaling"]["factor"] == rope["factor"]
    # Megatron-Bridge goes on with it
    with pytest.raises(MappingError, match="--allow-inexact rope_factor"):
        mckpt.plan(known(found, rows), tmp_path / "none", format="torch_dist")
    mckpt.plan(
        known(found / "weights", rows),
        tmp_path / "tp2",
        format="torch_dist",
        parallel=Parallel(tp=2),
        no_optimizer=True,
        run_config=True,
    ).run()
    assert not mckpt.diff(source, tmp_path / "tp2")
    assert not (tmp_path / "tp2/release/megatron_args.sh").exists()
    mckpt.plan(tmp_path / "tp2", tmp_path / "tp1", format="torch_dist").run()
    assert not (tmp_path / "tp1/release/megatron_args.sh").exists()
    contradicts_or_unknown(found, rows, tmp_path)


def known(path: Path, rows: int) -> mckpt.Checkpoint:
    """Returns a checkpoint whose vocabulary the user gives."""
    return mckpt.Checkpoint.open(path, SourceOptions(vocab_size=rows))


def contradicts_or_unknown(found: Path, rows: int, work: Path) -> None:
    """Other descriptions beside the same tensors are refused."""
    path = found / "context" / "model.yaml"
    config = yaml.safe_load(path.read_text())
    for changed, message in (
        ({"_target_": "nemo.collections.llm.gpt.model.gemma2.Gemma2Config2B"}, "llm.export_ckpt"),
        ({"num_layers": 3}, "is in no rule|should be"),
        ({"scale_embeddings_by": 7.0}, "args.scale_embeddings_by"),
    ):
        path.write_text(yaml.safe_dump({**config, "config": {**config["config"], **changed}}))
        with pytest.raises((MappingError, SourceError), match=message):
            mckpt.plan(known(found, rows), work / "refused", format="hf")
    shutil.rmtree(path.parent)
    with pytest.raises(UsageError, match=r"has no args, .* give --like"):
        mckpt.plan(known(found / "weights", rows), work / "refused", format="hf")
