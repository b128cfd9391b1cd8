"""Plans a Hugging Face directory: family, config.json, side files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import CONFIG, Checkpoint, family_of
from mckpt.conversion.facts import (
    facts_of,
    kept_mapping,
    kinds_of,
    naming,
    refuse_inexact,
    refuse_misfit,
)
from mckpt.conversion.plan import Plan
from mckpt.conversion.publishing import Destination
from mckpt.conversion.target import Target
from mckpt.errors import MappingError, UsageError
from mckpt.formats import hf
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.geometry.join import join
from mckpt.mapping import MappingFile
from mckpt.storage.files import TargetFile, read_file


def plan_hf(source: Checkpoint, destination: Destination, target: Target) -> Plan:
    if target.keep_padding:
        source = source.padded() or source
    _ = source.layout  # what is damaged is said before what does not fit
    dims, notes = source.dims, []
    described = source.described_by
    if described is not None:
        base = hf.read_config(described)
        family = family_of(base, source.naming, str(described / CONFIG))
        base = family.restate(base, dims, source.overruled or _denied(source, family, base))
        notes.append("config.json is that of the model's Hugging Face directory")
    else:
        base = None
        family, note = choose_family(source)
        notes.append(note)
    inexact = refuse_inexact(family.inexact(dims), target, f"family {family.name}")
    # trained, not converted: what the trainer computed is not what its args say
    if described is None and not source.manifest:
        said = {
            k: why for k, why in source.mapping.warnings(dims).items() if k not in source.known.dims
        }
        inexact = inexact | refuse_inexact(said, target, "config.json")
    kinds, dtype = kinds_of(source, target)
    if base is None:
        config = {
            "architectures": [family.architectures[0]],
            **family.write(dims),
            "torch_dtype": dtype,
        }
        text = (json.dumps(config, indent=2) + "\n").encode()
    else:
        key = "dtype" if "dtype" in base else "torch_dtype"
        assert described is not None
        changed = {
            **base,
            **({} if base.get(key) is None else {key: dtype}),
            "vocab_size": dims["vocab_size"],
        }
        if changed.pop(hf.QUANTISED, None):
            notes.append(
                f"config.json is written without its {hf.QUANTISED}: no tensor is quantised any"
                " more"
            )
        text = (
            read_file(described / CONFIG)
            if changed == hf.read_config(described)
            else (json.dumps(changed, indent=2) + "\n").encode()
        )
    refuse_misfit(source, source.mapping.path.name, family, family.path.name, dims)
    layout, outputs = hf.lay_out(family, dims, kinds, target.max_shard_size)
    kept = kept_mapping(source)
    side = [] if kept is None else [(MAPPING, kept[1])]
    outputs += [TargetFile.whole(*file) for file in side]
    names, copied = {o.path for o in outputs}, list[Path]()
    roots = [Path(r) for r in (target.tokenizer, described) if r is not None]
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root}: is no directory with tokenizer files")
        for name in hf.side_files(root):
            if name not in names:
                outputs.append(TargetFile.copy(name, root / name))
                copied.append(root / name)
                names.add(name)
    outputs.append(TargetFile.whole(CONFIG, text))
    facts = facts_of(
        source,
        source,
        target,
        family,
        inexact,
        notes,
        max_shard_size=target.max_shard_size,
        config=hashlib.sha256(text).hexdigest(),
        side=[[o.path, o.size] for o in outputs],
        **naming(source, side),
    )
    return Plan(
        source, destination, target, join(source.layout, layout), layout, outputs, [], copied, facts
    )


def _denied(source: Checkpoint, family: MappingFile, config: dict[str, Any]) -> list[str]:
    """The dims of a config.json that the user's word denies; the vocabulary's size is written in
    any case.
    """
    said = [name for name in source.known.dims if name != "vocab_size"]
    try:
        plain = family.read(config) if said else {}
    except MappingError:  # it lacks something that the user says
        return said
    return [name for name in said if not mapping.equal(plain[name], source.dims[name])]


def choose_family(source: Checkpoint) -> tuple[MappingFile, str]:
    """The one family that says these dims; the canonical one where several do.

    UsageError names the candidates.
    """
    if named := source.naming.mapping or source.naming.family:
        family = mapping.load("hf", named)
        return family, f"family {family.name}, as asked for"
    reasons, fit = [], []
    for name in mapping.names("hf"):
        family = mapping.load("hf", name)
        if family.requires is not None and not family.requires(source.dims):
            why = {"requires": f"it is for models where {family.requires.text}"}
        else:
            why = family.inexact(source.dims)
        if why:
            reasons.append(f"{name}: {'; '.join(why.values())}")
        else:
            fit.append(family)
    best = [f for f in fit if f.canonical] or fit
    if len(best) == 1:
        others = [f.name for f in fit if f is not best[0]]
        return best[0], f"family {best[0].name}" + (
            f", which computes the same as {', '.join(others)}"
            if others
            else ", the only one that fits the args"
        )
    if best:
        raise UsageError(
            f"{source.path}: several families compute this: say --family with one of"
            f" {', '.join(f.name for f in best)}"
        )
    raise MappingError.of(
        f"{source.path}: no family computes what its args describe:",
        reasons,
        "say --like HF_DIR, or --mapping FILE of your own family",
    )
