"""Receives what a plan of boxes sends, element by element, without memory for the model.

A virtual source has a value for each element of Megatron's tensors, which depends on the tensor and
on the number of the element. What a copy reads is found from the part that the sender holds there,
and what it should bring from the name and the box of the Hugging Face tensor that the receiver
waits for. The names of both sides are written here by hand, and no mapping file is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mckpt.live.direct import Boxes, Links
from mckpt.live.memory import Part
from mckpt.values.dtypes import itemsize

BATCH = 1 << 20  # elements at a time
PRIMES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
# Hugging Face -> Megatron, in a layer of DeepSeek-V3
ATTENTION = {
    "q_a_proj": "linear_q_down_proj.weight",
    "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
    "q_b_proj": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
    "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
    "kv_b_proj": "linear_kv_up_proj.weight",
    "o_proj": "linear_proj.weight",
}
# name of a linear -> that of Megatron, which of its halves it is, and how many it has
LINEARS = {"gate_proj": ("fc1", 0, 2), "up_proj": ("fc1", 1, 2), "down_proj": ("fc2", 0, 1)}
VOCABULARY = "embedding.word_embeddings.weight"
OUTSIDE = {
    "model.embed_tokens.weight": VOCABULARY,
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
IN_LAYER = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
}
IN_MTP = {"shared_head.norm.weight": "final_layernorm.weight"}
OF_MTP = {"embed_tokens.weight": VOCABULARY, "shared_head.head.weight": "output_layer.weight"}


def megatron(name: str, shape: Sequence[int], config: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the key of Megatron's tensor with the elements of a Hugging Face tensor, and the
    number of its first element there.
    """
    if name in OUTSIDE:
        return OUTSIDE[name], 0
    number, rest = name.removeprefix("model.layers.").split(".", 1)
    layer = int(number)
    prefix, num_layers = f"decoder.layers.{layer}.", config["num_hidden_layers"]
    if layer >= num_layers:
        prefix = f"mtp.layers.{layer - num_layers}."
        if rest in OF_MTP:
            return OF_MTP[rest], 0
        if rest.split(".")[0] in ("enorm", "hnorm", "eh_proj", "shared_head"):
            return prefix + IN_MTP.get(rest, rest), 0
        prefix += "transformer_layer."
    words, first = rest.split("."), 0
    if words[0] == "self_attn":
        return f"{prefix}self_attention.{ATTENTION[words[1]]}", 0
    if words[0] == "post_attention_layernorm" and layer < config["first_k_dense_replace"]:
        return f"{prefix}mlp.linear_fc1.layer_norm_weight", 0
    if words[-2] not in LINEARS:
        return prefix + IN_LAYER.get(rest, rest), 0
    linear, half, count = LINEARS[words[-2]]
    if words[1] == "experts":
        first = int(words[2]) * count * math.prod(shape)
        words[1:3] = ["experts.experts"]
    module = ".".join(words[:-2])
    return f"{prefix}{module}.linear_{linear}.weight", first + half * math.prod(shape)


class Sink:
    """The ranks that receive, and what they know of their boxes."""

    def __init__(
        self,
        links: Links,
        boxes: Mapping[int, Boxes],
        parts: Sequence[Sequence[Part]],
        config: Mapping[str, Any],
    ) -> None:
        """boxes: of the receivers. parts: of each rank of the trainer."""
        self.copies, self.links, self.num_checked = links.joined.copies.copy(), links, 0
        keys: dict[str, int] = {}
        held = [(rank, part) for rank, of_rank in enumerate(parts) for part in of_rank]
        places = np.array([(rank << 44) + part.at for rank, part in held], "i8")
        rows = [
            (keys.setdefault(p.key, len(keys)), *_grid(p.whole, p.offset, p.sizes)) for _, p in held
        ]
        shapes = {row.key: row.shape for row in links.held.rows}
        known = {name: megatron(name, shape, config) for name, shape in shapes.items()}
        wanted = []
        for _, of_rank in sorted(boxes.items()):
            for name, listed in of_rank.items():
                key, first = known[name]
                for box in listed:
                    offset, sizes = zip(*((a, b - a) for a, b in box), strict=True)
                    start, *grid = _grid(shapes[name], offset, sizes)
                    wanted.append((keys[key], first + start, *grid))
        order = np.argsort(places)
        at = (links.sender << 44) + self.copies["src_at"]
        part = order[np.searchsorted(places[order], at, "right") - 1]
        items = np.array([itemsize(cast.source) for cast in links.joined.casts], "i8")
        items = items[self.copies["cast"]]
        target = (self.copies["dst_file"].astype("i8") << 44) + self.copies["dst_at"]
        grids = np.array(rows, "i8")[part], np.array(wanted, "i8")[links.box]
        skipped = at - places[part], target - links.held.at[links.box]
        # one long row is several rows of the part or the box, whichever is narrower
        width = np.minimum(grids[0][:, 2], grids[1][:, 2])
        c = self.copies
        several = (c["rows"] == 1) & (c["run"] % width == 0)
        c["rows"][several] = c["run"][several] // width[several]
        c["run"][several] = width[several]
        for side in ("src", "dst"):
            c[f"{side}_pitch"][several] = width[several] * c[f"{side}_step"][several]
        self.source, self.target = (
            _Side(grid, before, items, c, side)
            for grid, before, side in zip(grids, skipped, ("src", "dst"), strict=True)
        )
        self.sizes = np.array(wanted, "i8")[:, 4]  # elements of each box

    def proof(self) -> list[str]:
        """Returns the copies that do not bring what a receiver waits for, and the boxes that they
        do not fill once.

        Both places of a copy are affine in its row and its column. If they are the same element in
        three corners, they are at all others.
        """
        c, wrong = self.copies, ~(self.source.is_affine() & self.target.is_affine())
        for row, column in ((0, 0), (1, 0), (0, 1), (1, 1)):
            r, k = row * (c["rows"] - 1), column * (c["run"] - 1)
            of_source, of_target = self.source.elements(r, k), self.target.elements(r, k)
            wrong |= (of_source[0] != of_target[0]) | (of_source[1] != of_target[1])
        problems = [f"{self._name(n)}: other elements" for n in np.flatnonzero(wrong)]
        counts = np.zeros(len(self.sizes), "i8")
        np.add.at(counts, self.links.box, c["rows"] * c["run"])
        order = np.argsort(self.links.box, kind="stable")
        low, high = self.target.corners()[:, order]
        box = self.links.box[order]
        for step in range(1, int(np.bincount(box).max())):
            meet = (low[step:] < high[:-step]) & (low[:-step] < high[step:])
            for n in np.flatnonzero(meet.all(1) & (box[step:] == box[:-step])):
                problems.append(f"{self._name(order[n])}: elements come twice")
        return problems + [f"box {n}: lacks elements" for n in np.flatnonzero(counts != self.sizes)]

    def sampled(self, count: int) -> list[str]:
        """Receives some elements of each copy. Returns the copies with a wrong value."""
        rng, wrong, c = np.random.default_rng(0), np.zeros(len(self.copies), bool), self.copies
        for _ in range(count):
            wrong |= self._differ(slice(None), rng.integers(c["rows"]), rng.integers(c["run"]))
        return [f"{self._name(n)}: wrong values" for n in np.flatnonzero(wrong)]

    def every(self) -> list[str]:
        """Receives all elements. Returns the copies with a wrong value, and the boxes that did not
        get each of their elements once.
        """
        first, problems = np.append(0, np.cumsum(self.sizes)), list[str]()
        seen, total = np.zeros(first[-1], bool), 0
        for group in self._alike():
            one = self.copies[group[0]]
            r, k = (axis.reshape(1, -1) for axis in np.indices((one["rows"], one["run"])))
            for n in range(0, len(group), step := max(BATCH // r.size, 1)):
                some = group[n : n + step, None]
                wrong = self._differ(some, r, k).any(1)
                problems += [f"{self._name(n)}: wrong values" for n in some[wrong, 0]]
                place = first[self.links.box[some]] + self.target.local(some, r, k)
                seen[place] = True
                total += place.size
        if total != len(seen) or not seen.all():
            problems.append(f"{total:,} elements came, to {seen.sum():,} of {len(seen):,} places")
        return problems

    def _alike(self) -> Iterator[np.ndarray]:
        """Yields the numbers of copies of one shape."""
        shape = self.copies["rows"] << 32 | self.copies["run"]
        order = np.argsort(shape, kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(shape[order])) + 1)

    def _differ(self, some: Any, r: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Returns whether elements of some copies do not have the values that are expected."""
        sent = values(*self.source.elements(r, k, some))
        self.num_checked += sent.size
        found: np.ndarray = sent != values(*self.target.elements(r, k, some))
        return found

    def _name(self, number: int) -> str:
        box = self.links.held.tensor(int(self.links.box[number]))
        sender, receiver = self.links.sender[number], self.links.receiver[number]
        return f"rank {sender} to {receiver}, {box.name} {list(box.shape)} at {list(box.start)}"


class _Side:
    """The places at which copies read, or those at which they write.

    Each array has an entry for each copy, and counts elements.
    """

    def __init__(
        self, grids: np.ndarray, skipped: np.ndarray, items: np.ndarray, copies: Any, side: str
    ) -> None:
        """grids: the number of Megatron's tensor, and what `_grid` returns."""
        self.key, self.start, self.width, self.whole, self.size = grids.T
        self.first = skipped // items
        self.pitch, self.step = copies[f"{side}_pitch"] // items, copies[f"{side}_step"] // items
        self.rows, self.run = copies["rows"], copies["run"]

    def local(self, some: Any, r: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Returns the numbers of elements in the part or the box."""
        found: np.ndarray = self.first[some] + r * self.pitch[some] + k * self.step[some]
        return found

    def elements(
        self, r: np.ndarray, k: np.ndarray, some: Any = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of Megatron's tensor, and those of elements in it."""
        at, width = self.local(some, r, k), self.width[some]
        return self.key[some], self.start[some] + at + at // width * (self.whole[some] - width)

    def is_affine(self) -> np.ndarray:
        """Returns whether all elements lie in the part, and their numbers in the whole tensor have
        one distance along the rows of a copy, and one along its columns.
        """
        last = self.local(slice(None), self.rows - 1, self.run - 1)
        within = (self.first >= 0) & (last < self.size)
        in_row = self.first % self.width + (self.run - 1) * self.step < self.width
        down = (self.rows == 1) | (self.pitch % self.width == 0)
        return within & ((self.width == self.whole) | (in_row & down))

    def corners(self) -> np.ndarray:
        """Returns the first row and column of each copy in its box, and the ends of both."""
        flat = (self.run == 1) | (self.step == 1)
        flat &= (self.rows == 1) | (self.pitch == self.run)
        rows, columns = self.rows, self.run
        full = flat & (self.rows * self.run % self.width == 0)
        rows = np.where(full, self.rows * self.run // self.width, rows)
        columns = np.where(full, self.width, columns)
        low = np.stack([self.first // self.width, self.first % self.width], 1)
        return np.stack([low, low + np.stack([rows, columns], 1)])


def _grid(
    whole: Sequence[int], offset: Sequence[int], sizes: Sequence[int]
) -> tuple[int, int, int, int]:
    """Returns the number of the first element of a box, the width of its rows and of those of the
    whole tensor, and its elements. Axes before the last two are 1 in a box.
    """
    start = 0
    for n, low in zip(whole, offset, strict=True):
        start = start * n + low
    width, rest = (sizes[-1], whole[-1]) if len(whole) > 1 else (1, 1)
    return start, width, rest, math.prod(sizes)


def values(key: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Returns 16 bits for each element of Megatron's tensors."""
    mixed = (number.astype("u8") + key.astype("u8") * PRIMES[0]) * PRIMES[1]
    found: np.ndarray = (mixed ^ (mixed >> np.uint64(29))) * PRIMES[0] >> np.uint64(48)
    return found
