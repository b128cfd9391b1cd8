"""Collects everything that determines the output of a plan, for its digest and manifest."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.conversion.refusals import refuse_casts
from mckpt.conversion.target import TargetOptions
from mckpt.errors import counted
from mckpt.formats import carried
from mckpt.formats.base import dtypes_of
from mckpt.formats.megatron.optimizer import holds_state, is_state
from mckpt.geometry.join import Joined
from mckpt.mapping import MappingFile
from mckpt.values import dtypes, quantisation
from mckpt.version import __version__


def dtypes_of_target(source: Checkpoint, target: TargetOptions) -> tuple[dict[str, str], str]:
    """Returns the dtype of each logical tensor in the target, and the dtype of most bytes."""
    if target.dtype is not None:
        wanted = dtypes.parse(target.dtype)
        refuse_casts(source, target.dtype)
        names = {p.tensor for s in source.layout.stored if not s.carried for p in s.pieces}
        cast = {name: wanted for name in names if not is_state(name)}
        return cast | _states(source), wanted
    kinds = dtypes_of(source.layout)
    weight: dict[str, int] = {}
    for s in (s for s in source.layout.stored if not (s.carried or holds_state(s))):
        weight[s.dtype] = weight.get(s.dtype, 0) + s.numel * len(s) * dtypes.itemsize(s.dtype)
    return kinds, max(weight, key=lambda d: weight[d])


def _states(source: Checkpoint) -> dict[str, str]:
    """Returns the dtypes of the optimizer's states, which --dtype does not cast."""
    stored = [s for s in source.layout.stored if holds_state(s)]
    return dtypes_of(replace(source.layout, stored=stored))


def most_dtype(source: Checkpoint) -> str:
    """Returns the dtype of most of a checkpoint's bytes."""
    return dtypes_of_target(source, TargetOptions())[1]


def mapping_to_keep(source: Checkpoint) -> tuple[str, bytes] | None:
    """Returns the name and content of the user's family file, as it is kept beside a model."""
    name = source.model.options.mapping
    return None if name is None else (Path(name).name, mapping.to_keep(name).encode())


def named_by_user(source: Checkpoint, kept: bool) -> dict[str, Any]:
    """Returns the manifest's entry on the family that the user named. A family file is recorded if
    it is `kept` beside the checkpoint.
    """
    file = mapping_to_keep(source) if kept else None
    if file is not None:
        return {"mapping_file": {"name": file[0], "digest": mapping.digest_of(file[1].decode())}}
    return {"family": source.model.options.family} if source.model.options.family else {}


def facts_of(
    source: Checkpoint,
    moved: Checkpoint,
    target: TargetOptions,
    file: MappingFile,
    inexact: Mapping[str, str],
    notes: list[str],
    **more: Any,
) -> dict[str, Any]:
    """Returns everything that determines the output, without time, host or path."""
    headers = hashlib.sha256()
    for s in moved.layout.stored:
        scales = [s.scales.grids] if s.scales else []
        for a in (s.file, s.at, s.layer, s.expert, *scales, *s.added.values()):
            headers.update(np.ascontiguousarray(a).tobytes())
        headers.update(f"{s.key} {s.stored_as} {s.shape}".encode())
    unchanged, merging = carried.of(moved.layout), source.merging
    return {
        "mckpt": __version__,
        "source": {
            "format": source.format,
            "layout": headers.hexdigest(),
            "mapping": {"name": source.mapping.name, "digest": source.mapping.digest},
            **({"iteration": at} if (at := source.files.iteration) is not None else {}),
            "files": [
                {"name": Path(f).name, "bytes": os.stat(f).st_size} for f in moved.layout.files
            ],
        },
        "mapping": {"name": file.name, "digest": file.digest, "logical": mapping.schema().digest},
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
        "casts": [*source.files.casts, *([dtypes.parse(target.dtype)] if target.dtype else [])],
        "inexact": dict(inexact),
        **({"carried": carried.facts(unchanged)} if unchanged else {}),
        **({"adapter": merging.facts} if merging else {}),
        "notes": [*source.model.notes, *(_merge_notes(merging.facts) if merging else []), *notes],
        **more,
    }


def _merge_notes(merges: Mapping[str, Any]) -> list[str]:
    """Returns a note on the adapter that is merged. merges: its entry in the manifest."""
    replaced = f"; {counted(merges['replaced'], 'tensor')} of it replace the base's"
    return [
        f"an adapter of {counted(merges['modules'], 'module')} is merged: its products are added in"
        f" float32, and each sum is rounded once{replaced * bool(merges['replaced'])}"
    ]


def offset_notes(joined: Joined) -> list[str]:
    """Returns notes on the tensors that one side stores with a number added to each value."""
    out = []
    for number, cast in enumerate(joined.casts):
        if cast.offset:
            copies = joined.copies[joined.copies["cast"] == number]
            elements = int((copies["rows"] * copies["run"]).sum())
            name = joined.name(int(copies["tensor"][0]))
            out.append(
                f"{elements:,} elements, such as those of {name}, are stored as the sum of the"
                f" value and {cast.offset:g}, rounded to {cast.target}. Weights of a norm from 0.5"
                " to 256 are exact; smaller ones lose their last bits"
            )
    return out


def quantised_notes(source: Checkpoint) -> list[str]:
    """Returns notes on the quantised tensors of the source, one for each encoding and block."""
    forms: Counter[str] = Counter()
    for s in source.layout.stored:
        if s.scales:
            forms[s.scales.description] += len(s)
    return [
        f"{num:,} tensors are {encoding}, and are dequantised to {quantisation.VALUES}"
        for encoding, num in forms.items()
    ]


def form_of(source: Checkpoint, family: MappingFile) -> str | None:
    """Returns the form of the family in which the source's tensors have their names, or had them in
    the directory that it was made of; None for a family without forms.
    """
    keys = [carried.key_of(s) for s in carried.of(source.layout)]
    known = source.files.manifest if source.is_megatron else source.names.choices
    return family.form_of(keys, known.get("form"))


def text_notes(source: Checkpoint) -> list[str]:
    """Returns notes on a source of which Megatron's model is a part, the one that computes text."""
    if (family := source.model.family) is None:
        return []
    if not carried.of(source.layout):
        return list(family.notes)
    named = form_of(source, family)
    form = family.form({} if named is None else {"form": named})
    text = (
        ", and Megatron's model is the text model: it computes text, and no images, video or audio"
    )
    return [
        f"the tensors {', '.join(form.carried)} are carried in hf/{carried.FILES}"
        f"{'' if family.head else text}",
        *family.notes,
    ]


def true_vocab(source: Checkpoint) -> int | None:
    try:
        return int(source.dims["vocab_size"])
    except VocabSizeUnknown:
        return None
