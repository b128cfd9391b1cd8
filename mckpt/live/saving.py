"""Writes a live model as a checkpoint of any format: each rank writes its own elements.

Each rank copies its weights to the memory of the host, as one file without a name. From then on the
model may change. The copies of a conversion move from that file into the files of the new
checkpoint, which all ranks write together; rank 0 publishes it when it is complete.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np

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
from mckpt.live.memory import Memory
from mckpt.live.model import Described, adapter_of, collected, ranks_of, release, stated
from mckpt.live.optimizer import LiveOptimizer, apart
from mckpt.live.settings import refuse_other_settings
from mckpt.live.syncing import Sync
from mckpt.live.together import gathered, own_result, rank_and_world
from mckpt.options import SaveOptions, TargetOptions
from mckpt.storage import sparse_copy

PIECE = 16 << 20  # bytes that a thread copies to the host at a time


def save(
    model_chunks: Sequence[Any],
    dst: str | Path,
    *,
    format: str = formats.MEGATRON,
    background: bool = False,
    max_memory: int | str = "256MiB",
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
    threads: of each rank; 0 means one for each core that it has. max_memory: bytes of the buffers
        of one rank, beside the copy.

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
    model = collected(memory, described, optimizer=held)
    if held is not None:
        refuse_changed(gathered(lambda: apart(memory, held)))
    wanted = (
        _merged(memory, model)
        if adapter == "merged"
        else own_result(lambda: chosen(model, adapter).model)
    )
    copy = own_result(lambda: _file(memory, model))
    options["format"] = format

    def planned() -> Plan:
        refuse_other_settings(memory.chunks, model)
        return _planned(wanted, dst, options)

    plan = own_result(planned)
    own_result(lambda: _copy(memory, copy, how.threads or Ranks.of_environment().cores))
    if background:
        pool = ThreadPoolExecutor(1, "mckpt-live")
        found = pool.submit(_write, plan, how, copy, _group())
        pool.shutdown(wait=False)
        return found
    done: Future[dict[str, Any]] = Future()
    done.set_result(_write(plan, how, copy, None))
    return done


def save_hf(model_chunks: Sequence[Any], dst: str | Path, **options: Any) -> Future[dict[str, Any]]:
    """Writes a live model as a Hugging Face directory. The keywords are those of `save`."""
    return save(model_chunks, dst, format=formats.HUGGING_FACE, **options)


def _group() -> Any:
    """Returns a group of all ranks that does not disturb those of the training."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo") if dist.is_initialized() else None


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


def _file(memory: Memory, model: Checkpoint) -> BinaryIO:
    """Returns a file in memory for the weights of this rank. Gives the files of all ranks the names
    and the sizes that a plan looks at.
    """
    ranks, (rank, _) = ranks_of(model), rank_and_world()
    file = open(os.memfd_create("mckpt-live"), "r+b")  # noqa: SIM115
    file.truncate(max(memory.nbytes, 1))
    for number, path in enumerate(ranks.paths):
        if ranks.rank_of(number) == rank:
            os.symlink(f"/proc/{os.getpid()}/fd/{file.fileno()}", path)
        else:
            with open(path, "wb") as other:
                other.truncate(ranks.sizes[ranks.rank_of(number)])
    return file


def _copy(memory: Memory, file: BinaryIO, threads: int) -> None:
    """Copies the weights of this rank into its file. Several threads do it, because the system
    makes the memory of the file page by page, which takes longer than copies from a device.
    """
    import torch

    held, device = threading.local(), memory.device
    cuda = device.type == "cuda"
    after = torch.cuda.current_stream(device) if cuda else None

    def copy(part: tuple[torch.Tensor, torch.Tensor]) -> None:
        source, target = part
        if not cuda:
            target.copy_(source)
            return
        if not hasattr(held, "stream"):
            held.stream = torch.cuda.Stream(device)
            held.stream.wait_stream(after)
            held.pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        pinned = held.pinned[: len(source)]
        with torch.cuda.stream(held.stream):
            pinned.copy_(source, non_blocking=True)
        held.stream.synchronize()
        target.copy_(pinned)

    with mmap.mmap(file.fileno(), 0) as mapped, ThreadPoolExecutor(threads) as pool:
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        targets = (whole[w.at : w.at + w.nbytes].split(PIECE) for w in memory.weights)
        sources = (weight.bytes().split(PIECE) for weight in memory.weights)
        for _ in pool.map(copy, zip(chain(*sources), chain(*targets), strict=True)):
            pass
        del whole, targets, sources


def _write(plan: Plan, how: RunSettings, copy: BinaryIO, group: Any) -> dict[str, Any]:
    """Writes this rank's part of the checkpoint, and on rank 0 publishes it. Returns the manifest.

    copy: the file with this rank's weights, which is closed at the end. group: through which the
    ranks speak, and which is ended too; None is the default group.
    """
    rank, _ = rank_and_world()
    try:
        write = partial(_moved, plan, how, group)
        publisher: Once | None = None
        with ExitStack() as stack:

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
    finally:
        copy.close()
        release(plan.source)
        if group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(group)


def _moved(plan: Plan, how: RunSettings, group: Any, data: Path) -> list[str]:
    """Writes this rank's elements into the files of the plan, and completes every `world`-th file.
    Returns the checksums of all files.
    """
    rank, world = rank_and_world()
    copies, ranks = plan.joined.copies, ranks_of(plan.source)
    # rank 0 copies the tensors that are carried from files
    numbers = range(len(plan.transfer.sources))
    holders = [ranks.rank_of(file) if file < len(ranks.files) else 0 for file in numbers]
    mine = np.array(holders, "i4")[copies["src_file"]] == rank
    batches = Batches(plan.transfer, data, how.copying())

    def move() -> list[list[Range]]:
        batches.do(copies[mine], lambda: None)
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
