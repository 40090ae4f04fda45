"""Support for objects of NNX in code that does not import Flax.

A program has such objects only if it has imported ``flax.nnx`` itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _is_nnx_imported() -> bool:
    """Return whether the program has imported ``flax.nnx``."""
    return "flax.nnx" in sys.modules


def make_pure_call(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any]]:
    """Return a call of ``fun`` as a pure function, its arguments, and a function that writes its results.

    NNX objects among the arguments change as under NNX's own transforms. The three values are those of
    :class:`jaxmp._internals.flax.nnx_calls.ArrayCall`.
    """
    if not _is_nnx_imported():
        return lambda args, kwargs: (fun(*args, **kwargs), ()), (args, kwargs), lambda results, _: results
    from jaxmp._internals.flax.nnx_calls import make_array_call

    pure, arguments, write, _ = make_array_call(fun, args, kwargs)
    return pure, arguments, write


def with_arrays_for_variables(tree: Any) -> Any:
    """Return a tree with the arrays of NNX's Variables in place of the Variables."""
    if not _is_nnx_imported():
        return tree
    from flax import nnx

    return nnx.as_pure(tree)


def is_to_linen(cls: type) -> bool:
    """Return whether ``cls`` is ``nnx.bridge.ToLinen`` or a subclass of it."""
    if not _is_nnx_imported():
        return False
    from flax import nnx

    return issubclass(cls, nnx.bridge.ToLinen)
