"""The pages for readers are true: their commands and Python run, and the files and the output that
they show exist.

All blocks of a page run in their order in one folder, which holds links to the files of the
repository. Comments above a block control it:

    <!-- not run: reason -->      a `sh` or `python` block that does not run; all others do
    <!-- needs megatron-core -->  the block and all behind it run in the judges' tier only
    <!-- exit 4 -->               the exit status of a `sh` block that does not end with 0
    <!-- file NAME -->            the text of that file, written before the next block runs
    <!-- from PATH -->            each line of the block stands in that file of the repository
    <!-- printed -->              the block before printed each line; `...` stands for any lines
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mckpt.geometry.packing import PACKINGS
from mckpt.mapping import reading, rule
from mckpt.mapping.nodes import FOLDER
from tests import matrix
from tests.helpers import made_models
from tests.helpers.tiny import CASES
from tests.judge.test_family_models import ENCODERS, UNLOADABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
BLOCK = re.compile(r"^((?:<!-- .*? -->\n)*)```(\w*)\n(.*?)^```$", re.M | re.S)
COMMENT = re.compile(r"<!-- (\w+(?: run)?)(?::? (.*?))? -->")
# tests must not use the network
INSTALL = re.compile(r"(?:\S*python3? -m venv \S+ && )?\S*pip install [^&\n]*(?:&& |\n)")
LIMIT_S = 300


class Block(NamedTuple):
    """A fenced block, the line at which its text begins, and the comments above it: first word ->
    the rest.
    """

    language: str
    text: str
    line: int
    comments: dict[str, str]


def blocks(page: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page):
        comments = dict(COMMENT.findall(match[1]))
        found.append(Block(match[2], match[3], page.count("\n", 0, match.start(3)) + 1, comments))
    return found


def runs(block: Block) -> bool:
    return block.language in ("sh", "python") and "not run" not in block.comments


def run_page(page: str, folder: Path, judged: bool) -> list[str]:
    """Runs the blocks of a page in `folder`, without `judged` only up to the first block that needs
    Megatron-Core. Returns the statements of the page that are wrong.
    """
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "demo":
            (folder / path.name).symlink_to(path)
    programs = folder / ".programs"
    programs.mkdir()
    for name, arguments in (("mckpt", "-m mckpt"), ("python", ""), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    wrong: list[str] = []
    printed = ""
    for block in blocks(page):
        if "file" in block.comments:
            (folder / block.comments["file"]).write_text(block.text)
        elif "from" in block.comments:
            there = {
                bare(line) for line in (ROOT / block.comments["from"]).read_text().splitlines()
            }
            wrong += [
                f"line {block.line}: {block.comments['from']} has no line {line!r}"
                for line in lines(block.text)
                if line not in there
            ]
        elif "printed" in block.comments:
            wrong += [
                f"line {block.line}: {line!r} is not in\n{printed}"
                for line in lines(block.text)
                if line not in printed
            ]
        elif runs(block):
            if "needs" in block.comments and not judged:
                break
            text = INSTALL.sub("", block.text)
            program = (
                ["bash", "-e", "-c", text]
                if block.language == "sh"
                else [sys.executable, "-c", text]
            )
            done = subprocess.run(
                program, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S
            )
            printed = done.stdout + done.stderr
            if done.returncode != int(block.comments.get("exit", 0)):
                wrong.append(
                    f"line {block.line}: exit status {done.returncode}\n{block.text}\n{printed}"
                )
                break
    return wrong


def bare(line: str) -> str:
    """Returns the line without its YAML comment and without the spaces around it."""
    return line.split("  #")[0].strip()


def lines(text: str) -> list[str]:
    return [bare(line) for line in text.splitlines() if bare(line) not in ("", "...")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    assert not run_page(page.read_text(), tmp_path, judged=False)


JUDGED = [
    path for path in PAGES if any("needs" in block.comments for block in blocks(path.read_text()))
]


@pytest.mark.judge
@pytest.mark.parametrize("page", JUDGED, ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_with_megatron_core(page: Path, tmp_path: Path) -> None:
    assert not run_page(page.read_text(), tmp_path, judged=True)


def test_a_block_that_does_not_run_gives_the_reason() -> None:
    for page in PAGES:
        for block in blocks(page.read_text()):
            for name, rest in block.comments.items():
                assert name in (
                    "not run",
                    "needs",
                    "exit",
                    "file",
                    "from",
                    "printed",
                    "tests",
                    "table",
                    "end",
                ), f"{page.name}:{block.line}: {name}"
                assert rest or name in (
                    "printed",
                    "tests",
                    "table",
                    "end",
                ), f"{page.name}:{block.line}: <!-- {name} --> says no more"


def test_the_page_on_new_models_has_every_word_of_the_mapping_language() -> None:
    page = (ROOT / "docs" / "new-model.md").read_text()
    rows = set(re.findall(r"^\| `([\w-]+)` \|", page, re.M))
    words = {*reading._TOP, *rule._RULE, *reading._DIM, *PACKINGS, "is", "instead", "loads"}
    assert not words - rows, f"docs/new-model.md has no row for {', '.join(sorted(words - rows))}"


def test_the_examples_on_the_page_on_new_models_stand_in_mapping_files() -> None:
    page = (ROOT / "docs" / "new-model.md").read_text()
    files = [path.read_text() for path in FOLDER.rglob("*.yaml")] + [
        b.text for b in blocks(page) if "file" in b.comments
    ]
    there = " ".join(" ".join(files).split())
    language = page[
        page.index("## The mapping language") : page.index("## What the language cannot say")
    ]
    rows = re.findall(r"^\| `[\w-]+` \| .* \| `([^`]+)` \|$", language, re.M)
    assert len(rows) > 40
    assert not [example for example in rows if " ".join(example.split()) not in there]
    assert not [example for example in rows if example.count("{") != example.count("}")]


def test_the_page_of_judges_has_the_largest_difference_of_each_judge_and_version() -> None:
    def row(
        judge: str, version: str, sizes: str, difference: float, dialect: str = "gpt"
    ) -> dict[str, Any]:
        where = {"case": "llama", "dialect": dialect, "format": "torch", "sizes": sizes}
        found = {"judge": judge, "megatron_core": version}
        return {**where, **found, "difference": difference, "largest": 2.0}

    text = matrix.page(
        matrix.worst_of(
            [
                row("forward", "0.19.2", "tp 2", 1e-6),
                row("forward", "0.19.2", "pp 2", 5e-6),
                row("forward", "0.9.0", "tp 2", 3e-6),
                row("stock trainer", "0.19.2", "tp 4", 2e-6),
                row("stock trainer", "0.19.2", "pp 2, layout Et|tL", 4e-6, "hybrid"),
            ]
        )
    )
    heads = "stock trainer, 0.19.2 | forward, 0.9.0 | forward, 0.19.2"
    assert f"| model | dialect | format | {heads} |" in text
    assert "| llama | gpt | `torch` | 1.0e-06 | 1.5e-06 | 2.5e-06 |" in text
    assert "| llama | hybrid | `torch` | 2.0e-06 |  |  |" in text
    assert "| forward | gpt | `torch` | tp 2; pp 2 | llama |" in text
    assert "| stock trainer | hybrid | `torch` | pp 2, layout Et\\|tL | llama |" in text


def test_the_tables_are_those_of_the_last_judged_run_and_of_the_families() -> None:
    """`python -m tests.matrix` writes them again after a family's text has changed."""
    results = matrix.read()
    assert (ROOT / "docs" / "judges.md").read_text() == matrix.page(results)
    models = matrix.MODELS.read_text()
    assert models == matrix.with_families(models, results)


def test_every_link_and_every_page_that_a_text_names_exists() -> None:
    texts = [
        *PAGES,
        ROOT / "CHANGELOG.md",
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
    texts += [
        path for part in ("mckpt", "mappings", "tests") for path in ROOT.glob(f"{part}/**/*.py")
    ]
    wrong = []
    for path in texts:
        text = path.read_text()
        named = {ROOT / name for name in re.findall(r"\bdocs/[\w-]+\.(?:md|json)\b", text)}
        if path.suffix == ".md":
            links = re.findall(r"\]\((?!\w+:)([^)#]*)", text)
            named |= {path.parent / link for link in links if link}
        wrong += [f"{path.relative_to(ROOT)} names {one}" for one in named if not one.exists()]
    assert not wrong, "\n".join(wrong)


def test_every_anchor_of_a_link_is_a_heading() -> None:
    for path in PAGES:
        for link, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#([^)]+)\)", path.read_text()):
            page = path.parent / link if link else path
            heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{path.name}: {link}#{anchor}"


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


@pytest.mark.skipif("JUDGED" in os.environ, reason="this run makes the results for the tables")
def test_every_model_has_been_judged_in_every_dialect_and_format() -> None:
    """A new model is not in the tables until `.ci/run` has judged it."""
    judged = {(r["case"], r["dialect"], r["format"]) for r in matrix.read()}
    assert {(c, "gpt", form) for c in CASES for form in ("torch", "torch_dist")} <= judged
    cases = {
        (case, dialect)
        for case in made_models.CASES
        for dialect in ([ENCODERS[case]] if case in ENCODERS else ("gpt", "hybrid"))
    }
    assert cases <= {key[:2] for key in judged} | UNLOADABLE
    assert {(case, "t5") for case in made_models.ENCODER_DECODERS} <= {key[:2] for key in judged}
    by_bridge = {r["case"] for r in matrix.read() if r["judge"] == "Megatron-Bridge's forward"}
    assert by_bridge >= {*made_models.BRIDGE_MODELS}
    of_swift = made_models.SWIFT_MODELS
    assert of_swift.items() <= {key[:2] for key in judged}
    others = {*made_models.BRIDGE_MODELS, *made_models.BRIDGE_IMAGES, *of_swift}
    others |= made_models.WHOLE["swift"].keys()
    newer = made_models.SINCE  # than the transformers of this environment
    known = {*CASES, *made_models.CASES, *newer, *made_models.ENCODER_DECODERS, *others}
    assert not {key[0] for key in judged} - known
