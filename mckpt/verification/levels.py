"""The verdict: do a Hugging Face and a Megatron checkpoint hold one model?

    bytes     Every logical tensor is the same to the last bit, or the exact cast that the manifest
              names, and the dims are the same. Works for any two formats and needs no torch.
    forward   All of `bytes`; and transformers and Megatron-Core compute the same logits, at every
              position of several sequences.
    train     All of `forward`; and a few training steps at two parallel layouts give the same
              losses.

This module starts the processes that a level needs; `verdict` judges their results.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mckpt import formats, launching
from mckpt.adapters import forms, merging, peft
from mckpt.adapters.checkpoint import AdapterCheckpoint, of_megatron
from mckpt.adapters.factors import AdapterNames
from mckpt.adapters.peft import PeftAdapter
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.files import open_files
from mckpt.conversion import planning
from mckpt.conversion.plan_data import most_dtype
from mckpt.conversion.refusals import refuse_sizes
from mckpt.errors import MckptError, StorageError, UsageError
from mckpt.formats.foreign import has_adapter
from mckpt.formats.hf_config import read_config
from mckpt.geometry.parallel import Parallel
from mckpt.keywords import VerifyKeywords, keywords
from mckpt.options import SIZES, SourceOptions, TargetOptions, VerifyOptions
from mckpt.storage import sparse_copy
from mckpt.verification import verdict
from mckpt.verification.pair import Pair, Values, run_sizes, say_sizes
from mckpt.verification.requirements import (
    differing_dims,
    dims_apart,
    model_args,
    model_notes,
    mrope_of,
    refuse_without_images,
    require_core,
    unlike_dims,
)
from mckpt.verification.tokens import random_sequences, read_tokens, text_for
from mckpt.verification.verdict import Verdict, casts_between, compare_values, uncast

if TYPE_CHECKING:
    from typing_extensions import Unpack

RUN_SIZES, SPLIT = SIZES[:5], SIZES[5:]


@keywords(VerifyKeywords, VerifyOptions)
def verify(hf: str | Path, megatron: str | Path, **options: Unpack[VerifyKeywords]) -> Verdict:
    """Returns whether a Hugging Face directory and a Megatron checkpoint hold the same model.

    level: "bytes" compares all stored values and hyperparameters of any two checkpoints. "forward"
        also runs transformers and Megatron-Core on the same tokens and compares their logits.
        "train" also trains a few `steps` at two parallel layouts and compares the losses.
    tp, pp, vpp, ep, etp: sizes of the run; None means those of the checkpoint for `torch` files,
        else 1. cp: context-parallel size.
    adapter: a directory of PEFT. The checkpoint must have the weights of `hf` with this adapter
        merged, or this adapter beside its weights, or must be this adapter alone, as
        Megatron-Bridge saves it. transformers also runs with the adapter beside the weights, and so
        does Megatron-Core if the checkpoint has adapters.
    alpha: that of a checkpoint of adapters alone that does not state it.
    image: of a model that reads images: also runs an image of noise.
    sequences, length: number of random sequences, and tokens in each. tokens: a file of more.
    keep: a directory for the arrays of both sides, which are removed otherwise.
    timeout_s: seconds that one collective may take.
    tell: called with each phase when it starts.

    Raises MissingExtra without torch, transformers and Megatron-Core, which "bytes" does not need.
    """
    return verify_all(hf, [megatron], VerifyOptions.of(options))[0]


def verify_all(
    hf: str | Path, checkpoints: Sequence[str | Path], options: VerifyOptions
) -> list[Verdict]:
    """Returns the verdict on each Megatron checkpoint. The Hugging Face model runs once, and all
    checkpoints must run at the same sizes.
    """
    left = Checkpoint.open(
        hf,
        options.described.with_(iteration=None),
    )
    if not left.is_megatron and not (options.family or options.mapping) and checkpoints:
        left = left.named_as(
            Checkpoint.open(checkpoints[0], SourceOptions(iteration=options.iteration))
        )
        options = options.with_(mapping=left.files.options.mapping)
    if options.adapter is not None:
        left = merging.merge(left, peft.open_adapter(options.adapter))
    with ExitStack() as stack:
        beside = {str(path): _adapters(left, path, options, stack) for path in checkpoints}
        return _verify(left, beside, checkpoints, options)


def _adapters(
    left: Checkpoint, path: str | Path, options: VerifyOptions, stack: ExitStack
) -> _Adapters | None:
    """Returns the adapters in a Megatron checkpoint; None if it has none.

    stack: keeps the adapters as a directory of PEFT until it is closed.
    """
    if options.adapter is None:
        return None
    known = _known(left, options).with_(like=left.files.described_by)
    files = open_files(path, known)
    if not files.is_megatron or not has_adapter(files.opened.keys()):
        return None
    source, names = of_megatron(path, known, options.alpha)
    return _Adapters(source, names, stack.enter_context(forms.as_peft(source)))


class _Adapters(NamedTuple):
    """The adapters of a Megatron checkpoint."""

    source: AdapterCheckpoint
    names: AdapterNames
    peft: PeftAdapter  # the same adapters

    def weights(self, left: Checkpoint) -> Checkpoint:
        """Returns the weights beside the adapters; those of the base if there are none."""
        return self.source.base or replace(left, merging=None)

    def run(
        self, parallel: Parallel, work: Path, name: str, options: VerifyOptions
    ) -> dict[str, Any]:
        """Returns the adapter of a job of the trainer, which reads torch_dist.

        Writes the adapter again if its files do not fit the sizes of the run.
        """
        directory = self.source.files.iteration_directory
        path = self.source.path if directory is None else directory.path
        alpha = self.source.scale * self.names.rank
        by_rank = self.names.has_rows_by_rank and self.names.parallel.tp != parallel.tp
        if by_rank or self.names.by_swift or self.source.opened.format.fixed_sizes:
            path = work / f"{name}.adapter"
            options.tell(f"writing the adapter for {parallel} into a temporary directory")
            target = TargetOptions(parallel=parallel, no_optimizer=True)
            how = "canonical" if self.names.canonical else "fused"
            form = partial(forms.form_adapters, how=how)
            plan = planning.make_plan(self.source, path, target, form)
            plan.run(checksum="none")
            alpha = plan.facts["adapter"]["alpha"]
        return {
            "path": str(path),
            "alpha": alpha,
            "names": dict(peft.rules()["megatron"]),
        }


def _verify(
    left: Checkpoint,
    beside: Mapping[str, _Adapters | None],
    checkpoints: Sequence[str | Path],
    options: VerifyOptions,
) -> list[Verdict]:
    """Returns the verdict on each checkpoint.

    beside: the adapters of each, None if it has none.
    """
    if options.level == "bytes":
        if options.image:
            raise UsageError("--level bytes runs no model: leave --image out or give another level")
        options.tell("comparing all stored values")
        return [
            _bytes(
                left,
                merging.merge(found.weights(left), found.peft)
                if (found := beside[str(path)])
                else Checkpoint.open(path, _known(left, options)),
            )
            for path in checkpoints
        ]
    if any(beside.values()):
        if not all(beside.values()):
            raise UsageError(
                "checkpoints that are verified together must all have adapters, or none"
            )
        if options.level == "train" or options.transformer_impl == "transformer_engine":
            raise UsageError(
                "a checkpoint with adapters runs at --level forward and with"
                " --transformer-impl local only"
            )
        options = options.with_(transformer_impl="local")
    if left.is_megatron:
        raise UsageError(
            f"{left.path}: is a Megatron checkpoint; give a Hugging Face directory as the first"
        )
    if not left.dims["causal"] or left.dims["encoder_layers"]:
        kind = "has" if left.dims["encoder_layers"] else "is"
        raise UsageError(
            f"{left.path}: {kind} an encoder, and verify runs decoders only. --level bytes compares"
            " all tensors and hyperparameters of both; docs/judges.md says with which tiny models"
            " of the family the tests of mckpt compare logits"
        )
    if options.image:
        refuse_without_images(left)
    sparse_copy.refuse(left.path, f"--level {options.level}")
    launching.require("torch", "transformers", "megatron", "psutil")
    if options.adapter is not None:
        launching.require("peft", extra="adapters")
    _ = left.layout  # damage is reported before any process starts
    work = Path(options.keep or tempfile.mkdtemp(prefix="mckpt-verify-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        subjects = [
            _Subject(left, path, options, f"checkpoint{index}", work, beside[str(path)])
            for index, path in enumerate(checkpoints)
        ]
        if any(
            (s.pair.sizes, s.dtype, s.casts)
            != (subjects[0].pair.sizes, subjects[0].dtype, subjects[0].casts)
            for s in subjects
        ):
            raise UsageError(
                "checkpoints that are verified together must be of one dtype, with the same casts"
                " in mckpt.json, and run at the same sizes"
            )
        options.tell("comparing all stored values, at the same time as the following")
        with _comparing(subjects) as values:
            return _run(subjects, values, work, options)
    finally:
        if options.keep is None:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _comparing(subjects: list[_Subject]) -> Iterator[list[Future[Values | str]]]:
    """Compares all stored values of each subject in threads of this process, while other processes
    compute.

    Ends the comparison early if the block fails.
    """
    stop = threading.Event()

    def compare(subject: _Subject) -> Values | str:
        pair = subject.pair
        try:
            return compare_values(pair.left, pair.right, stop)
        except MckptError as e:
            if isinstance(e, StorageError) or not (pair.apart or pair.unread):
                raise
            return f"so the tensors cannot be compared: {e}"

    with ThreadPoolExecutor(1, "values") as pool:
        try:
            yield [pool.submit(compare, subject) for subject in subjects]
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _run(
    subjects: list[_Subject],
    values: Sequence[Future[Values | str]],
    work: Path,
    options: VerifyOptions,
) -> list[Verdict]:
    """Runs the levels `forward` and `train`."""
    left, sizes = subjects[0].pair.left, subjects[0].pair.sizes
    num_ranks = launching.world({**sizes, "cp": 1})
    device = launching.device(options.device, launching.world(sizes))
    if options.level == "train":  # an error is raised before anything runs
        for subject in subjects:
            launching.device(options.device, launching.world(subject.other_sizes()))
    vocab_size = left.dims["vocab_size"]
    instead = text_for(left.mapping, read_config(left.path))
    sequences = [
        *read_tokens(options.tokens, vocab_size),
        *random_sequences(left.dims, options.sequences, options.length, instead),
    ]
    if left.opened.quantised or left.merging:
        copied = "dequantised copy" if left.opened.quantised else "copy with the merged weights"
        options.tell(f"writing a {copied} for transformers")
    reference: dict[str, Any] = {
        "hf": str(_as_transformers_reads_it(left, work)),
        "out": str(work),
        "dtype": subjects[0].dtype,
        "sequences": sequences,
        "vocab_size": vocab_size,
        "length": len(sequences[-1]),
        "instead": list(instead.items()),
        "casts": subjects[0].casts,
        "uncast": subjects[0].uncast,
        # without the layers of multi-token prediction, which neither model runs
        "parts": left.dims["layer_parts"][: left.dims["num_layers"]],
        "config": dict(left.mapping.verify),
        "carried": [],
        "image": options.image,
    }
    if left.merging is not None:
        base = _as_transformers_reads_it(replace(left, merging=None), work, "base")
        beside = any(subject.adapter for subject in subjects)
        given = {"adapter": str(left.merging.path), "base": str(base), "beside": beside}
        reference |= given | {"stored": most_dtype(left)}
    if left.mapping.head:  # transformers runs the causal language model around the same decoder
        reference["carried"] = list(left.mapping.form({}).carried)
        if left.dims["tied"]:
            reference["config"]["tie_word_embeddings"] = True
    options.tell(f"transformers computes the logits of {len(sequences)} sequences on {device}")
    launching.launch("mckpt.trainer.reference", reference, work, device)

    def run(suffix: str, sizes: dict[str, int]) -> None:
        jobs = [
            {
                "name": s.pair.name + suffix,
                "path": str(s.run_path),
                "args": s.given_args,
                "sizes": {**sizes, "vocab_size": vocab_size},
                "impl": options.transformer_impl,
                "casts": s.cast_back,
                "adapter": s.adapter,
                "prefix": s.prefix,
                "mrope": s.mrope,
            }
            for s in subjects
        ]
        job = {"out": str(work), "timeout_s": options.timeout_s, "checkpoints": jobs}
        options.tell(f"Megatron-Core computes them with {say_sizes(sizes)}")
        launching.launch("mckpt.trainer.worker", job, work, device, launching.world(sizes))

    try:
        run("", {**sizes, "cp": 1})
        # Context parallelism does not run in fp32, and only fp32 shows small faults. So the run at
        # cp 1 decides, and then the same is run again at the size that was asked for.
        if sizes["cp"] > 1:
            run(".cp", sizes)
    except MckptError as e:
        only = subjects[0].pair
        if len(subjects) > 1 or not (only.apart or only.unread):
            raise
        found = [verdict.does_not_load(only, e)]  # the args that differ explain the error
    else:
        options.tell("judging the logits and the stored values")
        found = [
            verdict.decide(subject.pair, one.result(), work, device, num_ranks)
            for subject, one in zip(subjects, values, strict=True)
        ]
    for subject, one in zip(subjects, found, strict=True):
        one.facts["level"] = options.level
        if subject.resharded:
            one.facts["resharded"] = (
                f"from {subject.pair.right.parallel}, into a temporary directory"
            )
        if options.level == "train" and one.verdict != "fail":
            _train(subject, one, work, options)
    return found


def _as_transformers_reads_it(left: Checkpoint, work: Path, name: str = "plain") -> Path:
    """Returns the directory; for a quantised one a dequantised copy, for names with wrappers a copy
    without them, and with an adapter a copy with the merged weights.

    transformers 5 runs 8 bits on few GPUs. Elsewhere it misreads blocks that do not divide a weight
    (integrations/finegrained_fp8.py).
    """
    if not (left.opened.quantised or left.opened.notes or left.merging):
        return left.path
    copy = work / name
    planning.make_plan(left, copy, TargetOptions(format=formats.HUGGING_FACE)).run(checksum="none")
    return copy


# -------------------------------------------------------------------------------------------- bytes


def _bytes(left: Checkpoint, right: Checkpoint) -> Verdict:
    """Runs the level `bytes`: compares the tensors, and the dims that both sides have."""
    facts: dict[str, Any] = {"level": "bytes", "hf": str(left.path), "megatron": str(right.path)}
    apart, unread = (
        differing_dims(left, right, window=True)
        if right.is_megatron and not left.is_megatron
        else (dims_apart(left, right), None)
    )
    facts["dims"] = apart
    reasons = [*map(verdict.say_dim, apart), *([unread] if unread else [])]
    try:
        values = compare_values(left, right)
    except MckptError as e:
        if not reasons:
            raise
        return Verdict("fail", [*reasons, f"so the tensors cannot be compared: {e}"], facts)
    reasons += values.reasons(left, right)
    missing = [*unlike_dims(left, right), *values.not_compared(left, right)]
    facts["notes"] = [*left.model.notes, *right.model.notes]
    return Verdict(
        "fail" if reasons else "incomplete" if missing else "pass",
        [*reasons, *missing],
        {**facts, "values": values.difference.json()},
    )


# ---------------------------------------------------------------------------- a Megatron checkpoint


class _Subject:
    """One Megatron checkpoint, the args that differ from the config, and the way to run it."""

    def __init__(
        self,
        left: Checkpoint,
        path: str | Path,
        options: VerifyOptions,
        name: str,
        work: Path,
        adapters: _Adapters | None,
    ) -> None:
        self.adapter: dict[str, Any] | None = None
        self.run_path = Path(path)
        if adapters is not None:
            wanted = Parallel().with_(**{k: getattr(options, k) for k in RUN_SIZES})
            self.adapter = adapters.run(wanted, work, name, options)
            weights = adapters.weights(left)
            options.tell(
                f"writing the weights of {weights.path} for Megatron-Core into a temporary"
                " directory"
            )
            self.run_path = work / f"{name}.base"
            target = TargetOptions(parallel=wanted, dialect=adapters.source.model.mapping.name)
            base = planning.make_plan(weights, self.run_path, target)
            base.run(checksum="none")
        right = Checkpoint.open(self.run_path, _known(left, options))
        if adapters is not None:
            right = merging.merge(right, adapters.peft)
        if not right.is_megatron:
            raise UsageError(
                f"{path}: is a Hugging Face directory; the second of the two is a Megatron"
                " checkpoint"
            )
        sparse_copy.refuse(right.path, f"--level {options.level}")
        apart, unread = differing_dims(left, right)
        self.given_args = _args_of(left, right) if model_args(right) is None else None
        whole = right.mapping.whole
        self.prefix = whole.text if whole else ""
        self.mrope = None
        if options.image:
            self.mrope, differing = mrope_of(left, right)
            apart += differing
        if not apart and not unread:
            _ = right.layout  # truncated, incomplete: SourceError
        args = self.given_args or right.args or {}
        self.dtype = str(args.get("params_dtype") or "torch.float32").removeprefix("torch.")
        self.casts = casts_between(left, right)
        self.uncast = _uncast_keys(left, right) if self.casts else []
        self.cast_back = [] if self.casts else casts_between(right, left)
        saved = right.parallel if right.opened.format.fixed_sizes else Parallel()
        wanted = saved.with_(**{k: getattr(options, k) for k in RUN_SIZES})
        directory = right.files.iteration_directory
        where = Path(path) if directory is None else directory.path
        self.pair = Pair(
            name,
            left,
            right,
            where,
            run_sizes(wanted, options.cp),
            apart,
            unread,
            [*left.model.notes, *right.model.notes, *model_notes(left, right), *self._cast_notes()],
            unlike_dims(left, right),
            _pipeline_split(right.parallel, wanted),
        )
        refuse_sizes(right.mapping, left.dims, wanted)
        _refuse_context_parallelism(path, self.dtype, options)
        self.run_path = where
        if adapters is not None:
            where = Path(path)
        self.resharded = right.opened.format.fixed_sizes and wanted != saved
        self.resharded |= not formats.FORMATS[right.format].loads_anywhere
        require_core(right, as_stored=not self.resharded)
        if self.resharded:
            self.run_path = work / f"{name}.resharded"
            options.tell(f"writing the weights for {wanted} into a temporary directory")
            reshard(right, self.run_path, wanted)

    def _cast_notes(self) -> list[str]:
        """Returns notes on the casts with which the two sides run."""
        sides = {"transformers": self.casts, "Megatron-Core": self.cast_back}
        return [
            f"{side} runs with its weights cast to {', then '.join(casts)}, as mckpt.json says"
            for side, casts in sides.items()
            if casts
        ]

    def other_sizes(self) -> dict[str, int]:
        """Returns the second layout of `train`."""
        return other_sizes(
            self.pair.sizes, self.pair.left.dims, self.given_args or self.pair.right.args or {}
        )


def _pipeline_split(saved: Parallel, wanted: Parallel) -> dict[str, Any]:
    """Returns the fields of `saved` that split its pipeline unevenly; none if the run has other
    stages.
    """
    if (saved.pp, saved.vpp) != (wanted.pp, wanted.vpp):
        return {}
    return {k: v for k in SPLIT if (v := getattr(saved, k))}


def _uncast_keys(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Returns the keys of the Hugging Face side that a cast of the whole model does not change."""
    always = uncast(right)
    pinned = (b for b in left.names.bound if all(name in always for name in b.rule.of))
    return list(itertools.chain(*(b.keys() for b in pinned)))


def _refuse_context_parallelism(path: str | Path, dtype: str, options: VerifyOptions) -> None:
    """Raises UsageError if --cp is given for a run in fp32."""
    if options.cp > 1 and (options.level == "train" or dtype == "float32"):
        run = "--level train compares in" if options.level == "train" else f"{path}: is"
        raise UsageError(
            f"{run} fp32, which Transformer Engine's context parallelism does not compute; leave"
            " --cp out"
        )


def reshard(
    source: Checkpoint, directory: Path, parallel: Parallel, text_only: bool = False
) -> None:
    """Writes the weights as torch_dist, which runs at any sizes. `torch` files run only at the
    sizes with which they were saved.

    text_only: of a whole model, writes the text model.
    """
    target = TargetOptions(
        parallel=parallel,
        no_optimizer=True,
        megatron_version=_version_for(source),
        towers="beside" if text_only else None,
    )
    planning.make_plan(source, directory, target).run(checksum="none")


def _version_for(source: Checkpoint) -> str:
    """Returns a version of megatron-core that loads the model: torch_dist is the same for all, some
    models need a new one, and the newest refuses others.
    """
    mapping, facts = source.mapping, {**source.dims, "transformer_impl": "transformer_engine"}
    oldest = {**facts, "megatron": mapping.version(mapping.megatron[0])}
    return mapping.megatron[bool(mapping.warnings(oldest, loads=False))]


def _known(left: Checkpoint, options: VerifyOptions) -> SourceOptions:
    """Returns the facts from the Hugging Face side that help to read the other."""
    return options.described.with_(like=None if left.is_megatron else left.path)


def _args_of(left: Checkpoint, right: Checkpoint) -> dict[str, Any]:
    """Returns the args that Megatron would have for the model of the config."""
    rows = right.opened.padded_vocab(right.mapping)
    given = {"dtype": most_dtype(left), "padded_vocab_size": rows or left.dims["vocab_size"]}
    return right.mapping.write(left.dims, given)


# -------------------------------------------------------------------------------------------- train


def _train(subject: _Subject, found: Verdict, work: Path, options: VerifyOptions) -> None:
    """Trains at the sizes asked for and at others, and adds to the verdict how the losses agree."""
    pair = subject.pair
    first = pair.sizes
    second = subject.other_sizes()
    path = work / f"{pair.name}.training"
    if pair.right.opened.format.fixed_sizes or subject.prefix:
        reshard(pair.right, path, Parallel(), text_only=bool(subject.prefix))
    else:
        path = subject.run_path
    dims = pair.left.dims
    multiple = math.lcm(first["tp"], second["tp"])
    length = (
        min(options.length, dims["max_positions"] or options.length, 256) // multiple * multiple
    )
    if length == 0:
        raise UsageError(
            f"--length {options.length} cannot be cut into {multiple} equal parts, as training at"
            f" {say_sizes(first)} and at {say_sizes(second)} asks"
        )
    curves = []
    for number, sizes in enumerate((first, second)):
        losses = work / f"{pair.name}.losses{number}.jsonl"
        job = {
            "checkpoint": str(path),
            "losses": str(losses),
            "steps": options.steps,
            "seq_length": length,
            "global_batch_size": 8,
            "dtype": "float32",
            "transformer_impl": options.transformer_impl,
            **sizes,
        }
        if subject.given_args:
            chosen = {"transformer_impl": options.transformer_impl}
            job["args"] = subject.given_args | chosen
        num_ranks = launching.world(sizes)
        options.tell(f"Megatron-Core trains {options.steps} steps with {say_sizes(sizes)}")
        launching.launch(
            "mckpt.trainer.train", job, work, launching.device(options.device, num_ranks), num_ranks
        )
        curves.append([json.loads(line) for line in losses.read_text().splitlines()])
    found.facts["training"] = verdict.decide_training(found, [first, second], curves)


def other_sizes(
    sizes: dict[str, int], dims: dict[str, Any], args: dict[str, Any]
) -> dict[str, int]:
    """Returns sizes as unlike these as the model allows, on as many ranks, but at least two."""
    num_ranks = max(2, launching.world(sizes))
    rows = args.get("padded_vocab_size") or dims["vocab_size"]
    divided = [dims[k] for k in ("num_heads", "num_query_groups", "ffn_size") if dims.get(k)]
    divided += [rows, *dims.get("ffn_sizes", ())]

    def fits(tp: int, pp: int, ep: int) -> bool:
        whole = all(d % tp == 0 for d in divided) and dims["num_layers"] % pp == 0
        return whole and (
            ep == 1 or (bool(dims.get("num_experts")) and dims["num_experts"] % ep == 0)
        )

    def unlike(new: dict[str, int]) -> int:
        return sum(new[k] != sizes[k] for k in ("tp", "pp", "ep"))

    found = []
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    for tp, pp, ep in itertools.product(divisors, repeat=3):
        new = {"tp": tp, "pp": pp, "vpp": 1, "ep": ep, "etp": 1 if ep > 1 else tp, "cp": 1}
        if fits(tp, pp, ep) and launching.world(new) == num_ranks and unlike(new):
            found.append(new)
    if not found:
        raise UsageError(
            f"the model allows no other sizes than {say_sizes(sizes)} on {num_ranks} ranks: give"
            " others, or --level forward"
        )
    return max(found, key=unlike)
