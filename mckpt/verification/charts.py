"""Draws the charts of the report as SVG: states by layer, logits, and the losses of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mckpt.pages.document import Markup, listed, say, section, table, tag
from mckpt.verification.pair import say_sizes

X_LABELS = 12  # at most, on an x axis
LEFT, TOP = 78, 48  # of every plot, in units of its SVG
GAP = 18.0  # between the values and the edges of the plot, where zero and infinity lie
Ticks = list[tuple[float, str]]  # position and label


@dataclass(frozen=True)
class Scale:
    """Maps values to positions between two edges, in units of the SVG.

    Infinite and undefined values lie on the edges, and so does the zero of a log scale.
    """

    low: float  # least value; in decades on a log scale
    high: float  # largest value
    start: float  # the edge at `low`
    end: float  # the edge at `high`
    log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], start: float, end: float, log: bool = False) -> Scale:
        """Returns a scale that contains all finite values, in whole decades on a log scale."""
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        if log:
            decades = [math.log10(value) for value in finite] or [0.0]
            first, last = math.floor(min(decades)), min(308, math.ceil(max(decades)))
            return cls(first if first < last else first - 1, last, start, end, log)
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        wider = 0.0 if low < high else max(0.5, abs(low) / 10)
        return cls(low - wider, high + wider, start, end)

    def __call__(self, value: float) -> float:
        if math.isnan(value) or value == math.inf:
            return self.end
        if value == -math.inf or (self.log and value <= 0):
            return self.start
        gap = math.copysign(GAP, self.end - self.start)
        part = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return round(self.start + gap + part * (self.end - self.start - 2 * gap), 1)

    def ticks(self, values: Iterable[float] = ()) -> Ticks:
        """Returns about six round numbers; on a log scale decades, and each edge on which one of
        `values` lies.
        """
        if self.log:
            occupied = {self(value) for value in values}
            edges = [(self.start, "0"), (self.end, "inf")]
            every = math.ceil((self.high - self.low) / 7)
            decades = range(int(self.low), int(self.high) + 1, every)
            return [(self(10.0**k), f"1e{k}") for k in decades] + [
                edge for edge in edges if edge[0] in occupied
            ]
        raw = (self.high - self.low) / 6
        decade = 10.0 ** math.floor(math.log10(raw))
        step = next(m * decade for m in (1, 2, 5, 10) if m * decade >= raw * 0.999)
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self(k * step), f"{k * step:.6g}") for k in multiples]


@dataclass(frozen=True)
class Plot:
    """An SVG whose plot ends at these edges."""

    right: int
    bottom: int

    def draw(
        self, title: str, x: Ticks, y: Ticks, names: tuple[str, str], marks: Iterable[Markup]
    ) -> Markup:
        """Returns the SVG with `marks` and its axes, whose `names` are those of x and y."""
        parts = [
            tag("title", title),
            tag("text", names[0], x=self.right, y=self.bottom + 50, class_="last"),
            tag("text", names[1], x=6, y=18),
        ]
        for at, label in x:
            parts += [
                tag("line", x1=at, x2=at, y1=self.bottom, y2=self.bottom + 5, class_="grid"),
                tag("text", label, x=at, y=self.bottom + 24, class_="under"),
            ]
        for at, label in y:
            parts += [
                tag("line", x1=LEFT, x2=self.right, y1=at, y2=at, class_="grid"),
                tag("text", label, x=LEFT - 8, y=at + 5, class_="tick"),
            ]
        box = f"0 0 {self.right + 16} {self.bottom + 58}"
        return tag("svg", *parts, *marks, viewBox=box, role="img")


def _circle(x: float, y: float, radius: float, kind: str, title: str) -> Markup:
    return tag("circle", tag("title", title), cx=x, cy=y, r=radius, class_=kind)


def _polyline(xs: Iterable[float], ys: Iterable[float], kind: str) -> Markup:
    points = " ".join(f"{x},{y}" for x, y in zip(xs, ys, strict=True))
    return tag("polyline", points=points, class_=kind)


def _legend(**names: str) -> Markup:
    keys = (tag("span", name, class_=f"key-{key}") for key, name in names.items())
    return tag("div", *keys, class_="legend")


# ------------------------------------------------------------------------------------------- states


def layer_of(point: str) -> int | None:
    """Returns the layer of a point such as layers.3.attn; None for embed and final_norm."""
    found = re.match(r"layers\.(\d+)", point)
    return int(found[1]) if found else None


def states(facts: dict[str, Any]) -> Markup:
    """Returns the section that shows the differences of the hidden states, layer by layer."""
    rows = facts["points"]
    differences = [float(row["difference"]) for row in rows]
    beyond = [not float(row["difference"]) <= float(row["tolerance"]) for row in rows]
    first = beyond.index(True) if any(beyond) else None
    head = ["point", "difference", "noise", "tolerance", "size"]
    cells = [[row["point"], *(say(float(row[key])) for key in head[1:])] for row in rows]

    plot = Plot(704, 302)
    step = (plot.right - LEFT) / len(rows)
    xs = [round(LEFT + step * (i + 0.5), 1) for i in range(len(rows))]
    series = {key: [float(row[key]) for row in rows] for key in ("noise", "tolerance")}
    series["difference"] = differences
    values = [value for found in series.values() for value in found]
    y = Scale.of(values, plot.bottom, TOP, log=True)
    lines = {"noise": "line-noise", "tolerance": "line-b", "difference": "line-a"}
    marks = [_polyline(xs, map(y, series[key]), kind) for key, kind in lines.items()]
    if first is not None:
        x, side = xs[first], "last" if first > len(rows) / 2 else "start"
        marks += [
            tag("line", x1=x, x2=x, y1=TOP, y2=plot.bottom, class_="parting"),
            tag("text", rows[first]["point"], x=x, y=TOP - 8, class_=f"named {side}"),
        ]
    width, height = round(step, 1), plot.bottom - TOP
    radius = min(4.0, max(1.8, round(step / 3, 1)))
    for i, x in enumerate(xs):
        kind = "first" if i == first else "beyond" if beyond[i] else "a"
        title = "{}: difference {}, noise {}, tolerance {}, size {}".format(*cells[i])
        # an invisible column that shows the title wherever the pointer is above the point
        column = tag(
            "rect", x=round(x - step / 2, 1), y=TOP, width=width, height=height, class_="hit"
        )
        larger = radius + 2.5 * (i == first)
        dot = tag("circle", cx=x, cy=y(differences[i]), r=larger, class_=kind)
        marks.append(tag("g", tag("title", title), column, dot))
    title, names = "difference of states by layer", ("layer", "L2 norm (log)")
    drawn = plot.draw(title, _layer_ticks(rows, xs), y.ticks(values), names, marks)

    end = "No point exceeds its tolerance."
    if first is not None:
        decided = "" if "where" in facts else "; the logits decide, and are within theirs"
        end = f"The first point that exceeds its tolerance is {rows[first]['point']}{decided}."
    caption = (
        "Each step is a point in the order of the computation: embed, then attn, mlp and the end"
        f" of every layer, then final_norm. {end}"
    )
    keys = _legend(
        a="largest difference of a position",
        noise="noise floor of transformers",
        b="tolerance",
        fail="beyond the tolerance",
    )
    numbers = table(head, cells, shown=len(cells))
    return section(
        "States, layer by layer (fp32)",
        tag("figure", keys, drawn, tag("figcaption", caption)),
        tag("details", tag("summary", f"{len(rows):,} points in numbers"), numbers),
    )


def _layer_ticks(rows: Sequence[dict[str, Any]], xs: Sequence[float]) -> Ticks:
    """Returns the first point of every layer, or of every few layers."""
    starts: dict[int, float] = {}
    for row, x in zip(rows, xs, strict=True):
        layer = layer_of(row["point"])
        if layer is not None:
            starts.setdefault(layer, x)
    every = max(1, math.ceil(len(starts) / X_LABELS))
    return [(x, str(layer)) for layer, x in sorted(starts.items()) if layer % every == 0]


# ------------------------------------------------------------------------------------------- logits


def logits(facts: dict[str, Any]) -> Markup:
    """Returns the section that draws pairs of logits against each other."""
    pairs = [(float(a), float(b)) for a, b in facts["scatter"]]
    plot, values = Plot(504, 474), [value for pair in pairs for value in pair]
    x, y = Scale.of(values, LEFT, plot.right), Scale.of(values, plot.bottom, TOP)
    marks = [tag("line", x1=x(x.low), y1=y(x.low), x2=x(x.high), y2=y(x.high), class_="diagonal")]
    odd = 0
    for a, b in pairs:
        finite = math.isfinite(a) and math.isfinite(b)
        odd += not finite
        title = f"transformers {say(a)}, Megatron-Core {say(b)}, apart {say(abs(a - b))}"
        marks.append(_circle(x(a), y(b), 2.2, "a" if finite else "odd", title))
    dots, names = tag("g", *marks, class_="dots"), ("transformers", "Megatron-Core")
    drawn = plot.draw("logits against logits", x.ticks(), y.ticks(), names, [dots])
    caption = f"{len(pairs):,} logits drawn at random, in fp32; equal ones lie on the diagonal."
    if odd:
        caption += f" {odd:,} are not finite, and lie on the edges."
    figure = tag("figure", drawn, tag("figcaption", caption), class_="square")
    return section("Logits against logits", figure)


# ----------------------------------------------------------------------------------------- training


def training(facts: dict[str, Any]) -> Markup:
    found = facts["training"]
    (first, second), norms = found["losses"], found["grad_norms"]
    names = [say_sizes(sizes) for sizes in found["sizes"]]
    plot, steps = Plot(704, 282), range(1, len(first) + 1)
    x, y = Scale.of(steps, LEFT, plot.right), Scale.of([*first, *second], plot.bottom, TOP)
    marks = []
    for kind, losses, name, radius in (("a", first, names[0], 3.5), ("b", second, names[1], 6.0)):
        marks.append(_polyline(map(x, steps), map(y, losses), f"line-{kind}"))
        for step, loss in zip(steps, losses, strict=True):
            title = f"{name}, step {step}: loss {loss:.7g}"
            marks.append(_circle(x(step), y(loss), radius, kind, title))
    ticks = [(x(step), str(step)) for step in steps[:: math.ceil(len(steps) / X_LABELS)]]
    drawn = plot.draw("losses of two runs", ticks, y.ticks(), ("step", "loss"), marks)
    rows = [
        [str(step), f"{a:.7g}", f"{b:.7g}", say(abs(a - b)), say(m), say(n)]
        for step, a, b, m, n in zip(steps, first, second, *norms, strict=True)
    ]
    losses_at = [f"loss at {name}" for name in names]
    head = ["step", *losses_at, "apart", "gradient norm, first", "second"]
    summary = [
        f"training moved the loss by {say(found['moved'])}; the curves differ by"
        f" {say(found['max_abs'])}, the tolerance is {say(found['tolerance'])}",
        f"gradient norms differ by {say(found['grad_norm_apart'])} of themselves, the tolerance is"
        f" {say(found['grad_norm_tolerance'])}",
    ]
    figure = tag("figure", _legend(a=names[0], b=names[1]), drawn)
    return section("Training", listed(summary), figure, table(head, rows))
