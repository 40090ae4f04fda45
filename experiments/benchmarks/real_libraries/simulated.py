"""Rewrite programs so that their values are rounded to half precision.

A rule decides for each equation which values are rounded. The rounded arrays stay float32 arrays, so every equation
keeps its types and is bound again unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp.program.binding import bind_equation
from jaxmp.program.primitives import BODIES, PRODUCTS, Trait, with_trait
from jaxmp.program.rewriting import Rewriter

_INLINED = with_trait(Trait.CUSTOM_DERIVATIVE, Trait.INLINED)
Round = Callable[[Any], Any]
Rule = Callable[[Any, Sequence[Any]], tuple[Sequence[Any], Round | None]]
"""A function of an equation and its operands. It returns the operands to compute with, and a function that rounds the
results (None if they are not rounded)."""


def half_products(fun: Callable[..., Any], half: Any) -> Callable[..., Any]:
    """Return ``fun`` with the operands of products rounded to ``half``.

    This is the rule T of ``run.py``. Products are accumulated in float32, and everything else is float32.
    """
    to_half = _rounding(half)

    def rule(eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], Round | None]:
        if eqn.primitive.name in PRODUCTS:
            return [to_half(operand) for operand in operands], None
        return operands, None

    return _rewritten(fun, rule)


def half_everything(fun: Callable[..., Any], half: Any) -> Callable[..., Any]:
    """Return ``fun`` with all operands and results of equations rounded to ``half``.

    This is the rule N of ``run.py``.
    """
    to_half = _rounding(half)

    def rule(eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], Round | None]:
        return [to_half(operand) for operand in operands], to_half

    return _rewritten(fun, rule)


def _rounding(half: Any) -> Round:
    def to_half(value: Any) -> Any:
        if getattr(value, "dtype", None) != jnp.float32:
            return value
        return jax.lax.reduce_precision(value, *_BITS[jnp.dtype(half).name])

    return to_half


_BITS = {"bfloat16": (8, 7), "float16": (5, 10)}  # bits of the exponent and of the mantissa


def _rewritten(fun: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _RoundingRewriter(rule).evaluate(program.jaxpr, program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


class _RoundingRewriter(Rewriter):
    """A rewriter that rounds values of every jaxpr in the program.

    A jaxpr may also be one that is no body, such as the update function of a scatter.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def evaluate_literal(self, atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype)

    def evaluate_equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name in _INLINED:
            body = eqn.params[BODIES[eqn.primitive.name]]
            return self.evaluate(body.jaxpr, body.consts, operands)
        params = {name: self._rewrite_jaxprs(value) for name, value in eqn.params.items()}
        rounded, round_result = self.rule(eqn, operands)
        results = bind_equation(eqn, rounded, params)
        return results if round_result is None else [round_result(result) for result in results]

    def _rewrite_jaxprs(self, param: Any) -> Any:
        """Return a parameter of an equation with every jaxpr in it rewritten."""

        def is_program(value: Any) -> bool:
            return isinstance(value, (ClosedJaxpr, Jaxpr))

        def rewrite(value: Any) -> Any:
            if not is_program(value) or (isinstance(value, Jaxpr) and value.constvars):
                return value  # a derivative rule, which nothing needs any more
            closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
            avals = [var.aval for var in closed.jaxpr.invars]
            new = jax.make_jaxpr(lambda *args: self.evaluate(closed.jaxpr, closed.consts, args))(*avals)
            return new if value is closed else new.jaxpr

        if not any(is_program(leaf) for leaf in jax.tree.leaves(param, is_leaf=is_program)):
            return param
        return jax.tree.map(rewrite, param, is_leaf=is_program)
