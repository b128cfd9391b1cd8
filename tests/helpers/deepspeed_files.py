"""Writes checkpoints in the layout of DeepSpeed, with torch.save and without DeepSpeed.

PYTHONPATH=. python -m tests.helpers.deepspeed_files HF_DIR OUT    OUT/global_step7, by ZeRO 1
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from tests.helpers import tiny

RANKS, BETAS = 3, (0.9, 0.95)
STATES = ("fp32", "exp_avg", "exp_avg_sq")
RANK = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
Tensors = dict[str, dict[str, torch.Tensor]]  # state -> name -> value


class fragment_address:
    """What DeepSpeed pickles for the range of a weight in a rank's part of a group."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


MODULE = fragment_address.__module__ = "deepspeed.utils.tensor_fragment"


def sample(
    form: str, folder: Path, case: str = "llama-tied", prefix: str = "", frozen: str = "-"
) -> Path:
    """Writes `hf` and a checkpoint of DeepSpeed; returns the latter.

    frozen: part of the names of the weights that are not trained.
    """
    config = tiny.config(case)
    (folder / "hf").mkdir(parents=True)
    tiny.write_json(folder / "hf/config.json", config)
    tiny.write_weights(folder / "hf", tiny.tensors(config, "float32"))
    return write(form, folder / "hf", folder / "global_step7", prefix, frozen)


def write(form: str, hf: Path, out: Path, prefix: str = "", frozen: str = "-") -> Path:
    weights = {
        prefix + name: value.float()
        for file in sorted(hf.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    tensors = {"fp32": weights} | {
        state: {name: moment(state, value) for name, value in weights.items()}
        for state in STATES[1:]
    }
    out.mkdir(parents=True)
    fixed = [name for name in weights if frozen in name]
    # in an order that is not that of the model
    names = sorted(weights.keys() - fixed, reverse=True)
    groups = [[n for n in names if (weights[n].dim() > 1) == matrix] for matrix in (True, False)]
    model: dict[str, Any] = {
        **{"module": {n: weights[n].bfloat16() for n in names}, "buffer_names": []},
        "param_shapes": [{n: weights[n].shape for n in group} for group in groups],
        **{"shared_params": {}, "global_steps": 7, "dp_world_size": RANKS},
    }
    model_files = ["mp_rank_00_model_states.pt"]
    if form == "zero3":
        model_files = [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(RANKS)]
    model["frozen_param_shapes"] = {n: weights[n].shape for n in fixed} or None
    if form == "zero1":  # which has them in the module alone, beside the further names of tied ones
        model["module"] |= {name: weights[name] for name in fixed}
        model |= {"frozen_param_shapes": None, "shared_params": {"lm_head.weight": "embed"}}
        model["module"]["lm_head.weight"] = weights[prefix + "model.embed_tokens.weight"]
    for rank, file in enumerate(model_files):
        fragments = {n: weights[n] for n in fixed if form != "zero1"}
        if form == "zero3":
            fragments = {name: third(value, rank) for name, value in fragments.items()}
        torch.save({**model, "frozen_param_fragments": fragments or None}, out / file)
    own = {"lr": 2e-4, "betas": BETAS, "eps": 1e-8, "params": [0]}
    settings = [{**own, "weight_decay": 0.1}, {**own, "weight_decay": 0.0}]
    if form == "universal":
        for name in names:
            (out / "zero" / name).mkdir(parents=True)
            for state in STATES:
                torch.save({"param": tensors[state][name]}, out / f"zero/{name}/{state}.pt")
            torch.save(torch.tensor(5.0), out / f"zero/{name}/step.pt")
        torch.save({"param_groups": settings}, out / "zero/optimizer_state.pt")
        return out
    for rank in range(RANKS):
        parts = equal(tensors, groups, rank) if form == "zero3" else cut(tensors, groups, rank)
        module: Any = types.ModuleType(MODULE)
        module.fragment_address = fragment_address
        known = dict.fromkeys(("deepspeed", "deepspeed.utils", MODULE), module)
        with mock.patch.dict(sys.modules, known):
            value = {"optimizer_state_dict": content(form, parts, settings)}
            torch.save(value, out / RANK.format(rank))
    return out


def moment(state: str, weight: torch.Tensor) -> torch.Tensor:
    return 3 * weight if state == "exp_avg" else weight.square() + 1


Parts = list[tuple[dict[str, torch.Tensor], dict[str, Any]]]  # of each group: flat states, ranges


def content(form: str, parts: Parts, settings: list[Any]) -> dict[str, Any]:
    base = {
        "state": {
            g: {**{s: flat[s] for s in STATES[1:]}, "step": 5} for g, (flat, _) in enumerate(parts)
        },
        "param_groups": settings,
    }
    flat = [flat["fp32"] for flat, _ in parts]
    if form == "zero3":
        return {"partition_count": RANKS, "optimizer_state_dict": base, "fp32_flat_groups": flat}
    return {
        **{"partition_count": [RANKS] * len(parts), "base_optimizer_state": base},
        **{"single_partition_of_fp32_groups": flat},
        "param_slice_mappings": [ranges for _, ranges in parts],
    }


def cut(tensors: Tensors, groups: list[list[str]], rank: int) -> Parts:
    """Returns a rank's part by ZeRO 1: a third of all weights of a group, one after the other."""
    out: Parts = []
    for group in groups:
        owner = torch.cat(
            [torch.full((tensors["fp32"][n].numel(),), i) for i, n in enumerate(group)]
        )
        low, high = (len(owner) * r // RANKS for r in (rank, rank + 1))
        flats = {s: torch.cat([tensors[s][n].flatten() for n in group])[low:high] for s in STATES}
        mine = owner[low:high].tolist()
        ranges = {
            group[i]: fragment_address(mine.index(i), mine.count(i)) for i in dict.fromkeys(mine)
        }
        out.append(({s: t.clone() for s, t in flats.items()}, ranges))
    return out


def equal(tensors: Tensors, groups: list[list[str]], rank: int) -> Parts:
    """Returns a rank's part by ZeRO 3: a third of each weight, with 9 behind the last elements."""
    return [
        ({s: torch.cat([third(tensors[s][n], rank) for n in g]) for s in STATES}, {})
        for g in groups
    ]


def third(value: torch.Tensor, rank: int) -> torch.Tensor:
    short = -value.numel() % RANKS
    return torch.cat([value.flatten(), torch.full((short,), 9.0)]).chunk(RANKS)[rank].clone()


if __name__ == "__main__":
    write("zero1", Path(sys.argv[1]), Path(sys.argv[2]) / "global_step7")
