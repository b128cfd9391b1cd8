"""The state of optimizers, in all forms in which Megatron's formats keep it.

This package exports the names that other modules use: those of states, and the optimizers of a
rank. `kinds` has the optimizers that mckpt knows, and the rule by which their state is complete.
`flat`, `layer_wise` and `torch_reading` read the forms that have no key for each weight,
`torch_writing` writes the files of torch, and `buckets` computes the place of each parameter in a
flat buffer.
"""

from __future__ import annotations

from mckpt.formats.megatron.optimizer.state import (
    BY_LAYERS,
    CURE,
    FULLY_RESHARDABLE,
    LAYER_WISE,
    LOW_BITS,
    MASTER,
    MASTER_KEYS,
    MODEL_SPACE,
    NOT_DISTRIBUTED,
    SCALER,
    SHARED,
    Optimizer,
    Scaler,
    common_of,
    decays,
    group_of,
    groups_of,
    has_moments,
    holds_state,
    is_matrix,
    is_muon,
    is_state,
    is_wrapped,
    keys_of,
    links,
    loads_at_its_sizes,
    masters_alone,
    next_group,
    number_in,
    prefix_of,
    regrouped,
    rescaled,
    scalers_of,
    sharding_of,
    split_key,
    state_bound,
    state_pieces,
    states_of,
    unkept,
)
