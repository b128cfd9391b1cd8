"""What a checkpoint requires of the installed megatron-core, found out before any model runs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MappingError, MissingExtra, SourceError, UsageError
from mckpt.formats.megatron.common_state import COMMON_OBJECT_SINCE
from mckpt.formats.megatron.optimizer import FULLY_RESHARDABLE, loads_at_its_sizes
from mckpt.mapping import major_minor
from mckpt.verification.pair import run_sizes

IMPLS = ("transformer_engine", "local")  # layer specs that the trainer builds


def require_core(checkpoint: Checkpoint, as_stored: bool = True) -> None:
    """Raises an error if the trainer or the installed megatron-core cannot build the model, or read
    its args. Does not import torch.

    as_stored: False if the weights are written to another checkpoint first.
    """
    dialect, installed = checkpoint.mapping, version("megatron-core")
    if not set(IMPLS) & set(dialect.choices["transformer_impl"]):
        raise UsageError(
            f"{checkpoint.path}: holds a model from before megatron-core, which is not run here."
            " `mckpt reshard SRC DST --target-dialect DIALECT` writes it for megatron-core; `mckpt"
            " mappings list` lists the dialects"
        )
    since = _first_version(checkpoint)
    if major_minor(installed) < since:
        named = ".".join(map(str, since))
        raise MissingExtra(
            f"{checkpoint.path}: is of the dialect {dialect.name}, and megatron-core has this model"
            f" from {named} on. Here is megatron-core {installed}: pip install"
            f" 'megatron-core>={named}' (0.18 and later require Python 3.12)"
        )
    common = checkpoint.files.common
    if as_stored and common and common.as_object and major_minor(installed) < COMMON_OBJECT_SINCE:
        named = ".".join(map(str, COMMON_OBJECT_SINCE))
        raise SourceError(
            f"{checkpoint.path}: keeps its args and iteration as an object, which megatron-core"
            f" reads from {named} on, and this is megatron-core {installed}. Install {named} or"
            f" later, or write a file with `mckpt reshard {checkpoint.path} DST --common-state"
            " file`"
        )


def _first_version(checkpoint: Checkpoint) -> list[int]:
    """Returns the first megatron-core that can build the model, with any of IMPLS."""
    dialect = checkpoint.mapping
    try:
        dims = checkpoint.dims
    except MappingError:  # a fault that the verdict names
        return major_minor(dialect.megatron[0])
    entries = [
        entry.when
        for entry in dialect.warned.values()
        if not entry.loads and "megatron" in entry.when.names
    ]
    (major, oldest), (_, newest) = map(major_minor, dialect.megatron)
    facts = {**dialect.given, **dims, "pp": 1, "format": checkpoint.format}
    for minor in range(oldest, newest):
        at = [facts | {"megatron": [major, minor], "transformer_impl": impl} for impl in IMPLS]
        if not any(all(when(scope) for scope in at) for when in entries):
            return [major, minor]
    return [major, newest]


def refuse_resume(checkpoint: Checkpoint, sizes: dict[str, Any]) -> None:
    """Raises SourceError if the optimizer's state loads at other sizes than these only."""
    common, own = checkpoint.files.common, checkpoint.parallel
    marks = (common.fields.get("content_metadata") if common else None) or {}
    form, saved = marks.get("distrib_optim_sharding_type"), run_sizes(own, sizes["cp"])
    if form not in (None, FULLY_RESHARDABLE) and any(sizes[k] != n for k, n in saved.items()):
        raise loads_at_its_sizes(checkpoint.opened.root, form)
