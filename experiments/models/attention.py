"""Attention: cuDNN's fused kernel on a GPU, and plain products on other devices."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

import jax
import jax.numpy as jnp

import jaxmp

Implementation = Literal["cudnn", "portable"]
_implementation: ContextVar[Implementation | None] = ContextVar("attention_implementation", default=None)


@contextlib.contextmanager
def implementation(name: Implementation | None) -> Iterator[None]:
    """Set the implementation with which :func:`attention` is traced.

    Use ``"cudnn"`` to compile for a GPU that is not attached. With None, the default backend decides. A jitted function
    keeps the implementation with which it was traced.

    Args:
      name: ``"cudnn"``, ``"portable"`` or None.

    Raises:
      ValueError: ``name`` is another value.

    >>> with implementation("portable"):
    ...     attention(*3 * (jnp.ones((1, 4, 2, 8)),)).shape
    (1, 4, 2, 8)
    """
    if name not in ("cudnn", "portable", None):
        raise ValueError(f'an implementation of attention must be "cudnn", "portable" or None, got {name!r}')
    token = _implementation.set(name)
    try:
        yield
    finally:
        _implementation.reset(token)


def implementation_on(device: str | None) -> Implementation | None:
    """Return the implementation for a GPU or TPU that is not attached; None for the attached device.

    >>> implementation_on("h200"), implementation_on("v5e")
    ('cudnn', 'portable')
    """
    if device is None:
        return None
    return "cudnn" if jaxmp.hardware.detect(device).platform == "gpu" else "portable"


def asked() -> Implementation | None:
    """Return the implementation that :func:`implementation` has set.

    The result is None if it has set none.
    """
    return _implementation.get()


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False, mask: jax.Array | None = None
) -> jax.Array:
    """Return scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762).

    On a GPU, cuDNN computes attention if the inputs are in half precision, or if :func:`jaxmp.autocast` casts them to
    half precision. Otherwise there are two products in the dtype of the inputs and a softmax in float32. cuDNN has no
    kernel for an old GPU, or if the head width is not a multiple of 8. A warning then gives the reason, and the slower
    products are used.

    Args:
      q: queries, (batch, tokens, heads, head width), of a floating dtype.
      k: keys, of the same shape and dtype.
      v: values, of the same shape and dtype.
      causal: whether a token sees only itself and earlier tokens.
      mask: (batch, tokens), True or nonzero for keys that are visible; None for all.

    Returns: (batch, tokens, heads, head width) in the dtype of ``v``. A query without visible keys gets the mean of all
      values.

    Raises:
      ValueError: the inputs differ in shape or dtype.
      RuntimeError: :func:`implementation` asks for cuDNN, and it is not installed. If cuDNN has no kernel, the error is
        a NotImplementedError.

    >>> q = k = v = jnp.ones((1, 4, 2, 8), jnp.float16)
    >>> attention(q, k, v, causal=True).dtype
    dtype('float16')
    """
    if q.ndim != 4 or not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "attention takes q, k and v of one shape (batch, tokens, heads, head width) and one dtype, got "
            + ", ".join(f"{array.shape} {array.dtype.name}" for array in (q, k, v))
        )
    if mask is not None:  # cuDNN needs a row for each query
        mask = jnp.broadcast_to(mask.astype(bool)[:, None, None, :], (q.shape[0], 1, q.shape[1], k.shape[1]))
    chosen = asked() or ("cudnn" if jax.default_backend() == "gpu" else "portable")
    half = jaxmp.autocast_dtype() if q.dtype == jnp.float32 else q.dtype
    if chosen == "cudnn" and half in (jnp.float16, jnp.bfloat16):
        try:  # float32 inputs also go to this function, which autocast replaces
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="cudnn")
        except RuntimeError as error:  # NotImplementedError is one
            # A JaxRuntimeError comes from running the kernel, for example out of memory.
            if asked() or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            warnings.warn(f"attention runs without cuDNN, slower and in more memory: {error}", stacklevel=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = visible if mask is None else mask & visible
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
