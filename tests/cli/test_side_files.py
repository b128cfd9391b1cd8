"""The files that mckpt copies beside weights: which ones, from where, and whether undamaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mckpt.formats.megatron.save_directory import TRACKER
from mckpt.storage.files import LFS_POINTER
from tests.helpers.commands import edit_json, good, mckpt, refused, run, tree

STRANGERS = ("notes.txt", "id_rsa", "train.log", "runs/events", "sub/tokenizer.json")


@pytest.fixture
def model(src: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's directory."""
    return Path(shutil.copytree(src, tmp_path / "model"))


def test_only_files_of_a_model_directory_are_copied(model: Path, tmp_path: Path) -> None:
    """Links are copied if they stay in the directory, or lead into the Hub's cache."""
    (tmp_path / "passwd").write_text("secret")
    blobs = tmp_path / "models--org--name/blobs"
    blobs.mkdir(parents=True)
    (blobs / "1234").write_text("{{ messages }}")
    for name in STRANGERS:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("mine")
    (model / "tokenizer.model").symlink_to(tmp_path / "passwd")
    (model / "additional_chat_templates").symlink_to(blobs)
    (model / "vocab.txt").symlink_to("tokenizer.json")
    (model / "chat_template.jinja").symlink_to(blobs / "1234")
    (model / "License.txt").write_text("ours")
    for name in ("model.gguf", ".env"):  # left out in silence
        (model / name).write_text("x")
    said = good("hf-to-megatron", model, tmp_path / "ckpt").err
    kept = {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("special_tokens_map.json", "vocab.txt", "chat_template.jinja", "License.txt"),
    }
    assert tree(tmp_path / "ckpt/hf").keys() == kept
    assert (tmp_path / "ckpt/hf/chat_template.jinja").read_text() == "{{ messages }}"
    assert "links that leave the directory" in said
    assert ": additional_chat_templates, id_rsa, notes.txt and 4 more" in said, said
    args = ("plan", tmp_path / "ckpt", tmp_path / "out", "--tokenizer", model)
    assert "id_rsa, notes.txt and 4 more" in good(*args).out
    before = good(*args, "--json").json["plan"]
    (model / "other.log").write_text("")
    assert good(*args, "--json").json["plan"] == before  # a stranger does not change the output


def test_the_images_of_a_model_card_are_copied(model: Path, tmp_path: Path) -> None:
    """Those at the top, and those in a directory whose names a card contains."""
    card = "![](figures/loss%20curve.png) <img src='./assets/Logo.SVG'> [old](a/b/c.png)"
    (model / "README.md").write_text(card)
    shown = ("banner.webp", "figures/loss curve.png", "assets/Logo.SVG")
    others = ("figures/step_1.png", "a/b/c.png", "figures/weights.bin", "figures/notes.txt")
    for name in (*shown, *others):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    said = good("hf-to-megatron", model, tmp_path / "ckpt").err
    assert "left out" in said and "a/b/c.png, figures/notes.txt, figures/step_1.png" in said
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out")
    good("check", tmp_path / "out")
    for folder in (tmp_path / "ckpt/hf", tmp_path / "out"):
        there = tree(folder)
        assert all((folder / name).read_text() == name for name in shown)
        assert not there.keys() & set(others)
    (tmp_path / "out/assets/Logo.SVG").write_text("other")
    assert "assets/Logo.SVG: has 5 bytes" in mckpt("check", tmp_path / "out").out


def test_the_tokenizer_that_a_training_saved_is_exported(model: Path, tmp_path: Path) -> None:
    """Megatron-LM copies the vocabulary of TikTokenizer, a list, to the same name."""
    (model / "added_tokens.json").write_text("{}")  # of the base, and not of the training
    good("hf-to-megatron", model, tmp_path / "ckpt")
    saved = tmp_path / "ckpt/release/tokenizer"
    saved.mkdir()
    (saved / "tokenizer.json").write_text('{"version": "1.0"}')
    good("reshard", tmp_path / "ckpt", tmp_path / "more", "--target-tp", 2)
    for number, source in enumerate((tmp_path / "ckpt", tmp_path / "more")):
        out = tmp_path / f"hf{number}"
        assert "the tokenizer is that of the training" in good("megatron-to-hf", source, out).err
        assert tree(out).keys() == {
            *("config.json", "generation_config.json", "mckpt.json", "model.safetensors"),
            "tokenizer.json",
        }
        assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    given = ("megatron-to-hf", tmp_path / "ckpt", tmp_path / "given", "--tokenizer", model)
    good(*given)
    assert (tmp_path / "given/tokenizer.json").read_bytes() == (
        model / "tokenizer.json"
    ).read_bytes()
    (saved / "tokenizer.json").write_text('[{"rank": 0}]')
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "list")
    assert (tmp_path / "list/tokenizer.json").read_bytes() == (
        model / "tokenizer.json"
    ).read_bytes()


def test_a_private_file_stays_private(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (model / name).chmod(0o600)
    (model / "tokenizer_config.json").chmod(0o444)
    good("hf-to-megatron", model, tmp_path / "ckpt")
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out")
    for folder in (tmp_path / "ckpt/hf", tmp_path / "out"):
        modes = {name: (folder / name).stat().st_mode & 0o777 for name in os.listdir(folder)}
        assert modes["tokenizer.json"] == modes["config.json"] == 0o600, folder
        assert modes["tokenizer_config.json"] == 0o644, folder


def test_an_export_says_what_it_lacks(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.move(model / name, tmp_path / name)
    good("hf-to-megatron", model, tmp_path / "ckpt")
    line = ("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out")
    said = good(*line).err
    assert "the export has no tokenizer and no generation_config.json: --tokenizer HF_DIR" in said
    said = good(*line, "--tokenizer", tmp_path, "--overwrite").err
    assert "the export has no" not in said and (tmp_path / "out/tokenizer.json").exists()


# ---- the manifest records them


def flip(path: Path) -> None:
    """Changes one letter of a file, which stays valid JSON if it is."""
    text = path.read_text()
    at = text.index("e")
    path.write_text(f"{text[:at]}E{text[at + 1 :]}")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "config.json"])
def test_a_changed_copy_is_found_and_refused(src: Path, tmp_path: Path, name: str) -> None:
    """Beside a Megatron checkpoint and in an export; also if it is gone."""
    ckpt, out = tmp_path / "ckpt", tmp_path / "out"
    good("hf-to-megatron", src, ckpt)
    good("megatron-to-hf", ckpt, out)
    assert ": sound; " in good("check", ckpt).out
    for folder, args in (
        (ckpt / "hf", ("megatron-to-hf", ckpt, tmp_path / "new")),
        (ckpt / "hf", ("reshard", ckpt, tmp_path / "new")),
        (out, ("hf-to-megatron", out, tmp_path / "new")),
    ):
        before = (folder / name).read_bytes()
        flip(folder / name)
        said = mckpt("check", args[1])
        assert said.code == 3 and f"{folder / name}: has the checksum crc32:" in said.out
        words = ("is not as mckpt wrote it", name, "checksum crc32:", "remove its name from mckpt")
        refused(3, *words, args=args, untouched=tmp_path)
        (folder / name).write_bytes(before)
    (ckpt / "hf/tokenizer.json").unlink()
    assert mckpt("check", ckpt).code == 3
    refused(3, "tokenizer.json: is missing", args=("megatron-to-hf", ckpt, tmp_path / "new"))
    edit_json(ckpt / "release/mckpt.json", lambda found: found["hf"].pop("tokenizer.json"))
    assert "has no tokenizer" in good("megatron-to-hf", ckpt, tmp_path / "new").err


def test_a_tokenizer_that_is_given_takes_the_place_of_a_changed_one(
    src: Path, tmp_path: Path
) -> None:
    good("hf-to-megatron", src, tmp_path / "ckpt")
    flip(tmp_path / "ckpt/hf/tokenizer.json")
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out", "--tokenizer", src)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()


def test_check_finds_pointers_and_files_of_no_index(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert ": sound; " in good("check", model).out
    shutil.copy(model / "model.safetensors", model / "old.safetensors")
    said = mckpt("check", model)
    assert (
        said.code == 1 and f"suspicious: {model}/old.safetensors: belongs to no index" in said.out
    )
    good("hf-to-megatron", model, tmp_path / "ckpt")
    written = next((tmp_path / "ckpt/release").glob("*.distcp"))
    shutil.copy(written, written.with_name("__9_9.distcp"))
    said = mckpt("check", tmp_path / "ckpt")
    assert said.code == 1 and "__9_9.distcp: belongs to no index" in said.out
    shutil.rmtree(tmp_path / "ckpt/hf")
    assert "not checked: hf: is not there" in mckpt("check", tmp_path / "ckpt").out
    (model / "tokenizer.json").write_bytes(LFS_POINTER)
    said = mckpt("check", model)
    assert said.code == 3 and "tokenizer.json: is a pointer of git-lfs" in said.out


# ---- adapters


def test_an_adapter_beside_weights_is_left_out(model: Path, tmp_path: Path) -> None:
    """Transformers would apply it, so the weights alone are another model."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(model / "config.json", model / name)
    good("hf-to-megatron", model, tmp_path / "ckpt", "--no-adapter")
    good("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out")
    assert not [name for name in tree(tmp_path) if name.startswith(("ckpt/hf/adap", "out/adap"))]
    line = ("megatron-to-hf", tmp_path / "ckpt", tmp_path / "new", "--no-adapter")
    refused(2, "has no adapter; leave it out", args=line, untouched=tmp_path)


# ---- of Megatron's side


def test_hf_inside_an_iteration_is_used(src: Path, tmp_path: Path) -> None:
    """Megatron-Bridge and NeMo-RL write it there."""
    ckpt = tmp_path / "ckpt"
    good("hf-to-megatron", src, ckpt, "--iteration", 5)
    shutil.move(ckpt / "hf", ckpt / "iter_0000005/hf")
    (ckpt / "iter_0000005/mckpt.json").unlink()
    for source, out in ((ckpt, "a"), (ckpt / "iter_0000005", "b")):
        good("megatron-to-hf", source, tmp_path / out)
        for name in ("config.json", "tokenizer.json"):
            assert (tmp_path / out / name).read_bytes() == (src / name).read_bytes()
    shutil.move(ckpt / "iter_0000005", tmp_path / "lone")
    good("reshard", tmp_path / "lone", tmp_path / "c", "--target-tp", 2)
    assert tree(tmp_path / "c/hf") == tree(tmp_path / "lone/hf")


def test_training_saves_beside_the_files_of_its_source(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mckpt.launching.run_alone", lambda *job: None)
    monkeypatch.setattr("mckpt.launching.require", lambda *names: None)
    ckpt, save = tmp_path / "ckpt", tmp_path / "save"
    good("hf-to-megatron", src, ckpt)
    shutil.copy(src / "model.safetensors", ckpt / "hf/carried.safetensors")
    line = ("train", ckpt, "--steps", 1, "--device", "cpu", "--save")
    for folder in (save, save, ckpt):
        good(*line, folder)
    assert tree(save / "hf") == tree(ckpt / "hf") and os.listdir(save) == ["hf"]
    flip(save / "hf/tokenizer.json")
    refused(6, "tokenizer.json: is not the source's", args=(*line, save), untouched=tmp_path)


def test_train_prints_its_device_its_sizes_and_where_it_saved(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(module: str, job: dict[str, Any], device: str, num_ranks: int) -> None:
        if "save" in job and job["steps"] > 5:
            (Path(job["save"]) / TRACKER).write_text(str(job["steps"]))

    monkeypatch.setattr("mckpt.launching.run_alone", train)
    monkeypatch.setattr("mckpt.launching.require", lambda *names: None)
    ckpt, even, save = tmp_path / "ckpt", tmp_path / "even", tmp_path / "save"
    good("hf-to-megatron", src, ckpt, "--iteration", 5)
    good("hf-to-megatron", src, even, "--make-vocab-size-divisible-by", 1)
    line = ("train", ckpt, "--device", "cpu", "--steps")
    said = good(*line, 6, "--resume", "--tp", 2, "--ranks", 4, "--save", save).err.splitlines()
    assert said[0] == f"trains {ckpt}/iter_0000005: tp 2, pp 1, dp 2; 4 ranks on cpu"
    assert "rows of the vocabulary are padding" in said[1] and "--keep-padding" in said[1]
    assert said[2:] == [f"saved {save}/iter_0000006"]
    said = good(*line, 5, "--resume", "--save", tmp_path / "new").err.splitlines()
    assert "nothing is left to train: the checkpoint has done 5 steps" in said[1]
    assert not [text for text in said if "saved" in text]
    said = good("train", even, "--device", "cpu", "--steps", 1, "--json")
    events = [json.loads(text) for text in said.err.splitlines()]
    assert [event["event"] for event in events] == ["note"] * 2
    assert events[1]["message"] == "nothing is saved; --save DIR saves the result"


def test_the_launch_line_names_the_tokenizer_of_hf(src: Path, tmp_path: Path) -> None:
    good("hf-to-megatron", src, tmp_path / "ckpt", "--tp", 2)
    script = "cd release && . ./megatron_args.sh && printf '%s\\n' \"${MEGATRON_ARGS[@]}\""
    words = run(["bash", "-euc", script], cwd=tmp_path / "ckpt").stdout.split("\n")
    at = words.index("--tokenizer-type")
    assert words[at + 1 : at + 4] == ["HuggingFaceTokenizer", "--tokenizer-model", "./../hf"]
    flags = json.loads((tmp_path / "ckpt/release/megatron_args.json").read_text())
    assert flags["--tokenizer-model"] == "../hf"
    shutil.rmtree(tmp_path / "ckpt/hf")
    good("reshard", tmp_path / "ckpt", tmp_path / "bare", "--target-tp", 1)
    flags = json.loads((tmp_path / "bare/release/megatron_args.json").read_text())
    assert flags["--tokenizer-type"] == "NullTokenizer" and "--tokenizer-model" not in flags
