"""A verdict as one page: HTML that needs nothing else, no script and no network; the same bytes for
the same verdict.

Text becomes `Markup` in one place, `text`, which escapes it: a hostile path or name of a tensor
stays text. A section whose facts are missing is left out: what does not load has no logits, and
level `bytes` has no points.
"""

from __future__ import annotations

import html
import math
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mckpt.errors import UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.verification.verdict import CLEAN, FAULT, Verdict

SHOWN = 16  # rows of a table, items of a list; the others are there, folded
X_LABELS = 12

HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { --paper: #fcfcfa; --card: #f2f1ec; --line: #d9d7cf; --soft: #605f59; --ink: #1c1c1a;
  --a: #1f66c1; --b: #b45309; --noise: #85847c; --pass: #1a7f37; --fail: #c1121f; --incomplete: #8a5a00; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #171716; --card: #232321; --line: #3b3a36; --soft: #a8a69d; --ink: #ecebe6;
  --a: #6aa8f2; --b: #f0a04b; --noise: #8f8d84; --pass: #4cc26a; --fail: #ff7b72; --incomplete: #e3b341; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 26px; margin: 8px 0 16px; } h2 { font-size: 18px; margin: 36px 0 8px; padding-top: 10px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; }
h1 b { color: var(--paper); padding: 2px 12px; border-radius: 4px; margin-right: 10px; letter-spacing: .04em; }
h1 .pass { background: var(--pass); } h1 .fail { background: var(--fail); } h1 .incomplete { background: var(--incomplete); }
p, ul { margin: 8px 0; max-width: 80ch; } ul { padding-left: 20px; } code, td, dd, li { overflow-wrap: anywhere; }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 8px 0; } dt, figcaption, .note, th { color: var(--soft); }
dd { margin: 0; } .wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; margin: 8px 0; }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; font-weight: normal; min-width: 5em; }
td:has(code) { min-width: 15em; } td.here { background: var(--card); color: var(--fail); font-weight: 600; } summary { cursor: pointer; color: var(--soft); }
figure { margin: 8px 0; } .square { max-width: 560px; } figcaption, .note { font-size: 14px; max-width: 90ch; }
svg { display: block; width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--line); } .tick, .last { text-anchor: end; } .under { text-anchor: middle; } .hit { fill: transparent; }
.a { fill: var(--a); stroke: none; } .b { fill: none; stroke: var(--b); stroke-width: 1.5; } .dots .a { fill-opacity: .4; }
.beyond, .odd { fill: var(--fail); stroke: none; } .first { fill: var(--fail); stroke: var(--ink); stroke-width: 1.5; }
svg .named { fill: var(--fail); font-weight: 600; } .parting { stroke: var(--fail); stroke-dasharray: 2 3; }
polyline { fill: none; stroke-width: 1.5; } .line-a { stroke: var(--a); stroke-opacity: .55; } .line-noise { stroke: var(--noise); stroke-width: 1.2; }
.line-b { stroke: var(--b); stroke-dasharray: 6 4; } .diagonal { stroke: var(--noise); } .legend { display: flex; flex-wrap: wrap; gap: 2px 18px; }
.legend span::before { content: ""; display: inline-block; width: 16px; margin-right: 6px; vertical-align: middle; border-top: 3px solid var(--key); }
.key-a { --key: var(--a); } .key-b { --key: var(--b); } .key-noise { --key: var(--noise); } .key-fail { --key: var(--fail); }
@media (max-width: 600px) { svg text { font-size: 20px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 6px; }
  th, td { padding-right: 10px; } }
@media print { main { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } }
</style>
"""


def page(verdict: Verdict) -> str:
    """The whole page."""
    facts, title = verdict.facts, f"{verdict.verdict.upper()}: mckpt verify"
    sections = (
        ("where", _where),
        ("logits", _numbers),
        ("points", _points),
        ("scatter", _scatter),
        ("coverage", _coverage),
        ("points", _layout),
        ("training", _training),
        ("dims", _dims),
        ("values", _values),
    )
    shown = [
        _header(verdict),
        _reasons(verdict),
        *(show(facts) for key, show in sections if facts.get(key)),
    ]
    return HEAD + many(
        [
            tag("title", title),
            Markup("</head><body>\n"),
            tag("main", *shown),
            Markup("</body></html>\n"),
        ]
    )


def write(verdict: Verdict, path: str | Path) -> None:
    """The page as a file, complete or not at all; OSError if it cannot be written."""
    target = Path(path)
    beside = target.with_name(f".mckpt-{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as f:
            f.write(page(verdict).encode())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def refuse(path: str | Path) -> None:
    """UsageError if a page cannot be written there."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise UsageError(
            f"{path}: cannot be written: {folder} must be a directory that may be written to"
        )


# --------------------------------------------------------------------------------------------- text


class Markup(str):
    """HTML that is ready to stand in a page."""


NOTHING = Markup()
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def text(value: Any) -> Markup:
    """Anything as text of a page: escaped, and characters that XML refuses or that turn the reading
    order as their numbers.
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNSEEN.sub(lambda m: f"\\u{ord(m[0]):04x}", str(value))))


def many(parts: Iterable[Any]) -> Markup:
    return Markup("".join(map(text, parts)))


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """One element; `class_` and `stroke_width` are said class and stroke-width."""
    said = "".join(f' {k.rstrip("_").replace("_", "-")}="{text(v)}"' for k, v in attributes.items())
    return Markup(f"<{name}{said}>{many(children)}</{name}>")


def say(value: Any) -> str:
    """A number in four digits."""
    if isinstance(value, float):
        whole = 1e3 <= abs(value) < 1e9
        return f"{float(f'{value:.4g}'):,.0f}" if whole else f"{value:.4g}"
    return "-" if value is None else f"{value:,}"


def share(value: float) -> str:
    """In percent; 100% is all of them."""
    return f"{math.floor(value * 1e4) / 1e2:g}%" if math.isfinite(value) else str(value)


def span(numbers: Sequence[int]) -> str:
    """Numbers that follow each other."""
    return (
        "-"
        if not numbers
        else str(numbers[0])
        if len(numbers) == 1
        else f"{numbers[0]} to {numbers[-1]}"
    )


def section(title: str, *children: Any) -> Markup:
    return tag("section", tag("h2", title), *children)


def terms(rows: Iterable[tuple[str, Any]]) -> Markup:
    """Names and what they are; None is left out."""
    return tag(
        "dl",
        *(many([tag("dt", name), tag("dd", value)]) for name, value in rows if value is not None),
    )


def folded(kind: str, head: Markup, items: Sequence[Markup], shown: int = SHOWN) -> Markup:
    """Items in elements of one kind, those beyond `shown` folded."""
    if len(items) <= shown:
        return tag(kind, head, *items)
    more = tag(
        "details",
        tag("summary", f"and {len(items) - shown:,} more"),
        tag(kind, head, *items[shown:]),
    )
    return many([tag(kind, head, *items[:shown]), more])


def listed(items: Iterable[Any], element: str | None = None) -> Markup:
    return folded("ul", NOTHING, [tag("li", tag(element, x) if element else x) for x in items])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], shown: int = SHOWN) -> Markup:
    """A cell that is an element stands as it is."""
    made = [
        tag(
            "tr",
            *(c if isinstance(c, Markup) and c.startswith("<td") else tag("td", c) for c in row),
        )
        for row in rows
    ]
    return tag(
        "div", folded("table", tag("tr", *(tag("th", h) for h in head)), made, shown), class_="wide"
    )


# ---------------------------------------------------------------------------------------------- svg

GAP = 18.0  # between a plot's edge, where zero and infinity lie, and its values


LEFT, TOP = 78, 48  # of every plot, in units of its SVG
Ticks = list[tuple[float, str]]  # where, and the label


@dataclass(frozen=True)
class Plot:
    """An SVG whose plot ends at these edges."""

    right: int
    bottom: int

    def draw(
        self, title: str, x: Ticks, y: Ticks, names: tuple[str, str], marks: Iterable[Markup]
    ) -> Markup:
        """The SVG with its axes, named x and y."""
        parts = [
            tag("title", title),
            tag("text", names[0], x=self.right, y=self.bottom + 50, class_="last"),
            tag("text", names[1], x=6, y=18),
        ]
        for at, label in x:
            parts.append(
                tag("line", x1=at, x2=at, y1=self.bottom, y2=self.bottom + 5, class_="grid")
            )
            parts.append(tag("text", label, x=at, y=self.bottom + 24, class_="under"))
        for at, label in y:
            parts.append(tag("line", x1=LEFT, x2=self.right, y1=at, y2=at, class_="grid"))
            parts.append(tag("text", label, x=LEFT - 8, y=at + 5, class_="tick"))
        return tag(
            "svg", *parts, *marks, viewBox=f"0 0 {self.right + 16} {self.bottom + 58}", role="img"
        )


@dataclass(frozen=True)
class Scale:
    """Where a value lies between two edges.

    Infinite and undefined values lie on the edges, and so does the zero of a log scale.
    """

    low: float  # of the values, in decades on a log scale
    high: float
    start: float  # edges in units of the SVG
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if math.isnan(value) or value == math.inf:
            return self.end
        if value == -math.inf or (self.log and value <= 0):
            return self.start
        gap = math.copysign(GAP, self.end - self.start)
        part = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return round(self.start + gap + part * (self.end - self.start - 2 * gap), 1)

    @classmethod
    def of(cls, values: Iterable[float], start: float, end: float, log: bool = False) -> Scale:
        """One that holds all finite values; whole decades on a log scale."""
        held = [
            math.log10(v) if log else v for v in values if math.isfinite(v) and (v > 0 or not log)
        ] or [0.0]
        low, high = (
            (math.floor(min(held)), min(308, math.ceil(max(held))))
            if log
            else (min(held), max(held))
        )
        wider = 0.0 if low < high else 1.0 if log else max(0.5, abs(low) / 10)
        return (
            cls(low - wider, high, start, end, log)
            if log
            else cls(low - wider, high + wider, start, end)
        )

    def ticks(self, values: Iterable[float] = ()) -> Ticks:
        """Round numbers, about six; on a log scale decades, and those edges that a value
        lies on.
        """
        if self.log:
            on = {self(v) for v in values}
            decades = range(
                int(self.low), int(self.high) + 1, math.ceil((self.high - self.low) / 7)
            )
            edges = [
                (at, label) for at, label in ((self.start, "0"), (self.end, "inf")) if at in on
            ]
            return [(self(10.0**k), f"1e{k}") for k in decades] + edges
        raw = (self.high - self.low) / 6
        decade = 10.0 ** math.floor(math.log10(raw))
        step = next(m * decade for m in (1, 2, 5, 10) if m * decade >= raw * 0.999)
        return [
            (self(k * step), f"{k * step:.6g}")
            for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        ]


def circle(x: float, y: float, radius: float, kind: str, title: str) -> Markup:
    return tag("circle", tag("title", title), cx=x, cy=y, r=radius, class_=kind)


def polyline(xs: Iterable[float], ys: Iterable[float], kind: str) -> Markup:
    return tag(
        "polyline", points=" ".join(f"{x},{y}" for x, y in zip(xs, ys, strict=True)), class_=kind
    )


def legend(**names: str) -> Markup:
    return tag(
        "div",
        *(tag("span", name, class_=f"key-{key}") for key, name in names.items()),
        class_="legend",
    )


# ----------------------------------------------------------------------------------- what was found


def _sizes(sizes: dict[str, Any], all_of_them: bool = False) -> str:
    return ", ".join(f"{k} {v}" for k, v in sizes.items() if all_of_them or v != 1) or "one rank"


def _header(verdict: Verdict) -> Markup:
    facts = verdict.facts
    # `bytes` takes any two
    names = ("first", "second") if facts.get("level") == "bytes" else ("Hugging Face", "Megatron")
    versions = {"mckpt": facts.get("mckpt"), **facts.get("versions", {})}
    rows = [
        (names[0], tag("code", facts.get("hf", "?"))),
        (names[1], tag("code", facts.get("megatron", "?"))),
        ("level", facts.get("level")),
        ("format", facts.get("format")),
        ("iteration", facts.get("iteration")),
        ("resharded", facts.get("resharded")),
        ("sizes of the run", _sizes(facts["sizes"], True) if "sizes" in facts else None),
        ("ranks", facts.get("ranks")),
        ("device", facts.get("device")),
        ("dtype of the checkpoint", facts.get("dtype")),
        ("transformer_impl", facts.get("impl")),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v) or None),
    ]
    return tag(
        "header",
        tag("h1", tag("b", verdict.verdict.upper(), class_=verdict.verdict), "mckpt verify"),
        terms(rows),
    )


def _reasons(verdict: Verdict) -> Markup:
    none = "No fault was found." if verdict.verdict == "pass" else "No reason was given."
    return section("Why", listed(verdict.reasons) if verdict.reasons else tag("p", none))


def _where(facts: dict[str, Any]) -> Markup:
    where = facts["where"]
    position = where.get("position")
    kinds = (
        ("args that differ", "args"),
        ("Hugging Face keys that feed this point", "hf"),
        ("stored tensors that feed this point", "stored"),
        ("logical tensors whose values differ", "differ"),
    )
    rows: list[tuple[str, Any]] = [
        ("they part first at", tag("code", where["point"]) if where.get("point") else "no point")
    ]
    rows += [
        (
            "logits part from",
            (
                f"position {position['position']} of sequence {position['sequence']} on"
                if position
                else None
            ),
        )
    ]
    rows += [
        (name, listed(where[key], "code") if where[key] else "none")
        for name, key in kinds
        if key in where
    ]
    return section("Where", terms([*rows, ("message", where.get("message"))]))


MEASURES = (
    ("largest difference of a logit", "max_abs", say),
    ("root mean square", "rms", say),
    ("KL divergence, mean (nats)", "kl", say),
    ("KL divergence, largest", "kl_max", say),
    ("KL of transformers in this dtype", "kl_transformers", say),
    ("top-1 agreement", "top1", share),
    ("top-1 of transformers in this dtype", "top1_transformers", share),
    ("loss, transformers in fp32", "loss_hf", say),
    ("loss, Megatron-Core", "loss", say),
    ("losses differ by", "apart", say),
    ("spread of the logits (standard deviation)", "spread", say),
    ("noise floor", "noise", say),
    ("tolerance", "tolerance", say),
    ("and at most (its bound)", "bound", say),
)


def _numbers(facts: dict[str, Any]) -> Markup:
    columns = {
        dtype: found | {"apart": abs(found["loss"] - found["loss_hf"])}
        for dtype, found in facts["logits"].items()
    }
    rows = [
        [name, *(how(c[key]) if key in c else "-" for c in columns.values())]
        for name, key, how in MEASURES
        if any(key in c for c in columns.values())
    ]
    judged = [
        [
            "the tolerance is for",
            *(
                "largest difference" if "probe" in c else "root mean square"
                for c in columns.values()
            ),
        ]
    ]
    return section(
        "Logits",
        table(["", *columns], rows + judged),
        listed(s for dtype, c in columns.items() for s in margins(dtype, c)),
    )


def margins(dtype: str, found: dict[str, Any]) -> list[str]:
    """How far the run and a seeded fault are from the tolerance, in words.

    Only in fp32 (which has a probe) is a fault seeded.
    """
    below, out = found["below"], []
    wanted = f" (at least {CLEAN:g} wanted)" if "probe" in found else ""
    if not found["decisive"]:
        noise, spread = say(found["noise"]), say(found["spread"])
        out.append(
            f"{dtype} decides nothing here: its noise, {noise}, is too large beside the spread of"
            f" the logits, {spread}"
        )
    if math.isnan(below):
        out.append(f"{dtype}: nothing could be judged")
    elif below < 1:
        out.append(
            f"{dtype}: this run "
            + (f"exceeds the tolerance {say(1 / below)}x" if below else "differs infinitely")
        )
    else:
        out.append(
            f"{dtype}: this run "
            + (
                f"stays {say(below)}x below the tolerance{wanted}"
                if below < math.inf
                else "differs nowhere"
            )
        )
    if "probe" in found:
        above = found["probe_above"]
        how = f"exceeds it {say(above)}x" if above > 1 else f"reaches {say(above)} of it"
        out.append(
            f"{dtype}: a seeded fault {how} (at least {FAULT:g} wanted): it moves logits by"
            f" {say(found['probe'])}"
        )
    return out


def _layer(point: str) -> int | None:
    found = re.match(r"layers\.(\d+)", point)
    return int(found[1]) if found else None


def _points(facts: dict[str, Any]) -> Markup:
    rows = facts["points"]
    plot, series = (
        Plot(704, 302),
        {k: [float(r[k]) for r in rows] for k in ("difference", "noise", "tolerance")},
    )
    values = [v for found in series.values() for v in found]
    y = Scale.of(values, plot.bottom, TOP, log=True)
    step = (plot.right - LEFT) / len(rows)
    xs = [round(LEFT + step * (i + 0.5), 1) for i in range(len(rows))]
    beyond = [not d <= t for d, t in zip(series["difference"], series["tolerance"], strict=True)]
    first = beyond.index(True) if any(beyond) else None
    starts = {
        n: x
        for x, r in zip(reversed(xs), reversed(rows), strict=True)
        if (n := _layer(r["point"])) is not None
    }
    every = max(1, math.ceil(len(starts) / X_LABELS))
    marks = [
        polyline(xs, map(y, series[k]), f"line-{key}")
        for k, key in (("noise", "noise"), ("tolerance", "b"), ("difference", "a"))
    ]
    if first is not None:
        marks.append(
            tag("line", x1=xs[first], x2=xs[first], y1=TOP, y2=plot.bottom, class_="parting")
        )
        side = "last" if first > len(rows) / 2 else "start"
        marks.append(
            tag("text", rows[first]["point"], x=xs[first], y=TOP - 8, class_=f"named {side}")
        )
    cells = [
        [r["point"], *(say(float(r[k])) for k in ("difference", "noise", "tolerance", "size"))]
        for r in rows
    ]
    for i, (x, cell) in enumerate(zip(xs, cells, strict=True)):
        kind = "first" if i == first else "beyond" if beyond[i] else "a"
        radius = min(4.0, max(1.8, round(step / 3, 1))) + 2.5 * (i == first)
        title = "{}: difference {}, noise {}, tolerance {}, size {}".format(*cell)
        column = tag(
            "rect",
            x=round(x - step / 2, 1),
            y=TOP,
            width=round(step, 1),
            height=plot.bottom - TOP,
            class_="hit",
        )
        marks.append(
            tag(
                "g",
                tag("title", title),
                column,
                tag("circle", cx=x, cy=y(series["difference"][i]), r=radius, class_=kind),
            )
        )
    ticks = [(x, str(n)) for n, x in sorted(starts.items()) if n % every == 0]
    drawn = plot.draw(
        "difference of states by layer", ticks, y.ticks(values), ("layer", "L2 norm (log)"), marks
    )
    end = "None is beyond its tolerance."
    if first is not None:
        end = (
            "The first beyond its tolerance is"
            f" {rows[first]['point']}{'' if 'where' in facts else '; the logits decide, and are within theirs'}."
        )
    said = (
        "Each step is a point in the order of the computation: embed, then attn, mlp and the end"
        f" of every layer, then final_norm. {end}"
    )
    keys = legend(
        a="largest difference of a position",
        noise="noise floor of transformers",
        b="tolerance",
        fail="beyond it",
    )
    head = ["point", "difference", "noise", "tolerance", "size"]
    numbers = tag(
        "details",
        tag("summary", f"{len(rows):,} points in numbers"),
        table(head, cells, shown=len(cells)),
    )
    return section(
        "States, layer by layer (fp32)",
        tag("figure", keys, drawn, tag("figcaption", said)),
        numbers,
    )


def _scatter(facts: dict[str, Any]) -> Markup:
    pairs = [(float(a), float(b)) for a, b in facts["scatter"]]
    plot, values = Plot(504, 474), [v for pair in pairs for v in pair]
    x, y = Scale.of(values, LEFT, plot.right), Scale.of(values, plot.bottom, TOP)
    odd = [not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs]
    marks = [tag("line", x1=x(x.low), y1=y(x.low), x2=x(x.high), y2=y(x.high), class_="diagonal")]
    for (a, b), is_odd in zip(pairs, odd, strict=True):
        title = f"transformers {say(a)}, Megatron-Core {say(b)}, apart {say(abs(a - b))}"
        marks.append(circle(x(a), y(b), 2.2, "odd" if is_odd else "a", title))
    drawn = plot.draw(
        "logits against logits",
        x.ticks(),
        y.ticks(),
        ("transformers", "Megatron-Core"),
        [tag("g", *marks, class_="dots")],
    )
    said = f"{len(pairs):,} logits drawn at random, in fp32; equal ones lie on the diagonal."
    said += f" {sum(odd):,} are not finite, and lie on the edges." if any(odd) else ""
    return section(
        "Logits against logits", tag("figure", drawn, tag("figcaption", said), class_="square")
    )


def _coverage(facts: dict[str, Any]) -> Markup:
    coverage, tokens = facts["coverage"], facts["tokens"]
    rows: list[tuple[str, Any]] = []
    embedded = coverage["embedding_rows"]
    if experts := coverage.get("experts"):
        missing = listed(
            f"layer {layer}: {', '.join(map(str, which))}"
            for layer, which in experts["missing"].items()
        )
        never = many([", never chosen:", missing]) if experts["missing"] else ""
        rows.append(
            (
                "experts chosen",
                many(
                    [f"{experts['reached']:,} of {experts['of']:,}, counted in every layer", never]
                ),
            )
        )
    rows.append(("rows of the embedding", f"{embedded['reached']:,} of {embedded['of']:,}"))
    if window := coverage.get("window"):
        how = "exceeded" if window["exceeded"] else "not exceeded, so it was not tried"
        rows.append(
            (
                "sliding window",
                (
                    f"{window['window']:,}, the longest sequence is {window['longest_sequence']:,}:"
                    f" {how}"
                ),
            )
        )
    rows.append(
        (
            "positions",
            (
                f"{say(coverage['positions']['longest_sequence'])} of"
                f" {say(coverage['positions']['of'])}"
            ),
        )
    )
    rows.append(
        (
            "sequences",
            f"{tokens['sequences']:,}, of {', '.join(map(say, tokens['lengths']))} tokens",
        )
    )
    rows.append(("positions judged", f"{tokens['judged']:,} of {tokens['positions']:,}"))
    rows.append(
        ("ties between experts that fell otherwise", f"{tokens['ties']:,}" if experts else None)
    )
    return section("What the tokens reached", terms(rows))


def _layout(facts: dict[str, Any]) -> Markup:
    layers = [n for r in facts["points"] if (n := _layer(r["point"])) is not None]
    num_layers, title = max(layers, default=-1) + 1, "What lies on which rank"
    try:
        parallel = Parallel(**{k: v for k, v in facts["sizes"].items() if k != "cp"})
        stages = parallel.stages(num_layers)
    except UsageError as e:
        return section(title, tag("p", f"The sizes alone do not say: {e}"))
    per_stage = facts["ranks"] // parallel.pp
    parted = _layer(facts.get("where", {}).get("point") or "")
    rows: list[list[Any]] = []
    for p, virtual in enumerate(stages):
        row: list[Any] = [f"stage {p}", f"ranks {span(range(p * per_stage, (p + 1) * per_stage))}"]
        for v, held in enumerate(virtual):
            before, after = (
                "embed, " * (p == v == 0),
                ", norm, head" * (p == parallel.pp - 1 and v == parallel.vpp - 1),
            )
            row.append(
                tag(
                    "td",
                    f"{before}{span(held)}{after}",
                    **({"class_": "here"} if parted in held else {}),
                )
            )
        rows.append(row)
    virtual_names = (
        ["layers"] if parallel.vpp == 1 else [f"virtual stage {v}" for v in range(parallel.vpp)]
    )
    return section(
        title, table(["", "", *virtual_names], rows), _experts(facts, parallel, per_stage)
    )


def _experts(facts: dict[str, Any], parallel: Parallel, per_stage: int) -> Markup:
    """Experts of each expert-parallel rank."""
    count = facts.get("coverage", {}).get("experts", {}).get("per_layer", 0)
    if not count or count % parallel.ep:
        return NOTHING
    each, rows = count // parallel.ep, []
    for e in range(parallel.ep):
        on = [str(r) for r in range(per_stage) if r // parallel.expert_tp % parallel.ep == e]
        rows.append([f"ep rank {e}", span(range(e * each, (e + 1) * each)), ", ".join(on)])
    return table(["", "experts of a layer", "ranks, counted within a stage"], rows)


def _training(facts: dict[str, Any]) -> Markup:
    found = facts["training"]
    (first, second), norms, names = (
        found["losses"],
        found["grad_norms"],
        [_sizes(s) for s in found["sizes"]],
    )
    plot, steps = Plot(704, 282), range(1, len(first) + 1)
    x, y = Scale.of(steps, LEFT, plot.right), Scale.of([*first, *second], plot.bottom, TOP)
    marks = []
    for key, losses, name, radius in (("a", first, names[0], 3.5), ("b", second, names[1], 6.0)):
        marks.append(polyline(map(x, steps), map(y, losses), f"line-{key}"))
        marks += [
            circle(x(s), y(v), radius, key, f"{name}, step {s}: loss {v:.7g}")
            for s, v in zip(steps, losses, strict=True)
        ]
    every = math.ceil(len(steps) / X_LABELS)
    drawn = plot.draw(
        "losses of two runs",
        [(x(s), str(s)) for s in steps if (s - 1) % every == 0],
        y.ticks(),
        ("step", "loss"),
        marks,
    )
    rows = [
        [str(s), f"{a:.7g}", f"{b:.7g}", say(abs(a - b)), say(m), say(n)]
        for s, a, b, m, n in zip(steps, first, second, *norms, strict=True)
    ]
    said = [
        (
            f"training moved the loss by {say(found['moved'])}; the curves differ by"
            f" {say(found['max_abs'])}, the tolerance is {say(found['tolerance'])}"
        ),
        (
            f"gradient norms differ by {say(found['grad_norm_apart'])} of themselves, the tolerance"
            f" is {say(found['grad_norm_tolerance'])}"
        ),
    ]
    head = [
        "step",
        f"loss at {names[0]}",
        f"loss at {names[1]}",
        "apart",
        "gradient norm, first",
        "second",
    ]
    return section(
        "Training",
        listed(said),
        tag("figure", legend(a=names[0], b=names[1]), drawn),
        table(head, rows),
    )


def _dims(facts: dict[str, Any]) -> Markup:
    rows = [[d["dim"], tag("code", d["arg"]), d["hf"], d["megatron"]] for d in facts["dims"]]
    return section("Dims that differ", table(["dim", "arg", "config", "args"], rows))


def _values(facts: dict[str, Any]) -> Markup:
    found = facts["values"]
    rows = [
        [
            tag("code", c["name"]),
            c["what"],
            c["left"],
            c["right"],
            "-" if c["first"] is None else list(c["first"]),
            say(c["count"] or None),
            say(c["max_abs"]),
        ]
        for c in found["changed"]
    ]
    counts = [
        ("equal to the last bit", f"{found['tensors_equal']:,} tensors"),
        ("compared", f"{found['bytes_compared']:,} bytes"),
    ]
    if found["equal_after_cast"]:
        counts.append(("of these after a cast", f"{found['equal_after_cast']:,} tensors"))
    parts = [terms(counts)]
    if rows:
        parts.append(
            table(
                ["tensor that differs", "in", "first", "second", "at", "elements", "max abs"], rows
            )
        )
    for key, name in (
        ("missing", "Only in the first"),
        ("extra", "Only in the second"),
        ("left_out", "Ignored by the mapping and not compared"),
    ):
        if found[key]:
            parts += [tag("h3", f"{name}: {len(found[key]):,}"), listed(found[key], "code")]
    return section("Tensors", *parts)
