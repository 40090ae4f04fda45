"""Round the operands of products to half precision, and no other values.

A product is a matrix product or a convolution. Half precision is float16 or bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.program import equations
from jaxmp.program.bodies import UNCHANGED_RULES, bind_equation, rebuilt
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import interpreted


def with_rounded_operands(fun: Callable[..., Any], half: np.dtype) -> Callable[..., Any]:
    """Return ``fun`` with the operands of its products rounded to a half dtype.

    Only floating operands are rounded. A rounded operand keeps its dtype, so all operations keep their dtypes. Compile
    the returned function with the options :data:`jaxmp.inspect.program.calls.AS_WRITTEN`, because XLA otherwise removes
    the roundings. For gradients, pass the gradient function as ``fun``. If you differentiate the returned function
    instead, the cotangents of the rounded operands are also rounded.
    """

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _evaluate(program, half, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _evaluate(program: Any, half: np.dtype, args: Sequence[Any]) -> list[Any]:
    jaxpr, consts = equations.opened(program)
    return interpreted(jaxpr, consts, args, functools.partial(_evaluate_equation, half))


def _evaluate_equation(half: np.dtype, eqn: Any, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name in PRODUCTS:
        operands = [_rounded(operand, half) for operand in operands]
    bodies = equations.bodies_of(eqn)
    if bodies is None:
        return bind_equation(eqn, operands, eqn.params)

    def body(program: Any) -> Callable[..., list[Any]]:
        return lambda *args: _evaluate(program, half, args)

    return list(rebuilt(eqn, bodies, [body(program) for program in bodies.jaxprs], UNCHANGED_RULES)(*operands))


def _rounded(operand: Any, half: np.dtype) -> Any:
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return operand
    return operand.astype(half).astype(operand.dtype)
