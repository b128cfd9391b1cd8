"""Unpickles over inert classes, after `scan` has refused opcodes that could hurt.

The C unpickler can reach only the classes that `find_class` gives it, but it believes the bytes:

    danger                                         bound
    LONG_BINPUT with a huge index: 16 bytes each   index <= size of the pickle / 4
    a string, number or frame that claims to be    lengths against the bytes that are left
      longer than the file
    nested tuples as dict keys: hashing recurses   a tuple that holds tuples has at most MAX_NESTED
      in C, and visits shared ones repeatedly        elements in all
    a list that REDUCE copies again and again      only OrderedDict() without arguments is called
    opcodes of one byte that make an object        at most 64 bytes of memory per byte of pickle
                                                     (`]`, `}`); `max_bytes` of `loads` bounds it
    many distinct globals, 1.5 KB each             MAX_GLOBALS of `loads`
    opcodes that no checkpoint has                 refused: text protocol 0, INST, OBJ, EXT, DUP,
                                                     sets, out-of-band buffers

The time that an attacker can waste is not bounded, but it is linear in the size of the pickle times
MAX_NESTED, plus the cost of dict keys that are chosen to collide.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mckpt.containers.safe_pickle.records import Storage, glob
from mckpt.errors import PickleError

MAX_NESTED = 2000  # elements in a tuple of tuples; the largest seen is Python's RNG state, 628

# opcode -> bytes of its argument: BININT1 BININT2 BININT BINFLOAT, and those without an argument
_PUSHES = {0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8, **dict.fromkeys(b")]}N\x88\x89", 0)}
# opcode of a string, bytes or a long -> width of its length
_SIZED = {
    **{0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8},
    **{0x96: 8, 0x55: 1, 0x54: 4, 0x8A: 1, 0x8B: 4},
}
_PUTS = {0x71: 1, 0x72: 4, 0x94: 0}  # BINPUT LONG_BINPUT MEMOIZE -> width of the index
# APPEND SETITEM BUILD -> number of values that it takes from the stack; it fills the one below
_POPS = {0x61: 1, 0x73: 2, 0x62: 1}
_HEAVY = 0xFFFF  # the largest weight that the memo stores: far more than MAX_NESTED

# The chunks and items of a .metadata, of which there are 10**5, are scanned as whole objects: a
# class that is on the stack, made without arguments and given a dict of fields. A field is a
# constant, a number, a memo entry, or one of at most two torch.Size of at most 8 numbers. The
# object pushes weight 1. Every tuple that it hashes is on the stack or in the memo already. Either
# all of it is memoised (group 1 is MEMOIZE), as torch writes it, or none of it, as `dcp_metadata`
# writes it.
_LONG1 = rb"\x8a(?:%b)" % b"|".join(b"\\x%02x" % n + n * b"." for n in range(9))
_NUMBER = rb"(?:K.|M..|J....|%b)" % _LONG1
_FIELDS = rb"(?:h.|j....|K.|M..|J....|N|\x88|\x89|%b){0,16}" % _LONG1
_SIZE = rb"(?:h.|j....)(?:\(%b{0,8}t|%b\x85|%b{2}\x86|%b{3}\x87)\1\x85\1R\1" % (
    _NUMBER,
    _NUMBER,
    _NUMBER,
    _NUMBER,
)
_OBJECT = rb"(?s)\)\x81(\x94?)}\1\(%b(?:%b%b()(?:%b%b())?)?ub" % (
    _FIELDS,
    _SIZE,
    _FIELDS,
    _SIZE,
    _FIELDS,
)
# The weights that an object puts into the memo, by the number of its last group: group 1, and one
# more for each torch.Size.
_PUTS_OF_OBJECT = {1 + n: array("H", [1, 1] + n * [9, 10, 10]) for n in range(3)}


def _refuse(where: str, at: int, what: str) -> PickleError:
    return PickleError(
        f"{where}: byte {at} of the pickle: {what}. No checkpoint contains that; nothing in it"
        " was run"
    )


def as_pickle(data: bytes, where: str) -> bytes:
    """Returns the pickle with which `data` begins; raises PickleError as `scan` does."""
    return data[: scan(data, where)]


def scan(data: bytes, where: str) -> int:
    """Proves that the C unpickler can read `data` without harm; runs no opcode.

    Returns the length of the pickle, because more bytes may follow it.

    Raises PickleError with the offset and the opcode. Takes about 0.2 s for 1 MB, or 0.03 s if
    `_OBJECT` matches whole objects.
    """
    # each put into the memo follows a push: 1 + 5 bytes, or 1 + 2 for the first 256
    bound = len(data) // 4 + 256
    # the weight of each value: 1, or for a tuple the number of leaves that hashing it visits
    stack: list[int] = []
    marks: list[int] = []
    memo = array("H")  # weights up to _HEAVY; 0 means not set
    num_set = 0
    at, here, size = 0, 0, len(data)
    # here, because compiling it takes 1 ms, and many commands scan nothing; `re` keeps the result
    match_object = re.compile(_OBJECT).match

    try:
        while True:
            op = data[at]
            here = at
            at += 1
            if op in _PUSHES:
                # EMPTY_TUPLE NEWOBJ ...
                if op == 0x29 and num_set == len(memo) and (found := match_object(data, here)):
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
            elif op == 0x30:  # POP takes a mark, if a mark is on top
                if marks and marks[-1] == len(stack):
                    marks.pop()
                else:
                    stack.pop()
            elif op in b"eu1":  # APPENDS SETITEMS POP_MARK
                del stack[marks.pop() :]
                if op != 0x31:
                    stack[-1]
            # REDUCE: a Record weighs 1, but torch.Size returns its argument, which keeps its weight
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
                return at
            else:
                name = _NAMES.get(op)
                raise _refuse(
                    where,
                    here,
                    f"opcode {name} is refused" if name else f"{op:#04x} is not an opcode",
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
    """Returns the offset behind a string or number; its length is the `width` bytes at `at`."""
    length = int.from_bytes(data[at : at + width], "little")
    if at + width + length > len(data):
        raise _refuse(
            where,
            at - 1,
            f"opcode {_NAMES[data[at - 1]]} claims {length} bytes, {max(len(data) - at - width, 0)}"
            " are left",
        )
    return at + width + length


# bytes of a pickle, unless the caller sets another limit; the largest data.pkl seen (70,000
# tensors) has 12 MB
MAX_BYTES = 256 << 20
MAX_GLOBALS = 4096  # distinct globals of one pickle; a real common.pt names 60


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


# Replaces torch.Size by a function that returns a tuple itself and refuses anything else. tuple()
# would copy a long list each time that a pickle calls it.
_COMPACT = {("torch", "Size"): ().__add__}


@contextmanager
def no_gc() -> Iterator[None]:
    """Switches the cyclic garbage collector off inside the block.

    It would walk millions of young objects again and again: 3.0 s instead of 1.1 s for a large
    .metadata.
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
    """Returns the value of a pickle.

    where: names the pickle in errors.
    compact: makes each torch.Size a plain tuple. That saves 40% of the memory of a .metadata, but
        the value cannot be written again as it was.
    storages: gets each storage that the pickle names, as often as it does.
    classes: (module, name) -> a class that replaces the inert class. It must have no base, only
        `__slots__` and a `__setstate__` that stores, so that a pickle can do nothing else with it.

    Raises PickleError if the pickle is hostile, damaged, or longer than `max_bytes`.
    """
    if len(data) > max_bytes:
        raise PickleError(
            f"{where}: a pickle of {len(data)} bytes; at most {max_bytes} are read here"
        )
    with no_gc():
        scan(data, where)
        known = {**(_COMPACT if compact else {}), **(classes or {})}
        try:
            return _Unpickler(data, known, storages).load()
        except Exception as e:  # the unpickler reports other damage with a dozen kinds of error
            cause = str(e).split("\n", 1)[0][:200]
            raise PickleError(
                f"{where}: not a pickle of a checkpoint: {type(e).__name__}: {cause}"
            ) from None
