"""The places at which two models are compared. Both sides use the same names.

    embed                input of the first layer: the embedding, with learned positions if the
                         model has them
    layers.{l}.attn      what the attention of layer l adds to the residual stream
    layers.{l}.mlp       what its mlp or experts add
    layers.{l}           the residual stream behind layer l (0 is the first)
    final_norm           input of the output layer

A hidden state of any width is kept as its product with one fixed random matrix, which has 32
numbers for a position. Differences keep their length (Johnson and Lindenstrauss; here within some
12 percent), states that differ have products that differ, and 94 layers take megabytes.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mckpt.errors import MckptError, SourceError, StorageError

WIDTH = 32  # numbers kept of a hidden state


class Recorder:
    """Collects hidden states, and the experts that routers choose, from hooks on modules. It holds
    those of one sequence at a time.
    """

    def __init__(self) -> None:
        self.states: dict[str, np.ndarray] = {}  # point -> [seq, WIDTH] fp32
        self.experts: dict[int, np.ndarray] = {}  # layer -> [seq, experts] bool
        # The reference alone fills these two.
        self.router_logits: dict[int, np.ndarray] = {}  # layer -> [seq, experts] fp32
        # layer -> [seq]: the score of the last chosen expert less that of the best other one
        self.margins: dict[int, np.ndarray] = {}
        self._hooks: list[Any] = []

    def clear(self) -> None:
        self.states, self.experts, self.router_logits, self.margins = {}, {}, {}, {}

    def state(self, name: str, hidden: torch.Tensor) -> None:
        """Keeps `hidden` [seq, hidden size] under `name`."""
        self.states[name] = sketch(hidden).cpu().numpy()

    def output(self, module: torch.nn.Module, keep: Callable[[Any], None]) -> None:
        """Calls `keep` with the module's output each time it runs."""
        hook = module.register_forward_hook(lambda _module, _args, output: keep(output))
        self._hooks.append(hook)

    def input(self, module: torch.nn.Module, keep: Callable[[Any], None]) -> None:
        """Calls `keep` with the module's first argument, or with its `hidden_states`, each time it
        runs.
        """

        def first(_module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(args[0] if args else named["hidden_states"])

        self._hooks.append(module.register_forward_pre_hook(first, with_kwargs=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def sketch(hidden: torch.Tensor) -> torch.Tensor:
    """Projects [..., hidden size] to [..., WIDTH] in fp32. Lengths are kept on average."""
    return hidden.float() @ projection(hidden.shape[-1], hidden.device)


@functools.lru_cache
def projection(size: int, device: torch.device) -> torch.Tensor:
    """Returns the matrix [size, WIDTH], which is the same in every process: it is drawn on the CPU
    from a fixed seed.
    """
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, WIDTH, generator=generator) / WIDTH**0.5).to(device)


@torch.no_grad()
def cast(model: torch.nn.Module, dtypes: list[str], left_out: Collection[str] = ()) -> None:
    """Replaces the weights by their values after these casts. The model keeps its dtype."""
    for name, parameter in model.named_parameters() if dtypes else ():
        if parameter.is_meta:
            raise SourceError(
                f"{name} is not in memory, so it cannot be cast to {dtypes[0]}; run on a machine"
                " that holds the whole model"
            )
        for dtype in dtypes if name not in left_out else ():
            parameter.data = parameter.data.to(getattr(torch, dtype)).to(parameter.dtype)


# ------------------------------------------------------------------------------------------- logits


@torch.no_grad()
def compare(
    reference: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor
) -> dict[str, np.ndarray]:
    """Returns how `other`'s logits [seq, vocab] differ from `reference`'s, as arrays [seq].

    max_abs and mean_square are taken over the vocabulary. kl is the divergence of the
    distributions, in nats. top1 is 1 where both choose the same token. loss and loss_reference are
    those of the next token (NaN at the last position). spread is the standard deviation of the
    reference over the vocabulary.
    """
    out: dict[str, list[np.ndarray]] = {}
    following = torch.cat([tokens[1:], tokens[:1]]).to(other.device)
    for at in range(0, len(reference), 64):  # 64 positions of 150,000 words are 77 MB in fp64
        a, b = reference[at : at + 64].to(other.device).double(), other[at : at + 64].double()
        apart = (a - b).abs()
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        target = following[at : at + 64, None]
        found = {
            "max_abs": apart.amax(-1),
            "mean_square": apart.square().mean(-1),
            "kl": (log_a.exp() * (log_a - log_b)).sum(-1).clamp(min=0),
            "top1": (a.argmax(-1) == b.argmax(-1)).double(),
            "loss_reference": -log_a.gather(-1, target)[:, 0],
            "loss": -log_b.gather(-1, target)[:, 0],
            "spread": a.std(-1),
        }
        for name, value in found.items():
            out.setdefault(name, []).append(value.cpu().numpy())
    joined = {name: np.concatenate(values) for name, values in out.items()}
    joined["loss_reference"][-1] = joined["loss"][-1] = np.nan  # nothing follows the last token
    return joined


def add(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Adds arrays to an .npz file, which may be new."""
    there = dict(np.load(path)) if path.exists() else {}
    np.savez(path, **there | arrays)


# ----------------------------------------------------------------------------- a process of its own


@contextmanager
def reporting(path: str) -> Iterator[dict[str, Any]]:
    """Reads the job of a file.

    If the block fails, error.rank{r}.json beside the job gets the reason: the class and the message
    of one of mckpt's errors, else the traceback.
    """
    try:
        yield json.loads(Path(path).read_text())
    except Exception as e:
        if isinstance(e, OSError) and not isinstance(e, (ConnectionError, TimeoutError)):
            e = StorageError(f"{e.filename or 'input/output'}: {e.strerror or e}")
        ours = isinstance(e, MckptError)
        reason = {
            "class": type(e).__name__ if ours else None,
            "message": str(e) if ours else traceback.format_exc(),
        }
        file = Path(path).parent / f"error.rank{os.environ.get('RANK', '0')}.json"
        # complete or not at all: this process is killed when another rank has failed
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps(reason))
        draft.rename(file)
        raise SystemExit(1) from None
