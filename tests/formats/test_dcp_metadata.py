"""mckpt and torch read and write the same .metadata of torch_dist."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import re
import struct
import time

import numpy as np
import pytest

from mckpt.containers import dcp_metadata, torch_file
from mckpt.containers import safe_pickle as sp
from mckpt.containers.safe_pickle import reading
from mckpt.errors import MckptError, SourceError
from tests.helpers.commands import emit
from tests.helpers.lazy import torch

TENSORS = {
    "decoder.fc2.weight": (
        "bfloat16",
        (4, 6, 8),
        [((i, 0, c * 4), (1, 6, 4)) for i in range(4) for c in range(2)],
    ),
    "emb": ("float32", (10, 4), [((0, 0), (7, 4)), ((7, 0), (3, 4))]),
    "f8": ("float8_e4m3fn", (3, 4), [((0, 0), (3, 4))]),
    "decoder._extra_state/shard_0_1": None,
}


def write_dist(path, tensors=TENSORS):
    """Writes a torch_dist directory whose tensors are all 0, 1, 2 ...; returns its items."""
    items, end = [], 0
    with open(path / "__0_0.distcp", "wb") as f:
        for key, tensor in tensors.items():
            for offsets, sizes in tensor[2] if tensor else [(None, None)]:
                laid = torch_file.lay_out(sp.tensor(tensor[0], sizes, "0") if tensor else [None])
                body = bytearray(laid.size)
                for at, piece in laid.fixed():
                    body[at : at + len(piece)] = piece
                if tensor:
                    whole = torch.arange(math.prod(tensor[1])).reshape(tensor[1])
                    cut = (
                        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
                        .to(getattr(torch, tensor[0]))
                        .contiguous()
                    )
                    at, n = laid.data["0"]
                    body[at : at + n] = cut.view(torch.uint8).numpy().tobytes()
                f.write(body)
                items.append((key, offsets, "__0_0.distcp", end, laid.size))
                end += laid.size
    (path / ".metadata").write_bytes(emit(tensors, items))
    return items


def test_torch_reads_the_metadata_and_items(tmp_path):
    from torch.distributed import checkpoint as dcp

    items = write_dist(tmp_path)
    state = {k: torch.zeros(t[1], dtype=getattr(torch, t[0])) for k, t in TENSORS.items() if t}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for key, got in state.items():
        assert torch.equal(
            got.float(), torch.arange(got.numel()).reshape(got.shape).to(got.dtype).float()
        ), key
    md = dcp_metadata.read_metadata(tmp_path / ".metadata")
    assert md.tensors == {k: t for k, t in TENSORS.items() if t} and md.objects == [
        "decoder._extra_state/shard_0_1"
    ]
    assert [(*k, *v) for k, v in md.items.items()] == items


def test_metadata_of_torch_and_megatron_are_read(tmp_path):
    from torch.distributed import checkpoint as dcp

    dcp.save(
        {"a": {"w": torch.ones(4, 6), "n": 3}}, checkpoint_id=str(tmp_path / "d"), no_dist=True
    )
    md = dcp_metadata.read_metadata(tmp_path / "d" / ".metadata")
    assert md.tensors == {"a.w": ("float32", (4, 6), [((0, 0), (4, 6))])}
    assert md.objects == ["a.n"]
    file, at, length = md.items["a.w", (0, 0)]
    with open(tmp_path / "d" / file, "rb") as f:
        where = torch_file.item_data_offset(f.fileno(), at, length, 96, "x", "float32", (4, 6))
        assert os.pread(f.fileno(), 96, where) == struct.pack("<f", 1) * 24
    # Megatron-Core adds plans and has class names of its own
    value = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    value.all_local_plans = [value.state_dict_metadata, value.storage_data]
    value.mcore_data = {}
    plain = dcp_metadata.read_metadata(pickle.dumps(value, 4))
    assert plain.tensors == md.tensors and plain.items == md.items
    assert dcp_metadata.read_metadata(pickle.dumps(value, 2)).items == md.items
    renamed = pickle.dumps(value, 2).replace(
        b"torch.distributed.checkpoint.metadata\nMetadata\n",
        b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n",
    )
    assert dcp_metadata.read_metadata(renamed).items == md.items


def test_an_error_lists_everything_that_is_wrong():
    def error(tensors, items):
        with pytest.raises(SourceError) as e:
            dcp_metadata.read_metadata(emit(tensors, items), "m")
        return str(e.value)

    one = ("a", (0,), "f", 0, 1)
    assert "reaches out of" in error({"a": ("float32", (4,), [((0,), (5,))])}, [one])
    assert "hold 3 elements, the tensor [4] has 4" in error(
        {"a": ("float32", (4,), [((0,), (3,))])}, [one]
    )
    assert "overlap" in error(
        {"a": ("float32", (4,), [((0,), (2,)), ((1,), (2,))])}, [one, ("a", (1,), "f", 0, 1)]
    )
    four = [((0, 0), (2, 2)), ((0, 1), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]
    assert "overlap" in error(
        {"a": ("float32", (4, 4), four)}, [("a", o, "f", 0, 1) for o, _ in four]
    )
    assert "rank" in error({"a": ("float32", (4,), [((0, 0), (4, 1))])}, [one])
    assert "complex64" in error({"a": ("complex64", (4,), [((0,), (4,))])}, [one])
    assert "1 of 1 chunks have no item" in error({"a": ("float32", (4,), [((0,), (4,))])}, [])
    both = error({"a": ("float32", (4,), [((0,), (3,))]), "b": None}, [("a", (0,), "../f", 0, 1)])
    assert "not a file name" in both and "hold 3" in both and "object without an item" in both
    assert "offset -1" in error({"b": None}, [("b", None, "f", -1, 1)])
    for name in ("/etc/passwd", "..", "a/b", "", "a\0b"):
        assert "not a file name" in error({"b": None}, [("b", None, name, 0, 1)])


def test_values_of_other_types_are_named():
    good = emit({"a": ("float32", (4,), [((0,), (4,))])}, [("a", (0,), "f", 0, 1)])

    def error(change):
        record = sp.loads(good, "m", True)
        change(record.state["state_dict_metadata"])
        with pytest.raises(SourceError) as e:
            dcp_metadata.read_metadata(sp.dumps(record), "m")
        return str(e.value)

    def inner(found, **fields):
        found["a"].state["chunks"][0].state.update(fields)

    assert "not whole numbers" in error(lambda found: inner(found, offsets=([0],)))
    kind = sp.glob("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")
    assert "neither a tensor nor an object" in error(lambda found: found.update(a=kind))


def test_uneven_chunks_that_cover_a_tensor_are_read():
    chunks = [
        ((0, 0), (2, 3)),
        ((0, 3), (1, 1)),
        ((1, 3), (1, 1)),
        ((2, 0), (2, 1)),
        ((2, 1), (2, 3)),
    ]
    tensors = {"a": ("float32", (4, 4), chunks)}
    items = [("a", o, "f", 0, 1) for o, _ in chunks]
    assert dcp_metadata.read_metadata(emit(tensors, items)).tensors == tensors


def test_many_chunks_are_read_fast():
    """The scan reads chunks and items as whole objects, whoever wrote them. 20,000 of them take 0.3
    s, and 0.9 s opcode by opcode.
    """
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunks = [((i, j, 0), (1, 1, 300)) for i in range(100) for j in range(200)]
    files = [f"__{n}_0.distcp" for n in range(7)]
    items = [("a", o, files[o[0] % 7], n * 1000, 1000) for n, (o, _) in enumerate(chunks)]
    at = np.arange(len(chunks))
    rows = dcp_metadata.Items(
        ["a"], None, np.array([o for o, _ in chunks]), at // 200 % 7, at * 1000, 1000
    )
    chunk = dcp_metadata.Chunks("a", rows.offsets, (1, 1, 300))
    pieces = dcp_metadata.emit_metadata(
        {"a": ("float32", (100, 200, 300))}, [], [chunk], [rows], files
    )
    ours = b"".join(piece.data() for piece in pieces)
    size, kinds = torch.Size, of_torch
    described = kinds.TensorStorageMetadata(
        kinds.TensorProperties(torch.float32),
        size((100, 200, 300)),
        [kinds.ChunkStorageMetadata(size(o), size(s)) for o, s in chunks],
    )
    stored = {
        kinds.MetadataIndex(key, size(o)): _StorageInfo(file, at, n)
        for key, o, file, at, n in items
    }
    theirs = pickle.dumps(kinds.Metadata({"a": described}, {"a": ("a",)}, stored))
    for data in (ours, theirs):
        assert len(re.findall(reading._OBJECT, data)) > 59_000  # 60,000 objects are in the file
        began = time.process_time()
        found = dcp_metadata.read_metadata(data)
        assert time.process_time() - began < 2
        assert (
            found.tensors == {"a": ("float32", (100, 200, 300), chunks)}
            and [(*k, *v) for k, v in found.items.items()] == items
        )


def test_torch_reads_numbers_of_every_width():
    """Every row of opcodes has the width of its largest number."""
    for largest in (1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 2**62):
        at, names = np.array([0, largest, 7]), ["a", "é"]
        tensors = {"w": ("float32", (3, 5)), "s": ("float32", ())}
        chunks = [
            dcp_metadata.Chunks("w", np.array([[0, 0], [1, 0], [2, 0]]), (1, 5)),
            dcp_metadata.Chunks("s", np.empty((1, 0), "i8"), ()),
        ]
        items = [
            dcp_metadata.Items(["w"], None, chunks[0].offsets, np.array([0, 1, 0]), at, largest),
            dcp_metadata.Items(["s"], np.array([0]), chunks[1].offsets, np.array([1]), at[1:2], 4),
            dcp_metadata.Items(["o/1", "o/2"], None, None, np.array([1, 0]), at[:2], 9),
            dcp_metadata.Items([], None, None, at[:0], at[:0], 9),
        ]
        pieces = dcp_metadata.emit_metadata(tensors, ["o/1", "o/2"], chunks, items, names)
        data = b"".join(piece.data() for piece in pieces)
        assert [piece.nbytes for piece in pieces] == [len(piece.data()) for piece in pieces]
        wanted = {
            ("w", (0, 0)): ("a", 0, largest),
            ("w", (1, 0)): ("é", largest, largest),
            ("w", (2, 0)): ("a", 7, largest),
            ("s", ()): ("é", largest, 4),
            ("o/1", None): ("é", 0, 9),
            ("o/2", None): ("a", largest, 9),
        }
        found, theirs = dcp_metadata.read_metadata(data), pickle.loads(data)
        assert found.items == wanted and found.objects == ["o/1", "o/2"]
        assert found.tensors == {
            "w": ("float32", (3, 5), [((i, 0), (1, 5)) for i in range(3)]),
            "s": ("float32", (), [((), ())]),
        }
        stored = {
            (k.fqn, k.offset): (v.relative_path, v.offset, v.length)
            for k, v in theirs.storage_data.items()
        }
        assert stored == wanted
        described = theirs.state_dict_metadata["w"]
        assert (described.size, [c.offsets[0] for c in described.chunks]) == ((3, 5), [0, 1, 2])


def test_damaged_metadata_raises_only_mckpt_errors(tmp_path):
    from torch.distributed import checkpoint as dcp

    write_dist(tmp_path)
    dcp.save(
        {"a": {"w": torch.ones(4, 6), "n": 3}}, checkpoint_id=str(tmp_path / "d"), no_dist=True
    )
    rng = random.Random(4)
    for path in (tmp_path / ".metadata", tmp_path / "d" / ".metadata"):
        data = path.read_bytes()
        for n in range(1500):
            body = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            with contextlib.suppress(MckptError):
                dcp_metadata.read_metadata(
                    bytes(body[: len(body) if n % 3 else rng.randrange(len(body))])
                )
