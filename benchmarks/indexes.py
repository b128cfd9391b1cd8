"""Files for `plans` of benchmarks/run: two indexes of torch_dist, and the floor of an inspection.

python -m benchmarks.indexes torch DIRECTORY      as torch writes the index of 256 ranks
python -m benchmarks.indexes mckpt DIRECTORY      as mckpt writes it, with an object per chunk
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

# Decodes the headers and the index of a model, and does no more. Ends as mckpt does, because
# freeing the objects would take a tenth of the time.
HEADERS = """
import gc, os, sys, msgspec; from pathlib import Path
gc.set_threshold(10_000_000); os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as mckpt does
headers, folder = [], Path(sys.argv[1])
for path in folder.glob("*.safetensors"):
    with path.open("rb") as f:
        headers.append(msgspec.json.decode(f.read(int.from_bytes(f.read(8), "little"))))
index = (folder / "model.safetensors.index.json").read_bytes()
index = msgspec.json.decode(index)["weight_map"]
"""
FOUND = """
import click, numpy, yaml
every = {key: tensor for header in headers for key, tensor in header.items()}
found = list(map(every.get, index))
"""
END = "os._exit(0)\n"

LAYERS, EXPERTS, TP = 58, 256, 8  # of DeepSeek-V3
# (tensor, its shape, parts in which a rank stores its share, the axis that tp cuts); fc1 is gate
# and up
EXPERT_TENSORS = (("linear_fc1", (4096, 7168), 2, 2), ("linear_fc2", (7168, 2048), 1, 3))


def by_torch(directory: Path) -> None:
    """Writes the index of DeepSeek-V3's experts as 256 ranks (tp8 ep32) of two files each do, whose
    lists of written chunks torch gathers. The data files are holes.
    """
    import torch
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    size, tensors = torch.Size, {}
    written: dict[tuple[int, int], list[Any]] = {}
    for name, (rows, columns), parts, axis in EXPERT_TENSORS:
        key = f"decoder.layers.mlp.experts.experts.{name}.weight"
        each, chunks = [1, 1, rows, columns], list[Any]()
        each[axis] //= parts * TP
        nbytes = 2 * size(each).numel() + 1200
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for part in range(parts * TP):
                    at = [layer, expert, 0, 0]
                    at[axis] = part * each[axis]
                    item = key, at, len(chunks), nbytes
                    written.setdefault((expert // 8, part % TP), []).append(item)
                    chunks.append(m.ChunkStorageMetadata(size(at), size(each)))
        shape = size([LAYERS, EXPERTS, rows, columns])
        tensors[key] = m.TensorStorageMetadata(m.TensorProperties(torch.bfloat16), shape, chunks)
    items = {}
    out = directory / "unit"
    out.mkdir(parents=True)
    for rank, (_, mine) in enumerate(sorted(written.items())):
        # Each rank sends keys of its own, which pickle stores as separate strings.
        keys = {key: key.encode().decode() for key in tensors}
        for n in range(2):
            name, end = f"__{rank}_{n}.distcp", 0
            for key, at, index, length in mine[n::2]:
                items[m.MetadataIndex(keys[key], size(at), index)] = _StorageInfo(name, end, length)
                end += length
            with (out / name).open("wb") as f:
                f.truncate(end)
    (out / ".metadata").write_bytes(pickle.dumps(m.Metadata(tensors, None, items)))
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (out / "metadata.json").write_text(json.dumps(said))


def by_mckpt(directory: Path) -> None:
    """Writes a torch_dist checkpoint of 58 layers of 3,072 experts, two tensors each, whose data
    are holes. Beside each tensor is an object, the _extra_state of Megatron-Core's layers.
    """
    import mckpt
    from benchmarks import models

    config = models.mixture(LAYERS, 3072, hidden_size=64, moe_intermediate_size=64, vocab_size=1024)
    hf = models.write(config, directory / "hf", sparse=True)
    for output in mckpt.plan(hf, directory / "megatron").outputs:
        path = directory / "unit" / output.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            f.truncate(output.size)
            for at, data in output.fixed(lambda at, n: 0):
                f.seek(at)
                f.write(data)


if __name__ == "__main__":
    {"torch": by_torch, "mckpt": by_mckpt}[sys.argv[1]](Path(sys.argv[2]))
