"""Writes a verdict as one HTML page that needs nothing else, no script and no network; or as a
small YAML file, to publish with a model.

The same verdict gives the same bytes. A section whose facts are missing is left out: a checkpoint
that does not load has no logits, and level `bytes` has no points.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import StorageError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from mckpt.pages import document
from mckpt.pages.document import (
    NOTHING,
    Markup,
    listed,
    many,
    say,
    section,
    share,
    span,
    table,
    tag,
    terms,
)
from mckpt.storage import descriptors
from mckpt.storage.files import unreadable
from mckpt.storage.staging import STAGING
from mckpt.verification import charts
from mckpt.verification.charts import layer_of
from mckpt.verification.measuring import say_position
from mckpt.verification.pair import say_sizes
from mckpt.verification.verdict import CLEAN, FAULT, Verdict, finite
from mckpt.version import __version__

STYLE = Path(__file__).with_name("report.css")


def page(verdict: Verdict) -> str:
    facts, title = verdict.facts, f"{verdict.verdict.upper()}: mckpt verify"
    sections = (
        ("where", _where),
        ("logits", _logits),
        ("points", charts.states),
        ("scatter", charts.logits),
        ("coverage", _coverage),
        ("points", _layout),
        ("training", charts.training),
        ("dims", _dims),
        ("values", _values),
    )
    shown = [_header(verdict), _reasons(verdict)]
    shown += [make(facts) for fact, make in sections if facts.get(fact)]
    return document.page(title, STYLE, *shown)


def write(verdict: Verdict, path: str | Path) -> None:
    """Writes the page, whole or not at all; raises OSError if that fails."""
    document.write(page(verdict), path)


# -------------------------------------------------------------------------------------- the verdict


def _header(verdict: Verdict) -> Markup:
    facts = verdict.facts
    # level `bytes` compares checkpoints of any two formats
    names = ("first", "second") if facts.get("level") == "bytes" else ("Hugging Face", "Megatron")
    versions = {"mckpt": facts.get("mckpt"), **facts.get("versions", {})}
    rows = [
        (names[0], tag("code", facts.get("hf", "?"))),
        (names[1], tag("code", facts.get("megatron", "?"))),
        ("level", facts.get("level")),
        ("format", facts.get("format")),
        ("iteration", facts.get("iteration")),
        ("resharded", facts.get("resharded")),
        ("sizes of the run", say_sizes(facts["sizes"], True) if "sizes" in facts else None),
        ("ranks", facts.get("ranks")),
        ("device", facts.get("device")),
        ("dtype of the checkpoint", facts.get("dtype")),
        ("transformer_impl", facts.get("impl")),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v) or None),
    ]
    banner = tag("b", verdict.verdict.upper(), class_=verdict.verdict)
    return tag("header", tag("h1", banner, "mckpt verify"), terms(rows))


def _reasons(verdict: Verdict) -> Markup:
    none = "No fault was found." if verdict.verdict == "pass" else "No reason was given."
    return section("Why", listed(verdict.reasons) if verdict.reasons else tag("p", none))


def _where(facts: dict[str, Any]) -> Markup:
    where = facts["where"]
    point = tag("code", where["point"]) if where.get("point") else "no point"
    rows: list[tuple[str, Any]] = [("they differ first at", point)]
    if position := where.get("position"):
        rows.append(("logits differ from", f"{say_position(position)} on"))
    names = {
        "args": "args that differ",
        "hf": "Hugging Face keys that feed this point",
        "stored": "stored tensors that feed this point",
        "differ": "logical tensors whose values differ",
    }
    for key, name in names.items():
        if key in where:
            rows.append((name, listed(where[key], "code") if where[key] else "none"))
    return section("Where", terms([*rows, ("message", where.get("message"))]))


# ------------------------------------------------------------------------------------------- logits

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


def _logits(facts: dict[str, Any]) -> Markup:
    """Returns the measurements of the logits, a column for each dtype."""
    columns = {
        dtype: found | {"apart": abs(found["loss"] - found["loss_hf"])}
        for dtype, found in facts["logits"].items()
    }
    rows = [
        [name, *(show(found[key]) if key in found else "-" for found in columns.values())]
        for name, key, show in MEASURES
        if any(key in found for found in columns.values())
    ]
    bounded = {True: "largest difference", False: "root mean square"}
    rows.append(["the tolerance is for", *(bounded[_is_fp32(c)] for c in columns.values())])
    sentences = [text for dtype, found in columns.items() for text in margins(dtype, found)]
    return section("Logits", table(["", *columns], rows), listed(sentences))


def _is_fp32(found: dict[str, Any]) -> bool:
    return "probe" in found  # a fault is seeded in fp32 only


def margins(dtype: str, found: dict[str, Any]) -> list[str]:
    """Returns sentences that say how far the run and a seeded fault are from the tolerance."""
    below, out = found["below"], []
    if not found["decisive"]:
        out.append(
            f"{dtype} decides nothing here: its noise, {say(found['noise'])}, is too large beside"
            f" the spread of the logits, {say(found['spread'])}"
        )
    if math.isnan(below):
        out.append(f"{dtype}: nothing could be judged")
    elif below == math.inf:
        out.append(f"{dtype}: this run differs nowhere")
    elif below >= 1:
        wanted = f" (at least {CLEAN:g} wanted)" if _is_fp32(found) else ""
        out.append(f"{dtype}: this run stays {say(below)}x below the tolerance{wanted}")
    elif below > 0:
        out.append(f"{dtype}: this run exceeds the tolerance {say(1 / below)}x")
    else:
        out.append(f"{dtype}: this run differs infinitely")
    if _is_fp32(found):
        above = found["probe_above"]
        how = f"exceeds it {say(above)}x" if above > 1 else f"reaches {say(above)} of it"
        out.append(
            f"{dtype}: a seeded fault {how} (at least {FAULT:g} wanted): it moves logits by"
            f" {say(found['probe'])}"
        )
    return out


# --------------------------------------------------------------------------------- tokens and ranks


def _coverage(facts: dict[str, Any]) -> Markup:
    """Returns the parts of the model that the tokens reached."""
    coverage, tokens = facts["coverage"], facts["tokens"]
    rows: list[tuple[str, Any]] = []
    if experts := coverage.get("experts"):
        chosen = [f"{experts['reached']:,} of {experts['of']:,}, counted in every layer"]
        if missing := experts["missing"]:
            layers = (f"layer {layer}: {', '.join(map(str, e))}" for layer, e in missing.items())
            chosen += [", never chosen:", listed(layers)]
        rows.append(("experts chosen", many(chosen)))
    embedded = coverage["embedding_rows"]
    rows.append(("rows of the embedding", f"{embedded['reached']:,} of {embedded['of']:,}"))
    if window := coverage.get("window"):
        how = "exceeded" if window["exceeded"] else "not exceeded, so it was not tested"
        longest = f"the longest sequence is {window['longest_sequence']:,}"
        rows.append(("sliding window", f"{window['window']:,}, {longest}: {how}"))
    positions, lengths = coverage["positions"], ", ".join(map(say, tokens["lengths"]))
    rows += [
        ("positions", f"{say(positions['longest_sequence'])} of {say(positions['of'])}"),
        ("sequences", f"{tokens['sequences']:,}, of {lengths} tokens"),
        ("positions judged", f"{tokens['judged']:,} of {tokens['positions']:,}"),
        ("ties between experts that fell otherwise", f"{tokens['ties']:,}" if experts else None),
    ]
    if image := facts.get("image"):
        given = "with the features that the tower of transformers makes of noise"
        rows += [
            ("places of the image", f"{image['places']:,} of {image['positions']:,}, {given}"),
            ("tensors of towers that are equal", image.get("towers_equal")),
        ]
    return section("Coverage of the tokens", terms(rows))


def _layout(facts: dict[str, Any]) -> Markup:
    """Returns the layers of each pipeline stage, and the experts of each rank."""
    layers = [n for row in facts["points"] if (n := layer_of(row["point"])) is not None]
    title = "Layers and experts of each rank"
    try:
        parallel = Parallel(**{k: v for k, v in facts["sizes"].items() if k != "cp"})
        stages = parallel.stages(max(layers, default=-1) + 1)
    except UsageError as e:
        return section(title, tag("p", f"The sizes alone do not say: {e}"))
    per_stage = facts["ranks"] // parallel.pp
    differs = layer_of(facts.get("where", {}).get("point") or "")
    rows: list[list[Any]] = []
    for p, virtual in enumerate(stages):
        ranks = span(range(p * per_stage, (p + 1) * per_stage))
        row: list[Any] = [f"stage {p}", f"ranks {ranks}"]
        for v, layers_here in enumerate(virtual):
            before = "embed, " if p == v == 0 else ""
            last = p == parallel.pp - 1 and v == parallel.vpp - 1
            after = ", norm, head" if last else ""
            mark = {"class_": "here"} if differs in layers_here else {}
            row.append(tag("td", f"{before}{span(layers_here)}{after}", **mark))
        rows.append(row)
    names = [f"virtual stage {v}" for v in range(parallel.vpp)] if parallel.vpp > 1 else ["layers"]
    experts = _experts(facts, parallel, per_stage)
    return section(title, table(["", "", *names], rows), experts)


def _experts(facts: dict[str, Any], parallel: Parallel, per_stage: int) -> Markup:
    count = facts.get("coverage", {}).get("experts", {}).get("per_layer", 0)
    if not count or count % parallel.ep:
        return NOTHING
    each, rows = count // parallel.ep, []
    for e in range(parallel.ep):
        on = [str(r) for r in range(per_stage) if r // parallel.expert_tp % parallel.ep == e]
        rows.append([f"ep rank {e}", span(range(e * each, (e + 1) * each)), ", ".join(on)])
    return table(["", "experts of a layer", "ranks, counted within a stage"], rows)


# --------------------------------------------------------------------------------- dims and tensors


def _dims(facts: dict[str, Any]) -> Markup:
    rows = [[d["dim"], tag("code", d["arg"]), d["hf"], d["megatron"]] for d in facts["dims"]]
    return section("Dims that differ", table(["dim", "arg", "config", "args"], rows))


def _values(facts: dict[str, Any]) -> Markup:
    found = facts["values"]
    counts = [
        ("equal to the last bit", f"{found['tensors_equal']:,} logical tensors"),
        ("compared", f"{found['bytes_compared']:,} bytes"),
    ]
    if after_cast := found["equal_after_cast"]:
        counts.append(("of these after a cast", f"{after_cast:,} logical tensors"))
    parts = [terms(counts)]
    head = ["tensor that differs", "in", "first", "second", "at", "elements", "max abs"]
    rows = [
        [
            tag("code", change["name"]),
            change["what"],
            change["left"],
            change["right"],
            "-" if change["first"] is None else list(change["first"]),
            say(change["count"] or None),
            say(change["max_abs"]),
        ]
        for change in found["changed"]
    ]
    if rows:
        parts.append(table(head, rows))
    names = {
        "missing": "Only in the first",
        "extra": "Only in the second",
        "dropped": "Dropped by the mapping and not compared",
    }
    for key, name in names.items():
        if found[key]:
            parts += [tag("h3", f"{name}: {len(found[key]):,}"), listed(found[key], "code")]
    return section("Tensors", *parts)


BLOCK = 1 << 20  # bytes that one thread reads at once
MOST = 16  # numbers in a list that the card shows
HEAD = """\
# The verdict of `mckpt verify`: whether two checkpoints hold one model. `sha256` of a side is what
#     find -L . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum
# prints in the directory of its checkpoint.
"""


def write_card(
    found: Verdict, hf: str | Path, megatron: str | Path, iteration: int | None, path: Path
) -> None:
    """Writes the card of a verdict on these two checkpoints.

    iteration: of the Megatron checkpoint; None: the one that the tracker names.
    """
    import yaml

    facts = found.facts
    card: dict[str, Any] = {
        "verdict": found.verdict,
        "reasons": found.reasons,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "mckpt": __version__,
        "checkpoints": {
            "hf": _side(Checkpoint.open(hf)),
            "megatron": _side(Checkpoint.open(megatron, SourceOptions(iteration=iteration))),
        },
    }
    for key in ("sizes", "ranks", "device", "dtype", "impl", "versions"):
        if key in facts:
            card[key] = facts[key]
    if values := facts.get("values"):
        card["values"] = {
            name: values[name] for name in ("tensors_equal", "equal_after_cast", "bytes_compared")
        }
    if logits := facts.get("logits"):
        card["logits"] = {dtype: _plain(measured) for dtype, measured in logits.items()}
    for key in ("tokens", "coverage", "image", "training"):
        if key in facts:
            card[key] = _plain(facts[key])
    text = HEAD + yaml.safe_dump(finite(card), sort_keys=False, width=100)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{path}: cannot be written: {e.strerror or e}") from e


def _plain(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are single numbers, words or small tables of them."""
    out: dict[str, Any] = {}
    for key, value in measured.items():
        if isinstance(value, dict):
            out[key] = _plain(value)
        elif isinstance(value, (bool, int, float, str)) or value is None:
            out[key] = value
        elif isinstance(value, list) and len(value) <= MOST:
            out |= {key: value} if all(isinstance(v, (int, float)) for v in value) else {}
    return out


def _side(source: Checkpoint) -> dict[str, Any]:
    """Returns what identifies one checkpoint: its name, format, files and their hash."""
    root = source.opened.root
    out: dict[str, Any] = {
        "name": Path(os.path.realpath(source.path)).name,
        "format": source.format,
    }
    if source.is_megatron:
        out |= {"directory": root.name, "parallel": str(source.parallel)}
    return {**out, **fingerprint(root)}


def fingerprint(root: Path) -> dict[str, Any]:
    """Returns the number of files of a directory, their bytes, and the sha256 of the lines that
    sha256sum prints for them, sorted by name.
    """
    paths = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(STAGING)]
        paths += [Path(folder) / name for name in names]
    files = (p for p in paths if p.is_file())
    paths = sorted(files, key=lambda p: os.fsencode(f"./{p.relative_to(root)}"))
    with ThreadPoolExecutor(os.cpu_count() or 1, "hash") as pool:
        sums = list(pool.map(_sha256, paths))
    lines = "".join(f"{s}  ./{p.relative_to(root)}\n" for s, p in zip(sums, paths, strict=True))
    return {
        "files": len(paths),
        "bytes": sum(p.stat().st_size for p in paths),
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        for block in descriptors.blocks(path, BLOCK):
            digest.update(block)
    except OSError as e:
        raise unreadable(path, e) from e
    return digest.hexdigest()
