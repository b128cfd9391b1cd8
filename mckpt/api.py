"""Joins mapping, formats and planning: open, plan, convert, diff. What `mckpt.` exports."""

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

from mckpt import __version__, comparison, dtypes, mapping, megatron_args
from mckpt.box import Layout, gaps
from mckpt.errors import DestinationError, MappingError, SourceError, UsageError
from mckpt.formats import hf, torch, torch_dist
from mckpt.formats.entry import TargetFile, dtypes_of, read_file
from mckpt.formats.save_directory import Unit, find, is_unit_name, new_common, unit_name
from mckpt.logical import LogicalTensor, Reader
from mckpt.mapping import Dims, MappingFile
from mckpt.parallel import Parallel
from mckpt.planning import Joined, join
from mckpt.publishing import CONFIG, MANIFEST, Destination

FORMATS = ("hf", "torch", "torch_dist")
DIALECT = "mcore"
RUN_CONFIG = "run_config.yaml"  # what Megatron-Bridge writes instead of args
DIVISIBLE_BY = 128  # Megatron's default of --make-vocab-size-divisible-by
Progress = Callable[[int, int], None]


# ---------------------------------------------------------------------------------------------------------------- opening


@dataclass(frozen=True)
class Known:
    """What the user says about a checkpoint that may not say it itself."""

    like: str | Path | None = None  # a Hugging Face directory whose config.json describes the model
    family: str | None = None
    mapping: str | None = None  # the user's own family file
    vocab_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # dim -> value
    iteration: int | None = None


class Checkpoint(Mapping[str, LogicalTensor]):
    """A checkpoint of any format as its logical tensors: `ckpt["layers.3.attn.q.weight"][:8].numpy()` reads those rows and nothing else."""

    def __init__(self, path: str | Path, known: Known | None = None) -> None:
        self.path, self.known = Path(path), known or Known()
        # take the padded vocabulary for the true one where nothing says it: of no matter from Megatron to Megatron
        self.keep_padded, self.took_padded = False, False
        if not self.path.exists():
            raise SourceError(f"{self.path}: does not exist")
        if not self.path.is_dir():
            raise SourceError(f"{self.path}: is a file; the directory of a checkpoint is wanted")
        self.stored = self._open()

    def _open(self) -> hf.Checkpoint | torch.Checkpoint | torch_dist.Checkpoint:
        self.unit: Unit | None = None
        if hf.detect(self.path):
            if self.known.iteration is not None:
                raise UsageError(f"{self.path}: is a Hugging Face directory, which has no iterations; --iteration has no meaning there")
            return hf.Checkpoint(self.path)
        unit = find(self.path, self.known.iteration)
        assert unit is not None
        self.unit = unit
        if torch_dist.detect(unit.path):
            return torch_dist.Checkpoint(unit.path)
        if torch.detect(unit.path):
            return torch.Checkpoint(unit.path)
        raise SourceError(
            f"{unit.path}: no checkpoint that mckpt knows: neither safetensors or pytorch_model*.bin, nor mp_rank_*, nor .metadata with metadata.json"
        )

    @property
    def format(self) -> str:
        return self.stored.format

    @cached_property
    def side_directory(self) -> Path | None:
        """Where a Megatron save directory keeps the Hugging Face files of its model, if it does."""
        if self.unit is None:
            return None
        side = self.unit.root / "hf"
        return side if is_unit_name(self.unit.name) and (side / CONFIG).is_file() else None

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """mckpt.json, if mckpt wrote this checkpoint."""
        path = (self.unit.path if self.unit else self.path) / MANIFEST
        if not path.exists():
            return {}
        try:
            found = json.loads(read_file(path, 1 << 28))
        except ValueError as e:
            raise SourceError(f"{path}: no JSON: {e}") from None
        return found if isinstance(found, dict) else {}

    @cached_property
    def mapping(self) -> MappingFile:
        """The family (hf) or dialect (Megatron) whose names its keys are."""
        if isinstance(self.stored, hf.Checkpoint):
            return _family(self.stored.config, self.known, str(self.path / CONFIG))
        return mapping.load("megatron", DIALECT)

    @cached_property
    def dims(self) -> Dims:
        """Sizes and hyperparameters, from every source that says them; sources that disagree are an error."""
        known: dict[str, Any] = dict(self.known.settings)
        if self.known.vocab_size is not None:
            known["vocab_size"] = self.known.vocab_size
        if isinstance(self.stored, hf.Checkpoint):
            return self.mapping.read(self.stored.config, known, str(self.path / CONFIG))
        described = self.described_by
        if described is not None:
            config = hf.read_config(described)
            known = _family(config, self.known, str(described / CONFIG)).read(config, known, str(described / CONFIG))
        recorded = self.manifest.get("dims")
        if isinstance(recorded, dict):
            known = {**recorded, **known}
        args = self.stored.common.args
        bridge = self.stored.root / RUN_CONFIG
        if args is None and bridge.exists():
            return mapping.load("megatron", "bridge").read(_run_config(bridge), known, str(bridge))
        if args is None:
            missing = [n for n in mapping.hub().dims if n not in known and mapping.hub().dims[n].neutral is None]
            if missing:
                raise UsageError(
                    f"{self.stored.root}: has no args, so nothing says its {', '.join(missing)}; give --like HF_DIR, a directory whose config.json does"
                )
            return self.mapping.read(self.mapping.write(known, GIVEN), known, "the given dims")
        if args.get("vocab_size") is None and "vocab_size" not in known:
            padded = args.get("padded_vocab_size")
            if self.keep_padded and padded:
                self.took_padded = True
                return self.mapping.read(args, {**known, "vocab_size": padded}, f"args of {self.stored.root}")
            raise UsageError(
                f"{self.stored.root}: its args say no true vocab_size" + (f", only the padded {padded}" if padded else "")
                + "; say --vocab-size N (the tokenizer may be shorter than the model's), or --like HF_DIR"
            )  # fmt: skip
        return self.mapping.read(args, known, f"args of {self.stored.root}")

    @property
    def described_by(self) -> Path | None:
        """The Hugging Face directory that describes the model of a Megatron checkpoint: --like, else DST/hf."""
        return Path(self.known.like) if self.known.like else self.side_directory

    @cached_property
    def parallel(self) -> Parallel:
        """The sizes it was saved with."""
        return Parallel() if isinstance(self.stored, hf.Checkpoint) else self.stored.parallel()

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """The dialect's choices as this checkpoint made them."""
        if isinstance(self.stored, hf.Checkpoint):
            return {}
        self._check_layers()
        return self.stored.choices(self.mapping, self.dims, self.parallel)

    @cached_property
    def layout(self) -> Layout:
        """What is stored where."""
        if isinstance(self.stored, hf.Checkpoint):
            self._check_layers()
            return self.stored.layout(self.mapping, self.dims)
        return self.stored.layout(self.mapping, self.dims, self.parallel, self.chosen)

    def _check_layers(self) -> None:
        """SourceError if its layers cannot be those of the tensors there are, before each rule is bound to a million of them."""
        said, most = self.dims["num_layers"], self.stored.most_layers()
        if said > most:
            raise SourceError(f"{self.path}: {said:,} layers are said, and there are tensors for {most:,} at most")
        if self.format == "torch":
            try:
                self.parallel.check(self.dims["num_experts"])
                self.parallel.stages(said)
            except UsageError as e:
                raise SourceError(f"{self.path}: its sizes ({self.parallel}) do not fit its model: {e}") from None

    def left_behind(self) -> list[str]:
        """What it holds that is no weight: optimizer, random states, schedules."""
        if isinstance(self.stored, hf.Checkpoint):
            return []
        return self.stored.beside(self.mapping) if isinstance(self.stored, torch_dist.Checkpoint) else self.stored.beside()

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.layout)

    def __getitem__(self, name: str) -> LogicalTensor:
        return self._reader[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader)

    def __len__(self) -> int:
        return len(self._reader)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "known": self.known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["known"])  # type: ignore[misc]


def open(path: str | Path, **known: Any) -> Checkpoint:
    """Open a checkpoint of any format. Keywords are those of `Known`: like, family, vocab_size, iteration, settings."""
    return Checkpoint(path, Known(**known))


def _run_config(path: Path) -> dict[str, Any]:
    """The model section of a run_config.yaml; its tags of Python objects are read as plain values."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else getattr(node, "value", None)

    Loader.add_multi_constructor("", plain)
    try:
        found = yaml.load(read_file(path, 1 << 24), Loader)  # a SafeLoader: nothing is imported
    except yaml.YAMLError as e:
        raise SourceError(f"{path}: no YAML: {e}") from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, dict):
        raise SourceError(f"{path}: has no `model` section")
    return model


def _family(config: Mapping[str, Any], known: Known, where: str) -> MappingFile:
    if known.mapping:
        return mapping.load("hf", known.mapping)
    if known.family:
        return mapping.load("hf", known.family)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise MappingError(f"{where}: names no architectures; say --family with one of {', '.join(mapping.names('hf'))}")
    try:
        return mapping.load("hf", mapping.family_of(str(architectures[0])))
    except MappingError as e:
        raise MappingError(f"{where}: {e}") from None


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
    common_as_object: bool = False
    iteration: int | None = None
    allow_inexact: Sequence[str] = ()
    no_optimizer: bool = False
    tokenizer: str | Path | None = None
    max_shard_size: int = 5 * 10**9
    keep_padding: bool = False


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
    side: list[tuple[str, Path]]  # files of DST/hf, and where they are now
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
            f"{s['format']} {s['path']} ({s['mapping']}, {s['parallel']}): {s['tensors']:,} logical tensors in {s['files']:,} files",
            f"  -> {t['format']} {t['path']} ({t['mapping']}, {t['parallel']}): "
            f"{t['tensors']:,} stored tensors, {len(t['files']):,} files, {t['bytes']:,} bytes",
            f"{p['copies']:,} copies; every element of the target is written once, every element of the source is used or named here",
        ]
        lines += [f"cast {k}: {n:,} elements" for k, n in p["casts"].items()]
        lines += [f"padding of the vocabulary: {p['padding_bytes']:,} bytes of zeros"] * bool(p["padding_bytes"])
        lines += [f"ignored: {k} ({why})" for k, why in p["ignored"].items()]
        lines += [f"left behind: {', '.join(p['left_behind'])}"] * bool(p["left_behind"])
        lines += [f"inexact: {text}" for text in p["inexact"].values()]
        return "\n".join(lines + p["notes"])

    def run(self, *, max_memory: int | str = "64MiB", threads: int = 0, checksum: str = "crc32", allow_overflow: bool = False, resume: bool = True,
            check_replicas: bool = False, progress: Progress | None = None) -> dict[str, Any]:  # fmt: skip
        """Write it; returns the manifest. A run that dies is gone on with by the same call, unless `resume` is False."""
        from mckpt.execute import Output, Overflow, execute

        budget = hf.parse_size(max_memory) if isinstance(max_memory, str) else max_memory
        stamps = self._stamps()
        key = hashlib.sha256(f"{self.digest} {checksum} {stamps}".encode()).hexdigest()
        reader = Reader(self.source.layout)
        if (check_replicas or self.source.format == "hf") and (apart := reader.check_replicas()):
            raise SourceError.of(f"{self.source.path}: holds copies of one tensor that differ, and it is not known which is meant:", apart)
        dropped = reader.padding() if self.target.format == "hf" else []
        with self.destination.staging(key, resume) as staging:
            try:
                sums = execute(
                    self.joined.copies, self.joined.casts, self.source.layout.files, [Output(*o) for o in self.outputs], staging / "data",
                    max_memory=budget, threads=threads, checksum=checksum, allow_overflow=allow_overflow, progress=progress,
                )  # fmt: skip
            except Overflow as e:
                raise UsageError(f"{self.joined.name(e.tensor)}: {e.where}") from e
            if self._stamps() != stamps:
                raise SourceError(f"{self.source.path}: was changed while it was read; run the command again when nothing writes there")
            files = {o.path: {"bytes": o.size, "checksum": s} for o, s in zip(self.outputs, sums, strict=True)}
            manifest = {**self.facts, "plan": self.digest, "dropped": dropped, "files": files}
            (staging / "data" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            self.destination.publish(staging, self.side)
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
         target: Target | None = None, **wanted: Any) -> Plan:  # fmt: skip
    """The proven plan that brings `src` to `dst`. Keywords are those of `Target` (format, parallel, dtype ...) unless `target` is given."""
    source = src if isinstance(src, Checkpoint) else Checkpoint(src, known)
    target = target or Target(**wanted)
    if target.format not in FORMATS:
        raise UsageError(f"no format {target.format!r}; known: {', '.join(FORMATS)}")
    name = None
    if target.format != "hf":
        iteration = target.iteration
        name = unit_name(iteration)
        if iteration is None and source.unit is not None and is_unit_name(source.unit.name):
            name = source.unit.name
    source.keep_padded = target.format != "hf"
    destination = Destination(Path(dst), name, source.unit.root if source.unit and is_unit_name(source.unit.name) else source.path,
                              overwrite=overwrite, update_tracker=update_tracker)  # fmt: skip
    if target.dtype is not None:
        dtypes.parse(target.dtype)
    _ = source.layout  # what is damaged is said before what does not fit, and before dims of any size are computed with
    return (_plan_hf if target.format == "hf" else _plan_megatron)(source, destination, target)


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
    return comparison.diff(left, right, atol, progress)


def given(source: Checkpoint) -> dict[str, Any]:
    """What the args of a checkpoint say beside its dims, by default."""
    return {**GIVEN, "dtype": _kinds(source, Target())[1], "padded_vocab_size": _padded(source, Target(), source.dims["vocab_size"])}


def _kinds(source: Checkpoint, target: Target) -> tuple[dict[str, str], str]:
    """The dtype of each logical tensor in the target, and the dtype of most bytes."""
    if target.dtype is not None:
        wanted = dtypes.parse(target.dtype)
        held = {s.dtype for s in source.layout.stored}
        strange = sorted(d for d in held if d not in ("float64", "float32", "float16", "bfloat16"))
        if strange:
            raise UsageError(f"--dtype {target.dtype}: the source holds {', '.join(strange)}, which is not cast")
        return dict.fromkeys(source.layout.shapes, wanted), wanted
    kinds = dtypes_of(source.layout)
    weight: dict[str, int] = {}
    for s in source.layout.stored:
        weight[s.dtype] = weight.get(s.dtype, 0) + s.numel * len(s) * dtypes.itemsize(s.dtype)
    return kinds, max(weight, key=lambda d: weight[d])


def _refuse_inexact(found: Mapping[str, str], target: Target, where: str) -> dict[str, str]:
    refused = {k: v for k, v in found.items() if k not in target.allow_inexact}
    if refused:
        raise MappingError.of(
            f"{where} would not compute what the source does:",
            [v if k == "config" else f"{k}: {v}" for k, v in refused.items()],
            "If you know that it does not matter, say " + " ".join(f"--allow-inexact {k}" for k in refused),
        )
    return dict(found)


def _facts(
    source: Checkpoint, target: Target, file: MappingFile, inexact: Mapping[str, str], notes: list[str], **more: Any
) -> dict[str, Any]:
    """What decides the output: no time, no host, no path."""
    headers = hashlib.sha256()
    for s in source.layout.stored:
        for a in (s.file, s.at, s.layer, s.expert):
            headers.update(np.ascontiguousarray(a).tobytes())
        headers.update(f"{s.key} {s.dtype} {s.shape}".encode())
    return {
        "mckpt": __version__,
        "source": {
            "format": source.format, "layout": headers.hexdigest(), "mapping": {"name": source.mapping.name, "digest": source.mapping.digest},
            "files": [{"name": Path(f).name, "bytes": os.stat(f).st_size} for f in source.layout.files],
        },
        "mapping": {"name": file.name, "digest": file.digest, "logical": mapping.hub().digest},
        "dims": {k: list(v) if isinstance(v, tuple) else v for k, v in source.dims.items()},
        "format": target.format,
        "dtype": target.dtype,
        "inexact": dict(inexact),
        "notes": notes,
        **more,
    }  # fmt: skip


def _plan_megatron(source: Checkpoint, destination: Destination, target: Target) -> Plan:
    dialect = mapping.load("megatron", DIALECT)
    dims, parallel = source.dims, target.parallel
    parallel.check(dims["num_experts"])
    parallel.stages(dims["num_layers"])
    inexact: dict[str, str] = {}
    if isinstance(source.stored, hf.Checkpoint):
        inexact = dialect.inexact(dims, GIVEN)
        inexact.update({k: f"config.json says {k} {source.stored.config[k]!r}, of which {source.mapping.path.name} knows nothing"
                        for k in source.mapping.unknown(source.stored.config)})  # fmt: skip
        inexact = _refuse_inexact(inexact, target, "Megatron")
    left = source.left_behind()
    if left and not target.no_optimizer:
        raise UsageError(
            f"{source.path}: holds more than weights: {', '.join(left)}. Weights alone are moved; say --no-optimizer to leave the rest behind"
        )
    if dims["num_heads"] % parallel.tp:
        raise UsageError(f"{dims['num_heads']} attention heads do not divide by tp {parallel.tp}")
    if dims["num_query_groups"] % parallel.tp and parallel.tp % dims["num_query_groups"]:
        raise UsageError(f"{dims['num_query_groups']} query groups (k and v heads) neither divide by tp {parallel.tp} nor divide it")
    kinds, dtype = _kinds(source, target)
    impl = target.transformer_impl or source.chosen.get("transformer_impl") or "transformer_engine"
    grouped = target.grouped_experts
    if grouped is None:
        grouped = (
            source.chosen["experts"] == "grouped" if source.chosen and target.transformer_impl is None else impl == "transformer_engine"
        )
    if grouped and impl == "local" and target.grouped_experts:
        raise UsageError("grouped experts need --transformer-impl transformer_engine: the local spec names no tensors for them")
    chosen = {
        "container": target.format, "transformer_impl": impl, "experts": "grouped" if grouped else "sequential",
        "layers": "stacked" if not any(dims["moe_layers"]) or all(dims["moe_layers"]) else "per_layer", "pp": parallel.pp,
    }  # fmt: skip
    if source.format == "torch_dist" and target.format == "torch_dist":
        chosen["layers"] = source.chosen["layers"]
    padded = _padded(source, target, dims["vocab_size"])
    given = {**GIVEN, "dtype": dtype, "padded_vocab_size": padded, "transformer_impl": impl, "experts": chosen["experts"],
             "divisible_by": target.divisible_by, "container": target.format, "tp": parallel.tp}  # fmt: skip
    written = {**dialect.write(dims, given), **parallel.args()}
    args = _python(written)
    iteration = 0 if destination.unit == "release" else int(str(destination.unit).removeprefix("iter_"))
    if isinstance(source.stored, hf.Checkpoint) or source.stored.common.args is None:
        common = new_common(args, iteration)
    else:
        mine = source.stored.common
        kept = {
            **parallel.args(),
            "padded_vocab_size": padded,
            "transformer_impl": impl,
            "moe_grouped_gemm": written.get("moe_grouped_gemm"),
        }
        if left:
            kept.update(no_save_optim=True, no_save_rng=True)
        if target.dtype is not None:
            kept.update({k: args[k] for k in ("params_dtype", "bf16", "fp16")})
        common = {k: v for k, v in mine.changed(kept).items() if not (_beside(k, dialect) or k in left or k.startswith("model"))}
        common["iteration"] = iteration
        written = {**(mine.args or {}), **kept}
    said = megatron_args.flags(dialect, written)
    if target.format == "torch":
        layout, outputs = torch.lay_out(dialect, dims, kinds, parallel, chosen, padded, common)
    else:
        layout, outputs = torch_dist.lay_out(dialect, dims, kinds, parallel, chosen, padded, common, target.common_as_object)
    outputs.append(
        TargetFile.whole(megatron_args.SHELL, megatron_args.shell(said, "flags of pretrain_gpt.py for this checkpoint").encode())
    )
    outputs.append(TargetFile.whole(megatron_args.JSON, megatron_args.as_json(said).encode()))
    side = _side_of(source)
    destination.refuse_other_side(side)
    if not side and (destination.root / "hf" / CONFIG).is_file():
        _refuse_side_of_other(source, destination.root / "hf")
    facts = _facts(source, target, dialect, inexact, [], parallel=parallel.args(), choices=chosen, padded_vocab_size=padded,
                   unit=destination.unit, common_as_object=target.common_as_object, args=said)  # fmt: skip
    return Plan(source, destination, target, join(source.layout, layout), layout, outputs, side, [], facts)


def _refuse_side_of_other(source: Checkpoint, side: Path) -> None:
    """DestinationError if a DST/hf that is there describes another model: it would be read as this one's."""
    config = hf.read_config(side)
    dims = {k: v for k, v in source.dims.items() if k != "vocab_size" or not source.took_padded}
    try:
        _family(config, Known(), str(side / CONFIG)).read(config, dims, str(side / CONFIG))
    except MappingError as e:
        raise DestinationError(f"{side}: describes another model; all checkpoints of one save directory share its hf. {e}") from None


def _beside(key: str, dialect: MappingFile) -> bool:
    return key in dialect.ignore or key == "lr_scheduler"


def _python(args: dict[str, Any]) -> dict[str, Any]:
    """Args with dtypes as torch's own objects, the way Megatron keeps them."""
    from mckpt import safe_pickle

    return {
        k: safe_pickle.torch_dtype(v.removeprefix("torch.")) if isinstance(v, str) and v.startswith("torch.") else v
        for k, v in args.items()
    }


def _padded(source: Checkpoint, target: Target, vocab_size: int) -> int:
    """Rows of the padded vocabulary: as Megatron computes it, or those of a Megatron source where they divide (vocab_utils.py)."""
    multiple = target.divisible_by * target.parallel.tp
    if source.unit is not None:
        args = {} if isinstance(source.stored, hf.Checkpoint) else source.stored.common.args or {}
        rows = args.get("padded_vocab_size") or _rows_held(source.layout)
        if rows and rows >= vocab_size and rows % target.parallel.tp == 0:
            return int(rows)
        if source.took_padded:
            raise UsageError(
                f"{source.path}: {rows} padded rows of the vocabulary do not divide by tp {target.parallel.tp}; say --vocab-size N"
            )
    return -(-vocab_size // multiple) * multiple


def _rows_held(layout: Layout) -> int:
    """Rows of the padded vocabulary, those of ranks that hold nothing else included; 0 where it is not stored by rows."""
    rows: dict[str, int] = {}
    for s in layout.stored:
        if s.padding and not s.replica and len(s.shape) == 2:
            rows[s.key] = rows.get(s.key, 0) + s.shape[0]
    return max(rows.values(), default=0)


def _side_of(source: Checkpoint) -> list[tuple[str, Path]]:
    """The Hugging Face files beside the weights, to be kept in DST/hf."""
    root = source.path if source.format == "hf" else source.side_directory
    if root is None:
        return []
    return [(name, root / name) for name in [CONFIG, *hf.side_files(root)]]


def _plan_hf(source: Checkpoint, destination: Destination, target: Target) -> Plan:
    if source.format == "hf":
        raise UsageError(f"{source.path}: is a Hugging Face directory already")
    if target.keep_padding:
        rows = _rows_held(source.layout) or source.dims["vocab_size"]
        source = Checkpoint(source.path, source.known)
        source.dims = {**source.dims, "vocab_size": rows}
    dims, notes = source.dims, []
    described = source.described_by
    if described is not None:
        base = hf.read_config(described)
        family = _family(base, source.known, str(described / CONFIG))
        notes.append(f"config.json is that of {described}")
    else:
        base = None
        family, note = _choose_family(source)
        notes.append(note)
    _refuse_inexact(family.inexact(dims), target, f"family {family.name}")
    kinds, dtype = _kinds(source, target)
    if base is None:
        config = {"architectures": [family.architectures[0]], **family.write(dims), "torch_dtype": dtype}
        text = (json.dumps(config, indent=2) + "\n").encode()
    else:
        key = "dtype" if "dtype" in base else "torch_dtype"
        assert described is not None
        changed = {**base, **({} if base.get(key) is None else {key: dtype}), "vocab_size": dims["vocab_size"]}
        text = read_file(described / CONFIG) if changed == base else (json.dumps(changed, indent=2) + "\n").encode()
    layout, outputs = hf.lay_out(family, dims, kinds, target.max_shard_size)
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
    facts = _facts(source, target, family, {}, notes[1:] if base is not None else notes, max_shard_size=target.max_shard_size,
                   side=[[o.path, o.size] for o in outputs])  # fmt: skip
    return Plan(source, destination, target, join(source.layout, layout), layout, outputs, [], copied, facts)


def _choose_family(source: Checkpoint) -> tuple[MappingFile, str]:
    """The one family that says these dims; the canonical one where several do. UsageError names the candidates."""
    if source.known.mapping or source.known.family:
        family = mapping.load("hf", source.known.mapping or source.known.family or "")
        return family, f"family {family.name}, as asked for"
    reasons, fit = [], []
    for name in mapping.names("hf"):
        family = mapping.load("hf", name)
        why = family.inexact(source.dims)
        if family.requires is not None and not family.requires(source.dims):
            why["requires"] = f"it is for models where {family.requires.text}"
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
