"""Flat buckets: where tensors lie in one piece of memory, and when they are copied into it."""

from __future__ import annotations

from typing import Any

import pytest

from mckpt.errors import UsageError
from mckpt.live import flat


@pytest.mark.parametrize(
    ("align", "starts", "end"),
    [(1, [0, 8, 14], 15), (16, [0, 16, 32], 48), (512, [0, 512, 1024], 1536)],
)
def test_tensors_begin_at_multiples(align: int, starts: list[int], end: int) -> None:
    """The first list has one element of 8 bytes, three elements of 2 bytes, and one byte."""
    assert flat.offsets([(8, 8), (6, 2), (1, 1)], align) == (starts, end)
    assert flat.offsets([(5, 1), (8, 8)], 1) == ([0, 8], 16)
    assert flat.offsets([], align) == ([], 0)


@pytest.mark.parametrize("align", [0, -2, 3, 24])
def test_alignments_are_powers_of_two(align: int) -> None:
    with pytest.raises(UsageError, match=f"align is {align}, and must be a power of two"):
        flat.refuse_align(align)


def pairs(memory: Any) -> list[tuple[str, Any]]:
    import torch

    whole = memory.view(torch.bfloat16)
    return [("a", whole[:6].view(2, 3)), ("b", whole[8:12]), ("c", memory[32:40].view(torch.int64))]


def test_tensors_that_lie_so_are_not_copied() -> None:
    import torch

    memory = torch.arange(64, dtype=torch.uint8)
    given = pairs(memory)
    bucket = flat.flat_bucket(given, 16, torch.device("cpu"))
    assert bucket.buffer.data_ptr() == memory.data_ptr() and len(bucket.buffer) == 48
    assert [tuple(t) for t in bucket.tensors] == [
        ("a", torch.bfloat16, (2, 3), 0),
        ("b", torch.bfloat16, (4,), 16),
        ("c", torch.int64, (1,), 32),
    ]
    for (name, tensor), (found, part) in zip(given, bucket.named(), strict=True):
        assert name == found and torch.equal(tensor.view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize("align", [1, 32])
def test_other_tensors_are_copied(align: int) -> None:
    import torch

    memory = torch.arange(64, dtype=torch.uint8)
    given = pairs(memory)
    given[0] = "a", given[0][1].t()  # which is not contiguous
    bucket = flat.flat_bucket(given, align, torch.device("cpu"))
    assert bucket.buffer.data_ptr() != memory.data_ptr()
    memory.zero_()
    for (name, part), (wanted, tensor) in zip(
        bucket.named(), pairs(torch.arange(64, dtype=torch.uint8)), strict=True
    ):
        tensor = tensor.t() if name == "a" else tensor
        right = tensor.contiguous().view(torch.uint8)
        assert name == wanted and torch.equal(part.view(torch.uint8), right)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_the_caller_are_copied_to_the_device(device: str) -> None:
    torch = pytest.importorskip("torch")
    given = torch.arange(64.0)  # it lies as a bucket at multiples of 256 bytes has it
    bucket = flat.flat_bucket([("k_scale", given)], 256, torch.device(device), copies=True)
    assert (bucket.buffer.device.type, bucket.buffer.numel()) == (device, 256)
    if device == "cpu":
        given.fill_(7)
        assert torch.equal(bucket.named()[0][1], torch.arange(64.0))
