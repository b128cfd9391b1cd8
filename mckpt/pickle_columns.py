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

# Some opcodes in a row: bytes where they are known, and where an argument is open an opcode for all of its kind, which is one of these.
Form = tuple["bytes | int", ...]
NUMBER, GET, SHORT_TEXT, TEXT, FLOAT = b"Kh\x8cXG"  # a number up to 8 bytes, a memo index, texts up to 255 bytes


class Run(NamedTuple):
    """Repetitions in a pickle, one behind the other, that differ in nothing but what their form leaves open."""

    begins: np.ndarray  # the byte of each
    end: int  # the byte behind the last
    memo: int  # entries before it
    puts: int  # memo entries of each
    form: Form


_MAX_OPEN = 5 + 255  # bytes of an open opcode, its argument, and what else is looked at there
_MIN_ANCHOR, _MAX_ANCHOR = 3, 16  # bytes; shorter ones would be found in numbers
_WINDOW, _MAX_WINDOW = 1 << 16, 1 << 22  # bytes looked at at once
_WAIT, _MAX_WAIT, _FEW = 16, 1 << 10, 16  # repetitions


class Gone:
    """In place of an object that is in a Column, and of what was made for it."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Opcode BUILD, which is meant for the object."""
        raise ValueError("a state for an object of a column")


GONE = Gone()


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
    objects: list[list[_Objects]]  # for each form what one repetition of it makes

    def fill(self, held: Sequence[Any], size: Any) -> None:
        """Gives the columns their class and fields. `held`: what the memo entries `ids` hold; `size`: torch.Size. ValueError where that fails."""
        memo = dict(zip(self.ids, held, strict=True))
        for found in self.objects:
            for objects in found:
                objects.made = _one(objects.made, memo)
                objects.fields = {_one(name, memo): _known(value, memo, size) for name, value in objects.fields}
            if len({id(objects.made) for objects in found}) < len(found):
                raise ValueError("objects of one class in turns, whose columns would stand one behind the other")


def take_out(data: bytes, runs: Sequence[Run], frames: Sequence[int], stop: int) -> TakenOut:
    """`frames` and `stop`: the bytes of those opcodes. ValueError and the like where it cannot be done.

    A placeholder is left for each run, and in each memo entry that it would have set GONE, so that all others keep their numbers, or the text that
    it was. At the end of the pickle those memo entries are asked for that the runs refer to.
    """
    forms: dict[Form, list[Run]] = {}
    for run in runs:
        forms.setdefault(run.form, []).append(run)
    every: list[list[_Objects]] = []
    columns: dict[int, Column] = {}
    cuts = {at: (at + 9, b"") for at in frames}  # byte -> where to go on, and what to put there; a frame's length would be wrong
    ids: set[int] = set()
    for form, alike in forms.items():
        nums = [len(run.begins) for run in alike]
        try:
            found, puts = _symbols(data, np.concatenate([run.begins for run in alike]), form)
        except (ValueError, TypeError, IndexError):  # opcodes that the C unpickler follows itself
            continue
        if len({int(objects.made.ids[0]) for objects in found if isinstance(objects.made, _Get)}) < len(found):  # see `fill`
            continue
        gets = [get for objects in found for get in _gets((objects.made, objects.fields))]
        before = np.repeat([run.memo for run in alike], nums)
        if any((get.ids >= before).any() for get in gets):
            raise ValueError("refers to what is not in the memo yet, or to one of its own objects")
        ids.update(*(distinct(get.ids).tolist() if (get.ids != get.ids[0]).any() else get.ids[:1].tolist() for get in gets))
        every.append(found)
        for run, (begin, end) in zip(alike, itertools.pairwise(itertools.accumulate(nums, initial=0)), strict=True):
            placed = range(len(columns), len(columns) + len(found))
            columns.update(zip(placed, (Column(objects, begin, end) for objects in found), strict=True))
            gone = b"NQ" + _memoised(puts, begin, end) + b"0"
            cuts[int(run.begins[0])] = run.end, gone + b"".join([b"J%bQ" % struct.pack("<i", n) for n in placed])
    pieces, at = [], 0
    for begin, (end, instead) in sorted(cuts.items()):
        pieces += [data[at:begin], instead]
        at = end
    pieces += [data[at:stop], b"(", *(b"j" + struct.pack("<I", i) for i in ids), b"t\x86."]
    return TakenOut(b"".join(pieces), columns, list(ids), every)


def _memoised(puts: Sequence[Any], begin: int, end: int) -> bytes:
    """Opcodes that set the memo entries of repetitions `begin` to `end` to what is on the stack, or to texts: others may refer to these."""
    if not any(isinstance(put, _Texts) for put in puts):
        return b"\x94" * (len(puts) * (end - begin))
    num, each = end - begin, list[list[bytes]]()
    for put in puts:
        each += [put.opcodes[begin:end], [b"\x940"] * num] if isinstance(put, _Texts) else [[b"\x94"] * num]
    return b"".join(itertools.chain.from_iterable(zip(*each, strict=True)))


class _Get(NamedTuple):
    """What memo entries hold, [num]."""

    ids: np.ndarray


class _Texts(NamedTuple):
    """Strings, [num], as their opcodes; `head` bytes before each text."""

    opcodes: list[bytes]
    head: int


class _Call(NamedTuple):
    """REDUCE: function, arguments."""

    parts: tuple[Any, Any]


class Ahead:
    """Where the repetitions of a form lie further on in a pickle, many at once: one by one takes a microsecond each.

    They are looked for by bytes that all of them hold, their anchor, which may stand elsewhere too: a guess. What proves it: from each anchor
    the form is followed to its end, from there the next one to its anchor, and the two meet.
    """

    anchors: np.ndarray  # bytes, of those that were looked at
    begins: np.ndarray  # where the form begins that each is of, if it is of one
    ends: np.ndarray
    wrong: np.ndarray  # the numbers of those that are of none

    def __init__(self, form: Form, parts: Sequence[bytes]) -> None:
        """`parts`: those of the form in one of them, the opcodes where it is open with their arguments."""
        self.form, self.size = form, sum(map(len, parts))
        one, around = b"".join(parts), []
        for i in (i for i, part in enumerate(form) if isinstance(part, bytes)):
            # with the memo indices beside them, which name classes and fields
            low, high = i - (i > 0 and form[i - 1] == GET), i + 1 + (form[i + 1 : i + 2] == (GET,))
            around.append((b"".join(parts[low:high])[:_MAX_ANCHOR], low))
        self.anchor, self.place = max(around, key=lambda found: (-one.count(found[0]), len(found[0])), default=(b"", 0))
        self.rare = min(range(len(self.anchor)), key=lambda i: one.count(self.anchor[i]), default=0)  # of its bytes
        self.wait = _WAIT  # repetitions that had better be taken one by one before the next are asked for
        self.stop, self.window, self.taken = 0, _WINDOW, 0  # bytes: up to where was looked, how far, how many of these were taken

    def take(self, data: bytes, at: int) -> tuple[np.ndarray, int]:
        """Where more of them begin [num], the first at `at` and each where the one before ends, and the byte behind the last.

        Of few it says that there are none.
        """
        self.wait = min(2 * self.wait, _MAX_WAIT)
        if len(self.anchor) >= _MIN_ANCHOR:
            if at >= self.stop:
                self._look(np.frombuffer(data, "u1"), at)
            first = int(np.searchsorted(self.anchors, at))
            if first < len(self.begins) and self.begins[first] == at:
                wrong = int(np.searchsorted(self.wrong, first))
                last = int(self.wrong[wrong]) if wrong < len(self.wrong) else len(self.begins)
                if last - first >= _FEW:
                    end = int(self.ends[last - 1])
                    self.taken, self.wait = self.taken + end - at, 1
                    return self.begins[first:last], end
        return np.zeros(0, "i8"), at

    def _look(self, raw: np.ndarray, at: int) -> None:
        self.window = min(4 * self.window, _MAX_WINDOW) if self.taken > self.window // 2 else _WINDOW
        self.stop, self.taken = at + self.window, 0
        # what is followed below stays within the pickle, wherever a wrong guess leads
        most = sum(len(part) if isinstance(part, bytes) else _MAX_OPEN for part in self.form)
        num = max(min(self.window, len(raw) - 2 * most - at), 0)
        found = np.flatnonzero(raw[at + self.rare : at + self.rare + num] == self.anchor[self.rare]) + at
        whole = f"V{len(self.anchor)}"
        found = found[at_each_byte(raw, whole)[found] == np.frombuffer(self.anchor, whole)]
        if len(found) * self.size > 4 * self.window:  # more than there can be of any use
            found = found[:0]
        _, ends, fits = follow(raw, found, self.form[self.place :])
        begins = np.concatenate([np.array([at], "i8"), ends[:-1]])[: len(found)]
        _, met, fit = follow(raw, begins, self.form[: self.place])
        self.anchors, self.begins, self.ends = found, begins, ends
        self.wrong = np.flatnonzero(~(fits & fit & (met == found)))


def follow(raw: np.ndarray, at: np.ndarray, form: Form, known: bool = False) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Follows a form from each of the bytes `at` [num] of a pickle, all at once.

    The bytes [num] of each open opcode, those behind the form, and whether all of it was there, which `known` says it is; where it was
    not, the bytes mean nothing.
    """
    places: list[np.ndarray] = []
    fits = np.ones(len(at), bool)
    for part in form:
        if isinstance(part, bytes):
            if not known:
                fits &= at_each_byte(raw, f"V{len(part)}")[at] == np.frombuffer(part, f"V{len(part)}")
            at = at + len(part)
            continue
        places.append(at)
        steps: Any = 9  # of a float
        if part in (NUMBER, GET):
            steps = np.frombuffer(_BYTES_OF_NUMBER if part == NUMBER else _BYTES_OF_GET, "u1")[raw[at]]
            fits &= steps > 0
            if part == NUMBER and (long := steps == _LONG).any():
                size = raw[at + 1]
                fits &= ~long | (size <= 8)
                steps = np.where(long, 2 + np.minimum(size, 8), steps)
        else:
            fits &= raw[at] == part
            if part != FLOAT:
                steps = 1 + _LENGTH[part] + raw[at + 1].astype("i8")
            if part == TEXT:
                fits &= at_each_byte(raw, "V3")[at + 2] == np.zeros(1, "V3")
        at = at + steps
    return places, at, fits


def at_each_byte(raw: np.ndarray, dtype: str) -> np.ndarray:
    """What begins at each byte, read as `dtype`: a view that overlaps itself."""
    size = np.dtype(dtype).itemsize
    return np.ndarray(max(len(raw) + 1 - size, 0), dtype, raw, 0, (1,))


def _symbols(data: bytes, begins: np.ndarray, form: Form) -> tuple[list[_Objects], list[Any]]:
    """What repetitions of one form push that begin at those bytes [num], and put: their opcodes followed once, over columns in place of values.

    ValueError, TypeError or IndexError if that is anything but filled objects.

    The columns: an array [num] of numbers, `_Texts`, `_Get`, `_Call`, tuples of them, a list of (name, value) for a dict, and None, True and False.
    """
    places = iter(follow(np.frombuffer(data, "u1"), begins, form, known=True)[0])
    stack: list[Any] = []
    marks: list[int] = []
    puts: list[Any] = []
    for part in form:
        if isinstance(part, int):
            stack.append(_column(data, next(places), part))
            continue
        opcodes = iter(part)
        for op in opcodes:
            if op in b"hj":
                number = int.from_bytes([next(opcodes) for _ in range(1 if op == 0x68 else 4)], "little")
                stack.append(_Get(np.full(len(begins), number)))
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
            elif op == 0x94:
                puts.append(stack[-1])
            else:
                raise ValueError("an opcode that makes no such object")
    if not all(isinstance(value, _Objects) and type(value.fields) is list for value in stack):
        raise ValueError("no objects with a state")
    return stack, puts


def _column(data: bytes, at: np.ndarray, part: int) -> Any:
    """The values of the open opcodes at those bytes [num]."""
    raw = np.frombuffer(data, "u1")
    if part == FLOAT:
        raise ValueError("an opcode that makes no such object")
    if part in (SHORT_TEXT, TEXT):
        head = 1 + _LENGTH[part]
        ends = at + head + raw[at + 1].astype("i8")  # numpy 1 would add bytes as bytes
        return _Texts([data[a:b] for a, b in zip(at.tolist(), ends.tolist(), strict=True)], head)
    op, eight = raw[at], at_each_byte(raw, "<i8")  # behind each of a run are more than 8 bytes
    if (op == op[0]).all() and op[0] in _DTYPES:
        values = at_each_byte(raw, _DTYPES[op[0]])[at + 1].astype("i8")
    else:
        most = np.zeros(256, "i8")
        most[list(_DTYPES)] = [(1 << 8 * np.dtype(dtype).itemsize) - 1 for dtype in _DTYPES.values()]
        values = eight[at + 1] & most[op]
        if (negative := (op == 0x4A) & (values >> 31 == 1)).any():
            values[negative] -= 1 << 32
        if len(long := np.flatnonzero(op == 0x8A)):  # LONG1: says of how many bytes it is, and has its sign in the last
            size = raw[at[long] + 1].astype("i8")
            over = 64 - 8 * np.maximum(size, 1)
            values[long] = np.where(size == 0, 0, eight[at[long] + 2] << over >> over)
    return _Get(values) if part == GET else values


_LENGTH = {SHORT_TEXT: 1, TEXT: 4}  # bytes of the length of a text
_DTYPES = {0x4B: "u1", 0x4D: "<u2", 0x4A: "<i4", 0x68: "u1", 0x6A: "<u4"}  # K M J h j
_LONG = 127  # in place of what LONG1 takes, which it says itself
# bytes of each opcode with its argument; 0: it is none
_BYTES_OF_NUMBER = bytes({0x4B: 2, 0x4D: 3, 0x4A: 5, 0x8A: _LONG}.get(op, 0) for op in range(256))
_BYTES_OF_GET = bytes({0x68: 2, 0x6A: 5}.get(op, 0) for op in range(256))


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
        return [opcode[value.head :].decode("utf-8", "surrogatepass") for opcode in value.opcodes]
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
