"""The `.metadata` pickle of torch.distributed.checkpoint: the tensors of a torch_dist directory,
their chunks, and the bytes of each chunk.

    state_dict_metadata   key -> dtype, global shape, [chunk: offsets, sizes]
                          key -> BytesStorageMetadata, for an object
    storage_data          (key, chunk offsets, None for an object) -> file, offset, length
                          of an item of a .distcp (`torch_file`)

Shapes, offsets and sizes of chunks are in elements; offsets and lengths of items are in bytes. It
is read and written without torch. The classes are those that torch 2.1 to 2.13 and Megatron-Core
0.6 to main pickle (MCoreMetadata and MCoreSavePlan are dataclasses with more fields).
"""

from mckpt.containers.dcp_metadata.reading import (
    MAX_BYTES,
    Chunk,
    Index,
    Metadata,
    possible,
    read_metadata,
)
from mckpt.containers.dcp_metadata.writing import (
    Chunks,
    Items,
    Rows,
    Words,
    emit_metadata,
    metadata_file,
)
