"""A float8 product and its derivatives.

For a GPU, the program converts each float8 operand to bfloat16, multiplies the operand by its scale, and multiplies the
two bfloat16 operands. XLA recognises this form and compiles it to a float8 product. A device without float8 runs the
bfloat16 product. For a TPU, the program multiplies the float8 operands: see ``direct_product.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxmp._internals.jax.cast_with_transpose import cast_with_transpose
from jaxmp._internals.jax.hi_primitives import transposable_checkpoint
from jaxmp._internals.jax.sources import names_of
from jaxmp._internals.jax.traces import may_be_skipped
from jaxmp.policy import direct_product, float8
from jaxmp.policy.float8 import FORWARD_FORMAT, Float8, get_recipe
from jaxmp.policy.quantisation import as_float8, dequantised, quantised
from jaxmp.program.equations import bodies_of

_COMPUTE = np.dtype(jnp.bfloat16)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    recipe: Float8,
    *,
    weight: str | None = None,
    is_fused: bool = False,
) -> jax.Array:
    """Compute ``jax.lax.dot_general`` and its derivatives in float8.

    The examples of a ``jax.vmap`` share one scale, and so do the shards of an array. In a branch or a loop of a
    ``shard_map`` each shard has its own scale. A NaN in an operand makes only those results NaN that are computed from
    it. An infinity makes the whole result NaN. Derivatives treat the quantisation as the identity. The residuals are
    float8 arrays, named :data:`RESIDUALS`. If you differentiate without ``jax.jit``, the operands are stored too.

    Args:
      lhs: a floating array, bfloat16 under a policy.
      rhs: the other operand.
      dimension_numbers: as ``jax.lax.dot_general`` takes them. They may have batch dimensions.
      recipe: the settings of the product: the formats, the accumulation and the residuals.
      weight: the operand to which ``recipe.weight_gradient`` applies, ``"lhs"`` or ``"rhs"``; None if neither is a
        weight.
      is_fused: whether XLA may fuse the operation that reads the result into the product's kernel. XLA crashes if it
        fuses a bfloat16 GELU of the tanh form, so pass True only if you know which operation reads the result.

    >>> x, w = jax.numpy.full((16, 32), 0.4375), jax.numpy.full((32, 16), 0.875)  # 448 times a power of two: exact
    >>> float(dot_general(x, w, (((1,), (0,)), ((), ())), jaxmp.Float8())[0, 0])
    12.25
    """
    contracting, batch = dimension_numbers
    dimensions = tuple(map(tuple, contracting)), tuple(map(tuple, batch))
    with jax.named_scope(f"jaxmp.float8({recipe})"):
        # The operands are quantised outside of the product, so that a weight is quantised once for several products.
        is_own = may_be_skipped()
        operands = quantised(lhs, FORWARD_FORMAT, is_own), quantised(rhs, FORWARD_FORMAT, is_own)
        dtype = jnp.result_type(lhs, rhs)
        return _product(dimensions, recipe, dtype, weight, is_fused, is_own, float8.is_direct())(*operands)


def recipe_of(eqn: Any) -> Float8 | None:
    """Return the recipe of an equation that is a float8 product, or None."""
    bodies = bodies_of(eqn)
    names = names_of(eqn) if bodies is not None and bodies.has_rule else ()
    scope = re.fullmatch(r"jaxmp\.float8\((.*)\)", names[-1]) if names else None
    return get_recipe(scope[1]) if scope else None


@functools.cache
def _product(
    dimensions: Any,
    recipe: Float8,
    dtype: np.dtype,
    weight: str | None,
    is_fused: bool,
    is_own: bool,
    is_direct: bool,
) -> Callable[..., Any]:
    """Return a function that multiplies quantised operands.

    The function is cached, because JAX traces the same function object only once.
    """
    return _Product(dimensions, recipe, dtype, weight, is_fused, is_own, is_direct).with_derivatives()


@dataclasses.dataclass(frozen=True)
class _Product:
    """A float8 product and its derivative.

    Attributes:
      dimensions, recipe, weight, is_fused: the arguments of :func:`dot_general`.
      dtype: the dtype of the result.
      is_own: whether each shard of a ``shard_map`` has its own scale.
      is_direct: whether float8 operands are multiplied without casts to bfloat16.
    """

    dimensions: Any
    recipe: Float8
    dtype: np.dtype
    weight: str | None
    is_fused: bool
    is_own: bool
    is_direct: bool

    def with_derivatives(self) -> Callable[..., Any]:
        """Return the product as a function of two results of :func:`quantised`."""
        # The checkpoint stores the float8 operands, not their dequantised values.
        tangent = transposable_checkpoint(self._tangent)

        @jax.custom_jvp
        def product(*operands: Any) -> Any:
            return self._forward(*(as_float8(operand, FORWARD_FORMAT) for operand in operands))

        def rule(operands: Any, tangents: Any) -> Any:
            operands = [as_float8(operand, FORWARD_FORMAT) for operand in operands]
            result = self._forward(*operands)
            nonzero = [None if isinstance(value, SymbolicZero) else value for value, _, _ in tangents]
            if nonzero == [None, None]:
                return result, jnp.zeros_like(result)
            read = [operands[side] if nonzero[1 - side] is not None else None for side in (0, 1)]
            return result, tangent(nonzero, read)

        product.defjvp(rule, symbolic_zeros=True)
        return product

    def _dot(self, lhs: Any, rhs: Any, is_precise: bool, out: Any = _COMPUTE) -> Any:
        precision = jax.lax.Precision.HIGHEST if is_precise else jax.lax.Precision.DEFAULT
        return jax.lax.dot_general(lhs, rhs, self.dimensions, precision=precision, preferred_element_type=out)

    def _forward(self, lhs: Any, rhs: Any) -> Any:
        if self.is_direct:
            return direct_product.multiplied(lhs, rhs, self.dimensions).astype(self.dtype)
        out = _COMPUTE if self.dtype == _COMPUTE else jnp.float32
        result = self._dot(dequantised(*lhs), dequantised(*rhs), self.recipe.accumulate == "precise", out)
        # Without the barrier, XLA fuses a later GELU into the product (as GELU_AUX), and crashes in float8.
        return (result if self.is_fused else jax.lax.optimization_barrier(result)).astype(self.dtype)

    def _transpose(self, cotangent: Any) -> Any:
        gradient = self.recipe.gradient
        return dequantised(*as_float8(quantised(cotangent, gradient, self.is_own), gradient))

    def _tangent(self, tangents: Any, operands: Any) -> Any:
        """Return the tangent of the result.

        The tangent is a sum. Each operand that has a tangent adds one term: the product of this tangent and the other
        operand.
        """
        parts: list[Any] = []
        tangents_in_float8 = list(tangents)
        for side, tangent in enumerate(tangents):
            if tangent is not None and self._is_exact(side):
                parts.append(self._part(side, tangent, operands[1 - side][0].astype(_COMPUTE), is_precise=False))
                tangents_in_float8[side] = None
        if any(tangent is not None for tangent in tangents_in_float8):
            parts.append(self._tangent_in_float8(tangents_in_float8, operands))
        return functools.reduce(jnp.add, [part.astype(self.dtype) for part in parts])

    def _is_exact(self, side: int) -> bool:
        """Return whether the gradient of an operand is computed without float8."""
        return self.recipe.weight_gradient == "compute" and self.weight == ("lhs", "rhs")[side]

    def _part(self, side: int, tangent: Any, other: Any, is_precise: bool) -> Any:
        tangent = tangent.astype(_COMPUTE)
        lhs, rhs = (tangent, other) if side == 0 else (other, tangent)
        return self._dot(lhs, rhs, is_precise)

    def _tangent_in_float8(self, tangents: Any, operands: Any) -> Any:
        """Return the tangent of the result, whose transpose multiplies the quantised cotangent."""
        if self.is_direct:
            return direct_product.tangent_of_product(
                tangents, operands, self.dimensions, self.dtype, self.recipe.gradient, self.is_own
            )
        is_precise = self.recipe.accumulate != "fast"
        parts = []
        for side, tangent in enumerate(tangents):
            if tangent is not None:
                parts.append(self._part(side, tangent, dequantised(*operands[1 - side]), is_precise))
        return cast_with_transpose(functools.reduce(jnp.add, parts), self.dtype, self._transpose)
