"""The fused attention of cuDNN for functions written in float32.

``jax.nn.dot_product_attention`` chooses its implementation while a function is traced, by the dtypes it sees then, and
cuDNN's takes half operands only: in the finished program it would be too late. So for as long as autocast traces a
function, the name ``jax.nn.dot_product_attention`` stands for a function that casts first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

_half: ContextVar[np.dtype | None] = ContextVar("jaxmp_attention_dtype", default=None)
_lock = threading.Lock()
_originals: list[Any] = []
_depth = 0


@contextlib.contextmanager
def fused_attention(half: np.dtype | None) -> Iterator[None]:
    """Within it float32 calls of ``jax.nn.dot_product_attention`` run in ``half``, on cuDNN where it can.

    A call with ``implementation="xla"`` stays as it is, and so does every call if ``half`` is None (a float32 region).
    Other threads see the function that they know.
    """
    global _depth
    token = _half.set(half)
    with _lock:
        if _depth == 0:
            _originals.append(jax.nn.dot_product_attention)
            jax.nn.dot_product_attention = _standing_in_for(_originals[-1])
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                jax.nn.dot_product_attention = _originals.pop()
        _half.reset(token)


def _standing_in_for(original: Any) -> Any:
    @functools.wraps(original)
    def dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        half, implementation = _half.get(), kwargs.get("implementation")
        operands = (query, key, value)
        written = {np.dtype(getattr(operand, "dtype", None)) for operand in operands}
        wants = implementation == "cudnn" or (implementation is None and jax.default_backend() == "gpu")
        if half is None or not wants or written != {np.dtype(np.float32)}:
            return original(*operands, *args, **kwargs)
        arrays, options = jax.tree.map(
            lambda leaf: leaf.astype(half) if _is_float32(leaf) else leaf, ((*operands, *args), kwargs)
        )
        fused = functools.partial(original, *arrays, **{**options, "implementation": "cudnn"})
        if implementation is None:
            try:
                jax.eval_shape(fused)
            except (NotImplementedError, RuntimeError, ValueError):  # a head, mask or GPU that cuDNN has no kernel for
                return original(*operands, *args, **kwargs)
        return jax.tree.map(lambda leaf: leaf.astype(np.float32), fused())

    return dot_product_attention


def _is_float32(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == np.float32
