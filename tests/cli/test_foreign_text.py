"""Names, values and paths of others in what mckpt prints: none can forge a line of mckpt, or give
an order to the terminal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mckpt.containers import safe_pickle
from mckpt.errors import SourceError, printable
from mckpt.verification import report
from mckpt.verification.verdict import Verdict
from tests.helpers.commands import (
    PT,
    TRACKER,
    Pt,
    Said,
    edit_json,
    good,
    hf,
    mckpt,
    shard,
    write_shard,
)

FORGED = "mckpt: all is sound"
HOSTILE = f"\x1b]0;title\x07\x1b[2J<script>alert(1)</script>\u202e\u2028\x85\r\n{FORGED}\r"
NAME = HOSTILE.replace("/", "")  # of a file
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(work: Path) -> Path:
    """Returns a folder with a Hugging Face directory and a Megatron checkpoint."""
    hf(work / "foreign" / "hf")
    good("hf-to-megatron", work / "foreign" / "hf", work / "foreign" / "megatron")
    good("hf-to-megatron", work / "foreign" / "hf", work / "foreign" / "torch", "--format", "torch")
    return work / "foreign"


def is_clean(said: Said) -> bool:
    """Returns whether every character is shown as itself, and no line is forged."""
    lines = f"{said.out}\n{said.err}".split("\n")
    return all(line.isprintable() and not line.startswith(FORGED) for line in lines)


def _tensor(folder: Path) -> None:
    path = folder / "hf" / "model.safetensors"
    header, data = shard(path)
    write_shard(path, {**header, HOSTILE: {**next(iter(header.values())), "shape": [0]}}, data)


def _named_tensor(folder: Path) -> None:
    path = folder / "hf" / "model.safetensors"
    header, data = shard(path)
    at = {"dtype": "BF16", "shape": [0], "data_offsets": [len(data), len(data)]}
    write_shard(path, {**header, HOSTILE: at}, data)


def _dtype(folder: Path) -> None:
    path = folder / "hf" / "model.safetensors"
    header, data = shard(path)
    header[next(iter(header))]["dtype"] = HOSTILE
    write_shard(path, header, data)


def _config(key: str, value: object) -> Damage:
    return lambda folder: edit_json(folder / "hf" / "config.json", lambda c: c.update({key: value}))


def _key_of_megatron(folder: Path) -> None:
    for path in (folder / "torch").rglob(PT):
        file = Pt(path)
        file.value["model"][HOSTILE] = file.put("bfloat16", (0,), b"")
        file.save()


def _arg(folder: Path) -> None:
    for path in (folder / TORCH).rglob(PT):
        file = Pt(path)
        args = {
            **safe_pickle.fields(file.value["args"]),
            HOSTILE: HOSTILE,
            "normalization": HOSTILE,
        }
        file.value["args"] = safe_pickle.namespace(**args)
        file.save()


def _manifest(folder: Path) -> None:
    for path in folder.rglob("mckpt.json"):
        edit_json(path, lambda found: found.update(inexact={HOSTILE: HOSTILE}, notes=[HOSTILE]))
        edit_json(path, lambda found: found["files"].update({HOSTILE: {"bytes": 1}}))


HF, MEGATRON, TORCH = "hf", "megatron", "torch"
KEPT = "megatron/hf/mckpt-mapping.yaml"
# what is damaged -> the checkpoint that is read, and how it is damaged
DAMAGES: dict[str, tuple[str, Damage]] = {
    "an entry of a header": (HF, _tensor),
    "a tensor": (HF, _named_tensor),
    "a dtype": (HF, _dtype),
    "a key of config.json": (HF, _config(HOSTILE, HOSTILE)),
    "a value of config.json": (HF, _config("hidden_act", HOSTILE)),
    "an architecture": (HF, _config("architectures", [HOSTILE])),
    "a quantisation": (HF, _config("quantization_config", {"quant_method": HOSTILE})),
    "a side file": (HF, lambda folder: (folder / HF / f"{NAME}.txt").touch()),
    "a key of Megatron": (TORCH, _key_of_megatron),
    "an arg": (TORCH, _arg),
    "a tracker": (TORCH, lambda folder: (folder / TORCH / TRACKER).write_text(HOSTILE)),
    "a manifest": (MEGATRON, _manifest),
    "a key of a mapping": (
        MEGATRON,
        lambda folder: (folder / KEPT).write_text(json.dumps({"extends": "qwen3", HOSTILE: 1})),
    ),
    "a note of a mapping": (
        MEGATRON,
        lambda folder: (folder / KEPT).write_text(
            json.dumps({"extends": "qwen3", "notes": [HOSTILE]})
        ),
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_no_foreign_text_reaches_the_terminal(what: str, made: Path, tmp_path: Path) -> None:
    kind, damage = DAMAGES[what]
    for name in (HF, kind):
        shutil.copytree(made / name, tmp_path / name, dirs_exist_ok=True)
    damage(tmp_path)
    source = tmp_path / kind
    of_kind: tuple[tuple[object, ...], ...] = (
        (
            ("hf-to-megatron", source, tmp_path / "out"),
            ("diff", made / HF, source),
            ("mappings", "new", source),
            ("mappings", "check", "mappings/hf/qwen3.yaml", source),
        )
        if kind == HF
        else (("megatron-to-hf", source, tmp_path / "out"),)
    )
    for words in (
        ("inspect", source),
        ("check", source),
        ("plan", source, tmp_path / "out"),
        *of_kind,
    ):
        said = mckpt(*words)
        assert is_clean(said), f"{words[0]}: {said.out}{said.err}"
        assert said.code != 70


def test_no_argument_reaches_the_terminal(made: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        json.dumps({"steps": [{"command": "inspect", "path": HOSTILE, HOSTILE: HOSTILE}]})
    )
    (tmp_path / "dry.yaml").write_text(
        json.dumps({"steps": [{"command": "inspect", "path": HOSTILE}]})
    )
    for words in (
        ("plan", made / "hf", tmp_path / NAME),
        ("hf-to-megatron", made / "hf", tmp_path / NAME),
        ("inspect", tmp_path / NAME),
        ("check", tmp_path / NAME),
        ("inspect", HOSTILE),
        (HOSTILE,),
        ("inspect", made / "hf", HOSTILE),
        ("inspect", made / "hf", f"--{HOSTILE}"),
        ("inspect", made / "hf", "--iteration", HOSTILE),
        ("inspect", made / "hf", "--set", HOSTILE),
        ("inspect", made / "hf", "--family", HOSTILE),
        ("run", tmp_path / "job.yaml"),
        ("run", tmp_path / "dry.yaml", "--dry-run"),
        ("run", tmp_path / "dry.yaml"),
    ):
        said = mckpt(*words)
        assert is_clean(said), f"{words[0]}: {said.out}{said.err}"
        assert said.code != 70


def test_page_and_card_escape_foreign_text(made: Path, tmp_path: Path) -> None:
    facts = {"level": "bytes", "hf": HOSTILE, "megatron": HOSTILE, "dtype": HOSTILE}
    verdict = Verdict("fail", [HOSTILE], facts)
    page = report.page(verdict)
    assert "<script>" not in page
    assert all(line.isprintable() for line in page.split("\n"))
    report.write_card(verdict, made / "hf", made / "megatron", None, tmp_path / "card.yaml")
    assert all(line.isprintable() for line in (tmp_path / "card.yaml").read_text().split("\n"))


def test_an_error_within_a_text_is_one_line() -> None:
    inner = SourceError.of("x: is damaged:", ["a", HOSTILE], "Copy it again.")
    assert f"{inner}" == f"x: is damaged: a; {printable(HOSTILE)}; Copy it again."
    outer = SourceError(f"y: {inner}")
    assert str(outer) == f"y: {inner}"
    assert str(inner) == f"x: is damaged:\n  - a\n  - {printable(HOSTILE)}\nCopy it again."
    assert printable("a\n\x1b\u202e\ud800 b") == "a\\n\\x1b\\u202e\\ud800 b"
