"""Models around the decoder of a language model: without its output layer, or with a head of their
own, such as one that classifies sequences.

All of them are one thing for mckpt: the family of the language model, whose keys begin otherwise,
without the rule of the output layer, and with the tensors of the head among those that are carried.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from mckpt.errors import MappingError
from mckpt.mapping.file import Dim, MappingFile
from mckpt.mapping.forms import NameForm
from mckpt.mapping.nodes import FOLDER, digest_of, parse

_OUTPUT_PARTS = ("lm_head.bias", "lm_head.dense.weight")  # logical tensors beside its weight
_EMBED, _OUTPUT = "embed.weight", "lm_head.weight"  # logical tensors
OWN, BASE, TEXT = "own", "base", "text"  # the words of `places`
FLAT, HEAD = "flat", "head"  # names of the only form of such a model


@functools.cache
def _heads() -> tuple[dict[str, Any], str]:
    return parse(FOLDER / "heads.yaml")


def _classes() -> dict[str, dict[str, Any]]:
    classes: dict[str, dict[str, Any]] = _heads()[0]["classes"]
    return classes


def _end_of(architecture: str) -> str | None:
    """Returns the longest ending of `classes` that the name of a class has: ForRewardModel, not
    Model.
    """
    return max((e for e in _classes() if architecture.endswith(e)), key=len, default=None)


def language_models(architecture: str) -> Iterator[str]:
    """Yields the language models that may have the same decoder as another class, none for a class
    that is a language model itself.
    """
    end, languages = _end_of(architecture), _heads()[0]["language"]
    if end is not None and end not in languages:
        for language in _classes()[end].get("language", languages):
            yield architecture.removesuffix(end) + language


def is_of_head(key: str) -> bool:
    """Returns whether a stored key is that of a tensor of a head, which is carried unchanged."""
    return NameForm({}, tuple(_heads()[0]["heads"])).carries(key)


def _patterns_of(keys: Collection[str]) -> tuple[str, ...]:
    """Returns the patterns of the heads whose tensors are among stored keys."""
    starts = {"".join(key.partition(".")[:2]) for key in keys}  # "score." of score.weight
    return tuple(one for one in _heads()[0]["heads"] if one.removesuffix("*") in starts)


def with_head(
    family: MappingFile, architecture: str, keys: Collection[str], form: object = None
) -> MappingFile:
    """Returns a family as it describes the model of an architecture: itself for a language model as
    transformers saves it.

    keys: stored keys of the model, or only those of its carried tensors. form: the name of the form
    that a manifest records.

    Raises MappingError for a class that Megatron has no place for, and if neither the keys nor the
    form tell the names of its decoder.
    """
    end = _end_of(architecture)
    own = architecture in family.architectures or end is None or end in _heads()[0]["language"]
    kind: dict[str, Any] = {"places": [OWN], "output": True} if end is None else _classes()[end]
    heads = _patterns_of(keys)
    if not own and not heads and "head" in kind:
        heads = (kind["head"],)
    # a family with forms has names of its own for a language model without a prefix
    usual = [OWN] if own and family.forms else kind["places"]
    places = [*usual, *kind.get("rare", ())]
    forms = {place: at for place in places if (at := _forms_at(family, place, places[0], own))}
    place = _place_of(family, architecture, forms, keys, form, usual)
    if own and place == OWN and not heads:
        return family
    output = kind.get("output", False) and place == OWN
    if not output and (lacked := _own_output(family)):
        raise _refused(
            family,
            architecture,
            f"it has no output layer, and that of Megatron's model has further tensors ({lacked})",
        )
    with_heads = {n: NameForm(f.names, (*f.carried, *heads)) for n, f in forms[place].items()}
    around = replace(
        family,
        digest=digest_of(family.digest + _heads()[1]),
        architectures=(architecture or family.architectures[0],),
        forms=with_heads,
        needs=() if place == TEXT else family.needs,
        head=HEAD if heads else place,
    )
    return around if output else _without_output(around, own)


def _refused(family: MappingFile, architecture: str, why: str) -> MappingError:
    return MappingError(
        f"{architecture} has the decoder of family {family.name}, and mckpt does not convert it:"
        f" {why}. Save the whole model as {' or '.join(family.architectures)}"
    )


def _own_output(family: MappingFile) -> str:
    """Returns a stored key of the family's output layer beside its weight, "" if it has none."""
    rules = (rule for rule in family.rules if not rule.when)
    return next((r.key for r in rules if r.of[0] in _OUTPUT_PARTS), "")


def _embedding(family: MappingFile) -> str:
    """Returns the key of the embedding in the family's rules."""
    return next(rule.key for rule in family.rules if rule.of == (_EMBED,) and not rule.alias)


def start_of(family: MappingFile) -> str:
    """Returns what the keys of the decoder begin with in the family's rules, such as `model.`; ""
    if they have nothing in common.
    """
    keys = [_embedding(family).split(".")]
    keys += [r.key.split(".") for r in family.rules if "layer" in r.indices and not r.mtp]
    same = 0
    while len({tuple(key[: same + 1]) for key in keys}) == 1 and "{" not in keys[0][same]:
        same += 1
    return "".join(f"{part}." for part in keys[0][:same])


def _forms_at(family: MappingFile, place: str, usual: str, own: bool) -> dict[str, NameForm]:
    """Returns the forms of a family with the decoder at a place; none if no form can have it there.

    usual: the first place of the class. The names of forms at another one tell the place.
    """
    if not family.forms:
        only = {OWN: HEAD, TEXT: FLAT if own else TEXT}.get(place, place)
        named = {only.strip("."): NameForm({}, ())}
    else:
        end = "" if place == usual else f"/{place.strip('.')}"
        named = {name + end: form for name, form in family.forms.items()}
    at = {name: _form_at(family, place, form) for name, form in named.items()}
    return {name: form for name, form in at.items() if form is not None}


def _form_at(family: MappingFile, place: str, form: NameForm) -> NameForm | None:
    """Returns a form with the decoder at a place; None if it cannot be there."""
    start = start_of(family)
    if place == OWN:
        return form
    if place == TEXT:
        return NameForm({start: ""}, ())
    if place != BASE:
        return NameForm({**form.names, start: place}, form.carried)
    stored = form.rename(start)
    outer = stored.partition(".")[0] + "." if stored else ""
    if not all(pattern.startswith(outer) for pattern in form.carried):
        return None  # the class has no name for its decoder and what is around it
    names = {s: t.removeprefix(outer) for s, t in {**form.names, start: stored}.items()}
    return NameForm(names, tuple(pattern.removeprefix(outer) for pattern in form.carried))


def _place_of(
    family: MappingFile,
    architecture: str,
    forms: Mapping[str, Mapping[str, NameForm]],
    keys: Collection[str],
    recorded: object,
    usual: Collection[str],
) -> str:
    """Returns the place at which the stored keys have the embedding, or the one that the name of a
    recorded form tells; else the first one.

    forms: those at each place. usual: the places of which more than one class has each.
    """
    embedding = _embedding(family)
    for place, at in forms.items():
        if (isinstance(recorded, str) and recorded in at) or any(
            form.rename(embedding) in keys for form in at.values()
        ):
            return place
    first = next(iter(forms))
    literal = [place for place in usual if place.endswith(".")]
    if others := [place for place in literal if place != start_of(family)]:
        raise MappingError(
            f"{architecture}: nothing tells whether the names of its decoder begin with"
            f" {start_of(family)} or {others[0]}: give --like HF_DIR, the model's original"
            " directory"
        )
    return first


def _without_output(family: MappingFile, own: bool) -> MappingFile:
    """Returns a family whose embedding is also the output layer, which files do not have.

    own: the class is a language model, and reads whether its output layer is tied.
    """
    tied = replace(
        family.dims.get("tied", _UNSET),
        has_const=True,
        const=True,
        values=None,
        read=None,
        write=None,
        tensor=_OUTPUT,
    )
    inert = family.inert if own else family.inert | set(tied.keys)
    if not own:  # the class never reads whether an output layer is tied
        tied = replace(tied, keys=(), tensor=None)
    note = (
        "the model has no output layer: Megatron's has the embedding in that place, and a Hugging"
        " Face directory is written without one"
    )
    return replace(
        family,
        dims={**family.dims, "tied": tied},
        inert=inert,
        rules=tuple(rule for rule in family.rules if rule.of != (_OUTPUT,)),
        notes=(*family.notes, note),
    )


_UNSET = Dim(
    keys=(),
    default=None,
    values=None,
    has_const=True,
    const=True,
    read=None,
    write=None,
    when=None,
    write_when=None,
    free=False,
    tensor=None,
    unstored=None,
    where="",
)
