"""mckpt.json, the manifest of a checkpoint: the files that mckpt wrote, and their source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from mckpt.errors import SourceError
from mckpt.storage.files import read_json
from mckpt.storage.staging import MANIFEST

BESIDE = "../hf/"  # prefix of the files in DST/hf, whose paths are relative to a checkpoint
_MAX_BYTES = 1 << 28


class Recorded(TypedDict):
    """A file that mckpt wrote."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    # crc32:0a1b2c3d; "" if none was computed
    checksum: Annotated[str, msgspec.Meta(pattern=r"^(crc32:[0-9a-f]{8}|sha256:[0-9a-f]{64})?$")]


class _Mapping(TypedDict, total=False):
    """A mapping file."""

    name: str
    digest: str
    logical: str  # digest of logical.yaml


class _UserMapping(TypedDict):
    """A family file of the user."""

    name: str
    digest: str


class _SourceFacts(TypedDict, total=False):
    format: str
    layout: str  # digest of the places of its tensors
    mapping: _Mapping
    iteration: int
    files: list[dict[str, Any]]  # the name and the bytes of each


class Facts(TypedDict, total=False):
    """The entries of a manifest that decide the output, without time, host or path."""

    mckpt: str  # version
    source: _SourceFacts
    mapping: _Mapping  # of the target
    family: str  # named by the user
    mapping_file: _UserMapping
    form: str | None
    dims: dict[str, Any]
    format: str
    dtype: str | None
    casts: list[str]
    inexact: dict[str, str]
    carried: dict[str, Any]
    tower_keys: list[str]
    adapter: dict[str, Any]
    average: dict[str, Any]
    delta: dict[str, Any]  # of a version of weights, and of what is made by one
    edits: list[Any]  # texts in those of older versions
    optimizer: dict[str, Any]
    left_behind: list[str]
    notes: list[str]
    # of a Megatron checkpoint
    parallel: dict[str, Any]
    choices: dict[str, Any]
    padded_vocab_size: int
    unit: str | None  # its directory
    common: str  # digest of the common state
    common_as_object: bool
    args: dict[str, Any]  # flags of Megatron's training program
    megatron_version: str | None
    files_beside: list[list[Any]]  # the path and the bytes of each
    # of a Hugging Face directory
    max_shard_size: int
    quantize: str
    config: str  # digest of the config
    side: list[list[Any]]  # the path and the bytes of each


class Manifest(Facts, total=False):
    """The content of a manifest. Those that older versions wrote lack some entries."""

    plan: str  # digest of the facts
    read: str  # the state of the source
    dropped: list[str]
    files: dict[str, Recorded]
    hf: dict[str, Recorded]  # the files in DST/hf


def read(directory: Path) -> Manifest:
    """Returns a directory's mckpt.json; {} if there is none.

    Raises SourceError if it is not one that mckpt writes, or names files outside of the checkpoint.
    """
    path = directory / MANIFEST
    if not path.exists():
        return {}
    content: Manifest = read_json(path, _MAX_BYTES)
    try:
        msgspec.convert(content, Manifest)
    except msgspec.ValidationError as e:
        raise SourceError(f"{path}: is not as mckpt writes it: {e}; {CURE}") from None
    for name in (*content.get("files", ()), *content.get("hf", ())):
        # the first part of an absolute name is empty
        if "\0" in name or {"", ".."} & set(name.removeprefix(BESIDE).split("/")):
            raise SourceError(
                f"{path}: names {name!r}, which cannot be a file of a checkpoint; {CURE}"
            )
    if content and "files" not in content:
        raise SourceError(f"{path}: names no files; {CURE}")
    return content


CURE = f"copy the checkpoint again, or move {MANIFEST} away to read the checkpoint without it"
