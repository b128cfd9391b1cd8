"""The one function of SGLang that examples/live/sglang_weights.py calls."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def init_custom_process_group(
    backend: str, init_method: str, world_size: int, rank: int, group_name: str
) -> Any:
    """Returns a group with ranks of its own, which need not be those of the default group."""
    store = next(dist.rendezvous(init_method, rank, world_size))[0]
    prefixed = dist.PrefixStore(group_name, store)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        prefixed,
        group_name=group_name,
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
