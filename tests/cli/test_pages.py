"""The pages of `inspect --html` and `plan --html`: every tensor, no outside text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import mckpt as api
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers import safe_pickle
from mckpt.pages import picture
from tests.cli.test_foreign_text import HOSTILE
from tests.helpers.commands import PT, Pt, good, shard
from tests.helpers.tiny import TinyModel, unpack


class Page:
    """A page as its script reads it."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text)
        assert found
        self.data = json.loads(found[1])
        self.sides = [list(tensors(side)) for side in self.data["sides"]]


def numbers(runs: list[int]) -> list[int]:
    out, value = [], 0
    for step, count in zip(runs[::2], runs[1::2], strict=True):
        for _ in range(count):
            value += step
            out.append(value)
    return out


def tensors(side: dict[str, Any]) -> Any:
    for group in side["groups"]:
        digits = [numbers(column) for column in group["digits"]]
        file = numbers(group["file"])
        assert {len(column) for column in (*digits, file)} == {group["count"]}
        for i in range(group["count"]):
            name = group["parts"][0] + "".join(
                f"{column[i]}{part}"
                for column, part in zip(digits, group["parts"][1:], strict=True)
            )
            where = side["files"][file[i]] if file[i] >= 0 else None
            yield name, where, group["dtype"], group["shape"], group["bytes"], group["kind"]


def made_of(page: Page) -> dict[tuple[str, str], list[str]]:
    """Returns the names of the tensors that each (tensor, file) of the target is made of."""
    out, number = {}, 0
    for group, origin in zip(page.data["sides"][0]["groups"], page.data["origins"], strict=True):
        count, ids = group["count"], numbers(origin["ids"])
        if isinstance(origin["each"], int):
            rows = [ids[i::count] for i in range(count)]
        else:
            ends = [0]
            for each in numbers(origin["each"]):
                ends.append(ends[-1] + each)
            rows = [ids[begin:end] for begin, end in pairwise(ends)]
        for row in rows:
            name, file, *_ = page.sides[0][number]
            out[name, file] = [page.sides[1][i][0] for i in row]
            number += 1
    return out


def stored(directory: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Returns (tensor, file) -> (dtype, shape) of the files of a `torch` checkpoint."""
    out = {}
    for path in directory.glob(f"mp_rank_*/{PT}"):
        for key, record in Pt(path).value["model"].items():
            if (view := safe_pickle.as_tensor(record)) is not None:
                out[key, str(path.relative_to(directory))] = (view.dtype, list(view.shape))
    return out


@pytest.fixture(scope="module")
def moe(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3-moe")


@pytest.fixture(scope="module")
def planned(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a checkpoint of several ranks, `dst`, and the page of its plan."""
    out = tmp_path_factory.mktemp("planned")
    sizes = ("--tp", 2, "--pp", 2, "--ep", 2)
    good("plan", moe, out / "dst", "--to", "torch", *sizes, "--html", out / "plan.html")
    good("hf-to-megatron", moe, out / "dst", "--format", "torch", *sizes)
    return out


def test_page_of_a_directory_has_every_tensor(moe: Path, tmp_path: Path) -> None:
    good("inspect", moe, "--html", tmp_path / "a.html")
    (found,) = Page(tmp_path / "a.html").sides
    header, _ = shard(moe / "model.safetensors")
    header.pop("__metadata__", None)
    assert Counter(name for name, *_ in found) == Counter(header.keys())
    for name, file, _, shape, nbytes, kind in found:
        begin, end = header[name]["data_offsets"]
        assert (file, shape, nbytes, kind) == (
            "model.safetensors",
            header[name]["shape"],
            end - begin,
            "weight",
        )


def test_page_of_a_plan_has_every_shard_and_its_origin(planned: Path) -> None:
    page = Page(planned / "plan.html")
    found = {(name, file): (dtype, shape) for name, file, dtype, shape, *_ in page.sides[0]}
    assert len(found) == len(page.sides[0])
    assert found == stored(planned / "dst" / "release")
    origins = made_of(page)
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert origins[qkv, f"mp_rank_01_001_001/{PT}"] == [
        f"model.layers.{len(api.open(planned / 'dst').names.stages()[0][0])}.self_attn.{x}.weight"
        for x in ("q_proj", "k_proj", "v_proj")
    ]
    experts = api.open(planned / "dst").dims["num_experts"] // 2
    fc2 = origins["decoder.layers.0.mlp.experts.linear_fc2.weight1", f"mp_rank_00_000_001/{PT}"]
    assert fc2 == [f"model.layers.0.mlp.experts.{experts + 1}.down_proj.weight"]


def test_page_of_an_export_has_the_shards_of_each_tensor(planned: Path, tmp_path: Path) -> None:
    good("plan", planned / "dst", tmp_path / "hf", "--to", "hf", "--html", tmp_path / "a.html")
    page = Page(tmp_path / "a.html")
    made = made_of(page)
    assert {name for name, _ in made} == {name for name, *_ in page.sides[0]}
    last = api.open(planned / "dst").dims["num_layers"] - 1
    name = f"model.layers.{last}.self_attn.q_proj.weight"
    local = last - len(api.open(planned / "dst").names.stages()[0][0])
    assert (
        made[name, "model.safetensors"]
        == [f"decoder.layers.{local}.self_attention.linear_qkv.weight"] * 2
    )


def test_parts_of_stacked_tensors_have_names_of_their_own(moe: Path, tmp_path: Path) -> None:
    good("plan", moe, tmp_path / "dst", "--html", tmp_path / "a.html")
    page = Page(tmp_path / "a.html")
    assert len({name for name, *_ in page.sides[0]}) == len(page.sides[0])
    qkv = "decoder.layers.self_attention.linear_qkv.weight[1]"
    ((_, origin),) = (one for one in made_of(page).items() if one[0][0] == qkv)
    assert origin == [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]


def test_keys_of_a_hybrid_model_have_numbers_of_their_own(moe: Path, tmp_path: Path) -> None:
    """Attention and mlp of one layer are two layers there."""
    sizes = ("--pp", 2, "--html", tmp_path / "a.html")
    good("plan", moe, tmp_path / "a", "--to", "torch", "--target-dialect", "hybrid", *sizes)
    more = ("--dialect", "hybrid", "--pp", 2)
    good("hf-to-megatron", moe, tmp_path / "a", "--format", "torch", *more)
    found = {
        (name, file): (dtype, shape)
        for name, file, dtype, shape, *_ in Page(tmp_path / "a.html").sides[0]
    }
    assert found == stored(tmp_path / "a" / "release")


def test_page_has_the_optimizer_state(tmp_path: Path) -> None:
    unpack("optimizer/fully_sharded_model_space", tmp_path)
    (root,) = {path.parent for path in tmp_path.rglob(".metadata")}
    good("inspect", root, "--html", tmp_path / "a.html")
    page = Page(tmp_path / "a.html")
    kinds = Counter(kind for *_, kind in page.sides[0])
    assert kinds["optimizer"] == 3 * kinds["weight"]


@pytest.mark.parametrize("name", ["plan.html", "inspect.html"])
def test_page_needs_nothing_from_outside(name: str, moe: Path, planned: Path) -> None:
    if name == "inspect.html":
        good("inspect", planned / "dst", "--html", planned / name)
    text = (planned / name).read_text()
    assert not re.search(r"https?:|//[a-z]|\bsrc=|<link|@import|url\(", text.replace("// ", ""))
    code = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(code) == 1
    digest = base64.b64encode(hashlib.sha256(code[0].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_foreign_names_are_escaped(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = api.open(moe)
    layout = source.layout
    layout.files[0] = HOSTILE
    layout.ignored[HOSTILE] = HOSTILE
    layout.stored[0] = replace(layout.stored[0], key=HOSTILE)
    monkeypatch.setattr(Checkpoint, "with_optimizer", lambda self: self)
    text = picture.of_checkpoint(source)
    assert text.count("<script") == text.count("</script>") == 2
    assert "alert(1)" in text
    assert all(line.isprintable() for line in text.split("\n"))
    read = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert json.dumps(read, ensure_ascii=False).isprintable()


def test_a_page_is_written_through_a_symbolic_link(moe: Path, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    link, target = tmp_path / "latest.html", tmp_path / "pages" / "a.html"
    link.symlink_to(target)
    for _ in range(2):  # the link leads to nothing, then to the first page
        good("inspect", moe, "--html", link)
        assert link.is_symlink() and len(Page(target).sides) == 1
        assert [p.name for p in target.parent.iterdir()] == ["a.html"]
