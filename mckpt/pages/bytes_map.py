"""Counts the bytes of each layer: on each rank of a model-parallel group, and in each file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mckpt.formats.base import Names, packed
from mckpt.formats.megatron.optimizer import holds_state, is_state
from mckpt.formats.megatron.torch_shards import local
from mckpt.geometry.box import Layout, Stored
from mckpt.mapping import Bound, Rule
from mckpt.pages.document import span
from mckpt.values.dtypes import itemsize

MAX_COLUMNS = 256  # of a map of files: more would make its cells too narrow


@dataclass
class Column:
    """One column of a map."""

    head: str  # such as the pipeline stage
    label: str
    title: str  # the full text, for the pointer
    nbytes: np.ndarray  # of each row
    count: int = 1  # how many ranks have these bytes


class Rows:
    """The rows of a map: the layers of a model, and the tensors that are in none."""

    def __init__(self, names: Names) -> None:
        self.encoder = names.dims["encoder_layers"]
        layers, mtp = names.dims["num_layers"], names.dims["mtp_layers"]
        self.labels = [
            "before the layers",
            *(f"encoder layer {i}" for i in range(self.encoder)),
            *(f"layer {i}" for i in range(layers)),
            *(f"layer {i} (mtp)" for i in range(layers, layers + mtp)),
            "after the layers",
            "carried, scales, ignored",
        ]
        # further rules of a tensor describe its copies
        self._rules = {name: b.rule for b in reversed(names.bound) for name in b.rule.of}

    def of(self, rule: Rule, layers: np.ndarray) -> np.ndarray:
        """Returns the rows of a rule's tensors of these layers."""
        if "layer" in rule.indices:
            return 1 + layers + (0 if rule.encoder else self.encoder)
        return np.full(len(layers), 0 if rule.stage == "first" else len(self.labels) - 2)

    def of_stored(self, s: Stored) -> np.ndarray:
        """Returns the rows of stored tensors."""
        rule = None if s.carried else self._rules.get(s.pieces[0].tensor.partition("@")[0])
        if rule is None:
            return np.full(len(s), len(self.labels) - 1)
        return self.of(rule, s.layer)


def nbytes(s: Stored) -> int:
    """Returns the bytes of one buffer."""
    return s.numel * itemsize(s.stored_as)


def by_file(
    layout: Layout, rows: Rows, labels: Sequence[str], others: Iterable[tuple[int, int]]
) -> list[Column]:
    """Returns a column for each file with tensors, and one for the optimizer's state. Many files
    share columns with their neighbours.

    others: (file, bytes) of tensors that the layout does not have.
    """
    each = -(-len(layout.files) // MAX_COLUMNS) or 1
    total = np.zeros((-(-len(layout.files) // each), len(rows.labels)), "i8")
    for s in layout.stored:
        if not holds_state(s):
            np.add.at(total, (s.file // each, rows.of_stored(s)), nbytes(s))
    for file, size in others:
        total[file // each, -1] += size
    columns = []
    for i, column in enumerate(total):
        files = range(i * each, min((i + 1) * each, len(layout.files)))
        title = " to ".join(labels[n] for n in dict.fromkeys((files[0], files[-1])))
        if column.any():
            columns.append(Column("", str(i) if each == 1 else span(files), title, column))
    return columns


def optimizer(layout: Layout, rows: Rows) -> np.ndarray | None:
    """Returns the bytes of the optimizer's state in each row; None without one."""
    total = np.zeros(len(rows.labels), "i8")
    for s in filter(holds_state, layout.stored):
        np.add.at(total, rows.of_stored(s), nbytes(s))
    return total if total.any() else None


def by_rank(names: Names, layout: Layout, rows: Rows, padded_vocab: int) -> list[list[Column]]:
    """Returns the columns of the virtual stages of each rank of each pipeline stage. Ranks with the
    same bytes in all rows share columns.

    These are the weights that Megatron loads on a rank at `names.parallel`, in whichever files they
    are. Raises UsageError if the sizes do not fit the model.
    """
    parallel, stages = names.parallel, names.stages()
    ep = parallel.ep if names.dims["num_experts"] else 1
    etp = parallel.expert_tp if names.dims["num_experts"] else 1
    # (tp, etp) of all ranks of a stage, and how many ranks have them; ep changes no size
    number = np.arange(math.lcm(parallel.tp, etp * ep))
    pairs, count = np.unique(
        np.stack([number % parallel.tp, number % etp]), axis=1, return_counts=True
    )
    total = np.zeros((parallel.pp, parallel.vpp, pairs.shape[1], len(rows.labels)), "i8")
    sizes = _sizes(layout)
    scope = names.scope()
    for b in names.bound:
        if not b.rule.of or not (b.rule.written and set(b.rule.of) <= sizes.keys()):
            continue
        whole, expert = packed(b.rule, scope, padded_vocab or None), "expert" in b.rule.indices
        ways, rank = (etp, pairs[1]) if expert else (parallel.tp, pairs[0])
        if b.rule.tp == "replicated":
            rank = rank * 0
        each = {t: math.prod(local(b, whole, t, ways)[0]) for t in set(rank.tolist())}
        sizes_of_ranks = np.array([each[t] for t in rank.tolist()]) * sizes[b.rule.of[0]]
        sizes_of_ranks *= len(b.experts) // ep if expert else 1
        for p, v, layers in _places(b, stages, names):
            np.add.at(total[p, v].T, rows.of(b.rule, layers), sizes_of_ranks)
    return [
        column
        for p in range(parallel.pp)
        for column in _alike(p, total[p], pairs, count, len(number))
    ]


def _sizes(layout: Layout) -> Mapping[str, int]:
    """Returns the bytes of an element of each logical weight, by template."""
    return {
        piece.tensor: itemsize(s.dtype)
        for s in layout.stored
        for piece in s.pieces
        if not is_state(piece.tensor)
    }


def _places(
    b: Bound, stages: list[list[list[int]]], names: Names
) -> Iterable[tuple[int, int, np.ndarray]]:
    """Yields the (pipeline rank, virtual stage, layers) in which a rule has tensors."""
    parallel = names.parallel
    if b.rule.encoder:
        yield 0, 0, b.layers
    elif b.rule.mtp or b.rule.stage == "mtp":
        yield *parallel.mtp_stage, b.layers
    elif "layer" not in b.rule.indices:
        last = (parallel.pp - 1, parallel.vpp - 1) if b.rule.stage == "last" else (0, 0)
        yield *last, b.layers[:1]
    else:
        for p, virtual in enumerate(stages):
            for v, numbers in enumerate(virtual):
                yield p, v, b.layers[np.isin(b.numbers, numbers)]


def _alike(
    p: int, total: np.ndarray, pairs: np.ndarray, count: np.ndarray, num_ranks: int
) -> Iterable[list[Column]]:
    """Yields the columns of the ranks of one pipeline stage, once for all ranks that are alike."""
    groups: dict[bytes, list[int]] = {}
    for i in range(pairs.shape[1]):
        groups.setdefault(total[:, i].tobytes(), []).append(i)
    for members in groups.values():
        ranks = int(count[members].sum())
        tp, etp = (sorted(set(pairs[axis, members].tolist())) for axis in (0, 1))
        label = f"{ranks} rank" + "s" * (ranks > 1)
        which = "" if len(groups) == 1 else f", tp ranks {_listed(tp)}, etp ranks {_listed(etp)}"
        title = f"pipeline stage {p}: {ranks:,} of {num_ranks:,} ranks{which}"
        columns = []
        for v in range(total.shape[0]):
            named = f", virtual stage {v}" * (total.shape[0] > 1)
            columns.append(Column(f"pp {p}", label, title + named, total[v, members[0]], ranks))
        yield columns


def _listed(numbers: list[int]) -> str:
    return span(numbers) if numbers[-1] - numbers[0] + 1 == len(numbers) else str(numbers)[1:-1]
