"""Strange content in the files that mckpt writes for itself: mckpt.json, and a run's journal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mckpt.errors import SourceError
from mckpt.execute import journal
from mckpt.storage import manifest, staging
from tests.helpers.commands import good, hf, mckpt, refused


@pytest.fixture(scope="module")
def made(work: Path) -> Path:
    """Returns a folder with a Hugging Face directory, and two checkpoints made of it."""
    folder = work / "manifest"
    hf(folder / "source")
    good("hf-to-megatron", folder / "source", folder / "megatron")
    good("megatron-to-hf", folder / "megatron", folder / "hf")
    return folder


STRANGE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not valid JSON"),
    "a list": (b"[]", "Expected `object`, got `array`"),
    "a number": (b"7", "Expected `object`, got `int`"),
    "no UTF-8": (b"\xff\xfe\xfd", "not valid JSON"),
    "deep lists": (b"[" * 100_000, "not valid JSON"),
    "a long number": (b'{"dims": ' + b"9" * 6000 + b"}", "not valid JSON"),
    "half of a pair": (rb'{"family": "\ud800"}', "not valid JSON"),
    "files as a list": (b'{"files": ["a"]}', "Expected `object`, got `array` - at `$.files`"),
    "a file as a number": (b'{"files": {"a": 1}}', "at `$.files[...]`"),
    "a file without bytes": (b'{"files": {"a": {"checksum": ""}}}', "required field `bytes`"),
    "bytes as text": (b'{"files": {"a": {"bytes": "1", "checksum": ""}}}', "$.files[...].bytes"),
    "negative bytes": (b'{"files": {"a": {"bytes": -1, "checksum": ""}}}', "$.files[...].bytes"),
    "a checksum as a number": (b'{"hf": {"a": {"bytes": 1, "checksum": 1}}}', "checksum"),
    "a file above": (b'{"files": {"../x": {"bytes": 1, "checksum": ""}}}', "names '../x'"),
    "a file of the system": (b'{"files": {"/a": {"bytes": 1, "checksum": ""}}}', "names '/a'"),
    "a file with a NUL": (b'{"hf": {"a\\u0000": {"bytes": 1, "checksum": ""}}}', "names 'a\\x00'"),
    "dims as a list": (b'{"dims": [1]}', "$.dims"),
    "casts as text": (b'{"casts": "bfloat16"}', "$.casts"),
    "inexact of numbers": (b'{"inexact": {"tied": 1}}', "$.inexact[...]"),
    "a source as text": (b'{"source": "hf"}', "$.source"),
    "an iteration as text": (b'{"source": {"iteration": "1"}}', "$.source.iteration"),
    "a family as a list": (b'{"family": ["qwen3"]}', "$.family"),
    "a mapping file as text": (b'{"mapping_file": "a.yaml"}', "$.mapping_file"),
    "carried as a number": (b'{"carried": 1}', "$.carried"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_manifest_is_an_error_that_names_the_place(what: str, tmp_path: Path) -> None:
    content, words = STRANGE[what]
    (tmp_path / "mckpt.json").write_bytes(content)
    with pytest.raises(SourceError) as raised:
        manifest.read(tmp_path)
    assert words in str(raised.value) and str(tmp_path / "mckpt.json") in str(raised.value)


@pytest.mark.parametrize("what", ["nothing", "a file without bytes", "dims as a list"])
def test_commands_refuse_a_strange_manifest(what: str, made: Path, tmp_path: Path) -> None:
    content, words = STRANGE[what]
    for name in ("megatron", "hf"):
        shutil.copytree(made / name, tmp_path / name)
    (tmp_path / "hf" / "mckpt.json").write_bytes(content)
    (tmp_path / "megatron" / "release" / "mckpt.json").write_bytes(content)
    for args in (
        ("inspect", tmp_path / "megatron"),
        ("plan", tmp_path / "megatron", tmp_path / "out"),
        ("inspect", tmp_path / "hf"),
        ("plan", tmp_path / "hf", tmp_path / "out"),
    ):
        refused(3, "mckpt.json", words, args=args)
    assert mckpt("check", tmp_path / "megatron").code == 3
    # it does not tell that these files are mckpt's
    refused(6, "hf", args=("megatron-to-hf", made / "megatron", tmp_path / "hf"))


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, 1e300])
def test_a_recorded_dim_is_checked_as_one_of_an_arg(value: Any, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "megatron", tmp_path / "m")
    path = tmp_path / "m" / "release" / "mckpt.json"
    found = json.loads(path.read_text())
    found["dims"]["rope_theta"], found["inexact"] = value, {"rope_theta": "why"}
    path.write_text(json.dumps(found))
    for args in (("inspect", tmp_path / "m"), ("plan", tmp_path / "m", tmp_path / "out")):
        assert mckpt(*args).code != 70


ODD = [
    b"",
    b"[]",
    b"{}",
    b"null",
    b"\xff",
    b'{"a": 1}',
    b'{"a": [1]}',
    b'{"files": 1}',
    b"[" * 9999,
]


@pytest.mark.parametrize("content", ODD)
def test_a_strange_journal_counts_as_none(content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / f"{staging.STAGING}x"
    folder.mkdir()
    for name in (staging.PUBLISHING, staging.INTENT, journal.GENERATION):
        (folder / name).write_bytes(content)
    assert staging.marked(folder) == {}
    assert staging.intent(folder) is None and staging.intended(tmp_path, None) == set()
    assert isinstance(journal.generation(folder), str)
