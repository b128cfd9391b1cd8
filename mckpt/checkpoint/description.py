"""What describes a checkpoint beside its tensors: its manifest, the family file kept with it, and
the family of a config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.errors import MappingError, SourceError
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.mapping import MappingFile
from mckpt.storage.files import read_file
from mckpt.storage.staging import MANIFEST


def download_hint(path: Path) -> str:
    """Returns how to get a model whose name on the Hugging Face hub this may be; nothing for what
    looks like a path.
    """
    name = str(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) or path.parent.exists():
        return ""
    return (
        f"; a model of that name on the Hugging Face hub is fetched with `hf download {name}"
        f" --local-dir {path.name}`"
    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns a directory's mckpt.json; {} if there is none."""
    path = directory / MANIFEST
    if not path.exists():
        return {}
    try:
        found = json.loads(read_file(path, 1 << 28))
    except ValueError as e:
        raise SourceError(f"{path}: not valid JSON: {e}") from None
    return found if isinstance(found, dict) else {}


def kept_mapping(directory: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Returns the family file kept in a directory, if any.

    MappingError if it is not the one that the checkpoint's manifest names.
    """
    path, recorded = directory / MAPPING, manifest.get("mapping_file")
    wanted = recorded.get("digest") if isinstance(recorded, dict) else None
    cure = "put back the file with which the checkpoint was made, or give --mapping FILE"
    if not path.is_file():
        if wanted is not None and directory.is_dir():
            raise MappingError(
                f"{path}: is not there, and {MANIFEST} names it with the digest {wanted}; {cure}"
            )
        return None
    found = mapping.digest_of(read_file(path, 1 << 24).decode("utf-8", "replace"))
    if wanted not in (None, found):
        raise MappingError(
            f"{path}: has the digest {found}, and {MANIFEST} names it with {wanted}; {cure}"
        )
    return path


def family_for(config: Mapping[str, Any], named: str | None, where: str) -> MappingFile:
    """The family that is `named`, or the one that the config's architectures have."""
    if named:
        return mapping.load("hf", named)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise MappingError(
            f"{where}: names no architectures; give --family with one of"
            f" {', '.join(mapping.names('hf'))}"
        )
    try:
        return mapping.load("hf", mapping.family_with(str(architectures[0])))
    except MappingError as e:
        raise MappingError(f"{where}: {e}") from None
