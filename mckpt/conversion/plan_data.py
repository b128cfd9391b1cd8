"""The data of a plan: all copies and files of a conversion, proved from headers, and everything
that determines its output, for its digest and manifest. Also the identity of its source, by which a
later run recognises the output and the interrupted work of the same command: a file that has the
same size, mtime, ctime and inode is the same. If one of them differs, the content decides
(`done`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.conversion.refusals import refuse_casts
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import Destination
from mckpt.errors import counted, printable, shown
from mckpt.formats import carried
from mckpt.formats.base import Names, dtypes_of
from mckpt.formats.megatron.optimizer import holds_state, is_state
from mckpt.geometry.box import ZEROS, Layout, num_free
from mckpt.geometry.join import COPY, UNSCALED, Joined
from mckpt.mapping import MappingFile
from mckpt.options import TargetOptions
from mckpt.storage import sparse_copy
from mckpt.storage.files import Stamp, TargetFile, stamp
from mckpt.storage.manifest import Facts
from mckpt.values import dtypes, quantisation
from mckpt.version import __version__

if TYPE_CHECKING:
    from mckpt.execute.transfer import Transfer


def dtypes_of_target(source: Checkpoint, target: TargetOptions) -> tuple[dict[str, str], str]:
    """Returns the dtype of each logical tensor in the target, and the dtype of most bytes."""
    if target.dtype is not None:
        wanted = dtypes.parse(target.dtype)
        refuse_casts(source, target.dtype)
        names = {n for s in source.layout.stored if not s.carried for n in s.tensors}
        cast = {name: wanted for name in names if not is_state(name)}
        return cast | _states(source), wanted
    kinds = dtypes_of(source.layout)
    weight: dict[str, int] = {}
    for s in (s for s in source.layout.stored if not (s.carried or holds_state(s))):
        weight[s.dtype] = weight.get(s.dtype, 0) + s.numel * len(s) * dtypes.itemsize(s.dtype)
    return kinds, max(weight, key=lambda d: weight[d])


def _states(source: Checkpoint) -> dict[str, str]:
    """Returns the dtypes of the optimizer's states, which --dtype does not cast."""
    stored = [s for s in source.layout.stored if holds_state(s)]
    return dtypes_of(replace(source.layout, stored=stored))


def most_dtype(source: Checkpoint) -> str:
    """Returns the dtype of most of a checkpoint's bytes."""
    return dtypes_of_target(source, TargetOptions())[1]


def mapping_to_keep(source: Checkpoint) -> tuple[str, bytes] | None:
    """Returns the name and content of the user's family file, as it is kept beside a model."""
    name = source.model.options.mapping
    return (
        None
        if name is None or source.changes_family
        else (Path(name).name, mapping.to_keep(name).encode())
    )


def named_by_user(source: Checkpoint, kept: bool) -> Facts:
    """Returns the manifest's entry on the family that the user named. A family file is recorded if
    it is `kept` beside the checkpoint.
    """
    file = mapping_to_keep(source) if kept else None
    if file is not None:
        return {"mapping_file": {"name": file[0], "digest": mapping.digest_of(file[1].decode())}}
    named = None if source.changes_family else source.model.options.family
    return {"family": named} if named else {}


@dataclass(frozen=True)
class Form:
    """Describes what a source becomes: the names, places and files of its tensors. It is decided
    from headers.
    """

    source: Checkpoint
    moved: Checkpoint  # whose tensors are read: the source with what the target keeps of it
    destination: Destination
    target: TargetOptions
    names: Names
    layout: Layout
    outputs: list[TargetFile]
    side: SideFiles
    facts: Facts  # those of this form alone
    inexact: Mapping[str, str]  # features that the user accepts to lose: name -> reason
    notes: list[str]
    # of the logical tensors whose values the target has times a number, by template
    factors: Mapping[str, float] = field(default_factory=dict)
    copied: list[Path] = field(default_factory=list)  # the source files that are copied whole
    remarks: list[str] = field(default_factory=list)  # on files that the output does not have

    def all_facts(self, joined: Joined) -> Facts:
        """Returns everything that determines the output, without time, host or path."""
        source, moved, file = self.source, self.moved, self.names.mapping
        headers = hashlib.sha256()
        for s in moved.layout.stored:
            scales = [s.scales.grids] if s.scales else []
            for a in (s.file, s.at, s.layer, s.expert, *scales, *s.added.values()):
                headers.update(np.ascontiguousarray(a).tobytes())
            headers.update(f"{s.key} {s.stored_as} {s.shape}".encode())
        unchanged, merging = carried.of(moved.layout), source.merging
        casts = [dtypes.parse(self.target.dtype)] if self.target.dtype else []
        return {
            "mckpt": __version__,
            "source": {
                "format": source.format,
                "layout": headers.hexdigest(),
                "mapping": {"name": source.mapping.name, "digest": source.mapping.digest},
                **({"iteration": at} if (at := source.files.iteration) is not None else {}),
                "files": [
                    {"name": Path(f).name, "bytes": os.stat(f).st_size}
                    for f in moved.layout.own_files
                ],
            },
            "mapping": {
                "name": file.name,
                "digest": file.digest,
                "logical": mapping.schema().digest,
            },
            "dims": (
                {
                    k: list(v) if isinstance(v, tuple) else v
                    for k, v in moved.dims.items()
                    if k != "vocab_size"
                }
                | ({} if (true := true_vocab(source)) is None else {"vocab_size": true})
            ),
            "format": self.target.format,
            "dtype": self.target.dtype,
            "casts": [*source.files.casts, *casts],
            "inexact": dict(self.inexact),
            **({"carried": carried.facts(unchanged)} if unchanged else {}),
            **(merging.facts if merging else {}),
            "notes": [
                *source.model.notes,
                *(merging.notes if merging else ()),
                *self.notes,
                *filled_notes(moved.layout),
                *offset_notes(joined, moved.layout),
            ],
            **self.facts,
        }


def filled_notes(layout: Layout) -> list[str]:
    """Returns a note for each value that fills tensors which the source does not have."""
    by_value: dict[float, list[str]] = {}
    for s in layout.filled():
        value = -s.pieces[0].offset or 0.0
        places = zip(s.layer.tolist(), s.expert.tolist(), strict=True)
        keys = (s.key.format(layer=layer, expert=expert) for layer, expert in places)
        by_value.setdefault(value, []).extend(keys)
    return [
        f"{counted(len(keys), 'tensor')} that no layer computes with, such as {min(keys)}: not in"
        f" the source; each element is written as {value:g}"
        for value, keys in by_value.items()
    ]


def offset_notes(joined: Joined, source: Layout) -> list[str]:
    """Returns notes on the tensors that one side stores with a number added to each value."""
    out = []
    filled = [n for n, file in enumerate(source.files) if file == ZEROS]
    for number, cast in enumerate(joined.casts):
        copies = joined.copies[joined.copies["cast"] == number]
        copies = copies[~np.isin(copies["src_file"], filled)]
        if cast.offset and len(copies):
            elements = int((copies["rows"] * copies["run"]).sum())
            name = joined.name(int(copies["tensor"][0]))
            out.append(
                f"{elements:,} elements, such as those of {name}, are stored as the sum of the"
                f" value and {cast.offset:g}, rounded to {cast.target}. Weights of a norm from 0.5"
                " to 256 are exact; smaller ones lose their last bits"
            )
    return out


def quantised_notes(source: Checkpoint) -> list[str]:
    """Returns notes on the quantised tensors of the source, one for each encoding and block."""
    forms: Counter[str] = Counter()
    for s in source.layout.stored:
        if s.scales:
            forms[s.scales.description] += len(s)
    return [
        f"{num:,} tensors are {encoding}, and are dequantised to {quantisation.VALUES}"
        for encoding, num in forms.items()
    ]


def form_of(source: Checkpoint, family: MappingFile) -> str | None:
    """Returns the form of the family in which the source's tensors have their names, or had them in
    the directory that it was made of; None for a family without forms.
    """
    keys = [row.key for row in carried.of(source.layout)]
    known = source.files.manifest if source.is_megatron else source.names.choices
    return family.form_of(keys, known.get("form"))


def adopted_config(source: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model that an edit has moved to another family."""
    before, family = source.model.family, source.family
    assert before is not None and family is not None
    return family.adopted(config, before, source.dims, source.edited)


def text_notes(source: Checkpoint, whole: mapping.Tower | None = None) -> list[str]:
    """Returns notes on a source of which Megatron's model is a part, the one that computes text.

    whole: the towers of the target, if it has the whole model.
    """
    if (family := source.model.family) is None:
        return []
    if not carried.of(source.layout):
        return list(family.notes)
    named = form_of(source, family)
    form = family.form({} if named is None else {"form": named})
    text = (
        ", and Megatron's model is the text model: it computes text, and no images, video or audio"
    )
    tensors = ", ".join(form.carried)
    if whole is not None:
        return [f"the towers, {tensors}, are in the checkpoint, as {whole.trainer} has them"]
    return [
        f"the tensors {tensors} are carried in hf/{carried.FILES}{'' if family.head else text}",
        *family.notes,
    ]


def true_vocab(source: Checkpoint) -> int | None:
    try:
        return int(source.dims["vocab_size"])
    except VocabSizeUnknown:
        return None


class PlannedCopy(NamedTuple):
    """One copy of a plan: a grid of `shape` elements that are cast on their way from one file into
    another. Element [i, j] lies i * strides[0] + j * strides[1] elements behind the offset.
    """

    tensor: str  # the logical tensor that the elements belong to
    source: str  # path of the file
    source_offset: int  # bytes
    source_strides: tuple[int, int]  # elements
    source_dtype: str
    target: str  # path of the file, relative to the new checkpoint
    target_offset: int  # bytes
    target_strides: tuple[int, int]  # elements
    target_dtype: str
    shape: tuple[int, int]
    added: float  # a number that is added to each value
    scaled: bool  # whether the elements of one side are quantised: values are codes times scales


class SourceState(Struct, frozen=True):
    """The state of the source files of a plan."""

    stamps: Sequence[Stamp]

    def __str__(self) -> str:
        """Returns the text for the manifest."""
        return f"{self.shared}:{_digest([one.exact for one in self.stamps])}"

    @property
    def shared(self) -> str:
        """Returns the part that is the same on all machines that see the files."""
        return _digest([one.shared for one in self.stamps])


@dataclass(eq=False, repr=False)
class PlanData:
    """A conversion that is proved from headers alone. The fields are those of its form."""

    source: Checkpoint
    destination: Destination
    target: TargetOptions
    joined: Joined
    layout: Layout
    names: Names  # of the target
    outputs: list[TargetFile]
    side: SideFiles
    copied: list[Path]  # the source files that are copied whole
    facts: Facts
    remarks: list[str]  # sentences for the user on files that the output does not have

    def __repr__(self) -> str:
        source, target = self.source, self.destination
        return shown(
            f"{type(self).__name__}({source.format} {source.path} -> {self.target.format}"
            f" {target.path}: {len(self.joined.copies):,} copies,"
            f" {counted(len(self.outputs), 'file')}, {self.nbytes:,} bytes)"
        )

    @cached_property
    def digest(self) -> str:
        """Returns a digest of everything that determines the bytes of the output."""
        return hashlib.sha256(shown(json.dumps(self.facts, sort_keys=True)).encode()).hexdigest()

    def state(self, refresh: bool = False) -> SourceState:
        """Returns the state of the source files now; with `refresh`, lists the stores that have
        them.
        """
        merging = self.source.merging
        own = self.source.layout.own_files
        stored = ((file,) if merging is None else merging.made_of(file) for file in own)
        files = [*itertools.chain.from_iterable(stored), *map(str, self.copied)]
        if refresh:
            for copy in {id(one): one for one in map(sparse_copy.of, files) if one}.values():
                copy.list()
        return SourceState([stamp(file) for file in files])

    def key(self, checksum: str, shared: str) -> str:
        """Returns a digest of the bytes that a run writes; the same command has the same one, on
        all its ranks.

        shared: that of the source's state. A run that continues another one compares the whole
        state too (Destination.staging).
        """
        return _digest(f"{self.digest} {checksum} {shared}")

    @cached_property
    def transfer(self) -> Transfer:
        """Returns the copies of the plan, with the files that they read and write."""
        from mckpt.execute.transfer import Transfer

        return Transfer(self.joined, list(map(Path, self.source.layout.files)), self.outputs)

    @property
    def nbytes(self) -> int:
        return sum(o.size for o in self.outputs)

    def copies(self) -> Iterator[PlannedCopy]:
        """Yields all copies, in the order of the source files. A large plan has a million."""
        sources, outputs = self.source.layout.files, self.outputs
        for row, at in zip(self.joined.copies, self.joined.first_bytes().tolist(), strict=True):
            c = dict(zip(COPY.names or (), row.item(), strict=True))
            cast = self.joined.casts[c["cast"]]
            wide, width = dtypes.itemsize(cast.source), dtypes.itemsize(cast.target)
            yield PlannedCopy(
                self.joined.name(c["tensor"]),
                str(sources[c["src_file"]]),
                c["src_at"],
                (c["src_pitch"] // wide, c["src_step"] // wide),
                cast.source,
                outputs[c["dst_file"]].path,
                at,
                (c["dst_pitch"] // width, c["dst_step"] // width),
                cast.target,
                (c["rows"], c["run"]),
                cast.offset,
                c["grid"] != UNSCALED,
            )

    def json(self) -> dict[str, Any]:
        copies, format = self.joined.copies, self.destination.format
        padding = sum(
            num_free(s.pieces, s.numel)[0] * len(s) * dtypes.itemsize(s.dtype)
            for s in self.layout.stored
            if s.padding
        )
        moved = (
            np.bincount(copies["cast"], copies["rows"] * copies["run"], len(self.joined.casts))
            .astype("i8")
            .tolist()
        )
        return {
            "source": {
                "path": str(self.source.path),
                "format": self.source.format,
                "files": len(self.source.layout.own_files),
                "tensors": len(self.source),
                "parallel": str(self.source.parallel),
                "mapping": self.source.mapping.name,
            },
            "target": {
                "path": str(self.destination.path),
                "format": self.target.format,
                "parallel": str(self.target.parallel),
                "mapping": self.facts["mapping"]["name"],
                "tensors": self.layout.num_stored(
                    by_file=format.megatron and not format.global_keys
                ),
                "files": [{"path": o.path, "bytes": o.size} for o in self.outputs],
                "bytes": self.nbytes,
            },
            "copies": len(copies),
            "casts": {
                f"{a} -> {b}": n
                for (a, b, offset, _), n in zip(self.joined.casts, moved, strict=True)
                if a != b and not offset
            },
            "offsets": {
                f"{a} {offset:+g} -> {b}": n
                for (a, b, offset, _), n in zip(self.joined.casts, moved, strict=True)
                if offset
            },
            "padding_bytes": int(padding),
            "carried": self.facts.get("carried"),
            "ignored": dict(grouped(self.source.layout.ignored)),
            "optimizer": self.facts.get("optimizer"),
            "left_behind": self.facts.get("left_behind", self.source.left_behind()),
            "inexact": self.facts["inexact"],
            "notes": [*self.facts["notes"], *self.remarks],
            "plan": self.digest,
        }

    def summary(self) -> str:
        p = self.json()
        s, t = p["source"], p["target"]
        sizes = [  # a Hugging Face directory is not sharded
            f", {self.source.parallel}" * self.source.is_megatron,
            f", {self.target.parallel}" * self.destination.format.megatron,
        ]
        lines = [
            (
                f"{s['format']} {s['path']} ({s['mapping']}{sizes[0]}):"
                f" {counted(s['tensors'], 'logical tensor')} in {counted(s['files'], 'file')}"
            ),
            (
                f"  -> {t['format']} {t['path']} ({t['mapping']}{sizes[1]}):"
                f" {counted(t['tensors'], 'stored tensor')}, {counted(len(t['files']), 'file')},"
                f" {t['bytes']:,} bytes"
            ),
            (
                f"{p['copies']:,} copies; every element of the target is written exactly once;"
                " every element of the source is used or listed below as ignored"
            ),
        ]
        adapter = self.facts.get("adapter", {})
        kinds = ["filled factors"] * ("layout" in adapter)
        kinds += ["padding of the vocabulary"] * ("layout" not in adapter or "beside" in adapter)
        filled = " and ".join(kinds)
        lines += [f"cast {k}: {n:,} elements" for k, n in p["casts"].items()]
        lines += [f"{filled}: {p['padding_bytes']:,} bytes of zeros"] * bool(p["padding_bytes"])
        if unchanged := p["carried"]:
            tensors = counted(unchanged["tensors"], "tensor")
            merged = bool(adapter) and "layout" not in adapter  # it may change towers
            how = "carried" + " unchanged" * (not merged)
            lines.append(f"{how}: {tensors}, {unchanged['bytes']:,} bytes")
        if state := p["optimizer"]:
            lines += _optimizer_lines(state, self.destination.rank0)
        lines += [f"ignored: {k} ({why})" for k, why in p["ignored"].items()]
        lines += [f"left behind: {', '.join(p['left_behind'])}"] * bool(p["left_behind"])
        lines += [f"inexact: {text}" for text in p["inexact"].values()]
        return "\n".join(map(printable, lines + p["notes"]))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _optimizer_lines(state: Mapping[str, Any], compared: bool) -> Iterator[str]:
    """Yields sentences on the optimizer that is kept. `state` is its entry in the manifest.

    compared: whether the master copies are compared with the weights already.
    """
    proved = f"; of {counted(state['proved'], 'weight')} the master copy, when rounded, " + (
        "will be compared with the weight"
        if not compared
        else "is the weight within the precision of fp16"
        if state.get("half")
        else "is the weight bit for bit"
    )
    yield (
        f"optimizer ({state['stored_as']}): {', '.join(state['states'])} are kept"
        + proved * bool(state["proved"])
    )
    if found := state.get("loss_scalers"):
        yield "loss scaler: " + ", ".join(f"{k} {v:g}" for k, v in found[0].items()) + " are kept"
    if state.get("no_loss_scaler"):
        yield (
            "loss scaler: the run trained in fp16, and its checkpoint has none, so training goes on"
            " with --initial-loss-scale"
        )
    if num := state["unproved"]:
        yield f"{counted(num, 'weight')} have no master copy that could prove their states' names"
    if without := state["without"]:
        yield f"parameters without optimizer state: {', '.join(without[:8])}" + (
            f" and {len(without) - 8:,} more" * (len(without) > 8)
        )


def grouped(ignored: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the ignored keys and their reasons; keys with the same reason are counted."""
    by_reason: dict[str, list[str]] = {}
    for key, why in ignored.items():
        by_reason.setdefault(why, []).append(key)
    for why, keys in by_reason.items():
        yield (keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more"), why


def factor_notes(names: Names, dtypes: Mapping[str, str]) -> list[str]:
    """Returns sentences on the tensors that one side stores times a number."""
    if not names.factors:
        return []
    from mckpt.formats import scaling

    return list(scaling.factor_notes(names, dtypes))
