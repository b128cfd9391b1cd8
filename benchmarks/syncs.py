"""Plans a sync of a very large model between all ranks, in one process: from sizes, without torch.

    python -m benchmarks.syncs deepseek-v3 --tp 8 --pp 16 --ep 32 --engine-tp 16
    python -m benchmarks.syncs kimi-k2 --tp 8 --pp 16 --ep 32 --engine-ep 64 --samples 64
    python -m benchmarks.syncs deepseek-v3 --tp 8 --pp 16 --ep 32 --engine-tp 16 --shrink 32 --every

Describes what each rank of Megatron holds, as `mckpt.live` does on running models, proves that the
ranks hold each element, and plans what they send to the ranks of one engine, which come behind
them. Then a sink of its own checks the plan (benchmarks/sink.py): the two maps of each copy, which
holds for all of its elements, and the values of `--samples` elements of each copy. `--every`
receives all elements of the model instead. `--shrink N` divides the sizes of all matrices.

The model of the time is an estimate. Its constants are those of two H200 in docs/live.md, and a
network card for each rank.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import mckpt
from benchmarks import models
from mckpt import live, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.files import CheckpointFiles
from mckpt.checkpoint.model import ModelDescription
from mckpt.conversion.to_megatron import padded_rows
from mckpt.formats.base import Names, dtype_of, dtypes_of, packed, stored_shape
from mckpt.formats.megatron.torch_shards import instances
from mckpt.geometry.box import Box, row_major
from mckpt.geometry.join import join
from mckpt.geometry.packing import shard
from mckpt.geometry.parallel import Parallel
from mckpt.live.direct import Links, plan_boxes
from mckpt.live.memory import ALIGN, Part
from mckpt.live.model import OpenedModel, RankParts
from mckpt.mapping import Bound
from mckpt.options import SourceOptions, TargetOptions

T = TypeVar("T")
# bytes per second: a network card of 400 Gbit/s for each rank. A sync reaches 0.87 of an all-gather
# by NVLink.
LINK = 0.87 * 50e9
# seconds of Python for each tensor of a sync: 9,435 tensors at tp 2 take 0.15 s
TENSOR = 0.15 / 9435
SHRUNK = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank")
SHRUNK += ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "vocab_size")


class Trainer:
    """The ranks of Megatron with a model."""

    def __init__(self, hf: Path, sizes: Parallel, world: int) -> None:
        source = mckpt.open(hf)
        dialect = mapping.dialect_for(source.mapping)
        chosen = {**source.names.choices, **dialect.choices_for(dialect.version())}
        # sharded_state_dict() names the layers of a model one by one if they differ
        chosen |= {"pp": sizes.pp, "transformer_impl": "transformer_engine", "experts": "grouped"}
        chosen |= {"keys": "global", "layers": "per_layer"}
        self.names = Names(dialect, source.dims, chosen, sizes)
        self.hf, self.world, self.dtypes = hf, world, dtypes_of(source.layout)
        self.stages = self.names.stages()
        self._known: dict[tuple[int, int], list[Part]] = {}

    def args(self) -> dict[str, Any]:
        """Returns the args of Megatron that make this model."""
        rows = padded_rows(self.names.dims, 128, self.names.parallel.tp)
        given = {"dtype": "bfloat16", "padded_vocab_size": rows, **self.names.choices}
        return self.names.mapping.write(self.names.dims, given)

    @cached_property
    def rules(self) -> list[tuple[Bound, Any, dict[int, str]]]:
        """Returns the rules, the whole tensor of each, and its key for each layer. The vocabulary
        that some ranks have for their last layers is that of the first stage.
        """
        names, scope = self.names, self.names.scope()
        local = replace(names, choices={**names.choices, "keys": "local"})
        own = [b for b in names.bound if not b.rule.alias]
        copies = [b for b in local.bound if b.rule.alias and b.rule.written]
        bound = own + copies
        rows = padded_rows(names.dims, 128, names.parallel.tp)
        named = own + [next(b for b in own if b.rule.of == one.rule.of) for one in copies]
        keys = [{layer: key for key, layer in b.global_keys()} for b in named]
        whole = [packed(b.rule, scope, rows) for b in bound]
        return list(zip(bound, whole, keys, strict=True))

    def parts(self, rank: int) -> list[Part]:
        """Returns what a rank holds, in the order of its memory. The ranks of a stage have their
        tensor parallel rank first, those of experts behind it.
        """
        sizes, (stage, inner) = (
            self.names.parallel,
            divmod(rank, self.world // self.names.parallel.pp),
        )
        alike = inner % np.lcm(sizes.tp, sizes.expert_tp * sizes.ep)
        if (stage, alike) not in self._known:
            self._known[stage, alike] = self._parts(stage, int(alike))
        return self._known[stage, alike]

    def _parts(self, stage: int, inner: int) -> list[Part]:
        names, sizes, scope = self.names, self.names.parallel, self.names.scope()
        found, end = list[Part](), 0
        ep = inner // sizes.expert_tp % sizes.ep
        for b, whole, keys in self.rules:
            ways = sizes.expert_tp if "expert" in b.rule.indices else sizes.tp
            boxes = shard(whole, b.rule.tp, inner % ways, ways)
            if ways == 1:  # gate and up are two parts of one parameter also here
                ends, zeros = accumulate(whole.parts), (0,) * (len(whole.shape) - 1)
                parts = [(n, end - n) for n, end in zip(whole.parts, ends, strict=True)]
                boxes = [Box((at, *zeros), (n, *whole.shape[1:])) for n, at in parts]
            shape = (*b.axes(scope), *stored_shape(b.rule, whole))
            dtype = dtype_of(b.rule, self.dtypes)
            here = instances(b, self.stages[stage], stage, sizes, names.dims, ep)
            for _, layer, expert, _ in here:
                first = (expert,) if "expert" in b.rule.stacked() else ()
                for box in boxes:
                    offset, own = first + box.offset, (1,) * len(first) + box.shape
                    given = dtype, shape, offset, own, row_major(own), end
                    found.append(Part(keys.get(layer, keys[min(keys)]), *given))
                    end += found[-1].nbytes
                end += -end % ALIGN
        return found

    def model(self, root: Path) -> Checkpoint:
        """Returns the model of all ranks, as they would collect it."""
        held = [self.parts(rank) for rank in range(self.world)]
        opened = OpenedModel(RankParts(root, held, None), self.names.parallel, None)
        files = CheckpointFiles(root, SourceOptions(like=self.hf), None, opened)
        return Checkpoint(files, ModelDescription(files))


def config(name: str, shrink: int = 1) -> models.Config:
    """Returns a published config.json in bfloat16, or one whose matrices are smaller."""
    found = models.config(name)
    shrunk = {key: -(-found[key] // shrink) for key in SHRUNK}
    return {**found, "quantization_config": None, **(shrunk if shrink > 1 else {})}


def timed(seconds: dict[str, np.ndarray], name: str, work: Callable[[], T]) -> T:
    """Does some work, and notes its seconds: of a clock, and of the processor."""
    begun = np.array([time.perf_counter(), time.process_time()])
    found = work()
    seconds[name] = np.array([time.perf_counter(), time.process_time()]) - begun
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=("deepseek-v3", "kimi-k2"))
    for option in ("tp", "pp", "ep", "engine-tp", "engine-ep", "shrink"):
        parser.add_argument(f"--{option}", type=int, default=1)
    parser.add_argument("--layers", type=int, help="of a part of the model")
    parser.add_argument("--world", type=int, help="ranks of the trainer; default: two of each")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--every", action="store_true")
    given = parser.parse_args()
    sizes = Parallel(tp=given.tp, pp=given.pp, ep=given.ep, etp=1)
    one = config(given.model, given.shrink)
    one["num_hidden_layers"] = given.layers or one["num_hidden_layers"]
    if given.pp > 1 and one["num_hidden_layers"] % given.pp:
        last = one["num_hidden_layers"] % (given.pp - 1) or None
        sizes = replace(sizes, last_stage_layers=last)
    world = given.world or 2 * int(np.lcm(given.tp, given.ep)) * given.pp
    engine = {"tp": given.engine_tp, "ep": given.engine_ep}
    with tempfile.TemporaryDirectory() as work:
        hf = models.write(one, Path(work) / "hf", sparse=True, shard_bytes=5_000_000_000)
        seconds: dict[str, np.ndarray] = {}
        trainer = timed(seconds, "names", lambda: Trainer(hf, sizes, world))
        model = timed(seconds, "describe", lambda: trainer.model(Path(work)))
        timed(seconds, "prove", lambda: join(model.layout, model.layout))
        listed = timed(seconds, "boxes", lambda: live.engine_boxes(model, **engine))
        boxes = dict(enumerate(listed, world))
        target = TargetOptions("hf")
        links = timed(seconds, "plan", lambda: plan_boxes(model, target, None, boxes, range(world)))
        report(links, world, seconds)
        from benchmarks.sink import Sink

        begun = time.perf_counter()
        sink = Sink(links, boxes, [trainer.parts(r) for r in range(world)], one)
        problems = sink.every() if given.every else sink.proof() + sink.sampled(given.samples)
        spent = time.perf_counter() - begun
        print(f"sink: {sink.num_checked:,} values received in {spent:.1f} s, {len(problems)} wrong")
    if problems:
        raise SystemExit("\n".join(problems[:10]))


def report(links: Links, world: int, seconds: dict[str, np.ndarray]) -> None:
    """Prints the work of all ranks, and an estimate of its time."""
    transfers, between = links.transfers, links.transfers.links()
    engine = len(set(links.held.rank.tolist()))
    ends = np.array(list(between), "i8").reshape(-1, 2)
    nbytes = np.array(list(between.values()), "i8")
    of_ranks = np.zeros((2, world + engine), "i8")
    for side in range(2):
        np.add.at(of_ranks[side], ends[:, side], nbytes)
    messages = np.unique(np.stack([links.bucket, links.sender, links.receiver]), axis=1).shape[1]
    print(
        f"{len(links.held.rows):,} tensors, {world:,} + {engine} ranks,"
        f" {len(transfers):,} transfers in {links.num_buckets} buckets, {messages:,} messages,"
        f" {transfers.nbytes.sum() / 1e9:,.1f} GB"
    )
    for name, column in (("sent", of_ranks[0, :world]), ("received", of_ranks[1, world:])):
        low, middle, high = column.min(), np.median(column), column.max()
        print(f"GB {name} by a rank: {low / 1e9:.3f} / {middle / 1e9:.3f} / {high / 1e9:.3f}")
    print(f"{len(nbytes):,} links, at most {nbytes.max() / 1e9:.3f} GB by a link")
    spent = ", ".join(f"{name} {one[0]:.2f} s" for name, one in seconds.items())
    clock, processor = sum(seconds.values())
    print(f"{spent}: in all {clock:.2f} s, and {processor:.2f} s of one core")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parts = [len(pickle.dumps(links.of(rank))) for rank in (0, world)]
    listed = sum(array.nbytes for array in (*links.held[2:], *transfers.columns))
    print(
        f"memory of this process {peak / 1e6:,.0f} MB; plan of a sender {parts[0] / 1e6:.2f} MB,"
        f" list of all transfers {listed / 1e6:.0f} MB, plan of a receiver {parts[1] / 1e6:.2f} MB"
    )
    wire = of_ranks.max() / LINK
    python = np.bincount(links.held.rank).max() * TENSOR
    print(
        f"model of the time: {wire:.2f} s of the busiest rank at {LINK / 1e9:.1f} GB/s, and"
        f" {python:.2f} s of Python on a receiver: {max(wire, python):.2f} to {wire + python:.2f} s"
    )


if __name__ == "__main__":
    main()
