"""A rule of a mapping file, and the same rule bound to the layers and experts of one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.mapping.expression import Expression


class Rule(NamedTuple):
    """One stored key template and the logical tensors packed in it.

    An object rule has no members.
    """

    key: str
    of: tuple[str, ...]
    pack: str
    tp: str  # column, row, vocab or replicated
    stage: str | None  # first or last: the pipeline stage of a tensor that is in no layer
    when: Expression | None
    alias: bool  # a further copy of a tensor that another rule stores
    written: bool  # False: an alias that is read if it is present, and never written
    dtype: str | None  # the dtype in which it is always stored
    # True for layers of multi-token prediction. Their numbers follow the decoder's; in a key, {mtp}
    # counts them from 0.
    mtp: bool
    indices: tuple[str, ...]  # "layer", "expert", if its tensors or its key have them
    where: str
    number: Expression | None = None  # the number that stands for {layer} in its key; None: layer
    transposed: bool = False  # the stored tensor is the transpose of the packed one
    heads: Expression | None = None  # groups of the packing qkv; None: num_query_groups
    offset: float = 0.0  # the stored values are the logical ones plus this number
    encoder: bool = False  # {layer} counts the layers of the encoder, not those of the decoder

    @property
    def shared(self) -> bool:
        """Returns whether several keys are copies of one tensor: the keys name a layer, and the
        tensor does not.
        """
        return "layer" in self.indices and bool(self.of) and "{layer}" not in self.of[0]

    def stacked(self) -> tuple[str, ...]:
        """Returns the indices that are leading axes of the stored tensor because the key does not
        name them.
        """
        return tuple(
            i
            for i in self.indices
            if f"{{{i}}}" not in self.key and not (i == "layer" and self.mtp)
        )


class Bound(NamedTuple):
    """A rule with the layers (or [0]) and experts (or [0]) of one model to which it applies."""

    rule: Rule
    layers: np.ndarray
    experts: np.ndarray
    numbers: np.ndarray  # of each layer: the number that stands for it in the key
    num_layers: int  # of the decoder

    def key(self, number: int, expert: int = 0) -> str:
        """Returns the key of the tensor of the layer with this number."""
        return self.rule.key.format(layer=number, expert=expert, mtp=number - self.num_layers)

    def keys(self) -> list[str]:
        """Returns all keys that name layer and expert, layer by layer."""
        experts = list(map(str, self.experts.tolist()))
        out: list[str] = []
        for number in self.numbers.tolist():
            key = self.rule.key.replace("{expert}", "\0").format(
                layer=number, mtp=number - self.num_layers
            )
            out += [key.replace("\0", expert) for expert in experts]
        return out

    def instances(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the layers and the experts of the tensors that `keys` name."""
        return np.repeat(self.layers * (not self.rule.shared), len(self.experts)), np.tile(
            self.experts, len(self.layers)
        )

    def global_keys(self) -> list[tuple[str, int]]:
        """Returns the (key, layer) of each stored tensor whose axes are the indices that its key
        does not name. Such a key never has an expert.
        """
        if "layer" in self.rule.stacked() or "layer" not in self.rule.indices:
            return [(self.key(0), 0)]
        numbered = zip(self.numbers.tolist(), self.layers.tolist(), strict=True)
        return [(self.key(number), layer) for number, layer in numbered]

    def axes(self, scope: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the sizes of the axes that `Rule.stacked` names."""
        layers = scope["encoder_layers" if self.rule.encoder else "num_layers"]
        size = {"layer": layers, "expert": scope["num_experts"]}
        return tuple(size[index] for index in self.rule.stacked())
