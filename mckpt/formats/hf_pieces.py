"""The parts of tensors in Hugging Face names that the ranks of a training by FSDP save, each in
files of its own:

    shard-00001-model-00001-of-00002.safetensors    torch's HuggingFaceStorageWriter, which NeMo
                                                    AutoModel uses; the header states where a part
                                                    begins (DCP_SHARDING_INFO)
    model_world_size_2_rank_0.pt                    verl: a state dict of DTensors, in torch.save
    pytorch_model_fsdp_rank0.bin                    the same by accelerate, LOCAL_STATE_DICT

A DTensor states the shape of the whole tensor, the mesh of the ranks, the place of its rank in the
mesh, and for each axis of the mesh the axis of the tensor that it cuts, as torch.chunk does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import safetensors, torch_file
from mckpt.containers.dcp_metadata import possible
from mckpt.containers.entries import Entry, entry_of
from mckpt.containers.safe_pickle import Record, TensorView, as_tensor, short
from mckpt.containers.torch_file import Ranges
from mckpt.errors import PickleError, SourceError
from mckpt.geometry.box import Box, tiles
from mckpt.storage.files import opened, read_json

SAFETENSORS = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
TORCH = re.compile(
    r"(?:model_world_size_(\d+)_rank_|pytorch_model_fsdp(?:_\d+)?_rank)(\d+)\.(?:pt|bin)"
)
OPTIMIZER = re.compile(r"optim_world_size_(\d+)_rank_(\d+)\.pt")  # of verl
INFO = "DCP_SHARDING_INFO"  # in the header of a safetensors file


class Part(NamedTuple):
    """The part of a tensor that one file holds."""

    box: Box
    entry: Entry
    copy: bool = False  # another part holds the same elements


class Whole(NamedTuple):
    """A tensor and its parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]
    sharded: bool = True  # False: each rank has it whole, as it has buffers


class Pieces(NamedTuple):
    """The files of a directory, and the tensors whose parts they hold."""

    files: list[str]
    wholes: dict[str, Whole]
    problems: list[str]


def numbered(root: Path, form: re.Pattern[str]) -> list[tuple[int, str]]:
    """Returns the number of the rank and the path of each file whose name has this form."""
    found = ((form.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(name[name.re.groups]), str(path)) for name, path in found if name)


def read(root: Path) -> Pieces:
    """Returns the tensors of a directory. Only headers are read; contradictions between the files
    become problems.

    Raises SourceError for a damaged file.
    """
    shards, ranks = numbered(root, SAFETENSORS), numbered(root, TORCH)
    if shards and ranks:
        names = " and ".join(Path(files[0][1]).name for files in (shards, ranks))
        raise SourceError(f"{root}: has files of two programs, such as {names}: move one's away")
    pieces = _of_safetensors(shards) if shards else _of_ranks(root, ranks)
    torn = []
    for key, whole in pieces.wholes.items():
        boxes = [p.box for p in whole.parts if not p.copy and 0 not in p.box.shape]
        if math.prod(whole.shape) and (wrong := tiles(boxes, whole.shape)):
            torn.append(f"{key} {list(whole.shape)}: {wrong}")
    # a rank without a part has no file, so a file that is not there need not be lost
    if torn and (absent := _absent(shards)):
        names = ", ".join(absent[:3]) + f" and {len(absent) - 3:,} more" * (len(absent) > 3)
        torn.insert(0, f"{names}: not there")
    pieces.problems.extend(torn)
    return pieces


def _whole(key: str, shape: tuple[int, ...], parts: list[Part], problems: list[str]) -> Whole:
    """Returns a tensor; parts of several dtypes become a problem."""
    kinds = sorted({part.entry.dtype for part in parts})
    if len(kinds) > 1:
        problems.append(f"{key}: its parts hold {' and '.join(kinds)}")
    return Whole(kinds[0], shape, parts)


# ------------------------------------------------------------------------------------- safetensors


def _of_safetensors(shards: list[tuple[int, str]]) -> Pieces:
    files = [path for _, path in shards]
    entries = safetensors.read(files)
    stated = [_offsets(path) for path in files]
    found: dict[str, list[Part]] = {}
    for row, key in enumerate(entries.names):
        entry = entries.entry(row)
        offsets = stated[entry.file].get(key)
        offsets = offsets.get("saved_offsets") if isinstance(offsets, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(entry.shape)
            or not all(type(n) is int and 0 <= n < 1 << 48 for n in offsets)
        ):
            raise SourceError(
                f"{files[entry.file]}: {key} {list(entry.shape)}: {INFO} of the header has"
                f" {str(offsets)[:80]}, and must have the offset of this part along each axis; copy"
                " the file again"
            )
        parts = found.setdefault(key, [])
        box = Box(tuple(offsets), entry.shape)
        parts.append(Part(box, entry, any(box == other.box for other in parts)))
    problems: list[str] = []
    wholes = {}
    for key, parts in found.items():
        ends = [[o + n for o, n in zip(*p.box, strict=True)] for p in parts]
        if len(set(map(len, ends))) > 1:
            problems.append(f"{key}: its parts have several numbers of axes")
            continue
        shape = tuple(map(max, zip(*ends, strict=True)))
        wholes[key] = _whole(key, shape, parts, problems)
    return Pieces(files, wholes, problems)


def _absent(shards: list[tuple[int, str]]) -> list[str]:
    """Returns the names of files that ranks of this many files may have, and that are not there."""
    here = {Path(path).name for _, path in shards}
    last = max((rank for rank, _ in shards), default=0)
    counts = {name.rpartition("-of-")[2] for name in here}
    return [
        name
        for rank in range(1, min(last, 1 << 16) + 1)
        for count in sorted(counts)
        for number in range(1, min(int(count.partition(".")[0]), 1 << 10) + 1)
        if (name := f"shard-{rank:05}-model-{number:05}-of-{count}") not in here
    ]


def _offsets(path: str) -> dict[str, Any]:
    """Returns where each part of a safetensors file begins, as its header states it."""
    text = safetensors.metadata(path).get(INFO)
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SourceError(
            f"{path}: its header has no {INFO}, which states where its parts of tensors begin; copy"
            " it again, or save with HuggingFaceStorageWriter(save_distributed=True)"
        )
    return found


# --------------------------------------------------------------------------- DTensors of torch.save


# for each axis of a mesh: the rank's place, and the axis of the tensor that it cuts, or None
Cuts = tuple[tuple[int, int | None], ...]


class _Local(NamedTuple):
    """One rank's part of a DTensor, before the sizes of its mesh are known."""

    shape: tuple[int, ...]  # of the whole tensor
    entry: Entry
    cuts: Cuts


def _of_ranks(root: Path, ranks: list[tuple[int, str]]) -> Pieces:
    files = [path for _, path in ranks]
    problems = _lost_ranks(root, ranks)
    return Pieces(files, of_state_dicts(files, state_dict_in, problems), problems)


def of_state_dicts(
    files: Sequence[str],
    state_dict: Callable[[str], tuple[dict[Any, Any], Ranges]],
    problems: list[str],
) -> dict[str, Whole]:
    """Returns the tensors of the files of all ranks; contradictions become problems.

    state_dict: returns the tensors of one file, and the places of their storages.
    """
    locals_: dict[str, list[_Local]] = {}
    for number, path in enumerate(files):
        for key, local in _locals(path, number, *state_dict(path)):
            locals_.setdefault(key, []).append(local)
    wholes: dict[str, Whole] = {}
    for key, parts in locals_.items():
        if len(parts) != len(files) and not problems:
            names = {Path(files[part.entry.file]).name for part in parts}
            lacking = [Path(file).name for file in files if Path(file).name not in names]
            problems.append(f"{key}: is in {len(parts)} files, and not in {', '.join(lacking[:3])}")
        try:
            found = _placed(parts)
        except ValueError as e:
            problems.append(f"{key}: {e}")
            continue
        whole = _whole(key, parts[0].shape, found, problems)
        wholes[key] = whole._replace(sharded=bool(parts[0].cuts))
    return wholes


def _lost_ranks(root: Path, ranks: list[tuple[int, str]]) -> list[str]:
    """Returns the problems of files that cannot be those of all ranks of one run."""
    here = [rank for rank, _ in ranks]
    worlds = {match[1] for _, path in ranks if (match := TORCH.fullmatch(Path(path).name))}
    stated = {int(world) for world in worlds if world}
    if len(worlds) > 1 or len(set(here)) < len(here):
        return [f"its files are of several runs ({', '.join(Path(p).name for _, p in ranks)})"]
    if (root / "fsdp_config.json").is_file():
        config = read_json(root / "fsdp_config.json", 1 << 20)
        size = config.get("world_size") if isinstance(config, dict) else None
        stated |= {size} if type(size) is int else set()
    if len(stated) > 1:
        return [f"fsdp_config.json and the names of the files have the sizes {sorted(stated)}"]
    count = next(iter(stated), max(here) + 1)
    lost = sorted({*range(min(count, 1 << 20))} - {*here})
    names = ", ".join(map(str, lost[:8]))
    return [f"the files of rank {names} of {count} ranks are not there"] if lost else []


def state_dict_in(path: str) -> tuple[dict[Any, Any], Ranges]:
    """Returns the content of a rank's file, and the places of its storages."""
    with opened(path) as fd:
        value, data = torch_file.read(fd, path)
    if not isinstance(value, dict):
        raise SourceError(f"{path}: holds {short(value)}, not a state dict")
    return value, data


def _locals(
    path: str, file: int, value: dict[Any, Any], data: Ranges
) -> Iterator[tuple[str, _Local]]:
    """Yields the tensors of a state dict in a rank's file."""
    for key, record in value.items():
        try:
            view, cuts = as_tensor(record), Cuts()
            shape = view.shape if view else ()
            if view is None:
                shape, cuts, view = _dtensor(record)
        except (PickleError, ValueError, LookupError, TypeError, AttributeError) as e:
            what = f"{path}: {str(key)[:200]}: is not a tensor that mckpt reads"
            raise SourceError(f"{what}: {e}") from None
        if not isinstance(key, str):
            raise SourceError(f"{path}: {short(key)} is not the name of a tensor")
        yield key, _Local(shape, entry_of(view, data, file), cuts)


def _dtensor(record: Any) -> tuple[tuple[int, ...], Cuts, TensorView]:
    """Returns the shape of a DTensor, its cuts, and the tensor of its rank.

    Raises ValueError with the reason, or LookupError, TypeError or AttributeError for a record of
    another structure.
    """
    if not isinstance(record, Record) or type(record).name != "_rebuild_from_type_v2":
        raise ValueError(short(record))
    rebuild, kind, args, state = record.args
    if rebuild.name != "_rebuild_wrapper_subclass" or kind.name != "DTensor":
        raise ValueError(f"a {kind.name}")
    fields: dict[str, Any] = {}
    for part in state if type(state) is tuple else (state,):
        fields |= part or {}
    spec = fields["_spec"].state
    shape = sizes_of(args[2])
    where = sizes_of(spec["mesh"].state["_coordinate_on_dim"])
    cuts: list[tuple[int, int | None]] = []
    for at, placement in zip(where, spec["placements"], strict=True):
        name = type(placement).name
        axis = placement.state["dim"] if name == "Shard" else None
        if name not in ("Shard", "Replicate") or (axis is not None and not 0 <= axis < len(shape)):
            raise ValueError(f"a DTensor placed as {name} {axis}, and not as Shard or Replicate")
        cuts.append((at, axis))
    view = as_tensor(fields["_local_tensor"])
    if view is None or not possible(shape):
        raise ValueError("a DTensor without elements")
    return shape, tuple(cuts), view


def sizes_of(value: Any) -> tuple[int, ...]:
    """Returns whole numbers of a torch.Size, a tuple or a list. Raises ValueError for others."""
    if isinstance(value, Record) and type(value).name == "Size":
        (value,) = value.args
    if type(value) not in (tuple, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"sizes that are {short(value)}")
    return tuple(value)


def _placed(parts: Sequence[_Local]) -> list[Part]:
    """Returns the parts with their boxes. Raises ValueError if they do not fit together."""
    if len({(part.shape, len(part.cuts)) for part in parts}) > 1:
        shapes = sorted({part.shape for part in parts})
        raise ValueError(f"the ranks state several shapes or meshes: {list(map(list, shapes))}")
    places = [tuple(at for at, _ in part.cuts) for part in parts]
    mesh = tuple(max(along) + 1 for along in zip(*places, strict=True))
    if (mesh and len(parts) % math.prod(mesh)) or len(set(places)) < (
        math.prod(mesh) if mesh else 1
    ):
        raise ValueError(f"{len(parts)} ranks are not a mesh of {list(mesh)}")
    out: list[Part] = []
    seen = set[Box]()
    for part in parts:
        box = _box(part.shape, part.cuts, mesh)
        if part.entry.shape != box.shape:
            raise ValueError(
                f"the part of the rank at {[at for at, _ in part.cuts]} of the mesh {list(mesh)} is"
                f" {list(part.entry.shape)}, and should be {list(box.shape)} of {list(part.shape)}"
            )
        out.append(Part(box, part.entry, box in seen))
        seen.add(box)
    return out


def _box(shape: tuple[int, ...], cuts: Cuts, mesh: Iterable[int]) -> Box:
    """Returns the box of one rank: along each axis of the mesh torch.chunk cuts what is left."""
    offset, size = [0] * len(shape), list(shape)
    for (at, axis), ways in zip(cuts, mesh, strict=True):
        if axis is not None:
            each = -(-size[axis] // ways)
            low = min(at * each, size[axis])
            offset[axis] += low
            size[axis] = min(each, size[axis] - low)
    return Box(tuple(offset), tuple(size))
