"""Pages of HTML and SVG, each one file that needs nothing else and sends nothing: its style and its
script are inside, and its policy lets no other script run.

`text` is the only place where text becomes `Markup`, and it escapes the text: a hostile path or
tensor name cannot become an element.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mckpt.errors import UsageError, printable

SHOWN = 16  # rows of a table or items of a list that are not folded


class Markup(str):
    """HTML that needs no escaping."""


NOTHING = Markup()


def text(value: Any) -> Markup:
    """Returns a value as escaped text. Its lines are those of a `MckptError`, or it is one line."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape("\n".join(map(printable, str(value).split("\n")))))


def many(parts: Iterable[Any]) -> Markup:
    return Markup("".join(map(text, parts)))


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """Returns one element; `class_` and `stroke_width` stand for class and stroke-width."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{shown}>{many(children)}</{name}>")


# ------------------------------------------------------------------------------- numbers in words


def say(value: Any) -> str:
    """Returns a number with four digits."""
    if isinstance(value, float):
        whole = 1e3 <= abs(value) < 1e9
        return f"{float(f'{value:.4g}'):,.0f}" if whole else f"{value:.4g}"
    return "-" if value is None else f"{value:,}"


def size(nbytes: float) -> str:
    """Returns a number of bytes with three digits and a decimal unit."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop(0)
    return f"{nbytes:.3g} {units[0]}" if nbytes < 999.5 else f"{nbytes:,.0f} {units[0]}"


def share(value: float) -> str:
    """Returns a share in percent, rounded down: 100% means all."""
    return f"{math.floor(value * 1e4) / 1e2:g}%" if math.isfinite(value) else str(value)


def span(numbers: Sequence[int]) -> str:
    """Returns consecutive numbers as "first to last"."""
    if not numbers:
        return "-"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


# ------------------------------------------------------------------------------- parts of a page


def section(title: str, *children: Any) -> Markup:
    return tag("section", tag("h2", title), *children)


def terms(rows: Iterable[tuple[str, Any]]) -> Markup:
    """Returns a list of names and values; a value of None is left out."""
    pairs = ((tag("dt", name), tag("dd", value)) for name, value in rows if value is not None)
    return tag("dl", *map(many, pairs))


def listed(items: Iterable[Any], element: str | None = None) -> Markup:
    """Returns a list, with each item in an `element` if one is given."""
    rows = [tag("li", tag(element, item) if element else item) for item in items]
    return _folded("ul", NOTHING, rows, SHOWN)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], shown: int = SHOWN) -> Markup:
    """Returns a table; a cell that is a `td` element stays as it is."""

    def cell(value: Any) -> Markup:
        made = isinstance(value, Markup) and value.startswith("<td")
        return value if made else tag("td", value)

    heads = tag("tr", *(tag("th", name) for name in head))
    made = [tag("tr", *map(cell, row)) for row in rows]
    return tag("div", _folded("table", heads, made, shown), class_="wide")


def _folded(kind: str, head: Markup, items: Sequence[Markup], shown: int) -> Markup:
    """Returns the items in one element, and those after the first `shown` in a folded one."""
    if len(items) <= shown:
        return tag(kind, head, *items)
    summary = tag("summary", f"and {len(items) - shown:,} more")
    more = tag("details", summary, tag(kind, head, *items[shown:]))
    return many([tag(kind, head, *items[:shown]), more])


HERE = Path(__file__).parent
DATA = "data"  # the id of the element with the data of the script


def page(title: str, style: Path, *children: Any, script: Path | None = None) -> str:
    """Returns the whole page. style, script: files whose content becomes part of it."""
    css = "".join(path.read_text(encoding="utf-8") for path in (HERE / "base.css", style))
    code = script.read_text(encoding="utf-8") if script else ""
    runs = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'" + (
        f"; script-src 'sha256-{runs}'" if code else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>
{css}</style>
{tag("title", title)}</head><body>
{tag("main", *children)}{f"<script>{code}</script>" if code else ""}</body></html>
"""


def data(value: Any) -> Markup:
    """Returns an element with the data of the script, of which no character is markup."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{DATA}">{text}</script>')


def write(text: str, path: str | Path) -> None:
    """Writes the page, whole or not at all; raises OSError if that fails. A symbolic link stays,
    and the file that it names is written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".mckpt-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(text.encode())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def refuse(path: str | Path) -> None:
    """Raises UsageError if a page cannot be written to `path`."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UsageError(f"{path}: cannot be written: something that is not a file has this name")
    folder = target.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{path}: cannot be written: {folder} must be a directory that may be written to"
        )
