"""Warnings at the line of the user's code."""

from __future__ import annotations

import inspect
import warnings

_LIBRARIES = frozenset({"jaxmp", "jax", "flax", "optax", "contextlib"})


def warn_user(message: str) -> None:
    """Warn at the innermost line that does not belong to jaxmp, JAX, Flax or optax.

    The number of their frames differs: JAX calls jaxmp while it traces, NNX calls the constructors of its classes, and
    optax calls the transforms of a chain.
    """
    frame = inspect.currentframe()
    level = 1
    while frame is not None and _package_of(frame.f_globals.get("__name__")) in _LIBRARIES:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def _package_of(module: str | None) -> str:
    return (module or "").partition(".")[0]
