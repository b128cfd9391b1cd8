"""Pickles plain values and records, as Python and torch would pickle the objects that the records
stand for.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from mckpt.containers.safe_pickle.records import Global, Ordered, Record, Storage, glob
from mckpt.errors import PickleError

_BATCH = 1000  # elements of a list or dict that CPython writes between two marks


class Emitter:
    """Writes plain values, Globals, Records and Storages as pickle protocol 2.

    torch.load(weights_only=True) reads that protocol. The memo is used as CPython uses it, so that
    the output equals torch.save's data.pkl byte for byte.
    """

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")  # joining a list of pieces would take 80 bytes for each
        self.storages: dict[str, int] = {}  # key -> bytes, in the order of the pickle
        self.known: dict[str, bytes] = {}  # the bytes of those storages that have them
        self._memo: dict[int, int] = {}  # id() of a value -> its number
        self._keep: list[Any] = []  # keeps those values alive, so that no other gets their id()

    def done(self) -> bytes:
        return b"".join((self.out, b"."))

    def constant(self, value: Any) -> bytes:
        """Puts `value` into the memo only, and returns the opcode that pushes it."""
        self.save(value)
        self.out += b"0"
        self._keep.append(value)
        return self._get(self._memo[id(value)])

    @property
    def num_memo(self) -> int:
        """The number of values in the memo, which is the number of the next one."""
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
            if v.data is not None:
                self.known[v.key] = v.data
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
        # a record among its elements contains this very tuple: use that one, as CPython does
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
    """Returns the opcode that pushes an int, with its argument."""
    return pickle.dumps(v, 2)[2:-1]  # without the opcodes PROTO and STOP


def emitted(value: Any) -> Emitter:
    """Returns an Emitter that has written `value`.

    Its pickle is `.done()`, the storages that the pickle names are `.storages`. Raises PickleError
    for a value that has no place in a checkpoint.
    """
    emitter = Emitter()
    try:
        emitter.save(value)
    except RecursionError:
        raise PickleError("a value is nested too deeply to be written as a pickle") from None
    return emitter


def dumps(value: Any) -> bytes:
    """Returns the pickle, protocol 2, of a value from `loads` or of records made by hand.

    Raises PickleError for a value that has no place in a checkpoint.
    """
    return emitted(value).done()
