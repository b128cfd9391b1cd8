"""Published models without weights: config.json, and a file with a header and a hole.

transformers builds its own class of a config on the meta device, and names the tensors that it
would save. The file has their names, shapes and dtypes and the size of all their data, and takes
no space on the disk. mckpt reads headers only to plan a conversion, so it can plan that of a model
of a terabyte.

    python -m tests.helpers.published OUT CONFIG ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from tests.helpers import renamed
from tests.helpers.made_models import AS_PUBLISHED, published_name
from tests.helpers.tiny import class_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "fixtures" / "configs"
NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
# the dialects of a model that has others than gpt and hybrid
DIALECTS = {
    "flan-t5-base": ("t5",),
    "megatron-bert-cased-345m": ("bert",),
    "mimo-v2-flash": ("bridge",),
    "mt5-small": ("t5",),
}
SCOUT = ("attn_chunk", "attn_temperature", "rope_high_freq_factor", "qk_l2_norm", "rope_factor")
# (model, dialect) -> the dims that the dialect cannot compute exactly
INEXACT: dict[tuple[str, str], tuple[str, ...]] = {
    **{("baichuan2-7b", dialect): ("normed_head",) for dialect in ("gpt", "hybrid")},
    ("cwm", "gpt"): ("rope_factor",),
    ("cwm", "hybrid"): ("rope_type", "rope_factor"),
    ("ernie-4.5-0.3b", "hybrid"): ("rope_interleaved",),
    ("exaone-3.5-7.8b", "hybrid"): ("rope_type", "rope_factor"),
    ("flan-t5-base", "t5"): ("activation",),
    ("mt5-small", "t5"): ("activation",),
    ("glm-4-9b-chat", "hybrid"): ("rope_interleaved",),
    ("deepseek-v3.2", "gpt"): ("mtp_layers",),
    ("glm-5", "gpt"): ("mtp_layers", "norm_eps"),
    ("glm-5.2", "gpt"): ("mtp_layers", "norm_eps"),
    **{("gemma-2b", dialect): ("activation",) for dialect in ("gpt", "hybrid")},
    **{("granite-3.1-2b-base", dialect): ("residual_scale",) for dialect in ("gpt", "hybrid")},
    **{("granite-3.1-3b-a800m", dialect): ("residual_scale",) for dialect in ("gpt", "hybrid")},
    ("granite-4.0-h-small", "hybrid"): ("residual_scale",),
    ("helium-1-2b", "hybrid"): ("rope_interleaved",),
    **{("ministral-3-8b", dialect): ("position_scale",) for dialect in ("gpt", "hybrid")},
    **{("ministral-3-8b-instruct", d): ("position_scale",) for d in ("gpt", "hybrid")},
    **{("pythia-1.4b", dialect): ("parallel_residual",) for dialect in ("gpt", "hybrid")},
    ("glm-5", "hybrid"): ("norm_eps",),
    ("glm-5.2", "hybrid"): ("mtp_layers", "norm_eps"),
    **{("glm-4.7-flash", dialect): ("norm_eps",) for dialect in ("gpt", "hybrid")},
    **{(model, "gpt"): SCOUT for model in ("llama-4-scout", "llama-4-scout-text")},
    **{
        (model, "hybrid"): (*SCOUT, "rope_type", "rope_interleaved")
        for model in ("llama-4-scout", "llama-4-scout-text")
    },
    ("hunyuan-7b", "gpt"): ("qk_norm_after_rope",),
    ("hunyuan-7b", "hybrid"): ("qk_norm_after_rope",),
    ("hunyuan-a13b", "gpt"): ("qk_norm_after_rope",),
    ("hunyuan-a13b", "hybrid"): ("qk_norm_after_rope",),
    **{("kimi-k2.5", dialect): ("norm_eps",) for dialect in ("gpt", "hybrid")},
    ("kimi-k2", "gpt"): ("rope_beta_fast",),
    ("kimi-k2", "hybrid"): ("rope_beta_fast",),
    ("llama-3.1-8b", "hybrid"): ("rope_type", "rope_factor"),
    ("llama-3.1-nemotron-ultra-253b", "gpt"): ("rope_factor",),
    ("llama-3.2-1b", "gpt"): ("rope_factor",),
    ("llama-3.2-1b", "hybrid"): ("rope_type", "rope_factor"),
    ("llama-3.3-70b", "hybrid"): ("rope_type", "rope_factor"),
    ("moonlight-16b-a3b", "gpt"): ("norm_eps",),
    ("sarvam-105b", "gpt"): ("router_group_experts",),
    ("qwen3-next-80b-a3b", "gpt"): ("mtp_layers",),
    ("qwen3.6-27b-text", "gpt"): ("mtp_layers",),
    ("qwen3.6-35b-a3b-text", "gpt"): ("mtp_layers",),
}
# (model, dialect) that no megatron-core can load
UNLOADABLE = {
    ("deepseek-v2-lite", "hybrid"),
    ("moonlight-16b-a3b", "hybrid"),
    ("sarvam-105b", "hybrid"),
    ("llama-3.1-nemotron-ultra-253b", "hybrid"),
    ("llama-3.3-nemotron-super-49b", "hybrid"),
    # GPTModel has no Mamba-2
    ("bamba-9b", "gpt"),
    ("granite-4.0-h-small", "gpt"),
    ("mamba-codestral-7b", "gpt"),
    ("nemotron-3-nano-30b-a3b", "gpt"),
    ("nemotron-3-super-120b-a12b", "gpt"),
    ("nemotron-h-8b", "gpt"),
    ("nemotron-nano-9b-v2", "gpt"),
}
# model -> the newest megatron-core that can load it, if it is not the newest of all
UNTIL = {"moonlight-16b-a3b": "0.18", "deepseek-v2-lite": "0.18", "sarvam-105b": "0.18"}
# the tensor-parallel size of a plan, where 2 is too many: one group, and experts with biases
TP = {"bamba-9b": 1, "gpt-oss-20b": 1, "granite-4.0-h-small": 1}
# model -> the case of fixtures/families that has its names, where transformers saves others
AS_CASE = {"kimi-k2.5": "kimi_k25"}
DTYPES = {"torch.bfloat16": ("BF16", 2), "torch.float32": ("F32", 4), "torch.int64": ("I64", 8)}


def write_all(names: Iterable[str], out: Path) -> None:
    """Writes each model to out/NAME, in a process of its own since transformers needs 5 s."""
    command = [sys.executable, "-m", "tests.helpers.published", str(out), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _write(name: str, directory: Path) -> None:
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    text = (CONFIGS / f"{name}.json").read_text()
    config = json.loads(text)
    kind = class_of(config)
    for key in ("quantization_config", "model_type"):  # of the weights; a name of no class
        config.pop(key, None)
    if "text_config" in config:  # transformers 5 ties by default, and published files are not tied
        config.setdefault("tie_word_embeddings", False)
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(renamed.config(config))).to(torch.bfloat16)
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    # transformers 5 says of every T5 that it is tied
    if config.get("is_encoder_decoder") and not config["tie_word_embeddings"]:
        tied.discard("lm_head.weight")
    state = {k: v for k, v in model.state_dict().items() if k not in tied}
    saved = revert_weight_conversion(model, state)
    starts = AS_PUBLISHED.get(AS_CASE.get(name, ""), {})
    saved = {published_name(key, starts): tensor for key, tensor in saved.items()}
    saved = renamed.as_published(config, saved)
    _holes(saved, directory / "model.safetensors")
    (directory / "config.json").write_text(text)


def _holes(tensors: dict[str, Any], path: Path) -> None:
    """Writes a safetensors file whose data is one hole."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        name, size = DTYPES[str(tensor.dtype)]
        begin, end = end, end + size * prod(tensor.shape)
        header[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)


if __name__ == "__main__":
    for stem in sys.argv[2:]:
        _write(stem, Path(sys.argv[1]) / stem)
