"""Reads the state of Muon in a `torch` checkpoint of a training that distributes it by layers.

    mp_rank_TT[_PPP][_EEE]/layer_wise_optimizer_D.pt    of data-parallel rank D
        [{optimizer: {state: {NUMBER: {momentum_buffer}}, param_groups: [{params: [NUMBER]}]},
          fp32_from_fp16_params: [[master copies of group 0], ...]}, {the same of Adam}]

Each rank has the states of some whole parameters, and no file names them. They follow from the rule
by which Megatron deals the parameters out: LayerWiseDistributedOptimizer._shard_params_ping_pong
(megatron/core/optimizer/layer_wise_optimizer.py, megatron-core 0.19). A training has that rule with
--no-use-layer-wise-param-layout; without the flag megatron-core cannot save the format `torch`.
Experts on ranks of their own are dealt out among the ranks that have the same experts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Problems, shapes_of
from mckpt.formats.megatron.optimizer.state import (
    CURE,
    LAYER_WISE,
    MASTER,
    NOT_DISTRIBUTED,
    Link,
    Optimizer,
    decays,
    groups_of,
    is_undecayed,
    links,
)
from mckpt.formats.megatron.optimizer.torch_reading import (
    KEYS,
    Contents,
    ModelParameter,
    Source,
    StateBuffer,
    found_in,
    registered,
    shape_of,
    stored_of,
)
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel

_NAME = re.compile(r"layer_wise_optimizer_(\d+)\.pt")
Files = dict[str, list[int]]  # of each directory: the data-parallel ranks that have a file there


class _KeptParameter(NamedTuple):
    """A parameter, and where the optimizers keep it."""

    parameter: ModelParameter
    link: int
    group: int
    expert: bool  # whether it is dealt out among expert-data-parallel ranks


def deal(numels: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the rank that has each parameter.

    numels: the number of elements of each parameter. The smallest parameter goes to rank 0, the
    next one to rank 1, and so on to the last rank and back again. The last rank and rank 0 get two
    in a row where the direction changes: for two ranks, 0 1 1 0 0 1 1 0.
    """
    loop = [*range(num_ranks), *reversed(range(num_ranks))]
    ranks = [0] * len(numels)
    for turn, index in enumerate(sorted(range(len(numels)), key=numels.__getitem__)):
        ranks[index] = loop[turn % len(loop)]
    return ranks


def expert_rank(parallel: Parallel, tp: int, data: int) -> tuple[int, int]:
    """Returns the expert rank and the expert-data-parallel rank of a tensor and data-parallel rank.

    Ranks are numbered in the order tensor, expert or context, data (RankGenerator of
    megatron/core/parallel_state.py).
    """
    number = data * parallel.tp + tp
    return number // parallel.expert_tp % parallel.ep, number // (parallel.expert_tp * parallel.ep)


def files(root: Path, directories: list[str]) -> Files:
    """Returns the files of all directories; none of them without such an optimizer."""
    out = {
        name: sorted(int(m[1]) for m in map(_NAME.fullmatch, os.listdir(root / name)) if m)
        for name in directories
        if (root / name).is_dir()
    }
    return out if any(out.values()) else {}


def read(source: Source, ranks: Files, args: dict[str, Any]) -> Optimizer:
    """Returns the optimizer's state. ranks: those with a file. args: those of the checkpoint.

    Raises UsageError if ranks wrote their files over each other, and SourceError with every rank
    whose file is missing or does not fit its parameters.
    """
    if (cp := args.get("context_parallel_size") or 1) > 1:
        raise UsageError(
            f"{source.where}: its run had context_parallel_size {cp}, and gave each of these ranks"
            f" parameters of its own, but they wrote their files ({LAYER_WISE}) over each other, so"
            " that those of only one are left. Save it with --ckpt-format torch_dist, or give"
            " --no-optimizer to convert the weights alone"
        )
    num_ranks = 1 + max(number for numbers in ranks.values() for number in numbers)
    parallel = source.names.parallel
    problems = Problems(
        f"the optimizer's state of {source.where} does not match its weights:", CURE
    )
    _check(ranks, parallel, args.get("data_parallel_size") or num_ranks, problems)
    problems.check()
    contents = {
        (directory, number): _open(source, directory, number)
        for directory, numbers in ranks.items()
        for number in numbers
    }
    groups = groups_of(_combined(list(contents.values())), source.where)
    chain = links(groups)
    found: list[StateBuffer] = []
    for directory, parameters in registered(source, problems):
        listed = _placed([p for chunk in parameters for p in chunk], groups, chain)
        tp = int(directory.split("_")[2])
        for number in ranks[directory]:
            mine = _mine(listed, parallel, tp, number, num_ranks)
            found += _found(contents[directory, number], mine, problems)
    problems.check()
    stored, bound = stored_of(found, problems)
    problems.check()
    layout = Layout(source.files, stored, shapes_of(bound, source.names.scope()))
    return Optimizer(NOT_DISTRIBUTED, layout, groups, frozenset({*KEYS, LAYER_WISE}), [])


def _check(ranks: Files, parallel: Parallel, num_ranks: int, problems: Problems) -> None:
    """Adds to `problems` the files that are missing, and those of ranks that do not exist."""
    wanted: Files = {}
    for p in range(parallel.pp):
        for tp in range(parallel.tp):
            for number in range(num_ranks):
                ep = expert_rank(parallel, tp, number)[0]
                wanted.setdefault(parallel.directory(tp, p, ep), []).append(number)
    for directory in sorted(ranks.keys() | wanted.keys()):
        here, there = set(ranks.get(directory, ())), set(wanted.get(directory, ()))
        for number in sorted(there - here):
            problems.missing(f"{directory}: {_name(number)} is missing")
        for number in sorted(here - there):
            problems.missing(
                f"{directory}: {_name(number)} belongs to none of {num_ranks} data-parallel ranks"
            )


def _name(number: int) -> str:
    return LAYER_WISE.replace("*", str(number))


def _open(source: Source, directory: str, number: int) -> Contents:
    contents = source.open(directory, _name(number))
    if contents is None:
        raise SourceError(f"{source.where}/{directory}: {_name(number)} is missing")
    listed = contents.value if isinstance(contents.value, list) else [contents.value]
    if not all(map(_is_optimizer, listed)):
        raise SourceError(
            f"{contents.path}: is not the state of an optimizer that is distributed by layers:"
            f" it lacks groups of parameters, states or master copies. {CURE}"
        )
    return contents._replace(value=listed)


def _is_optimizer(one: Any) -> bool:
    """Returns whether a value of a file has what `_combined` and `_found` read of an optimizer."""
    match one:
        case {
            "fp32_from_fp16_params": list(masters),
            "optimizer": {"state": dict(states), "param_groups": list(groups)},
        }:
            lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
            return (
                len(masters) == len(groups)
                and all(isinstance(one, list) for one in (*masters, *lists))
                and all(type(number) is int for numbers in lists for number in numbers or ())
                and all(isinstance(state, dict) for state in states.values())
            )
    return False


def _combined(files: list[Contents]) -> list[Any]:
    """Returns the optimizers of all files as one. Each group is that of a rank with parameters of
    the group, because other ranks do not count its steps. Raises SourceError if the numbers of
    groups differ.
    """
    counts = [[len(one["optimizer"]["param_groups"]) for one in file.value] for file in files]
    for file, count in zip(files, counts, strict=True):
        if count != counts[0]:
            raise SourceError(
                f"{file.path}: its optimizers have {count} groups of parameters, and those of"
                f" {files[0].path} have {counts[0]}. {CURE}"
            )
    out = []
    for chained in zip(*(one.value for one in files), strict=True):
        inner = [one["optimizer"] for one in chained]
        groups = [
            next((group for group in same if group["params"]), same[0])
            for same in zip(*(one["param_groups"] for one in inner), strict=True)
        ]
        states = (value for one in inner for value in one["state"].values())
        out.append({"optimizer": {"param_groups": groups, "state": dict(enumerate(states))}})
    return out


def _placed(
    parameters: list[ModelParameter], groups: list[list[dict[str, Any]]], chain: list[Link]
) -> list[_KeptParameter]:
    """Returns the parameters of a rank before they are dealt out: those of each group of each
    optimizer, in the order of their registration.
    """
    apart = any(group.get("is_expert_parallel") for own in groups for group in own)
    out = []
    for p in parameters:
        expert = apart and "expert" in p.bound.rule.indices
        undecayed = is_undecayed(p.key, len(p.entry.shape))
        for link, own in enumerate(groups):
            if chain[link].updates(p.bound, len(p.entry.shape)):
                fits = [
                    (bool(g.get("is_expert_parallel")) != expert, decays(g) == undecayed, number)
                    for number, g in enumerate(own)
                ]
                out.append(_KeptParameter(p, link, min(fits)[2], expert))
    return sorted(out, key=lambda place: (place.link, place.group))


def _mine(
    listed: list[_KeptParameter], parallel: Parallel, tp: int, number: int, num_ranks: int
) -> list[_KeptParameter]:
    """Returns the parameters of one data-parallel rank in the order of its groups. With several
    ranks, this is the order of their sizes.
    """
    if num_ranks == 1:
        return listed
    num_experts = num_ranks * parallel.tp // (parallel.expert_tp * parallel.ep)
    mine: list[_KeptParameter] = []
    for expert, ranks, rank in (
        (False, num_ranks, number),
        (True, num_experts, expert_rank(parallel, tp, number)[1]),
    ):
        dealt = [place for place in listed if place.expert == expert]
        numels = [math.prod(place.parameter.entry.shape) for place in dealt]
        owners = deal(numels, ranks)
        order = sorted(range(len(dealt)), key=numels.__getitem__)
        mine += [dealt[i] for i in order if owners[i] == rank]
    return mine


def _found(
    contents: Contents, mine: list[_KeptParameter], problems: Problems
) -> Iterator[StateBuffer]:
    """Yields the states of the parameters of one rank."""
    for link, one in enumerate(contents.value):
        inner = one["optimizer"]
        for number, group in enumerate(inner["param_groups"]):
            own = [place.parameter for place in mine if (place.link, place.group) == (link, number)]
            masters = list(one["fp32_from_fp16_params"][number])
            states = [dict(inner["state"].get(n, {})) for n in group["params"]]
            if not len(states) == len(masters) == len(own):
                problems.missing(
                    f"{contents.path}: group {number} of optimizer {link} has {len(states)}"
                    f" parameters and {len(masters)} master copies, and should have {len(own)}"
                )
                continue
            for p, state, master in zip(own, states, masters, strict=True):
                state[MASTER] = master
                if (shape := shape_of(state)) != p.entry.shape:
                    problems.missing(
                        f"{contents.path}: group {number} of optimizer {link} has a state of"
                        f" {list(shape or ())}, where {p.key} {list(p.entry.shape)} should be"
                    )
                    continue
                yield from found_in(contents, p, state)
