"""What holds while autocast traces a function or one of its derivative rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.attention import fused_attention
from jaxmp.autocast.rules import Rules

_tracing: ContextVar[Callable[[], np.dtype | None] | None] = ContextVar("jaxmp_autocast_tracing", default=None)


@contextlib.contextmanager
def tracing(key: tuple[np.dtype, tuple[tuple[str, str], ...]]) -> Iterator[None]:
    """Traces the author's code for an autocast with this half dtype and these overrides."""
    half, overrides = key

    def dtype_here() -> np.dtype | None:
        asked = Rules(half, dict(overrides)).asked_of("dot_general", reading.current_names())
        return None if asked is not None and asked[0] == "float32" else half

    token = _tracing.set(dtype_here)
    try:
        # Without the default precision, so that what is left in a product is what its author wrote there.
        with fused_attention(key, dtype_here), jax.default_matmul_precision(None):
            yield
    finally:
        _tracing.reset(token)


def is_inside() -> bool:
    """Whether an autocast is tracing the code that asks."""
    return _tracing.get() is not None


def autocast_dtype() -> np.dtype | None:
    """The half dtype in which autocast will compute a float32 product that is written here.

    For the code of operations that have derivative rules or kernels of their own, and decide what they keep by the
    dtype of what they are given: autocast traces them on the dtypes that are written, float32.

    Returns:
      None outside of autocast, and where a region or an override asks for float32.

    >>> half = jaxmp.autocast(lambda x: x.astype(jaxmp.autocast_dtype() or x.dtype), "mixed_bfloat16")
    >>> half(jnp.ones(2)).dtype, jaxmp.autocast_dtype()
    (dtype(bfloat16), None)
    """
    ask = _tracing.get()
    return None if ask is None else ask()
