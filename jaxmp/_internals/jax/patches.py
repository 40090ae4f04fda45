"""A replacement of JAX's attention during tracing.

``jax.nn.dot_product_attention`` chooses its implementation during tracing, by the dtypes of its operands. cuDNN
supports only half precision (float16 or bfloat16). So the operands must be cast before the call, not in the finished
program. So while the engine traces a function, a wrapper replaces this function of JAX, and casts the operands first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.cache_keys import decided
from jaxmp.base.context_variables import setting

_deciding: ContextVar[Callable[[], np.dtype | None] | None] = ContextVar("jaxmp_attention", default=None)
_lock = threading.Lock()
_original = jax.nn.dot_product_attention  # the function to restore
_depth = 0


@contextlib.contextmanager
def half_attention(key: Any, dtype: Callable[[], np.dtype | None]) -> Iterator[None]:
    """Replace JAX's attention in this context.

    Float32 calls of ``jax.nn.dot_product_attention`` run in half precision with cuDNN, where cuDNN has a kernel. A call
    with ``implementation="xla"`` does not change. In other threads, JAX's function behaves as usual.

    Args:
      key: a hashable key of everything that ``dtype`` depends on.
      dtype: a function that returns the half-precision dtype for a call of the attention, or None to leave the call in
        float32.
    """
    with setting(_deciding, dtype), _replacing(), decided(key):
        yield


@contextlib.contextmanager
def _replacing() -> Iterator[None]:
    """Replace JAX's attention in this context.

    If several contexts overlap, the last context to end restores the function.
    """
    global _depth, _original
    with _lock:
        if _depth == 0:
            _original = jax.nn.dot_product_attention
            jax.nn.dot_product_attention = _attention(_original)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                jax.nn.dot_product_attention = _original


@contextlib.contextmanager
def with_cudnn(version: tuple[int, int, int]) -> Iterator[None]:
    """Make JAX assume this version of cuDNN in this context.

    JAX reads the version of cuDNN when it traces a fused attention, but can compile the attention without cuDNN.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # later versions may move this module

    original = fused.check_cudnn_version
    major, minor, patch = version
    fused.check_cudnn_version = lambda: 10_000 * major + 100 * minor + patch
    try:
        yield
    finally:
        fused.check_cudnn_version = original


@functools.cache
def _attention(original: Any) -> Any:
    @functools.wraps(original)
    def dot_product_attention(
        query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **kwargs: Any
    ) -> Any:
        implementation, operands = kwargs.get("implementation"), (query, key, value)
        written = {np.dtype(getattr(operand, "dtype", None)) for operand in operands}
        wants = implementation == "cudnn" or (implementation is None and jax.default_backend() == "gpu")
        deciding = _deciding.get() if wants and written == {np.dtype(np.float32)} else None
        half = deciding() if deciding else None
        if half is None:
            return original(*operands, **kwargs, bias=bias, mask=mask)
        arrays = [operand.astype(half) for operand in operands]  # the backward pass of a cast stores no array
        half_bias, shift = bias, None
        if getattr(bias, "dtype", None) == np.float32:
            wide_bias = jnp.asarray(bias)[(None,) * (4 - np.ndim(bias))]
            shift = _largest_bias(wide_bias, mask, query.shape[-3], key.shape[-3], **kwargs)
            half_bias = _cast_bias(wide_bias - shift, half)
        fused = functools.partial(
            original, *arrays, **{**kwargs, "bias": half_bias, "mask": mask, "implementation": "cudnn"}
        )
        if implementation is None:
            try:
                jax.eval_shape(fused)
            except (NotImplementedError, RuntimeError, ValueError):
                # cuDNN has no kernel for this head size, mask or GPU.
                return original(*operands, **kwargs, bias=bias, mask=mask)
        results = jax.tree.map(lambda leaf: leaf.astype(np.float32), fused())
        if shift is None or not isinstance(results, tuple):
            return results
        attended, log_sums = results
        return attended, (log_sums + shift[..., 0].swapaxes(-1, -2)).reshape(log_sums.shape)

    return dot_product_attention


def _largest_bias(
    bias: Any,
    mask: Any,
    queries: int,
    keys: int,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    key_value_seq_lengths: Any = None,
    **kwargs: Any,
) -> Any:
    """Return for each query the largest bias of the keys that it may read, or 0 if none is finite.

    A softmax does not depend on a number that is subtracted from all elements. Without this number, half precision
    represents a bias best for the keys with the largest weights. Examples that share a bias share the smallest of their
    numbers, because a bias for each example would need more memory.
    """
    query, key = jnp.arange(queries, dtype=np.int32)[:, None], jnp.arange(keys, dtype=np.int32)[None, :]
    is_read = jnp.ones((1, keys), bool) if mask is None else mask
    with jax.numpy_rank_promotion("allow"):
        if is_causal:
            is_read = is_read & (key <= query)
        if local_window_size is not None:
            left, right = np.broadcast_to(local_window_size, 2).tolist()
            is_read = is_read & (query - left <= key) & (key <= query + right)
        if key_value_seq_lengths is not None:
            is_read = is_read & (key < jnp.asarray(key_value_seq_lengths)[:, None, None, None])
        largest = jnp.where(is_read, bias, -jnp.inf).max(-1, keepdims=True)
    # A bias that masks all readable keys, as -1e9 does, says nothing about the others.
    largest = jnp.where(largest > -1e4, largest, jnp.inf)
    shared = tuple(axis for axis in range(2) if bias.shape[axis] == 1)
    largest = largest.min(shared, keepdims=True)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))


def _cast_bias(bias: Any, half: np.dtype) -> Any:
    """Return a float32 bias in ``half``, clipped to the range of this dtype."""
    info = jnp.finfo(half)
    return jnp.clip(bias, float(info.min), float(info.max)).astype(half)
