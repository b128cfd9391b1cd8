"""What docs/surgery.md says that each edit makes of a model, in numpy, apart from mckpt's editing.

A model is its logical tensors and the states of its optimizer, NAME@master, NAME@exp_avg and
NAME@exp_avg_sq. A state of a copied weight is copied with it, unless a function says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.formats.test_hybrid_edit import fresh, old_layers
from tests.formats.test_upcycle import drawn

Tensors = dict[str, np.ndarray]
Kept = Mapping[int, list[int]]  # layer -> indices
LAYER = re.compile(r"layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"moe\.experts\.(\d+)\.(.*)")
# what a layer adds to the residual stream
OUTPUT = r"(attn\.o|linear\.out|mamba\.out|mlp\.down|moe\.experts\.\d+\.down|moe\.shared\.down)"
READS = (  # the residual stream, with the columns of a matrix
    r"(attn\.(q|k|v|gate|q_down|kv_down)|linear\.(q|k|v|z|alpha|beta)|mamba\.(z|x|b|c|dt)|mlp\.(gate|up)"
    r"|moe\.(router|shared\.router|shared\.(gate|up)|experts\.\d+\.(gate|up)))\.weight"
)
NORM = r"(attn_norm|mlp_norm|mtp\.\w*norm)\.weight"


def split(name: str) -> tuple[int, str, str]:
    """Returns layer, rest and state of a name: layers.3.attn.q.weight@master is 3, attn.q.weight
    and master. The layer of a tensor outside of layers is -1.
    """
    weight, _, state = name.partition("@")
    found = LAYER.fullmatch(weight)
    return (int(found[1]), found[2], state) if found else (-1, weight, state)


def joined(layer: int, rest: str, state: str) -> str:
    return f"layers.{layer}." * (layer >= 0) + rest + f"@{state}" * bool(state)


def is_moment(state: str) -> bool:
    return state.startswith("exp_")


def made(values: np.ndarray, like: np.ndarray, state: str) -> np.ndarray:
    """Returns a new tensor, or its state: moments are zero, and masters are the float32 values."""
    wide = np.asarray(values, "f4")
    return np.zeros_like(wide, like.dtype) if is_moment(state) else wide.astype(like.dtype)


def layers(t: Tensors, order: Sequence[int], count: int, silent: Sequence[int] = ()) -> Tensors:
    """Returns the layers of an order; silent: the new numbers of those whose outputs are zero, and
    whose moments are.
    """
    out: Tensors = {}
    for name, tensor in t.items():
        layer, rest, state = split(name)
        if layer < 0 or layer >= count:  # those behind are of multi-token prediction
            out[joined(layer - count + len(order) if layer >= 0 else -1, rest, state)] = tensor
        for new in (n for n, old in enumerate(order) if old == layer):
            zero = new in silent and (is_moment(state) or re.match(OUTPUT, rest))
            out[joined(new, rest, state)] = np.zeros_like(tensor) if zero else tensor
    return out


def untied(t: Tensors) -> Tensors:
    return t | {n.replace("embed.", "lm_head."): v for n, v in t.items() if n.startswith("embed.")}


def without_head(t: Tensors) -> Tensors:
    return {n: v for n, v in t.items() if not n.startswith("lm_head.")}


def repeated_heads(t: Tensors, times: int, width: int) -> Tensors:
    out = dict(t)
    for name, tensor in t.items():
        if re.fullmatch(r"attn\.[kv]\.weight", split(name)[1]):
            heads = [tensor[at : at + width] for at in range(0, len(tensor), width)]
            out[name] = np.concatenate([head for head in heads for _ in range(times)])
    return out


def mean_heads(t: Tensors, num: int, width: int) -> Tensors:
    """Returns means of `num` heads, those of weights from their master copies. The products with a
    power of 2 are exact, so each sum has the one rounding of a fused multiply-add.
    """
    out = dict(t)
    for name, tensor in t.items():
        _, rest, state = split(name)
        if not re.fullmatch(r"attn\.[kv]\.weight", rest):
            continue
        wide = t[name if state or f"{name}@master" not in t else f"{name}@master"].astype("f4")
        heads, means = [wide[at : at + width] for at in range(0, len(wide), width)], []
        for first in range(0, len(heads), num):
            total = np.zeros_like(heads[0])
            for head in heads[first : first + num]:
                total = np.float32(1 / num) * head + total
            means.append(total)
        out[name] = np.concatenate(means).astype(tensor.dtype)
    return out


def rows(t: Tensors, numbers: Sequence[int | None], new: Callable[..., np.ndarray]) -> Tensors:
    """Returns the rows of the vocabulary with these old numbers; new: makes one that has none of
    the old rows in float64.
    """
    out = dict(t)
    for name, tensor in t.items():
        if not name.startswith(("embed.", "lm_head.")):
            continue
        weight, _, state = name.partition("@")
        row = made(new(t[weight].astype("f8")), tensor, state)
        out[name] = np.stack([row if n is None else tensor[n] for n in numbers])
    return out


def experts(t: Tensors, kept: Kept) -> Tensors:
    out: Tensors = {}
    for name, tensor in t.items():
        layer, rest, state = split(name)
        found = EXPERT.fullmatch(rest)
        if found and int(found[1]) in kept[layer]:
            new = kept[layer].index(int(found[1]))
            out[joined(layer, f"moe.experts.{new}.{found[2]}", state)] = tensor
        elif not found:
            router = re.match(r"moe\.router\.", rest)
            out[name] = tensor[kept[layer]] if router else tensor
    return out


def units(t: Tensors, kept: Kept, part: str = r"mlp\.") -> Tensors:
    """part: a pattern of the names before gate, up and down."""
    out = dict(t)
    for name, tensor in t.items():
        layer, rest, _ = split(name)
        if re.fullmatch(rf"{part}(gate|up)\.weight", rest):
            out[name] = tensor[kept[layer]]
        elif re.fullmatch(rf"{part}down\.weight", rest):
            out[name] = tensor[:, kept[layer]]
    return out


def units_of_experts(t: Tensors, kept: Kept) -> Tensors:
    return units(t, kept, r"moe\.experts\.\d+\.")


def heads(t: Tensors, kept: Kept, groups: int) -> Tensors:
    """groups: the heads of keys and values before, each of which has as many queries."""
    out = dict(t)
    for name, tensor in t.items():
        layer, rest, _ = split(name)
        if re.fullmatch(r"attn\.(q|k|v|gate|q_up|kv_up)\.weight", rest):
            parts = np.split(tensor, groups)
            out[name] = np.concatenate([parts[n] for n in kept[layer]])
        elif rest == "attn.o.weight":
            parts = np.split(tensor, groups, axis=1)
            out[name] = np.concatenate([parts[n] for n in kept[layer]], axis=1)
    return out


def hidden(t: Tensors, kept: list[int], width: int) -> Tensors:
    out = dict(t)
    for name, tensor in t.items():
        _, rest, _ = split(name)
        if re.fullmatch(r"(embed|lm_head)\.weight", rest) or re.fullmatch(READS, rest):
            out[name] = tensor[:, kept]
        elif re.match(OUTPUT, rest) or re.fullmatch(NORM, rest) or rest == "final_norm.weight":
            out[name] = tensor[kept]
        elif rest == "mtp.proj.weight":  # reads [embedding, hidden state]
            out[name] = tensor[kept][:, [*kept, *(width + n for n in kept)]]
    return out


def more_mtp(t: Tensors, count: int, at: int, zero_centred: bool) -> Tensors:
    """at: the number of the new layer. zero_centred: norms are stored less 1."""
    out, end = dict(t), t["final_norm.weight"]
    width = len(end)
    one = np.zeros(width) if zero_centred else np.ones(width)
    values = {"mtp.embed_norm.weight": one, "mtp.hidden_norm.weight": one}
    values["mtp.proj.weight"] = np.concatenate([np.zeros((width, width)), np.eye(width)], 1)
    for name, tensor in t.items():
        layer, rest, state = split(name)
        if layer == count - 1:
            out[joined(at, rest, state)] = tensor
        elif rest == "final_norm.weight":
            out[joined(at, "mtp.norm.weight", state)] = tensor
            out |= {joined(at, n, state): made(v, tensor, state) for n, v in values.items()}
    return out


def upcycled(t: Tensors, copies: int, parts: int) -> Tensors:
    """Returns the mlps as `copies` of experts, each cut into `parts`; down is multiplied by them,
    its first moment is divided by them, and its second one by their square.
    """
    out: Tensors = {}
    times = {"": parts, "master": parts, "exp_avg": 1 / parts, "exp_avg_sq": 1 / parts**2}
    for name, tensor in t.items():
        layer, rest, state = split(name)
        found = re.fullmatch(r"mlp\.(gate|up|down)\.weight", rest)
        if not found:
            out[name] = tensor
            continue
        shards = np.split(tensor, parts, axis=int(found[1] == "down"))
        for number in range(copies * parts):
            part = shards[number % parts]
            if found[1] == "down":
                part = (part.astype("f4") * np.float32(times[state])).astype(tensor.dtype)
            out[joined(layer, f"moe.experts.{number}.{found[1]}.weight", state)] = part
        if found[1] == "down":
            router = np.repeat(drawn(layer, copies, len(tensor)), parts, axis=0)
            out[joined(layer, "moe.router.weight", state)] = made(router, tensor, state)
    return out


def hybrid(t: Tensors, pattern: str, count: int, mamba: Tensors) -> Tensors:
    """mamba: the new tensors in float32."""
    old, out = old_layers(pattern), dict[str, np.ndarray]()
    end = 1 + max(layer for layer, _ in old)
    for name, tensor in t.items():
        layer, rest, state = split(name)
        kind = "mlp" if re.match("mlp|moe", rest) else "*"
        if layer < 0 or layer >= count:
            out[joined(layer - count + end if layer >= 0 else -1, rest, state)] = tensor
        for new in (n for (n, of), at in old.items() if of == kind and at == layer):
            out[joined(new, rest, state)] = tensor
        if rest == "final_norm.weight":
            out |= {joined(*split(n)[:2], state): made(v, tensor, state) for n, v in mamba.items()}
    return out


def grafted(
    t: Tensors, other: Tensors, wanted: Callable[[int, str], bool], renamed: Mapping[str, str]
) -> Tensors:
    """Returns the tensors with the wanted ones of another model. Without states there, the moments
    of these are zero and their masters are the weights.

    renamed: names of tensors of the other model -> those that they get.
    """
    out = dict(t)
    states = {split(name)[2] for name in t} if any("@" in name for name in t) else {""}
    known = {split(name)[2] for name in other}
    for name, tensor in other.items():
        layer, rest, state = split(name)
        rest = renamed.get(rest, rest)
        if not wanted(layer, rest) or state not in states:
            continue
        out[joined(layer, rest, state)] = tensor
        trained = f"{joined(layer, rest, '')}@master" in t or joined(layer, rest, "") not in t
        for kind in states - known if not state and trained else ():
            out[joined(layer, rest, kind)] = made(tensor, np.zeros(0, "f4"), kind)
    return out


def mamba(pattern: str, seed: int, dims: Mapping[str, int]) -> Tensors:
    """Returns the new layers of Mamba-2, with heads of 8, 2 groups and states of 12."""
    hidden, inner, state = dims["hidden_size"], 2 * dims["hidden_size"], 2 * 12
    widths = {"x": inner, "z": inner, "b": state, "c": state, "dt": inner // 8}
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"mamba.{name}.weight": (width, hidden) for name, width in widths.items()}
    shapes |= {f"mamba.{name}_conv.weight": (widths[name], 1, 4) for name in "xbc"}
    vectors = {f"mamba.{name}_conv.bias": widths[name] for name in "xbc"}
    vectors |= {f"mamba.{name}": inner // 8 for name in ("a_log", "d", "dt_bias")}
    vectors |= {"mamba.norm.weight": inner, "attn_norm.weight": hidden}
    shapes |= {"mamba.out.weight": (hidden, inner), **{n: (size,) for n, size in vectors.items()}}
    new = [layer for layer, kind in old_layers(pattern) if kind == "M"]
    names = {joined(layer, rest, ""): shape for layer in new for rest, shape in shapes.items()}
    return {name: fresh(seed, name, shape, dict(dims)) for name, shape in names.items()}


def dims_of_hybrid(dims: Mapping[str, Any], pattern: str, others: Sequence[str]) -> dict[str, Any]:
    """Returns the dims that change. others: names of lists that are not by layer."""
    old, count = old_layers(pattern), dims["num_layers"]
    every = range(1 + max(layer for layer, _ in old))
    # a layer without an attention has the settings of the one before it
    near = [max((old.get((at, "*"), 0) for at in range(n + 1)), default=0) for n in every]
    lists = {n: v for n, v in dims.items() if isinstance(v, list) and n not in others}
    out: dict[str, Any] = {n: [v[at] for at in near] + v[count:] for n, v in lists.items()}
    mlps = [
        dims["layer_parts"][old[n, "mlp"]].split()[1] if (n, "mlp") in old else "" for n in every
    ]
    for n in every:
        mixer = "mamba" if (n, "M") in old else "attn" if (n, "*") in old else ""
        out["layer_parts"][n] = f"{mixer} {mlps[n]}".strip()
        out["moe_layers"][n] = int(mlps[n] == "moe")
        out["linear_layers"][n] *= int((n, "*") in old)
        at = old.get((n, "mlp"))
        out["ffn_sizes"][n] = dims["ffn_size"] if at is None else dims["ffn_sizes"][at]
    sizes = {"mamba_heads": dims["hidden_size"] // 4, "mamba_head_dim": 8, "mamba_groups": 2}
    return {**out, **sizes, "num_layers": len(every), "mamba_state_size": 12, "mamba_conv_size": 4}
