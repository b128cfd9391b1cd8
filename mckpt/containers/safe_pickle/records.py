"""The values of a pickle: inert classes that stand for its globals, and records of what it did with
them. Among them are namespaces, and tensors as views of storages.

Nothing here imports or calls anything that a pickle names.
"""

from __future__ import annotations

import math
import pickle
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

from mckpt.errors import PickleError
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


def namespace(**fields: Any) -> Record:
    """Makes the record of an argparse.Namespace."""
    made: Any = glob("argparse", "Namespace")  # a subclass of Record
    record = Record.__new__(made)
    record.state = fields
    return record


def fields(record: Any, where: str = "pickle") -> dict[str, Any]:
    """Returns the fields of a Namespace, SimpleNamespace or dataclass as they were read.

    where: the file, for the error. Raises PickleError if it has none.
    """
    state = record.state if isinstance(record, Record) else None
    if type(state) is tuple and len(state) == 2:  # (dict, slots)
        state = (
            {**(state[0] or {}), **(state[1] or {})}
            if all(type(s) in (dict, type(None)) for s in state)
            else None
        )
    if type(state) is not dict or not all(type(k) is str for k in state):
        raise PickleError(
            f"{where}: contains {short(record)} instead of an object with fields. Nothing in the"
            " file was run; get the file again from a source that you trust"
        )
    return state


def plain(value: Any, depth: int = 8) -> Any:
    """Returns a value as plain Python that JSON can represent, for display.

    torch.bfloat16 becomes "bfloat16", an enum its value, a path its parts joined, and any other
    record a short string. Everything deeper than `depth` or beyond 10,000 elements is cut.
    """
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


_CPU = "cpu"  # one object, as in torch, so that the pickle memoises it
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")


class TensorView(NamedTuple):
    """A tensor as a view of a storage."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    storage: str  # key: the zip record data/<key>
    offset: int  # elements


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns torch's strides of a row-major tensor, in elements: a size of 0 counts as 1."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def tensor(dtype: str, shape: tuple[int, ...], key: str, data: bytes | None = None) -> Record:
    """Makes the record with which torch.save writes a contiguous tensor that owns data/<key>.

    data: its bytes; None: they are tensor data, which the copies of a plan write.
    """
    numel = math.prod(shape)
    name = dtypes.TABLE[dtype].storage
    if name:
        pid = ("storage", glob("torch", name), key, _CPU, numel)
        return glob("torch._utils", "_rebuild_tensor_v2")(
            Storage(pid, data), 0, tuple(shape), contiguous(shape), False, OrderedDict()
        )
    untyped, nbytes = glob("torch.storage", "UntypedStorage"), numel * dtypes.itemsize(dtype)
    pid = ("storage", untyped, key, _CPU, nbytes)
    rebuild = glob("torch._utils", "_rebuild_tensor_v3")
    return rebuild(
        Storage(pid, data),
        *(0, tuple(shape), contiguous(shape), False, OrderedDict(), torch_dtype(dtype)),
    )


def as_tensor(record: Any) -> TensorView | None:
    """Returns the tensor that `record` stands for, None if it stands for something else.

    Loads nothing. Raises PickleError for a tensor whose sizes are not whole numbers, whose dtype
    mckpt does not know, or which reaches past its storage.
    """
    for _ in range(8):  # a parameter may wrap a tensor subclass, which wraps a tensor, and so on
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
    """Returns the numbers of a torch.Size, tuple or list of sizes; None for anything else."""
    if isinstance(value, Record) and type(value).name == "Size" and len(value.args) == 1:
        value = value.args[0]
    if type(value) not in (tuple, list) or len(value) > 64:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 63 for n in value) else None


def torch_dtype(name: str) -> Global:
    """Makes the record of a dtype, which torch pickles as a global."""
    return glob("torch", name)
