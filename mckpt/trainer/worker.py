"""One rank of the Megatron-Core side of a verdict: builds the model of a checkpoint's args and runs
it on the reference's sequences.

    torchrun --nproc-per-node N -m mckpt.trainer.worker job.json

job.json: out (the folder with the reference's files), timeout_s, and checkpoints, a list of {name,
path, args (instead of the checkpoint's own) or null, sizes {tp, pp, vpp, ep, etp, cp}, impl, casts
(the dtypes that the other side was cast to)}. All have the same sizes, so that they can share one
set of process groups.

It writes OUT/NAME.json: {"error": ...} or facts about the load. OUT/NAME.rank{r}.{i}.npz has the
states and the chosen experts of sequence i on rank r. OUT/NAME.{i}.npz, written by rank 0, has the
differences of the logits in fp32 and, prefixed `low_`, in the checkpoint's dtype.
"""

from __future__ import annotations

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
from mckpt.trainer import build, forward, load, points

SCATTER = 2000  # pairs of logits kept of each sequence, for the report's plot


def main(job: dict[str, Any]) -> None:
    build.join(job["timeout_s"])
    out, started = Path(job["out"]), False
    sequences = json.loads((out / "reference.json").read_text())["sequences"]
    for checkpoint in job["checkpoints"]:
        try:
            stored = checkpoint["args"] or load.read_args(checkpoint["path"])
            args = build.at_sizes(
                stored, transformer_impl=checkpoint["impl"], **checkpoint["sizes"]
            )
            if not started:
                build.initialize(args, job["timeout_s"])
                started = True
            facts = run(args, checkpoint, sequences, out)
        except MckptError as e:
            if dist.get_world_size() > 1:  # the other ranks wait for this one
                raise
            facts = {"error": {"class": type(e).__name__, "message": str(e)}}
        if dist.get_rank() == 0:
            (out / f"{checkpoint['name']}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def run(
    args: Namespace, checkpoint: dict[str, Any], sequences: list[list[int]], out: Path
) -> dict[str, Any]:
    """Runs one checkpoint in fp32, recording its states, and in the dtype of its args."""
    own = getattr(args, "params_dtype", torch.float32)
    facts: dict[str, Any] = {}
    # Attention over several context-parallel ranks has no fp32 kernel.
    dtypes = [own] if args.context_parallel_size > 1 else [torch.float32, own]
    for dtype in dict.fromkeys(dtypes):
        with fitting(checkpoint["path"]):
            chunks = build.build(args, dtype)
            state = load.load(chunks, args, checkpoint["path"])
        for chunk in chunks:
            points.cast(chunk, checkpoint["casts"])
        facts |= {"unread": on_all_ranks(state["unread"]), "iteration": state.get("iteration")}
        low = dtype != torch.float32
        recorder = points.Recorder()
        if not low:
            forward.watch(chunks, recorder)
        for index, tokens in enumerate(sequences):
            recorder.clear()
            found = forward.logits(chunks, args, torch.tensor([tokens]))
            if recorder.states:
                n, file = len(tokens), f"{checkpoint['name']}.rank{dist.get_rank()}.{index}.npz"
                kept: dict[str, Any] = {f"state_{k}": v[:n] for k, v in recorder.states.items()}
                kept |= {f"experts_{k}": v[:n] for k, v in recorder.experts.items()}
                np.savez(out / file, **kept)
            if dist.get_rank() == 0:
                assert found is not None
                compare(found[0], tokens, out, checkpoint["name"], index, low)
        recorder.remove()
        del chunks, state, found
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
