"""The page of a checkpoint (`mckpt inspect --html`) or of a plan (`mckpt plan --html`): what the
command prints, and every tensor with its origin. All of it comes from headers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.checkpoint import inspection
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.plan_data import PlanData, grouped
from mckpt.errors import MckptError, counted, printable, shown
from mckpt.formats.base import Format, Names
from mckpt.geometry.box import Layout
from mckpt.pages import document, listing
from mckpt.pages.document import Markup, listed, many, section, size, tag, terms
from mckpt.pages.listing import Numbering, Other

HERE = Path(__file__).parent


class Side(NamedTuple):
    """A checkpoint that is read, or the one that a plan writes."""

    title: str
    format: Format
    names: Names
    layout: Layout
    root: str
    others: list[Other]

    @property
    def files(self) -> list[str]:
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
    content = plan.json()
    target = Side("Target", plan.destination.format, plan.names, plan.layout, "", [])
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
    side = Side("Source", format, source.names, layout, str(source.opened.root), [])
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
    data = []
    for side in sides:
        local = side.format.megatron and not side.format.global_keys
        groups = listing.groups(side.layout, Numbering(side.names, local))
        groups += listing.others(side.others)
        data.append({"title": side.title, "files": side.files, "groups": groups})
    parts.append(_tensors(data))
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
