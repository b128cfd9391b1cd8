"""The verdict on an edited or merged checkpoint: does it keep the contract of its edits?

The manifest has the edits as data, or the coefficients or the method of a merge. They are done
again while the sources are read, and every value of the result is compared with DST: what is kept,
what is new, and the state of the optimizer. So a wrong row, a layer in another place and a moment
that was not moved are found to the last bit. Sums are computed by other code. For edits that keep
the logits, transformers also runs both models on the same tokens. For an edit of the
vocabulary these are kept ones, and so are the logits that are compared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import formats, launching
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion import planning
from mckpt.editing import methods, steps
from mckpt.editing.averaging import Averaging
from mckpt.editing.edits import EXACT, Edit, Editing
from mckpt.editing.vocabulary import Vocabulary
from mckpt.errors import UsageError
from mckpt.formats.hf_config import read_config
from mckpt.options import TargetOptions, VerifyOptions
from mckpt.verification import recomputing
from mckpt.verification.measuring import NOISE, ROUNDING, SHARE
from mckpt.verification.requirements import dims_apart
from mckpt.verification.tokens import random_sequences, read_tokens, text_for
from mckpt.verification.verdict import Verdict, casts_between, compare_values, say_dim


def verify(
    src: str | Path, dst: str | Path, options: VerifyOptions, others: Sequence[Path] = ()
) -> Verdict:
    """Returns whether `dst`, which `mckpt edit` or `mckpt merge` wrote, keeps its contract.

    others: the checkpoints beside `src` of which it was made, in the order of the edits or of the
        merge. level: "bytes" runs no model. Raises UsageError if the manifest of `dst` has neither
        edits nor a merge, or if a checkpoint has changed.
    """
    given = ("tp", "pp", "vpp", "ep", "etp", "adapter", "image", "alpha")
    if wrong := [name for name in given if getattr(options, name)]:
        raise UsageError(f"--contract: --{wrong[0]} has no effect; leave it out")
    if options.level == "train":
        raise UsageError("--contract: compares values and logits; give --level forward or bytes")
    source = Checkpoint.open(src, options.described.with_(iteration=None))
    described = options.described.with_(vocab_size=None)  # the manifest of `dst` has its own
    right = Checkpoint.open(dst, described)
    described = described.with_(iteration=None)
    more = [Checkpoint.open(path, described) for path in others]
    merge, edits = right.files.manifest.get("average"), list[Edit]()
    if not merge:
        edits = steps.again(right.files.manifest.get("edits"), right, source.dims, more)
    facts: dict[str, Any] = {"hf": str(source.path), "megatron": str(right.path), "notes": []}
    both = source.with_optimizer(), right.with_optimizer()
    if source.optimizer is None or right.optimizer is None:
        both = source, right
    if (source.optimizer is None) != (right.optimizer is None):
        facts["notes"].append("the state of the optimizer is not compared: one side has none")
    options.tell(f"doing the {'merge' if merge else 'edits'} again, and comparing all values")
    if merge:
        left, total = _merged(source, more, merge, right, options)
        both = left, right.with_optimizer() if total.states else right
        facts["notes"] = [f"merged, {note}" for note in total.notes]
    else:
        left = replace(both[0], merging=Editing(tuple(edits), both[0]))
    apart = dims_apart(left, both[1])
    values = compare_values(left, both[1])
    # the edits leave these values out on purpose, so they are not reported
    dropped = {*source.layout.dropped, *right.layout.dropped}
    found = values.difference
    found.dropped = [text for text in found.dropped if any(f": {key} (" in text for key in dropped)]
    reasons, missing = [*map(say_dim, apart)], list[str]()
    if merge:
        computed = recomputing.coefficients_of(total)
        cast = casts_between(left, both[1])
        if computed is not None or cast:  # `left` rounds to the dtype of the inputs
            rounded = [change for change in found.changed if change.what == "values"]
            found.changed = [change for change in found.changed if change.what != "values"]
        if computed is not None:
            wrong = list(recomputing.wrong_sums(total, computed, both[1]))
            found.same += len(rounded) - len(wrong)
            reasons += wrong
            facts["notes"].append(
                "the sums were computed again by other code than that of the merge"
            )
        elif cast:
            missing = ["the values were not compared: the merge has another dtype than its inputs"]
        else:
            facts["notes"].append(
                "the code of the merge computed the values again: they prove the inputs and the"
                " bytes, and not the formula"
            )
    reasons += values.reasons(left, both[1])
    facts |= {"dims": apart, "values": found.json()}
    facts["notes"] += [f"edited, {edit.contract}: {edit.words}" for edit in edits]
    if options.level != "bytes" and edits and not reasons:
        if all(edit.contract == EXACT for edit in edits if not isinstance(edit, Vocabulary)):
            reasons += _logits_apart(source, right, edits, options, facts["notes"])
        else:
            facts["notes"].append("the logits are not compared: the edits do not keep them")
    missing += values.not_compared(left, both[1])
    verdict = "fail" if reasons else "incomplete" if missing else "pass"
    return Verdict(verdict, [*reasons, *missing], facts)


def _merged(
    source: Checkpoint,
    others: Sequence[Checkpoint],
    merge: dict[str, Any],
    right: Checkpoint,
    options: VerifyOptions,
) -> tuple[Checkpoint, Averaging]:
    """Returns the merge that an entry of the manifest of `right` describes."""
    size = source.dims["vocab_size"]
    inputs = [source, *(other.with_default_vocab_size(size) for other in others)]
    iterations = [one.get("iteration") for one in merge["inputs"]]
    if not others and None not in iterations:  # of one run
        root = source.files.root
        inputs = [Checkpoint.open(root, options.described.with_(iteration=n)) for n in iterations]
    left = methods.again(inputs, merge, right)
    assert isinstance(left.merging, Averaging)
    return left.with_optimizer() if left.merging.states else left, left.merging


def _logits_apart(
    source: Checkpoint,
    right: Checkpoint,
    edits: Sequence[Edit],
    options: VerifyOptions,
    notes: list[str],
) -> list[str]:
    """Returns the reason why the logits are too far apart, none if they are near. Adds a note on
    what was measured.
    """
    if not source.dims["causal"] or source.dims["encoder_layers"]:
        raise UsageError(
            f"{source.path}: is not a decoder, and only decoders are run; --level bytes compares"
            " its values"
        )
    launching.require("torch", "transformers")
    device = launching.device(options.device, 1)
    old_of = np.arange(source.dims["vocab_size"])  # of each new token; -1 if it is new
    for edit in (edit for edit in edits if isinstance(edit, Vocabulary)):
        rows = edit.old_of(len(old_of))
        old_of = np.where(rows >= 0, old_of[rows], -1)
    new = np.flatnonzero(old_of >= 0)
    old = old_of[new]
    if not len(new):
        notes.append("the logits are not compared: no token is kept")
        return []
    work = Path(options.keep or tempfile.mkdtemp(prefix="mckpt-contract-"))
    try:
        described = _as_hf(source, work / "source")
        instead = text_for(source.mapping, read_config(described))
        made = [
            *read_tokens(options.tokens, len(old_of)),
            *random_sequences(source.dims, options.sequences, options.length, instead),
        ]
        at = [np.array(sequence) % len(new) for sequence in made]
        sides = ((source, described, old), (right, _as_hf(right, work / "result"), new))
        found = [
            _run(
                side,
                path,
                [kept[one].tolist() for one in at],
                work / f"run{number}",
                device,
                options,
            )
            for number, (side, path, kept) in enumerate(sides)
        ]
        apart = noise = largest = spread = 0.0
        for index in range(len(at)):
            ours, theirs = found[0](index)[:, old], found[1](index)[:, new]
            apart = max(apart, float(np.abs(ours - theirs).max()))
            largest, spread = (
                max(largest, float(np.abs(ours).max())),
                max(spread, float(ours.std())),
            )
            with np.load(work / "run0" / f"reference.{index}.npz") as arrays:
                noise = max(noise, float(arrays["noise_max_abs"].max()))
    finally:
        if options.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    tolerance = min(NOISE * max(noise, ROUNDING * largest), SHARE * spread)
    said = f"logits of {len(new):,} tokens, in float32: max {apart:.3g}, tolerance {tolerance:.3g}"
    notes.append(f"{said} (noise of transformers {noise:.3g})")
    return [] if apart <= tolerance else [f"{said}: the edits should keep them"]


def _as_hf(side: Checkpoint, copy: Path) -> Path:
    """Returns a Hugging Face directory of the weights, which transformers reads."""
    if not (side.is_megatron or side.opened.quantised or side.opened.notes):
        return side.path
    plan = planning.make_plan(side, copy, TargetOptions(format=formats.HUGGING_FACE))
    plan.run(checksum="none")
    return copy


def _run(
    side: Checkpoint,
    path: Path,
    sequences: list[list[int]],
    out: Path,
    device: str,
    options: VerifyOptions,
) -> Callable[[int], np.ndarray]:
    """Runs transformers, and returns what reads the logits of a sequence."""
    out.mkdir(parents=True)
    options.tell(f"transformers computes the logits of {side.path}")
    job: dict[str, Any] = {"hf": str(path), "out": str(out), "dtype": "float32", "casts": []}
    job |= {"sequences": sequences, "uncast": [], "config": {}, "carried": [], "instead": []}
    job |= {"vocab_size": side.dims["vocab_size"], "length": len(sequences[-1])}
    job["parts"] = side.dims["layer_parts"][: side.dims["num_layers"]]
    config = dict(side.mapping.verify) if not side.is_megatron else {}
    if not side.is_megatron and side.mapping.head:
        job["carried"] = list(side.mapping.form({}).carried)
        config |= {"tie_word_embeddings": True} if side.dims["tied"] else {}
    job["config"] = config
    launching.launch("mckpt.trainer.reference", job, out, device)
    return lambda index: np.asarray(np.load(out / f"logits.{index}.npy"))
