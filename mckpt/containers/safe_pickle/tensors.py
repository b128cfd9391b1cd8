"""Tensors in a pickle: the records that torch.save makes of them, as views of storages."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

from mckpt.containers.safe_pickle.records import Global, Record, Storage, glob, short
from mckpt.errors import PickleError
from mckpt.values import dtypes

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
