"""Megatron's `torch_dist` format: chunks of whole, unsharded tensors in
torch.distributed.checkpoint's container.

    .metadata          which chunk of which key lies where (a pickle)
    __R_I.distcp       items one after the other, each a torch.save file of one chunk or object
    common.pt          all values but tensors; in place of it, megatron-core from 0.19 on has the
                       object common_state/shard_0_1
    metadata.json      names the format; a directory without it is not complete

Keys name layers globally, or not at all: `decoder.layers.mlp.linear_fc2.weight` is [layers, hidden,
ffn].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers import safe_pickle
from mckpt.containers.entries import Span
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError
from mckpt.formats import carried
from mckpt.formats.base import (
    Format,
    Names,
    Problems,
    Shown,
    best_choices,
    shapes_of,
)
from mckpt.formats.megatron import optimizer
from mckpt.formats.megatron.chunked import MODEL, Chunked, Directory, has_keys
from mckpt.formats.megatron.interface import Common, has_tensors
from mckpt.formats.megatron.optimizer import BY_LAYERS, Optimizer
from mckpt.formats.megatron.run_config import RUN_CONFIG
from mckpt.formats.megatron.torch_dist_writing import (
    COMMON,
    COMMON_OBJECT,
    MARKER,
    METADATA,
    lay_out,
)
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound, MappingFile
from mckpt.storage.files import read_json

CHOICES = {"keys": ("global",)}  # of the dialects


def detect(path: Path) -> bool:
    # Without its metadata.json it was saved in part, or has another format.
    if (path / METADATA).exists() and not has_keys(path, MODEL):
        return True
    if not (path / MARKER).exists():
        return False
    from mckpt.formats.megatron.zarr_directory import has_arrays

    return not has_arrays(path)


def backend(path: Path) -> str:
    """Returns the name of the format in a metadata.json.

    Raises SourceError if there is none, or it does not name a format.
    """
    if not (path / MARKER).exists():
        other = "" if has_keys(path, "decoder.") else ", or another program than Megatron wrote it"
        raise SourceError(f"{path}: has no {MARKER}: its save never finished{other}")
    try:
        return str(read_json(path / MARKER, 1 << 20)["sharded_backend"])
    except (KeyError, TypeError, IndexError):
        raise SourceError(f"{path / MARKER}: names no sharded_backend") from None


def open_directory(path: Path) -> TorchDist:
    """Opens a `torch_dist` checkpoint."""
    if (found := backend(path)) != FORMAT.name:
        raise SourceError(
            f"{path}: sharded_backend is {found!r}; mckpt reads {FORMAT.name} and zarr"
        )
    if not (path / METADATA).exists():
        raise SourceError(f"{path}: has {MARKER} and no {METADATA}")
    return TorchDist(Directory(path, nemo=True), FORMAT)


class TorchDist:
    """An opened checkpoint of Megatron-Core's dist_checkpointing: `torch_dist`, or `zarr` with the
    same keys.

    Reads the index of the directory, and of each chunk only the header, which shows where the data
    begins.
    """

    quantised = False

    def __init__(self, directory: Chunked, format: Format) -> None:
        self.format, self.root = format, directory.root
        self.directory, self.metadata = directory, directory.metadata
        self.notes = directory.notes

    @cached_property
    def common(self) -> Common:
        """Returns the content of common.pt, else that of the object common_state; empty if there is
        neither.
        """
        value, _, path = self._common
        return Common(value, path, as_object=not path.endswith(COMMON))

    @cached_property
    def _common(self) -> tuple[dict[str, Any], Any, str]:
        """Reads the common state: its value, the places of its storages, and its file."""
        path = self.root / COMMON
        if path.exists():
            value, data = self.directory.read(str(path))
            return self._dict(value, str(path)), data, str(path)
        if COMMON_OBJECT in self.metadata.objects:
            value, data, where = self._object(COMMON_OBJECT)
            inner = value[0] if isinstance(value, list) and value else value
            return self._dict(inner, f"{where}: {COMMON_OBJECT}"), data, where
        return {}, {}, str(path)

    def _object(self, key: str) -> tuple[Any, Any, str]:
        """Returns the value of an object, the places of its storages, and its file."""
        value, data = self.directory.object(key)
        return value, data, str(self.root / self.metadata.items[key, None][0])

    @staticmethod
    def _dict(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SourceError(
                f"{where}: holds {safe_pickle.short(value)}, not a dict of args and the like"
            )
        return value

    def parallel(self) -> Parallel:
        """Returns the sizes of the run that saved it; reading does not depend on them."""
        return self.common.parallel()

    def keys(self) -> list[str]:
        return list(self.metadata.tensors)

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        """Rows of the embedding, padding included."""
        found = self.metadata.tensors.get(mapping.vocabulary.key)
        return found[1][0] if found and found[1] else None

    def beside(self, dialect: MappingFile) -> list[str]:
        """Returns the keys of optimizer, random states and the like, up to a dot or slash."""
        from mckpt.formats.megatron.optimizer import flat

        keys = (k for k in (*self.metadata.tensors, *self.metadata.objects) if k != COMMON_OBJECT)
        names = [k for k in keys if _ignored(k, dialect) and not k.endswith("_extra_state")]
        found = {
            "optimizer"
            if optimizer.split_key(k) or flat.group_of(k)
            else k.replace("/", ".").split(".")[0]
            for k in names
            if "_extra_state" not in k
        }
        return sorted(
            found
            | {k for k, v in self.common.fields.items() if k in dialect.ignore or has_tensors(v)}
        )

    def show(self, most: int | None) -> Shown:
        """Returns every stored tensor, with the number of its chunks."""
        return self.directory.show(most)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        """Returns the records and tensors of all items, and of common.pt."""
        common = [Item(str(self.root / COMMON))] if (self.root / COMMON).exists() else []
        return self.directory.spans(problems, common)

    def choices(self, names: Names) -> dict[str, Any]:
        """Returns the dialect's choices of this checkpoint: those whose keys fit best."""
        stored = {k for k in self.metadata.tensors if not _ignored(k, names.mapping)}

        choices = {**names.mapping.choices, **CHOICES}
        return best_choices(names, choices, lambda chosen: len(_keys(chosen.bound) ^ stored))

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes, as `Opened.layout`."""
        self.directory.check_sizes()
        dialect, bound = names.mapping, names.bound
        problems = Problems(f"the tensors of {self.root} do not match its args:")
        stored = self.directory.stored(bound, names, problems)
        known = _keys(bound)
        ignored = {
            k: _ignored(k, dialect) for k in (*self.metadata.tensors, *self.metadata.objects)
        }
        tensors = self.metadata.tensors.items()
        left = [(k, f"{k} {list(t[1])}") for k, t in tensors if not ignored[k] and k not in known]
        problems.unknown(left, dialect.path.name)
        problems.extend(
            f"{k}: an object that {dialect.path.name} does not know"
            for k in self.metadata.objects
            if not ignored[k]
        )
        problems.check()
        return Layout(
            self.directory.paths,
            stored,
            shapes_of(bound, names.scope()),
            {k: why for k, why in ignored.items() if why},
        )

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none."""
        state_keys = optimizer.keys_of(self.metadata.tensors)
        if not state_keys:
            return self._flat_optimizer(names)
        bound = []
        for b in names.bound:
            keys = [key for key, _ in b.global_keys()] if not b.rule.alias else []
            for state in dict.fromkeys(s for key in keys for s in state_keys.get(key, ())):
                key = next(key for key in keys if state in state_keys.get(key, ()))
                prefix = state_keys[key][state].removesuffix(key)
                bound.append(optimizer.state_bound(b, state, prefix))
        what = f"the optimizer's state of {self.root} does not match its weights:"
        problems = Problems(what, optimizer.CURE)
        stored = self.directory.stored(bound, names, problems)
        known = _keys(bound)
        problems.extend(
            f"{key}: the state of a weight that {names.mapping.path.name} does not have"
            for states in state_keys.values()
            for key in states.values()
            if key not in known
        )
        problems.check()
        layout = Layout(self.directory.paths, stored, shapes_of(bound, names.scope()))
        stored_keys = frozenset(key for states in state_keys.values() for key in states.values())
        fields, data, path = self._common
        plain = fields.get("optimizer")
        rest = self._flat_optimizer(names, rest=True) if self._has_flat else None
        if rest is not None and isinstance(plain, dict):  # Muon, distributed by layers
            plain = {**plain, 1: {"param_groups": rest.groups[0]}}
            layout, stored_keys = carried.joined(layout, rest.layout), stored_keys | rest.keys
        groups = optimizer.groups_of(plain, path, data)
        scalers = optimizer.scalers_of(plain, data, path)
        form = self._form() if rest is None else rest.form
        return Optimizer(form, layout, groups, stored_keys, scalers)

    @property
    def _has_flat(self) -> bool:
        from mckpt.formats.megatron.optimizer import flat

        keys = (*self.metadata.tensors, *self.metadata.objects)
        return any(flat.group_of(key) for key in keys)

    def weight_facts(self, names: Names) -> tuple[dict[str, str], int | None]:
        """Returns the dtype of each weight, by logical tensor, and the rows of the embedding."""
        # other choices than the checkpoint's may name a key that it does not have
        vocabulary = self.metadata.tensors.get(names.mapping.vocabulary.key)
        most = vocabulary[0] if vocabulary else "float32"  # adapters alone have no embedding
        local = replace(names, choices={**names.choices, "keys": "local"})
        dtypes = {name: most for b in local.bound for name in b.rule.of}
        dtypes |= {
            name: self.metadata.tensors[key][0]
            for b in names.bound
            for key, _ in b.global_keys()[:1]
            for name in b.rule.of
            if key in self.metadata.tensors
        }
        return dtypes, self.padded_vocab(names.mapping)

    def _flat_optimizer(self, names: Names, rest: bool = False) -> Optimizer | None:
        """Returns the optimizer's state of flat buffers, None if there are none.

        rest: the buffers contain no matrices, because Muon stores the state of those elsewhere.
        """
        from mckpt.formats.megatron.optimizer import flat, kinds

        marks = self.common.fields.get("content_metadata") or {}
        kind = optimizer.sharding_of(self.common.fields.get("optimizer")) or "distributed"
        form = str(marks.get("distrib_optim_sharding_type", kind))
        objects = {k: found for k in self.metadata.objects if (found := flat.group_of(k))}
        extents = {
            place: list(self.directory.extents(key))
            for key in self.metadata.tensors
            if (place := flat.place_of(key)) is not None
        }
        for key, (chain, number, what) in objects.items():
            if what == "param_state":
                (value, *_), data = self.directory.object(key)
                file = self.directory.number[self.metadata.items[key, None][0]]
                extents |= flat.buffers(value, data, file, chain, number)
        if not extents:
            missing = f"{self.root}: has no state of any weight"
            kinds.refuse_empty(self.common.fields.get("optimizer"), missing, self.common.fields)
            for key in (k for k, (_, _, what) in objects.items() if what == "optimizer"):
                one = self.directory.object(key)[0][0]
                kinds.refuse_empty(one, missing, self.common.fields)
            return None
        local = replace(names, choices={**names.choices, "keys": "local"})
        dtypes, rows = self.weight_facts(names)
        groups: dict[int, Any] = {}
        scalers: dict[int, optimizer.Scaler] = {}
        for key, (chain, number, what) in objects.items():
            if what == "optimizer" and chain not in groups:
                (value, *_), data, path = self._object(key)
                (groups[chain],) = optimizer.groups_of(value, path, data)
            elif what == optimizer.SCALER and chain not in scalers:
                (value, *_), data, path = self._object(key)
                scalers[chain] = optimizer.scalers_of({what: value}, data, path)[0]
            elif what == "per_bucket_numel_unpadded":
                numels = self.directory.object(key)[0][0]
                extents = flat.unpadded(extents, numels, chain, number)
        listed = [{"param_groups": groups[chain]} for chain in sorted(groups)]
        keys = frozenset(k for k in (*self.metadata.tensors, *objects) if flat.group_of(k))
        return Optimizer(
            form,
            flat.layout(extents, local, dtypes, rows, self.directory.paths, rest),
            optimizer.groups_of(listed, str(self.root)),
            keys,
            [scalers[chain] for chain in sorted(scalers)],
        )

    def _form(self) -> str:
        """Returns how the optimizer's state is stored. The common state names it from megatron-core
        0.13 on; without that name, the keys show it.
        """
        marks = self.common.fields.get("content_metadata") or {}
        if (kind := optimizer.sharding_of(self.common.fields.get("optimizer"))) is not None:
            return str(marks.get("distrib_optim_sharding_type", kind))
        by_layers = (self.common.args or {}).get(BY_LAYERS)
        distributed = f"optimizer.state.{optimizer.MASTER_KEYS[0]}."
        if any(distributed in key for key in self.metadata.tensors):
            supposed = optimizer.FULLY_RESHARDABLE
        else:
            flat = bool(self.metadata.flattened)
            supposed = optimizer.MODEL_SPACE if flat else optimizer.NOT_DISTRIBUTED
            if by_layers:  # its content_metadata names a form that it does not have
                return supposed
        return str(marks.get("distrib_optim_sharding_type", supposed))


def _keys(bound: list[Bound]) -> set[str]:
    """Returns the keys of the stacked tensors of these rules."""
    return {key for b in bound for key, _ in b.global_keys()}


def _ignored(key: str, dialect: MappingFile) -> str | None:
    """Returns why a key is not a weight, or None."""
    if key == COMMON_OBJECT:
        return "common state"
    parts = key.split("/")[0].split(".")
    return next((why for word, why in dialect.ignore.items() if word in parts), None)


FORMAT = Format(
    "torch_dist",
    ".metadata with metadata.json",
    megatron=True,
    detect=detect,
    open=open_directory,
    lay_out=lay_out,
    parts=(METADATA, MARKER, COMMON, "*.distcp", RUN_CONFIG, "train_state.pt"),
    global_keys=True,
    layer_keys=True,
    common_object=True,
    optimizer=True,
    last=MARKER,
)
