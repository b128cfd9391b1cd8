"""Values that are drawn: each from the seed, the name of its tensor and its index alone.

    u = SplitMix64 of start + index * GOLDEN, as a number of 0 .. 1

So each box of a tensor has the same bits, whatever is drawn before it, and on which thread.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.adding import WIDTH, Lengths, Read
from mckpt.values.dtypes import cast, pieces

GOLDEN = 0x9E3779B97F4A7C15
# the values between low and high: evenly; the logarithms of such; and the numbers of which softplus
# is between both, evenly by its logarithm
UNIFORM, LOG, SOFTPLUS = range(3)


def uniform(start: int, index: np.ndarray) -> np.ndarray:
    """Returns a number of 0 .. 1 for each index: SplitMix64, scrambled once more."""
    counter = index.astype("u8") * np.uint64(GOLDEN) + np.uint64(start % (1 << 64))
    return (scrambled(scrambled(counter)) >> np.uint64(11)) * 2.0**-53


def scrambled(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Draw(NamedTuple):
    """The values of a tensor that lies row-major from the first byte of its file on."""

    start: int  # of the counter
    kind: int  # UNIFORM, LOG or SOFTPLUS
    low: float
    high: float

    @classmethod
    def named(cls, seed: int, name: str, kind: int, low: float, high: float) -> Draw:
        """Returns the values of the tensor with this name."""
        key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(key, "little", signed=True), kind, low, high)

    @property
    def files(self) -> set[int]:
        return set()

    def fill(
        self,
        base: np.ndarray,
        out: np.ndarray,
        place: tuple[int, int, int],
        read: Read,
        lengths: Lengths,
        offset: float,
    ) -> None:
        """Fills `out` [m, n] with the values of the elements at `place`, computed in float64,
        rounded to float32, and once more to the dtype of `out`. base: has zeros in their place.
        """
        at, pitch, step = (number // base.itemsize for number in place)
        for part in pieces(*out.shape):
            rows, columns = (np.arange(n)[s] for n, s in zip(out.shape, part, strict=True))
            u = uniform(self.start, at + rows[:, None] * pitch + columns * step)
            low, high = (np.log(x) if self.kind == SOFTPLUS else x for x in self[2:])
            value = low + u * (high - low)
            if self.kind == SOFTPLUS:
                value = np.exp(value)
                value += np.log(-np.expm1(-value))
            elif self.kind == LOG:
                value = np.log(value)
            cast(value.astype("f4") + np.float32(offset), out[part])

    def words(self) -> list[int]:
        """Returns the numbers of `of`, [WIDTH]."""
        bits = np.array(self[2:], "f8").view("i8").tolist()
        return [*self[:2], *bits] + [0] * (WIDTH - 4)

    @classmethod
    def of(cls, words: np.ndarray) -> Draw:
        """Returns the values of their numbers, the first row of [rows, WIDTH]."""
        return cls(*words[0, :2].tolist(), *words[0, 2:4].view("f8").tolist())
