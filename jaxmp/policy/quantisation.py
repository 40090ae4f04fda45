"""Quantise arrays to float8.

A quantised array is a triple: the array, the bits of its float8 array, and its scale. The scale of an array is computed
from its largest magnitude ("current scaling"). So a product needs no state from earlier steps.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jaxmp._internals.jax.traces import manual_axes
from jaxmp.policy.float8 import is_direct

RESIDUALS = "jaxmp_float8"
"""The name of float8 residuals, for ``jax.checkpoint_policies.save_only_these_names``."""

_COMPUTE = np.dtype(jnp.bfloat16)


def quantised(value: Any, dtype: str, is_own: bool = False) -> tuple[Any, Any, Any]:
    """Return ``value``, the bits of its quantised float8 array, and the scale.

    If ``is_own`` is true, each shard has its own scale. Otherwise all shards have the same scale.
    """
    scale = checkpoint_name(_scale(value, dtype, is_own), RESIDUALS)
    # JAX rounds a named float8 residual again, as if e4m3fn had infinities, so 256 would become infinite. JAX does not
    # round integers, so the residual is stored as integer bits.
    bits = jax.lax.bitcast_convert_type(_cast(value, scale, dtype), jnp.uint8)
    return value, checkpoint_name(bits, RESIDUALS), scale


def as_float8(operand: tuple[Any, Any, Any], dtype: str) -> tuple[Any, Any, Any]:
    """Return the result of :func:`quantised` with its bits as float8 values."""
    value, bits, scale = operand
    return value, jax.lax.bitcast_convert_type(bits, dtype), scale


@jax.custom_jvp
def dequantised(value: Any, quantised: Any, scale: Any) -> Any:
    """Return the dequantised array, with the tangent of ``value``.

    The arguments are the result of :func:`as_float8`. ``value`` is not used otherwise, so XLA drops it.
    """
    return quantised.astype(_COMPUTE) * scale.astype(_COMPUTE)


@functools.partial(dequantised.defjvp, symbolic_zeros=True)
def _straight_through(primals: Any, tangents: Any) -> Any:
    result = dequantised(*primals)
    is_zero = isinstance(tangents[0], SymbolicZero)
    return result, jnp.zeros_like(result) if is_zero else tangents[0].astype(_COMPUTE)


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
    columns = jax.lax.reduce_max(jnp.abs(value), tuple(range(value.ndim - 1)))
    if not is_direct():
        # XLA for GPUs computes the maximum of each column in the kernel that computes `value`. A single reduction would
        # read `value` again. On a TPU, that kernel computes the single reduction too.
        columns = jax.lax.optimization_barrier(columns)
    return jax.lax.reduce_max(columns, tuple(range(columns.ndim))).astype(jnp.float32)


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
