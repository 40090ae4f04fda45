"""Products of half operands with a float32 result.

The level ``"float32_result"`` requests them for logits, routers and attention scores. *Half* is half precision: float16
or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jaxmp.engine.marks import FLOAT32_RESULT
from jaxmp.program.binding import bind_equation
from jaxmp.program.equations import Array, Params


def emit_with_float32_result(eqn: JaxprEqn, operands: Sequence[Array], params: Params) -> list[Array]:
    """Return the float32 result of a product of half operands.

    The derivatives are half products, whose results are cast. JAX's own rule would multiply the float32 cotangent, so
    that the products of the backward pass would be float32.

    Args:
      eqn: the equation of the product.
      operands: its operands.
      params: the parameters of the product with a half result.
    """
    wide_params = {**params, "preferred_element_type": np.dtype(np.float32)}

    @jax.custom_jvp
    def product(*operands: Array) -> Array:
        with jax.named_scope(FLOAT32_RESULT):
            return bind_equation(eqn, operands, wide_params)[0]

    def derivative(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
        terms = []
        for n, tangent in enumerate(tangents):  # a product is linear in each operand
            if not isinstance(tangent, SymbolicZero):
                operands = [*primals[:n], tangent, *primals[n + 1 :]]
                terms.append(bind_equation(eqn, operands, params)[0].astype(jnp.float32))
        return product(*primals), sum(terms[1:], start=terms[0])

    product.defjvp(derivative, symbolic_zeros=True)
    return [product(*operands)]
