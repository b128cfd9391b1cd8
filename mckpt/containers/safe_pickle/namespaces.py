"""Namespaces and other records of named fields, and their contents as plain Python for display."""

from __future__ import annotations

import math
from typing import Any

from mckpt.containers.safe_pickle.records import Global, Record, glob, short
from mckpt.errors import PickleError


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
