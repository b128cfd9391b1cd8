"""The checkpoints of Megatron-FSDP v2: `save_checkpoint` of its module `experimental`.

It is stored as `torch_dcp` is, with the states by the names of their weights:

    model.KEY                             a weight, in fp32: its master copy
    optimizer.state.KEY.exp_avg           its state
    optimizer.state.KEY.step              a tensor of one element; with the Adam of torch
    optimizer.param_groups.G.params       an object: the keys of the weights of a group
    optimizer.param_groups.G.lr           an object: one of its settings

Neither args nor a schedule belong to it. What mckpt writes has both beside it; the args name the
format, by which weights alone are told from those of a `torch_dcp`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.errors import UsageError
from mckpt.formats.base import Format
from mckpt.formats.megatron import optimizer
from mckpt.formats.megatron.chunked import MODEL, has_keys
from mckpt.formats.megatron.fsdp_dtensor import FsdpDtensor
from mckpt.formats.megatron.fsdp_writing import PREFIX, SCHEDULE, STATE, STEP, lay_out_mfsdp_v2
from mckpt.formats.megatron.torch_adam import NOTE, common_state
from mckpt.formats.megatron.torch_dcp import GROUP, TorchDcp
from mckpt.formats.megatron.torch_dist_writing import METADATA

OPTIMIZER = "optimizer."  # begins the keys of an optimizer
# what begins the names of a model's weights, behind optimizer.state.
MODULES = ("decoder.", "embedding.", "encoder.", "output_layer.")


def detect(path: Path) -> bool:
    if not has_keys(path, MODEL) or has_keys(path, PREFIX):
        return False
    if any(has_keys(path, STATE + name, most=-1) for name in MODULES):
        return True
    if has_keys(path, OPTIMIZER, most=-1):
        return False
    args = TorchDcp(path).common.args or {}
    return args.get("ckpt_format") == FORMAT.name


class MfsdpV2(FsdpDtensor):
    """An opened checkpoint of `save_checkpoint`."""

    prefix = MODEL
    member = str  # the key of a weight

    def __init__(self, path: Path) -> None:
        super().__init__(path, FORMAT)
        trained = any(map(GROUP.fullmatch, self.metadata.objects))
        scheduled = f"{SCHEDULE}.num_steps" in self.metadata.objects
        self.notes = (NOTE,) * (trained and not scheduled)

    def fields(self) -> dict[str, Any]:
        """Reads the fields of the common state. Those of Adam take the place of missing ones."""
        with suppress(UsageError):  # `optimizer` raises it
            return {**self._adam, **super().fields()}
        return super().fields()

    @cached_property
    def _grouped(self) -> dict[str, list[tuple[str, str]]]:
        """Returns the weights that the optimizer updates."""
        return {self.prefix + name: [] for group in self._groups for name in group["params"]}

    @cached_property
    def _steps(self) -> set[float]:
        """Returns the numbers of steps that weights have made."""
        return self._counts or {float(group.get(STEP, 0)) for group in self._groups}

    @cached_property
    def _adam(self) -> dict[str, Any]:
        """Returns the common state that Megatron would have."""
        return common_state(self.root, self._groups, self._steps) if self._groups else {}

    def _settings(self, experts: set[str]) -> list[list[dict[str, Any]]]:
        """Returns the param_groups of the optimizer: its own if Megatron made them."""
        if any("wd_mult" not in group for group in self._groups):
            return optimizer.groups_of(self._adam["optimizer"], str(self.root))
        more = {"is_expert_parallel": False, STEP: int(next(iter(self._steps)))}
        groups = [{**group, **more} for group in self._groups]
        return optimizer.groups_of({"param_groups": groups}, str(self.root))


FORMAT = Format(
    "mfsdp_v2",
    ".metadata with keys model.* and optimizer.state.decoder.*",
    megatron=True,
    detect=detect,
    open=MfsdpV2,
    lay_out=lay_out_mfsdp_v2,
    optimizer=True,
    masters_alone=True,
    one_optimizer=True,
    parts=(METADATA, "*.distcp"),
    last=METADATA,
)
