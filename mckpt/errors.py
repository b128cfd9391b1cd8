"""The errors of mckpt, one class per exit code.

A message names the thing, the place, the numbers and the cure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

# Problems that one error prints; the rest are counted. A wrong --tp would otherwise print one line
# per tensor.
MAX_LISTED = 20


# Sparse copies of URLs (`storage.sparse_copy`): the text of the path -> the URL.
_shown: dict[str, str] = {}


def show_as(path: str, url: str) -> None:
    """Lets `shown` replace a path by a URL until `show_again`."""
    _shown[path] = url


def show_again(path: str) -> None:
    """Lets `shown` no longer replace a path."""
    _shown.pop(path, None)


def shown(text: str) -> str:
    """Returns a text for people, with the URL in the place of the path of each sparse copy."""
    for path, url in list(_shown.items()):  # other threads change it
        text = text.replace(path, url)
    return text


def printable(text: str) -> str:
    """Returns one line of text, in which an escape such as \\x1b or \\n stands for each character
    that a terminal interprets or does not display: control characters, line breaks, marks that
    change the direction of text.

    Names, paths and values come from others. All text for people goes through this function, line
    by line, so that none of them can forge a line or change what the terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# Whether errors name options as the command line does: --overwrite, not overwrite=True.
_options_shown = False
# Returns a line with options as keywords. `options`, which knows them, sets it.
in_keywords: Callable[[str], str] = str


def show_options(on: bool) -> bool:
    """Lets the errors made from now on name options as the command line does, or as keywords of the
    Python API. Returns the previous setting.
    """
    global _options_shown
    before, _options_shown = _options_shown, on
    return before


def _worded(line: str) -> str:
    """Returns a line of a message as people read it."""
    line = printable(shown(line))
    if _options_shown or "--" not in line:
        return line
    return in_keywords(line)


class MckptError(Exception):
    """Base of all errors that the user can resolve; `mckpt` exits with `exit_code`.

    Its args are the lines of the message. Within another text, `f"{error}"` is one line.
    A message is "WHERE: WHAT; CURE", in which WHERE or CURE may be missing.
    """

    exit_code = 70
    problems: tuple[str, ...] = ()  # all problems, if the message lists some of them

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(_worded, lines))

    def __str__(self) -> str:
        return "\n".join(self.args)

    def __format__(self, _: str) -> str:
        text, *more = self.args or ("",)
        for line in more:
            text += (" " if text.endswith((":", ".")) else "; ") + line.strip().removeprefix("- ")
        return str(text)

    @property
    def where(self) -> str | None:
        """Returns the file, directory, tensor or option at the start of the message; None if the
        message names none there.
        """
        place, colon, _ = (self.args or ("",))[0].partition(": ")
        return place if colon else None

    @property
    def cure(self) -> str | None:
        """Returns the advice of the message: what follows the first line's last semicolon, else the
        last line of several; None if there is none.
        """
        first, last = (self.args or ("",))[0], self.args[-1] if self.args else ""
        _, semicolon, advice = first.rpartition("; ")
        if semicolon:
            return advice
        return last if len(self.args) > 1 and not last.startswith("  - ") else None

    @classmethod
    def of(cls, headline: str, problems: Iterable[str], cure: str = "") -> MckptError:
        """Makes one error that lists `problems` under a headline."""
        problems = [_worded(problem) for problem in problems]
        lines = [f"  - {p}" for p in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            lines.append(f"  - and {len(problems) - MAX_LISTED} more")
        error = cls(headline, *lines, *([cure] if cure else []))
        error.problems = tuple(problems)
        return error

    def with_hint(self, *hints: str) -> MckptError:
        error = type(self)(*self.args, *hints)
        error.problems = self.problems
        return error


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, such as "1 chunk" or "2,000 chunks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class UsageError(MckptError):
    """The request contradicts itself, or lacks something that only the user can know."""

    exit_code = 2


class SourceError(MckptError):
    """The source is damaged or incomplete, or contradicts its own headers."""

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


class Unprinted(StorageError):
    """Stdout refused the result that a command prints."""


class PickleError(MckptError):
    """A pickle is hostile or unreadable; nothing in it was imported or called."""

    exit_code = 8


class MissingExtra(MckptError):
    """An optional dependency is not installed."""

    exit_code = 9


class Unreported(MckptError):
    """The output is published, and stdout refused the report of it."""

    exit_code = 10


class Cancelled(MckptError):
    """The caller cancelled the operation; the same call continues a conversion."""

    exit_code = 130
