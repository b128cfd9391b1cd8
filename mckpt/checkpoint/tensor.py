"""A tensor of a checkpoint that is read when its elements are needed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mckpt.lazy import numpy as np
from mckpt.values.dtypes import itemsize, numpy_dtype

if TYPE_CHECKING:
    import torch

CPU = (1, 0)  # DLPack's number of the kind of device, and of the device
BUILT_IN = 1  # `isbuiltin` of numpy's own dtypes; numpy does not export those of ml_dtypes


class LazyTensor(ABC):
    """The name, shape and dtype of a tensor, and the ways to read its elements: `numpy()`,
    `torch()`, `np.asarray(tensor)` and `torch.from_dlpack(tensor)`. Each call reads them anew.
    """

    name: str
    dtype: str  # such as "bfloat16"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Returns the number of elements along each axis."""

    @abstractmethod
    def _read(self, buffer: np.ndarray | None = None) -> np.ndarray:
        """Returns the bytes of the elements, row by row, as an array of any dtype: the first
        `nbytes` bytes of `buffer`, or new memory.
        """

    @property
    def nbytes(self) -> int:
        """Returns the size of the elements in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a single number, which has no length")
        return self.shape[0]

    def numpy(self, buffer: np.ndarray | None = None) -> np.ndarray:
        """Reads and returns the elements; dtypes that numpy lacks are those of ml_dtypes.

        buffer: an array of bytes, whose first `nbytes` bytes receive the elements.
        """
        return self._read(buffer).view(numpy_dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """Reads the elements and returns them as a torch tensor."""
        import torch

        raw = torch.from_numpy(self._read().view(np.uint8).reshape(-1))
        return raw.view(getattr(torch, self.dtype)).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the elements for `np.asarray`. Raises ValueError for copy=False, because the
        elements are in a file.
        """
        if copy is False:
            raise ValueError(f"{self.name}: its elements are in a file; leave copy=False out")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *, copy: bool | None = None, **_: Any) -> Any:
        """Reads the elements into memory of the CPU and returns a DLPack capsule of them.

        numpy exports no bfloat16 and no 8-bit floats; torch does so if it is installed. Raises
        BufferError if it is not, and for copy=False, because the elements are in a file.
        """
        if copy is False:
            raise BufferError(f"{self.name}: its elements are in a file; leave copy=False out")
        if numpy_dtype(self.dtype).isbuiltin == BUILT_IN:
            return self.numpy().__dlpack__()
        try:
            tensor = self.torch()
        except ImportError:
            raise BufferError(
                f"{self.name} is {self.dtype}, which numpy does not export; install torch, or take"
                " .numpy(), whose dtype is that of ml_dtypes"
            ) from None
        return tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the CPU as DLPack's kind and number of a device."""
        return CPU

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {list(self.shape)}, {self.dtype})"
