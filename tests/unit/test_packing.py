"""Packings are right: they equal references written with reshape, concatenate and split, which do
not use boxes.

A round trip proves no packing: with k and v exchanged in `qkv`, every round trip passes. So the
second half packs wrongly on purpose, and asserts that the comparison with the reference fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mckpt.geometry import packing
from mckpt.geometry.box import Box, Piece, gaps, tiles
from mckpt.geometry.packing import PACKINGS, PackingError, Shape, buffer, padded, shard

# all sizes differ; 3 q heads in each query group
HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB = 12, 4, 6, 20, 24, 13


def tensor(seed: int, *shape: int) -> np.ndarray:
    """Returns random values, all of them different."""
    return np.random.RandomState(seed).permutation(math.prod(shape)).reshape(shape) + 1000 * seed


Q, K, V = (
    tensor(1, HEADS * HEAD_DIM, HIDDEN),
    tensor(2, GROUPS * HEAD_DIM, HIDDEN),
    tensor(3, GROUPS * HEAD_DIM, HIDDEN),
)
Q_BIAS, K_BIAS, V_BIAS = (
    tensor(4, HEADS * HEAD_DIM),
    tensor(5, GROUPS * HEAD_DIM),
    tensor(6, GROUPS * HEAD_DIM),
)
GATE, UP, DOWN = tensor(7, FFN, HIDDEN), tensor(8, FFN, HIDDEN), tensor(9, HIDDEN, FFN)
GATE_BIAS, UP_BIAS = tensor(10, FFN), tensor(11, FFN)
EMBED, NORM = tensor(12, VOCAB, HIDDEN), tensor(13, HIDDEN)

# --------------------------------------------------------------------------------------- references


def reference_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, groups: int = GROUPS) -> np.ndarray:
    """Stacks one query group after the other: its q heads, its k head, its v head (Megatron-Core,
    attention.py, get_query_key_value_tensors).
    """
    parts = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])


def reference_gated(gate: np.ndarray, up: np.ndarray, ways: int) -> list[np.ndarray]:
    """Gives every rank its part of gate above its part of up, because SwiGLU chunks the local
    output in two (mlp.py, glu).
    """
    return [
        np.concatenate(both) for both in zip(np.split(gate, ways), np.split(up, ways), strict=True)
    ]


def reference_version(
    version: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, ways: int
) -> list[np.ndarray]:
    """The rows of query_key_value of every rank, by the checkpoint_version of Megatron-LM
    (checkpointing.py, fix_query_key_value_ordering, which each rank runs on its own heads):
    [3, heads, width] for 0, [heads, width, 3] for 1, and [heads, 3, width] for 2 and 3.
    """
    out = []
    for rank in range(ways):
        parts = [np.split(x, ways)[rank] for x in (q, k, v)]
        # [3, heads, width, ...]
        each = np.stack([x.reshape(-1, HEAD_DIM, *x.shape[1:]) for x in parts])
        axes = {0: (0, 1, 2), 1: (1, 2, 0), 2: (1, 0, 2), 3: (1, 0, 2)}[version]
        each = each.transpose(*axes, *range(3, each.ndim))
        out.append(each.reshape(-1, *q.shape[1:]))
    return out


def reference_vocab(embed: np.ndarray, rows: int, ways: int) -> list[np.ndarray]:
    """Adds zeros below the true rows, and splits into equal ranges of rows
    (tensor_parallel/layers.py, VocabParallelEmbedding).
    """
    return np.split(
        np.concatenate([embed, np.zeros((rows - len(embed), embed.shape[1]), embed.dtype)]), ways
    )


def reference_interleaved(*members: np.ndarray) -> np.ndarray:
    """Row 0 of each member, then row 1 of each (modeling_gpt_oss.py, _apply_gate, takes gate and up
    apart as columns [::2] and [1::2] of the transpose).
    """
    return np.stack(members, axis=1).reshape(-1, *members[0].shape[1:])


# --------------------------------------------------------------------------------------------- ours


def store(shape: Shape, pieces: Sequence[Piece], members: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the buffer that the pieces describe, filled from the members. Elements of no piece
    are zero.
    """
    out = np.zeros(math.prod(shape), int)
    for p in pieces:
        cut = tuple(slice(o, o + n) for o, n in zip(p.box.offset, p.box.shape, strict=True))
        to = np.lib.stride_tricks.as_strided(
            out[p.start :], p.box.shape, [s * out.itemsize for s in p.strides]
        )
        to[...] = members[int(p.tensor)][cut]
    return out.reshape(shape)


def shards(
    pack: str,
    members: Sequence[np.ndarray],
    kind: str,
    ways: int,
    *,
    groups: int = GROUPS,
    rows: int = 0,
    transposed: bool = False,
) -> list[np.ndarray]:
    """Returns the buffer of each tensor-parallel rank, as mckpt places it."""
    whole = PACKINGS[pack]([m.shape for m in members], groups)
    if rows:
        whole = padded(whole, rows)
    out, found = [], []
    for rank in range(ways):
        shape, pieces = buffer(
            whole, shard(whole, kind, rank, ways), [str(i) for i in range(len(members))], transposed
        )
        out.append(store(shape, pieces, members))
        found.append((shape, pieces))
    if not rows:  # each rank's buffer is full, and together they hold each member once
        assert all(gaps(pieces, math.prod(shape))[0].size == 0 for shape, pieces in found)
    for i, m in enumerate(members):
        held = [
            p.box
            for _, pieces in (found[:1] if kind == "replicated" else found)
            for p in pieces
            if p.tensor == str(i)
        ]
        assert tiles(held, m.shape) is None
    return out


def same(ours: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> None:
    assert len(ours) == len(reference)
    for rank, (a, b) in enumerate(zip(ours, reference, strict=True)):
        assert a.shape == b.shape, f"rank {rank}: {a.shape} against {b.shape}"
        assert np.array_equal(a, b), (
            f"rank {rank}: {int((a != b).sum())} of {a.size} elements differ"
        )


def check_qkv(ways: int = 1) -> None:
    same(shards("qkv", [Q, K, V], "column", ways), np.split(reference_qkv(Q, K, V), ways))


def check_qkv_bias(ways: int = 1) -> None:
    same(
        shards("qkv", [Q_BIAS, K_BIAS, V_BIAS], "column", ways),
        np.split(reference_qkv(Q_BIAS, K_BIAS, V_BIAS), ways),
    )


def check_gated_attention(ways: int = 1) -> None:
    """Compares with Megatron-Core, which splits each query group into [q | gate | k | v], and with
    transformers, which views q_proj as [heads, 2 * head_dim] and chunks each head in two.
    """
    gate = tensor(15, HEADS * HEAD_DIM, HIDDEN)
    grouped = [x.reshape(GROUPS, -1, HIDDEN) for x in (Q, gate, K, V)]
    megatron = np.concatenate(grouped, axis=1).reshape(-1, HIDDEN)
    same(shards("qkv", [Q, gate, K, V], "column", ways), np.split(megatron, ways))
    (q_proj,) = shards("qkv", [Q, gate], "column", 1, groups=HEADS)
    by_head = q_proj.reshape(HEADS, 2 * HEAD_DIM, HIDDEN)
    same([by_head[:, :HEAD_DIM].reshape(-1, HIDDEN)], [Q])
    same([by_head[:, HEAD_DIM:].reshape(-1, HIDDEN)], [gate])


def check_gated_delta_net(ways: int = 1) -> None:
    """Splits in_proj_qkvz and in_proj_ba as transformers does, per key head, and compares each
    rank of Megatron-Core's in_proj, which is [q | k | v | z | beta | alpha] over its own heads.
    """
    heads, ratio, dk, dv = 8, 3, 5, 7
    q, k = tensor(16, heads * dk, HIDDEN), tensor(17, heads * dk, HIDDEN)
    v, z = (tensor(i, heads * ratio * dv, HIDDEN) for i in (18, 19))
    beta, alpha = tensor(20, heads * ratio, HIDDEN), tensor(21, heads * ratio, HIDDEN)
    members = [q, k, v, z, beta, alpha]
    (qkvz,) = shards("qkv", members[:4], "column", 1, groups=heads)
    (ba,) = shards("qkv", members[4:], "column", 1, groups=heads)
    ends = np.cumsum([dk, dk, ratio * dv])
    split = np.split(qkvz.reshape(heads, -1, HIDDEN), ends, axis=1)
    split += np.split(ba.reshape(heads, 2 * ratio, HIDDEN), 2, axis=1)
    same([part.reshape(-1, HIDDEN) for part in split], members)
    of_ranks = zip(*(np.split(member, ways) for member in members), strict=True)
    same(shards("gated", members, "column", ways), [np.concatenate(own) for own in of_ranks])


def check_convolution(ways: int = 1) -> None:
    """Compares tensors of three axes, [channels, 1, kernel]."""
    members = [tensor(22, 40, 1, 4), tensor(23, 40, 1, 4), tensor(24, 56, 1, 4)]
    of_ranks = zip(*(np.split(member, ways) for member in members), strict=True)
    same(shards("gated", members, "column", ways), [np.concatenate(own) for own in of_ranks])


def check_gated(ways: int = 1) -> None:
    same(shards("gated", [GATE, UP], "column", ways), reference_gated(GATE, UP, ways))


def check_gated_bias(ways: int = 1) -> None:
    same(
        shards("gated", [GATE_BIAS, UP_BIAS], "column", ways),
        reference_gated(GATE_BIAS, UP_BIAS, ways),
    )


def check_mamba(ways: int = 1) -> None:
    """Takes each rank's rows out of the in_proj and the conv1d of transformers, which splits them
    into [z | x | B | C | dt] and [x | B | C], by the heads and groups that Megatron-Core gives the
    rank (mamba_mixer.py, nheads_local_tp and ngroups_local_tp).
    """
    heads, groups, width, state = 16, 8, 3, 5
    sizes = {"z": heads * width, "x": heads * width, "B": groups * state, "C": groups * state}
    in_proj = tensor(14, sum(sizes.values()) + heads, HIDDEN)
    conv = tensor(15, sum(sizes.values()) - sizes["z"], 1, 4)
    first = dict(zip("zxBC", np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    first["dt"] = sum(sizes.values())
    rows = {"z": heads, "x": heads, "B": groups, "C": groups, "dt": heads}
    each = {"z": width, "x": width, "B": state, "C": state, "dt": 1}

    def of_rank(rank: int, names: Sequence[str]) -> list[int]:
        return [
            first[name] + number * each[name] + row
            for name in names
            for number in range(rank * rows[name] // ways, (rank + 1) * rows[name] // ways)
            for row in range(each[name])
        ]

    names = ["z", "x", "B", "C", "dt"]
    members = [in_proj[first[n] : first[n] + rows[n] * each[n]] for n in names]
    same(shards("concat", members, "column", 1), [in_proj])
    wanted = [in_proj[of_rank(rank, names)] for rank in range(ways)]
    same(shards("gated", members, "column", ways), wanted)
    ends = np.cumsum([sizes["x"], sizes["B"]])
    wanted = [conv[np.array(of_rank(r, ["x", "B", "C"])) - sizes["z"]] for r in range(ways)]
    same(shards("gated", np.split(conv, ends), "column", ways), wanted)


def check_row(ways: int = 1) -> None:
    same(shards("one", [DOWN], "row", ways), np.split(DOWN, ways, axis=1))


def check_column(ways: int = 1) -> None:
    same(shards("one", [GATE], "column", ways), np.split(GATE, ways))


def check_concat(ways: int = 1) -> None:
    same(
        shards("concat", [GATE, UP, EMBED[:8]], "column", ways),
        np.split(np.concatenate([GATE, UP, EMBED[:8]]), ways),
    )


def check_swapped(ways: int = 1) -> None:
    """MiMo projects [hidden state | embedding], and Megatron-Core [embedding | hidden state]."""
    left, right = np.split(GATE, 2, axis=1)
    same(shards("swapped", [GATE], "column", ways), np.split(np.hstack([right, left]), ways))


def check_halved(ways: int = 1) -> None:
    """Megatron-Core cuts the rows of each rank in two (apply_swiglu_sharded_factory), also where an
    adapter of a linear_fc1 has no gate.
    """
    rows = tensor(16, 2 * FFN, HIDDEN)
    halves = [np.split(rank, 2) for rank in np.split(rows, ways)]
    first, second = ([half[i] for half in halves] for i in (0, 1))
    same(shards("halved", [rows], "replicated", 1, groups=ways), [np.vstack([*first, *second])])


def check_paired(ways: int = 1) -> None:
    """torchtitan's Llama turns neighbours, so the halves of a head take turns (its
    state_dict_adapter.py, _reverse_permute).
    """
    for rows, heads in ((Q, HEADS), (K, GROUPS)):
        turned = rows.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(rows.shape)
        same(shards("paired", [rows], "column", ways, groups=heads), np.split(turned, ways))


def check_transposed(ways: int = 1) -> None:
    """Compares a square weight too, in which only the values show a transpose."""
    square = tensor(14, FFN, FFN)
    same(
        shards("one", [square], "row", ways, transposed=True),
        [s.T for s in np.split(square, ways, axis=1)],
    )
    same(
        shards("gated", [GATE, UP], "column", ways, transposed=True),
        [s.T for s in reference_gated(GATE, UP, ways)],
    )


def check_vocab(ways: int = 1) -> None:
    same(shards("one", [EMBED], "vocab", ways, rows=24), reference_vocab(EMBED, 24, ways))


CHECKS: dict[str, Callable[[int], None]] = {
    f.__name__: f
    for f in (
        check_qkv,
        check_qkv_bias,
        check_gated_attention,
        check_gated_delta_net,
        check_convolution,
        check_gated,
        check_gated_bias,
        check_mamba,
        check_row,
        check_column,
        check_concat,
        check_swapped,
        check_halved,
        check_paired,
        check_transposed,
        check_vocab,
    )
}


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CHECKS)
def test_packings_equal_the_reference(name: str, ways: int) -> None:
    """tp 8 is more than the 4 query groups, and leaves ranks that hold only padding of the
    vocabulary.
    """
    CHECKS[name](ways)


@pytest.mark.parametrize(("groups", "heads"), [(1, 6), (6, 6), (2, 6)])
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_qkv_packs_multi_query_and_multi_head_attention(groups: int, heads: int, ways: int) -> None:
    q, k, v = tensor(1, heads * 4, 5), tensor(2, groups * 4, 5), tensor(3, groups * 4, 5)
    same(
        shards("qkv", [q, k, v], "column", ways, groups=groups),
        np.split(reference_qkv(q, k, v, groups), ways),
    )


@pytest.mark.parametrize("members", [(GATE, UP), (GATE_BIAS, UP_BIAS), (GATE, UP, GATE + 7)])
def test_interleaved_rows_take_turns(members: tuple[np.ndarray, ...]) -> None:
    whole = reference_interleaved(*members)
    same(shards("interleaved", members, "replicated", 1), [whole])
    (ours,) = shards("interleaved", members, "replicated", 1, transposed=True)
    same([ours], [whole.T])
    for i, member in enumerate(members):  # as transformers takes them apart
        assert np.array_equal(ours[..., i :: len(members)].T, member)


def test_interleaved_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(PackingError, match="cannot be cut in columns"):
        shards("interleaved", [GATE, UP], "row", 2)
    with pytest.raises(PackingError, match="rows cannot take turns"):
        shards("interleaved", [GATE, GATE[:4]], "replicated", 1)


OLD = {0: "gated", 1: "interleaved", 2: "qkv", 3: "qkv"}


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("version", OLD)
def test_qkv_of_every_checkpoint_version(version: int, ways: int) -> None:
    """With one head of k and v for each head of q, as before query groups."""
    for shape in ((HEADS * HEAD_DIM, HIDDEN), (HEADS * HEAD_DIM,)):
        members = [tensor(seed, *shape) for seed in (21, 22, 23)]
        wanted = reference_version(version, *members, ways)
        same(shards(OLD[version], members, "column", ways, groups=HEADS), wanted)
        others = [p for p in set(OLD.values()) if p != OLD[version]]
        for other in others:
            with pytest.raises(AssertionError, match="elements differ"):
                same(shards(other, members, "column", ways, groups=HEADS), wanted)


def test_interleaved_rows_are_cut_anywhere() -> None:
    """A cut may part the rows that take a turn: 48 rows of two members in 16 pieces of 3."""
    whole = reference_interleaved(GATE, UP)
    same(shards("interleaved", [GATE, UP], "column", 16), np.split(whole, 16))


def test_replicated_tensors_are_whole_on_every_rank() -> None:
    same(shards("one", [NORM], "replicated", 3), [NORM] * 3)
    same(shards("one", [DOWN], "replicated", 2), [DOWN] * 2)


def test_vocab_is_padded_only_where_rows_require_it() -> None:
    same(shards("one", [EMBED], "vocab", 1, rows=VOCAB), [EMBED])
    ours = shards("one", [EMBED], "vocab", 4, rows=16)
    assert (ours[3][1:] == 0).all()
    assert (ours[3][0] == EMBED[12]).all()


def test_qkv_packs_a_literal_example() -> None:
    """The packed rows are [ q0 q1 k0 v0 | q2 q3 k1 v1 ]."""
    q, k, v = np.array([[10], [11], [12], [13]]), np.array([[20], [21]]), np.array([[30], [31]])
    (ours,) = shards("qkv", [q, k, v], "column", 1, groups=2)
    assert ours.ravel().tolist() == [10, 11, 20, 30, 12, 13, 21, 31]


def test_a_tensor_that_is_named_twice_is_stored_twice() -> None:
    whole = PACKINGS["qkv"]([(4,), (2,), (2,)], 2)
    shape, pieces = buffer(whole, [Box((0,), whole.shape)], ["0", "1", "1"])
    filled = store(shape, pieces, [np.array([1, 2, 3, 4]), np.array([5, 6])])
    assert filled.tolist() == [1, 2, 5, 5, 3, 4, 6, 6]
    assert [p.start for p in pieces if p.copy] == [3, 7]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PackingError, match=r"tensor 1 \[7, 5\] does not fall into 2 groups"):
        packing.qkv([(8, 5), (7, 5), (8, 5)], 2)
    with pytest.raises(PackingError, match=r"tensor 2 \[8, 6\]"):
        packing.qkv([(8, 5), (8, 5), (8, 6)], 2)
    with pytest.raises(
        PackingError, match=r"cannot be stacked along axis 0: \[4, 5\] and \[4, 6\]"
    ):
        packing.gated([(4, 5), (4, 6)], 1)
    with pytest.raises(PackingError, match=r"\[4, 5\] has no two halves of columns"):
        packing.swapped([(4, 5)], 1)
    with pytest.raises(PackingError, match=r"\[10, 5\] does not fall into 2 groups of two halves"):
        packing.paired([(10, 5)], 2)
    with pytest.raises(PackingError, match="10 rows are not divisible by 4"):
        shard(packing.one([(10, 6)], 1), "column", 0, 4)
    with pytest.raises(PackingError, match="6 columns are not divisible by 4"):
        shard(packing.one([(8, 6)], 1), "row", 0, 4)
    # each part is divided on its own; the 10 rows of both would be divisible
    with pytest.raises(PackingError, match="5 rows are not divisible by 2"):
        shard(packing.gated([(5, 6), (5, 6)], 1), "column", 0, 2)
