"""Expressions in mapping files: arithmetic, comparisons, indexing and comprehensions over named values. Parsed, never `eval`-ed."""

from __future__ import annotations

import ast
import functools
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

MAX_LENGTH = 1_000_000  # of a list that an expression makes: a config can say any number of layers

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda a, b: a * b if _is_short(a, b) and _is_short(b, a) else _refuse("a repetition"),
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
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
    **{f.__name__: f for f in (all, any, bool, float, int, len, max, min)},
    "range": lambda *a: range(*a) if all(abs(x) <= MAX_LENGTH for x in a) else _refuse(f"range{a}"),
    "is_list": lambda v: isinstance(v, (list, tuple)),
}
_LEAVES: tuple[type, ...] = (ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.And, ast.Or, *_BINARY, *_COMPARE, *_UNARY)
_BRANCHES: tuple[type, ...] = (ast.BoolOp, ast.IfExp, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Attribute, ast.List)
_NODES = (*_LEAVES, *_BRANCHES, ast.ListComp, ast.comprehension)


def _is_short(value: Any, times: Any) -> bool:
    """Whether `value * times` is no list or text that fills the memory."""
    return not isinstance(value, (list, tuple, str)) or len(value) * times <= MAX_LENGTH


def _refuse(what: str) -> Any:
    raise ValueError(f"{what} is longer than a model can need")


class ExpressionError(ValueError):
    """An expression that cannot be parsed or has no value; the caller adds file and line."""


class Expression:
    """One parsed expression. `names` are the free names that it uses."""

    def __init__(self, text: str | bool | int | float) -> None:
        self.text = str(text)
        self.tree, self.names = _parsed(self.text)

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        """The value in a scope of names. `config.some_key` reads a dict and is None where it has no such key."""
        try:
            return _value(self.tree, scope)
        except ExpressionError:
            raise
        except Exception as e:  # a wrong type in a config ends in any of a dozen errors
            raise ExpressionError(f"{self.text!r} has no value: {type(e).__name__}: {e}") from e

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


@functools.cache
def _parsed(text: str) -> tuple[ast.expr, frozenset[str]]:
    """The tree and the free names of an expression, of which a mapping says the same in many places. ExpressionError if it is none."""
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
        if isinstance(node, ast.Constant) and not (node.value is None or isinstance(node.value, (bool, int, float, str))):
            raise ExpressionError(f"{text!r}: {node.value!r} is not allowed in a mapping")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords):
            raise ExpressionError(f"{text!r}: only {', '.join(_FUNCTIONS)} can be called")
        if isinstance(node, ast.Attribute) and not isinstance(node.value, (ast.Name, ast.Attribute)):
            raise ExpressionError(f"{text!r}: only names have attributes")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS and node.id not in bound:
            names.add(node.id)
    return tree, frozenset(names)


def _value(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            try:
                return scope[node.id]
            except KeyError:
                raise ExpressionError(f"{node.id} is not known here") from None
        case ast.Attribute():
            owner = _value(node.value, scope)
            return owner.get(node.attr) if isinstance(owner, dict) else None
        case ast.BoolOp():
            value: Any = None
            for part in node.values:
                value = _value(part, scope)
                if bool(value) != isinstance(node.op, ast.And):
                    return value
            return value
        case ast.UnaryOp():
            return _UNARY[type(node.op)](_value(node.operand, scope))
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, scope), _value(node.right, scope))
        case ast.IfExp():
            return _value(node.body if _value(node.test, scope) else node.orelse, scope)
        case ast.Compare():
            left = _value(node.left, scope)
            for op, comparator in zip(node.ops, node.comparators, strict=True):
                right = _value(comparator, scope)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.Subscript():
            return _value(node.value, scope)[_value(node.slice, scope)]
        case ast.List():
            return [_value(e, scope) for e in node.elts]
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_value(a, scope) for a in node.args))
        case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name)) as each]):
            outer: Any = scope  # ChainMap wants scopes to write in, and none is written
            inner = (ChainMap({name: item}, outer) for item in _value(each.iter, scope))
            return [_value(node.elt, s) for s in inner if all(_value(test, s) for test in each.ifs)]
    raise ExpressionError(f"{ast.dump(node)} is not allowed in a mapping")
