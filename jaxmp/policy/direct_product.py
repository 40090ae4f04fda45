"""Float8 products as a TPU computes them.

The compiler for TPUs multiplies float8 arrays directly. It does not recognise the form that XLA for GPUs compiles to a
float8 product. So the program multiplies the float8 arrays, and multiplies the float32 result by both scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp._internals.jax.linear_with_transpose import linear_with_transpose
from jaxmp.policy.quantisation import as_float8, dequantised, quantised

Operand = tuple[Any, Any, Any]
"""A result of :func:`~jaxmp.policy.quantisation.as_float8`: an array, its float8 array, and the scale."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def multiplied(lhs: Operand, rhs: Operand, dimensions: Any, sharding: Any = None) -> Any:
    """Return the float32 product of two operands.

    The derivative is that of the product of the dequantised operands.
    """
    (_, left, left_scale), (_, right, right_scale) = lhs, rhs
    # The product of two small scales could underflow, so the result is multiplied by each of them.
    smaller, larger = jax.lax.min(left_scale, right_scale), jax.lax.max(left_scale, right_scale)
    return _dot(left, right, dimensions, sharding) * smaller * larger


@multiplied.defjvp
def _derivative(dimensions: Any, sharding: Any, operands: Any, tangents: Any) -> tuple[Any, Any]:
    def dequantised_product(lhs: Any, rhs: Any) -> Any:
        return _dot(dequantised(*lhs), dequantised(*rhs), dimensions, sharding)

    return multiplied(*operands, dimensions, sharding), jax.jvp(dequantised_product, operands, tangents)[1]


def _dot(lhs: Any, rhs: Any, dimensions: Any, sharding: Any = None) -> Any:
    return jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32, out_sharding=sharding)


def cotangent_of_operand(side: int, operand: Any, cotangent: Operand, other: Operand, dimensions: Any) -> Any:
    """Return the float32 cotangent of an operand of a product.

    Args:
      side: the position of the operand.
      operand: the type of the operand, with its shape and its sharding.
      cotangent: the quantised cotangent of the product's result.
      other: the other operand.
      dimensions: the product's dimension numbers.
    """
    contracting, batch = dimensions
    bound, bound_of_other = ({*contracting[n], *batch[n]} for n in (side, 1 - side))
    free = [axis for axis in range(len(operand.shape)) if axis not in bound]
    free_of_other = [axis for axis in range(other[1].ndim) if axis not in bound_of_other]
    first = len(batch[0]) + (len(free) if side == 0 else 0)
    summed = tuple(range(first, first + len(free_of_other))), tuple(free_of_other)
    batch_of_result = tuple(range(len(batch[0])))
    # The axes of the product below are the batch axes, the free axes of the operand, and the contracted axes in the
    # order of the other operand.
    pairs = sorted(zip(contracting[1 - side], contracting[side], strict=True))
    axes = [*batch[side], *free, *(axis for _, axis in pairs)]
    product = multiplied(cotangent, other, (summed, (batch_of_result, batch[1 - side])), _sharding(operand, axes))
    return jax.lax.transpose(product, [axes.index(axis) for axis in range(len(axes))])


def _sharding(array: Any, axes: Sequence[int]) -> Any:
    """Return the sharding of an array whose axes are reordered; None outside of a mesh with explicit axes."""
    sharding = array.sharding
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in axes)))


def tangent_of_product(
    tangents: Sequence[Any], operands: Sequence[Any], dimensions: Any, dtype: np.dtype, gradient: str, is_own: bool
) -> Any:
    """Return the tangent of a product.

    The backward pass quantises the cotangent once, and multiplies it by both operands in float8. Forward mode
    multiplies the tangents by bfloat16 operands.

    Args:
      tangents: the tangents of both operands; at most one is None.
      operands: both operands; one may be None if the other has no tangent.
      dimensions: the product's dimension numbers.
      dtype: the dtype of the product's result.
      gradient: the format of the quantised cotangent.
      is_own: whether each shard has its own scale.
    """
    sides = tuple(side for side in (0, 1) if tangents[side] is not None)
    residuals: list[Any] = []
    ndims = [0, 0]
    for side in sides:
        _, in_float8, scale = other = operands[1 - side]
        # Without the original array, the residuals are float8. The dequantised array has its tangent.
        residuals += [dequantised(*other), in_float8, scale]
        ndims[side], ndims[1 - side] = tangents[side].ndim, in_float8.ndim
    rule = _Tangent(sides, (ndims[0], ndims[1]), dimensions, dtype, gradient, is_own)
    return linear_with_transpose([tangents[side] for side in sides], residuals, rule)


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The tangent of a product as a linear function of the tangents of its operands.

    For each tangent, the residuals are the other operand: the dequantised array, the float8 array and the scale.

    Attributes:
      sides: the positions of the operands that have a tangent.
      ndims: the number of axes of each operand.
      dimensions, dtype, gradient, is_own: the arguments of :func:`tangent_of_product`.
    """

    sides: tuple[int, ...]
    ndims: tuple[int, int]
    dimensions: Any
    dtype: np.dtype
    gradient: str
    is_own: bool

    def forward(self, tangents: Sequence[Any], residuals: Sequence[Any]) -> Any:
        """Return the sum of the products of each tangent and the other operand."""
        terms = []
        for side, tangent, other in zip(self.sides, tangents, residuals[::3], strict=True):
            half = tangent.astype(other.dtype)
            lhs, rhs = (half, other) if side == 0 else (other, half)
            terms.append(_dot(lhs, rhs, self.dimensions))
        return functools.reduce(jnp.add, terms).astype(self.dtype)

    def transpose(self, cotangent: Any, tangents: Sequence[Any], residuals: Sequence[Any]) -> list[Any]:
        """Return the cotangents of the tangents."""
        of_result = as_float8(quantised(cotangent, self.gradient, self.is_own), self.gradient)
        cotangents = []
        for n, side in enumerate(self.sides):
            other = residuals[3 * n : 3 * n + 3]
            of_operand = cotangent_of_operand(side, tangents[n], of_result, tuple(other), self.dimensions)
            cotangents.append(of_operand.astype(tangents[n].dtype))
        return cotangents

    def batched(self, is_batched: Sequence[bool]) -> tuple[_Tangent, list[bool], int]:
        """Return the rule for operands with a batch axis in front; see ``linear_with_transpose.Rule``."""
        has_axis = [False, False]
        for n, side in enumerate(self.sides):
            of_other = len(self.sides) + 3 * n
            has_axis[side] |= is_batched[n]
            has_axis[1 - side] |= any(is_batched[of_other : of_other + 2])
        must_be_batched = [has_axis[side] for side in self.sides]
        for side in self.sides:
            must_be_batched += [has_axis[1 - side], has_axis[1 - side], False]  # all examples share a scale

        def moved(axes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
            left, right = (tuple(axis + has_axis[n] for axis in axes[n]) for n in (0, 1))
            return left, right

        contracting, batch = map(moved, self.dimensions)
        if all(has_axis):
            batch, axis_of_result = ((0, *batch[0]), (0, *batch[1])), 0
        elif has_axis[0]:
            axis_of_result = len(batch[0])
        else:
            axis_of_result = self.ndims[0] - len(contracting[0])
        ndims = self.ndims[0] + has_axis[0], self.ndims[1] + has_axis[1]
        rule = dataclasses.replace(self, ndims=ndims, dimensions=(contracting, batch))
        return rule, must_be_batched, axis_of_result
