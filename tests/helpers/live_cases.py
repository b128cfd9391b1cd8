"""The checks of live models that tests/helpers/judge.py runs, for tests/judge/test_live.py.

live   checkpoint: of Megatron, which megatron-core itself loads
       loads: [[source, keywords of mckpt.live.load]]: each must fill the model with the same
       bits as that load
       like: the Hugging Face directory that describes the model
       exports: [[directory, keywords of mckpt.live.Sync]]: each Sync must give the tensors of that
       Hugging Face directory, bit for bit. The keyword `to` may be a name in TO; with `once`
       there is one call only; with `flat` the tensors come in buckets of this alignment
       saves: [[destination, keywords of mckpt.live.save]]: with `background`, all weights are
       zeroed while it is written
       engines: {an engine in ENGINES: the ports of its stand-in, such as
       tests/helpers/sglang_server.py, and of its group}: its example sends the weights twice,
       doubled the second time
       trains: true fills a model in DistributedDataParallel, with a distributed optimizer, whose
       master copies must have the same bits too; only `loads` are run then
       resumes: options of mckpt.trainer.train: a model and its optimizer are filled from
       `checkpoint`, a training checkpoint of any sizes, and train a step. `theirs`: the checkpoint
       that megatron-core itself loads, with the same bits before and after the step; with
       `reshard`, the keywords of mckpt.convert, it is made of `checkpoint` first. `saves` are
       written before the step, with the optimizer. `refused`: the load of `source` must fail;
       with "other", because its optimizer is that of another model, and with "settings", because a
       group of it decays otherwise
       lora: {"kind": "lora" or "canonical", "dim", "alpha" ...}: the model is wrapped with adapters
       of tests/helpers/lora_wrapper.py, or those of Megatron-Bridge with "bridge": true (also
       "dora"), and megatron-core saves it in `saved`. Each `loads` must fill the weights below
       them, and leave the adapters alone; Sync and save must give the tensors that mckpt makes of
       `saved`, merged and as PEFT
       adapters: [[directory of PEFT, directory]]: the second must have the weights of the model
       with the first loaded into its adapters. `refused`: directories of PEFT that do not fit
       -> wrong: {name of a check: what differs, on any rank}
       -> refused: the error for each of these
       whole: a directory to write: the model becomes the text model of a whole one, whose tower
       is made of the tensors of `like`. Each `loads` must fill it, and Sync and save_hf must give
       the tensors of `like`
       -> wrong: {name of a check: what differs, on any rank}
       hands: true does what a user may do wrong (`hands`), with `sources`: two directories of the
       same shapes
       deltas: the shares of the elements that change, one after the other, `times` over, with
       `like` and `options` of Sync: the deltas must make the tensors of a whole Sync
       -> wrong: {number: what differs}, errors: of each of the faults of `run_deltas`
       -> sent: {share: [bytes that all ranks sent for the deltas, and for all tensors]}
       memory: true lets a rank have no memory at many places of calls of a Sync, with `options`,
       and of saves to `saved`
       -> memory: {fault: [error of each rank, seconds, bytes that are not freed, what is wrong
       afterwards, bytes at the next call of the function that failed]}
       options: of mckpt.trainer.train, for `trains`
       -> errors: of each of these, one for each rank, by a name
       fault: makes the first load fail (FAULTS)
       -> differs: {number of a load: names of the weights that differ, on any rank}
       -> exported: {number of an export: what is wrong with its tensors, on any rank}
       overlap: the parameters of a step are gathered at the next forward pass only
       -> differs: {before, after, again: names of what differs} of `resumes`
       -> errors: of the first load, one for each rank; "" for a rank that has none
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import runpy
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import mckpt
from mckpt import live
from mckpt.errors import MckptError, SourceError, StorageError
from mckpt.live import flat, loading, memory, pieces, syncing
from mckpt.trainer import cpu, load, save, train
from mckpt.values.sizes import parse_size
from tests.helpers.box_engine import all_of

ROOT = Path(__file__).resolve().parents[2]


@torch.no_grad()
def run(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Runs the parts of one case on this rank, with a model that is built and not filled."""
    if "fault" in case:
        return {"errors": fault(case, chunks)}
    wrapped = fresh(chunks)
    differs: dict[str, list[str]] = {}
    if case["loads"]:  # before anything else has asked for its sharded_state_dict()
        source, options = case["loads"][0]
        live.load(wrapped, source, **options)
    first = {name: value.clone() for name, value in load.weights(chunks)}
    load.load(chunks, args, case["checkpoint"])
    wanted = {name: value.clone() for name, value in load.weights(chunks)}
    if case["loads"]:
        differs["fresh"] = on_any_rank(n for n in wanted if not same(first[n], wanted[n]))
    if case.get("hands"):
        return {"differs": differs, **hands(case, chunks, wanted)}
    for number, (source, options) in enumerate(case["loads"]):
        load.mark(chunks)
        live.load(wrapped, source, **options)
        differs[str(number)] = on_any_rank(
            name for name, value in load.weights(chunks) if not same(value, wanted[name])
        )
    if "like" in case:
        assert list(live.describe(chunks, like=case["like"])) == list(
            mckpt.open(case["checkpoint"])
        )
    exported = {
        str(number): on_any_rank(export_problems(chunks, case["like"], directory, options))
        for number, (directory, options) in enumerate(case.get("exports", ()))
    }
    for destination, options in case.get("saves", ()):
        saved = live.save(chunks, destination, like=case["like"], **options)
        for _, weight in load.weights(chunks) if options.get("background") else ():
            weight.zero_()
        assert saved.result()["files"]
        for name, value in load.weights(chunks):
            value.copy_(wanted[name])
    for engine, ports in case.get("engines", {}).items():
        push(chunks, case["like"], engine, *ports)
    return {"differs": differs, "exported": exported}


@torch.no_grad()
def run_whole(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Fills a whole multimodal model, and compares what it gives with `like`."""
    like, wrong = Path(case["like"]), dict[str, list[str]]()
    wanted = read(like)
    load.mark(chunks)
    live.load(chunks, like)  # the text model alone, whose source has towers too
    text = {name: weight.clone() for name, weight in load.weights(chunks)}
    load.load(chunks, args, case["checkpoint"])
    wrong["text"] = changed(chunks, text)
    models = [whole_model(chunk, wanted) for chunk in chunks]
    for number, (source, options) in enumerate(case["loads"]):
        for _, weight in load.weights(models):
            weight.fill_(float("nan"))
        live.load(models, source, **options)
        empty = (name for name, weight in load.weights(models) if weight.isnan().any())
        wrong[f"load {number}"] = on_any_rank(empty)
        given = on_the_host(live.hf_tensors(models, like=like))
        wrong[f"sync {number}"] = unlike(given, wanted)
    live.save_hf(models, case["whole"], like=like)
    wrong["saved"] = unlike(read(Path(case["whole"])), wanted)
    config = models[0].config
    config.layernorm_epsilon *= 2
    refused = refusal(lambda: live.load(models, case["loads"][0][0]))
    return {"wrong": wrong, "refused": refused}


def whole_model(chunk: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns a whole multimodal model as the trainers build it: the text model is its
    `language_model`, and the first stage has a tower whose names are those of transformers.
    """
    from megatron.core.transformer.module import MegatronModule

    class Whole(MegatronModule):
        def __init__(self) -> None:
            super().__init__(chunk.config)
            self.language_model = chunk
            for name, tensor in tensors.items() if chunk.pre_process else ():
                if not name.startswith("visual."):
                    continue
                module: torch.nn.Module = self
                *path, last = name.split(".")
                for part in path:
                    if not hasattr(module, part):
                        module.add_module(part, torch.nn.Module())
                    module = getattr(module, part)
                parameter = torch.nn.Parameter(torch.empty_like(tensor), requires_grad=False)
                module.register_parameter(last, parameter)

    return Whole()


def fresh(chunks: list[Any]) -> list[Any]:
    """Wraps chunks as get_model() of Megatron-LM does, after which a router's expert_bias has the
    dtype of the model until the first step.
    """
    from megatron.core.transformer.module import Float16Module

    dtypes = {value.dtype for _, value in load.weights(chunks[:1])}
    if not dtypes & {torch.bfloat16, torch.float16}:
        return chunks
    for chunk in chunks:
        chunk.config.bf16, chunk.config.fp16 = torch.bfloat16 in dtypes, torch.float16 in dtypes
    return [Float16Module(chunk.config, chunk) for chunk in chunks]


@torch.no_grad()
def run_deltas(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Changes a model again and again, and compares what deltas make with a whole Sync."""
    load.load(chunks, args, case["checkpoint"])
    like, options = case["like"], {"bucket_bytes": "96KiB", **case.get("options", {})}
    whole = live.Sync(chunks, like=like, **options)
    sync = live.Sync(chunks, like=like, delta=case.get("where", "host"), **options)
    wrong: dict[str, list[str]] = {}
    sent: dict[str, list[int]] = {}
    engine = {name: torch.zeros_like(tensor) for name, tensor in whole()}
    version = live.apply_delta(engine, sync(), 0)
    wrong["first"] = unlike(on_the_host(engine.items()), on_the_host(whole()))
    for number in range(case["times"]):
        for share in case["deltas"]:
            change(chunks, share, number)
            with counted_bytes() as full:
                right = on_the_host(whole())
            before, deltas = version, sync()
            assert deltas.base_version == version
            with counted_bytes() as some:
                if number % 2:
                    version = by_buckets(engine, deltas)
                else:
                    version = live.apply_delta(engine, deltas, version)
            assert version == before + 1
            wrong[f"{number} {share}"] = unlike(on_the_host(engine.items()), right)
            sent[str(share)] = [some[0], full[0]]
    return {"wrong": wrong, "sent": sent, **delta_faults(chunks, like)}


def by_buckets(engine: dict[str, torch.Tensor], deltas: live.Deltas) -> int:
    """Applies deltas from their flat form, and returns their version."""
    for bucket in deltas.buckets():
        first = 0
        for name, count in zip(bucket.names, bucket.counts, strict=True):
            part = slice(first, first := first + count)
            if bucket.indices is None:
                engine[name].copy_(bucket.values)
            else:
                engine[name].view(-1)[bucket.indices[part]] = bucket.values[part]
    return deltas.version


def change(chunks: list[Any], share: float, seed: int, flip: int = 0, of: str = "") -> None:
    """Changes low bits of about a share of the values, or the bits `flip`. The value of an element
    decides, so that all copies of a weight stay equal. of: a part of the names of the weights.
    """
    for _, weight in (pair for pair in load.weights(chunks) if of in pair[0]):
        bits = weight.view(-1).view(torch.int16)
        drawn = ((bits.long() + 40_000) * (2 * seed + 7_919) % 100_003) % 10_007
        bits[drawn < share * 10_007] ^= flip or 1 + seed % 7


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yields a list whose only number is, at the end, the bytes that all ranks have sent."""
    total, rank = [0], dist.get_rank()

    def counting(name: str, of: Callable[..., int]) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **keywords: Any) -> Any:
            total[0] += of(*args)
            return function(*args, **keywords)

        return call

    sizes: dict[str, Callable[..., int]] = {
        "all_reduce": lambda tensor: tensor.nbytes,
        "all_gather_into_tensor": lambda out, own: own.nbytes,
        "broadcast": lambda tensor, source: tensor.nbytes * (source == rank),
        "batch_isend_irecv": lambda listed: sum(
            one.tensor.nbytes for one in listed if one.op is dist.isend
        ),
    }
    kept = {name: getattr(dist, name) for name in sizes}
    for name, of in sizes.items():
        setattr(dist, name, counting(name, of))
    try:
        yield total
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, total[0])
        total[0] = sum(every)


def delta_faults(chunks: list[Any], like: str) -> dict[str, Any]:
    """Does what goes wrong with deltas; behind each fault all tensors must come right again."""
    rank, errors, seconds = dist.get_rank(), dict[str, list[str]](), dict[str, float]()
    whole = live.Sync(chunks, like=like)
    sync = live.Sync(chunks, like=like, delta="device", bucket_bytes="96KiB")
    engine = {name: torch.zeros_like(tensor) for name, tensor in whole()}
    version, wrong = live.apply_delta(engine, sync(), 0), dict[str, list[str]]()
    kept = sync._kept

    def old() -> int:
        first, second = sync(), sync()  # `second` builds on what `first` leaves half changed
        for _ in first if rank == 1 else ():
            break
        with suppress(MckptError):
            deque(first if rank != 1 else (), 0)
        deque(second, 0)
        return version

    def one_version() -> int:
        sync.version += rank == 1
        return version + (rank == 1)

    def unfit() -> int:
        kept.held[0] = kept.held[0][: len(kept.held[0]) - (rank == 1)]
        return version

    def early() -> int:
        for _ in sync() if rank == 1 else ():
            break
        return version

    def other_values() -> int:
        if rank == 1:
            engine[next(iter(engine))] += 1
        return version

    def another_base() -> int:
        return version + (rank == 2)

    def another() -> int:
        nonlocal version
        first = iter(sync())
        next(first)
        # which sends all tensors whole
        version = live.apply_delta(engine, sync(), version)
        deque(first, 0)
        return version

    for fault in (one_version, unfit, early, other_values, another_base, old, another):
        change(chunks, 0.1, len(errors))
        started, error = time.monotonic(), ""
        held, number = list(kept.held), sync.version
        try:
            asked = fault()
            if fault is not early or rank != 1:
                version = live.apply_delta(engine, sync(), asked)
        except MckptError as found:
            error = str(found)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, error)
        name = fault.__name__
        errors[name], seconds[name] = every, time.monotonic() - started
        if name == "one_version":
            sync.version = number
        if name == "unfit":
            kept.held = held
        version = live.apply_delta(engine, sync(), version)
        wrong[name] = unlike(on_the_host(engine.items()), on_the_host(whole()))
    return {"errors": errors, "seconds": seconds, "after": wrong}


# functions that need memory, and what they raise without it
NEEDY: tuple[tuple[Any, str, type[Exception]], ...] = (
    (torch, "empty", torch.OutOfMemoryError),
    (torch, "cat", torch.OutOfMemoryError),
    (torch, "searchsorted", torch.OutOfMemoryError),
    (torch.Tensor, "copy_", MemoryError),
)


@contextmanager
def failing(owner: Any, name: str, error: type[Exception], number: int) -> Iterator[list[int]]:
    """Lets one call of a function by mckpt.live fail on rank 1: that of this number, none if it is
    negative. Yields a list of the number of the calls, and of the bytes that rank 1 holds at the
    call behind the one that failed.
    """
    function, calls = getattr(owner, name), [0]

    def call(*args: Any, **keywords: Any) -> Any:
        if os.path.dirname(live.__file__) in sys._getframe(1).f_code.co_filename:
            calls[0] += 1
            if calls[0] == number + 1 and dist.get_rank() == 1:
                raise error("no memory is left")
            if calls[0] == number + 2 > 1:
                calls.append(held_bytes())
        return function(*args, **keywords)

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        setattr(owner, name, function)


def memory_faults(
    work: Callable[[], Any],
    again: Callable[[], list[str]] = list,
    needy: Any = NEEDY,
    most: int = 4,
) -> dict[str, Any]:
    """Lets some of the calls of each function fail, one after the other.

    again: makes ready for the work, and returns what is wrong behind the work before.

    Returns for each of them the errors of all ranks, the seconds, the bytes that a rank holds more
    while it has the error, what is wrong afterwards, and the bytes more at the next call of rank 1.
    """
    found: dict[str, Any] = {}
    for owner, name, error in needy:
        again()
        with failing(owner, name, error, -1) as calls:
            work()
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, calls[0])
        again()
        for number in sorted({*range(0, counts[1], counts[1] // most + 1), counts[1] - 1} - {-1}):
            held, raised, started = held_bytes(), None, time.monotonic()
            with failing(owner, name, error, number) as calls:
                try:
                    work()
                except MckptError as one:
                    raised = one
            seconds, more = time.monotonic() - started, held_bytes() - held
            while more > 0 and time.monotonic() < started + seconds + 0.5:  # threads of gloo end
                more = held_bytes() - held
            every: list[Any] = [None] * dist.get_world_size()
            said = "" if raised is None else str(raised)
            then = [one - held for one in calls[1:]]
            dist.all_gather_object(every, (said, seconds, more, calls[0] > number, then))
            del raised
            errors, times, kept, failed, then = ([*column] for column in zip(*every, strict=True))
            one = [errors, max(times), max(kept), again(), then[1]]
            if failed[1]:  # what changed decides whether there are as many calls
                found[f"{name} {number} of {counts[1]}"] = one
    return found


KNOWN: set[int] = set()  # addresses of the weights


def held_bytes() -> int:
    """Returns the bytes of all tensors but KNOWN, and of the copies of saves."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    total = sum(nbytes for address, nbytes in sizes.items() if address not in KNOWN)
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "mckpt-live" in os.readlink(f"/proc/self/fd/{number}"):
                total += os.stat(f"/proc/self/fd/{number}").st_blocks * 512 + 1
    return total


# keywords of Sync, by a name
GIVING: dict[str, dict[str, Any]] = {
    "whole": {},
    "snapshot": {"snapshot": True},
    "fp8": {"quantize": "fp8"},
}
# keywords of save, by a name: pieces go straight into files, and a copy of the weights
SAVING: dict[str, dict[str, Any]] = {
    "pieces of hf": {"format": "hf", "background": True},
    "pieces of own": {"background": True},
    "copy": {"format": "torch", "tp": 1, "pp": 1, "background": True},
    "portions": {"format": "torch", "tp": 1, "pp": 1},
}


@torch.no_grad()
def run_memory(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Lets a rank have no memory at some places of calls and of saves."""
    load.load(chunks, args, case["checkpoint"])
    like, options = case["like"], {"bucket_bytes": "96KiB", **case.get("options", {})}
    found: dict[str, Any] = {}
    KNOWN.update(weight.untyped_storage().data_ptr() for _, weight in load.weights(chunks))
    gc.freeze()  # then `held_bytes` looks only at objects that are made later

    def add(name: str, faults: dict[str, Any]) -> None:
        found.update({f"{name}: {fault}": one for fault, one in faults.items()})

    whole = live.Sync(chunks, like=like, **options)
    needy = [*NEEDY, (torch.Tensor, "clone", MemoryError)]
    for name, more in GIVING.items():
        sync = live.Sync(chunks, like=like, **options, **more)
        right = on_the_host(sync())

        def given(sync: Any = sync, right: Any = right) -> list[str]:
            return unlike(on_the_host(sync()), right)

        add(name, memory_faults(lambda s=sync: deque(s(), 0), given, needy))
        if name == "fp8":
            add("flat", memory_faults(lambda s=sync: deque(s.buckets(), 0), given, needy))
    for name, keywords in SAVING.items() if "saved" in case else ():
        folders = [Path(case["saved"]) / name]

        def saved(folders: Any = folders) -> list[str]:
            wrong = [str(folders[-1])] if (folders[-1] / "mckpt.json").exists() else []
            folders.append(folders[0].with_name(f"{folders[0].name} {len(folders)}"))
            return on_any_rank(wrong)

        def save_it(folders: Any = folders, keywords: Any = keywords) -> None:
            live.save(chunks, folders[-1], like=like, **keywords).result()

        add(name, memory_faults(save_it, saved, needy[-2:]))
    for where in ("host", "device"):
        sync = live.Sync(chunks, like=like, delta=where, **options)
        engine = {name: torch.zeros_like(tensor) for name, tensor in whole()}
        applied = [0]

        def again(sync: Any = sync, engine: Any = engine, applied: Any = applied) -> list[str]:
            if sync.version != applied[0]:  # nobody has applied the deltas of the last call
                sync._kept.valid = False
            applied[0] = live.apply_delta(engine, sync(), sync.version)
            wrong = unlike(on_the_host(engine.items()), on_the_host(whole()))
            change(chunks, 0.02, sync.version)
            change(chunks, 0.5, sync.version, of="mlp")
            return wrong

        add(where, memory_faults(lambda s=sync: deque(s(), 0), again))
    return {"memory": found}


# keyword of Sync -> its value on rank 0, and on the others
UNLIKE: dict[str, tuple[Any, Any]] = {
    "bucket_bytes": (65536, "1MiB"),
    "slices": (True, False),
    "dtype": (None, "fp32"),
    "quantize": (None, "fp8"),
    "to": (0, 1),
    "adapter": ("none", "merged"),
    "snapshot": (True, False),
    "allow_overflow": (True, False),
    "delta": ("host", None),
    "vocab_size": (None, 131),
}


class Aborted:
    """A work of NCCL that was aborted: it looks like one that is done, and has sent nothing."""

    def wait(self) -> None:
        pass


def full_disk(fd: int, view: memoryview, at: int, path: str) -> None:
    raise StorageError(f"{path}: no space left")


def hands(
    case: dict[str, Any], chunks: list[Any], wanted: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Does what a user may do wrong, on all ranks or on one of them. Returns the errors of all
    ranks by a name, and what is wrong with the values that were given nevertheless.
    """
    like, rank = case["like"], dist.get_rank()
    source = case["loads"][0][0]
    errors: dict[str, list[str]] = {}
    wrong: dict[str, list[str]] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, refusal(work))
        errors[name] = every

    for name, values in UNLIKE.items():
        options = {"bucket_bytes": "4MiB", name: values[rank > 0]}
        note(f"Sync {name}", lambda o=options: live.Sync(chunks, like=like, **o))
    names = list(mckpt.open(like).hf_tensors())
    receivers = (lambda r: names) if rank else (lambda r: names[:3])
    note("Sync receivers", lambda: live.Sync(chunks, like=like, to=receivers))
    for name, options in (("broadcast", {"broadcast": rank == 0}), ("threads", {"threads": -rank})):
        note(f"load {name}", lambda o=options: live.load(chunks, source, **o))
    note("load source", lambda: live.load(chunks, case["sources"][rank > 0]))
    destination = Path(case["sources"][0]).parent
    note("save dst", lambda: live.save_hf(chunks, destination / f"dst{rank}", like=like))
    note("no chunks", lambda: live.load(chunks if rank == 0 else [], source))
    note("a chunk", lambda: live.load(chunks[0], source))
    note("functions", lambda: (live.load if rank else live.describe)(chunks, *[source][:rank]))
    load.mark(chunks)
    # windows as of ranks that have other numbers of cores, and as small as this model needs
    loading._window_bytes = lambda *_: 1 << 12 + rank
    try:
        live.load(chunks, source, broadcast=True)
    finally:
        loading._window_bytes = WINDOW_BYTES
    wrong["windows of each rank"] = changed(chunks, wanted)

    sync = live.Sync(chunks, like=like, bucket_bytes="1MiB")
    right = on_the_host(sync())
    layers = next(m for chunk in chunks for m in chunk.modules() if hasattr(m, "linear_qkv"))
    inner, weight = layers.linear_qkv, layers.linear_qkv.weight
    held = weight.data
    if rank == 1:
        weight.data = held.float()
    note("dtype", lambda: list(sync()))
    weight.data = held
    if rank == 1:
        weight.data = held[:-1]
    note("shape", lambda: list(sync()))
    weight.data = held
    if rank == 1:
        layers.linear_qkv = copy.copy(inner)
    note("module", lambda: list(sync()))
    layers.linear_qkv = inner
    weight.data = held.clone()
    wrong["storage"] = unlike(on_the_host(sync()), right)
    kept, size = held.clone(), held.untyped_storage().nbytes()
    weight.data = held
    if rank == 1:
        held.untyped_storage().resize_(0)
    note("released", lambda: list(sync()))
    note("released load", lambda: live.load(chunks, source))
    note("released save", lambda: live.save_hf(chunks, destination / "none", like=like))
    held.untyped_storage().resize_(size)
    held.copy_(kept)
    write_at = pieces.write_at
    if rank == 1:
        pieces.write_at = full_disk
    for more in ({}, {"background": True}):
        saving = {"like": like, **more}
        folder = destination / f"full{len(more)}"
        note(f"full {len(more)}", lambda f=folder, s=saving: live.save_hf(chunks, f, **s).result())
        wrong[folder.name] = ["published"] if (folder / "config.json").exists() else []
    pieces.write_at = write_at
    wrong["restored"] = unlike(on_the_host(sync()), right)
    summed = dist.all_reduce
    dist.all_reduce = lambda *_, **keywords: Aborted()
    note("aborted", lambda: list(sync()))
    dist.all_reduce = summed
    sync, given = live.Sync(chunks, like=like, bucket_bytes="1MiB", snapshot=True), {}
    for name, tensor in sync():
        given[name] = tensor.to("cpu", copy=True)
        for _, value in load.weights(chunks) if len(given) == 1 else ():
            value.mul_(2)
    for _, value in load.weights(chunks):
        value.div_(2)
    wrong["snapshot"] = unlike(given, right)
    first, apart = sync(), live.Sync(chunks, like=like, bucket_bytes="1MiB", snapshot=True)()
    given = {name: tensor.clone() for name, tensor in (next(first), next(apart))}
    for _, value in load.weights(chunks):
        value.mul_(2)
    doubled = {name: tensor * 2 for name, tensor in right.items()}
    wrong["another call"] = unlike(on_the_host(sync()), doubled)
    note("call goes on", lambda: list(first))
    wrong["another Sync"] = unlike({**given, **on_the_host(apart)}, right)
    for _, value in load.weights(chunks):
        value.div_(2)
    wrong["behind it"] = unlike(on_the_host(sync()), right)
    return {"errors": errors, "wrong": wrong}


@torch.no_grad()
def run_lora(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Wraps a model with adapters, and compares its ways in and out with those of files."""
    like, saved = case["like"], Path(case["saved"])
    load.load(chunks, args, case["checkpoint"])
    wrap(chunks, **case["lora"])
    fill_adapters(chunks)
    before = {name: value.clone() for name, value in load.weights(chunks)}
    save.save(chunks, args, saved / "wrapped", "torch_dist")
    if dist.get_rank() == 0:
        file_route(saved, like, case["lora"]["alpha"])
    dist.barrier()
    wrong: dict[str, list[str]] = {}
    for number, (source, options) in enumerate(case["loads"]):
        for name, weight in load.weights(chunks):
            if ".adapter." not in name:
                weight.fill_(float("nan"))
        report = live.load(chunks, source, **options)
        wrong[f"load {number}"] = changed(chunks, before)
        kept = sum(value.numel() for name, value in before.items() if ".adapter." in name)
        assert report["adapter_kept"] == kept, report
    for source in ("only", "wrapped"):
        load.mark(chunks)
        options = {"broadcast": source == "wrapped"}
        report = live.load(chunks, like, adapter=saved / source, **options)
        assert "adapter_kept" not in report
        wrong[f"load {source}"] = changed(chunks, before)
    for adapter, merged in case.get("adapters", ()):
        live.load(chunks, like, adapter=adapter)
        given = on_the_host(live.hf_tensors(chunks, like=like))
        wrong[f"load {adapter}"] = unlike(given, read(Path(merged)))
    refused = [
        refusal(lambda place=adapter: live.load(chunks, like, adapter=place))
        for adapter in case.get("refused", ())
    ]
    for name, weight in load.weights(chunks):
        weight.copy_(before[name])
    weights = list(live.describe(chunks, like=like))
    assert weights == list(mckpt.open(case["checkpoint"]))
    assert all(":" in name for name in live.describe(chunks, like=like, adapter="only"))
    dora = case["lora"]["kind"] == "dora"  # whose lengths of rows no Sync computes
    for choice in ("merged", "none", "only"):
        if dora and choice == "merged":
            refused.append(refusal(lambda: live.Sync(chunks, like=like)))
        else:
            sync = live.Sync(chunks, like=like, adapter=choice)
            for call in (1, 2):
                given = on_the_host(sync())
                wrong[f"{choice} {call}"] = unlike(given, read(saved / choice))
            assert list(given) == sync.names
            names = [p for c in chunks for p in (*c.named_parameters(), *c.named_buffers())]
            host = {f"{n} {name}": weight.clone() for n, (name, weight) in enumerate(names)}
            named = [(f"{n} {name}", weight) for n, (name, weight) in enumerate(names)]
            load.mark(chunks)
            given = on_the_host(sync(weights=host, named=named))
            wrong[f"{choice} copies"] = unlike(given, read(saved / choice))
            for name, weight in load.weights(chunks):
                weight.copy_(before[name])
        options: dict[str, Any] = {"background": choice == "merged", "adapter": choice}
        saving = live.save_hf(chunks, saved / f"live-{choice}", like=like, **options)
        for _, weight in load.weights(chunks) if choice == "merged" else ():
            weight.zero_()
        saving.result()
        for name, weight in load.weights(chunks):
            weight.copy_(before[name])
    for name, options in MERGED.items() if not dora else ():
        sync, wanted = live.Sync(chunks, like=like, **options), read(saved / name.split()[0])
        if "slices" in options:
            pieces: dict[str, list[torch.Tensor]] = {}
            for one in sync():
                pieces.setdefault(one.name, []).append(one.tensor)
            given = on_the_host((key, torch.cat(parts)) for key, parts in pieces.items())
        else:
            given = on_the_host(sync())
        here = options.get("to") in (None, dist.get_rank())
        wrong[name] = unlike(given, wanted if here else {})
    if not dora:
        boxes = dict(enumerate(live.engine_boxes(like, tp=2)))
        given = all_of(live.Sync(chunks, like=like, to=boxes))
        own = boxes.get(dist.get_rank(), {})
        wrong["boxes"] = on_any_rank(box_problems(given, own, read(saved / "merged")))
    nvfp4 = "" if dora else refusal(lambda: live.Sync(chunks, like=like, quantize="nvfp4"))
    errors = adapter_faults(chunks, like)
    return {"wrong": wrong, "errors": errors, "refused": refused, "nvfp4": nvfp4}


def adapter_faults(chunks: list[Any], like: str) -> list[list[str]]:
    """Returns the errors of each rank if one rank has an adapter of another alpha, and if one has
    a tensor of an adapter that mckpt does not know.
    """
    found, rank = [], dist.get_rank()
    adapters = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "linear_in")]
    adapters[0].alpha *= 1 + (rank == 1)
    found.append(refusal(lambda: live.describe(chunks, like=like)))
    adapters[0].alpha //= 1 + (rank == 1)
    whole = chunks[0].sharded_state_dict

    def renamed(*args: Any, **keywords: Any) -> Any:
        state = whole(*args, **keywords)
        for value in state.values() if rank == 1 else ():
            value.key = value.key.replace("adapter.linear_in", "adapter.linear_mid")
        return state

    chunks[0].sharded_state_dict = renamed
    found.append(refusal(lambda: live.load(chunks, like)))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


def refusal(work: Callable[[], Any]) -> str:
    """Returns the error of a function; "" if it has none."""
    try:
        work()
    except MckptError as error:
        return str(error)
    return ""


# the keywords of Sync that give the tensors of a directory, which the first word of the name names
MERGED: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "fp8": {"quantize": "fp8"},
    "merged on one rank": {"to": 1},
    "merged in slices": {"slices": True, "bucket_bytes": 8192},
}


def wrap(chunks: list[Any], kind: str, bridge: bool = False, **options: Any) -> None:
    """Wraps a model with adapters."""
    if not bridge:
        from tests.helpers import lora_wrapper

        lora_wrapper.wrap(chunks, kind, **options)
        return
    from tests.helpers import bridge_adapters

    bridge_adapters.prepare()
    bridge_adapters.adapter_class(kind)(**options)(chunks, training=False)
    for chunk in chunks:
        chunk.to(chunk.config.params_dtype)


def fill_adapters(chunks: list[Any]) -> None:
    """Fills the factors with numbers whose products float32 holds exactly. Each whole tensor is
    drawn by its key, and a rank takes its parts.
    """
    for tensor in load.sharded_values(load.sharded_state(chunks, save.CONTENT_METADATA)):
        if ".adapter." not in tensor.key or not hasattr(tensor, "local_shape"):
            continue
        drawn = torch.Generator().manual_seed(zlib.crc32(tensor.key.encode()))
        shape, axes = tensor.global_shape, tensor.prepend_axis_num
        part = torch.randint(-8, 9, shape, generator=drawn)[tuple(tensor.global_offset[:axes])]
        sizes = zip(tensor.global_offset[axes:], tensor.local_shape, strict=True)
        tensor.data.copy_(part[tuple(slice(o, o + n) for o, n in sizes)] / 64)


def file_route(saved: Path, like: str, alpha: float) -> None:
    """Writes what the conversions of files make of the wrapped model."""
    from mckpt.adapters import forms, merging
    from mckpt.adapters.checkpoint import of_megatron
    from mckpt.options import SourceOptions

    source, _ = of_megatron(saved / "wrapped", SourceOptions(like=like), alpha)
    mckpt.adapter_to_hf(saved / "wrapped", saved / "only", alpha=alpha, like=like)
    assert source.base is not None
    mckpt.convert(source.base, saved / "none", format="hf")
    with forms.as_peft(source) as adapter:
        merged = merging.merge(source.base, adapter)
        mckpt.convert(merged, saved / "merged", format="hf")
        mckpt.convert(merged, saved / "fp32", format="hf", dtype="fp32")
        mckpt.convert(saved / "merged", saved / "fp8", format="hf", quantize="fp8")


def changed(chunks: list[Any], before: dict[str, torch.Tensor]) -> list[str]:
    """Returns the weights that do not have the bits that they had before, on any rank."""
    return on_any_rank(
        name for name, value in load.weights(chunks) if not same(value, before[name])
    )


def on_the_host(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns copies of tensors, by their names."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a Hugging Face directory."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def unlike(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Returns the tensors that differ from others, on any rank."""
    wrong = given.keys() ^ wanted.keys()
    wrong |= {name for name in given.keys() & wanted.keys() if not same(given[name], wanted[name])}
    return on_any_rank(wrong)


def box_problems(
    found: dict[Any, torch.Tensor], boxes: live.Boxes, whole: dict[str, torch.Tensor]
) -> list[str]:
    """Returns the boxes that are missing, left over, or no slices of the whole tensors."""
    wanted = {
        (name, box): whole[name][tuple(slice(a, b) for a, b in box)]
        for name, listed in boxes.items()
        for box in listed
    }
    wrong = found.keys() ^ wanted.keys()
    wrong |= {key for key in found.keys() & wanted.keys() if not same(found[key], wanted[key])}
    return [str(key) for key in wrong]


def run_training(case: dict[str, Any], args: Any) -> dict[str, Any]:
    """Fills a model that is ready to be trained."""
    options = train.TrainOptions(dtype="bfloat16", **case.get("options", {}))
    args = train.run_args(args, options)
    with cpu.as_cuda():
        chunks, optimizer, _ = train.set_up(args, options)
        models = [chunk.module for chunk in chunks]
        load.load(models, args, case["checkpoint"])
        optimizer.reload_model_params()

        def bits() -> dict[str, torch.Tensor]:
            masters = [m for group in optimizer.param_groups for m in group["params"]]
            held = {f"master {i}": m.detach().clone() for i, m in enumerate(masters)}
            return held | {name: value.clone() for name, value in load.weights(models)}

        wanted, differs = bits(), {}
        for number, (source, keywords) in enumerate(case["loads"]):
            load.mark(models)
            optimizer.reload_model_params()
            live.load(chunks, source, optimizer=optimizer, **keywords)
            found = bits()
            wrong = [name for name in wanted if not same(found[name], wanted[name])]
            differs[str(number)] = on_any_rank(wrong)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.step()
            found = bits()
            wrong = [name for name in wanted if not same(found[name], wanted[name])]
            differs[f"{number} after a step"] = on_any_rank(wrong)
        load.mark(models)
        refused = refusals(chunks, *case["loads"][0][:1], None, load_optimizer=False)
        live.load(chunks, case["loads"][0][0], keep_masters=True)
        load.mark(models)
        optimizer.step()  # writes the master copies into the parameters
        found = bits()
        assert [name for name in wanted if not same(found[name], wanted[name])] == []
    masters = sum("master" in name for name in wanted)
    return {"differs": differs, "masters": masters, "errors": {"load": refused}}


def run_resumed(case: dict[str, Any], args: Any) -> dict[str, Any]:
    """Fills a model and its optimizer, and trains a step."""
    given = {"global_batch_size": 4, "seq_length": 16, "lr": 1e-2, **case["resumes"]}
    options = train.TrainOptions(**given)
    args = train.run_args(args, options)
    data = train.data.open_source(None, args, args.seq_length, options.seed, None)
    if "reshard" in case and dist.get_rank() == 0:
        mckpt.convert(case["checkpoint"], case["theirs"], **case["reshard"])
    dist.barrier()
    with cpu.as_cuda():
        theirs = train.set_up(args, options)
        with overlapping() if case.get("overlap") else nullcontext():
            mine = train.set_up(args, options)
        if "refused" in case:
            optimizer = theirs[1] if case["refused"] == "other" else mine[1]
            if case["refused"] == "settings":
                optimizer.param_groups[0]["wd_mult"] = 0.25
            errors = refusals(mine[0], case["source"], optimizer)
            links = getattr(mine[1], "chained_optimizers", [mine[1]])
            assert not any(link.optimizer.state for link in links), "it has a state now"
            return {"errors": errors}

        def fill() -> None:
            chunks, optimizer, scheduler = mine
            load.mark([chunk.module for chunk in chunks])
            given = {"optimizer": optimizer, "scheduler": scheduler, "load_optimizer": True}
            live.load(chunks, case["checkpoint"], **given, **case.get("keywords", {}))

        fill()
        for destination, keywords in case.get("saves", ()):
            given = {"optimizer": mine[1], "scheduler": mine[2], "args": args}
            live.save(mine[0], destination, **given, **keywords).result()
        models = [chunk.module for chunk in theirs[0]]
        load.load(models, args, case["theirs"], optimizer=theirs[1], scheduler=theirs[2])
        wanted = bits_of(*theirs)
        differs = {"before": differences(bits_of(*mine), wanted)}
        for run in (mine, theirs):
            train.train_step(3, *run, args, data)
        if case.get("overlap"):
            assert differences(bits_of(*mine), bits_of(*theirs)), "all ranks have all parameters"
            memory.Memory(mine[0]).complete()
        differs["after"] = differences(bits_of(*mine), bits_of(*theirs))
        assert differences(bits_of(*mine), wanted), "the step has changed nothing"
        fill()
        differs["again"] = differences(bits_of(*mine), wanted)
        errors = replaced_on_one(mine[0], case["like"]) if case.get("overlap") else {}
    return {"differs": differs, "states": len(wanted), "errors": errors}


def replaced_on_one(chunks: list[Any], like: str) -> dict[str, list[str]]:
    """Returns the errors of each rank if only rank 0 gives tensors in the place of the weights, and
    if all ranks or none do so afterwards.
    """
    errors: dict[str, list[str]] = {}
    copies = {n: w.detach().clone() for n, w in chunks[0].named_parameters()}
    copies |= {n: w.detach().clone() for n, w in chunks[0].named_buffers()}
    for delta in (None, "host"):
        sync = live.Sync(chunks, like=like, delta=delta)
        for name, ranks in {"one": [0], "none": [], "all": range(4)}.items():
            given = copies if dist.get_rank() in ranks else None
            every: list[Any] = [None] * dist.get_world_size()
            said = refusal(lambda s=sync, g=given: deque(s(weights=g), 0))
            dist.all_gather_object(every, said)
            errors[f"{delta} {name}"] = every
    return errors


@contextmanager
def overlapping() -> Iterator[None]:
    """Lets DistributedDataParallel gather the parameters of a step at the next forward pass."""
    from megatron.core import distributed

    kept = distributed.DistributedDataParallelConfig
    overlapped = functools.partial(kept, overlap_param_gather=True)
    distributed.DistributedDataParallelConfig = overlapped
    try:
        yield
    finally:
        distributed.DistributedDataParallelConfig = kept


def refusals(
    chunks: list[Any], source: str, optimizer: Any, load_optimizer: bool = True
) -> list[str]:
    """Returns the error of each rank; "" for a rank that has none."""
    error = ""
    try:
        live.load(chunks, source, optimizer=optimizer, load_optimizer=load_optimizer)
    except MckptError as e:
        error = str(e)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error)
    return every


def bits_of(chunks: list[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Returns everything that a training goes on from."""
    out: dict[str, Any] = {}
    for name, value in load.weights([chunk.module for chunk in chunks]):
        out[name] = value.detach().clone()
    for i, link in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for j, group in enumerate(link.optimizer.param_groups):
            out[f"group {i} {j}"] = {k: v for k, v in group.items() if k != "params"}
            for k, main in enumerate(group["params"]):
                for name, value in {"main": main, **link.optimizer.state[main]}.items():
                    out[f"{name} {i} {j} {k}"] = value.detach().clone()
        if scaler := getattr(link, "grad_scaler", None):
            out |= {f"{name} {i}": value for name, value in scaler.state_dict().items()}
    return out | {"scheduler": scheduler.state_dict()}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    def equal(a: Any, b: Any) -> bool:
        return same(a, b) if isinstance(b, torch.Tensor) else a == b

    wrong = found.keys() ^ wanted.keys()
    wrong |= {name for name in found.keys() & wanted.keys() if not equal(found[name], wanted[name])}
    return on_any_rank(wrong)


# engine -> the file of its example in examples/live, the function there, the method of what that
# returns, and its keywords
ENGINES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sglang": ("sglang_weights.py", "SglangServer", "update", {"backend": "gloo"}),
    "vllm": ("vllm_weights.py", "vllm_engine", "send_weights", {}),
}


def push(chunks: list[Any], like: str, engine: str, http: int, group: int) -> None:
    """Runs the example of an engine with a stand-in for it."""
    file, function, method, keywords = ENGINES[engine]
    sys.path[:0] = [str(ROOT / "tests" / "helpers" / name) for name in ("fake_sglang", "fake_vllm")]
    example = runpy.run_path(str(ROOT / "examples" / "live" / file))
    url, place = f"http://127.0.0.1:{http}", {"address": "127.0.0.1", "port": group}
    server = example[function](chunks, like, url, **place, workers=1, **keywords)
    getattr(server, method)()
    for _, weight in load.weights(chunks):
        weight.mul_(2)
    getattr(server, method)()
    for _, weight in load.weights(chunks):
        weight.div_(2)


# what the keyword `to` of Sync may be, by a name that JSON can have
TO = {
    "halves": lambda rank: NAMES[rank % 2 :: 2],  # two groups of ranks receive every other tensor
    "last": lambda rank: NAMES if rank == 3 else [],
}
NAMES: list[str] = []


@torch.no_grad()
def export_problems(
    chunks: list[Any], like: str, directory: str, options: dict[str, Any]
) -> Iterator[str]:
    """Yields what is wrong with the tensors that a Sync gives this rank, in two calls: before the
    second one all weights are doubled, and afterwards they are halved. There is one call only where
    the tensors would not be doubled: the smallest numbers of fp16, codes, shifted norms.
    """
    wanted = read(Path(directory))
    NAMES[:] = sorted(wanted)
    rank, to = dist.get_rank(), options.get("to")
    mine = set(TO[to](rank)) if isinstance(to, str) else set(NAMES)
    if isinstance(to, int) and to != rank:
        mine = set()
    options = dict(options)
    align = options.pop("flat", 0)
    once = options.pop("once", False) or "quantize" in options or options.get("dtype") == "fp16"
    sync = live.Sync(chunks, like=like, **{**options, "to": TO.get(to, to)})
    most = parse_size(options.get("bucket_bytes", "1GiB"))
    for factor in (1,) if once else (1, 2):
        for _, weight in load.weights(chunks) if factor == 2 else ():
            weight.mul_(2)
        whole = {name: torch.zeros_like(wanted[name]) for name in mine}
        rows = Counter[str]()
        for found in flattened(sync, align) if align else sync():
            name, tensor = found[:2]
            first = found.first if options.get("slices") else 0
            if name not in mine or tensor.nbytes > most:
                yield f"{name}: not asked for, or too large"
                continue
            part = whole[name][first : first + len(tensor)]
            if (tensor.dtype, tensor.shape) != (part.dtype, part.shape):
                yield f"{name}: is {tensor.dtype} {list(tensor.shape)}"
                continue
            part.copy_(tensor)
            rows[name] += len(part)
        for name, tensor in whole.items():
            right = wanted[name] if factor == 1 else wanted[name] * 2
            if rows[name] != len(tensor) or not same(tensor, right):
                yield f"{name}: differs, or is not complete (call {factor})"
        last = sync.last
        if sync.version != factor or last["version"] != factor or not last["seconds"] > 0:
            yield f"call {factor} is not counted: {last}"
        every = on_any_rank([f"{last['sent']} {last['received']}"])
        sums = [sum(int(line.split()[place]) for line in every) for place in (2, 3)]
        links = sync.links
        if sums[1] != sum(links.values()) or sums[0] < sums[1] / dist.get_world_size():
            yield f"{sums[0]} bytes sent and {sums[1]} received of {sum(links.values())}"
        for _, weight in load.weights(chunks) if factor == 2 else ():
            weight.div_(2)


def flattened(sync: live.Sync, align: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of flat buckets, which are all cut at the end: a later bucket must not
    write into an earlier one. Each must lie in one memory, as its metadata says.
    """

    listed = (tensor for bucket in sync._plan.listed for tensor in bucket.tensors)
    later = {tensor.name for tensor in listed if tensor.quantised}  # by the ranks that receive it

    def made(named: list[tuple[str, torch.Tensor]], *args: Any) -> live.FlatBucket:
        bucket = flat.flat_bucket(named, *args)
        copied = bucket.buffer.data_ptr() != named[0][1].data_ptr()
        assert copied == any(name in later for name, _ in named), "it is copied twice"
        return bucket

    syncing.flat_bucket = made
    try:
        buckets = list(sync.buckets(align))
    finally:
        syncing.flat_bucket = flat.flat_bucket
    for buffer, tensors, ready in buckets:
        assert (ready is None) == (buffer.device.type == "cpu")
        assert buffer.dtype is torch.uint8 and buffer.is_contiguous()
        assert buffer.storage_offset() == 0 and not len(buffer) % align
        end = 0
        for name, dtype, shape, offset in tensors:
            form = sync.tensors[name]
            assert form == (dtype, shape), (name, form, dtype, shape)
            unit = max(align, dtype.itemsize)
            assert offset == -(-end // unit) * unit, f"{name}: begins at {offset}, behind {end}"
            count = torch.Size(shape).numel() * dtype.itemsize
            end = offset + count
            yield name, buffer[offset:end].view(dtype).view(shape)
        assert end <= len(buffer) < end + align
    pointers = [bucket.buffer.untyped_storage().data_ptr() for bucket in buckets]
    assert len(set(pointers)) == len(buckets)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits."""
    bytes_of = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bytes_of)


def on_any_rank(names: Any) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(names))
    return sorted({f"rank {rank}: {name}" for rank, held in enumerate(every) for name in held})


# --------------------------------------------------------------------------------------- faults


def extra_parameter(chunks: list[Any]) -> None:
    """Adds a frozen parameter that no mapping names, on one rank only."""
    if dist.get_rank() == 1:
        new = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        chunks[0].decoder.register_parameter("extra", new)


def hidden_parameter(chunks: list[Any]) -> None:
    """Lets sharded_state_dict() leave out a parameter."""
    decoder = chunks[0].decoder
    whole = decoder.sharded_state_dict

    def without(*args: Any, **keywords: Any) -> Any:
        state = whole(*args, **keywords)
        return {name: v for name, v in state.items() if not name.endswith("linear_proj.weight")}

    decoder.sharded_state_dict = without


def renamed_parameter(chunks: list[Any]) -> None:
    """Gives a parameter a name that no mapping has."""
    whole = chunks[0].sharded_state_dict

    def renamed(*args: Any, **keywords: Any) -> Any:
        state = whole(*args, **keywords)
        for value in state.values():
            value.key = value.key.replace("linear_proj.weight", "linear_out.weight")
        return state

    chunks[0].sharded_state_dict = renamed


def failing_read(chunks: list[Any]) -> None:
    """Lets one rank fail while it reads."""

    def read(*args: Any) -> None:
        raise SourceError("the disk of one rank is broken")

    if dist.get_rank() == 1:
        loading.read = read


def other_settings(chunks: list[Any]) -> None:
    """Gives two settings of the model, on one rank, other values than those of the checkpoint."""
    if dist.get_rank() == 1:
        chunks[0].config.layernorm_epsilon = 3e-5
        chunks[0].rotary_base = 77


def lost_in_call(chunks: list[Any]) -> None:
    """Lets one rank leave while the tensors of a Sync are on their way."""
    sync = live.Sync(chunks, like=LIKE[0], bucket_bytes=16384, slices=True)
    for number, _ in enumerate(sync()):
        if dist.get_rank() == 1 and number == 2:
            raise SystemExit
    raise AssertionError("a rank has all tensors, although another one has left")


LIKE = [""]  # of the model of a fault


def lost_rank(chunks: list[Any]) -> None:
    """Lets one rank leave before the load."""
    if dist.get_rank() == 1:
        raise SystemExit


FAULTS = {
    f.__name__: f
    for f in (
        extra_parameter,
        hidden_parameter,
        renamed_parameter,
        other_settings,
        failing_read,
        lost_rank,
        lost_in_call,
    )
}


def fault(case: dict[str, Any], chunks: list[Any]) -> list[str | None]:
    """Returns the error of each rank, through the store: a group may be broken."""
    rank, world, store = (
        dist.get_rank(),
        dist.get_world_size(),
        dist.distributed_c10d._get_default_store(),
    )
    said = ""
    LIKE[0] = case["loads"][0][0]
    try:
        FAULTS[case["fault"]](chunks)
        live.load(chunks, *case["loads"][0][:1], **case["loads"][0][1])
    except MckptError as error:
        said = str(error)
    except SystemExit:
        if dist.get_backend() != "nccl":  # which would wait for the work that is left
            dist.destroy_process_group()
    finally:
        loading.read = READ
    store.set(f"said{rank}", said)
    return [store.get(f"said{r}").decode() for r in range(world)]


READ = loading.read
WINDOW_BYTES = loading._window_bytes
