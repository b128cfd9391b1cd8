"""The optimizers of a rank, which Megatron-Core chains, and the parameters that each updates.

    adam, sgd       all parameters; if experts are on ranks of their own, two: the rest, experts
    muon            matrices, matrices of experts, the rest, the rest of experts: those with
                    parameters, and experts only if they are on ranks of their own
    muon by layers  matrices, the rest: --use-distributed-optimizer gives each data-parallel rank
                    whole matrices. The rest then has a DistributedOptimizer, or, with
                    --no-use-layer-wise-param-layout, is dealt out as the matrices are

A matrix is a parameter with two axes that is neither the embedding nor the output layer. The
param_groups of Muon have no entry `optimizer`; those of the rest have one, such as adam.

The rules are those of megatron/core/optimizer/__init__.py, megatron-core 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mckpt.errors import UsageError
from mckpt.formats.base import Names, packed
from mckpt.formats.megatron.optimizer.state import decays
from mckpt.mapping import Bound

SINCE = [0, 19]  # the first megatron-core with which Muon was tested
BY_LAYERS = "use_layer_wise_distributed_optimizer"  # an arg
Groups = Sequence[Sequence[Mapping[str, Any]]]


class Link(NamedTuple):
    """The parameters that one optimizer of a chain updates."""

    matrices: bool | None = None  # True: matrices only; False: no matrices; None: both
    experts: bool | None = None  # True: those of experts only; False: all others; None: both

    def updates(self, b: Bound, num_axes: int) -> bool:
        """Returns whether this optimizer updates the parameter of a rule, with so many axes."""
        expert = "expert" in b.rule.indices
        return self.matrices in (None, is_matrix(b, num_axes)) and self.experts in (None, expert)


def is_matrix(b: Bound, num_axes: int) -> bool:
    return num_axes == 2 and b.rule.tp != "vocab"


def is_muon(groups: Groups) -> bool:
    """Returns whether param_groups of several optimizers are those of a training with Muon."""
    return any("optimizer" in group for own in groups for group in own)


def links(groups: Groups) -> list[Link]:
    """Returns the parameters of each optimizer of a chain."""
    apart = [bool(own) and all(g.get("is_expert_parallel") for g in own) for own in groups]
    if not is_muon(groups):
        return [Link(experts=bool(i) if len(groups) > 1 else None) for i in range(len(groups))]
    return [
        Link("optimizer" not in own[0], expert if any(apart) else None)
        for own, expert in zip(groups, apart, strict=True)
    ]


def muon_groups(groups: Groups, names: Names, apart: bool, by_layers: bool) -> list[list[Any]]:
    """Returns the param_groups of each optimizer of a target that is trained with Muon.

    groups: of the source. names: of the target. apart: its experts are on ranks of their own.
    """
    every = [dict(group) for own in groups for group in own]
    found = [group for group in every if not group.get("is_expert_parallel")]
    if apart:
        known = [group for group in every if group.get("is_expert_parallel")]
        vectors = any(_is_vector_of_experts(names, b) for b in names.bound)
        found += known or [
            {**group, "is_expert_parallel": True}
            for group in found
            if "optimizer" not in group or (vectors and not decays(group))
        ]
    out: dict[tuple[bool, bool], list[Any]] = {}
    for group in found:
        expert = not by_layers and bool(group.get("is_expert_parallel"))
        out.setdefault(("optimizer" in group, expert), []).append(group)
    return [out[key] for key in sorted(out)]


def _is_vector_of_experts(names: Names, b: Bound) -> bool:
    is_parameter = names.mapping.registration.is_parameter(b.rule.key)
    expert = is_parameter and "expert" in b.rule.indices
    return expert and len(packed(b.rule, names.scope()).shape) == 1


def refuse_target(fixed_sizes: bool, by_layers: bool, megatron: list[int]) -> None:
    """Raises UsageError for a target that cannot hold the state of Muon."""
    if megatron < SINCE:
        raise UsageError(
            f"the source has the state of Muon, which mckpt writes for megatron-core"
            f" {'.'.join(map(str, SINCE))} and later, and the target is for"
            f" {'.'.join(map(str, megatron))}; give --no-optimizer to convert the weights alone"
        )
    if fixed_sizes and by_layers:
        raise UsageError(
            "the source has the state of Muon, distributed by layers, of which the format torch has"
            " a file for each data-parallel rank (layer_wise_optimizer_*.pt); mckpt reads these and"
            " does not write them, so give --target-format torch_dist to keep the state, or"
            " --no-optimizer to convert the weights alone"
        )
