"""Round the operands and results of products to half precision, and no other values.

A product is a matrix product or a convolution. Half precision is float16 or bfloat16.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.inspect._budget.rounding import round_if
from jaxmp.program.equations import opened
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.rewriting import Rewriter


class Rounding(enum.IntEnum):
    """The values of products that are rounded."""

    NONE = 0
    OPERANDS = 1
    OPERANDS_AND_RESULTS = 2
    OPERANDS_TO_BFLOAT16 = 3


def with_rounded_products(fun: Callable[..., Any], half: np.dtype) -> Callable[..., Any]:
    """Return ``fun`` with an additional first argument, a :class:`Rounding` of its products.

    Only floating values are rounded. A rounded value keeps its dtype, so all operations keep their dtypes. The argument
    may be traced, so one compiled program serves all roundings. For gradients, pass the gradient function as ``fun``.
    """

    def call(rounding: Any, *args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _RoundingRewriter(half, rounding).evaluate(*opened(program), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


@dataclasses.dataclass(frozen=True)
class _RoundingRewriter(Rewriter):
    half: np.dtype
    rounding: Any

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name not in PRODUCTS:
            return super().evaluate_operation(eqn, operands)
        rounds_results = self.rounding == Rounding.OPERANDS_AND_RESULTS
        rounds_operands = (self.rounding == Rounding.OPERANDS) | rounds_results
        operands = [_rounded(operand, self.half, rounds_operands) for operand in operands]
        if self.half == np.float16:
            to_bfloat16 = self.rounding == Rounding.OPERANDS_TO_BFLOAT16
            operands = [_rounded(operand, np.dtype(jnp.bfloat16), to_bfloat16) for operand in operands]
        results = super().evaluate_operation(eqn, operands)
        return [_rounded(result, self.half, rounds_results) for result in results]


def _rounded(value: Any, half: np.dtype, is_rounded: Any) -> Any:
    is_wider = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > half.itemsize
    return round_if(is_rounded, half, value) if is_wider else value
