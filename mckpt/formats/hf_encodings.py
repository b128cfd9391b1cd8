"""Reads `quantization_config` of config.json, which describes how quantised weights are stored.

quant_method fp8                  X.weight, X.weight_scale_inv      fp8, in blocks or per tensor
quant_method mxfp8                X.weight, X.weight_scale_inv      fp8, in blocks of 1 x 32
quant_method mxfp4                X_blocks, X_scales                mxfp4, in blocks of 32
quant_method modelopt             X.weight, X.weight_scale          fp8, also in blocks of 1 x 32
                                  and X.weight_scale_2              nvfp4
quant_method compressed-tensors   X.weight, X.weight_scale          fp8, also in blocks, or int8
                                  X.weight_packed, X.weight_scale   int4, mxfp4, or int8 + 128
                                  and X.weight_global_scale         nvfp4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from mckpt.mapping.patterns import PatternError, pattern
from mckpt.values.dtypes import itemsize
from mckpt.values.quantisation import (
    ALONE,
    E4M3,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    OVER,
    PACKED_INT8,
    TIMES,
    Encoding,
)

# the forms that mckpt reads; the end of most texts of `refused`
READ = (
    "of quantised models, these are read: quant_method fp8 (fmt e4m3), mxfp8, mxfp4, modelopt"
    " (quant_algo FP8, MXFP8, NVFP4 and W4A16_NVFP4), and compressed-tensors (pack-quantized with 4"
    " or 8 bits, float-quantized, int-quantized, naive-quantized, mxfp8-quantized,"
    " mxfp4-pack-quantized and nvfp4-pack-quantized; symmetric, without actorder)"
)
FLOATS = ("float32", "bfloat16", "float16")
E8M0 = ("uint8", "float8_e8m0fnu")  # of scales that are powers of two
MX_BLOCK = 32  # elements of mxfp4 and mxfp8 that share a scale
NV_BLOCK, NV_SCALES = 16, ("float8_e4m3fn",)  # the same of nvfp4, and the dtype of the scales
# The reasons to ignore tensors beside the weights: no weight's value depends on them.
ACTIVATIONS = "a scale of activations, which training in bfloat16 does not use"
PACKED_SHAPE = "the shape of a packed weight, which the dims give as well"


class Scheme(NamedTuple):
    """The form of quantised weights [rows, columns] of some modules."""

    encoding: Encoding
    codes: str  # what the key of a weight's elements has after the weight's key
    scales: str  # what the key of its scales has after the weight's key
    block: tuple[int | None, int | None]  # rows and columns that share a scale; None: all
    dtypes: tuple[str, ...] = FLOATS  # that the scales may have
    transposed: bool = False  # the elements are stored as the transpose of the weight
    targets: tuple[str, ...] = ("Linear",)  # the modules, as compressed-tensors names them
    # what the key of the scale of the whole weight has after the weight's key, and its use
    whole: str = ""
    overall: int = ALONE

    def stored_matrix(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows and columns of the stored form of a weight."""
        return shape[::-1] if self.transposed else shape

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...] | None:
        """Returns the shape of the stored elements of a weight; None if its columns do not fill
        whole elements.
        """
        rows, columns = self.stored_matrix(shape)
        if self.transposed:  # of GPT-OSS
            return None if columns % MX_BLOCK else (rows, columns // MX_BLOCK, MX_BLOCK // 2)
        each = itemsize(self.encoding.dtype) * self.encoding.per_byte
        return None if columns % each else (rows, columns // each)

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows and columns of a block of a weight. No block is larger than it."""
        rows, columns = (
            min(n, b or n) for n, b in zip(self.stored_matrix(shape), self.block, strict=True)
        )
        return rows, columns

    def grids(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Returns the shapes that the scales of a weight may have; the first one is usual."""
        pairs = zip(self.stored_matrix(shape), self.block, strict=True)
        grid = tuple(-(-n // (b or n)) for n, b in pairs)
        return [(), (1,), (1, 1)] if self.block == (None, None) else [grid]

    def description(self) -> str:
        """Returns the encoding and its blocks, for messages."""
        match self.block:
            case None, None:
                where = "a scale for each tensor"
            case 1, None:
                where = "a scale for each row"
            case rows, columns:
                where = f"a scale for each {rows} x {columns}"
        return f"{self.encoding.name} with {where}" + ", and one for each tensor" * bool(self.whole)


class Quantisation(Struct, frozen=True):
    """The forms of the quantised weights of one model."""

    schemes: tuple[Scheme, ...] = ()
    beside: dict[str, str] = {}  # key suffix -> the reason to ignore it
    refused: str = ""  # why config.json's quantization_config is not read
    by_dtype: bool = False  # the dtype of a weight's elements decides which of the schemes it has

    def scheme_of(self, key: str) -> Scheme | None:
        """Returns the scheme of the module that has this weight: the one that names it, else the
        one whose pattern matches, else the one of all linears.
        """
        module = key.rpartition(".")[0]
        found = [(_match(s.targets, module), s) for s in self.schemes]
        best = min(found, key=lambda pair: pair[0], default=(NONE, None))
        return best[1] if best[0] < NONE else None


NONE = 3  # _match of a module that no target names


def _match(targets: Iterable[str], module: str) -> int:
    """Returns 0 if a target is the module, 1 if a pattern matches it, 2 for a class, else NONE."""
    how = [
        (1 if pattern(target[3:]).match(module) else NONE)
        if target.startswith("re:")
        else (0 if target == module else 2 if target == "Linear" else NONE)
        for target in targets
    ]
    return min(how, default=NONE)


# The forms that --quantize writes, under their names.
WRITTEN = {
    "fp8": Scheme(E4M3, "", "_scale_inv", (128, 128)),
    "mxfp8": Scheme(E4M3, "", "_scale", (1, MX_BLOCK), ("uint8",)),
    "nvfp4": Scheme(
        *(NVFP4, "_packed", "_scale", (1, NV_BLOCK), NV_SCALES), whole="_global_scale", overall=OVER
    ),
}


def quantisation_config(name: str, kept: Sequence[str]) -> dict[str, Any]:
    """Returns the quantization_config of a model that is written in the form `name`.

    kept: the modules whose weights are matrices and are not quantised.

    fp8 is the form of DeepSeek-V3 and Qwen3 as published. mxfp8 and nvfp4 are the presets MXFP8 and
    NVFP4A16 of compressed-tensors 0.20.0 (quantization/quant_scheme.py), which vLLM 0.33.0 reads
    for linear layers with CompressedTensorsW8A8Mxfp8 and CompressedTensorsW4A4Fp4(use_a16=True),
    and for experts with methods of the same names (in model_executor/layers/quantization/,
    compressed_tensors/compressed_tensors.py, schemes/ and compressed_tensors_moe/);
    tests/judge/test_quantised_peers.py lets it load all forms. With activations in nvfp4, each
    layer would need a scale of its activations, which only data gives.
    """
    if name == "fp8":
        return {
            "quant_method": name,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(WRITTEN[name].block),
            "modules_to_not_convert": sorted(kept),
        }
    common: dict[str, Any] = {"type": "float", "symmetric": True}
    weights: dict[str, Any] = {**common, "dynamic": False, "observer": "memoryless_minmax"}
    activations = None
    if name == "mxfp8":
        group = {"num_bits": 8, "strategy": "group", "group_size": MX_BLOCK}
        group |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        form, activations = "mxfp8-quantized", {**common, "dynamic": True, **group}
    else:
        scales = "torch.float8_e4m3fn"
        group = {"num_bits": 4, "strategy": "tensor_group", "group_size": NV_BLOCK}
        group |= {"scale_dtype": scales, "zp_dtype": scales}
        form = "nvfp4-pack-quantized"
    quantised: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**weights, **group},
        "format": form,
    }
    quantised |= {"input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": quantised},
        # vLLM 0.33 looks for the module attn.qkv of the vision tower of GLM-4.5V under the name
        # attn.qkv_proj, with compressed-tensors only (model_executor/models/glm4_1v.py)
        "ignore": sorted({*kept, *(f"{name}_proj" for name in kept if name.endswith(".qkv"))}),
        "kv_cache_scheme": None,
    }


def quantisation_of(how: Any, keys: Iterable[str]) -> Quantisation:
    """Returns the forms that a quantization_config describes; `how` is its value, `keys` are those
    of all tensors.

    An empty value has no forms. `refused` names what mckpt does not know.
    """
    if not how:
        return Quantisation()
    if not isinstance(how, dict):
        return Quantisation(refused=READ)
    producer, method = how.get("producer"), how.get("quant_method")
    if method is None and isinstance(producer, dict):  # ModelOpt up to 0.31 writes no quant_method
        method = producer.get("name")
    match method:
        case "fp8":
            return _fp8(how, keys)
        case "mxfp8":
            return _fp8({"weight_block_size": [1, MX_BLOCK], **how, "scale_fmt": "ue8m0"}, keys)
        case "modelopt":
            return _modelopt(how)
        case "mxfp4":
            block = (1, MX_BLOCK)
            scheme = Scheme(MXFP4, "_blocks", "_scales", block, ("uint8",), transposed=True)
            return Quantisation((scheme,))
        case "compressed-tensors":
            return _compressed_tensors(how)
    return Quantisation(refused=READ)


def _fp8(how: dict[str, Any], keys: Iterable[str]) -> Quantisation:
    """Returns the form of fp8 weights, in blocks or with one scale.

    vLLM's form has `weight_scale` and `input_scale`, transformers' form has `weight_scale_inv` and
    `activation_scale`.
    """
    if how.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):  # MiniMax-M2 has torch's name
        return Quantisation(refused=READ)
    dtypes = (*FLOATS, *E8M0) if how.get("scale_fmt") == "ue8m0" else FLOATS
    beside = _beside(".activation_scale", ".input_scale")
    match how.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Quantisation((Scheme(E4M3, "", "_scale_inv", (rows, columns), dtypes),), beside)
        case None:
            vllm = any(key.endswith(".weight_scale") for key in keys)
            scales = "_scale" if vllm else "_scale_inv"
            return Quantisation((Scheme(E4M3, "", scales, (None, None), dtypes),), beside)
    return Quantisation(
        refused="its weight_block_size is neither two positive numbers nor null; " + READ
    )


def _modelopt(how: dict[str, Any]) -> Quantisation:
    """Returns the forms of a model of NVIDIA's ModelOpt. Its modules that are not quantised have
    weights of another dtype, so their list is not needed.

    The keys are those of config.json or, below `quantization`, those of hf_quant_config.json.
    """
    inner = how.get("quantization")
    part = inner if isinstance(inner, dict) else how
    layers = part.get("quantized_layers")
    named = list(layers.values()) if isinstance(layers, dict) else [part]
    algorithms = {str(one.get("quant_algo") if isinstance(one, dict) else one) for one in named}
    known = {
        "FP8": Scheme(E4M3, "", "_scale", (None, None), FLOATS),
        "MXFP8": Scheme(E4M3, "", "_scale", (1, MX_BLOCK), E8M0),
        "NVFP4": Scheme(
            *(NVFP4, "", "_scale", (1, NV_BLOCK), NV_SCALES), whole="_scale_2", overall=TIMES
        ),
    }
    known["W4A16_NVFP4"] = known["NVFP4"]
    if unknown := sorted(name for name in algorithms if name.upper() not in known):
        return Quantisation(refused=f"its quant_algo {unknown[0]} is not read; {READ}")
    schemes = {known[name.upper()] for name in algorithms}
    if len({scheme.encoding for scheme in schemes}) < len(schemes):
        return Quantisation(refused="its layers have two forms of fp8, FP8 and MXFP8; " + READ)
    ordered = tuple(sorted(schemes, key=lambda scheme: scheme.encoding.name))
    return Quantisation(ordered, _beside(".input_scale", ".k_scale", ".v_scale"), by_dtype=True)


def _beside(*suffixes: str) -> dict[str, str]:
    """Returns the endings of keys of scales of activations, and the reason to ignore them."""
    return dict.fromkeys(suffixes, ACTIVATIONS)


def _compressed_tensors(how: dict[str, Any]) -> Quantisation:
    """Returns the forms of the groups of a compressed-tensors model."""
    for key in ("transform_config", "sparsity_config"):
        if how.get(key) not in (None, {}):
            return Quantisation(refused=f"its {key} changes what the weights mean; {READ}")
    groups = how.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return Quantisation(refused="it has no config_groups; " + READ)
    schemes = []
    for name, group in groups.items():
        group = group if isinstance(group, dict) else {}
        found = _scheme(group, group.get("format") or how.get("format"))
        if isinstance(found, str):
            return Quantisation(refused=f"its config_groups {name} has {found}; {READ}")
        schemes.append(found)
    beside = _beside(".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
    beside |= _beside(".input_global_scale")
    return Quantisation(tuple(schemes), {**beside, ".weight_shape": PACKED_SHAPE})


def _is_target(target: Any) -> bool:
    """Returns whether a target is a name, or `re:` and an expression that can be matched."""
    if not isinstance(target, str) or not target.startswith("re:"):
        return isinstance(target, str)
    try:
        pattern(target[3:])
    except PatternError:
        return False
    return True


def _scheme(group: dict[str, Any], form: Any) -> Scheme | str:
    """Returns the form of a group's weights, or the entry that mckpt does not read."""
    weights, targets = group.get("weights"), group.get("targets")
    if not isinstance(weights, dict):
        return f"weights {weights!r}"
    if not isinstance(targets, list) or not all(map(_is_target, targets)):
        return f"targets {targets!r}"
    if not weights.get("symmetric", True):
        return "symmetric false: weights with zero points are not read"
    if weights.get("actorder"):
        return f"actorder {weights['actorder']!r}: weights in another order are not read"
    match weights.get("strategy"), weights.get("group_size"), weights.get("block_structure"):
        case "tensor", _, _:
            block: tuple[int | None, int | None] = (None, None)
        case "channel", _, _:
            block = (1, None)
        case "group" | "tensor_group", int(size), _ if size > 0:
            block = (1, size)
        case "block", _, [int(rows), int(columns)] if rows > 0 and columns > 0:
            block = (rows, columns)
        case strategy, size, structure:
            return f"strategy {strategy!r}, group_size {size!r}, block_structure {structure!r}"
    # The values of other forms are computed in the dtype of the scales, and only those of bfloat16
    # and float32 are those that mckpt computes.
    dtypes: tuple[str, ...] = "bfloat16", "float32"
    codes, whole, overall = "", "", ALONE
    match form, weights.get("type"), weights.get("num_bits"):
        case "pack-quantized", "int", 4:
            encoding, codes = INT4, "_packed"
        case "pack-quantized", "int", 8:
            encoding, codes = PACKED_INT8, "_packed"
        case "mxfp8-quantized", "float", 8:
            encoding, dtypes = E4M3, E8M0
        case "mxfp4-pack-quantized", "float", 4:
            encoding, codes, dtypes = MXFP4, "_packed", E8M0
        case "nvfp4-pack-quantized", "float", 4:
            encoding, codes, dtypes = NVFP4, "_packed", NV_SCALES
            whole, overall = "_global_scale", OVER
        case (("int-quantized" | "naive-quantized"), "int", 8):
            encoding = INT8
        case (("float-quantized" | "naive-quantized"), "float", 8):
            encoding = E4M3
        case _, kind, bits:
            return f"format {form!r}, type {kind!r}, num_bits {bits!r}"
    named = tuple(targets)
    return Scheme(encoding, codes, "_scale", block, dtypes, False, named, whole, overall)
