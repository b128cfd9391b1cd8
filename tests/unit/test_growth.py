"""A new format is one file, and so is a new dialect: nothing else of mckpt changes for them."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mckpt
from mckpt import formats, mapping
from mckpt.checkpoint.inspection import inspect
from mckpt.errors import MappingError
from mckpt.mapping import reading, schema
from mckpt.mapping.nodes import FOLDER
from tests.helpers import tiny
from tests.helpers.tiny import TinyModel

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"hf", *formats.FORMATS}


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_a_new_format_is_one_file(
    family: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format converts in all directions, is compared and inspected, and replaces another
    format.
    """
    listed = formats.Listed("tests.helpers.flat_format", megatron=True)
    monkeypatch.setitem(formats.FORMATS, "flat", listed)
    source = tiny_model(family)
    mckpt.convert(source, tmp_path / "flat", format="flat")
    assert mckpt.open(tmp_path / "flat").format == "flat"
    assert not mckpt.diff(source, tmp_path / "flat")
    assert inspect(mckpt.open(tmp_path / "flat"))["num_tensors"] >= 9
    parallel = mckpt.Parallel(tp=2, pp=2)
    mckpt.convert(tmp_path / "flat", tmp_path / "torch", format="torch", parallel=parallel)
    mckpt.convert(tmp_path / "torch", tmp_path / "again", format="flat")
    mckpt.convert(tmp_path / "again", tmp_path / "back", format="hf")
    for other in ("torch", "again", "back"):
        assert not mckpt.diff(source, tmp_path / other), other
    data = "release/flat.bin"
    assert (tmp_path / "flat" / data).read_bytes() == (tmp_path / "again" / data).read_bytes()
    assert mckpt.verify(source, tmp_path / "again", level="bytes").verdict == "pass"
    mckpt.plan(source, tmp_path / "flat", format="torch_dist", overwrite=True).run()
    assert mckpt.open(tmp_path / "flat").format == "torch_dist"


DIALECT = """
extends: [gpt, parts/norms]
tensors:
  embedding.word_embeddings.weight: null
  wte.weight:
    - {of: embed.weight, tp: vocab, stage: first}
"""
NORMS = """
tensors:
  decoder.final_layernorm.{weight,bias}: null
  norm_f.{weight,bias}: {of: "final_norm.{weight,bias}", stage: last, when: "{True,layernorm}"}
"""


def write_dialect(folder: Path) -> None:
    """Writes a dialect, and a part of it in a folder below."""
    (folder / "other.yaml").write_text(DIALECT)
    (folder / "parts").mkdir(exist_ok=True)
    (folder / "parts" / "norms.yaml").write_text(NORMS)


@pytest.fixture
def own_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a copy of the mapping files that a test may change."""
    folder = tmp_path / "mappings"
    shutil.copytree(FOLDER, folder)

    def forget() -> None:
        for cached in (reading.names, reading.load, reading._first_keys, schema):
            cached.cache_clear()

    monkeypatch.setattr(reading, "FOLDER", folder)
    forget()
    yield folder
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_new_dialect_is_one_file(
    form: str, tiny_model: TinyModel, tmp_path: Path, own_mappings: Path
) -> None:
    """The dialect is written on request, and recognised from the keys when it is read."""
    write_dialect(own_mappings / "megatron")
    source = tiny_model("llama")
    mckpt.convert(source, tmp_path / "other", format=form, dialect="other")
    mckpt.convert(source, tmp_path / "gpt", format=form)
    other, gpt = mckpt.open(tmp_path / "other"), mckpt.open(tmp_path / "gpt")
    assert (other.mapping.name, gpt.mapping.name) == ("other", "gpt")
    assert {"wte.weight", "norm_f.weight"} <= set(other.opened.keys())
    assert not mckpt.diff(other, gpt) and not mckpt.diff(source, other)
    mckpt.convert(tmp_path / "other", tmp_path / "again", format="torch_dist")
    assert mckpt.open(tmp_path / "again").mapping.name == "other", "a reshard keeps it"
    mckpt.convert(tmp_path / "again", tmp_path / "back", format="hf")
    assert not mckpt.diff(source, tmp_path / "back")
    assert mckpt.verify(source, tmp_path / "other", level="bytes").verdict == "pass"


def test_a_family_file_can_name_its_dialect(
    tiny_model: TinyModel, tmp_path: Path, own_mappings: Path
) -> None:
    write_dialect(own_mappings / "megatron")
    file = tmp_path / "own.yaml"
    file.write_text("extends: llama\ndialect: other\n")
    source = tiny_model("llama")
    mckpt.plan(mckpt.open(source, mapping=str(file)), tmp_path / "out").run()
    assert mckpt.open(tmp_path / "out").mapping.name == "other"


def test_a_dialect_must_declare_the_names_that_it_uses(own_mappings: Path) -> None:
    path = own_mappings / "megatron" / "other.yaml"
    path.write_text("extends: gpt\nalso:\n  new_arg: new_fact\n")
    with pytest.raises(MappingError, match=r"yaml:3: also: new_arg: 'new_fact' is not"):
        mapping.load("megatron", str(path))
    path.write_text("extends: gpt\ngiven:\n  new_fact: 7\nalso:\n  new_arg: new_fact\n")
    dims = mapping.load("hf", "llama").read(tiny.config("llama"))
    assert mapping.load("megatron", "other").write(dims)["new_arg"] == 7


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("extends:\n", r"other\.yaml:1: `extends` needs the name"),
        ("extends: [gpt, [norms]]\n", r"other\.yaml:1: `extends` needs the name"),
        (
            "extends: gpt\nderive:\n  wide: tp > 1\n",
            r":3: derive: wide: 'tp' is not .*given",
        ),
        (
            "extends: gpt\nby_args:\n  keys: hidden\n",
            r":3: by_args: keys: 'hidden' is not",
        ),
        (
            "extends: gpt\ngiven: {divisible_by: null}\n",
            "must declare divisible_by",
        ),
    ],
)
def test_a_bad_dialect_is_refused(text: str, why: str, own_mappings: Path) -> None:
    path = own_mappings / "megatron" / "other.yaml"
    path.write_text(text)
    with pytest.raises(MappingError, match=why):
        mapping.load("megatron", str(path))


def test_the_table_of_formats_agrees_with_their_modules() -> None:
    for name, listed in formats.FORMATS.items():
        found = formats.get(name)
        assert (found.name, found.megatron) == (name, listed.megatron)


def test_no_format_is_named_outside_of_its_file() -> None:
    """Code asks a format for its abilities. The only format that it knows by name is the default
    one.
    """
    wrong = []
    for path in sorted((ROOT / "mckpt").rglob("*.py")):
        inside = path.relative_to(ROOT / "mckpt").parts[0]
        if inside in ("formats", "containers"):  # a pickle names the module torch
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                for part in (node.left, *node.comparators):
                    if isinstance(part, ast.Constant) and part.value in NAMES:
                        wrong.append(f"{path.name}:{node.lineno}: compares with {part.value!r}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.args[1])}
                if names & {"Torch", "TorchDist", "HuggingFace"}:
                    wrong.append(f"{path.name}:{node.lineno}: asks for the type of a format")
    assert not wrong
