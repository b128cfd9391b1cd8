"""The parameters of MaxText, made of the tensors of a Hugging Face directory, and Orbax itself.

`tree` follows src/maxtext/checkpoint_conversion/utils/param_mapping.py of MaxText, and knows
nothing of mckpt. As a program it runs under another Python, which has orbax-checkpoint and jax:

    python maxtext.py save NPZ DIR [ocdbt] [zarr3] [state] [trained]    writes these arrays
    python maxtext.py restore DIR NPZ                                   reads them

    python -m tests.helpers.maxtext train RELEASE STEP    makes a training of weights by mckpt
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PYTHON = os.environ.get("ORBAX_PYTHON", "")  # of an environment with orbax-checkpoint 0.12
Arrays = dict[str, np.ndarray]
STEPS = 3
ADAM = {
    **{"adam_b1": 0.9, "adam_b2": 0.95, "adam_eps": 1e-8, "adam_eps_root": 0.0},
    **{"adam_weight_decay": 0.1, "learning_rate": 1e-3},
}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
PREFIX, COUNT = "params.params.", "opt_state.0.count"

EXPERTS = {
    "Qwen3MoeForCausalLM": ("moe_block", "mlp", ("gate_proj", "up_proj", "down_proj")),
    "MixtralForCausalLM": ("MoeBlock_0", "block_sparse_moe", ("w1", "w3", "w2")),
    "DeepseekV3ForCausalLM": (
        *("DeepSeekMoeBlock_0.MoeBlock_0", "mlp"),
        ("gate_proj", "up_proj", "down_proj"),
    ),
}
SCALED = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
ATTENTION = {
    "query.kernel": "q_proj.weight",
    "key.kernel": "k_proj.weight",
    "value.kernel": "v_proj.weight",
    "out.kernel": "o_proj.weight",
    "query.bias": "q_proj.bias",
    "key.bias": "k_proj.bias",
    "value.bias": "v_proj.bias",
    "query_norm.scale": "q_norm.weight",
    "key_norm.scale": "k_norm.weight",
    "wq_a.kernel": "q_a_proj.weight",
    "wq_b.kernel": "q_b_proj.weight",
    "wkv_a.kernel": "kv_a_proj_with_mqa.weight",
    "wkv_b.kernel": "kv_b_proj.weight",
    "q_norm.scale": "q_a_layernorm.weight",
    "kv_norm.scale": "kv_a_layernorm.weight",
}


def tree(config: Mapping[str, Any], hf: Mapping[str, np.ndarray], scan: bool = True) -> Arrays:
    """Returns the arrays of MaxText by their path."""
    if gemma := GEMMA.get(config["architectures"][0]):
        text = {
            re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", k): hf[k]
            for k in hf
        }
        return gemma(config.get("text_config", config), text, scan)
    layers, first = config["num_hidden_layers"], config.get("first_k_dense_replace")
    out = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
    }
    if not config.get("tie_word_embeddings"):
        out["decoder.logits_dense.kernel"] = hf["lm_head.weight"].T
    names = dict.fromkeys(range(layers), "layers")
    if first is not None:
        names = {n: "dense_layers" if n < first else "moe_layers" for n in range(layers)}
    each = {n: layer(config, hf, n) for n in range(layers)}
    for kind in set(names.values()):
        out |= stacked(kind, [each[n] for n in range(layers) if names[n] == kind], scan)
    return {PREFIX + key: np.ascontiguousarray(array) for key, array in out.items()}


def layer(config: Mapping[str, Any], hf: Mapping[str, np.ndarray], number: int) -> Arrays:
    """Returns the arrays of one layer."""
    model, at = config["architectures"][0], f"model.layers.{number}."
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    groups = config.get("num_key_value_heads", heads)
    out = {
        "pre_self_attention_layer_norm.scale": hf[f"{at}input_layernorm.weight"],
        "post_self_attention_layer_norm.scale": hf[f"{at}post_attention_layernorm.weight"],
    }
    counts = {"query": heads, "key": groups, "value": groups, "wq_b": heads, "wkv_b": heads}
    for name, stored in ATTENTION.items():
        if (found := hf.get(f"{at}self_attn.{stored}")) is None:
            continue
        module, kind = name.split(".")
        if kind == "kernel":
            found = found.T
        if module == "out":
            found = found.reshape(heads, -1, found.shape[-1])
        elif module in counts:
            found = found.reshape(*found.shape[:-1], counts[module], -1)
        if kind == "kernel" and module in ("query", "key") and turns_neighbours(config):
            halves = np.split(found, 2, axis=-1)
            found = np.stack(halves, axis=-1).reshape(found.shape)
        if name == "query.kernel" and model in SCALED:
            factor = np.float32(1 / np.sqrt(width))
            found = (found.astype(np.float32) * factor).astype(found.dtype)
        out[f"self_attention.{name}"] = found
    mlp = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    for prefix, module in (
        ("mlp", "mlp"),
        ("DeepSeekMoeBlock_0.shared_experts", "mlp.shared_experts"),
    ):
        for name, stored in mlp.items():
            if (found := hf.get(f"{at}{module}.{stored}.weight")) is not None:
                out[f"{prefix}.{name}.kernel"] = found.T
    if model in EXPERTS:
        prefix, module, parts = EXPERTS[model]
        if (found := hf.get(f"{at}{module}.gate.weight")) is not None:
            out[f"{prefix}.gate.kernel"] = found.T
            count = config.get("num_local_experts") or config.get("num_experts")
            count = count or config["n_routed_experts"]
            for name, part in zip(mlp, parts, strict=True):
                every = [hf[f"{at}{module}.experts.{e}.{part}.weight"].T for e in range(count)]
                out[f"{prefix}.{name}"] = np.stack(every)
        if (found := hf.get(f"{at}{module}.gate.e_score_correction_bias")) is not None:
            out[f"{prefix}.gate.bias"] = found
    return out


NORMS = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def times(array: np.ndarray, factor: float) -> np.ndarray:
    return (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)


def plus_one(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.float32) + np.float32(1)).astype(array.dtype)


def gemma2_tree(config: Mapping[str, Any], hf: Mapping[str, np.ndarray], scan: bool) -> Arrays:
    """Returns the arrays of Gemma 2, of which one layer has two of the model."""

    def norm(name: str) -> np.ndarray:
        return plus_one(hf[f"{name}.weight"])

    out = {
        "token_embedder.embedding": times(
            hf["model.embed_tokens.weight"], config["hidden_size"] ** 0.5
        ),
        "decoder.decoder_norm.scale": norm("model.norm"),
    }
    pairs: list[Arrays] = []
    for number in range(config["num_hidden_layers"]):
        kind, at = ("local", "global")[number % 2], f"model.layers.{number}"
        own = {f"{ours}_{kind}.scale": norm(f"{at}.{name}") for ours, name in NORMS.items()}
        for ours, name in (("query", "q"), ("key", "k"), ("value", "v")):
            array = hf[f"{at}.self_attn.{name}_proj.weight"].T
            array = array.reshape(array.shape[0], -1, config["head_dim"])
            factor = config["head_dim"] ** -0.5 if name == "q" else 1
            own[f"self_attention_{kind}.{ours}.kernel"] = times(array, factor)
        array = hf[f"{at}.self_attn.o_proj.weight"].T
        array = array.reshape(-1, config["head_dim"], array.shape[-1])
        own[f"self_attention_{kind}.out.kernel"] = array
        for ours, name in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            own[f"mlp_{kind}.{ours}.kernel"] = hf[f"{at}.mlp.{name}_proj.weight"].T
        pairs = [*pairs, own] if kind == "local" else [*pairs[:-1], pairs[-1] | own]
    out |= stacked("layers", pairs, scan)
    return {PREFIX + key: np.ascontiguousarray(array) for key, array in out.items()}


def gemma3_tree(config: Mapping[str, Any], hf: Mapping[str, np.ndarray], scan: bool) -> Arrays:
    """Returns the arrays of Gemma 3. A scanned layer has six of the model, each with its own keys.
    The layers that are left are not stacked.
    """
    # the factor is rounded before the product, and ml_dtypes rounds the product
    embedding = hf["model.embed_tokens.weight"]
    factor = embedding.dtype.type(ml_dtypes.bfloat16(config["hidden_size"] ** 0.5))
    out = {
        "token_embedder.embedding": embedding * factor,
        "decoder.decoder_norm.scale": plus_one(hf["model.norm.weight"]),
    }
    each = []
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        own = {f"{ours}.scale": plus_one(hf[f"{at}{name}.weight"]) for ours, name in NORMS.items()}
        for ours, name in (("query", "q"), ("key", "k"), ("value", "v")):
            array = hf[f"{at}self_attn.{name}_proj.weight"].T
            own[f"self_attention.{ours}.kernel"] = array.reshape(
                array.shape[0], -1, config["head_dim"]
            )
            if ours != "value":
                own[f"self_attention.{ours}_norm.scale"] = plus_one(
                    hf[f"{at}self_attn.{name}_norm.weight"]
                )
        array = hf[f"{at}self_attn.o_proj.weight"].T
        own["self_attention.out.kernel"] = array.reshape(-1, config["head_dim"], array.shape[-1])
        for ours, name in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            own[f"mlp.{ours}.kernel"] = hf[f"{at}mlp.{name}_proj.weight"].T
        each.append(own)
    scanned = len(each) // 6 * 6 if scan else 0
    for place in range(6):
        out |= stacked(f"layers.layers_{place}", each[place:scanned:6], True)
    out |= stacked("layers_remainder.layers" if scan else "layers", each[scanned:], False)
    return {PREFIX + key: np.ascontiguousarray(array) for key, array in out.items()}


GEMMA = {
    "Gemma2ForCausalLM": gemma2_tree,
    "Gemma3ForCausalLM": gemma3_tree,
    "Gemma3ForConditionalGeneration": gemma3_tree,
}


def stacked(kind: str, own: list[dict[str, Any]], scan: bool) -> dict[str, Any]:
    """Returns the arrays of layers, in one array for each name if they are scanned."""
    out = {}
    for key in own[0] if own else ():
        if scan:
            out[f"decoder.{kind}.{key}"] = np.stack([one[key] for one in own], axis=1)
        else:
            out |= {f"decoder.{kind}_{n}.{key}": one[key] for n, one in enumerate(own)}
    return out


def turns_neighbours(config: Mapping[str, Any]) -> bool:
    """Returns whether MaxText has rope_type llama3.1 for the model."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("rope_type") == "llama3"


# ------------------------------------------------------------------------ files, on both sides


def write(path: Path, arrays: Arrays) -> None:
    """Writes arrays; bfloat16, which numpy does not store, as the same bits."""
    content: dict[str, Any] = {f"{a.dtype}|{key}": _bits(a) for key, a in arrays.items()}
    np.savez(path, **content)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def read(path: Path) -> Arrays:
    out = {}
    with np.load(path) as file:
        for name in file.files:
            dtype, _, key = name.partition("|")
            array = file[name]
            out[key] = array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array
    return out


# ------------------------------------------------------------------------------- the tests' side


def by_orbax(*arguments: Any) -> None:
    """Runs this file under the Python of the environment with Orbax."""
    done = subprocess.run(
        [PYTHON, __file__, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def save(arrays: Arrays, folder: Path, *how: str) -> Path:
    """Lets Orbax write a checkpoint, in its directory `items`, and returns the directory above."""
    folder.mkdir(parents=True)
    write(folder / "arrays.npz", arrays)
    by_orbax("save", folder / "arrays.npz", folder / "0" / "items", *how)
    return folder / "0"


def train(weights: Path, step: Path) -> None:
    """Makes the checkpoint of a training of one that mckpt wrote. The moments are the weights."""
    items, metadata = step / "items", step / "items/_METADATA"
    shutil.copytree(weights, step, ignore=shutil.ignore_patterns("mckpt.json"))
    content = json.loads(metadata.read_text())
    tree = content["tree_metadata"]
    own = {
        ".".join(part["key"] for part in entry["key_metadata"]): entry for entry in tree.values()
    }
    copies = [(name, ("mu", *name.split(".")[1:])) for name in own]
    copies += [(name, ("nu", *inner)) for name, (_, *inner) in copies]
    count = {"shape": [], "data_type": "int32", "fill_value": 0, "codecs": [LITTLE]}
    count["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": []}}
    for name, inner in [*copies, ("", ("count",))]:
        parts = ["opt_state", "0", *inner]
        keys = {"key_metadata": [{"key": part, "key_type": 2} for part in parts]}
        tree[str(tuple(parts))] = own.get(name, {"value_metadata": {"write_shape": []}}) | keys
        if name:
            shutil.copytree(items / name, items / ".".join(parts))
    zarr = json.loads((items / next(iter(own)) / "zarr.json").read_text())
    (items / COUNT).mkdir()
    (items / COUNT / "zarr.json").write_text(json.dumps(zarr | count))
    (items / COUNT / "0").write_bytes((7).to_bytes(4, "little"))
    metadata.write_text(json.dumps(content))
    (step / "config.yml").write_text("".join(f"{k}: {v:.9f}\n" for k, v in ADAM.items()))


def restore(items: Path, scratch: Path) -> Arrays:
    """Lets Orbax read a checkpoint."""
    by_orbax("restore", items, scratch / "restored.npz")
    return read(scratch / "restored.npz")


# ------------------------------------------------------------------------------- Orbax's side


def gradient(weights: Any) -> Any:
    """Returns a gradient that is a formula of the weights."""
    return weights * 3 + weights.dtype.type(0.25)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        inner = out
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return out


def _flat(tree: Any, prefix: str = "") -> Arrays:
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    return {
        k: v
        for name, inner in tree.items()
        for k, v in _flat(inner, f"{prefix}.{name}" if prefix else name).items()
    }


def main(what: str, source: str, target: str, *how: str) -> None:
    if what == "train":
        train(Path(source), Path(target))
        return
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    if what == "restore":
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        handler = ocp.PyTreeCheckpointHandler()
        checkpointer = ocp.Checkpointer(handler)
        metadata = checkpointer.metadata(source).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=one), metadata)
        found = checkpointer.restore(source, args=ocp.args.PyTreeRestore(restore_args=args))
        write(Path(target), _flat(found))
        return
    arrays: dict[str, Any] = {key: jnp.asarray(a) for key, a in read(Path(source)).items()}
    content: Any = _nested(arrays)
    if "state" in how:  # of a new training, or after STEPS steps; next.npz is after another one
        import optax
        from flax.training.train_state import TrainState

        adam = optax.adamw(ADAM["learning_rate"], 0.9, 0.95, 1e-8, weight_decay=0.1)
        content = TrainState.create(apply_fn=None, params=content["params"], tx=adam)
        for _ in range(STEPS * ("trained" in how)):
            content = content.apply_gradients(grads=jax.tree.map(gradient, content.params))
        last = content.apply_gradients(grads=jax.tree.map(gradient, content.params))
        write(Path(source).with_name("next.npz"), _flat({"params": last.params}))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt="ocdbt" in how, use_zarr3="zarr3" in how)
    ocp.Checkpointer(handler).save(target, args=ocp.args.PyTreeSave(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
