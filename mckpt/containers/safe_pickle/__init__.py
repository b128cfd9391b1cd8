"""Reads and writes the pickles of Megatron and torch without importing or calling what they name.

    pickle bytes -> scan -> C unpickler over inert classes -> dict, list, str, int, Record, Storage

Reading: each global that a pickle names becomes an inert class (`Global`). Calling it, building it
and filling it only records that (`Record`). Writing: an encoder of a dozen types, which knows no
module, emits the records as they were read. The same records, made by hand, write a new checkpoint.
"""

from mckpt.containers.safe_pickle.reading import MAX_BYTES, as_pickle, loads, no_gc
from mckpt.containers.safe_pickle.records import (
    Global,
    Ordered,
    Record,
    Storage,
    TensorView,
    as_tensor,
    contiguous,
    fields,
    glob,
    namespace,
    plain,
    short,
    tensor,
    torch_dtype,
)
from mckpt.containers.safe_pickle.writing import Emitter, dumps, emit_int, emitted
