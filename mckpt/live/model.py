"""A live model as a checkpoint: the parts that all ranks hold, under the names of `torch_dist`.

So the mapping files, the proof and the join that read a directory read a model too. Only the bytes
are somewhere else: each rank is one file (`memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from msgspec import structs

from mckpt.adapters.checkpoint import AdapterCheckpoint, of_files
from mckpt.adapters.factors import AdapterNames
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.files import CheckpointFiles
from mckpt.checkpoint.model import ModelDescription
from mckpt.containers import safe_pickle
from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Span
from mckpt.containers.torch_spans import Item
from mckpt.errors import CoverError, SourceError, UsageError, show_again, show_as
from mckpt.formats import places
from mckpt.formats.base import Names
from mckpt.formats.foreign import FACTOR
from mckpt.formats.megatron import torch_dist
from mckpt.formats.megatron.chunked import Chunked
from mckpt.formats.megatron.interface import MARKS, Common
from mckpt.formats.megatron.optimizer import Optimizer
from mckpt.formats.megatron.save_directory import IterationDirectory
from mckpt.geometry.box import Layout
from mckpt.geometry.join import join
from mckpt.geometry.parallel import Parallel
from mckpt.live.memory import Memory, Part
from mckpt.live.optimizer import LiveOptimizer, OptimizerFacts, parts_of
from mckpt.live.settings import refuse_other_settings
from mckpt.live.together import gathered, own_result, rank_and_world
from mckpt.options import SourceOptions
from mckpt.storage import sparse_copy

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT = structs.replace(
    torch_dist.FORMAT, name="live", seen_as="a model in memory", optimizer=False, readable=False
)
# arg of an uneven pipeline -> its name in the config of a model
_UNEVEN = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
}
_PLAIN = (bool, int, float, str, type(None))


class RankParts(Chunked):
    """The parts that all ranks hold."""

    def __init__(self, root: Path, held: Sequence[Sequence[Part]], own: int | None) -> None:
        """held: the parts of each rank. own: the rank whose parts are taken where several ranks
        hold the same one; None: they take turns.

        Raises SourceError if the ranks describe one tensor in different ways.
        """
        holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, Part]]] = {}
        tensors: dict[str, tuple[str, tuple[int, ...], list[Any]]] = {}
        self._strides: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        problems = []
        for rank, parts in enumerate(held):
            for part in parts:
                known = tensors.setdefault(part.key, (part.dtype, part.whole, []))
                strides = self._strides.setdefault((part.key, part.sizes), part.strides)
                same = holders.setdefault((part.key, part.offset), [])
                if not same:
                    known[2].append((part.offset, part.sizes))
                sizes = same[0][1].sizes if same else part.sizes
                stated = part.dtype, part.whole, part.strides, part.sizes
                if stated != (*known[:2], strides, sizes):
                    problems.append(
                        f"{part.key}: rank {rank} holds {part.dtype} {list(part.sizes)} of"
                        f" {list(part.whole)}, and another rank {known[0]} {list(sizes)} of"
                        f" {list(known[1])}"
                    )
                same.append((rank, part))
        if problems:
            raise SourceError.of("the ranks do not hold parts of one model:", problems)
        self.holders = holders  # (key, offset) of a part -> the ranks that hold it, and their parts
        items: dict[tuple[str, Any], tuple[str, int, int]] = {}
        # (place of the part that is taken, place of another copy) of parts that `own` has twice
        self.copies: list[tuple[Part, Part]] = []
        for turn, (at, same) in enumerate(holders.items()):
            mine = [part for rank, part in same if rank == own]
            rank, part = same[turn % len(same) if own is None else 0]
            if mine and own is not None:
                rank, part = own, mine[0]
            items[at] = f"rank_{rank:06d}", part.at, part.nbytes
            self.copies += [(part, other) for other in mine[1:] if other.at != part.at]
        self.sizes: list[int] = []  # bytes of the memory of each rank
        self.optimizer: OptimizerFacts | None = (
            None  # that of the model, if its state is among the parts
        )
        super().__init__(root, Metadata(tensors, [], items, {}))

    def rank_of(self, file: int) -> int:
        """Returns the rank whose file has this number."""
        return int(self.files[file].removeprefix("rank_"))

    def strides(self, key: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return self._strides[key, sizes]

    def object(self, key: str) -> tuple[Any, Any]:
        raise KeyError(key)  # there are none

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        return iter(())


class OpenedModel(torch_dist.TorchDist):
    """A live model whose parts are known and whose names are not yet understood."""

    def __init__(
        self, directory: RankParts, sizes: Parallel, args: Mapping[str, Any] | None
    ) -> None:
        super().__init__(directory, FORMAT)
        self.sizes = sizes
        self.temporary = ExitStack()  # removes the directory that stands for the model
        self.state = directory.optimizer
        self.adapters: OpenedModel | None = None  # the factors of its adapters (LoRA)
        self.alpha = 0.0  # of the adapters
        fields: dict[str, Any] = {"content_metadata": dict(MARKS)}
        if args is not None:
            fields["args"] = safe_pickle.namespace(**args)
        if self.state is not None:
            fields |= {"optimizer": self.state.common(), **self.state.schedule}
        common = Common(fields, "the live model")
        # cached properties that read files
        self.__dict__.update(common=common, _common=(fields, {}, common.where))

    def parallel(self) -> Parallel:
        """Returns the sizes of the args, which describe uneven pipelines too; else the running
        ones.
        """
        return self.sizes if self.common.args is None else self.common.parallel()

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the state of the live optimizer; None if it is not among the parts."""
        if self.state is None or (found := super().optimizer(names)) is None:
            return None
        return found._replace(scalers=self.state.scalers, live=True)

    def layout(self, names: Names) -> Layout:
        """Returns the logical box that each part holds. Raises SourceError with every parameter
        that the names do not have, that is missing or of another shape.
        """
        try:
            return super().layout(names)
        except (SourceError, CoverError) as error:
            raise SourceError.of(
                "the parameters of the live model are not those of the model that the checkpoint or"
                " config.json describes:",
                error.problems,
                "Build the model with the args of the checkpoint; `mckpt inspect SRC"
                " --megatron-args` prints them.",
            ) from None


class Described(TypedDict, total=False):
    """The keywords that describe a live model, as those of mckpt.open do."""

    like: str | Path  # the Hugging Face directory of the model, or its name on the Hub
    args: Any  # Megatron-LM's get_args(), for a model that no directory describes
    family: str
    mapping: str | Path
    vocab_size: int
    settings: Mapping[str, Any]


def describe(
    model_chunks: Sequence[Any],
    *,
    adapter: Literal["none", "only"] = "none",
    **described: Unpack[Described],
) -> Checkpoint:
    """Returns a live model as a checkpoint: its mapping, dims, logical tensors and layout, in which
    each rank is a file. The elements cannot be read from it. All ranks call it.

    adapter: "only" returns the factors of the adapters (LoRA) that wrap its modules, in the place
        of its weights.

    Raises one error on all ranks if a parameter has no name in the mapping, or if the parts of all
    ranks do not cover each whole tensor once.
    """
    given = {"function": "describe", "adapter": adapter, **stated(described)}
    memory = own_result(lambda: Memory(model_chunks), lambda _: given)
    model = collected(memory, described)

    def prove() -> Checkpoint:
        join(model.layout, model.layout)
        found = adapter_of(model)
        if found is not None:
            join(found.layout, found.layout)
        refuse_other_settings(memory.chunks, model)
        return required(found) if adapter == "only" else model

    return own_result(prove)


def has_adapters(model: Checkpoint) -> bool:
    """Returns whether modules of a live model are wrapped by adapters."""
    return cast(OpenedModel, model.opened).adapters is not None


def adapter_of(model: Checkpoint) -> AdapterCheckpoint | None:
    """Returns the factors of the adapters of a live model, whose optimizer is left out; None if it
    has no adapters. The errors are those of an adapter in a checkpoint.
    """
    found = named_adapter(model)
    return None if found is None else found[0]


def named_adapter(model: Checkpoint) -> tuple[AdapterCheckpoint, AdapterNames] | None:
    """Returns `adapter_of`, and the names of the factors in the model."""
    opened = cast(OpenedModel, model.opened)
    if opened.adapters is None:
        return None
    return of_files(replace(model.files, opened=opened.adapters), model.model, opened.alpha)


def required(adapter: AdapterCheckpoint | None) -> AdapterCheckpoint:
    """Returns the adapter. Raises UsageError if the live model has none."""
    if adapter is None:
        raise UsageError("the live model has no adapters (LoRA); leave out `adapter`")
    return adapter


def collected(
    memory: Memory,
    described: Described | None = None,
    *,
    own: bool = False,
    optimizer: LiveOptimizer | None = None,
) -> Checkpoint:
    """Returns the model whose chunks all ranks have in their memory. Its layout is not proved.

    own: where several ranks hold the same part, take that of this rank; otherwise the ranks take
    turns.

    Raises one error on all ranks, with all parameters that no rank's `sharded_state_dict()` names.
    """
    described = described or {}
    if unknown := described.keys() - Described.__annotations__.keys():
        raise TypeError(f"unexpected keyword: {', '.join(sorted(unknown))}")
    options = own_result(lambda: _options(described))

    def parts() -> tuple[list[Part], list[Part], dict[Any, str], int, OptimizerFacts | None]:
        found, problems = memory.parts()
        if problems:
            raise SourceError.of("the model has weights that cannot be described:", problems)
        keys = {part.key for part in found}
        factors = [part for part in found if _is_factor(part.key, keys)]
        found = [part for part in found if not _is_factor(part.key, keys)]
        alphas = memory.alphas()
        if optimizer is None:
            return found, factors, alphas, memory.nbytes, None
        if factors:
            raise UsageError(
                "the modules of the live model have adapters (LoRA), and mckpt does not read or"
                " write the optimizer of a model with adapters; leave the optimizer out"
            )
        more = parts_of(memory, optimizer, found, to_save=not own)
        return found + more, factors, alphas, memory.nbytes, optimizer.recorded()

    every = gathered(parts)
    temporary = ExitStack()
    root = temporary.enter_context(sparse_copy.scratch())
    show_as(str(root), "the live model")
    temporary.callback(show_again, str(root))
    taken = rank_and_world()[0] if own else None
    directory = RankParts(root, [weights for weights, *_ in every], taken)
    directory.sizes = [nbytes for *_, nbytes, _ in every]
    if recorded := [one for *_, one in every if one is not None]:
        directory.optimizer = OptimizerFacts.merged(recorded)
    args = described.get("args")
    plain = None if args is None else _plain(args if isinstance(args, Mapping) else vars(args))
    opened = OpenedModel(directory, sizes_of(memory), plain)
    opened.temporary = temporary
    if any(factors for _, factors, *_ in every):
        directory = RankParts(root, [factors for _, factors, *_ in every], taken)
        opened.adapters = OpenedModel(directory, opened.sizes, plain)
        opened.adapters.temporary = temporary
        opened.alpha = _alpha([alphas for _, _, alphas, *_ in every])
    if options.like is not None:  # a conversion copies the files of this directory
        (root / "hf").symlink_to(options.like, target_is_directory=True)
    files = CheckpointFiles(root, options, IterationDirectory(root, root, "live"), opened)
    return Checkpoint(files, ModelDescription(files))


def _is_factor(key: str, keys: Collection[str]) -> bool:
    """Returns whether a key is that of a factor of an adapter. Raises UsageError for another tensor
    of an adapter.

    keys: of all tensors of the rank. A linear of a tower has both factors in its own module.
    """
    if ".adapter." not in key:
        ends = ".linear_in.weight", ".linear_out.weight"
        return key.endswith(ends) and all(key.rpartition(".linear_")[0] + e in keys for e in ends)
    if not FACTOR.search(key):
        raise UsageError(
            f"{key}: belongs to an adapter of a kind that mckpt does not know. It knows LoRA,"
            " CanonicalLoRA and DoRA of Megatron-Bridge, whose tensors are linear_in.weight,"
            " linear_out.weight and weight_magnitude"
        )
    return True


def _alpha(every: Sequence[Mapping[Any, str]]) -> float:
    """Returns the alpha of all adapters, of which each rank has some. Raises UsageError unless they
    have the same.
    """
    found = {alpha: module for alphas in every for alpha, module in alphas.items()}
    if len(found) != 1 or None in found:
        raise UsageError.of(
            "the adapters of the live model must have one alpha, as the attribute `alpha`:",
            [f"{module}: {alpha}" for alpha, module in found.items()],
        )
    return float(next(iter(found)))


def stated(described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a description that must be equal on all ranks. The args of a rank may
    say which one it is.
    """
    return {name: value if name != "args" else "given" for name, value in described.items()}


def ranks_of(model: Checkpoint) -> RankParts:
    """Returns the parts that all ranks hold of a live model."""
    directory = cast(OpenedModel, model.opened).directory
    return cast(RankParts, directory)


def _options(described: Described) -> SourceOptions:
    like, file = described.get("like"), described.get("mapping")
    return SourceOptions.of(
        described,
        like=None if like is None else places.local(like, weights=False),
        mapping=None if file is None else str(file),
    )


def release(model: Checkpoint) -> None:
    """Removes the temporary directory that stands for a live model."""
    cast(OpenedModel, model.opened).temporary.close()


def sizes_of(memory: Memory) -> Parallel:
    from megatron.core import parallel_state as ps

    config = memory.chunks[0].config
    pp = ps.get_pipeline_model_parallel_world_size()
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    args = {
        "tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": len(memory.chunks),
        "expert_model_parallel_size": ps.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": ps.get_expert_tensor_parallel_world_size(),
    }
    if pp > 1:
        args |= {arg: getattr(config, name, None) for arg, name in _UNEVEN.items()}
        layout = getattr(layout, "input_data", layout)
        if isinstance(layout, (list, tuple)):  # of names, or of members of an Enum
            layout = [[getattr(one, "name", one) for one in stage] for stage in layout]
        args["pipeline_model_parallel_layout"] = layout
    return Parallel.of_args(args)


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the args of Megatron-LM that are plain values, and those that are dtypes of torch, as
    a checkpoint stores them.
    """
    out: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, _PLAIN) or (
            isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value)
        ):
            out[name] = value
        elif str(value).startswith("torch."):
            out[name] = safe_pickle.torch_dtype(str(value).removeprefix("torch."))
    if not out:
        raise UsageError("args: has no args of Megatron; give what get_args() returns")
    return out
