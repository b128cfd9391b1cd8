"""What can go wrong, one class per exit code.

The message names the thing, the place, the numbers and the cure.
"""

from __future__ import annotations

from collections.abc import Iterable

# problems printed of one kind; the rest are counted: a wrong --tp would otherwise print one line
# per tensor
MAX_LISTED = 20


class MckptError(Exception):
    """Base of every error that is the user's to mend; `exit_code` is what `mckpt` exits with."""

    exit_code = 70
    problems: tuple[str, ...] = ()  # all of them, where the message lists some

    @classmethod
    def of(cls, headline: str, problems: Iterable[str], cure: str = "") -> MckptError:
        """One error that lists all `problems` under a headline."""
        problems = list(problems)
        lines = [f"  - {p}" for p in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            lines.append(f"  - and {len(problems) - MAX_LISTED} more")
        error = cls("\n".join([headline, *lines, *([cure] if cure else [])]))
        error.problems = tuple(problems)
        return error


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, such as "1 chunk" or "2,000 chunks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class UsageError(MckptError):
    """The request makes no sense or lacks something only the user can know."""

    exit_code = 2


class SourceError(MckptError):
    """The source is damaged, incomplete, or not what its own headers say."""

    exit_code = 3


class MappingError(MckptError):
    """No mapping knows the model, or a mapping file is wrong."""

    exit_code = 4


class CoverError(MckptError):
    """The plan would not write every target element once or would leave a source element unused."""

    exit_code = 5


class DestinationError(MckptError):
    """The destination is refused: in use, in the way, inside the source."""

    exit_code = 6


class StorageError(MckptError):
    """The operating system refused to read or write."""

    exit_code = 7


class PickleError(MckptError):
    """A pickle is hostile or unreadable; nothing in it was imported or called."""

    exit_code = 8


class MissingExtra(MckptError):
    """An optional dependency is not installed."""

    exit_code = 9
