"""The quantised weights of a Hugging Face directory, and the scales that each of them has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from mckpt.containers.entries import Entries
from mckpt.formats.base import Problems
from mckpt.formats.hf_encodings import Quantisation, Scheme
from mckpt.geometry.box import Piece, Scales, Stored, restride
from mckpt.lazy import numpy as np
from mckpt.mapping import Rule
from mckpt.values import dtypes, quantisation
from mckpt.values.quantisation import Grid

WHOLE = dtypes.itemsize("float32")  # bytes of the scale of a whole weight


class Weights(NamedTuple):
    """The weights of one rule."""

    rule: Rule
    keys: list[str]
    layers: np.ndarray
    experts: np.ndarray
    axes: tuple[int, ...]  # [experts] if one tensor holds all of them, else []
    shape: tuple[int, ...]  # of a weight without these axes
    pieces: tuple[Piece, ...]  # of a weight

    @property
    def reported(self) -> list[int]:
        """Returns the weights to report problems of: of a tensor of all experts, the first one."""
        return np.flatnonzero((self.experts == 0) | (not self.axes)).tolist()


class QuantisedTensors(Struct, frozen=True):
    """All tensors of a directory, some of which hold elements and scales of quantised weights."""

    entries: Entries
    files: list[str]  # their paths
    quantisation: Quantisation
    problems: Problems

    def rows_of(self, keys: list[str]) -> list[tuple[Scheme, np.ndarray, np.ndarray]]:
        """Returns the forms in which some of these weights are quantised, for each a mask of them
        and the rows in `entries` of their elements.
        """
        out = []
        schemes = self.quantisation.schemes
        several = len(schemes) > 1 and not self.quantisation.by_dtype
        chosen = [self.quantisation.scheme_of(key) for key in keys] if several else []
        for scheme in schemes:
            rows = self.entries.rows(keys if not scheme.codes else (k + scheme.codes for k in keys))
            kinds = self.entries.kinds
            which = self.entries.are(
                rows, [bool(scheme.codes) or k.dtype == scheme.encoding.dtype for k in kinds]
            )
            if chosen:
                which &= np.array([one == scheme for one in chosen], bool)
            if which.any():
                out.append((scheme, which, rows))
        return out

    def stored(
        self, weights: Weights, scheme: Scheme, rows: np.ndarray
    ) -> tuple[list[Stored], np.ndarray]:
        """Returns the weights with their scales, as stored tensors of dequantised values, and the
        rows in `entries` of all their scales.

        rows: those of the elements of each weight.
        """
        scale_rows = self.entries.rows([key + scheme.scales for key in weights.keys])
        whole_rows = scale_rows
        if scheme.whole:
            whole_rows = self.entries.rows([key + scheme.whole for key in weights.keys])
        known = np.concatenate([scale_rows, whole_rows])
        known = known[known >= 0]
        if len(weights.shape) != 2:
            for key, row in zip(weights.keys, rows.tolist(), strict=True):
                self.problems.missing(
                    f"{self._named(key + scheme.codes, row)}, but not a matrix, and"
                    f" {scheme.description()} is for matrices: dequantise it first"
                )
            return [], known
        shape = (weights.shape[0], weights.shape[1])
        fit = self._fit_elements(weights, scheme, shape, rows)
        grids = scheme.grids(shape)
        fit &= self._fit_scales(
            weights, scheme, scheme.scales, grids, scheme.dtypes, scale_rows, fit
        )
        if scheme.whole:
            fit &= self._fit_scales(
                weights, scheme, scheme.whole, [(), (1,)], ("float32",), whole_rows, fit
            )
        self._check_dense(weights, scheme, (rows, scale_rows, whole_rows), fit)
        pieces = weights.pieces
        matrix = scheme.stored_matrix(shape)
        if scheme.transposed:
            placed = [restride(p, shape, (1, shape[0])) for p in pieces]
            pieces = tuple(p for p in placed if p is not None)
            assert len(pieces) == len(placed), f"{weights.rule.key} has no transpose"
        out = []
        encoding = scheme.encoding
        width = matrix[1] // encoding.per_byte
        for number, dtype in enumerate(quantisation.SCALES):
            alike = fit & self.entries.are(
                scale_rows, [k.dtype == dtype for k in self.entries.kinds]
            )
            if not alike.any():
                continue
            # in a tensor of all experts, the part of each expert begins after the one before
            expert = weights.experts[alike] if weights.axes else 0
            ats = self.entries.at[rows[alike]] + expert * matrix[0] * width
            scale_ats = self.entries.at[scale_rows[alike]] + (
                expert * math.prod(grids[0]) * dtypes.itemsize(dtype)
            )
            height, across = scheme.blocks(shape)
            made = _grids(
                weight_at=ats,
                width=width,
                rows=height,
                columns=across,
                file=self.entries.file[scale_rows[alike]],
                at=scale_ats,
                kind=number,
                code=quantisation.ENCODINGS.index(encoding),
                overall=scheme.overall,
                overall_file=self.entries.file[whole_rows[alike]],
                overall_at=self.entries.at[whole_rows[alike]] + expert * WHOLE,
            )
            out.append(
                Stored(
                    weights.rule.key,
                    quantisation.VALUES,
                    matrix,
                    pieces,
                    weights.layers[alike],
                    weights.experts[alike],
                    self.entries.file[rows[alike]],
                    ats,
                    replica=weights.rule.alias,
                    scales=Scales(encoding.name, made, encoding.per_byte, scheme.description()),
                )
            )
        return out, known

    def _fit_elements(
        self, weights: Weights, scheme: Scheme, shape: tuple[int, int], rows: np.ndarray
    ) -> np.ndarray:
        """Returns a mask of the weights whose elements have the right shape and dtype; reports the
        others.
        """
        stored = scheme.shape(shape)
        wanted = None if stored is None else (*weights.axes, *stored)
        dtype = scheme.encoding.dtype
        fit = self.entries.are(
            rows, [(k.shape, k.dtype) == (wanted, dtype) for k in self.entries.kinds]
        )
        for i in weights.reported:
            if fit[i]:
                continue
            should = (
                f"should be {list(wanted)} {dtype} by config.json"
                if wanted is not None
                else f"a row of {scheme.stored_matrix(shape)[1]} elements does not fill whole words"
                f" of {scheme.encoding.name}"
            )
            key = weights.keys[i] + scheme.codes
            self.problems.missing(f"{self._named(key, int(rows[i]))}, and {should}")
        return fit

    def _fit_scales(
        self,
        weights: Weights,
        scheme: Scheme,
        suffix: str,
        grids: list[tuple[int, ...]],
        allowed: tuple[str, ...],
        rows: np.ndarray,
        of: np.ndarray,
    ) -> np.ndarray:
        """Returns a mask of the weights whose scales have a right shape and dtype; reports the
        others of the weights `of`.

        suffix: of the keys of these scales. grids: the shapes that they may have for one weight.
        allowed: their dtypes. rows: those of the scales.
        """
        wanted = [(*weights.axes, *grid) for grid in grids]
        kinds = self.entries.kinds
        fit = self.entries.are(rows, [k.shape in wanted and k.dtype in allowed for k in kinds])
        for i in weights.reported:
            if fit[i] or not of[i]:
                continue
            key = weights.keys[i]
            name, codes = key + suffix, key + scheme.codes
            what = f"{codes} {list(weights.axes + weights.shape)} is {scheme.description()}"
            if rows[i] < 0:
                self.problems.missing(
                    f"{what}, and {name} {list(wanted[0])} is missing: find the file that has it,"
                    " or dequantise the model"
                )
                continue
            scales = self.entries.entry(int(rows[i]))
            file = Path(self.files[scales.file]).name
            self.problems.missing(
                f"{name} is {list(scales.shape)} in {file}, and should be {list(wanted[0])}: {what}"
                if scales.shape not in wanted
                else f"{name} holds {scales.dtype} in {file}, and these scales are"
                f" {', '.join(allowed)}"
            )
        return fit

    def _check_dense(
        self,
        weights: Weights,
        scheme: Scheme,
        rows: Sequence[np.ndarray],
        fit: np.ndarray,
    ) -> None:
        """Reports the weights among `fit` that are views with strides, or whose scales are.

        rows: those of the elements, then those of the scales.
        """
        strided = [k.strides is not None for k in self.entries.kinds]
        views = fit & np.logical_or.reduce([self.entries.are(one, strided) for one in rows])
        for i in np.flatnonzero(views).tolist():
            self.problems.missing(
                f"{self._named(weights.keys[i] + scheme.codes, int(rows[0][i]))}, and it or its"
                " scales are a view with strides; save both as dense tensors"
            )

    def ignored(self, left: Iterable[str]) -> dict[str, str]:
        """Returns the tensors without a rule that belong to quantised weights, and why they are not
        used.
        """
        beside = self.quantisation.beside
        return {key: why for key in left for suffix, why in beside.items() if key.endswith(suffix)}

    def weight_of(self, key: str) -> str:
        """Returns the key of the weight to which a tensor of scales or elements belongs, or the key
        itself.
        """
        for scheme in self.quantisation.schemes:
            for suffix in (scheme.whole, scheme.scales, scheme.codes):
                if suffix and key.endswith(suffix):
                    return key.removesuffix(suffix)
        return key

    def _named(self, key: str, row: int) -> str:
        """Returns the start of a message on a tensor."""
        entry = self.entries.entry(row)
        return f"{key} {list(entry.shape)} in {Path(self.files[entry.file]).name} is {entry.dtype}"


def target_scales(
    scheme: Scheme,
    shape: tuple[int, int],
    weights: np.ndarray,
    scales: tuple[np.ndarray, np.ndarray],
    whole: tuple[np.ndarray, np.ndarray],
    peers: np.ndarray,
) -> Scales:
    """Returns the scales of weights of one shape that are to be written.

    weights: the first byte of each weight. scales, whole: the files that hold the scales of its
    blocks and that of the whole weight, and their first bytes there. peers: a number that weights
    with the same scale of the whole weight have.
    """
    rows, columns = scheme.blocks(shape)
    kind = quantisation.SCALES.index(scheme.dtypes[0])
    code = quantisation.ENCODINGS.index(scheme.encoding)
    grids = _grids(
        weight_at=weights,
        width=shape[1],
        rows=rows,
        columns=columns,
        file=scales[0],
        at=scales[1],
        kind=kind,
        code=code,
        overall=scheme.overall,
        overall_file=whole[0],
        overall_at=whole[1],
        peers=peers,
    )
    return Scales(scheme.encoding.name, grids, description=scheme.description())


def _grids(**fields: Any) -> np.ndarray:
    """Returns a Grid in each row. fields: those of Grid, a number for all or an array."""
    return np.stack(np.broadcast_arrays(*Grid(**fields)), 1).astype("i8")
