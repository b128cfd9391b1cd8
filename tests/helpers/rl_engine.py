"""A stand-in for the receiving sides of frameworks of reinforcement learning, in a process of its
own, which opens memory of the trainers and cuts it as they do.

    python -m tests.helpers.rl_engine FOLDER

It reads pickled messages from stdin, and answers each on stdout with None or an error. An `end` of
an update writes the tensors to FOLDER/NAME/model.safetensors.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NEMO_ALIGN = 512


@dataclass
class FlattenedTensorMetadata:
    """Stands for the class of SGLang. The indices count bytes, because a bucket can have several
    dtypes.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def handle_of(value: Any) -> bytes:
    """Returns what opens the tensors of a value in another process, without their bytes."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    file = io.BytesIO()
    ForkingPickler(file).dump(value)
    return file.getvalue()


def slime(message: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """SGLang's update_weights_from_tensor: one handle of each rank of the engine."""
    assert message["load_format"] == "flattened_bucket" and message["weight_version"].isdigit()
    every = [pickle.loads(one) for one in message["serialized_named_tensors"]]
    out: list[list[tuple[str, torch.Tensor]]] = []
    for content in every:
        assert content.keys() == {"flattened_tensor", "metadata"}
        flat = content["flattened_tensor"]
        assert flat.dim() == 1 and flat.dtype is torch.uint8
        cut = []
        for meta in content["metadata"]:
            assert meta.end_idx - meta.start_idx == meta.numel
            part = flat[meta.start_idx : meta.end_idx]
            cut.append((meta.name, part.view(meta.dtype).reshape(meta.shape)))
        out.append(cut)
    for cut in out[1:]:  # what all ranks of the trainer send is the same
        for (name, tensor), (other, wanted) in zip(cut, out[0], strict=True):
            assert name == other and torch.equal(tensor.cpu(), wanted.cpu()), name
    return out[0]


def verl(message: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """vLLM workers of verl: one buffer for all buckets, and offsets in bytes."""
    buffer, out = pickle.loads(message["buffer"]), []
    for name, meta in message["bucket_meta"].items():
        assert name == meta["name"] and meta["handle"] is None
        size = meta["dtype"].itemsize * meta["shape"].numel()
        part = buffer[meta["offset"] : meta["offset"] + size]
        out.append((name, part.view(meta["dtype"]).view(meta["shape"])))
    return out


def nemo_rl(message: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """vLLM workers of NeMo-RL: the names of a buffer, whose forms were told before."""
    buffer, forms, offset, out = pickle.loads(message["handle"]), message["forms"], 0, []
    for name in message["names"]:
        shape, dtype = forms[name]
        size = dtype.itemsize * shape.numel()
        out.append((name, buffer[offset : offset + size].view(dtype).view(shape)))
        offset += -(-size // NEMO_ALIGN) * NEMO_ALIGN
    assert offset == message["used_bytes"], (offset, message["used_bytes"])
    return out


def skyrl(message: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """vLLM workers of SkyRL: elements of one dtype without gaps."""
    packed, offset, out = pickle.loads(message["handle"]), 0, []
    for name, shape, size in zip(
        message["names"], message["shapes"], message["sizes"], strict=True
    ):
        out.append((name, packed[offset : offset + size].view(*shape)))
        offset += size
    assert offset == packed.numel()
    return out


CUTS = {function.__name__: function for function in (slime, verl, nemo_rl, skyrl)}


def main() -> None:
    folder, held = Path(sys.argv[1]), dict[str, torch.Tensor]()
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error = None
        try:
            if "end" in message:
                (folder / message["end"]).mkdir(parents=True)
                save_file(held, folder / message["end"] / "model.safetensors")
                held = {}
            else:
                for name, tensor in CUTS[message.pop("kind")](message):
                    assert name not in held, f"{name} came twice"
                    held[name] = tensor.to("cpu", copy=True)
                del tensor
        except Exception as caught:
            error = repr(caught)
        pickle.dump(error, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
