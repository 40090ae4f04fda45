"""Attention over (batch, tokens, heads, head width).

It is cuDNN's fused kernel on a GPU, and plain products elsewhere.
"""

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
    """Trace :func:`attention` for that implementation, whatever the default backend is.

    Who compiles for a GPU that is not there asks for ``"cudnn"``; None goes by the default backend again. A jitted
    function that was traced before keeps what it was traced for.

    Args:
      name: ``"cudnn"``, ``"portable"`` or None.

    Raises:
      ValueError: it is another.

    >>> with implementation("portable"):
    ...     attention(*3 * (jnp.ones((1, 4, 2, 8)),)).shape
    (1, 4, 2, 8)
    """
    if name not in ("cudnn", "portable", None):
        raise ValueError(f'an implementation of attention is "cudnn", "portable" or None, got {name!r}')
    token = _implementation.set(name)
    try:
        yield
    finally:
        _implementation.reset(token)


def asked() -> Implementation | None:
    """Return the implementation to trace for."""
    return _implementation.get()


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False, mask: jax.Array | None = None
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762).

    On a GPU half inputs go to cuDNN, and float32 ones too where :func:`jaxmp.autocast` casts them. Other dtypes and
    every other backend have two products in the inputs' dtype around a softmax in float32. So has what cuDNN has no
    kernel for (an old GPU, a head whose width is not a multiple of 8), with a warning that says why: it takes more
    memory and time.

    Args:
      q, k, v: (batch, tokens, heads, head width), of one floating dtype.
      causal: whether a token sees only itself and those before it.
      mask: (batch, tokens), True or nonzero for the keys that may be seen; None for all.

    Returns:
      (batch, tokens, heads, head width) in the dtype of ``v``. A query that may see no key gets the mean of all values.

    Raises:
      ValueError: the inputs are not of one shape and dtype.
      RuntimeError: cuDNN was asked for by :func:`implementation` and is not installed; NotImplementedError, which is
        one, that it has no kernel.

    >>> q = k = v = jnp.ones((1, 4, 2, 8), jnp.float16)
    >>> attention(q, k, v, causal=True).dtype
    dtype('float16')
    """
    if q.ndim != 4 or not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "attention takes q, k and v of one shape (batch, tokens, heads, head width) and one dtype, got "
            + ", ".join(f"{array.shape} {array.dtype.name}" for array in (q, k, v))
        )
    if mask is not None:  # cuDNN wants a row for each query
        mask = jnp.broadcast_to(mask.astype(bool)[:, None, None, :], (q.shape[0], 1, q.shape[1], k.shape[1]))
    chosen = asked() or ("cudnn" if jax.default_backend() == "gpu" else "portable")
    half = jaxmp.autocast_dtype() if q.dtype == jnp.float32 else q.dtype
    if chosen == "cudnn" and half in (jnp.float16, jnp.bfloat16):
        try:  # by this name and with float32 inputs too: it is where autocast steps in
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="cudnn")
        except RuntimeError as error:  # NotImplementedError is one
            if asked() or isinstance(error, jax.errors.JaxRuntimeError):  # the latter: it ran, out of memory say
                raise
            warnings.warn(f"attention runs without cuDNN, slower and in more memory: {error}", stacklevel=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = visible if mask is None else mask & visible
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
