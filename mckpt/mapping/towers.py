"""Whole multimodal models: their text model and their towers in one Megatron checkpoint.

The section `towers` of a family says, for each trainer, the start of the text model's keys and the
key of each tensor of the towers. The logical tensor of a tower's tensor is `carried.KEY`, with its
key in Hugging Face files; its shape is known once a checkpoint is read. So a whole model has a
dialect of its own, made of the dialect of its text model (`mckpt/mapping/whole.py`).

    towers:
      bridge:                                    # the trainer
        text: language_model.                    # the start of the text model's keys
        tensors:
          model.visual.merger.: visual.merger.   # the start of a key, and what replaces it
          model.visual.blocks.{n}.attn.qkv.weight:
            {key: "vision_model.decoder.layers.{n}.self_attention.linear_qkv.weight",
             pack: heads, heads: vision_config.num_heads, tp: column}
        objects: ["vision_model.decoder.layers.{n}.self_attention.linear_qkv._extra_state"]

A tensor whose key ends with a dot stands for all keys that begin so; every rank holds the whole of
these. The others are tensors of Megatron's modules. {n} counts the layers of a tower, which a
`torch_dist` checkpoint stores in one tensor, or each under a key of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.geometry.packing import PACKINGS, TP_KINDS
from mckpt.mapping.forms import NameForm, lookup
from mckpt.mapping.nodes import Node, plain
from mckpt.mapping.rule import expand

Shapes = Mapping[str, tuple[int, ...]]
NUMBER = "{n}"
BRIDGE = "bridge"  # Megatron-Bridge, whose checkpoints run_config.yaml describes
_TENSOR = ("key", "pack", "heads", "tp", "transposed")


class TowerTensor(NamedTuple):
    """One entry under `tensors`: a key in Hugging Face files, and what a trainer makes of it."""

    stored: str  # in Hugging Face files
    key: str  # in Megatron
    pack: str = "one"
    heads: str | None = None  # the key of config.json with the number of heads
    tp: str = "replicated"
    transposed: bool = False  # Megatron has the transpose

    @property
    def is_start(self) -> bool:
        """Returns whether both keys are the starts of many keys."""
        return self.stored.endswith(".")

    def key_of(self, stored: str) -> tuple[str, int] | None:
        """Returns Megatron's key of a tensor, and the number of its layer; None if the entry does
        not have the tensor.
        """
        return _exchanged(stored, self.stored, self.key)

    def stored_key(self, key: str) -> tuple[str, int] | None:
        """Returns the key in Hugging Face files, and the number of the layer, of one in Megatron;
        None if the entry does not have it.
        """
        return _exchanged(key, self.key, self.stored)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in Megatron of a tensor with this one in Hugging Face files, and the
        other way round.
        """
        return shape[::-1] if self.transposed else shape


class Tower(NamedTuple):
    """The towers of a model as one trainer stores them."""

    trainer: str
    text: str  # the start of the text model's keys
    tensors: tuple[TowerTensor, ...]
    objects: tuple[str, ...]
    dialect: str = ""  # of the text model, where the trainer builds another one than its family
    # the fields of Megatron-Bridge's provider that the text model does not have; see `provided`
    provider: Mapping[str, Any] = {}

    def provided(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of the whole model's provider, as run_config.yaml has them.

        config: config.json. A field is a text as it is, the first of several keys of `config` that
        is there, an object of a class, made of the keys under one of them, or fields of its own. An
        object has the entries `with` instead of those of `config`, and `without` where it has none.
        """
        out: dict[str, Any] = {}
        for field, what in self.provider.items():
            if isinstance(what, list):
                found = (lookup(config, path) for path in what)
                value = next((one for one in found if one is not None), None)
                if value is not None:
                    out[field] = value
            elif isinstance(what, dict) and "of" in what:
                inner = lookup(config, what["of"]) if what["of"] else config
                if isinstance(inner, Mapping):
                    inner = _filled(inner, what.get("without", {}))
                    out[field] = {"_target_": what["class"], **inner, **what.get("with", {})}
            elif isinstance(what, dict):
                out[field] = self._replace(provider=what).provided(config)
            else:
                out[field] = what
        return out

    @property
    def has_run_config(self) -> bool:
        """Returns whether the trainer reads run_config.yaml, and not args."""
        return self.trainer == BRIDGE

    def used(self, keys: Iterable[str]) -> list[str]:
        """Returns the stored keys of the entries of some tensors, which are stored under these
        keys.
        """
        entries = (self.entry_for(key) for key in keys)
        return list(dict.fromkeys(entry.stored for entry in entries if entry))

    def entry_for(self, stored: str) -> TowerTensor | None:
        """Returns the entry of a tensor in Hugging Face files."""
        fit = [t for t in self.tensors if t.key_of(stored)]
        return max(fit, key=lambda t: len(t.stored), default=None)

    def among(self, used: Collection[str]) -> Tower:
        """Returns the entries that `used` names."""
        return self._replace(tensors=tuple(t for t in self.tensors if t.stored in used))

    def of_form(self, form: NameForm, keys: Collection[str] = ()) -> Tower:
        """Returns the entries of the tensors that a form of the family carries, without those that
        have none of the stored keys.

        keys: those of a Hugging Face directory; without them, all entries fit.
        """
        own = [t for t in self.tensors if form.carries(t.stored.replace(NUMBER, "0") + ".")]
        if carried := [key for key in keys if form.carries(key)]:
            own = [t for t in own if any(map(t.key_of, carried))]
        return self._replace(tensors=tuple(own))

    def fit(self, keys: Iterable[str]) -> tuple[int, int]:
        """Returns how many of a Megatron checkpoint's keys are those of such towers, and how many
        characters of them the entries have: `visual.visual.` fits better than `visual.`.
        """
        rest = [key for key in keys if not key.startswith(self.text)]
        entries = [entry for key in rest if (entry := self.entry_of(key))]
        return len(entries), sum(len(entry.key) for entry in entries)

    def entry_of(self, key: str) -> TowerTensor | None:
        """Returns the entry of a key in Megatron, whether it names a layer or not."""
        fit = [t for t in self.tensors if t.stored_key(key) or stacked(t.key) == key]
        return max(fit, key=lambda t: len(t.key), default=None)

    def shapes(self, stored: Shapes, tp: int = 1) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a tower's tensors by their keys in Hugging Face files.

        stored: those of a checkpoint of Megatron, by key; of one rank of `tp`, or whole.
        """
        found: dict[str, tuple[int, ...]] = {}
        for key, shape in stored.items():
            if key.startswith(self.text) or (entry := self.entry_of(key)) is None:
                continue
            named = entry.stored_key(key)
            if named is None:  # one tensor with all layers
                names = [entry.stored.replace(NUMBER, str(n)) for n in range(shape[0])]
                shape = shape[1:]
            else:
                names = [named[0]]
            axis = {"column": 0, "row": 1}.get(entry.tp)
            whole = tuple(n * (tp if i == axis else 1) for i, n in enumerate(shape))
            found |= dict.fromkeys(names, entry.shape(whole))
        return found


def stacked(key: str) -> str:
    """Returns the key of one tensor with all layers."""
    return key.replace(f"{NUMBER}.", "")


def _filled(given: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object with the entries of `defaults` that it lacks, at any depth."""
    given = given or {}
    inner = {k: _filled(given.get(k), v) for k, v in defaults.items() if isinstance(v, dict)}
    return {**defaults, **given, **inner}


def _exchanged(text: str, old: str, new: str) -> tuple[str, int] | None:
    """Returns `text`, which begins with or is of the pattern `old`, with that of `new` in its
    place, and the number that {n} stands for. Returns None for another text.
    """
    if old.endswith("."):
        return (new + text[len(old) :], 0) if text.startswith(old) else None
    before, numbered, after = old.partition(NUMBER)
    if not numbered:
        return (new, 0) if text == old else None
    number = text[len(before) : len(text) - len(after)]
    if text.startswith(before) and text.endswith(after) and re.fullmatch(r"\d{1,6}", number):
        return new.replace(NUMBER, number), int(number)
    return None


def read_towers(root: Node, problems: list[str]) -> Iterator[tuple[str, Tower]]:
    """Yields the entries of `towers`; adds errors to `problems`."""
    towers = root.get("towers") or Node()
    for trainer, section in towers.items():
        if section is None:  # not of this family
            continue
        where = towers.lines[trainer]
        section = section or {}
        tensors, found = section.get("tensors") or {}, list[TowerTensor]()
        if section.keys() - {"text", "dialect", "tensors", "objects", "provider"} or not isinstance(
            tensors, dict
        ):
            problems.append(
                f"{where}: towers: {trainer} may have `text`, `dialect`, `tensors`,"
                " `objects` and `provider`"
            )
            continue
        for stored, spec in tensors.items():
            if spec is None:
                continue
            try:
                found += _entries(str(stored), spec)
            except (ValueError, TypeError) as e:
                problems.append(f"{where}: towers: {stored}: {e}")
        objects = [key for text in section.get("objects") or () for key, _ in expand(text, None)]
        yield (
            str(trainer),
            Tower(
                str(trainer),
                section.get("text") or "",
                tuple(found),
                tuple(objects),
                section.get("dialect") or "",
                plain(section.get("provider") or {}),
            ),
        )


def _entries(stored: str, spec: Any) -> Iterator[TowerTensor]:
    """Yields an entry for each of the words in {a,b}."""
    spec = {"key": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, dict) or spec.keys() - set(_TENSOR) or not spec.get("key"):
        raise ValueError(f"wants a key, or {', '.join(_TENSOR)}, not {spec!r}")
    if spec.get("pack", "one") not in PACKINGS or spec.get("tp", "replicated") not in TP_KINDS:
        raise ValueError(f"has no known `pack` or `tp`: {spec!r}")
    hidden, key = (text.replace(NUMBER, "\0") for text in (stored, spec["key"]))
    for name, one in expand(hidden, {"of": key}):
        entry = TowerTensor(name, one["of"][0], **{k: v for k, v in spec.items() if k != "key"})
        entry = entry._replace(
            stored=entry.stored.replace("\0", NUMBER), key=entry.key.replace("\0", NUMBER)
        )
        if entry.is_start != entry.key.endswith("."):
            raise ValueError("both keys end with a dot, or none of them")
        yield entry
