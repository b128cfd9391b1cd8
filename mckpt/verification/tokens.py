"""The sequences of tokens on which two models are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mckpt.errors import UsageError
from mckpt.mapping import Dims, MappingFile

LONGEST_WINDOW = 8192  # a sliding window beyond this is not filled


def random_sequences(
    dims: Dims, count: int, length: int, instead: Mapping[int, int]
) -> list[list[int]]:
    """Returns random tokens from fixed seeds over the whole vocabulary. The first sequence is
    longer than a sliding window.

    instead: tokens that must not occur, and the token to take for each.
    """
    length = max(2, min(length, dims["max_positions"] or length))
    lengths = [length] * count
    window = dims.get("sliding_window")
    if window and length <= window < LONGEST_WINDOW:
        lengths[0] = min(window + window // 4 + 1, dims["max_positions"] or LONGEST_WINDOW)
    drawn = [
        np.random.RandomState(seed).randint(0, dims["vocab_size"], n).tolist()
        for seed, n in enumerate(lengths)
    ]
    return [[instead.get(token, token) for token in tokens] for tokens in drawn]


def text_for(family: MappingFile, config: Mapping[str, Any]) -> dict[int, int]:
    """Returns for each placeholder in a config, such as the token of an image, a token of text to
    use instead. The text model never reads a placeholder.
    """
    found = (family.lookup(config, key) for key in family.placeholders)
    placeholders = [token for token in found if isinstance(token, int)]
    free = min(set(range(len(placeholders) + 1)).difference(placeholders))
    return dict.fromkeys(placeholders, free)


def read_tokens(path: str | Path | None, vocab_size: int) -> list[list[int]]:
    """Reads the sequences of a file: JSON, a list of lists; JSON lines, a list or {"tokens": [...]}
    each; or .npy [sequences, length].
    """
    if path is None:
        return []
    try:
        if str(path).endswith(".npy"):
            found = np.load(path).tolist()
        else:
            text = Path(path).read_text()
            try:
                found = json.loads(text)
            except ValueError:
                found = [json.loads(line) for line in text.splitlines() if line.strip()]
            if isinstance(found, dict) or (found and not isinstance(found[0], (list, dict))):
                found = [found]  # one line
        rows = [row["tokens"] if isinstance(row, dict) else row for row in found]
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (EOFError, ValueError, KeyError, TypeError) as e:
        raise UsageError(
            f"{path}: expected one JSON list of token ids per line, or a .npy file: {e}"
        ) from None
    for number, row in enumerate(rows, 1):
        wrong = (
            not isinstance(row, list)
            or len(row) < 2
            or any(type(t) is not int or not 0 <= t < vocab_size for t in row)
        )
        if wrong:
            raise UsageError(
                f"{path}: sequence {number} must be at least 2 whole numbers from 0 to"
                f" {vocab_size - 1:,}"
            )
    return rows
