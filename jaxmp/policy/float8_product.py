"""A float8 product and its derivatives.

Each tensor has one scale, which is computed from its largest magnitude ("current scaling"). So a product needs no state
from earlier steps. The program converts each float8 operand to bfloat16, multiplies the operand by its scale, and
multiplies the two bfloat16 operands. XLA recognises this form and compiles it to a float8 product. A device without
float8 runs the bfloat16 product.
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
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jaxmp._internals.jax.cast_with_transpose import cast_with_transpose
from jaxmp._internals.jax.sources import names_of
from jaxmp._internals.jax.traces import manual_axes, may_be_skipped
from jaxmp.policy.float8 import FORWARD_FORMAT, Float8, get_recipe
from jaxmp.program.equations import bodies_of

RESIDUALS = "jaxmp_float8"
"""The name of float8 residuals, for ``jax.checkpoint_policies.save_only_these_names``."""

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
        return _product(dimensions, recipe, jnp.result_type(lhs, rhs), weight, is_fused, is_own)(*operands)


def recipe_of(eqn: Any) -> Float8 | None:
    """Return the recipe of an equation that is a float8 product, or None."""
    bodies = bodies_of(eqn)
    names = names_of(eqn) if bodies is not None and bodies.has_rule else ()
    scope = re.fullmatch(r"jaxmp\.float8\((.*)\)", names[-1]) if names else None
    return get_recipe(scope[1]) if scope else None


@functools.cache
def _product(
    dimensions: Any, recipe: Float8, dtype: np.dtype, weight: str | None, is_fused: bool, is_own: bool
) -> Callable[..., Any]:
    """Return a function that multiplies quantised operands.

    The function is cached, because JAX traces the same function object only once.
    """
    return _Product(dimensions, recipe, dtype, weight, is_fused, is_own).with_derivatives()


@dataclasses.dataclass(frozen=True)
class _Product:
    """A float8 product and its derivative.

    Attributes:
      dimensions, recipe, weight, is_fused: the arguments of :func:`dot_general`.
      dtype: the dtype of the result.
      is_own: whether each shard of a ``shard_map`` has its own scale.
    """

    dimensions: Any
    recipe: Float8
    dtype: np.dtype
    weight: str | None
    is_fused: bool
    is_own: bool

    def with_derivatives(self) -> Callable[..., Any]:
        """Return the product as a function of two results of :func:`quantised`."""
        # The checkpoint stores the float8 operands, not their dequantised values.
        tangent = jax.checkpoint(self._tangent, prevent_cse=False)

        @jax.custom_jvp
        def product(*operands: Any) -> Any:
            return self._forward(*(_opened(operand, FORWARD_FORMAT) for operand in operands))

        def rule(operands: Any, tangents: Any) -> Any:
            operands = [_opened(operand, FORWARD_FORMAT) for operand in operands]
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
        out = _COMPUTE if self.dtype == _COMPUTE else jnp.float32
        result = self._dot(_dequantised(*lhs), _dequantised(*rhs), self.recipe.accumulate == "precise", out)
        # Without the barrier, XLA fuses a later GELU into the product (as GELU_AUX), and crashes in float8.
        return (result if self.is_fused else jax.lax.optimization_barrier(result)).astype(self.dtype)

    def _transpose(self, cotangent: Any) -> Any:
        return dequantised(quantised(cotangent, self.recipe.gradient, self.is_own), self.recipe.gradient)

    def _tangent(self, tangents: Any, operands: Any) -> Any:
        """Return the tangent of the result.

        The tangent is a sum. Each operand that has a tangent adds one term: the product of this tangent and the other
        operand.
        """
        parts_in_float8: list[Any] = []
        parts: list[Any] = []
        for side, tangent in enumerate(tangents):
            if tangent is None:
                continue
            is_exact = self.recipe.weight_gradient == "compute" and self.weight == ("lhs", "rhs")[side]
            value, in_float8, scale = operands[1 - side]
            other = value.astype(_COMPUTE) if is_exact else _dequantised(value, in_float8, scale)
            tangent = tangent.astype(_COMPUTE)
            lhs, rhs = (tangent, other) if side == 0 else (other, tangent)
            part = self._dot(lhs, rhs, not is_exact and self.recipe.accumulate != "fast")
            (parts if is_exact else parts_in_float8).append(part)
        if parts_in_float8:
            total = functools.reduce(jnp.add, parts_in_float8)
            parts.append(cast_with_transpose(total, self.dtype, self._transpose))
        return functools.reduce(jnp.add, [part.astype(self.dtype) for part in parts])


def quantised(value: Any, dtype: str, is_own: bool = False) -> tuple[Any, Any, Any]:
    """Return ``value``, the bits of its quantised float8 array, and the scale.

    If ``is_own`` is true, each shard has its own scale. Otherwise all shards have the same scale.
    """
    scale = checkpoint_name(_scale(value, dtype, is_own), RESIDUALS)
    # JAX rounds a named float8 residual again, as if e4m3fn had infinities, so 256 would become infinite. JAX does not
    # round integers, so the residual is stored as integer bits.
    bits = jax.lax.bitcast_convert_type(_cast(value, scale, dtype), jnp.uint8)
    return value, checkpoint_name(bits, RESIDUALS), scale


def _opened(operand: tuple[Any, Any, Any], dtype: str) -> tuple[Any, Any, Any]:
    """Return the result of :func:`quantised` with its bits as float8 values."""
    value, bits, scale = operand
    return value, jax.lax.bitcast_convert_type(bits, dtype), scale


def dequantised(operand: tuple[Any, Any, Any], dtype: str) -> Any:
    """Return the dequantised operand from the result of :func:`quantised`."""
    return _dequantised(*_opened(operand, dtype))


def _scale(value: Any, dtype: str, is_own: bool = False) -> Any:
    """Return the largest magnitude divided by the largest number of ``dtype``.

    If all values are zero or one is NaN, the scale is 1.
    """
    largest = _largest(jax.lax.stop_gradient(value))
    if not is_own and (axes := manual_axes(value)):
        largest = jax.lax.pmax(largest, axes)
    scale = jax.lax.max(largest * np.float32(1 / float(jnp.finfo(dtype).max)), np.finfo(np.float32).tiny)
    scale = jax.lax.select(largest > 0, scale, jnp.ones_like(scale))
    # The scale is rounded up to a bfloat16 number, because dequantising in bfloat16 must use the same scale as
    # quantising. A scale that exceeds a bfloat16 number only by float32's rounding error is rounded down.
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) + np.uint32(0xFFF0)
    return jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)


@custom_vmap
def _largest(value: Any) -> Any:
    """Return the largest magnitude in ``value``, in float32.

    Under ``jax.vmap``, all examples share the largest magnitude.
    """
    # The maximum of each column is computed first, because XLA does this in the kernel that computes `value`. A single
    # reduction would read `value` again.
    columns = jax.lax.reduce_max(jnp.abs(value), tuple(range(value.ndim - 1)))
    return jax.lax.reduce_max(jax.lax.optimization_barrier(columns), tuple(range(columns.ndim))).astype(jnp.float32)


@_largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: Any, value: Any) -> Any:
    return _largest(value), False  # with one scale per example, XLA would multiply in bfloat16


def _cast(value: Any, scale: Any, dtype: str) -> Any:
    largest = np.float32(jnp.finfo(dtype).max)
    # `value` may be rounded from a float32 array. Without reduce_precision, XLA would read that array here, and so
    # store it or compute it twice.
    info = jnp.finfo(value.dtype)
    rounded = jax.lax.reduce_precision(jax.lax.stop_gradient(value), info.nexp, info.nmant)
    scaled = rounded.astype(jnp.float32) / scale
    return jax.lax.clamp(-largest, scaled, largest).astype(dtype)


@jax.custom_jvp
def _dequantised(value: Any, quantised: Any, scale: Any) -> Any:
    """Return the dequantised array, with the tangent of ``value``.

    ``value`` is not used otherwise, so XLA drops it.
    """
    return quantised.astype(_COMPUTE) * scale.astype(_COMPUTE)


@functools.partial(_dequantised.defjvp, symbolic_zeros=True)
def _straight_through(primals: Any, tangents: Any) -> Any:
    result = _dequantised(*primals)
    is_zero = isinstance(tangents[0], SymbolicZero)
    return result, jnp.zeros_like(result) if is_zero else tangents[0].astype(_COMPUTE)
