"""A format for tests: this file and a line in `mckpt.formats.FORMATS` are all that a new one needs.

flat.bin     all tensors one after the other, with the keys and shapes of the whole model
flat.json    {"args": {...}, "tensors": {key: {dtype, shape, at}}}
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mckpt.containers import safe_pickle
from mckpt.containers.entries import Span
from mckpt.formats.base import (
    Format,
    Names,
    Shown,
    best_choices,
    dtype_of,
    packed,
    shapes_of,
)
from mckpt.formats.megatron.interface import Common, MegatronRequest
from mckpt.geometry.box import Layout, Stored, whole_box
from mckpt.geometry.packing import buffer
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import MappingFile
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

DATA, INDEX = "flat.bin", "flat.json"


class Flat:
    """An opened checkpoint. It has no pickled common state, because its args are plain values."""

    block, notes = None, ()

    def __init__(self, root: Path) -> None:
        self.format = FORMAT
        self.root = root
        index = json.loads((root / INDEX).read_text())
        self.tensors: dict[str, dict[str, Any]] = index["tensors"]
        self.common = Common({"args": safe_pickle.namespace(**index["args"])}, INDEX)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def parallel(self) -> Parallel:
        return self.common.parallel()

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        return int(self.tensors[mapping.vocabulary.key]["shape"][0])

    def beside(self, mapping: MappingFile) -> list[str]:
        return []

    def choices(self, names: Names) -> dict[str, Any]:
        def mismatch(chosen: Names) -> int:
            wanted = {key for b in chosen.bound for key, _ in b.global_keys()}
            return len(wanted ^ self.tensors.keys())

        return best_choices(names, {**names.mapping.choices, "keys": ("global",)}, mismatch)

    def layout(self, names: Names) -> Layout:
        at = {key: tensor["at"] for key, tensor in self.tensors.items()}
        dtypes = {key: tensor["dtype"] for key, tensor in self.tensors.items()}
        rows = self.padded_vocab(names.mapping) or 0
        stored = list(_stored(names, rows, at, dtypes))
        return Layout([str(self.root / DATA)], stored, shapes_of(names.bound, names.scope()))

    def optimizer(self, names: Names) -> None:
        return None

    def spans(self, problems: list[str]) -> Iterator[Span]:
        for key, t in self.tensors.items():
            nbytes = math.prod(t["shape"]) * itemsize(t["dtype"])
            yield Span(key, str(self.root / DATA), t["at"], nbytes, t["dtype"])

    def show(self, most: int | None) -> Shown:
        rows = [
            (key, t["dtype"], tuple(t["shape"]), dict[str, Any]())
            for key, t in self.tensors.items()
        ]
        return Shown({"files": 2}, rows[:most], Counter(row[1:3] for row in rows))


def _stored(
    names: Names, padded_rows: int, at: dict[str, int], dtypes: dict[str, str]
) -> Iterator[Stored]:
    """Returns the place of every stored tensor: for each key all of its layers and experts,
    outermost.
    """
    scope = names.scope()
    for b in names.bound:
        whole = packed(b.rule, scope, padded_rows)
        shape, pieces = buffer(whole, [whole_box(whole.shape)], b.rule.of)
        layers, experts = b.instances()
        for key, layer in b.global_keys():
            here = np.ones(len(layers), bool) if "{layer}" not in b.rule.key else layers == layer
            dtype = dtypes[key]
            step = math.prod(shape) * itemsize(dtype)
            starts = at[key] + np.arange(int(here.sum())) * step
            zeros = np.zeros(len(starts), "i4")
            yield Stored(
                b.rule.key,
                dtype,
                shape,
                pieces,
                layers[here],
                experts[here],
                zeros,
                starts,
                replica=b.rule.alias,
                padding=b.rule.tp == "vocab",
            )


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    scope, bound = request.names.scope(), request.names.bound
    tensors: dict[str, dict[str, Any]] = {}
    end = 0
    for b in bound:
        whole = packed(b.rule, scope, request.padded_vocab_size)
        dtype = dtype_of(b.rule, request.dtypes)
        for key, _ in b.global_keys():
            shape = [*b.axes(scope), *whole.shape]
            tensors[key] = {"dtype": dtype, "shape": shape, "at": end}
            end += math.prod(shape) * itemsize(dtype)
    at = {key: tensor["at"] for key, tensor in tensors.items()}
    dtypes = {key: tensor["dtype"] for key, tensor in tensors.items()}
    stored = list(_stored(request.names, request.padded_vocab_size, at, dtypes))
    args = safe_pickle.plain(safe_pickle.fields(request.common["args"]))
    index = json.dumps({"args": args, "tensors": tensors}).encode()
    files = [TargetFile.headed(DATA, b"", end), TargetFile.whole(INDEX, index)]
    return Layout([DATA], stored, shapes_of(bound, scope)), files


FORMAT = Format(
    "flat",
    "flat.json",
    megatron=True,
    detect=lambda folder: (folder / INDEX).exists(),
    open=Flat,
    lay_out=lay_out,
    parts=(DATA, INDEX),
    global_keys=True,
    last=INDEX,
)
