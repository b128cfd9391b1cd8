"""The values of a pickle: inert classes that stand for its globals, and records of what it did with
them.

Nothing here imports or calls anything that a pickle names.
"""

from __future__ import annotations

import pickle
import weakref
from collections import OrderedDict
from typing import Any

from mckpt.values import dtypes


class Global(type):
    """The metaclass of inert classes, each of which stands for one global (module, name)."""

    module: str
    name: str

    def __call__(cls, *args: Any) -> Any:
        """Opcode REDUCE: records a call; only OrderedDict() without arguments is really made."""
        if not args and cls.name == "OrderedDict" and cls.module == "collections":
            return Ordered()
        made: Any = cls  # a subclass of Record, as is every class that this metaclass makes
        record = Record.__new__(made, *args)
        record.opcode = b"R"
        return record

    def __repr__(cls) -> str:
        return f"<{cls.module[:80]}.{cls.name[:80]}>"


class Record(metaclass=Global):
    """One object of a pickle: a global that was called or built, and what it was then given."""

    __slots__ = ("args", "entries", "items", "opcode", "state")
    module = name = ""
    opcode: bytes  # REDUCE or NEWOBJ
    args: tuple[Any, ...]
    state: Any  # what BUILD gave it
    items: list[tuple[Any, Any]] | None  # of a dict subclass
    entries: list[Any] | None  # of a list subclass

    def __new__(cls, *args: Any) -> Record:
        """Opcode NEWOBJ: records the class and its arguments."""
        record = object.__new__(cls)
        record.opcode, record.args = b"\x81", args
        record.state = record.items = record.entries = None
        return record

    def __setstate__(self, state: Any) -> None:
        """Opcode BUILD: stores the state."""
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Opcodes SETITEM and SETITEMS, for a dict subclass: stores an item."""
        if self.items is None:
            self.items = []
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Opcodes APPEND and APPENDS, for a list subclass: stores an entry."""
        if self.entries is None:
            self.entries = []
        self.entries.append(value)

    def __repr__(self) -> str:
        return repr(type(self))[:-1] + " object>"  # not its contents: they may be exponential


class Ordered(OrderedDict[Any, Any]):
    """A collections.OrderedDict from a pickle.

    Its only attribute may be the `_metadata` of Module.state_dict().
    """

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or set(state) - {"_metadata"}:
            raise pickle.UnpicklingError("an OrderedDict is given attributes other than _metadata")
        self.__dict__.update(state)


class Storage:
    """torch's persistent id ('storage', class, key, location, numel).

    Its bytes are the zip record data/<key>. Before torch 1.6, a sixth item names the storage of
    which this one is a part; only None is read.

    data: its bytes, if they are known when a file is laid out, as those of a single number are.
    """

    __slots__ = ("data", "pid")

    def __init__(self, pid: Any, data: bytes | None = None) -> None:
        if not (
            type(pid) is tuple
            and (len(pid) == 5 or (len(pid) == 6 and pid[5] is None))
            and pid[0] == "storage"
            and isinstance(pid[1], Global)
        ):
            raise pickle.UnpicklingError("a persistent id that is not a storage of torch")
        if not (
            type(pid[2]) is str and type(pid[3]) is str and type(pid[4]) is int and pid[4] >= 0
        ):
            raise pickle.UnpicklingError("a storage of torch with an odd key, location or size")
        self.pid: tuple[str, Global, str, str, int] = pid[:5]
        self.data = data

    @property
    def key(self) -> str:
        """The key of the storage, whose zip record is data/<key>."""
        return self.pid[2]

    @property
    def dtype(self) -> str | None:
        """The dtype of the elements; None for an UntypedStorage or a dtype unknown to mckpt."""
        return dtypes.OF_STORAGE.get(self.pid[1].name)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
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
    """Returns the inert class of module.name.

    There is one class per name, so that identity survives reading and writing.
    """
    found = _GLOBALS.get((module, name))
    if found is None:
        # setdefault, because two threads may make it at once
        made = Global("Global", (Record,), {"__slots__": (), "module": module, "name": name})
        found = _GLOBALS.setdefault((module, name), made)
    return found


def short(value: Any) -> str:
    """Describes any value in a few characters, for messages."""
    if isinstance(value, Global | Record | Storage):
        return repr(value)
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int:
        return repr(value) if value.bit_length() < 128 else f"an int of {value.bit_length()} bits"
    if type(value) is str:
        return repr(value[:80])
    return f"a {type(value).__name__}"
