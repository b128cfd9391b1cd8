"""Adapters of PEFT and of Megatron as checkpoints, whose logical tensors are the factors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.adapters import factors
from mckpt.adapters.factors import INDEX, A, AdapterNames, B, is_factor, name_of
from mckpt.adapters.fitting import Fit, fit
from mckpt.adapters.peft import PeftAdapter, is_alpha, rules
from mckpt.checkpoint import masters
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.files import CheckpointFiles, open_files
from mckpt.checkpoint.model import ModelDescription
from mckpt.errors import SourceError, UsageError, shown
from mckpt.formats import carried
from mckpt.formats.base import Names
from mckpt.formats.foreign import FACTOR, advice, has_adapter
from mckpt.formats.hf_config import CONFIG
from mckpt.formats.megatron.interface import as_megatron
from mckpt.formats.megatron.optimizer import (
    SHARED,
    Optimizer,
    is_muon,
    keys_of,
)
from mckpt.formats.megatron.run_config import RUN_CONFIG, read_section, run_config_text
from mckpt.geometry.box import Layout, Piece, Stored, whole_box
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import MappingFile
from mckpt.mapping.schema import MAGNITUDE
from mckpt.mapping.towers import BRIDGE
from mckpt.options import SourceOptions
from mckpt.storage.files import read_file
from mckpt.values.adding import FACTORS, ROW_WISE, Factor


@dataclass(frozen=True, eq=False, repr=False)
class AdapterCheckpoint(Checkpoint):
    """The factors of an adapter, as the logical tensors of a checkpoint.

    Its files and its model are those of the checkpoint that describes the base.
    """

    held: Layout | None = None
    scale: float = 1.0  # of every product but those of `scales`
    # scales other than `scale`, by the templates of the weights
    scales: Mapping[str, float] = field(default_factory=dict)
    named: Names | None = None  # the names of its keys; None: those of PEFT
    beside: Layout | None = None  # the weights of the base, if they are in the checkpoint too
    peft: Path | None = None  # the directory of an adapter of PEFT
    base_name: str | None = None  # the path or the id on the Hub of the model that it adapts
    remarks: tuple[str, ...] = ()  # notes on how its factors are read

    @property
    def path(self) -> Path:
        return super().path if self.peft is None else self.peft

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

        Raises UsageError for states of another optimizer than Adam, or of other parameters too.
        """
        if "optimizer" not in self.left_behind():
            return None
        assert isinstance(self.named, AdapterNames)
        found = None
        alone = not (self.named.whole and self.opened.format.fixed_sizes)
        alone &= not self.named.outer  # for which Megatron-Bridge has no state to judge it by
        if alone and all(map(FACTOR.search, keys_of(self.opened.keys()))):
            found = self._optimizer
        if found is None or is_muon(found.groups):
            raise UsageError(
                f"{self.path}: mckpt converts the optimizer's state of adapters if it is that of"
                " Adam, in torch_dist or torch, and of no other parameters; in torch, if the file"
                " has the adapters alone; and if experts share no factor. Give --no-optimizer to"
                " convert the adapters without it"
            )
        return found._replace(layout=factors.shared(found.layout, self.named))

    @property
    def _optimizer(self) -> Optimizer | None:
        """Returns the states of the parameters that are factors."""
        opened = as_megatron(self.opened)
        assert isinstance(self.named, AdapterNames) and opened is not None
        # the keys of torch_dist do not show whether the experts of a rank share an adapter
        choices = {**self.named.choices, SHARED: _section(self.files).get(SHARED, True)}
        own: Names = replace(self.named, whole=False, choices=choices)
        return masters.read(opened, own, self.held)

    @property
    def base(self) -> AdapterCheckpoint | None:
        """Returns the weights beside the factors; None if there are none."""
        if self.beside is None:
            return None
        own = self.names
        names = Names(own.mapping, own.dims, own.choices, own.parallel)
        return replace(self, held=self.beside, named=names, beside=None)

    def __reduce__(self) -> tuple[Any, ...]:
        kind, parts = super().__reduce__()
        named = None if self.named is None else replace(self.named)  # without what was derived
        own = self.held, self.scale, self.scales, named, self.beside, self.peft, self.base_name
        return kind, (*parts, *own, self.remarks)

    def scale_of(self, weight: str) -> float:
        """Returns the number that multiplies the product of a weight, by its template."""
        return self.scales.get(weight, self.scale)

    def left_behind(self) -> list[str]:
        return [] if self.named is None else super().left_behind()


def of_peft(adapter: PeftAdapter, base: Checkpoint, *, look: bool = True) -> AdapterCheckpoint:
    """Returns the factors of an adapter of PEFT.

    base: describes the model, and is not read but for its headers. look: read the values too, to
    refuse those that are not finite. Raises SourceError for an
    adapter that does not fit it, and UsageError for one that Megatron's adapters cannot express.
    """
    family = base.mapping if not base.is_megatron else base.model.family
    if family is None:
        raise UsageError(
            f"{base.path}: no config.json describes the base; give its Hugging Face directory"
        )
    choices = {} if base.is_megatron else base.names.choices
    towers = carried.shapes_in(base.layout) if mapping.is_part(family.forms) else {}
    fitted = fit(adapter, Names(family, base.dims, choices, Parallel()), towers, look=look)
    if fitted.whole:
        names = [adapter.key(row) for _, row in fitted.whole.values()]
        raise UsageError.of(
            f"{adapter.path}: has whole tensors (modules_to_save or bias), which the adapters of"
            " Megatron-Bridge do not have:",
            names,
            "Merge the adapter with `mckpt adapter merge` instead.",
        )
    found: dict[str, set[float]] = {}
    for (weight, _, _), parts in fitted.parts.items():
        found.setdefault(weight, set()).update(part.scale for part in parts)
    if any(len(several) > 1 for several in found.values()):
        listed = [f"{one.module}: rank {one.rank}, scale {one.scale:g}" for one in fitted.adapted]
        raise UsageError.of(
            f"{adapter.path}: its modules have different scales (alpha / r), and an adapter of"
            " Megatron-Bridge has one alpha and one rank, or two with normalize_moe_lora:",
            listed,
            "Merge the adapter with `mckpt adapter merge` instead.",
        )
    scales = {weight: several.pop() for weight, several in found.items()}
    common = min(scales.values(), key=abs)  # experts of a smaller rank have a larger scale
    return AdapterCheckpoint(
        base.files,
        base.model,
        held=_layout_of(fitted, adapter),
        scale=common,
        scales={weight: scale for weight, scale in scales.items() if scale != common},
        peft=adapter.path,
        base_name=adapter.config.get("base_model_name_or_path") or shown(str(base.path)),
        remarks=tuple(fitted.notes),
    )


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


class _Model(ModelDescription):
    """The model of a checkpoint with adapters: the keys of their factors name no weight."""

    @cached_property
    def mapping(self) -> MappingFile:
        opened, own = self.files.opened, self.options.mapping
        run, keys = run_config_text(opened.root / RUN_CONFIG), list(opened.keys())
        recorded = self.files.manifest.get("mapping", {}).get("name", "")
        text, whole, _ = recorded.partition(mapping.SIGN)
        trainer = "swift" if any(".lora_A." in key for key in keys) else BRIDGE

        def dialect_of(keys: list[str]) -> MappingFile:
            if text in mapping.names("megatron"):
                return mapping.load("megatron", text, own)
            return mapping.dialect_of(keys, own, run)

        def of_text(keys: list[str]) -> MappingFile:
            if text or self.family is None or trainer not in self.family.towers:
                return dialect_of(keys)
            named = self.family.towers[trainer].dialect or None  # factors show little of it
            return mapping.dialect_for(self.family, named, own)

        found = None
        if whole or not recorded:
            found = self.whole_mapping(self._weights, of_text, trainer)
        return found or dialect_of([FACTOR.sub(".weight", key) for key in keys])

    def _weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights, also of those that only their factors show, by key."""
        stored, found = self._stored(), dict[str, tuple[int, ...]]()
        ends = tuple(rules()[program]["factors"]["b"] for program in ("megatron", "swift"))
        for key, shape in stored.items():
            weight = FACTOR.sub(".weight", key)
            if weight != key and len(shape) > 1:  # A is [rank, in], and B is [out, rank]
                *axes, rows, columns = found.get(weight, shape)
                is_b = any(end in key for end in ends)  # or a section of it
                cut = (shape[-2], columns) if is_b else (rows, shape[-1])
                found[weight] = (*axes, *cut)
        return found | {key: shape for key, shape in stored.items() if not FACTOR.search(key)}


def of_megatron(
    path: str | Path,
    options: SourceOptions,
    alpha: float | None = None,
    otherwise: float | None = None,
) -> tuple[AdapterCheckpoint, AdapterNames]:
    """Opens a Megatron checkpoint with adapters.

    alpha: replaces that of run_config.yaml, mckpt.json or the args. otherwise: their alpha if none
    of these states it. Raises SourceError if there are none, or if they are not complete, and
    UsageError if the checkpoint does not state their alpha.
    """
    files = open_files(path, options)
    model = _Model(files)
    if not files.is_megatron or not has_adapter(
        key for stage in _stages(files, model) for chunk in stage for key in chunk
    ):
        hint = advice(files.opened.keys())
        error = SourceError(f"{files.path}: has no adapters whose names mckpt knows")
        raise error.with_hint(hint) if hint else error
    return of_files(files, model, alpha, otherwise)


def _stages(
    files: CheckpointFiles, model: ModelDescription
) -> list[list[dict[str, tuple[int, ...]]]]:
    """Returns the shapes of the tensors of each [pipeline rank][virtual stage], by key; of a format
    whose keys do not depend on the stages, all of them as one.
    """
    if files.opened.format.fixed_sizes:
        stages: list[list[dict[str, tuple[int, ...]]]] = files.opened.stages(model.parallel)  # type: ignore[attr-defined]  # only such formats have it
        return stages
    return [[{key: shape for key, _, shape, _ in files.opened.show(None).tensors}]]


def with_factors(source: Checkpoint) -> Checkpoint:
    """Returns a checkpoint whose tensors are the factors of its adapters too, if it has any. Their
    scale is NaN if it does not state their alpha.
    """
    files = source.files
    if not files.is_megatron or not has_adapter(files.opened.keys()):
        return source
    found, _ = of_files(files, _Model(files), otherwise=math.nan)
    if found.held is None or found.beside is None:
        return found
    return replace(found, held=carried.joined(found.held, found.beside))


def of_files(
    files: CheckpointFiles,
    model: ModelDescription,
    alpha: float | None = None,
    otherwise: float | None = None,
) -> tuple[AdapterCheckpoint, AdapterNames]:
    """Returns the adapters of an opened checkpoint. The arguments and errors are those of
    `of_megatron`.

    model: of the weights that the adapters belong to.
    """
    stages = _stages(files, model)
    shapes = {key: shape for stage in stages for chunk in stage for key, shape in chunk.items()}
    swift = any(key.endswith(rules()["swift"]["factors"]["a"]) for key in shapes)
    program = "swift" if swift else "megatron"
    ends = rules()[program]["factors"]
    outer = [(key, shape) for key, shape in shapes.items() if f".{ends['b']}" in key]
    if swift and (whole := [key for key in shapes if f".{rules()[program]['whole']}." in key]):
        raise UsageError.of(
            f"{files.opened.root}: has whole tensors (modules_to_save), which mckpt does not read"
            " beside the adapters of ms-swift:",
            whole,
            "`megatron export --mcore_adapter DIR --model MODEL --to_hf true --merge_lora false` of"
            " ms-swift writes a directory of PEFT.",
        )
    if flat := [key for key, shape in outer if len(shape) < 2 or not shape[-1]]:
        raise SourceError.of(f"{files.opened.root}: has factors without a rank:", flat)
    ranks = {shape[-1] for _, shape in outer}
    if not ranks:
        raise SourceError(
            "{}: has factors {} of adapters, and none that is {}; copy it again".format(
                files.opened.root, *(ends[side].removesuffix(".weight") for side in "ab")
            )
        )
    names = AdapterNames(
        model.mapping,
        model.dims,
        model.mapping.choices_in(files.common.stated if files.common else {}),
        model.parallel,
        rank=max(ranks),
        program=program,
        canonical=any(".adapter.adapter_" in key for key in shapes),
        mtp=any(key.startswith("mtp.") for key in shapes),
        dora=any(key.endswith(f".{rules()['megatron']['magnitude']}") for key in shapes),
        whole=any(
            not FACTOR.search(key) and model.mapping.ignore.keys().isdisjoint(key.split("."))
            for key in shapes
        ),
    )
    names = replace(names, weights=_adapted(names, shapes))
    names = replace(names, choices=files.opened.choices(names))
    if len(ranks) > 1:
        names = replace(names, ranks=_ranks(names, outer, files.opened.root))
    names = replace(names, outer=_of_all_experts(names, shapes))
    stated = files.args is not None or files.manifest or (files.opened.root / RUN_CONFIG).exists()
    known = files.opened.format.fixed_sizes or not files.opened.format.readable  # a live model
    if not stated and not known and names.has_rows_by_rank:
        raise UsageError(
            f"{files.opened.root}: has adapters whose rows are in the order of the tensor-parallel"
            f" ranks, and neither {RUN_CONFIG} nor args state tp; let the program that saved them"
            " write a directory of PEFT"
        )
    if names.dora and (lost := names.without_lengths):
        raise UsageError.of(
            f"{files.opened.root}: has DoRA at tp {names.parallel.tp} of weights whose columns the"
            " ranks share, or which they do not cut. There Megatron-Bridge divides by the length of"
            " each rank's part of a row, so that the ranks compute different outputs and no weights"
            " compute the same:",
            lost,
            "Train them at tp 1, or without these modules.",
        )
    names = replace(names, there=names.found_in(stages), halved=_halved(files, names))
    every = factors.shared(files.opened.layout(names), names)
    held, weights = (
        factors.kept(every, [name for name in every.shapes if is_factor(name) == which])
        for which in (True, False)
    )
    number = _alpha(files, names, alpha, otherwise)
    source = AdapterCheckpoint(
        files,
        model,
        held=held,
        scale=number / names.rank,
        scales={weight: number / rank for weight, rank in names.ranks.items()},
        named=names,
        beside=weights if weights.stored else None,
        base_name=_base_name(files),
    )
    return source, names


def _of_all_experts(names: AdapterNames, shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Returns the factors of experts whose tensors lack the axis of experts.

    Megatron-Bridge 0.3 has one adapter for all experts of a layer, and later releases have one
    factor of two with experts_shared_outer_loras.
    """
    stored = [(key.rpartition("/")[2], len(shape)) for key, shape in shapes.items()]
    found: set[str] = set()
    for b in replace(names, whole=False).bound:
        if "expert" in b.rule.stacked():
            pattern, most = re.compile(_keys_of(b.rule.key)), len(b.axes(names.scope())) + 2
            if any(num_axes < most and pattern.fullmatch(key) for key, num_axes in stored):
                found.update(b.rule.of)
    return frozenset(found)


def _keys_of(template: str) -> str:
    """Returns a regular expression of the keys of a template."""
    return r"\d+".join(map(re.escape, INDEX.split(template)))


def _halved(files: CheckpointFiles, names: AdapterNames) -> frozenset[str]:
    """Returns the starts of the keys of `AdapterNames.halved`.

    Megatron-Bridge before 0.5.1 stores each linear_fc1 as if it had a gate: of the rows of each
    rank two chunks, where later releases and mckpt have one.
    """
    found: set[str] = set()
    for stem, ways in names.ungated.items():
        key = _keys_of(stem + rules()["megatron"]["factors"]["b"])
        for stored, (_, _, chunks) in files.opened.metadata.tensors.items():  # type: ignore[attr-defined]  # such formats have it
            if re.fullmatch(key, stored) and len({at[-2] for at, _ in chunks}) == 2 * ways:
                found.add(stem)
    return frozenset(found)


def _ranks(
    names: AdapterNames, factors: Sequence[tuple[str, tuple[int, ...]]], where: Path
) -> dict[str, int]:
    """Returns the ranks other than `names.rank`, by the templates of the weights.

    factors: the keys and the shapes of the factors B. Raises UsageError if the adapters of one
    module have several ranks in different layers.
    """
    text = "\n".join(f"{shape[-1]} {key.rpartition('/')[2]}" for key, shape in factors)
    ranks, apart = dict[str, int](), list[str]()
    for module in names.modules:
        pattern = _keys_of(module.stem + rules()[names.program]["factors"]["b"])
        found = sorted(set(map(int, re.findall(rf"^(\d+) {pattern}$", text, re.MULTILINE))))
        if len(found) > 1 or (names.by_swift and found != [names.rank]):
            apart.append(f"{module.stem.rstrip('.')}: {', '.join(map(str, found))}")
        elif found and found[0] != names.rank:
            ranks.update(dict.fromkeys(module.of, found[0]))
    if apart:
        raise UsageError.of(
            f"{where}: its adapters have several ranks, and mckpt reads those of one rank for all"
            f" layers of a module{', which ms-swift has for all modules' * names.by_swift}:",
            apart,
            "Train all layers with one rank.",
        )
    return ranks


def _base_name(files: CheckpointFiles) -> str | None:
    """Returns the path or the id on the Hub of the model that a checkpoint's adapters belong to,
    which mckpt.json, --like or config.json state; else None.
    """
    recorded = files.manifest.get("adapter", {}).get("base")
    if recorded or files.options.like:
        return recorded or shown(str(files.options.like))
    described = files.described_by
    config = described and json.loads(read_file(described / CONFIG))
    name = config.get("_name_or_path") if isinstance(config, dict) else None
    return name if isinstance(name, str) and name else None


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


def _alpha(
    files: CheckpointFiles, names: AdapterNames, given: float | None, otherwise: float | None
) -> float:
    """Returns the alpha of the adapters of a checkpoint, which is that of the user if it is given,
    and `otherwise` if nothing states it. alpha / rank is the scale, also with use_rslora.

    Raises UsageError if alpha is not a finite number other than 0, or is not stated at all, and
    SourceError if the args state another rank than that of the factors.
    """
    args = (files.args or {}) if names.by_swift else {}
    if (rank := args.get("lora_rank", names.rank)) != names.rank:
        raise SourceError(
            f"{files.opened.root}: its args state lora_rank {rank}, and its factors have the rank"
            f" {names.rank}"
        )
    path, stated = files.opened.root / RUN_CONFIG, _section(files).get("alpha")
    recorded = files.manifest.get("adapter", {})
    for where, alpha in (
        ("--alpha", given),
        (f"{files.opened.root}: mckpt.json: alpha", recorded.get("alpha")),
        (f"{path}: alpha", stated),
        (f"{files.opened.root}: args: lora_alpha", args.get("lora_alpha")),
    ):
        if alpha is not None:
            if not is_alpha(alpha):
                raise UsageError(f"{where} is {alpha!r:.60}, and must be a finite number, not 0")
            return float(alpha) * (names.rank**0.5 if args.get("use_rslora") else 1)
    if otherwise is not None:
        return otherwise
    raise UsageError(
        f"{files.opened.root}: neither {RUN_CONFIG} nor mckpt.json nor its args state the alpha of"
        " its adapters; give --alpha"
    )


def _section(files: CheckpointFiles) -> Mapping[str, Any]:
    """Returns the section `peft` of a checkpoint's run_config.yaml; empty without one."""
    path = files.opened.root / RUN_CONFIG
    section = read_section(path, "peft") if path.exists() else None
    return section if isinstance(section, Mapping) else {}


def show(source: AdapterCheckpoint, names: AdapterNames) -> dict[str, Any]:
    """Returns what `mckpt adapter inspect` prints of the adapters of a Megatron checkpoint."""
    modules: dict[str, list[str]] = {}
    for weight, layer, expert in sorted(factors.weights_in(source.layout)):
        modules.setdefault(weight, []).append(weight.format(layer=layer, expert=expert))
    stored = [s for s in source.layout.stored if s.pieces]
    return {
        "path": str(source.path),
        "kind": "DoRA" if names.dora else "CanonicalLoRA" if names.canonical else "LoRA",
        "program": "ms-swift" if names.by_swift else "Megatron-Bridge",
        "rank": names.rank,
        **({"ranks": dict(names.ranks)} if names.ranks else {}),
        "alpha": source.scale * names.rank,
        "dtype": sorted({s.dtype for s in stored}),
        "weights": {weight: len(there) for weight, there in modules.items()},
        "parallel": str(names.parallel),
        "base": source.base is not None,
    }
