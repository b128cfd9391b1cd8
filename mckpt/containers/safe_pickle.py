"""Reads and writes the pickles of Megatron and torch without importing or calling anything they
name.

Reading: every global that a pickle names becomes an inert class (`Global`); calling it, building it
and filling it only records (`Record`). Writing: records are emitted as they were read, by an
encoder of a dozen types that knows no module; so the same records, made by hand, write a new
checkpoint.

    pickle bytes -> scan (what could hurt) -> C unpickler over inert classes -> dict, list, str,
    int, Record, Storage ...

The C unpickler can only reach what `find_class` gives it, but it believes the bytes, so `scan`
reads each opcode first:

  hurt by                                         bounded by
  LONG_BINPUT with a huge index: 16 bytes each    index <= size of the pickle / 4
  a string, number or frame longer than the file  lengths against the bytes that are left
  nested tuples as dict keys: hashing recurses    a tuple that holds tuples has at most MAX_NESTED elements in all
  in C and visits what is shared again and again
  copying a list again and again by REDUCE        nothing is called but OrderedDict() without arguments
  one-byte opcodes that make an object            at most 64 bytes of memory per byte of pickle (`]`, `}`); `max_bytes` bounds those
  many distinct globals, 1.5 KB each              MAX_GLOBALS
  opcodes no checkpoint has                       refused: text protocol 0, INST, OBJ, EXT, DUP, sets, out-of-band buffers

Seen (2 cores, Python 3.11): see `scan` for its speed. Not bounded: the time an attacker can waste,
beyond that it is linear in the size of the pickle times MAX_NESTED, plus dict keys chosen to
collide.
"""

from __future__ import annotations

import gc
import io
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

from mckpt.errors import PickleError
from mckpt.values import dtypes

# of a pickle, unless the caller says otherwise; the largest data.pkl seen (70,000 tensors) has 12
# MB
MAX_BYTES = 256 << 20
MAX_NESTED = 2000  # elements in a tuple of tuples; the largest seen is Python's RNG state, 628
MAX_GLOBALS = 4096  # distinct globals of one pickle; a real common.pt names 60

# ------------------------------------------------------------------------------------- placeholders


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
    """What the pickle did with a global: called or built it with `args`, gave it `state`, dict
    `items` and list `entries`.
    """

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
        record.opcode, record.args, record.state, record.items, record.entries = (
            b"\x81",
            args,
            None,
            None,
            None,
        )
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
    """collections.OrderedDict as a pickle makes it; of attributes it may have only the `_metadata`
    of Module.state_dict().
    """

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or set(state) - {"_metadata"}:
            raise pickle.UnpicklingError("an OrderedDict is given attributes other than _metadata")
        self.__dict__.update(state)


class Storage:
    """torch's persistent id ('storage', class, key, location, numel): the bytes are the zip record
    data/<key>.
    """

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        if not (
            type(pid) is tuple
            and len(pid) == 5
            and pid[0] == "storage"
            and isinstance(pid[1], Global)
        ):
            raise pickle.UnpicklingError("a persistent id that is no storage of torch")
        if not (
            type(pid[2]) is str and type(pid[3]) is str and type(pid[4]) is int and pid[4] >= 0
        ):
            raise pickle.UnpicklingError("a storage of torch with an odd key, location or size")
        self.pid: tuple[str, Global, str, str, int] = pid

    @property
    def key(self) -> str:
        """The zip record is data/<key>."""
        return self.pid[2]

    @property
    def dtype(self) -> str | None:
        """The dtype of its elements; None: bytes of any dtype (UntypedStorage), or a dtype that
        mckpt does not know.
        """
        return dtypes.OF_STORAGE.get(self.pid[1].name)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        dtype = self.dtype
        return self.pid[4] * (
            dtypes.itemsize(dtype) if dtype else _OTHER_STORAGES.get(self.pid[1].name, 1)
        )

    def __repr__(self) -> str:
        return f"<storage {self.key[:80]}>"


_OTHER_STORAGES = {
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
}
_GLOBALS: weakref.WeakValueDictionary[tuple[str, str], Global] = weakref.WeakValueDictionary()


def glob(module: str, name: str) -> Global:
    """The inert class of module.name; one object per name, so that identity survives reading and
    writing.
    """
    found = _GLOBALS.get((module, name))
    if found is None:
        # setdefault: two threads may come here at once
        made = Global("Global", (Record,), {"__slots__": (), "module": module, "name": name})
        found = _GLOBALS.setdefault((module, name), made)
    return found


# ----------------------------------------------------------------------------------------- the scan

# bytes after BININT1 BININT2 BININT BINFLOAT ...
_PUSHES = {0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8, **dict.fromkeys(b")]}N\x88\x89", 0)}
# width of their length
_SIZED = {
    0x8C: 1,
    0x58: 4,
    0x8D: 8,
    0x43: 1,
    0x42: 4,
    0x8E: 8,
    0x96: 8,
    0x55: 1,
    0x54: 4,
    0x8A: 1,
    0x8B: 4,
}
_PUTS = {0x71: 1, 0x72: 4, 0x94: 0}  # width of the index of BINPUT LONG_BINPUT MEMOIZE
_POPS = {0x61: 1, 0x73: 2, 0x62: 1}  # APPEND SETITEM BUILD: take that many, and fill what is below
_HEAVY = 0xFFFF  # the most that the memo says of a weight: far more than MAX_NESTED

# Chunks and items of a .metadata, of which there are 10**5, are read as whole objects: a class,
# which is on the stack, called without arguments and given a dict of fields. A field is a constant,
# a number, a memo entry, or one of at most two torch.Size of at most 8 numbers. The object pushes
# weight 1, and hashes no tuple that is not on the stack or in the memo without it. All of it is
# memoised (group 1 is MEMOIZE), as torch writes it, or nothing of it, as `dcp_metadata` does.
_LONG1 = rb"\x8a(?:%b)" % b"|".join(b"\\x%02x" % n + n * b"." for n in range(9))
_NUMBER = rb"(?:K.|M..|J....|%b)" % _LONG1
_FIELDS = rb"(?:h.|j....|K.|M..|J....|N|\x88|\x89|%b){0,16}" % _LONG1
_SIZE = rb"(?:h.|j....)(?:\(%b{0,8}t|%b\x85|%b{2}\x86|%b{3}\x87)\1\x85\1R\1" % (
    _NUMBER,
    _NUMBER,
    _NUMBER,
    _NUMBER,
)
_OBJECT = re.compile(
    rb"(?s)\)\x81(\x94?)}\1\(%b(?:%b%b()(?:%b%b())?)?ub" % (_FIELDS, _SIZE, _FIELDS, _SIZE, _FIELDS)
)
# weights that it puts into the memo, by the last of its groups: 1, then one more for each
# torch.Size
_PUTS_OF_OBJECT = {1 + n: array("H", [1, 1] + n * [9, 10, 10]) for n in range(3)}


def _refuse(where: str, at: int, what: str) -> PickleError:
    return PickleError(
        f"{where}: byte {at} of the pickle: {what}. No checkpoint is written so; nothing in it"
        " was run"
    )


def scan(data: bytes, where: str) -> None:
    """Proves that the C unpickler can take `data` without harm; reads each opcode once, runs none.

    Raises PickleError with the offset and the opcode. Takes about 0.2 s for 1 MB, and 0.03 s where
    `_OBJECT` reads whole objects.
    """
    # a memo put follows a push: 1 + 5 bytes, or 1 + 2 for the first 256
    bound = len(data) // 4 + 256
    # weight of each element: 1, or for a tuple the number of leaves that hashing it visits
    stack: list[int] = []
    marks: list[int] = []
    memo = array("H")  # the same, at most _HEAVY; 0: not set
    num_set = 0
    at, here, size = 0, 0, len(data)

    try:
        while True:
            op = data[at]
            here = at
            at += 1
            if op in _PUSHES:
                # EMPTY_TUPLE NEWOBJ ...
                if op == 0x29 and num_set == len(memo) and (found := _OBJECT.match(data, here)):
                    at = found.end()
                    stack[-1] = 1
                    if found[1]:
                        memo.extend(_PUTS_OF_OBJECT[found.lastindex or 1])
                        num_set = len(memo)
                    continue
                stack.append(1)
                at += _PUSHES[op]
                continue
            if op in (0x68, 0x6A):  # BINGET LONG_BINGET
                width = 1 if op == 0x68 else 4
                index = data[at] if op == 0x68 else int.from_bytes(data[at : at + 4], "little")
                at += width
                if at > size:
                    raise IndexError
                if index >= len(memo) or not memo[index]:
                    raise _refuse(where, here, f"reads memo {index}, which nothing has set")
                stack.append(memo[index])
                continue
            if op in _PUTS:
                width = _PUTS[op]
                index = int.from_bytes(data[at : at + width], "little") if width else num_set
                at += width
                if at > size:
                    raise IndexError
                if width and index > bound:
                    raise _refuse(
                        where,
                        here,
                        f"opcode LONG_BINPUT sets memo {index}, but {size} bytes of pickle have"
                        f" room for {bound}",
                    )
                if index >= len(memo):
                    memo.frombytes(bytes(2 * (index + 1 - len(memo))))
                num_set += memo[index] == 0
                memo[index] = min(stack[-1], _HEAVY)
                continue
            if op in _SIZED:
                at = _sized(data, at, _SIZED[op], where)
                stack.append(1)
                continue
            if op in (0x85, 0x86, 0x87, 0x74):  # TUPLE1 TUPLE2 TUPLE3 TUPLE
                start = marks.pop() if op == 0x74 else len(stack) - (op - 0x84)
                if start < (marks[-1] if marks else 0):
                    raise IndexError
                parts = stack[start:]
                weight = sum(parts) + 1
                if weight > MAX_NESTED and weight > len(parts) + 1:
                    raise _refuse(
                        where,
                        here,
                        f"opcode TUPLE makes a nest of {weight} elements; {MAX_NESTED} is the most"
                        " allowed",
                    )
                del stack[start:]
                stack.append(weight if parts else 1)
            elif op == 0x28:  # MARK
                marks.append(len(stack))
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
            # REDUCE: a Record weighs 1, but what torch.Size returns weighs as its argument
            elif op == 0x52:
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
            elif op == 0x80:  # PROTO
                at += 1
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise IndexError
                return
            else:
                name = _NAMES.get(op)
                raise _refuse(
                    where, here, f"opcode {name} is refused" if name else f"{op:#04x} is no opcode"
                )
            if marks and marks[-1] > len(stack):  # the C unpickler refuses it too
                raise IndexError
    except (IndexError, ValueError):
        if at >= size:
            raise PickleError(
                f"{where}: the pickle of {size} bytes ends before its STOP opcode: the file is cut"
                " short"
            ) from None
        raise _refuse(
            where, here, f"opcode {_NAMES.get(op, op)} finds nothing to work on"
        ) from None


_NAMES = {
    getattr(pickle, n)[0]: n
    for n in dir(pickle)
    if n.isupper()
    and isinstance(getattr(pickle, n), bytes)
    and len(getattr(pickle, n)) == 1
    and n not in ("TRUE", "FALSE")
}


def _sized(data: bytes, at: int, width: int, where: str) -> int:
    """The offset behind a string or number whose length, `width` bytes of it, is at `at`."""
    length = int.from_bytes(data[at : at + width], "little")
    if at + width + length > len(data):
        raise _refuse(
            where,
            at - 1,
            f"opcode {_NAMES[data[at - 1]]} claims {length} bytes, {max(len(data) - at - width, 0)}"
            " are left",
        )
    return at + width + length


# ------------------------------------------------------------------------------------------ reading


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, known: dict[tuple[str, str], Any], storages: list[Storage] | None
    ) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 18))
        self.known, self.storages = known, storages

    def find_class(self, module: str, name: str) -> Any:
        found = self.known.get((module, name))
        if found is None:
            if len(self.known) >= MAX_GLOBALS:
                raise pickle.UnpicklingError(f"it names more than {MAX_GLOBALS} globals")
            found = self.known[module, name] = glob(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        storage = Storage(pid)
        if self.storages is not None:
            self.storages.append(storage)
        return storage


# torch.Size as what turns a tuple into itself, and anything else into an error: tuple() would copy
# a long list each time it is asked
_COMPACT = {("torch", "Size"): ().__add__}


@contextmanager
def no_gc() -> Iterator[None]:
    """Without the cyclic collector: it would walk millions of young objects again and again (3.0 s
    instead of 1.1 s for a large .metadata).
    """
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
) -> Any:
    """The value of a pickle; `where` names it in errors.

    `compact`: torch.Size becomes a plain tuple, which saves 40% of the memory of a .metadata, but
    cannot be written again as it was. `storages` collects each storage that the pickle names, as
    often as it does. `classes`, (module, name) -> class, replaces inert classes by smaller ones:
    without a base, with `__slots__` and a `__setstate__` that only stores, so that a pickle can do
    no more with them. Raises PickleError when the pickle is hostile, damaged, or longer than
    `max_bytes`.
    """
    if len(data) > max_bytes:
        raise PickleError(
            f"{where}: a pickle of {len(data)} bytes; {max_bytes} is the most read here"
        )
    with no_gc():
        scan(data, where)
        known = {**(_COMPACT if compact else {}), **(classes or {})}
        try:
            return _Unpickler(data, known, storages).load()
        except Exception as e:  # what is left to find ends in a dozen kinds of error
            cause = str(e).split("\n", 1)[0][:200]
            raise PickleError(
                f"{where}: not a pickle of a checkpoint: {type(e).__name__}: {cause}"
            ) from None


# ------------------------------------------------------------------------------------------ writing


_BATCH = 1000  # what a pickler writes of a list or dict between two marks


class Emitter:
    """Pickle protocol 2 of plain values, Globals, Records and Storages, memoised as CPython does
    it.

    Protocol 2 is what torch.load(weights_only=True) reads. The output equals torch.save's data.pkl
    byte for byte.
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
                raise PickleError(
                    f"storage {v.key[:80]} has {self.storages[v.key]} bytes and {v.nbytes} bytes"
                )
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
            raise PickleError(
                f"{t.__module__}.{t.__qualname__} has no place in a checkpoint's pickle"
            )

    def _save_tuple(self, v: tuple[Any, ...]) -> None:
        if len(v) > 3:
            self.out += b"("
        for e in v:
            self.save(e)
        # a record among its elements holds this very tuple: take that one, as CPython does
        if id(v) in self._memo:
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
    return (
        b"\x8a%c" % len(raw) + raw
        if len(raw) < 256
        else b"\x8b" + struct.pack("<i", len(raw)) + raw
    )


def emitted(value: Any) -> Emitter:
    """An Emitter that holds `value` whole: its pickle is `.done()`, the storages it names are
    `.storages`.

    Raises PickleError.
    """
    emitter = Emitter()
    try:
        emitter.save(value)
    except RecursionError:
        raise PickleError("a value is nested too deeply to be written as a pickle") from None
    return emitter


def dumps(value: Any) -> bytes:
    """The pickle, protocol 2, of what `loads` returned or of records made by hand.

    Raises PickleError.
    """
    return emitted(value).done()


# ------------------------------------------------------------------------------------------ tensors

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
        return glob("torch._utils", "_rebuild_tensor_v2")(
            Storage(pid), 0, tuple(shape), contiguous(shape), False, OrderedDict()
        )
    pid = (
        "storage",
        glob("torch.storage", "UntypedStorage"),
        key,
        _CPU,
        numel * dtypes.itemsize(dtype),
    )
    rebuild = glob("torch._utils", "_rebuild_tensor_v3")
    return rebuild(
        Storage(pid), 0, tuple(shape), contiguous(shape), False, OrderedDict(), torch_dtype(dtype)
    )


def as_tensor(record: Any) -> TensorView | None:
    """The tensor that `record` stands for, None if it stands for none. Nothing is loaded.

    Raises PickleError when it says so but its sizes are no sizes, its dtype is none that mckpt
    knows, or it reaches past its storage.
    """
    for _ in range(8):  # a parameter of a tensor subclass of a tensor ...
        if not isinstance(record, Record):
            return None
        name, args = type(record).name, record.args
        if type(record).module == "torch._utils" and name in _PARAMETERS and args:
            record = args[0]
        elif (
            type(record).module == "torch._tensor"
            and name == "_rebuild_from_type_v2"
            and len(args) == 4
        ):
            # a tensor with Python attributes: (function, type, args, state)
            if not (isinstance(args[0], Global) and type(args[2]) is tuple):
                return None
            record = args[0](*args[2])
        else:
            break
    if type(record).module != "torch._utils" or name not in (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    ):
        return None
    if len(args) < 4 or not isinstance(args[0], Storage):
        raise PickleError(f"a tensor without a storage: {name} of {len(args)} arguments")
    storage, offset, shape, strides = args[:4]
    shape, strides = _ints(shape), _ints(strides)
    if (
        shape is None
        or strides is None
        or len(shape) != len(strides)
        or type(offset) is not int
        or offset < 0
    ):
        raise PickleError(
            f"a tensor in storage {storage.key[:80]} whose shape, strides or offset are not whole"
            " numbers of one rank"
        )
    dtype = storage.dtype
    if name == "_rebuild_tensor_v3":  # dtypes that have no storage class of their own
        dtype = args[6].name if len(args) > 6 and isinstance(args[6], Global) else None
    if dtype not in dtypes.TABLE:
        odd = args[6] if name == "_rebuild_tensor_v3" and len(args) > 6 else storage.pid[1]
        raise PickleError(
            f"a tensor in storage {storage.key[:80]} of a dtype that mckpt does not know:"
            f" {short(odd)}"
        )
    room = storage.nbytes // dtypes.itemsize(dtype)
    end = (
        offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        if 0 not in shape
        else offset
    )
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


# ------------------------------------------------------------------------------------ plain records


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
    """The fields of a Namespace, SimpleNamespace or dataclass as read.

    Raises PickleError when it has none.
    """
    state = record.state if isinstance(record, Record) else None
    if type(state) is tuple and len(state) == 2:  # (dict, slots)
        state = (
            {**(state[0] or {}), **(state[1] or {})}
            if all(type(s) in (dict, type(None)) for s in state)
            else None
        )
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
    """What an args Namespace holds as plain JSON-able Python, for display: torch.bfloat16 ->
    "bfloat16", an enum -> its value, a path -> its parts joined, a record of unknown kind -> a
    short string.

    Deeper than `depth`, or longer than 10,000 elements: cut."""
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
            return (
                {str(walk(k, left - 1)): walk(e, left - 1) for k, e in v.items()}
                if len(v) <= budget[0]
                else "..."
            )
        if isinstance(v, Record):
            if type(v).name in ("Namespace", "SimpleNamespace") and type(v.state) is dict:
                return walk(v.state, left)
            if type(v).module == "pathlib":
                return "/".join(str(walk(a, 0)) for a in v.args).replace("//", "/", 1)
            if v.opcode == b"R" and len(v.args) == 1 and v.state is None:
                return walk(v.args[0], left - 1)  # an enum's value, a torch.Size, a torch.device
        return short(v)

    return walk(value, depth)
