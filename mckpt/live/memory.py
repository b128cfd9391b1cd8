"""The weights that a live model has in this process: which part of which whole tensor lies where.

All parameters and buffers of this rank count as one file: they lie one after the other in the
order of the modules, each at a multiple of ALIGN bytes. A byte of this file is called a place.

    rank 3     [embedding.word_embeddings.weight | decoder.layers.0...linear_qkv.weight | ...]
    place       0                                  262144
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mckpt.errors import UsageError
from mckpt.formats.foreign import FACTOR
from mckpt.live.asking import Given
from mckpt.live.together import call, gathered
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

ALIGN = 256  # bytes; more than the size of any element


class Part(NamedTuple):
    """A part of a whole tensor, as `sharded_state_dict()` describes it and one rank holds it."""

    key: str  # of the whole tensor, as in a torch_dist checkpoint
    dtype: str
    whole: tuple[int, ...]  # shape of the whole tensor, with the axes of layers and experts
    offset: tuple[int, ...]  # of the part in the whole tensor
    sizes: tuple[int, ...]  # of the part, 1 along the axes of layers and experts
    strides: tuple[int, ...]  # elements, along the same axes
    at: int  # the place of its first element

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * itemsize(self.dtype)


class Weight(NamedTuple):
    """A parameter or a buffer of this rank, or a tensor of its optimizer's state.

    It is looked up in its module each time, because a framework may replace it, as by moving it to
    the host and back.
    """

    name: str
    module: Any  # of a state: an object with the tensor
    attribute: str
    at: int  # the place of its first byte
    nbytes: int
    expert: bool  # its copies are in the data-parallel group of the experts
    parameter: bool
    state: bool = False  # of an optimizer; other ranks may hold other elements of it

    def detached(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.module, self.attribute).detach()
        return found if found.is_contiguous() else _not_contiguous(self.name)

    def tensor(self) -> torch.Tensor:
        """Returns its elements as one axis."""
        return self.detached().reshape(-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the sizes of its axes."""
        return tuple(getattr(self.module, self.attribute).shape)

    @property
    def dtype(self) -> str:
        """Returns the name of its dtype, such as bfloat16."""
        return str(getattr(self.module, self.attribute).dtype).removeprefix("torch.")

    def bytes(self) -> torch.Tensor:
        """Returns its bytes as one axis."""
        import torch

        return self.tensor().view(torch.uint8)


def _not_contiguous(name: str) -> Any:
    raise UsageError(f"{name}: is not contiguous, so mckpt cannot fill it; call .contiguous()")


class Memory:
    """The weights of the chunks of a model in this process."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Raises UsageError for a weight whose class is not torch.Tensor, such as an fp8 weight, or
        whose memory is released.
        """
        listed = _listed(chunks)
        self._chunks, self.chunks = listed, [unwrapped(chunk) for chunk in listed]
        self._wrappers = [wrapper for chunk in listed for wrapper in _wrappers(chunk)]
        self.weights: list[Weight] = []
        self._kept: dict[int, torch.Tensor] = {}  # number of a weight -> its copy
        self._lent: dict[int, torch.Tensor] = {}  # and what is on the device of `_kept` on the host
        self._parts: set[int] = set()  # numbers of the weights that the model's tensors are made of
        for chunk in self.chunks:
            for path, module in chunk.named_modules():
                for attribute, tensor in _tensors(module):
                    _refuse_released(tensor, f"{path}.{attribute}")
        # first, because a router then replaces its expert_bias by one in fp32
        self._shards = list(_shards(self.chunks))
        self._at: dict[int, int] = {}  # address of a weight -> its number
        end = 0
        for number, chunk in enumerate(self.chunks):
            for path, module in chunk.named_modules():
                for attribute, tensor in _tensors(module):
                    name = f"chunk {number}: {path}.{attribute}"
                    address = _address(tensor, name)
                    if address in self._at:  # tied weights are one tensor
                        continue
                    self._at[address] = len(self.weights)
                    nbytes = tensor.numel() * tensor.element_size()
                    expert = not getattr(tensor, "allreduce", True)
                    parameter = attribute in module._parameters
                    self.weights.append(
                        Weight(name, module, attribute, end, nbytes, expert, parameter)
                    )
                    end += -(-nbytes // ALIGN) * ALIGN
        self.nbytes = end
        self._places = [weight.at for weight in self.weights]
        self._flat: dict[tuple[int, str], torch.Tensor] = {}
        inner = [module._modules for chunk in self.chunks for module in chunk.modules()]
        self._modules = [(modules, [*modules.values()]) for modules in inner if modules]
        self._leaves = [modules for modules in inner if not modules]
        self._slots = [
            (weight.module, "_parameters" if weight.parameter else "_buffers", weight.attribute)
            for weight in self.weights
        ]
        self._forms = [_form(weight) for weight in self.weights]
        self._seen: _Seen | None = None
        self._home = self.device

    @property
    def device(self) -> torch.device:
        import torch

        if not self.weights:
            return torch.device("cpu")
        device: torch.device = getattr(self.weights[0].module, self.weights[0].attribute).device
        return device

    def masters(self) -> list[str]:
        """Returns the names of the parameters of which an optimizer has master copies."""
        return [
            weight.name
            for weight in self.weights
            if hasattr(getattr(weight.module, weight.attribute), "main_param")
        ]

    def refuse_changed(self) -> None:
        """Raises UsageError unless the modules are the same as in the beginning, and their weights
        have the same dtype and shape and their elements are in memory.
        """
        changed = any([*inner.values()] != before for inner, before in self._modules)
        if changed or any(self._leaves):
            raise UsageError(
                "modules of the live model were added, removed or replaced since it was described;"
                " make the Sync again"
            )
        # a thousand experts are looked at in less than a millisecond, and in ten one by one
        tensors = [getattr(module, kind).get(name) for module, kind, name in self._slots]
        if not self._kept and self._seen is not None and self._seen.still(tensors):
            return
        # strict=False: tensors of an optimizer's state come behind the weights, and have no form
        for number, (weight, form) in enumerate(zip(self.weights, self._forms, strict=False)):
            if number in self._kept:
                continue
            tensors[number] = tensor = getattr(weight.module, weight.attribute, None)
            if tensor is None:
                raise UsageError(
                    f"{weight.name}: the model no longer has this weight; make the Sync again"
                )
            _refuse_released(tensor, weight.name)
            if (found := _form(weight)) != form:
                said = [
                    f"{str(d).removeprefix('torch.')} {list(shape)}" for d, shape in (form, found)
                ]
                raise UsageError(
                    f"{weight.name}: was {said[0]} when the live model was described, and is"
                    f" {said[1]} now; make the Sync again"
                )
            weight.detached()
        self._seen = None if self._kept else _Seen.of(tensors)

    def keep(self) -> None:
        """Copies all weights. `whole` and `view` return the copies until `refresh`."""
        self._flat.clear()
        self._kept = {i: weight.detached().clone() for i, weight in enumerate(self.weights)}

    def take(self, given: Given, named: Iterable[tuple[str, Any]] | None) -> None:
        """Takes tensors in the place of the weights, also tensors of the host, until `refresh`.

        given: by the names of the weights. named: the name of each weight, and the weight; without
            it, as `named_parameters()` and `named_buffers()` of the chunks have them.

        Raises UsageError for a name that is missing or left over, and for another form.
        """
        held = {id(getattr(w.module, w.attribute)): i for i, w in enumerate(self.weights)}
        listed = list(named) if named is not None else self._named()
        found = {name: held.get(id(tensor)) for name, tensor in listed}
        wrong = [f"{name}: the model has no such weight" for name in given if name not in found]
        names = {number: name for name, number in found.items()}
        for number in sorted(self._parts):
            name, wanted = names.get(number, self.weights[number].name), self._forms[number]
            if (tensor := given.get(name)) is None:
                wrong.append(f"{name}: is missing")
            elif (tensor.dtype, tensor.shape) != wanted or not tensor.is_contiguous():
                form = f"{tensor.dtype} {list(tensor.shape)}"
                wrong.append(
                    f"{name}: is {form}, and must be contiguous {wanted[0]} {list(wanted[1])}"
                )
            else:
                self._kept[number] = tensor.detach()
        if wrong:
            raise UsageError.of("`weights` are not those of the live model:", wrong)

    def _named(self) -> list[tuple[str, Any]]:
        """Returns the weights of all chunks, by names that must differ."""
        chunks = self._chunks
        listed = [pair for c in chunks for pair in (*c.named_parameters(), *c.named_buffers())]
        if len(dict(listed)) < len(listed):
            raise UsageError("weights: chunks of the model have the same names; give `named`")
        return listed

    def whole(self, number: int) -> torch.Tensor:
        """Returns a weight, or its copy, on the device."""
        weight = self.weights[number]
        kept = self._kept.get(number)
        if kept is None:
            return getattr(weight.module, weight.attribute)
        if kept.device == self._home:
            return kept
        if number not in self._lent:  # not non_blocking: the owner may change it after the call
            self._lent[number] = kept.to(self._home)
        return self._lent[number]

    def give_back(self) -> None:
        """Frees what is on the device of tensors of the host."""
        if self._lent:
            self._lent.clear()
            self._flat.clear()

    def add(self, name: str, state: Any, expert: bool) -> int:
        """Adds a tensor of the optimizer's state behind all others, and returns the place of its
        first byte. It is the attribute `tensor` of `state`.
        """
        at, nbytes = self.nbytes, state.tensor.numel() * state.tensor.element_size()
        self.weights.append(Weight(name, state, "tensor", at, nbytes, expert, False, True))
        self._places.append(at)
        self.nbytes += -(-nbytes // ALIGN) * ALIGN
        return at

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of the weight that a parameter is; None if the model lacks it."""
        return self._at.get(tensor.data_ptr())

    def complete(self, replaced: bool = False) -> None:
        """Completes the parameters of the last step, unless other tensors come in their place. With
        overlap_param_gather each rank has only its own part of them until the next forward pass.
        All ranks call it.

        Raises the errors of `refuse_changed` on all ranks, or UsageError if only some replace them.
        """
        late = [
            wrapper
            for wrapper in self._wrappers
            if getattr(getattr(wrapper, "ddp_config", None), "overlap_param_gather", False)
        ]
        if late:
            look = bool if replaced else self.refuse_changed
            gathered(look, stated=lambda _: {"weights": replaced})
        for wrapper in () if replaced else late:
            call(wrapper.start_param_sync, force_sync=True)

    def refresh(self) -> None:
        """Forgets where the weights were: `view` looks for them again."""
        self._flat.clear()
        self._kept, self._lent = {}, {}

    def number(self, place: int) -> int:
        """Returns the number of the weight that has a place."""
        return bisect_right(self._places, place) - 1

    def located(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the weights that have places, and the bytes before these."""
        starts = np.array(self._places, "i8")
        numbers = np.searchsorted(starts, places, "right") - 1
        return numbers, places - starts[numbers]

    @property
    def on_device(self) -> bool:
        """Returns whether no weight was replaced by a tensor of the host."""
        return all(kept.device == self._home for kept in self._kept.values())

    def addresses(self) -> np.ndarray:
        """Returns the address of each weight, or of its copy, as `refuse_changed` found it."""
        found = [0] * len(self.weights)
        if self._seen is not None:
            found[: len(self._slots)] = self._seen.addresses
        for number, kept in self._kept.items():
            found[number] = kept.data_ptr()
        return np.array(found, "i8")

    def view(
        self, place: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Returns elements of a weight. `place` is that of the first one; strides are elements."""
        number = bisect_right(self._places, place) - 1  # not by a call, which would take as long
        weight = self.weights[number]
        if (flat := self._flat.get((number, dtype))) is None:
            import torch

            wanted = getattr(torch, dtype)
            flat = self.whole(number) if number in self._kept else weight.detached()
            if flat.dtype is not wanted:
                flat = flat.reshape(-1).view(wanted)
            self._flat[number, dtype] = flat
        start = flat.storage_offset() + (place - weight.at) // itemsize(dtype)
        return flat.as_strided(shape, strides, start)

    def alphas(self) -> dict[Any, str]:
        """Returns each alpha of the adapters (LoRA) of the model, None if one does not state it,
        and the name of a module that has it.
        """
        return {
            getattr(module, "alpha", None): f"chunk {number}: {path}"
            for number, chunk in enumerate(self.chunks)
            for path, module in chunk.named_modules()
            if FACTOR.search(f"{path}.linear_in.weight") and hasattr(module, "linear_in")
        }

    def parts(self) -> tuple[list[Part], list[str]]:
        """Returns the parts of whole tensors that `sharded_state_dict()` names, and the problems:
        parameters that it does not name, and names that are not parts of parameters.
        """
        addresses = sorted(self._at)
        parts: list[Part] = []
        problems: list[str] = []
        covered: dict[int, set[tuple[Any, ...]]] = {}  # number of a weight -> its parts
        for shard in self._shards:
            if not shard.data.numel():
                continue
            data, address = shard.data.detach(), _address(shard.data, shard.key)
            before = bisect_right(addresses, address) - 1
            number = self._at[addresses[before]] if before >= 0 else 0
            weight, inside = self.weights[number], address - addresses[before]
            if before < 0 or inside >= weight.nbytes:
                problems.append(
                    f"{shard.key} {list(shard.global_shape)}: sharded_state_dict() returns a copy"
                    " of it, and no part of a parameter"
                )
                continue
            ones = (1,) * shard.prepend_axis_num
            part = Part(
                shard.key,
                str(shard.dtype).removeprefix("torch."),
                tuple(shard.global_shape),
                tuple(shard.global_offset),
                (*ones, *shard.local_shape),
                (*ones, *(data.stride() if data.dim() else ())),
                weight.at + inside,
            )
            parts.append(part)
            covered.setdefault(number, set()).add((part.at, part.nbytes, part.strides))
        for number, weight in enumerate(self.weights):
            held = sum(nbytes for _, nbytes, _ in covered.get(number, ()))
            if weight.parameter and held != weight.nbytes:
                problems.append(
                    f"{weight.name}: sharded_state_dict() of the model names {held:,} of its"
                    f" {weight.nbytes:,} bytes"
                )
        self._shards, self._parts = [], set(covered)
        return parts, problems


def _listed(chunks: Any) -> list[Any]:
    """Returns the chunks as a list. Raises UsageError for a model alone, or for none."""
    if hasattr(chunks, "named_modules") or not isinstance(chunks, Iterable):
        raise UsageError(
            f"model_chunks is a {type(chunks).__name__}; give the list of chunks that get_model()"
            " returns, also where it has one: [model]"
        )
    if not (listed := list(chunks)):
        raise UsageError(
            "model_chunks is empty; each rank gives the list of its own chunks, which get_model()"
            " returns"
        )
    return listed


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers of a module that have elements, and their attributes."""
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor.numel():
            yield attribute, tensor


class _Seen(NamedTuple):
    """The weights as they were found in memory, where the plan knows them."""

    tensors: list[Any]
    addresses: list[int]  # of the first elements; others if their storage was released
    dtypes: list[Any]
    shapes: list[Any]
    contiguous: list[bool]

    @classmethod
    def of(cls, tensors: list[Any]) -> _Seen:
        import torch

        dtypes, shapes = [t.dtype for t in tensors], [t.shape for t in tensors]
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        return cls(tensors, addresses, dtypes, shapes, [*map(torch.Tensor.is_contiguous, tensors)])

    def still(self, tensors: list[Any]) -> bool:
        """Returns whether nothing of them has changed."""
        return all(map(is_, tensors, self.tensors)) and _Seen.of(tensors)[1:] == self[1:]


def _form(weight: Weight) -> tuple[Any, ...]:
    """Returns what a plan knows of a weight."""
    tensor = getattr(weight.module, weight.attribute)
    return tensor.dtype, tensor.shape


def _refuse_released(tensor: Any, name: str) -> None:
    """Raises UsageError for a tensor whose elements are not in memory, because a framework has
    released its storage. On the CPU a read of it would end the process.
    """
    import torch

    if type(tensor.data) is not torch.Tensor or tensor.is_meta:
        return  # `_address` refuses it
    end = tensor.storage_offset() + (tensor.numel() if tensor.is_contiguous() else 1)
    if tensor.untyped_storage().nbytes() < end * tensor.element_size():
        raise UsageError(
            f"{name}: its elements are not in memory, because its storage was released, as by a"
            " framework that moves the parameters to the host; load them back before this call"
        )


def unwrapped(chunk: Any) -> Any:
    """Returns the model in wrappers such as DistributedDataParallel and Float16Module."""
    *_, last = _wrappers(chunk)
    if not hasattr(last, "config"):
        raise UsageError(
            f"{type(last).__name__}: is not a model of Megatron-Core; give the list of chunks that"
            " get_model() returns"
        )
    return last


def _wrappers(chunk: Any) -> Iterator[Any]:
    """Yields a chunk, and what it wraps, down to the model."""
    yield chunk
    if hasattr(chunk, "module"):
        yield from _wrappers(chunk.module)


def _shards(chunks: Sequence[Any]) -> Iterator[Any]:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor):
                yield value


def _address(tensor: Any, name: str) -> int:
    """Returns the address of the first element. Raises UsageError for a tensor of another class
    than torch's, such as an fp8 weight of Transformer Engine, which holds codes.
    """
    import torch

    if type(tensor.detach()) is not torch.Tensor or not tensor.data_ptr():
        raise UsageError(
            f"{name}: is a {type(tensor.detach()).__name__} and not a plain tensor, so mckpt cannot"
            " address its elements; build the model without fp8_param, and on a device"
        )
    return int(tensor.data_ptr())
