"""Joins mapping, formats and planning: plan, convert, diff. With `open`, what `mckpt.` exports."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import __version__, comparison, dtypes, mapping, megatron_args, quantisation, safe_pickle
from mckpt.box import Layout, gaps
from mckpt.checkpoint import CONFIG, DIALECT, MANIFEST, Checkpoint, Known, VocabSizeUnknown, family_of
from mckpt.errors import DestinationError, MappingError, SourceError, StorageError, UsageError, counted
from mckpt.formats import hf, torch, torch_dist
from mckpt.formats.entry import WEIGHT_DTYPES, TargetFile, dtypes_of, read_file
from mckpt.formats.save_directory import MAPPING, is_unit_name, new_common, unit_name
from mckpt.mapping import Dims, MappingFile
from mckpt.parallel import Parallel
from mckpt.planning import Joined, join
from mckpt.publishing import Destination, Side
from mckpt.ranks import Ranks, Session

FORMATS = ("hf", "torch", "torch_dist")
MAX_SHARD_SIZE = 2 * 10**9  # bytes; so that a small model too has files for several threads: two writers of one inode wait for each other
FOLLOWS_IMPL = ("no_persist_layer_norm", "apply_rope_fusion", "gradient_accumulation_fusion", "sequence_parallel")  # args; see mcore.yaml
DIVISIBLE_BY = 128  # Megatron's default of --make-vocab-size-divisible-by
Progress = Callable[..., None]  # (bytes done, bytes in all), and of what writes files (files done, files in all) too


def open(path: str | Path, **known: Any) -> Checkpoint:
    """Open a checkpoint of any format. Keywords are those of `Known`: like, family, vocab_size, iteration, settings."""
    return Checkpoint(path, Known(**known))


# ---------------------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class Target:
    """The form wanted. `parallel` and the fields after it are Megatron's."""

    format: str = "torch_dist"
    parallel: Parallel = field(default_factory=Parallel)
    dtype: str | None = None  # None: each tensor keeps its own
    transformer_impl: str | None = None
    grouped_experts: bool | None = None
    divisible_by: int = DIVISIBLE_BY
    layer_keys: str | None = None  # of torch_dist: stacked or per_layer; None: what the model's args imply
    common_as_object: bool = False
    iteration: int | None = None
    allow_inexact: Sequence[str] = ()
    no_optimizer: bool = False
    tokenizer: str | Path | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    keep_padding: bool = False
    megatron_version: str | None = None  # of the megatron-core that will load it, such as "0.16" or "0.19.2"; None: the newest that mckpt knows


# what a dialect's args name beside dims, where nothing else says it
GIVEN: dict[str, Any] = {"dtype": "bfloat16", "padded_vocab_size": 0, "transformer_impl": "transformer_engine", "experts": "grouped",
                          "divisible_by": DIVISIBLE_BY, "container": "torch_dist", "tp": 1}  # fmt: skip


@dataclass(eq=False)
class Plan:
    """The whole job, proved from headers alone. Nothing is written before `run`."""

    source: Checkpoint
    destination: Destination
    target: Target
    joined: Joined
    layout: Layout
    outputs: list[TargetFile]
    side: Side  # files of DST/hf
    copied: list[Path]  # sources of outputs that are copied whole
    facts: dict[str, Any]  # what the manifest says

    @cached_property
    def digest(self) -> str:
        """Of everything that decides the output's bytes."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all files to be written."""
        return sum(o.size for o in self.outputs)

    def json(self) -> dict[str, Any]:
        """The plan as plain data."""
        copies = self.joined.copies
        padding = sum(
            int(gaps(s.pieces, s.numel)[0][:, 1].sum()) * len(s) * dtypes.itemsize(s.dtype) for s in self.layout.stored if s.padding
        )
        moved = np.bincount(copies["cast"], copies["rows"] * copies["run"], len(self.joined.casts)).astype("i8").tolist()
        return {
            "source": {
                "path": str(self.source.path), "format": self.source.format, "files": len(self.source.layout.files), "tensors": len(self.source),
                "parallel": str(self.source.parallel), "mapping": self.source.mapping.name,
            },
            "target": {
                "path": str(self.destination.path), "format": self.target.format, "parallel": str(self.target.parallel),
                "mapping": self.facts["mapping"]["name"], "tensors": sum(map(len, self.layout.stored)),
                "files": [{"path": o.path, "bytes": o.size} for o in self.outputs], "bytes": self.nbytes,
            },
            "copies": len(copies),
            "casts": {f"{a} -> {b}": n for (a, b), n in zip(self.joined.casts, moved, strict=True) if a != b},
            "padding_bytes": int(padding),
            "ignored": dict(_short(self.source.layout.ignored)),
            "left_behind": self.source.left_behind(),
            "inexact": self.facts["inexact"],
            "notes": self.facts["notes"],
            "plan": self.digest,
        }  # fmt: skip

    def summary(self) -> str:
        """The plan for people."""
        p = self.json()
        s, t = p["source"], p["target"]
        lines = [
            f"{s['format']} {s['path']} ({s['mapping']}, {s['parallel']}): {counted(s['tensors'], 'logical tensor')} in {counted(s['files'], 'file')}",
            f"  -> {t['format']} {t['path']} ({t['mapping']}, {t['parallel']}): "
            f"{counted(t['tensors'], 'stored tensor')}, {counted(len(t['files']), 'file')}, {t['bytes']:,} bytes",
            f"{p['copies']:,} copies; every element of the target is written once, every element of the source is used or named here",
        ]
        lines += [f"cast {k}: {n:,} elements" for k, n in p["casts"].items()]
        lines += [f"padding of the vocabulary: {p['padding_bytes']:,} bytes of zeros"] * bool(p["padding_bytes"])
        lines += [f"ignored: {k} ({why})" for k, why in p["ignored"].items()]
        lines += [f"left behind: {', '.join(p['left_behind'])}"] * bool(p["left_behind"])
        lines += [f"inexact: {text}" for text in p["inexact"].values()]
        return "\n".join(lines + p["notes"])

    def run(self, *, max_memory: int | str = "64MiB", threads: int = 0, checksum: str = "crc32", allow_overflow: bool = False, resume: bool = True,
            check_replicas: bool = False, ranks: Ranks | None = None, progress: Progress | None = None,
            tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:  # fmt: skip
        """Write it; returns the manifest. A run that dies is gone on with by the same call, unless `resume` is False.

        Several processes do it together if each calls this with its own `ranks`; all return when the checkpoint is in place. `tell` gets
        what people should know though nothing failed.
        """
        budget = hf.parse_size(max_memory) if isinstance(max_memory, str) else max_memory
        stamps = self._stamps()
        key = hashlib.sha256(f"{self.digest} {checksum} {stamps}".encode()).hexdigest()

        def move(session: Session) -> list[str]:
            from mckpt.execute import Output, Overflow, execute

            try:
                return execute(
                    self.joined.copies, self.joined.casts, self.source.layout.files, [Output(*o) for o in self.outputs], session.staging / "data",
                    max_memory=budget, threads=threads, checksum=checksum, allow_overflow=allow_overflow, grids=self.joined.grids,
                    session=session, progress=progress,
                )  # fmt: skip
            except Overflow as e:
                raise UsageError(f"{self.joined.name(e.tensor)}: {e.where}") from e

        session = Session(self.destination.staging_directory(key), ranks or Ranks(), tell)
        if session.ranks.rank:
            return self._help(session, move)
        if session.ranks.size == 1:  # before anything is made
            dropped = self._look_through(check_replicas)
        with self.destination.staging(key, resume, session.ranks.name) as staging, session:
            session.open()
            if session.ranks.size > 1:  # the others are told of what is found
                dropped = self._look_through(check_replicas)
            sums = move(session)
            if self._stamps() != stamps:
                raise SourceError(f"{self.source.path}: was changed while it was read; run the command again when nothing writes there")
            files = {o.path: {"bytes": o.size, "checksum": s} for o, s in zip(self.outputs, sums, strict=True)}
            manifest = {**self.facts, "plan": self.digest, "dropped": dropped, "files": files}
            (staging / "data" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            self.destination.publish(staging, self.side)
        return manifest

    def _look_through(self, check_replicas: bool) -> list[str]:
        """What is dropped, in words. SourceError if copies of one tensor differ."""
        reader = self.source.reader
        if (check_replicas or self.source.format == "hf") and (apart := reader.check_replicas()):
            raise SourceError.of(f"{self.source.path}: holds copies of one tensor that differ, and it is not known which is meant:", apart)
        return reader.padding()

    def _help(self, session: Session, move: Callable[[Session], list[str]]) -> dict[str, Any]:
        """What the other ranks do: their share, and wait for rank 0 to publish."""

        def finished(late: bool) -> bool:
            """Whether what this plan writes is in place, and the run is over.

            With --overwrite an earlier run may have put it there, and nothing in it tells: this rank would go home, and rank 0, who is about to
            replace it, would lack it. So it stays for as long as rank 0 waits for a rank that does not come. Then either rank 0 is done, or it is
            so late that it finds this one missing, and does its share: the output is right in any order, and no wait is longer than that.
            """
            return (late or not self.destination.overwrite) and self.destination.manifest().get("plan") == self.digest

        try:
            with session:
                session.join(finished, lambda: self.destination.refuse(session.staging, session.ranks.name))
                move(session)
                session.listen()
        except (StorageError, OSError):  # as Gone, or as whatever a file that went away led to
            if session.staging.exists() or (manifest := self.destination.manifest()).get("plan") != self.digest:
                raise
            return manifest

    def _stamps(self) -> list[int]:
        """When the sources were last changed: a resumed run must not mix two states of them."""
        return [Path(f).stat().st_mtime_ns for f in [*self.source.layout.files, *map(str, self.copied)]]


def _short(ignored: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Ignored keys, those of one reason counted."""
    by_reason: dict[str, list[str]] = {}
    for key, why in ignored.items():
        by_reason.setdefault(why, []).append(key)
    for why, keys in by_reason.items():
        yield (keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more"), why


def plan(src: str | Path | Checkpoint, dst: str | Path, *, overwrite: bool = False, update_tracker: bool = False, known: Known | None = None,
         target: Target | None = None, helps: bool = False, **wanted: Any) -> Plan:  # fmt: skip
    """The proven plan that brings `src` to `dst`. Keywords are those of `Target` (format, parallel, dtype ...) unless `target` is given.

    With `helps`, that of a rank other than 0: what stands at `dst` is rank 0's to judge.
    """
    source = src if isinstance(src, Checkpoint) else Checkpoint(src, known)
    target = target or Target(**wanted)
    if target.format not in FORMATS:
        raise UsageError(f"no format {target.format!r}; known: {', '.join(FORMATS)}")
    if target.format == "hf" and source.format == "hf" and not source.quantised:
        raise UsageError(f"{source.path}: is a Hugging Face directory already, and none of its tensors is quantised")
    destination = Destination(
        Path(dst), None if target.format == "hf" else _unit(source, target), source.root, overwrite=overwrite, update_tracker=update_tracker, helps=helps
    )
    if target.dtype is not None:
        dtypes.parse(target.dtype)
    return (_plan_hf if target.format == "hf" else _plan_megatron)(source, destination, target)


def _unit(source: Checkpoint, target: Target) -> str:
    """The name that the checkpoint gets: the one asked for, else the source's, else that of its iteration."""
    if target.iteration is not None:
        return unit_name(target.iteration)
    if source.unit is not None and is_unit_name(source.unit.name):
        return source.unit.name
    iteration = source.stored.common.fields.get("iteration") if source.stored.common else None
    return unit_name(iteration if isinstance(iteration, int) and iteration > 0 else None)


def convert(src: str | Path, dst: str | Path, *, max_memory: int | str = "64MiB", threads: int = 0, checksum: str = "crc32",
            progress: Progress | None = None, **wanted: Any) -> dict[str, Any]:  # fmt: skip
    """`plan(...)`, then `run`; returns the manifest."""
    return plan(src, dst, **wanted).run(max_memory=max_memory, threads=threads, checksum=checksum, progress=progress)


def diff(a: str | Path | Checkpoint, b: str | Path | Checkpoint, *, atol: float | None = None, known: Known | None = None,
         progress: Progress | None = None) -> comparison.Difference:  # fmt: skip
    """Compare two checkpoints of any formats tensor by tensor; see `comparison.diff`."""
    if atol is not None and not 0 <= atol < math.inf:
        raise UsageError(f"atol {atol} is no largest difference: say a number from 0 on")
    left, right = (x if isinstance(x, Checkpoint) else Checkpoint(x, known) for x in (a, b))
    left, right = left.named_as(right), right.named_as(left)
    found = comparison.diff(left, right, atol, progress)
    found.replicas = comparison.copies_apart((left, right))
    return found


def launch(source: Checkpoint) -> megatron_args.Launch:
    """The flags of pretrain_gpt.py for any checkpoint: from its dims, and from its own args where it has them."""
    dialect = mapping.load("megatron", DIALECT)
    own = {k: v for k, v in (source.args or {}).items() if v is not None}
    try:
        rows = source.stored.padded_vocab(dialect, source.parallel) if not isinstance(source.stored, hf.Checkpoint) else None
        given = {**GIVEN, "dtype": most_dtype(source), "padded_vocab_size": rows or _padded(source.dims, Target())}
        return megatron_args.launch(dialect, {**dialect.write(source.dims, given), **source.parallel.args(), **own})
    except VocabSizeUnknown:
        return megatron_args.launch(dialect, own)


def _kinds(source: Checkpoint, target: Target) -> tuple[dict[str, str], str]:
    """The dtype of each logical tensor in the target, and the dtype of most bytes."""
    if target.dtype is not None:
        wanted = dtypes.parse(target.dtype)
        held = {s.dtype for s in source.layout.stored}
        strange = sorted(d for d in held if d not in WEIGHT_DTYPES)
        if strange:
            raise UsageError(f"--dtype {target.dtype}: the source holds {', '.join(strange)}, which is not cast")
        return dict.fromkeys(source.layout.shapes, wanted), wanted
    kinds = dtypes_of(source.layout)
    weight: dict[str, int] = {}
    for s in source.layout.stored:
        weight[s.dtype] = weight.get(s.dtype, 0) + s.numel * len(s) * dtypes.itemsize(s.dtype)
    return kinds, max(weight, key=lambda d: weight[d])


def most_dtype(source: Checkpoint) -> str:
    """The dtype of most of a checkpoint's bytes."""
    return _kinds(source, Target())[1]


def _refuse_inexact(found: Mapping[str, str], target: Target, where: str) -> dict[str, str]:
    refused = {k: v for k, v in found.items() if k not in target.allow_inexact}
    if refused:
        raise MappingError.of(
            f"{where} would not compute what the source does:",
            [v if k == "config" else f"{k}: {v}" for k, v in refused.items()],
            "If you know that it does not matter, say " + " ".join(f"--allow-inexact {k}" for k in refused),
        )
    return dict(found)


def _refuse_misfit(source: Checkpoint, family: str, target: MappingFile, name: str, dims: Dims, **chosen: Any) -> None:
    """MappingError if the source's mapping and the target's do not name the same logical tensors."""
    wanted = {n for b in target.bind(target.scope(dims, **chosen)) for n in b.rule.of}
    if found := mapping.misfits(family, set(source.layout.shapes), name, wanted, dims):
        cure = "Add what is missing to the family file; `mckpt mappings check FILE --config CONFIG.JSON` says what is left."
        raise MappingError.of(f"{source.path}: {family} and {name} do not have the same tensors:", found, cure)


def _kept_mapping(source: Checkpoint) -> tuple[str, bytes] | None:
    """The user's own family file as it is kept beside a converted model: its name and content."""
    name = source.naming.mapping
    return None if name is None else (Path(name).name, mapping.to_keep(name).encode())


def _naming(source: Checkpoint, side: Side) -> dict[str, Any]:
    """What the manifest says of the family that the user named; of a family file, if it is among the files of `side`."""
    kept = _kept_mapping(source)
    if kept is not None and MAPPING in dict(side):
        return {"mapping_file": {"name": kept[0], "digest": mapping.digest_of(kept[1].decode())}}
    return {"family": source.naming.family} if source.naming.family else {}


def _facts(
    source: Checkpoint, moved: Checkpoint, target: Target, file: MappingFile, inexact: Mapping[str, str], notes: list[str], **more: Any
) -> dict[str, Any]:
    """What decides the output: no time, no host, no path."""
    headers = hashlib.sha256()
    for s in moved.layout.stored:
        for a in (s.file, s.at, s.layer, s.expert, *([s.scales.grids] if s.scales else [])):
            headers.update(np.ascontiguousarray(a).tobytes())
        headers.update(f"{s.key} {s.stored_as} {s.shape}".encode())
    return {
        "mckpt": __version__,
        "source": {
            "format": source.format, "layout": headers.hexdigest(), "mapping": {"name": source.mapping.name, "digest": source.mapping.digest},
            "files": [{"name": Path(f).name, "bytes": os.stat(f).st_size} for f in moved.layout.files],
        },
        "mapping": {"name": file.name, "digest": file.digest, "logical": mapping.hub().digest},
        "dims": {k: list(v) if isinstance(v, tuple) else v for k, v in moved.dims.items() if k != "vocab_size"}
        | ({} if (true := _true_vocab(source)) is None else {"vocab_size": true}),
        "format": target.format,
        "dtype": target.dtype,
        "casts": [*source.casts, *([dtypes.parse(target.dtype)] if target.dtype else [])],
        "inexact": dict(inexact),
        "notes": [*source.notes, *notes],
        **more,
    }  # fmt: skip


def _plan_megatron(source: Checkpoint, destination: Destination, target: Target) -> Plan:
    dialect = mapping.load("megatron", DIALECT)
    parallel = target.parallel
    moved, padded = _vocabulary(source, target)  # what is moved: from Megatron to Megatron, the vocabulary's padding too
    _ = moved.layout  # what is damaged is said before what does not fit, and before dims of any size are computed with
    dims = moved.dims
    check_sizes(dims, parallel)
    megatron = dialect.version(target.megatron_version)
    chosen = {**_choices(moved, target), **dialect.choices_for(megatron)}
    program = {"megatron": megatron, "transformer_impl": chosen["transformer_impl"]}
    if refused := dialect.warnings({**dims, **program}, loads=False):
        raise MappingError.of(f"{source.path}: Megatron could not load what would be written:", list(refused.values()))
    inexact = source.allowed
    if isinstance(source.stored, hf.Checkpoint):
        inexact = dialect.inexact(dims, {**GIVEN, **program})
        inexact.update({k: f"config.json says {k} {mapping.lookup(source.stored.config, k)!r}, of which {source.mapping.path.name} knows nothing"
                        for k in source.mapping.unknown(source.stored.config) if k != hf.QUANTISED or source.stored.block is None})  # fmt: skip
        inexact = _refuse_inexact(inexact, target, "Megatron")
    left = source.left_behind()
    if left and not target.no_optimizer:
        raise UsageError(
            f"{source.path}: holds more than weights: {', '.join(left)}. Weights alone are moved; say --no-optimizer to leave the rest behind"
        )
    kinds, dtype = _kinds(moved, target)
    given = {**GIVEN, "dtype": dtype, "padded_vocab_size": padded, "divisible_by": target.divisible_by, "tp": parallel.tp, **chosen}
    written = {**dialect.write({**dims, "vocab_size": _true_vocab(source)}, given), **parallel.args()}
    own = source.args or {}
    said = dialect.say_choices({**written, **own})  # a dense model's args say nothing of its layers: they are alike
    fields = source.stored.common.fields if source.stored.common else {}
    if (fields.get("content_metadata") or {}).get("non_homogeneous_layers"):  # where Megatron-Core looks first (transformer_block.py)
        said["layers"] = "per_layer"
    implied = moved.chosen["layers"] if source.format == target.format else said.get("layers", "stacked")
    chosen["layers"] = target.layer_keys or implied
    iteration = 0 if destination.unit == "release" else int(str(destination.unit).removeprefix("iter_"))
    if source.args is None or source.stored.common is None:
        common = new_common(_python(written), iteration)
    else:
        kept = {k: written[k] for k in (*parallel.args(), "padded_vocab_size", "transformer_impl", "moe_grouped_gemm")}
        kept.update({k: written[k] for k in ("params_dtype", "bf16", "fp16")} if target.dtype is not None else {})
        kept.update({"no_save_optim": True, "no_save_rng": True} if left else {})
        if written["transformer_impl"] != own.get("transformer_impl", written["transformer_impl"]):
            kept.update({k: written[k] for k in FOLLOWS_IMPL})
        elif written["sequence_parallel"]:  # which experts need at tp > 1; the source run may have had tp 1
            kept["sequence_parallel"] = True
        common = {k: v for k, v in source.stored.common.changed(_python(kept)).items() if not (k in dialect.ignore or k in left)}
        common["iteration"] = iteration
        written = {**written, **{k: v for k, v in own.items() if v is not None}, **kept}
    if target.layer_keys is not None and target.format == "torch_dist":
        if target.layer_keys == "stacked" and dialect.say_choices({**written, **own}).get("layers") == "per_layer":
            raise UsageError("the layers differ, or moe_layer_freq is a list: Megatron asks for per-layer keys then")
        marked = {**common.get("content_metadata", {}), "non_homogeneous_layers": target.layer_keys == "per_layer"}
        common["content_metadata"] = marked
    line = megatron_args.launch(dialect, written)
    _refuse_misfit(moved, source.mapping.path.name, dialect, "Megatron", dims, **chosen)
    if target.format == "torch":
        layout, outputs = torch.lay_out(dialect, dims, kinds, parallel, chosen, padded, common)
    else:
        layout, outputs = torch_dist.lay_out(dialect, dims, kinds, parallel, chosen, padded, common, target.common_as_object)
    outputs += [TargetFile.whole(name, text.encode()) for name, text in megatron_args.files(line).items()]
    side = _side_of(source)
    destination.refuse_other_side(side)
    if not side and (destination.root / "hf" / CONFIG).is_file():
        _refuse_side_of_other(source, destination.root / "hf")
    facts = _facts(source, moved, target, dialect, inexact, _dequantised(moved), parallel=parallel.args(), choices=chosen, padded_vocab_size=padded,
                   unit=destination.unit, common=hashlib.sha256(safe_pickle.dumps(common)).hexdigest(), common_as_object=target.common_as_object,
                   args=line.flags, megatron_version=".".join(map(str, megatron)), **_naming(source, side))  # fmt: skip
    return Plan(moved, destination, target, join(moved.layout, layout), layout, outputs, side, [], facts)


def _dequantised(source: Checkpoint) -> list[str]:
    """What of the source is quantised, for people."""
    num = sum(len(s) for s in source.layout.stored if s.scales)
    block = source.stored.block if isinstance(source.stored, hf.Checkpoint) else None
    if not num or block is None:
        return []
    return [f"{num:,} tensors are {quantisation.CODES} with a scale for each {block[0]} x {block[1]}, and are dequantised to {quantisation.VALUES}"]


def _vocabulary(source: Checkpoint, target: Target) -> tuple[Checkpoint, int]:
    """What is moved, and the rows of the padded vocabulary that it gets.

    A Megatron checkpoint keeps its padding, values included, where it divides by the target's tp: the softmax sees those rows. Else, and from
    Hugging Face, the true vocabulary is padded anew, as Megatron computes it (vocab_utils.py).
    """
    if source.format != "hf":
        whole = source.padded()
        if whole is not None and whole.dims["vocab_size"] % target.parallel.tp == 0:
            return whole, whole.dims["vocab_size"]
        try:
            _ = source.dims
        except VocabSizeUnknown:
            rows = whole.dims["vocab_size"] if whole else 0
            raise UsageError(
                f"{source.path}: {rows} padded rows of the vocabulary do not divide by tp {target.parallel.tp}; say --vocab-size N"
            ) from None
    return source, _padded(source.dims, target)


def _padded(dims: Dims, target: Target) -> int:
    multiple = target.divisible_by * target.parallel.tp
    return -(-int(dims["vocab_size"]) // multiple) * multiple


def _true_vocab(source: Checkpoint) -> int | None:
    try:
        return int(source.dims["vocab_size"])
    except VocabSizeUnknown:
        return None


def check_sizes(dims: Dims, parallel: Parallel) -> None:
    """UsageError if Megatron could not launch the model at these sizes."""
    parallel.check(dims["num_experts"])
    parallel.stages(dims["num_layers"], dims["mtp_layers"])
    heads, groups = dims["num_heads"], dims["num_query_groups"]
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    cure = f"choose a tp of {', '.join(map(str, fit))}"
    if heads % parallel.tp:
        raise UsageError(f"{heads} attention heads do not divide by tp {parallel.tp}; {cure}")
    if groups % parallel.tp and parallel.tp % groups:
        raise UsageError(f"{groups} query groups (k and v heads) neither divide by tp {parallel.tp} nor divide it; {cure}")


def _choices(source: Checkpoint, target: Target) -> dict[str, Any]:
    """The dialect's choices for the target: what is asked for, else what the source does, else Megatron's defaults."""
    impl = target.transformer_impl or source.chosen.get("transformer_impl") or "transformer_engine"
    if target.grouped_experts is not None:
        grouped = target.grouped_experts
        if grouped and impl == "local":
            raise UsageError("grouped experts need --transformer-impl transformer_engine: the local spec names no tensors for them")
    elif target.transformer_impl is None and source.chosen:
        grouped = source.chosen["experts"] == "grouped"
    else:
        grouped = impl == "transformer_engine"
    return {
        "container": target.format,
        "transformer_impl": impl,
        "experts": "grouped" if grouped else "sequential",
        "pp": target.parallel.pp,
    }


def _refuse_side_of_other(source: Checkpoint, side: Path) -> None:
    """DestinationError if a DST/hf that is there describes another model: it would be read as this one's."""
    config = hf.read_config(side)
    try:
        dims = source.dims
    except VocabSizeUnknown:
        return
    try:
        named = Known(mapping=str(side / MAPPING)) if (side / MAPPING).is_file() else source.naming
        family_of(config, named, str(side / CONFIG)).read(config, dims, str(side / CONFIG))
    except MappingError as e:
        raise DestinationError(f"{side}: describes another model; all checkpoints of one save directory share its hf. {e}") from None


def _python(args: dict[str, Any]) -> dict[str, Any]:
    """Args with dtypes as torch's own objects, the way Megatron keeps them."""
    return {
        k: safe_pickle.torch_dtype(v.removeprefix("torch.")) if isinstance(v, str) and v.startswith("torch.") else v
        for k, v in args.items()
    }


def _side_of(source: Checkpoint) -> Side:
    """The Hugging Face files beside the weights, to be kept in DST/hf; config.json as the user's word corrects it, and the user's family file."""
    root = source.path if source.format == "hf" else source.side_directory
    if root is None:
        return []
    side: dict[str, Path | bytes] = {name: root / name for name in [CONFIG, *hf.side_files(root)]}
    if source.overruled:
        config = source.mapping.restate(hf.read_config(root), source.dims, source.overruled)
        side[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    if (kept := _kept_mapping(source)) is not None:
        side[MAPPING] = kept[1]
    return list(side.items())


def _plan_hf(source: Checkpoint, destination: Destination, target: Target) -> Plan:
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
        family, note = _choose_family(source)
        notes.append(note)
    inexact = _refuse_inexact(family.inexact(dims), target, f"family {family.name}")
    if described is None and not source.manifest:  # trained, not converted: what the trainer computed is not what its args say
        said = {k: why for k, why in source.mapping.warnings(dims).items() if k not in source.known.dims}
        inexact = inexact | _refuse_inexact(said, target, "config.json")
    kinds, dtype = _kinds(source, target)
    if base is None:
        config = {"architectures": [family.architectures[0]], **family.write(dims), "torch_dtype": dtype}
        text = (json.dumps(config, indent=2) + "\n").encode()
    else:
        key = "dtype" if "dtype" in base else "torch_dtype"
        assert described is not None
        changed = {**base, **({} if base.get(key) is None else {key: dtype}), "vocab_size": dims["vocab_size"]}
        if changed.pop(hf.QUANTISED, None):
            notes.append(f"config.json is written without its {hf.QUANTISED}: no tensor is quantised any more")
        text = read_file(described / CONFIG) if changed == hf.read_config(described) else (json.dumps(changed, indent=2) + "\n").encode()
    _refuse_misfit(source, source.mapping.path.name, family, family.path.name, dims)
    layout, outputs = hf.lay_out(family, dims, kinds, target.max_shard_size)
    kept = _kept_mapping(source)
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
    facts = _facts(source, source, target, family, inexact, notes, max_shard_size=target.max_shard_size, config=hashlib.sha256(text).hexdigest(),
                   side=[[o.path, o.size] for o in outputs], **_naming(source, side))  # fmt: skip
    return Plan(source, destination, target, join(source.layout, layout), layout, outputs, [], copied, facts)


def _denied(source: Checkpoint, family: MappingFile, config: dict[str, Any]) -> list[str]:
    """The dims of a config.json that the user's word denies; the vocabulary's size is written in any case."""
    said = [name for name in source.known.dims if name != "vocab_size"]
    try:
        plain = family.read(config) if said else {}
    except MappingError:  # it lacks something that the user says
        return said
    return [name for name in said if not mapping.equal(plain[name], source.dims[name])]


def _choose_family(source: Checkpoint) -> tuple[MappingFile, str]:
    """The one family that says these dims; the canonical one where several do. UsageError names the candidates."""
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
            f", which computes the same as {', '.join(others)}" if others else ", the only one that fits the args"
        )
    if best:
        raise UsageError(f"{source.path}: several families compute this: say --family with one of {', '.join(f.name for f in best)}")
    raise MappingError.of(
        f"{source.path}: no family computes what its args describe:", reasons, "say --like HF_DIR, or --mapping FILE of your own family"
    )


__all__ = ["Checkpoint", "DestinationError", "Known", "Parallel", "Plan", "Target", "convert", "diff", "open", "plan"]
