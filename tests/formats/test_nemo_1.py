"""Archives of NeMo 1 with the format zarr, from files that an old megatron-core saved, and archives
that are damaged. `tests/judge/test_nemo_1.py` has those of the other formats.
"""

from __future__ import annotations

import gzip
import io
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.errors import SourceError
from mckpt.options import SourceOptions
from mckpt.storage import archive as storage_archive
from mckpt.storage import descriptors, sparse_copy
from tests.helpers import nemo_archive
from tests.helpers.commands import good, refused

WEIGHTS = "model.safetensors"
VOCABULARY = SourceOptions(vocab_size=14)


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_an_archive_of_zarr_has_the_weights_of_the_same_ranks(mode: str, tmp_path: Path) -> None:
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    described = nemo_archive.described(config)
    archive = nemo_archive.pack(folder, described, tmp_path / "a.nemo", mode)
    ckpt = mckpt.Checkpoint.open(archive, VOCABULARY)
    assert ckpt.format == "zarr"
    assert not mckpt.diff(ckpt, tmp_path / "sample" / "torch")
    out = good("megatron-to-hf", archive, tmp_path / "out", "--vocab-size", 14).err
    assert "its keys begin with `model.`, as NeMo writes them" in out
    assert ("is compressed, so its" in out) == (mode == "w:gz")
    assert not mckpt.diff(tmp_path / "out", tmp_path / "sample" / "torch")
    assert "decoder.layers.mlp.linear_fc1.weight" in good("inspect", archive).out


def test_a_checkpoint_of_nemo_2_in_zarr_is_read(tmp_path: Path) -> None:
    folder, config = nemo_archive.zarr(tmp_path, "module.", "weights")
    found = {
        "_target_": "nemo.collections.llm.gpt.model.llama.Llama2Config7B",
        **nemo_archive.of_nemo_2(config),
    }
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump({"config": found}))
    ckpt = mckpt.Checkpoint.open(folder, VOCABULARY)
    assert ckpt.format == "zarr"
    assert not mckpt.diff(ckpt, tmp_path / "sample" / "torch")


def cut(size: int) -> Callable[[Path], None]:
    """Returns what cuts an archive to a size."""
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def rewritten(change: Callable[[tarfile.TarInfo], bool]) -> Callable[[Path], None]:
    """Returns what writes an archive again, with each member as `change` leaves it; False drops the
    member.
    """

    def damage(path: Path) -> None:
        out = io.BytesIO()
        with tarfile.open(path) as old, tarfile.open(fileobj=out, mode="w:") as new:
            for member in old.getmembers():
                data = old.extractfile(member) if member.isreg() else None
                if change(member):
                    new.addfile(member, data if member.isreg() else None)
        path.write_bytes(out.getvalue())

    return damage


def named(name: str) -> Callable[[tarfile.TarInfo], bool]:
    def change(member: tarfile.TarInfo) -> bool:
        if member.name == "./a_tokenizer.model":
            member.name = name
        return True

    return change


def linked(member: tarfile.TarInfo) -> bool:
    if member.name == "./a_tokenizer.model":
        member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
    return True


def without(part: str) -> Callable[[tarfile.TarInfo], bool]:
    return lambda member: part not in member.name


def begun(*headers: bytes) -> Callable[[Path], None]:
    """Returns a function that writes headers in front of an archive."""
    return lambda path: path.write_bytes(b"".join(headers) + path.read_bytes())


def header(kind: bytes, size: int, name: str = "a") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def extended(size: int) -> bytes:
    """Returns the headers of a member whose extended header states its size."""
    text = f"{len(str(size)) + 9} size={size}\n".encode()
    assert int(text.split()[0]) == len(text)
    return header(tarfile.XHDTYPE, len(text)) + text.ljust(512, b"\0") + header(b"0", 0, "long")


LONG_NAME = header(tarfile.GNUTYPE_LONGNAME, 2) + b"a".ljust(512, b"\0")
# name -> the damage, and words of the error
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "empty": (cut(0), ("a.nemo: is not a tar archive",)),
    "no archive": (lambda path: path.write_bytes(b"x" * 4096), ("a.nemo: is not a tar archive",)),
    "cut inside a header": (cut(30_000), ("a.nemo: has no end", "so it is truncated; copy it")),
    "cut after a header": (cut(30_208), ("a.nemo: is not a tar archive, or is truncated", "copy")),
    "cut after a member": (cut(29_696), ("a.nemo: has no end of a tar archive at byte 29,696",)),
    "outside": (rewritten(named("../evil")), ("'../evil' lies outside of the archive",)),
    "absolute": (rewritten(named("/tmp/evil")), ("'/tmp/evil' lies outside of the archive",)),
    "twice": (rewritten(named("./model_config.yaml")), ("has 'model_config.yaml' twice",)),
    "link": (rewritten(linked), ("'./a_tokenizer.model' is a link",)),
    "a long name of gigabytes": (
        begun(header(tarfile.GNUTYPE_LONGNAME, 2 << 30)),
        ("a.nemo", "long name at byte 0 has 2,147,483,648 bytes, more than 1,048,576"),
    ),
    "an extended header of gigabytes": (
        begun(header(tarfile.XHDTYPE, 2 << 30)),
        ("a.nemo", "at byte 0 has 2,147,483,648 bytes"),
    ),
    "long names in a row": (
        begun(LONG_NAME * 1000),
        ("a.nemo", "more than 8 headers of long names in a row"),
    ),
    "a negative size": (begun(header(b"0", -512, "minus")), ("a.nemo", "'minus' has -512 bytes")),
    "a negative size of an extended header": (
        begun(extended(-5)),
        ("a.nemo", "'long' has -5 bytes"),
    ),
    "no config": (rewritten(without("model_config")), ("no checkpoint that mckpt knows",)),
    "no weights": (rewritten(without("/model_weights")), ("no checkpoint that mckpt knows",)),
    "no chunk": (
        rewritten(without("fc2.weight/1.0.0")),
        ("a.nemo/model_weights", "fc2.weight/1"),
    ),
    "no array": (rewritten(without("fc2.weight")), ("linear_fc2.weight is missing",)),
}


@pytest.fixture(scope="module")
def whole(work: Path) -> Path:
    folder, config = nemo_archive.zarr(work / "whole", "model.", "model_weights")
    return nemo_archive.pack(folder, nemo_archive.described(config), work / "whole" / "a.nemo")


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_archive_is_one_error(case: str, whole: Path, tmp_path: Path) -> None:
    damage, words = DAMAGE[case]
    archive = tmp_path / "a.nemo"
    shutil.copyfile(whole, archive)
    damage(archive)
    refused(3, *words, args=("megatron-to-hf", archive, tmp_path / "out", "--vocab-size", 14))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [1, 2_000])
def test_a_compressed_archive_that_is_cut_is_one_error(size: int, tmp_path: Path) -> None:
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    archive = nemo_archive.pack(folder, nemo_archive.described(config), tmp_path / "a.nemo", "w:gz")
    cut(-size)(archive)
    refused(3, "a.nemo: is truncated or damaged", args=("inspect", archive))


def test_an_archive_that_unpacks_to_nothing_but_zeros_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_archive, "_ROOM", 1 << 20)
    (tmp_path / "a.nemo").write_bytes(gzip.compress(bytes(64 << 20), 1))
    refused(
        3,
        "more than 50 times as many when they are unpacked",
        args=("inspect", tmp_path / "a.nemo"),
    )


def test_an_archive_is_unpacked_once_for_the_processes_of_a_machine(tmp_path: Path) -> None:
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    archive = nemo_archive.pack(folder, nemo_archive.described(config), tmp_path / "a.nemo", "w:gz")
    first = storage_archive.Archive(archive)
    assert pickle.loads(pickle.dumps(first)).tar == first.tar
    first.tar.unlink()
    assert pickle.loads(pickle.dumps(first)).tar != first.tar


def test_a_compressed_archive_is_known_again(tmp_path: Path) -> None:
    """It is unpacked again for each run, and the identity of its source is that of the archive."""
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    archive = nemo_archive.pack(folder, nemo_archive.described(config), tmp_path / "a.nemo", "w:gz")
    convert = ("megatron-to-hf", archive, tmp_path / "out", "--vocab-size", 14)
    states = []
    for _ in range(2):
        source = mckpt.Checkpoint.open(archive, VOCABULARY)
        planned = mckpt.plan(source, tmp_path / "out", format="hf")
        states.append((planned.digest, str(planned.state())))
        sparse_copy.clean()
    assert states[0] == states[1]
    good(*convert)
    sparse_copy.clean()
    said = good(*convert)
    assert "is done already" in said.out and "moved, touched" not in said.err


def test_a_read_that_the_system_cuts_short_goes_on(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = descriptors.pread
    monkeypatch.setattr(descriptors, "pread", lambda fd, n, at: real(fd, min(n, 100), at))
    archive = storage_archive.Archive(whole)
    name = max(archive.objects, key=lambda name: archive.objects[name].size)
    size = archive.objects[name].size
    assert size > 200
    with tarfile.open(whole) as opened:
        expected = opened.extractfile(f"./{name}")
        assert expected and archive.read(name, 0, size) == expected.read()


def test_the_whole_archive_is_checked_without_the_size_of_the_vocabulary(whole: Path) -> None:
    assert "sound" in good("check", whole).out
    refused(2, "The embedding has 16 rows", args=("megatron-to-hf", whole, whole.parent / "out"))


def test_an_archive_that_gives_tensors_has_the_vocabulary_of_the_source(
    whole: Path, tmp_path: Path
) -> None:
    src, out, edit = (tmp_path / name for name in ("src", "out", "edit"))
    mckpt.convert(mckpt.open(whole, vocab_size=14), src)
    zeros = {name: np.zeros_like(tensor) for name, tensor in load_file(src / WEIGHTS).items()}
    save_file(zeros, src / WEIGHTS)
    (src / "mckpt.json").unlink()
    for take, start in (("layers.0", "model.layers.0."), ("head", "lm_head.")):
        good("edit", src, out, "--edit", f"graft: {{from: {whole}, take: {take}}}", "--overwrite")
        apart = {name for name in zeros if load_file(out / WEIGHTS)[name].any()}
        assert apart == {name for name in zeros if name.startswith(start)}
        good("verify", src, out, "--contract", "--with", whole)
    args = "edit", src, out, "--edit", "vocab: {size: 18}", "--edit"
    words = "its head belongs to a model of other dims", "vocab_size: 16, and 18 in SRC"
    refused(2, *words, args=(*args, f"graft: {{from: {whole}, take: head}}"))
    # the source of an edit
    good("edit", whole, edit, "--vocab-size", 14, "--edit", "layers: {silent_after: 0}")
    refused(2, "give --vocab-size N", args=("verify", whole, edit, "--contract"))
    good("verify", whole, edit, "--contract", "--vocab-size", 14, "--level", "bytes")


def test_an_archive_that_changes_while_it_is_read_is_an_error(whole: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.nemo"
    shutil.copyfile(whole, archive)
    ckpt = mckpt.Checkpoint.open(archive, VOCABULARY)
    cut(30_000)(archive)
    with pytest.raises(SourceError, match="was changed while it was read"):
        ckpt["embed.weight"][:].numpy()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mcore_gpt": False}, ("mcore_gpt is False", "convert_gpt_nemo_to_mcore.py")),
        ({"activation": "reglu"}, ("activation is 'reglu'",)),
        ({"target": "nemo.x.MegatronT5Model"}, ("MegatronGPTModel",)),
        ({"mcore_customization_config": {"new_decoder_architecture": 1}}, ("customization",)),
        ({"apply_embedding_scaling": True}, ("apply_embedding_scaling is True",)),
        ({"some_new_layer": 7.5}, ("some_new_layer",)),
        ({"window_size": [7]}, ("window_size has 1 item, and it must have 2",)),
    ],
)
def test_a_model_that_the_mapping_does_not_know_is_refused(
    changed: dict[str, object], words: tuple[str, ...], tmp_path: Path
) -> None:
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    described = {**nemo_archive.described(config), **changed}
    archive = nemo_archive.pack(folder, described, tmp_path / "a.nemo")
    refused(4, *words, args=("megatron-to-hf", archive, tmp_path / "out", "--vocab-size", 14))
