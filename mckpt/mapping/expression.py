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
_LEAVES: tuple[type, ...] = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Store,
    ast.And,
    ast.Or,
    *_BINARY,
    *_COMPARE,
    *_UNARY,
)
_BRANCHES: tuple[type, ...] = (
    ast.BoolOp,
    ast.IfExp,
    ast.Compare,
    ast.BinOp,
    ast.UnaryOp,
    ast.Call,
    ast.Subscript,
    ast.Attribute,
    ast.List,
)
_NODES = (*_LEAVES, *_BRANCHES, ast.ListComp, ast.comprehension)


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
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ExpressionError(f"{text!r} is no expression: {e}") from None
    nodes = list(ast.walk(tree))
    loops = [g for n in nodes if isinstance(n, ast.ListComp) for g in n.generators]
    bound = {g.target.id for g in loops if isinstance(g.target, ast.Name)}
    names = set()
    for node in nodes:
        if not isinstance(node, _NODES):
            raise ExpressionError(f"{text!r}: {type(node).__name__} is not allowed in a mapping")
        if isinstance(node, ast.Constant) and not (
            node.value is None or isinstance(node.value, (bool, int, float, str))
        ):
            raise ExpressionError(f"{text!r}: {node.value!r} is not allowed in a mapping")
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        ):
            raise ExpressionError(f"{text!r}: only {', '.join(_FUNCTIONS)} can be called")
        if isinstance(node, ast.ListComp) and not (
            len(node.generators) == 1 and isinstance(node.generators[0].target, ast.Name)
        ):
            raise ExpressionError(f"{text!r}: a list is made by one `for` and one name")
        if isinstance(node, ast.Attribute) and not isinstance(
            node.value, (ast.Name, ast.Attribute)
        ):
            raise ExpressionError(f"{text!r}: only names have attributes")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS and node.id not in bound:
            names.add(node.id)
    try:
        return _compiled(tree), frozenset(names)
    except RecursionError:
        raise ExpressionError(f"{text!r} is nested too deeply") from None


def _compiled(node: ast.AST) -> _Value:
    """Returns a node of the tree as a function of the scope. The tree is walked once, because a
    `when` has a value for each layer.
    """
    match node:
        case ast.Constant(value=constant):
            return lambda scope: constant
        case ast.Name(id=name):
            return functools.partial(_named, name)
        case ast.Attribute(attr=attribute):
            of = _compiled(node.value)
            return lambda scope: (
                owner.get(attribute) if isinstance(owner := of(scope), dict) else None
            )
        case ast.BoolOp():
            return functools.partial(
                _either, list(map(_compiled, node.values)), isinstance(node.op, ast.And)
            )
        case ast.UnaryOp():
            unary, operand = _UNARY[type(node.op)], _compiled(node.operand)
            return lambda scope: unary(operand(scope))
        case ast.BinOp():
            binary, left, right = (
                _BINARY[type(node.op)],
                _compiled(node.left),
                _compiled(node.right),
            )
            return lambda scope: binary(left(scope), right(scope))
        case ast.IfExp():
            test, then, otherwise = map(_compiled, (node.test, node.body, node.orelse))
            return lambda scope: then(scope) if test(scope) else otherwise(scope)
        case ast.Compare():
            compared = [
                (_COMPARE[type(op)], _compiled(other))
                for op, other in zip(node.ops, node.comparators, strict=True)
            ]
            return functools.partial(_compare, _compiled(node.left), compared)
        case ast.Subscript():
            whole, index = _compiled(node.value), _compiled(node.slice)
            return lambda scope: whole(scope)[index(scope)]
        case ast.List():
            elements = list(map(_compiled, node.elts))
            return lambda scope: [element(scope) for element in elements]
        case ast.Call(func=ast.Name(id=name)):
            function, arguments = _FUNCTIONS[name], list(map(_compiled, node.args))
            return lambda scope: function(*(argument(scope) for argument in arguments))
        case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name)) as each]):
            return functools.partial(
                _listed,
                name,
                _compiled(each.iter),
                list(map(_compiled, each.ifs)),
                _compiled(node.elt),
            )
    raise ExpressionError(f"{ast.dump(node)} is not allowed in a mapping")


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
