"""Measures how far the two runs of a model are from each other, from the arrays that they left, and
finds where they start to differ.

The tolerance of the logits is measured, not chosen. It is NOISE times the difference between two
runs of transformers on the same tokens, the second of which adds its sums in another order. A fault
moves the logits thousands of times as far. That is measured too: the reference run seeds a fault
(the probe).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError
from mckpt.verification.pair import LISTED, Pair, Values

# Of fp32 logits: the tolerance in noises of transformers. Megatron-Core's logits were 0 to 2 noises
# away from transformers' (all families, tp 1 to 4), and faults 1,000 tolerances.
NOISE = 10.0
# The largest tolerance, in standard deviations of the logits. A larger one could hide a fault, so
# the measurement then decides nothing.
SHARE = 0.01
# The same two for logits in the checkpoint's own dtype. The noise is the difference between
# transformers in that dtype and in fp32, the root mean square over all positions.
LOW_NOISE = 4.0
LOW_SHARE = 0.5
# The least noise, in units of the largest value: two units in the last place of fp32.
ROUNDING = 2.0**-21
# Noises of the router's logits: rounding may decide between two experts that score this close.
TIES = 30.0

# The tolerance of merged weights, as a part of the difference that rounding them makes. PEFT and
# mckpt add in another order, and so round a few in 10,000 weights to another neighbour, which made
# 0 to 0.1 of that difference.
ROUNDED = 0.5

SCATTERED = 2000  # pairs of logits in a plot


class Runs:
    """The arrays that both runs left in the working directory, by sequence.

    `reference.*` comes from transformers, `{name}.*` from Megatron-Core on `num_ranks` ranks.
    """

    def __init__(self, work: Path, name: str, num_ranks: int) -> None:
        self.work, self.name = work, name
        self.facts = json.loads((work / "reference.json").read_text())
        self.sequences: list[list[int]] = self.facts["sequences"]
        self.ranks = range(num_ranks)
        self.image = work / "image.npz"

    @property
    def has_image(self) -> bool:
        return self.image.exists()

    def image_places(self) -> np.ndarray:
        """Returns the positions of the image in the sequence."""
        with np.load(self.image) as arrays:
            places: np.ndarray = arrays["places"]
            return places

    def reference(self, index: int) -> Any:
        return np.load(self.work / f"reference.{index}.npz")

    def logits(self, index: int) -> Any:
        return np.load(self.work / f"{self.name}.{index}.npz")

    def states(self, index: int) -> dict[str, Any]:
        """Returns the file that holds each hidden state and choice of experts."""
        paths = (self.work / f"{self.name}.rank{rank}.{index}.npz" for rank in self.ranks)
        files = [np.load(path) for path in paths if path.exists()]
        return {key: file for file in files for key in file.files}

    def gather(self, side: str, key: str, counted: list[np.ndarray] | None = None) -> np.ndarray:
        """Returns the values of all positions of all sequences, or of those that count."""
        load = self.reference if side == "reference" else self.logits
        rows = []
        for index in range(len(self.sequences)):
            with load(index) as arrays:
                rows.append(arrays[key] if counted is None else arrays[key][counted[index]])
        return np.concatenate(rows)

    def largest_logit(self) -> float:
        """Returns the largest absolute value of the reference's fp32 logits."""
        paths = (self.work / f"logits.{index}.npy" for index in range(len(self.sequences)))
        return max(float(np.abs(np.load(path, mmap_mode="r")).max()) for path in paths)


# ------------------------------------------------------------------------------ with an adapter


def measure_adapter(runs: Runs) -> dict[str, Any] | None:
    """Measures how far the merged weights are from transformers with PEFT; None without an adapter.

    Each number is the median over all positions of the largest difference of a logit. A tie between
    two experts, which rounding may decide otherwise, moves few positions.

    moved: by the adapter. apart: of the merged weights and those that PEFT merges, both rounded.
    rounding: what rounding the merged weights moves. noise: of transformers with PEFT.
    """
    keys = ("moved", "apart", "rounding", "noise", "merging")
    found: dict[str, list[np.ndarray]] = {key: [] for key in keys}
    largest = 0.0
    for index in range(len(runs.sequences)):
        path = runs.work / f"adapter.{index}.npz"
        if not path.exists():
            continue
        with np.load(path) as arrays:
            beside = "ours" in arrays  # the reference is then not the merged weights
            ours = arrays["ours"] if beside else np.load(runs.work / f"logits.{index}.npy")
            pairs = (
                (arrays["unmerged"], arrays["base"]),
                (ours, arrays["rounded"]),
                (arrays["rounded"], arrays["merged"]),
                (arrays["again"], arrays["unmerged"]),
                (arrays["merged"], arrays["unmerged"]),
            )
            for key, (a, b) in zip(keys, pairs, strict=True):
                found[key].append(np.abs(a - b).max(-1))
            largest = max(largest, float(np.abs(arrays["unmerged"]).max()))
    if not found["moved"]:
        return None
    measured = {key: float(np.median(np.concatenate(found[key]))) for key in keys}
    least = NOISE * max(measured["noise"], ROUNDING * largest)
    return measured | {
        "largest": largest,
        "merging_tolerance": least,
        "tolerance": max(least, ROUNDED * measured["rounding"]),
    }


# -------------------------------------------------------------------------- positions that count


@dataclass
class Positions:
    """The positions whose logits count, and the choices of experts that differ."""

    counted: list[np.ndarray]  # of each sequence: [seq] bool
    ties: int  # choices that rounding decided
    faults: list[str]  # a choice that differs and was not a tie; at most one is listed


def select_positions(runs: Runs) -> Positions:
    """Finds the positions that rounding did not send to other experts.

    If two experts score within the noise of each other, rounding chooses between them, and
    everything after that position may differ. So from a choice that differs on, no position of the
    sequence counts, whether the choice differs between the two sides or between the two runs of
    transformers. A choice that differs and was not a tie is a fault.
    """
    positions = Positions([], 0, [])
    for index, tokens in enumerate(runs.sequences):
        with runs.reference(index) as reference:
            steady = steady_positions(reference, len(tokens))
            counts = steady.copy()
            positions.ties += int(not steady.all())
            states = runs.states(index)
            for layer in _moe_layers(reference):
                key = f"experts_{layer}"
                ours, theirs = reference[key], states[key][key]
                margins = reference[f"margin_{layer}"]
                close = TIES * _router_noise(reference, layer, steady)
                for at in np.flatnonzero((ours != theirs).any(1) & counts):
                    if not counts[at]:
                        continue
                    if margins[at] <= close and theirs[at].sum() == ours[at].sum():
                        counts[at:] = False
                        positions.ties += 1
                    elif not positions.faults:
                        positions.faults.append(
                            f"layer {layer} sends token {at} of sequence {index} to experts"
                            f" {np.flatnonzero(theirs[at]).tolist()}, transformers to"
                            f" {np.flatnonzero(ours[at]).tolist()}, and the scores are not a tie"
                        )
        positions.counted.append(counts)
    return positions


def steady_positions(reference: Any, length: int) -> np.ndarray:
    """Returns the positions [seq] before the first choice of experts on which the two runs of
    transformers differ.
    """
    counts = np.ones(length, bool)
    for layer in _moe_layers(reference):
        differs = reference[f"experts_{layer}"] != reference[f"noise_experts_{layer}"]
        others = np.flatnonzero(differs.any(1))
        counts[int(others[0]) if len(others) else length :] = False
    return counts


def _moe_layers(reference: Any) -> list[int]:
    """Returns the layers with experts, in order."""
    keys = [key for key in reference.files if key.startswith("experts_")]
    return sorted(int(key.removeprefix("experts_")) for key in keys)


def _router_noise(reference: Any, layer: int, steady: np.ndarray) -> float:
    """Returns the largest difference of the router's logits between the runs of transformers."""
    moved = reference[f"noise_router_{layer}"][steady]
    largest = float(np.abs(reference[f"router_{layer}"]).max())
    return max(float(moved.max(initial=0)), largest * ROUNDING)


# ------------------------------------------------------------------------------------------- logits


def measure_logits(runs: Runs, counted: list[np.ndarray]) -> dict[str, Any]:
    """Measures the fp32 logits; the largest difference of a position that counts decides."""
    found = _differences(runs, "", counted)
    noise = float(runs.gather("reference", "noise_max_abs", counted).max(initial=0))
    least = ROUNDING * runs.largest_logit()
    bounds = _bounds(runs, found["max_abs"], noise, least, NOISE, SHARE)
    # the seeded fault ran on the first sequence
    probe = float(np.max(runs.facts["probe"], initial=0, where=counted[0]))
    return {**found, **bounds, "probe": probe, "probe_above": probe / bounds["tolerance"]}


def measure_low_logits(runs: Runs, counted: list[np.ndarray] | None = None) -> dict[str, Any]:
    """Measures the logits in the checkpoint's dtype, at all positions if `counted` is None; their
    root mean square decides.

    Both Megatron-Core and transformers run in that dtype, and are compared with transformers in
    fp32. The difference of transformers is the noise.
    """
    found = _differences(runs, "low_", counted)
    noise = float(np.sqrt(runs.gather("reference", "low_mean_square", counted).mean()))
    return {
        **found,
        **_bounds(runs, found["rms"], noise, 0.0, LOW_NOISE, LOW_SHARE),
        "kl_transformers": float(runs.gather("reference", "low_kl", counted).mean()),
        "top1_transformers": float(runs.gather("reference", "low_top1", counted).mean()),
    }


def _bounds(
    runs: Runs, difference: float, noise: float, least: float, noises: float, share: float
) -> dict[str, Any]:
    """Returns the tolerance of a difference of logits: `noises` times the noise, which is at least
    `least`, and at most a `share` of the spread of the logits.
    """
    spread = float(runs.gather("reference", "noise_spread").mean())
    tolerance = min(noises * max(noise, least), share * spread)
    return {
        "noise": noise,
        "spread": spread,
        "tolerance": tolerance,
        "bound": share * spread,
        "decisive": noises * noise <= share * spread,
        "below": tolerance / difference if difference else math.inf,
    }


def _differences(runs: Runs, prefix: str, counted: list[np.ndarray] | None) -> dict[str, float]:
    def of(key: str) -> np.ndarray:
        return runs.gather("logits", prefix + key, counted)

    if counted is not None and not any(positions.any() for positions in counted):
        keys = ("max_abs", "rms", "kl", "kl_max", "top1", "loss", "loss_hf")
        return dict.fromkeys(keys, math.nan)
    largest, squares, kl = of("max_abs"), of("mean_square"), of("kl")
    finite = bool(np.isfinite(largest).all())
    return {
        "max_abs": float(largest.max()) if finite else math.inf,
        "rms": float(np.sqrt(squares.mean())) if finite else math.inf,
        "kl": float(kl.mean()) if finite else math.inf,
        "kl_max": float(kl.max()) if finite else math.inf,
        "top1": float(of("top1").mean()),
        "loss": float(np.nanmean(of("loss"))) if finite else math.inf,
        "loss_hf": float(np.nanmean(of("loss_reference"))),
    }


def too_far(dtype: str, measured: dict[str, Any]) -> str | None:
    """Returns a sentence if the logits differ by more than the tolerance, else None."""
    if is_fp32(dtype):
        worst, what = measured["max_abs"], logits_of(dtype)
    else:
        worst, what = measured["rms"], f"logits in {dtype} (root mean square)"
        if not measured["decisive"]:
            return None
    # nan: no position counts, which makes the verdict incomplete
    if worst <= measured["tolerance"] or math.isnan(worst):
        return None
    tolerance = measured["tolerance"]
    times = worst / tolerance
    return f"{what} differ by {worst:.3g}, {times:.3g} times the tolerance {tolerance:.3g}"


def is_fp32(name: str) -> bool:
    """Returns whether measurements with this name, such as "float32, image", are those of fp32."""
    return name.startswith("float32")


def logits_of(name: str) -> str:
    """Returns the fp32 logits with this name in words, such as "logits (image)"."""
    part = name.partition(", ")[2]
    return f"logits ({part})" if part else "logits"


def sample_logits(runs: Runs) -> list[list[float]]:
    """Returns about SCATTERED pairs of logits, the reference's first."""
    drawn = [runs.logits(index)["scatter"] for index in range(len(runs.sequences))]
    pairs = np.concatenate(drawn)
    return [[float(a), float(b)] for a, b in pairs[:: max(1, len(pairs) // SCATTERED)]]


# ------------------------------------------------------------------------------------ hidden states


def measure_points(runs: Runs, counted: list[np.ndarray]) -> list[dict[str, Any]]:
    """Measures the hidden states at every point, in the order of the computation.

    Of each point: the largest L2 norm of the difference at a position that counts, its noise, its
    tolerance, and the largest norm of the state itself.
    """
    out: dict[str, dict[str, Any]] = {}
    for index in range(len(runs.sequences)):
        states = runs.states(index)
        with runs.reference(index) as reference:
            for key in (k for k in reference.files if k.startswith("state_")):
                ours, theirs = reference[key], states[key][key]
                with np.errstate(invalid="ignore", over="ignore"):
                    apart = np.linalg.norm(ours.astype("f8") - theirs, axis=-1)
                apart = np.where(np.isfinite(apart), apart, math.inf)[counted[index]]
                noise = reference[f"noise_{key}"][counted[index]]
                found = {
                    "difference": float(apart.max(initial=0)),
                    "noise": float(noise.max(initial=0)),
                    "size": float(np.linalg.norm(ours, axis=-1).max()),
                }
                row = out.setdefault(key.removeprefix("state_"), dict.fromkeys(found, 0.0))
                for name, value in found.items():
                    row[name] = max(row[name], value)
    for row in out.values():
        noise = max(row["noise"], ROUNDING * row["size"])
        row["tolerance"] = min(NOISE * noise, SHARE * row["size"])
    return [{"point": name, **out[name]} for name in sorted(out, key=_order)]


def _order(point: str) -> tuple[int, int, int]:
    """Sorts embed, then attn, mlp and the end of each layer, then final_norm."""
    if not point.startswith("layers."):
        return (0 if point == "embed" else 2, 0, 0)
    _, layer, *part = point.split(".")
    return (1, int(layer), {"attn": 0, "mlp": 1}.get(part[0] if part else "", 2))


# ----------------------------------------------------------------------------------------- coverage


def measure_coverage(
    dims: Mapping[str, Any], runs: Runs, counted: list[np.ndarray]
) -> dict[str, Any]:
    """Counts the parts of the model that the tokens of the positions that count used."""
    longest = max(map(len, runs.sequences))
    tokens: set[int] = set()
    for sequence, counts in zip(runs.sequences, counted, strict=True):
        tokens |= set(np.array(sequence)[counts].tolist())
    out: dict[str, Any] = {"embedding_rows": {"reached": len(tokens), "of": dims["vocab_size"]}}
    if reached := _reached_experts(runs, counted):
        out["experts"] = {
            "reached": int(sum(experts.sum() for experts in reached.values())),
            "of": sum(map(len, reached.values())),
            "missing": {
                str(layer): np.flatnonzero(~experts).tolist()
                for layer, experts in sorted(reached.items())
                if not experts.all()
            },
            "per_layer": max(map(len, reached.values())),
        }
    if window := dims.get("sliding_window"):
        exceeded = longest > window
        out["window"] = {"window": window, "longest_sequence": longest, "exceeded": exceeded}
    out["positions"] = {"longest_sequence": longest, "of": dims["max_positions"]}
    return out


def _reached_experts(runs: Runs, counted: list[np.ndarray]) -> dict[int, np.ndarray]:
    """Returns for each layer the experts that a position that counts chose: [expert] bool."""
    reached: dict[int, np.ndarray] = {}
    for index in range(len(runs.sequences)):
        with runs.reference(index) as reference:
            for layer in _moe_layers(reference):
                chosen = reference[f"experts_{layer}"][counted[index]].any(0)
                reached[layer] = reached.get(layer, False) | chosen
    return reached


def locate(
    pair: Pair,
    values: Values | str,
    runs: Runs,
    points: list[dict[str, Any]],
    logits: dict[str, dict[str, Any]],
    counted: list[np.ndarray],
) -> dict[str, Any]:
    """Returns the first point whose states differ, the tensors that feed it, and the tensors whose
    values differ.

    points, logits: the measurements of these runs, that of the fp32 logits first.
    """
    point = next((p["point"] for p in points if p["difference"] > p["tolerance"]), None)
    if point is None and any(too_far(dtype, m) for dtype, m in logits.items()):
        point = "logits"
    out: dict[str, Any] = {"point": point, "args": [dim["arg"] for dim in pair.apart]}
    if point is not None:
        tolerance = next(iter(logits.values()))["tolerance"]
        out["position"] = _first_position(runs, tolerance, counted)
    try:
        out |= _tensors(pair, values, point)
    except MckptError as e:  # no layout fits the args
        out["message"] = str(e)
    return out


def _first_position(
    runs: Runs, tolerance: float, counted: list[np.ndarray]
) -> dict[str, Any] | None:
    """Returns the first position that counts whose logits exceed the tolerance."""
    for index, counts in enumerate(counted):
        within = runs.logits(index)["max_abs"] <= tolerance  # false for nan
        found = np.flatnonzero(~within & counts)
        if len(found):
            sequence = "image" if runs.has_image else index
            return {"sequence": sequence, "position": int(found[0])}
    return None


def _tensors(pair: Pair, values: Values | str, point: str | None) -> dict[str, Any]:
    """Returns the tensors of both sides that feed the point, and those whose values differ."""
    out: dict[str, Any] = {}
    if point is not None:
        tied = bool(pair.left.dims["tied"])
        names = sorted({n for n in pair.left if feeds(n, point, tied)}, key=_by_number)
        out["logical"] = names
        out["hf"], out["stored"] = _keys(pair.left, names), _keys(pair.right, names)
    if isinstance(values, Values):
        found = values.difference
        out["differ"] = [change.name for change in found.changed] + found.missing + found.extra
    return out


def feeds(name: str, point: str, tied: bool) -> bool:
    """Returns whether a logical tensor is used between the previous point and this one."""
    if point == "logits":
        return name.startswith("embed." if tied else "lm_head.")
    if point == "embed":
        return name.startswith(("embed.", "positions."))
    if point == "final_norm":
        return name.startswith("final_norm.")
    layer, _, part = point.removeprefix("layers.").partition(".")
    inside = name.removeprefix(f"layers.{layer}.")
    if inside == name:
        return False
    return not part or inside.startswith(("attn",) if part == "attn" else ("mlp", "moe"))


def _keys(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Returns the keys of the stored tensors that hold these logical tensors."""
    wanted, out = set(names), []
    for b in (b for b in checkpoint.names.bound if not b.rule.alias):
        layers, experts = b.instances()
        for key, layer, expert in zip(b.keys(), layers.tolist(), experts.tolist(), strict=True):
            if any(t.format(layer=layer, expert=expert) in wanted for t in b.rule.of):
                out.append(key)
    return list(dict.fromkeys(out))


def _by_number(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def say_position(position: dict[str, Any]) -> str:
    """Returns a position in words. Its sequence is a number, or `image`: that with the image."""
    named = f"sequence {position['sequence']}"
    named = "the sequence with the image" if position["sequence"] == "image" else named
    return f"position {position['position']} of {named}"


def say_where(where: dict[str, Any]) -> str:
    """Returns one sentence that says where the runs differ."""
    text = f"they differ first at {where['point']}"
    if position := where.get("position"):
        text += f", and the logits from {say_position(position)} on"
    if differ := where.get("differ"):
        more = f" and {len(differ) - LISTED} more" if len(differ) > LISTED else ""
        text += f"; tensors whose values differ: {', '.join(differ[:LISTED])}{more}"
    elif "differ" in where and not where["args"]:
        stored = ", ".join(where["stored"][:4])
        text += (
            f"; no tensor's value differs, so either {stored} are packed wrongly, or an arg that"
            " mckpt does not compare is wrong. In a family file of your own, a dim can be wrong:"
            " `mckpt mappings new HF_DIR` lists those that config.json does not decide"
        )
    return text
