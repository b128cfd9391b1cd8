"""numpy, imported on first use: the import takes as long as the rest of a start, and `mckpt --help`
does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # the next access finds it without this method
            return value

    numpy = _Numpy()

__all__ = ["distinct", "numpy"]


def distinct(values: numpy.ndarray) -> numpy.ndarray:
    """Returns each of the values once, sorted.

    numpy.unique does the same, but imports numpy.ma, which takes 12 to 65 ms.
    """
    values = numpy.sort(values, axis=None)
    return values[numpy.append(True, values[1:] != values[:-1])[: len(values)]]
