"""Equal objects for equal arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from jaxmp._internals.jax.core import trace_state_clean

T = TypeVar("T")
MOST = 64
"""The number of results that are kept for a function."""


def remembered(fun: Callable[..., T]) -> Callable[..., T]:
    """Return ``fun`` with a memory: for equal positional arguments, it returns the same object again.

    The object of an optimizer is a static part of a train state, and ``jax.jit`` compiles again if a static part is not
    equal. ``fun`` is called each time if an argument is not hashable, or while JAX traces: an optimizer may close over
    a tracer, such as its learning rate, and a tracer must not outlive its trace.

    Arguments of different types differ, although an optimizer equals any other tuple of its two functions.

    >>> import optax
    >>> make, sgd = remembered(lambda tx: [tx]), optax.sgd(0.1)
    >>> make(sgd) is make(sgd), make([sgd]) is make([sgd]), make(sgd) is make(tuple(sgd))
    (True, False, False)
    """
    remembering = functools.lru_cache(maxsize=MOST, typed=True)(fun)

    @functools.wraps(fun)
    def call(*args: object) -> T:
        if not trace_state_clean():
            return fun(*args)
        try:
            hash(args)
        except TypeError:
            return fun(*args)
        return remembering(*args)

    return call
