"""numpy, imported on first use, and regular expressions, compiled on first use. Both take time at
the start of a command that may not need them.
"""

from __future__ import annotations

import re
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


class _LazyPattern:
    def __init__(self, text: str, flags: int) -> None:
        self.pattern, self.flags = text, flags

    def __getattr__(self, name: str) -> Any:
        value = getattr(re.compile(self.pattern, self.flags), name)
        setattr(self, name, value)
        return value


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Returns a regular expression that is compiled when one of its methods is first used."""
    found: Any = _LazyPattern(text, flags)
    return found


def distinct(values: numpy.ndarray) -> numpy.ndarray:
    """Returns each of the values once, sorted.

    numpy.unique does the same, but imports numpy.ma, which takes 12 to 65 ms.
    """
    values = numpy.sort(values, axis=None)
    return values[numpy.append(True, values[1:] != values[:-1])[: len(values)]]
