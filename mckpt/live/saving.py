"""Writes a live model as a checkpoint of any format: all ranks write its files together, and rank 0
publishes it when it is complete.

What the files have as it lies on the ranks, and whole tensors of a Hugging Face directory, go there
straight (`live.pieces`). Of the other weights, each rank makes a copy in the memory of the host, as
one file without a name: portion after portion, or all at once in the background. The copies of a
conversion move from that file into the files of the new checkpoint.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from msgspec import structs

from mckpt import api, formats
from mckpt.adapters import merging
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.adapters.forms import form_peft, peft_form
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.moving import RunSettings
from mckpt.conversion.planning import Plan, make_plan
from mckpt.conversion.run import Once
from mckpt.errors import UsageError
from mckpt.execute.checksums import Range
from mckpt.execute.files import lay_out
from mckpt.execute.piecewise import Batches
from mckpt.execute.ranks import Ranks
from mckpt.live.adapters import chosen, without_values
from mckpt.live.devices import PIECE, ToHost
from mckpt.live.memory import Memory, Weight
from mckpt.live.model import Described, adapter_of, collected, ranks_of, release, stated
from mckpt.live.optimizer import LiveOptimizer, apart
from mckpt.live.pieces import Pieces, pieces_of
from mckpt.live.settings import refuse_other_settings
from mckpt.live.syncing import Sync
from mckpt.live.together import gathered, own_result, rank_and_world
from mckpt.options import SaveOptions, TargetOptions
from mckpt.storage import sparse_copy
from mckpt.values.sizes import LEAST_MEMORY

if TYPE_CHECKING:
    import torch

THREADS = 8  # most of a rank by default; more wait for Python's lock


def save(
    model_chunks: Sequence[Any],
    dst: str | Path,
    *,
    format: str = formats.MEGATRON,
    background: bool = False,
    max_memory: int | str = "1GiB",
    threads: int = 0,
    checksum: str = "crc32",
    allow_overflow: bool = False,
    optimizer: Any = None,
    scheduler: Any = None,
    adapter: Literal["merged", "only", "none"] = "merged",
    **options: Any,
) -> Future[dict[str, Any]]:
    """Writes a live model as a checkpoint of any format and at any parallel sizes. All ranks call
    it. `dst` must be one directory that all ranks see.

    background: return when the weights are copied to the host, and write while the model is used.
    optimizer: what get_megatron_optimizer() returned; its state is saved too, for formats of
        Megatron. scheduler: the OptimizerParamScheduler, whose state is saved with it.
    adapter: of a model whose modules are wrapped by adapters (LoRA): "merged" writes the weights
        with the products of the adapters added, "none" without them, and "only" writes the adapter
        as a directory of PEFT, with format "hf".
    threads: of each rank; 0 means one for each core that it has, at most 8.
    max_memory: bytes of the buffers of one rank. Beside them the host holds two portions of its
        weights, each of as many bytes or of one weight; with `background` a copy of all that the
        rank writes.

    The other keywords describe the model (`Described`) and the checkpoint: those of mckpt.convert.
    Without sizes it has those of the model.

    Returns a future: its result() is the content of mckpt.json. With `background` that raises the
    error of the save, which is the same on all ranks; otherwise this call raises it.

    Raises the errors of mckpt.plan on all ranks before anything is written.
    """

    def begun() -> tuple[Memory, RunSettings]:
        SaveOptions(background, adapter)  # refuses wrong values
        how = {"max_memory": max_memory, "threads": threads, "checksum": checksum}
        settings = RunSettings.of(how | {"allow_overflow": allow_overflow})
        most = min(THREADS, settings.max_memory // LEAST_MEMORY)
        cores = Ranks.of_environment().cores
        settings = structs.replace(settings, threads=settings.threads or min(cores, most))
        return Memory(model_chunks), settings

    given = {
        **stated(options),
        "dst": os.path.abspath(dst),
        "format": format,
        "background": background,
        "checksum": checksum,
        "allow_overflow": allow_overflow,
        "optimizer": optimizer is not None,
        "scheduler": scheduler is not None,
        "adapter": adapter,
        "function": "save",
    }
    memory, how = own_result(begun, lambda _: given)
    memory.complete()
    held = None
    if optimizer is not None:
        held = own_result(lambda: LiveOptimizer(optimizer, scheduler))
    names = options.keys() & Described.__annotations__.keys()
    described = cast(Described, {name: options.pop(name) for name in names})
    with ExitStack() as kept:  # freed here at an error, and otherwise by `_write`
        model = collected(memory, described, optimizer=held)
        kept.callback(release, model)
        if held is not None:
            refuse_changed(gathered(lambda: apart(memory, held)))
        wanted = (
            _merged(memory, model)
            if adapter == "merged"
            else own_result(lambda: chosen(model, adapter).model)
        )
        copy = own_result(lambda: _HostCopy(memory, model, how))
        kept.callback(copy.close)
        options["format"] = format

        def planned() -> Plan:
            refuse_other_settings(memory.chunks, model)
            return _planned(wanted, dst, options)

        plan = own_result(planned)
        own_result(lambda: _ready(memory))
        copies = _copies_of(plan)
        own = copies["src_file"] < len(ranks_of(plan.source).files)
        live = copies[own]
        pieces = pieces_of(plan, wanted if wanted is model else None, memory, how, live)
        kept.callback(pieces.close)
        part = _Part(pieces, live[~pieces.covered], copies[~own])
        copy.need(part.left["src_at"])
        own_result(pieces.make_room)
        if background:
            own_result(pieces.hold)
            own_result(copy.fill)
            group = _group(kept)
            pool = ThreadPoolExecutor(1, "mckpt-live")
            found = pool.submit(_write, plan, how, copy, part, group, kept.pop_all())
            pool.shutdown(wait=False)
            return found
        done: Future[dict[str, Any]] = Future()
        done.set_result(_write(plan, how, copy, part, None, kept.pop_all()))
        return done


def save_hf(model_chunks: Sequence[Any], dst: str | Path, **options: Any) -> Future[dict[str, Any]]:
    """Writes a live model as a Hugging Face directory. The keywords are those of `save`."""
    return save(model_chunks, dst, format=formats.HUGGING_FACE, **options)


def _group(kept: ExitStack) -> Any:
    """Returns a group of all ranks beside those of the training, which ends with `kept`."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo")
    kept.callback(dist.destroy_process_group, group)
    return group


def refuse_changed(found: Sequence[Sequence[str]]) -> None:
    """Raises UsageError if parameters of a rank are not the rounded master copies.

    found: their names, for each rank.
    """
    if changed := sorted({name for names in found for name in names}):
        raise UsageError.of(
            "parameters of the model are not the master copies of the optimizer, when rounded, so"
            " they were changed after its last step; call optimizer.reload_model_params(), or save"
            " without `optimizer`:",
            changed,
        )


def _merged(memory: Memory, model: Checkpoint) -> Checkpoint:
    """Returns a live model with its adapters, if it has some, merged into its weights. Each rank
    has the factors of this moment in a temporary directory. All ranks call it.

    Raises the errors of a merge.
    """
    adapter = own_result(lambda: adapter_of(model))
    if adapter is None:
        return model
    found = own_result(lambda: without_values(model.path, peft_form(adapter)))
    tensors = list(Sync.of_factors(memory, adapter)())

    def merged() -> Checkpoint:
        import torch

        with open(found.files[0], "r+b") as file:
            for name, tensor in tensors:
                file.seek(found.entries[name].at)
                file.write(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
        return merging.merge(model, found)

    return own_result(merged)


def _planned(model: Checkpoint, dst: str | Path, options: dict[str, Any]) -> Plan:
    if isinstance(model, AdapterCheckpoint):
        if more := sorted(options.keys() - {"format", "overwrite"}):
            raise UsageError(f"adapter='only': leave out {', '.join(more)}")
        if options["format"] != formats.HUGGING_FACE:
            raise UsageError(
                "adapter='only': writes a directory of PEFT; give format='hf', and convert it with"
                " `mckpt adapter to-megatron`"
            )
        target = TargetOptions(format=formats.HUGGING_FACE)
        form = partial(form_peft, look=False)
        plan = make_plan(model, dst, target, form, overwrite=options.get("overwrite", False))
    else:
        plan = api.plan(model, dst, **options)
    if sparse_copy.of(plan.destination.root) is not None:
        raise UsageError(
            f"{dst}: a live model is saved to a directory that all ranks see; copy it to the store"
            " afterwards"
        )
    return plan


class _Part(NamedTuple):
    """The work of this rank for a checkpoint."""

    pieces: Pieces
    left: np.ndarray  # copies from its memory that `pieces` does not cover
    carried: np.ndarray  # copies from files, which rank 0 does


def _copies_of(plan: Plan) -> np.ndarray:
    """Returns the copies of this rank."""
    rank, _ = rank_and_world()
    copies, ranks = plan.joined.copies, ranks_of(plan.source)
    numbers = range(len(plan.transfer.sources))
    holders = [ranks.rank_of(file) if file < len(ranks.files) else 0 for file in numbers]
    found: np.ndarray = copies[np.array(holders, "i4")[copies["src_file"]] == rank]
    return found


class _HostCopy:
    """The weights of this rank in a file in the memory of the host: all, or a portion after the
    other, of which two are there at a time.
    """

    def __init__(self, memory: Memory, model: Checkpoint, how: RunSettings) -> None:
        """Gives the files of all ranks the names and the sizes that a plan looks at."""
        ranks, (rank, _) = ranks_of(model), rank_and_world()
        self.memory, self.most = memory, how.max_memory
        self.threads = how.threads
        self.weights: Sequence[Weight] = memory.weights  # that are copied
        self.whole = False
        self.file = open(os.memfd_create("mckpt-live"), "r+b")  # noqa: SIM115
        self.file.truncate(max(memory.nbytes, 1))
        self.mapped = mmap.mmap(self.file.fileno(), 0)
        for number, path in enumerate(ranks.paths):
            if ranks.rank_of(number) == rank:
                os.symlink(f"/proc/{os.getpid()}/fd/{self.file.fileno()}", path)
            else:
                with open(path, "wb") as other:
                    other.truncate(ranks.sizes[ranks.rank_of(number)])

    def close(self) -> None:
        self.mapped.close()
        self.file.close()

    def need(self, places: np.ndarray) -> None:
        """Lets only the weights be copied that have these places."""
        numbers = sorted({self.memory.number(place) for place in np.unique(places).tolist()})
        self.weights = [self.memory.weights[number] for number in numbers]

    def fill(self) -> None:
        """Copies the weights that are needed, all at once."""
        self._fill(self.weights)
        self.whole = True

    def portions(self) -> Iterator[tuple[int, int]]:
        """Yields bounds of places (`live.memory`), between which all weights are in the file until
        the next ones are asked for. The weights of these are copied meanwhile.
        """
        if self.whole:
            yield 0, self.memory.nbytes
            return
        if not (listed := list(self._split())):
            return
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self._fill, listed[0])
            for portion, after in zip(listed, [*listed[1:], []], strict=True):
                ahead.result()
                ahead = pool.submit(self._fill, after)
                first, end = portion[0].at, portion[-1].at + portion[-1].nbytes
                yield first, end
                low = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
                high = end // mmap.PAGESIZE * mmap.PAGESIZE
                if low < high:
                    self.mapped.madvise(mmap.MADV_REMOVE, low, high - low)

    def _split(self) -> Iterator[list[Weight]]:
        """Yields weights that follow each other: at most `most` bytes, or one."""
        portion: list[Weight] = []
        for weight in self.weights:
            if portion and weight.at + weight.nbytes - portion[0].at > self.most:
                yield portion
                portion = []
            portion.append(weight)
        if portion:
            yield portion

    def _fill(self, weights: Sequence[Weight]) -> None:
        """Copies some weights, in several threads: the system makes the memory of the file page by
        page, which takes longer than copies from a device.
        """
        import torch

        host, whole = ToHost(), torch.frombuffer(self.mapped, dtype=torch.uint8)

        def copy(part: tuple[torch.Tensor, torch.Tensor]) -> None:
            source, target = part
            target.copy_(host(source))

        targets = (whole[w.at : w.at + w.nbytes].split(PIECE) for w in weights)
        sources = (weight.bytes().split(PIECE) for weight in weights)
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(copy, zip(chain(*sources), chain(*targets), strict=True)):
                pass


def _ready(memory: Memory) -> None:
    """Waits until the weights have their values: other streams copy them."""
    import torch

    if memory.device.type == "cuda":
        torch.cuda.synchronize(memory.device)


def _write(
    plan: Plan, how: RunSettings, copy: _HostCopy, part: _Part, group: Any, kept: ExitStack
) -> dict[str, Any]:
    """Writes this rank's part of the checkpoint, and on rank 0 publishes it. Returns the manifest.

    copy: this rank's weights. group: through which the ranks speak; None is the default group.
    kept: what is closed at the end.
    """
    rank, _ = rank_and_world()
    write = partial(_moved, plan, how, copy, part, group)
    publisher: Once | None = None
    with kept, ExitStack() as stack:

        def begin() -> Path:
            nonlocal publisher
            publisher = Once(plan, how, "live", write)
            stack.enter_context(publisher.begun())
            data = publisher.folder / "data"
            lay_out(plan.outputs, data, data / "journal")
            return data

        def end() -> dict[str, Any]:
            assert publisher is not None
            return publisher.finish([], sums)

        sums = write(gathered(begin if rank == 0 else Path, group)[0])
        return gathered(end if rank == 0 else dict, group)[0]


def _moved(
    plan: Plan,
    how: RunSettings,
    copy: _HostCopy,
    part: _Part,
    group: Any,
    data: Path,
) -> list[str]:
    """Writes this rank's elements into the files of the plan, and completes every `world`-th file.
    Returns the checksums of all files.
    """
    rank, world = rank_and_world()
    batches = Batches(plan.transfer, data, how.copying())

    def move() -> list[list[Range]]:
        part.pieces.write(batches)
        batches.do(part.carried, lambda: None)
        places = part.left["src_at"]
        for first, end in copy.portions():
            batches.do(part.left[(places >= first) & (places < end)], lambda: None)
        batches.sync()
        return batches.ranges

    with closing(batches):
        written = gathered(move, group)
        batches.ranges = [
            [r for ranges in of_file for r in ranges] for of_file in zip(*written, strict=True)
        ]
        files = range(rank, len(plan.outputs), world)
        sums = gathered(lambda: batches.end(lambda: None, files), group)
    return [sums[file % world][file] for file in range(len(plan.outputs))]
