"""Reads and writes the pickles of Megatron and torch without importing or calling anything they name.

Reading: every global that a pickle names becomes an inert class (`Global`); calling it, building it and filling it only records
(`Record`). Writing: records are emitted as they were read, by an encoder of a dozen types that knows no module; so the same
records, made by hand, write a new checkpoint.

    pickle bytes -> scan (what could hurt) -> C unpickler over inert classes -> dict, list, str, int, Record, Storage ...
                                           -> what repeats 10**5 times, if the caller wants it so, as columns of numbers (`Column`)

The C unpickler can only reach what `find_class` gives it, but it believes the bytes, so `scan` reads each opcode first:

  hurt by                                         bounded by
  LONG_BINPUT with a huge index: 16 bytes each    index <= size of the pickle / 4
  a string, number or frame longer than the file  lengths against the bytes that are left
  nested tuples as dict keys: hashing recurses    a tuple that holds tuples has at most MAX_NESTED elements in all
  in C and visits what is shared again and again
  copying a list again and again by REDUCE        nothing is called but OrderedDict() without arguments
  one-byte opcodes that make an object            at most 64 bytes of memory per byte of pickle (`]`, `}`); `max_bytes` bounds those
  many distinct globals, 1.5 KB each              MAX_GLOBALS
  opcodes no checkpoint has                       refused: text protocol 0, INST, OBJ, EXT, DUP, sets, out-of-band buffers

Seen (2 cores, Python 3.11): see `scan` for its speed. Not bounded: the time an attacker can waste, beyond that it is linear in the
size of the pickle times MAX_NESTED, plus dict keys chosen to collide.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import math
import pickle
import re
import struct
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from mckpt import dtypes, pickle_columns
from mckpt.errors import PickleError
from mckpt.pickle_columns import GONE, Ahead, Form, Run

MAX_BYTES = 256 << 20  # of a pickle, unless the caller says otherwise; the largest data.pkl seen (70,000 tensors) has 12 MB
MAX_NESTED = 2000  # elements in a tuple of tuples; the largest seen is Python's RNG state, 628
MAX_GLOBALS = 4096  # distinct globals of one pickle; a real common.pt names 60

# ------------------------------------------------------------------------------------------------ placeholders


class Global(type):
    """A class that stands for one global (module, name) of a pickle. Nothing is ever imported."""

    module: str
    name: str

    def __call__(cls, *args: Any) -> Any:
        """Opcode REDUCE: what the pickle wants called, with what."""
        if not args and cls.name == "OrderedDict" and cls.module == "collections":
            return Ordered()
        made: Any = cls  # a Record's class: all that this metaclass makes are
        record = Record.__new__(made, *args)
        record.opcode = b"R"
        return record

    def __repr__(cls) -> str:
        return f"<{cls.module[:80]}.{cls.name[:80]}>"


class Record(metaclass=Global):
    """What the pickle did with a global: called or built it with `args`, gave it `state`, dict `items` and list `entries`."""

    __slots__ = ("args", "entries", "items", "opcode", "state")
    module = name = ""
    opcode: bytes
    args: tuple[Any, ...]
    state: Any
    items: list[tuple[Any, Any]] | None
    entries: list[Any] | None

    def __new__(cls, *args: Any) -> Record:
        """Opcode NEWOBJ arrives here directly."""
        record = object.__new__(cls)
        record.opcode, record.args, record.state, record.items, record.entries = b"\x81", args, None, None, None
        return record

    def __setstate__(self, state: Any) -> None:
        """Opcode BUILD."""
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """SETITEM(S): a dict subclass."""
        if self.items is None:
            self.items = []
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """APPEND(S): a list subclass."""
        if self.entries is None:
            self.entries = []
        self.entries.append(value)

    def __repr__(self) -> str:
        return repr(type(self))[:-1] + " object>"  # never what it holds: that may be exponential


class Ordered(OrderedDict[Any, Any]):
    """collections.OrderedDict as a pickle makes it; of attributes it may have only the `_metadata` of Module.state_dict()."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or set(state) - {"_metadata"}:
            raise pickle.UnpicklingError("an OrderedDict is given attributes other than _metadata")
        self.__dict__.update(state)


class Storage:
    """torch's persistent id ('storage', class, key, location, numel): the bytes are the zip record data/<key>."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        if not (type(pid) is tuple and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Global)):
            raise pickle.UnpicklingError("a persistent id that is no storage of torch")
        if not (type(pid[2]) is str and type(pid[3]) is str and type(pid[4]) is int and pid[4] >= 0):
            raise pickle.UnpicklingError("a storage of torch with an odd key, location or size")
        self.pid: tuple[str, Global, str, str, int] = pid

    @property
    def key(self) -> str:
        """The zip record is data/<key>."""
        return self.pid[2]

    @property
    def dtype(self) -> str | None:
        """The dtype of its elements; None: bytes of any dtype (UntypedStorage), or a dtype that mckpt does not know."""
        return dtypes.OF_STORAGE.get(self.pid[1].name)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        dtype = self.dtype
        return self.pid[4] * (dtypes.itemsize(dtype) if dtype else _OTHER_STORAGES.get(self.pid[1].name, 1))

    def __repr__(self) -> str:
        return f"<storage {self.key[:80]}>"


_OTHER_STORAGES = {"ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4}
_GLOBALS: weakref.WeakValueDictionary[tuple[str, str], Global] = weakref.WeakValueDictionary()


def glob(module: str, name: str) -> Global:
    """The inert class of module.name; one object per name, so that identity survives reading and writing."""
    found = _GLOBALS.get((module, name))
    if found is None:
        # setdefault: two threads may come here at once
        made = Global("Global", (Record,), {"__slots__": (), "module": module, "name": name})
        found = _GLOBALS.setdefault((module, name), made)
    return found


# ------------------------------------------------------------------------------------------------ the scan

_ARGUMENT = {0x80: 1, 0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8, 0x68: 1, 0x6A: 4, 0x71: 1, 0x72: 4}  # bytes after PROTO K M J G h j q r
_SIZED = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8, 0x96: 8, 0x55: 1, 0x54: 4, 0x8A: 1, 0x8B: 4}  # width of their length
_POPS = {0x61: 1, 0x73: 2, 0x62: 1}  # APPEND SETITEM BUILD: take that many, and fill what is below
_PUTS = b"qr\x94"  # BINPUT LONG_BINPUT MEMOIZE
_HEAVY = 0xFFFF  # the most that the memo says of a weight: far more than MAX_NESTED
_ENDS = b"bseuaR\x81\x85\x86\x87t0"  # something is finished: behind it (and its put) a repetition may begin
_TEXTS = (b"X", b"\x8c")  # a name and what the memo holds: an item of a dict
_PUT_BYTES = (b"q", b"r", b"\x94")
_ALIKE = bytes.maketrans(b"MJ\x8aj", b"KKKh")  # numbers, memo indices
_NUMBER = b"(?:K.|M..|J....|\\x8a(?:%b))" % b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(9))
_GET = b"(?:h.|j....)"
_SMALL = 1 << 14  # bytes; below, a scan takes 3 ms at most
_PERIOD = 16  # ends in a unit: an item of .metadata has 7, a tensor in a state dict 6
_MAX_UNIT = 1 << 10  # bytes: an item has 110 to 200
_BATCH = 1000  # what a pickler writes of a list or dict between two marks
_MAX_UNITS = 32  # what a regular expression tries is bounded by these two


def _refuse(where: str, at: int, what: str) -> PickleError:
    return PickleError(f"{where}: byte {at} of the pickle: {what}. No checkpoint is written so; nothing in it was run")


class Scanned(NamedTuple):
    """What `scan` saw."""

    steps: int  # opcodes that it followed one by one
    stop: int  # byte of the opcode STOP
    frames: list[int]  # bytes of the opcodes FRAME
    # of those that only push, where lists and dicts take all of what they push, and nothing else touches it; none with storages
    runs: list[Run]


def scan(data: bytes, where: str) -> Scanned:
    """Proves that the C unpickler can take `data` without harm; reads each opcode once, runs none.

    Raises PickleError with the offset and the opcode. 1 MB costs 0.1 to 0.2 s one opcode at a time. Where a pickle repeats itself, and
    only there can it be large, `_Repeats` takes what repeats as a whole: 1 MB in 0.005 to 0.02 s.
    """
    bound = len(data) // 4 + 256  # a memo put follows a push: 1 + 5 bytes, or 1 + 2 for the first 256
    stack: list[int] = []  # weight of each element: 1, or for a tuple the number of leaves that hashing it visits
    marks: list[int] = []
    memo = array("H")  # the same, at most _HEAVY; 0: not set
    num_set = 0
    at, size, steps = 0, len(data), 0
    frames: list[int] = []
    runs: list[Run] = []
    storages = False
    repeats = _Repeats(data, stack, memo, runs) if size >= _SMALL else None

    def put(index: int) -> None:
        nonlocal num_set, repeats
        weight = min(stack[-1], _HEAVY)
        if index == len(memo):
            memo.append(weight)
            num_set += 1
            return
        repeats = None  # no pickler does that
        runs.clear()
        if index > len(memo):
            memo.frombytes(bytes(2 * (index + 1 - len(memo))))
        num_set += memo[index] == 0
        memo[index] = weight

    try:
        while True:
            op = data[at]
            here = at
            at += 1
            steps += 1
            if op in _ARGUMENT:
                width = _ARGUMENT[op]
                arg = int.from_bytes(data[at : at + width], "little")
                at += width
                if at > size:
                    raise IndexError
                if op in (0x68, 0x6A):  # BINGET LONG_BINGET
                    if arg >= len(memo) or not memo[arg]:
                        raise _refuse(where, here, f"reads memo {arg}, which nothing has set")
                    stack.append(memo[arg])
                elif op in (0x71, 0x72):  # BINPUT LONG_BINPUT
                    if arg > bound:
                        raise _refuse(where, here, f"opcode LONG_BINPUT sets memo {arg}, but {size} bytes of pickle have room for {bound}")
                    put(arg)
                elif op != 0x80:
                    stack.append(1)
            elif op == 0x94:  # MEMOIZE
                put(num_set)
            elif op in _SIZED:
                at = _sized(data, at, _SIZED[op], where)
                stack.append(1)
            elif op in (0x85, 0x86, 0x87, 0x74):  # TUPLE1 TUPLE2 TUPLE3 TUPLE
                start = marks.pop() if op == 0x74 else len(stack) - (op - 0x84)
                if start < (marks[-1] if marks else 0):
                    raise IndexError
                parts = stack[start:]
                weight = sum(parts) + 1
                if weight > MAX_NESTED and weight > len(parts) + 1:
                    raise _refuse(where, here, f"opcode TUPLE makes a nest of {weight} elements; {MAX_NESTED} is the most allowed")
                del stack[start:]
                stack.append(weight if parts else 1)
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op in b")]}N\x88\x89":  # empty tuple, list, dict; None, True, False
                stack.append(1)
            elif op in _POPS:
                del stack[len(stack) - _POPS[op] :]
                stack[-1]
            elif op == 0x30:  # POP takes a mark, if that is what is on top
                if marks and marks[-1] == len(stack):
                    marks.pop()
                else:
                    stack.pop()
            elif op in b"eu1":  # APPENDS SETITEMS POP_MARK
                del stack[marks.pop() :]
                if op != 0x31:
                    stack[-1]
            elif op == 0x52:  # REDUCE: a Record weighs 1, but what torch.Size returns weighs as its argument
                args = stack.pop()
                stack[-1] = args
            elif op in (0x81, 0x93):  # NEWOBJ STACK_GLOBAL
                stack.pop()
                stack[-1] = 1
            elif op == 0x92:  # NEWOBJ_EX
                del stack[len(stack) - 2 :]
                stack[-1] = 1
            elif op == 0x51:  # BINPERSID: a column would be one too
                stack[-1] = 1
                storages = True
            elif op == 0x63:  # GLOBAL
                at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
                stack.append(1)
            elif op == 0x95:  # FRAME
                _sized(data, at, 8, where)
                frames.append(here)
                at += 8
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise IndexError
                return Scanned(steps, here, frames, [] if storages else runs)
            else:
                name = _NAMES.get(op)
                raise _refuse(where, here, f"opcode {name} is refused" if name else f"{op:#04x} is no opcode")
            if marks and marks[-1] > len(stack):  # the C unpickler refuses it too
                raise IndexError
            if repeats is not None:
                if repeats.floors:
                    repeats.keep_runs(op)
                repeats.shape.append(op)
                if op in _ENDS or op in _PUTS or (op in b"hj" and repeats.shape[-2:-1] in _TEXTS):
                    at = repeats.ended(op, at)
                    num_set = len(memo)
    except (IndexError, ValueError):
        if at >= size:
            raise PickleError(f"{where}: the pickle of {size} bytes ends before its STOP opcode: the file is cut short") from None
        raise _refuse(where, here, f"opcode {_NAMES.get(op, op)} finds nothing to work on") from None


_NAMES = {
    getattr(pickle, n)[0]: n
    for n in dir(pickle)
    if n.isupper() and isinstance(getattr(pickle, n), bytes) and len(getattr(pickle, n)) == 1 and n not in ("TRUE", "FALSE")
}


def _sized(data: bytes, at: int, width: int, where: str) -> int:
    """The offset behind a string or number whose length, `width` bytes of it, is at `at`."""
    length = int.from_bytes(data[at : at + width], "little")
    if at + width + length > len(data):
        raise _refuse(where, at - 1, f"opcode {_NAMES[data[at - 1]]} claims {length} bytes, {max(len(data) - at - width, 0)} are left")
    return at + width + length


class _Unit(NamedTuple):
    """Some opcodes in a row, and what they do to stack and memo wherever they stand."""

    one: re.Pattern[bytes]
    text: bytes  # of the pattern
    pushes: list[int]  # weights left on the stack
    puts: array[int]  # weights put into the memo, at the next indices
    width: int  # bytes of the index that each put names; 0: they name none
    named: list[int]  # the groups of the pattern that are such indices
    checked: list[tuple[int, int]]  # (group, weight) of memo indices that must have that weight
    base: bool  # fills what is on the stack below it
    form: Form  # where nothing is named or checked: the pattern, with texts of up to 255 bytes
    ahead: Ahead


class _Repeats:
    """Finds what repeats in a pickle, and takes the repetitions by a regular expression, or many at once (`Ahead`), with the same effect.

    A unit is learned from opcodes that were followed one by one: a pattern that leaves open only what has no effect. Those are the values
    of numbers, the text of strings, and memo indices read by opcodes that drop them again; an index whose weight goes into a tuple, into
    the memo or to the stack stays as it was. A unit takes nothing from the stack that it did not push and closes its own marks, so its
    effect is the same everywhere: it pushes these weights and puts those into the memo. That holds as long as no memo index is set twice
    or left out; where one is, `scan` drops this whole object. Where a pattern does not match, nothing has happened.

    What is taken for a repetition (`ended`) is a guess that costs time only; failures are counted, so that they cannot cost much.
    """

    def __init__(self, data: bytes, stack: list[int], memo: array[int], runs: list[Run]) -> None:
        self.data, self.stack, self.memo, self.runs = data, stack, memo, runs
        self.floors: list[int] = []  # elements on the stack behind each run whose objects are still there
        self.shape = bytearray()  # opcodes since the last end
        self.ends = [0] * (2 * _PERIOD + 1)
        self.history = bytearray(range(2 * _PERIOD))  # a number for the shape of what lies between two ends
        self.shapes: dict[bytes, int] = {}
        self.tried: set[bytes] = set()
        self.learned: dict[bytes, dict[int, bytes]] = {}
        self.units: list[_Unit] = []  # the last used first
        self.taken = 0  # up to here not every opcode was followed
        self.credit = 4000

    def ended(self, op: int, at: int) -> int:
        """An opcode that may end a unit was followed: the offset behind all that can be taken at once."""
        shape, data = self.shape, self.data
        if data[at : at + 1] in _PUT_BYTES or self.credit <= 0 or (op in _PUTS and (len(shape) < 2 or shape[-2] not in _ENDS)):
            return at
        if data[at : at + 1] == b"}" and b"\x81" in shape[-2:]:  # an object is about to be filled
            return at
        self.history.append(self.shapes.setdefault(bytes(shape.translate(_ALIKE)), len(self.shapes) + 2 * _PERIOD & 255))
        self.ends.append(at)
        shape.clear()
        if len(self.ends) > 1 << 12:
            del self.ends[: -2 * _PERIOD - 1], self.history[: -2 * _PERIOD]
            if len(self.shapes) > 1 << 12:
                self.shapes.clear()
        after = self._take(at) if self.units else at
        if after == at:
            self.credit -= bool(self.units)
            if self._learn(at):
                after = self._take(at)
        if after != at:
            self.ends[-1] = self.taken = after
            self.credit = min(self.credit + 8 + (after - at >> 6), 4000)
        return after

    def keep_runs(self, op: int) -> None:
        """After each opcode: drops the runs, as things to be taken out, when one of them was touched but by a list or dict that takes it whole."""
        num, floors = len(self.stack), self.floors
        while floors and num < floors[-1] and op in b"eu":
            floors.pop()
        if floors and (num < floors[-1] or (num == floors[-1] and op not in b"(01\x95")):  # the last object is put, filled, called ...
            self.runs.clear()
            floors.clear()

    def _learn(self, at: int) -> bool:
        history = self.history
        for period in range(1, _PERIOD + 1):
            if history[-1 - period] != history[-1]:
                continue
            last = bytes(history[-period:])
            if history[-2 * period : -period] == last:
                begin = self.ends[-1 - period]
                key = last + self.data[begin : begin + 1]
                if self.taken <= begin and at - begin <= _MAX_UNIT and key not in self.tried and len(self.learned) < 1 << 8:
                    self.credit -= 5
                    if unit := _unit(self.data, begin, at, self.memo, self.learned.setdefault(key, {})):
                        if all(unit.text != known.text for known in self.units):
                            self.units.insert(0, unit)
                            del self.units[_MAX_UNITS:]
                            self.credit -= 50
                            return True
                    elif len(self.tried) < 1 << 10:
                        self.tried.add(key)
        return False

    def _take(self, at: int) -> int:
        more = True
        while more:
            more = False
            for i, unit in enumerate(self.units):
                if (not unit.base or (self.stack and self.floors[-1:] != [len(self.stack)])) and (after := self._all(unit, at)) != at:
                    at, more = after, True
                    if i:
                        self.units.insert(0, self.units.pop(i))
                    break
        return at

    def _all(self, unit: _Unit, at: int) -> int:
        """The offset behind all repetitions of `unit` at `at`."""
        data, memo, count, match = self.data, self.memo, 0, unit.one.match
        single = bool(unit.width or unit.checked)
        ahead, after = unit.ahead, unit.ahead.wait
        first_run = len(self.runs)
        while found := match(data, at):
            if single:
                if not self._as_learned(unit, found):
                    break
                memo.extend(unit.puts)
            count += 1
            at = found.end()
            if count >= after and not single:
                begins, at = ahead.take(data, at)
                if len(begins) and unit.pushes and not unit.base:
                    self.runs.append(Run(begins, at, len(memo) + count * len(unit.puts), len(unit.puts), unit.form))
                count += len(begins)
                after = count + ahead.wait
        self.stack.extend(unit.pushes * count)
        if len(self.runs) > first_run:
            self.floors.append(len(self.stack))
        if not single:
            memo.extend(unit.puts * count)
        return at

    def _as_learned(self, unit: _Unit, found: re.Match[bytes]) -> bool:
        """Whether the memo indices that a match names are the next ones, where it sets them, and weigh the same, where it reads them."""
        memo, num = self.memo, len(unit.puts)
        for group, weight in unit.checked:
            index = int.from_bytes(found[group][1:], "little")
            if index >= len(memo) or memo[index] != weight:
                return False
        if not unit.width:
            return True
        if len(memo) + num > 1 << 8 * unit.width:
            return False
        indices = range(len(memo), len(memo) + num)
        return b"".join([found[group] for group in unit.named]) == (
            bytes(indices) if unit.width == 1 else struct.pack(f"<{num}I", *indices)
        )


def _unit(data: bytes, at: int, end: int, memo: array[int], before: dict[int, bytes]) -> _Unit | None:
    """The opcodes from `at` to `end`, which `scan` has followed, as a unit; None if their effect depends on what is around them.

    `before`: the memo indices whose weight mattered when it was learned before; of those that changed, the weight is checked each time.
    """
    text: list[bytes] = []
    begins: list[int] = []
    stack: list[tuple[int, tuple[int, ...]]] = []  # weight, and the places in `text` of the memo indices that it comes from
    marks: list[int] = []
    puts = array("H")
    fixed: dict[int, bytes] = {}  # place in `text` -> the bytes it must be
    got: dict[int, bytes] = {}
    free: set[int] = set()  # places in `text` of numbers, strings and memo indices
    explicit: set[int] = set()
    base = False

    def fix(elements: list[tuple[int, tuple[int, ...]]]) -> None:
        for _, places in elements:
            fixed.update((place, got[place]) for place in places)

    while at < end:
        op, begin = data[at], at
        at += 1
        begins.append(begin)
        if op in b"KMJ\x8ahj\x8cXG":
            free.add(len(text))
        if op in (0x4B, 0x4D, 0x4A) or (op == 0x8A and data[at] <= 8):
            at += _ARGUMENT.get(op) or 1 + data[at]
            text.append(_NUMBER)
            stack.append((1, ()))
        elif op in (0x68, 0x6A):
            at += _ARGUMENT[op]
            got[len(text)] = data[begin:at]
            stack.append((memo[int.from_bytes(data[begin + 1 : at], "little")], (len(text),)))
            text.append(_GET)
        elif op in (0x8C, 0x58):
            width = _SIZED[op]
            length = int.from_bytes(data[at : at + width], "little")
            at += width + length
            if length > 255:
                return None
            text.append(_string(op, length >> 4))
            stack.append((1, ()))
        elif op in _PUTS:
            if not stack:
                return None
            at += _ARGUMENT.get(op, 0)
            fix(stack[-1:])
            puts.append(min(stack[-1][0], _HEAVY))
            explicit.add(_ARGUMENT.get(op, 0))
            text.append({0: b"\\x94", 1: b"q(.)", 4: b"r(....)"}[_ARGUMENT.get(op, 0)])
        else:
            text.append(re.escape(data[begin:at]))
            if op in (0x85, 0x86, 0x87, 0x74):
                if op == 0x74 and not marks:
                    return None
                start = marks.pop() if op == 0x74 else len(stack) - (op - 0x84)
                parts = stack[start:]
                weight = sum(w for w, _ in parts) + 1
                if start < (marks[-1] if marks else 0) or weight > MAX_NESTED:
                    return None
                fix(parts)
                stack[start:] = [(weight if parts else 1, ())]
            elif op == 0x28:
                marks.append(len(stack))
            elif op in b")]}N\x88\x89":
                stack.append((1, ()))
            elif op == 0x47:
                at += 8
                text[-1] = b"G.{8}"
                stack.append((1, ()))
            elif op in _POPS or (op == 0x30 and not (marks and marks[-1] == len(stack))):
                num = _POPS.get(op, 1)
                if len(stack) - num < (marks[-1] if marks else 0):
                    return None
                del stack[len(stack) - num :]
                base = base or (op != 0x30 and not stack)
            elif op in b"eu":
                if not marks:
                    return None
                del stack[marks.pop() :]
                base = base or not stack
            elif op in (0x52, 0x81, 0x93):
                if len(stack) - 2 < (marks[-1] if marks else 0):
                    return None
                args = stack.pop()
                stack[-1] = args if op == 0x52 else (1, ())
            elif op == 0x51 and stack:
                stack[-1] = (1, ())
            elif op == 0x63:
                at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
                text[-1] = re.escape(data[begin:at])
                stack.append((1, ()))
            else:
                return None
    if at != end or marks or len(explicit) > 1:
        return None
    fix(stack)
    named: list[int] = []
    checked: list[tuple[int, int]] = []
    for place, piece in enumerate(text):
        if place in fixed:
            if before.setdefault(place, fixed[place]) != fixed[place]:
                before[place] = b""  # from now on
                text[place] = b"(h.|j....)"
                checked.append((len(named) + len(checked) + 1, memo[int.from_bytes(fixed[place][1:], "little")]))
            else:
                text[place] = re.escape(fixed[place])
        elif piece in (b"q(.)", b"r(....)"):
            named.append(len(named) + len(checked) + 1)
    whole = b"".join(text)
    form: list[bytes | int] = []
    made: list[bytes] = []  # of this one
    for place, (begin, behind) in enumerate(itertools.pairwise([*begins, end])):
        known = place not in free or place in fixed
        if known and form and isinstance(form[-1], bytes):
            form[-1] = made[-1] = made[-1] + data[begin:behind]
        else:
            made.append(data[begin:behind])
            form.append(made[-1] if known else _ALIKE[data[begin]])
    pushes, width = [w for w, _ in stack], max(explicit, default=0)
    return _Unit(re.compile(b"(?s)" + whole), whole, pushes, puts, width, named, checked, base, tuple(form), Ahead(tuple(form), made))


@functools.lru_cache(maxsize=64)
def _string(op: int, sixteenth: int) -> bytes:
    """A pattern for the strings of 16 * `sixteenth` up to 16 * `sixteenth` + 15 bytes."""
    zeros = bytes(_SIZED[op] - 1)
    lengths = range(16 * sixteenth, 16 * sixteenth + 16)
    return re.escape(bytes([op])) + b"(?:%b)" % b"|".join(re.escape(bytes([n]) + zeros) + b".{%d}" % n for n in lengths)


# ------------------------------------------------------------------------------------------------ reading


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, known: dict[tuple[str, str], Any], storages: list[Storage] | None, columns: dict[int, Any] | None = None
    ) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 18))
        self.known, self.storages, self.columns = known, storages, columns

    def find_class(self, module: str, name: str) -> Any:
        found = self.known.get((module, name))
        if found is None:
            if len(self.known) >= MAX_GLOBALS:
                raise pickle.UnpicklingError(f"it names more than {MAX_GLOBALS} globals")
            found = self.known[module, name] = glob(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self.columns is not None:
            return GONE if pid is None else self.columns.pop(pid)
        storage = Storage(pid)
        if self.storages is not None:
            self.storages.append(storage)
        return storage


# torch.Size as what turns a tuple into itself, and anything else into an error: tuple() would copy a long list each time it is asked
_COMPACT = {("torch", "Size"): ().__add__}


@contextmanager
def no_gc() -> Iterator[None]:
    """Without the cyclic collector: it would walk millions of young objects again and again (3.0 s instead of 1.1 s, see scan)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def loads(
    data: bytes,
    where: str,
    compact: bool = False,
    max_bytes: int = MAX_BYTES,
    storages: list[Storage] | None = None,
    classes: Mapping[tuple[str, str], type] | None = None,
    columns: bool = False,
) -> Any:
    """The value of a pickle; `where` names it in errors.

    `compact`: torch.Size becomes a plain tuple, which saves 40% of the memory of a .metadata, but cannot be written again as it was.
    `storages` collects each storage that the pickle names, as often as it does.
    `classes`, (module, name) -> class, replaces inert classes by smaller ones: without a base, with `__slots__` and a `__setstate__` that
    only stores, so that a pickle can do no more with them.
    `columns`: a Column may stand in lists and dicts for many objects, and GONE wherever the pickle refers to one of them again. No `storages`.
    Raises PickleError when the pickle is hostile, damaged, or longer than `max_bytes`.
    """
    if len(data) > max_bytes:
        raise PickleError(f"{where}: a pickle of {len(data)} bytes; {max_bytes} is the most read here")
    with no_gc():
        scanned = scan(data, where)
        known = {**(_COMPACT if compact else {}), **(classes or {})}
        try:
            return _in_columns(data, scanned, known) if columns and scanned.runs else _Unpickler(data, known, storages).load()
        except Exception as e:  # what is left to find ends in a dozen kinds of error
            cause = str(e).split("\n", 1)[0][:200]
            raise PickleError(f"{where}: not a pickle of a checkpoint: {type(e).__name__}: {cause}") from None


def _in_columns(data: bytes, scanned: Scanned, known: dict[tuple[str, str], Any]) -> Any:
    """The value of a pickle whose runs of objects are taken out of it: what the C unpickler does for each of 10**6 takes seconds."""
    rest = pickle_columns.take_out(data, scanned.runs, scanned.frames, scanned.stop)
    value, held = _Unpickler(rest.pickle, known, None, rest.columns).load()
    rest.fill(held, known.get(("torch", "Size")))
    return value


# ------------------------------------------------------------------------------------------------ writing


class Emitter:
    """Pickle protocol 2 of plain values, Globals, Records and Storages, memoised as CPython does it.

    Protocol 2 is what torch.load(weights_only=True) reads. The output equals torch.save's data.pkl byte for byte.
    """

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")  # joining a list of pieces would take 80 bytes for each
        self.storages: dict[str, int] = {}  # key -> bytes, in the order met
        self._memo: dict[int, int] = {}
        self._keep: list[Any] = []  # id() is unique only among the living

    def done(self) -> bytes:
        """The pickle."""
        return b"".join((self.out, b"."))

    def constant(self, value: Any) -> bytes:
        """Puts `value` into the memo only; the opcode that pushes it."""
        self.save(value)
        self.out += b"0"
        self._keep.append(value)
        return self._get(self._memo[id(value)])

    @property
    def num_memo(self) -> int:
        """How many values are in the memo: the number of the next one."""
        return len(self._memo)

    def _put(self, value: Any) -> None:
        n = self._memo[id(value)] = len(self._memo)
        self._keep.append(value)
        self.out += b"q%c" % n if n < 256 else b"r" + struct.pack("<I", n)

    @staticmethod
    def _get(n: int) -> bytes:
        return b"h%c" % n if n < 256 else b"j" + struct.pack("<I", n)

    def save(self, v: Any) -> None:
        """Appends one value. Raises PickleError for a type that has no place in a checkpoint."""
        out, t = self.out, type(v)
        if v is None or t is bool:
            out += b"N" if v is None else b"\x88" if v else b"\x89"
        elif t is int:
            out += emit_int(v)
        elif t is float:
            out += b"G" + struct.pack(">d", v)
        elif t is Storage:
            if self.storages.setdefault(v.key, v.nbytes) != v.nbytes:
                raise PickleError(f"storage {v.key[:80]} has {self.storages[v.key]} bytes and {v.nbytes} bytes")
            self.save(v.pid)
            out += b"Q"
        elif t is tuple and not v:
            out += b")"
        elif id(v) in self._memo:
            out += self._get(self._memo[id(v)])
        elif t is str:
            raw = v.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<I", len(raw)) + raw
            self._put(v)
        elif t is bytes or t is bytearray:
            self._save_bytes(v)
        elif t is tuple:
            self._save_tuple(v)
        elif t is list:
            out += b"]"
            self._put(v)
            self._fill(v)
        elif t is dict:
            out += b"}"
            self._put(v)
            self._fill_items(v.items())
        elif t in (Ordered, OrderedDict):
            self.save(glob("collections", "OrderedDict"))
            out += b")R"
            self._put(v)
            self._fill_items(v.items())
            if vars(v):  # nn.Module.state_dict()'s _metadata
                self.save(vars(v))
                out += b"b"
        elif isinstance(v, Global):
            out += f"c{v.module}\n{v.name}\n".encode()
            self._put(v)
        elif isinstance(v, Record):
            self._save_record(v)
        else:
            raise PickleError(f"{t.__module__}.{t.__qualname__} has no place in a checkpoint's pickle")

    def _save_tuple(self, v: tuple[Any, ...]) -> None:
        if len(v) > 3:
            self.out += b"("
        for e in v:
            self.save(e)
        if id(v) in self._memo:  # a record among its elements holds this very tuple: take that one, as CPython does
            self.out += (b"1" if len(v) > 3 else b"0" * len(v)) + self._get(self._memo[id(v)])
            return
        self.out += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(v), b"t")
        self._put(v)

    def _save_bytes(self, v: bytes | bytearray) -> None:  # protocol 2 has no opcode for them
        if type(v) is bytearray:
            self.save(glob("builtins", "bytearray"))
            self.save((bytes(v),))
        elif v:
            self.save(glob("_codecs", "encode"))
            self.save((v.decode("latin1"), "latin1"))
        else:
            self.save(glob("__builtin__", "bytes"))
            self.save(())
        self.out += b"R"
        self._put(v)

    def _save_record(self, v: Record) -> None:
        self.save(type(v))
        self.save(v.args)
        self.out += v.opcode
        self._put(v)
        self._fill(v.entries or ())
        self._fill_items(v.items or ())
        if v.state is not None:
            self.save(v.state)
            self.out += b"b"

    def _fill(self, entries: Iterable[Any]) -> None:
        entries = list(entries)
        for i in range(0, len(entries), _BATCH):
            batch = entries[i : i + _BATCH]
            if len(batch) > 1:
                self.out += b"("
            for e in batch:
                self.save(e)
            self.out += b"e" if len(batch) > 1 else b"a"

    def _fill_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        items = list(items)
        for i in range(0, len(items), _BATCH):
            batch = items[i : i + _BATCH]
            if len(batch) > 1:
                self.out += b"("
            for key, value in batch:
                self.save(key)
                self.save(value)
            self.out += b"u" if len(batch) > 1 else b"s"


def emit_int(v: int) -> bytes:
    """The opcode that pushes an int."""
    if 0 <= v < 256:
        return b"K%c" % v
    if 0 <= v < 65536:
        return b"M" + struct.pack("<H", v)
    if -(2**31) <= v < 2**31:
        return b"J" + struct.pack("<i", v)
    raw = v.to_bytes((v.bit_length() >> 3) + 1, "little", signed=True)
    if v < 0 and len(raw) > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
        raw = raw[:-1]
    return b"\x8a%c" % len(raw) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw)) + raw


def emitted(value: Any) -> Emitter:
    """An Emitter that holds `value` whole: its pickle is `.done()`, the storages it names are `.storages`. Raises PickleError."""
    emitter = Emitter()
    try:
        emitter.save(value)
    except RecursionError:
        raise PickleError("a value is nested too deeply to be written as a pickle") from None
    return emitter


def dumps(value: Any) -> bytes:
    """The pickle, protocol 2, of what `loads` returned or of records made by hand. Raises PickleError."""
    return emitted(value).done()


# ------------------------------------------------------------------------------------------------ tensors

_CPU = "cpu"  # one object, as in torch: memoised
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")


class TensorView(NamedTuple):
    """A tensor as a view of a storage."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    storage: str  # key: the zip record data/<key>
    offset: int  # elements


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major tensor, as torch says them: a size of 0 counts as 1."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def tensor(dtype: str, shape: tuple[int, ...], key: str) -> Record:
    """The record torch.save makes of a contiguous tensor that owns its storage data/<key>."""
    numel = math.prod(shape)
    name = dtypes.TABLE[dtype].storage
    if name:
        pid = ("storage", glob("torch", name), key, _CPU, numel)
        return glob("torch._utils", "_rebuild_tensor_v2")(Storage(pid), 0, tuple(shape), contiguous(shape), False, OrderedDict())
    pid = ("storage", glob("torch.storage", "UntypedStorage"), key, _CPU, numel * dtypes.itemsize(dtype))
    rebuild = glob("torch._utils", "_rebuild_tensor_v3")
    return rebuild(Storage(pid), 0, tuple(shape), contiguous(shape), False, OrderedDict(), torch_dtype(dtype))


def as_tensor(record: Any) -> TensorView | None:
    """The tensor that `record` stands for, None if it stands for none. Nothing is loaded.

    Raises PickleError when it says so but its sizes are no sizes, its dtype is none that mckpt knows, or it reaches past its storage.
    """
    for _ in range(8):  # a parameter of a tensor subclass of a tensor ...
        if not isinstance(record, Record):
            return None
        name, args = type(record).name, record.args
        if type(record).module == "torch._utils" and name in _PARAMETERS and args:
            record = args[0]
        elif type(record).module == "torch._tensor" and name == "_rebuild_from_type_v2" and len(args) == 4:
            # a tensor with Python attributes: (function, type, args, state)
            if not (isinstance(args[0], Global) and type(args[2]) is tuple):
                return None
            record = args[0](*args[2])
        else:
            break
    if type(record).module != "torch._utils" or name not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return None
    if len(args) < 4 or not isinstance(args[0], Storage):
        raise PickleError(f"a tensor without a storage: {name} of {len(args)} arguments")
    storage, offset, shape, strides = args[:4]
    shape, strides = _ints(shape), _ints(strides)
    if shape is None or strides is None or len(shape) != len(strides) or type(offset) is not int or offset < 0:
        raise PickleError(f"a tensor in storage {storage.key[:80]} whose shape, strides or offset are not whole numbers of one rank")
    dtype = storage.dtype
    if name == "_rebuild_tensor_v3":  # dtypes that have no storage class of their own
        dtype = args[6].name if len(args) > 6 and isinstance(args[6], Global) else None
    if dtype not in dtypes.TABLE:
        odd = args[6] if name == "_rebuild_tensor_v3" and len(args) > 6 else storage.pid[1]
        raise PickleError(f"a tensor in storage {storage.key[:80]} of a dtype that mckpt does not know: {short(odd)}")
    room = storage.nbytes // dtypes.itemsize(dtype)
    end = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if 0 not in shape else offset
    if end > room:
        raise PickleError(
            f"a tensor of shape {list(shape)}, strides {list(strides)} at element {offset} "
            f"reaches element {end} of storage {storage.key[:80]}, which has {room}"
        )
    return TensorView(dtype, shape, strides, storage.key, offset)


def _ints(value: Any) -> tuple[int, ...] | None:
    """A torch.Size or tuple of sizes; None if it is anything else."""
    if isinstance(value, Record) and type(value).name == "Size" and len(value.args) == 1:
        value = value.args[0]
    if type(value) not in (tuple, list) or len(value) > 64:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 63 for n in value) else None


# ------------------------------------------------------------------------------------------------ plain records


def namespace(**fields: Any) -> Record:
    """The record of an argparse.Namespace."""
    made: Any = glob("argparse", "Namespace")  # a Record's class
    record = Record.__new__(made)
    record.state = fields
    return record


def torch_dtype(name: str) -> Global:
    """torch pickles a dtype as a global."""
    return glob("torch", name)


def fields(record: Any) -> dict[str, Any]:
    """The fields of a Namespace, SimpleNamespace or dataclass as read. Raises PickleError when it has none."""
    state = record.state if isinstance(record, Record) else None
    if type(state) is tuple and len(state) == 2:  # (dict, slots)
        state = {**(state[0] or {}), **(state[1] or {})} if all(type(s) in (dict, type(None)) for s in state) else None
    if type(state) is not dict or not all(type(k) is str for k in state):
        raise PickleError(f"{short(record)} has no fields")
    return state


def short(value: Any) -> str:
    """A few characters that say what a value is, whatever it holds."""
    if isinstance(value, Global | Record | Storage):
        return repr(value)
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int:
        return repr(value) if value.bit_length() < 128 else f"an int of {value.bit_length()} bits"
    if type(value) is str:
        return repr(value[:80])
    return f"a {type(value).__name__}"


def plain(value: Any, depth: int = 8) -> Any:
    """What an args Namespace holds as plain JSON-able Python, for display: torch.bfloat16 -> "bfloat16", an enum -> its value,
    a path -> its parts joined, a record of unknown kind -> a short string. Deeper than `depth`, or longer than 10,000 elements: cut."""
    budget = [10_000]

    def walk(v: Any, left: int) -> Any:
        budget[0] -= 1
        if budget[0] < 0 or left < 0:
            return "..."
        if v is None or type(v) in (bool, str):
            return v
        if type(v) is float:
            return v if math.isfinite(v) else repr(v)
        if type(v) is int:
            return v if v.bit_length() < 128 else short(v)
        if isinstance(v, Global):
            return v.name if v.module == "torch" else f"{v.module}.{v.name}"[:160]
        if type(v) in (list, tuple):
            return [walk(e, left - 1) for e in v[: max(budget[0], 0) + 1]]
        if isinstance(v, dict):
            return {str(walk(k, left - 1)): walk(e, left - 1) for k, e in v.items()} if len(v) <= budget[0] else "..."
        if isinstance(v, Record):
            if type(v).name in ("Namespace", "SimpleNamespace") and type(v.state) is dict:
                return walk(v.state, left)
            if type(v).module == "pathlib":
                return "/".join(str(walk(a, 0)) for a in v.args).replace("//", "/", 1)
            if v.opcode == b"R" and len(v.args) == 1 and v.state is None:
                return walk(v.args[0], left - 1)  # an enum's value, a torch.Size, a torch.device
        return short(v)

    return walk(value, depth)
