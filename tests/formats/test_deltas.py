"""Deltas of weights: what changed between two checkpoints of any formats, for the engines of others
and for `mckpt apply`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.conversion import deltas
from mckpt.execute.threads import ThreadPool
from tests.helpers.commands import command_line, edit_json, good, refused, run, tree
from tests.helpers.tiny import TinyModel

INDEX = "model.safetensors.index.json"
DIGESTS = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
FORMS: list[dict[str, Any]] = [{"tp": 2}, {"format": "torch", "tp": 2, "pp": 2}]


def weights(directory: Path) -> dict[str, np.ndarray]:
    """Returns the bytes of each tensor of a Hugging Face directory."""
    found = {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}
    return {name: array.reshape(-1).view("u1") for name, array in found.items()}


def trained(source: Path, out: Path, share: float, seed: int, keep: str = "norm") -> Path:
    """Writes a model in which a share of the elements have other bits, but for the tensors whose
    names have `keep` in them.
    """
    shutil.copytree(source, out)
    drawn = np.random.default_rng(seed)
    for file in out.glob("*.safetensors"):
        arrays = load_file(file)
        for name, array in arrays.items():
            if keep not in name:
                flat = array.reshape(-1).view("u2").copy()
                at = drawn.choice(len(flat), int(len(flat) * share), replace=False)
                flat[at] ^= drawn.integers(1, 1 << 10, len(at)).astype("u2")
                arrays[name] = flat.view(array.dtype).reshape(array.shape)
        save_file(arrays, file, metadata={"format": "pt"})
    return out


def pulled(base: dict[str, np.ndarray], version: Path) -> dict[str, np.ndarray]:
    """Returns the weights after a version, applied as the engines of slime and miles do it."""
    stated = json.loads((version / INDEX).read_text())["metadata"]
    assert int(stated["version"]) == int(stated["base_version"]) + 1
    assert stated["compression_format"] == "zstd"
    out = {name: array.copy() for name, array in base.items()}
    for file in sorted(version.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            sums = opened.metadata()
            for name in opened.keys():  # noqa: SIM118
                frame, region = opened.get_tensor(name).tobytes(), out[name]
                delta = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), "u1")
                if stated["delta_encoding"] == "xor":
                    region ^= delta
                else:
                    count = int.from_bytes(delta[:4].tobytes(), "little")
                    at = np.frombuffer(delta[4 : 4 + 4 * count].tobytes(), "<u4")
                    region[at] = delta[4 + 4 * count :]
                assert DIGESTS[stated["checksum_format"]](region.tobytes()) == sums[name]
    return out


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[n], right[n]) for n in left)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors come in many blocks, and files are small."""
    monkeypatch.setattr(deltas, "ThreadPool", lambda threads, _: ThreadPool(threads, 1600))
    monkeypatch.setattr(deltas, "FILE_BYTES", 60_000)


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_engines_of_others_and_apply_make_the_new_weights(
    encoding: str, digest: str, tiny_model: TinyModel, tmp_path: Path, small_blocks: None
) -> None:
    states = [tiny_model("qwen3")]
    for number, share in enumerate((0.02, 0.0, 1.0)):
        states.append(trained(states[-1], tmp_path / f"state-{number}", share, number))
    published, found = tmp_path / "published", weights(states[0])
    for number, (old, new) in enumerate(itertools.pairwise(states), 1):
        good("delta", old, new, published, "--encoding", encoding, "--digest", digest)
        version = published / f"weight_v{number:06d}"
        found = pulled(found, version)
        assert same(found, weights(new))
        changed = json.loads((version / INDEX).read_text())["weight_map"]
        assert set(changed) == {n for n in found if "norm" not in n and number != 2}
        applied = tmp_path / f"applied-{number}"
        good("apply", states[0], published, applied, "--until", number, "--checksum", "sha256")
        assert same(weights(applied), found)
        assert mckpt.check(applied).exit_code == 0
    good("apply", applied.with_name("applied-1"), published, tmp_path / "followed")
    assert same(weights(tmp_path / "followed"), found)
    before = tree(applied)
    good("apply", states[0], published, applied, "--checksum", "sha256")  # is done already
    assert tree(applied) == before


@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe", "llama"])
def test_formats_and_sizes_of_both_sides_do_not_matter(
    case: str, tiny_model: TinyModel, tmp_path: Path, small_blocks: None
) -> None:
    old, new = tiny_model(case), trained(tiny_model(case), tmp_path / "new", 0.05, 1)
    mckpt.delta(old, new, tmp_path / "plain")
    files = sorted((tmp_path / "plain" / "weight_v000001").glob("*.safetensors"))
    assert len(files) > 1
    for number, how in enumerate(FORMS):
        left, right, out = (tmp_path / f"{side}-{number}" for side in ("left", "right", "out"))
        mckpt.convert(old, left, transformer_impl="local", **how)
        mckpt.convert(new, right, **how)
        for name, sides in {"mixed": (old, right), "both": (left, right)}.items():
            published = tmp_path / f"{name}-{number}"
            mckpt.delta(*sides, published)
            for file in files:
                assert (published / "weight_v000001" / file.name).read_bytes() == file.read_bytes()
        mckpt.apply_delta(left, published, out)
        assert same(weights(out), weights(new))


@pytest.fixture(scope="module")
def published(work: Path, tiny_model: TinyModel) -> Path:
    """A folder with the states 0 to 2 of a model, and the two deltas between them."""
    source = work / "0"
    shutil.copytree(tiny_model("qwen3"), source)
    trained(source, work / "1", 0.05, 1)
    trained(work / "1", work / "2", 0.05, 2)
    mckpt.delta(source, work / "1", work / "deltas")
    mckpt.delta(work / "1", work / "2", work / "deltas", encoding="overwrite")
    return work


@pytest.fixture
def copied(published: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the deltas."""
    shutil.copytree(published / "deltas", tmp_path / "deltas")
    yield tmp_path / "deltas"
    assert not (tmp_path / "out").exists() or not tree(tmp_path / "out")


EMBEDDING = "model.embed_tokens.weight"


def test_a_wrong_base_is_refused_with_the_name_of_a_tensor(published: Path, copied: Path) -> None:
    out, said = copied.parent / "out", f"{EMBEDDING}: is not the tensor on which"
    refused(3, said, args=("apply", published / "1", copied, out))
    # of a tensor that no delta changes
    other = trained(published / "0", copied.parent / "other", 0.5, 3, keep="proj")
    edit = load_file(other / "model.safetensors")
    right = load_file(published / "0" / "model.safetensors")
    edit |= {name: array for name, array in right.items() if "norm" not in name}
    save_file(edit, other / "model.safetensors", metadata={"format": "pt"})
    refused(3, "layernorm.weight: is not the tensor on", args=("apply", other, copied, out))
    # also where another program has made the first version
    (copied / "weight_v000001" / "mckpt.json").unlink()
    refused(3, "layernorm.weight: is not the tensor on", args=("apply", other, copied, out))
    # of a delta that another program has made
    for path in copied.glob("*/mckpt.json"):
        path.unlink()
    args = ("apply", published / "1", copied, out)
    refused(3, f"{EMBEDDING}: has another digest after", args=args)


def test_a_delta_that_does_not_follow_is_refused(published: Path, copied: Path) -> None:
    sides = published / "0", published / "2"
    said = f"{EMBEDDING}: is not what {copied / 'weight_v000002'} makes of it"
    refused(3, said, args=("delta", *sides, copied), untouched=copied)
    refused(2, "give --digest", args=("delta", *sides, copied, "--digest", "adler32"))
    out = copied.parent / "out"
    refused(6, "lies", args=("delta", *sides, published / "0" / "in"))
    good("delta", published / "2", published / "1", copied)
    shutil.rmtree(copied / "weight_v000002")
    args = ("apply", published / "0", copied, out)
    refused(3, "weight_v000003: does not build on version 1", args=args)
    edit_json(copied / "weight_v000003" / INDEX, lambda i: i["metadata"].update(base_version="1"))
    refused(3, f"weight_v000003: does not build on version 1: {EMBEDDING} is another", args=args)
    args = ("delta", *sides, copied / "weight_v000003")
    refused(2, "is a version itself", args=args, untouched=copied)
    whole = shutil.copytree(published / "1", copied.parent / "weight_v000003")
    args = ("apply", whole, copied, out)
    refused(3, f"has no version for {whole}, which is version 3; it has 1, 3", args=args)


def test_a_delta_follows_a_version_of_whole_weights(published: Path, copied: Path) -> None:
    whole, out = copied / "weight_v000007", copied.parent / "then"
    shutil.copytree(published / "2", whole)
    good("delta", published / "2", published / "1", copied)
    good("apply", whole, copied, out)
    assert same(weights(out), weights(published / "1"))
    good("delta", out, published / "0", copied)
    assert sorted(path.name[-1] for path in copied.iterdir()) == ["1", "2", "7", "8", "9"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_delta_is_refused(number: int, published: Path, copied: Path) -> None:
    version, out = copied / f"weight_v{number:06d}", copied.parent / "out"
    args = ("apply", published / str(number - 1), version, out)
    file = next(version.glob("*.safetensors"))
    raw = file.read_bytes()
    with safe_open(file, "np") as opened:
        name = next(n for n in opened.keys() if "q_proj" in n)  # noqa: SIM118
        frame, digest = opened.get_tensor(name).tobytes(), opened.metadata()[name]
    at = raw.index(frame)
    for place in (0, len(frame) // 2, len(frame) - 2):
        wrong = bytearray(raw)
        wrong[at + place] ^= 0x10
        file.write_bytes(wrong)
        refused(3, name, args=args)
    other = digest.replace(digest[0], "f" if digest[0] != "f" else "0")
    file.write_bytes(raw.replace(digest.encode(), other.encode()))
    refused(3, name, "has other digests than its mckpt.json", args=args)
    record = (version / "mckpt.json").read_bytes()
    (version / "mckpt.json").unlink()
    refused(3, name, "has another digest after", args=args)
    (version / "mckpt.json").write_bytes(record)
    file.unlink()
    refused(3, f"{file.name}: named by {INDEX}, and not there", args=args)


def test_files_of_another_version_and_lost_versions_are_refused(
    published: Path, tmp_path: Path
) -> None:
    """The same bytes change twice, so that the second overwrite fits the first base too."""
    states, out, folder = [published / "0"], tmp_path / "out", tmp_path / "deltas"
    for number in (1, 2):
        states.append(shutil.copytree(states[0], tmp_path / str(number)))
        arrays = load_file(states[0] / "model.safetensors")
        for array in arrays.values():
            array.reshape(-1).view("u2")[:5] ^= 0x0101 << number
        save_file(arrays, states[-1] / "model.safetensors", metadata={"format": "pt"})
        mckpt.delta(*states[-2:], folder, encoding="overwrite")
    first, second = sorted(folder.iterdir())
    for lost, until in ((second, 2), (second, None), (first, None)):
        index = (lost / INDEX).read_bytes()
        (lost / INDEX).unlink()
        more = () if until is None else ("--until", until)
        said = "has no version 2" if until else f"have no {INDEX}; copy them again"
        refused(3, said, args=("apply", states[0], folder, out, *more))
        (lost / INDEX).write_bytes(index)
    refused(3, "has no version 3", args=("apply", states[0], folder, out, "--until", 3))
    for file in second.glob("*.safetensors"):
        shutil.copy(file, first)
    said = "weight_v000001: has other digests than its mckpt.json"
    refused(3, said, EMBEDDING, args=("apply", states[0], folder, out, "--until", 1))
    assert not out.exists()


def test_other_shapes_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    sides, out = (tiny_model("qwen3"), tiny_model("llama")), tmp_path / "deltas"
    refused(3, "have other tensors:", "missing", args=("delta", *sides, out), untouched=out)
    mckpt.convert(sides[0], tmp_path / "wide", format="torch", dtype="fp32")
    said = f"{EMBEDDING}: bfloat16 [193, 48], and float32 [193, 48]"
    refused(3, said, args=("delta", sides[0], tmp_path / "wide", out), untouched=out)


def test_what_a_delta_would_lose_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    out, old = tmp_path / "deltas", tiny_model("deepseek-v3")
    new = shutil.copytree(old, tmp_path / "new")
    arrays = load_file(new / "model.safetensors")
    arrays["model.layers.4.embed_tokens.weight"].reshape(-1).view("u2")[3] ^= 1
    save_file(arrays, new / "model.safetensors", metadata={"format": "pt"})
    said = "new: holds different copies of one tensor"
    refused(3, said, args=("delta", old, new, out), untouched=out)
    copy = shutil.copytree(old, tmp_path / "copy")
    edit_json(copy / "config.json", lambda c: c.update(rope_theta=12345))
    said = "have other settings, and a delta has weights alone:", "rope_theta: ", ", and 12345"
    refused(3, *said, args=("delta", old, copy, out), untouched=out)
    shutil.copy(old / "config.json", copy)
    edit_json(copy / "config.json", lambda c: c.update(max_position_embeddings=777))
    mckpt.delta(old, copy, out)  # the longest sequence changes no value


def test_a_directory_of_deltas_is_shown_and_is_no_checkpoint(published: Path) -> None:
    folder = published / "deltas"
    found = good("inspect", folder, "--json").json
    assert [one["version"] for one in found["versions"]] == [1, 2]
    assert found["versions"][1]["encoding"] == "overwrite"
    assert "base_version 1" in good("inspect", folder / "weight_v000002").out
    for path in (folder, folder / "weight_v000001"):
        args = ("hf-to-megatron", path, published / "none")
        refused(3, "deltas of weights: `mckpt apply BASE DIR OUT`", args=args)


# kills the process when it writes the second entry of a journal
KILL = """
import os, signal
from mckpt.conversion import deltas
from mckpt.execute.journal import Journal
deltas.FILE_BYTES = 60_000
write, seen = Journal.write_sum, []
def killing(*args):
    seen.append(args)
    if len(seen) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
Journal.write_sum = killing
"""


def test_a_killed_run_goes_on(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "FILE_BYTES", 60_000)
    made: list[Path] = []
    writer = deltas.DeltaWriter
    monkeypatch.setattr(deltas, "DeltaWriter", lambda p, *a: made.append(p) or writer(p, *a))
    args = ("delta", published / "0", published / "1", tmp_path / "deltas", "--threads", "1")
    run(command_line(*args, before=KILL), code=-9)
    assert not list(tmp_path.glob("deltas/weight_v*"))
    good(*args)
    files = sorted(tmp_path.glob("deltas/weight_v000001/*.safetensors"))
    assert [path.name for path in made] == [path.name for path in files[1:]]
    assert same(pulled(weights(published / "0"), files[0].parent), weights(published / "1"))
    args = ("apply", published / "0", tmp_path / "deltas", tmp_path / "out", "--threads", "1")
    run(command_line(*args, before=KILL), code=-9)
    assert not (tmp_path / "out" / "config.json").exists()
    good(*args)
    assert same(weights(tmp_path / "out"), weights(published / "1"))
    assert not list(tmp_path.glob("*/.mckpt-*"))


def test_a_delta_needs_its_extra(published: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    args = ("delta", published / "0", published / "1", tmp_path / "deltas")
    refused(9, "pip install 'mckpt[delta]'", args=args)
