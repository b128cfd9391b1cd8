"""The edit of a dense model: it becomes a mixture of experts, each of which is a part of its mlp.

Of N = experts * granularity experts, number j has shard j mod granularity of the mlp: the same rows
of gate and up, and the same columns of down. The router has a row for each of the `experts`, each
`granularity` times in a row. So the shards of one mlp have one score and are chosen together
(virtual groups, https://arxiv.org/abs/2410.07524):

    3 experts, granularity 2      expert    0  1  2  3  4  5
                                  shard     0  1  0  1  0  1
                                  row       a  a  b  b  c  c

The chosen experts have weights whose sum is 1, so the sum of their outputs is that of the mlp
divided by the granularity. The form `exact` multiplies down by it. The form `megatron` is that of
megatron/core/transformer/moe/upcycling_utils.py, which multiplies gate and up too.

No class of transformers has experts with squared ReLUs beside the attention of Nemotron-4 and
Minitron: the result is a checkpoint of Megatron alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import EXACT, FORMULA, Edit
from mckpt.editing.pieces import (
    again,
    file_of,
    is_moment,
    kinds_of,
    new_values,
    number_of,
    rows,
    under,
    with_new_states,
)
from mckpt.errors import UsageError, counted
from mckpt.formats import carried
from mckpt.formats.megatron.optimizer import MASTER
from mckpt.formats.scaling import scaled
from mckpt.geometry.box import NEW, ZEROS, Box, Layout, Piece, Stored, whole_box
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, MappingFile
from mckpt.mapping.choosing import families_for

MLP = re.compile(r"layers\.\{layer\}\.mlp\.(gate|up|down)\.weight(?:@(.*))?")
MLP_OF, SHARED = "layers.{{layer}}.mlp.{}.weight", "layers.{{layer}}.moe.shared.{}.weight"
DOWN, ROUTER = MLP_OF.format("down"), "layers.{layer}.moe.router.weight"
# of a weight that is multiplied by s, a state is multiplied by s to this power, because the
# gradient of the loss is divided by s
POWERS = {"": 1, MASTER: 1, "exp_avg": -1, "exp_avg_sq": -2, "momentum_buffer": -1}
SQUARED = "squared_relu"
PLAIN = ("float32", "bfloat16", "float16")  # dtypes that are multiplied in float32


@dataclass(frozen=True)
class Upcycle(Edit):
    """Makes a mixture of experts of each mlp.

    experts: copies of the mlp, each of which is cut into `granularity` experts. topk: the experts
        that are chosen for a token. router: "normal", rows with this standard deviation, or "zero".
    shared: an expert that every token takes, a copy of the mlp whose output is zero. Its moments
        and those of the router are zero.
    """

    experts: int
    topk: int
    granularity: int = 1
    router: str = "normal"
    seed: int = 1234
    std: float = 0.02
    form: str = "exact"
    shared: bool = False

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Upcycle:
        names = [field.name for field in fields(Upcycle)]
        if unknown := given.keys() - names:
            raise ValueError(f"{min(unknown)} is not one of {', '.join(names)}")
        edit = Upcycle(**{"experts": given["experts"], "topk": given["topk"], **given})
        for name in ("experts", "topk", "granularity", "seed"):
            value = getattr(edit, name)
            if type(value) is not int or value < (name != "seed"):
                raise ValueError(f"{name} is a whole number, not {value!r}")
        if edit.router not in ("normal", "zero") or edit.form not in ("exact", "megatron"):
            raise ValueError("router is normal or zero, and form is exact or megatron")
        if type(edit.std) not in (int, float) or edit.std < 0 or type(edit.shared) is not bool:
            raise ValueError("std is a number, and shared is true or false")
        edit._refuse(dims)
        edit._refuse_without_family(dims)
        return edit

    @property
    def contract(self) -> str:
        return EXACT if self.form == "exact" or self.granularity == 1 else FORMULA

    @property
    def last(self) -> bool:
        return self.granularity > 1

    @property
    def words(self) -> str:
        parts = self.granularity
        cut = f", each cut into {parts}" * (parts > 1)
        rows = f"normal, std {self.std:g}, seed {self.seed}" if self.router == "normal" else "zero"
        formula = f"; gate, up and down are multiplied by {self._factor('gate'):g}, as Megatron"
        return (
            f"each mlp becomes {counted(self.experts, 'expert')}{cut}; a token takes {self.topk}"
            f"; the rows of the router are {rows}"
            + f"; down is multiplied by {parts}" * (parts > 1 and self.form == "exact")
            + f"{formula} does, which keeps no model with silu or gelu" * (self.contract == FORMULA)
        )

    def unfit(self, source: Checkpoint) -> str:
        if carried.of(source.layout) or source.mapping.whole:
            return f"upcycle: {source.path} has towers beside its text model"
        return ""

    def dims(self, dims: Dims) -> Dims:
        count, width = dims["num_layers"], dims["ffn_size"] // self.granularity
        shared = {"shared_ffn_size": dims["ffn_size"], "shared_gate": True} if self.shared else {}
        return {
            **dims,
            "num_experts": self.experts * self.granularity,
            "experts_per_token": self.topk,
            "expert_ffn_size": width,
            "ffn_size": width,  # no layer is dense, so families take that of an expert
            "ffn_sizes": [width] * count,
            "moe_layers": [1] * count,
            "layer_parts": ["attn moe"] * count,
            "normalize_topk": True,
            "router_score": "softmax",
            **shared,
        }

    def family(self, family: MappingFile | None, dims: Dims) -> MappingFile | None:
        return next(iter(_families(dims)), None)

    def _refuse(self, dims: Dims) -> None:
        """Raises UsageError for a model that is not a dense decoder, and for other numbers."""
        parts, num = self.granularity, self.experts * self.granularity
        for name, why in (
            ("num_experts", "is a mixture of experts already; give a dense one"),
            ("encoder_layers", "has an encoder, whose layers no edit changes"),
            ("mlp_bias", "has biases in its mlp, which this edit does not know"),
            ("mtp_layers", "has layers of multi-token prediction; --no-mtp leaves them out"),
        ):
            if dims[name]:
                raise UsageError(f"upcycle: the model {why} ({name} {dims[name]})")
        if {*dims["layer_parts"]} != {"attn mlp"} or {*dims["ffn_sizes"]} != {dims["ffn_size"]}:
            raise UsageError("upcycle: not every layer has an attention and an mlp of one width")
        if dims["ffn_size"] % parts:
            fit = [str(n) for n in range(1, 65) if dims["ffn_size"] % n == 0]
            raise UsageError(
                f"upcycle: the mlp's width {dims['ffn_size']} is not divisible by granularity"
                f" {parts}; choose one of {', '.join(fit)}"
            )
        if self.topk > num:
            raise UsageError(f"upcycle: topk {self.topk} of {num} experts; choose at most {num}")
        if self.form == "exact" and self.topk % parts:
            near = max(parts, self.topk // parts * parts)
            raise UsageError(
                f"upcycle: topk {self.topk} is not a multiple of granularity {parts}, so a token"
                f" would get a part of an mlp; give topk {near}, or form: megatron"
            )
        if self.form == "exact" and self.router == "zero" and parts > 1:
            raise UsageError(
                "upcycle: with router: zero all experts have one score, so those that are chosen"
                " need not be the parts of one mlp; give router: normal, or granularity 1"
            )

    def _refuse_without_family(self, dims: Dims) -> None:
        """Raises UsageError unless a family with experts can express the edited model."""
        if _families(after := self.dims(dims)) or dims["activation"] == SQUARED:
            return
        near = [
            f"; {'; '.join(why.values())}"
            for _, why in families_for(after).others
            if not {"config", "requires"} & why.keys()
        ]
        other = replace(self, shared=not self.shared)
        fits = bool(_families(other.dims(dims)))
        raise UsageError(
            "upcycle: no family of transformers with experts computes what this model would"
            + "".join(near[:2])
            + f"; give shared: {str(other.shared).lower()}" * fits
            + "; docs/surgery.md lists the models that can be upcycled" * (not fits)
        )

    def _factor(self, part: str, three: bool = True) -> float:
        """Returns the number by which the weights gate, up or down are multiplied.

        three: it is a factor of the output three times: of gate, up and down, or squared and down.
        """
        if self.form == "exact":
            return float(self.granularity if part == "down" else 1)
        return float(self.granularity ** (1 / 3 if three else 1 / 2))

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        self._refuse(dims)
        width = dims["ffn_size"] // self.granularity
        stored, shapes = list[Stored](), dict(layout.shapes)
        for name, shape in layout.shapes.items():
            if found := MLP.fullmatch(name):
                own = (shape[0], width) if found[1] == "down" else (width, shape[1])
                shapes[_of_expert(name)] = own
        for s in layout.stored:
            names = sorted(name for name in s.tensors if MLP.fullmatch(name))
            rest = tuple(p for p in s.pieces if p.tensor not in names)
            if rest:
                stored.append(replace(s, pieces=rest, view=True) if names else s)
            for name in names if not s.replica else ():
                three = dims["gated"] or dims["activation"] == SQUARED
                stored += self._experts(s, name, width, three)
        out = replace(layout, stored=stored, shapes=shapes)
        out = self._with_router(out, layout, dims)
        return self._with_shared(out, layout, dims) if self.shared else out

    def _experts(self, s: Stored, name: str, width: int, three: bool) -> Iterator[Stored]:
        """Yields the experts of stored tensors with this name, one shard of the mlp for each."""
        found = MLP.fullmatch(name)
        assert found is not None
        part, state = found[1], found[2] or ""
        axis, factor = int(part == "down"), self._factor(part, three)
        if factor != 1:
            factor = _factor_of(s, state, factor)
        every = [(row, layer) for row, layer in enumerate(s.layer.tolist())] * self.experts
        for shard in range(self.granularity):
            pieces = [
                q._replace(tensor=_of_expert(name), box=_moved(q.box, axis, -shard * width))
                for p in s.pieces
                if p.tensor == name and not p.copy
                for q in rows(p, shard * width, (shard + 1) * width, axis)
            ]
            one = replace(s, pieces=tuple(pieces), view=True)
            first = np.arange(self.experts) * self.granularity + shard
            one = one if factor == 1 or not pieces else scaled(one, factor)
            for experts in again(one, every) if pieces else ():
                yield replace(experts, expert=np.repeat(first, len(s)))

    def _with_router(self, layout: Layout, before: Layout, dims: Dims) -> Layout:
        """Returns the layout with the rows of the router, which are in a file of their own."""
        layers, shape = [*range(dims["num_layers"])], (self.experts, dims["hidden_size"])
        path = file_of(self._rows(layer, shape).tobytes() for layer in layers)
        files, stored, shapes = [*layout.files], [*layout.stored], dict(layout.shapes)
        made, zeros, none = number_of(files, path), number_of(files, ZEROS), [0] * len(layers)
        starts = [layer * math.prod(shape) * 4 for layer in layers]
        parts, width = self.granularity, shape[1]
        full = whole_box((self.experts * parts, width))
        for state, dtype in _states(before).items():
            name = f"{ROUTER}@{state}" if state else ROUTER
            shapes[name] = full.shape
            if is_moment(name):
                where = np.array([layers, none, [zeros] * len(layers), none], "i8")
                piece = Piece(name, full, 0, (width, 1))
                stored.append(Stored(f"{NEW}{name}", dtype, full.shape, (piece,), *where))
                continue
            where = np.array([layers, none, [made] * len(layers), starts], "i8")
            wide = None if dtype == "float32" else "float32"
            for nth in range(parts):
                pieces = tuple(
                    Piece(name, Box((row * parts + nth, 0), (1, width)), row * width, (width, 1))
                    for row in range(self.experts)
                )
                one = Stored(f"{NEW}{name}", dtype, shape, pieces, *where, rounded_from=wide)
                stored.append(one)
        return replace(layout, files=files, stored=stored, shapes=shapes)

    def _rows(self, layer: int, shape: tuple[int, int]) -> np.ndarray:
        """Returns the rows of the router of a layer, [experts, hidden] in float32."""
        if self.router == "zero":
            return np.zeros(shape, "f4")
        drawn = np.random.default_rng([self.seed, layer]).standard_normal(shape, "f4")
        return drawn * np.float32(self.std)

    def _with_shared(self, layout: Layout, before: Layout, dims: Dims) -> Layout:
        """Returns the layout with an expert that every token takes. Its gate and up are those of
        the mlp; its down and its own gate are zero.
        """
        new = under(before, {MLP_OF.format(n): SHARED.format(n) for n in ("gate", "up")})
        files = [*layout.files]
        stored, shapes, dtype = [*new.stored], dict(new.shapes), _states(before)[""]
        for name, shape in (
            (SHARED.format("down"), before.shapes[DOWN]),
            (SHARED.format("router"), (1, dims["hidden_size"])),
        ):
            shapes[name], box = shape, whole_box(shape)
            stored += [
                new_values(files, ZEROS, name, layer, box, dtype)
                for layer in range(dims["num_layers"])
            ]
        weights = [name for name in shapes if "@" not in name]
        new = replace(new, files=files, stored=stored, shapes=shapes)
        new = with_new_states(new, {name: kinds_of(before)[DOWN] for name in weights})
        stored, shapes = [*layout.stored, *new.stored], {**layout.shapes, **new.shapes}
        return replace(layout, files=new.files, stored=stored, shapes=shapes)


def _families(dims: Dims) -> list[MappingFile]:
    """Returns the families of transformers that compute a model with these dims, best first."""
    best = families_for(dims).best
    return [family for family in best if mapping.in_transformers(family.architectures[0])]


def _of_expert(name: str) -> str:
    return name.replace(".mlp.", ".moe.experts.{expert}.")


def _moved(box: Box, axis: int, by: int) -> Box:
    """Returns a box that is moved along an axis."""
    return Box(tuple(o + by * (i == axis) for i, o in enumerate(box.offset)), box.shape)


def _factor_of(s: Stored, state: str, factor: float) -> float:
    """Returns the factor of a weight's state. Raises UsageError for one that cannot be scaled."""
    if s.scales or s.added or s.stored_as not in PLAIN:
        raise UsageError(
            f"upcycle: {s.key} is stored as {s.stored_as} or is computed, and would be multiplied;"
            " convert it to plain weights first"
            + "; or give --no-optimizer to edit the weights alone"
            * bool(state)
        )
    if state and (state not in POWERS or math.frexp(factor)[0] != 0.5):
        raise UsageError(
            f"upcycle: weights are multiplied by {factor:g}; their optimizer's state {state} can"
            " follow only if it is one of Adam or Muon and the number is a power of two; give"
            " --no-optimizer to edit the weights alone, or another granularity"
        )
    return float(factor ** POWERS[state])


def _states(layout: Layout) -> dict[str, str]:
    """Returns the dtypes of the mlp's weights, under "", and of the states that they have."""
    found = {name: s.dtype for s in layout.stored for name in s.tensors}
    return {n.partition("@")[2]: t for n, t in found.items() if n.partition("@")[0] == DOWN}
