"""Models as other programs save them: with wrappers that add to the names of the tensors, with
adapters, or in directories of another layout.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mckpt.lazy import pattern

# Parts of names that a wrapper adds at each module that it wraps -> the wrapper
_INSIDE = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
# Prefixes of all names of a model -> the wrapper
_AROUND = {
    "module.": "DistributedDataParallel or DeepSpeed",
    "pretrained_model.": "TRL's model with a value head",
    "base_model.model.": "PEFT",
}
VALUE_HEAD = "v_head."  # starts the names of TRL's value head, which is beside `pretrained_model.`
_LORA = pattern(r"\.(?:lora_\w+|base_layer|modules_to_save)\.")

# Ends of the keys of the factors of adapters, those of Megatron-Bridge and of ms-swift
# (mappings/adapters.yaml), and the part that the keys of the weights below them have in memory. A
# factor B may be in sections, whose names follow.
FACTOR = pattern(
    r"\.(?:(?:adapter\.(?:adapter_\w+\.)?)?linear_(?:in|out)\.weight|adapter\.weight_magnitude"
    r"|lora_[AB]\.default\.weight)(?=$|(?<=linear_out\.weight)\.\w+$)"
)
_WRAPPED = ".to_wrap."

# Names that no mapping has, and what to do with a checkpoint that has them
_NAMES = (
    (
        r"\.(to_wrap|adapter)\.",
        "Tensors named `adapter` are those of a LoRA in Megatron, and `to_wrap` are the weights to"
        " which it is added: `mckpt megatron-to-hf SRC DST` writes the adapter as a directory of"
        " PEFT, and with --merge the weights with the adapter; `mckpt adapter` reshards and merges"
        " adapters, with or without weights beside them, and `mckpt verify --adapter PEFT_DIR` runs"
        " them beside the weights.",
    ),
    (
        r"^(?:decoder|mtp)\..*\.lora_[AB]\.default\.weight",
        "Tensors named lora_A.default are those of an adapter (LoRA) of ms-swift: `mckpt adapter"
        " to-hf SRC DST --like HF_DIR` writes them as a directory of PEFT, and `mckpt adapter merge"
        " HF_DIR SRC DST` the weights with them.",
    ),
    (
        _LORA.pattern,
        "These are names of a PEFT adapter and of the weights below it. Save the model that"
        " `merge_and_unload()` of PEFT returns, and convert it; or save the adapter alone, and let"
        " `mckpt adapter merge` add it to the weights.",
    ),
    (
        r"^model\.language_model\.encoder\.",
        "These are the names of NeMo's own GPT model, which it builds if mcore_gpt is false. mckpt"
        " reads its models of Megatron-Core. Convert this one with NeMo's"
        " scripts/checkpoint_converters/convert_gpt_nemo_to_mcore.py first.",
    ),
    (
        r"^tok_embeddings\.|\.attention\.w[qkvo]\.",
        "These are the names of torchtitan and of Meta's own files, not those of transformers."
        " mckpt reads the checkpoints that torchtitan saves, step-N, with --like HF_DIR.",
    ),
    (
        r"^(?:vision|audio)_encoder\.",
        "These are the towers of a multimodal model of MaxText (use_multimodal=true). mckpt reads"
        " the text models of MaxText. MaxText's own to_huggingface writes the whole model, which"
        " mckpt converts to Megatron.",
    ),
)
_DEEPSPEED = (
    "a directory with checkpoints of DeepSpeed: give the path of one of them, such as"
    " DIR/global_stepN or DIR/global_stepN_universal, and --like HF_DIR"
)
_VERL = (
    "a checkpoint of verl: give the directory of a role in a step, such as"
    " DIR/global_step_N/actor, with model_world_size_*_rank_*.pt of a run with FSDP, or dist_ckpt"
    " of one with Megatron (use_dist_checkpointing)"
)
_DELTAS = (
    "deltas of weights: `mckpt apply BASE DIR OUT` applies them, and `mckpt inspect` lists them"
)
_VERSION = pattern(r"weight_v(\d+)")
# Patterns of file names -> the description of a directory that has files for all of them
_DIRECTORIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("*.nemo",),
        "a directory with archives of NeMo 1: give the path of one of them, a *.nemo file",
    ),
    (
        ("adapter_config.json",),
        "a PEFT adapter without the model that it belongs to, which its adapter_config.json names:"
        " `mckpt adapter merge MODEL ADAPTER DST` writes the model with the adapter merged",
    ),
    (("global_step[0-9]*", "latest"), _DEEPSPEED),
    (("global_step[0-9]*", "latest_universal"), _DEEPSPEED),
    (("dist_ckpt", "huggingface"), _VERL),
    (("global_step_[0-9]*",), _VERL),
    (("actor",), _VERL),
    (("weight_v[0-9]*",), f"a directory of {_DELTAS}"),
    (
        ("step-[0-9]*",),
        "a directory with checkpoints of torchtitan: give the path of one of them, step-N, and"
        " --like HF_DIR",
    ),
)


def unwrapped(names: list[str]) -> tuple[list[str], list[str]]:
    """Returns the names of a model's tensors without the parts of wrappers, and these parts.

    The names stay as they are if an adapter is among them, or if two would become the same.
    """
    out, found = names, dict[str, str]()
    text = "\n".join(names)
    if any(f"{part}." in text for part in _INSIDE):
        split = [key.split(".") for key in names]
        wrappers = {part for parts in split for part in parts} & _INSIDE.keys()
        out = [".".join(part for part in parts if part not in wrappers) for parts in split]
        found = {f"{part}.": program for part, program in _INSIDE.items() if part in wrappers}
    while start := next((start for start in _AROUND if _is_around(start, out)), None):
        out = [key.removeprefix(start) for key in out]
        found[start] = _AROUND[start]
    if not found or _LORA.search(text) or len(set(out)) < len(out):
        return names, []
    return out, [f"{part} ({program})" for part, program in found.items()]


def _is_around(start: str, names: list[str]) -> bool:
    inside = (start, VALUE_HEAD) if start == "pretrained_model." else (start,)
    return all(key.startswith(inside) for key in names) and any(
        key.startswith(start) for key in names
    )


def without_adapter(key: str) -> str:
    """Returns the key that a weight of Megatron has without the adapter around its module."""
    return key.replace(_WRAPPED, ".")


def has_adapter(keys: Iterable[str]) -> bool:
    """Returns whether keys of Megatron are those of adapters, or of adapters and weights."""
    return any(map(FACTOR.search, keys))


def advice(names: Iterable[str]) -> str:
    """Returns what to do with a checkpoint that has names that no mapping has; "" if that is not
    known.
    """
    text = "\n".join(names)
    return next((cure for pattern, cure in _NAMES if re.search(pattern, text, re.MULTILINE)), "")


def number_of_version(path: Path) -> int:
    """Returns the number in a name weight_vNNNNNN, as slime and miles publish; 0 for another."""
    found = _VERSION.fullmatch(path.name)
    return int(found[1]) if found else 0


def is_delta(path: Path) -> bool:
    """Returns whether a directory is a delta of weights, and no checkpoint."""
    index = path / "model.safetensors.index.json"
    if index.exists() and not (path / "config.json").exists():
        with suppress(OSError):
            return b'"delta_encoding"' in index.read_bytes()
    return False


def has_deltas(path: Path) -> bool:
    """Returns whether a directory is a delta, or has some."""
    return any(map(is_delta, (path, *path.glob("weight_v*"))))


def program_of(path: Path) -> str | None:
    """Returns a sentence on a file or directory of another program that mckpt does not read, with
    what to do; None if it is not known.
    """
    names = os.listdir(path) if path.is_dir() else [path.name]
    found = next(
        (
            description
            for patterns, description in _DIRECTORIES
            if all(fnmatch.filter(names, pattern) for pattern in patterns)
        ),
        None,
    )
    if found is None and is_delta(path):
        found = f"one of the {_DELTAS}"
    return found and f"{path}: is {found}."
