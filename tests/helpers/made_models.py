"""Tiny checkpoints made by transformers' own classes, for the families in fixtures/families.

Each file there is a config.json with small sizes that all differ from each other. transformers
builds the model from it and saves it, so names, shapes and files are those of published
checkpoints. Every tensor gets random values: transformers sets norms to 1 and biases to 0, and a
converter that loses such a tensor would pass.

transformers needs 5 s, so a program of tests/helpers/session.py writes them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers import renamed, tiny
from tests.helpers.judging import launch

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ROOT / "fixtures" / "families"
TRANSFORMERS = [int(part) for part in version("transformers").split(".")[:2]]
# case -> the oldest transformers that has its class
SINCE = {"lara_mini": [5, 24]}
CASES = tuple(
    sorted(
        path.stem
        for path in FAMILIES.glob("*.json")
        if SINCE.get(path.stem, TRANSFORMERS) <= TRANSFORMERS
    )
)
# these take two sequences, so that tests/judge/test_t5.py runs them
SEQ2SEQ = FAMILIES / "encoder_decoder"
ENCODER_DECODERS = tuple(sorted(path.stem for path in SEQ2SEQ.glob("*.json")))

# these only Megatron-Bridge computes; tests/judge/test_bridge.py runs them
OF_BRIDGE = FAMILIES / "bridge"
BRIDGE_MODELS = tuple(sorted(path.stem for path in OF_BRIDGE.glob("*.json")))
# models around the text models of these
WITH_IMAGES = OF_BRIDGE / "images"
BRIDGE_IMAGES = tuple(sorted(path.stem for path in WITH_IMAGES.glob("*.json")))

# text models that mcore-bridge, of ms-swift, computes (tests/judge/test_mcore_bridge.py), and their
# dialects. It reads full_attention_interval of Qwen3-Next, and has no dense layers between experts.
OF_SWIFT = FAMILIES / "mcore_bridge"
SWIFT_MODELS = {"glm4": "mcore_bridge", "qwen3_next_moe": "mcore_bridge_gdn"}

# Whole models with their towers, by the trainer whose own program saves, loads and exports them;
# with IMAGE it also computes the logits of an image on CPU. Megatron-Bridge cannot run a gated
# delta net there, and has the image sizes of Gemma 3 fixed. mcore-bridge reads the experts of
# Qwen3-VL-MoE in another orientation than transformers: only Megatron-Bridge judges that model.
IMAGE, LOADED = "image", "loaded"
SILENT = "silent"  # loaded; the trainer has the thinker alone, without what speaks
SAVED = "saved"  # the trainer saves it, and exports other values than it loads
OLD = "old"  # as TEXT, with megatron-core 0.18, whose layers it needs
TEXT = "text"  # loaded, and the trainer's own program computes the logits of text
BESIDE = "beside"  # as TEXT, with stand-ins for the classes that are published beside the weights
WHOLE = {
    "bridge": {
        **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe"), IMAGE),
        **dict.fromkeys(("qwen3_5_vl", "qwen3_5_moe_vl", "gemma3_vl"), LOADED),
        **dict.fromkeys(("ministral3_vl", "mistral3"), IMAGE),
        "kimi_k25": SAVED,
    },
    "swift": {
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v_moe"), IMAGE),
        **dict.fromkeys(("internvl", "internvl_moe", "llama4_vl"), IMAGE),
        **dict.fromkeys(("qwen3_5_vl", "qwen3_5_moe_vl"), IMAGE),
        **dict.fromkeys(("qwen2_5_omni", "qwen3_omni"), SILENT),
        **dict.fromkeys(("gemma4_dense_vl", "gemma4_e2b_vl", "gemma4_moe_vl"), TEXT),
        **dict.fromkeys(("internvl_chat", "ovis2_5"), BESIDE),
        "kimi_vl": OLD,
    },
}

# case -> names that transformers writes and does not read -> the names of published files
AS_PUBLISHED = {
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
}


def config(case: str) -> dict[str, Any]:
    """Returns the config.json of a case, also of tests/helpers/tiny.py."""
    folders = (FAMILIES, SEQ2SEQ, OF_BRIDGE, WITH_IMAGES, OF_SWIFT, tiny.FIXTURES / "tiny")
    path = next(p for folder in folders if (p := folder / f"{case}.json").exists())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def text(c: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json that describes the text model."""
    c = c.get("thinker_config") or c
    found: dict[str, Any] = c.get("text_config") or c.get("llm_config") or c
    return found


def tokens(case: str, rows: int = 2) -> np.ndarray:
    """Returns random tokens [rows, length] over the whole vocabulary, at most 96 in a row. Those of
    a case of tests/helpers/tiny.py are up to 512.
    """
    if case in tiny.CASES:
        return tiny.tokens(case, rows)
    c = config(case)
    length = min(text(c).get("max_position_embeddings", 96), 96)
    return np.random.RandomState(1).randint(0, text(c)["vocab_size"], (rows, length))


def make(cases: Iterable[str], out: Path) -> None:
    """Writes each case to out/CASE, in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = list(cases)
    log = launch("made_models", [{"name": case} for case in chosen], 1, out, 600)
    assert all((out / case / "config.json").exists() for case in chosen), log


def save_by_ranks(folder: Path, kind: str = "") -> Path:
    """Saves the model in folder/hf as the ranks of a training do (tests/helpers/rank_files.py);
    returns `folder`.
    """
    log = launch("rank_files", [{"kind": kind}], 4, folder, 300)
    assert (folder / "verl").exists(), log
    return folder


def prepare() -> None:
    """Makes a model, which imports for 3 s what all of them need."""
    with tempfile.TemporaryDirectory() as place:
        write("arcee", Path(place))


def run(cases: list[dict[str, Any]], out: Path) -> int:
    for case in cases:
        write(case["name"], out / case["name"])
    return 0


def cast(source: Path, directory: Path, dtype: str) -> None:
    """Writes the weights and the config.json of another directory, in another dtype."""
    from safetensors.numpy import load_file

    stored = load_file(source / "model.safetensors")
    kind = tiny.DTYPES[dtype][1]
    directory.mkdir(parents=True)
    tiny.write_weights(directory, {k: v.astype(kind) for k, v in stored.items()})
    shutil.copy(source / "config.json", directory)


def write(case: str, directory: Path, c: dict[str, Any] | None = None) -> None:
    """Writes a case in this process, or a model of the same kind with another config.json."""
    import torch

    c = c or config(case)
    kind = tiny.class_of(c)
    torch.manual_seed(0)  # some tensors keep the mean of transformers' random values
    # a copy, since transformers adds keys to rope_scaling
    given = renamed.config(copy.deepcopy(c))
    given.pop("model_type", None)  # it may be a name that its maker gave to the class
    model = kind(kind.config_class.from_dict(given)).float()
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.is_floating_point():
                drawn = np.random.RandomState(zlib.crc32(name.encode()))
                tensor.copy_(torch.from_numpy(_values(name, tensor, drawn)))
    model.save_pretrained(directory)
    _rename(c, directory / "model.safetensors", AS_PUBLISHED.get(case, {}))
    if text(c).get("num_kv_shared_layers"):
        _add_unread(text(c), directory / "model.safetensors")
    # with the keys of the file, since transformers writes its own defaults beside them
    (directory / "config.json").write_text(json.dumps(c, indent=2, sort_keys=True) + "\n")


def _rename(c: dict[str, Any], file: Path, names: dict[str, str]) -> None:
    """Gives the tensors of a file the names of published files."""
    from safetensors.torch import load_file, save_file

    saved = load_file(file)
    found = renamed.as_published(c, {published_name(k, names): v for k, v in saved.items()})
    if found.keys() != saved.keys():
        save_file(found, file, {"format": "pt"})


def _add_unread(c: dict[str, Any], file: Path) -> None:
    """Adds the keys and values of the layers that take those of others. Published files have them,
    and transformers neither reads nor writes them.
    """
    from safetensors.numpy import load_file, save_file

    held = load_file(file)
    first = c["num_hidden_layers"] - c["num_kv_shared_layers"]
    for layer, kind in list(enumerate(c["layer_types"]))[first:]:
        width = c["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        projected = (c["num_key_value_heads"] * width, c["hidden_size"])
        shapes = {"k_proj": projected, "v_proj": projected, "k_norm": (width,)}
        at = next(k for k in held if k.endswith(f"layers.{layer}.self_attn.q_proj.weight"))
        for part, shape in shapes.items():
            name = at.replace("q_proj", part)
            drawn = np.random.RandomState(zlib.crc32(name.encode()))
            held[name] = drawn.standard_normal(shape).astype(np.float32)
    save_file(held, file, {"format": "pt"})


def without_unread(source: Path, folder: Path) -> None:
    """Copies a directory without the tensors that `_add_unread` adds: as transformers saves it."""
    from safetensors.numpy import load_file, save_file

    c = json.loads((source / "config.json").read_text())
    first = text(c)["num_hidden_layers"] - text(c)["num_kv_shared_layers"]
    unread = re.compile(r".*layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight")
    held = load_file(source / "model.safetensors")
    found = {key: unread.fullmatch(key) for key in held}
    kept = {k: v for k, v in held.items() if not ((m := found[k]) and int(m[1]) >= first)}
    folder.mkdir(parents=True)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(c))


def published_name(name: str, names: dict[str, str]) -> str:
    """Returns the name of a tensor with its start replaced."""
    start = next((start for start in names if name.startswith(start)), "")
    return names.get(start, "") + name[len(start) :]


def _values(name: str, tensor: Any, drawn: np.random.RandomState) -> np.ndarray:
    """Returns normal values, scaled such that the logits depend on every tensor."""
    normal = np.asarray(drawn.standard_normal(tuple(tensor.shape)), np.float32)
    if tensor.dim() < 2:  # a norm keeps its mean of 0 or 1, a bias its 0
        # from 0.5 to 2, so that Megatron-Core's form of it, 1 less, is exact
        spread = 0.05 if "correction_bias" in name or "linear_attn.norm" in name else 0.3
        return np.asarray(np.float32(tensor.mean().item()) + np.float32(spread) * normal)
    if "embed" in name:
        return np.float32(0.25) * normal
    return np.float32(1.1 / np.sqrt(tensor.shape[-1])) * normal
