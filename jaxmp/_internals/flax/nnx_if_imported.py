"""Support for objects of NNX in code that does not import Flax.

A program has such objects only if it has imported ``flax.nnx`` itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def imported_nnx() -> Any:
    """Return the module ``flax.nnx`` if the program has imported it, otherwise None."""
    return sys.modules.get("flax.nnx")


def make_pure_call(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any]]:
    """Return a call of ``fun`` as a pure function, its arguments, and a function that writes its results.

    NNX objects among the arguments change as under NNX's own transforms. The three values are those of
    :class:`jaxmp._internals.flax.nnx_calls.ArrayCall`.
    """
    if imported_nnx() is None:
        return lambda args, kwargs: (fun(*args, **kwargs), ()), (args, kwargs), lambda results, _: results
    from jaxmp._internals.flax.nnx_calls import make_array_call

    return make_array_call(fun, args, kwargs)
