"""The edit that makes a hybrid: the layers of a pattern, some of which are new Mamba-2 layers.

    pattern of Megatron   M  *  -  M  *  -      attention 0, mlp 0, attention 1, mlp 1 of the source
    layer of mckpt        0  1  1  2  3  3      an mlp belongs to the layer of the mixer before it

New values are those of tools/checkpoint/gpt_hybrid_conversion.py of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import KEPT, Edit
from mckpt.editing.layers import LAYER, Layers
from mckpt.editing.pieces import again, kinds_of_new, new_values, only, with_new_states
from mckpt.errors import UsageError, counted
from mckpt.formats import carried
from mckpt.geometry.box import ZEROS, Layout, Stored, whole_box
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, MappingFile
from mckpt.mapping.choosing import families_for
from mckpt.mapping.schema import schema
from mckpt.values.drawing import LOG, SOFTPLUS, UNIFORM, Draw
from mckpt.values.element import DRAW

OF_LAYER = re.compile(r"[M*][-E]?|[-E]")  # the symbols of one layer of mckpt
OF_MLP = re.compile(r"layers\.\{layer\}\.(mlp|moe)")  # starts the names of an mlp's tensors
PARTS = {"M": "mamba", "*": "attn", "-": "mlp", "E": "moe"}
CONV = 4  # positions of the convolution in MambaMixer


@dataclass(frozen=True)
class Hybrid(Edit):
    """Makes a hybrid of a model without Mamba-2 layers.

    pattern: M is a new Mamba-2, the i-th * is attention i of the source, and the i-th - or E its
        mlp or mixture of experts i. The others are args of Megatron. Without mamba_num_heads, the
        heads have twice the hidden size together.
    """

    pattern: str
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    seed: int = 1234
    contract = KEPT
    last = True  # an edit that cuts tensors would not cut how they are drawn
    dialect = "hybrid"
    anew: ClassVar[dict[str, Any]] = {"mamba_heads": 0}

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Hybrid:
        names = [field.name for field in fields(Hybrid)]
        if unknown := given.keys() - names:
            raise ValueError(f"{min(unknown)} is not one of {', '.join(names)}")
        if {*(pattern := str(given["pattern"]))} - {*PARTS} or "M" not in pattern:
            raise ValueError("pattern has M, one at least, *, - and E; --pp cuts it")
        for name in given.keys() - {"pattern"}:
            if type(given[name]) is not int or given[name] < (name != "seed"):
                raise ValueError(f"{name} is a whole number, not {given[name]!r}")
        return Hybrid(**given)

    @property
    def words(self) -> str:
        new = counted(self.pattern.count("M"), "Mamba-2 layer")
        return f"the layers are {self.pattern}, with {new} drawn with seed {self.seed}"

    def unfit(self, source: Checkpoint) -> str:
        towers = carried.of(source.layout) or source.mapping.whole
        return f"hybrid: {source.path} has towers beside its text model" if towers else ""

    @property
    def _layers(self) -> list[str]:
        """Returns the symbols of each layer."""
        return OF_LAYER.findall(self.pattern)

    def _places(self, dims: Dims) -> tuple[dict[int, int], dict[int, int]]:
        """Returns where the attentions and the mlps are: number of the new layer -> of the old one.
        Raises UsageError for a model that the pattern does not fit.
        """
        count, symbols = dims["num_layers"], "".join(c for c in self.pattern if c in "-E")
        parts = [set(one.split()) for one in dims["layer_parts"][:count]]
        attentions = [n for n, one in enumerate(parts) if "attn" in one]
        mlps = [n for n, one in enumerate(parts) if one & {"mlp", "moe"}]
        kinds = "".join("E" if "moe" in parts[n] else "-" for n in mlps)
        if (self.pattern.count("*"), symbols) != (len(attentions), kinds):
            own, theirs = (
                f"{counted(stars, 'attention')} and {counted(len(of), 'mlp')} ({of})"
                for stars, of in ((self.pattern.count("*"), symbols), (len(attentions), kinds))
            )
            raise UsageError(f"hybrid: {self.pattern} has {own}, and the model has {theirs}")
        stars, ends = (
            [n for n, one in enumerate(self._layers) if {*one} & {*of}] for of in ("*", "-E")
        )
        return dict(zip(stars, attentions, strict=True)), dict(zip(ends, mlps, strict=True))

    def dims(self, dims: Dims) -> Dims:
        if any("mamba" in parts for parts in dims["layer_parts"]) or dims["parallel_mamba"]:
            raise UsageError("hybrid: the model has Mamba-2 layers already")
        stars, mlps = self._places(dims)
        heads = self.mamba_num_heads or 2 * dims["hidden_size"] / self.mamba_head_dim
        if heads % self.mamba_num_groups:
            raise UsageError(
                f"hybrid: {heads:g} heads of mamba_head_dim {self.mamba_head_dim} are not divisible"
                f" by mamba_num_groups {self.mamba_num_groups}; give mamba_num_heads"
            )
        # a layer without an attention has the settings of the one before it
        every = range(len(self._layers))
        near = [max((n for n in stars if n <= new), default=min(stars)) for new in every]
        out = Layers(tuple((stars[n], False) for n in near)).dims(dims)
        lists: dict[str, list[Any]] = {
            "layer_parts": [" ".join(PARTS[c] for c in one) for one in self._layers],
            "linear_layers": [int(n in stars and dims["linear_layers"][stars[n]]) for n in every],
            "moe_layers": [int("E" in one) for one in self._layers],
            "ffn_sizes": [
                dims["ffn_sizes"][mlps[n]] if n in mlps else dims["ffn_size"] for n in every
            ],
        }
        sizes = {
            "mamba_heads": int(heads),
            "mamba_head_dim": self.mamba_head_dim,
            "mamba_groups": self.mamba_num_groups,
            "mamba_state_size": self.mamba_state_dim,
            "mamba_conv_size": CONV,
        }
        beyond = {name: dims[name][dims["num_layers"] :] for name in lists}
        return {**out, **sizes, **{name: [*new, *beyond[name]] for name, new in lists.items()}}

    def family(self, family: MappingFile | None, dims: Dims) -> MappingFile | None:
        best = families_for(dims).best
        return next((f for f in best if mapping.in_transformers(f.architectures[0])), None)

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        first = dims["num_layers"]
        behind = {len(self._layers) + n: first + n for n in range(dims["mtp_layers"])}
        new_of = [{old: n for n, old in {**one, **behind}.items()} for one in self._places(dims)]
        stored = list[Stored]()
        for s in layout.stored:
            mlp = {name for name in s.tensors if OF_MLP.match(name)}
            attention = {name for name in s.tensors if LAYER in name} - mlp
            if not mlp | attention:
                stored.append(s)
            for names, place in zip((attention, mlp), new_of, strict=True):
                for one in only([s], names.__contains__):
                    rows = [(row, place[old]) for row, old in enumerate(s.layer.tolist())]
                    stored += again(one, rows)
        new = self._new(layout, self.dims(dims))
        shapes = {**layout.shapes, **new.shapes}
        return replace(layout, files=new.files, stored=[*stored, *new.stored], shapes=shapes)

    def _new(self, layout: Layout, dims: Dims) -> Layout:
        """Returns the new tensors and their states. dims: those of the hybrid."""
        files, stored, shapes = [*layout.files], list[Stored](), dict[str, tuple[int, ...]]()
        dtypes = {name: s.dtype for s in layout.stored for name in s.tensors}
        for rest, kind, low, high in _values(dims):
            if rest == "attn_norm.bias" and "final_norm.bias" not in dtypes:
                continue
            name = f"layers.{{layer}}.{rest}"
            shapes[name] = schema().shape(name, dims)
            for layer in (n for n, one in enumerate(self._layers) if "M" in one):
                box, dtype = whole_box(shapes[name]), dtypes["final_norm.weight"]
                one = new_values(files, ZEROS, name, layer, box, dtype)
                draw = Draw.named(self.seed, name.format(layer=layer), kind, low, high)
                words = np.array([[draw.words()]], "i8")
                stored.append(replace(one, added={0: words}, term=DRAW))
        kinds = kinds_of_new("hybrid", layout)
        return with_new_states(Layout(files, stored, shapes), dict.fromkeys(shapes, kinds))


def _values(dims: Dims) -> Iterator[tuple[str, int, float, float]]:
    """Yields the new tensors of a layer, and how their values are drawn. Matrices are those of
    torch's kaiming_uniform_(a=sqrt(5)): within 1 / sqrt(inputs).
    """
    sizes = {f"{name}.weight": dims["hidden_size"] for name in ("z", "x", "b", "c", "dt")}
    sizes |= {f"{name}_conv.weight": CONV for name in ("x", "b", "c")}
    sizes["out.weight"] = dims["mamba_heads"] * dims["mamba_head_dim"]
    for name, inputs in sizes.items():
        yield f"mamba.{name}", UNIFORM, -(inputs**-0.5), inputs**-0.5
    yield "mamba.dt_bias", SOFTPLUS, 0.001, 0.1  # dt_min and dt_max
    yield "mamba.a_log", LOG, 1.0, 16.0  # A_init_range
    for name in ("mamba.d", "mamba.norm.weight", "attn_norm.weight"):
        value = 0.0 if name[0] == "a" and dims["norm_offset"] else 1.0
        yield name, UNIFORM, value, value
    for name in ("mamba.x_conv.bias", "mamba.b_conv.bias", "mamba.c_conv.bias", "attn_norm.bias"):
        yield name, UNIFORM, 0.0, 0.0
