"""Joins two layouts over logical boxes into a plan: which bytes go where, and the proof that each is written once."""

from __future__ import annotations

import numpy as np

# One copy: `rows` rows of `run` elements, a pitch apart on either side; a step is the distance of neighbouring elements in a row.
# 2-D and affine on both sides, so it covers shards of columns, interleaving and transposes. 70 bytes.
COPY = np.dtype(
    [
        ("tensor", "i4"),  # copies of one number move parts of one logical tensor, so one staging pass can serve them all
        ("src_file", "i4"),
        ("dst_file", "i4"),
        ("cast", "u2"),  # index into Plan.casts: (source dtype, target dtype)
        ("rows", "i8"),
        ("run", "i8"),  # elements
        ("src_at", "i8"),  # bytes from here on
        ("dst_at", "i8"),
        ("src_pitch", "i8"),
        ("dst_pitch", "i8"),
        ("src_step", "i4"),
        ("dst_step", "i4"),
    ]
)
