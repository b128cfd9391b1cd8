"""Rows about verdicts, and Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from tests.gpu.verification import sizes
from tests.gpu.verification.cases import Json, last_line
from tests.gpu.verification.steps import TE

HEAD = ["sizes", "layers", "format", "verdict", "max", "noise", "tolerance", "margin"]
HEAD += ["rms", "rms (hf)", "margin", "s"]


def verdict_rows(record: Json, label: str) -> Iterator[list[str]]:
    """Returns a row for each format of a record, under HEAD."""
    seconds = f"{record['seconds']:.0f}"
    for form, v in record["result"]["verdicts"].items():
        verdict = v["verdict"] if v["verdict"] == "pass" else f"**{v['verdict']}**"
        if "logits" not in v:
            yield [label, "", form, verdict, *[""] * 7, seconds]
            continue
        exact = float32(v, label)
        low = list(v["logits"].values())[-1] if v["dtype"] != "float32" else {}
        yield [
            label,
            "TE" if v["impl"] == TE else v["impl"],
            form,
            verdict,
            *(number(exact.get(key)) for key in ("max_abs", "noise", "tolerance", "below")),
            *(number(low.get(key)) for key in ("rms", "noise", "below")),
            seconds,
        ]


def float32(verdict: Json, size: str) -> Json:
    """Returns the figures of the fp32 logits. There are none for cp, which runs only in the
    checkpoint's dtype.
    """
    found: Json = verdict.get("logits", {}).get("float32", {})
    return found if size != sizes.name(sizes.CP) else {}


def not_passed(records: Iterable[Json]) -> str:
    """Returns a list of the verdicts that did not pass, each reason once. It is empty if all
    passed.
    """
    why: dict[str, list[str]] = {}
    for record in records:
        for form, v in record["result"]["verdicts"].items():
            if v["verdict"] != "pass":
                text = last_line("; ".join(v["reasons"]))
                why.setdefault(text, []).append(f"{record['case']} ({form}, {v['verdict']})")
    return bullets(f"{', '.join(where)}: {text}" for text, where in why.items())


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def paragraph(text: str, first: str = "", rest: str = "") -> str:
    """Returns the text wrapped at 100 columns."""
    return textwrap.fill(
        " ".join(text.split()),
        100,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bullets(items: Iterable[str]) -> str:
    return "\n".join(paragraph(item, "- ", "  ") for item in items)


def number(value: Any, digits: int = 3) -> str:
    """Returns three digits. Infinite numbers come as text."""
    return "" if value is None else f"{float(value):.{digits}g}"
