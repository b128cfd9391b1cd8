"""Saves and restores the states of this rank's random generators, as Megatron-LM's get_rng_state
and load_checkpoint do.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def collect(sharded: bool) -> Any:
    """Returns the states as a list of one dict; for `torch_dist` as a ShardedObject over (pp, tp),
    or (pp, tp, dp) where experts are spread over dp.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": get_cuda_rng_tracker().get_states(),
        }
    ]
    if not sharded:
        return states
    shape = (ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size())
    offset = (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
    dp_rank = ps.get_data_parallel_rank(with_context_parallel=True)
    if ps.get_expert_model_parallel_world_size() > 1:
        num_dp = ps.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject("rng_state", states, (*shape, num_dp), (*offset, dp_rank))
    return ShardedObject("rng_state", states, shape, offset, replica_id=dp_rank)


def restore(states: list[dict[str, Any]]) -> None:
    """Sets the generators to the states that `collect` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = states[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
