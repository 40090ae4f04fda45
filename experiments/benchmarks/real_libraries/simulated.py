"""Rewrite programs so that their values are rounded to half precision.

A rule decides for each equation which values are rounded. The rounded arrays stay float32 arrays, so every equation
keeps its types and is bound again unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxmp.program.primitives import BODIES, PRODUCTS, Trait, with_trait

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
        results = _evaluated(program.jaxpr, program.consts, jax.tree.leaves(args), rule)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _evaluated(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rule: Rule) -> list[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        results = _results(eqn, operands, rule)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, operands: Sequence[Any], rule: Rule) -> Sequence[Any]:
    if eqn.primitive.name in _INLINED:
        body = eqn.params[BODIES[eqn.primitive.name]]
        return _evaluated(body.jaxpr, body.consts, operands, rule)
    params = {name: _rewritten_bodies(value, rule) for name, value in eqn.params.items()}
    operands, round_result = rule(eqn, operands)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    results = results if eqn.primitive.multiple_results else [results]
    return results if round_result is None else [round_result(result) for result in results]


def _rewritten_bodies(param: Any, rule: Rule) -> Any:
    """Return a parameter of an equation with every jaxpr in it rewritten."""

    def is_program(value: Any) -> bool:
        return isinstance(value, (ClosedJaxpr, Jaxpr))

    def rewritten(value: Any) -> Any:
        if not is_program(value) or (isinstance(value, Jaxpr) and value.constvars):
            return value  # a derivative rule, which nothing needs any more
        closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
        avals = [var.aval for var in closed.jaxpr.invars]
        new = jax.make_jaxpr(lambda *args: _evaluated(closed.jaxpr, closed.consts, args, rule))(*avals)
        return new if value is closed else new.jaxpr

    if not any(is_program(leaf) for leaf in jax.tree.leaves(param, is_leaf=is_program)):
        return param
    return jax.tree.map(rewritten, param, is_leaf=is_program)
