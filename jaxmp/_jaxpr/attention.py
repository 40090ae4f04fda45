"""The fused attention of cuDNN: for functions written in float32, and where cuDNN is not installed.

``jax.nn.dot_product_attention`` chooses its implementation while a function is traced, by the dtypes it sees then, and
cuDNN's takes half operands only: in the finished program it would be too late. So for as long as autocast traces a
function, the name ``jax.nn.dot_product_attention`` stands for a function that casts first.
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

# A part of the keys of JAX's own caches: what was jitted and traced without autocast is traced again in it.
_key: Any = jax.make_user_context(default_value=None)
_deciding: ContextVar[Callable[[], np.dtype | None]] = ContextVar("jaxmp_attention_dtype")
_lock = threading.Lock()
_originals: list[Any] = []
_depth = 0


@contextlib.contextmanager
def fused_attention(key: Any, dtype: Callable[[], np.dtype | None]) -> Iterator[None]:
    """Within it float32 calls of ``jax.nn.dot_product_attention`` run in half, on cuDNN where it can.

    A call with ``implementation="xla"`` stays as it is. Other threads see the function that they know.

    Args:
      key: what ``dtype`` depends on, hashable.
      dtype: asked by each call for the dtype to cast to; None leaves the call as it is.
    """
    global _depth
    token = _deciding.set(dtype)
    with _lock:
        if _depth == 0:
            _originals.append(jax.nn.dot_product_attention)
            jax.nn.dot_product_attention = _standing_in_for(_originals[-1])
        _depth += 1
    try:
        with _key(key):
            yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                jax.nn.dot_product_attention = _originals.pop()
        _deciding.reset(token)


@contextlib.contextmanager
def with_cudnn(version: tuple[int, int, int]) -> Iterator[None]:
    """Within it JAX takes this version of cuDNN for the installed one.

    JAX asks the library when it traces a fused attention, and the library is not needed to compile one.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # may move: only this needs it

    original = fused.check_cudnn_version
    major, minor, patch = version
    fused.check_cudnn_version = lambda: 10_000 * major + 100 * minor + patch
    try:
        yield
    finally:
        fused.check_cudnn_version = original


def _standing_in_for(original: Any) -> Any:
    @functools.wraps(original)
    def dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        implementation, operands = kwargs.get("implementation"), (query, key, value)
        written = {np.dtype(getattr(operand, "dtype", None)) for operand in operands}
        wants = implementation == "cudnn" or (implementation is None and jax.default_backend() == "gpu")
        half = _deciding.get(lambda: None)() if wants and written == {np.dtype(np.float32)} else None
        if half is None:
            return original(*operands, *args, **kwargs)
        arrays = [operand.astype(half) for operand in operands]  # whose derivative needs nothing of what was cast
        rest, options = jax.tree.map(functools.partial(_cast_bias, half), (args, kwargs))
        fused = functools.partial(original, *arrays, *rest, **{**options, "implementation": "cudnn"})
        if implementation is None:
            try:
                jax.eval_shape(fused)
            except (NotImplementedError, RuntimeError, ValueError):  # a head, mask or GPU that cuDNN has no kernel for
                return original(*operands, *args, **kwargs)
        return jax.tree.map(lambda leaf: leaf.astype(np.float32), fused())

    return dot_product_attention


def _cast_bias(half: np.dtype, leaf: Any) -> Any:
    """``leaf`` in half if it is float32; what half cannot hold, as a bias that masks, at the end of its range."""
    if getattr(leaf, "dtype", None) != np.float32:
        return leaf
    info = jnp.finfo(half)
    return jnp.clip(leaf, float(info.min), float(info.max)).astype(half)
