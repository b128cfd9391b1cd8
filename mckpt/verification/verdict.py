"""Decides on two runs of one model: pass, fail with the place of the fault, or incomplete.

Reads the arrays that the runs left and compares the stored values of the two checkpoints, with the
casts that were made on the way. Runs no model itself.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import errors
from mckpt.checkpoint import comparison
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError
from mckpt.formats import carried
from mckpt.progress import watched
from mckpt.verification.measuring import (
    ROUNDING,
    SHARE,
    Positions,
    Runs,
    is_fp32,
    locate,
    logits_of,
    measure_adapter,
    measure_coverage,
    measure_logits,
    measure_low_logits,
    measure_points,
    sample_logits,
    say_where,
    select_positions,
    too_far,
)
from mckpt.verification.pair import LISTED, Pair, Values, say_sizes
from mckpt.version import __version__

# A pass needs fp32 logits that differ by at most 1 / CLEAN tolerances. docs/gpu-verification.md has
# 295 clean runs; the closest one stayed 4.28 times below its tolerance.
CLEAN = 3.0
IMAGE = "image"  # the folder of the runs with an image
FAULT = 10.0  # the tolerances by which the seeded fault must move the logits


@dataclass(repr=False)
class Verdict:
    """The result of a verification.

    `verdict` is pass, fail or incomplete, `reasons` say why, and `facts` contain everything that
    was measured, as plain data.
    """

    verdict: str
    reasons: list[str]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Is 0 for pass, 1 for fail and incomplete."""
        return 0 if self.verdict == "pass" else 1

    def __repr__(self) -> str:
        more = f" and {len(self.reasons) - 1:,} more" * (len(self.reasons) > 1)
        return f"Verdict({': '.join([self.verdict, *self.reasons[:1]])}{more})"

    def json(self) -> dict[str, Any]:
        """Returns plain data, without the pairs of logits that the report draws."""
        facts = {key: value for key, value in self.facts.items() if key != "scatter"}
        return {"verdict": self.verdict, "reasons": self.reasons, **finite(facts)}

    def lines(self) -> list[str]:
        """Returns everything that was measured, a line each, and then the reasons."""
        facts = self.facts
        out = [f"note: {note}" for note in facts.get("notes", [])]
        if resharded := facts.get("resharded"):
            out.append(f"resharded {resharded}: that copy ran, not the files themselves")
        for dtype, measured in facts.get("logits", {}).items():
            out += _logits_lines(dtype, measured)
        for index, (first, second) in facts.get("measured_again", {}).items():
            out.append(
                f"the noise of sequence {index} was measured twice: {first:.3g}, then {second:.3g}"
            )
        if tokens := facts.get("tokens"):
            reached = [
                f"{what.replace('_', ' ')} {found['reached']:,} of {found['of']:,}"
                for what, found in facts["coverage"].items()
                if "reached" in found
            ]
            out.append(
                f"{tokens['judged']:,} of {tokens['positions']:,} positions of"
                f" {tokens['sequences']} sequences; {', '.join(reached)}"
            )
        if adapter := facts.get("adapter"):
            out.append(
                f"adapter: it moves the logits by {adapter['moved']:.3g}; merged they differ from"
                f" transformers with PEFT by {adapter['apart']:.3g}, tolerance"
                f" {adapter['tolerance']:.3g} (rounding the merged weights moves them by"
                f" {adapter['rounding']:.3g}, noise {adapter['noise']:.3g}; medians over positions)"
            )
        if values := facts.get("values"):
            cast = ""
            if count := values["equal_after_cast"]:
                cast = f", {count:,} of them after a cast that mckpt.json or the mapping names"
            out.append(
                f"{values['tensors_equal']:,} logical tensors are equal to the last bit{cast}"
                f" ({values['bytes_compared']:,} bytes)"
            )
        if image := facts.get("image"):
            out.append(
                f"image: noise at {image['places']:,} of {image['positions']:,} positions. Both"
                " text models get the features that the tower of transformers makes of it"
            )
            if (towers := image.get("towers_equal")) is not None:
                out.append(
                    f"towers: {towers:,} tensors equal, of those that Megatron's text model lacks"
                )
        if training := facts.get("training"):
            out.append(
                f"{len(training['losses'][0])} steps at two layouts: losses"
                f" {training['max_abs']:.3g} apart, tolerance {training['tolerance']:.3g}"
            )
        return out + self.reasons


def _logits_lines(dtype: str, measured: dict[str, Any]) -> list[str]:
    what, key = ("max", "max_abs") if is_fp32(dtype) else ("rms", "rms")
    out = [
        f"logits {dtype}: {what} {measured[key]:.3g}, tolerance {measured['tolerance']:.3g}"
        f" (noise of transformers {measured['noise']:.3g}, spread {measured['spread']:.3g}),"
        f" KL {measured['kl']:.2g}, top-1 {measured['top1']:.2%},"
        f" loss {measured['loss']:.5f} and {measured['loss_hf']:.5f}"
    ]
    if not measured["decisive"]:
        out.append(f"the noise in {dtype} is too large to decide anything")
    if "probe_above" in measured:
        out.append(
            f"margins: the logits differ by {_ratio(measured['below'])}; a seeded fault moves them"
            f" by {_plain(measured['probe_above'])} times the tolerance"
        )
    return out


def _plain(number: float) -> str:
    """Returns a number rounded to three digits, such as 1.92 or 13,100."""
    text = f"{number:.3g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def _ratio(below: float) -> str:
    """Returns a difference in words, relative to the tolerance; `below` is the tolerance divided by
    the difference.
    """
    if below >= 1:
        return "nothing" if below == math.inf else f"1/{below:,.3g} of the tolerance"
    return f"{1 / below if below else math.inf:,.3g} times the tolerance"


# ----------------------------------------------------------------------------------------- deciding


def decide(pair: Pair, values: Values | str, work: Path, device: str, num_ranks: int) -> Verdict:
    """Decides on the stored values and the arrays that both runs left in `work` (level `forward`).

    `values` is a sentence if the tensors could not be compared because args differ.
    """
    ran = json.loads((work / f"{pair.name}.json").read_text())
    if "error" in ran:
        error = getattr(errors, ran["error"]["class"])(*ran["error"]["message"].split("\n"))
        return does_not_load(pair, error)
    runs = Runs(work, pair.name, num_ranks)
    positions = select_positions(runs)
    facts = _facts(pair) | {
        "ranks": num_ranks,
        "device": device,
        **{key: ran[key] for key in ("dtype", "impl", "iteration")},
        "versions": runs.facts["versions"] | ran["versions"],
        "logits": _logits(pair, runs, ran["dtype"], positions.counted, None),
    }
    if again := runs.facts.get("measured_again"):
        facts["measured_again"] = again
    if (merging := pair.left.merging) and (measured := measure_adapter(runs)):
        facts["adapter"] = {"path": str(merging.path), **measured}
    facts |= {
        "points": measure_points(runs, positions.counted),
        "tokens": {
            "sequences": len(runs.sequences),
            "positions": sum(map(len, runs.sequences)),
            "judged": int(sum(counts.sum() for counts in positions.counted)),
            "lengths": sorted({len(sequence) for sequence in runs.sequences}),
            "ties": positions.ties,
        },
        "coverage": measure_coverage(pair.left.dims, runs, positions.counted),
        "scatter": sample_logits(runs),
    }
    if isinstance(values, Values):
        facts["values"] = values.difference.json()
        stored = values.reasons(pair.left, pair.right)
        not_compared = values.not_compared(pair.left, pair.right)
    else:
        stored, not_compared = [values], []

    reasons = _reasons_of_args(pair)
    reasons += [
        f"{key}: in the checkpoint, and the model that its args describe has no such tensor"
        for key in ran["unread"][:LISTED]
    ]
    reasons += stored[:LISTED]
    if len(stored) > LISTED:
        reasons.append(f"and {len(stored) - LISTED:,} more")
    reasons += positions.faults
    compared = [(runs, facts["points"], dict(facts["logits"]), positions.counted)]
    if (work / IMAGE).exists():
        seen = Runs(work / IMAGE, pair.name, num_ranks)
        chosen = select_positions(seen)
        reasons += [f"with the image, {fault}" for fault in chosen.faults]
        facts["image"], logits = _measure_image(pair, seen, ran["dtype"], chosen)
        facts["logits"] |= logits
        compared.append((seen, facts["image"]["points"], logits, chosen.counted))
        if isinstance(values, Values):
            facts["image"]["towers_equal"] = values.equal_towers(pair.left)
    reasons += _adapter_faults(facts)
    reasons += filter(None, (too_far(dtype, found) for dtype, found in facts["logits"].items()))
    if reasons:
        places = [locate(pair, values, *one) for one in compared]
        facts["where"] = next((place for place in places if place["point"]), places[0])
        if facts["where"]["point"]:
            reasons.append(say_where(facts["where"]))
        return Verdict("fail", reasons, facts)
    missing = [*pair.unlike, *not_compared, *incomplete(facts)]
    return Verdict("incomplete" if missing else "pass", missing, facts)


def _logits(
    pair: Pair,
    runs: Runs,
    dtype: str,
    counted: list[np.ndarray],
    inside: list[np.ndarray] | None,
) -> dict[str, dict[str, Any]]:
    """Returns the measurements of the logits in every dtype that ran.

    counted: the positions of each sequence that count in fp32. inside: those that count in other
        dtypes; None for all.
    """
    out = {"float32": measure_logits(runs, counted)}
    if dtype != "float32":
        out[dtype] = measure_low_logits(runs, inside)
    if (cp := pair.sizes["cp"]) > 1:  # a second run, in the checkpoint's dtype only
        again = Runs(runs.work, f"{pair.name}.cp", 0)
        out[f"{dtype}, cp {cp}"] = measure_low_logits(again, inside)
    return out


def _measure_image(
    pair: Pair, runs: Runs, dtype: str, positions: Positions
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Measures the sequence with an image. Returns the facts about it, and the measurements of the
    logits: those at the places of the image and those at the text around it.
    """
    (counted,) = positions.counted
    is_image = np.isin(np.arange(len(counted)), runs.image_places())
    logits: dict[str, dict[str, Any]] = {}
    for part, inside in (("image", is_image), ("text with the image", ~is_image)):
        measured = _logits(pair, runs, dtype, [inside & counted], [inside])
        logits |= {f"{name}, {part}": found for name, found in measured.items()}
    facts = {
        "places": int(is_image.sum()),
        "positions": len(counted),
        "judged": int(counted.sum()),
        "ties": positions.ties,
        "points": measure_points(runs, positions.counted),
    }
    return facts, logits


def does_not_load(pair: Pair, error: MckptError) -> Verdict:
    """Returns a fail if args that differ from the config explain the error, else raises it."""
    reasons = _reasons_of_args(pair)
    if not reasons:
        raise error
    where = {"point": "load", "args": [dim["arg"] for dim in pair.apart], "message": str(error)}
    reasons.append(f"so the checkpoint does not load: {error}")
    return Verdict("fail", reasons, _facts(pair) | {"where": where})


def _facts(pair: Pair) -> dict[str, Any]:
    """Returns the facts that are known before anything runs."""
    return {
        "hf": str(pair.left.path),
        "megatron": str(pair.path),
        "format": pair.right.format,
        "mckpt": __version__,
        "sizes": {**pair.sizes, **pair.split},
        "dims": pair.apart,
        **({"notes": pair.notes} if pair.notes else {}),
    }


def _reasons_of_args(pair: Pair) -> list[str]:
    return [*map(say_dim, pair.apart), *([pair.unread] if pair.unread else [])]


def say_dim(dim: dict[str, Any]) -> str:
    """Returns one sentence on how the config and the args differ."""
    return (
        f"{dim['arg']} ({dim['dim']}): the config says {dim['hf']}, the args say {dim['megatron']}"
    )


def _adapter_faults(facts: dict[str, Any]) -> list[str]:
    """Returns the reasons why the weights are not those of the base with the adapter."""
    found = facts.get("adapter")
    if not found:
        return []
    out = []
    if not found["apart"] <= found["tolerance"]:
        out.append(
            f"the logits of the merged weights differ by {found['apart']:.3g} from those of"
            f" transformers with PEFT, and the tolerance is {found['tolerance']:.3g}"
        )
    if not found["merging"] <= found["merging_tolerance"]:
        out.append(
            f"PEFT's own merge moves the logits by {found['merging']:.3g}, more than its noise"
            f" {found['merging_tolerance']:.3g}: it does not merge this adapter right"
        )
    return out


def incomplete(facts: dict[str, Any]) -> list[str]:
    """Returns the reasons why a run that found no fault does not prove that there is none."""
    out, coverage, tokens = [], facts["coverage"], facts["tokens"]
    experts = coverage.get("experts")
    if experts and experts["missing"]:
        where = "; ".join(
            f"layer {layer}: {', '.join(map(str, missing[:8]))}{' ...' * (len(missing) > 8)}"
            for layer, missing in list(experts["missing"].items())[:8]
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
    logits = facts["logits"]
    for dtype in [*filter(is_fp32, logits)] or list(logits)[:1]:
        out += _weak_margins(dtype, logits[dtype])
    adapter = facts.get("adapter")
    if adapter and adapter["moved"] < FAULT * adapter["tolerance"]:
        out.append(
            f"the adapter moves the logits by only {adapter['moved']:.3g}, less than {FAULT:g}"
            f" times the tolerance {adapter['tolerance']:.3g}: a wrong scale of it could be missed"
        )
    if tokens["judged"] < tokens["positions"] / 2:
        out.append(
            f"only {tokens['judged']:,} of {tokens['positions']:,} positions could be judged:"
            f" {tokens['ties']} choices of experts were ties that rounding decided otherwise; give"
            " more and shorter sequences"
        )
    image = facts.get("image")
    if image and image["judged"] < image["positions"] / 2:
        out.append(
            f"only {image['judged']:,} of {image['positions']:,} positions of the sequence with the"
            f" image could be judged: {image['ties']} choices of experts were ties that rounding"
            " decided otherwise"
        )
    return out


def _weak_margins(dtype: str, logits: dict[str, Any]) -> list[str]:
    """Returns the reason why the logits decide nothing, if there is one."""
    if not logits["decisive"]:
        return [
            f"the noise of {dtype}, {logits['noise']:.3g}, is too large against the logits' spread"
            f" {logits['spread']:.3g} to show a fault"
        ]
    if (below := logits.get("below", math.inf)) < CLEAN:
        return [
            f"the {logits_of(dtype)} differ by {_ratio(below)}; those of a clean conversion differ"
            f" by at most 1/{CLEAN:g} of it"
        ]
    if (above := logits.get("probe_above", math.inf)) < FAULT:
        return [
            f"a seeded fault moved the {logits_of(dtype)} by only {logits['probe']:.3g},"
            f" {above:.2g} times the tolerance: another fault could be missed"
        ]
    return []


# ----------------------------------------------------------------------------------------- training


def decide_training(
    found: Verdict, sizes: Sequence[dict[str, int]], curves: Sequence[Sequence[dict[str, float]]]
) -> dict[str, Any]:
    """Compares two curves of {loss, grad_norm}, and changes the verdict `found` if they differ.

    The losses may differ by SHARE of what training moved them by, the gradient norms by SHARE of
    themselves. Returns the facts.
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
    if not apart <= tolerance or not norms_apart <= SHARE:
        both = " and ".join(map(say_sizes, sizes))
        found.verdict = "fail"
        found.reasons.append(
            f"trained at {both}, losses differ by {apart:.3g} (tolerance {tolerance:.3g},"
            f" {SHARE:.0%} of what training moved them by) and gradient norms by {norms_apart:.2%}"
            f" (tolerance {SHARE:.0%})"
        )
    elif tolerance < FAULT * rounding:
        found.verdict = "incomplete"
        found.reasons.append(
            f"{losses.shape[1]} steps moved the loss by only {moved:.3g}, too little to compare"
            " curves; give more --steps"
        )
    return {
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


def finite(value: Any) -> Any:
    """Returns plain data for JSON: infinite and undefined numbers become text."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def compare_values(
    left: Checkpoint, right: Checkpoint, cancel: threading.Event | None = None
) -> Values:
    """Compares all stored values of the two, the further copies of a tensor, and the padding of a
    converted vocabulary.
    """
    found = diff_converted(left, right, cancel)
    found.replicas = comparison.copies_apart((left, right), cancel)
    # which pads with zeros
    converted = right.is_megatron and right.files.from_hugging_face
    return Values(found, right.reader.padding() if converted else [])


def diff_converted(
    left: Checkpoint, right: Checkpoint, cancel: threading.Event | None = None
) -> comparison.Difference:
    """Compares a checkpoint with one that was converted from it, or the other way round.

    The manifests name the casts that were made on the way: the values must be equal to exactly
    those casts. Tensors that the mapping always stores in one dtype must be equal to that cast.
    """
    if (
        left.files.casts != right.files.casts
        and left.files.casts[: len(right.files.casts)] == right.files.casts
    ):
        return _diff_casts(right, left, cancel).swapped()
    return _diff_casts(left, right, cancel)


def _diff_casts(
    left: Checkpoint, right: Checkpoint, cancel: threading.Event | None
) -> comparison.Difference:
    made, always = casts_between(left, right), uncast(right)
    return comparison.diff(
        left,
        right,
        progress=watched(None, cancel),
        casts=lambda name: always.get(left.reader.template(name), made),
    )


def casts_between(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Returns the dtypes to which the right side was cast after it was converted from the left one,
    in order, from their manifests.
    """
    known = right.files.casts[: len(left.files.casts)] == left.files.casts
    return right.files.casts[len(left.files.casts) :] if known else []


def uncast(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Returns the logical templates that the checkpoint's mapping always stores in one dtype, and
    that dtype; and those of tensors that are carried unchanged, which have none.
    """
    always = {
        name: [rule.dtype] for rule in checkpoint.mapping.rules if rule.dtype for name in rule.of
    }
    return always | {name: list[str]() for name in carried.names(checkpoint.layout)}
