"""Compares the stored values of two checkpoints, with the casts that were made on the way."""

from __future__ import annotations

import threading

from mckpt.checkpoint import comparison
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.formats import carried
from mckpt.progress import watched
from mckpt.verification.verdict import Values


def compare_values(
    left: Checkpoint, right: Checkpoint, cancel: threading.Event | None = None
) -> Values:
    """Compares all stored values of the two, the further copies of a tensor, and the padding of a
    converted vocabulary.
    """
    found = diff_converted(left, right, cancel)
    found.replicas = comparison.copies_apart((left, right), cancel)
    # which pads with zeros
    converted = right.is_megatron and right.files.from_hugging_face
    return Values(found, right.reader.padding() if converted else [])


def diff_converted(
    left: Checkpoint, right: Checkpoint, cancel: threading.Event | None = None
) -> comparison.Difference:
    """Compares a checkpoint with one that was converted from it, or the other way round.

    The manifests name the casts that were made on the way: the values must be equal to exactly
    those casts. Tensors that the mapping always stores in one dtype must be equal to that cast.
    """
    if (
        left.files.casts != right.files.casts
        and left.files.casts[: len(right.files.casts)] == right.files.casts
    ):
        return _diff_casts(right, left, cancel).swapped()
    return _diff_casts(left, right, cancel)


def _diff_casts(
    left: Checkpoint, right: Checkpoint, cancel: threading.Event | None
) -> comparison.Difference:
    made, always = casts_between(left, right), uncast(right)
    return comparison.diff(
        left,
        right,
        progress=watched(None, cancel),
        casts=lambda name: always.get(left.reader.template(name), made),
    )


def casts_between(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Returns the dtypes to which the right side was cast after it was converted from the left one,
    in order, from their manifests.
    """
    known = right.files.casts[: len(left.files.casts)] == left.files.casts
    return right.files.casts[len(left.files.casts) :] if known else []


def uncast(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Returns the logical templates that the checkpoint's mapping always stores in one dtype, and
    that dtype; and those of tensors that are carried unchanged, which have none.
    """
    always = {
        name: [rule.dtype] for rule in checkpoint.mapping.rules if rule.dtype for name in rule.of
    }
    return always | {name: list[str]() for name in carried.shapes(checkpoint.layout.stored)}
