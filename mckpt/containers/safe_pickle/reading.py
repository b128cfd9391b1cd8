"""Unpickles over inert classes, after `scan` has found nothing that could hurt."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mckpt.containers.safe_pickle.records import Storage, glob
from mckpt.containers.safe_pickle.scanning import scan
from mckpt.errors import PickleError

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
