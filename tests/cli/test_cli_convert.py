"""The commands that convert, and their options: hf-to-megatron, megatron-to-hf and reshard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt as package
from mckpt.containers import safe_pickle
from tests.helpers.commands import PT, Pt, good, mckpt, tree


def alone(root: Path, to: Path) -> Path:
    """Copies a checkpoint without its Hugging Face files and manifest, so that it has only args."""
    shutil.copytree(root, to)
    shutil.rmtree(to / "hf")
    (to / "release" / "mckpt.json").unlink()
    return to


def test_json_of_a_conversion_has_the_manifest(src, tmp_path):
    said = good("hf-to-megatron", src, tmp_path / "d", "--json")
    path = tmp_path / "d" / "release"
    manifest = json.loads((path / "mckpt.json").read_text())
    outcome = {"state": "written", "path": str(path), "seconds": said.json["seconds"]}
    assert said.json == {**outcome, "bytes": said.json["bytes"], **manifest}
    assert (
        good("hf-to-megatron", src, tmp_path / "e", "--json", "--dry-run").json["plan"]
        == said.json["plan"]
    )
    assert not (tmp_path / "e").exists()
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize("algorithm", ["crc32", "sha256", "none"])
def test_the_manifest_has_the_checksum_of_each_file(src, tmp_path, algorithm):
    import hashlib
    import zlib

    manifest = good("hf-to-megatron", src, tmp_path / "d", "--json", "--checksum", algorithm).json
    for name, file in manifest["files"].items():
        data = (tmp_path / "d" / "release" / name).read_bytes()
        known = {
            "crc32": f"crc32:{zlib.crc32(data):08x}",
            "sha256": f"sha256:{hashlib.sha256(data).hexdigest()}",
            "none": "",
        }
        assert file["bytes"] == len(data) and (file["checksum"] or "") in (
            known[algorithm],
            "none",
        ), name


def test_names_of_allow_inexact(src, torch_dir, tmp_path):
    for source, to in ((src, "torch"), (torch_dir, "torch"), (torch_dir, "hf")):
        for known in ("rope_factor", "config", "sliding_window"):
            good("plan", source, tmp_path / "d", "--to", to, "--allow-inexact", known)


def test_tokenizer_files_are_copied_byte_for_byte(torch_dir, tmp_path):
    given = tmp_path / "tokenizer"
    (given / "additional_chat_templates").mkdir(parents=True)
    files = {
        "tokenizer.json": b'{"mine": 1}\r\n',
        "chat_template.jinja": "{{ 'ä' }}".encode(),
        "merges.txt": b"\xff\x00\n",
        "additional_chat_templates/tool.jinja": b"{}",
        "tokenizer.model": b"\0\1",
    }
    for name, data in files.items():
        (given / name).write_bytes(data)
    for not_copied in ("model.safetensors", "config.json", ".hidden"):
        (given / not_copied).write_bytes(b"{}")
    good("megatron-to-hf", torch_dir, tmp_path / "d", "--tokenizer", given)
    written = tree(tmp_path / "d")
    assert {k: written[k] for k in files} == files
    assert (
        ".hidden" not in written
        and written["model.safetensors"] != b"{}"
        and written["config.json"] != b"{}"
    )
    assert (
        written["tokenizer_config.json"]
        == (torch_dir / "hf" / "tokenizer_config.json").read_bytes()
    )


def test_like_and_set_describe_the_model(torch_dir, src, tmp_path):
    lone = alone(torch_dir, tmp_path / "lone")
    planned = good("plan", lone, tmp_path / "p", "--like", src, "--set", "rope_theta=5")
    assert "Hugging Face directory, with rope_theta changed to 5 (--set)" in planned.out
    good("megatron-to-hf", lone, tmp_path / "like", "--like", src)
    assert (tmp_path / "like" / "config.json").read_bytes() == (src / "config.json").read_bytes()
    # without an option, the args of the checkpoint state every dim
    good("megatron-to-hf", lone, tmp_path / "args")
    assert mckpt("diff", src, tmp_path / "args").code == 0


def edit_ranks(root: Path, change: Any) -> None:
    for path in sorted((root / "release").glob(f"mp_rank_*/{PT}")):
        pt = Pt(path)
        change(pt)
        pt.save()


def test_rows_beyond_the_vocabulary_are_reported_or_kept(torch_dir, src, tmp_path):
    lone = tmp_path / "lone"
    shutil.copytree(torch_dir, lone)
    last = Pt(lone / "release" / "mp_rank_01_000" / PT)
    storage = safe_pickle.as_tensor(last.value["model"]["embedding.word_embeddings.weight"]).storage
    rows = np.frombuffer(last.data[storage], "u2").reshape(128, 48).copy()
    rows[100:103] = 0x3F80  # rows 228 to 230 of both ranks' 256: beyond 193
    last.data[storage] = rows.tobytes()
    last.save()
    said = good("megatron-to-hf", lone, tmp_path / "d")
    assert "3 rows beyond" in said.err
    assert any(
        "3 rows beyond" in line
        for line in json.loads((tmp_path / "d" / "mckpt.json").read_text())["dropped"]
    )
    assert mckpt("diff", src, tmp_path / "d").code == 0
    good("megatron-to-hf", alone(lone, tmp_path / "bare"), tmp_path / "kept", "--keep-padding")
    kept = package.open(tmp_path / "kept")
    assert (
        kept["embed.weight"].shape == (256, 48)
        and (kept["embed.weight"][228:231].numpy() == 1).all()
    )
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["vocab_size"] == 256


def test_a_vocab_size_that_no_file_has_is_given(torch_dir, src, tmp_path):
    lone = alone(torch_dir, tmp_path / "lone")
    edit_ranks(lone, lambda pt: pt.value["args"].state.update(vocab_size=None))
    good("megatron-to-hf", lone, tmp_path / "d", "--vocab-size", 193)
    assert mckpt("diff", src, tmp_path / "d").code == 0
    # a reshard does not need the size of the vocabulary
    good("reshard", lone, tmp_path / "r", "--target-tp", 4)


def test_reshard_keeps_args_that_it_does_not_know(torch_dir, src, tmp_path):
    lone = tmp_path / "lone"
    shutil.copytree(torch_dir, lone)
    odd = safe_pickle.glob("somebody.plugin", "Policy")(3, "x")
    edit_ranks(lone, lambda pt: pt.value["args"].state.update(policy=odd, note="keep", seed=1234))
    good(
        "reshard",
        lone,
        tmp_path / "d",
        "--target-tp",
        1,
        "--target-pp",
        4,
        "--target-format",
        "torch_dist",
    )
    args = Pt(tmp_path / "d" / "release" / "common.pt").value["args"].state
    assert (
        args["note"],
        args["seed"],
        args["tensor_model_parallel_size"],
        args["pipeline_model_parallel_size"],
    ) == ("keep", 1234, 1, 4)
    kept = args["policy"]
    assert (type(kept).module, type(kept).name, kept.args) == (
        "somebody.plugin",
        "Policy",
        (3, "x"),
    )
    assert mckpt("diff", src, tmp_path / "d").code == 0
