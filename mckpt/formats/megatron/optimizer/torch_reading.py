"""Reads the optimizer's state of a `torch` checkpoint.

    Float16OptimizerWithFloat16Params: in each model_optim_rng.pt, as `optimizer`
        {optimizer: {state: {NUMBER: {exp_avg, exp_avg_sq}}, param_groups: [{params: [NUMBER]}]},
         fp32_from_fp16_params: [[master copies of group 0], ...]}
    FP32Optimizer: the same without master copies, and without the inner `optimizer`
    DistributedOptimizer: in a distrib_optim.pt beside it
        {buckets_coalesced: True,
         BUFFER: {(dtype, dtype of gradients): {param, exp_avg, exp_avg_sq, numel_unpadded}}}

A model with experts on ranks of their own has a list of two of these. Neither names parameters, but
both have them in the order in which the model registers them, which is that of the keys of `model`.
`buckets` computes their places in a flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle
from mckpt.containers.entries import Entry, entry_of
from mckpt.containers.torch_file import Ranges
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Names, Problems, group, packed, shapes_of
from mckpt.formats.megatron.optimizer import buckets, frozen, kinds
from mckpt.formats.megatron.optimizer.state import (
    BY_LAYERS,
    CURE,
    LAYER_WISE,
    MASTER,
    MASTER_KEYS,
    NOT_DISTRIBUTED,
    Link,
    Optimizer,
    counted,
    decays,
    groups_of,
    links,
    next_group,
    scalers_of,
    state_bound,
    state_pieces,
)
from mckpt.formats.megatron.torch_shards import FILE as MODEL
from mckpt.formats.megatron.torch_shards import Shard, axes, directories, places, shards
from mckpt.geometry.box import Layout, Piece, Stored, row_major
from mckpt.mapping import Bound
from mckpt.values.dtypes import itemsize

FILE = "distrib_optim.pt"
FORM = "distrib_optim.pt"
STEP = "step"  # the count of steps of one parameter
# the keys of a file, and the file, that belong to the optimizer
KEYS = ("optimizer", "opt_param_scheduler", FILE)


class Contents(NamedTuple):
    """One torch.save file: its value, the places of its storages, and its number."""

    value: Any
    data: Ranges
    file: int
    path: str


class ModelParameter(NamedTuple):
    """A parameter of one rank, as its `model` has it."""

    key: str
    entry: Entry  # of the weight
    bound: Bound
    shard: Shard
    layer: int
    expert: int
    experts: int = 1  # it has the matrices of so many experts, `expert` and those behind it

    def states(self, state: str, entry: Entry) -> Iterator[StateBuffer]:
        """Yields a state of the parameter, which lies at `entry`, for each expert."""
        if self.experts == 1:
            yield StateBuffer(state, self, entry)
            return
        shape, (step, *strides) = entry.shape[1:], entry.strides or row_major(entry.shape)
        for number in range(self.experts):
            at = entry.at + number * step * itemsize(entry.dtype)
            own = Entry(entry.dtype, shape, entry.file, at, entry.strides and tuple(strides))
            yield StateBuffer(state, self._replace(expert=self.expert + number), own)


class Source(NamedTuple):
    """A `torch` checkpoint as its reader hands it over: its names, its files and its models."""

    names: Names
    grid: list[tuple[int, int]]  # tensor and expert ranks of the files of a pipeline stage
    padded_vocab_size: int | None  # rows
    models: Callable[[str], list[dict[str, Entry | None]]]  # of a directory, by virtual stage
    # directory, name of a file in it -> the file's contents, None if it is not there
    open: Callable[[str, str], Contents | None]
    files: list[str]
    where: str
    bucket_size: int | None  # elements at which a bucket was full; None: there was one bucket


class _Group(NamedTuple):
    """The states of the parameters of one param_group, in their order."""

    decays: bool  # whether weight decay applies to them
    states: list[dict[str, Any]]
    # master copies of those parameters that are not fp32; None: FP32Optimizer, which has none
    masters: list[Any] | None

    def following(self, p: ModelParameter) -> tuple[int, ...] | None:
        """Returns the shape of the next parameter of the group, which may be `p`; None at the end
        of the group. A parameter in fp32 of an optimizer that has made no step has no tensor.
        """
        if not self.states:
            return None
        if self.states[0]:
            return shape_of(self.states[0])
        if p.entry.dtype == "float32" or not self.masters:
            return p.entry.shape
        return shape_of({MASTER: self.masters[0]})


class StateBuffer(NamedTuple):
    """The buffer of one state of one parameter."""

    state: str
    parameter: ModelParameter
    entry: Entry


def read(source: Source, args: Mapping[str, Any]) -> Optimizer | None:
    """Returns the optimizer's state, None if no file has one.

    args: those of the checkpoint. Raises SourceError with every rank whose state does not fit its
    parameters, or whose file is missing.
    """
    parallel = source.names.parallel
    places = directories(parallel, source.grid)
    flat = any(source.open(place, FILE) is not None for place in places)
    first = source.open(places[0], MODEL)
    common = first.value if first is not None else {}
    plain = common.get("optimizer")
    if not flat and not _has_states(plain):
        missing = (
            f"{FILE if not args.get(BY_LAYERS) else LAYER_WISE} is missing in every rank"
            if args.get("use_distributed_optimizer") or args.get(BY_LAYERS)
            else "has no state of any weight"
        )
        kinds.refuse_empty(plain, f"{source.where}: {missing}", common)
        if not _has_masters(plain):
            return None
    problems = Problems(
        f"the optimizer's state of {source.where} does not match its weights:", CURE
    )
    where = f"{source.where}/{places[0]}/{MODEL}"
    groups = groups_of(plain, where) if first is None else groups_of(plain, first.path, first.data)
    models = [one for place in places[1:] if (one := source.open(place, MODEL)) is not None]
    others = (groups_of(one.value.get("optimizer"), one.path, one.data) for one in models)
    groups = counted(groups, [own for rank in others for own in rank])
    chain = links(groups)
    found: list[StateBuffer] = []
    for directory, parameters in registered(source, problems):
        contents = source.open(directory, FILE if flat else MODEL)
        if contents is None and flat and _saves_nothing(source, directory):
            continue
        if contents is None:
            problems.missing(f"{directory}: has no {FILE}")
            continue
        found += (
            _flat(contents, parameters, chain, source, problems)
            if flat
            else _listed(contents, parameters, chain, problems)
        )
    problems.check()
    scalers = [] if first is None else scalers_of(plain, first.data, first.path)
    stored, bound = stored_of(found, problems)
    problems.check()
    layout = Layout(source.files, stored, shapes_of(bound, source.names.scope()))
    form = FORM if flat else NOT_DISTRIBUTED
    return Optimizer(form, layout, groups, frozenset(KEYS), scalers)


def registered(
    source: Source, problems: Problems
) -> Iterator[tuple[str, list[list[ModelParameter]]]]:
    """Yields each directory and the parameters of its rank by virtual stage, in the order of their
    registration. A rank with keys of no rule becomes one of `problems`.
    """
    index = _parameters(source)
    is_parameter = source.names.mapping.registration.is_parameter
    for directory in directories(source.names.parallel, source.grid):
        models = [
            [key for key, entry in model.items() if entry is not None]
            for model in source.models(directory)
        ]
        known = index.get(directory, {})
        if unknown := [key for v, m in enumerate(models) for key in m if (v, key) not in known]:
            problems.missing(f"{directory}: {', '.join(unknown)}: other names than those expected")
            continue
        own = [[known[v, key] for key in model] for v, model in enumerate(models)]
        yield directory, [[p for p in chunk if is_parameter(p.bound.rule.key)] for chunk in own]


def _saves_nothing(source: Source, directory: str) -> bool:
    """Returns whether another rank saves the only optimizer of this one: that of all experts, if
    the run trained no parameter of experts.
    """
    parallel, own = source.names.parallel, source.open(directory, MODEL)
    savers = {
        parallel.directory(t, p, t // parallel.expert_tp % parallel.ep)
        for t in range(parallel.tp)
        for p in range(parallel.pp)
    }
    return directory not in savers and own is not None and isinstance(own.value["optimizer"], dict)


def _has_states(plain: Any) -> bool:
    chained = plain if isinstance(plain, list) else [plain]
    inner = [one.get("optimizer", one) for one in chained if isinstance(one, dict)]
    return any(isinstance(one, dict) and one.get("state") for one in inner)


def _has_masters(plain: Any) -> bool:
    chained = plain if isinstance(plain, list) else [plain]
    return any(isinstance(one, dict) and one.get("fp32_from_fp16_params") for one in chained)


def _parameters(source: Source) -> dict[str, dict[tuple[int, str], ModelParameter]]:
    """Returns every tensor of the model: directory -> (virtual stage, key) -> parameter."""
    names = source.names
    scope = names.scope()
    out: dict[str, dict[tuple[int, str], ModelParameter]] = {}
    for b in names.bound:
        whole = packed(b.rule, scope, source.padded_vocab_size)
        for shard in shards(b, whole, names.parallel, source.grid):
            for _, directory, v, layer, expert, key in places(b, shard, names):
                entry = source.models(directory)[v].get(key)
                if entry is not None:
                    (experts,) = axes(b, names.parallel, names.dims) or (1,)
                    parameter = ModelParameter(key, entry, b, shard, layer, expert, experts)
                    out.setdefault(directory, {}).setdefault((v, key), parameter)
    return out


def _optimizers(
    path: str, listed: list[Any], parameters: list[list[ModelParameter]], chain: list[Link]
) -> Iterator[tuple[Any, list[list[ModelParameter]]]]:
    """Yields each of a rank's optimizers, and its parameters by virtual stage.

    chain: of the first rank. Old releases of megatron-core make an optimizer of experts only on
    ranks that have some.
    """
    if len(listed) != len(chain):
        if len(listed) > 2 or any(link.matrices is not None for link in chain):
            raise SourceError(
                f"{path}: has {len(listed)} optimizers, and the first rank has {len(chain)}; copy"
                " it again, or give --no-optimizer to convert the weights alone"
            )
        chain = links([[]] * len(listed))
    for one, link in zip(listed, chain, strict=True):
        yield (
            one,
            [
                [p for p in chunk if link.updates(p.bound, len(p.entry.shape))]
                for chunk in parameters
            ],
        )


def _flat(
    contents: Contents,
    parameters: list[list[ModelParameter]],
    chain: list[Link],
    source: Source,
    problems: Problems,
) -> Iterator[StateBuffer]:
    """Yields the states in a distrib_optim.pt."""
    value = contents.value
    listed = value if isinstance(value, list) else [value]
    for one, own in _optimizers(contents.path, listed, parameters, chain):
        if one is None:  # another rank's file has it
            continue
        if not isinstance(one, dict) or not one.get("buckets_coalesced"):
            problems.missing(
                f"{contents.path}: is of a Megatron-LM before 2024, which kept the parts of each"
                " rank; its --ckpt-convert-update-legacy-dist-opt-format rewrites it"
            )
            return
        # one buffer for each dtype of a chunk, in the order in which the dtypes first occur
        kinds = [(v, p.entry.dtype) for v, chunk in enumerate(own) for p in chunk]
        for number, (v, kind) in enumerate(dict.fromkeys(kinds)):
            what = f"{kind} of chunk {v}"
            inside = [p for p in own[v] if p.entry.dtype == kind]
            found = {dtypes[0].name: buffer for dtypes, buffer in one.get(number, {}).items()}
            if kind not in found:
                problems.missing(f"{contents.path}: has no buffer {number}, for {what}")
                return
            yield from _buffer(contents, found[kind], inside, what, source, problems)


def _buffer(
    contents: Contents,
    buffer: dict[str, Any],
    parameters: list[ModelParameter],
    what: str,
    source: Source,
    problems: Problems,
) -> Iterator[StateBuffer]:
    """Yields the states of one flat buffer. parameters: in the order of their registration."""
    views = ((name, safe_pickle.as_tensor(record)) for name, record in buffer.items())
    wholes = {
        MASTER if name in MASTER_KEYS else name: entry_of(view, contents.data, contents.file)
        for name, view in views
        if view is not None
    }
    if (master := wholes.get(MASTER)) and not _starts(parameters, master.shape[0], source):
        parameters = _trained(parameters, master, source, what)
    for name, whole in wholes.items():
        starts = _starts(parameters, whole.shape[0], source)
        if starts is None:
            total = sum(math.prod(p.entry.shape) for p in parameters)
            problems.missing(
                f"{contents.path}: {name} of {what} has {whole.shape[0]:,} elements, and its"
                f" {len(parameters)} parameters have {total:,}"
            )
            return
        size = itemsize(whole.dtype)
        for p, start in zip(reversed(parameters), starts, strict=True):
            entry = Entry(whole.dtype, p.entry.shape, whole.file, whole.at + start * size)
            yield from p.states(name, entry)


def _trained(
    parameters: list[ModelParameter], master: Entry, source: Source, what: str
) -> list[ModelParameter]:
    """Returns the parameters in a buffer that lacks some, which the run did not train. Returns all
    if the master copies of no choice fill it. Raises UsageError if those of several do.
    """
    found = frozen.choices([p.entry for p in parameters], master, source.files)
    if not found:
        return parameters
    one, *others = ([parameters[number] for number in numbers] for numbers in found)
    if others:
        left = [[p.key for p in parameters if p not in some] for some in (one, *others)]
        (a, b) = ([key for key in mine if key not in rest] for mine, rest in (left, left[::-1]))
        raise UsageError(
            f"{source.files[master.file]}: has no state of some parameters of {what}, which the run"
            f" did not train: either of {', '.join(a)} or of {', '.join(b)}. The file names no"
            " weight, and these have equal values. Let Megatron load it and save it with"
            f" --ckpt-format torch_dist, which has names, or {kinds.NO_OPTIMIZER}"
        )
    return one


def _starts(parameters: list[ModelParameter], total: int, source: Source) -> list[int] | None:
    """Returns the start of each parameter in a buffer of `total` elements, the last parameter
    first; None if they do not fill it.
    """
    copied = {b.rule.of for b in source.names.bound if b.rule.alias}
    shared = next((p for p in parameters if p.bound.rule.of in copied), None)
    registered = [
        buckets.Parameter(
            p.key, p.entry.dtype, p.entry.shape, p.shard.pieces, p.layer, p.expert, p is shared
        )
        for p in parameters
    ]
    for size in dict.fromkeys((None, source.bucket_size)):
        for buffer in buckets.lay_out(registered, bucket_size=size):
            if sum(buffer.numels) == total:
                return [buffer.start(placed.bucket) + placed.start for placed in buffer.placed]
    return None


def _listed(
    contents: Contents,
    parameters: list[list[ModelParameter]],
    chain: list[Link],
    problems: Problems,
) -> Iterator[StateBuffer]:
    """Yields the states in the `optimizer` of a model_optim_rng.pt."""
    value = contents.value.get("optimizer")
    listed = value if isinstance(value, list) else [value]
    for one, chunks in _optimizers(contents.path, listed, parameters, chain):
        try:
            inner = one.get("optimizer", one)
            listed, states = inner["param_groups"], inner["state"]
            masters = one.get("fp32_from_fp16_params", [None] * len(listed))
            groups = [
                _Group(
                    decays(group),
                    # an optimizer that has made no step has no state at all
                    [dict(states[number] if states else {}) for number in group["params"]],
                    None if own is None else list(own),
                )
                for group, own in zip(listed, masters, strict=True)
            ]
        except (AttributeError, KeyError, TypeError, ValueError):
            problems.missing(f"{contents.path}: its optimizer is incomplete")
            return
        yield from _grouped(contents, groups, [p for chunk in chunks for p in chunk], problems)


def _grouped(
    contents: Contents, groups: list[_Group], parameters: list[ModelParameter], problems: Problems
) -> Iterator[StateBuffer]:
    """Yields the states of groups, each of which has some of the parameters in their order."""
    decaying = [one.decays for one in groups]
    proved = any(one.masters for one in groups)
    for p in parameters:
        following = [one.following(p) for one in groups]
        number = next_group(p.key, p.entry.shape, following, decaying, proved)
        if number is None:
            problems.missing(
                f"{contents.path}: no group of its optimizer has a state of {list(p.entry.shape)}"
                f" next, for {p.key}"
            )
            return
        states, masters = groups[number].states.pop(0), groups[number].masters
        if masters is not None and p.entry.dtype != "float32":
            if not masters:
                problems.missing(f"{contents.path}: its optimizer has no master copy of {p.key}")
                return
            states[MASTER] = masters.pop(0)
        yield from found_in(contents, p, states)
    if rest := sum(max(len(one.states), len(one.masters or [])) for one in groups):
        problems.missing(f"{contents.path}: its optimizer has {rest} more states than parameters")


def found_in(
    contents: Contents, p: ModelParameter, states: dict[str, Any]
) -> Iterator[StateBuffer]:
    """Yields the states of one parameter. Raises UsageError for a tensor of another shape, other
    than a count of steps.
    """
    for name, record in states.items():
        view = safe_pickle.as_tensor(record)
        if view is None or name == STEP:
            continue
        if view.shape != p.entry.shape:
            raise UsageError(
                f"{contents.path}: the state {name} of {p.key} is {list(view.shape)}, and the"
                f" weight {list(p.entry.shape)}; mckpt does not convert it, so {kinds.NO_OPTIMIZER}"
            )
        yield from p.states(name, entry_of(view, contents.data, contents.file))


def shape_of(states: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape of a parameter by its states; `step` may be a number or a tensor."""
    views = [safe_pickle.as_tensor(value) for name, value in states.items() if name != STEP]
    return next((view.shape for view in views if view is not None), None)


def stored_of(found: list[StateBuffer], problems: Problems) -> tuple[list[Stored], list[Bound]]:
    """Returns the states as stored tensors, and the rules that name them."""
    kinds: dict[tuple[str, int, int, bool], list[StateBuffer]] = {}
    seen: set[tuple[str, int, tuple[Piece, ...], int, int]] = set()
    for one in found:
        p = one.parameter
        place = one.state, id(p.bound), p.shard.pieces, p.layer, p.expert
        replica = p.bound.rule.alias or place in seen
        seen.add(place)
        kinds.setdefault((one.state, id(p.bound), id(p.shard.pieces), replica), []).append(one)
    stored: list[Stored] = []
    bound: dict[tuple[str, int], Bound] = {}
    for (state, _, _, replica), members in kinds.items():
        first = members[0].parameter
        b = bound.setdefault((state, id(first.bound)), state_bound(first.bound, state))
        stored += group(
            f"{b.rule.key} ({state})",
            first.shard.shape,
            state_pieces(first.shard.pieces, state),
            [(m.parameter.layer, m.parameter.expert, m.entry) for m in members],
            problems,
            replica=replica,
            padding=b.rule.tp == "vocab",
        )
    return stored, list(bound.values())
