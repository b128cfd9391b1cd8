"""Models around the decoder of a causal language model, such as one that classifies sequences."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from mckpt.errors import MappingError
from mckpt.mapping.file import MappingFile
from mckpt.mapping.forms import NameForm
from mckpt.mapping.nodes import FOLDER, digest_of, parse

CAUSAL = "ForCausalLM"


@functools.cache
def _heads() -> tuple[dict[str, dict[str, Any]], str]:
    return parse(FOLDER / "heads.yaml")


def _end_of(architecture: str) -> str | None:
    """Returns the longest key with which the name of a class ends: ForRewardModel, not Model."""
    return max((e for e in _heads()[0] if architecture.endswith(e)), key=len, default=None)


def decoder_of(architecture: str) -> str:
    """Returns the causal language model around the decoder of another class, "" for a class that
    mckpt does not know as such.
    """
    end = _end_of(architecture)
    return "" if end is None or end == CAUSAL else architecture.removesuffix(end) + CAUSAL


def is_of_head(key: str) -> bool:
    """Returns whether a stored key is that of a tensor of a head, which is carried unchanged."""
    heads = (head for kinds in _heads()[0].values() for head in kinds.values())
    return any(NameForm({}, tuple(head.get("carried") or ())).carries(key) for head in heads)


def with_head(
    family: MappingFile, architecture: str, keys: Collection[str], form: object = None
) -> MappingFile:
    """Returns a family as it describes the model of an architecture: itself for a causal language
    model as transformers saves it.

    keys: stored keys of the model, or only those of its carried tensors. form: the name of the form
    that a manifest records, which wins.

    Raises MappingError for a class with a head if the family's names are not `model.*`.
    """
    heads, digest = _heads()
    end = _end_of(architecture) or CAUSAL
    own = architecture in family.architectures or end == CAUSAL
    if family.forms or not any(rule.key.startswith("model.") for rule in family.rules):
        if own:
            return family
        raise MappingError(
            f"{architecture} has the decoder of family {family.name}, of which mckpt converts only"
            f" {', '.join(family.architectures)}: save the whole model as one of them"
        )
    for name, head in heads[end].items():
        if form == name or (form is None and ("has" not in head or head["has"] in keys)):
            return _around(family, architecture or family.architectures[0], name, head, digest)
    return family


def _around(
    family: MappingFile, architecture: str, name: str, head: dict[str, Any], digest: str
) -> MappingFile:
    dims, notes, inert = dict(family.dims), list[str](), family.inert
    if not head.get("output", True):
        tied = replace(
            dims["tied"],
            has_const=True,
            const=True,
            values=None,
            read=None,
            write=None,
            tensor="lm_head.weight",
        )
        if "has" not in head:  # the class never reads whether an output layer is tied
            inert |= set(tied.keys)
            tied = replace(tied, keys=(), tensor=None)
        dims["tied"] = tied
        notes.append(
            "the model has no output layer: Megatron's has the embedding in that place, and a"
            " Hugging Face directory is written without one"
        )
    return replace(
        family,
        digest=digest_of(family.digest + digest),
        architectures=(architecture,),
        dims=dims,
        forms={name: NameForm(dict(head.get("names") or {}), tuple(head.get("carried") or ()))},
        inert=inert,
        notes=tuple(notes),
        head=name,
    )
