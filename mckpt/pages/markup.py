"""Builds HTML and SVG elements for the pages.

`text` is the only place where text becomes `Markup`, and it escapes the text: a hostile path or
tensor name cannot become an element.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mckpt.errors import printable

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
    """Returns all parts, one after the other."""
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
