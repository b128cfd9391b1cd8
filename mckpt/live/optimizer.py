"""The optimizer of a live model: which elements of which parameter each tensor of its state holds.

A distributed optimizer keeps the state of one range of each parameter on each data-parallel rank:

    parameter    [ . . a b c d . . ]      elements 2..6 belong to this rank
    master           [ a b c d ]          tensors of 4 elements
    exp_avg          [ a b c d ]

In the layout of the model, such a range is a part of the state's whole tensor, as one box or a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mckpt.errors import UsageError
from mckpt.formats.megatron.optimizer import (
    MASTER,
    SCALER,
    Scaler,
    common_of,
    prefix_of,
    regrouped,
    rescaled,
)
from mckpt.geometry.box import Box, Piece, clip, row_major
from mckpt.live.memory import Memory, Part
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    import torch

SCHEDULER = "opt_param_scheduler"  # of a common state
STEP = "step"  # of a group of parameters, and with torch's Adam of each parameter


class State(NamedTuple):
    """A tensor of the state of one parameter, or of a range of its elements."""

    name: str  # master, exp_avg or exp_avg_sq
    parameter: torch.Tensor  # of the model
    low: int  # the element of the parameter to which its first element belongs
    tensor: torch.Tensor


class OptimizerFacts(NamedTuple):
    """The facts that a checkpoint records of an optimizer beside its tensors."""

    groups: list[list[dict[str, Any]]]  # the param_groups of each optimizer, without parameters
    scalers: list[Scaler]  # the loss scaler of each of them, or none
    distributed: bool
    wrapped: bool  # False: FP32Optimizer, which holds no other optimizer
    schedule: dict[str, Any]  # opt_param_scheduler: the state of the scheduler, if one is given

    @classmethod
    def merged(cls, every: Sequence[OptimizerFacts]) -> OptimizerFacts:
        """Returns the facts of all ranks. The optimizer of a rank does not count the steps of a
        group of which it has no parameters.
        """
        steps = [
            group[STEP] for one in every for own in one.groups for group in own if STEP in group
        ]
        counted = {STEP: max(steps)} if steps else {}
        groups = [[{**group, **counted} for group in own] for own in every[0].groups]
        return every[0]._replace(groups=groups)

    def common(self) -> Any:
        """Returns the `optimizer` of a common state, without the loss scalers."""
        distributed = [self.distributed] * len(self.groups)
        return common_of(self.groups, [], distributed, self.wrapped)


class LiveOptimizer:
    """An optimizer of Megatron-Core in this process: DistributedOptimizer, Float16Optimizer or
    FP32Optimizer with Adam, or a chain of them.
    """

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        """scheduler: that of the learning rate, an OptimizerParamScheduler.

        Raises UsageError for an optimizer that keeps another state.
        """
        from megatron.core.optimizer import optimizer as core
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        kinds = (DistributedOptimizer, core.Float16OptimizerWithFloat16Params, core.FP32Optimizer)
        if type(optimizer) not in (core.ChainedOptimizer, *kinds):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}; give what get_megatron_optimizer()"
                f" returned for adam: {', '.join(kind.__name__ for kind in kinds)}, or a chain of"
                " these"
            )
        every = getattr(optimizer, "chained_optimizers", [optimizer])
        self.links = [link for link in every if not link.is_stub_optimizer]
        self.distributed = any(isinstance(link, DistributedOptimizer) for link in self.links)
        self.wrapped = not any(isinstance(link, core.FP32Optimizer) for link in self.links)
        for link in self.links:
            _refuse_others(link)
        self.scheduler = scheduler

    def allocate(self) -> list[Any]:
        """Allocates the tensors that the first step allocates, as Megatron-Core's load of a
        checkpoint does. Returns the optimizers of the chain that had none.
        """
        empty = [link for link in self.links if not link.optimizer.state]
        for link in empty:
            if not self.distributed:
                link.init_state_fn(link.optimizer, link.config)
            else:
                # torch's Adam needs a count of steps
                groups = [{STEP: 0, **group} for group in _settings(link)]
                link.load_state_dict({"optimizer": {"param_groups": groups}, **_scaler(link)})
        return empty

    def states(self, to_save: bool = False) -> Iterator[State]:
        """Yields the tensors of the state. The master copy of a parameter in fp32 is the parameter
        itself, which a distributed optimizer saves, and which need not be loaded twice.

        Raises UsageError if the optimizer has no state yet, as before its first step.
        """
        for link in self.links:
            for parameter, low, main in _mains(link):
                tensors = {n: t for n, t in link.optimizer.state[main].items() if n != STEP}
                if not tensors:
                    raise UsageError(
                        "the optimizer has no state before its first step; save the model without"
                        " `optimizer`, or after a step"
                    )
                if main.dtype != parameter.dtype or (to_save and self.distributed):
                    tensors = {MASTER: main, **tensors}
                for name, tensor in tensors.items():
                    yield State(name, parameter, low, tensor)

    def recorded(self) -> OptimizerFacts:
        """Returns what a checkpoint records of the optimizer on this rank."""
        groups, scalers = [], []
        for link in self.links:
            steps = [float(one[STEP]) for one in link.optimizer.state.values() if STEP in one]
            counted = {STEP: max(steps)} if steps else {}
            groups.append([{**group, **counted} for group in _settings(link)])
            for state in _scaler(link).values():
                tensors = {n: float(v) for n, v in state.items() if hasattr(v, "item")}
                scalers.append({**state, **tensors})
        schedule = {} if self.scheduler is None else {SCHEDULER: self.scheduler.state_dict()}
        return OptimizerFacts(groups, scalers, self.distributed, self.wrapped, schedule)

    def matched(self, groups: list[list[dict[str, Any]]], place: str) -> list[list[dict[str, Any]]]:
        """Returns the settings that a checkpoint has for each of the param_groups, for each
        optimizer.

        groups: those of the checkpoint, at `place`. Raises UsageError with all groups that it does
        not have.
        """
        experts = [_is_of_experts(_settings(link)) for link in self.links]
        stored = regrouped(groups, 2 if any(experts) else 1)
        out, missing = [], []
        for link, expert in zip(self.links, experts, strict=True):
            known = {_identity(group): group for group in stored[expert]}
            own = [_identity(group) for group in _settings(link)]
            missing += [one for one in own if one not in known]
            out.append([known.get(one, {}) for one in own])
        if missing:
            raise UsageError.of(
                f"{place}: its optimizer was built with other settings than the live one, whose"
                " groups of parameters it does not have:",
                [str(dict(one)) for one in dict.fromkeys(missing)],
                "The checkpoint has "
                + ", ".join(str(dict(_identity(group))) for own in stored for group in own)
                + "; build the optimizer with the settings of its run",
            )
        return out

    def set_groups(self, matched: Sequence[list[dict[str, Any]]], scalers: list[Scaler]) -> None:
        """Sets the count of steps, the settings of the param_groups, and the loss scalers.

        matched: the result of the method of this name. scalers: those of the checkpoint.
        """
        import torch

        scalers = rescaled(scalers, len(self.links))
        for number, (link, groups) in enumerate(zip(self.links, matched, strict=True)):
            state: dict[str, Any] = {"optimizer": {"param_groups": groups}, **_scaler(link)}
            if not self.distributed:
                state = link.state_dict()
                inner = state["optimizer"] if self.wrapped else state
                listed = zip(groups, inner["param_groups"], strict=True)
                inner["param_groups"] = [{**new, "params": own["params"]} for new, own in listed]
            if scalers and SCALER in state:
                state[SCALER] = {
                    name: torch.tensor([value]) if isinstance(value, float) else value
                    for name, value in scalers[number].items()
                }
            link.load_state_dict(state)
            for one in link.optimizer.state.values():
                if STEP in one:  # Megatron-Core gives all parameters one and the same count
                    one[STEP] = one[STEP].clone()


def parts_of(
    memory: Memory, optimizer: LiveOptimizer, weights: Sequence[Part], to_save: bool
) -> list[Part]:
    """Adds the tensors of an optimizer's state to the memory of this rank, and returns their parts,
    under their keys of `torch_dist`.

    weights: the parts of the model. Raises UsageError for states of other parameters.
    """
    by_weight: dict[int, list[Part]] = {}
    for part in weights:
        by_weight.setdefault(memory.number(part.at), []).append(part)
    parts = []
    for state in optimizer.states(to_save):
        if (number := memory.number_of(state.parameter)) is None:
            raise UsageError(
                "the optimizer has the state of parameters that the model chunks do not have; give"
                " the optimizer of this model, and all chunks of the model"
            )
        weight = memory.weights[number]
        place = memory.add(f"{weight.name}@{state.name}", state, weight.expert)
        dtype = str(state.tensor.dtype).removeprefix("torch.")
        key, size = prefix_of(state.name, optimizer.distributed), itemsize(dtype)
        for part in by_weight[number]:
            start = (part.at - weight.at) // itemsize(part.dtype)
            whole = Piece(part.key, Box(part.offset, part.sizes), start, part.strides)
            for piece in clip(whole, state.low, state.low + state.tensor.numel()):
                (offset, sizes), at = piece.box, place + piece.start * size
                strides = _strides(sizes, piece.strides)
                parts.append(Part(key + part.key, dtype, part.whole, offset, sizes, strides, at))
    return parts


def apart(memory: Memory, optimizer: LiveOptimizer) -> list[str]:
    """Returns the names of the parameters of this rank that are not their master copies, when
    rounded.
    """
    import torch

    out = []
    for state in optimizer.states():
        if state.name == MASTER and (number := memory.number_of(state.parameter)) is not None:
            count = state.tensor.numel()
            own = state.parameter.detach().view(-1)[state.low : state.low + count]
            rounded = state.tensor.detach().view(-1).to(own.dtype)
            if not torch.equal(rounded.view(torch.int16), own.view(torch.int16)):
                out.append(memory.weights[number].name)
    return out


def _mains(link: Any) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Yields each parameter that an optimizer updates on this rank, the first element that it
    updates, and the tensor of these elements that it updates in fp32.
    """
    if hasattr(link, "model_param_gbuf_map"):  # distributed
        for parameter in link.model_param_gbuf_map:
            group, place = link.model_param_group_index_map[parameter]
            low = link._get_model_param_range_map(parameter)["param"].start
            yield parameter, low, link.optimizer.param_groups[group]["params"][place]
        return
    masters: dict[torch.Tensor, torch.Tensor] = {}  # master copy -> parameter
    if hasattr(link, "float16_groups"):
        for own, copies in zip(link.float16_groups, link.fp32_from_float16_groups, strict=True):
            masters |= dict(zip(copies, own, strict=True))
    for group in link.optimizer.param_groups:
        for main in group["params"]:
            yield masters.get(main, main), 0, main


def _strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a part, row-major where it is dense: axes of one element have none
    that matter.
    """
    dense = row_major(sizes)
    steps = zip(sizes, strides, dense, strict=True)
    return dense if all(n == 1 or step == own for n, step, own in steps) else strides


def _settings(link: Any) -> list[dict[str, Any]]:
    """Returns the param_groups of an optimizer without their parameters."""
    groups = link.optimizer.param_groups
    return [{name: v for name, v in group.items() if name != "params"} for group in groups]


def _scaler(link: Any) -> dict[str, dict[str, Any]]:
    """Returns the loss scaler of an optimizer as an entry of its state dict; {} without one."""
    scaler = getattr(link, SCALER, None)
    return {SCALER: scaler.state_dict()} if scaler else {}


def _is_of_experts(groups: Sequence[Mapping[str, Any]]) -> bool:
    return bool(groups) and all(group.get("is_expert_parallel") for group in groups)


def _identity(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the settings by which Megatron-Core tells param_groups from each other."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    found = {key: group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys}
    return tuple((key, value) for key, value in found.items() if value is not None)


def _refuse_others(link: Any) -> None:
    """Raises UsageError for an optimizer that does not keep the state of Adam in fp32."""
    import torch

    config, inner = link.config, link.optimizer
    distributed = hasattr(link, "ddp_config")
    cure = "; save and load it with Megatron-Core, and convert its checkpoint (`mckpt reshard`)"
    if config.optimizer != "adam":
        raise UsageError(
            f"the live optimizer is {config.optimizer}, and mckpt.live loads and saves the state of"
            f" adam only{cure}"
        )
    if getattr(config, "use_precision_aware_optimizer", False):
        raise UsageError(
            "the live optimizer has use_precision_aware_optimizer, with which its state is scaled"
            f" or in other dtypes than fp32{cure}"
        )
    if type(inner).__name__ == "HybridDeviceOptimizer":
        raise UsageError(f"the live optimizer keeps a part of its state on the CPU{cure}")
    if distributed and link.ddp_config.use_megatron_fsdp:
        raise UsageError(f"the live optimizer is that of Megatron-FSDP{cure}")
    if not distributed and isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        raise UsageError(
            "the live optimizer is torch's AdamW, which counts the steps of each parameter, because"
            " Transformer Engine and Apex are missing; install one of them, or set"
            " use_distributed_optimizer"
        )
