"""Fills a live model from a checkpoint: each rank reads the bytes of its own parameters.

The plan is that of a conversion from the source to the model's layout. Each rank does the copies
into its own weights, window by window:

    ranges of the source files --> staging memory of one window --> weights of this rank

While a thread reads one window, the one that it read before is on its way to the device.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs

from mckpt.adapters.checkpoint import of_megatron, of_peft
from mckpt.adapters.peft import is_peft, open_adapter
from mckpt.adapters.placing import into_model
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.checkpoint.model import ModelDescription
from mckpt.conversion.refusals import refuse_misfit
from mckpt.errors import UsageError, counted, shown
from mckpt.execute.files import OpenFiles
from mckpt.execute.mover import naming
from mckpt.execute.piecewise import MEMORY, read, within
from mckpt.execute.threads import ThreadPool
from mckpt.formats import places
from mckpt.formats.foreign import FACTOR
from mckpt.geometry.box import Layout
from mckpt.geometry.join import Joined, join
from mckpt.live.memory import Memory, Weight
from mckpt.live.model import (
    RankParts,
    collected,
    has_adapters,
    named_adapter,
    ranks_of,
    release,
)
from mckpt.live.resuming import Resumed, masters_in_fp32
from mckpt.live.settings import refuse_other_settings
from mckpt.live.together import call, gathered, own_result, rank_and_world
from mckpt.options import LoadOptions, SourceOptions
from mckpt.storage import sparse_copy
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    import torch

# Most threads of a rank. Each waits for Python's lock after each system call: on an H200 with 16
# cores, 16 GB took 1.2 to 1.4 s with 4 threads, 0.8 to 0.9 with 6, 0.8 to 1.2 with 8, and up to 2.2
# with 12 or 16.
THREADS = 6
SAMPLED = 16  # files of a source of which bytes are compared
SAMPLE = 4096  # bytes
STAGING = 8 << 20  # bytes; the least that a thread has for two windows
WINDOW = 32 << 20  # bytes; larger windows take longer to pin


class Window(NamedTuple):
    """Neighbouring places of this rank that are filled at once: some weights, or a range of one."""

    start: int
    end: int
    weights: tuple[Weight, ...]

    @property
    def expert(self) -> bool:
        return self.weights[0].expert

    @property
    def state(self) -> bool:
        return self.weights[0].state

    def pieces(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields the bytes of each weight that lie in the window, and their place in it."""
        for weight in self.weights:
            low, high = max(self.start, weight.at), min(self.end, weight.at + weight.nbytes)
            yield weight.bytes()[low - weight.at : high - weight.at], low - self.start


class Filling(NamedTuple):
    """The plan by which this rank fills its weights."""

    joined: Joined
    copies: np.ndarray  # those into this rank's weights, by their place
    at: np.ndarray  # of each copy: its place
    padded: np.ndarray  # the places of this rank at which weights begin that have padding
    sources: list[str]


def load(
    model_chunks: Sequence[Any],
    source: str | Path | Checkpoint,
    *,
    max_memory: int | str = "512MiB",
    threads: int = 0,
    broadcast: bool = False,
    optimizer: Any = None,
    load_optimizer: bool = False,
    scheduler: Any = None,
    adapter: str | Path | None = None,
    keep_masters: bool = False,
) -> dict[str, float]:
    """Fills the parameters of a live model from a checkpoint of any format. All ranks call it.

    Each rank reads only the byte ranges that its own parameters need. Values are cast to the
    dtypes of the parameters; quantised weights are dequantised.

    model_chunks: what get_model() of Megatron-LM returns; wrappers may be around the chunks.
    source: a directory, a name on the Hub, a URL, or what mckpt.open returned.
    max_memory: bytes of all buffers of one rank, on the host.
    threads: 0 means one per core that a rank has, at most 4.
    broadcast: of the ranks that hold the same parameters, each reads a part and sends it to the
        others. Faster where storage is slower than the network.
    optimizer: what get_megatron_optimizer() returned. Its master copies are set to the new
        parameters afterwards.
    load_optimizer: fill the state of the optimizer too: moments, master copies, the count of steps
        and the settings of the param_groups, of a training checkpoint of any sizes and format.
    scheduler: of the learning rate, an OptimizerParamScheduler; load_optimizer sets it too.
    adapter: fills the adapters (LoRA) that wrap modules of the model too: a directory of PEFT, or a
        Megatron checkpoint with adapters. Without it they keep their values.
    keep_masters: load without `optimizer`, although parameters have master copies of one; you call
        its reload_model_params() before its next step, which else puts the old weights back.

    Returns the seconds of each part of the work on this rank: "open" (the source), "describe" (the
    model), "plan", "fill", "share" (with replicas), "optimizer"; and of all threads of "fill"
    together, "read" and "wait" (for the device). If adapters keep their values, "adapter_kept" is
    the number of their parameters on this rank.

    Raises one error on all ranks: those of `mckpt.open`, and CoverError, SourceError or
    MappingError if the model and the checkpoint are not made of the same tensors; UsageError if the
    ranks ask for different loads, or if master copies would keep the old weights. An error that
    occurs while bytes are read leaves parameters partly filled.
    """
    clock = _Clock()
    options: dict[str, Any] = {
        "max_memory": max_memory,
        "threads": threads,
        "broadcast": broadcast,
        "load_optimizer": load_optimizer,
        "adapter": adapter,
        "keep_masters": keep_masters,
    }

    def begun() -> tuple[Memory, LoadOptions]:
        how = LoadOptions(**options)
        if scheduler is not None and not load_optimizer:
            raise UsageError(
                "scheduler: it is set from a training checkpoint; give load_optimizer too"
            )
        memory = Memory(model_chunks)
        _refuse_stale(memory, optimizer, load_optimizer, keep_masters)
        return memory, how

    given = {
        "function": "load",
        "broadcast": broadcast,
        "optimizer": optimizer is not None,
        "load_optimizer": load_optimizer,
        "scheduler": scheduler is not None,
        "adapter": None if adapter is None else os.path.abspath(adapter),
        "keep_masters": keep_masters,
    }
    memory, how = own_result(begun, lambda _: given)
    opened = own_result(lambda: opened_source(source, load_optimizer), _identity)
    clock.ends("open")
    if load_optimizer:
        with own_result(lambda: Resumed(opened, optimizer, scheduler)) as resumed:
            gathered(resumed.allocate)
            _load(memory, opened, resumed, how, clock)
            gathered(resumed.finish)
    else:
        _load(memory, opened, None, how, clock)
        if optimizer is not None:
            optimizer.reload_model_params()
    clock.ends("optimizer")
    return clock.seconds


def _load(
    memory: Memory,
    opened: Checkpoint,
    resumed: Resumed | None,
    how: LoadOptions,
    clock: _Clock,
) -> None:
    """Fills the weights, and the tensors of the optimizer's state if it is resumed."""
    adapter, broadcast, most = how.adapter, how.broadcast, how.max_memory
    optimizer = None if resumed is None else resumed.optimizer
    model = _described(collected(memory, own=True, optimizer=optimizer), opened)
    if adapter is None and has_adapters(model):
        own = (w for w in memory.weights if FACTOR.search(w.name) and w.parameter)
        clock.seconds["adapter_kept"] = sum(math.prod(w.shape) for w in own)
    if resumed is not None:
        model = model.with_optimizer()
    clock.ends("describe")

    def planned() -> list[Filling]:
        found = [plan(opened, model)]
        refuse_other_settings(memory.chunks, model, opened)
        return found if adapter is None else [*found, plan_adapter(opened, model, adapter)]

    fillings = own_result(planned)
    release(model)
    if resumed is not None:
        gathered(resumed.prove)
    sizes = gathered(lambda: _window_bytes(most, _threads(how.threads, most)))
    size = min(sizes)  # those of all ranks, which send windows to each other
    windows = [list(_windows(memory, filling, size)) for filling in fillings]
    mine = [_readers(some) if broadcast else np.ones(len(some), bool) for some in windows]
    clock.ends("plan")

    def fill() -> None:
        for filling, some, own in zip(fillings, windows, mine, strict=True):
            _fill(list(itertools.compress(some, own)), filling, most, how.threads, clock)

    gathered(fill)
    clock.ends("fill")
    for some in windows if broadcast else ():
        _broadcast(some)
    for part, other in ranks_of(model).copies:
        views = [memory.view(p.at, p.dtype, p.sizes, p.strides) for p in (other, part)]
        views[0].copy_(views[1])
    clock.ends("share")


def _described(model: Checkpoint, source: Checkpoint) -> Checkpoint:
    """Returns the live model, which the config.json of the source describes if it is a whole
    multimodal one: that says how the weights of its towers are packed.
    """
    like = source.files.described_by
    if like is None or not any(".decoder." in key for key in list(model.opened.keys())):
        return model
    files = replace(model.files, options=model.files.options.with_(like=like))
    return Checkpoint(files, ModelDescription(files))


class _Clock:
    """The seconds of the parts of a load."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def ends(self, part: str) -> None:
        """Ends a part, which began when the one before it ended."""
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


def _refuse_stale(memory: Memory, optimizer: Any, resumes: bool, kept: bool) -> None:
    """Raises UsageError if an optimizer would put the old weights back at its next step, because
    nothing sets its master copies to the new ones.
    """
    masters = memory.masters()
    if optimizer is None and masters and not kept:
        raise UsageError(
            f"{counted(len(masters), 'parameter')} of the live model, such as {masters[0]}, have"
            " master copies in an optimizer, whose next step would put the old weights back; give"
            " optimizer=, or keep_masters=True if you call its reload_model_params() yourself"
        )
    for link in getattr(optimizer, "chained_optimizers", [optimizer]) if not resumes else ():
        config = getattr(link, "config", None)
        aware = getattr(config, "use_precision_aware_optimizer", False)
        if aware and getattr(getattr(link, "optimizer", None), "state", None):
            raise UsageError(
                "the live optimizer has use_precision_aware_optimizer and has made a step: its"
                " reload_model_params() leaves the master copies as they are, so its next step"
                " would put the old weights back; load before the first step"
            )


def _identity(source: Checkpoint) -> dict[str, Any]:
    """Returns what tells a source from another one of the same shapes: its place, the sizes of its
    files, and some bytes of each of some of them.
    """
    found = hashlib.sha256()
    remote = sparse_copy.of(source.path) is not None
    files = sorted(map(str, source.layout.files))
    for path in filter(os.path.isfile, files[:: -(-len(files) // SAMPLED) or 1]):
        size = os.path.getsize(path)
        found.update(f"{os.path.basename(path)} {size}".encode())
        if not remote:  # a sparse copy has the bytes that were asked for
            with open(path, "rb") as file:
                file.seek(size // 2)
                found.update(file.read(SAMPLE))
    name = shown(str(source.path))
    place = name if remote else os.path.realpath(name)
    return {"source": place, "content of the source": found.hexdigest()[:16]}


def opened_source(source: str | Path | Checkpoint, with_optimizer: bool = False) -> Checkpoint:
    """Returns the checkpoint, with its headers read."""
    found = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    found = found.with_optimizer() if with_optimizer else found
    _ = found.layout
    return found


def join_models(source: Checkpoint, model: Checkpoint) -> tuple[Joined, Layout]:
    """Returns the copies that fill a whole live model, proved, and its layout."""
    moved = _with_rows(source, model)
    described = model.with_dims(moved.dims)
    refuse_misfit(moved, described.names, "the live model")
    unused = masters_in_fp32(moved, described) if moved.has_states else set()
    # what the model does not have, such as a vision tower, has no place in it
    whole = model.mapping.whole is not None
    held = [
        s for s in moved.layout.stored if not (unused & set(s.tensors) or (s.carried and not whole))
    ]
    layout = Layout(moved.layout.files, held, moved.layout.shapes)
    return join(layout, described.layout), described.layout


def plan(source: Checkpoint, model: Checkpoint) -> Filling:
    """Returns the copies that fill this rank's weights. The proof is that of the whole model."""
    joined, layout = join_models(source, model)
    return _filling(joined, layout, source.layout.files, ranks_of(model))


def plan_adapter(source: Checkpoint, model: Checkpoint, adapter: str | Path) -> Filling:
    """Returns the copies that fill this rank's adapters from a directory of PEFT, or from a
    Megatron checkpoint.

    source: of the weights of the model, whose config.json names them.
    """
    found = named_adapter(model.with_dims(source.dims))
    if found is None:
        raise UsageError(
            "the modules of the live model have no adapters (LoRA) that `adapter` fills"
        )
    held, names = found
    place = places.local(adapter)
    if not place.is_dir() or is_peft(place):
        given = of_peft(open_adapter(place), source, look=False)
    else:
        options = SourceOptions(like=source.files.described_by)
        given = of_megatron(place, options, otherwise=held.scale * names.rank)[0]
    have, wanted = into_model(given, names, held.opened.layout(names), held.scale_of, str(adapter))
    joined = join(have, wanted)
    # experts that share an adapter have one place
    fields = ["dst_file", "dst_at", "dst_pitch", "dst_step", "rows", "run"]
    _, once = np.unique(joined.copies[fields], return_index=True)
    joined = structs.replace(joined, copies=joined.copies[np.sort(once)])
    return _filling(joined, wanted, have.files, ranks_of(held))


def _filling(joined: Joined, layout: Layout, sources: Sequence[Any], ranks: RankParts) -> Filling:
    """Returns the copies of a join into this rank's weights. layout: the whole target."""
    own = [file for file in range(len(ranks.files)) if ranks.rank_of(file) == rank_and_world()[0]]
    copies = joined.copies[np.isin(joined.copies["dst_file"], own)]
    copies = copies[np.argsort(copies["dst_at"], kind="stable")]
    at = np.ascontiguousarray(copies["dst_at"])  # which numpy searches in less time
    items = np.array([itemsize(c.target) for c in joined.casts], "i8")[copies["cast"]]
    filled = np.append(0, np.cumsum(copies["rows"] * copies["run"] * items))
    padded: list[int] = []
    for s in (s for s in layout.stored if s.padding):
        nbytes = s.numel * itemsize(s.dtype)
        for start in s.at[np.isin(s.file, own)].tolist():
            chosen = _slice(at, start, start + nbytes)
            if filled[chosen.stop] - filled[chosen.start] < nbytes:
                padded.append(start)
    return Filling(joined, copies, at, np.array(sorted(padded), "i8"), list(map(str, sources)))


def _with_rows(source: Checkpoint, model: Checkpoint) -> Checkpoint:
    """Returns the source with as many rows of the vocabulary as the model can take: its true ones,
    and of its padding those that the model has too.
    """
    whole = source.with_padding() if source.is_megatron else None
    rows = model.opened.padded_vocab(model.mapping)
    if whole is None or rows is None:
        return source
    held = int(whole.dims["vocab_size"])
    try:
        true = int(source.dims["vocab_size"])
    except VocabSizeUnknown:
        true = min(held, rows)
    if true > rows:
        raise UsageError(
            f"{source.path}: has a vocabulary of {true:,} tokens, and the live model has {rows:,}"
            " rows for it; build the model with the vocabulary of the checkpoint"
        )
    return whole if held <= rows else source.with_vocab_size(rows)


def _threads(threads: int, max_memory: int) -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    found = min(threads or min(cores, THREADS), max_memory // (MEMORY + STAGING))
    if not found:
        raise UsageError(
            f"--max-memory {max_memory}: one thread needs {MEMORY + STAGING:,} bytes; raise it"
        )
    return found


def _window_bytes(max_memory: int, threads: int) -> int:
    """Returns the bytes of a window: a power of two, because torch pins memory in such sizes."""
    most = min(WINDOW, (max_memory // threads - MEMORY) // 2)
    return 1 << most.bit_length() - 1


def _windows(memory: Memory, filling: Filling, most: int) -> Iterator[Window]:
    """Yields the places of this rank that are to be filled, in windows of at most `most` bytes: the
    weights, those of the experts, and the state of the optimizer.
    """
    # a shard of the vocabulary may have padding only
    at = np.sort(np.concatenate([filling.at, filling.padded]))
    filled = [w for w in memory.weights if _slice(at, w.at, w.at + w.nbytes)]
    for state, expert in itertools.product((False, True), repeat=2):
        held: list[Weight] = []
        for weight in (w for w in filled if (w.state, w.expert) == (state, expert)):
            end = weight.at + weight.nbytes
            if held and end - held[0].at > most:
                yield Window(held[0].at, held[-1].at + held[-1].nbytes, tuple(held))
                held = []
            if weight.nbytes > most:
                starts = range(weight.at, end, most)
                yield from (Window(s, min(s + most, end), (weight,)) for s in starts)
            else:
                held.append(weight)
        if held:
            yield Window(held[0].at, held[-1].at + held[-1].nbytes, tuple(held))


def _slice(at: np.ndarray, start: int, end: int) -> range:
    """Returns the numbers of the copies that begin in [start, end)."""
    return range(*np.searchsorted(at, [start, end]).tolist())


def _readers(windows: Sequence[Window]) -> np.ndarray:
    """Returns which windows this rank reads, if those that hold the same weights take turns. Each
    rank reads the state of its own optimizer.
    """
    import torch.distributed as dist

    groups = {expert: _group(expert) for expert in (False, True)}
    turns = [dist.get_rank(groups[w.expert]) for w in windows]
    sizes = [dist.get_world_size(groups[w.expert]) for w in windows]
    own = np.array([w.state for w in windows], bool)
    return own | (np.arange(len(windows)) % np.array(sizes or [1]) == np.array(turns, "i8"))


def _group(expert: bool) -> Any:
    """Returns the group of the ranks that hold the same weights as this one."""
    from megatron.core import parallel_state as ps

    if expert:
        return ps.get_expert_data_parallel_group()
    return ps.get_data_parallel_group(with_context_parallel=True)


def _broadcast(windows: Sequence[Window]) -> None:
    """Sends each window from the rank that read it to the others that hold the same weights."""
    import torch.distributed as dist

    for number, window in enumerate(windows):
        group = _group(window.expert)
        size = dist.get_world_size(group)
        for piece, _ in window.pieces() if size > 1 and not window.state else ():
            call(dist.broadcast, piece, dist.get_global_rank(group, number % size), group=group)


class _Staging:
    """The memory of one thread for two windows: one is read while the other one is copied into the
    weights, which a GPU does by itself.
    """

    def __init__(self, nbytes: int, after: torch.cuda.Stream | None) -> None:
        """after: the stream whose work on the weights comes first, None without a GPU."""
        import torch

        self.stream: torch.cuda.Stream | None = None
        self.read = self.waited = 0.0  # seconds
        self._turn = 0
        if after is not None:
            torch.cuda.set_device(after.device)  # of this thread
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(after)
            self._events = torch.cuda.Event(), torch.cuda.Event()
        self._halves = torch.empty((2, nbytes), dtype=torch.uint8, pin_memory=after is not None)

    def free(self, nbytes: int) -> torch.Tensor:
        """Waits until the older window has been copied, and returns its memory."""
        self._turn ^= 1
        if self.stream is not None:
            self._events[self._turn].synchronize()
        return self._halves[self._turn, :nbytes]

    def send(self, window: Window) -> None:
        """Begins to copy a window from the memory that `free` returned."""
        import torch

        staged = self._halves[self._turn]
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for piece, start in window.pieces():
                piece.copy_(staged[start : start + piece.numel()], non_blocking=True)
        if self.stream is not None:
            self._events[self._turn].record(self.stream)

    def end(self) -> None:
        """Waits until all windows have been copied."""
        if self.stream is not None:
            self.stream.synchronize()


def _fill(
    windows: Sequence[Window], filling: Filling, max_memory: int, threads: int, clock: _Clock
) -> None:
    """Reads windows into the weights, in several threads."""
    import torch

    joined, count = filling.joined, _threads(threads, max_memory)
    at, largest = filling.at, max((w.end - w.start for w in windows), default=0)
    most = min(_window_bytes(max_memory, count), largest)
    device = windows[0].weights[0].tensor().device if windows else None
    after = torch.cuda.current_stream(device) if device and device.type == "cuda" else None
    staging: dict[int, _Staging] = {}  # by the buffer of the thread
    files = OpenFiles(filling.sources, os.O_RDONLY)

    def work(number: int, buffer: memoryview, check: Any) -> None:
        started, window = time.perf_counter(), windows[number]
        if (held := staging.get(id(buffer))) is None:
            held = staging[id(buffer)] = _Staging(most, after)
        staged = held.free(window.end - window.start)
        free = time.perf_counter()
        first, last = window.weights[0], window.weights[-1]
        if _slice(filling.padded, first.at, last.at + last.nbytes):
            staged.zero_()  # the rows that no copy fills
        chosen = _slice(at, first.at, last.at + last.nbytes)
        copies = filling.copies[chosen.start : chosen.stop]
        if chosen and (window.start > first.at or window.end < last.at + last.nbytes):
            width = itemsize(joined.casts[int(copies["cast"][0])].target)
            copies = within(copies, width, window.start, window.end)
        out = staged.numpy().data
        read(structs.replace(joined, copies=copies), files, window.start, out, buffer)
        full = time.perf_counter()
        held.send(window)
        held.read += full - free
        held.waited += free - started + time.perf_counter() - full

    with closing(files), naming(joined):
        ThreadPool(count, count * MEMORY).each(range(len(windows)), work)
    found = list(staging.values())
    for held in found:
        held.end()
    for name, spent in ("read", [s.read for s in found]), ("wait", [s.waited for s in found]):
        clock.seconds[name] = clock.seconds.get(name, 0.0) + sum(spent)
