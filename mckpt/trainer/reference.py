"""The transformers side of a verdict: one model, run on every sequence, with the noise of its own
arithmetic.

    python -m mckpt.trainer.reference job.json

job.json: hf (directory), out (directory), dtype (of the checkpoint), sequences (lists of tokens),
casts (dtypes that the checkpoint's weights were cast to, one after the other) and uncast (the names
of those that were not), and vocab_size and length for the further sequences that are tried while
some expert was not reached.

OUT/reference.json tells the sequences, the probe and the versions; OUT/reference.{i}.npz holds per
position what `points` names; OUT/logits.{i}.npy the fp32 logits [seq, vocab] of sequence i. The
model is loaded once in fp32 and once in its own dtype, one after the other.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mckpt.errors import SourceError
from mckpt.trainer import points

TRIES = 64  # further sequences that are run to reach every expert
# of the largest logit; on CPU the noise of the 13 models of tests/tiny.py is 2**-19.7 to 2**-17.4
# of it
SUSPICIOUS = 2.0**-14
LESS = 10.0  # times; a second measurement of a suspicious noise counts if it is this much smaller


def main(job: dict[str, Any]) -> None:
    out, sequences = Path(job["out"]), [list(s) for s in job["sequences"]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(job["hf"], "float32", device)
    points.cast(model, job["casts"], set(job["uncast"]))
    recorder = points.Recorder()
    watch(model, recorder)
    largest = [base(model, recorder, tokens, out, index) for index, tokens in enumerate(sequences)]
    reach(model, recorder, sequences, job, out)
    if not np.isfinite(largest).all():
        raise SourceError(
            f"{job['hf']}: transformers computes logits that are not finite, so there is nothing to"
            " compare with"
        )
    again = {}
    for index, tokens in enumerate(sequences):
        if twice := measured_noise(model, recorder, tokens, out, index):
            again[index] = twice
    probed = probe(model, sequences[0], out)
    recorder.remove()
    del model
    gc.collect()
    if job["dtype"] != "float32":
        model = load(job["hf"], job["dtype"] if len(job["casts"]) < 2 else "float32", device)
        # the last cast makes the dtype, and those before it change values too
        if len(job["casts"]) > 1:
            points.cast(model, job["casts"], set(job["uncast"]))
            for name, parameter in model.named_parameters():
                parameter.data = (
                    parameter.data
                    if name in job["uncast"]
                    else parameter.data.to(getattr(torch, job["dtype"]))
                )
        for index, tokens in enumerate(sequences):
            found = points.compare(saved(out, index), logits(model, tokens), torch.tensor(tokens))
            keep(out, index, {f"low_{key}": value for key, value in found.items()})
    import transformers

    said = {
        "sequences": sequences,
        "probe": probed,
        "dtype": job["dtype"],
        "measured_again": again,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (out / "reference.json").write_text(json.dumps(said))


# ---------------------------------------------------------------------------------------- the model


def load(directory: str, dtype: str, device: torch.device) -> Any:
    """The model as transformers loads it, eager; SourceError if a tensor is missing, left over or
    of another shape.

    With accelerate installed a model larger than the GPU is spread over all of them and the host,
    and one larger than memory over the disk.
    """
    import importlib.util

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    placed: dict[str, Any] = {}
    files = [*Path(directory).glob("*.safetensors"), *Path(directory).glob("pytorch_model*.bin")]
    nbytes = sum(path.stat().st_size for path in files) * (2 if dtype == "float32" else 1)
    if (
        device.type == "cuda"
        and importlib.util.find_spec("accelerate")
        and nbytes > torch.cuda.mem_get_info()[0] / 2
    ):
        placed = {"device_map": "auto"}
    # eager experts and attention run at any sizes; grouped_mm refuses widths that are no multiple
    # of 16 bytes
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        trust_remote_code=False,
        **placed,
    )
    model, found = loaded
    last = model.config.get_text_config().num_hidden_layers
    found["unexpected_keys"] = [k for k in found["unexpected_keys"] if not _behind(k, last)]
    wrong = [f"{kind}: {', '.join(map(str, keys))}" for kind, keys in found.items() if keys]
    if wrong:
        raise SourceError.of(f"{directory}: transformers does not load it whole:", wrong)
    return (model if placed else model.to(device)).eval()


def _behind(key: str, num_layers: int) -> bool:
    """Whether a key is of a layer behind the decoder's: of multi-token prediction, for which
    transformers' model has no place.
    """
    found = re.search(r"\blayers\.(\d+)\.", key)
    return found is not None and int(found[1]) >= num_layers


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """fp32 logits [seq, vocab]."""
    rows = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    found: torch.Tensor = model(rows, use_cache=False).logits[0].float()
    return found


def decoder_layers(model: Any) -> list[Any]:
    """The decoder's layers: the list of modules that is as long as the config says."""
    for _, module in model.named_modules():
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == model.config.get_text_config().num_hidden_layers
        ):
            return list(module)
    raise SourceError(f"{type(model).__name__} has no list of num_hidden_layers modules")


def watch(model: Any, recorder: points.Recorder) -> None:
    """Hooks at every point.

    A layer's children that are no norms are its attention and its mlp, in this order, in every
    family.
    """

    def first(value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    def state(name: str) -> Any:
        return lambda value: recorder.state(name, first(value)[0])  # of a batch of one

    def routed(layer: int, router: torch.nn.Module) -> Any:
        def keep(value: Any) -> None:
            scores, chosen = value[0].float(), value[-1]
            recorder.router_logits[layer] = scores.cpu().numpy()
            recorder.margins[layer] = margin(router, scores, chosen.shape[1]).cpu().numpy()
            recorder.experts[layer] = (
                torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True).cpu().numpy()
            )

        return keep

    recorder.output(model.get_input_embeddings(), state("embed"))
    for index, layer in enumerate(decoder_layers(model)):
        recorder.output(layer, state(f"layers.{index}"))
        attention, mlp, *_ = [child for name, child in layer.named_children() if "norm" not in name]
        recorder.output(attention, state(f"layers.{index}.attn"))
        recorder.output(mlp, state(f"layers.{index}.mlp"))
        for module in mlp.modules():
            # gives logits [tokens, experts], weights, chosen experts [tokens, k]
            if type(module).__name__.endswith("Router"):
                recorder.output(module, routed(index, module))
    recorder.input(model.get_output_embeddings(), state("final_norm"))


def margin(router: Any, logits: torch.Tensor, chosen: int) -> torch.Tensor:
    """How close the choice of `chosen` experts was, for each of [tokens, experts] logits; of the
    groups of experts too where there are any.

    DeepSeek's router chooses by sigmoids with a bias, and first among groups by the sum of their
    two best.
    """
    scores = (
        logits
        if getattr(router, "e_score_correction_bias", None) is None
        else logits.sigmoid() + router.e_score_correction_bias
    )
    closest = torch.full(scores.shape[:1], torch.inf, device=scores.device)
    groups, best = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
    if groups > best:
        parts = scores.view(len(scores), groups, -1)
        of_group = parts.topk(2, -1)[0].sum(-1)
        ranked = of_group.sort(-1, descending=True)[0]
        closest = ranked[:, best - 1] - ranked[:, best]
        scores = parts.masked_fill(
            (of_group < ranked[:, best - 1, None])[..., None], -torch.inf
        ).flatten(1)
    if chosen < scores.shape[1]:
        ranked = scores.sort(-1, descending=True)[0]
        closest = torch.minimum(closest, ranked[:, chosen - 1] - ranked[:, chosen])
    return closest


# ----------------------------------------------------------------------------------------- its runs


def base(model: Any, recorder: points.Recorder, tokens: list[int], out: Path, index: int) -> float:
    """Runs one sequence and keeps all of it; returns the largest magnitude of its logits."""
    recorder.clear()
    found = logits(model, tokens)
    np.save(out / f"logits.{index}.npy", found.cpu().numpy())
    kept: dict[str, Any] = {f"state_{name}": value for name, value in recorder.states.items()}
    kept |= {f"experts_{layer}": value for layer, value in recorder.experts.items()}
    kept |= {f"router_{layer}": value for layer, value in recorder.router_logits.items()}
    kept |= {f"margin_{layer}": value for layer, value in recorder.margins.items()}
    np.savez(out / f"reference.{index}.npz", **kept)
    return float(found.abs().max())


def measured_noise(
    model: Any, recorder: points.Recorder, tokens: list[int], out: Path, index: int
) -> list[float] | None:
    """Measures the noise of one sequence, and measures it again if it is far above what is usual.

    A noise like that was seen when the machine was short of memory, and not in the next run. The
    second measurement repeats both runs. It counts if its noise is LESS times smaller. Returns both
    values if there were two.
    """
    first = noise(model, recorder, tokens, out, index)
    if first <= SUSPICIOUS * float(saved(out, index).abs().max()):
        return None
    kept = [out / f"reference.{index}.npz", out / f"logits.{index}.npy"]
    for path in kept:
        path.rename(path.with_name(f"first.{path.name}"))
    base(model, recorder, tokens, out, index)
    second = noise(model, recorder, tokens, out, index)
    for path in kept:
        before = path.with_name(f"first.{path.name}")
        if second * LESS > first:
            before.rename(path)
        else:
            before.unlink()
    return [first, second]


def noise(model: Any, recorder: points.Recorder, tokens: list[int], out: Path, index: int) -> float:
    """Runs one sequence again, its sums in another order, and keeps how far it is from the first
    time; returns the largest distance of a logit.
    """
    first = dict(np.load(out / f"reference.{index}.npz"))
    recorder.clear()
    with reordered(model):
        found = points.compare(saved(out, index), logits(model, tokens), torch.tensor(tokens))
    kept: dict[str, Any] = {f"noise_{name}": value for name, value in found.items()}
    kept |= {
        f"noise_state_{name}": np.linalg.norm(value - first[f"state_{name}"], axis=-1)
        for name, value in recorder.states.items()
    }
    kept |= {f"noise_experts_{layer}": value for layer, value in recorder.experts.items()}
    kept |= {
        f"noise_router_{k}": np.abs(value - first[f"router_{k}"]).max(-1)
        for k, value in recorder.router_logits.items()
    }
    keep(out, index, kept)
    return float(found["max_abs"].max())


def saved(out: Path, index: int) -> torch.Tensor:
    return torch.from_numpy(np.load(out / f"logits.{index}.npy"))


def keep(out: Path, index: int, more: dict[str, Any]) -> None:
    path = out / f"reference.{index}.npz"
    np.savez(path, **dict(np.load(path)) | more)


def reach(
    model: Any,
    recorder: points.Recorder,
    sequences: list[list[int]],
    job: dict[str, Any],
    out: Path,
) -> None:
    """Adds sequences until every expert of every layer was chosen once, or TRIES were in vain."""
    union: dict[int, np.ndarray] = {}
    for index in range(len(sequences)):
        with np.load(out / f"reference.{index}.npz") as kept:
            for layer in recorder.experts:
                union[layer] = union.get(layer, False) | kept[f"experts_{layer}"].any(0)
    for seed in range(TRIES):
        if all(u.all() for u in union.values()):
            break
        tokens = candidate(seed, job["vocab_size"], job["length"])
        recorder.clear()
        logits(model, tokens)
        if any((value.any(0) & ~union[layer]).any() for layer, value in recorder.experts.items()):
            sequences.append(tokens)
            base(model, recorder, tokens, out, len(sequences) - 1)
            union = {
                layer: union[layer] | value.any(0) for layer, value in recorder.experts.items()
            }


def candidate(seed: int, vocab_size: int, length: int) -> list[int]:
    """Random tokens; every other time each is said 8 times over: experts that a mixture never
    chooses often take a lone word.
    """
    draw = np.random.RandomState(1_000 + seed)
    if seed % 2 == 0:
        return list(map(int, draw.randint(0, vocab_size, length)))
    return list(map(int, np.repeat(draw.randint(0, vocab_size, -(-length // 8)), 8)[:length]))


def probe(model: Any, tokens: list[int], out: Path) -> float:
    """How far logits move when the first weight of the last layer's attention is shifted by one
    head: a fault that the tolerance must show.
    """
    layer = decoder_layers(model)[-1]
    attention = next(child for name, child in layer.named_children() if "norm" not in name)
    weight = next(m.weight for m in attention.modules() if isinstance(m, torch.nn.Linear))
    config = model.config.get_text_config()
    rows = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        kept = weight.data
        weight.data = kept.roll(rows, 0)
        found = float((logits(model, tokens).cpu() - saved(out, 0)).abs().max())
        weight.data = kept
    return found


class _SplitSums(TorchFunctionMode):
    """Every linear layer's sums in four parts: the rounding is then that of other kernels and of
    tensor parallelism.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.nn.functional.linear and not kwargs and args[0].shape[-1] >= 4:
            x, weight, *bias = args
            parts = zip(x.tensor_split(4, -1), weight.tensor_split(4, -1), strict=True)
            out = sum(a @ w.mT for a, w in parts)
            return out + bias[0] if bias and bias[0] is not None else out
        return function(*args, **kwargs or {})


@contextmanager
def reordered(model: Any) -> Iterator[None]:
    """The same function, its sums in another order: another attention kernel, and
    linears in parts.
    """
    model.set_attn_implementation("sdpa")
    with _SplitSums():
        yield
    model.set_attn_implementation("eager")


if __name__ == "__main__":
    with points.reporting(sys.argv[1]) as JOB:
        main(JOB)
