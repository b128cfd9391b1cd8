"""mckpt and torch read and write the same files of torch.save."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import struct
import zipfile
import zlib
from collections import OrderedDict

import pytest

from mckpt.containers import safe_pickle as sp
from mckpt.containers import torch_file, torch_stream
from mckpt.errors import MckptError, SourceError
from tests.helpers.lazy import torch


def sample():
    g = torch.Generator().manual_seed(1)
    base = torch.randn(4, 6, generator=g)
    return {
        "args": argparse.Namespace(a=1, dtype=torch.bfloat16, name="modèle"),
        "model": OrderedDict(
            w=base,
            half=base.half(),
            b=base.bfloat16(),
            f8=base.to(torch.float8_e4m3fn),
            empty=torch.zeros(0),
            one=torch.tensor(3),
        ),
        "view": base.t()[1:, 2:],
        "local._extra_state": None,
    }


def rebuilt(path, stem):
    """Lays out the file at `path` again from the content that was read, with its data copied."""
    data = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    value, ranges = torch_file.read(fd, str(path))
    os.close(fd)
    laid = torch_file.lay_out(value, stem)
    assert laid.data == ranges
    out = bytearray(laid.size)
    for at, n in laid.data.values():
        out[at : at + n] = data[at : at + n]
    for at, piece in laid.fixed(lambda at, n: zlib.crc32(out[at : at + n])):
        out[at : at + len(piece)] = piece
    return data, bytes(out)


def read_at(path):
    with open(path, "rb") as f:
        return torch_file.read(f.fileno(), str(path))


def without_id(data):
    """Returns the file without the serialization id and its checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        info = z.infolist()[-1]
        assert info.filename.endswith("serialization_id")
        at = data.index(b"PK\7\10", info.header_offset)
        central = data.rindex(b"PK\1\2")
    blank = bytearray(data)
    blank[at - 40 : at + 8] = bytes(48)
    blank[central + 16 : central + 20] = bytes(4)
    return bytes(blank)


@pytest.fixture
def saved(tmp_path):
    torch.save(sample(), tmp_path / "s.pt")
    return tmp_path / "s.pt"


def test_the_file_equals_that_of_torch(saved):
    golden, ours = rebuilt(saved, "s")
    assert without_id(golden) == without_id(ours)
    assert zipfile.ZipFile(io.BytesIO(ours)).testzip() is None


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_the_file(saved, mmap):
    saved.write_bytes(rebuilt(saved, "s")[1])
    with torch.serialization.safe_globals([argparse.Namespace]):
        got = torch.load(saved, weights_only=True, mmap=mmap)
    want = sample()
    assert vars(got["args"]) == vars(want["args"]) and torch.equal(got["view"], want["view"])
    assert all(
        torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        for a, b in zip(got["model"].values(), want["model"].values(), strict=True)
    )
    assert (
        got["view"].untyped_storage().data_ptr() == got["model"]["w"].untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("numel", [0, 1, 1 << 20, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_the_layout_is_that_of_torch_at_any_size(tmp_path, numel):
    """The layout is that of torch's skip_data. Past 4 GiB both files are sparse."""
    path = tmp_path / "big.pt"
    value = {
        "a": torch.empty(numel, dtype=torch.uint8, device="meta"),
        "b": torch.empty(3, device="meta"),
    }
    with torch.serialization.skip_data():
        torch.save({k: torch.empty(v.shape, dtype=v.dtype) for k, v in value.items()}, path)
    laid = torch_file.lay_out(
        {"a": sp.tensor("uint8", (numel,), "0"), "b": sp.tensor("float32", (3,), "1")}, "big"
    )
    assert path.stat().st_size == laid.size
    fd = os.open(path, os.O_RDONLY)
    assert torch_file.read(fd, "big")[1] == laid.data
    for at, piece in laid.fixed():
        golden = os.pread(fd, len(piece), at)
        # the serialization id and its two checksums
        assert sum(x != y for x, y in zip(golden, piece, strict=True)) <= 48
    os.close(fd)


def test_cut_and_padded_files_are_refused(saved, tmp_path):
    data = saved.read_bytes()
    path = tmp_path / "cut.pt"
    with zipfile.ZipFile(saved) as z:
        places = {i.header_offset + d for i in z.infolist() for d in (0, 20, 64)} | {
            len(data) - d for d in (1, 21, 22, 23, 42, 98, 99)
        }
    for body in [data[:at] for at in places] + [
        data + b"\0",
        data + bytes(200),
        b"",
        b"\0" * 100,
        b"junk" + data,
    ]:
        path.write_bytes(body)
        with open(path, "rb") as f, pytest.raises(SourceError, match=r"cut\.pt: "):
            torch_file.read(f.fileno(), "cut.pt")


def refused(tmp_path, data, match):
    path = tmp_path / "bad.pt"
    path.write_bytes(data)
    with open(path, "rb") as f, pytest.raises(SourceError, match=match):
        torch_file.read(f.fileno(), "bad.pt")


def test_inconsistent_zips_are_refused(saved, tmp_path):
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as z:
        infos = {i.filename.split("/", 1)[1]: i for i in z.infolist()}
    central = {}
    at = data.index(b"PK\1\2")
    for name in infos:
        central[name] = at
        n, extra = struct.unpack_from("<HH", data, at + 28)
        at += 46 + n + extra

    def patched(at, fmt, *values):
        out = bytearray(data)
        struct.pack_into(fmt, out, at, *values)
        return bytes(out)

    refused(tmp_path, patched(central["data/0"] + 20, "<II", 1 << 30, 1 << 30), "its size is wrong")
    refused(tmp_path, patched(central["data/0"] + 20, "<II", 200, 200), "begins")
    refused(
        tmp_path, patched(central["data/0"] + 20, "<II", 4, 4), "names bytes that it does not hold"
    )
    refused(tmp_path, patched(central["data/0"] + 10, "<H", 8), "compressed")
    refused(tmp_path, patched(central["data/0"] + 42, "<I", 1 << 31), "behind")
    refused(tmp_path, patched(central["data/0"] + 42, "<I", 3), "no record header")
    refused(tmp_path, patched(central["data/0"] + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF), "zip64")
    refused(tmp_path, data.replace(b"PK\6\6", b"PK\6\0"), "has no zip64 end record at")
    refused(tmp_path, data.replace(b"data/1", b"data/0"), "twice")
    refused(tmp_path, data.replace(b"little", b"bigbig"), "endian")
    refused(tmp_path, data.replace(b"data.pkl", b"date.pkl"), "without data.pkl")


def test_files_of_torch_before_1_6_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_stream, "_FIRST", 64)  # the pickles are longer
    path = tmp_path / "old.pt"
    value = sample()
    del value["model"]["f8"]  # a dtype of today
    torch.save(value, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    found, ranges = read_at(path)
    assert sp.fields(found["args"], "x")["name"] == "modèle"
    for name, wanted in [*value["model"].items(), ("view", value["view"])]:
        view = sp.as_tensor(found["view"] if name == "view" else found["model"][name])
        at, size = ranges[view.storage]
        whole = torch.frombuffer(bytearray(data[at : at + size] or b"\0" * 8), dtype=wanted.dtype)
        ours = whole.as_strided(view.shape, view.strides, view.offset)
        assert torch.equal(ours, wanted), name


def test_damaged_files_of_torch_before_1_6_are_refused(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"a": torch.zeros(3), "b": 1}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    refused(tmp_path, data[:-1], "damaged or cut short")
    refused(tmp_path, data[:-20], "damaged or cut short")
    refused(tmp_path, data[:-20] + b"\7" + data[-19:], "should have 3 elements")
    little = data.index(b"little_endian") + len(b"little_endian")
    at = data.index(b"\x88", little)
    refused(tmp_path, data[:at] + b"\x89" + data[at + 1 :], "big-endian")
    rng = random.Random(4)
    for _ in range(500):
        body = bytearray(data)
        body[rng.randrange(len(body))] = rng.randrange(256)
        path.write_bytes(body)
        with contextlib.suppress(MckptError):
            read_at(path)


def test_damaged_files_raise_only_mckpt_errors(saved, tmp_path):
    data, rng = saved.read_bytes(), random.Random(3)
    path = tmp_path / "flip.pt"
    for _ in range(1500):
        body = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        path.write_bytes(body)
        with open(path, "rb") as f:
            try:
                value, _ = torch_file.read(f.fileno(), "x")
                for v in (value if isinstance(value, dict) else {}).values():
                    sp.as_tensor(v)
            except MckptError:
                pass


def test_many_records_are_read(tmp_path):
    value = {f"layers.{i}": sp.tensor("bfloat16", (2, 3), str(i)) for i in range(20_000)}
    laid = torch_file.lay_out(value, "m")
    with open(tmp_path / "m.pt", "wb+") as f:
        for at, piece in laid.fixed():
            os.pwrite(f.fileno(), piece, at)
        os.truncate(f.fileno(), laid.size)
        got, ranges = torch_file.read(f.fileno(), "m")
    assert ranges == laid.data and len(got) == 20_000
    assert len(torch.load(tmp_path / "m.pt", weights_only=True, mmap=True)) == 20_000


@pytest.mark.parametrize(("room", "wanted"), [(0, ["0", "1", "2", "1"]), (600, ["0", "1", "2"])])
def test_equal_pickles_are_parsed_once(room, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file, "_MAX_KNOWN_BYTES", room)
    parsed = []
    original = torch_file.loads
    monkeypatch.setattr(
        torch_file, "loads", lambda *a, **k: parsed.append(a[1]) or original(*a, **k)
    )
    values = [{"args": stage, "w": sp.tensor("bfloat16", (2, 3), "0")} for stage in range(3)]
    reader = torch_file.TorchFileReader()
    for stage in (0, 0, 1, 1, 1, 0, 2, 2, 1):  # without room, the pickle of 2 replaced that of 1
        laid = torch_file.lay_out(values[stage], "m")
        path = tmp_path / "m.pt"
        path.write_bytes(b"")
        with open(path, "rb+") as f:
            for at, piece in laid.fixed():
                os.pwrite(f.fileno(), piece, at)
            value, ranges = reader.read(f.fileno(), str(stage))
            assert (
                value["args"] == stage
                and ranges == laid.data == torch_file.read(f.fileno(), "read")[1]
            )
    assert [p for p in parsed if p != "read"] == wanted
    # the storages that a pickle names are looked up in each file
    body = torch_file.TorchFile("m", sp.dumps(values[0]), {})
    path.write_bytes(b"".join(piece for _, piece in body.fixed()))
    with open(path, "rb") as f:
        for _ in range(2):
            with pytest.raises(SourceError, match="there is no record of it"):
                reader.read(f.fileno(), "m")


def test_items_with_a_known_head_are_read(tmp_path, monkeypatch):
    torch_file._HEADS.clear()
    path = tmp_path / "__0_0.distcp"
    items = []
    with open(path, "wb") as f:
        for t in (
            torch.ones(2, 3),
            torch.zeros(2, 3),
            torch.ones(3, 2).t(),
            torch.ones(2, 3).bfloat16(),
            torch.ones(5)[1:3],
        ):
            body = io.BytesIO()
            torch.save(t, body)
            items.append((f.tell(), len(body.getvalue()), t))
            f.write(body.getvalue())
    reads = []
    original = torch_file.read
    monkeypatch.setattr(torch_file, "read", lambda *a: reads.append(a) or original(*a))
    with open(path, "rb") as f:
        for at, length, t in items:
            dtype = str(t.dtype)[6:]
            find = (f.fileno(), at, length, t.nbytes, "x", dtype, tuple(t.shape))
            if not t.is_contiguous():
                with pytest.raises(SourceError, match="strides"):
                    torch_file.item_data_offset(*find)
                continue
            where = torch_file.item_data_offset(*find)
            assert (
                os.pread(f.fileno(), t.nbytes, where)
                == t.contiguous().view(torch.uint8).numpy().tobytes()
            )
        assert len(reads) == 4  # the second item has the head of the first
        at, length, _ = items[0]
        for dtype, shape in (("bfloat16", (2, 3)), ("float32", (3, 2))):
            with pytest.raises(SourceError, match="should be"):
                torch_file.item_data_offset(f.fileno(), at, length, 24, "x", dtype, shape)
        with pytest.raises(SourceError):
            torch_file.item_data_offset(
                f.fileno(), items[-1][0] + 1, length, 24, "x", "float32", (2, 3)
            )
