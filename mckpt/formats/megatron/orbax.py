"""Checkpoints of Orbax, as MaxText saves them.

    DIR/items/_METADATA         the names of the arrays, and how they are stored (JSON)
              manifest.ocdbt    with use_ocdbt: a database of NAME/zarr.json, NAME/c/0/1, ...
              NAME/.zarray      without: a directory for each array
    DIR/_CHECKPOINT_METADATA, commit_success.txt

MaxText saves the training's state: the weights below `params.params`, `opt_state` and `step`. A
checkpoint of weights alone has the first. `items` itself is a checkpoint too.

    opt_state.0.{mu,nu}.params.KEY    optax's adamw: the means of the gradient and of its square
    opt_state.0.count                 the number of its steps
    opt_state.{mu,nu}.params.KEY      MaxText's adam_pax, which is not read

The settings of Adam are in the config.yml that MaxText writes into the directory of the run.

The arrays of all layers of a weight are one, whose second axis counts the layers, unless
scan_layers is false: then the keys have their numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers.arrays import Arrays, Group
from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Span
from mckpt.containers.safe_pickle import short
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError
from mckpt.formats.base import Format, Names, packed, stored_shape
from mckpt.formats.megatron.chunked import Chunked
from mckpt.formats.megatron.optimizer import MASTER, Optimizer, kinds, prefix_of
from mckpt.formats.megatron.orbax_writing import ITEMS, METADATA, SHAPE, WEIGHTS, lay_out
from mckpt.formats.megatron.run_config import read_section
from mckpt.formats.megatron.torch_adam import NOTE, TorchAdam, with_masters
from mckpt.formats.scaling import with_factors
from mckpt.geometry.box import Layout, row_major
from mckpt.mapping import Bound, MappingFile
from mckpt.storage.files import read_json

NNX = ".value"  # ends the names of the weights in MaxText's form for NNX
COUNT = "opt_state.0.count"  # of the steps of Adam, as optax has it
# what begins the names of arrays, and their keys in torch_dist
STARTS = {
    f"{WEIGHTS}.": "",
    "opt_state.0.mu.": "optimizer.state.exp_avg.",
    "opt_state.0.nu.": "optimizer.state.exp_avg_sq.",
    COUNT: COUNT,
}
CONFIG, ADAMW = "config.yml", "adamw"
SETTINGS = ("adam_eps_root", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay", "learning_rate")
MASTER_KEY, MOMENT_KEY = (prefix_of(name, True) for name in (MASTER, "exp_avg"))


def place(path: Path) -> Path:
    """Returns the directory with the arrays of a checkpoint."""
    return path / ITEMS if (path / ITEMS / METADATA).is_file() else path


class _Tree(NamedTuple):
    """The tree of arrays that a directory describes."""

    group: Group  # of the weights and moments, by their keys in torch_dist
    shapes: dict[str, Any]  # as it states them, or None, by the names
    others: list[str]  # the names of other arrays

    @classmethod
    def of(cls, root: Path) -> _Tree:
        """Raises SourceError if the description is damaged, or has no weights."""
        found = read_json(root / METADATA, 1 << 30)
        try:
            ocdbt, driver = found["use_ocdbt"], "zarr3" if found["use_zarr3"] else "zarr"
            stated = {
                ".".join(str(part["key"]) for part in entry["key_metadata"]): value.get(SHAPE)
                for entry in found["tree_metadata"].values()
                if not (value := entry["value_metadata"]).get("skip_deserialize")
            }
        except (KeyError, TypeError, AttributeError) as e:
            raise SourceError(
                f"{root / METADATA}: does not describe the arrays of an Orbax checkpoint: {e!r};"
                " copy it again"
            ) from e
        weights = [name for name in stated if name.startswith(f"{WEIGHTS}.")]
        if not weights:
            raise SourceError(
                f"{root}: has no arrays below `{WEIGHTS}`, where MaxText has the weights; it has"
                f" {', '.join(list(stated)[:3]) or 'none'}; give the items of a training of MaxText"
            )
        ending = NNX if all(name.endswith(NNX) for name in weights) else ""
        names = {
            key + name.removeprefix(start).removesuffix(ending).removeprefix(f"{WEIGHTS}."): name
            for name in stated
            for start, key in STARTS.items()
            if name.startswith(start)
        }
        others = sorted(stated.keys() - names.values())
        return cls(Group(names, driver, ocdbt, METADATA), stated, others)

    def arrays(self, root: Path) -> Arrays:
        """Opens the arrays. Raises SourceError if one is damaged, or has another shape."""
        arrays = Arrays(root, self.group)
        for key, array in arrays.opened.items():
            name, shape = self.group.names[key], list(array.shape)
            if (stated := self.shapes[name]) not in (None, shape):
                raise SourceError(
                    f"{root}: {name} is {shape}, and {METADATA} states {stated}; copy the"
                    " checkpoint again"
                )
        return arrays


class _View(NamedTuple):
    """The order and the shape in which the elements of an array are read."""

    order: tuple[int, ...]  # of its axes in the file: the layers first
    shape: tuple[int, ...]  # as its rule has it
    turned: bool = False  # the last two axes of `shape` are in the other order in the file


class _Directory(Chunked):
    """The arrays as whole chunks, in a directory with a file for each; or in files of their own."""

    def __init__(self, arrays: Arrays, others: list[str], views: Mapping[str, _View]) -> None:
        """views: by key. The other arrays are read as they are stored. others: the names of arrays
        that are not read.
        """
        tensors, items = dict[str, Any](), dict[Any, tuple[str, int, int]]()
        for key, array in arrays.opened.items():
            shape = views[key].shape if key in views else array.shape
            files = arrays.plain_files.get(key, [key])
            axis = int(key not in views)  # of the layers
            ats = [tuple(n * (i == axis) for i in range(len(shape))) for n in range(len(files))]
            each = tuple(n if len(files) == 1 or i != axis else 1 for i, n in enumerate(shape))
            nbytes = arrays.objects[key].size // len(files)
            tensors[key] = (array.dtype.name, shape, [(at, each) for at in ats])
            items |= {(key, at): (file, 0, nbytes) for at, file in zip(ats, files, strict=True)}
        orders = {key: view.order for key, view in views.items()}
        root = arrays.root if arrays.plain_files else arrays.in_order(orders)
        trained = {key for key in tensors if f"{MOMENT_KEY}{key}" in tensors}
        metadata = Metadata(tensors, others, items, {})
        super().__init__(root, with_masters(metadata, trained))
        self.views = views

    def strides(self, key: str, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        if not self.views[key.removeprefix(MASTER_KEY)].turned:
            return None
        *lead, rows, columns = sizes
        return (*row_major((*lead, columns, rows))[:-2], 1, rows)

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        for (key, _), (file, at, nbytes) in self.metadata.items.items():
            yield Span(key, str(self.root / file), at, nbytes, self.metadata.tensors[key][0])


class Orbax(TorchAdam):
    """An opened checkpoint. The dialect of MaxText names its arrays. Weights of a training are
    their own master copies.
    """

    directory: _Directory
    lacking = ""  # why the settings of Adam are not known

    def __init__(self, path: Path) -> None:
        self.tree = _Tree.of(place(path))
        self.arrays = self.tree.arrays(place(path))
        super().__init__(_Directory(self.arrays, self.tree.others, {}), FORMAT)
        self.root = path
        opened = self.arrays.opened
        self.trained = COUNT in opened and any(key.startswith(MOMENT_KEY) for key in opened)
        self.iteration = None
        if self.trained:
            self.iteration = int.from_bytes(self.arrays.read(COUNT, 0, 4), "little")
            self.notes = (NOTE,)

    def beside(self, dialect: MappingFile) -> list[str]:
        kept = {"opt_state", "step"} if self.trained else {"step"}
        found = [name for name in super().beside(dialect) if name not in kept]
        pax = any(name.startswith("opt_state.mu.") for name in self.tree.others)
        return [f"{name} of adam_pax" if pax else name for name in found]

    def layout(self, names: Names) -> Layout:
        self._view_as(names)
        factors = {name: 1 / factor for name, factor in names.factors.items()}
        return with_factors(super().layout(names), factors)

    def _view_as(self, names: Names) -> None:
        """Makes the arrays those that the rules have."""
        scope, opened, plain = names.scope(), self.arrays.opened, self.arrays.plain_files
        views = {
            start + key: _view(b, opened[start + key].shape, scope, not plain)
            for b in names.bound
            for key, _ in b.global_keys()
            for start in STARTS.values()
            if start + key in opened
        }
        if views != self.directory.views:
            self.directory = _Directory(self.arrays, self.tree.others, views)
            self.metadata = self.directory.metadata

    def settings(self) -> tuple[list[dict[str, Any]], set[float]] | None:
        """Returns the settings of Adam, which MaxText's config has, and the number of its steps.

        Without such a config, and of another optimizer, `lacking` says why the settings are not
        known. A conversion that needs them raises that text as its error.
        """
        if not self.trained:
            return None
        places = self.root, *self.root.absolute().parents[:3]
        path = next((p for at in places if (p := at / CONFIG).is_file()), None)
        found = read_section(path, None) if path else None
        config = found if isinstance(found, dict) else {}
        stated = [config.get(name) for name in SETTINGS]
        states = (name for name in self.tree.others if name.startswith("opt_state."))
        # other optimizers of optax have states with the names of Adam's, and more
        more = next((name for name in states if ".count" not in name), None)
        if (kind := config.get("opt_type", ADAMW)) != ADAMW or more:
            why = f"{ADAMW} does not keep {more}" if more else f"{path}: opt_type is {short(kind)}"
            self.lacking = (
                f"{self.root}: is of another optimizer than {ADAMW}, which mckpt does not convert:"
                f" {why}. {kinds.NO_OPTIMIZER.capitalize()}"
            )
        elif stated[0] != 0 or not all(type(number) in (int, float) for number in stated):
            self.lacking = (
                f"{self.root}: MaxText does not store the settings of Adam in it. Put the"
                f" {CONFIG} of the run into this directory or that of the run, with numbers for"
                f" {', '.join(SETTINGS)}; adam_eps_root must be 0, as in Megatron. Or give"
                " --no-optimizer to convert the weights alone"
            )
        _, b1, b2, eps, decay, lr = [0] * len(SETTINGS) if self.lacking else stated
        group = {"betas": (b1, b2), "eps": eps, "weight_decay": decay, "lr": lr}
        return [group], {float(self.iteration or 0)}

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the state of Adam. The gradient of a weight that MaxText stores times a number is
        that of the weight divided by it, and the moments are its mean and that of its square.
        """
        self._view_as(names)
        is_parameter = names.mapping.registration.is_parameter
        buffers = [b for b in names.bound if not is_parameter(b.rule.key)]
        ends = tuple(f".{key}" for b in buffers for key, _ in b.global_keys())
        trained, tensors = copy.copy(self), self.metadata.tensors.items()
        kept = {key: stored for key, stored in tensors if not key.endswith(ends)}
        trained.metadata = self.metadata._replace(tensors=kept)
        found = super(Orbax, trained).optimizer(names)
        if found is None:
            return None
        self.notes = (
            NOTE,
            *(
                f"MaxText trains {name} times {factor:.6g}: its moments are converted, and Adam's"
                f" next steps of {name} are {factor:.6g} times as large as in MaxText"
                for name, factor in names.factors.items()
            ),
        )
        factors = {
            f"{name}@{state}": factor**power
            for name, factor in names.factors.items()
            for state, power in ((MASTER, -1), ("exp_avg", 1), ("exp_avg_sq", 2))
        }
        return found._replace(layout=with_factors(found.layout, factors), lacking=self.lacking)


def _view(b: Bound, stored: tuple[int, ...], scope: dict[str, Any], turns: bool) -> _View:
    """Returns how an array of this shape is read.

    turns: the arrays of rules that transpose are transposed before their elements are read.
    """
    order = tuple(range(len(stored)))
    if "layer" in b.rule.stacked() and len(stored) > 1:
        order = (1, 0, *order[2:])
    shape = tuple(stored[axis] for axis in order)
    axes, inner = b.axes(scope), stored_shape(b.rule, packed(b.rule, scope))
    own, lead = tuple(e(scope) for e in b.rule.shape) or inner, len(axes)
    if shape != (*axes, *own):  # an error, or a vocabulary with padding
        return _View(order, shape)
    turns &= b.rule.transposed
    if turns:  # the file has long ranges of the matrix's rows
        ends = (math.prod(shape[lead:n]) for n in range(lead, len(shape)))
        end = lead + [*ends].index(inner[0])
        order = (*order[:lead], *order[end:], *order[lead:end])
    return _View(order, (*axes, *inner), turns)


FORMAT = Format(
    "orbax",
    f"{METADATA} of Orbax",
    megatron=True,
    detect=lambda path: (place(path) / METADATA).is_file(),
    open=Orbax,
    lay_out=lay_out,
    parts=(f"{ITEMS}/*", f"{ITEMS}/*/*", "_CHECKPOINT_METADATA", "commit_success.txt"),
    torch_optimizer=True,
    global_keys=True,
    layer_keys=True,
    last=f"{ITEMS}/{METADATA}",
)
