"""The checkpoints that verl saves of a training with Megatron, since June 2026 in three parts:

    model/dist_ckpt/          the weights, in torch_dist, or model/huggingface/
    optimizer/dist_ckpt/      the optimizer and the schedule in torch_dist, without weights
    extra/dist_ckpt/          random states, which are not read
    transformer_config.json   the parallel sizes

Before, dist_ckpt had all but a Hugging Face directory; or also without the weights, which were in
huggingface/ beside it. A checkpoint has no args.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from mckpt.containers.entries import Span
from mckpt.errors import SourceError
from mckpt.formats import hf
from mckpt.formats.base import FAMILY, Format, Names, dtypes_of
from mckpt.formats.hf import HuggingFace
from mckpt.formats.megatron.chunked import Directory
from mckpt.formats.megatron.interface import Common
from mckpt.formats.megatron.optimizer import Optimizer, keys_of
from mckpt.formats.megatron.save_directory import VERL_HF, VERL_WEIGHTS, verl_step
from mckpt.formats.megatron.torch_dist import FORMAT as TORCH_DIST
from mckpt.formats.megatron.torch_dist import METADATA, TorchDist
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import MappingFile, dialect_for, dialect_of
from mckpt.storage.files import read_json

CONFIG = "transformer_config.json"
# fields of Megatron's TransformerConfig that its args call otherwise
_ARGS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_BESIDE = re.compile(r"(chained_\d+\.)?(optimizer|rng_state)")  # begins keys of other than weights
Facts = tuple[dict[str, str], int | None]


def _role(path: Path) -> Path:
    """Returns the directory of the role, such as `actor`, that has these weights."""
    return path.parent.parent if path.parent.name == "model" else path.parent


def _optimizer_of(path: Path) -> Path | None:
    """Returns the directory with the optimizer of weights; None if there is none. verl makes
    directories that it leaves empty.

    Raises SourceError if the directory has lost its index.
    """
    for part in (_role(path) / "optimizer", _role(path)):
        found = part / VERL_WEIGHTS
        if (found / METADATA).is_file():
            return found
        if any(found.glob("*.distcp")):
            raise SourceError(f"{found / METADATA}: is not there; copy the checkpoint again")
    return None


def detect(path: Path) -> bool:
    """Returns whether these are the weights of a training in the names of Hugging Face, beside an
    optimizer. Beside one that has lost its index they are a Hugging Face directory like others.
    """
    with suppress(SourceError):
        return path.name == VERL_HF and hf.detect(path) and _optimizer_of(path) is not None
    return False


class OptimizerDirectory(TorchDist):
    """The directory of an optimizer, beside the one of its weights."""

    facts: Callable[[Names], Facts]

    def __init__(self, weights: Path, states: Path) -> None:
        super().__init__(Directory(states), TORCH_DIST)
        self.role, self.apart = _role(weights), states != weights

    def weight_facts(self, names: Names) -> Facts:
        return self.facts(names)

    def parallel(self) -> Parallel:
        path = self.role / CONFIG
        config = read_json(path, 1 << 24) if path.is_file() else {}
        if not isinstance(config, dict):
            raise SourceError(f"{path}: is not an object")
        return Parallel.of_args(config | {arg: config.get(key) for arg, key in _ARGS.items()})

    @cached_property
    def common(self) -> Common:
        fields, _, where = self._common
        if self.apart and not fields:
            raise SourceError(f"{where}: is not there; copy the checkpoint again")
        if self.apart:  # args are those of weights
            fields = {name: value for name, value in fields.items() if name != "args"}
        return Common({**fields, **verl_step(self.role)}, where)

    def beside(self, dialect: MappingFile) -> list[str]:
        extra = ["rng_state"] if (self.role / "extra").is_dir() else []
        return sorted({*super().beside(dialect), *extra})


class VerlTorchDist(TorchDist):
    """An opened checkpoint of verl whose weights are in torch_dist."""

    def __init__(self, path: Path) -> None:
        super().__init__(Directory(path, nemo=True), TORCH_DIST)
        self.states = OptimizerDirectory(path, _optimizer_of(path) or path)
        self.states.facts = super().weight_facts

    @property
    def has_weights(self) -> bool:
        """Returns whether it has more than an optimizer and random states."""
        return any(not _BESIDE.match(key) for key in self.keys())

    @property
    def common(self) -> Common:
        return self.states.common

    def parallel(self) -> Parallel:
        return self.states.parallel()

    def optimizer(self, names: Names) -> Optimizer | None:
        return self.states.optimizer(names)

    def beside(self, dialect: MappingFile) -> list[str]:
        return self.states.beside(dialect)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        yield from super().spans(problems)
        if self.states.apart:
            yield from self.states.spans(problems)


class VerlTraining(HuggingFace):
    """An opened checkpoint of verl whose weights are a Hugging Face directory."""

    def __init__(self, path: Path, trained: bool = True) -> None:
        """trained: it is read as one of Megatron, with its optimizer."""
        super().__init__(path)
        self.format = FORMAT if trained else hf.FORMAT
        found = _optimizer_of(path)
        assert found is not None  # `detect` found it
        self.states = OptimizerDirectory(path, found)

    @property
    def common(self) -> Common:
        return self.states.common

    def parallel(self) -> Parallel:
        return self.states.parallel() if self.format is FORMAT else super().parallel()

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, whose keys have the dialect of the model's family, if they
        name weights at all.
        """
        tensors, parallel = self.states.metadata.tensors, self.states.parallel()
        named = keys_of(tensors).items()
        keys = {key: tensors[next(iter(states.values()))] for key, states in named}
        dialect = dialect_of(keys, dist=True) if keys else dialect_for(names.mapping)
        local = Names(dialect, names.dims, {}, parallel)
        weights = copy.copy(self.states)
        weights.metadata = weights.metadata._replace(tensors=keys)
        local = replace(local, choices={**weights.choices(local), **names.choices})
        dtypes = dtypes_of(self.layout(names))
        # the number of rows with padding is not stored: one of these fills the buffers
        rows = int(names.dims["vocab_size"])
        padded = {-(-rows // step) * step for step in (parallel.tp, 128 * parallel.tp)}
        errors: list[SourceError] = []
        for count in sorted(padded):
            self.states.facts = partial(_stated, (dtypes, count))
            try:
                return self.states.optimizer(local)
            except SourceError as e:
                errors.append(e)
        raise errors[0]

    def beside(self, mapping: MappingFile) -> list[str]:
        return self.states.beside(mapping)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        yield from super().spans(problems)
        yield from self.states.spans(problems)


def _stated(facts: Facts, names: Names) -> Facts:
    return facts


FORMAT = Format(
    "verl_training",
    "model/huggingface with optimizer/dist_ckpt of verl",
    megatron=True,
    detect=detect,
    open=VerlTraining,
    parts=(),
    trainer=FAMILY,
    global_keys=True,
)
