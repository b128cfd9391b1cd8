"""The optimizers that mckpt knows, and the states that each of them keeps.

A weight that has one state has all states of its optimizer. A frozen weight has none. Before its
first step, an optimizer has master copies alone. Anything else is damage: a save, a copy or an
index lost a part. The formats read the states that are there, and `refuse_lost` compares them with
this rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Names, Problems, packed
from mckpt.formats.megatron.optimizer.state import (
    CURE,
    MASTER,
    Groups,
    Optimizer,
    chained,
    has_moments,
    is_muon,
    links,
    steps_in,
)
from mckpt.geometry.box import Layout
from mckpt.lazy import numpy as np

# value of --optimizer -> the states of a weight beside its master copy. Muon updates matrices; the
# groups of its other parameters name the optimizer that updates them.
KINDS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}
NO_OPTIMIZER = "give --no-optimizer to convert the weights alone"

Places = dict[str, "np.ndarray"]  # tensor -> the numbers of its layers and experts, in order


def refuse_others(named: Iterable[Any], where: object) -> None:
    """Raises UsageError for a name of an optimizer that mckpt does not know."""
    *most, last = KINDS
    for name in named:
        if name not in KINDS:
            raise UsageError(
                f"{where}: has the state of the optimizer {name}; mckpt converts the state of"
                f" {', '.join(most)} and {last} only, so {NO_OPTIMIZER}"
            )


def has_stepped(groups: Iterable[Mapping[str, Any]], common: Mapping[str, Any]) -> bool:
    """Returns whether an optimizer has made a step, by its param_groups and by the schedule in the
    common state. An iteration whose gradient in fp16 overflows makes none, so the number of the
    iteration does not show it. Without a schedule the optimizer is taken to have stepped.
    """
    schedule = common.get("opt_param_scheduler")
    made = schedule.get("num_steps") if isinstance(schedule, dict) else None
    return made != 0 or any(group.get("step") for group in groups)


def refuse_empty(plain: Any, missing: str, common: Mapping[str, Any]) -> None:
    """Raises SourceError for param_groups without any state, if the optimizer has made a step.

    plain: an `optimizer` of a common state, or anything else. missing: the sentence that says what
    is missing, and where. common: the common state.
    """
    inner = [one.get("optimizer", one) for one in chained(plain) if isinstance(one, dict)]
    found = [one.get("param_groups") for one in inner if isinstance(one, dict)]
    groups = [g for own in found if isinstance(own, list) for g in own if isinstance(g, dict)]
    if any(map(has_moments, groups)) and has_stepped(groups, common):
        raise SourceError(f"{missing}, although its optimizer has groups of parameters. {CURE}")


def refuse_lost(
    found: Optimizer,
    names: Names,
    stated: Mapping[str, str],
    weights: Callable[[], Layout],
    where: object,
    common: Mapping[str, Any],
) -> None:
    """Raises SourceError with every weight that has some states of its optimizer and lacks others,
    and UsageError for a state that its optimizer does not keep.

    stated: where the checkpoint names its optimizer, and the name. weights: returns the places of
    the weights; they are needed only if some have no master copy. common: the common state.
    """
    experts = 1 + max((int(s.expert.max()) for s in found.layout.stored if len(s)), default=0)
    held: dict[str, Places] = {}
    for name, places in _places(found.layout, experts).items():
        weight, _, state = name.partition("@")
        held.setdefault(weight, {})[state] = places
    kind_of = _kinds(found.groups, names, stated, held)
    momentum = any(map(has_moments, (group for own in found.groups for group in own)))
    momentum |= any(KINDS["sgd"][0] in own for own in held.values())
    stepped = has_stepped((group for own in found.groups for group in own), common)
    new = all(own.keys() <= {MASTER} for own in held.values()) and not stepped
    problems = Problems(f"the optimizer's state of {where} is incomplete:", CURE)
    counts = found.live or steps_in(found.groups)  # a live one may wait for its values
    if stepped and not counts and "adam" in map(kind_of, held):
        problems.missing("the number of steps is missing in all groups of parameters")
    bare: Places = {}  # the weights without a master copy
    for weight, own in held.items():
        kind = kind_of(weight)
        wanted = () if new or (kind == "sgd" and not momentum) else KINDS[kind]
        if others := own.keys() - {MASTER, *wanted}:
            _refuse_unknown(weight, sorted(others), kind, stated, where)
        places = np.unique(np.concatenate([*own.values()]))
        for state in wanted:
            lost = np.setdiff1d(places, own.get(state, []))
            _report(weight, state, lost, experts, problems)
        bare[weight] = np.setdiff1d(places, own.get(MASTER, []))
    if any(map(len, bare.values())):
        strict = found.distributed and not (found.live or is_muon(found.groups))
        need = bare if strict else _rounded(weights(), bare, experts)
        for weight, lost in need.items():
            _report(weight, MASTER, lost, experts, problems)
    problems.check()


def _places(layout: Layout, experts: int) -> Places:
    """Returns the layers and experts of which a layout has each tensor, as one number each."""
    found: dict[str, list[np.ndarray]] = {}
    for s in layout.stored:
        for name in s.tensors if not s.replica else ():
            found.setdefault(name, []).append(s.layer.astype("i8") * experts + s.expert)
    return {name: np.unique(np.concatenate(numbers)) for name, numbers in found.items()}


def _rounded(layout: Layout, bare: Places, experts: int) -> Places:
    """Returns those of the weights `bare` that are not fp32, so that a master copy was rounded to
    them. A weight in fp32 may be its own master copy: where the optimizer is not distributed, and
    in a running model.
    """
    low = Layout(layout.files, [s for s in layout.stored if s.dtype != "float32"], layout.shapes)
    held = _places(low, experts)
    return {name: np.intersect1d(lost, held.get(name, [])) for name, lost in bare.items()}


def _report(weight: str, state: str, lost: np.ndarray, experts: int, problems: Problems) -> None:
    if not len(lost):
        return
    layer, expert = divmod(int(lost[0]), experts)
    more = f" and {len(lost) - 1:,} more of its kind" if len(lost) > 1 else ""
    what = "master copy" if state == MASTER else state
    problems.missing(f"the {what} of {weight.format(layer=layer, expert=expert)}{more} is missing")


def _kinds(
    groups: Groups, names: Names, stated: Mapping[str, str], held: Mapping[str, Places]
) -> Callable[[str], str]:
    """Returns the function that tells which optimizer updates a weight, by its template."""
    if not is_muon(groups):
        every = {state for own in held.values() for state in own} - {MASTER}
        fitting = [name for name, states in KINDS.items() if every and every <= {*states}]
        kind = next(iter([*stated.values(), *fitting]), "adam")
        return lambda weight: kind
    scope, chain = names.scope(), links(groups)
    found: dict[str, str] = {}
    for b in names.bound:
        num_axes = len(packed(b.rule, scope).shape) if b.rule.of else 0
        for link, own in zip(chain, groups, strict=True):
            if link.updates(b, num_axes):
                kind = "muon" if link.matrices else str(own[0]["optimizer"])
                found |= dict.fromkeys(b.rule.of, kind)
    return found.__getitem__


def _refuse_unknown(
    weight: str, states: list[str], kind: str, stated: Mapping[str, str], where: object
) -> None:
    source = next((f" by its {place}" for place, name in stated.items() if name == kind), "")
    raise UsageError(
        f"{where}: its optimizer is {kind}{source}, which keeps {' and '.join(KINDS[kind])}, and it"
        f" has {', '.join(states)} of {weight.format(layer='*', expert='*')}, which mckpt does not"
        f" convert; {NO_OPTIMIZER}"
    )
