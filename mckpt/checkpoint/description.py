"""Reads the descriptions of a checkpoint that are stored beside its tensors: its manifest, its
family file, and a config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.formats.hf_config import CONFIG, read_config
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.mapping import Dims, MappingFile
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
    found = [
        text
        for text in changed_files(directory, manifest)
        if "is missing" in text or not text.partition(": has ")[0].endswith(TEXTS)
    ]
    if found:
        raise SourceError.of(
            f"{directory}: is not as mckpt wrote it:",
            found,
            "Copy it again; if you changed or removed a file on purpose, remove its name from the"
            f" `files` of {MANIFEST}.",
        )


def refuse_changed_side(directory: Path, recorded: Mapping[str, Any]) -> None:
    """Raises SourceError if a file that is copied beside weights is not as mckpt wrote it.

    recorded: the entries of a manifest on the files of the directory, by name.
    """
    found = changed_files(directory, {"files": recorded})
    if not found:
        for name, facts in recorded.items():
            kind, _, stated = facts["checksum"].partition(":")
            if stated and (own := checksum_of(directory / name, kind)) != facts["checksum"]:
                found.append(f"{directory / name}: has the checksum {own}, not {kind}:{stated}")
    if found:
        raise SourceError.of(
            f"{directory}: is not as mckpt wrote it:",
            found,
            "Copy it again; if you changed or removed a file on purpose, remove its name from"
            f" {MANIFEST}, which records it.",
        )


def kept_mapping(directory: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Returns the family file kept in a directory, if any.

    Raises MappingError if it is not the one that the checkpoint's manifest names.
    """
    path = directory / MAPPING
    wanted = (manifest.get("mapping_file") or {}).get("digest")
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
        return mapping.with_head(family, architecture, keys, form)
    except MappingError as e:
        raise MappingError(f"{where}: {e}") from None


def family_hint(described: Path | None, option: str, given: str | None) -> str:
    """Returns the cure if the user named another family than a config.json does, else ""."""
    named = read_config(described).get("architectures") if described and given else None
    if not isinstance(named, list) or not named:
        return ""
    try:
        family = mapping.family_with(str(named[0]))
    except MappingError:
        return ""
    if family == given:
        return ""
    return (
        f"{option} {given} was given, but config.json has the architecture {named[0]}, which is"
        f" family {family}: leave out {option} {given}."
    )


def contradiction(
    path: Path,
    family: MappingFile,
    apart: Mapping[str, Any],
    plain: Mapping[str, Any],
    why: str,
    sized: Sequence[str],
) -> MappingError:
    """Returns the error for dims that the user and the config.json in `path` set differently.

    apart: the user's dims. plain: the dims of config.json. why: the reason not to use the user's.
    sized: dims that come from --vocab-size, not from --set.
    """
    config, lines, options = read_config(path), [], []
    for name, value in apart.items():
        options.append(f"--vocab-size {value}" if name in sized else f"--set {name}={value}")
        keys = family.keys_of(name, config) or {name: plain[name]}
        said = ", ".join(f"{key} is {v!r}" for key, v in keys.items())
        lines.append(f"{options[-1]}: in config.json {said}, and {why}")
    error = MappingError.of(
        f"{path / CONFIG} contradicts the command line:",
        lines,
        f"Leave out {', '.join(options)}; if config.json is wrong, correct it there.",
    )
    assert isinstance(error, MappingError)
    return error


def unstored(
    family: MappingFile, config: Mapping[str, Any], keys: Collection[str]
) -> dict[str, Any]:
    """Returns the neutral value of each dim whose tensor is not among the stored keys, unless the
    config has that value already.
    """
    found: dict[str, Any] = {}
    for name, spec in family.dims.items():
        neutral = mapping.schema().dims[name].neutral
        if spec.tensor and spec.tensor not in keys and (spec.has_const or neutral is not None):
            value = neutral({}) if neutral is not None and not spec.has_const else spec.const
            said = family.keys_of(name, config).values()
            if not said or any(v != value for v in said):
                found[name] = value
    return found


def overruled(
    family: MappingFile, config: Mapping[str, Any], name: str, value: Any, tensor: str | None
) -> str:
    """Returns the note on a dim that is not read from config.json.

    tensor: the stored key whose absence decides the dim; None if the user gave the value.
    """
    said = ", ".join(f"{k} {v!r}" for k, v in family.keys_of(name, config).items())
    if tensor is not None:
        return (
            f"{name}: config.json has {said or 'no key for it'}; {value!r} is used, because the"
            f" tensor {tensor} is not there"
        )
    return (
        f"{name}: config.json has {said}; the value of --set, {value!r}, is used, because the"
        " tensors agree with it"
    )


def require_vocab_size(
    root: Path,
    dialect: MappingFile,
    args: Mapping[str, Any],
    known: Mapping[str, Any],
    said: Mapping[str, Any],
) -> None:
    """Raises VocabSizeUnknown if neither the args of a checkpoint nor another source contains its
    unpadded vocab_size.
    """
    if dialect.keys_of("vocab_size", args) or "vocab_size" in {**known, **said}:
        return
    padded = args.get("padded_vocab_size")
    raise VocabSizeUnknown(
        f"{root}: its args do not contain the unpadded vocab_size"
        + (f", only the padded {padded}" if padded else "")
        + "; give --vocab-size N (the tokenizer may be shorter than the model's), or"
        " --like HF_DIR"
    )


def completed(root: Path, known: Mapping[str, Any]) -> Dims:
    """Returns the known dims of a checkpoint without args, and the neutral values of all others.

    Raises UsageError, which names the dims that have no neutral value.
    """
    dims = mapping.schema().dims
    missing = [n for n, dim in dims.items() if n not in known and dim.neutral is None]
    if missing:
        raise UsageError(
            f"{root}: has no args, so nothing says its {', '.join(missing)}; give --like"
            " HF_DIR, a directory whose config.json does"
        )
    neutral = {
        n: dim.neutral(known)
        for n, dim in dims.items()
        if n not in known and dim.neutral is not None
    }
    return {**known, **neutral}
