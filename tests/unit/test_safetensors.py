"""Unusual but valid headers of safetensors; tests/refusals.py has the invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt.checkpoint.inspection import inspect
from mckpt.containers import safetensors
from mckpt.containers.entries import Entry
from mckpt.errors import SourceError


def write(path: Path, nbytes: int, **tensors: Any) -> int:
    """Writes a file of tensors, (dtype, shape, begin, end), in this order; returns the byte at
    which their data begin.
    """
    header = {
        name: {"dtype": t[0], "shape": t[1], "data_offsets": t[2:]} for name, t in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    return 8 + len(text)


def index(directory: Path, **weight_map: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_every_valid_header_is_read(tmp_path: Path) -> None:
    """The headers have tensors out of the order of the data, empty tensors, scalars, or
    no tensor.
    """
    first = write(
        tmp_path / "a.safetensors",
        14,
        late=("BF16", [3], 8, 14),
        early=("F32", [1, 2], 0, 8),
        empty=("F32", [0, 5], 8, 8),
    )
    write(tmp_path / "b.safetensors", 0)
    last = write(tmp_path / "c.safetensors", 6, scalar=("F32", [], 0, 4), bytes=("U8", [2], 4, 6))
    found = safetensors.read([str(tmp_path / f"{name}.safetensors") for name in "abc"])
    assert list(found.items()) == [
        ("early", Entry("float32", (1, 2), 0, first)),
        ("empty", Entry("float32", (0, 5), 0, first + 8)),
        ("late", Entry("bfloat16", (3,), 0, first + 8)),
        ("scalar", Entry("float32", (), 2, last)),
        ("bytes", Entry("uint8", (2,), 2, last + 4)),
    ]
    assert found.rows(["bytes", "no such", "early"]).tolist() == [4, -1, 0]
    assert not safetensors.read([])


def test_offsets_of_many_digits_are_read(tmp_path: Path) -> None:
    """The numbers are near the largest possible file size, some of them beyond it."""
    for end, what in (
        (10**17, "truncated"),
        (2**62 - 1, "truncated"),
        (2**62, "sizes below"),
        (10**30, "sizes below"),
        ("01", "not JSON"),
        ("", "not JSON"),
    ):
        text = f'{{"x":{{"dtype":"U8","shape":[{end}],"data_offsets":[0,{end}]}}}}'.encode()
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(mckpt.errors.SourceError, match=what):
            safetensors.read([str(tmp_path / "x.safetensors")])


@pytest.mark.parametrize("nbytes, begin", [(8, 1), (9, 1), (12, 4)])
def test_a_hole_at_the_start_of_a_later_file_is_refused(
    tmp_path: Path, nbytes: int, begin: int
) -> None:
    """The end of the file before must not count as the end of a tensor before the hole."""
    write(tmp_path / "a.safetensors", begin, one=("U8", [begin], 0, begin))
    write(tmp_path / "b.safetensors", nbytes, two=("U8", [8], begin, begin + 8))
    with pytest.raises(
        mckpt.errors.SourceError, match=rf"b.safetensors: two starts at byte {begin} of the data"
    ):
        safetensors.read([str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])


def raw(path: Path, text: str, nbytes: int = 0) -> list[str]:
    """Writes a file with this header, unchanged."""
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + bytes(nbytes))
    return [str(path)]


TENSOR = '"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def test_metadata_with_braces_in_a_text_are_skipped(tmp_path: Path) -> None:
    paths = raw(tmp_path / "a.safetensors", '{"__metadata__":{"note":"a}, b"},' + TENSOR + "}", 1)
    assert list(safetensors.read(paths)) == ["t"]


@pytest.mark.parametrize(
    "header, what",
    [
        ('{"__metadata__":{},"__metadata__":{},' + TENSOR + "}", "names '__metadata__' twice"),
        ("{" + TENSOR + "," + TENSOR + "}", "names 't' twice"),
        (
            '{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,9],"data_offsets":[0,1]}}',
            "names 'data_offsets' twice",
        ),
        (
            '{"t":{"dtype":"U8","shape":['
            + ",".join([str(2**62)] * 300)
            + '],"data_offsets":[0,1]}}',
            r"takes 2\*\*62 or more bytes, and data_offsets give 1",
        ),
    ],
    ids=["metadata", "name", "field", "shape"],
)
def test_headers_that_no_library_writes_are_refused(tmp_path: Path, header: str, what: str) -> None:
    with pytest.raises(mckpt.errors.SourceError, match=what):
        safetensors.read(raw(tmp_path / "a.safetensors", header, 1))


def test_a_key_in_two_files_is_one_tensor(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", 8, x=("F32", [2], 0, 8))
    write(tmp_path / "c.safetensors", 4, y=("F32", [1], 0, 4))
    index(tmp_path, x="a.safetensors", y="c.safetensors", z="b.safetensors")
    found = inspect(mckpt.open(tmp_path))
    assert (found["num_tensors"], found["bytes"], list(found["tensors"])) == (2, 12, ["x", "y"])
    assert found["problems"] == [
        "x is in a.safetensors and in b.safetensors",
        "z: model.safetensors.index.json places it in b.safetensors, which does not contain it",
    ]


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.safetensors", 4, **{name: ("F32", [], 0, 4)})
    with pytest.raises(SourceError, match="the header is not JSON") as caught:
        safetensors.read([str(tmp_path / "a.safetensors")])
    str(caught.value).encode()
