"""Plans the conversion of adapters between PEFT and Megatron, and to other parallel sizes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mckpt import formats, mapping
from mckpt.adapters import factors
from mckpt.adapters.factors import A, AdapterNames, B, Member, Module, Place, name_of
from mckpt.adapters.fitting import Fit, fit
from mckpt.adapters.peft import NOT_FINITE, PeftAdapter, is_adapter, open_adapter, rules
from mckpt.adapters.peft_writing import PEFT, config, lay_out
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import SourceOptions
from mckpt.checkpoint.files import CheckpointFiles, open_files
from mckpt.checkpoint.model import ModelDescription
from mckpt.conversion import optimizer, to_megatron
from mckpt.conversion.args import Decided, args_of, bridge_files
from mckpt.conversion.plan_data import facts_of
from mckpt.conversion.planning import Plan, name_of_iteration
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import Destination, TargetOptions
from mckpt.errors import SourceError, UsageError
from mckpt.formats import carried, places
from mckpt.formats.base import Names
from mckpt.formats.foreign import FACTOR, has_adapter
from mckpt.formats.hf_config import ADAPTER
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.optimizer import (
    Optimizer,
    Scaler,
    holds_state,
    is_muon,
    is_state,
    keys_of,
)
from mckpt.formats.megatron.run_config import RUN_CONFIG, read_model, read_section
from mckpt.formats.megatron.save_directory import iteration_name
from mckpt.geometry.box import Layout, Piece, Stored, whole_box
from mckpt.geometry.join import join
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import MappingFile
from mckpt.mapping.schema import MAGNITUDE
from mckpt.storage.files import TargetFile
from mckpt.values import dtypes
from mckpt.values.adding import FACTORS, ROW_WISE, Factor

LAYOUTS = ("fused", "block", "canonical")


@dataclass(frozen=True, eq=False, repr=False)
class AdapterCheckpoint(Checkpoint):
    """The factors of an adapter, as the logical tensors of a checkpoint.

    Its files and its model are those of the checkpoint that describes the base.
    """

    held: Layout | None = None
    scale: float = 1.0  # of every product
    named: Names | None = None  # the names of its keys; None: those of PEFT
    beside: Layout | None = None  # the weights of the base, if they are in the checkpoint too

    @property
    def names(self) -> Names:
        """Returns the names of the stored keys, or those of the base."""
        return super().names if self.named is None else self.named

    @cached_property
    def layout(self) -> Layout:
        """Returns the places of the factors, and those of their states."""
        held = self.held
        assert held is not None
        if self.has_states and (states := self.optimizer) is not None:
            held = carried.joined(held, states.layout)
            ignored = {key: why for key, why in held.ignored.items() if key not in states.keys}
            held = replace(held, ignored=ignored)
        return held if self.merging is None else self.merging.layout(held)

    @cached_property
    def optimizer(self) -> Optimizer | None:
        """Returns the states of the factors, None if there are none.

        Raises UsageError for states that are not stored factor by factor.
        """
        if "optimizer" not in self.left_behind():
            return None
        states = keys_of(self.opened.keys())
        found = super().optimizer if states and all(map(FACTOR.search, states)) else None
        if found is None or is_muon(found.groups):
            raise UsageError(
                f"{self.path}: mckpt converts the optimizer's state of adapters only if it is that"
                " of Adam in torch_dist and has a tensor for each factor. Save it so, with"
                " dist_ckpt_optim_fully_reshardable in the section `checkpoint` of Megatron-Bridge,"
                " or give --no-optimizer to convert the adapters alone"
            )
        assert isinstance(self.named, AdapterNames)
        shared = factors.shared(found.layout, self.named.modules, self.named.rank)
        return found._replace(layout=shared)

    @property
    def base(self) -> AdapterCheckpoint | None:
        """Returns the weights beside the factors; None if there are none."""
        if self.beside is None:
            return None
        own = self.names
        names = Names(own.mapping, own.dims, own.choices, own.parallel)
        return replace(self, held=self.beside, named=names, beside=None)

    def left_behind(self) -> list[str]:
        return [] if self.named is None else super().left_behind()


# ------------------------------------------------------------------------------- adapters of PEFT


def of_peft(adapter: PeftAdapter, base: Checkpoint) -> AdapterCheckpoint:
    """Returns the factors of an adapter of PEFT.

    base: describes the model, and is not read but for its headers. Raises SourceError for an
    adapter that does not fit it, and UsageError for one that Megatron's adapters cannot express.
    """
    family = base.mapping if not base.is_megatron else base.model.family
    if family is None:
        raise UsageError(
            f"{base.path}: no config.json describes the base; give its Hugging Face directory"
        )
    choices = {} if base.is_megatron else base.names.choices
    fitted = fit(adapter, Names(family, base.dims, choices, Parallel()))
    if fitted.whole:
        names = [adapter.key(row) for _, row in fitted.whole.values()]
        raise UsageError.of(
            f"{adapter.path}: has whole tensors (modules_to_save or bias), which the adapters of"
            " Megatron-Bridge do not have:",
            names,
            "Merge the adapter with `mckpt adapter merge` instead.",
        )
    scales = {part.scale for parts in fitted.parts.values() for part in parts}
    if len(scales) > 1:
        listed = [f"{one.module}: rank {one.rank}, scale {one.scale:g}" for one in fitted.adapted]
        raise UsageError.of(
            f"{adapter.path}: its modules have different scales (alpha / r), and an adapter of"
            " Megatron-Bridge has one alpha and one rank:",
            listed,
            "Merge the adapter with `mckpt adapter merge` instead.",
        )
    layout = _layout_of(fitted, adapter)
    return AdapterCheckpoint(base.files, base.model, held=layout, scale=scales.pop())


def _layout_of(fitted: Fit, adapter: PeftAdapter) -> Layout:
    """Returns the places of the factors in an adapter's files."""
    stored: list[Stored] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for (weight, layer, expert), parts in fitted.parts.items():
        rank = parts[0].rank
        rows = max(part.box.offset[0] + part.box.shape[0] for part in parts)
        columns = max(part.box.offset[1] + part.box.shape[1] for part in parts)
        for number, part in enumerate(parts):
            low, high = part.box.offset[0], part.box.shape[0]
            if part.box.shape[1] != columns:
                raise UsageError(f"{weight}: its columns are cut, which no adapter of Megatron has")
            wanted: list[tuple[str, Factor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
            wanted = [(B, part.left, (low, 0), (high, rank), (rows, rank))]
            if not number:
                wanted.append((A, part.right, (0, 0), (rank, columns), (rank, columns)))
            if part.magnitudes is not None:
                if part.axis != ROW_WISE:
                    raise UsageError(
                        f"{adapter.path}: adapts {weight}, and an embedding has no adapter in"
                        " Megatron-Bridge; merge the adapter with `mckpt adapter merge` instead"
                    )
                wanted.append((MAGNITUDE, part.magnitudes, (low,), (high,), (rows,)))
            for side, factor, offset, shape, whole in wanted:
                name = name_of(weight, side, rank)
                shapes[name] = whole
                stored.append(_stored(name, factor, offset, shape, layer, expert))
    return Layout(list(adapter.files), stored, shapes)


def _stored(
    name: str,
    factor: Factor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    layer: int,
    expert: int,
) -> Stored:
    """Returns a factor in a file as a stored tensor."""
    steps = (factor.down, factor.along)[: len(shape)]
    span = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    box = whole_box(shape)._replace(offset=offset)
    where = np.array([[layer], [expert], [factor.file], [factor.at]], "i8")
    dtype = FACTORS[factor.dtype]
    return Stored(name, dtype, (span,), (Piece(name, box, 0, steps),), *where, view=True)


# --------------------------------------------------------------------------- adapters of Megatron


class _Model(ModelDescription):
    """The model of a checkpoint with adapters: the keys of their factors name no weight."""

    @cached_property
    def mapping(self) -> MappingFile:
        recorded = self.files.manifest.get("mapping", {}).get("name", "")
        if recorded in mapping.names("megatron"):
            return mapping.load("megatron", recorded, self.options.mapping)
        keys = map(_weight_key, self.files.opened.keys())
        return mapping.dialect_of(keys, self.options.mapping)


def _weight_key(key: str) -> str:
    """Returns the key of the weight that a factor adapts."""
    return FACTOR.sub(".weight", key)


def of_megatron(
    path: str | Path, options: SourceOptions, alpha: float | None = None
) -> tuple[AdapterCheckpoint, AdapterNames]:
    """Opens a Megatron checkpoint with adapters.

    alpha: replaces that of run_config.yaml or mckpt.json. Raises SourceError if there are none, or
    if they are not complete, and UsageError if the checkpoint does not state their alpha.
    """
    files = open_files(path, options)
    if not files.is_megatron or not has_adapter(files.opened.keys()):
        raise SourceError(f"{files.path}: has no adapters whose names mckpt knows")
    model = _Model(files)
    shown = files.opened.show(None).tensors
    # the stages of a pipeline may have different layers
    keys = list(getattr(files.opened, "stage_keys", files.opened.keys)())
    ranks = {shape[-1] for key, _, shape, _ in shown if key.endswith("linear_out.weight")}
    if not ranks:
        raise SourceError(
            f"{files.opened.root}: has factors linear_in of adapters, and none that is linear_out;"
            " copy it again"
        )
    if len(ranks) != 1:
        raise UsageError(
            f"{files.opened.root}: its adapters have the ranks {sorted(ranks)}, and mckpt reads"
            " those of one rank"
        )
    names = AdapterNames(
        model.mapping,
        model.dims,
        model.mapping.choices_in(files.common.stated if files.common else {}),
        _saved_with(files, model.parallel),
        rank=ranks.pop(),
        canonical=any(".adapter.adapter_" in key for key in keys),
        mtp=any(key.startswith("mtp.") for key in keys),
        dora=any(key.endswith(f".{rules()['megatron']['magnitude']}") for key in keys),
        whole=any(
            not FACTOR.search(key) and model.mapping.ignore.keys().isdisjoint(key.split("."))
            for key, *_ in shown
        ),
    )
    names = replace(names, weights=_adapted(names, keys))
    if names.dora and names.parallel.tp > 1:
        raise UsageError(
            f"{files.opened.root}: has DoRA at tp {names.parallel.tp}, where Megatron-Bridge"
            " divides by the lengths of the rows of each rank, so no directory of PEFT computes"
            " the same; mckpt reads DoRA that was saved at tp 1"
        )
    names = replace(names, choices=files.opened.choices(names))
    every = factors.shared(files.opened.layout(names), names.modules, names.rank)
    held, weights = (
        factors.kept(every, [name for name in every.shapes if (":" in name) == which])
        for which in (True, False)
    )
    scale = (_alpha(files) if alpha is None else alpha) / names.rank
    beside = weights if weights.stored else None
    source = AdapterCheckpoint(files, model, held=held, scale=scale, named=names, beside=beside)
    return source, names


@contextmanager
def as_peft(source: AdapterCheckpoint) -> Iterator[PeftAdapter]:
    """Yields the adapters of a Megatron checkpoint as a directory of PEFT, which is removed at the
    end.
    """
    with TemporaryDirectory(prefix="mckpt-adapter-") as folder:
        place = Path(folder) / "peft"
        plan_peft(source, place, TargetOptions(format=formats.HUGGING_FACE)).run()
        yield open_adapter(place)


@contextmanager
def opened_adapter(
    path: str | Path, base: Checkpoint, alpha: float | None = None
) -> Iterator[PeftAdapter]:
    """Yields an adapter of PEFT, or those of a Megatron checkpoint as one of PEFT.

    base: the checkpoint that the adapter belongs to, whose config.json describes the model.
    """
    place = places.local(path)
    if not place.is_dir() or is_adapter(place):
        yield open_adapter(place)
        return
    described = base.files.described_by
    options = SourceOptions(like=described)
    with as_peft(of_megatron(place, options, alpha)[0]) as adapter:
        yield adapter


def _saved_with(files: CheckpointFiles, parallel: Parallel) -> Parallel:
    """Returns the sizes with which adapters were saved. Some of their rows are in the order of the
    tensor-parallel ranks, in torch_dist too.
    """
    path = files.opened.root / RUN_CONFIG
    if files.args is None and path.exists():
        tp = read_model(path).get("tensor_model_parallel_size")
        return replace(parallel, tp=tp) if isinstance(tp, int) and tp > 0 else parallel
    return parallel


def _adapted(names: AdapterNames, keys: Iterable[str]) -> frozenset[str]:
    """Returns the templates of the weights whose modules have a factor among the keys."""
    stems = {FACTOR.sub("", key.rpartition("/")[2]) for key in keys if FACTOR.search(key)}
    text, found = "\n".join(sorted(stems)), set[str]()
    for rule in names.mapping.rules:
        stem, dot, _ = rule.key.rpartition(".weight")
        if dot and not rule.alias:
            pattern = re.escape(re.sub(r"\{\w+\}", "0", stem)).replace("0", r"\d+")
            if re.search(f"^{pattern}$", text, re.MULTILINE):
                found.update(rule.of)
    return frozenset(found)


def _alpha(files: CheckpointFiles) -> float:
    """Returns the alpha of the adapters of a checkpoint."""
    recorded = files.manifest.get("adapter", {})
    if "alpha" in recorded:
        return float(recorded["alpha"])
    path = files.opened.root / RUN_CONFIG
    if path.exists():
        section = read_section(path, "peft")
        if isinstance(section, Mapping) and section.get("alpha") is not None:
            return float(section["alpha"])
    raise UsageError(
        f"{files.opened.root}: neither {RUN_CONFIG} nor mckpt.json states the alpha of its"
        " adapters; give --alpha"
    )


def show(source: AdapterCheckpoint, names: AdapterNames) -> dict[str, Any]:
    """Returns what `mckpt adapter inspect` prints of the adapters of a Megatron checkpoint."""
    modules: dict[str, list[str]] = {}
    for weight, layer, expert in sorted(factors.weights_in(source.layout)):
        modules.setdefault(weight, []).append(weight.format(layer=layer, expert=expert))
    stored = [s for s in source.layout.stored if s.pieces]
    return {
        "path": str(source.path),
        "kind": "DoRA" if names.dora else "CanonicalLoRA" if names.canonical else "LoRA",
        "rank": names.rank,
        "alpha": source.scale * names.rank,
        "dtype": sorted({s.dtype for s in stored}),
        "weights": {weight: len(there) for weight, there in modules.items()},
        "parallel": str(names.parallel),
        "base": source.base is not None,
    }


# --------------------------------------------------------------------------------- to Megatron


def plan_megatron(
    source: AdapterCheckpoint,
    dst: str | Path,
    target: TargetOptions,
    how: str = "fused",
    *,
    base: Checkpoint | None = None,
    overwrite: bool = False,
    update_tracker: bool = False,
    helps: bool = False,
) -> Plan:
    """Returns the plan that writes the factors of `source` as a checkpoint of Megatron's adapters.

    how: one of LAYOUTS. base: describes the model; None: `source` itself does.
    """
    if how not in LAYOUTS:
        raise UsageError(f"layout is {how!r}, and must be {', '.join(LAYOUTS)}")
    format = formats.get(target.format)
    again = base is None
    named = name_of_iteration(source, target) if again else iteration_name(target.target_iteration)
    destination = Destination(
        Path(dst),
        named,
        format,
        source.files.root,
        overwrite=overwrite,
        update_tracker=update_tracker,
        helps=helps,
    )
    described: Checkpoint = source
    if base is None:  # the factors of an adapter of PEFT have been read, to find what they change
        _check_finite(source)
    else:  # whose own optimizer is that of other parameters
        described, target = base, replace(target, no_optimizer=True)
    decided = to_megatron.decide(described, destination, target)
    if decided.optimizer:
        source = source.with_optimizer()
    args = args_of(decided)
    places = factors.weights_in(source.layout)
    names = AdapterNames(
        decided.names.mapping._replace(objects=()),
        decided.names.dims,
        {**decided.names.choices, "layers": args.layers},
        decided.names.parallel,
        weights=frozenset(place[0] for place in places),
        canonical=how == "canonical",
        dora=_has_magnitudes(source),
        mtp=any(layer >= decided.names.dims["num_layers"] for _, layer, _ in places),
    )
    members, rank = _members(source, names.modules, places, how)
    _refuse_homeless(places, names)
    names = replace(names, rank=rank)
    if names.dora:
        _refuse_dora(names, members, how, decided.padded_vocab_size)
    if rank % names.parallel.tp:
        raise UsageError(
            f"the rank {rank} is not divisible by tp {names.parallel.tp}: Megatron-Bridge cuts the"
            " factor A of most linears along the rank; choose a tp that divides it"
        )
    dtype = dtypes.parse(target.dtype) if target.dtype else _dtype(source.layout)
    kinds = {name: dtype for b in names.bound for name in b.rule.of}
    kinds |= {name: kind for name, kind in decided.dtypes.items() if is_state(name)}
    distributed, groups, scalers = True, list[list[dict[str, Any]]](), list[Scaler]()
    state = None
    if decided.optimizer and source.optimizer is not None:
        distributed = source.optimizer.distributed
        groups, scalers = _optimizer_entries(source, names, decided)
        look = source.opened.format.readable and not helps
        state = optimizer.facts(source, look)
    laid, outputs = format.lay_out(
        MegatronRequest(
            names,
            kinds,
            decided.padded_vocab_size,
            args.common,
            target.common_as_object,
            distributed,
            groups,
            scalers,
        )
    )
    layout = factors.placed(laid, names.modules, members)
    layout = replace(layout, shapes=dict(source.layout.shapes))
    held = factors.kept(source.layout, {p.tensor for s in layout.stored for p in s.pieces})
    layout = replace(layout, shapes=dict(held.shapes))
    source = replace(source, held=held, has_states=False)
    alpha = source.scale * rank
    config = _run_config(decided, names, how, rank, alpha)
    files = [*outputs, *config]
    joined = join(held, layout)
    side_files = to_megatron.side_of(described)
    side = SideFiles(destination.root, side_files)
    side.refuse_other()
    facts = facts_of(
        source,
        source,
        target,
        names.mapping,
        decided.inexact,
        [],
        parallel=names.parallel.args(),
        choices=dict(names.choices),
        unit=destination.iteration_name,
        adapter=_facts(how, rank, alpha, names),
        megatron_version=decided.target.megatron_version,
        files_beside=[[file.path, file.size] for file in config],
        **(
            {"optimizer": state, "left_behind": optimizer.left_behind(source, True)}
            if state
            else {}
        ),
    )
    return Plan(source, destination, target, joined, layout, names, files, side, [], facts, [])


def _optimizer_entries(
    source: AdapterCheckpoint, names: AdapterNames, decided: Decided
) -> tuple[list[list[dict[str, Any]]], list[Scaler]]:
    """Returns the param_groups and the loss scalers of the optimizers of a rank of the target.

    Raises UsageError for a format that is not torch_dist.
    """
    format = decided.destination.format
    if format.fixed_sizes:
        raise UsageError(
            f"{source.path}: has the state of an optimizer, which mckpt does not write for adapters"
            f" in the format {format}; give --target-format torch_dist to keep it, or"
            " --no-optimizer to convert the adapters alone"
        )
    if not any("expert" in b.rule.indices for b in names.bound):
        # Megatron makes an optimizer of the experts only if they have parameters to train
        names = replace(names, dims={**names.dims, "num_experts": 0})
    groups = optimizer.groups(source, names, format.fixed_sizes, decided.megatron)
    return groups, optimizer.scalers(source, names, decided.megatron)


def _check_finite(source: AdapterCheckpoint) -> None:
    """Reads all factors. Raises SourceError with each that has a value which is not finite."""
    found = []
    for name in (name for name in source if ":" in name):
        values = source[name].numpy()
        if not (finite := np.isfinite(values)).all():
            place = np.argwhere(~finite)[0].tolist()
            found.append(f"{name} {list(values.shape)}: {place} is {values[tuple(place)]}")
    if found:
        raise SourceError.of(f"{source.path}: {NOT_FINITE[0]}", found, NOT_FINITE[1])


def _has_magnitudes(source: AdapterCheckpoint) -> bool:
    """Returns whether the adapters are DoRA."""
    return any(MAGNITUDE in name for name in source.layout.shapes)


def _dtype(layout: Layout) -> str:
    """Returns the dtype of all factors; the widest one if they have several."""
    return max({s.dtype for s in layout.stored if not holds_state(s)}, key=dtypes.itemsize)


def _facts(how: str, rank: int, alpha: float, names: AdapterNames) -> dict[str, Any]:
    """Returns the manifest's entry on adapters."""
    return {"layout": how, "rank": rank, "alpha": alpha, "modules": len(names.modules)}


def _members(
    source: AdapterCheckpoint, modules: list[Module], places: Mapping[Place, int], how: str
) -> tuple[dict[Place, Member], int]:
    """Returns the place of the factors of each weight in those of its module, and the rank of all
    modules.

    Raises UsageError if weights of one module have different factors A and `how` requires one.
    """
    members: dict[Place, Member] = {}
    apart: list[str] = []
    for module in modules:
        b = module.bound
        layers, experts = b.instances()
        for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True):
            there = [name for name in module.of if (name, layer, expert) in places]
            first = 0
            for number, name in enumerate(there):
                own = places[name, layer, expert]
                members[name, layer, expert] = Member(
                    name, own, first, how == "block" or not number
                )
                first += own if how == "block" else 0
            if (
                how == "fused"
                and len(there) > 1
                and not _same(source, there, layer, expert, places)
            ):
                apart.append(
                    f"{module.stem.rstrip('.')}, layer {layer}: "
                    + ", ".join(name.format(layer=layer, expert=expert) for name in there)
                )
    if apart:
        apart_or = "--layout canonical, which keeps them apart (CanonicalLoRA), or "
        dora = _has_magnitudes(source)
        raise UsageError.of(
            f"{source.path}: an adapter of Megatron's LoRA has one factor A for all weights that a"
            " linear packs, and here they differ:",
            apart,
            f"Give {apart_or * (not dora)}--layout block, whose adapters have the sum of their"
            " ranks and compute the same.",
        )
    rank = max(member.first + member.rank for member in members.values())
    return members, rank


def _same(
    source: AdapterCheckpoint,
    names: list[str],
    layer: int,
    expert: int,
    places: Mapping[Place, int],
) -> bool:
    """Returns whether the factors A of some weights are equal bit for bit."""
    read = [
        source[name_of(name, A, places[name, layer, expert]).format(layer=layer, expert=expert)]
        for name in names
    ]
    first = read[0].numpy()
    return all(
        one.shape == read[0].shape
        and one.dtype == read[0].dtype
        and bool(np.array_equal(one.numpy(), first))
        for one in read[1:]
    )


def _refuse_homeless(places: Mapping[Place, int], names: AdapterNames) -> None:
    """Raises UsageError for weights that no adapter of Megatron has."""
    there = {
        (name, int(layer), int(expert))
        for module in names.modules
        if module.bound.rule.stage != "first"
        for layer, expert in zip(*module.bound.instances(), strict=True)
        for name in module.of
    }
    if lost := [place for place in places if place not in there]:
        raise UsageError.of(
            "the adapter changes weights that have no adapter in Megatron-Bridge:",
            [name.format(layer=layer, expert=expert) for name, layer, expert in lost],
            "Merge the adapter with `mckpt adapter merge` instead.",
        )


def _refuse_dora(
    names: AdapterNames, members: Mapping[Place, Member], how: str, rows: int | None
) -> None:
    """Raises UsageError for magnitudes that the DoRA of Megatron-Bridge does not have, or with
    which it computes something else.

    rows: of the vocabulary with padding.
    """
    cure = "merge the adapter with `mckpt adapter merge` instead"
    if names.parallel.tp > 1:
        raise UsageError(
            f"DoRA at tp {names.parallel.tp}: Megatron-Bridge divides by the lengths of the rows of"
            f" each rank, which are not those of PEFT; give --tp 1, or {cure}"
        )
    if how == "canonical":
        raise UsageError(
            "--layout canonical: CanonicalLoRA of Megatron-Bridge has no magnitudes (DoRA); give"
            " --layout fused or block"
        )
    lost = []
    for module in names.modules:
        if "expert" in module.bound.rule.indices:
            raise UsageError(
                f"{module.of[0]}: Megatron-Bridge has no DoRA for the experts of a layer; {cure}"
            )
        if module.bound.rule.tp == "vocab" and rows != names.dims["vocab_size"]:
            raise UsageError(
                f"{module.of[0]}: Megatron pads the vocabulary of {names.dims['vocab_size']:,} to"
                f" {rows:,} rows, and DoRA divides by the length of each, which is 0; {cure}"
            )
        for layer, expert in zip(*map(list, module.bound.instances()), strict=True):
            there = [(name, int(layer), int(expert)) in members for name in module.of]
            if any(there) and not all(there):
                lost += [
                    name.format(layer=layer, expert=expert)
                    for name, found in zip(module.of, there, strict=True)
                    if not found
                ]
    if lost:
        raise UsageError.of(
            "Megatron has one linear for several weights, and with DoRA all or none of them must"
            " have magnitudes; these have none:",
            lost,
            f"Train them too, or {cure}.",
        )


def _run_config(
    decided: Decided, names: AdapterNames, how: str, rank: int, alpha: float
) -> list[TargetFile]:
    """Returns run_config.yaml with the section `peft`, from which Megatron-Bridge builds the
    adapters; nothing for a target that it does not read.
    """
    asked = replace(decided, target=replace(decided.target, run_config=True))
    try:
        files = bridge_files(asked)
    except UsageError:
        return []
    import yaml

    known = rules()["megatron"]
    linears = sorted(
        {m.stem.partition(f".{names.module}.")[0].rpartition(".")[2] for m in names.modules}
    )
    targets = known["targets"] if how == "canonical" else {}
    kind = "dora" if names.dora else how
    section = {
        "_target_": known["classes"][kind],
        "target_modules": [one for name in linears for one in targets.get(name, [name])],
        "dim": rank,
        "alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "dropout": 0.0,
        **({} if names.dora else {"share_expert_adapters": False}),
    }
    text = yaml.safe_dump({"peft": section}, sort_keys=False).encode()
    out = []
    for file in files:
        ((_, content),) = file.fixed(None)
        out.append(TargetFile.whole(file.path, content + text * (file.path == RUN_CONFIG)))
    return out


# ------------------------------------------------------------------------------------- to PEFT


def plan_peft(
    source: AdapterCheckpoint,
    dst: str | Path,
    target: TargetOptions,
    *,
    overwrite: bool = False,
    update_tracker: bool = False,
    helps: bool = False,
) -> Plan:
    """Returns the plan that writes an adapter of Megatron as a directory of PEFT."""
    family = source.model.family
    if family is None:
        raise UsageError(
            f"{source.path}: no config.json describes the model, so the names of its weights in"
            " Hugging Face are not known; give --like HF_DIR"
        )
    names = Names(family, source.dims, {}, Parallel())
    places = factors.weights_in(source.layout)
    destination = Destination(
        Path(dst), None, PEFT, source.files.root, overwrite=overwrite, helps=helps
    )
    _check_finite(source)
    dora = _has_magnitudes(source)
    layout, outputs, adapted = lay_out(names, places, _dtype(source.layout), dora)
    held = factors.kept(source.layout, {p.tensor for s in layout.stored for p in s.pieces})
    layout = replace(layout, shapes=dict(held.shapes))
    source = replace(source, held=held)
    rank = max(places.values())
    content = config(adapted, names, source.scale * rank, dora)
    outputs.append(TargetFile.whole(ADAPTER[0], content))
    remarks = [
        "layers of multi-token prediction have adapters, and no model of transformers has these"
        " layers, so PEFT does not load their factors"
    ] * any(one.bound.rule.mtp for one in adapted)
    facts = facts_of(
        source,
        source,
        target,
        family,
        {},
        [],
        config=hashlib.sha256(content).hexdigest(),
    )
    return Plan(
        source,
        destination,
        target,
        join(held, layout),
        layout,
        names,
        outputs,
        SideFiles(destination.root, {}),
        [],
        facts,
        remarks,
    )
