"""Walk a jaxpr and the jaxprs nested in it, and walk graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmp.program.equations import is_literal, opened
from jaxmp.program.primitives import PRODUCTS

T = TypeVar("T", bound=Hashable)


def interpreted(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    variables: dict[Any, Any] | None = None,
) -> list[Any]:
    """Interpret an open jaxpr, with arrays or with facts about its values.

    Args:
      jaxpr: an open jaxpr.
      consts: the arrays or facts of its constants.
      args: the arrays or facts of its arguments.
      equation: a function that takes an equation and the arrays or facts of its operands. It returns the arrays or
        facts of the equation's results.
      literal: a function that returns the array or fact of a literal.
      variables: a dictionary, which is filled with the array or fact of each variable.

    Returns:
      The arrays or facts of the jaxpr's results.
    """
    env = {} if variables is None else variables
    env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr and of the jaxprs nested in it.

    The jaxpr may be open or closed.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations(inner)


def jaxprs_in(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs in an equation's parameters."""
    yield from filter(is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr))


def is_jaxpr(param: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    # `ClosedJaxpr` and `Jaxpr` became one class in JAX 0.11, so this tests their attributes.
    return hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns")


def product_dtypes(jaxpr: Any) -> set[str]:
    """Return the names of the operand dtypes of all products in ``jaxpr``."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return {var.aval.dtype.name for eqn in products for var in eqn.invars[:2]}


def computing_only(jaxpr: Any, is_wanted: Sequence[bool]) -> Any:
    """Return the open jaxpr that computes only the wanted results of ``jaxpr``."""
    return dce_jaxpr(opened(jaxpr)[0], list(is_wanted), True)[0]


def walk(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Return the nodes of a graph that can be reached from ``start``, each once."""
    reached = dict.fromkeys(start)
    stack = [*reached]
    while stack:
        for node in follow(stack.pop()):
            if node not in reached:
                reached[node] = None
                stack.append(node)
    return reached


def cycles(nodes: Sequence[T], inputs_of: Callable[[T], Iterable[T]]) -> list[list[T]]:
    """Return the cycles of a graph.

    A cycle here is a strongly connected component of more than one node.
    """
    from scipy.sparse import coo_array, csgraph

    number = {node: n for n, node in enumerate(nodes)}
    edges = [(number[operand], n) for n, node in enumerate(nodes) for operand in inputs_of(node)]
    if not edges:
        return []
    matrix = coo_array((np.ones(len(edges)), np.array(edges).T), (len(nodes), len(nodes)))
    cycles_of: dict[int, list[T]] = {}
    for node, label in zip(nodes, csgraph.connected_components(matrix, connection="strong")[1], strict=True):
        cycles_of.setdefault(label, []).append(node)
    return [cycle for cycle in cycles_of.values() if len(cycle) > 1]


def nearest_ends(
    nodes: Sequence[T],
    beside: Callable[[T], Iterable[T]],
    is_end: Callable[[T], bool],
    known: Mapping[T, T | None] | None = None,
) -> dict[T, T | None]:
    """Return for each node the nearest node for which ``is_end`` is true.

    ``beside`` returns the neighbours of a node. ``known`` has the results of some nodes, which are returned unchanged.
    """
    ends = dict(known or {})
    for node in (*nodes, *nodes):  # twice, because a cycle refers to later nodes
        for other in beside(node):
            if is_end(other) or other in ends:
                ends.setdefault(node, other if is_end(other) else ends[other])
    return ends
