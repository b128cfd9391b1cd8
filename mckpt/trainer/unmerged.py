"""Runs transformers with an adapter of PEFT beside the weights, and with the weights that PEFT
merges. The process of the reference calls it before it loads the merged weights of mckpt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mckpt.errors import SourceError
from mckpt.trainer import points

LISTED = 10  # tensors in an error


def run(
    model: Any,
    job: dict[str, Any],
    logits: Callable[[Any, list[int]], torch.Tensor],
    reordered: Callable[[Any], AbstractContextManager[None]],
) -> None:
    """Saves the logits of each sequence i, in fp32, to OUT/adapter.{i}.npz: base, unmerged, again
    (unmerged, with the sums in another order), merged (by PEFT), and rounded (merged, with each
    weight rounded to the dtype of the base's weights, and cast as the checkpoint's).

    model: transformers' fp32 model of the base, which is changed. Raises SourceError if PEFT leaves
    out a tensor of the adapter.
    """
    sequences: Sequence[list[int]] = job["sequences"]
    found: list[dict[str, np.ndarray]] = [{} for _ in sequences]

    def keep(name: str, runs: Any) -> None:
        for one, tokens in zip(found, sequences, strict=True):
            one[name] = logits(runs, tokens).cpu().numpy()

    keep("base", model)
    wrapped = adapted(model, job["adapter"])
    keep("unmerged", wrapped)
    with reordered(wrapped):
        keep("again", wrapped)
    model = wrapped.merge_and_unload()
    keep("merged", model)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name not in job["uncast"]:
            parameter.data = parameter.data.to(getattr(torch, job["stored"])).float()
    points.cast(model, job["casts"], set(job["uncast"]))
    keep("rounded", model)
    for index, arrays in enumerate(found):
        named: dict[str, Any] = dict(arrays)  # numpy types the names as its own options
        np.savez(Path(job["out"]) / f"adapter.{index}.npz", **named)


def run_merged(
    model: Any, job: dict[str, Any], logits: Callable[[Any, list[int]], torch.Tensor]
) -> None:
    """Adds `ours` to the files of `run`: the logits of the weights that mckpt merged.

    model: has these weights.
    """
    for index, tokens in enumerate(job["sequences"]):
        path = Path(job["out"]) / f"adapter.{index}.npz"
        points.add(path, {"ours": logits(model, tokens).cpu().numpy()})


def adapted(model: Any, directory: str) -> Any:
    """Returns a model of transformers with an adapter. PEFT reports no tensors that it does not
    load, so this function looks for them.
    """
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(directory)
    config.inference_mode = True
    wrapped = PeftModel(model, config)
    weights = load_peft_weights(directory, device="cpu")
    loaded: Any = set_peft_model_state_dict(wrapped, weights)
    lost = [key for key in loaded.missing_keys if ".lora_" in key]
    if lost or loaded.unexpected_keys:
        listed = [
            *(f"{key}: not in the adapter" for key in lost),
            *(f"{key}: no module of the model takes it" for key in loaded.unexpected_keys),
        ]
        more = [f"and {len(listed) - LISTED} more"] if len(listed) > LISTED else []
        raise SourceError.of(
            f"{directory}: PEFT does not load this adapter whole, so there is nothing to compare"
            " with:",
            listed[:LISTED] + more,
        )
    return wrapped.eval()
