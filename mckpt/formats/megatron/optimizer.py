"""The optimizer's state of each weight: its fp32 master copy, and the moments of Adam.

In a layout, a state is a logical tensor of its own with the weight's shape and the name
WEIGHT@STATE, for example `layers.{layer}.attn.q.weight@exp_avg`. So all that plans, copies and
compares weights does the same for states. The master copy is always called `master` here; the
others have Megatron's names.

This module knows the keys of the optimizers whose state is stored parameter by parameter. In
`torch_dist` these are optimizer.state.STATE.KEY, where KEY is the key of the weight:

    fully_reshardable   param, exp_avg, exp_avg_sq        DistributedOptimizer, from 0.15 on
    (not recorded)      fp32_param, exp_avg, exp_avg_sq   Float16Optimizer, which is not distributed
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mckpt.errors import SourceError
from mckpt.geometry.box import Layout, Stored
from mckpt.mapping import Bound

MASTER = "master"
# names of the master copy: of DistributedOptimizer, and of Float16Optimizer
MASTER_KEYS = ("param", "fp32_param")
FULLY_RESHARDABLE = "fully_reshardable"
NOT_DISTRIBUTED = "not distributed"
# what `optimizer` in a common state has beside tensors
_PLAIN = (
    *("optimizer", "param_groups", "state", "param_state", "param_state_sharding_type"),
    "fp32_from_fp16_params",
)
CURE = "If the checkpoint should be complete, copy it again; else give --no-optimizer."
# Before `chained_optim_avoid_prefix`, the optimizers of dense weights and of experts had prefixes.
_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")


class Optimizer(NamedTuple):
    """The optimizer's state of a checkpoint."""

    form: str  # how it is stored, such as fully_reshardable
    layout: Layout  # of its tensors
    # the param_groups of each optimizer: of a model with experts on ranks of their own, the second
    # is that of the experts
    groups: list[list[dict[str, Any]]]
    keys: frozenset[str]  # under which the checkpoint stores it

    @property
    def distributed(self) -> bool:
        """Returns whether it is the state of a DistributedOptimizer."""
        return self.form != NOT_DISTRIBUTED

    @property
    def portable(self) -> bool:
        """Returns whether Megatron loads it at other sizes than those it was saved at."""
        return self.form in (FULLY_RESHARDABLE, NOT_DISTRIBUTED)

    @property
    def states(self) -> list[str]:
        """Returns the names of the states."""
        return sorted({name.partition("@")[2] for name in self.layout.shapes})


def is_state(name: str) -> bool:
    return "@" in name


def holds_state(s: Stored) -> bool:
    """Returns whether a stored tensor is an optimizer's state."""
    return any(is_state(p.tensor) for p in s.pieces)


def split_key(key: str) -> tuple[str, str] | None:
    """Returns the state and the weight's key that the key of a state in torch_dist names."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    return (MASTER if found[1] in MASTER_KEYS else found[1]), found[2]


def keys_of(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the keys of all states in torch_dist: weight's key -> state -> key."""
    out: dict[str, dict[str, str]] = {}
    for key in keys:
        if (found := split_key(key)) is not None:
            out.setdefault(found[1], {})[found[0]] = key
    return out


def states_of(b: Bound, dtypes: Mapping[str, str]) -> list[str]:
    """Returns the states that the weights of a rule have.

    dtypes: of each logical tensor, by template; weights and states.
    """
    first = f"{b.rule.of[0]}@" if b.rule.of and not b.rule.alias else None
    return [n.removeprefix(first) for n in dtypes if n.startswith(first)] if first else []


def state_bound(b: Bound, state: str, prefix: str = "") -> Bound:
    """Returns the rule that stores a state of the weights of another rule.

    prefix: what precedes the weight's key in that of the state.
    """
    return b._replace(
        rule=b.rule._replace(
            key=prefix + b.rule.key,
            of=tuple(f"{name}@{state}" for name in b.rule.of),
            dtype=None,
            offset=b.rule.offset if state == MASTER else 0.0,
        )
    )


def prefix_of(state: str, distributed: bool) -> str:
    """Returns what precedes a weight's key in the key of its state in torch_dist."""
    name = MASTER_KEYS[not distributed] if state == MASTER else state
    return f"optimizer.state.{name}."


def groups_of(plain: Any, where: str) -> list[list[dict[str, Any]]]:
    """Returns the param_groups of each optimizer in the `optimizer` of a checkpoint's common state.

    Their lists of parameters are left out: they number the parameters of one rank. Raises
    SourceError if there are none.
    """
    out = []
    for one in _chained(plain):
        inner = one.get("optimizer", one) if isinstance(one, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise SourceError(
                f"{where}: has the state of an optimizer without its param_groups; give"
                " --no-optimizer to convert the weights alone"
            )
        out.append([{k: v for k, v in group.items() if k != "params"} for group in groups])
    return out


def unkept(plain: Any) -> list[str]:
    """Returns the names of what an `optimizer` of a common state has beside groups and states, such
    as the `grad_scaler` of training in fp16, which Megatron starts anew if it is not there.
    """
    found = {str(k) for one in _chained(plain) if isinstance(one, dict) for k in one}
    return sorted(found - set(_PLAIN))


def _chained(plain: Any) -> list[Any]:
    """Returns the values of each optimizer: a model with experts may have several."""
    numbered = isinstance(plain, dict) and plain.keys() and all(type(k) is int for k in plain)
    return list(plain.values()) if numbered else plain if isinstance(plain, list) else [plain]


def common_of(optimizer: Optimizer) -> Any:
    """Returns the `optimizer` of the common state of a torch_dist with the same optimizer."""
    kind = {"param_state_sharding_type": FULLY_RESHARDABLE} if optimizer.distributed else {}
    inner = [{"param_groups": own} for own in optimizer.groups]
    # FP32Optimizer, which has no master copies, is not wrapped around another
    wrapped = optimizer.distributed or MASTER in optimizer.states
    each = [{"optimizer": own, **kind} if wrapped else own for own in inner]
    return each[0] if len(each) == 1 else dict(enumerate(each))
