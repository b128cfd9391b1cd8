"""Plans a Hugging Face directory: family, config.json, side files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mckpt import formats, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.plan_data import (
    Form,
    adopted_config,
    dtypes_of_target,
    factor_notes,
    form_of,
    mapping_to_keep,
    named_by_user,
)
from mckpt.conversion.refusals import (
    lost_args,
    lost_factors,
    refuse_inexact,
    refuse_misfit,
    refuse_uncarried,
)
from mckpt.conversion.side_files import SideFiles, refuse_changed
from mckpt.conversion.target import At
from mckpt.errors import MappingError, UsageError
from mckpt.formats import carried, places
from mckpt.formats.base import Names
from mckpt.formats.hf import HuggingFaceRequest, unquantised
from mckpt.formats.hf_config import (
    CONFIG,
    FAST_TOKENIZER,
    GENERATION,
    QUANTISED,
    has_tokenizer,
    is_of_tokenizer,
    left_out,
    quantised_by,
    read_config,
    side_files,
    without_quantisation,
)
from mckpt.formats.hf_encodings import WRITTEN, quantisation_config
from mckpt.formats.megatron.save_directory import MAPPING, TOKENIZER_DIRECTORY
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import MappingFile
from mckpt.options import TargetOptions
from mckpt.storage.files import TargetFile, mode_of, read_file


class Export(NamedTuple):
    """The Hugging Face directory that a checkpoint becomes."""

    source: Checkpoint  # with the padding rows, if they are kept
    request: HuggingFaceRequest
    config: bytes  # content of config.json
    inexact: dict[str, str]  # features that the user accepts to lose: name -> reason
    notes: list[str]


def export_of(source: Checkpoint, target: TargetOptions) -> Export:
    """Returns the description of a Hugging Face directory.

    config.json is copied from the directory that describes the model. If there is none, it is made
    from the dims.
    """
    if target.keep_padding:
        source = source.with_padding() or source
    _ = source.layout  # damage is reported before dims that do not fit
    family, base, note = _model(source)
    inexact = _inexact(source, family, target)
    kinds, dtype = dtypes_of_target(source, target)
    text, notes = _config(source, family, base, dtype)
    if target.quantize and source.opened.quantised:
        raise UsageError(
            f"--quantize {target.quantize}: {source.path} is quantised already. To keep its form,"
            " copy the directory. For another form, convert it without the option first, which"
            " dequantises it to bfloat16, and then convert the result with it"
        )
    refuse_uncarried(source, family)
    unchanged = carried.of(source.layout)
    form = form_of(source, family)
    names = Names(family, source.dims, {} if form is None else {"form": form}, Parallel())
    if family.has_unread and names.unread_beyond(source.names):
        names = replace(names, mapping=family.without_unread())
    refuse_misfit(source, names, family.path.name)
    request = HuggingFaceRequest(
        names,
        kinds,
        target.max_shard_size,
        carried=tuple(unchanged),
        quantize=target.quantize,
    )
    if target.quantize:
        how = quantisation_config(target.quantize, unquantised(request))
        text = _json({**json.loads(text), QUANTISED: how})
        encoding = WRITTEN[target.quantize].description()
        notes.append(f"the weights of linear layers are written as {encoding}; they are rounded")
    notes += factor_notes(source.names, kinds)
    return Export(source, request, text, inexact, [note, *notes])


def form_hf(source: Checkpoint, at: At, target: TargetOptions) -> Form:
    destination = at(None, formats.get(target.format))
    tokenizer = target.tokenizer and places.local(target.tokenizer, weights=False)
    if not source.files.options.like:
        refuse_changed(source, side_files(Path(tokenizer)).kept if tokenizer else ())
    source, request, text, inexact, notes = export_of(source, target)
    layout, outputs = destination.format.lay_out(request)
    kept = mapping_to_keep(source)
    if kept is not None:
        outputs.append(TargetFile.whole(MAPPING, kept[1]))
    own, described = source.files.tokenizer_directory, source.files.described_by
    roots = [Path(root) for root in (tokenizer, own, described) if root is not None]
    copies = _side_copies(roots, {file.path for file in outputs}, own)
    # an edit changes the files of the source, and not those that the user gives
    given = {n: p for n, p in copies.items() if tokenizer and p.is_relative_to(tokenizer)}
    beside: dict[str, Path | bytes] = {n: p for n, p in copies.items() if n not in given}
    beside = {**source.files_beside({**beside, CONFIG: text}), **given}
    config = beside.pop(CONFIG)
    assert isinstance(config, bytes)
    if own is not None:
        notes.append(f"the tokenizer is that of the training, in {TOKENIZER_DIRECTORY}")
    outputs += [TargetFile.beside(name, file) for name, file in beside.items()]
    described_as = TargetFile.whole(CONFIG, config)
    if described is not None:
        described_as = described_as._replace(mode=mode_of(described / CONFIG))
    outputs.append(described_as)
    return Form(
        source=source,
        moved=source,
        destination=destination,
        target=target,
        names=request.names,
        layout=layout,
        outputs=outputs,
        side=SideFiles(destination.root, {}),
        facts={
            "max_shard_size": target.max_shard_size,
            **({"quantize": target.quantize} if target.quantize else {}),
            "config": hashlib.sha256(config).hexdigest(),
            "side": [[file.path, file.size] for file in outputs],
            **named_by_user(source, kept is not None),
        },
        inexact=inexact,
        notes=notes,
        copied=[file for file in beside.values() if isinstance(file, Path)],
        remarks=[*left_out(roots), *_lacking(beside, source)],
    )


def _model(source: Checkpoint) -> tuple[MappingFile, dict[str, Any] | None, str]:
    """Returns the family, the config.json that describes the model with the user's corrections
    (None if there is none), and a note on the origin of both.
    """
    described, family = source.files.described_by, source.family
    if source.changes_family and family is None:
        raise UsageError(
            f"{source.path}: no class of transformers computes the edited model; give --format"
            " torch_dist, or another format of Megatron"
        )
    if described is None or family is None:
        chosen, note = choose_family(source)
        return chosen, None, note
    base = read_config(described)
    if source.changes_family:
        note = f"config.json is that of the source, as the family {family.name} has it (an edit)"
        return family, adopted_config(source, base), note
    overruled, added = source.model.overruled, source.model.corrected(base)
    if source.edited:
        base = family.followed(base, source.model.dims, source.dims, source.kept_layers)
    edited = family.to_restate(base, source.dims, source.edited)
    by_set = {*overruled, *source.files.options.dims}
    mtp = "--no-mtp" if source.files.options.no_mtp else "the args"
    corrected = list(dict.fromkeys([*overruled, *added, *edited]))
    # without a path, because facts contain none
    note = "config.json is copied from the model's Hugging Face directory"
    if corrected:
        changes = [
            f"{name} changed to {source.dims[name]!r}"
            f" ({'an edit' if name in edited else '--set' if name in by_set else mtp})"
            for name in corrected
        ]
        note += f", with {', '.join(changes)}"
    return family, family.restate(base, source.dims, corrected), note


def _inexact(source: Checkpoint, family: MappingFile, target: TargetOptions) -> dict[str, str]:
    """Returns the features that config.json cannot express and that the user accepts: name ->
    reason.

    Raises MappingError for features that the user does not accept.
    """
    lost = {**family.inexact(source.dims), **lost_args(source), **lost_factors(source)}
    found = refuse_inexact(lost, target, f"family {family.name}")
    # Without a manifest the checkpoint was trained, and the trainer may have ignored some args.
    if source.files.described_by is None and not source.files.manifest:
        trained_by = source.model.run_config_file or source.mapping
        warned = trained_by.warnings(source.model.dims).items()  # before an edit
        unsaid = {name: why for name, why in warned if name not in source.files.options.dims}
        found = found | refuse_inexact(unsaid, target, "config.json")
    return found


def _config(
    source: Checkpoint, family: MappingFile, base: dict[str, Any] | None, dtype: str
) -> tuple[bytes, list[str]]:
    """Returns the content of config.json, and notes on it."""
    if base is None:
        named = {"architectures": [family.architectures[0]]}
        return _json({**named, **family.write(source.dims), "torch_dtype": dtype}), []
    config = mapping.typed(base, family.inside, dtype)
    config = family.restate(config, source.dims, ["vocab_size"])
    notes = []
    if quantised_by(config):
        config = without_quantisation(config)
        notes.append(
            f"config.json is written without its {QUANTISED}: no tensor is quantised any more"
        )
    described = source.files.described_by
    assert described is not None
    unchanged = config == read_config(described)
    return (read_file(described / CONFIG) if unchanged else _json(config)), notes


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()


def _side_copies(roots: list[Path], there: set[str], whole: Path | None) -> dict[str, Path]:
    """Returns the tokenizer, templates and similar files to copy from these directories: name ->
    path. Names in `there` are left out, and the first directory that has a file wins.

    whole: one of the directories. If it has a tokenizer.json, which is a whole tokenizer, the
    directories after it give no files of a tokenizer.
    """
    out: dict[str, Path] = {}
    done = False
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root}: is not a directory; --tokenizer needs one")
        for name in side_files(root).kept:
            if name not in there and not (done and is_of_tokenizer(name)):
                out.setdefault(name, root / name)
        done = done or (root == whole and (root / FAST_TOKENIZER).is_file())
    return out


def _lacking(names: Iterable[str], source: Checkpoint) -> list[str]:
    """Returns a sentence on the files that a loader may need and the export does not have, none if
    nothing is missing.
    """
    lacks = [] if has_tokenizer(names) else ["tokenizer"]
    if source.dims["causal"] and GENERATION not in names:
        lacks.append(GENERATION)
    return [
        f"the export has no {' and no '.join(lacks)}: --tokenizer HF_DIR copies what that directory"
        " has of it"
    ] * bool(lacks)


def choose_family(source: Checkpoint) -> tuple[MappingFile, str]:
    """Returns the one family that can express these dims, or the canonical one of several, and a
    note.

    Raises UsageError with the candidates if several fit and none is canonical.
    """
    if named := source.model.options.family_name:
        family = mapping.load("hf", named)
        return family, f"family {family.name}, as asked for"
    from mckpt.mapping.choosing import families_for

    found = families_for(source.dims)
    best = found.best
    if len(best) == 1:
        others = [f.name for f in found.families if f is not best[0]]
        return best[0], f"family {best[0].name}" + (
            f", which computes the same as {', '.join(others)}"
            if others
            else ", the only one that fits the dims"
        )
    if best:
        raise UsageError(
            f"{source.path}: several families compute this: give --family with one of"
            f" {', '.join(f.name for f in best)}"
        )
    raise MappingError.of(
        f"{source.path}: no family computes what its args describe:",
        [f"{name}: {'; '.join(why.values())}" for name, why in found.others],
        "give --like HF_DIR, --family NAME, or --mapping FILE of your own family",
    )
