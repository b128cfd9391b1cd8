"""Regular expressions that other people's files contain, matched in bounded time.

Python's `re` takes exponential time for some expressions, such as `(.*)*x`. This module parses an
expression with the parser of `re`, so that the meaning is Python's, and matches it without
backtracking: each part of the expression turns the places at which it may start into those at which
it may end. All places are one integer, of which bit n is the place before character n.

    text "ab.c", expression "a.*c":   0b00001 --a--> 0b00010 --.*--> 0b11110 --c--> 0b10000
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from mckpt.errors import SourceError

if sys.version_info >= (3, 11):
    # typeshed leaves private modules out
    from re import _constants as codes  # type: ignore[attr-defined]
    from re import _parser as parser
else:
    import sre_constants as codes
    import sre_parse as parser

LONGEST = 10_000  # characters of an expression
LONGEST_TEXT = 2_000  # characters of a text; the names of modules have less than 200
DEEPEST = 50  # parts of an expression inside each other
STEPS = 100_000  # of the repeats in one match: 50 ms. Usual expressions take less than 100

_Test = Callable[[str], bool]  # of one character


class PatternError(SourceError):
    """An expression that Python does not accept, or that mckpt does not match."""


class _Text:
    """A text, and the places of its characters."""

    def __init__(self, text: str) -> None:
        self.text, self.size, self.steps = text, len(text), 0
        self.places: dict[str, int] = {}
        for at, character in enumerate(text):
            self.places[character] = self.places.get(character, 0) | 1 << at
        self.passing: dict[_Test, int] = {}
        self.holds: dict[tuple[_Part, int], bool] = {}  # of what stands around a place

    def where(self, test: _Test) -> int:
        """Returns the places before characters that pass a test."""
        if test not in self.passing:
            found = (places for c, places in self.places.items() if test(c))
            self.passing[test] = functools.reduce(int.__or__, found, 0)
        return self.passing[test]

    def spend(self, steps: int) -> None:
        """Counts the steps of a repeat. Raises PatternError if they are too many."""
        self.steps += steps
        if self.steps > STEPS:
            raise PatternError(f"a regular expression takes too long to match {self.text!r:.200}")


# The ends that a part of an expression reaches from its starts
_Part = Callable[[_Text, int], int]


class Pattern:
    """An expression. Raises PatternError if it is not one, or if it has a part that is not matched
    here: back references, conditions, atomic groups, possessive repeats, (?m) and (?L).
    """

    def __init__(self, expression: str) -> None:
        if len(expression) > LONGEST:
            raise PatternError(f"has {len(expression):,} characters, and at most {LONGEST:,} fit")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("error", DeprecationWarning)  # (?i) behind the start
                parsed = parser.parse(expression)
        except (codes.error, OverflowError, DeprecationWarning) as e:
            raise PatternError(f"is not a regular expression: {e}") from None
        except RecursionError:
            raise PatternError("has too many brackets inside each other") from None
        flags = parsed.state.flags
        if flags & (codes.SRE_FLAG_MULTILINE | codes.SRE_FLAG_LOCALE):
            raise PatternError("has a flag (?m) or (?L), which mckpt does not match")
        self._part, _ = _sequence(parsed, flags, 0)

    def ends(self, text: str, start: int = 0) -> Iterator[int]:
        """Yields each place at which a match that begins at `start` may end, in ascending order.

        Raises PatternError if the text is too long, or the match takes too many steps.
        """
        if len(text) > LONGEST_TEXT:
            raise PatternError(
                f"{text[:60]!r}...: this name has {len(text):,} characters, and at most"
                f" {LONGEST_TEXT:,} are matched with a regular expression"
            )
        found = self._part(_Text(text), 1 << start)
        return _bits(found)

    def match(self, text: str) -> bool:
        """Returns whether the start of a text matches, as `re.match` does."""
        return any(True for _ in self.ends(text))

    def fullmatch(self, text: str) -> bool:
        """Returns whether a whole text matches, as `re.fullmatch` does."""
        return len(text) in self.ends(text)


@functools.lru_cache(10_000)
def pattern(expression: str) -> Pattern:
    """Returns the Pattern of an expression, made once."""
    return Pattern(expression)


def _bits(places: int) -> Iterator[int]:
    while places:
        yield (places & -places).bit_length() - 1
        places &= places - 1


def _sequence(items: Any, flags: int, depth: int) -> tuple[_Part, int]:
    """Returns a part that matches items one after the other, and its steps."""
    if depth > DEEPEST:
        raise PatternError(f"has more than {DEEPEST} parts inside each other")
    parts, steps = [], 1
    for code, value in items:
        more = 1
        if code is codes.LITERAL and not flags & codes.SRE_FLAG_IGNORECASE:
            part = _character(chr(value))
        elif (test := _test(code, value, flags)) is not None:
            part = _one(test)
        else:
            part, more = _compound(code, value, flags, depth)
        parts.append(part)
        steps += more

    def ends(text: _Text, starts: int) -> int:
        for part in parts:
            if not starts:
                break
            starts = part(text, starts)
        return starts

    return (parts[0] if len(parts) == 1 else ends), steps


def _character(c: str) -> _Part:
    return lambda text, starts: (starts & text.places.get(c, 0)) << 1


def _one(test: _Test) -> _Part:
    return lambda text, starts: (starts & text.where(test)) << 1


def _compound(code: Any, value: Any, flags: int, depth: int) -> tuple[_Part, int]:
    """Returns a part that does not match one character, and its steps."""
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, high, items = value
        tests = [_test(kind, one, flags) for kind, one in items]
        test = tests[0] if len(tests) == 1 else None
        if test and (low, high) in ((0, codes.MAXREPEAT), (1, codes.MAXREPEAT)):
            return _run(test, low), 1
        body, steps = _sequence(items, flags, depth + 1)
        return _repeat(body, steps, low, high), steps
    if code is codes.SUBPATTERN:
        _, on, off, items = value
        return _sequence(items, (flags | on) & ~off, depth + 1)
    if code is codes.BRANCH:
        found = [_sequence(items, flags, depth + 1) for items in value[1]]
        branches = [part for part, _ in found]

        def either(text: _Text, starts: int) -> int:
            return functools.reduce(int.__or__, (part(text, starts) for part in branches), 0)

        return either, sum(steps for _, steps in found)
    if code is codes.AT and value in _AT:
        at = _AT[value]
        return (lambda text, starts: sum(1 << n for n in _bits(starts) if at(text.text, n))), 1
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        direction, items = value
        body, steps = _sequence(items, flags, depth + 1)
        behind = items.getwidth()[0] if direction < 0 else None
        return _around(body, steps, behind, code is codes.ASSERT), steps
    if code is codes.FAILURE:
        return (lambda text, starts: 0), 1
    raise PatternError(f"has a part ({str(code).lower()}) that mckpt does not match")


def _run(test: _Test, low: int) -> _Part:
    """Returns a part that matches any number of characters, and at least `low`: 0 or 1."""

    def ends(text: _Text, starts: int) -> int:
        alike = text.where(test)
        if low:
            starts = (starts & alike) << 1
        # the sum carries a start through the characters that follow it
        return (((starts & alike) + alike) ^ alike) | starts

    return ends


def _repeat(body: _Part, steps: int, low: int, high: int) -> _Part:
    """Returns a part that matches another one `low` to `high` times."""

    def ends(text: _Text, starts: int) -> int:
        # more repeats than characters need an empty one, of which there may be any number
        for _ in range(min(low, text.size + 1)):
            text.spend(steps)
            before, starts = starts, body(text, starts)
            if starts in (0, before):
                break
        found = new = starts
        left = min(high - low, text.size + 1)
        while new and left:
            text.spend(steps)
            new = body(text, new) & ~found
            found |= new
            left -= 1
        return found

    return ends


def _around(body: _Part, steps: int, behind: int | None, wanted: bool) -> _Part:
    """Returns a part that matches at places after which another one matches, or before which one
    of the width `behind` does. wanted: whether it must match there, or must not.
    """

    def there(text: _Text, at: int) -> bool:
        if (body, at) not in text.holds:
            text.spend(steps)
            if behind is None:
                found = body(text, 1 << at) != 0
            else:
                found = at >= behind and body(text, 1 << (at - behind)) >> at & 1 == 1
            text.holds[body, at] = found
        return text.holds[body, at]

    return lambda text, starts: sum(1 << n for n in _bits(starts) if there(text, n) is wanted)


def _test(code: Any, value: Any, flags: int) -> _Test | None:
    """Returns the test of an item that matches one character; None for another item."""
    if code is codes.ANY:
        return (lambda c: True) if flags & codes.SRE_FLAG_DOTALL else (lambda c: c != "\n")
    if code not in (codes.LITERAL, codes.NOT_LITERAL, codes.IN):
        return None
    items = value if code is codes.IN else [(code, value)]
    wanted = items[0][0] not in (codes.NEGATE, codes.NOT_LITERAL)
    if not flags & codes.SRE_FLAG_IGNORECASE:
        return lambda c: any(_is(c, kind, one, flags) for kind, one in items) is wanted
    return lambda c: (
        wanted
        is any(_is(x, kind, one, flags) for kind, one in items for x in (c.lower(), c.upper()))
    )


def _is(c: str, code: Any, value: Any, flags: int) -> bool:
    """Returns whether an item of a set of characters has a character."""
    if code in (codes.LITERAL, codes.NOT_LITERAL):
        return ord(c) == value
    if code is codes.RANGE:
        return bool(value[0] <= ord(c) <= value[1])
    if code is codes.CATEGORY:
        name = str(value).rpartition("_")[2]
        is_in = _CATEGORIES[name](c) and not (flags & codes.SRE_FLAG_ASCII and not c.isascii())
        return is_in is not ("NOT" in str(value))
    return False  # NEGATE, which `_test` reads


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


def _boundary(text: str, at: int) -> bool:
    return (at > 0 and _is_word(text[at - 1])) != (at < len(text) and _is_word(text[at]))


_CATEGORIES: dict[str, _Test] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
_AT: dict[Any, Callable[[str, int], bool]] = {
    codes.AT_BEGINNING: lambda text, at: at == 0,
    codes.AT_BEGINNING_STRING: lambda text, at: at == 0,
    codes.AT_END: lambda text, at: text[at:] in ("", "\n"),
    codes.AT_END_STRING: lambda text, at: at == len(text),
    codes.AT_BOUNDARY: _boundary,
    codes.AT_NON_BOUNDARY: lambda text, at: not _boundary(text, at),
}
