"""Round the operands of products to half precision, and no other values.

A product is a matrix product or a convolution. Half precision is float16 or bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.program.equations import opened
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.rewriting import Rewriter


def with_rounded_operands(fun: Callable[..., Any], half: np.dtype) -> Callable[..., Any]:
    """Return ``fun`` with the operands of its products rounded to a half dtype.

    Only floating operands are rounded. A rounded operand keeps its dtype, so all operations keep their dtypes. Compile
    the returned function with the options :data:`jaxmp.inspect.program.calls.AS_WRITTEN`, because XLA otherwise removes
    the roundings. For gradients, pass the gradient function as ``fun``. If you differentiate the returned function
    instead, the cotangents of the rounded operands are also rounded.
    """

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _RoundingRewriter(half).evaluate(*opened(program), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


@dataclasses.dataclass(frozen=True)
class _RoundingRewriter(Rewriter):
    half: np.dtype

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name in PRODUCTS:
            operands = [_rounded(operand, self.half) for operand in operands]
        return super().evaluate_operation(eqn, operands)


def _rounded(operand: Any, half: np.dtype) -> Any:
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return operand
    return operand.astype(half).astype(operand.dtype)
