"""The checkpoints of torchtitan, `step-N`, in the container of torch.distributed.checkpoint.

    layers.0.attention.wo.weight                   a weight, in the names of mappings/trainers
    optimizer.state.KEY.exp_avg                    its state
    optimizer.param_groups.KEY.lr                  an object: a setting of its group
    optimizer.state.KEY.step, train_state.step     tensors: the number of the step

They are read as those of `torch_dist`. The weights are their own master copies: those of a training
in fp32 are cast while it computes.
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
from mckpt.formats.base import Format, Names, Shown
from mckpt.formats.megatron.chunked import Directory, has_keys
from mckpt.formats.megatron.torch_adam import NOTE, TorchAdam, with_masters
from mckpt.formats.megatron.torch_dist_writing import METADATA
from mckpt.geometry.box import Layout
from mckpt.mapping import MappingFile

FIRST = "tok_embeddings.weight"
_STATE = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")
_GROUP = re.compile(r"optimizer\.param_groups\.(.+)\.([^.]+)")
STEP, TRAIN_STEP = "step", "train_state.step"


def detect(path: Path) -> bool:
    return any(has_keys(path, start + FIRST) for start in ("", "optimizer.state."))


class Torchtitan(TorchAdam):
    """An opened checkpoint of torchtitan."""

    def __init__(self, path: Path) -> None:
        self.saved = Directory(path)
        named = copy.copy(self.saved)
        named.metadata = _as_torch_dist(self.saved.metadata)
        super().__init__(named, FORMAT)
        self.notes = (NOTE,) * bool(self.groups)

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
        for one, key in self.saved.settings(_GROUP):
            out.setdefault(one[1], []).append((one[2], key))
        return {weight: sorted(own) for weight, own in out.items()}

    def settings(self) -> tuple[list[dict[str, Any]], set[float]] | None:
        if not self.groups:
            return None
        # each weight has a copy of the settings, which are compared as bytes
        own = self.groups.values()
        alike = {tuple(self.saved.raw(key for _, key in one)): one for one in own}
        found = [{n: self.saved.setting(key) for n, key in one} for one in alike.values()]
        tensors = self.saved.metadata.tensors
        keys = (f"optimizer.state.{weight}.{STEP}" for weight in self.groups)
        return found, {self.saved.number_at(key) for key in keys if key in tensors}

    @cached_property
    def iteration(self) -> int | None:  # type: ignore[override]  # the base sets it as an attribute
        known = TRAIN_STEP in self.saved.metadata.tensors
        return int(self.saved.number_at(TRAIN_STEP)) if known else None


def _as_torch_dist(saved: Metadata) -> Metadata:
    """Returns an index in which the states have the keys of torch_dist, and each weight that has
    states is its master copy too.
    """
    names = {key: one for key in saved.tensors if (one := _STATE.fullmatch(key))}
    keys = {
        key: f"optimizer.state.{one[2]}.{one[1]}" if (one := names.get(key)) else key
        for key in saved.tensors
        if key not in names or names[key][2] != STEP
    }
    renamed = saved._replace(
        tensors={new: saved.tensors[key] for key, new in keys.items()},
        items={(keys.get(key, key), at): item for (key, at), item in saved.items.items()},
    )
    return with_masters(renamed, {one[1] for one in names.values()})


FORMAT = Format(
    "torchtitan",
    ".metadata with keys tok_embeddings.*",
    megatron=True,
    detect=detect,
    open=Torchtitan,
    parts=(METADATA, "*.distcp"),
    trainer="torchtitan",
    torch_optimizer=True,
    global_keys=True,
)
