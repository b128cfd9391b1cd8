"""The forms that adapters can have: checkpoints of Megatron, and directories of PEFT."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec import structs

from mckpt import formats
from mckpt.adapters import factors, placing
from mckpt.adapters.checkpoint import AdapterCheckpoint, of_megatron
from mckpt.adapters.factors import AdapterNames, Place, is_factor
from mckpt.adapters.peft import (
    NOT_FINITE,
    PeftAdapter,
    is_peft,
    open_adapter,
    rules,
)
from mckpt.adapters.peft_writing import PEFT, AdaptedWeight, config, lay_out, loaded_names
from mckpt.checkpoint.checkpoint import Addition, Checkpoint
from mckpt.containers import safe_pickle
from mckpt.conversion import optimizer
from mckpt.conversion.args import Decided, args_of, bridge_files
from mckpt.conversion.plan_data import Form
from mckpt.conversion.planning import form_of_weights, make_plan
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import At
from mckpt.conversion.to_megatron import AdaptersBeside, decide, name_of_iteration, side_of
from mckpt.errors import SourceError, UsageError, shown
from mckpt.formats import carried, places
from mckpt.formats.base import Format, Names
from mckpt.formats.hf_config import ADAPTER
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.optimizer import (
    Scaler,
    holds_state,
    is_state,
)
from mckpt.formats.megatron.run_config import RUN_CONFIG
from mckpt.formats.megatron.save_directory import iteration_name
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import NESTED
from mckpt.options import AdapterOptions, SourceOptions, TargetOptions
from mckpt.storage.files import TargetFile
from mckpt.storage.manifest import Facts
from mckpt.values import dtypes

_SECTION = re.compile(rb"^peft:.*\n(?:[ -].*\n)*", re.MULTILINE)  # of run_config.yaml


@contextmanager
def as_peft(source: AdapterCheckpoint) -> Iterator[PeftAdapter]:
    """Yields the adapters of a Megatron checkpoint as a directory of PEFT, which is removed at the
    end.
    """
    with TemporaryDirectory(prefix="mckpt-adapter-") as folder:
        place = Path(folder) / "peft"
        make_plan(source, place, TargetOptions(format=formats.HUGGING_FACE), _form_peft).run()
        yield replace(open_adapter(place), made_of=tuple(source.layout.files))


@contextmanager
def opened_adapter(
    path: str | Path,
    base: Checkpoint,
    alpha: float | None = None,
    experts: AdapterOptions | None = None,
) -> Iterator[PeftAdapter]:
    """Yields an adapter of PEFT, or those of a Megatron checkpoint as one of PEFT.

    base: the checkpoint that the adapter belongs to, whose config.json describes the model.
    """
    place = places.local(path)
    if not place.exists():
        raise SourceError(f"{path}: does not exist")
    if not place.is_dir() or is_peft(place):
        if alpha is not None:
            raise UsageError(f"{path}: states its alpha in {ADAPTER[0]}; leave out --alpha")
        yield open_adapter(place, experts)
        return
    described = base.files.described_by
    options = SourceOptions(like=described)
    with as_peft(of_megatron(place, options, alpha)[0]) as adapter:
        yield adapter


def form_adapters(
    source: AdapterCheckpoint, at: At, target: TargetOptions, how: str | None = None
) -> Form:
    """Returns the form of a checkpoint of Megatron's adapters, with the weights if `source` has
    them beside its factors.

    how: None: fused, or canonical if only that can hold the factors.
    """
    if (weights := source.base) is not None:
        if "optimizer" in source.left_behind() and not target.no_optimizer:
            raise UsageError(
                f"{source.path}: has weights beside its adapters, and mckpt does not convert the"
                " optimizer's state of such a checkpoint; give --no-optimizer"
            )
        return form_of_weights(weights, at, target, adapters=partial(beside, source, how))
    format, swift = formats.get(target.format), (how or "").startswith("swift")
    described: Checkpoint = source
    if swift:
        _refuse_swift(source, target, format)
    if source.peft is None:
        name = name_of_iteration(source, target)
        _check_finite(source)  # those of PEFT have been read, to find what they change
    else:  # the optimizer of the base is that of other parameters
        described = Checkpoint(source.files, source.model)
        if swift and target.target_iteration is None:  # ms-swift reads no release
            target = target.with_(target_iteration=1)
        name, target = iteration_name(target.target_iteration), target.with_(no_optimizer=True)
    destination = at(name, format)
    decided = decide(described, destination, target)
    if decided.optimizer:
        source = source.with_optimizer()
    args = args_of(decided)
    decided = structs.replace(
        decided,
        names=replace(
            decided.names,
            # a base that keeps its padding has more rows than the adapter
            dims={**decided.names.dims, "vocab_size": described.dims["vocab_size"]},
            choices={**decided.names.choices, "layers": args.layers},
        ),
    )
    chosen = placing.choose(source, decided, how)
    how, names = chosen.how, chosen.names
    kinds = _kinds(source, names, target.dtype)
    kinds |= {name: kind for name, kind in decided.dtypes.items() if is_state(name)}
    request = MegatronRequest(
        names, kinds, decided.padded_vocab_size, args.common, target.common_as_object
    )
    facts = Facts(
        parallel=names.parallel.args(),
        choices=dict(names.choices),
        unit=destination.iteration_name,
        adapter=_facts(how, names, source),
        megatron_version=decided.target.megatron_version,
    )
    if tower := names.mapping.whole:
        known = source.files.manifest if source.is_megatron else described.names.choices
        facts["form"] = known.get("form")
        facts["tower_keys"] = tower.used(map(carried.key_of, names.mapping.tower))
    if decided.optimizer and source.optimizer is not None:
        groups, scalers = _optimizer_entries(source, names, decided)
        distributed = source.optimizer.distributed
        request = structs.replace(request, distributed=distributed, groups=groups, scalers=scalers)
        look = source.opened.format.readable and destination.rank0
        facts["optimizer"] = optimizer.facts(source, look)
        facts["left_behind"] = optimizer.left_behind(source, True)
    remarks = chosen.notes
    if swift:
        common, told = _swift_args(args.common, names, source.scale * names.rank)
        request = structs.replace(request, common=common)
        root = shown(str(destination.root))
        remarks.append(f"ms-swift loads it with --mcore_adapter {root} {told}")
    if isinstance(source.named, AdapterNames) and source.named.outer:
        remarks.append("experts that shared factors have each its own")
    laid, outputs = format.lay_out(request)
    held, layout = placing.placed(source, names, laid, chosen.members, chosen.equal)
    source = replace(source, held=held, has_states=False)
    config = [] if swift else _run_config(decided, names, how, source.scale)
    facts["files_beside"] = [[file.path, file.size] for file in config]
    side = SideFiles(destination.root, side_of(described))
    side.refuse_other()
    return Form(
        source=source,
        moved=source,
        destination=destination,
        target=target,
        names=names,
        layout=layout,
        outputs=[*outputs, *config],
        side=side,
        facts=facts,
        inexact=decided.inexact,
        notes=list(source.remarks),
        remarks=remarks,
    )


def _kinds(source: AdapterCheckpoint, names: AdapterNames, asked: str | None) -> dict[str, str]:
    """Returns the dtype of each factor of a new checkpoint. asked: that of the user."""
    dtype = dtypes.parse(asked) if asked else _dtype(source.layout)
    return dict.fromkeys(
        (name for b in names.bound for name in b.rule.of if is_factor(name)), dtype
    )


@dataclass(frozen=True)
class _Held(Addition):
    """Factors that are read beside the weights of a checkpoint."""

    adapter: Path
    held: Layout
    about: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.adapter

    @property
    def facts(self) -> Facts:
        return {"adapter": self.about}

    def layout(self, base: Layout) -> Layout:
        """Returns the layout of the weights and the factors."""
        return carried.joined(base, self.held)


def beside(source: AdapterCheckpoint, how: str | None, decided: Decided) -> AdaptersBeside:
    """Returns the factors of `source` as adapters beside the weights of a new checkpoint.

    how: None: fused, or canonical if only that can hold the factors.
    """
    if (how or "").startswith("swift"):
        raise UsageError(
            f"--layout {how}: ms-swift keeps adapters without the weights; write them with `mckpt"
            " adapter to-megatron`"
        )
    chosen = placing.choose(source, decided, how, whole=True)
    how, names = chosen.how, chosen.names
    kinds = _kinds(source, names, decided.target.dtype)
    facts = {**_facts(how, names, source), "beside": True}

    def placed(laid: Layout) -> tuple[Checkpoint, Layout]:
        weights = factors.kept(laid, laid.shapes.keys() - kinds.keys())
        kept = factors.kept(laid, kinds)
        held, layout = placing.placed(source, names, kept, chosen.members, chosen.equal)
        moved = replace(decided.moved, merging=_Held(source.path, held, facts))
        stored, shapes = [*weights.stored, *layout.stored], {**weights.shapes, **layout.shapes}
        return moved, replace(laid, stored=stored, shapes=shapes)

    # Megatron-LM's own programs would leave out the adapters, and get no launch line
    known = structs.replace(
        decided,
        names=names,
        dtypes={**decided.dtypes, **kinds},
        has_args=False,
        notes=[*decided.notes, *chosen.notes, *source.remarks],
    )
    return AdaptersBeside(known, placed, _run_config(decided, names, how, source.scale), facts)


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
    groups = optimizer.groups(source, names, format, decided.megatron)
    return groups, optimizer.scalers(source, names, format, decided.megatron)


def _check_finite(source: AdapterCheckpoint) -> None:
    """Reads all factors. Raises SourceError with each that has a value which is not finite."""
    found = []
    for name in filter(is_factor, source):
        values = source[name].numpy()
        if not (finite := np.isfinite(values)).all():
            place = np.argwhere(~finite)[0].tolist()
            found.append(f"{name} {list(values.shape)}: {place} is {values[tuple(place)]}")
    if found:
        raise SourceError.of(f"{source.path}: {NOT_FINITE[0]}", found, NOT_FINITE[1])


def _dtype(layout: Layout) -> str:
    """Returns the dtype of all factors; if they have several, one that holds the values of all."""
    found = {s.dtype for s in layout.stored if not holds_state(s)}
    widest = [one for one in found if dtypes.itemsize(one) == max(map(dtypes.itemsize, found))]
    return widest[0] if len(widest) == 1 else "float32"


def _facts(how: str, names: AdapterNames, source: AdapterCheckpoint) -> dict[str, Any]:
    return {
        "layout": how,
        "rank": names.rank,
        **({"ranks": dict(names.ranks)} if names.ranks else {}),
        "alpha": source.scale * names.rank,
        "modules": len(names.modules),
        **({"base": source.base_name} if source.base_name else {}),
    }


def _refuse_swift(source: AdapterCheckpoint, target: TargetOptions, format: Format) -> None:
    """Raises UsageError for adapters that ms-swift does not load."""
    if format.fixed_sizes:
        raise UsageError(
            f"ms-swift does not read adapters in the format {format}; give the format torch_dist"
        )
    if placing.has_magnitudes(source):
        raise UsageError(
            f"{source.path}: has magnitudes (DoRA), which ms-swift does not have in Megatron; merge"
            " the adapter with `mckpt adapter merge` instead"
        )


def _swift_args(
    common: Mapping[str, Any], names: AdapterNames, alpha: float
) -> tuple[dict[str, Any], str]:
    """Returns the common state with the args from which ms-swift builds its adapters, and the
    options that state them.
    """
    targets = names.targets()
    shown = int(alpha) if float(alpha).is_integer() else alpha
    stated = {
        "tuner_type": "lora",
        "lora_rank": names.rank,
        "lora_alpha": shown,
        "lora_dropout": 0.0,
        "lora_bias": "none",
        "use_rslora": False,
        "modules_to_save": [],
        "target_modules": targets,
        "target_regex": None,
    }
    option = f"--target_modules {' '.join(targets)}"
    if any("*" in target for target in targets):
        parts = (re.escape(target.lstrip("*")).replace(r"\*", ".*") for target in targets)
        stated["target_regex"] = rf"(?:.*\.)?(?:{'|'.join(parts)})"
        option = f"--target_regex '{stated['target_regex']}'"
    args = safe_pickle.fields(common["args"], "args") if "args" in common else {}
    merged = {**names.parallel.args(), **args, **stated}
    told = f"--tuner_type lora --lora_rank {names.rank} --lora_alpha {shown} {option}"
    return {**common, "args": safe_pickle.namespace(**merged)}, told


def _run_config(decided: Decided, names: AdapterNames, how: str, scale: float) -> list[TargetFile]:
    """Returns run_config.yaml with the section `peft`, from which Megatron-Bridge builds the
    adapters; nothing for a target that it does not read.
    """
    if names.mapping.whole and decided.destination.format.fixed_sizes:
        raise UsageError(
            f"{names.mapping.whole.trainer}: does not read adapters of whole models in the format"
            f" {decided.destination.format}; give the format torch_dist"
        )
    asked = structs.replace(decided, target=decided.target.with_(run_config=True))
    try:
        files = bridge_files(asked)
    except UsageError:
        return []
    import yaml

    known, alpha = rules()["megatron"], scale * names.rank
    kind = "dora" if names.dora else how
    section: dict[str, Any] = {
        "_target_": known["classes"][kind],
        "target_modules": names.targets(),
        "dim": names.rank,
        "alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "dropout": 0.0,
        **({} if names.dora else {"share_expert_adapters": False}),
    }
    out = []
    for file in files:
        ((_, content),) = file.fixed(None)
        if file.path == RUN_CONFIG:
            found = _SECTION.search(content)
            before = yaml.safe_load(found[0])["peft"] if found else {}
            # made of target_modules; CanonicalLoRA of Megatron-Bridge 0.6 fails on what it saved
            before.pop("canonical_mapping", None)
            if before.get(outer := "experts_shared_outer_loras"):  # now each has both factors
                before |= {outer: False, "share_expert_adapters": False}
            if "normalize_moe_lora" in before or names.ranks:
                before["normalize_moe_lora"] = bool(names.ranks)
            kept = {
                key: before[key] for key in ("dropout", "share_expert_adapters") if key in before
            }
            text = yaml.safe_dump({"peft": before | section | kept}, sort_keys=False).encode()
            content = _SECTION.sub(b"", content) + text
        out.append(TargetFile.whole(file.path, content))
    return out


class PeftForm(NamedTuple):
    """The directory of PEFT that an adapter of Megatron becomes."""

    source: AdapterCheckpoint  # of the factors that the directory has
    names: Names
    layout: Layout
    outputs: list[TargetFile]  # of the weights
    config: bytes  # content of adapter_config.json
    remarks: list[str]


def peft_form(source: AdapterCheckpoint, loaded: bool = False) -> PeftForm:
    """Returns the description of a directory of PEFT, made of headers alone.

    loaded: its names are those under which PEFT loads it, not those of the base's files.

    Raises UsageError if the names of the model's weights in Hugging Face are not known.
    """
    family = source.model.family
    if family is None:
        raise UsageError(
            f"{source.path}: no config.json describes the model, so the names of its weights in"
            " Hugging Face are not known; give --like HF_DIR"
        )
    form = {"form": NESTED} if NESTED in family.forms else {}
    places = factors.weights_in(source.layout)
    names = Names(family, source.dims, form, Parallel())
    if loaded:
        names = loaded_names(names, places.keys())
    dora = placing.has_magnitudes(source)
    named = source.named.mapping.tower if source.named else {}
    towers = {carried.key_of(name): shape for name, shape in named.items()}
    layout, outputs, adapted = lay_out(names, places, _dtype(source.layout), towers, dora)
    source = replace(source, held=_without_equal(source, adapted, places))
    layout = replace(layout, shapes=dict(source.layout.shapes))
    content = config(adapted, names, source.scale_of, dora, source.base_name)
    remarks = [
        "layers of multi-token prediction have adapters, and no model of transformers has these"
        " layers, so PEFT does not load their factors"
    ] * any(one.bound.rule.mtp for one in adapted)
    return PeftForm(source, names, layout, outputs, content, remarks)


def _without_equal(
    source: AdapterCheckpoint, adapted: Sequence[AdaptedWeight], places: Mapping[Place, int]
) -> Layout:
    """Returns the factors of `source` but those A that equal the one that their module of PEFT has.

    Raises UsageError for weights of one module of PEFT whose factors A differ.
    """
    apart: list[str] = []
    same: set[Place] = set()
    for one in adapted:
        for expert in one.experts if len(one.there) > 1 else ():
            found = placing.equal_factors(source, one.there, one.layer, expert, places)
            if len(found) < len(one.there[1:]):
                apart.append(f"{one.key}, expert {expert}" if len(one.experts) > 1 else one.key)
            same |= found
    if apart:
        raise UsageError.of(
            f"{source.path}: a module of PEFT has one factor A, and the adapters of the weights"
            " that these modules pack have different ones:",
            apart,
            "Merge the adapter with `mckpt adapter merge` instead.",
        )
    return replace(
        factors.without(source.layout, same, placing.EQUAL), ignored=source.layout.ignored
    )


def form_peft(source: AdapterCheckpoint, at: At, target: TargetOptions, look: bool = True) -> Form:
    """Returns the form of a directory of PEFT.

    look: read the factors, to refuse values that are not finite.

    Raises UsageError for linears of which PEFT loads no adapter.
    """
    form = _form_peft(source, at, target, look, loaded=True)
    family = form.names.mapping.name
    never = tuple(f".{name}.weight" for name in rules()["peft"]["never"].get(family, ()))
    keys = {s.key.partition(":")[0] for s in form.layout.stored}
    if refused := sorted(key for key in keys if key.endswith(never)):
        raise UsageError.of(
            f"{source.path}: PEFT loads no adapter of these linears of a {family} model:",
            refused,
            "Merge the adapter with `mckpt adapter merge` instead.",
        )
    return form


def _form_peft(
    source: AdapterCheckpoint,
    at: At,
    target: TargetOptions,
    look: bool = True,
    loaded: bool = False,
) -> Form:
    """Returns the same for a directory that mckpt alone reads, unless `loaded`."""
    form = peft_form(source, loaded)
    destination = at(None, PEFT)
    if look:
        _check_finite(source)
    return Form(
        source=form.source,
        moved=form.source,
        destination=destination,
        target=target,
        names=form.names,
        layout=form.layout,
        outputs=[*form.outputs, TargetFile.whole(ADAPTER[0], form.config)],
        side=SideFiles(destination.root, {}),
        facts={"config": hashlib.sha256(form.config).hexdigest()},
        inexact={},
        notes=[],
        remarks=form.remarks,
    )
