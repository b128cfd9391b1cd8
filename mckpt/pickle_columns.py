"""Objects that a pickle makes 10**5 times, as columns of numbers: runs of them are taken out before the C unpickler makes each.

    pickle, runs -> `take_out` -> a shorter pickle, with a Column for each run in it -> unpickled -> `fill` -> columns with their fields

That is right only where lists and dicts take all of a run, and nothing else touches it: `safe_pickle.scan` leaves out runs of which that is
not known. What refers to one of the objects again gets GONE, which a reader must refuse, and read the pickle whole.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mckpt.lazy import distinct
from mckpt.lazy import numpy as np


class Run(NamedTuple):
    """Repetitions in a pickle that differ in nothing but numbers, memo indices and texts, each as many bytes as in the others."""

    begin: int  # byte
    num: int
    memo: int  # entries before it
    puts: int  # memo entries of each
    form: bytes  # one of them, zero where they differ


GONE = object()  # in place of an object that is in a Column


class _Objects:
    """Many objects of one class, made with the same arguments or filled with the same fields."""

    __slots__ = ("fields", "made")

    def __init__(self, made: Any, fields: Any) -> None:
        self.made, self.fields = made, fields


class Column:
    """Some objects that a pickle makes of one class and fills with the same fields, one behind the other; stands where they would."""

    __slots__ = ("begin", "end", "objects")

    def __init__(self, objects: _Objects, begin: int, end: int) -> None:
        self.objects, self.begin, self.end = objects, begin, end

    def __setstate__(self, state: Any) -> None:
        """Opcode BUILD, which is meant for one of the objects."""
        raise ValueError("a state for one object of a column")

    @property
    def made(self) -> Any:
        """Their class."""
        return self.objects.made

    def __contains__(self, field: str) -> bool:
        return field in self.objects.fields

    def rows(self, field: str) -> Iterable[Any]:
        """The values of one field, one by one: numbers, tuples of numbers, or what the pickle held already. KeyError if there is none."""
        value, here = self.objects.fields[field], slice(self.begin, self.end)
        if isinstance(value, np.ndarray):
            return value[here].tolist()
        if type(value) is tuple and value:
            return zip(*(axis[here].tolist() for axis in value), strict=True)
        return value[here] if type(value) is list else [value] * (self.end - self.begin)


class TakenOut(NamedTuple):
    """A pickle without its runs of objects."""

    pickle: bytes  # of a tuple: the value, and the memo entries `ids`
    columns: dict[int, Column]  # what its persistent ids stand for, once each; the persistent id None is GONE
    ids: list[int]
    objects: list[_Objects]

    def fill(self, held: Sequence[Any], size: Any) -> None:
        """Gives the columns their class and fields. `held`: what the memo entries `ids` hold; `size`: torch.Size. ValueError where that fails."""
        memo = dict(zip(self.ids, held, strict=True))
        for objects in self.objects:
            objects.made = _one(objects.made, memo)
            objects.fields = {_one(name, memo): _known(value, memo, size) for name, value in objects.fields}


def take_out(data: bytes, runs: Sequence[Run], frames: Sequence[int], stop: int) -> TakenOut:
    """`frames` and `stop`: the bytes of those opcodes. ValueError and the like where it cannot be done.

    A placeholder is left for each run, and GONE in each memo entry that its objects would have had, so that all others keep their numbers. At the
    end of the pickle those memo entries are asked for that the runs refer to.
    """
    forms: dict[bytes, list[Run]] = {}
    for run in runs:
        forms.setdefault(run.form, []).append(run)
    every: list[_Objects] = []
    columns: dict[int, Column] = {}
    cuts = {at: (at + 9, b"") for at in frames}  # byte -> where to go on, and what to put there; a frame's length would be wrong
    ids: set[int] = set()
    for form, alike in forms.items():
        size, starts = len(form), [0, *itertools.accumulate(run.num for run in alike)]
        rows = np.concatenate([np.frombuffer(data, "u1", run.num * size, run.begin) for run in alike]).reshape(-1, size)
        try:
            found = _symbols(rows)
        except (ValueError, TypeError, IndexError):  # opcodes that the C unpickler follows itself
            continue
        gets = [get for objects in found for get in _gets((objects.made, objects.fields))]
        before = np.repeat([run.memo for run in alike], [run.num for run in alike])
        if any((get.ids >= before).any() for get in gets):
            raise ValueError("refers to what is not in the memo yet, or to one of its own objects")
        ids.update(*(distinct(get.ids).tolist() if (get.ids != get.ids[0]).any() else get.ids[:1].tolist() for get in gets))
        every += found
        for run, begin in zip(alike, starts[:-1], strict=True):
            placed = range(len(columns), len(columns) + len(found))
            columns.update(zip(placed, (Column(objects, begin, begin + run.num) for objects in found), strict=True))
            gone = b"NQ" + b"\x94" * (run.puts * run.num) + b"0"
            cuts[run.begin] = run.begin + run.num * size, gone + b"".join([b"J%bQ" % struct.pack("<i", n) for n in placed])
    pieces, at = [], 0
    for begin, (end, instead) in sorted(cuts.items()):
        pieces += [data[at:begin], instead]
        at = end
    pieces += [data[at:stop], b"(", *(b"j" + struct.pack("<I", i) for i in ids), b"t\x86."]
    return TakenOut(b"".join(pieces), columns, list(ids), every)


class _Get(NamedTuple):
    """What memo entries hold, [num]."""

    ids: np.ndarray


class _Texts(NamedTuple):
    """Strings, [num]."""

    values: list[str]


class _Call(NamedTuple):
    """REDUCE: function, arguments."""

    parts: tuple[Any, Any]


def _symbols(rows: np.ndarray) -> list[_Objects]:
    """What runs of one form [num, bytes] push: their opcodes followed once, over columns in place of values.

    ValueError, TypeError or IndexError if that is anything but filled objects.

    The columns: an array [num] of numbers, `_Texts`, `_Get`, `_Call`, tuples of them, a list of (name, value) for a dict, and None, True and False.
    """
    num, size = rows.shape
    row, at = rows[0].tobytes(), 0
    stack: list[Any] = []
    marks: list[int] = []

    def column(start: int, stop: int, dtype: str) -> np.ndarray:
        return np.ascontiguousarray(rows[:, start:stop]).view(dtype).ravel()

    while at < size:
        op = row[at]
        at += 1
        if op in _NUMBERS:
            dtype = np.dtype(_NUMBERS[op])
            value = column(at, at + dtype.itemsize, dtype.str)
            at += dtype.itemsize
            stack.append(_Get(value) if op in b"hj" else value)
        elif op == 0x8A and row[at] in range(1, 9):  # LONG1
            wide = np.empty((num, 8), "u1")
            wide[:, : row[at]] = rows[:, at + 1 : at + 1 + row[at]]
            wide[:, row[at] :] = np.where(rows[:, at + row[at], None] < 128, 0, 255)
            stack.append(wide.view("<i8").ravel())
            at += 1 + row[at]
        elif op in b"\x8cX":
            width = _SIZED[op]
            length = int.from_bytes(row[at : at + width], "little")
            raw = rows[:, at + width : at + width + length].tobytes()
            stack.append(_Texts([raw[i : i + length].decode("utf-8", "surrogatepass") for i in range(0, num * length, length)]))
            at += width + length
        elif op in b"N\x88\x89":
            stack.append({0x4E: None, 0x88: True, 0x89: False}[op])
        elif op == 0x28:
            marks.append(len(stack))
        elif op in b")]}":
            stack.append(() if op == 0x29 else [])
        elif op in b"\x85\x86\x87t":
            start = marks.pop() if op == 0x74 else len(stack) - (op - 0x84)
            stack[start:] = [tuple(stack[start:])]
        elif op in b"R\x81":
            args = stack.pop()
            stack[-1] = _Call((stack[-1], args)) if op == 0x52 else _Objects(stack[-1], args)
        elif op == 0x75:  # SETITEMS
            start = marks.pop()
            stack[start - 1] += zip(stack[start::2], stack[start + 1 :: 2], strict=True)
            del stack[start:]
        elif op == 0x62:  # BUILD
            state = stack.pop()
            if not isinstance(stack[-1], _Objects) or stack[-1].fields != () or type(state) is not list:
                raise ValueError("a state that is no dict")
            stack[-1].fields = state
        elif op != 0x94:
            raise ValueError("an opcode that makes no such object")
    if not all(isinstance(value, _Objects) and type(value.fields) is list for value in stack):
        raise ValueError("no objects with a state")
    return stack


_SIZED = {0x8C: 1, 0x58: 4}  # opcodes with a text behind them, and the width of its length
_NUMBERS = {0x4B: "u1", 0x4D: "<u2", 0x4A: "<i4", 0x68: "u1", 0x6A: "<u4"}  # opcodes with a number behind them: K M J h j


def _gets(value: Any) -> Iterator[_Get]:
    """Those within a value of `_symbols`."""
    if isinstance(value, _Get):
        yield value
    elif isinstance(value, (tuple, list)) and not isinstance(value, _Texts):
        for part in value:
            yield from _gets(part)


def _known(value: Any, memo: dict[int, Any], size: Any) -> Any:
    """A value of `_symbols` as a field. ValueError for what is none."""
    if isinstance(value, _Get):
        return list(map(memo.__getitem__, value.ids.tolist()))
    if isinstance(value, _Texts):
        return value.values
    if isinstance(value, _Call):
        function, args = value.parts
        if _one(function, memo) is not size or len(args) != 1 or type(args[0]) is not tuple:
            raise ValueError("a call of anything but torch.Size")
        (value,) = args
    if type(value) is tuple and not all(isinstance(part, np.ndarray) for part in value):
        raise ValueError("a tuple of anything but numbers")
    if type(value) is list or isinstance(value, _Objects):
        raise ValueError("a list, a dict or an object")
    return value


def _one(value: Any, memo: dict[int, Any]) -> Any:
    """What all of a `_Get` are. ValueError if it is none, or they differ."""
    if not isinstance(value, _Get) or (value.ids != value.ids[0]).any():
        raise ValueError("a name or a class that is not the same for all")
    return memo[int(value.ids[0])]
