"""Finds where two runs start to differ, and the tensors that feed that point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError
from mckpt.verification.measuring import Runs, too_far
from mckpt.verification.pair import LISTED, Pair, Values


def locate(
    pair: Pair, values: Values | str, runs: Runs, facts: dict[str, Any], counted: list[np.ndarray]
) -> dict[str, Any]:
    """Returns the first point whose states differ, the tensors that feed it, and the tensors whose
    values differ.
    """
    point = next((p["point"] for p in facts["points"] if p["difference"] > p["tolerance"]), None)
    if point is None and any(too_far(dtype, m) for dtype, m in facts["logits"].items()):
        point = "logits"
    out: dict[str, Any] = {"point": point, "args": [dim["arg"] for dim in pair.apart]}
    if point is not None:
        tolerance = facts["logits"]["float32"]["tolerance"]
        out["position"] = _first_position(runs, tolerance, counted)
    try:
        out |= _tensors(pair, values, point)
    except MckptError as e:  # no layout fits the args
        out["message"] = str(e)
    return out


def _first_position(
    runs: Runs, tolerance: float, counted: list[np.ndarray]
) -> dict[str, int] | None:
    """Returns the first position that counts whose logits exceed the tolerance."""
    for index, counts in enumerate(counted):
        within = runs.logits(index)["max_abs"] <= tolerance  # false for nan
        found = np.flatnonzero(~within & counts)
        if len(found):
            return {"sequence": index, "position": int(found[0])}
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
    if point in ("embed", "final_norm"):
        return name.startswith(f"{point}.")
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


def say_where(where: dict[str, Any]) -> str:
    """Returns one sentence that says where the runs differ."""
    text = f"they differ first at {where['point']}"
    if position := where.get("position"):
        text += (
            f", and the logits from position {position['position']} of sequence"
            f" {position['sequence']} on"
        )
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
