"""The expressions of mapping files: their values, and the Python that they refuse."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from mckpt.mapping import expression
from mckpt.mapping.expression import Expression, ExpressionError

SCOPE = {
    "a": 3,
    "b": 2.5,
    "xs": [1, 0, 1],
    "none": None,
    "config": {"k": 7, "inner": {"z": 1}},
    "yes": True,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + 2 * 4 - 1", 10),
        ("7 // 2", 3),
        ("7 / 2", 3.5),
        ("7 % 4", 3),
        ("-a", -3),
        ("not yes", False),
        ("a == 3 and b < 3", True),
        ("1 < a <= 3", True),
        ("3 < a <= 3", False),
        ("none or 5", 5),
        ("0 or none", None),
        ("1 and 2", 2),
        ("0 and 2", 0),
        ("xs[0]", 1),
        ("xs[-1]", 1),
        ("config.k", 7),
        ("config.missing", None),
        ("config.inner.z", 1),
        ("config.inner.no.deeper", None),
        ("config.k.deeper", None),
        ("'x' if yes else 'y'", "x"),
        ("a in [1, 3]", True),
        ("a not in [1, 3]", False),
        ("[i * 2 for i in range(4)]", [0, 2, 4, 6]),
        ("[i for i in xs if i]", [1, 1]),
        ("any(xs)", True),
        ("all(xs)", False),
        ("len(xs)", 3),
        ("max(a, 1)", 3),
        ("min(a, 1)", 1),
        ("float(a)", 3.0),
        ("int('4')", 4),
        ("bool(none)", False),
        ("is_list(xs)", True),
        ("is_list(a)", False),
        ("[1] * 3", [1, 1, 1]),
        ("'torch.' + 'float32'", "torch.float32"),
        ("none != None", False),
        ("power(b, 2)", 6.25),
        ("bfloat16(sqrt(2560))", 50.5),  # 50.596
        ("bfloat16(sqrt(5376))", 73.5),  # 73.321
        ("bfloat16(-257)", -256.0),
        ("bfloat16(259)", 260.0),
        ("bfloat16(0)", 0.0),
        ("sum(xs)", 2),
        ("concat([xs, [a], []])", [1, 0, 1, 3]),
        ("starts([2, 1, 2])", [0, 2, 3]),
        ("starts([])", []),
        ("of_layer(from_json('{\"05\": {\"width\": 8}}'), 5, 'width')", 8),
        ("of_layer(from_json('{\"05\": {\"width\": 8}}'), 4, 'width')", None),
        ("of_layer(from_json('{\"05\": {}}'), 5, 'width')", None),
        ("a % 2 == yes % 2", True),
        ("[[j for j in range(i)] for i in range(3)]", [[], [0], [0, 1]]),
        ("True", True),
        (True, True),
        (7, 7),
        (1.5, 1.5),
    ],
)
def test_expressions_have_these_values(text: Any, value: Any) -> None:
    assert Expression(text)(SCOPE) == value


def test_names_lists_only_free_names() -> None:
    assert Expression("[i + layer for i in range(n) if moe[i]]").names == {"layer", "n", "moe"}


# outside the language: statements, calls of other functions, attributes of anything but dicts
NO_EXPRESSIONS = r"""
__import__('os')
().__class__
(1).__class__
[].__class__
''.join(xs)
xs.append(1)
open('x')
eval('1')
lambda: 1
(lambda: 1)()
{1: 2}
{1, 2}
{i for i in xs}
{i: i for i in xs}
(i for i in xs)
(1, 2)
f'{a}'
a := 1
(a := 1)
import os
a; b
a = 1
*xs
range(*xs)
max(key=a)
1 << 9
a | 1
a & 1
a ^ 1
~a
+a
a @ b
a ** 2
await a
yield
xs[0:1]
...
a is b
a is not b
[i for i, j in xs].x
config['k'].x
(a + b).real
print(1)
getattr(a, 'x')
type(a)
range.__call__(3)
any.x(1)
(
1 +
a b
b'x'
1j
"""
ODD = ["", "\x00", "(" * 500 + ")" * 500, "+".join("1" * 1500)]


@pytest.mark.parametrize("text", [*NO_EXPRESSIONS.strip().split("\n"), *ODD])
def test_other_python_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text)


NO_VALUES = r"""
missing
a[0]
xs[9]
1 / 0
power(10, 400)
power(-1, 0.5)
'%d' % a
b % 2
sum([xs, xs], [])
a % 0
none + 1
len(a)
int('x')
[i for i in a]
max()
range('x')
range(10000000)
len(range(0, 99999999999))
[0] * 100000000000
'x' * 100000000000
100000000000 * [0]
[i for i, j in xs]
[i + j for i in xs for j in xs]
any
"""


@pytest.mark.parametrize("text", NO_VALUES.strip().split("\n"))
def test_an_expression_without_a_value_is_an_error(text: str) -> None:
    """The error is raised when the expression is parsed or when it is evaluated. It is immediate
    and always of the same class.
    """
    with pytest.raises(ExpressionError):
        Expression(text)(SCOPE)


# each of them would fill the memory, or take hours
def _nested(around: str, inside: str, depth: int) -> str:
    for _ in range(depth):
        inside = around.replace("HERE", inside)
    return inside


BOMBS = {
    "nested lists": "[[b for b in range(1000000)] for a in range(1000000)]",
    "nested loops": "any([all([b >= 0 for b in range(1000000)]) == 5 for a in range(1000000)])",
    "dear items": f"[{' + '.join(['a'] * 90)} for a in range(1000000)]",
    "replace": "replace('a' * 1000000, 'a', 'b' * 1000000)",
    "join": "join('a' * 1000000, 'b' * 1000000)",
    "concat": "concat([[1] * 1000000] * 1000000)",
    "repeated by a text": "[0] * 1000000 * ('x' * 1000000)",
    "format": "'%3000000000d' % 1",
    "sums of texts": " + ".join(["'a' * 1000000"] * 200),
    "squares": _nested("[a * a for a in [HERE]][0]", "3", 40),
    "doubled texts": _nested("[a + a for a in [HERE]][0]", "'ab'", 34),
    "doubled lists": _nested("[a + a for a in [HERE]][0]", "[1]", 34),
    "shared lists": _nested("[[a, a] for a in [HERE]]", "[1]", 25),
    "compared lists": "[[[[1] * 1000] * 1000] * 1000] == [[[[1] * 1000] * 1000] * 1000]",
    "searched texts": "any(['ab' * 100000 in 'a' * 1000000 for i in range(100000)])",
    "split texts": "[split('a,' * 100000, ',') for i in range(1000)]",
    "least of lists": "min([[0] * 100000] * 1000)",
    "a long number": "0x" + "f" * 9000,
    "a long expression": "+".join(["1"] * 20000),
    "deep": "-" * 5000 + "1",
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_expression_fills_the_memory_or_takes_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenth of the steps, so that the test is quick and the memory is a tenth of the limit
    as well.
    """
    monkeypatch.setattr(expression, "MAX_STEPS", expression.MAX_STEPS // 10)
    tracemalloc.start()
    try:
        with pytest.raises(ExpressionError):
            Expression(BOMBS[name])({})
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_attributes_read_only_dicts() -> None:
    """An attribute never reads a Python object, whatever its name."""

    class Secret:
        k = "secret"

    assert Expression("config.k")({"config": Secret()}) is None
    assert Expression("config.__class__")({"config": {}}) is None
    assert Expression("a.__class__.__base__")(SCOPE) is None
