"""Tiny adapters in directories of PEFT, and the weights with an adapter by the formulas of PEFT.

Every factor is random and has no zeros: PEFT sets B to 0, and a program that loses such an adapter
would pass. The values are multiples of 1/64, so the product of two factors, scaled by a power of
two, is exact in fp32, and its sum with a bfloat16 weight nearly always too. So a merge in fp32 that
rounds once has one right result, to the last bit, whatever the order of its sums.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.helpers import tiny

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# modules whose weights Megatron packs into one matrix, so that its LoRA has one A for all of them
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "in_proj"),
}
Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, int]]  # name of a module -> [out, in] of its weight


def drawn(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns random multiples of 1/64 between -1/4 and 1/4, without 0, in fp32. They depend on
    the name, the shape and the seed.
    """
    random = np.random.RandomState([seed, zlib.crc32(name.encode())])
    signs = random.choice(np.float32([-1, 1]), shape)
    return signs * random.randint(1, 17, shape).astype(np.float32) / np.float32(64)


def weights(base: Path) -> Arrays:
    """Returns the tensors of a directory of safetensors files."""
    return {k: v for file in sorted(base.glob("*.safetensors")) for k, v in load_file(file).items()}


def modules(base: Path, *ends: str) -> dict[str, tuple[int, int]]:
    """Returns the modules of a base whose path ends with one of `ends`, with the shapes of their
    weights: those that PEFT adapts for target_modules `ends`.
    """
    return {
        module: array.shape
        for key, array in weights(base).items()
        if (module := key.removesuffix(".weight")) != key
        and any(module == end or module.endswith(f".{end}") for end in ends)
    }


def factors(
    shapes: Shapes, rank: Callable[[str], int] | int = 4, *, shared: bool = True, seed: int = 0
) -> Arrays:
    """Returns the tensors lora_A and lora_B of modules, under the keys of PEFT's files.

    shared: the modules in FUSED of one layer have the same A.
    """
    made: Arrays = {}
    for module, (out, into) in shapes.items():
        r = rank(module) if callable(rank) else rank
        parent, _, leaf = module.rpartition(".")
        one = f"{parent}.{FUSED.get(leaf, leaf)}" if shared else module
        made[f"{PREFIX}{module}.lora_A.weight"] = drawn(f"{one} A", (r, into), seed)
        made[f"{PREFIX}{module}.lora_B.weight"] = drawn(f"{module} B", (out, r), seed)
    return made


def magnitudes(base: Path, made: Arrays) -> Arrays:
    """Returns factors with the magnitudes of DoRA, which differ from those that PEFT starts with:
    the lengths of the rows of the base's weights, and of the columns of an embedding.
    """
    stored, out = weights(base), dict(made)
    for key in made:
        module, _, end = key.removeprefix(PREFIX).partition(".lora_")
        if end.startswith(("A.", "embedding_A")):
            weight = stored[f"{module}.weight"].astype(np.float32)
            lengths = np.linalg.norm(weight, axis=0 if "embedding" in end else 1)
            times = 1 + np.abs(drawn(f"{module} m", lengths.shape))
            out[f"{PREFIX}{module}.lora_magnitude_vector"] = lengths * times
    return out


def embedding(module: str, shape: tuple[int, int], rank: int = 4) -> Arrays:
    """Returns the factors of an embedding [vocab, hidden], which PEFT stores as [r, vocab] and
    [hidden, r].
    """
    vocab, hidden = shape
    return {
        f"{PREFIX}{module}.lora_embedding_A": drawn(f"{module} A", (rank, vocab)),
        f"{PREFIX}{module}.lora_embedding_B": drawn(f"{module} B", (hidden, rank)),
    }


def stacked(
    experts: str, count: int, gate_up: tuple[int, int], down: tuple[int, int], rank: int = 4
) -> Arrays:
    """Returns the factors of the stacked experts of transformers 5, as target_parameters names
    them.

    experts: the module that has gate_up_proj [count, *gate_up] and down_proj [count, *down]. PEFT
    nests two wrappers, of which the inner one is that of gate_up_proj.
    """
    made: Arrays = {}
    for at, (out, into) in {f"{experts}.base_layer": gate_up, experts: down}.items():
        made[f"{PREFIX}{at}.lora_A.weight"] = drawn(f"{at} A", (count * rank, into))
        made[f"{PREFIX}{at}.lora_B.weight"] = drawn(f"{at} B", (out, rank * count))
    return made


def write(directory: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """Writes a directory of PEFT. `config` changes entries of its adapter_config.json; the default
    scale is 2, and the default rank 4.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiny.write_safetensors(directory / WEIGHTS, tensors)
    ends = {
        re.sub(r"\.lora_.*|\.base_layer.*|\.weight$|\.bias$", "", name).rpartition(".")[2]
        for name in tensors
    } - {"experts"}  # that module has target_parameters
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somebody/base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted(ends),
        "use_dora": False,
        "use_rslora": False,
    }
    # in this order, since the first pattern that matches a module gives its rank
    (directory / CONFIG).write_text(json.dumps(content | config, indent=2) + "\n")
    return directory


# ------------------------------------------------------------------------------- the reference


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def merged(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a base with an adapter in fp64, by the formulas of PEFT
    (peft/tuners/lora/layer.py): W + scale * B @ A, and with DoRA each row of that scaled to its
    magnitude.
    """
    result = {key: array.astype(np.float64) for key, array in weights(base).items()}
    config = json.loads((adapter / CONFIG).read_text())
    stored = {
        key.removeprefix(PREFIX): array.astype(np.float64)
        for key, array in load_file(adapter / WEIGHTS).items()
    }
    if not any(key.startswith("model.language_model.") for key in result):
        # names that transformers 5 has in memory
        names = {"model.language_model.": "model.", "model.visual.": "visual."}
        if any(key.startswith("backbone.") for key in result):
            names = {"model.": "backbone."}
        for old, new in names.items():
            stored = {key.replace(old, new): array for key, array in stored.items()}
    count = 1 + max([int(found[1]) for key in result if (found := _EXPERT.search(key))], default=-1)
    for key in [key for key, array in stored.items() if array.ndim == 3]:  # one for all experts
        (of_all,) = stored.pop(key)
        for number in range(count):
            stored[key.replace(".experts.", f".experts.{number}.")] = of_all
    for key, array in stored.items():
        module = re.sub(r"\.(lora_A\.weight|lora_embedding_A)$", "", key)
        if module == key:
            continue
        other = key.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")
        target = module.replace(".base_layer", "")
        if _stacked(result, target, config):
            _add_to_experts(result, module, array, stored[other], config)
            continue
        factor = stored[other] @ array * scale(config, target, array.shape[0])
        weight, expert = _weight(result, target)
        weight[expert] += factor.T if "lora_embedding" in key else factor
        magnitude = stored.get(f"{module}.lora_magnitude_vector")
        if magnitude is not None:
            columns = "lora_embedding" in key  # PEFT scales the columns of an embedding
            lengths = np.linalg.norm(weight[expert], axis=0 if columns else 1)
            times = magnitude / lengths
            weight[expert] *= times if columns else times[:, None]
    for key, array in stored.items():
        if ".lora_" not in key:
            plain = key.replace(".base_layer", "")
            assert result[plain].shape == array.shape
            if not key.endswith("base_layer.weight"):  # that one is a copy of the base's
                result[plain] = array
    return result


def scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Returns alpha / r of a module: the first pattern that matches gives its alpha."""
    alpha = config["lora_alpha"]
    if f"{module}.weight" in (config.get("target_parameters") or ()):
        module = f"{module}.weight"
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _weight(result: Arrays, module: str) -> tuple[np.ndarray, Any]:
    """Returns the tensor that holds the weight of a module, and where it is in there."""
    if f"{module}.weight" in result:
        return result[f"{module}.weight"], ...
    experts, expert, leaf = module.rsplit(".", 2)  # one expert of a base whose experts are stacked
    packed = result[f"{experts}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"]
    half = packed.shape[1] // 2
    rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None), "down_proj": slice(None)}
    return packed, (int(expert), rows[leaf])


def _stacked(result: Arrays, module: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a module has parameters of all experts."""
    return module.endswith(".experts") and bool(config.get("target_parameters"))


def _add_to_experts(
    result: Arrays, module: str, a: np.ndarray, b: np.ndarray, config: Mapping[str, Any]
) -> None:
    """Adds the products of all experts. PEFT reads A as [experts, r, in], and B as [out, r,
    experts].
    """
    experts = module.removesuffix(".base_layer")
    inner = module != experts or not any(
        name.endswith("down_proj") for name in config["target_parameters"]
    )
    name = "gate_up_proj" if inner else "down_proj"
    found = [key for key in result if re.match(rf"{re.escape(experts)}\.(\d+)\.down_proj", key)]
    packed = result.get(f"{experts}.{name}")
    count = len(found) or result[f"{experts}.{name}"].shape[0]
    a = a.reshape(count, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, count)
    for expert in range(count):
        product = b[:, :, expert] @ a[expert] * scale(config, f"{experts}.{name}", a.shape[1])
        if packed is not None:
            packed[expert] += product
            continue
        parts = ["gate_proj", "up_proj"] if inner else ["down_proj"]
        for leaf, part in zip(parts, np.split(product, len(parts)), strict=True):
            result[f"{experts}.{expert}.{leaf}.weight"] += part


def differences(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], *, powers: bool = True
) -> list[str]:
    """Returns the tensors that are not the exact values, rounded once to their own dtype.

    Where fp32 does not hold the exact value, the result may be the rounding of any number within
    the error of a few sums in fp32.

    powers: all scales are powers of two, so that fp32 computes every value exactly that it holds.
    """
    wrong = [f"{key}: missing" for key in wanted.keys() - found.keys()]
    wrong += [f"{key}: not wanted" for key in found.keys() - wanted.keys()]
    for key in sorted(wanted.keys() & found.keys()):
        kind, exact = found[key].dtype, wanted[key]
        error = 16 * np.finfo(np.float32).eps * (np.abs(exact) + 1)
        if powers:
            error[exact == exact.astype(np.float32)] = 0
        least, most = ((exact + e).astype(np.float32).astype(kind) for e in (-error, error))
        values = found[key].astype(np.float64)
        bad = (values < least.astype(np.float64)) | (values > most.astype(np.float64))
        if bad.any():
            largest = np.abs(values - exact).max()
            wrong.append(f"{key}: {bad.sum()} of {bad.size} values, up to {largest:.3g} apart")
    return wrong


def exact(wanted: Mapping[str, np.ndarray], keys: Iterable[str]) -> float:
    """Returns the part of the values of these tensors that fp32 holds exactly."""
    arrays = [wanted[key] for key in keys]
    return float(np.mean(np.concatenate([(a == a.astype(np.float32)).ravel() for a in arrays])))


def peft_logits(base: Path, adapter: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of transformers with PEFT, which must report no missing tensor."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = PeftModel.from_pretrained(tiny.load(base), str(adapter))
    return tiny.logits(model.eval(), tokens)
