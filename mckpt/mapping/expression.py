"""Expressions in mapping files: arithmetic, comparisons, indexing and comprehensions over named
values.

They are parsed and walked, never passed to `eval`.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

_Value = Callable[[Mapping[str, Any]], Any]  # of a scope

MAX_LENGTH = 1_000_000  # of a list that an expression makes: a config can say any number of layers

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda a, b: (
        a * b if _is_short(a, b) and _is_short(b, a) else _refuse("a repetition")
    ),
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: float(a) ** float(b),  # a power of whole numbers could fill the memory
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
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (all, any, bool, float, int, len, max, min, sum)},
    "range": lambda *a: range(*a) if all(abs(x) <= MAX_LENGTH for x in a) else _refuse(f"range{a}"),
    "split": lambda text, by: text.split(by),
    "join": lambda by, texts: by.join(texts),
    "replace": lambda text, old, new: text.replace(old, new),
    "sqrt": math.sqrt,
    "is_list": lambda v: isinstance(v, (list, tuple)),
}


def _is_short(value: Any, times: Any) -> bool:
    """Returns whether `value * times` is short enough not to fill the memory."""
    return not isinstance(value, (list, tuple, str)) or len(value) * times <= MAX_LENGTH


def _refuse(what: str) -> Any:
    raise ValueError(f"{what} is longer than a model can need")


class ExpressionError(ValueError):
    """Raised for an expression that cannot be parsed or has no value; the caller adds file and
    line.
    """


class Expression:
    """One parsed expression. `names` are the free names that it uses."""

    def __init__(self, text: str | bool | int | float) -> None:
        self.text = str(text)
        self.value, self.names = _parsed(self.text)

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        """Returns the value in a scope of names.

        `config.some_key` reads a dict; it is None if the dict lacks the key.
        """
        try:
            return self.value(scope)
        except ExpressionError:
            raise
        except Exception as e:  # a wrong type in a config ends in any of a dozen errors
            raise ExpressionError(f"{self.text!r} has no value: {type(e).__name__}: {e}") from e

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


@functools.cache
def _parsed(text: str) -> tuple[_Value, frozenset[str]]:
    """Returns the value and the free names of an expression.

    Cached, because the same text occurs in many places of a mapping. Raises ExpressionError if
    `text` is not an expression.
    """
    names: set[str] = set()
    try:
        value = _compiled(ast.parse(text.strip(), mode="eval").body, names)
    except RecursionError:
        raise ExpressionError(f"{text!r} is nested too deeply") from None
    except ExpressionError as e:
        raise ExpressionError(f"{text!r}: {e}") from None
    except (SyntaxError, ValueError, MemoryError) as e:
        raise ExpressionError(f"{text!r} is not an expression: {e}") from None
    return value, frozenset(names)


def _compiled(node: ast.AST, names: set[str]) -> _Value:
    """Returns a node of the tree as a function of the scope, and adds its free names to `names`.

    The tree is walked once, because a `when` has a value for each layer. Raises ExpressionError for
    a node that the language does not have.
    """

    def part(child: ast.AST) -> _Value:
        return _compiled(child, names)

    match node:
        case ast.Name(id=name):
            names.add(name)
            return functools.partial(_named, name)
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            return lambda scope: constant
        case ast.Constant(value=constant):
            raise ExpressionError(f"{constant!r} is not allowed in a mapping")
        case ast.Attribute(value=ast.Name() | ast.Attribute() as owned, attr=attribute):
            of = part(owned)
            return lambda scope: (
                owner.get(attribute) if isinstance(owner := of(scope), dict) else None
            )
        case ast.Attribute():
            raise ExpressionError("only names have attributes")
        case ast.BoolOp():
            parts = list(map(part, node.values))
            return functools.partial(_either, parts, isinstance(node.op, ast.And))
        case ast.Compare():
            compared = [
                (_operator(_COMPARE, op), part(other))
                for op, other in zip(node.ops, node.comparators, strict=True)
            ]
            return functools.partial(_compare, part(node.left), compared)
        case ast.UnaryOp():
            unary, operand = _operator(_UNARY, node.op), part(node.operand)
            return lambda scope: unary(operand(scope))
        case ast.BinOp():
            binary, left, right = _operator(_BINARY, node.op), part(node.left), part(node.right)
            return lambda scope: binary(left(scope), right(scope))
        case ast.IfExp():
            test, then, otherwise = map(part, (node.test, node.body, node.orelse))
            return lambda scope: then(scope) if test(scope) else otherwise(scope)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            function, arguments = _FUNCTIONS[name], list(map(part, node.args))
            return lambda scope: function(*(argument(scope) for argument in arguments))
        case ast.Call():
            raise ExpressionError(f"only {', '.join(_FUNCTIONS)} can be called")
        case ast.Subscript():
            whole, index = part(node.value), part(node.slice)
            return lambda scope: whole(scope)[index(scope)]
        case ast.List():
            elements = list(map(part, node.elts))
            return lambda scope: [element(scope) for element in elements]
        case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name)) as each]):
            inner: set[str] = set()  # of what is computed for each element
            tests = [_compiled(test, inner) for test in each.ifs]
            element = _compiled(node.elt, inner)
            names |= inner - {name}
            return functools.partial(_listed, name, part(each.iter), tests, element)
        case ast.ListComp():
            raise ExpressionError("a list is made by one `for` and one name")
    raise ExpressionError(f"{type(node).__name__} is not allowed in a mapping")


def _operator(known: Mapping[type, Callable[..., Any]], node: ast.AST) -> Callable[..., Any]:
    if (found := known.get(type(node))) is None:
        raise ExpressionError(f"{type(node).__name__} is not allowed in a mapping")
    return found


def _named(name: str, scope: Mapping[str, Any]) -> Any:
    try:
        return scope[name]
    except KeyError:
        raise ExpressionError(f"{name} is not known here") from None


def _either(parts: list[_Value], all_of: bool, scope: Mapping[str, Any]) -> Any:
    """Returns the first part that decides, or the last."""
    value: Any = None
    for part in parts:
        value = part(scope)
        if bool(value) != all_of:
            return value
    return value


def _compare(
    first: _Value, rest: list[tuple[Callable[[Any, Any], Any], _Value]], scope: Mapping[str, Any]
) -> bool:
    left = first(scope)
    for compare, part in rest:
        right = part(scope)
        if not compare(left, right):
            return False
        left = right
    return True


def _listed(
    name: str, each: _Value, tests: list[_Value], element: _Value, scope: Mapping[str, Any]
) -> list[Any]:
    outer: Any = scope  # ChainMap wants scopes to write in, and none is written
    inner = (ChainMap({name: item}, outer) for item in each(scope))
    return [element(s) for s in inner if all(test(s) for test in tests)]
