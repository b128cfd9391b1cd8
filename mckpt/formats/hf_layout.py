"""Matches the tensors of a Hugging Face directory with the rules of its family."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.containers.entries import Entries, Kind
from mckpt.formats import carried
from mckpt.formats.base import Names, Problems, packed, shapes_of, stored_of
from mckpt.formats.hf_config import QUANTISED, quantised_by
from mckpt.formats.hf_encodings import Quantisation
from mckpt.formats.hf_quantised import QuantisedTensors, Weights
from mckpt.geometry.box import ZEROS, Layout, Stored, whole_box
from mckpt.geometry.packing import buffer
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound
from mckpt.mapping.forms import OUTER
from mckpt.mapping.schema import plain
from mckpt.values import dtypes

# dtypes of the elements of quantised weights, which have no value without scales
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8")


class Matching:
    """The tensors of one directory, and the parts of its layout that are found so far."""

    def __init__(
        self,
        root: Path,
        files: list[str],
        entries: Entries,
        config: Mapping[str, Any],
        quantisation: Quantisation,
        names: Names,
    ) -> None:
        self.files, self.entries, self.config = files, entries, config
        self.quantisation, self.names = quantisation, names
        self.family, self.scope = names.mapping, names.scope()
        self.problems = Problems(
            f"the tensors of {root} do not match its config.json (read as family"
            f" {self.family.name}):"
        )
        self.quantised = QuantisedTensors(entries, files, quantisation, self.problems)
        self.stored: list[Stored] = []
        self.used = np.zeros(len(entries.names), bool)  # the tensors that a rule names
        self.mtp_found = self.mtp_missing = 0  # tensors of multi-token prediction
        # of the rules with `absent`: how many tensors are there, and the numbers of the others
        self.kept = 0
        self.absent: list[tuple[Bound, np.ndarray]] = []

    def layout(self) -> Layout:
        """Returns the logical box that each stored tensor holds.

        Raises one error with everything that is missing, left over or of another shape.
        """
        bound = self.names.bound
        for b in bound:
            self._add_rule(b)
        files = [*self.files, *self._fill_absent()]
        form = self.family.form(self.scope)
        left = dict.fromkeys(self.entries.names[i] for i in np.flatnonzero(~self.used).tolist())
        self._add_carried([key for key in left if form.carries(key)])
        left = {key: None for key in left if not form.carries(key)}
        ignored, dropped = self._ignored(left)
        self._refuse_others(left, ignored)
        self._explain_problems()
        self.problems.check()
        shapes = {**shapes_of(bound, self.scope), **carried.shapes(self.stored)}
        return Layout(files, self.stored, shapes, ignored, dropped)

    # ------------------------------------------------------------------- tensors that a rule names

    def _add_rule(self, b: Bound) -> None:
        """Adds the tensors of one rule, quantised ones and others."""
        rule, keys, axes = b.rule, b.keys(), b.axes(self.scope)
        whole = packed(rule, self.scope)
        shape, pieces = buffer(whole, [whole_box(whole.shape)], rule.of, rule.transposed)
        rows, quantised = self.entries.rows(keys), np.zeros(len(keys), bool)
        for scheme, which, elements in self.quantised.rows_of(keys):
            at = np.flatnonzero(which)
            layers, experts = (index[at] for index in b.instances())
            named = [keys[i] for i in at.tolist()]
            weights = Weights(rule, named, layers, experts, axes, shape, pieces)
            stored, scales = self.quantised.stored(weights, scheme, elements[at])
            self.stored += stored
            self.used[elements[at]] = self.used[scales] = quantised[at] = True
        rows = np.where(quantised, -1, rows)
        there = rows >= 0
        self.used[rows[there]] = True
        if rule.mtp:
            self.mtp_found += int((quantised | there).sum())
            self.mtp_missing += 0 if rule.alias else int((~quantised & ~there).sum())
        fit = self.entries.are(rows, [kind.shape == axes + shape for kind in self.entries.kinds])
        unfit = np.flatnonzero(~fit & ~quantised)
        if rule.absent is not None:
            self.kept += int((quantised | there).sum())
            self.absent.append((b, unfit[~there[unfit]]))
            unfit = unfit[there[unfit]]
        self._report_unfit(b, unfit.tolist(), rows, axes + shape)
        here = np.flatnonzero(fit)
        rows = rows[here]
        where = np.stack(
            [
                *(index[here] for index in b.instances()),
                self.entries.file[rows],
                self.entries.at[rows],
            ]
        )
        kinds = self.entries.kind[rows]
        for number in np.flatnonzero(np.bincount(kinds)).tolist():
            kind, alike = self.entries.kinds[number], kinds == number
            if axes:
                kind = _stacked(kind, where, alike)
            if kind.dtype in EIGHT_BITS:
                for i in here[alike].tolist():
                    self.problems.missing(
                        f"{keys[i]} {list(axes + shape)} holds {kind.dtype}, and {QUANTISED} of"
                        " config.json does not describe it: dequantise it first"
                    )
                continue
            self.stored += stored_of(
                rule.key, pieces, kind, where[:, alike], self.problems, replica=rule.alias
            )

    def _fill_absent(self) -> list[str]:
        """Adds the tensors that may be absent, as parts of a file of zeros; returns the files that
        this adds. If some of these tensors are there, it reports the others as missing.
        """
        kinds = {plain(name): s.dtype for s in self.stored for name in s.tensors}
        at = 0
        for b, numbers in self.absent if not self.problems else ():
            whole = packed(b.rule, self.scope)
            shape, pieces = buffer(whole, [whole_box(whole.shape)], b.rule.of, b.rule.transposed)
            if self.kept:
                self._report_unfit(b, numbers.tolist(), np.full(len(b.keys()), -1), shape)
                continue
            # the values are those of the file minus the offset
            filled = tuple(p._replace(offset=-(b.rule.absent or 0.0)) for p in pieces)
            dtype = kinds[plain(b.rule.of[0])]
            nbytes = math.prod(shape) * dtypes.itemsize(dtype)
            layers, experts = (index[numbers] for index in b.instances())
            places = at + nbytes * np.arange(len(numbers))
            at += nbytes * len(numbers)
            where = layers, experts, np.full(len(numbers), len(self.files)), places
            self.stored.append(Stored(b.rule.key, dtype, shape, filled, *where))
        return [ZEROS] * bool(at)

    def _report_unfit(
        self, b: Bound, numbers: list[int], rows: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        """Reports the tensors of a rule with these numbers, which are missing or of another shape
        than this one.
        """
        keys, experts = b.keys(), b.instances()[1]
        for i in numbers:
            if b.axes(self.scope) and experts[i]:
                continue  # one tensor holds all experts
            if rows[i] >= 0:
                self.problems.missing(
                    f"{keys[i]} is {list(self.entries[keys[i]].shape)} in {self._file(keys[i])},"
                    f" and should be {list(shape)} by config.json"
                )
            elif not b.rule.alias:
                self.problems.missing(f"{keys[i]} is missing; it should be {list(shape)}")

    # ---------------------------------------------------------------------------- all other tensors

    def _add_carried(self, keys: list[str]) -> None:
        """Adds the tensors that are carried unchanged."""
        self.stored += carried.stored(self.entries, keys, self.problems)
        if quantised_by(self.config):
            carried.refuse_quantised(self.stored, self.problems)
            for key in keys:
                if any(x.codes and key.endswith(x.codes) for x in self.quantisation.schemes):
                    self.problems.append(
                        f"{key} holds the elements of a quantised weight, and tensors that are"
                        " carried unchanged cannot be quantised: dequantise the model first"
                    )
        form = self.family.form(self.scope)
        for pattern in form.unmatched(keys):
            self.problems.missing(
                f"{pattern}: no tensor has such a name, and {self.family.path.name} lists it as a"
                " part of the model"
            )
        for text in carried.gaps(keys):
            self.problems.missing(text)
        for names in self.family.needs:
            if all(self.family.lookup(self.config, name) is None for name in names):
                which = " or ".join(name.removeprefix(OUTER) for name in names)
                self.problems.missing(
                    f"config.json has no {which}, and no loader can build the parts of the model"
                    f" with the tensors {', '.join(form.carried)} without it: copy the config.json"
                    " of the whole model"
                )

    def _ignored(self, left: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the tensors that are ignored, with the reason for each, and those of them that
        are dropped weights of the model.
        """
        ignored, dropped = self.quantised.ignored(left), dict[str, str]()
        for found, patterns in ((ignored, self.family.ignore), (dropped, self.family.drop)):
            for pattern, why in patterns.items():
                match = mapping.key_pattern(self.family.form(self.scope).rename(pattern))
                found.update({key: why for key in left if match.fullmatch(key)})
        return ignored | dropped, dropped

    def _refuse_others(self, left: Mapping[str, None], ignored: dict[str, str]) -> None:
        """Reports the tensors that are neither named nor ignored. Scales of ignored weights are
        ignored with them.
        """
        unknown: list[tuple[str, str]] = []
        for key in [k for k in left if k not in ignored]:
            weight = self.quantised.weight_of(key)
            if weight in ignored:
                ignored[key] = ignored[weight]
            elif weight == key or weight in left:
                unknown.append((key, f"{key} {list(self.entries[key].shape)}"))
            else:
                entry = self.entries.get(weight)
                what = "is not there" if entry is None else f"holds {entry.dtype}"
                self.problems.missing(f"{key} in {self._file(key)} has scales, and {weight} {what}")
        self.problems.unknown(unknown, self.family.path.name)

    def _explain_problems(self) -> None:
        """Adds a common reason of the problems, where one is known."""
        problems, missing = self.problems, self.mtp_missing
        if problems and self.quantisation.refused:
            problems.damaged = True  # listed first, because all others may follow from it
            problems.insert(
                0,
                f"config.json has {QUANTISED} {_short(quantised_by(self.config))}:"
                f" {self.quantisation.refused}: dequantise it first",
            )
        if missing and not self.mtp_found and missing == len(problems):
            stated = self.family.keys_of("mtp_layers", self.config)
            listed = ", ".join(f"{key} {value!r}" for key, value in stated.items())
            problems.cure = (
                f"All {missing:,} missing tensors are of layers of multi-token prediction, and no"
                f" tensor of such a layer is there; config.json has {listed or 'no key for them'}."
                " transformers saves a model without them: --no-mtp leaves them out."
            )

    def _file(self, key: str) -> str:
        """Returns the name of the file that holds a tensor."""
        return Path(self.files[self.entries[key].file]).name


def _stacked(kind: Kind, where: np.ndarray, alike: np.ndarray) -> Kind:
    """Returns the kind of one expert's part of tensors that hold all experts, and moves the
    buffers in `where` that are `alike` to their parts.
    """
    shape, strides = kind.shape[1:], kind.strides
    step = math.prod(shape) if strides is None else strides[0]
    where[3, alike] += where[1, alike] * step * dtypes.itemsize(kind.dtype)
    return Kind(kind.dtype, shape, strides and strides[1:])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."
