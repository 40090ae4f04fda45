"""GELU that saves only its input for the backward pass, in the input's dtype."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jaxmp

_FLAT = 100.0  # beyond ±100 gelu is 0 or x in every dtype, and x·x may overflow
_CUBIC = 0.044715  # of the tanh form: ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))


def gelu(x: jax.Array, approximate: bool = True) -> jax.Array:
    """Return the Gaussian error linear unit of ``x``, in the dtype of ``x``.

    Hendrycks and Gimpel 2016, arXiv 1606.08415.

    Autodiff of ``jax.nn.gelu`` saves intermediate values, which take more memory than the input and may be float32.
    This function's gradient recomputes these values from the input. Value and gradient are computed in float32 and
    rounded once, with one exception: on a GPU, the tanh form of a half-precision input is written in half precision,
    because XLA then computes it in the kernel of the product before it. Under :func:`jaxmp.autocast`, a float32 input
    is saved in half precision. Only reverse mode is supported: ``jax.jvp`` of this function raises a TypeError.

    Args:
      x: any shape, any floating dtype.
      approximate: True for the tanh form of GPT-2, False for the error function of BERT.

    Returns:
      The shape and dtype of ``x``.

    Raises:
      TypeError: ``x`` is not floating.

    >>> gelu(jnp.array([-2.0, 0.0, 2.0], jnp.bfloat16))
    Array([-0.0454102, 0, 1.95312], dtype=bfloat16)
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"gelu takes a floating dtype, got {x.dtype.name}; cast it")
    half = jaxmp.autocast_dtype() if x.dtype == jnp.float32 else None
    return _gelu(x if half is None else x.astype(half), approximate).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gelu(x: jax.Array, approximate: bool) -> jax.Array:
    if approximate and x.dtype.itemsize == 2 and jaxmp.hardware.detect().platform == "gpu":
        with jaxmp.precision("half"):  # XLA moves this formula in half precision, and no other, into the product
            return jax.nn.gelu(x, approximate=True)
    with jaxmp.precision("float32"):
        return (_widened(x) * _gate(x, approximate)).astype(x.dtype)


def _forward(x: jax.Array, approximate: bool) -> tuple[jax.Array, jax.Array]:
    return _gelu(x, approximate), x


def _backward(approximate: bool, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    x = jax.lax.optimization_barrier(x)  # else XLA saves the gate of the forward pass in float32
    with jaxmp.precision("float32"):
        wide, gate = _widened(x), _gate(x, approximate)
        near = jnp.clip(wide, -_FLAT, _FLAT)
        if approximate:
            slope = gate * (1 - gate) * math.sqrt(8 / math.pi) * (1 + 3 * _CUBIC * near * near)
        else:
            slope = jnp.exp(-0.5 * near * near) / math.sqrt(2 * math.pi)
        return (((gate + near * slope) * _widened(cotangent)).astype(x.dtype),)


_gelu.defvjp(_forward, _backward)


def _gate(x: jax.Array, approximate: bool) -> jax.Array:
    """Return the normal distribution function of ``x`` in float32, or its tanh approximation.

    The formulas avoid the cancellation in ``1 + tanh`` and ``1 + erf``. For half precision, the cancellation in
    ``1 + erf`` is allowed: it is an error of 6e-8, and on a GPU ``erfc`` takes several times as many instructions.
    """
    wide = _widened(x)
    if approximate:
        return jax.nn.sigmoid(math.sqrt(8 / math.pi) * (wide + _CUBIC * wide * wide * wide))
    if x.dtype.itemsize == 2:
        return 0.5 + 0.5 * jax.lax.erf(wide / math.sqrt(2))
    return 0.5 * jax.lax.erfc(-wide / math.sqrt(2))


def _widened(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
