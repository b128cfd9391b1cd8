"""Regular expressions have the meaning of Python's `re`, and none takes long."""

from __future__ import annotations

import random
import re
import time
import warnings

import pytest

from mckpt.mapping.patterns import Pattern, PatternError

ATOMS = [
    *("a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "$", "^", r"\b", r"\B", "", "(?s:.)"),
    *("(?!a)", "(?=b)", "(?<=a)", "(?<!b)", "(?i:A)", "(?i:[^b-c])", r"(?a:\W)"),
]
REPEATS = ("*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}", "{2,}", "")


def drawn(choose: random.Random, depth: int) -> str:
    """Returns a random expression."""
    kind = choose.random() if depth else 0
    if kind < 0.35:
        return choose.choice(ATOMS)
    if kind < 0.55:
        return f"({drawn(choose, depth - 1)}){choose.choice(REPEATS)}"
    if kind < 0.75:
        return f"(?:{drawn(choose, depth - 1)}|{drawn(choose, depth - 1)})"
    return drawn(choose, depth - 1) + drawn(choose, depth - 1)


def test_random_expressions_match_as_in_python() -> None:
    choose, matched = random.Random(1), 0
    for _ in range(3000):
        expression = drawn(choose, 4)
        if len(re.findall("[*+,]", expression)) > 8:
            continue  # these take long in Python
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = re.compile(expression)
        ours = Pattern(expression)
        for _ in range(3):
            text = "".join(
                choose.choices("abA.1\n", (4, 4, 1, 3, 1, 0.5), k=choose.randrange(1, 8))
            )
            wanted = bool(theirs.match(text)), bool(theirs.fullmatch(text))
            assert (ours.match(text), ours.fullmatch(text)) == wanted, (expression, text)
            matched += wanted[1]
    assert matched > 500


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("(.*)*x", "a" * 200),
        ("((((.*.)*.)*.)*.)*x$", "ab" * 500),
        ("(((a*b)*c)*d)*x$", "aabcaabcd" * 100),
        ("((((a?){1000}){1000}){1000}){60000}x", "a" * 500),
        ("(?:(?=.*b).)*x", "a" * 2000),
        ("(a|b|ab|ba)*$", "ab" * 1000),
    ],
)
def test_no_expression_takes_long(expression: str, text: str) -> None:
    began = time.perf_counter()
    try:
        Pattern(expression).match(text)
    except PatternError as e:
        assert "takes too long" in str(e)
    assert time.perf_counter() - began < 2  # Python takes longer than the universe exists


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("(" * 4000 + ")" * 4000, "brackets inside each other"),
        ("(" * 60 + "a" + ")" * 60, "more than 50 parts"),
        ("a{99999999999}", "repetition number is too large"),
        ("x(?i)Q", "is not a regular expression"),
        (r"(a)\1", "groupref"),
        ("(?m)^a", "has a flag"),
        ("a" * 20000, "20,000 characters"),
        ("(", "is not a regular expression"),
    ],
)
def test_expressions_that_are_not_matched(expression: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        Pattern(expression)
    with pytest.raises(PatternError, match="3,000 characters"):
        Pattern("a").match("a" * 3000)
