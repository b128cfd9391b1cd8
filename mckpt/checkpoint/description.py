"""The descriptions of a checkpoint that are stored beside its tensors: its manifest, its family
file, a config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.mapping import MappingFile
from mckpt.storage.files import checksum_of, read_file
from mckpt.storage.staging import MANIFEST

TEXTS = (".json", ".yaml", ".txt", ".sh", ".jinja", ".md", ".py")  # files that a person may edit


class VocabSizeUnknown(UsageError):
    """The unpadded vocabulary size is not known."""


def changed_files(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each file that a manifest names and that is missing or has another
    size.
    """
    out = []
    listed = manifest.get("files")
    for name, facts in (listed or {}).items():
        path = directory / name
        if not path.is_file():
            out.append(f"{path}: is missing; {MANIFEST} names it")
        elif (size := path.stat().st_size) != facts["bytes"]:
            out.append(f"{path}: has {size:,} bytes, and {MANIFEST} states {facts['bytes']:,}")
    return out


def refuse_changed(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raises SourceError if a checkpoint lacks files that its manifest names, or if one has another
    size. A text, such as config.json, may be edited.
    """
    changed = [
        text
        for text in changed_files(directory, manifest)
        if "is missing" in text or not text.partition(": has ")[0].endswith(TEXTS)
    ]
    _refuse(directory, changed, f"the `files` of {MANIFEST}")


def refuse_changed_side(directory: Path, recorded: Mapping[str, Any]) -> None:
    """Raises SourceError if a file that is copied beside weights is not as mckpt wrote it.

    recorded: the entries of a manifest on the files of the directory, by name.
    """
    changed = changed_files(directory, {"files": recorded})
    if not changed:
        for name, facts in recorded.items():
            kind, _, stated = facts["checksum"].partition(":")
            if stated and (own := checksum_of(directory / name, kind)) != facts["checksum"]:
                changed.append(f"{directory / name}: has the checksum {own}, not {kind}:{stated}")
    _refuse(directory, changed, f"{MANIFEST}, which records it")


def _refuse(directory: Path, changed: list[str], record: str) -> None:
    if changed:
        raise SourceError.of(
            f"{directory}: is not as mckpt wrote it:",
            changed,
            "Copy it again; if you changed or removed a file on purpose, remove its name from"
            f" {record}.",
        )


def kept_mapping(directory: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Returns the family file kept in a directory, if any.

    Raises MappingError if it is not the one that the checkpoint's manifest names.
    """
    path = directory / MAPPING
    recorded = (manifest.get("mapping_file") or {}).get("digest")
    cure = "put back the file with which the checkpoint was made, or give --mapping FILE"
    if not path.is_file():
        if recorded is not None and directory.is_dir():
            raise MappingError(
                f"{path}: is not there, and {MANIFEST} names it with the digest {recorded}; {cure}"
            )
        return None
    digest = mapping.digest_of(read_file(path, 1 << 24).decode("utf-8", "replace"))
    if recorded not in (None, digest):
        raise MappingError(
            f"{path}: has the digest {digest}, and {MANIFEST} names it with {recorded}; {cure}"
        )
    return path


def family_for(
    config: Mapping[str, Any],
    named: str | None,
    where: str,
    keys: Collection[str] = (),
    form: object = None,
) -> MappingFile:
    """Returns the family that is `named`, else the one of the config's architectures, as it
    describes the model.

    keys, form: as for `mapping.with_head`.
    """
    listed = config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    if not named and not architecture:
        raise MappingError(
            f"{where}: names no architectures; give --family with one of"
            f" {', '.join(mapping.names('hf'))}"
        )
    if named:
        family = mapping.load("hf", named)
    try:
        if not named:
            family = mapping.load("hf", mapping.family_with(architecture))
        family = mapping.with_stacked_experts(family, keys)
        return mapping.with_head(family, architecture, keys, form)
    except MappingError as e:
        raise MappingError(f"{where}: {e}") from None


def unstored(
    family: MappingFile, config: Mapping[str, Any], keys: Collection[str]
) -> dict[str, Any]:
    """Returns the value of each dim whose tensor is not among the stored keys: its neutral value,
    unless the config has that already, or the one that the family gives it if the config has none.
    """
    found: dict[str, Any] = {}
    for name, spec in family.dims.items():
        neutral = mapping.schema().dims[name].neutral
        if spec.tensor is None or not family.stored_as(spec.tensor).isdisjoint(keys):
            continue
        stated = family.keys_of(name, config).values()
        if spec.unstored is not None:
            if not stated:
                found[name] = spec.unstored
        elif spec.has_const or neutral is not None:
            value = neutral({}) if neutral is not None and not spec.has_const else spec.const
            if not stated or any(v != value for v in stated):
                found[name] = value
    return found
