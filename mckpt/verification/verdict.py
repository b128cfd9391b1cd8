"""What two runs of one model say: pass, fail and where, or too little to tell.

Reads arrays that the runs left; runs nothing itself.

The tolerance of the logits is not chosen, it is measured: NOISE times what transformers differs
from itself with its sums in another order, on the same tokens. A fault moves logits thousands of
times as far; that too is measured, by seeding one (the probe).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import __version__, errors
from mckpt.checkpoint import comparison
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError

# fp32: Megatron-Core's logits are 0 to 2 times as far from transformers' as these are from their
# own in another order of summation (all families, tp 1 to 4); 10 leaves a clean run three times
# below, a fault is 1,000 times above.
NOISE = 10.0
# of the logits' standard deviation: a noise above SHARE / NOISE of it could hide a fault, and then
# nothing is said
SHARE = 0.01
# The checkpoint's own dtype: there transformers is compared with its fp32 self, root mean square
# over all positions.
LOW_NOISE = 4.0
LOW_SHARE = 0.5
# of the largest logit: two units in the last place of fp32, below which no noise is believed
ROUNDING = 2.0**-21
TIES = 30.0  # noises of the router's logits: a choice of experts this close may fall either way
# tolerances in a difference of fp32 logits must be at least this many; docs/gpu-verification.md has
# 295 clean runs, the least at 4.28
CLEAN = 3.0
FAULT = 10.0  # tolerances that a fault has to exceed, and that the probe's does
LISTED = 40


@dataclass
class Verdict:
    """What was found.

    `verdict` is pass, fail or incomplete; `reasons` say why, `facts` is everything measured, as
    plain data.
    """

    verdict: str
    reasons: list[str]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 for pass; anything else is no pass, and comes with a verdict: 1."""
        return 0 if self.verdict == "pass" else 1

    def json(self) -> dict[str, Any]:
        """Plain data; the pairs of logits for the plot are left out."""
        return {
            "verdict": self.verdict,
            "reasons": self.reasons,
            **finite({k: v for k, v in self.facts.items() if k != "scatter"}),
        }

    def lines(self) -> list[str]:
        """What was measured, a line each, and the reasons."""
        out = [f"note: {note}" for note in self.facts.get("notes", [])]
        if resharded := self.facts.get("resharded"):
            out.append(f"resharded {resharded}: what ran is that copy, not the files themselves")
        for dtype, m in self.facts.get("logits", {}).items():
            worst = m["rms"] if dtype != "float32" else m["max_abs"]
            out.append(
                f"logits {dtype}: {'rms' if dtype != 'float32' else 'max'} {worst:.3g}, tolerance"
                f" {m['tolerance']:.3g} (noise of transformers {m['noise']:.3g}, spread"
                f" {m['spread']:.3g}), KL {m['kl']:.2g}, top-1 {m['top1']:.2%}, loss"
                f" {m['loss']:.5f} and {m['loss_hf']:.5f}"
            )
            if not m["decisive"]:
                out.append(f"so much noise decides nothing in {dtype}")
            if "probe_above" in m:
                out.append(
                    f"margins: {m['below']:.3g} times below the tolerance; a seeded fault is"
                    f" {m['probe_above']:.3g} times above it"
                )
        for index, (first, second) in self.facts.get("measured_again", {}).items():
            out.append(
                f"the noise of sequence {index} was measured twice: {first:.3g}, then {second:.3g}"
            )
        if tokens := self.facts.get("tokens"):
            reached = [
                f"{what.replace('_', ' ')} {c['reached']:,} of {c['of']:,}"
                for what, c in self.facts["coverage"].items()
                if "reached" in c
            ]
            out.append(
                f"{tokens['judged']:,} of {tokens['positions']:,} positions of"
                f" {tokens['sequences']} sequences; {', '.join(reached)}"
            )
        if values := self.facts.get("values"):
            cast = (
                f", {values['equal_after_cast']:,} of them after a cast that mckpt.json or the"
                " mapping names"
                if values["equal_after_cast"]
                else ""
            )
            out.append(
                f"{values['tensors_equal']:,} tensors are equal to the last bit{cast}"
                f" ({values['bytes_compared']:,} bytes)"
            )
        if training := self.facts.get("training"):
            out.append(
                f"{len(training['losses'][0])} steps at two layouts: losses"
                f" {training['max_abs']:.3g} apart, tolerance {training['tolerance']:.3g}"
            )
        return out + self.reasons


@dataclass
class Pair:
    """A Hugging Face checkpoint and the Megatron checkpoint that is judged, under `name` in the
    working directory.
    """

    name: str
    left: Checkpoint
    right: Checkpoint
    path: Path  # of the Megatron checkpoint
    sizes: dict[str, int]  # tp, pp, vpp, ep, etp, cp of the run
    apart: list[dict[str, Any]]  # dims that config and args say differently: dim, arg, hf, megatron
    unread: str | None = None  # why the args could not be read
    # what a reader must know that changes no verdict
    notes: list[str] = field(default_factory=list)
    # dims that --allow-inexact let differ, so that the verdict is no pass
    unlike: list[str] = field(default_factory=list)
    # how an uneven pipeline of the run is split, in the fields of Parallel
    split: dict[str, Any] = field(default_factory=dict)


@dataclass
class Values:
    """The stored values of a pair, compared: their difference, and rows of the vocabulary's padding
    that a conversion cannot have made.
    """

    difference: comparison.Difference
    padding: list[str] = field(default_factory=list)

    def reasons(self, left: Checkpoint, right: Checkpoint) -> list[str]:
        """Why the two are not the same; empty if they are."""
        out = [f"{name}: only in {left.path}" for name in self.difference.missing]
        out += [f"{name}: only in {right.path}" for name in self.difference.extra]
        return [*self.difference.replicas, *out, *map(str, self.difference.changed), *self.padding]

    def not_compared(self) -> list[str]:
        """Why equal values are no proof; empty if they are one."""
        out = list(self.difference.infinite)
        if left_out := self.difference.left_out:
            shown = "; ".join(left_out[:LISTED]) + (" ..." if len(left_out) > LISTED else "")
            out.append(
                f"the mapping ignores {len(left_out):,} weights, which were not compared: {shown}"
            )
        return out


# ------------------------------------------------------------------------------------------ judging


class _Runs:
    """What both sides left in the working directory, sequence by sequence."""

    def __init__(self, work: Path, name: str, num_ranks: int) -> None:
        self.work, self.name = work, name
        self.said = json.loads((work / "reference.json").read_text())
        self.sequences: list[list[int]] = self.said["sequences"]
        self.ranks = range(num_ranks)

    def reference(self, index: int) -> Any:
        return np.load(self.work / f"reference.{index}.npz")

    def logits(self, index: int) -> Any:
        return np.load(self.work / f"{self.name}.{index}.npz")

    def states(self, index: int) -> list[Any]:
        return [
            np.load(p)
            for r in self.ranks
            if (p := self.work / f"{self.name}.rank{r}.{index}.npz").exists()
        ]

    def gather(self, side: str, key: str, judged: list[np.ndarray] | None = None) -> np.ndarray:
        """Per-position values of all sequences in one array, those judged if said."""
        rows = []
        for index in range(len(self.sequences)):
            with (self.reference if side == "reference" else self.logits)(index) as kept:
                rows.append(kept[key] if judged is None else kept[key][judged[index]])
        return np.concatenate(rows)


def judge(pair: Pair, values: Values | str, work: Path, device: str, num_ranks: int) -> Verdict:
    """Level `forward`: judges the stored values and what both sides left in `work`.

    `values` is a sentence that says why the tensors could not be compared, where args that differ
    are the reason.
    """
    ran = json.loads((work / f"{pair.name}.json").read_text())
    if "error" in ran:
        return does_not_load(pair, getattr(errors, ran["error"]["class"])(ran["error"]["message"]))
    facts = _facts(pair) | {"ranks": num_ranks, "device": device}
    reasons = _of_args(pair)
    runs = _Runs(work, pair.name, num_ranks)
    facts |= {k: ran[k] for k in ("dtype", "impl", "iteration")} | {
        "versions": runs.said["versions"] | ran["versions"]
    }
    if ran["unread"]:
        reasons += [
            f"{key}: in the checkpoint, and the model that its args describe has no such tensor"
            for key in ran["unread"][:LISTED]
        ]

    judged, ties, routed = _judged(runs)
    facts["logits"] = {"float32": _logits(runs, judged)}
    if ran["dtype"] != "float32":
        facts["logits"][ran["dtype"]] = _low(runs)
    if pair.sizes["cp"] > 1:  # what ran once more, in the checkpoint's dtype alone
        facts["logits"][f"{ran['dtype']}, cp {pair.sizes['cp']}"] = _low(
            _Runs(work, f"{pair.name}.cp", 0)
        )
    if again := runs.said.get("measured_again"):
        facts["measured_again"] = again
    facts["points"] = _points(runs, judged)
    facts["tokens"] = {
        "sequences": len(runs.sequences),
        "positions": sum(map(len, runs.sequences)),
        "judged": int(sum(j.sum() for j in judged)),
        "lengths": sorted({len(s) for s in runs.sequences}),
        "ties": ties,
    }
    facts["coverage"] = _coverage(pair, runs, judged)
    facts["scatter"] = _scatter(runs)
    wrong = [
        *routed,
        *(text for dtype, m in facts["logits"].items() if (text := _too_far(dtype, m))),
    ]
    apart = [values] if isinstance(values, str) else values.reasons(pair.left, pair.right)
    if not isinstance(values, str):
        facts["values"] = values.difference.json()
    if wrong or reasons or apart:
        facts["where"] = _where(pair, values, runs, facts, judged)
        wrong = [
            *apart[:LISTED],
            *([f"and {len(apart) - LISTED:,} more"] if len(apart) > LISTED else []),
            *wrong,
        ]
        if facts["where"]["point"]:
            wrong.append(_say_where(facts["where"]))
        return Verdict("fail", [*reasons, *wrong], facts)
    missing = [
        *pair.unlike,
        *(values.not_compared() if isinstance(values, Values) else []),
        *_incomplete(facts),
    ]
    return Verdict("incomplete" if missing else "pass", missing, facts)


def _too_far(dtype: str, measured: dict[str, Any]) -> str | None:
    """That the logits differ by more than the tolerance, if they do."""
    if dtype == "float32":
        worst, what = measured["max_abs"], "logits"
    else:
        worst, what = measured["rms"], f"logits in {dtype} (root mean square)"
        if not measured["decisive"]:
            return None
    # nan: no position could be judged, which makes the verdict incomplete
    if worst <= measured["tolerance"] or math.isnan(worst):
        return None
    times = worst / measured["tolerance"]
    return (
        f"{what} differ by {worst:.3g}, {times:.3g} times the tolerance {measured['tolerance']:.3g}"
    )


def does_not_load(pair: Pair, error: MckptError) -> Verdict:
    """The verdict where args that differ from the config are why; raises the error where they do
    not.
    """
    reasons = _of_args(pair)
    if not reasons:
        raise error
    where = {"point": "load", "args": [d["arg"] for d in pair.apart], "message": str(error)}
    return Verdict(
        "fail",
        [*reasons, f"so the checkpoint does not load: {error}"],
        _facts(pair) | {"where": where},
    )


def _facts(pair: Pair) -> dict[str, Any]:
    return {
        "hf": str(pair.left.path),
        "megatron": str(pair.path),
        "format": pair.right.format,
        "mckpt": __version__,
        "sizes": {**pair.sizes, **pair.split},
        "dims": pair.apart,
        **({"notes": pair.notes} if pair.notes else {}),
    }


def _of_args(pair: Pair) -> list[str]:
    return [*map(say_dim, pair.apart), *([pair.unread] if pair.unread else [])]


def _judged(runs: _Runs) -> tuple[list[np.ndarray], int, list[str]]:
    """Which positions count: [seq] bool for each sequence; how many choices of experts were ties;
    and choices that differ and were none.

    Where two experts score within the noise of each other, rounding chooses, and all that follows
    in that sequence may differ: such a choice that fell differently, here or between transformers'
    own two runs, takes the positions from there on out. One that was no tie is a fault.
    """
    judged: list[np.ndarray] = []
    ties, faults = 0, list[str]()
    for index, tokens in enumerate(runs.sequences):
        with runs.reference(index) as reference:
            counts = _steady(reference, len(tokens))
            ties += int(not counts.all())
            held = {k: s for s in runs.states(index) for k in s.files if k.startswith("experts_")}
            for key in sorted(
                (k for k in reference.files if k.startswith("experts_")),
                key=lambda k: int(k.split("_")[1]),
            ):
                ours, theirs, scores = (
                    reference[key],
                    held[key][key],
                    reference[key.replace("experts", "router")],
                )
                margins = reference[key.replace("experts", "margin")]
                moved = reference[key.replace("experts", "noise_router")][
                    _steady(reference, len(tokens))
                ]
                noise = max(float(moved.max(initial=0)), float(np.abs(scores).max()) * ROUNDING)
                for at in np.flatnonzero((ours != theirs).any(1) & counts):
                    if not counts[at]:
                        continue
                    if margins[at] <= TIES * noise and theirs[at].sum() == ours[at].sum():
                        counts[at:] = False
                        ties += 1
                    elif not faults:
                        layer = key.split("_")[1]
                        faults.append(
                            f"layer {layer} sends token {at} of sequence {index} to experts"
                            f" {np.flatnonzero(theirs[at]).tolist()}, transformers to"
                            f" {np.flatnonzero(ours[at]).tolist()}, and the scores are no tie"
                        )
        judged.append(counts)
    return judged, ties, faults


def _steady(reference: Any, length: int) -> np.ndarray:
    """Positions [seq] before the first choice of experts that fell otherwise when transformers ran
    with its sums in another order.
    """
    counts = np.ones(length, bool)
    for key in (k for k in reference.files if k.startswith("experts_")):
        other = np.flatnonzero((reference[key] != reference[f"noise_{key}"]).any(1))
        counts[int(other[0]) if len(other) else length :] = False
    return counts


def _logits(runs: _Runs, judged: list[np.ndarray]) -> dict[str, Any]:
    """The fp32 logits against the tolerance; largest difference over vocabulary and judged
    positions.
    """
    noise = float(runs.gather("reference", "noise_max_abs", judged).max(initial=0))
    size = max(
        float(np.abs(np.load(runs.work / f"logits.{i}.npy", mmap_mode="r")).max())
        for i in range(len(runs.sequences))
    )
    spread = float(runs.gather("reference", "noise_spread").mean())
    found = _measures(runs, "", judged)
    tolerance = min(NOISE * max(noise, ROUNDING * size), SHARE * spread)
    worst = found["max_abs"]
    return {
        **found,
        "noise": noise,
        "spread": spread,
        "tolerance": tolerance,
        "bound": SHARE * spread,
        "decisive": NOISE * noise <= SHARE * spread,
        "below": tolerance / worst if worst else math.inf,
        "probe": runs.said["probe"],
        "probe_above": runs.said["probe"] / tolerance,
    }


def _low(runs: _Runs) -> dict[str, Any]:
    """The logits in the checkpoint's dtype against transformers' in fp32, beside transformers' own
    in that dtype.
    """
    found = _measures(runs, "low_", None)
    noise = float(np.sqrt(runs.gather("reference", "low_mean_square").mean()))
    spread = float(runs.gather("reference", "noise_spread").mean())
    tolerance = min(LOW_NOISE * noise, LOW_SHARE * spread)
    return {
        **found,
        "noise": noise,
        "spread": spread,
        "tolerance": tolerance,
        "bound": LOW_SHARE * spread,
        "decisive": LOW_NOISE * noise <= LOW_SHARE * spread,
        "below": tolerance / found["rms"] if found["rms"] else math.inf,
        "kl_transformers": float(runs.gather("reference", "low_kl").mean()),
        "top1_transformers": float(runs.gather("reference", "low_top1").mean()),
    }


def _measures(runs: _Runs, prefix: str, judged: list[np.ndarray] | None) -> dict[str, float]:
    def of(key: str) -> np.ndarray:
        return runs.gather("logits", prefix + key, judged)

    if judged is not None and not any(j.any() for j in judged):
        return dict.fromkeys(
            ("max_abs", "rms", "kl", "kl_max", "top1", "loss", "loss_hf"), math.nan
        )
    worst, squares, kl = of("max_abs"), of("mean_square"), of("kl")
    finite = bool(np.isfinite(worst).all())
    return {
        "max_abs": float(worst.max()) if finite else math.inf,
        "rms": float(np.sqrt(squares.mean())) if finite else math.inf,
        "kl": float(kl.mean()) if finite else math.inf,
        "kl_max": float(kl.max()) if finite else math.inf,
        "top1": float(of("top1").mean()),
        "loss": float(np.nanmean(of("loss"))) if finite else math.inf,
        "loss_hf": float(np.nanmean(of("loss_reference"))),
    }


def _points(runs: _Runs, judged: list[np.ndarray]) -> list[dict[str, Any]]:
    """Every point in the order of the computation: largest difference of a judged position, its
    noise, and the size of the state.
    """
    out: dict[str, dict[str, Any]] = {}
    for index in range(len(runs.sequences)):
        theirs = {k: s for s in runs.states(index) for k in s.files}
        with runs.reference(index) as reference:
            for key in (k for k in reference.files if k.startswith("state_")):
                row = out.setdefault(
                    key.removeprefix("state_"), {"difference": 0.0, "noise": 0.0, "size": 0.0}
                )
                ours = reference[key]
                with np.errstate(invalid="ignore", over="ignore"):
                    apart = np.linalg.norm(ours.astype("f8") - theirs[key][key], axis=-1)
                apart = np.where(np.isfinite(apart), apart, math.inf)[judged[index]]
                row["size"] = max(row["size"], float(np.linalg.norm(ours, axis=-1).max()))
                row["noise"] = max(
                    row["noise"], float(reference["noise_" + key][judged[index]].max(initial=0))
                )
                row["difference"] = max(row["difference"], float(apart.max(initial=0)))
    for row in out.values():
        row["tolerance"] = min(
            NOISE * max(row["noise"], ROUNDING * row["size"]), SHARE * row["size"]
        )
    order = sorted(out, key=_order)
    return [{"point": name, **out[name]} for name in order]


def _order(point: str) -> tuple[int, int, int]:
    """embed, then each layer's attn, mlp and end, then final_norm."""
    if not point.startswith("layers."):
        return (0 if point == "embed" else 2, 0, 0)
    _, layer, *part = point.split(".")
    return (1, int(layer), {"attn": 0, "mlp": 1}.get(part[0] if part else "", 2))


def _coverage(pair: Pair, runs: _Runs, judged: list[np.ndarray]) -> dict[str, Any]:
    """What the tokens of judged positions reached."""
    dims = pair.left.dims
    longest = max(map(len, runs.sequences))
    seen = {
        token
        for tokens, counts in zip(runs.sequences, judged, strict=True)
        for token in np.array(tokens)[counts].tolist()
    }
    out: dict[str, Any] = {"embedding_rows": {"reached": len(seen), "of": dims["vocab_size"]}}
    reached: dict[int, np.ndarray] = {}
    for index in range(len(runs.sequences)):
        with runs.reference(index) as reference:
            for key in (k for k in reference.files if k.startswith("experts_")):
                layer = int(key.removeprefix("experts_"))
                reached[layer] = reached.get(layer, False) | reference[key][judged[index]].any(0)
    if reached:
        missing = {
            str(layer): np.flatnonzero(~r).tolist()
            for layer, r in sorted(reached.items())
            if not r.all()
        }
        out["experts"] = {
            "reached": int(sum(r.sum() for r in reached.values())),
            "of": sum(map(len, reached.values())),
            "missing": missing,
        }
        out["experts"]["per_layer"] = max(map(len, reached.values()))
    if dims.get("sliding_window"):
        out["window"] = {
            "window": dims["sliding_window"],
            "longest_sequence": longest,
            "exceeded": longest > dims["sliding_window"],
        }
    out["positions"] = {"longest_sequence": longest, "of": dims["max_positions"]}
    return out


def _incomplete(facts: dict[str, Any]) -> list[str]:
    """Why a run that found no fault is no proof."""
    out, coverage, tokens = [], facts["coverage"], facts["tokens"]
    experts = coverage.get("experts")
    if experts and experts["missing"]:
        where = "; ".join(
            f"layer {layer}: {', '.join(map(str, e[:8]))}{' ...' if len(e) > 8 else ''}"
            for layer, e in list(experts["missing"].items())[:8]
        )
        out.append(
            f"{experts['of'] - experts['reached']} of {experts['of']} experts were never chosen"
            f" ({where}); give --tokens that reach them"
        )
    window = coverage.get("window")
    if window and not window["exceeded"]:
        out.append(
            f"no sequence is longer than the window of {window['window']}; give --tokens with one"
            " that is"
        )
    dtype, logits = next(iter(facts["logits"].items()))
    if not logits["decisive"]:
        out.append(
            f"the noise of {dtype}, {logits['noise']:.3g}, is too large beside the logits' spread"
            f" {logits['spread']:.3g} to tell a fault"
        )
    elif logits.get("below", math.inf) < CLEAN:
        out.append(
            f"the logits stay only {logits['below']:.2g} times below the tolerance, and those of a"
            f" clean conversion stay {CLEAN:g} times below it at least"
        )
    elif logits.get("probe_above", math.inf) < FAULT:
        above = f"{logits['probe_above']:.2g} times the tolerance"
        out.append(
            f"a seeded fault moved logits by {logits['probe']:.3g} only, {above}: another could be"
            " missed"
        )
    if tokens["judged"] < tokens["positions"] / 2:
        out.append(
            f"only {tokens['judged']:,} of {tokens['positions']:,} positions could be judged:"
            f" {tokens['ties']} choices of experts were ties, and rounding chose another; give more"
            " and shorter sequences"
        )
    return out


def _scatter(runs: _Runs) -> list[list[float]]:
    """Some pairs of logits, the reference's first."""
    pairs = np.concatenate([runs.logits(i)["scatter"] for i in range(len(runs.sequences))])
    return [[float(a), float(b)] for a, b in pairs[:: max(1, len(pairs) // 2000)]]


# -------------------------------------------------------------------------------------------- where


def _where(
    pair: Pair, values: Values | str, runs: _Runs, facts: dict[str, Any], judged: list[np.ndarray]
) -> dict[str, Any]:
    """The first point whose states part, the tensors that feed it, and those whose
    values differ.
    """
    point = next((p["point"] for p in facts["points"] if p["difference"] > p["tolerance"]), None)
    if point is None and any(_too_far(dtype, m) for dtype, m in facts["logits"].items()):
        point = "logits"
    out: dict[str, Any] = {"point": point, "args": [d["arg"] for d in pair.apart]}
    if point is not None:
        first = [
            (i, int(at[0]))
            for i in range(len(runs.sequences))
            if len(at := np.flatnonzero(_beyond(runs, i, facts) & judged[i]))
        ]
        out["position"] = (
            dict(zip(("sequence", "position"), first[0], strict=True)) if first else None
        )
    try:
        out |= _tensors(pair, values, point)
    except MckptError as e:  # the args describe no layout that fits
        out["message"] = str(e)
    return out


def _beyond(runs: _Runs, index: int, facts: dict[str, Any]) -> np.ndarray:
    """Positions [seq] whose logits are further apart than the tolerance."""
    return np.asarray(~(runs.logits(index)["max_abs"] <= facts["logits"]["float32"]["tolerance"]))


def _tensors(pair: Pair, values: Values | str, point: str | None) -> dict[str, Any]:
    """Stored tensors that feed the point, and logical tensors whose values differ."""
    out: dict[str, Any] = {}
    if point is not None:
        out["logical"] = sorted(
            {n for n in pair.left if feeds(n, point, bool(pair.left.dims["tied"]))}, key=_by_number
        )
        out["hf"], out["stored"] = (
            _keys(pair.left, out["logical"]),
            _keys(pair.right, out["logical"]),
        )
    if isinstance(values, Values):
        found = values.difference
        out["differ"] = [c.name for c in found.changed] + found.missing + found.extra
    return out


def feeds(name: str, point: str, tied: bool) -> bool:
    """Whether the logical tensor takes part in what is computed between the point before and this
    one.
    """
    if point == "logits":
        return name.startswith("embed." if tied else "lm_head.")
    if point == "embed":
        return name.startswith("embed.")
    if point == "final_norm":
        return name.startswith("final_norm.")
    layer, _, part = point.removeprefix("layers.").partition(".")
    inside = name.removeprefix(f"layers.{layer}.")
    return inside != name and (
        not part or inside.startswith(("attn",) if part == "attn" else ("mlp", "moe"))
    )


def _keys(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """The stored tensors that hold these logical tensors."""
    wanted, out = set(names), []
    for stored in (s for s in checkpoint.layout.stored if not s.replica):
        templates = list(dict.fromkeys(p.tensor for p in stored.pieces))
        for layer, expert in zip(stored.layer.tolist(), stored.expert.tolist(), strict=True):
            if any(t.format(layer=layer, expert=expert) in wanted for t in templates):
                out.append(
                    stored.key.format(
                        layer=layer, expert=expert, mtp=layer - checkpoint.dims["num_layers"]
                    )
                )
    return list(dict.fromkeys(out))


def _by_number(name: str) -> list[Any]:
    return [int(p) if p.isdigit() else p for p in name.split(".")]


def say_dim(d: dict[str, Any]) -> str:
    return f"{d['arg']} ({d['dim']}): the config says {d['hf']}, the args say {d['megatron']}"


def _say_where(where: dict[str, Any]) -> str:
    text = f"they part first at {where['point']}"
    if where.get("position"):
        text += (
            f", and the logits from position {where['position']['position']} of sequence"
            f" {where['position']['sequence']} on"
        )
    if where.get("differ"):
        shown = where["differ"][:LISTED]
        text += f"; tensors whose values differ: {', '.join(shown)}" + (
            f" and {len(where['differ']) - LISTED} more" if len(where["differ"]) > LISTED else ""
        )
    elif "differ" in where and not where["args"]:
        text += (
            f"; no tensor's value differs, so it is how {', '.join(where['stored'][:4])} are"
            " packed, or an arg that mckpt does not compare"
        )
    return text


# ----------------------------------------------------------------------------------------- training


def judge_training(
    found: Verdict, sizes: Sequence[dict[str, int]], curves: Sequence[Sequence[dict[str, float]]]
) -> dict[str, Any]:
    """How two curves of {loss, grad_norm} agree, within SHARE of what training moved the loss by;
    may turn the verdict.
    """
    losses, norms = (
        np.array([[step[key] for step in curve] for curve in curves])
        for key in ("loss", "grad_norm")
    )
    moved = float(losses.max(1).max() - losses.min(1).min())
    apart = float(np.abs(losses[0] - losses[1]).max())
    norms_apart = float((np.abs(norms[0] - norms[1]) / norms[0]).max())
    tolerance = SHARE * moved
    rounding = ROUNDING * float(losses.max())
    said = {
        "sizes": list(sizes),
        "losses": losses.tolist(),
        "grad_norms": norms.tolist(),
        "moved": moved,
        "max_abs": apart,
        "tolerance": tolerance,
        "below": tolerance / apart if apart else math.inf,
        "grad_norm_apart": norms_apart,
        "grad_norm_tolerance": SHARE,
    }
    both = " and ".join(
        ", ".join(f"{k} {v}" for k, v in s.items() if v > 1) or "one rank" for s in sizes
    )
    if not apart <= tolerance or not norms_apart <= SHARE:
        found.verdict = "fail"
        found.reasons.append(
            f"trained at {both}, losses differ by {apart:.3g} (tolerance {tolerance:.3g},"
            f" {SHARE:.0%} of what training moved them by) and gradient norms by {norms_apart:.2%}"
            f" (tolerance {SHARE:.0%})"
        )
    elif tolerance < FAULT * rounding:
        found.verdict = "incomplete"
        found.reasons.append(
            f"{losses.shape[1]} steps moved the loss by {moved:.3g} only, too little to compare"
            " curves; give more --steps"
        )
    return said


# --------------------------------------------------------------------------------------- plain data


def finite(value: Any) -> Any:
    """Plain data that JSON can say: infinite and undefined numbers as text."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
