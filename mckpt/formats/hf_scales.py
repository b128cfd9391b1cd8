"""The 8-bit weights of a Hugging Face directory, and the scales that each of them has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mckpt.containers.entries import Entries, Kind
from mckpt.formats.base import Problems
from mckpt.formats.hf_config import QUANTISED
from mckpt.geometry.box import Piece, Scales, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Rule
from mckpt.values import quantisation

SCALES = "_scale_inv"  # what a quantised weight's key has more in the key of its scales


@dataclass(frozen=True)
class Quantised:
    """Weights of one rule and one kind, whose values are 8-bit floats."""

    entries: Entries  # of all tensors
    files: list[str]  # their paths
    kind: Kind
    names: list[str]  # for each weight, the key of its scales
    rows: np.ndarray  # and their row in `entries`
    block: tuple[int, int] | None  # rows and columns that share a scale

    def stored(
        self, rule: Rule, pieces: tuple[Piece, ...], where: np.ndarray, problems: Problems
    ) -> list[Stored]:
        """Returns the weights with their scales, as stored tensors of dequantised values.

        where: as in `stored_of`.
        """
        if self.block is None or len(self.kind.shape) != 2:
            self._without_blocks(problems)
            return []
        fit = self._with_fitting_scales(self.block, problems)
        self._check_dense(fit, problems)
        out = []
        for number, dtype in enumerate(quantisation.SCALES):
            alike = fit & self.entries.are(
                self.rows, [s.dtype == dtype for s in self.entries.kinds]
            )
            if alike.any():
                layers, experts, files, ats = where[:, alike]
                grids = self._grids(self.block, ats, self.rows[alike], number)
                out.append(
                    Stored(
                        rule.key,
                        quantisation.VALUES,
                        self.kind.shape,
                        pieces,
                        layers.astype("i4"),
                        experts.astype("i4"),
                        files.astype("i4"),
                        ats,
                        replica=rule.alias,
                        scales=Scales(self.kind.dtype, grids),
                    )
                )
        return out

    def _without_blocks(self, problems: Problems) -> None:
        """Reports every weight: config.json gives no blocks for them."""
        lacks = (
            "no weight_block_size (two numbers)"
            if self.block is None
            else f"blocks of {self.block[0]} x {self.block[1]}, and this is no matrix"
        )
        says = f"{QUANTISED} of config.json says {lacks}: dequantise it first"
        problems.extend(f"{self._held(name)} and {says}" for name in self.names)
        problems.damaged = True

    def _with_fitting_scales(self, block: tuple[int, int], problems: Problems) -> np.ndarray:
        """Returns a mask of the weights whose scales have the shape of its blocks and a dtype of
        scales; reports the others.
        """
        wanted = tuple(-(-n // b) for n, b in zip(self.kind.shape, block, strict=True))
        fit = self.entries.are(
            self.rows,
            [s.shape == wanted and s.dtype in quantisation.SCALES for s in self.entries.kinds],
        )
        for i in np.flatnonzero(~fit).tolist():
            name = self.names[i]
            if (scales := self.entries.get(name)) is None:
                problems.missing(
                    f"{self._held(name)} and {name} {list(wanted)} is missing: find the file that"
                    " has it, or dequantise the model"
                )
                continue
            file = Path(self.files[scales.file]).name
            if scales.shape != wanted:
                problems.missing(
                    f"{name} is {list(scales.shape)} in {file}, and should be {list(wanted)}:"
                    f" {_weight(name)} is {list(self.kind.shape)}, in blocks of {block[0]} x"
                    f" {block[1]}"
                )
            else:
                problems.missing(
                    f"{name} holds {scales.dtype} in {file}, and scales are"
                    f" {', '.join(quantisation.SCALES)}"
                )
        return fit

    def _check_dense(self, fit: np.ndarray, problems: Problems) -> None:
        """Reports those of the weights `fit` that are views with strides, or whose scales are."""
        strided = fit & self.entries.are(
            self.rows, [(s.strides or self.kind.strides) is not None for s in self.entries.kinds]
        )
        at = np.flatnonzero(strided).tolist()
        problems.extend(
            f"{self._held(self.names[i])} and it or its scales are a view with strides; save both"
            " as dense tensors"
            for i in at
        )
        problems.damaged |= bool(at)

    def _grids(
        self, block: tuple[int, int], ats: np.ndarray, rows: np.ndarray, number: int
    ) -> np.ndarray:
        """Returns one quantisation.Grid for each weight.

        ats: the bytes of the weights. rows: those of their scales in `entries`. number: of the
        scales' dtype.
        """
        # no block, however large it is said to be, is larger than the weight
        height, width = map(min, block, self.kind.shape)
        entries = self.entries
        file, at = entries.file[rows], entries.at[rows]
        grid = (ats, self.kind.shape[1], height, width, file, at, number)
        return np.stack(np.broadcast_arrays(*grid), 1)

    def _held(self, name: str) -> str:
        """Returns the start of a message on the weight that has scales of this name."""
        return f"{_weight(name)} {list(self.kind.shape)} holds {self.kind.dtype},"


def _weight(name: str) -> str:
    """Returns the key of the weight that has scales of this name."""
    return name.removesuffix(SCALES)
