"""Merges of checkpoints whose formula needs more of a tensor than one element: angles between the
inputs, the largest changes, or the sign that most inputs agree on.

    d_i = x_i - base                                     in float32; x_i itself without a base
    linear methods      base + sum of c_i * d_i          fused multiply-adds in the order of inputs
    masked methods      v_i = w_i * m_i * d_i            m_i is 0 for elements that are left out
                        base + lambda * (sum of those v_i that have the elected sign) / divisor

Where c_i or m_i depend on a whole tensor, all inputs are read once more, in blocks, when the first
of its elements is needed. Tensors are taken as mckpt names them, row by row, and the blocks
have one size, so the bits depend neither on the formats and sizes of the inputs nor on the threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.adding import CHUNK, FACTORS, WIDTH, Factor, Lengths, Read, lines
from mckpt.values.drawing import GOLDEN, uniform
from mckpt.values.dtypes import NoValue, numpy_dtype
from mckpt.values.summing import add, shifted, within

SHARES = 8  # parts of a tensor that threads read at the same time
LOW = 15  # the bits of a magnitude that the second pass counts; the first counts the 16 above them
BEYOND = (1 << 32) - 1, 0  # the cut above all magnitudes
EPS, NORM_EPS, COLLINEAR, SINGULAR = 1e-8, 1e-7, 0.9995, 1e-6  # mergekit's
# of the Karcher mean: lengths below the second number are zero, and it is found where a step is
# shorter than the third, which is what products in float64 resolve
ITERATIONS, ZERO, CONVERGED = 100, 1e-5, 1e-7

# the ways to leave elements of a change out
ALL, LARGEST, BETWEEN, DRAWN = range(4)


class Part(NamedTuple):
    """A part of the tensor of one input, from element (row, column) on."""

    part: Factor
    input: int
    shift: float  # added to each stored element, in float32
    row: int
    column: int
    rows: int
    columns: int


class Share(NamedTuple):
    """The part of one input in a merge: its weight, and which of its elements are kept."""

    weight: float
    density: float = 1.0  # the part of the elements that is kept
    gamma: float = 0.0  # the part of the elements, the largest ones, that is left out
    base: int = 0  # 1: the input is the base of the changes


class Mix(NamedTuple):
    """The merge that replaces a part of a stored tensor, and the place of the part in its file.

    Element (i, j) of the part is i * down + j * along elements behind byte `at`, and is element
    (row + i, column + j) of the tensor, or (column + j, row + i) if it is turned. The tensor is
    taken as a matrix, whose rows are its first axis.
    """

    at: int  # bytes
    down: int  # elements
    along: int  # elements
    row: int
    column: int
    turned: int
    rows: int  # of the whole tensor
    columns: int
    key: int  # a hash of the tensor's name
    own: int  # the number of the input in whose file the part lies
    formula: int  # an index into FORMULAS
    kept: int  # ALL, LARGEST, BETWEEN or DRAWN
    elects: int  # 1: only changes with the elected sign are summed
    normalize: int  # 1: the sum is divided by that of the weights
    rescale: int  # 1: changes are divided by their density
    rounded: int  # 1 + the index into FACTORS of the dtype to which each step is rounded; or 0
    seed: int
    scale: float  # lambda
    t: float
    shares: tuple[Share, ...]
    parts: tuple[Part, ...]  # the whole tensor of each input

    @property
    def files(self) -> set[int]:
        """The numbers of the files of all inputs."""
        return {part.part.file for part in self.parts}

    @property
    def bases(self) -> list[int]:
        return [i for i, share in enumerate(self.shares) if share.base]

    @property
    def others(self) -> list[int]:
        return [i for i, share in enumerate(self.shares) if not share.base]

    def fill(
        self,
        base: np.ndarray,
        out: np.ndarray,
        place: tuple[int, int, int],
        read: Read,
        lengths: Lengths,
        offset: float,
    ) -> None:
        """Does what `mix` does."""
        mix(self, base, out, *place, read, lengths, offset)

    def words(self) -> list[int]:
        """Returns the numbers of `of`, [(2 + inputs + parts) * WIDTH]."""
        head = [*self[:-4], *_bits(self.scale, self.t), len(self.shares), len(self.parts)]
        words = head + [0] * (2 * WIDTH - len(head))
        for share in self.shares:
            one = [*_bits(*share[:3]), share.base]
            words += one + [0] * (WIDTH - len(one))
        for part in self.parts:
            one = [*part.part, part.input, *_bits(part.shift), *part[3:]]
            words += one + [0] * (WIDTH - len(one))
        return words

    @classmethod
    def of(cls, words: np.ndarray) -> Mix:
        """Returns the merge of its numbers, which start at the first row of [rows, WIDTH]."""
        *head, scale, t, shares, parts = words[:2].ravel().tolist()[: len(cls._fields)]
        listed = words[2 : 2 + shares + parts].tolist()
        return cls._make(
            [
                *head,
                *_floats(scale, t),
                tuple(Share._make([*_floats(*one[:3]), one[3]]) for one in listed[:shares]),
                tuple(
                    Part._make([Factor(*one[:5]), one[5], *_floats(one[6]), *one[7:11]])
                    for one in listed[shares:]
                ),
            ]
        )


def _bits(*numbers: float) -> list[int]:
    return np.array(numbers, "f8").view("i8").tolist()


def _floats(*bits: int) -> list[float]:
    return np.array(bits, "i8").view("f8").tolist()


# ---- coefficients of whole tensors


class _Gram:
    """The products of the inputs' vectors with each other."""

    def __init__(self, products: np.ndarray) -> None:
        self.products = products
        self.norms = np.sqrt(products.diagonal())

    def units(self, eps: float) -> _Gram:
        """Returns the products of the vectors divided by their lengths."""
        lengths = self.norms + eps
        return _Gram(self.products / lengths[:, None] / lengths)

    def product(self, a: np.ndarray, b: np.ndarray) -> float:
        """Returns the product of two sums of the vectors with the coefficients a and b."""
        return float((a[:, None] * self.products * b).sum())

    def norm(self, a: np.ndarray) -> float:
        return math.sqrt(max(0.0, self.product(a, a)))

    def cosine(self, i: int, j: int, least: float) -> float:
        product = max(float(self.norms[i] * self.norms[j]), least)
        return min(1.0, max(-1.0, float(self.products[i, j]) / product))


def _on_arc(cosine: float, t: float) -> list[float]:
    angle = math.acos(cosine)
    return [math.sin(s * angle) / math.sin(angle) for s in (1 - t, t)]


def _given(of: Mix, gram: _Gram | None) -> list[float]:
    weights = [of.shares[i].weight for i in of.others]
    total = math.fsum(weights) if of.normalize else 1.0
    return [of.scale * w / (total if abs(total) >= EPS else 1.0) for w in weights]


def _slerp(of: Mix, gram: _Gram) -> list[float]:
    lengths = np.where(gram.norms > EPS, gram.norms, 1.0)
    cosine = min(1.0, max(-1.0, float(gram.products[0, 1] / lengths[0] / lengths[1])))
    return [1 - of.t, of.t] if abs(cosine) > COLLINEAR else _on_arc(cosine, of.t)


def _nuslerp(of: Mix, gram: _Gram) -> list[float]:
    first, second = (of.shares[i].weight for i in of.others)
    t = 0.5 if abs(first + second) < SINGULAR else second / (first + second)
    cosine = gram.cosine(0, 1, NORM_EPS**2)
    return [1 - t, t] if 1 - cosine**2 <= EPS**2 else _on_arc(cosine, t)


def _model_stock(of: Mix, gram: _Gram) -> list[float]:
    count = len(of.others)
    cosines = [gram.cosine(i, j, SINGULAR) for j in range(count) for i in range(j)]
    mean = math.fsum(cosines) / len(cosines)
    below = 1 + (count - 1) * mean
    return [0.0 if abs(below) < SINGULAR else mean / below] * count


def _multislerp(of: Mix, gram: _Gram) -> list[float]:
    weights = np.array([of.shares[i].weight for i in of.others])
    if of.normalize:
        weights = weights / weights.sum()
    units = gram.units(EPS)
    if (norm := units.norm(weights)) < EPS:
        if len(weights) == 2:
            return weights.tolist()
        raise NoValue("the weighted directions of the models cancel; give other weights")
    mean = weights / norm
    tangent = weights - units.product(weights, mean) * mean
    angle = units.norm(tangent) + EPS
    mixed = mean * math.cos(angle) + tangent * (math.sin(angle) / angle)
    return (mixed * (gram.norms * weights).sum() / (gram.norms + EPS)).tolist()


def _karcher(of: Mix, gram: _Gram) -> list[float]:
    valid = gram.norms > ZERO
    if not valid.any():
        return [0.0] * len(valid)
    lengths = np.where(valid, gram.norms, 1.0)
    units, alphas = _Gram(gram.products / lengths[:, None] / lengths), valid / valid.sum()
    each = np.eye(len(valid))
    norm = units.norm(alphas)
    mean = each[int(np.argmax(valid))] if norm < ZERO else alphas / norm
    for _ in range(ITERATIONS):
        tangent = np.zeros(len(valid))
        for unit, alpha in zip(each, alphas, strict=True):
            cosine = min(1.0, max(-1.0, units.product(mean, unit)))
            if alpha and (angle := math.acos(cosine)) >= CONVERGED:
                tangent = tangent + alpha * angle / math.sin(angle) * (unit - cosine * mean)
        if (norm := units.norm(tangent)) < CONVERGED:
            break
        mean = math.cos(norm) * mean + math.sin(norm) / norm * tangent
        mean = mean / units.norm(mean)
    return (gram.norms.mean() * mean / lengths).tolist()


# name -> the coefficients of the inputs, of their products with each other; None: `_masked`
FORMULAS: dict[str, Callable[[Mix, _Gram], list[float]] | None] = {
    "given": _given,
    "slerp": _slerp,
    "nuslerp": _nuslerp,
    "model_stock": _model_stock,
    "multislerp": _multislerp,
    "karcher": _karcher,
    "masked": None,
}
MEASURED = {"slerp", "nuslerp", "model_stock", "multislerp", "karcher"}
NAMES = tuple(FORMULAS)


# ---- reading whole tensors


def _values(
    of: Mix, number: int, rows: tuple[int, int, int], columns: tuple[int, int, int], read: Read
) -> np.ndarray:
    """Returns elements of one input in float32: the rows first, first + step, ... and columns."""
    out = np.empty((rows[2], columns[2]), "f4")
    for part in of.parts:
        if part.input != number:
            continue
        down = within(*rows, part.row, part.rows)
        along = within(*columns, part.column, part.columns)
        if down and along:
            found = part.part.block(
                *(down.first - part.row, down.extent),
                *(along.first - part.column, along.extent),
                read,
            )[:: rows[1], :: columns[1]]
            out[down.there, along.there] = shifted(found, part.shift)
    return out


def _changes(of: Mix, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the inputs without the base, each less the base, if there is one."""
    bases = of.bases
    return [values[i] - values[bases[0]] if bases else values[i] for i in of.others]


def _shares(of: Mix) -> int:
    """Returns the number of parts in which threads read a tensor."""
    return min(SHARES, -(-of.rows * of.columns // CHUNK))


def _blocks(of: Mix, share: int, read: Read) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yields the index of the first element, and the changes, of each block of a share. Blocks
    are ranges of the elements in their order.
    """
    width = min(of.columns, CHUNK)
    height = max(1, CHUNK // width)
    across = -(-of.columns // width)
    count, shares = -(-of.rows // height) * across, _shares(of)
    for number in range(count * share // shares, count * (share + 1) // shares):
        row, column = number // across * height, number % across * width
        rows = row, 1, min(height, of.rows - row)
        columns = column, 1, min(width, of.columns - column)
        values = [_values(of, i, rows, columns, read) for i in range(len(of.shares))]
        yield row * of.columns + column, _changes(of, values)


def _coefficients(of: Mix, read: Read, lengths: Lengths) -> list[float]:
    """Returns the coefficients of a linear method."""
    name = NAMES[of.formula]
    formula = FORMULAS[name]
    assert formula is not None
    if name not in MEASURED:
        return _given(of, None)

    def products(share: int) -> np.ndarray:
        total = np.zeros((len(of.others), len(of.others)))
        for _, changes in _blocks(of, share, read):
            wide = [change.astype("f8") for change in changes]
            for i, a in enumerate(wide):
                for j, b in enumerate(wide[: i + 1]):
                    total[i, j] += (a * b).sum()
        return total

    def finish(parts: list[np.ndarray]) -> list[float]:
        lower = sum(parts[1:], parts[0])
        with np.errstate(all="ignore"):
            return formula(of, _Gram(lower + np.tril(lower, -1).T))

    found: list[float] = lengths.shared.of((of.key, name), _shares(of), products, finish)
    return found


def _magnitudes(change: np.ndarray) -> np.ndarray:
    """Returns the bits of the magnitudes, in the order of the elements. Larger ones have larger
    bits.
    """
    return np.ascontiguousarray(change).ravel().view("u4") & np.uint32((1 << 31) - 1)


Cut = tuple[int, int]  # the bits of a magnitude, and the index of an element


def _ranks(of: Mix, share: Share) -> tuple[int, int] | None:
    """Returns the ranks of the magnitudes that are kept, the smallest first."""
    count = of.rows * of.columns
    if of.kept not in (LARGEST, BETWEEN) or share.density >= 1:
        return None
    if of.kept == LARGEST:
        return count - max(1, int(share.density * count)), count
    kept, top = int(share.density * count), int(share.gamma * count)
    low = max(0, count - kept - top)
    return low, low + kept


def _cuts(of: Mix, read: Read, lengths: Lengths) -> list[tuple[Cut, Cut] | None]:
    """Returns, for each change, the first elements that are kept and no longer kept, in the order
    of their magnitudes and, of equal ones, of their indices.
    """
    ranks = [_ranks(of, of.shares[i]) for i in of.others]
    count = of.rows * of.columns
    # (number of the change, rank)
    wanted = sorted({(i, r) for i, pair in enumerate(ranks) if pair for r in pair if r < count})

    def found(key: str, each: Callable[[int, np.ndarray], np.ndarray], left: list[int]) -> Any:
        """Returns the bin that has each rank, and the rank in it. each: returns the bins of the
        magnitudes of a block, for a number of `wanted`.
        """
        bins = 1 << (16 if key == "high" else LOW)

        def part(share: int) -> list[np.ndarray]:
            total = [np.zeros(bins, "u4") for _ in wanted]
            for _, changes in _blocks(of, share, read):
                for n, (i, _) in enumerate(wanted):
                    total[n] += np.bincount(each(n, changes[i]), minlength=bins).astype("u4")
            return total

        def finish(parts: list[list[np.ndarray]]) -> list[tuple[int, int]]:
            out = []
            for n, rank in enumerate(left):
                ends = np.cumsum(sum(one[n].astype("i8") for one in parts))
                number = int(np.searchsorted(ends, rank, "right"))
                out.append((number, rank - int(ends[number - 1] if number else 0)))
            return out

        return lengths.shared.of((of.key, key), _shares(of), part, finish)

    if not wanted:
        return [None if pair is None else (BEYOND, BEYOND) for pair in ranks]
    high = found("high", lambda _, change: _magnitudes(change) >> LOW, [r for _, r in wanted])

    def lower(n: int, change: np.ndarray) -> np.ndarray:
        bits = _magnitudes(change)
        return bits[bits >> LOW == high[n][0]] & np.uint32((1 << LOW) - 1)

    low = found("low", lower, [left for _, left in high])
    ties = [((h << LOW) + b, left) for (h, _), (b, left) in zip(high, low, strict=True)]
    places = lengths.shared.of(
        (of.key, "places"), 1, lambda _: _places(of, wanted, ties, read), lambda parts: parts[0]
    )
    at = dict(zip(wanted, places, strict=True))
    return [
        None if pair is None else (at.get((i, pair[0]), BEYOND), at.get((i, pair[1]), BEYOND))
        for i, pair in enumerate(ranks)
    ]


def _places(
    of: Mix, wanted: Sequence[tuple[int, int]], ties: Sequence[tuple[int, int]], read: Read
) -> list[Cut]:
    """Returns the magnitude of each wanted rank, and the index of its element: that of as many of
    those with this magnitude as the second number of `ties` says.
    """
    found = [(bits, 0) for bits, _ in ties]  # no element before the first one is equal
    left = {n: skipped for n, (_, skipped) in enumerate(ties) if skipped}
    for share in range(_shares(of)):
        for start, changes in _blocks(of, share, read) if left else ():
            for n in list(left):
                equal = np.flatnonzero(_magnitudes(changes[wanted[n][0]]) == ties[n][0])
                if len(equal) > left[n]:
                    found[n] = ties[n][0], start + int(equal[left.pop(n)])
                else:
                    left[n] -= len(equal)
    return found


# ---- elements


def _drawn(of: Mix, number: int, index: np.ndarray) -> np.ndarray:
    """Returns a number of 0 .. 1 for each element: SplitMix64 of its index, with a start that
    depends on the seed, the tensor and the input.
    """
    return uniform(of.key ^ of.seed * GOLDEN ^ (number + 1) * 0xD1B54A32D192ED03, index)


def _masked(
    of: Mix,
    values: Sequence[np.ndarray],
    cuts: Sequence[tuple[Cut, Cut] | None],
    index: np.ndarray,
) -> np.ndarray:
    base, terms, weights = values[of.bases[0]], [], []
    for number, (i, change) in enumerate(zip(of.others, _changes(of, values), strict=True)):
        share, keeps, weight = of.shares[i], None, np.float32(of.shares[i].weight)
        times = np.float32(share.weight / share.density) if of.rescale else weight
        if of.kept == DRAWN and share.density < 1:
            keeps = _drawn(of, number, index) < share.density
        elif (cut := cuts[number] if cuts else None) is not None:
            bits = _magnitudes(change).reshape(change.shape)
            (low, first), (high, end) = cut
            keeps = (bits > low) | ((bits == low) & (index >= first))
            keeps &= (bits < high) | ((bits == high) & (index < end))
        term = change * times
        terms.append(term if keeps is None else np.where(keeps, term, np.float32(0)))
        weights.append(weight)
    mixed = sum(terms[1:], terms[0])
    divisor: np.ndarray | np.float32 = sum(weights[1:], weights[0])
    if of.elects:
        sign = np.where(mixed >= 0, np.float32(1), np.float32(-1))
        agree = [np.sign(term) == sign for term in terms]
        terms = [
            np.where(some, term, np.float32(0)) for term, some in zip(terms, agree, strict=True)
        ]
        mixed = sum(terms[1:], terms[0])
        counted = [some * weight for some, weight in zip(agree, weights, strict=True)]
        divisor = sum(counted[1:], counted[0])
    if of.normalize:
        mixed = mixed / np.where(np.abs(divisor) < EPS, np.float32(1), divisor)
    total = base.copy()
    add(total, mixed, float(np.float32(of.scale)))
    return total


def _linear(of: Mix, values: Sequence[np.ndarray], coefficients: Sequence[float]) -> np.ndarray:
    total = values[of.bases[0]].copy() if of.bases else np.zeros_like(values[0])
    for change, coefficient in zip(_changes(of, values), coefficients, strict=True):
        add(total, change, float(np.float32(coefficient)))
    return total


def _rounded_steps(of: Mix, values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the elements as mergekit computes them: task arithmetic with each step rounded to the
    dtype of the models, or a sum in float32 that is divided by that of the weights.
    """
    weights = [np.float32(of.shares[i].weight) for i in of.others]
    if not of.bases:
        total = np.zeros_like(values[0])
        for value, weight in zip(values, weights, strict=True):
            add(total, value, float(weight))
        return total / sum(weights[1:], weights[0]) if of.normalize else total
    dtype = numpy_dtype(FACTORS[of.rounded - 1])

    def step(value: np.ndarray | np.float32) -> np.ndarray:
        return np.asarray(value).astype(dtype).astype("f4")

    mixed, total_weight = np.zeros_like(values[0]), np.float32(0)
    for change, weight in zip(_changes(of, values), weights, strict=True):
        mixed += step(step(change) * step(weight))
        total_weight += step(weight)
    mixed = step(mixed)
    if of.normalize and abs(total_weight) >= EPS:
        mixed = step(mixed / step(total_weight))
    if of.scale != 1:
        mixed = step(mixed * np.float32(of.scale))
    return step(values[of.bases[0]] + mixed)


def mix(
    of: Mix,
    base: np.ndarray,
    out: np.ndarray,
    at: int,
    pitch: int,
    step: int,
    read: Read,
    lengths: Lengths,
    offset: float = 0.0,
) -> None:
    """Fills `out` [m, n], of any float dtype, with the merged elements.

    offset: added to the values, if they are stored as the base is; they are if it is 0.
    base[i, j] is the element at byte at + i * pitch + j * step of the base's file. Raises NoValue.
    """
    item = base.itemsize
    numbers = (at - of.at) // item, pitch // item, step // item
    turned, row, down, column, along = lines(of, base.shape, *numbers)
    if turned:
        base, out = base.T, out.T
    if of.turned:
        base, out, row, down, column, along = base.T, out.T, column, along, row, down
    m, n = base.shape
    shift = next(part.shift for part in of.parts if part.input == of.own)
    cuts = _cuts(of, read, lengths) if of.kept in (LARGEST, BETWEEN) else []
    linear = FORMULAS[NAMES[of.formula]] is not None
    coefficients = _coefficients(of, read, lengths) if linear and not of.rounded else []
    width = max(1, min(n, CHUNK))
    height = max(1, min(m, CHUNK // width))
    for top in range(0, m, height):
        for left in range(0, n, width):
            part = slice(top, min(m, top + height)), slice(left, min(n, left + width))
            here = base[part]
            rows = row + top * down, down, here.shape[0]
            columns = column + left * along, along, here.shape[1]
            values = [
                shifted(here.astype("f4"), shift)
                if i == of.own
                else _values(of, i, rows, columns, read)
                for i in range(len(of.shares))
            ]
            if of.rounded:
                total = _rounded_steps(of, values)
            elif linear:
                total = _linear(of, values, coefficients)
            else:
                index = (rows[0] + down * np.arange(rows[2]))[:, None] * of.columns + (
                    columns[0] + along * np.arange(columns[2])
                )
                total = _masked(of, values, cuts, index)
            if offset != shift:
                total += np.float32(offset - shift)
            np.copyto(out[part], total, casting="unsafe")
