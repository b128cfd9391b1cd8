"""Reads and writes the pickles of Megatron and torch without importing or calling anything they name.

Reading: every global that a pickle names becomes an inert class (`Global`); calling it, building it and filling it only records
(`Record`). Writing: records are emitted as they were read, by an encoder of a dozen types that knows no module; so the same
records, made by hand, write a new checkpoint.

    pickle bytes -> scan (what could hurt) -> C unpickler over inert classes -> dict, list, str, int, Record, Storage ...

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
import math
import pickle
import re
import struct
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mckpt import dtypes
from mckpt.errors import PickleError

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
        record = cls.__new__(cls, *args)  # type: ignore[misc]
        record.opcode = b"R"
        return record

    def __repr__(cls) -> str:
        return f"<{cls.module[:80]}.{cls.name[:80]}>"


class Record(metaclass=Global):
    """What the pickle did with a global: called or built it with `args`, gave it `state`, dict `items` and list `entries`."""

    __slots__ = ("__weakref__", "args", "entries", "items", "opcode", "state")
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


class Ordered(OrderedDict):  # type: ignore[type-arg]
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
_POPS = {0x61: 1, 0x73: 2, 0x62: 1, 0x30: 1}  # APPEND SETITEM BUILD POP: leave what is below
_EARLY = 1 << 16  # memo indices that opcodes followed one by one have set; see _sentences


def _refuse(where: str, at: int, what: str) -> PickleError:
    return PickleError(f"{where}: byte {at} of the pickle: {what}. No checkpoint is written so; nothing in it was run")


def scan(data: bytes, where: str) -> None:
    """Proves that the C unpickler can take `data` without harm; reads each opcode once, runs none.

    Raises PickleError with the offset and the opcode. 1 MB costs 0.1 s when followed one opcode at a time, which is what the first 65,536
    memo entries get; from there on whole sentences are matched by a regular expression, 1 MB in 0.015 s.
    """
    bound = len(data) // 4 + 256  # a memo put follows a push: 1 + 5 bytes, or 1 + 2 for the first 256
    stack: list[int] = []  # weight of each element: 1, or for a tuple the number of leaves that hashing it visits
    marks: list[int] = []
    memo: dict[int, int] = {}
    at, size, fast = 0, len(data), True
    try:
        while True:
            op = data[at]
            here = at
            at += 1
            if op in _ARGUMENT:
                width = _ARGUMENT[op]
                arg = int.from_bytes(data[at : at + width], "little")
                at += width
                if at > size:
                    raise IndexError
                if op in (0x68, 0x6A):  # BINGET LONG_BINGET
                    if arg not in memo:
                        raise _refuse(where, here, f"reads memo {arg}, which nothing has set")
                    stack.append(memo[arg])
                elif op in (0x71, 0x72):  # BINPUT LONG_BINPUT
                    if arg > bound:
                        raise _refuse(where, here, f"opcode LONG_BINPUT sets memo {arg}, but {size} bytes of pickle have room for {bound}")
                    memo[arg] = stack[-1]
                elif op != 0x80:
                    stack.append(1)
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                if fast and len(memo) >= _EARLY:
                    if _sentences(data, at, memo, where):
                        return
                    fast = False
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
                if op != 0x30:
                    stack[-1]
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
            elif op == 0x51:  # BINPERSID
                stack[-1] = 1
            elif op == 0x63:  # GLOBAL
                at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
                stack.append(1)
            elif op == 0x95:  # FRAME
                _sized(data, at, 8, where)
                at += 8
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise IndexError
                return
            else:
                name = _NAMES.get(op)
                raise _refuse(where, here, f"opcode {name} is refused" if name else f"{op:#04x} is no opcode")
            if fast and op == 0x72 and len(memo) >= _EARLY:
                if _sentences(data, at, memo, where):
                    return
                fast = False
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


def _sentences(data: bytes, at: int, memo: dict[int, int], where: str) -> bool:
    """Whether the rest of the pickle, from `at` on, is made of sentences that are harmless whatever the stack holds.

    A tuple must be written in one sentence, out of atoms: numbers, strings, and memo indices below _EARLY, which may not be set again and
    hold no large tuple. So no tuple made here is part of another one, but for the arguments of a REDUCE and the shape and stride in a
    tensor's record, both written out in the sentence. That is all that torch and Megatron write, 10**5 times over.
    """
    if max(memo.values()) > MAX_NESTED or max(memo) >= 2 * _EARLY:
        return False
    sentence, size = _sentence_pattern(min((len(data) // 4 >> 16) + 1, 255)), len(data)
    while at < size:
        found = sentence.match(data, at)
        if found:
            at = found.end()
            if data[at - 1 : at] == b"." and found.lastgroup == "stop":
                return True
        elif data[at] in _SIZED:
            at = _sized(data, at + 1, _SIZED[data[at]], where)
        elif data[at] == 0x95:
            _sized(data, at + 1, 8, where)
            at += 9
        else:
            return False
    raise PickleError(f"{where}: the pickle of {size} bytes ends before its STOP opcode: the file is cut short")


@functools.lru_cache(maxsize=8)
def _sentence_pattern(high: int) -> re.Pattern[bytes]:
    """Up to 1000 sentences; `high`: the third byte of a memo index that may be set is at most that."""
    sized = b"|".join(b"%b%b" % (re.escape(bytes([n])), b".{%d}" % n if n else b"") for n in range(1, 256))
    wide = b"|".join(b"%b\\x00\\x00\\x00%b" % (re.escape(bytes([n])), b".{%d}" % n if n else b"") for n in range(256))
    string = b"(?:\\x8c(?:%b)|X(?:%b))" % (sized, wide)
    put = b"(?:\\x94|r..[\\x01-\\x%02x]\\x00)" % high
    number = b"(?:K.|M..|J....|\\x8a[\\x01-\\x08].{8})".replace(b"\\x8a[\\x01-\\x08].{8}", b"\\x8a(?:\\x05.{5}|\\x06.{6}|\\x07.{7}|\\x08.{8})")
    early = b"(?:h.|j..\\x00\\x00)"
    atom = b"(?:%b|%b|[N\\x88\\x89]|%b%b?)" % (number, early, string, put)
    flat = b"(?:%b(?:\\x85|%b(?:\\x86|%b\\x87))|\\((?:%b){0,64}t)%b?" % (atom, atom, atom, atom, put)
    call = b"(?:%b|c[^\\n]{1,200}\\n[^\\n]{1,200}\\n%b?)" % (b"(?:h.|j....)", put)
    pid = b"\\((?:%b|%b){0,8}t%b?Q" % (atom, call, put)
    # the arguments of torch's _rebuild_tensor: storage, offset, shape, stride, requires_grad, an empty OrderedDict, maybe more atoms
    tensor = b"\\(%b%b(?:%b|\\)){2}[\\x88\\x89]%b\\)R%b?(?:%b){0,2}t%b?R" % (pid, number, flat, call, put, atom, put)
    plain = b"[)\\]}(N\\x88\\x89sueabR\\x81\\x94]"
    get = b"(?:h.|j....)(?![\\x85-\\x87])"
    ops = [
        plain + b"(?<!\\()",
        get,
        b"(?:%b)(?:\\x85%b?R)?" % (flat, put),
        number,
        string,
        put,
        tensor,
        b"\\(",
        b"G.{8}",
        b"c[^\\n]{1,200}\\n[^\\n]{1,200}\\n",
        b"\\x93",
        b"0",
    ]
    return re.compile(b"(?s)(?:%b){1,1000}|(?P<stop>\\.)" % b"|".join(ops))
