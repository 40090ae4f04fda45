"""Separate functions among the leaves of arguments from the arrays.

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
class FunctionLeaves:
    """The leaves of some arguments that are neither arrays nor numbers, such as functions.

    Attributes:
      by_argument: for each argument, its structure, and its leaves with None in place of arrays and numbers. For an
        argument without such leaves, None.
    """

    by_argument: tuple[tuple[Any, tuple[Any, ...]] | None, ...]

    def put_back(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with these leaves, from the second result of :func:`without_functions`."""
        filled = list(args)
        for number, separated in enumerate(self.by_argument):
            if separated is not None:
                structure, leaves = separated
                pairs = zip(leaves, structure.flatten_up_to(args[number]), strict=True)
                filled[number] = jax.tree.unflatten(structure, [data if leaf is None else leaf for leaf, data in pairs])
        return tuple(filled)


def without_functions(args: Sequence[Any]) -> tuple[FunctionLeaves, tuple[Any, ...]]:
    """Return the functions among the leaves of arguments, and the arguments with None in place of them."""
    by_argument: list[tuple[Any, tuple[Any, ...]] | None] = []
    data = []
    structure: Any  # without JAX's type, which has no methods for mypy
    for arg in args:
        leaves, structure = jax.tree.flatten(arg)
        functions = tuple(None if _is_data(leaf) else leaf for leaf in leaves)
        if all(leaf is None for leaf in functions):
            by_argument.append(None)
            data.append(arg)
        else:
            by_argument.append((structure, functions))
            data.append(jax.tree.unflatten(structure, [leaf if _is_data(leaf) else None for leaf in leaves]))
    return FunctionLeaves(tuple(by_argument)), tuple(data)


def of_arrays(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of arrays and numbers, and its arguments.

    The returned function calls ``fun`` with the functions that are among the leaves of ``args``. If there are none,
    ``fun`` and ``args`` are returned.
    """
    functions, data = without_functions(args)
    if functions.by_argument == (None,) * len(args):
        return fun, tuple(args)

    @functools.wraps(fun)
    def with_functions(*args: Any) -> Any:
        return fun(*functions.put_back(args))

    return with_functions, data


def _is_data(leaf: Any) -> bool:
    return is_number(leaf) or hasattr(leaf, "dtype")
