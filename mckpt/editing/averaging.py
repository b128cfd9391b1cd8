"""Weighted sums of checkpoints of one model: iterations of a run, or models trained from one.

The inputs may have any formats and parallel sizes. One of them, the base, is copied; each of its
pieces knows the places of the same elements in the others (values/summing.py). So the sum is
planned, proved, written and continued as any other conversion, and no input is read as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from mckpt import formats
from mckpt.checkpoint.checkpoint import Addition, Checkpoint
from mckpt.checkpoint.logical import Reader
from mckpt.editing import schedules
from mckpt.editing.pieces import digest_of
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.formats.megatron.optimizer import MASTER, is_state
from mckpt.formats.megatron.save_directory import iterations_of
from mckpt.geometry.box import Box, Layout, Piece, Stored, overlap, row_major
from mckpt.geometry.join import proved
from mckpt.lazy import numpy as np
from mckpt.mapping import equal
from mckpt.options import AverageOptions, SourceOptions, TargetOptions
from mckpt.storage.manifest import Facts
from mckpt.values.adding import FACTORS, WIDTH, Factor
from mckpt.values.dtypes import itemsize
from mckpt.values.element import SUM
from mckpt.values.summing import BASE, Sum, Term

Place = tuple[str, int, int]  # a template, layer and expert
# of a piece in its file: the first byte, the elements to the next row and to the next column; and
# the row and the column of the tensor
Origin = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Averaging(Addition):
    """The sum of several checkpoints, one of which is read as the base."""

    inputs: tuple[Checkpoint, ...]
    coefficients: tuple[float, ...]  # of each input
    base: int  # its number
    masters: bool = False  # the fp32 master copies are summed, and not the weights
    states: bool = False  # and all states of the optimizer
    term: ClassVar[str] = SUM  # the kind of the computation

    @property
    def summands(self) -> tuple[Checkpoint, ...]:
        return self.inputs

    @property
    def path(self) -> Path:
        return self.inputs[self.base].path

    def layout(self, base: Layout) -> Layout:
        """Returns the layout of the base, each piece of which is a term of a sum.

        Raises SourceError for inputs that do not have the same elements.
        """
        return self._with_states if self.states and has_states(base) else self._layout

    @cached_property
    def _layout(self) -> Layout:
        return self._sum([self.read(one) for one in self.inputs])

    @cached_property
    def _with_states(self) -> Layout:
        return self._sum([self.read(one, states=True) for one in self.inputs])

    def _sum(self, layouts: Sequence[Layout]) -> Layout:
        """Returns the sum of the layouts of the inputs."""
        base = layouts[self.base]
        files, others = list(base.files), dict[int, dict[Place, list[Matrix]]]()
        for number, layout in enumerate(layouts):
            if number == self.base:
                others[number] = places_of(layout, 0)
                continue
            self._refuse_apart(number, layout, base)
            others[number] = places_of(layout, len(files))
            files += layout.files
        stored = [self._summed(s, base.shapes, others) for s in base.stored if not s.replica]
        return replace(base, files=files, stored=stored)

    @property
    def facts(self) -> Facts:
        """Returns the manifest's entry: what was summed, without paths."""
        inputs = []
        for one, coefficient in zip(self.inputs, self.coefficients, strict=True):
            iteration = one.files.iteration
            inputs.append(
                {
                    "coefficient": coefficient.hex(),
                    "format": one.format,
                    "layout": digest_of(self.read(one)),
                    **({} if iteration is None else {"iteration": iteration}),
                }
            )
        of = "states" if self.states else "masters" if self.masters else "weights"
        return {"average": {"inputs": inputs, "of": of}}

    @property
    def notes(self) -> list[str]:
        """Returns the contract of the values."""
        what = "master copies" if self.masters else "weights"
        what += " and of the other states of the optimizer" * self.states
        listed, count = ", ".join(f"{c:.6g}" for c in self.coefficients), len(self.inputs)
        return [
            f"formula: each element is the sum of the {what} of {count} checkpoints times"
            f" {listed}: fused multiply-adds in float32 in this order, rounded once"
        ]

    def read(self, one: Checkpoint, states: bool = False) -> Layout:
        """Returns the layout of what is summed of one input: its weights, or the master copies
        under their names; and the states.
        """
        if not self.masters:
            return one.layout
        layout = one.with_optimizer().layout
        weights = {name: s.dtype for s in layout.stored for name in s.tensors}
        suffix, kept, held = f"@{MASTER}", list[Stored](), set[str]()
        for s in layout.stored:
            pieces = tuple(
                p._replace(tensor=p.tensor.removesuffix(suffix))
                for p in s.pieces
                if p.tensor.endswith(suffix)
            )
            # the pieces of a buffer may belong to weights of several dtypes
            for dtype in sorted({weights[p.tensor] for p in pieces}):
                own = tuple(p for p in pieces if weights[p.tensor] == dtype)
                held.update(p.tensor for p in own)
                wide = s.stored_as if s.stored_as != dtype else None
                kept.append(replace(s, dtype=dtype, pieces=own, rounded_from=wide, view=True))
        if not kept:
            raise UsageError(
                f"{one.path}: has no fp32 master copies of the weights; leave out --from masters"
            )
        # a frozen weight has none, and is the same in all iterations
        for s in layout.stored:
            rest = tuple(
                p for p in s.pieces if (states if is_state(p.tensor) else p.tensor not in held)
            )
            if rest:
                kept.append(replace(s, pieces=rest, view=True))
        names = {name for s in kept for name in s.tensors}
        shapes = {name: shape for name, shape in layout.shapes.items() if name in names}
        return replace(layout, stored=kept, shapes=shapes)

    def _refuse_apart(self, number: int, layout: Layout, base: Layout) -> None:
        """Raises an error for an input that is another model than the base."""
        one, first = self.inputs[number], self.inputs[self.base]
        apart = [
            f"{name}: {one.dims.get(name)!r}, and {value!r} in {first.path}"
            for name, value in first.dims.items()
            if not equal(one.dims.get(name), value)
        ]
        if apart:
            raise MappingError.of(
                f"{one.path}: is a model of other dims:",
                apart,
                "Checkpoints of one shape can be summed; --set NAME=VALUE corrects a wrong dim.",
            )
        proved(layout)
        names, wanted = set(Reader(layout)), set(Reader(base))
        if names != wanted:
            raise SourceError.of(
                f"{one.path}: has other tensors than {first.path}:", sorted(names ^ wanted)
            )
        shapes = [
            f"{name}: {list(layout.shapes[name])}, and {list(shape)} in {first.path}"
            for name, shape in base.shapes.items()
            if layout.shapes.get(name, shape) != shape
        ]
        if shapes:
            raise SourceError.of(f"{one.path}: has tensors of other shapes:", shapes)

    def _summed(
        self,
        s: Stored,
        shapes: Mapping[str, tuple[int, ...]],
        others: Mapping[int, Mapping[Place, list[Matrix]]],
    ) -> Stored:
        """Returns stored tensors whose pieces are terms of sums."""
        self._refuse_computed(s, self.inputs[self.base])
        words = partial(self._words, shapes=shapes, others=others)
        return with_terms(s, shapes, self.term, words)

    def _words(
        self,
        place: Origin,
        of: Place,
        own: Matrix,
        turned: bool,
        shapes: Mapping[str, tuple[int, ...]],
        others: Mapping[int, Mapping[Place, list[Matrix]]],
    ) -> list[int]:
        """Returns the numbers that describe the computation of a piece. place: that of the piece in
        its file, as `Sum` has it.
        """
        return Sum(*place, tuple(self._terms(of, own, turned, others))).words()

    def _terms(
        self,
        place: Place,
        own: Matrix,
        turned: bool,
        others: Mapping[int, Mapping[Place, list[Matrix]]],
    ) -> Iterator[Term]:
        """Returns the terms of the sum of a piece, in the order of the inputs."""

        def check(s: Stored, number: int) -> None:
            self._refuse_computed(s, self.inputs[number])

        return terms(place, own, turned, self.coefficients, self.base, others, check)

    def _refuse_computed(self, s: Stored, of: Checkpoint) -> None:
        """Raises UsageError for a tensor whose elements are not stored as they are."""
        if s.scales or s.added or s.stored_as not in FACTORS:
            raise UsageError(
                f"{of.path}: {s.key} is stored quantised or as {s.stored_as}; convert the"
                " checkpoint to one of plain weights first"
            )
        if s.rounded_from and not self.masters:
            raise UsageError(
                f"{of.path}: {s.key} is stored in {s.rounded_from} as the master copy; give"
                " --from masters"
            )


def with_terms(
    s: Stored,
    shapes: Mapping[str, tuple[int, ...]],
    term: str,
    words_of: Callable[[Origin, Place, Matrix, bool], list[int]],
) -> Stored:
    """Returns stored tensors whose pieces are terms of computations of a kind.

    words_of: returns the numbers that describe the computation of a piece, from its place in its
        file, its tensor, the piece as a matrix, and whether that is turned.
    """
    added: dict[int, np.ndarray] = {}
    for number, piece in enumerate(s.pieces):
        own = matrix_of(piece, shapes[piece.tensor])
        if turned := own.down < own.along:  # the buffer has the columns one after the other
            own = own.turned
        words = []
        for row, at in enumerate(zip(s.layer.tolist(), s.expert.tolist(), strict=True)):
            start = int(s.at[row]) + own.start * itemsize(s.stored_as)
            place = start, own.down, own.along, own.row, own.column
            words.append(words_of(place, (piece.tensor, *at), own, turned))
        longest = max(map(len, words), default=0)
        filled = [one + [0] * (longest - len(one)) for one in words]
        added[number] = np.array(filled, "i8").reshape(len(s), -1, WIDTH)
    return replace(s, added=added, term=term)


def terms(
    place: Place,
    own: Matrix,
    turned: bool,
    coefficients: Sequence[float],
    base: int,
    others: Mapping[int, Mapping[Place, list[Matrix]]],
    check: Callable[[Stored, int], None],
) -> Iterator[Term]:
    """Yields the terms of the sum of a piece, in the order of the inputs.

    base: the number of the input whose piece it is. others: the parts of the tensors of each other
    input. check: raises UsageError for tensors of an input that cannot be summed.
    """
    for number, coefficient in enumerate(coefficients):
        rounded = float(np.float32(coefficient))
        if number == base:
            factor = Factor(BASE, 0, 0, 0, 0)
            yield Term(factor, number, rounded, -own.offset, *own.box.offset, *own.box.shape)
            continue
        covered = 0
        for one in others[number].get(place, ()):
            part = one.turned if turned else one
            if (inner := overlap(own.box, part.box)) is None:
                continue
            check(part.of, number)
            covered += math.prod(inner.shape)
            box = *part.box.offset, *part.box.shape
            yield Term(part.factor, number, rounded, -part.offset, *box)
        assert covered == own.rows * own.columns, (place, number, covered)


def chosen(paths: Sequence[Path], options: AverageOptions) -> list[tuple[Path, int | None]]:
    """Returns what is summed: each of the paths, or the iterations of a run, which is the only
    path.

    Raises UsageError for options that have no effect, and as `schedules.in_window`.
    """
    root = paths[0]
    iterations = iterations_of(root) if len(paths) == 1 else []
    if len(iterations) > 1:
        args = Checkpoint.open(root, SourceOptions(iteration=iterations[-1])).args
        window = options.start, options.end, options.window
        found = schedules.in_window(
            iterations, *window, schedules.tokens_of(args), options.min_interval
        )
        return [(root, iteration) for iteration in found]
    of_run = ("start", "end", "window", "min_interval")
    if given := [name for name in of_run if getattr(options, name) is not None]:
        raise UsageError(
            f"{options.spelled(given[0])}: chooses iterations of one run, and"
            + (f" {root} has none" if len(paths) == 1 else f" {len(paths)} checkpoints are given")
            + "; leave it out"
        )
    if len(paths) == 1:
        raise UsageError(
            f"{root}: is one checkpoint; give at least two, or the save directory of a run with"
            " several iterations"
        )
    return [(path, None) for path in paths]


def coefficients(options: AverageOptions, count: int) -> list[float]:
    """Returns the coefficients of `count` checkpoints. Raises UsageError for another number."""
    if options.weights is not None and options.schedule is not None:
        raise UsageError("give --weights or --schedule, not both")
    if options.reverse and options.schedule is None:
        raise UsageError("--reverse: reverses the coefficients of --schedule; leave it out")
    if options.weights is not None:
        found = [float(w) for w in options.weights]
        if len(found) != count:
            raise UsageError(
                f"--weights has {len(found)} numbers, and {count} checkpoints are summed"
            )
    elif options.schedule is not None:
        found = schedules.coefficients(options.schedule, count, options.reverse)
    else:
        found = [1.0 / count] * count
    if options.normalize:
        if not (total := math.fsum(found)):
            raise UsageError("--normalize: the sum of the coefficients is 0")
        found = [c / total for c in found]
    return found


def average(
    inputs: Sequence[Checkpoint],
    coefficients: Sequence[float],
    base: int = 0,
    summed: str = "weights",
) -> Checkpoint:
    """Returns a checkpoint whose weights are the sum of those of several, times coefficients.

    base: the number of the input whose args, config and tokenizer the result has. summed: as in
    AverageOptions.

    Raises UsageError for numbers that do not fit, and the errors of `Averaging.layout`.
    """
    if len(inputs) != len(coefficients):
        raise UsageError(f"{len(coefficients)} weights are given for {len(inputs)} checkpoints")
    if not all(map(math.isfinite, coefficients)):
        raise UsageError(f"weights must be finite numbers, not {list(coefficients)}")
    states, given = summed == "states", tuple(map(float, coefficients))
    if states and min(given) < 0:
        raise UsageError(
            "--from states: a negative coefficient could make a second moment negative"
        )
    total = Averaging(tuple(inputs), given, base, summed != "weights", states)
    out = replace(inputs[base], merging=total)
    _ = out.layout
    return out


def has_states(layout: Layout) -> bool:
    return any(map(is_state, layout.shapes))


def weights_alone(source: Checkpoint, target: TargetOptions) -> TargetOptions:
    """Returns a target without the state of an optimizer, which belongs to one input alone, unless
    it is summed too.
    """
    if isinstance(source.merging, Averaging) and source.merging.states:
        return target
    alone = formats.get(target.format).megatron and bool(source.optimizer)
    return target.with_(no_optimizer=target.no_optimizer or alone)


@dataclass(frozen=True)
class Matrix:
    """A piece of one stored tensor as a part of a matrix: element (i, j) is start + i * down + j *
    along of the buffer, and element (row + i, column + j) of the logical tensor.
    """

    row: int
    column: int
    rows: int
    columns: int
    start: int
    down: int
    along: int
    offset: float
    of: Stored
    file: int
    at: int

    @property
    def box(self) -> Box:
        return Box((self.row, self.column), (self.rows, self.columns))

    @property
    def turned(self) -> Matrix:
        return replace(
            self,
            row=self.column,
            column=self.row,
            rows=self.columns,
            columns=self.rows,
            down=self.along,
            along=self.down,
        )

    @property
    def factor(self) -> Factor:
        start = self.at + self.start * itemsize(self.of.stored_as)
        dtype = FACTORS.index(self.of.stored_as)
        return Factor(self.file, start, self.down, self.along, dtype)


def matrix_of(
    piece: Piece, shape: tuple[int, ...], of: Any = None, file: int = 0, at: int = 0
) -> Matrix:
    """Returns a piece as a part of a matrix, whose rows are the first axis of the tensor."""
    box, strides = piece.box, piece.strides
    width = math.prod(shape[1:])
    if len(shape) == 1:
        row, column, rows, columns = 0, box.offset[0], 1, box.shape[0]
        down, along = strides[0] * columns + 1, strides[0]
    elif len(shape) == 2:
        (row, column), (rows, columns), (down, along) = box.offset, box.shape, strides
    else:
        dense = tuple(strides[-1] * step for step in row_major(shape[1:]))
        if any(box.offset[1:]) or box.shape[1:] != shape[1:] or strides[1:] != dense:
            raise UsageError(f"{piece.tensor} {list(shape)}: only its first axis may be sharded")
        row, column, rows, columns = box.offset[0], 0, box.shape[0], width
        down, along = strides[0], strides[-1]
    return Matrix(row, column, rows, columns, piece.start, down, along, piece.offset, of, file, at)


def places_of(layout: Layout, first: int) -> dict[Place, list[Matrix]]:
    """Returns the parts of each logical tensor. first: the number of the layout's first file."""
    found: dict[Place, list[Matrix]] = {}
    for s in layout.stored:
        if s.replica:
            continue
        for piece in (p for p in s.pieces if not p.copy):
            part = matrix_of(piece, layout.shapes[piece.tensor], s)
            numbers = (array.tolist() for array in (s.layer, s.expert, s.file, s.at))
            for layer, expert, file, at in zip(*numbers, strict=True):
                own = replace(part, file=first + file, at=at)
                found.setdefault((piece.tensor, layer, expert), []).append(own)
    return found
