"""Hugging Face directories: safetensors (one file or an index) and pytorch_model*.bin. Only
safetensors are written.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers import torch_spans
from mckpt.containers.entries import Span
from mckpt.errors import SourceError, UsageError
from mckpt.formats import carried, foreign
from mckpt.formats.base import (
    Format,
    LayoutRequest,
    Names,
    Shown,
    best_choices,
    dtype_of,
    file_order,
    packed,
    shapes_of,
)
from mckpt.formats.hf_config import CONFIG, described_in, quantised_by, read_config
from mckpt.formats.hf_encodings import WRITTEN, Quantisation, Scheme, quantisation_of
from mckpt.formats.hf_files import INDEX, SINGLE, Row, place, weight_files
from mckpt.formats.hf_layout import Matching
from mckpt.formats.hf_quantised import target_scales
from mckpt.geometry.box import Layout, Stored, whole_box
from mckpt.geometry.packing import buffer
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, MappingFile, of_others, plain, schema
from mckpt.storage.files import TargetFile
from mckpt.values import dtypes

STEM = "model"  # starts the names of the weight files
SCALES, WHOLE = 1, 2  # tensors of a quantised weight, which is 0
INSTANCE = 40  # bits of a layer and an expert


def detect(path: Path) -> bool:
    """Returns whether a directory looks like a Hugging Face checkpoint."""
    if foreign.is_delta(path):
        return False
    return any((path / name).exists() for name in (*INDEX.values(), *SINGLE.values())) or (
        (path / CONFIG).exists() and any(map(carried.is_weights, path.glob("*.safetensors")))
    )


class HuggingFaceRequest(LayoutRequest, frozen=True):
    """The description of a new Hugging Face directory."""

    max_shard_size: int  # bytes
    carried: tuple[Row, ...] = ()  # of the source: tensors to write unchanged
    quantize: str | None = None  # the form in which the weights of linear layers are quantised


class HuggingFace:
    """An opened Hugging Face directory. Only headers are read."""

    cure = "If a download was interrupted, continue it."  # of files that do not fit together

    def __init__(self, path: str | Path) -> None:
        self.format = FORMAT
        self.root = Path(path)
        self.files, self.entries, self.problems, wrappers = weight_files(self.root)
        self.notes = [
            f"the names of the tensors are read without {part}, which they have in the files, and"
            " are written without it"
            for part in wrappers
        ]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Returns the content of config.json; raises SourceError if there is none."""
        return read_config(self.root)

    @cached_property
    def quantisation(self) -> Quantisation:
        """Returns the forms of the quantised weights, from config.json."""
        return quantisation_of(quantised_by(self.config), self.entries.names)

    @property
    def quantised(self) -> bool:
        """Returns whether config.json describes quantised weights that mckpt reads."""
        return bool(self.quantisation.schemes)

    def parallel(self) -> Parallel:
        """Returns sizes of one, because nothing is sharded."""
        return Parallel()

    def keys(self) -> list[str]:
        return list(self.entries.names)

    def padded_vocab(self, mapping: MappingFile) -> None:
        """Returns None, because there is no padding here."""

    def choices(self, names: Names) -> dict[str, Any]:
        """Returns the form of the names, if the family has several: the one that fits most keys."""
        if len(names.mapping.forms) < 2:
            return {}

        def mismatch(names: Names) -> int:
            form, keys = names.mapping.form(names.choices), self.keys()
            apart = len(form.unmatched(keys)) + len(of_others(form, names.mapping.forms, keys))
            scope = names.scope()
            ends = [scheme.codes for scheme in self.quantisation.schemes if scheme.codes]
            for b in (b for b in names.bound if not b.rule.alias):
                # the first layer that a rule has: all layers have the same names and shapes
                key = b.key(int(b.numbers[0]))
                if any(self.entries.get(key + end) for end in ends):
                    continue  # a quantised weight, whose shape `Matching` checks
                entry = self.entries.get(key)
                shape = packed(b.rule, scope).shape
                expected = b.axes(scope) + (shape[::-1] if b.rule.transposed else shape)
                apart += entry is None or entry.shape != expected
            return apart

        return best_choices(names, {"form": names.mapping.forms}, mismatch)

    def beside(self, mapping: MappingFile) -> list[str]:
        """Returns nothing, because the directory holds weights only."""
        return []

    def show(self, most: int | None) -> Shown:
        described = (described_in(self.root) / CONFIG).is_file()
        entries, config = self.entries, self.config if described else {}
        rows = [
            (key, *entries.entry(row)[:2], dict[str, Any]())
            for row, key in enumerate(entries.names[:most])
        ]
        kinds: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for kind, n in Counter(entries.columns.kind).items():
            kinds[entries.kinds[kind][:2]] += n
        named = config.get("architectures")
        model = ", ".join(map(str, named)) if isinstance(named, list) and named else None
        facts = {"model": model, "files": len(self.files), "problems": self.problems}
        return Shown(facts, rows, kinds)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        """Yields the bytes of every tensor, and the records of pytorch_model*.bin files."""
        bins = (torch_spans.Item(path) for path in self.files if path.endswith(".bin"))
        yield from torch_spans.spans(bins, problems)
        for row, key in enumerate(self.entries.names):
            e = self.entries.entry(row)
            path = self.files[e.file]
            if not path.endswith(".bin"):
                yield Span(key, path, e.at, math.prod(e.shape) * dtypes.itemsize(e.dtype), e.dtype)

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes, as `Opened.layout`."""
        if self.problems:  # raised alone: otherwise each tensor of a lost shard would be listed too
            raise SourceError.of(
                f"{self.root}: its weight files do not fit together:",
                self.problems,
                self.cure,
            )
        found = Matching(self.root, self.files, self.entries, self.config, self.quantisation, names)
        return found.layout()


# ------------------------------------------------------------------------------------------ writing


def lay_out(request: HuggingFaceRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the safetensors files of a model and their index: layer by layer, cut so that no
    file grows past `max_shard_size` bytes.
    """
    dims, kinds, scope = request.names.dims, request.dtypes, request.names.scope()
    bound = [b for b in request.names.bound if b.rule.written]
    scheme = WRITTEN[request.quantize] if request.quantize else None
    # (rank in the file order, tensor, rule, instance, what of the weight it is: PARTS)
    ranked: list[tuple[int, Row, int, int, int]] = []
    for r, b in enumerate(bound):
        whole, dtype = packed(b.rule, scope), dtype_of(b.rule, kinds)
        stored_shape, axes = whole.shape[::-1] if b.rule.transposed else whole.shape, b.axes(scope)
        form = scheme if quantises(request, b) else None
        keys = b.keys()
        order = file_order(b, dims["num_layers"])
        for i in range(0, len(keys), math.prod(axes)):
            rows = [Row(keys[i], dtype, axes + stored_shape)]
            if form:
                rows = _quantised(form, rows[0])
            ranked += [(order[i], row, r, i, part) for part, row in enumerate(rows)]
    ranked.sort(key=lambda row: row[0])
    rows = [*request.carried, *(row[1] for row in ranked)]
    placed = place(rows, request.max_shard_size, STEM)
    first = len(request.carried)
    index_of = {(r, i, part): n for n, (*_, r, i, part) in enumerate(ranked, first)}
    stored = carried.placed(request.carried, placed)
    for r, b in enumerate(bound):
        whole = packed(b.rule, scope)
        shape, pieces = buffer(whole, [whole_box(whole.shape)], b.rule.of, b.rule.transposed)
        layers, experts = b.instances()
        part = np.arange(len(layers)) % math.prod(b.axes(scope))  # of a tensor of all experts
        index = np.array([index_of[r, int(i), 0] for i in np.arange(len(layers)) - part])
        dtype, scales = dtype_of(b.rule, kinds), None
        if scheme and quantises(request, b):
            scales_at, whole_at = (
                np.array([index_of.get((r, i, n), 0) for i in range(len(layers))])
                for n in (SCALES, WHOLE)
            )
            scales = target_scales(
                scheme,
                (shape[0], shape[1]),
                placed.at[index],
                (placed.file[scales_at], placed.at[scales_at]),
                (placed.file[whole_at], placed.at[whole_at]),
                peers_of(b),
            )
        nbytes = math.prod(shape) * dtypes.itemsize(dtype)
        stored.append(
            Stored(
                b.rule.key,
                dtype,
                shape,
                pieces,
                layers,
                experts,
                placed.file[index],
                placed.at[index] + part * nbytes,
                replica=b.rule.alias,
                scales=scales,
            )
        )
    outputs = placed.outputs
    if len(placed.names) > 1:
        weight_map = {
            row.key: placed.names[file]
            for row, file in zip(rows, placed.file.tolist(), strict=True)
        }
        index_json = {
            "metadata": {"total_size": sum(row.nbytes for row in rows)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        outputs.append(
            TargetFile.whole(
                INDEX[".safetensors"], (json.dumps(index_json, indent=2) + "\n").encode()
            )
        )
    shapes = {**shapes_of(bound, scope), **carried.shapes(stored)}
    return Layout(placed.names, stored, shapes), outputs


def peers_of(b: Bound) -> np.ndarray:
    """Returns a number for each weight of a rule. The weights of all rules that have one number
    have one scale of the whole weight.
    """
    layers, experts = b.instances()
    list_of = schema().quantised[plain(b.rule.of[0])]
    found: np.ndarray = (list_of << INSTANCE) + (layers.astype("i8") << INSTANCE // 2) + experts
    return found


def _quantised(form: Scheme, row: Row) -> list[Row]:
    """Returns the tensors of a quantised weight: its elements, the scales of its blocks and, if it
    has one, that of the whole weight.
    """
    shape = row.shape[0], row.shape[1]
    stored = form.shape(shape)
    assert stored is not None, "its rows have whole blocks"
    return [
        Row(row.key + form.codes, form.encoding.dtype, stored),
        Row(row.key + form.scales, form.dtypes[0], form.grids(shape)[0]),
        *[Row(row.key + form.whole, "float32", (1,))] * bool(form.whole),
    ]


def quantises(request: HuggingFaceRequest, b: Bound) -> bool:
    """Returns whether the weights of a rule are quantised. Raises UsageError for weights that no
    loader reads in this form.
    """
    names = set(map(plain, b.rule.of))
    if request.quantize is None or not schema().quantised.keys() >= names:
        return False
    form, width = WRITTEN[request.quantize], packed(b.rule, request.names.scope()).shape[-1]
    if form.encoding.per_byte > 1 and schema().not_in_4_bits >= names:
        return False
    stacked = b.axes(request.names.scope())
    if stacked or b.rule.transposed:
        what = "the weights of all experts" if stacked else "the transpose of a matrix"
        raise UsageError(
            f"--quantize {request.quantize}: {b.rule.key} holds {what}, which no loader reads with"
            " scales of blocks; leave the option out"
        )
    if form.block[0] == 1 and width % (form.block[1] or 1):
        raise UsageError(
            f"--quantize {request.quantize}: {b.rule.key} has rows of {width} elements, and a scale"
            f" is for {form.block[1]}; no loader reads a part of a block. Leave the option out, or"
            " use fp8"
        )
    return True


def unquantised(request: HuggingFaceRequest) -> list[str]:
    """Returns the modules whose weights are matrices and keep their dtype."""
    scope = request.names.scope()
    kept = [s.key for s in request.carried if len(s.shape) == 2]
    for b in request.names.bound:
        if len(packed(b.rule, scope).shape) == 2 and not quantises(request, b):
            kept += b.keys()
    return [key.removesuffix(".weight") for key in kept if key.endswith(".weight")]


FORMAT = Format(
    "hf",
    "safetensors or pytorch_model*.bin",
    megatron=False,
    detect=detect,
    open=HuggingFace,
    lay_out=lay_out,
    parts=(
        CONFIG,
        "generation_config.json",
        "*.safetensors",
        "*.index.json",
        "pytorch_model*.bin",
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "sentencepiece*.model",
        "chat_template*",
    ),
    last=CONFIG,
)
