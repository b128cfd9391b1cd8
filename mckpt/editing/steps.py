"""Reads recipes: lists of edits in YAML, as `mckpt edit --recipe` takes them.

- layers: {drop: 20-23}          keep, drop, order or silent_after, each a list of ranges
- untie                          or tie
- kv_heads: {times: 2}           or {mean: 2}
- vocab: {size: 151936, init: mean}
- mtp: {add: 1}                  or {drop: true}
- prune: {experts: [0, 2-5]}      experts, ffn, expert_ffn, heads or hidden: a list or {layer: list}
- graft: {from: BASE, take: mtp}   mtp, tower, head, embedding, layers.RANGES or a pattern
- upcycle: {experts: 8, topk: 2}
- hybrid: {pattern: M*-M*-}       M is a new Mamba-2

Any of them may have the name of a JSON or YAML file with its parameters in their place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import Edit
from mckpt.editing.grafting import Graft
from mckpt.editing.heads import RepeatHeads, Tie, Untie
from mckpt.editing.hybrid import Hybrid
from mckpt.editing.layers import Layers
from mckpt.editing.multi_token import MultiToken
from mckpt.editing.pieces import loaded, refuse_changed
from mckpt.editing.pruning import Prune
from mckpt.editing.upcycling import Upcycle
from mckpt.editing.vocabulary import Vocabulary
from mckpt.errors import MappingError, UsageError
from mckpt.mapping import Dims
from mckpt.mapping.nodes import Node, load
from mckpt.mapping.schema import schema
from mckpt.storage.staging import MANIFEST


def read(recipe: Path | None, dims: Dims, more: Iterable[Any] = ()) -> list[Edit]:
    """Returns the edits of a recipe. dims: those of the source. more: further edits, each as a text
    of YAML or as data.

    Raises UsageError, with the line, for anything that is not an edit.
    """
    steps: list[tuple[str, Any]] = []
    if recipe is not None:
        listed = loaded(recipe)
        if not isinstance(listed, list) or not listed:
            raise UsageError(f"{recipe}: a recipe is a list of edits, such as `- untie`")
        steps = [(f"{recipe}: edit {number}", step) for number, step in enumerate(listed, 1)]
    for text in more:
        where = f"--edit {text!r}"
        try:
            steps.append((where, load(text, where) if isinstance(text, str) else text))
        except (ValueError, MappingError) as e:
            raise UsageError(f"{where}: {e}") from None
    if not steps:
        raise UsageError("give --recipe FILE, or --edit with an edit, such as --edit untie")
    found: list[Edit] = []
    for where, step in steps:
        named = {step: {}} if isinstance(step, str) else step
        if not isinstance(named, dict) or len(named) != 1:
            raise UsageError(f"{where}: wants one of {', '.join(EDITS)}, not {step!r}")
        ((name, given),) = named.items()
        if isinstance(step, Node) and not where.startswith("--edit"):
            where = step.lines[name]
        if name not in EDITS:
            raise UsageError(f"{where}: {name!r} is not an edit; they are {', '.join(EDITS)}")
        try:
            edit = EDITS[name].of(_parameters(given), dims)
            dims = {n: schema().check(n, value) for n, value in edit.dims(dims).items()}
        except UsageError as e:
            raise UsageError(f"{where}: {e}") from None
        except (TypeError, ValueError, KeyError) as e:
            raise UsageError(f"{where}: {name}: {given!r}: {_why(e)}") from None
        found.append(edit)
    return found


def _parameters(given: Any) -> dict[str, Any]:
    """Returns the parameters of an edit, or those in the file that the recipe names."""
    if isinstance(given, str):
        path = Path(given)
        try:
            text = path.read_text()
        except OSError as e:
            raise ValueError(e.strerror) from None
        given = json.loads(text) if path.suffix == ".json" else load(text, path.name)
    if not isinstance(given or {}, dict):
        raise ValueError("wants its parameters, or a file that has them")
    return given or {}


def again(data: Any, of: Checkpoint, dims: Dims, others: Sequence[Checkpoint] = ()) -> list[Edit]:
    """Returns the edits that the manifest of a checkpoint has as data.

    dims: those of its source. others: the checkpoints from which edits take tensors, in order.
    Raises UsageError if it has no edits, or if `others` are not those checkpoints.
    """
    from mckpt.editing.stacking import Stack

    if not data:
        raise UsageError(
            f"{of.path}: its {MANIFEST} has no edits, so `mckpt edit` did not write it"
        )
    kinds = {kind.__name__: kind for kind in Edit.__subclasses__()}
    found: list[Edit] = []
    for one in data:
        ((name, fields),) = one.items() if isinstance(one, dict) else ((str(one), {}),)
        try:
            digests = fields.get("digests") or [d for d in [fields.get("digest")] if d]
            some, others = others[: len(digests)], others[len(digests) :]
            if len(some) < len(digests):
                raise UsageError(
                    f"{of.path}: has tensors of another checkpoint; give it with --with"
                )
            some = [one.with_default_vocab_size(dims["vocab_size"]) for one in some]
            for one, digest in zip(some, digests, strict=True):
                refuse_changed(one.path, one.layout, digest, of.path)
            if name == "Stack":
                found.append(Stack.made([(m, layer) for m, layer in fields["order"]], some))
            elif name == "Graft":
                found.append(Graft(fields["take"], fields["digest"], some[0]))
            else:
                found.append(kinds[name].again(fields, dims))
        except (KeyError, TypeError, ValueError, msgspec.ValidationError):
            raise UsageError(
                f"{of.path}: its edit {name} cannot be done again from {MANIFEST} alone; run `mckpt"
                " edit` again and compare the results with `mckpt diff`"
            ) from None
        dims = found[-1].dims(dims)
    if others:
        raise UsageError(f"--with {others[0].path}: the edits of {of.path} take nothing from it")
    return found


def _why(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


EDITS: dict[str, type[Edit]] = {
    "layers": Layers,
    "untie": Untie,
    "tie": Tie,
    "kv_heads": RepeatHeads,
    "vocab": Vocabulary,
    "graft": Graft,
    "mtp": MultiToken,
    "upcycle": Upcycle,
    "hybrid": Hybrid,
    "prune": Prune,
}
