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
import time
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import renamed
from tests.helpers.made_models import AS_PUBLISHED, published_name
from tests.helpers.tiny import class_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "fixtures" / "configs"
NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
REPOSITORIES: dict[str, dict[str, Any]] = yaml.safe_load(
    (CONFIGS / "repositories.yaml").read_text()
)
# the dialects of a model that has others than gpt and hybrid
DIALECTS = {
    "flan-t5-base": ("t5",),
    "megatron-bert-cased-345m": ("bert",),
    **dict.fromkeys(("exaone-4.0-1.2b", "gemma-2-2b", "gemma-2-9b", "gemma-2-27b"), ("bridge",)),
    **dict.fromkeys(("gemma-3-1b", "gemma-3-4b"), ("bridge",)),
    **dict.fromkeys(("mimo-v2-flash", "minimax-m2.5", "olmoe-1b-7b"), ("bridge",)),
    **dict.fromkeys(("gemma-4-26b-a4b-text", "gemma-4-31b-text"), ("bridge_gemma4",)),
    "falcon-h1-0.5b": ("parallel_mamba",),
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
    **{
        (name, "bridge"): ("norm_eps",)
        for name in DIALECTS
        if name.startswith(("gemma-2", "gemma-3"))
    },
    ("gemma-4-26b-a4b-text", "bridge_gemma4"): ("norm_eps",),
    **{(f"gemma-{n}b", d): ("activation",) for n in (2, 7) for d in ("gpt", "hybrid")},
    **{("granite-3.1-2b-base", dialect): ("residual_scale",) for dialect in ("gpt", "hybrid")},
    **{("granite-3.1-3b-a800m", dialect): ("residual_scale",) for dialect in ("gpt", "hybrid")},
    **{(f"granite-4.0-h-{size}", "hybrid"): ("residual_scale",) for size in ("350m", "small")},
    ("helium-1-2b", "hybrid"): ("rope_interleaved",),
    **{
        (name, dialect): ("position_scale",)
        for name in ("devstral-small-2-24b", "ministral-3-8b", "ministral-3-8b-instruct")
        for dialect in ("gpt", "hybrid")
    },
    **{
        (f"pythia-{n}", d): ("parallel_residual",)
        for n in ("1.4b", "160m")
        for d in ("gpt", "hybrid")
    },
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
    **{(f"kimi-k2{n}", d): ("norm_eps",) for n in (".5", "-thinking") for d in ("gpt", "hybrid")},
    ("llama-4-maverick", "gpt"): ("attn_chunk", "attn_temperature"),
    ("llama-4-maverick", "hybrid"): ("attn_chunk", "attn_temperature", "rope_interleaved"),
    ("kimi-k2", "gpt"): ("rope_beta_fast",),
    ("kimi-k2", "hybrid"): ("rope_beta_fast",),
    ("llama-3.1-8b", "hybrid"): ("rope_type", "rope_factor"),
    ("llama-3.1-405b", "hybrid"): ("rope_type", "rope_factor"),
    ("llama-3.2-3b", "gpt"): ("rope_factor",),
    ("llama-3.2-3b", "hybrid"): ("rope_type", "rope_factor"),
    ("deepseek-coder-6.7b", "hybrid"): ("rope_type", "rope_factor"),
    ("llama-3.1-nemotron-ultra-253b", "gpt"): ("rope_factor",),
    ("llama-3.2-1b", "gpt"): ("rope_factor",),
    ("llama-3.2-1b", "hybrid"): ("rope_type", "rope_factor"),
    ("llama-3.3-70b", "hybrid"): ("rope_type", "rope_factor"),
    **{("k-exaone-236b-a23b", dialect): ("mtp_layers",) for dialect in ("gpt", "hybrid")},
    **{("minimax-m3", dialect): ("attn_blocks",) for dialect in ("gpt", "hybrid")},
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
    ("granite-4.0-h-350m", "gpt"),
    ("granite-4.0-h-small", "gpt"),
    ("mamba-codestral-7b", "gpt"),
    ("nemotron-3-nano-30b-a3b", "gpt"),
    ("nemotron-3-super-120b-a12b", "gpt"),
    ("nemotron-3-ultra-550b-a55b", "gpt"),
    ("nemotron-h-56b", "gpt"),
    ("nemotron-h-8b", "gpt"),
    ("nemotron-nano-12b-v2", "gpt"),
    ("nemotron-nano-9b-v2", "gpt"),
}
# model -> the newest megatron-core that can load it, if it is not the newest of all
UNTIL = {"moonlight-16b-a3b": "0.18", "deepseek-v2-lite": "0.18", "sarvam-105b": "0.18"}
# the tensor-parallel size of a plan, where 2 is too many: one group, experts with biases, 9 heads
TP = dict.fromkeys(
    (
        *("bamba-9b", "falcon-h1-0.5b", "gemma-3-1b", "gpt-oss-20b", "gpt-oss-120b"),
        *("granite-4.0-h-350m", "granite-4.0-h-small", "minimax-m2.5", "olmoe-1b-7b"),
        *("smollm2-135m", "starcoder"),
    ),
    1,
)
# model -> the case of fixtures/families that has its names, where transformers saves others
AS_CASE = {"kimi-k2.5": "kimi_k25"}
DTYPES = {"torch.bfloat16": ("BF16", 2), "torch.float32": ("F32", 4), "torch.int64": ("I64", 8)}


class Writing:
    """Writes each model to out/NAME, in processes of their own, because transformers needs 5 s to
    start and half a minute for all. Meanwhile a test can use those that are there.
    """

    def __init__(self, names: Iterable[str], out: Path, processes: int = 2) -> None:
        self.out, names = out, list(names)
        out.mkdir(parents=True, exist_ok=True)
        self.logs = [out / f"log-{i}" for i in range(processes)]
        self.running = []
        for i, log in enumerate(self.logs):
            command = [sys.executable, "-m", "tests.helpers.published", str(out)]
            with log.open("w") as file:
                own = names[i::processes]
                self.running.append(subprocess.Popen([*command, *own], cwd=ROOT, stderr=file))

    def wait(self, name: str) -> Path:
        """Returns the directory of a model when it is complete; config.json is its last file."""
        while not (self.out / name / "config.json").exists():
            codes = [process.poll() for process in self.running]
            texts = [log.read_text()[-4000:] for log in self.logs]
            assert not any(codes) and None in codes, "\n".join(texts)
            time.sleep(0.05)
        return self.out / name

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def _write(name: str, directory: Path) -> None:
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    text = (CONFIGS / f"{name}.json").read_text()
    config = json.loads(text)
    kind = class_of(config)
    for key in ("quantization_config", "model_type"):  # of the weights; a name of no class
        config.pop(key, None)
    # transformers 5 ties by default, and most published files with a text_config are not tied
    if "text_config" in config and not name.startswith("gemma"):
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
    beside = directory / "config.json.new"
    beside.write_text(text)
    beside.rename(directory / "config.json")


def _holes(tensors: dict[str, Any], path: Path) -> None:
    """Writes a safetensors file whose data is one hole."""
    header: dict[str, Any] = {}
    end = 0
    dtypes: dict[Any, tuple[str, int]] = {}  # the name of a dtype takes long to make
    for key, tensor in tensors.items():
        if (dtype := tensor.dtype) not in dtypes:
            dtypes[dtype] = DTYPES[str(dtype)]
        name, size = dtypes[dtype]
        shape = list(tensor.shape)
        begin, end = end, end + size * prod(shape)
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)


if __name__ == "__main__":
    for stem in sys.argv[2:]:
        _write(stem, Path(sys.argv[1]) / stem)
