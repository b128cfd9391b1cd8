"""The flat buffers in which Megatron-Core's distributed optimizer keeps its state.

Each model chunk of a rank has one buffer for the parameters of each dtype. A mixture of experts has
a second optimizer, with buffers of its own. A buffer lies in buckets, and it has the parameters in
the reverse order of their registration. `.` is padding:

    registered   a b c d
    buffer       [ d . c . | b . a . . ]
                 bucket 0    bucket 1

A parameter starts at a multiple of 64 elements. The end of a bucket is padded too, but a checkpoint
leaves that padding out: `dp_reshardable` stores each bucket as a tensor, and distrib_optim.pt
stores the buckets of a buffer one after the other. The data-parallel ranks cut each bucket, with
the padding of its end, into equal parts.

The rules are those of megatron/core/distributed/param_and_grad_buffer.py and
distributed_data_parallel.py, megatron-core 0.12 to 0.19. All numbers are elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mckpt.errors import SourceError
from mckpt.formats.base import Names, dtype_of, packed
from mckpt.formats.megatron.optimizer.state import SHARED, is_matrix, state_pieces
from mckpt.formats.megatron.torch_shards import axes, instances, local
from mckpt.geometry.box import Piece, clip
from mckpt.geometry.packing import Packed
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound

PARAMETER_STEP = 64  # a parameter starts at a multiple of it
BUCKET_STEP = 128  # and a bucket at a multiple of it and of the number of data-parallel ranks
BUSBW_STEP = 2**16  # and of this with --ddp-pad-buckets-for-high-nccl-busbw
# With --overlap-grad-reduce and without --ddp-bucket-size, a bucket is full at the larger one of
# SMALLEST_BUCKET, and of RANK_BUCKET for each data-parallel rank.
SMALLEST_BUCKET = 40_000_000
RANK_BUCKET = 1_000_000

Keys = Sequence[Sequence[str]]  # of each virtual stage, in the order of registration


class Parameter(NamedTuple):
    """A parameter of one rank."""

    key: str  # in the rank's state dict
    dtype: str
    shape: tuple[int, ...]  # of the rank's shard
    pieces: tuple[Piece, ...]
    layer: int  # the indices that fill the names of the pieces
    expert: int
    alone: bool = False  # it is a copy of the embedding on several stages, and a bucket of its own
    # It has the matrices of so many experts, `expert` and those behind it, one after the other; of
    # an adapter that these experts share, one matrix.
    experts: int = 1
    is_shared: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape) * (1 if self.is_shared else self.experts)

    def of_experts(self) -> Iterator[tuple[Parameter, int]]:
        """Yields the parameter of each expert, and the first of its elements in this one."""
        for number in range(self.experts):
            one = self._replace(expert=self.expert + number, experts=1, is_shared=False)
            yield one, 0 if self.is_shared else number * one.numel

    @property
    def whole(self) -> tuple[tuple[Piece, ...], int, int]:
        """Returns the facts that a parameter and its copies on other ranks have in common."""
        return self.pieces, self.layer, self.expert


class StateKind(NamedTuple):
    """The state of equal parameters, or of equal ranges of them, of several layers and experts."""

    key: str  # template, for messages
    state: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replica: bool

    @classmethod
    def of(
        cls, p: Parameter, state: str, replica: bool, low: int = 0, high: int | None = None
    ) -> StateKind:
        """Returns the kind of the elements low..high of a parameter; None: to its end."""
        shape, pieces = p.shape, p.pieces
        if high is not None and (low, high) != (0, p.numel):
            shape = (high - low,)
            pieces = tuple(part for piece in p.pieces for part in clip(piece, low, high))
        key = f"{re.sub(r'[0-9]+', '*', p.key)} ({state})"
        return cls(key, state, shape, state_pieces(pieces, state), replica)


class PlacedParameter(NamedTuple):
    """A parameter and its place in a bucket."""

    parameter: Parameter
    bucket: int
    start: int  # in the bucket

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel


class Buffer(NamedTuple):
    """The parameters of one dtype in one model chunk."""

    chunk: int  # virtual stage
    dtype: str
    placed: tuple[PlacedParameter, ...]  # in the order of the buffer
    numels: tuple[int, ...]  # of each bucket, without the padding of its end

    def start(self, bucket: int, step: int | None = None) -> int:
        """Returns where a bucket starts in the buffer: in memory if `step` is the result of
        `bucket_step`, and in distrib_optim.pt, which leaves out the padding of ends, without it.
        """
        return sum(
            numel if step is None else rounded(numel, step) for numel in self.numels[:bucket]
        )


class RankOptimizer(NamedTuple):
    """One optimizer of one model-parallel rank."""

    chain: int  # its index in the rank's ChainedOptimizer
    tp: int  # tensor rank; that of the experts if `chain` is 1
    pp: int
    ep: int | None  # None: the optimizer of all parameters but those of experts
    group: int  # its dp_group_idx in the keys of dp_reshardable
    buffers: tuple[Buffer, ...]  # gbuf_idx is the index


def rounded(n: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


def bucket_step(num_ranks: int, high_busbw: bool = False) -> int:
    """Returns the number of which the start of every bucket in memory is a multiple.

    num_ranks: data-parallel ranks of the buffer, which differ for experts.
    """
    return math.lcm(num_ranks, BUCKET_STEP, BUSBW_STEP if high_busbw else 1)


def default_bucket_size(num_ranks: int) -> int:
    """Returns the size at which a bucket is full with --overlap-grad-reduce alone."""
    return max(SMALLEST_BUCKET, RANK_BUCKET * num_ranks)


def bucket_size(args: Mapping[str, Any]) -> int | None:
    """Returns the size at which a bucket of a run was full, by Megatron's args; None: it had one
    bucket.
    """
    if not args.get("overlap_grad_reduce"):
        return None
    return args.get("ddp_bucket_size") or default_bucket_size(args.get("data_parallel_size") or 1)


def gradient_dtype(dtype: str, args: Mapping[str, Any]) -> str:
    """Returns the dtype of the gradients of parameters of a dtype, by Megatron's args, which lack
    what the run did not set.
    """
    kept = dtype == "float16" and not args.get("accumulate_allreduce_grads_in_fp32")
    return dtype if kept or args.get("grad_reduce_in_bf16") else "float32"


def lay_out(
    registered: Sequence[Parameter], chunk: int = 0, bucket_size: int | None = None
) -> list[Buffer]:
    """Returns the buffers of one chunk: one for each dtype, in the order in which the dtypes first
    occur.

    registered: in the order of registration.
    bucket_size: a bucket ends behind the parameter with which it reaches this size; None: never.
    """
    dtypes = list(dict.fromkeys(p.dtype for p in registered))
    out = []
    for dtype in dtypes:
        placed: list[PlacedParameter] = []
        numels: list[int] = []
        at = 0  # in the bucket

        for p in reversed([p for p in registered if p.dtype == dtype]):
            at = rounded(at, PARAMETER_STEP)
            if p.alone and at:
                numels.append(at)
                at = 0
            placed.append(PlacedParameter(p, len(numels), at))
            at += p.numel
            if p.alone or (bucket_size is not None and at >= bucket_size):
                numels.append(at)
                at = 0
        if at:
            numels.append(at)
        out.append(Buffer(chunk, dtype, tuple(placed), tuple(numels)))
    return out


def optimizers(
    names: Names,
    dtypes: dict[str, str],
    padded_vocab: int | None,
    expert_chain: bool,
    bucket_size: int | None = None,
    registered: Callable[[int], Keys] | None = None,
    rest: bool = False,
) -> list[RankOptimizer]:
    """Returns the optimizers of all model-parallel ranks, those of the experts last.

    names: of the modules of each rank (the choice `keys` is local).
    dtypes: of each logical tensor, by template.
    padded_vocab: rows of the embedding with padding.
    expert_chain: experts have an optimizer of their own. They have one if ep > 1, and from
        megatron-core 0.17 on also if etp differs from tp.
    bucket_size: None without --overlap-grad-reduce. Only the first chunk of the first stage has
        several buckets by it.
    registered: returns the keys of the state dicts of a pipeline rank, which are in the order of
        registration. Without it, the dialect has the order.
    rest: leave out the matrices, which Muon updates.

    Raises SourceError if `registered` lacks a parameter.
    """
    parallel = names.parallel
    out = []
    for chain in range(2 if expert_chain else 1):
        kept = _kept(names, dtypes, padded_vocab, chain, expert_chain)
        kept = [k for k in kept if not (rest and is_matrix(k.bound, len(k.whole.shape)))]
        ways, eps = (parallel.expert_tp, parallel.ep) if chain else (parallel.tp, 1)
        for p in range(parallel.pp):
            keys = registered(p) if registered else None
            for e in range(eps):
                chunks = _registered(names, kept, p, e, keys)
                for t in range(ways):
                    buffers: list[Buffer] = []
                    for v, slots in enumerate(chunks):
                        size = bucket_size if (p, v) == (0, 0) else None
                        buffers += lay_out([slot.of(t, parallel) for slot in slots], v, size)
                    group = (p * eps + e) * ways + t
                    out.append(
                        RankOptimizer(chain, t, p, e if chain else None, group, tuple(buffers))
                    )
    return out


def registered(
    names: Names,
    dtypes: dict[str, str],
    padded_vocab: int | None,
    chain: int,
    expert_chain: bool,
    p: int,
) -> list[list[Slot]]:
    """Returns the parameters of an optimizer on pipeline rank `p` and the first expert rank, for
    each virtual stage, in the order of their registration. Its arguments are those of `optimizers`.
    """
    return _registered(names, _kept(names, dtypes, padded_vocab, chain, expert_chain), p, 0, None)


class Kept(NamedTuple):
    """A rule whose tensors are parameters."""

    bound: Bound
    whole: Packed
    dtype: str

    @property
    def expert(self) -> bool:
        return "expert" in self.bound.rule.indices


def _kept(
    names: Names, dtypes: dict[str, str], padded_vocab: int | None, chain: int, expert_chain: bool
) -> list[Kept]:
    """Returns the rules of the parameters that an optimizer updates."""
    scope = names.scope()
    rules = (
        Kept(b, packed(b.rule, scope, padded_vocab), dtype_of(b.rule, dtypes))
        for b in names.bound
        if b.rule.written and names.mapping.registration.is_parameter(b.rule.key)
    )
    return [k for k in rules if (k.expert if chain else not (k.expert and expert_chain))]


class Slot(NamedTuple):
    """A parameter of a pipeline rank, before it is cut over the tensor ranks."""

    kept: Kept
    key: str
    layer: int
    expert: int  # the first of `experts`
    alone: bool
    experts: int
    is_shared: bool

    def of(self, rank: int, parallel: Parallel) -> Parameter:
        """Returns the parameter of one tensor rank."""
        ways = parallel.expert_tp if self.kept.expert else parallel.tp
        shape, pieces = local(self.kept.bound, self.kept.whole, rank % ways, ways)
        dtype, place = self.kept.dtype, (self.layer, self.expert)
        several = self.experts, self.is_shared
        return Parameter(self.key, dtype, shape, pieces, *place, self.alone, *several)


def _registered(
    names: Names, rules: list[Kept], p: int, e: int, keys: Keys | None
) -> list[list[Slot]]:
    """Returns the parameters of each virtual stage of a pipeline rank, in the order of their
    registration.
    """
    parallel, stage = names.parallel, names.stages()[p]
    found: list[dict[str, tuple[Kept, int, int]]] = [{} for _ in range(parallel.vpp)]
    for kept in rules:
        for v, layer, expert, key in instances(kept.bound, stage, p, parallel, names.dims, e):
            found[v].setdefault(key, (kept, layer, expert))
    is_shared = bool(names.choices.get(SHARED))
    copied = {kept.bound.rule.of for kept in rules if kept.bound.rule.alias}
    out: list[list[Slot]] = []
    for v, parameters in enumerate(found):
        if keys is None:
            order = names.mapping.registration.sorted(parameters)
        else:
            order = [key for key in keys[v] if key in parameters]
            if absent := sorted(parameters.keys() - set(order)):
                raise SourceError.of(
                    f"the state dict of pipeline rank {p}, chunk {v}, lacks parameters, so the"
                    " places of the others in the optimizer's buffers are unknown:",
                    absent,
                )
        # Megatron-Core marks one copy of the embedding in a chunk as shared, the first one.
        first = next((key for key in order if parameters[key][0].bound.rule.of in copied), None)
        out.append([])
        for key in order:
            kept, layer, expert = parameters[key]
            (experts,) = axes(kept.bound, parallel, names.dims) or (1,)
            out[-1].append(Slot(kept, key, layer, expert, key == first, experts, is_shared))
    return out
