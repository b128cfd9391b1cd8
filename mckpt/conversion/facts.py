"""Collects everything that determines the output of a plan, for its digest and manifest."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import __version__, mapping
from mckpt.checkpoint.checkpoint import Checkpoint, VocabSizeUnknown
from mckpt.conversion.refusals import refuse_casts
from mckpt.conversion.target import Target
from mckpt.formats.base import dtypes_of
from mckpt.mapping import MappingFile
from mckpt.values import dtypes, quantisation


def kinds_of(source: Checkpoint, target: Target) -> tuple[dict[str, str], str]:
    """Returns the dtype of each logical tensor in the target, and the dtype of most bytes."""
    if target.dtype is not None:
        wanted = dtypes.parse(target.dtype)
        refuse_casts(source, target.dtype)
        return dict.fromkeys(source.layout.shapes, wanted), wanted
    kinds = dtypes_of(source.layout)
    weight: dict[str, int] = {}
    for s in source.layout.stored:
        weight[s.dtype] = weight.get(s.dtype, 0) + s.numel * len(s) * dtypes.itemsize(s.dtype)
    return kinds, max(weight, key=lambda d: weight[d])


def most_dtype(source: Checkpoint) -> str:
    """Returns the dtype of most of a checkpoint's bytes."""
    return kinds_of(source, Target())[1]


def mapping_to_keep(source: Checkpoint) -> tuple[str, bytes] | None:
    """Returns the name and content of the user's family file, as it is kept beside a model."""
    name = source.named.mapping
    return None if name is None else (Path(name).name, mapping.to_keep(name).encode())


def named_by_user(source: Checkpoint, kept: bool) -> dict[str, Any]:
    """Returns the manifest's entry on the family that the user named. A family file is recorded if
    it is `kept` beside the checkpoint.
    """
    file = mapping_to_keep(source) if kept else None
    if file is not None:
        return {"mapping_file": {"name": file[0], "digest": mapping.digest_of(file[1].decode())}}
    return {"family": source.named.family} if source.named.family else {}


def facts_of(
    source: Checkpoint,
    moved: Checkpoint,
    target: Target,
    file: MappingFile,
    inexact: Mapping[str, str],
    notes: list[str],
    **more: Any,
) -> dict[str, Any]:
    """Returns everything that determines the output, without time, host or path."""
    headers = hashlib.sha256()
    for s in moved.layout.stored:
        for a in (s.file, s.at, s.layer, s.expert, *([s.scales.grids] if s.scales else [])):
            headers.update(np.ascontiguousarray(a).tobytes())
        headers.update(f"{s.key} {s.stored_as} {s.shape}".encode())
    return {
        "mckpt": __version__,
        "source": {
            "format": source.format,
            "layout": headers.hexdigest(),
            "mapping": {"name": source.mapping.name, "digest": source.mapping.digest},
            "files": [
                {"name": Path(f).name, "bytes": os.stat(f).st_size} for f in moved.layout.files
            ],
        },
        "mapping": {"name": file.name, "digest": file.digest, "logical": mapping.hub().digest},
        "dims": (
            {
                k: list(v) if isinstance(v, tuple) else v
                for k, v in moved.dims.items()
                if k != "vocab_size"
            }
            | ({} if (true := true_vocab(source)) is None else {"vocab_size": true})
        ),
        "format": target.format,
        "dtype": target.dtype,
        "casts": [*source.casts, *([dtypes.parse(target.dtype)] if target.dtype else [])],
        "inexact": dict(inexact),
        "notes": [*source.notes, *notes],
        **more,
    }


def dequantised(source: Checkpoint) -> list[str]:
    """Returns notes on the quantised tensors of the source, one for each encoding and block."""
    forms: Counter[str] = Counter()
    for s in source.layout.stored:
        if s.scales:
            forms[s.scales.said] += len(s)
    return [
        f"{num:,} tensors are {said}, and are dequantised to {quantisation.VALUES}"
        for said, num in forms.items()
    ]


def true_vocab(source: Checkpoint) -> int | None:
    try:
        return int(source.dims["vocab_size"])
    except VocabSizeUnknown:
        return None
