"""Describes all tensors of a layout for the script of a page.

The data is small: tensors whose names differ only in numbers form one group, and the numbers are
stored as runs of equal differences.

    {"parts": ["model.layers.", ".mlp.up_proj.weight"], "digits": [[0,1, 1,60]],
     "layer": [0,1, 1,60], "dtype": "bfloat16", "shape": [4096, 1024], "count": 61, ...}

`[0,1, 1,60]` begins with 0 and then adds 1 sixty times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mckpt.errors import printable
from mckpt.formats.base import Names
from mckpt.formats.megatron.optimizer import holds_state
from mckpt.geometry.box import Layout, Stored
from mckpt.geometry.join import Joined
from mckpt.mapping import Bound
from mckpt.values.dtypes import itemsize

_FIELD = re.compile(r"\{(layer|expert|mtp)\}")
_DIGITS = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_SHIFT = 44  # bits of an offset in a file, which has less than 16 TiB
Group = dict[str, Any]


class Other(NamedTuple):
    """A stored tensor that no box of a layout holds, such as the scales of a quantised weight."""

    key: str
    dtype: str  # "" if it is not known, like the shape
    shape: tuple[int, ...]
    file: int  # -1: not known
    kind: str  # "scales", or "ignored: " and the reason

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype) if self.dtype else 0


def runs(values: np.ndarray) -> list[int]:
    """Returns the differences of neighbours and how often each is repeated, in one list."""
    steps = np.diff(values.astype("i8"), prepend=0)
    first = np.flatnonzero(np.append(True, steps[1:] != steps[:-1])[: len(steps)])
    counts = np.diff(np.append(first, len(steps)))
    out: list[int] = np.stack([steps[first], counts], 1).ravel().tolist()
    return out


class Numbering:
    """The numbers of layers and experts in the keys of a checkpoint.

    local: whether they count from the first of their own rank, as in the files of `torch`.
    """

    def __init__(self, names: Names, local: bool) -> None:
        self.names, self.local = names, local
        # several rules may name one tensor, such as those of the layers of multi-token prediction
        self._by_name: dict[str, list[Bound]] = {}
        for b in names.bound:
            for name in b.rule.of:
                self._by_name.setdefault(name, []).append(b)
        self._places = {
            number: i
            for virtual in (names.stages() if local else ())
            for numbers in virtual
            for i, number in enumerate(numbers)
        }

    def of(self, s: Stored) -> dict[str, np.ndarray]:
        """Returns the numbers that stand for the fields of the key of each tensor; none if the key
        has no fields or their numbers are not known.
        """
        bound = self._bound(s)
        if s.carried or not bound or not _FIELD.search(self.template(s)):
            return {}
        b = bound[0]
        if b.rule.shared:  # the tensors do not say which of the layers they are of
            if len(s) != len(b.numbers) * len(b.experts):
                return {}
            numbers = np.repeat(b.numbers, len(b.experts))
        else:
            table = np.zeros(1 + max(int(x.layers.max(initial=0)) for x in bound), "i8")
            for one in bound:
                table[one.layers] = self._numbers(one)
            numbers = table[s.layer]
        experts = s.expert
        if self.local and "expert" in b.rule.indices:
            experts = experts % (self.names.dims["num_experts"] // self.names.parallel.ep)
        return {"layer": numbers, "expert": experts, "mtp": numbers - b.num_layers}

    def template(self, s: Stored) -> str:
        """Returns the key with its fields, and with the indices of a part of a stacked tensor."""
        bound = self._bound(s)
        parts = bound[0].rule.stacked() if bound and not s.carried else ()
        return s.key + (f"[{','.join(f'{{{index}}}' for index in parts)}]" if parts else "")

    def _bound(self, s: Stored) -> list[Bound]:
        """Returns the rules of stored tensors; of an optimizer's state, those of its weight."""
        weight = s.pieces[0].tensor.partition("@")[0]
        named = self._by_name.get(weight, [])
        return [b for b in named if b.rule.key == s.key] or named

    def keys(self, s: Stored) -> list[str]:
        fields = self.of(s)
        if not fields:
            return [s.key] * len(s)
        rows = zip(*(numbers.tolist() for numbers in fields.values()), strict=True)
        return [s.key.format(layer=n, expert=e, mtp=m) for n, e, m in rows]

    def _numbers(self, b: Bound) -> np.ndarray:
        if b.stack:  # the place in the tensor
            return b.places(b.layers)
        if not self.local:
            return b.numbers
        if b.rule.mtp or b.rule.encoder:
            return b.layers
        return np.array([self._places.get(n, n) for n in b.numbers.tolist()], "i8")


def groups(layout: Layout, numbering: Numbering) -> list[Group]:
    """Returns the tensors of a layout, in its order."""
    out = []
    for s in layout.stored:
        fields = numbering.of(s)
        words = [s.key]
        if fields:
            words = _FIELD.split(numbering.template(s))
        kind = "weight"
        if s.carried:
            kind = "carried"
        elif holds_state(s):
            kind = "optimizer"
        elif s.replica:
            kind = "copy"
        made = {
            "rule": "" if s.carried else printable(s.key),
            "holds": [printable(name) for name in s.tensors],
            "indexed": not s.carried,
            "layer": runs(s.layer),
            "expert": runs(s.expert),
            "file": runs(s.file),
        }
        numbers = [runs(fields[name]) for name in words[1::2]]
        out.append(
            _group(
                words[::2],
                numbers,
                s.stored_as,
                s.shape,
                s.numel * itemsize(s.stored_as),
                len(s),
                kind,
            )
            | made
        )
    return out


def others(tensors: Iterable[Other]) -> Iterator[Group]:
    """Yields the tensors that the layout does not have. Names that differ in numbers only are
    one group.
    """
    alike: dict[tuple[Any, ...], list[tuple[Other, list[int]]]] = {}
    for tensor in tensors:
        words = _DIGITS.split(tensor.key)
        same = (tuple(words[::2]), tensor.dtype, tensor.shape, tensor.kind)
        alike.setdefault(same, []).append((tensor, [int(n) for n in words[1::2]]))
    for (parts, dtype, shape, kind), members in alike.items():
        digits = np.array([numbers for _, numbers in members], "i8").reshape(len(members), -1).T
        numbers = [runs(column) for column in digits]
        made = _group(parts, numbers, dtype, shape, members[0][0].nbytes, len(members), kind)
        yield made | {"file": runs(np.array([tensor.file for tensor, _ in members]))}


def _group(
    parts: Iterable[str],
    digits: list[list[int]],
    dtype: str,
    shape: tuple[int, ...],
    size: int,
    count: int,
    kind: str,
) -> Group:
    return {
        "parts": [printable(part) for part in parts],
        "digits": digits,
        "dtype": printable(dtype),
        "shape": list(shape),
        "bytes": size,
        "count": count,
        "kind": printable(kind),
    }


# --------------------------------------------------------------------------- where shards come from


def origins(joined: Joined, source: Layout, target: Layout) -> list[Mapping[str, Any]]:
    """Returns for each group of the target the numbers of the source's tensors, in the order of the
    source's groups, that each of its tensors is made of.

    "each": how many they are, the same number for all tensors of the group, or runs of numbers.
    "ids": if the number is the same, the first of each tensor, then the second of each, and so on.
    """
    copies = joined.copies
    made = _holder(target.stored, copies["dst_file"], joined.first_bytes())
    read = _holder(source.stored, copies["src_file"], copies["src_at"])
    pairs = np.unique(np.stack([made, read], 1), axis=0) if len(copies) else np.empty((0, 2), "i8")
    counts = np.bincount(pairs[:, 0], minlength=sum(map(len, target.stored)))
    out: list[Mapping[str, Any]] = []
    first = at = 0
    for s in target.stored:
        each = counts[first : first + len(s)]
        ids = pairs[at : at + int(each.sum()), 1]
        first, at = first + len(s), at + len(ids)
        if len(s) and (each == each[0]).all():
            out.append({"each": int(each[0]), "ids": runs(ids.reshape(len(s), -1).T.ravel())})
        else:
            out.append({"each": runs(each), "ids": runs(ids)})
    return out


def _holder(stored: list[Stored], file: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns the number of the tensor that holds each byte `at` of a `file`."""
    filled = [s for s in stored if len(s)]
    starts = np.concatenate([(s.file.astype("i8") << _SHIFT) + s.at for s in filled])
    # of tensors that begin at one byte, the last is the one that is read
    read = np.repeat([not s.replica and s.numel > 0 for s in filled], list(map(len, filled)))
    order = np.lexsort((read, starts))
    wanted = (file.astype("i8") << _SHIFT) + at
    return order[np.searchsorted(starts[order], wanted, side="right") - 1]
