"""`mckpt check` finds planted damage in checkpoints of every format, and names the place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mckpt.checking import SLAB, Span, scan
from mckpt.containers import torch_file
from mckpt.containers.dcp_metadata import read_metadata
from tests.helpers.commands import PT, Pt, edit_json, emit, good, hf, mckpt, shard, write_shard
from tests.helpers.tiny import write_safetensors

NAN, INFINITY = b"\xc0\x7f", b"\x80\x7f"  # bfloat16
FC2 = "decoder.layers.mlp.linear_fc2.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
RANK = f"release/mp_rank_01_001/{PT}"


def put(path: Path, at: int, data: bytes) -> None:
    """Overwrites bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    raw = path.read_bytes()
    put(path, at, bytes([raw[at] ^ 1]))


def cut(path: Path, nbytes: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - nbytes)


def place(path: Path, key: str) -> int:
    """Returns the offset of a tensor in a .safetensors file."""
    header, data = shard(path)
    return path.stat().st_size - len(data) + int(header[key]["data_offsets"][0])


def in_tensor(path: Path, key: str, value: bytes, element: int) -> tuple[str, ...]:
    """Overwrites one bfloat16 element of a .safetensors file; returns what names its place."""
    at = place(path, key) + 2 * element
    put(path, at, value)
    return key, path.name, f"element {element:,}", f"byte {at:,}"


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "model.safetensors"
        found, data = shard(path)
        change(found)
        write_shard(path, found, data)

    return damage


def record(path: Path, name: str = "data/7", base: int = 0, length: int | None = None) -> Any:
    """Returns offset and bytes of a record of a torch.save file."""
    with open(path, "rb") as file:
        at, nbytes, _ = torch_file.records(file.fileno(), str(path), base, length)[name]
    return at, nbytes


def flipped_record(path: Path, name: str = "data/7") -> tuple[str, ...]:
    at, nbytes = record(path, name)
    flip(path, at + nbytes // 2)
    return f"record {name}", f"bytes {at:,} to {at + nbytes:,}", str(path.name), "crc32"


def in_record(path: Path, value: bytes) -> tuple[str, ...]:
    """Overwrites the first element of a tensor, and leaves its checksum as it is."""
    at, _ = record(path)
    put(path, at, value)
    return f"byte {at:,}", path.name, "1 NaN"


def item(root: Path, key: str = FC2) -> tuple[str, Path, int, int]:
    """Returns what names the first item of a tensor, its file, offset and length."""
    items = read_metadata(root / "release/.metadata").items
    (_, offsets), (file, at, length) = next((k, v) for k, v in items.items() if k[0] == key)
    return f"{key} at {list(offsets)}", root / "release" / file, at, length


def flipped_item(root: Path) -> tuple[str, ...]:
    name, path, base, length = item(root)
    at, nbytes = record(path, "data/0", base, length)
    flip(path, at + 5)
    return name, path.name, f"bytes {at:,} to {at + nbytes:,}", "crc32"


def edited_metadata(change: Callable[[dict[str, Any], list[Any]], Any]) -> Callable[[Path], None]:
    """Returns a damage that changes the chunks or items of .metadata."""

    def damage(root: Path) -> None:
        path = root / "release/.metadata"
        found = read_metadata(path)
        tensors: dict[str, Any] = {
            key: (dtype, size, list(chunks)) for key, (dtype, size, chunks) in found.tensors.items()
        }
        tensors |= dict.fromkeys(found.objects)
        items = [(*key, *where) for key, where in found.items.items()]
        change(tensors, items)
        path.write_bytes(emit(tensors, items))

    return damage


def without_a_chunk(tensors: dict[str, Any], items: list[Any]) -> None:
    offsets, _ = tensors[FC2][2].pop()
    items[:] = [i for i in items if (i[0], i[1]) != (FC2, offsets)]


def with_a_moved_item(tensors: dict[str, Any], items: list[Any]) -> None:
    at = next(i for i, row in enumerate(items) if row[0] == FC2)
    key, offsets, file, start, length = items[at]
    items[at] = key, offsets, file, start + 64, length


def manifest(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "release/mckpt.json").read_text())
    return found


def unlisted(root: Path) -> None:
    """Removes the manifest, so that the checkpoint looks like one of Megatron's own."""
    (root / "release/mckpt.json").unlink()


def differing_copy(root: Path) -> None:
    """Changes one copy of a tensor that every tensor rank has, with right checksums."""
    path = root / "release/mp_rank_01_000" / PT
    pt, other = Pt(path), Pt(root / "release/mp_rank_00_000" / PT)
    key = next(k for k, raw in pt.data.items() if len(raw) == 2 * 48 and raw == other.data[k])
    pt.data[key] = bytes([pt.data[key][0] ^ 1]) + pt.data[key][1:]
    pt.save()
    unlisted(root)


# kind, damage (which may return what names its place), exit code, what is said
Damage = tuple[str, Callable[[Path], Any], int, tuple[str, ...]]
DAMAGES: dict[str, Damage] = {
    # Hugging Face
    "nan": ("one", lambda r: in_tensor(r / "model.safetensors", Q, NAN, 9), 1, ("1 NaN",)),
    "infinity": (
        "one",
        lambda r: in_tensor(r / "model.safetensors", "model.norm.weight", INFINITY, 3),
        1,
        ("1 infinite",),
    ),
    "last element": (
        "many",
        lambda r: in_tensor(
            next(p for p in sorted(r.glob("*.safetensors")) if "lm_head.weight" in shard(p)[0]),
            "lm_head.weight",
            NAN,
            0,
        ),
        1,
        ("1 NaN",),
    ),
    "header: a tensor is gone": (
        "one",
        header(lambda h: h.pop(Q)),
        3,
        ("model.safetensors", "a hole"),
    ),
    "header: another name": (
        "one",
        header(lambda h: h.update({"model.other": h.pop(Q)})),
        3,
        (Q, "model.other"),
    ),
    "header: another shape": (
        "one",
        header(lambda h: h[Q].update(shape=h[Q]["shape"][::-1])),
        3,
        (Q,),
    ),
    "header: too long": (
        "one",
        lambda r: put(r / "model.safetensors", 0, b"\xff" * 4),
        3,
        ("header",),
    ),
    "file cut": ("one", lambda r: cut(r / "model.safetensors", 100), 3, ("model.safetensors",)),
    "file empty": ("one", lambda r: (r / "model.safetensors").write_bytes(b""), 3, ("model.safe",)),
    "shard missing": (
        "many",
        lambda r: sorted(r.glob("*.safetensors"))[1].unlink(),
        3,
        ("model-00002", "not there"),
    ),
    "shard too many": (
        "many",
        lambda r: shutil.copy(
            sorted(r.glob("*.safetensors"))[0], r / "model-00009-of-00009.safetensors"
        ),
        3,
        ("model-00009-of-00009.safetensors",),
    ),
    "index: wrong file": (
        "many",
        lambda r: edit_json(
            r / "model.safetensors.index.json",
            lambda i: i["weight_map"].update({Q: i["weight_map"]["lm_head.weight"]}),
        ),
        3,
        (Q,),
    ),
    "index: unknown tensor": (
        "many",
        lambda r: edit_json(
            r / "model.safetensors.index.json",
            lambda i: i["weight_map"].update(extra=i["weight_map"]["lm_head.weight"]),
        ),
        3,
        ("extra",),
    ),
    "export: a byte": ("export", lambda r: flip(r / "model.safetensors", 40_001), 3, ("crc32",)),
    "export: config gone": ("export", lambda r: (r / "config.json").unlink(), 3, ("config.json",)),
    "export: tokenizer longer": (
        "export",
        lambda r: (r / "tokenizer_config.json").write_text("{}" + " " * 999),
        3,
        ("tokenizer_config.json", "bytes"),
    ),
    # torch
    "torch: a byte": ("torch", lambda r: flipped_record(r / RANK), 3, ()),
    "torch: a byte, no manifest": (
        "torch",
        lambda r: (unlisted(r), flipped_record(r / RANK))[1],
        3,
        (),
    ),
    "torch: a byte of the pickle": ("torch", lambda r: flipped_record(r / RANK, "version"), 3, ()),
    "torch: nan": ("torch", lambda r: (unlisted(r), in_record(r / RANK, NAN))[1], 3, ("decoder",)),
    "torch: rank missing": ("torch", lambda r: (r / RANK).unlink(), 3, ("mp_rank_01_001",)),
    "torch: cut": ("torch", lambda r: cut(r / RANK, 10), 3, ("mp_rank_01_001",)),
    "torch: copies differ": ("torch", differing_copy, 1, ("mp_rank_01_000", "differs")),
    "torch: ranks exchanged": (
        "torch",
        lambda r: shutil.copy(r / f"release/mp_rank_00_000/{PT}", r / RANK),
        3,
        ("mp_rank_01_001",),
    ),
    # torch_dist
    "dist: a byte": ("dist", flipped_item, 3, ()),
    "dist: a byte, no manifest": ("dist", lambda r: (unlisted(r), flipped_item(r))[1], 3, ()),
    "dist: common.pt gone": (
        "dist",
        lambda r: (r / "release/common.pt").unlink(),
        3,
        ("common.pt",),
    ),
    "dist: common.pt": (
        "dist",
        lambda r: flipped_record(r / "release/common.pt", "version"),
        3,
        (),
    ),
    "dist: file gone": ("dist", lambda r: item(r)[1].unlink(), 3, (".distcp",)),
    "dist: cut": ("dist", lambda r: cut(item(r)[1], 1000), 3, ("its last item",)),
    "dist: chunk gone": ("dist", edited_metadata(without_a_chunk), 3, (FC2, "3 chunks hold")),
    "dist: item moved": ("dist", edited_metadata(with_a_moved_item), 3, (FC2,)),
    "dist: no marker": (
        "dist",
        lambda r: (r / "release/metadata.json").unlink(),
        3,
        ("metadata.json",),
    ),
    "dist: .metadata cut": ("dist", lambda r: cut(r / "release/.metadata", 30), 8, (".metadata",)),
    "dist: a byte of .metadata": (
        "dist",
        lambda r: put(r / "release/metadata.json", 0, b" "),
        3,
        ("metadata.json",),
    ),
}


@pytest.fixture(scope="session")
def made(
    tmp_path_factory: pytest.TempPathFactory, src: Path, torch_dir: Path, dist_dir: Path
) -> dict[str, Path]:
    """One checkpoint of each format, to be copied and damaged."""
    many = hf(tmp_path_factory.mktemp("many") / "hf", max_shard_size=120_000)
    return {"one": src, "many": many, "torch": torch_dir, "dist": dist_dir}


@pytest.fixture(scope="module")
def sound(
    made: dict[str, Path], torch_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Checkpoints of each format, and an export that mckpt wrote."""
    work = tmp_path_factory.mktemp("sound")
    good("megatron-to-hf", torch_dir, work / "export")
    good("reshard", torch_dir, work / "dist", "--target-format", "torch_dist")
    return {**made, "dist": work / "dist", "export": work / "export"}


@pytest.mark.parametrize("kind", ["one", "many", "torch", "dist", "export"])
def test_a_sound_checkpoint(sound: dict[str, Path], kind: str) -> None:
    said = good("check", sound[kind])
    assert ": sound; " in said.out and len(said.out.splitlines()) == 1, said.out
    found = good("check", sound[kind], "--json").json
    assert found["state"] == "sound" and not found["damaged"]
    assert found["bytes"] > 200_000 and (found["checksums"] > 0) == (kind not in ("one", "many"))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(sound: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, damage, code, words = DAMAGES[name]
    root = tmp_path / "root"
    shutil.copytree(sound[kind], root)
    place = damage(root)
    words += place if isinstance(place, tuple) else ()
    said = mckpt("check", root)
    shown = said.out + said.err
    assert said.code == code, f"wanted exit {code}, got {said.code}:\n{shown}"
    assert all(word in shown for word in words), f"{words} are not all in:\n{shown}"
    assert "Traceback" not in shown and ": sound;" not in shown, shown


def test_thirty_damages_are_planted() -> None:
    assert len(DAMAGES) >= 30


def test_a_model_that_no_family_has(src: Path, tmp_path: Path) -> None:
    """Files and values are checked all the same, and the exit code says that something is left."""
    root = tmp_path / "root"
    shutil.copytree(src, root)
    edit_json(root / "config.json", lambda c: c.update(architectures=["UnknownForCausalLM"]))
    in_tensor(root / "model.safetensors", Q, NAN, 1)
    said = mckpt("check", root)
    assert said.code == 1 and "not checked: " in said.out and "1 NaN" in said.out, said


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float64"])
def test_values_across_the_ends_of_blocks(tmp_path: Path, dtype: str) -> None:
    """Elements that lie across two slabs, with an odd offset, are counted once."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    raw = np.random.default_rng(0).integers(0, 64, SLAB + 64 * kind.itemsize, dtype="u1")
    path, first = tmp_path / "file", 3
    values = np.frombuffer(raw.tobytes()[first:], kind, (len(raw) - first) // kind.itemsize).copy()
    wanted = [0, (SLAB - first) // kind.itemsize - 1, (SLAB - first) // kind.itemsize, -1]
    values[wanted] = np.nan
    path.write_bytes(bytes(first) + values.tobytes())
    span = Span("t", str(path), first, values.nbytes, dtype)
    (found,) = scan({str(path): ""}, [span]).non_finite
    assert (found.nans, found.infinities, found.first) == (len(set(wanted)), 0, first)


def test_sums_of_a_large_file(tmp_path: Path) -> None:
    """Checksums of records and of the whole file, each cut into slabs."""
    import zlib

    raw = np.random.default_rng(1).integers(0, 255, 2 * SLAB + 77, dtype="u1").tobytes()
    path = tmp_path / "file"
    path.write_bytes(raw)
    bounds = [(0, 10), (10, SLAB + 5), (SLAB + 5, SLAB + 5), (SLAB + 100, len(raw))]
    spans = [
        Span(f"r{i}", str(path), a, b - a, crc=zlib.crc32(raw[a:b]))
        for i, (a, b) in enumerate(bounds)
    ]
    found = scan({str(path): f"crc32:{zlib.crc32(raw):08x}"}, spans)
    assert found.broken == [] and found.checked == 5 and found.nbytes == len(raw)
    flip(path, SLAB + 200)
    broken = scan({str(path): f"crc32:{zlib.crc32(raw):08x}"}, spans).broken
    assert len(broken) == 1 and "r3" in broken[0]


def test_a_tensor_whose_elements_are_all_sound(tmp_path: Path) -> None:
    """The largest finite value of each dtype is no infinity."""
    import ml_dtypes

    arrays = {
        name: np.array([ml_dtypes.finfo(kind).max, ml_dtypes.finfo(kind).min], kind)
        for name, kind in {
            "a": np.float32,
            "b": ml_dtypes.bfloat16,
            "c": ml_dtypes.float8_e4m3fn,
            "d": np.float16,
        }.items()
    }
    write_safetensors(tmp_path / "model.safetensors", arrays)
    found, data = shard(tmp_path / "model.safetensors")
    start = (tmp_path / "model.safetensors").stat().st_size - len(data)
    names = {"a": "float32", "b": "bfloat16", "c": "float8_e4m3fn", "d": "float16"}
    spans = [
        Span(
            key,
            str(tmp_path / "model.safetensors"),
            start + found[key]["data_offsets"][0],
            arrays[key].nbytes,
            dtype,
        )
        for key, dtype in names.items()
    ]
    assert scan({}, spans).non_finite == []
