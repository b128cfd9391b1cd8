"""Plans a Megatron checkpoint: vocabulary, sizes, args, common state, launch line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import (
    CONFIG,
    DIALECT,
    Checkpoint,
    Known,
    VocabSizeUnknown,
    family_of,
)
from mckpt.containers import safe_pickle
from mckpt.conversion.facts import (
    dequantised,
    facts_of,
    kept_mapping,
    kinds_of,
    naming,
    refuse_inexact,
    refuse_misfit,
    true_vocab,
)
from mckpt.conversion.plan import Plan
from mckpt.conversion.publishing import Destination, Side
from mckpt.conversion.target import Target
from mckpt.errors import DestinationError, MappingError, UsageError
from mckpt.formats import hf
from mckpt.formats.megatron import megatron_args, torch, torch_dist
from mckpt.formats.megatron.save_directory import MAPPING, new_common
from mckpt.geometry.join import join
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import GIVEN, Dims
from mckpt.storage.files import TargetFile

# args; see mcore.yaml
FOLLOWS_IMPL = (
    "no_persist_layer_norm",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "sequence_parallel",
)


def plan_megatron(source: Checkpoint, destination: Destination, target: Target) -> Plan:
    dialect = mapping.load("megatron", DIALECT)
    parallel = target.parallel
    # what is moved: from Megatron to Megatron, the vocabulary's padding too
    moved, padded = _vocabulary(source, target)
    # what is damaged is said before what does not fit, and before dims of any size are computed
    # with
    _ = moved.layout
    dims = moved.dims
    check_sizes(dims, parallel)
    megatron = dialect.version(target.megatron_version)
    chosen = {**_choices(moved, target), **dialect.choices_for(megatron)}
    program = {"megatron": megatron, "transformer_impl": chosen["transformer_impl"]}
    if refused := dialect.warnings({**dims, **program}, loads=False):
        raise MappingError.of(
            f"{source.path}: Megatron could not load what would be written:", list(refused.values())
        )
    inexact = source.allowed
    if isinstance(source.stored, hf.Checkpoint):
        inexact = dialect.inexact(dims, {**GIVEN, **program})
        inexact.update(
            {
                k: (
                    f"config.json says {k} {mapping.lookup(source.stored.config, k)!r}, of which"
                    f" {source.mapping.path.name} knows nothing"
                )
                for k in source.mapping.unknown(source.stored.config)
                if k != hf.QUANTISED or source.stored.block is None
            }
        )
        inexact = refuse_inexact(inexact, target, "Megatron")
    left = source.left_behind()
    if left and not target.no_optimizer:
        raise UsageError(
            f"{source.path}: holds more than weights: {', '.join(left)}. Weights alone are moved;"
            " say --no-optimizer to leave the rest behind"
        )
    kinds, dtype = kinds_of(moved, target)
    given = {
        **GIVEN,
        "dtype": dtype,
        "padded_vocab_size": padded,
        "divisible_by": target.divisible_by,
        "tp": parallel.tp,
        **chosen,
    }
    written = {
        **dialect.write({**dims, "vocab_size": true_vocab(source)}, given),
        **parallel.args(),
    }
    own = source.args or {}
    # a dense model's args say nothing of its layers: they are alike
    said = dialect.say_choices({**written, **own})
    fields = source.stored.common.fields if source.stored.common else {}
    # where Megatron-Core looks first (transformer_block.py)
    if (fields.get("content_metadata") or {}).get("non_homogeneous_layers"):
        said["layers"] = "per_layer"
    implied = (
        moved.chosen["layers"] if source.format == target.format else said.get("layers", "stacked")
    )
    chosen["layers"] = target.layer_keys or implied
    iteration = (
        0 if destination.unit == "release" else int(str(destination.unit).removeprefix("iter_"))
    )
    if source.args is None or source.stored.common is None:
        common = new_common(_python(written), iteration)
    else:
        kept = {
            k: written[k]
            for k in (*parallel.args(), "padded_vocab_size", "transformer_impl", "moe_grouped_gemm")
        }
        kept.update(
            {k: written[k] for k in ("params_dtype", "bf16", "fp16")}
            if target.dtype is not None
            else {}
        )
        kept.update({"no_save_optim": True, "no_save_rng": True} if left else {})
        if written["transformer_impl"] != own.get("transformer_impl", written["transformer_impl"]):
            kept.update({k: written[k] for k in FOLLOWS_IMPL})
        # which experts need at tp > 1; the source run may have had tp 1
        elif written["sequence_parallel"]:
            kept["sequence_parallel"] = True
        common = {
            k: v
            for k, v in source.stored.common.changed(_python(kept)).items()
            if not (k in dialect.ignore or k in left)
        }
        common["iteration"] = iteration
        written = {**written, **{k: v for k, v in own.items() if v is not None}, **kept}
    if target.layer_keys is not None and target.format == "torch_dist":
        if (
            target.layer_keys == "stacked"
            and dialect.say_choices({**written, **own}).get("layers") == "per_layer"
        ):
            raise UsageError(
                "the layers differ, or moe_layer_freq is a list: Megatron asks for per-layer keys"
                " then"
            )
        marked = {
            **common.get("content_metadata", {}),
            "non_homogeneous_layers": target.layer_keys == "per_layer",
        }
        common["content_metadata"] = marked
    line = megatron_args.launch(dialect, written)
    refuse_misfit(moved, source.mapping.path.name, dialect, "Megatron", dims, **chosen)
    if target.format == "torch":
        layout, outputs = torch.lay_out(dialect, dims, kinds, parallel, chosen, padded, common)
    else:
        layout, outputs = torch_dist.lay_out(
            dialect, dims, kinds, parallel, chosen, padded, common, target.common_as_object
        )
    outputs += [
        TargetFile.whole(name, text.encode()) for name, text in megatron_args.files(line).items()
    ]
    side = side_of(source)
    destination.refuse_other_side(side)
    if not side and (destination.root / "hf" / CONFIG).is_file():
        _refuse_side_of_other(source, destination.root / "hf")
    facts = facts_of(
        source,
        moved,
        target,
        dialect,
        inexact,
        dequantised(moved),
        parallel=parallel.args(),
        choices=chosen,
        padded_vocab_size=padded,
        unit=destination.unit,
        common=hashlib.sha256(safe_pickle.dumps(common)).hexdigest(),
        common_as_object=target.common_as_object,
        args=line.flags,
        megatron_version=".".join(map(str, megatron)),
        **naming(source, side),
    )
    return Plan(
        moved, destination, target, join(moved.layout, layout), layout, outputs, side, [], facts
    )


def _vocabulary(source: Checkpoint, target: Target) -> tuple[Checkpoint, int]:
    """What is moved, and the rows of the padded vocabulary that it gets.

    A Megatron checkpoint keeps its padding, values included, where it divides by the target's tp:
    the softmax sees those rows. Else, and from Hugging Face, the true vocabulary is padded anew, as
    Megatron computes it (vocab_utils.py).
    """
    if source.format != "hf":
        whole = source.padded()
        if whole is not None and whole.dims["vocab_size"] % target.parallel.tp == 0:
            return whole, whole.dims["vocab_size"]
        try:
            _ = source.dims
        except VocabSizeUnknown:
            rows = whole.dims["vocab_size"] if whole else 0
            raise UsageError(
                f"{source.path}: {rows} padded rows of the vocabulary do not divide by tp"
                f" {target.parallel.tp}; say --vocab-size N"
            ) from None
    return source, padded_rows(source.dims, target)


def padded_rows(dims: Dims, target: Target) -> int:
    multiple = target.divisible_by * target.parallel.tp
    return -(-int(dims["vocab_size"]) // multiple) * multiple


def check_sizes(dims: Dims, parallel: Parallel) -> None:
    """UsageError if Megatron could not launch the model at these sizes."""
    parallel.check(dims["num_experts"])
    parallel.stages(dims["num_layers"], dims["mtp_layers"])
    heads, groups = dims["num_heads"], dims["num_query_groups"]
    fit = [
        n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)
    ]
    cure = f"choose a tp of {', '.join(map(str, fit))}"
    if heads % parallel.tp:
        raise UsageError(f"{heads} attention heads do not divide by tp {parallel.tp}; {cure}")
    if groups % parallel.tp and parallel.tp % groups:
        raise UsageError(
            f"{groups} query groups (k and v heads) neither divide by tp {parallel.tp} nor divide"
            f" it; {cure}"
        )


def _choices(source: Checkpoint, target: Target) -> dict[str, Any]:
    """The dialect's choices for the target: what is asked for, else what the source does, else
    Megatron's defaults.
    """
    impl = target.transformer_impl or source.chosen.get("transformer_impl") or "transformer_engine"
    if target.grouped_experts is not None:
        grouped = target.grouped_experts
        if grouped and impl == "local":
            raise UsageError(
                "grouped experts need --transformer-impl transformer_engine: the local spec names"
                " no tensors for them"
            )
    elif target.transformer_impl is None and source.chosen:
        grouped = source.chosen["experts"] == "grouped"
    else:
        grouped = impl == "transformer_engine"
    return {
        "container": target.format,
        "transformer_impl": impl,
        "experts": "grouped" if grouped else "sequential",
        "pp": target.parallel.pp,
    }


def _refuse_side_of_other(source: Checkpoint, side: Path) -> None:
    """DestinationError if a DST/hf that is there describes another model: it would be read as this
    one's.
    """
    config = hf.read_config(side)
    try:
        dims = source.dims
    except VocabSizeUnknown:
        return
    try:
        named = Known(mapping=str(side / MAPPING)) if (side / MAPPING).is_file() else source.naming
        family_of(config, named, str(side / CONFIG)).read(config, dims, str(side / CONFIG))
    except MappingError as e:
        raise DestinationError(
            f"{side}: describes another model; all checkpoints of one save directory share its"
            f" hf. {e}"
        ) from None


def _python(args: dict[str, Any]) -> dict[str, Any]:
    """Args with dtypes as torch's own objects, the way Megatron keeps them."""
    return {
        k: (
            safe_pickle.torch_dtype(v.removeprefix("torch."))
            if isinstance(v, str) and v.startswith("torch.")
            else v
        )
        for k, v in args.items()
    }


def side_of(source: Checkpoint) -> Side:
    """The Hugging Face files beside the weights, to be kept in DST/hf; config.json as the user's
    word corrects it, and the user's family file.
    """
    root = source.path if source.format == "hf" else source.side_directory
    if root is None:
        return []
    side: dict[str, Path | bytes] = {name: root / name for name in [CONFIG, *hf.side_files(root)]}
    if source.overruled:
        config = source.mapping.restate(hf.read_config(root), source.dims, source.overruled)
        side[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    if (kept := kept_mapping(source)) is not None:
        side[MAPPING] = kept[1]
    return list(side.items())
