"""One rank of the Megatron-Core side of a verdict: builds the model of a checkpoint's args and runs
it on the reference's sequences.

    torchrun --nproc-per-node N -m mckpt.trainer.worker job.json

job.json: out (the folder with the reference's files), timeout_s, and checkpoints, a list of {name,
path, args (instead of the checkpoint's own) or null, sizes {tp, pp, vpp, ep, etp, cp}, impl, casts
(the dtypes that the other side was cast to), adapter (what runs beside the weights, as in
beside.attach) or null, prefix (of the text model's keys in a whole model; else empty), mrope (as in
images.given) or null}. All have the same sizes, so that they can share one set of process groups.

It writes OUT/NAME.json: {"error": ...} or facts about the load. OUT/NAME.rank{r}.{i}.npz has the
states and the chosen experts of sequence i on rank r. OUT/NAME.{i}.npz, written by rank 0, has the
differences of the logits in fp32 and, prefixed `low_`, in the checkpoint's dtype. If the reference
has a folder OUT/image, it writes the same files there, for the sequence with the image.

The logits of every position and the hidden states on the way are computed under tensor, pipeline,
virtual pipeline, expert and context parallelism. megatron-core's pipeline schedules keep only the
loss. Here dist.send moves activations from chunk to chunk in the order in which the layers run:
virtual stage 0 on every pipeline rank, then virtual stage 1, and so on.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mckpt.errors import MckptError, SourceError
from mckpt.trainer import beside, build, hybrid, images, load, points
from mckpt.trainer.points import Recorder


@torch.no_grad()
def logits(chunks: list[Any], args: Namespace, tokens: torch.Tensor) -> torch.Tensor | None:
    """Returns the fp32 logits [batch, seq, vocab] of `tokens` [batch, seq] on pipeline rank 0, and
    None on the others.

    Every rank passes the same tokens. `vocab` is args.vocab_size, or the padded size if args have
    none; other padding is cut off.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    config = chunks[0].config
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    tokens = tokens.to(device)
    batch, seq = tokens.shape
    cp = config.context_parallel_size
    # Sequence parallelism cuts the sequence into `rows` parts.
    rows = args.tensor_model_parallel_size if config.sequence_parallel else 1
    multiple = rows * (2 * cp if cp > 1 else 1)
    # The padding is on the right, where a causal model does not look.
    tokens = torch.nn.functional.pad(tokens, (0, -seq % multiple))
    length = tokens.shape[1]
    mine = of_this_rank(length, cp).to(device)
    tokens, positions = tokens[:, mine], mine.expand(batch, -1)
    part = length // cp
    # True hides a position.
    mask = torch.ones(1, 1, part, part, dtype=torch.bool, device=device).triu(1)

    first = ps.is_pipeline_first_stage(ignore_virtual=True)
    last = ps.is_pipeline_last_stage(ignore_virtual=True)
    hidden: Any = None
    for stage, chunk in enumerate(chunks):
        if not (first and stage == 0):
            shape = part // rows, batch, config.hidden_size
            hidden = torch.empty(shape, dtype=config.params_dtype, device=device)
            dist.recv(hidden, ps.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(hidden)
        with without_mtp(chunk):
            hidden = chunk(tokens, positions, mask)
        if not (last and stage == len(chunks) - 1):
            dist.send(hidden.contiguous(), ps.get_pipeline_model_parallel_next_rank())

    vocab = getattr(args, "vocab_size", None) or args.padded_vocab_size
    out = torch.empty(batch, seq, vocab, dtype=torch.float32, device=device)
    if last:
        whole = in_order(gather_from_tensor_model_parallel_region(hidden.float()), cp, axis=1)
        out.copy_(whole[:, :seq, :vocab])
        if not first:
            dist.send(out, ps.get_pipeline_model_parallel_first_rank())
    elif first:
        dist.recv(out, ps.get_pipeline_model_parallel_last_rank())
    return out if first else None


@contextmanager
def without_mtp(chunk: Any) -> Iterator[None]:
    """Makes the chunk leave out its layers of multi-token prediction in the block. They have a loss
    and no logits, and fail without labels.
    """
    kept = chunk.mtp_process, chunk.config.mtp_num_layers
    chunk.mtp_process, chunk.config.mtp_num_layers = False, None
    try:
        yield
    finally:
        chunk.mtp_process, chunk.config.mtp_num_layers = kept


def of_this_rank(length: int, cp: int) -> torch.Tensor:
    """Returns the positions of this context-parallel rank: parts r and 2 cp - 1 - r of 2 cp parts,
    so that all ranks attend to equally many positions.
    """
    from megatron.core import parallel_state as ps

    positions = torch.arange(length)
    if cp == 1:
        return positions
    parts, rank = positions.chunk(2 * cp), ps.get_context_parallel_rank()
    return torch.cat([parts[rank], parts[2 * cp - 1 - rank]])


def rows_of_this_rank(config: Any, count: int, is_cut: bool) -> torch.Tensor:
    """Returns the positions of the `count` rows that this rank has of a tensor.

    is_cut: sequence parallelism, if it is on, cuts the tensor.
    """
    from megatron.core import parallel_state as ps

    ranks = ps.get_tensor_model_parallel_world_size() if is_cut and config.sequence_parallel else 1
    cp = config.context_parallel_size
    mine = of_this_rank(count * ranks * cp, cp)
    return mine.chunk(ranks)[ps.get_tensor_model_parallel_rank() if ranks > 1 else 0]


def in_order(part: torch.Tensor, cp: int, axis: int) -> torch.Tensor:
    """Gathers the parts of all context-parallel ranks along `axis`, in the sequence's order."""
    from megatron.core import parallel_state as ps

    if cp == 1:
        return part
    gathered = [torch.empty_like(part) for _ in range(cp)]
    dist.all_gather(gathered, part.contiguous(), group=ps.get_context_parallel_group())
    halves = [g.chunk(2, axis) for g in gathered]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], axis)


def watch(chunks: list[Any], recorder: Recorder) -> None:
    """Puts hooks on all places of `points` that this pipeline rank has.

    Each rank of a stage records the whole sequence, of a batch of one.
    """
    config = chunks[0].config
    pattern = getattr(chunks[0], "hybrid_layer_pattern", None)
    of_hybrid = hybrid.places(pattern) if pattern else []

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        """Returns [seq, width] from this rank's [part of seq, 1, width]."""
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return in_order(hidden, config.context_parallel_size, axis=0)[:, 0]

    def state(name: str) -> Any:
        def keep(value: Any) -> None:
            hidden, *more = value if isinstance(value, tuple) else (value,)
            if name.endswith((".attn", ".mlp")) and more and more[0] is not None:
                # megatron-core adds this bias later, together with the residual
                hidden = hidden + more[0]
            recorder.state(name, whole(hidden))

        return keep

    def routed(layer: int) -> Any:
        def keep(value: Any) -> None:  # (probabilities, map [tokens of this rank, experts] bool)
            recorder.experts[layer] = whole(value[1].float()[:, None]).bool().cpu().numpy()

        return keep

    for chunk in chunks:
        if chunk.pre_process:
            recorder.input(chunk.decoder, state("embed"))
        for module in chunk.decoder.layers:
            number = module.layer_number - 1
            # a layer of a hybrid model is one part of a layer of transformers
            layer, part = of_hybrid[number] if of_hybrid else (number, None)
            # the mlp comes last, and its state replaces that behind the attention
            recorder.output(module, state(f"layers.{layer}"))
            if part != "mlp":
                attention = getattr(module, "mixer", None) or module.self_attention
                recorder.output(attention, state(f"layers.{layer}.attn"))
            if part != "attn":
                recorder.output(module.mlp, state(f"layers.{layer}.mlp"))
            if hasattr(getattr(module, "mlp", None), "router"):
                recorder.output(module.mlp.router, routed(layer))
        if chunk.post_process:
            recorder.input(chunk.output_layer, state("final_norm"))


SCATTER = 2000  # pairs of logits kept of each sequence, for the report's plot


def main(job: dict[str, Any]) -> None:
    build.join(job["timeout_s"])
    out, started = Path(job["out"]), False
    for checkpoint in job["checkpoints"]:
        try:
            stored = checkpoint["args"] or load.read_args(checkpoint["path"])
            args = build.at_sizes(
                stored, transformer_impl=checkpoint["impl"], **checkpoint["sizes"]
            )
            if not started:
                build.initialize(args, job["timeout_s"])
                started = True
            facts = run(args, checkpoint, out)
        except MckptError as e:
            if dist.get_world_size() > 1:  # the other ranks wait for this one
                raise
            facts = {"error": {"class": type(e).__name__, "message": str(e)}}
        if dist.get_rank() == 0:
            (out / f"{checkpoint['name']}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def run(args: Namespace, checkpoint: dict[str, Any], out: Path) -> dict[str, Any]:
    """Runs one checkpoint in fp32, recording its states, and in the dtype of its args."""
    own = getattr(args, "params_dtype", torch.float32)
    facts: dict[str, Any] = {}
    # Attention over several context-parallel ranks has no fp32 kernel.
    dtypes = [own] if args.context_parallel_size > 1 else [torch.float32, own]
    for dtype in dict.fromkeys(dtypes):
        with fitting(checkpoint["path"]):
            chunks = build.build(args, dtype)
            state = load.load(chunks, args, checkpoint["path"], prefix=checkpoint["prefix"])
            unread = state["unread"]
            if checkpoint["adapter"]:
                unread += beside.attach(chunks, checkpoint["adapter"])
        for chunk in chunks:
            points.cast(chunk, checkpoint["casts"])
        facts |= {"unread": on_all_ranks(unread), "iteration": state.get("iteration")}
        low = dtype != torch.float32
        recorder = points.Recorder()
        if not low:
            watch(chunks, recorder)
        rows = functools.partial(rows_of_this_rank, chunks[0].config)
        for folder in filter(Path.exists, (out, out / "image")):
            with images.given(chunks, folder, checkpoint["mrope"], rows):
                run_sequences(chunks, args, recorder, folder, checkpoint["name"], low)
        recorder.remove()
        del chunks, state
        gc.collect()
    from megatron.core import __version__

    facts |= {
        "dtype": str(own).removeprefix("torch."),
        "impl": args.transformer_impl,
        "versions": {"megatron-core": __version__},
    }
    if args.transformer_impl == "transformer_engine":
        import transformer_engine

        facts["versions"]["transformer-engine"] = getattr(transformer_engine, "__version__", "?")
    return facts


def run_sequences(
    chunks: list[Any], args: Namespace, recorder: Recorder, out: Path, name: str, low: bool
) -> None:
    """Runs the sequences of the reference in `out`, and saves states and differences there."""
    sequences = json.loads((out / "reference.json").read_text())["sequences"]
    for index, tokens in enumerate(sequences):
        recorder.clear()
        found = logits(chunks, args, torch.tensor([tokens]))
        if recorder.states:
            n, file = len(tokens), f"{name}.rank{dist.get_rank()}.{index}.npz"
            kept: dict[str, Any] = {f"state_{k}": v[:n] for k, v in recorder.states.items()}
            kept |= {f"experts_{k}": v[:n] for k, v in recorder.experts.items()}
            np.savez(out / file, **kept)
        if dist.get_rank() == 0:
            assert found is not None
            compare(found[0], tokens, out, name, index, low)


@contextmanager
def fitting(path: str) -> Iterator[None]:
    """Turns errors of megatron-core and torch into SourceError, because they mean that args and
    tensors of the checkpoint do not fit each other.
    """
    try:
        yield
    except (MckptError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as e:
        raise SourceError(
            f"{path}: megatron-core cannot build or load what its args describe:"
            f" {type(e).__name__}: {e}"
        ) from e


def on_all_ranks(names: list[str]) -> list[str]:
    """Returns the names that all ranks have: a key may belong to another pipeline stage."""
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, names)
    return sorted(set.intersection(*map(set, given)))


def compare(
    found: torch.Tensor, tokens: list[int], out: Path, name: str, index: int, low: bool
) -> None:
    """Saves the differences of these logits [seq, vocab] from the reference's, and some pairs of
    both. Called by rank 0.
    """
    reference = torch.from_numpy(np.load(out / f"logits.{index}.npy", mmap_mode="r")[:])
    kept: dict[str, Any] = points.compare(reference, found, torch.tensor(tokens))
    path = out / f"{name}.{index}.npz"
    if low:
        kept = {f"low_{key}": value for key, value in kept.items()}
    if not path.exists():
        at = np.random.RandomState(index).randint(0, reference.numel(), SCATTER)
        kept["scatter"] = np.stack(
            [reference.reshape(-1)[at].numpy(), found.reshape(-1).cpu()[at].numpy()], 1
        )
    points.add(path, kept)


if __name__ == "__main__":
    with points.reporting(sys.argv[1]) as JOB:
        main(JOB)
