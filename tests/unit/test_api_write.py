"""The Python API: checkpoints written from a stream of Hugging Face tensors."""

from __future__ import annotations

import atexit
import json
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import errors
from mckpt.conversion import streaming
from mckpt.execute.piecewise import Batches
from mckpt.options import SourceOptions
from mckpt.storage import sparse_copy
from tests.helpers import made_models, tiny
from tests.helpers.commands import ROOT, hf, tree
from tests.unit.test_api_tensors import same

Named = tuple[str, Any]


pytestmark = pytest.mark.usefixtures("small_buffers")


def shuffled(arrays: dict[str, Any]) -> list[Named]:
    return random.Random(1).sample(list(arrays.items()), len(arrays))


def alike(a: Path, b: Path) -> None:
    """Asserts that two directories have the same files, but for the source in their manifests."""
    found, wanted = tree(a), tree(b)
    assert found.keys() == wanted.keys()
    for name, data in wanted.items():
        if not name.endswith("mckpt.json"):
            assert found[name] == data, name
            continue
        mine, other = json.loads(found[name] or b""), json.loads(data or b"")
        apart = {key for key in other if mine[key] != other[key]}
        assert mine.keys() == other.keys() and apart <= {"source", "plan", "read"}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3-moe", {"format": "torch_dist", "tp": 2, "ep": 2, "checksum": "sha256"}),
        ("llama-tied", {"format": "torch_dist", "pp": 2}),
        ("deepseek-v3", {"format": "torch", "tp": 2, "pp": 2, "dtype": "fp32", "checksum": "none"}),
    ],
)
def test_write_makes_the_files_of_the_conversion(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    src = hf(tmp_path / "src", case)
    mckpt.convert(src, tmp_path / "a", **options)
    arrays = tiny.tensors(tiny.config(case))
    mckpt.write(tmp_path / "b", src, shuffled(arrays), max_memory="200KiB", **options)
    alike(tmp_path / "b", tmp_path / "a")


def made(case: str, directory: Path) -> dict[str, np.ndarray]:
    """Writes a Hugging Face directory of random tensors, with the names and shapes that its family
    gives them; returns the tensors.
    """
    config = {**made_models.config(case), "torch_dtype": "float32"}
    with streaming.opened(config, [("", np.zeros(1, "f4"))], SourceOptions(), {}) as (_, stream):
        shapes = {name: stream.entries[name].shape for name in stream.entries}
    arrays = {name: tiny.values(name, shape) for name, shape in shapes.items()}
    directory.mkdir()
    tiny.write_safetensors(directory / "model.safetensors", arrays)
    tiny.write_json(directory / "config.json", config)
    return arrays


@pytest.mark.parametrize("case", ["gpt_oss", "gpt2", "gemma_silu", "qwen3_5_moe"])
def test_other_packings_are_written_and_read(case: str, tmp_path: Path) -> None:
    """Experts in one tensor, transposed matrices, norms with an offset, several forms of names."""
    arrays = made(case, tmp_path / "src")
    mckpt.convert(tmp_path / "src", tmp_path / "a", format="torch_dist")
    mckpt.write(tmp_path / "b", tmp_path / "src", shuffled(arrays), format="torch_dist")
    alike(tmp_path / "b", tmp_path / "a")
    mckpt.convert(tmp_path / "a", tmp_path / "hf", format="hf")
    same(mckpt.open(tmp_path / "a"), tmp_path / "hf")


def test_write_makes_a_hugging_face_directory(src: Path, tmp_path: Path) -> None:
    stream = mckpt.open(src).hf_tensors()
    mckpt.write(tmp_path / "b", src, stream.items(), format="hf")
    assert not mckpt.diff(src, tmp_path / "b")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "b" / name).exists()
    mckpt.convert(src, tmp_path / "fp8", format="hf", quantize="fp8")
    mckpt.write(tmp_path / "c", src, stream.items(), format="hf", quantize="fp8", threads=2)
    alike(tmp_path / "c", tmp_path / "fp8")


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return tiny.tensors(tiny.config("qwen3"))


NORM = "model.norm.weight"


def wrong(kind: str, arrays: dict[str, np.ndarray]) -> Iterator[Named]:
    for name, array in arrays.items():
        if name != NORM:
            yield name, array
    if kind == "unknown":
        yield "model.other.weight", arrays[NORM]
    elif kind == "repeated":
        yield next(iter(arrays.items()))
    elif kind == "misshapen":
        yield NORM, arrays[NORM][1:]
    elif kind == "other dtype":
        yield NORM, arrays[NORM].astype("f4")
    elif kind == "broken":
        raise ZeroDivisionError("its own error")


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("missing", mckpt.errors.SourceError, r"without 1 tensor .*\n.*model\.norm\.weight"),
        ("unknown", mckpt.errors.SourceError, r"model\.other\.weight \[48\]: is in no rule"),
        ("repeated", mckpt.errors.SourceError, r"model\.embed_tokens\.weight: came twice"),
        ("misshapen", mckpt.errors.SourceError, r"is \[47\] in the stream, and should be \[48\]"),
        ("other dtype", mckpt.errors.SourceError, r"is float32 .* should be bfloat16; cast it"),
        ("broken", ZeroDivisionError, "its own error"),
    ],
)
def test_a_wrong_stream_leaves_nothing(
    kind: str, error: Any, text: str, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    config = {**tiny.config("qwen3"), "torch_dtype": "bfloat16"}
    with pytest.raises(error, match=text):
        mckpt.write(tmp_path / "a", config, wrong(kind, arrays), max_memory="200KiB")
    assert not list(tmp_path.iterdir())


def test_write_refuses_before_it_takes_tensors(src: Path, arrays: Any, tmp_path: Path) -> None:
    taken = []

    def stream() -> Iterator[Named]:
        for one in arrays.items():
            taken.append(one)
            yield one

    quantised = {**tiny.config("qwen3"), "quantization_config": {"quant_method": "fp8"}}
    for config, options, text in (
        (src, {"ep": 2}, "has no experts"),
        (quantised, {}, "are not quantised"),
        (src, {"dtypes": {"nope.*": "float32"}}, r"like 'nope\.\*'"),
        ({**tiny.config("qwen3"), "architectures": ["Nope"]}, {}, "stream/config.json.*Nope"),
    ):
        taken.clear()
        with pytest.raises(mckpt.errors.MckptError, match=text):
            mckpt.write(tmp_path / "a", config, stream(), **options)
        assert len(taken) == 1 and not list(tmp_path.iterdir())
    for dst, options, text in (
        ("s3://bucket/a", {}, "s3://bucket/a: a stream is written to a directory of this machine"),
        (tmp_path / "a", {"threads": -1}, "threads is -1"),
    ):
        taken.clear()
        with pytest.raises(mckpt.errors.UsageError, match=text):
            mckpt.write(dst, src, stream(), **options)
        assert not taken
    with pytest.raises(mckpt.errors.SourceError, match="no tensors"):
        mckpt.write(tmp_path / "a", src, [])
    mckpt.write(tmp_path / "a", src, arrays.items())
    with pytest.raises(mckpt.errors.DestinationError):
        mckpt.write(tmp_path / "a", src, stream())


def test_tensors_that_megatron_does_not_have_are_refused_by_name(
    src: Path, arrays: Any, tmp_path: Path
) -> None:
    tower = made_models.config("qwen2_vl")
    with pytest.raises(mckpt.errors.UsageError, match=r"Qwen2VL\w+, whose tensors visual\.\*"):
        mckpt.write(tmp_path / "a", tower, [("visual.patch_embed.proj.weight", np.zeros(1, "f4"))])
    head = ("v_head.summary.bias", np.zeros(1, "f4"))
    with pytest.raises(mckpt.errors.UsageError, match=r"v_head\.summary\.bias: belongs to a head"):
        mckpt.write(tmp_path / "a", src, [*arrays.items(), head])
    assert not list(tmp_path.iterdir())


def test_arrays_of_other_byte_orders_and_strides_are_converted(arrays: Any, tmp_path: Path) -> None:
    config = {**tiny.config("qwen3"), "torch_dtype": "float32"}
    plain = {name: array.astype("f4") for name, array in arrays.items()}
    kinds = (
        lambda array: array.astype(">f4"),
        lambda array: np.asfortranarray(array.astype(">f4")),
        lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    )
    other = ((name, kinds[i % 3](array)) for i, (name, array) in enumerate(plain.items()))
    mckpt.write(tmp_path / "a", config, other)
    mckpt.write(tmp_path / "b", config, plain.items())
    alike(tmp_path / "a", tmp_path / "b")


def test_writes_leave_no_state_in_the_process(src: Path, arrays: Any, tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        return atexit._ncallbacks(), dict(errors._shown), dict(sparse_copy._temporary)  # type: ignore[attr-defined]

    mckpt.write(tmp_path / "first", src, arrays.items())
    before = state()

    def one(number: int) -> None:
        if number % 2:
            with pytest.raises(ZeroDivisionError):
                mckpt.write(tmp_path / str(number), src, wrong("broken", arrays))
        else:
            mckpt.write(tmp_path / str(number), src, arrays.items())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))
    assert state() == before
    assert {path.name for path in tmp_path.iterdir()} == {"first", "0", "2", "4", "6"}
    for number in (0, 2, 4, 6):
        alike(tmp_path / str(number), tmp_path / "first")


def test_dtypes_of_a_stream_may_differ(src: Path, arrays: Any, tmp_path: Path) -> None:
    arrays = {n: a.astype("f4") if "layernorm" in n else a for n, a in arrays.items()}
    mckpt.write(tmp_path / "a", src, arrays.items(), dtypes={"*layernorm.weight": "fp32"})
    tensor = mckpt.open(tmp_path / "a")["layers.0.attn_norm.weight"]
    assert tensor.dtype == "float32"


def test_an_output_layer_may_come_with_its_embedding(tmp_path: Path) -> None:
    src = hf(tmp_path / "src", "llama-tied")
    arrays = tiny.tensors(tiny.config("llama-tied"))
    embedding = arrays["model.embed_tokens.weight"]
    mckpt.write(tmp_path / "a", src, [("lm_head.weight", embedding), *arrays.items()])
    mckpt.convert(src, tmp_path / "b")
    alike(tmp_path / "a", tmp_path / "b")
    with pytest.raises(mckpt.errors.SourceError, match="says that both are one"):
        mckpt.write(tmp_path / "c", src, [*arrays.items(), ("lm_head.weight", embedding * 2)])


def test_the_stream_takes_bounded_space(
    src: Path, arrays: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, do = [], Batches.do

    def look(self: Batches, *args: Any) -> None:
        held.append(sum(os.stat(path).st_blocks for path in self.mover.sources.paths) * 512)
        do(self, *args)

    monkeypatch.setattr(Batches, "do", look)
    mckpt.write(tmp_path / "a", src, arrays.items(), max_memory=1 << 18)
    pages = 2 * 4096 * 10  # each tensor may begin and end within a block of the disk
    largest = max(array.nbytes for array in arrays.values())
    assert len(held) > 3 and max(held) <= (1 << 17) + largest + pages


def test_cancel_ends_a_stream(src: Path, arrays: Any, tmp_path: Path) -> None:
    cancel = threading.Event()
    seen: list[mckpt.Progress] = []
    mckpt.write(tmp_path / "a", src, arrays.items(), progress=seen.append, cancel=cancel)
    assert seen[-1].complete and seen[-1].nbytes > 0
    cancel.set()
    with pytest.raises(mckpt.errors.Cancelled, match="nothing was written"):
        mckpt.write(tmp_path / "b", src, arrays.items(), cancel=cancel)
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_mypy_accepts_a_program_that_uses_the_api(tmp_path: Path) -> None:
    """It takes 30 s, because mypy checks all that the program imports."""
    api = pytest.importorskip("mypy.api")
    program = ROOT / "tests" / "helpers" / "user_program.py"
    out, _, code = api.run(["--strict", "--config-file=", f"--cache-dir={tmp_path}", str(program)])
    assert code == 0, out
