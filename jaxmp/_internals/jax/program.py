"""The traced program of a function of arrays and Python values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._internals.jax.equations import opened
from jaxmp._internals.jax.traces import is_tracing


class TracedProgram:
    """The traced program of a function for the shapes of some arguments.

    Args:
      fun: a function.
      args: its arguments, which are not stored.
      write: a function that converts the results of ``fun`` into those of a call.

    Attributes:
      jaxpr: an open jaxpr and its constants.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], write: Callable[..., Any] | None = None) -> None:
        leaves, tree = jax.tree.flatten(args)
        are_traced = [is_array(leaf) for leaf in leaves]

        def flat(*operands: Any) -> list[Any]:
            rest = iter(operands)
            filled = [next(rest) if is_traced else leaf for leaf, is_traced in zip(leaves, are_traced, strict=True)]
            results, self._tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, filled)))
            # Without the tracers, which are invalid after the trace.
            self._leaves = [_ARRAY if is_array(leaf) else leaf for leaf in results]
            return arrays_in(results)

        with _adding_advice():
            self.jaxpr = opened(jax.make_jaxpr(flat)(*itertools.compress(leaves, are_traced)))
        self._write = write

    @property
    def result_count(self) -> int:
        """Return the number of arrays that are results of the function.

        The other arrays were written to its arguments.
        """
        results, _written = jax.tree.unflatten(self._tree, self._leaves)
        return sum(leaf is _ARRAY for leaf in jax.tree.leaves(results))

    def unflatten(self, results: Sequence[Any]) -> Any:
        """Return the results of the function from arrays.

        The other arrays are written to its arguments.
        """
        rest = iter(results)
        whole = jax.tree.unflatten(self._tree, [next(rest) if leaf is _ARRAY else leaf for leaf in self._leaves])
        return self._write(*whole) if self._write else whole


_ARRAY = object()
_KEEP_ARRAY = "leave an array an array, and let numbers that a shape depends on be no arguments"
_REMEDIES: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: "write jnp.where or jax.lax.cond",
    jax.errors.TracerArrayConversionError: "write jnp in place of np",
    jax.errors.TracerIntegerConversionError: _KEEP_ARRAY,
    jax.errors.ConcretizationTypeError: _KEEP_ARRAY,
}


def remedy_of(error: Exception, when: str) -> str | None:
    """Return advice for an error about the value of a traced array, or None.

    ``when`` describes when the array was traced.
    """
    remedy = next((remedy for kind, remedy in _REMEDIES.items() if isinstance(error, kind)), None)
    return remedy and f"nothing is computed {when}, as under jax.jit: {remedy}"


@contextlib.contextmanager
def _adding_advice() -> Iterator[None]:
    """Add advice to JAX's errors about traced values.

    Advice is added if JAX's message names jaxmp's function instead of the user's.
    """
    is_outermost = not is_tracing()
    try:
        yield
    except Exception as error:
        remedy = remedy_of(error, "while jaxmp traces a function")
        if remedy and is_outermost and f" at {__file__}:" in str(error):
            error.add_note(f"jaxmp: {remedy}")
        raise


def arrays_in(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves that are traced."""
    return [leaf for leaf in leaves if is_array(leaf)]


def is_array(leaf: Any) -> bool:
    """Return whether an argument or a result is traced.

    Other values stay Python values.
    """
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUTMm"  # objects, texts, times
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
