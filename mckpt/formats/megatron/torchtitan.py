"""The checkpoints of torchtitan, `step-N`, in the container of torch.distributed.checkpoint.

    layers.0.attention.wo.weight                   a weight, in the names of mappings/trainers
    optimizer.state.KEY.exp_avg                    its state
    optimizer.param_groups.KEY.lr                  an object: a setting of its group
    optimizer.state.KEY.step, train_state.step     tensors: the number of the step

They are read as those of `torch_dist`. The weights of a training in fp32, which torchtitan casts
while it computes, are their own master copies.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Span
from mckpt.errors import UsageError
from mckpt.formats.base import Format, Names, Shown
from mckpt.formats.megatron.chunked import Directory, Files, has_keys
from mckpt.formats.megatron.optimizer import MASTER_KEYS
from mckpt.formats.megatron.torch_dist import TorchDist
from mckpt.formats.megatron.torch_dist_writing import METADATA
from mckpt.geometry.box import Layout
from mckpt.lazy import numpy as np
from mckpt.mapping import MappingFile
from mckpt.storage import descriptors
from mckpt.values.dtypes import itemsize, numpy_dtype

FIRST = "tok_embeddings.weight"
_STATE = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")
_GROUP = re.compile(r"optimizer\.param_groups\.(.+)\.([^.]+)")
STEP, TRAIN_STEP = "step", "train_state.step"
# what Megatron's groups of Adam take over from those of torch
TAKEN = ("lr", "betas", "eps")


def detect(path: Path) -> bool:
    return any(has_keys(path, start + FIRST) for start in ("", "optimizer.state."))


class Torchtitan(TorchDist):
    """An opened checkpoint of torchtitan."""

    def __init__(self, path: Path) -> None:
        self.saved = Directory(path)
        named = copy.copy(self.saved)
        named.metadata = _as_torch_dist(self.saved.metadata)
        super().__init__(named, FORMAT)
        more = (
            "of the training, the weights and the state of Adam are read, and neither the schedule"
            " of the learning rate nor the place in the data",
        )
        self.notes = more * bool(self.groups)

    def beside(self, dialect: MappingFile) -> list[str]:
        """Returns the first names of what is stored beside the weights."""
        every = (*self.saved.metadata.tensors, *self.saved.metadata.objects)
        return sorted({key.partition(".")[0] for key in every} & dialect.ignore.keys())

    def show(self, most: int | None) -> Shown:
        return self.saved.show(most)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        return self.saved.spans(problems, [])

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes, as `Opened.layout`."""
        found = super().layout(names)
        used = {key for b in names.bound for key, _ in b.global_keys()}
        ignored = {key: why for key, why in found.ignored.items() if key not in used}
        known = self.saved.metadata.tensors
        dropped = {k: why for k, why in ignored.items() if k in known and k.startswith("layers.")}
        return replace(found, ignored=ignored, dropped=dropped)

    @cached_property
    def groups(self) -> dict[str, list[tuple[str, str]]]:
        """The weights that the optimizer updates, and the settings of each: name and key."""
        out: dict[str, list[tuple[str, str]]] = {}
        for key in self.saved.metadata.objects:
            if one := _GROUP.fullmatch(key):
                out.setdefault(one[1], []).append((one[2], key))
        return {weight: sorted(own) for weight, own in out.items()}

    @cached_property
    def _common(self) -> tuple[dict[str, Any], Any, str]:
        """The common state that Megatron would have: the step, the groups and a schedule."""
        step = self._number(TRAIN_STEP) if TRAIN_STEP in self.saved.metadata.tensors else None
        fields: dict[str, Any] = {} if step is None else {"iteration": int(step)}
        if self.groups:
            settings, steps = self._settings()
            fields["iteration"] = fields.get("iteration", steps)
            fields["optimizer"] = {"optimizer": {"param_groups": _groups(settings, steps)}}
            fields["opt_param_scheduler"] = _schedule(settings, steps)
        return fields, {}, str(self.root / METADATA)

    def _settings(self) -> tuple[dict[str, Any], int]:
        """Returns the settings of Adam, and the number of its steps.

        Each weight has a copy of the settings, which are compared as bytes. Raises UsageError for
        another optimizer, and for weights with other settings or steps.
        """
        alike = {tuple(self.saved.raw(key for _, key in own)): own for own in self.groups.values()}
        found = [{name: self.saved.object(key)[0] for name, key in own} for own in alike.values()]
        taken = {tuple(one.get(name) for name in TAKEN) for one in found}
        tensors = self.saved.metadata.tensors
        keys = (f"optimizer.state.{weight}.{STEP}" for weight in self.groups)
        steps = {self._number(key) for key in keys if key in tensors}
        if len(taken) != 1 or None in next(iter(taken)) or len(steps) != 1:
            raise UsageError(
                f"{self.root}: its optimizer has {len(taken)} groups of settings and"
                f" {len(steps)} counts of steps, and mckpt converts an Adam with one of each; give"
                " --no-optimizer to convert the weights alone"
            )
        decay = max(one.get("weight_decay", 0.0) for one in found)
        peak = max(one.get("initial_lr", one["lr"]) for one in found)
        own = dict(zip(TAKEN, next(iter(taken)), strict=True))
        return {**own, "weight_decay": decay, "max_lr": peak}, int(next(iter(steps)))

    def _number(self, key: str) -> float:
        """Returns the number in a tensor of one element."""
        dtype, _, ((offsets, sizes),) = self.saved.metadata.tensors[key]
        with Files(self.root) as files:
            file, at = self.saved.place(key, offsets, sizes, files)
            data = descriptors.pread(files.fd(self.saved.files[file]), itemsize(dtype), at)
        return float(np.frombuffer(data, numpy_dtype(dtype))[0])


def _as_torch_dist(saved: Metadata) -> Metadata:
    """Returns an index in which the states have the keys of torch_dist, and each weight in fp32
    that has states is its master copy too.
    """
    names: dict[str, list[str]] = {}
    for key in saved.tensors:
        if one := _STATE.fullmatch(key):
            names[key] = [f"optimizer.state.{one[2]}.{one[1]}"] * (one[2] != STEP)
            if saved.tensors.get(one[1], ("",))[0] == "float32":
                names[one[1]] = [one[1], f"optimizer.state.{MASTER_KEYS[0]}.{one[1]}"]
    return saved._replace(
        tensors={name: t for key, t in saved.tensors.items() for name in names.get(key, [key])},
        items={
            (name, at): item
            for (key, at), item in saved.items.items()
            for name in names.get(key, [key])
        },
    )


def _groups(settings: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Returns the param_groups of Megatron's Adam: weight decay is for matrices alone."""
    own = {
        **{"is_expert_parallel": False, "default_config": True, "lr_mult": 1.0},
        **{"is_decoupled_lr": False, "min_lr": 0.0, "bias_correction": True},
        **settings,
        "step": step,
    }
    return [{**own, "wd_mult": 1.0}, {**own, "wd_mult": 0.0, "weight_decay": 0.0}]


def _schedule(settings: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns the state of a constant schedule, which Megatron replaces by its own."""
    decay = settings["weight_decay"]
    return {
        **{"max_lr": settings["max_lr"], "min_lr": 0.0, "lr_warmup_steps": 0, "num_steps": step},
        **{"lr_decay_style": "constant", "lr_decay_steps": step, "wd_incr_steps": step},
        **{"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"},
    }


FORMAT = Format(
    "torchtitan",
    ".metadata with keys tok_embeddings.*",
    megatron=True,
    detect=detect,
    open=Torchtitan,
    parts=(METADATA, "*.distcp"),
    trainer="torchtitan",
    global_keys=True,
)
