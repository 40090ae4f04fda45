"""Marks on JAX's name stack: the regions of the author, and what an autocast has written."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax

from jaxmp._jaxpr.reading import Names

DECIDED = "jaxmp.autocast"
"""The scope around everything that autocast has written: another autocast leaves it as it is."""
_REGION = re.compile(r"jaxmp\.precision\((float32|half)\)")


def precision(level: str) -> contextlib.AbstractContextManager[None]:
    """Marks the code it surrounds: within :func:`jaxmp.autocast` its operations compute in this precision.

    Use it where an ``astype`` would leave no trace: in a function that autocast reads, everything is float32 already.
    The mark is a scope on JAX's name stack, so that it holds in gradients, loops and jitted functions alike; outside of
    autocast it changes nothing. Products in a float32 region run at the highest precision (no TF32).

    Args:
      level: ``"float32"`` or ``"half"``.

    Raises:
      ValueError: another level.

    >>> def fun(x, w):
    ...     with precision("float32"):
    ...         return x @ w
    >>> import jax.numpy as jnp
    >>> from jaxmp.engine.autocast import autocast
    >>> autocast(fun, "mixed_bfloat16")(jnp.full((1, 1), 1 / 3), jnp.ones((1, 1)))[0, 0]  # bfloat16 gives 0.33398438
    Array(0.33333334, dtype=float32)
    """
    return jax.named_scope(f"jaxmp.precision({checked_level(level)})")


def checked_level(level: Any) -> str:
    """``level`` itself if it is one."""
    if level in ("float32", "half"):
        return str(level)
    raise ValueError(
        f"a region or an override is computed in 'float32' or in 'half' (the policy's compute dtype), got {level!r}"
    )


def level_of(names: Names) -> str | None:
    """The level of the innermost region around what stands in these scopes."""
    return next((region[1] for part in reversed(names) if (region := _REGION.fullmatch(part))), None)


def regions_in(names: Names) -> Names:
    """The marks among some scopes."""
    return tuple(part for part in names if _REGION.fullmatch(part))


def path_of(names: Names) -> Names:
    """The scopes without the marks: modules and the author's own."""
    return tuple(part for part in names if not _REGION.fullmatch(part))
