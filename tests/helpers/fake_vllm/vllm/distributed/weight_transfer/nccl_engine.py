"""The names of this module of vLLM that examples/live/vllm_weights.py imports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    rank: int = field(kw_only=True)
