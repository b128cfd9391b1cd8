"""Hugging Face directories: safetensors (one file or an index) and pytorch_model*.bin; safetensors
are written.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import types
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mckpt import mapping
from mckpt.containers import safe_pickle, safetensors, torch_file
from mckpt.containers.entries import Entries, Entry, Kind, entry_of
from mckpt.errors import SourceError, UsageError, counted
from mckpt.formats.base import Problems, dtype_of, packed, shapes_of, stored_of
from mckpt.geometry.box import Layout, Piece, Scales, Stored, whole_box
from mckpt.geometry.packing import buffer
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import MappingFile, Rule, Scope
from mckpt.storage.files import TargetFile, read_file, unreadable
from mckpt.values import dtypes, quantisation

QUANTISED = "quantization_config"  # the key of config.json
SCALES = "_scale_inv"  # what a quantised weight's key has more in the key of its scales
LEAST_BARE = 1 << 20  # bytes that a size may say without a unit: fewer are a forgotten unit
ALIGN = 8  # header length is padded to this, so that data is aligned for mmap
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
INDEX = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}
SINGLE = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}


def detect(path: Path) -> bool:
    """Whether a directory looks like a Hugging Face checkpoint."""
    return any((path / name).exists() for name in (*INDEX.values(), *SINGLE.values())) or (
        (path / "config.json").exists() and any(path.glob("*.safetensors"))
    )


class Checkpoint:
    """An opened Hugging Face directory. Only headers are read."""

    format = "hf"
    common = None  # Megatron's args and the like

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path)
        self.files, self.entries, self.problems = self._index()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; SourceError if there is none."""
        return read_config(self.root)

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a quantised weight that share a scale, by config.json; None where it
        says no quantisation that is read.
        """
        how = self.config.get(QUANTISED)
        if (
            not isinstance(how, dict)
            or how.get("quant_method") != "fp8"
            or how.get("fmt", "e4m3") != "e4m3"
        ):
            return None
        match how.get("weight_block_size"):
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return int(rows), int(columns)
        return None

    def parallel(self) -> Parallel:
        """One of everything: nothing is sharded."""
        return Parallel()

    def choices(
        self, family: MappingFile, dims: Scope, parallel: Parallel, said: Scope
    ) -> dict[str, Any]:
        """None: there is one way to write a Hugging Face directory."""
        return {}

    def beside(self, family: MappingFile) -> list[str]:
        """Nothing but weights."""
        return []

    def side_files(self) -> list[str]:
        """Every file that is neither weights, nor config.json, nor hidden, relative to the
        directory: tokenizer, templates, modeling code.
        """
        return side_files(self.root)

    def layout(self, family: MappingFile, dims: Scope, parallel: Parallel, chosen: Scope) -> Layout:
        """What is stored where, in logical boxes.

        Everything missing, left over or of another shape is one error.
        """
        if self.problems:  # alone: each tensor of a lost shard would be named as missing too
            raise SourceError.of(
                f"{self.root}: its weight files do not fit together:",
                self.problems,
                "If a download was interrupted, let it go on.",
            )
        scope = family.scope(dims)
        bound = family.bind(scope)
        problems = Problems(f"{self.root} is not the {family.name} that its config.json describes:")
        entries = self.entries
        used = np.zeros(len(entries.names), bool)
        stored: list[Stored] = []
        mtp_found = mtp_missing = 0  # tensors of multi-token prediction
        for b in bound:
            rule, keys = b.rule, b.keys()
            whole = packed(rule, scope)
            shape, pieces = buffer(whole, [whole_box(whole.shape)], rule.of)
            rows = entries.rows(keys)
            used[rows[rows >= 0]] = True
            if rule.mtp:
                mtp_found += int((rows >= 0).sum())
                mtp_missing += 0 if rule.alias else int((rows < 0).sum())
            fit = entries.are(rows, [kind.shape == shape for kind in entries.kinds])
            for i in np.flatnonzero(~fit).tolist():
                if rows[i] >= 0:
                    problems.missing(
                        f"{keys[i]} is {list(entries[keys[i]].shape)} in {self._file(keys[i])}, and"
                        f" should be {list(shape)} by config.json"
                    )
                elif not rule.alias:
                    problems.missing(f"{keys[i]} is missing; it should be {list(shape)}")
            here = np.flatnonzero(fit)
            rows = rows[here]
            where = np.stack(
                [*(index[here] for index in b.instances()), entries.file[rows], entries.at[rows]]
            )
            kinds = entries.kind[rows]
            for number in np.flatnonzero(np.bincount(kinds)).tolist():
                kind, alike = entries.kinds[number], kinds == number
                if kind.dtype == quantisation.CODES:
                    scales = [keys[i] + SCALES for i in here[alike].tolist()]
                    known = entries.rows(scales)
                    used[known[known >= 0]] = True
                    stored += self._scaled(
                        rule, kind, pieces, where[:, alike], scales, known, problems
                    )
                else:
                    stored += stored_of(
                        rule.key, pieces, kind, where[:, alike], problems, replica=rule.alias
                    )
        left = dict.fromkeys(entries.names[i] for i in np.flatnonzero(~used).tolist())
        ignored: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for found, patterns in ((ignored, family.computed), (left_out, family.ignore)):
            for pattern, why in patterns.items():
                match = mapping.key_pattern(pattern)
                found.update({key: why for key in left if match.fullmatch(key)})
        ignored |= left_out
        for key in [k for k in left if k not in ignored]:
            weight = key.removesuffix(SCALES)
            if weight in ignored:
                ignored[key] = ignored[weight]
            elif weight == key or weight in left:
                problems.append(
                    f"{key} {list(entries[key].shape)} is in no rule of {family.path.name}"
                )
            else:
                what = f"holds {entries[weight].dtype}" if weight in entries else "is not there"
                problems.missing(f"{key} in {self._file(key)} has scales, and {weight} {what}")
        if problems and self.block is None and self.config.get(QUANTISED):
            problems.damaged = True  # in front, as all others may follow from it
            problems.insert(
                0,
                f"config.json says {QUANTISED} {_short(self.config[QUANTISED])}; of quantised"
                " models, those of quant_method fp8, fmt e4m3 and a weight_block_size are read:"
                " dequantise it first",
            )
        if mtp_missing and not mtp_found and mtp_missing == len(problems):
            said = [f"{k} {v!r}" for k, v in family.said_of("mtp_layers", self.config).items()]
            problems.cure = (
                f"All {mtp_missing:,} missing tensors are of layers of multi-token prediction, and"
                " no tensor of such a layer is there; config.json says"
                f" {', '.join(said) or 'nothing of them'}. transformers saves a model without them:"
                " --set mtp_layers=0 leaves them out."
            )
        problems.check()
        return Layout(self.files, stored, shapes_of(bound, scope), ignored, left_out)

    def _scaled(
        self,
        rule: Rule,
        kind: Kind,
        pieces: tuple[Piece, ...],
        where: np.ndarray,
        names: list[str],
        rows: np.ndarray,
        problems: Problems,
    ) -> list[Stored]:
        """Weights in 8 bits as what they are worth.

        `where` as in `stored_of`; `names` [n] are the keys of their scales, `rows` [n] where they
        are.
        """
        entries, block, shape = self.entries, self.block, kind.shape
        holds = f"{list(shape)} holds {kind.dtype}, "
        if block is None or len(shape) != 2:
            lacks = (
                "no weight_block_size (two numbers)"
                if block is None
                else f"blocks of {block[0]} x {block[1]}, and this is no matrix"
            )
            says = f"{QUANTISED} of config.json says {lacks}: dequantise it first"
            problems.extend(f"{name.removesuffix(SCALES)} {holds}and {says}" for name in names)
            problems.damaged = True
            return []
        wanted = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        fit = entries.are(
            rows, [s.shape == wanted and s.dtype in quantisation.SCALES for s in entries.kinds]
        )
        for i in np.flatnonzero(~fit).tolist():
            key = names[i].removesuffix(SCALES)
            if (scales := entries.get(names[i])) is None:
                problems.missing(
                    f"{key} {holds}and {names[i]} {list(wanted)} is missing: find the file that has"
                    " it, or dequantise the model"
                )
            elif scales.shape != wanted:
                problems.missing(
                    f"{names[i]} is {list(scales.shape)} in {self._file(names[i])}, and should be"
                    f" {list(wanted)}: {key} is {list(shape)}, in blocks of {block[0]} x {block[1]}"
                )
            else:
                problems.missing(
                    f"{names[i]} holds {scales.dtype} in {self._file(names[i])}, and scales are"
                    f" {', '.join(quantisation.SCALES)}"
                )
        strided = fit & entries.are(
            rows, [(s.strides or kind.strides) is not None for s in entries.kinds]
        )
        at = np.flatnonzero(strided).tolist()
        views = (
            f"{names[i].removesuffix(SCALES)} {holds}and it or its scales are a view with strides;"
            " save both as dense tensors"
            for i in at
        )
        problems.extend(views)
        problems.damaged |= bool(at)
        # no block, however large it is said to be, is larger than the weight
        height, width = map(min, block, shape)
        out = []
        for number, dtype in enumerate(quantisation.SCALES):
            alike = fit & entries.are(rows, [s.dtype == dtype for s in entries.kinds])
            if alike.any():
                layers, experts, files, ats = where[:, alike]
                grids = (
                    ats,
                    shape[1],
                    height,
                    width,
                    entries.file[rows[alike]],
                    entries.at[rows[alike]],
                    number,
                )
                out.append(
                    Stored(
                        rule.key,
                        quantisation.VALUES,
                        shape,
                        pieces,
                        layers.astype("i4"),
                        experts.astype("i4"),
                        files.astype("i4"),
                        ats,
                        replica=rule.alias,
                        scales=Scales(kind.dtype, np.stack(np.broadcast_arrays(*grids), 1)),
                    )
                )
        return out

    def _file(self, key: str) -> str:
        """The name of the file that holds a tensor."""
        return Path(self.files[self.entries[key].file]).name

    # ---- headers

    def _index(self) -> tuple[list[str], Entries, list[str]]:
        kind = next(
            (
                k
                for k in INDEX
                if (self.root / INDEX[k]).exists() or (self.root / SINGLE[k]).exists()
            ),
            None,
        )
        problems: list[str] = []
        named_by = "wanted"
        weight_map: dict[str, str] | None = None
        if kind is None:
            loose = sorted(p.name for p in self.root.glob("*.safetensors"))
            if len(loose) != 1:
                raise SourceError(
                    f"{self.root}: no {', no '.join((*SINGLE.values(), *INDEX.values()))}"
                    + (f"; {len(loose)} loose .safetensors files without an index" if loose else "")
                )
            kind, names = ".safetensors", loose
        elif (self.root / INDEX[kind]).exists():
            weight_map, names = self._weight_map(self.root / INDEX[kind])
            named_by = f"named by {INDEX[kind]}"
            # transformers would read this one, others the index
            if SINGLE[kind] not in names and (self.root / SINGLE[kind]).exists():
                problems.append(
                    f"both {SINGLE[kind]} and {INDEX[kind]} are there, and either may be meant:"
                    " move one of them away"
                )
            shards = re.compile(r".*-\d{5}-of-\d{5}" + re.escape(kind))
            extra = sorted(
                p.name
                for p in self.root.glob(f"*{kind}")
                if p.name not in names and shards.fullmatch(p.name)
            )
            problems.extend(f"{name}: a shard that {INDEX[kind]} does not name" for name in extra)
        else:
            names = [SINGLE[kind]]
        here: list[str] = []
        files: list[str] = []
        for name in names:
            path = os.path.join(self.root, name)
            if os.path.isfile(path):
                here.append(name)
                files.append(path)
            else:
                problems.append(
                    f"{name}: {named_by}, and {'no file' if os.path.exists(path) else 'not there'}"
                )
        if kind == ".safetensors":
            entries = safetensors.read(files)
        else:
            entries = Entries.of(
                pair for number, file in enumerate(files) for pair in read_bin(file, number)
            )
        held_by = list(map(here.__getitem__, entries.columns.file))
        if (
            weight_map is not None
            and len(weight_map) == len(held_by)
            and list(map(weight_map.get, entries.names)) == held_by
        ):
            # all is where the index says, and so nothing is there twice
            return files, entries, problems
        found: dict[str, str] = {}
        for key, name in zip(entries.names, held_by, strict=True):
            if found.setdefault(key, name) != name:
                problems.append(f"{key} is in {found[key]} and in {name}")
            elif weight_map is not None and weight_map.get(key) != name:
                said = f"says {weight_map[key]}" if key in weight_map else "does not name it"
                problems.append(f"{key} is in {name}, and {INDEX[kind]} {said}")
        lost = [(key, name) for key, name in (weight_map or {}).items() if key not in found]
        there = set(here)
        problems.extend(
            f"{key}: {INDEX[kind]} says it is in {name}, and it is not"
            for key, name in lost
            if name in there
        )
        if len(found) < len(entries.names):
            entries = Entries.of((key, entries[key]) for key in found)
        return files, entries, problems

    def _weight_map(self, path: Path) -> tuple[dict[str, str], list[str]]:
        """Tensor name -> file name, by an index, and the names of all files."""
        import msgspec

        raw = read_file(path)
        try:
            there = [name for name in os.listdir(path.parent) if name.isascii()]
        except OSError:  # a directory may be for passing through
            there = []
        # one string for each file, where all are there, not for each tensor
        for file in (Literal[tuple(there or [""])], str):
            weight_map: Any = types.GenericAlias(dict, (str, file))
            try:
                index: Any = msgspec.json.decode(
                    raw, type=msgspec.defstruct("Index", [("weight_map", weight_map)])
                )
                break
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # a file that is not there is told later
        else:
            raise SourceError(
                f"{path}: no index: a JSON object with weight_map, tensor name -> file name, is"
                " wanted"
            )
        found: dict[str, str] = index.weight_map
        files = sorted(set(found.values()))
        for name in files:
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise SourceError(f"{path}: names the file {name!r}; only files beside it are read")
        return found, files


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def read_config(root: Path) -> dict[str, Any]:
    """A directory's config.json."""
    if not (root / "config.json").is_file():
        raise SourceError(f"{root}: has no config.json, without which its tensors mean nothing")
    return parse_config(root / "config.json")


def parse_config(path: Path) -> dict[str, Any]:
    """A config.json wherever it lies."""
    try:
        config = json.loads(read_file(path, 1 << 24))
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: no JSON: {e}") from None
    if not isinstance(config, dict):
        raise SourceError(f"{path}: holds {type(config).__name__}, not an object")
    return config


def side_files(root: Path) -> list[str]:
    out = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(d for d in inner if not d.startswith("."))
        for name in sorted(names):
            relative = str((Path(folder) / name).relative_to(root))
            if (
                not name.startswith(".")
                and not name.endswith(WEIGHTS)
                and relative not in ("config.json", "mckpt.json")
            ):
                out.append(relative)
    return out


def read_bin(path: str, file: int) -> Iterator[tuple[str, Entry]]:
    """The tensors of a pytorch_model*.bin and their keys.

    Nothing in its pickle is imported or called.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as e:
        raise unreadable(path, e) from e
    try:
        if os.pread(fd, len(safetensors.LFS_POINTER), 0) == safetensors.LFS_POINTER:
            raise safetensors.pointer(path)
        value, data = torch_file.read(fd, path)
    finally:
        os.close(fd)
    if not isinstance(value, dict):
        raise SourceError(f"{path}: holds {safe_pickle.short(value)}, not a state dict")
    for key, record in value.items():
        view = safe_pickle.as_tensor(record)
        if view is None or not isinstance(key, str):
            raise SourceError(f"{path}: {key!r} is no tensor but {safe_pickle.short(record)}")
        yield key, entry_of(view, data, file)


# ------------------------------------------------------------------------------------------ writing


def parse_size(text: str, option: str = "") -> int:
    """ "5GB" or "512MiB" -> bytes.

    UsageError, which names the option, for a number without a unit that can only be meant to have
    one.
    """
    given = f"{option} {text!r}".lstrip()
    units = {
        "": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 1 << 10,
        "MIB": 1 << 20,
        "GIB": 1 << 30,
        "TIB": 1 << 40,
    }
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if (
        not found
        or found[2].upper() not in units
        or (size := int(float(found[1]) * units[found[2].upper()])) < 1
    ):
        raise UsageError(f"{given} is no size; say such as 5GB or 512MiB")
    if not found[2] and size < LEAST_BARE:
        raise UsageError(
            f"{given} without a unit is {counted(size, 'byte')}; say a unit, such as {found[1]}MiB"
            f" or {found[1]}GiB"
        )
    return size


def cut(sizes: list[int], most: int) -> list[int]:
    """The file of each tensor, of these bytes and in this order: files of about the same size, so
    that threads that write them end together.

    None is larger than `most` bytes but by one tensor alone.
    """
    each = np.array(sizes, "i8")
    total = int(each.sum())
    middle = np.cumsum(each) - each / 2
    least = max(1, -(-total // most))
    for count in range(least, least + least // 8 + 2):  # the fewest, or a few more
        _, even = np.unique(
            np.minimum(middle * count // max(1, total), count - 1), return_inverse=True
        )
        if not ((np.bincount(even, each) > most) & (np.bincount(even) > 1)).any():
            return [int(file) for file in even]
    # tensors about as large as `most`: as many as fit, one file after the other
    files, held = [0], 0
    for i, size in enumerate(sizes):
        full = i > 0 and held + size > most
        held = size if full else held + size
        files.append(files[-1] + full)
    return files[1:]


def lay_out(
    family: MappingFile, dims: Scope, kinds: dict[str, str], max_shard_size: int
) -> tuple[Layout, list[TargetFile]]:
    """The safetensors files of a model, and their index: layer by layer, cut so that no file grows
    past `max_shard_size` bytes.
    """
    scope = family.scope(dims)
    bound = [b for b in family.bind(scope) if b.rule.written]
    # (rank in the file order, key, dtype, shape, rule, instance)
    rows: list[tuple[int, str, str, tuple[int, ...], int, int]] = []
    for r, b in enumerate(bound):
        whole, dtype = packed(b.rule, scope), dtype_of(b.rule, kinds)
        for i, key in enumerate(b.keys()):
            layer = int(b.layers[i // len(b.experts)])
            order = (
                layer + 1
                if "layer" in b.rule.indices
                else (0 if b.rule.stage == "first" else dims["num_layers"] + 1)
            )
            rows.append((order, key, dtype, whole.shape, r, i))
    rows.sort(key=lambda row: row[0])
    sizes = [math.prod(row[3]) * dtypes.itemsize(row[2]) for row in rows]
    file_of = cut(sizes, max_shard_size)
    count = file_of[-1] + 1
    names = (
        [SINGLE[".safetensors"]]
        if count == 1
        else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    place = {(row[4], row[5]): i for i, row in enumerate(rows)}
    headers: list[dict[str, Any]] = [{"__metadata__": {"format": "pt"}} for _ in names]
    at = np.zeros(len(rows), "i8")
    ends = [0] * count
    for i, (_, key, dtype, shape, _, _) in enumerate(rows):
        f = file_of[i]
        at[i], ends[f] = ends[f], ends[f] + sizes[i]
        headers[f][key] = {
            "dtype": dtypes.TABLE[dtype].safetensors,
            "shape": list(shape),
            "data_offsets": [int(at[i]), ends[f]],
        }
    heads = []
    for header in headers:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGN)
        heads.append(struct.pack("<Q", len(text)) + text)
    at += np.array([len(heads[f]) for f in file_of])
    stored = []
    for r, b in enumerate(bound):
        whole = packed(b.rule, scope)
        shape, pieces = buffer(whole, [whole_box(whole.shape)], b.rule.of)
        layers, experts = b.instances()
        index = np.array([place[r, i] for i in range(len(layers))])
        stored.append(
            Stored(
                b.rule.key,
                dtype_of(b.rule, kinds),
                shape,
                pieces,
                layers,
                experts,
                np.array(file_of, "i4")[index],
                at[index],
                replica=b.rule.alias,
            )
        )
    outputs = [TargetFile.headed(n, h, e) for n, h, e in zip(names, heads, ends, strict=True)]
    if count > 1:
        weight_map = {row[1]: names[file_of[i]] for i, row in enumerate(rows)}
        index_json = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        outputs.append(
            TargetFile.whole(
                INDEX[".safetensors"], (json.dumps(index_json, indent=2) + "\n").encode()
            )
        )
    return Layout(names, stored, shapes_of(bound, scope)), outputs
