"""Checks before any model runs: the dims of a config.json against those of Megatron's args, and
whether the installed megatron-core can run the checkpoint.
"""

from __future__ import annotations

import itertools
import math
from importlib.metadata import version
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MappingError, MckptError, MissingExtra, SourceError, UsageError
from mckpt.formats.hf_config import read_config
from mckpt.formats.megatron.interface import COMMON_OBJECT_SINCE
from mckpt.formats.megatron.optimizer import FULLY_RESHARDABLE, loads_at_its_sizes
from mckpt.formats.megatron.run_config import description_of, read_model
from mckpt.mapping import Dims, load, major_minor, text_dialect
from mckpt.verification.pair import run_sizes

# not compared: vocab_size may be padded, and max_positions does not change the result
BOUNDS = ("vocab_size", "max_positions")


def dims_apart(left: Checkpoint, right: Checkpoint) -> list[dict[str, Any]]:
    """Returns the dims that differ between two checkpoints of any formats, without the padding of
    the vocabulary and the longest sequence.
    """
    both = [name for name in left.dims if name in right.dims and name not in BOUNDS]
    return [
        _row(name, name, left.dims[name], right.dims[name])
        for name in both
        if not _same(left.dims[name], right.dims[name])
    ]


def model_notes(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Returns notes on a model that does not run as it is stored, and on dims that stock Megatron
    computes differently although its args contain them. The trainer here follows the args.
    """
    found = right.mapping.inexact(left.dims)
    quantised = [
        "transformers runs on a copy of the Hugging Face side in bfloat16, dequantised by mckpt"
    ] * left.opened.quantised
    return [
        *quantised,
        *(f"{name}: {why}; this run follows the checkpoint's args" for name, why in found.items()),
    ]


def differing_dims(
    left: Checkpoint, right: Checkpoint, window: bool = False
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the dims that differ between the Megatron args and the config, and the reason if the
    args could not be read.

    window: also compare the sliding window. A run on a sequence that is longer than the window
    shows a difference without this.
    """
    if (args := model_args(right)) is None:
        return [], None
    vocabulary = {"vocab_size": left.dims["vocab_size"]}
    try:
        of_args = right.mapping.read(args, {}, f"args of {right.path}", vocabulary)
    except MckptError as e:
        return [], f"{e}"
    expected = {**left.dims, **_written(right)}
    skipped = BOUNDS if window else (*BOUNDS, "sliding_window")
    dims = right.mapping.dims
    return [
        _row(n, ", ".join(dims[n].keys if n in dims else ()) or n, expected[n], of_args.get(n))
        for n in left.dims
        if n not in skipped and not _same(expected[n], of_args.get(n))
    ], None


def model_args(right: Checkpoint) -> dict[str, Any] | None:
    """Returns the args of a Megatron checkpoint; None if they do not describe its model.
    Megatron-Bridge keeps no args, and those of ms-swift 4 are settings of the run.
    """
    args = right.args
    return args if args and right.mapping.keys_of("hidden_size", args) else None


def unlike_dims(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Returns sentences on the dims that --allow-inexact let a conversion write with another value
    than its source has.
    """
    if left.is_megatron or model_args(right) is None:
        return []
    return [
        f"{name}: the config says {_plain(left.dims[name])}, and the args mean {_plain(value)}:"
        f" --allow-inexact {name} was given when the checkpoint was made"
        for name, value in _written(right).items()
        if name in left.dims and not _same(left.dims[name], value)
    ]


def _written(right: Checkpoint) -> Dims:
    """Returns the values of the args for dims that --allow-inexact accepted: a dialect writes the
    true dims and reads them again.
    """
    if not right.model.accepted_dims:
        return {}
    dialect = right.mapping
    dims = {**right.dims, **right.model.accepted_dims}
    again = dialect.read(dialect.write(dims), {}, "args", {"vocab_size": dims["vocab_size"]})
    return {name: again[name] for name in right.model.accepted_dims if name not in BOUNDS}


def _row(name: str, arg: str, hf: Any, megatron: Any) -> dict[str, Any]:
    """Returns the entry of a dim that differs, as plain data."""
    return {"dim": name, "arg": arg, "hf": _plain(hf), "megatron": _plain(megatron)}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)
    return bool(_plain(a) == _plain(b))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value


def refuse_without_images(left: Checkpoint) -> None:
    """Raises UsageError for a model that reads no images."""
    if not read_config(left.path).get("vision_config"):
        raise UsageError(
            f"{left.path}: its config.json has no vision_config, so the model reads no images:"
            " leave --image out"
        )


def mrope_of(
    left: Checkpoint, right: Checkpoint
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Returns how the rotary embedding of the Megatron model takes the three positions of a token,
    and what of it differs from the config of the Hugging Face side, as `differing_dims` does.

    run_config.yaml or the args state it, else the config.json that the checkpoint keeps, else that
    of the Hugging Face side. The first part is None if none of them does.
    """
    run_config, kept = description_of(right.opened.root), right.files.hf_directory
    stated = read_model(run_config) if run_config else right.args or {}
    own, theirs = {}, {}
    for name in ("mrope_section", "mrope_interleaved"):
        keys = [f"rope_parameters.{name}", f"rope_scaling.{name}"]
        places = [place for place in (kept, left.path) if place is not None]
        found = [[left.mapping.lookup(read_config(p), key) for key in keys] for p in places]
        own[name] = next((value for value in found[-1] if value is not None), None)
        listed = [stated.get(name), *itertools.chain(*found)]
        theirs[name] = next((value for value in listed if value is not None), None)
    apart = [_row(n, n, own[n], theirs[n]) for n in own if not _same(own[n], theirs[n])]
    if (section := theirs["mrope_section"]) is None:
        return None, apart
    return {"section": list(section), "interleaved": bool(theirs["mrope_interleaved"])}, apart


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
    described = checkpoint.model.run_config_file is not None
    # a whole model has no args, and its text model runs with those of its own dialect
    text = load("megatron", text_dialect(dialect)) if dialect.whole else dialect
    if not text.has_args or (described and dialect.inexact(checkpoint.dims)):
        trainer = "Megatron-Bridge" if described else text.trainer
        raise UsageError(
            f"{checkpoint.path}: is for {trainer} alone, and the models of Megatron-Core are"
            " run here, which compute something else; `mckpt verify --level bytes` compares all"
            " values"
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
