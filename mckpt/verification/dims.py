"""Compares the dims that a config.json and Megatron's args say."""

from __future__ import annotations

import math
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError
from mckpt.mapping import Dims

# not compared: vocab_size may be padded, and max_positions does not change the result
BOUNDS = ("vocab_size", "max_positions")


def dims_apart(left: Checkpoint, right: Checkpoint) -> list[dict[str, Any]]:
    """Dims that two checkpoints of any formats say differently; those of the vocabulary's padding
    and longest sequence left out.
    """
    both = [name for name in left.dims if name in right.dims and name not in BOUNDS]
    apart = [name for name in both if not _same(left.dims[name], right.dims[name])]
    return [
        {"dim": n, "arg": n, "hf": _plain(left.dims[n]), "megatron": _plain(right.dims[n])}
        for n in apart
    ]


def model_notes(left: Checkpoint, right: Checkpoint) -> list[str]:
    """What is not run as it is stored; what stock Megatron would compute otherwise, though its args
    say it: the trainer here goes by the args.
    """
    found = right.mapping.inexact(left.dims)
    quantised = [
        "transformers runs on a copy of the Hugging Face side in bfloat16, dequantised by mckpt"
    ] * left.quantised
    return [
        *quantised,
        *(f"{name}: {why}; here the checkpoint's args are gone by" for name, why in found.items()),
    ]


def differing_dims(
    left: Checkpoint, right: Checkpoint, window: bool = False
) -> tuple[list[dict[str, Any]], str | None]:
    """Dims that the Megatron args and the config say differently; and why the args could not be
    read, if so.

    A sliding `window` is left out where a sequence beyond it is run.
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
    """Sentences on the dims that --allow-inexact let a conversion write otherwise than its source
    has them.
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
    """The dims that a Megatron checkpoint's args say by themselves; and why they could not be read,
    if so.
    """
    assert right.args is not None
    try:
        return (
            right.mapping.read(right.args, {}, f"args of {right.path}", {"vocab_size": vocab_size}),
            None,
        )
    except MckptError as e:
        return {}, str(e)


def _written(right: Checkpoint) -> Dims:
    """The values that args say for dims that --allow-inexact let pass: those of a dialect that
    writes the true dims and reads them again.
    """
    if not right.granted:
        return {}
    dialect = right.mapping
    dims = {**right.dims, **right.granted}
    again = dialect.read(dialect.write(dims), {}, "args", {"vocab_size": dims["vocab_size"]})
    return {name: again[name] for name in right.granted if name not in BOUNDS}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)
    return bool(_plain(a) == _plain(b))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value
