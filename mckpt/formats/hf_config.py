"""The files of a Hugging Face directory beside weights: config.json, tokenizer, templates, code."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from mckpt.errors import SourceError
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.storage.files import read_json
from mckpt.storage.staging import MANIFEST

CONFIG = "config.json"
BESIDE = ("", "huggingface", ".hf_metadata")  # of verl, and of NeMo AutoModel
QUANTISED = "quantization_config"  # the key of config.json
# The same, in a file of its own, which ModelOpt writes. Older versions of it write this file only.
MODELOPT = "hf_quant_config.json"
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
# an adapter, such as a LoRA, that lies beside whole weights: its description, and its own weights
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
FAST_TOKENIZER = "tokenizer.json"
_PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
GENERATION = "generation_config.json"
TOKENIZER = (
    *(FAST_TOKENIZER, "tokenizer.model*", "*.model", "*.spm", "*.tiktoken", "tekken.json"),
    *("*vocab*.json", "vocab.txt", "*.bpe", "bpe.codes"),
)
# what a tokenizer has beside these
_WITH_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.json", "*.jinja", "additional_chat_templates/*.jinja"),
)
# the images of a model card, at the top or in a directory such as `figures`
_IMAGES = tuple(
    f"{folder}*.{kind}"
    for folder in ("", "*/")
    for kind in ("png", "jpg", "jpeg", "gif", "svg", "webp")
)
_CARD = ".md"
_CARD_BYTES = 1 << 22  # of a card that are searched for names of images
# Files with the endings of weights that describe no tensor of the model: the voices of
# Qwen2.5-Omni, and the layers behind the model of sentence-transformers
_KEPT_WEIGHTS = ("spk_dict.pt", "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin")
# The files that a Hugging Face model directory has beside config.json and weights, as patterns
# that match letters of either case. No other file is copied or uploaded (docs/side-files.md).
SIDE_FILES = (
    *TOKENIZER,
    *_WITH_TOKENIZER,
    *(GENERATION, "*processor_config.json", "configuration.json"),
    *("*.py", f"*{_CARD}", "LICENSE*", "NOTICE*"),
    *_IMAGES,
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
    *("[0-9]_*/config.json", MAPPING),
    *_KEPT_WEIGHTS,
)


def described_in(root: Path) -> Path:
    """Returns the directory whose config.json describes the weights in `root`: one that a training
    puts there for it, or `root` itself.
    """
    return next((root / name for name in BESIDE if (root / name / CONFIG).is_file()), root)


def read_config(root: Path) -> dict[str, Any]:
    """Returns the config.json that describes the weights in a directory, with the description of
    its quantisation that may lie beside it.
    """
    root = described_in(root)
    if not (root / CONFIG).is_file():
        if not root.exists():
            raise SourceError(f"{root}: no such directory")
        raise SourceError(
            f"{root}: config.json is missing; download it, because it describes the tensors"
        )
    config = parse_config(root / CONFIG)
    if (root / MODELOPT).is_file() and not quantised_by(config):
        config[QUANTISED] = {"quant_method": "modelopt", **parse_config(root / MODELOPT)}
    return config


def parse_config(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, such as config.json.

    transformers 5 writes infinity as {"__float__": "Infinity"}, because JSON has no number for it.
    """
    config = read_json(path, 1 << 24)
    if not isinstance(config, dict):
        raise SourceError(f"{path}: holds {type(config).__name__}, not an object")
    found: dict[str, Any] = _with_infinity(config)
    return found


def _with_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_infinity(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _with_infinity(one) for key, one in value.items()}


class FilesBeside(NamedTuple):
    """The files beside weights in a directory, as names relative to it."""

    kept: list[str]  # a model directory has such files
    # files of other names, and links to what is not part of the directory
    left_out: list[str]


def side_files(root: Path) -> FilesBeside:
    """Returns the files of a directory that are neither weights, nor config.json, nor mckpt.json,
    nor hidden. A link to a directory is not followed. An image below the top is kept if a model
    card contains its name, because a training may write thousands of others.
    """
    out = FilesBeside([], [])
    cards: list[str] = []  # read when there is such an image
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        inner[:] = sorted(d for d in inner if not d.startswith("."))
        links = [d for d in inner if os.path.islink(os.path.join(folder, d))]
        for name in sorted([*names, *links]):
            relative = (here / name).as_posix()
            of_model = name.endswith(WEIGHTS) and not is_side_file(relative, _KEPT_WEIGHTS)
            if name.startswith(".") or of_model or relative in (CONFIG, MANIFEST):
                continue
            kept = (
                name not in links
                and is_side_file(relative)
                and relative.isprintable()  # mckpt.json cannot hold half of a surrogate pair
                and belongs(root / relative, root)
            )
            if kept and "/" in relative and is_side_file(relative, _IMAGES):
                cards = cards or [_cards(root)]
                kept = relative in cards[0]
            out[not kept].append(relative)
    return out


def refuse_half_processor(names: Iterable[str], root: Path) -> None:
    """Raises SourceError if a directory has the processor of images or sound, and not the file with
    its sizes. Processors of transformers 5 have both in one file.

    names: those of its files.
    """
    known = set(names)
    if _PROCESSOR not in known or PREPROCESSOR in known:
        return
    processor = parse_config(root / _PROCESSOR)
    if not any(isinstance(part, dict) for part in processor.values()):
        raise SourceError(
            f"{root / PREPROCESSOR}: is missing, and {_PROCESSOR} has no sizes of images or sound,"
            " so no loader can build the processor of the model: copy it from the model's original"
            f" directory, or remove {_PROCESSOR}"
        )


def _cards(root: Path) -> str:
    """Returns the text of the model cards at the top of a directory, with the names of the images
    that they show.
    """
    texts = []
    for path in sorted(root.iterdir()):
        if path.name.lower().endswith(_CARD) and path.is_file() and belongs(path, root):
            with path.open("rb") as file:
                texts.append(file.read(_CARD_BYTES).decode(errors="replace"))
    return unquote("\n".join(texts))


def is_side_file(name: str, patterns: Iterable[str] = SIDE_FILES) -> bool:
    """Returns whether the name of a file, relative to its directory, matches a pattern."""
    return any(
        pattern.count("/") == name.count("/") and fnmatch.fnmatchcase(name.lower(), pattern.lower())
        for pattern in patterns
    )


def has_tokenizer(names: Iterable[str]) -> bool:
    return any(is_side_file(name, TOKENIZER) for name in names)


def is_of_tokenizer(name: str) -> bool:
    """Returns whether a file of this name is part of a tokenizer or its chat templates."""
    return is_side_file(name, (*TOKENIZER, *_WITH_TOKENIZER))


def belongs(path: Path, root: Path) -> bool:
    """Returns whether the content of a file is part of the directory `root`: the file is not a
    link, or a link to a file of the directory or of a cache of huggingface_hub.

    A link to nothing belongs to the directory, which is damaged.
    """
    target = Path(os.path.realpath(path))
    cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    return (
        not path.is_symlink()
        or cached
        or target.is_relative_to(os.path.realpath(root))
        or not target.exists()
    )


def left_out(roots: Iterable[Path]) -> list[str]:
    """Returns a sentence on the files of these directories that are not copied, none without such
    files.
    """
    names = [name for root in roots for name in side_files(root).left_out]
    more = f" and {len(names) - 3:,} more" * (len(names) > 3)
    return [
        f"left out, because a model directory has no such files, or because they are links that"
        f" leave the directory (docs/side-files.md): {', '.join(names[:3])}{more}"
    ] * bool(names)


def quantised_by(config: Mapping[str, Any]) -> Any:
    """Returns the quantisation that a config.json describes: at the top, or in the config of one
    of the model's parts. None if there is none.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return next((part[QUANTISED] for part in parts if part.get(QUANTISED)), None)


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json without any description of a quantisation."""
    kept = {key: value for key, value in config.items() if key != QUANTISED}
    return {
        key: {k: v for k, v in value.items() if k != QUANTISED}
        if isinstance(value, dict)
        else value
        for key, value in kept.items()
    }
