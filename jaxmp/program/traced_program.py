"""The traced program of a function of arrays and Python values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.base.dtypes import AsComputed
from jaxmp.base.trees import require_no_raw_bytes
from jaxmp.program.equations import opened


class TracedProgram:
    """The traced program of a function for the shapes of some arguments.

    Args:
      fun: a function.
      args: the arguments of ``fun``; they are not stored.
      write: a function that turns the results of ``fun`` into the results of a call, such as ``write`` of ``ArrayCall``
        in ``_internals/flax/nnx_calls.py``; None to return the results of ``fun``.

    Attributes:
      open_jaxpr: the open jaxpr and its constants.
      are_as_computed: for each result, whether it is marked by :class:`jaxmp.base.dtypes.AsComputed`.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], write: Callable[..., Any] | None = None) -> None:
        leaves, tree = jax.tree.flatten(args)
        are_traced = [is_array(leaf) for leaf in leaves]

        def flat(*operands: Any) -> list[Any]:
            arrays = iter(operands)
            filled = [next(arrays) if is_traced else leaf for leaf, is_traced in zip(leaves, are_traced, strict=True)]
            marked, self._tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, filled)))
            results = [leaf.value if isinstance(leaf, AsComputed) else leaf for leaf in marked]
            pairs = zip(marked, results, strict=True)
            self.are_as_computed = [isinstance(leaf, AsComputed) for leaf, result in pairs if is_array(result)]
            # Drop the tracers, which are invalid after the trace.
            self._leaves = [_ARRAY if is_array(leaf) else leaf for leaf in results]
            return arrays_in(results)

        try:
            self.open_jaxpr = opened(jax.make_jaxpr(flat)(*itertools.compress(leaves, are_traced)))
        except TypeError:
            require_no_raw_bytes({"argument": leaves})
            raise
        self._write = write

    @property
    def result_count(self) -> int:
        """Return the number of arrays that are results of the function.

        The program also returns the arrays that the function wrote to its arguments. These arrays are not counted.
        """
        results, _written = jax.tree.unflatten(self._tree, self._leaves)
        return sum(leaf is _ARRAY for leaf in jax.tree.leaves(results))

    def unflatten(self, results: Sequence[Any]) -> Any:
        """Return the results of a call from the arrays that the program returned.

        If the function wrote arrays to its arguments, also write these arrays to the caller's arguments.
        """
        arrays = iter(results)
        filled = jax.tree.unflatten(self._tree, [next(arrays) if leaf is _ARRAY else leaf for leaf in self._leaves])
        return self._write(*filled) if self._write else filled


_ARRAY = object()


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
