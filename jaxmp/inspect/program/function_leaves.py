"""Separate functions and other Python values among the leaves of arguments from the arrays.

A model of Equinox may have its activation function as a leaf. JAX traces arrays and numbers only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp.optim.checks import is_number


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PythonLeaves:
    """The leaves of a tree that JAX does not trace, such as functions.

    Attributes:
      leaves: all leaves of the tree, with None in place of those that JAX traces. It is empty if JAX traces all leaves.
      structure: the structure of the tree.
    """

    leaves: tuple[Any, ...] = ()
    structure: Any = None

    def put_back(self, tree: Any) -> Any:
        """Return the tree with these leaves, from the second result of :func:`separated`."""
        if not self.leaves:
            return tree
        pairs = zip(self.leaves, self.structure.flatten_up_to(tree), strict=True)
        return jax.tree.unflatten(self.structure, [traced if leaf is None else leaf for leaf, traced in pairs])


def separated(tree: Any, is_traced: Callable[[Any], bool]) -> tuple[PythonLeaves, Any]:
    """Return the leaves of a tree that JAX does not trace, and the tree with None in place of them.

    If JAX traces all leaves, the second result is the tree itself.
    """
    leaves, structure = jax.tree.flatten(tree)
    if all(map(is_traced, leaves)):
        return PythonLeaves(), tree
    others = tuple(None if is_traced(leaf) else leaf for leaf in leaves)
    traced = [leaf if is_traced(leaf) else None for leaf in leaves]
    return PythonLeaves(others, structure), jax.tree.unflatten(structure, traced)


def without_functions(args: Sequence[Any]) -> tuple[tuple[PythonLeaves, ...], tuple[Any, ...]]:
    """Return the functions among the leaves of each argument, and the arguments without them."""
    pairs = [separated(arg, _is_data) for arg in args]
    return tuple(functions for functions, _ in pairs), tuple(data for _, data in pairs)


def with_functions(functions: Sequence[PythonLeaves], args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with their functions, from the results of :func:`without_functions`."""
    return tuple(leaves.put_back(arg) for leaves, arg in zip(functions, args, strict=True))


def of_arrays(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of arrays and numbers, and its arguments.

    The returned function calls ``fun`` with the functions that are among the leaves of ``args``. If there are none,
    ``fun`` and ``args`` are returned.
    """
    functions, data = without_functions(args)
    if not any(leaves.leaves for leaves in functions):
        return fun, tuple(args)

    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return fun(*with_functions(functions, args))

    return call, data


def _is_data(leaf: Any) -> bool:
    return is_number(leaf) or hasattr(leaf, "dtype")
