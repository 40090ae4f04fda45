"""What holds while autocast traces a function or one of its derivative rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.attention import fused_attention
from jaxmp.autocast.rules import Rules

_tracing: ContextVar[bool] = ContextVar("jaxmp_autocast_tracing", default=False)


@contextlib.contextmanager
def tracing(key: tuple[np.dtype, tuple[tuple[str, str], ...]]) -> Iterator[None]:
    """Traces the author's code for an autocast with this half dtype and these overrides."""
    half, overrides = key

    def attention_dtype() -> np.dtype | None:
        asked = Rules(half, dict(overrides)).asked_of("dot_general", reading.current_names())
        return None if asked is not None and asked[0] == "float32" else half

    token = _tracing.set(True)
    try:
        # Without the default precision, so that what is left in a product is what its author wrote there.
        with fused_attention(key, attention_dtype), jax.default_matmul_precision(None):
            yield
    finally:
        _tracing.reset(token)


def is_inside() -> bool:
    """Whether an autocast is tracing the code that asks."""
    return _tracing.get()
