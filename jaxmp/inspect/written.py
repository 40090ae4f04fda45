"""The numbers that the source of an equation has, which JAX may have rounded while it traced."""

from __future__ import annotations

import ast
import functools
import linecache
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxmp._jaxpr import reading

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Add: operator.add, ast.Sub: operator.sub, ast.Pow: operator.pow,
    ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_NAME = re.compile(r"(\.?)(?<!\w)([^\W\d]\w*)")
_CASTS = frozenset({"asarray", "array", "float16", "bfloat16", "half", "float32", "float64"})


def numbers_of(eqn: Any, *, is_array: bool) -> Iterator[float]:
    """The numbers in the expression of an equation, then those that its file binds to the names in it.

    Args:
      is_array: whether a name stands for every number in what is bound to it, unless an infinity is written there; else
        for the lone number, cast maybe, that it is.
    """
    file, line, code = reading.user_code_of(eqn)
    yield from _numbers_in(code)
    bound = list(_bound_in(code, file, line))
    if not is_array:
        yield from (number for node in bound if (number := _number(_uncast(node))) is not None)
    elif not any(name == "inf" for node in bound for _, name in _NAME.findall(ast.unparse(node))):
        yield from (number for node in bound for number in _numbers_in(ast.unparse(node)))


class _Binding(NamedTuple):
    """What a name is bound to, and the lines of the function that binds it, or of the whole file."""

    first: int
    last: float
    node: ast.expr


def _bound_in(code: str, file: str, line: int) -> Iterator[ast.expr]:
    """What the names in an expression are bound to: attributes anywhere, others by the innermost function around it."""
    for dot, name in dict.fromkeys(_NAME.findall(code)):
        found = [each for each in _bindings(file).get(name, ()) if dot or each.first <= line <= each.last]
        innermost = max((each.first for each in found), default=0)
        yield from (each.node for each in found if dot or each.first == innermost)


@functools.lru_cache(maxsize=64)
def _bindings(file: str) -> dict[str, list[_Binding]]:
    """What a file binds to each name: by assignments, defaults and keywords."""
    found: dict[str, list[_Binding]] = {}

    def visit(node: ast.AST, first: int, last: float) -> None:
        pairs: list[tuple[Any, ast.expr | None]] = []
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = [*zip(targets, values, strict=False)]
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=value):
                pairs = [(target, value)]
            case ast.keyword(value=value):
                pairs, first, last = [(node, value)], 0, math.inf
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args) | ast.Lambda(args=args):
                first, last = node.lineno, node.end_lineno or math.inf
                defaults = reversed([*args.posonlyargs, *args.args]), reversed(args.defaults)
                pairs = [*zip(*defaults, strict=False), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        for target, bound in pairs:
            name = next((text for part in ("id", "attr", "arg") if (text := getattr(target, part, None))), None)
            if name and bound:
                found.setdefault(name, []).append(_Binding(first, last, bound))
        for child in ast.iter_child_nodes(node):
            visit(child, first, last)

    try:
        visit(ast.parse("".join(linecache.getlines(file))), 0, math.inf)
    except SyntaxError:  # a notebook's cell with magic
        return {}
    return found


def _uncast(node: ast.AST) -> ast.AST:
    """What is cast in ``jnp.asarray(1e-8, dtype)`` and its like."""
    match node:
        case ast.Call(func=ast.Attribute(value=held, attr="astype")):
            return _uncast(held)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[held, *_]) if name in _CASTS:
            return _uncast(held)
    return node


def _numbers_in(code: str) -> Iterator[float]:
    """The numbers that are written in an expression, sums, powers and quotients of numbers computed."""
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:  # a part of a statement
        yield from (float(number) for number in _NUMBER.findall(code))
        return
    for node in ast.walk(tree):
        if (number := _number(node)) is not None:
            yield number


def _number(node: ast.AST) -> float | None:
    parts: tuple[ast.AST, ...]
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=op, operand=operand):
            parts = (operand,)
        case ast.BinOp(left=left, op=op, right=right):
            parts = (left, right)
        case _:
            return None
    try:
        return float(_OPERATORS[type(op)](*map(_number, parts)))
    except (ArithmeticError, KeyError, TypeError):  # another operator, or of what is no number, or a complex result
        return None
