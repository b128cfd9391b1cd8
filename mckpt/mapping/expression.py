"""Expressions in mapping files: arithmetic, comparisons, indexing and comprehensions over named
values.

They are parsed and walked, never passed to `eval`. A mapping file may come with a checkpoint, so
each evaluation has a limit on its steps. A value costs a step for each of its items when it is
made, so the limit also bounds the memory.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from mckpt.errors import MappingError

MAX_TEXT = 10_000  # characters; ten times the longest one in mappings/
# Twice as many as the longest lists of a model of 10,000 layers need. They take a few seconds.
MAX_STEPS = 4_000_000
MAX_NUMBER = 1 << 64  # of whole numbers that an expression makes
_ITEM = 4  # steps for an item of a list that a comprehension makes: its memory, and its turn
_SIZED = (str, list, tuple, dict, range)


class _StepsLeft:
    """The steps that are left to one evaluation."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def take(self, number: int) -> None:
        """Takes a number of steps. Raises ValueError if so many are not left."""
        self.left -= number
        if self.left < 0:
            raise ValueError(f"takes more than {MAX_STEPS:,} steps, and no model needs so many")

    def walk(self, value: Any) -> None:
        """Takes a step for each character and item in a value, as an operation on all of them
        does.
        """
        if isinstance(value, _SIZED):
            self.take(len(value))
        if isinstance(value, str):
            return  # before the other tests: most values are texts
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, _SIZED):
                    self.walk(item)

    def made(self, value: Any) -> Any:
        """Returns a value that an operation has made, after the steps for its size."""
        if isinstance(value, _SIZED):
            self.take(len(value))
        elif isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise ValueError("a whole number beyond 2 ** 64")
        return value


_Value = Callable[[Mapping[str, Any], _StepsLeft], Any]  # of a scope


def _times(a: Any, b: Any) -> Any:
    """Returns a product, or the repetition of a list or text."""
    for value, times in ((a, b), (b, a)):
        if isinstance(value, _SIZED) and isinstance(times, int):
            _refuse_long(len(value) * times)
    return a * b


def _modulo(a: Any, b: Any) -> int:
    if not (isinstance(a, int) and isinstance(b, int)):  # `%` formats a text
        raise TypeError("% is for whole numbers")
    return a % b


def _range(*bounds: int) -> range:
    for bound in bounds:
        _refuse_long(abs(bound))
    return range(*bounds)


def _join(by: str, texts: list[str]) -> str:
    _refuse_long(len(by) * len(texts))
    return by.join(texts)


def _replace(text: str, old: str, new: str) -> str:
    _refuse_long(text.count(old) * len(new))
    return text.replace(old, new)


def _concat(lists: list[list[Any]]) -> list[Any]:
    _refuse_long(sum(map(len, lists)))
    return list(itertools.chain.from_iterable(lists))


def _starts(lengths: list[int]) -> list[int]:
    """Returns where each of several parts begins, if they follow each other: the sum of the lengths
    before it.
    """
    return [
        end - length for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)
    ]


def _bfloat16(number: float) -> float:
    """Returns the nearest value of bfloat16, whose mantissas have 8 bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _of_layer(layers: dict[str, Any] | None, number: int, key: str) -> Any:
    """Returns the value of a key for one layer, from an object whose keys are numbers of layers,
    such as "5" or "05". None without it.
    """
    found = (values.get(key) for name, values in (layers or {}).items() if int(name) == number)
    return next(found, None)


def _by_layer(items: list[Any]) -> dict[str, Any]:
    """Returns an object whose keys are the numbers of the items that are not None."""
    return {str(number): item for number, item in enumerate(items) if item is not None}


def _refuse_long(length: int) -> None:
    """Raises ValueError for a value that costs more steps than there are, before it is made."""
    if length > MAX_STEPS:
        raise ValueError("a value longer than any model needs")


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: _modulo,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
# those that look at no item of their arguments
_AT_ONCE: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "is_list": lambda v: isinstance(v, (list, tuple)),
    "len": len,
    "range": _range,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (all, any, float, int, max, min)},
    "sum": lambda numbers: sum(numbers),  # Python's has a second argument: sum(lists, [])
    "power": math.pow,
    "sqrt": math.sqrt,
    "bfloat16": _bfloat16,
    "split": lambda text, by: text.split(by),
    "join": _join,
    "replace": _replace,
    "concat": _concat,
    "starts": _starts,
    "of_layer": _of_layer,
    "by_layer": _by_layer,
    "to_json": lambda value: json.dumps(value, allow_nan=False),
    "from_json": json.loads,
    **_AT_ONCE,
}


class ExpressionError(MappingError, ValueError):
    """Raised for an expression that cannot be parsed or has no value. A caller that reads a mapping
    file adds file and line; elsewhere the values of a checkpoint are at fault.
    """


class Expression:
    """One expression. It is parsed here, or with `later` when it is first used: a conversion uses
    half of the expressions in the files that come with mckpt, which a test parses all.
    """

    def __init__(self, text: str | bool | int | float, later: bool = False) -> None:
        self.text = str(text)
        if not later:
            _parsed(self.text)

    @property
    def names(self) -> frozenset[str]:
        """The free names that it uses."""
        return _parsed(self.text)[1]

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        """Returns the value in a scope of names.

        `config.some_key` reads a dict; it is None if the dict lacks the key.
        """
        steps = _StepsLeft()
        try:
            value = _parsed(self.text)[0](scope, steps)
            if isinstance(value, _SIZED):
                steps.walk(value)  # one item may be in a list many times
        except ExpressionError:
            raise
        except Exception as e:  # a wrong type in a config ends in any of a dozen errors
            why = f"{type(e).__name__}: {str(e)[:500]}"
            raise ExpressionError(f"{self.text!r} has no value: {why}") from e
        return value

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


class _Parts:
    """The free names of an expression or a part of one, and its number of operations."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.number = 0


@functools.cache
def _parsed(text: str) -> tuple[_Value, frozenset[str]]:
    """Returns the value and the free names of an expression.

    Cached, because the same text occurs in many places of a mapping. Raises ExpressionError if
    `text` is not an expression.
    """
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"{text[:80]!r}... has {len(text):,} characters, above {MAX_TEXT:,}")
    parts = _Parts()
    try:
        value = _compiled(ast.parse(text.strip(), mode="eval").body, parts)
    except RecursionError:
        raise ExpressionError(f"{text!r} is nested too deeply") from None
    except ExpressionError as e:
        raise ExpressionError(f"{text!r}: {e}") from None
    except (SyntaxError, ValueError, MemoryError) as e:
        raise ExpressionError(f"{text!r} is not an expression: {e}") from None
    return value, frozenset(parts.names)


def _compiled(node: ast.AST, parts: _Parts) -> _Value:
    """Returns a node of the tree as a function of the scope, and adds it to `parts`.

    The tree is walked once, because a `when` has a value for each layer. Raises ExpressionError for
    a node that the language does not have.
    """
    parts.number += 1

    def part(child: ast.AST) -> _Value:
        return _compiled(child, parts)

    match node:
        case ast.Name(id=name):
            parts.names.add(name)
            return functools.partial(_named, name)
        case ast.Constant(value=int() as constant) if abs(constant) > MAX_NUMBER:
            raise ExpressionError("a whole number beyond 2 ** 64 is not allowed in a mapping")
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            return lambda scope, steps: constant
        case ast.Constant(value=constant):
            raise ExpressionError(f"{constant!r} is not allowed in a mapping")
        case ast.Attribute(value=ast.Name() | ast.Attribute() as owned, attr=attribute):
            of = part(owned)
            return lambda scope, steps: (
                owner.get(attribute) if isinstance(owner := of(scope, steps), dict) else None
            )
        case ast.Attribute():
            raise ExpressionError("only names have attributes")
        case ast.BoolOp():
            either = list(map(part, node.values))
            return functools.partial(_either, either, isinstance(node.op, ast.And))
        case ast.Compare():
            compared = [
                (_operator(_COMPARE, op), part(other))
                for op, other in zip(node.ops, node.comparators, strict=True)
            ]
            return functools.partial(_compare, part(node.left), compared)
        case ast.UnaryOp():
            unary, operand = _operator(_UNARY, node.op), part(node.operand)
            return lambda scope, steps: unary(operand(scope, steps))
        case ast.BinOp():
            binary, left, right = _operator(_BINARY, node.op), part(node.left), part(node.right)
            return lambda scope, steps: steps.made(binary(left(scope, steps), right(scope, steps)))
        case ast.IfExp():
            test, then, otherwise = map(part, (node.test, node.body, node.orelse))
            return lambda scope, steps: (then if test(scope, steps) else otherwise)(scope, steps)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return functools.partial(_called, name, list(map(part, node.args)))
        case ast.Call():
            raise ExpressionError(f"only {', '.join(_FUNCTIONS)} can be called")
        case ast.Subscript():
            whole, index = part(node.value), part(node.slice)
            return lambda scope, steps: whole(scope, steps)[index(scope, steps)]
        case ast.List():
            elements = list(map(part, node.elts))
            return lambda scope, steps: [element(scope, steps) for element in elements]
        case ast.Dict():
            names = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            if not all(isinstance(name, str) for name in names):
                raise ExpressionError("the keys of an object are texts")
            values = list(map(part, node.values))
            return lambda scope, steps: {
                name: value(scope, steps) for name, value in zip(names, values, strict=True)
            }
        case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name)) as each]):
            inner = _Parts()  # of the expressions that have a value for each item
            tests = [_compiled(test, inner) for test in each.ifs]
            element = _compiled(node.elt, inner)
            parts.names |= inner.names - {name}
            parts.number += inner.number
            cost = _ITEM + inner.number
            return functools.partial(_listed, name, part(each.iter), tests, element, cost)
        case ast.ListComp():
            raise ExpressionError("a list is made by one `for` and one name")
    raise ExpressionError(f"{type(node).__name__} is not allowed in a mapping")


def _operator(known: Mapping[type, Callable[..., Any]], node: ast.AST) -> Callable[..., Any]:
    if (found := known.get(type(node))) is None:
        raise ExpressionError(f"{type(node).__name__} is not allowed in a mapping")
    return found


def _named(name: str, scope: Mapping[str, Any], steps: _StepsLeft) -> Any:
    try:
        return scope[name]
    except KeyError:
        raise ExpressionError(f"{name} is not known here") from None


def _either(parts: list[_Value], all_of: bool, scope: Mapping[str, Any], steps: _StepsLeft) -> Any:
    """Returns the first part that decides, or the last."""
    value: Any = None
    for part in parts:
        value = part(scope, steps)
        if bool(value) != all_of:
            return value
    return value


def _compare(
    first: _Value,
    rest: list[tuple[Callable[[Any, Any], Any], _Value]],
    scope: Mapping[str, Any],
    steps: _StepsLeft,
) -> bool:
    left = first(scope, steps)
    for compare, part in rest:
        right = part(scope, steps)
        if isinstance(right, _SIZED):
            steps.walk(left)
            steps.walk(right)
        if not compare(left, right):
            return False
        left = right
    return True


def _called(name: str, arguments: list[_Value], scope: Mapping[str, Any], steps: _StepsLeft) -> Any:
    values = [argument(scope, steps) for argument in arguments]
    if name in _AT_ONCE:
        return _AT_ONCE[name](*values)
    for value in values:
        steps.walk(value)
    return steps.made(_FUNCTIONS[name](*values))


def _listed(
    name: str,
    each: _Value,
    tests: list[_Value],
    element: _Value,
    cost: int,
    scope: Mapping[str, Any],
    steps: _StepsLeft,
) -> list[Any]:
    own: dict[str, Any] = {}
    outer: Any = scope  # ChainMap wants scopes to write in, and none is written
    inner, out = ChainMap(own, outer), []
    for item in each(scope, steps):
        steps.take(cost)
        own[name] = item
        if all(test(inner, steps) for test in tests):
            out.append(element(inner, steps))
    return out
