"""Compares the dims of a config.json with those of Megatron's args."""

from __future__ import annotations

import math
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError
from mckpt.mapping import Dims

# not compared: vocab_size may be padded, and max_positions does not change the result
BOUNDS = ("vocab_size", "max_positions")


def dims_apart(left: Checkpoint, right: Checkpoint) -> list[dict[str, Any]]:
    """Returns the dims that differ between two checkpoints of any formats, without the padding of
    the vocabulary and the longest sequence.
    """
    both = [name for name in left.dims if name in right.dims and name not in BOUNDS]
    apart = [name for name in both if not _same(left.dims[name], right.dims[name])]
    return [
        {"dim": n, "arg": n, "hf": _plain(left.dims[n]), "megatron": _plain(right.dims[n])}
        for n in apart
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

    A sliding `window` is left out if a sequence longer than it is run.
    """
    if right.args is None:
        return [], None
    dialect = right.mapping
    said, unread = _said(right, left.dims["vocab_size"])
    if unread is not None:
        return [], unread
    # what the args of an inexact conversion say in place of what --allow-inexact let pass
    meant = _written(right)
    out = []
    for name, value in left.dims.items():
        other = said.get(name)
        value = meant.get(name, value)
        if name in BOUNDS or (name == "sliding_window" and not window) or _same(value, other):
            continue
        keys = dialect.dims[name].keys if name in dialect.dims else ()
        out.append(
            {
                "dim": name,
                "arg": ", ".join(keys) or name,
                "hf": _plain(value),
                "megatron": _plain(other),
            }
        )
    return out, None


def unlike_dims(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Returns sentences on the dims that --allow-inexact let a conversion write with another value
    than its source has.
    """
    if left.is_megatron or right.args is None:
        return []
    pairs = [
        (name, left.dims[name], value)
        for name, value in _written(right).items()
        if name in left.dims
    ]
    return [
        f"{name}: the config says {_plain(a)}, and the args mean {_plain(b)}: --allow-inexact"
        f" {name} was given when the checkpoint was made"
        for name, a, b in pairs
        if not _same(a, b)
    ]


def _said(right: Checkpoint, vocab_size: int) -> tuple[Dims, str | None]:
    """Returns the dims that a Megatron checkpoint's args alone determine, and the reason if they
    could not be read.
    """
    assert right.args is not None
    try:
        return (
            right.mapping.read(right.args, {}, f"args of {right.path}", {"vocab_size": vocab_size}),
            None,
        )
    except MckptError as e:
        return {}, f"{e}"


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


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)
    return bool(_plain(a) == _plain(b))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value
