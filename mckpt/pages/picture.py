"""The page of a checkpoint (`mckpt inspect --html`) or of a plan (`mckpt plan --html`): a map of
the bytes of its layers, and every tensor with its origin. All of it comes from headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mckpt.checkpoint import inspection
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.plan_data import PlanData, grouped
from mckpt.errors import MckptError, UsageError, counted, printable, shown
from mckpt.formats.base import Format, Names
from mckpt.geometry.box import Layout
from mckpt.pages import bytes_map, document, listing
from mckpt.pages.bytes_map import Column, Rows
from mckpt.pages.document import Markup, listed, many, section, size, table, tag, terms
from mckpt.pages.listing import Numbering, Other

HERE = Path(__file__).parent
LEVELS = 6  # of the colours of a map
MAX_NUMBERS = 64  # columns: a wider map has every tenth number
MAX_TEXTS = 24  # columns: the cells of a wider map have colours only


class Side(NamedTuple):
    """A checkpoint that is read, or the one that a plan writes."""

    title: str
    format: Format
    names: Names
    layout: Layout
    root: str
    padded_vocab: int  # rows
    others: list[Other]

    @property
    def files(self) -> list[str]:
        """Returns the names of the files."""
        return [printable(shown(f.removeprefix(f"{self.root}/"))) for f in self.layout.files]


def of_checkpoint(source: Checkpoint) -> str:
    """Returns the page of a checkpoint.

    Raises what a conversion would raise if the tensors are not those of a model that mckpt knows.
    """
    notes = list(source.model.notes)
    try:
        side = _source(source.with_optimizer())
    except MckptError as e:
        side = _source(source)
        notes.append(f"The optimizer's state is not shown: {e}")
    facts_of_files = inspection.inspect(source, 0)
    left = ("tensors", "problems", "inexact", "carried")
    rows = [(inspection.LABELS.get(k, k), v) for k, v in facts_of_files.items() if k not in left]
    facts = {
        "Carried unchanged": facts_of_files.get("carried"),
        "Ignored": dict(grouped(side.layout.ignored)),
        "Left behind": source.left_behind(),
        "Inexact": source.files.inexact,
        "Problems": facts_of_files.get("problems"),
        "Notes": notes,
    }
    return _page("mckpt inspect", rows, [side], facts)


def of_plan(plan: PlanData) -> str:
    """Returns the page of a plan."""
    content = plan.json()
    target = Side(
        "Target",
        plan.destination.format,
        plan.names,
        plan.layout,
        "",
        plan.facts.get("padded_vocab_size") or 0,
        [],
    )
    sides = [target, _source(plan.source)]
    rows: list[tuple[str, Any]] = []
    for name in ("source", "target"):
        one = content[name]
        sized = f", {one['parallel']}" * sides[name == "source"].format.megatron
        rows.append((name, tag("code", one["path"])))
        rows.append(("", f"{one['format']}, {one['mapping']}{sized}"))
    num_files = counted(len(content["target"]["files"]), "file")
    rows += [
        ("to be written", f"{size(plan.nbytes)} in {num_files}"),
        ("copies", f"{content['copies']:,}; every element of the target is written exactly once"),
        ("plan", tag("code", content["plan"])),
    ]
    casts = content["casts"] | content["offsets"]
    facts = {
        "Casts": {name: counted(n, "element") for name, n in casts.items()},
        "Padding": content["padding_bytes"] and f"{content['padding_bytes']:,} bytes of zeros",
        "Optimizer": content["optimizer"],
        "Carried unchanged": content["carried"],
        "Ignored": content["ignored"],
        "Left behind": content["left_behind"],
        "Inexact": content["inexact"],
        "Notes": content["notes"],
    }
    origins = listing.origins(plan.joined, plan.source.layout, plan.layout)
    return _page("mckpt plan", rows, sides, facts, origins)


def _source(source: Checkpoint) -> Side:
    """Returns a checkpoint that is read, with the tensors that its layout does not have."""
    layout, format = source.layout, source.opened.format
    padded = source.opened.padded_vocab(source.mapping) if format.megatron else 0
    root = str(source.opened.root)
    side = Side("Source", format, source.names, layout, root, padded or 0, [])
    side.others.extend(_others(source, side))
    return side


def _others(source: Checkpoint, side: Side) -> Iterator[Other]:
    """Yields the tensors that are stored and that the layout does not have."""
    ignored, layout = side.layout.ignored, side.layout
    if side.format.megatron:
        yield from (Other(key, "", (), -1, f"ignored: {why}") for key, why in ignored.items())
        return
    numbering = Numbering(side.names, local=False)
    known = {key for s in layout.stored for key in numbering.keys(s)}
    number = {path: i for i, path in enumerate(layout.files)}
    rows = source.opened.show(None).tensors
    if len(rows) == len(known):
        return
    file = {span.name: number.get(span.path, -1) for span in source.opened.spans([])}
    for key, dtype, shape, _ in rows:
        if key not in known:
            kind = f"ignored: {ignored[key]}" if key in ignored else "scales"
            yield Other(key, dtype, shape, file.get(key, -1), kind)


# ----------------------------------------------------------------------------------------- the page


def _page(
    title: str,
    rows: list[tuple[str, Any]],
    sides: list[Side],
    facts: dict[str, Any],
    origins: Any = None,
) -> str:
    parts = [tag("header", tag("h1", title), terms((k, _plain(v)) for k, v in rows))]
    data, maps = [], []
    for side in sides:
        local = side.format.megatron and not side.format.global_keys
        groups = listing.groups(side.layout, Numbering(side.names, local))
        groups += listing.others(side.others)
        data.append({"title": side.title, "files": side.files, "groups": groups})
        maps.append(_maps(side, f"{side.title}: layers" if len(sides) > 1 else "Layers"))
    parts += [*maps[:1], _tensors(data), *maps[1:]]
    parts += [section(name, _fact(value)) for name, value in facts.items() if value]
    parts.append(document.data({"sides": data, "origins": origins}))
    return document.page(title, HERE / "picture.css", *parts, script=HERE / "picture.js")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return f"{value:,}" if type(value) is int and value > 9999 else value


def _fact(value: Any) -> Markup:
    """Returns a fact of the JSON for people."""
    if isinstance(value, dict):
        texts = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in value.items()}
        return terms((k, _plain(v)) for k, v in texts.items() if v not in (None, "", False))
    return listed(value) if isinstance(value, list) else tag("p", value)


def _tensors(data: list[dict[str, Any]]) -> Markup:
    """Returns the place of the list of all tensors, which the script fills when it is opened."""
    count = sum(group["count"] for group in data[0]["groups"])
    options = [tag("option", side["title"], value=i) for i, side in enumerate(data)]
    find = tag(
        "input", type="search", id="find", placeholder="words of a name, file, rule or dtype"
    )
    which = tag("select", *options, id="side", aria_label="checkpoint") if len(data) > 1 else ""
    inner = many(
        [
            tag("p", tag("label", "Search ", find), " ", which, class_="search"),
            tag("p", id="found"),
            tag("p", "A name that ends with [n] is the part n of a tensor that holds several."),
            tag("div", tag("table", id="rows"), class_="wide"),
            tag("button", "Show more", id="more", type="button", hidden=""),
            tag("noscript", "The list of tensors needs JavaScript."),
        ]
    )
    summary = tag("summary", f"{count:,} tensors and parts of tensors")
    opened = tag("details", summary, inner, id="tensors")
    return section("Tensors", opened)


# --------------------------------------------------------------------------------------------- maps


def _maps(side: Side, layers: str) -> Markup:
    """Returns the maps of one checkpoint: of Megatron's ranks, and of the files."""
    rows = Rows(side.names)
    lane = bytes_map.optimizer(side.layout, rows)
    others = [(o.file, o.nbytes) for o in side.others if o.file >= 0]
    files = bytes_map.by_file(side.layout, rows, side.files, others)
    of_files = many(
        [
            _map(rows, files, lane),
            table(
                ["", "file", "bytes"],
                [[c.label, tag("code", c.title), f"{c.nbytes.sum():,}"] for c in files],
            ),
        ]
    )
    if not side.format.megatron:
        text = tag("p", f"{counted(len(files), 'file')} with weights, numbered as listed below.")
        return section(f"{layers} and files", text, of_files)
    folded = tag("details", tag("summary", "Layers and files"), of_files)
    title = f"{layers} and ranks"
    try:
        ranks = bytes_map.by_rank(side.names, side.layout, rows, side.padded_vocab)
    except UsageError as e:
        return section(title, tag("p", f"The ranks are not shown: {e}"), folded)
    columns = [c for stage in ranks for c in stage]
    return section(title, _balance(side, ranks), _map(rows, columns, lane, ranks), folded)


def _balance(side: Side, ranks: Sequence[Sequence[Column]]) -> Markup:
    """Returns sentences on the largest and the mean rank."""
    total = np.array([sum(int(c.nbytes.sum()) for c in columns) for columns in ranks])
    count = np.array([columns[0].count for columns in ranks])
    mean, largest = float(np.average(total, weights=count)), int(total.argmax())
    where = ranks[largest][0].title.partition(":")[0]
    return many(
        [
            tag(
                "p",
                f"The weights that each rank loads at {side.names.parallel}. Ranks of a pipeline"
                " stage that hold equally many bytes of every layer share a column.",
            ),
            tag(
                "p",
                f"The largest rank ({where}) holds {size(int(total.max()))},"
                f" {total.max() / (mean or 1):.3g} times the mean of all ranks, {size(mean)}.",
            ),
        ]
    )


def _map(
    rows: Rows,
    columns: Sequence[Column],
    lane: np.ndarray | None,
    ranks: Sequence[Sequence[Column]] = (),
) -> Markup:
    """Returns a table of layers with the bytes in each column as texts and colours.

    lane: the bytes of the optimizer's state. ranks: the columns of each kind of rank.
    """
    every = np.array([c.nbytes for c in columns]).reshape(len(columns), len(rows.labels))
    used = every.any(0) if lane is None else every.any(0) | (lane > 0)
    most, texts = int(every.max(initial=1)), len(columns) <= MAX_TEXTS
    lane_head = [tag("th", "optimizer state", class_="lane")] if lane is not None else []
    heads = []
    if ranks:
        stages = [
            tag("th", g[0].head + f", {g[0].label}" * (len(g) > 1), colspan=len(g)) for g in ranks
        ]
        heads.append(tag("tr", tag("th", ""), *stages, *lane_head))
        lane_head = [tag("th", "all ranks", class_="lane")] * len(lane_head)
    every_tenth = 1 if len(columns) <= MAX_NUMBERS else 10
    names = [
        tag("th", "" if i % every_tenth else tag("span", _short_label(c, ranks)), title=c.title)
        for i, c in enumerate(columns)
    ]
    heads.append(tag("tr", tag("th", "" if ranks else "file"), *names, *lane_head))
    body = []
    for i in np.flatnonzero(used).tolist():
        cells = [_cell(c, int(c.nbytes[i]), most, texts, rows.labels[i]) for c in columns]
        if lane is not None:
            text = size(int(lane[i])) if lane[i] else ""
            cells.append(tag("td", text, class_="lane"))
        body.append(tag("tr", tag("th", rows.labels[i]), *cells))
    if ranks:
        body += _sums(ranks, lane)
    kind = "map" if texts else "map narrow" if len(columns) <= MAX_NUMBERS else "map narrow tiny"
    scale = [tag("i", class_=f"h{level}") for level in range(1, LEVELS + 1)]
    keys = [tag("span", "few bytes ", *scale, f" {size(most)}", class_="scale")]
    if lane is not None:
        keys.append(tag("span", "optimizer state, of all ranks together", class_="lane-key"))
    drawn = tag("div", tag("table", *heads, *body, class_=kind), class_="wide")
    return tag("figure", tag("div", *keys, class_="legend"), drawn)


def _short_label(column: Column, ranks: Sequence[Sequence[Column]]) -> str:
    if not ranks:
        return column.label
    virtual = column.title.rpartition("virtual stage ")[2] if "virtual" in column.title else ""
    return f"v {virtual}" if virtual else column.label


def _cell(column: Column, nbytes: int, most: int, texts: bool, row: str) -> Markup:
    if not nbytes:
        return tag("td")
    level, text = max(1, -(-nbytes * LEVELS // most)), size(nbytes)
    if texts:
        return tag("td", text, class_=f"h{level}")
    return tag("td", class_=f"h{level}", title=f"{row}, {column.title}: {text}")


def _sums(ranks: Sequence[Sequence[Column]], lane: np.ndarray | None) -> Iterator[Markup]:
    """Yields the rows with the bytes of each rank, and how they compare with the mean."""
    total = [sum(int(c.nbytes.sum()) for c in columns) for columns in ranks]
    mean = float(np.average(total, weights=[columns[0].count for columns in ranks])) or 1.0
    for name, texts, of_lane in (
        ("a rank", [size(n) for n in total], "" if lane is None else size(int(lane.sum()))),
        ("of the mean", [f"{n / mean:.0%}" for n in total], ""),
    ):
        kinds = ("most" if n == max(total) > 1.005 * mean else "sum" for n in total)
        cells = [
            tag("td", text, colspan=len(columns), class_=kind)
            for text, columns, kind in zip(texts, ranks, kinds, strict=True)
        ]
        ends = [tag("td", of_lane, class_="lane")] * (lane is not None)
        yield tag("tr", tag("th", name), *cells, *ends)
