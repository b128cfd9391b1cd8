"""The transformers side of a verdict: runs one model on every sequence, and measures the noise of
its arithmetic.

    python -m mckpt.trainer.reference job.json

job.json: hf (directory), out (directory), dtype (of the checkpoint), sequences (lists of tokens),
casts (dtypes that the checkpoint's weights were cast to, one after the other), uncast (the names of
weights that were not cast), and of the further sequences that are tried while some expert is not
reached: vocab_size, length, and instead (pairs of a token that must not occur and the one to take).
With an adapter also adapter (its directory), base (the directory without it; hf has the merged
weights) and stored (the dtype of the base's weights), for mckpt/trainer/unmerged.py; and beside:
true if the model that is compared is the base with the adapter beside its weights.
Also config, the values that transformers takes in place of those of config.json, and carried, the
patterns of tensors that the causal language model around the same decoder does not have. And image:
true if the whole model also runs an image of noise (images.py), whose files are in OUT/image.

It writes OUT/reference.json (the sequences, the probe and the versions), OUT/reference.{i}.npz (for
each position of sequence i the states of `points`), and OUT/logits.{i}.npy (fp32 logits [seq,
vocab]). The model is loaded once in fp32, and then once in its own dtype.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mckpt.errors import MappingError, SourceError
from mckpt.trainer import images, points, unmerged

TRIES = 64  # further sequences that are run to reach every expert
# A noise above this share of the largest logit is measured again. On a CPU the noise of the 13
# models of tests/helpers/tiny.py is 2**-19.7 to 2**-17.4 of it.
SUSPICIOUS = 2.0**-14
LESS = 10.0  # the second measurement counts if it is this many times smaller


def main(job: dict[str, Any]) -> None:
    out, sequences = Path(job["out"]), [list(s) for s in job["sequences"]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "adapter" in job:
        unmerged.run(load(job["base"], "float32", device, job), job, logits, reordered)
    if job.get("beside"):
        unmerged.run_merged(load(job["hf"], "float32", device, job), job, logits)
    model = subject("float32", device, job)
    points.cast(model, job["casts"], set(job["uncast"]))
    runs = [Run(out, sequences)]
    if job.get("image"):
        image = images.Image(model, job["hf"], dict(job.get("instead", ())))
        runs.append(Run(out / "image", [image.tokens], image.shown))
        runs[1].out.mkdir()
        image.save(runs[1].out)
    recorder = points.Recorder()
    watch(model, recorder, [parts.split() for parts in job["parts"]])
    for run in runs:
        with run.inputs(model):
            run.measure(model, recorder, job)
    recorder.remove()
    del model
    gc.collect()
    if job["dtype"] != "float32":
        dtype = job["dtype"] if len(job["casts"]) < 2 else "float32"
        model = subject(dtype, device, job)
        # The last cast gives the dtype, and the casts before it change values too.
        if len(job["casts"]) > 1:
            points.cast(model, job["casts"], set(job["uncast"]))
            for name, parameter in model.named_parameters():
                if name not in job["uncast"]:
                    parameter.data = parameter.data.to(getattr(torch, job["dtype"]))
        for run in runs:
            with run.inputs(model):
                run.measure_low(model)
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for run in runs:
        facts = {"dtype": job["dtype"], "versions": versions, **run.facts}
        (run.out / "reference.json").write_text(json.dumps(facts))


@dataclass
class Run:
    """The runs of some sequences, whose files are in `out`."""

    out: Path
    sequences: list[list[int]]
    # makes every run of a model take what belongs to the sequences: an image
    inputs: Callable[[Any], AbstractContextManager[None]] = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)

    def measure(self, model: Any, recorder: points.Recorder, job: dict[str, Any]) -> None:
        """Runs all sequences in fp32, and further ones if they are text; measures the noise."""
        out, sequences = self.out, self.sequences
        largest = [base(model, recorder, tokens, out, i) for i, tokens in enumerate(sequences)]
        if self.inputs is nullcontext:
            reach(model, recorder, sequences, job, out)
        if not np.isfinite(largest).all():
            raise SourceError(
                f"{job['hf']}: transformers computes logits that are not finite, so there is"
                " nothing to compare with"
            )
        again = {}
        for index, tokens in enumerate(sequences):
            if twice := measured_noise(model, recorder, tokens, out, index):
                again[index] = twice
        probed = probe(model, sequences[0], out)
        self.facts = {"sequences": sequences, "probe": probed, "measured_again": again}

    def measure_low(self, model: Any) -> None:
        """Runs all sequences in the checkpoint's dtype."""
        for index, tokens in enumerate(self.sequences):
            reference = saved(self.out, index)
            found = points.compare(reference, logits(model, tokens), torch.tensor(tokens))
            low = {f"low_{key}": value for key, value in found.items()}
            points.add(self.out / f"reference.{index}.npz", low)


# ---------------------------------------------------------------------------------------- the model


def subject(dtype: str, device: torch.device, job: dict[str, Any]) -> Any:
    """Loads the model that is compared with Megatron-Core's: that of `hf`, or the base with the
    adapter beside its weights.
    """
    if not job.get("beside"):
        return load(job["hf"], dtype, device, job)
    return unmerged.adapted(load(job["base"], dtype, device, job), job["adapter"]).get_base_model()


def load(directory: str, dtype: str, device: torch.device, job: dict[str, Any]) -> Any:
    """Loads the model with transformers, with eager attention. Raises SourceError if a tensor is
    missing, left over or of another shape.

    job: the content of job.json, of which `config`, `carried` and `image` are used.

    If accelerate is installed, a model larger than the GPU is spread over all GPUs and the host,
    and one larger than memory over the disk too.
    """
    import importlib.util

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    placed: dict[str, Any] = {}
    files = [*Path(directory).glob("*.safetensors"), *Path(directory).glob("pytorch_model*.bin")]
    nbytes = sum(path.stat().st_size for path in files) * (2 if dtype == "float32" else 1)
    spreads = device.type == "cuda" and importlib.util.find_spec("accelerate")
    if spreads and nbytes > torch.cuda.mem_get_info()[0] / 2:
        placed = {"device_map": "auto"}
    # Eager experts and attention run at any sizes. grouped_mm refuses widths that are not a
    # multiple of 16 bytes.
    loaded: Any = _loader_for(directory, bool(job.get("image")))(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        trust_remote_code=False,
        **placed,
        **job["config"],
    )
    model, found = loaded
    if type(model).forward is torch.nn.Module.forward:
        # Its parts run one after the other; the first one that has an output layer computes text.
        model = next(part for part in model.children() if part.get_output_embeddings() is not None)
    last = model.config.get_text_config().num_hidden_layers
    found["unexpected_keys"] = [
        key
        for key in found["unexpected_keys"]
        if not _behind(key, last) and not any(fnmatch(key, pattern) for pattern in job["carried"])
    ]
    wrong = [f"{kind}: {', '.join(map(str, keys))}" for kind, keys in found.items() if keys]
    if wrong:
        raise SourceError.of(f"{directory}: transformers does not load it whole:", wrong)
    return (model if placed else model.to(device)).eval()


def _loader_for(directory: str, whole: bool = False) -> Any:
    """Returns the function of transformers that builds the model: its text model alone, if
    transformers has one, unless the `whole` model is wanted. Raises MappingError without one.
    """
    import transformers

    why = "it has no language model for this config.json"
    try:
        config = type(transformers.AutoConfig.from_pretrained(directory))
    except ValueError as error:
        why = str(error).partition("\n")[0]
        # a class of transformers under a model_type of its maker. transformers finds the names of
        # tensors by that of the class.
        read = json.loads(Path(directory, "config.json").read_text())
        named: Any = getattr(transformers, (read.get("architectures") or [""])[0], None)
        if "model_type" in read and hasattr(named, "config_class"):
            return partial(named.from_pretrained, model_type=named.config_class.model_type)
    else:
        # the model of the other classes contains a text model
        kinds: list[Any] = [transformers.AutoModelForCausalLM]
        kinds.insert(0 if whole else 1, transformers.AutoModelForImageTextToText)
        for kind in kinds:
            if config in kind._model_mapping:
                return kind.from_pretrained
        several = transformers.AutoModelForMultimodalLM._model_mapping
        if config in several:
            # the method of the base class: that of the class may also load files without weights
            load: Any = transformers.PreTrainedModel.from_pretrained
            return partial(load.__func__, several[config])
    raise MappingError(
        f"{directory}: transformers {transformers.__version__} cannot build this model: {why}\n"
        "mckpt does not run Python files of a checkpoint. Compare the values of all tensors"
        " with --level bytes"
    )


def _behind(key: str, num_layers: int) -> bool:
    """Returns whether a key belongs to a layer behind the decoder's. Such layers are for
    multi-token prediction, and transformers' model does not have them.
    """
    found = re.search(r"\blayers\.(\d+)\.", key)
    return found is not None and int(found[1]) >= num_layers


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Returns the fp32 logits [seq, vocab]."""
    rows = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    found: torch.Tensor = model(rows, use_cache=False).logits[0].float()
    return found


def decoder_layers(model: Any) -> list[Any]:
    """Returns the decoder's layers: the list of modules that has num_hidden_layers items."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for _, module in model.get_decoder().named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise SourceError(f"{type(model).__name__} has no list of num_hidden_layers modules")


def matrices(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters with two axes: the weights of linear layers, and no norm or bias."""
    return (parameter for parameter in module.parameters() if parameter.dim() == 2)


def watch(model: Any, recorder: points.Recorder, parts: list[list[str]]) -> None:
    """Puts hooks on all places of `points`.

    parts: of each layer of mckpt, the names of its parts, as in the dim layer_parts. In some
    families each part is a layer of transformers. In the others, the parts are the children of a
    layer that have matrices, so no norms, in the order in which they run.
    """

    def first(value: Any) -> Any:
        """Returns the first output of a module, without the axis of a batch of one."""
        value = value[0] if isinstance(value, tuple) else value
        return value[0] if value.dim() == 3 else value

    def state(name: str) -> Any:
        return lambda value: recorder.state(name, first(value))

    def routed(layer: int, router: torch.nn.Module) -> Any:
        def keep(value: Any) -> None:
            scores, chosen = value[0].float(), value[-1]
            if chosen.is_floating_point():  # the weights of all experts, 0 if not chosen; scores
                scores, weights = chosen.float(), value[0]
                chosen = weights.topk(int((weights[0] > 0).sum())).indices
            experts = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
            recorder.router_logits[layer] = scores.cpu().numpy()
            recorder.margins[layer] = margin(router, scores, chosen.shape[1]).cpu().numpy()
            recorder.experts[layer] = experts.cpu().numpy()

        return keep

    layers = decoder_layers(model)
    # not the output of the embedding, to which some models add positions, or which they scale
    recorder.input(layers[0], state("embed"))
    places = list(enumerate(parts))
    if len(places) < len(layers):
        places = [(index, [name]) for index, names in places for name in names]
    for layer, (index, names) in zip(layers, places, strict=True):
        recorder.output(layer, state(f"layers.{index}"))  # that of the last part stays
        points_of = [
            f"layers.{index}.{'mlp' if name in ('mlp', 'moe') else 'attn'}" for name in names
        ]
        turn = itertools.cycle(points_of)

        def part(value: Any, turn: Iterator[str] = turn) -> None:
            recorder.state(next(turn), first(value))

        for child in layer.children():
            if next(matrices(child), None) is not None:
                recorder.output(child, part)
        for module in layer.modules():
            # it returns logits [tokens, experts], weights, chosen experts [tokens, k]
            if type(module).__name__.endswith("Router"):
                recorder.output(module, routed(index, module))
    recorder.input(model.get_output_embeddings(), state("final_norm"))


def margin(router: Any, logits: torch.Tensor, chosen: int) -> torch.Tensor:
    """Returns for each token how close the router's choice of `chosen` experts, and of groups if it
    has any, was: the least difference of a chosen score from one that was not. `logits` are
    [tokens, experts].

    DeepSeek's router chooses by sigmoids with a bias, and first among groups by the sum of their
    two best.
    """
    scores = logits
    if getattr(router, "e_score_correction_bias", None) is not None:
        scores = logits.sigmoid() + router.e_score_correction_bias
    closest = torch.full(scores.shape[:1], torch.inf, device=scores.device)
    groups, best = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
    if groups > best:
        parts = scores.view(len(scores), groups, -1)
        of_group = parts.topk(2, -1)[0].sum(-1)
        ranked = of_group.sort(-1, descending=True)[0]
        closest = ranked[:, best - 1] - ranked[:, best]
        beaten = (of_group < ranked[:, best - 1, None])[..., None]
        scores = parts.masked_fill(beaten, -torch.inf).flatten(1)
    if chosen < scores.shape[1]:
        ranked = scores.sort(-1, descending=True)[0]
        closest = torch.minimum(closest, ranked[:, chosen - 1] - ranked[:, chosen])
    return closest


# ----------------------------------------------------------------------------------------- its runs


def base(model: Any, recorder: points.Recorder, tokens: list[int], out: Path, index: int) -> float:
    """Runs one sequence and saves its states; returns the largest magnitude of its logits."""
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
    """Measures the noise of one sequence, and measures it again if it is unusually large.

    Such a noise was seen when the machine was short of memory, and not in the next run. The second
    measurement repeats both runs, and counts if its noise is LESS times smaller. Returns both
    values if there are two.
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
    """Runs one sequence again with its sums in another order, and saves the differences from the
    first run; returns the largest difference of a logit.
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
    points.add(out / f"reference.{index}.npz", kept)
    return float(found["max_abs"].max())


def saved(out: Path, index: int) -> torch.Tensor:
    return torch.from_numpy(np.load(out / f"logits.{index}.npy"))


def reach(
    model: Any,
    recorder: points.Recorder,
    sequences: list[list[int]],
    job: dict[str, Any],
    out: Path,
) -> None:
    """Adds sequences until every expert of every layer was chosen once, or TRIES were tried."""
    union: dict[int, np.ndarray] = {}
    instead = dict(job.get("instead", ()))
    for index in range(len(sequences)):
        with np.load(out / f"reference.{index}.npz") as kept:
            for layer in recorder.experts:
                union[layer] = union.get(layer, False) | kept[f"experts_{layer}"].any(0)
    for seed in range(TRIES):
        if all(u.all() for u in union.values()):
            break
        tokens = candidate(seed, job["vocab_size"], job["length"])
        tokens = [instead.get(token, token) for token in tokens]
        recorder.clear()
        logits(model, tokens)
        if any((value.any(0) & ~union[layer]).any() for layer, value in recorder.experts.items()):
            sequences.append(tokens)
            base(model, recorder, tokens, out, len(sequences) - 1)
            union = {k: union[k] | value.any(0) for k, value in recorder.experts.items()}


def candidate(seed: int, vocab_size: int, length: int) -> list[int]:
    """Returns random tokens. For odd seeds each token is repeated 8 times: experts that random
    tokens never reach often take a token that is repeated.
    """
    draw = np.random.RandomState(1_000 + seed)
    if seed % 2 == 0:
        return list(map(int, draw.randint(0, vocab_size, length)))
    return list(map(int, np.repeat(draw.randint(0, vocab_size, -(-length // 8)), 8)[:length]))


def probe(model: Any, tokens: list[int], out: Path) -> list[float]:
    """Shifts the first weight of the last layer's attention by one head, and returns how far the
    logits of each position move. The tolerance must show such a fault.
    """
    layer = decoder_layers(model)[-1]
    weight = next(matrix for child in layer.children() for matrix in matrices(child))
    config = model.config.get_text_config()
    rows = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        kept = weight.data
        weight.data = kept.roll(rows, 0)
        found = (logits(model, tokens).cpu() - saved(out, 0)).abs().amax(-1)
        weight.data = kept
    return [float(moved) for moved in found]


class _SplitSums(TorchFunctionMode):
    """Computes the sums of every linear layer in four parts. Rounding then differs as it does with
    other kernels and with tensor parallelism.
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
    """Makes the model compute its sums in another order within the block: by another attention
    kernel, and in linear layers in parts.
    """
    if getattr(model, "_supports_sdpa", True):  # a model without attention does not
        model.set_attn_implementation("sdpa")
    with _SplitSums():
        yield
    model.set_attn_implementation("eager")


if __name__ == "__main__":
    with points.reporting(sys.argv[1]) as JOB:
        main(JOB)
