"""Walking a jaxpr with everything nested in it, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp._internals.jax.equations import is_literal

T = TypeVar("T", bound=Hashable)
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def interpreted(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda atom: atom.val,
) -> list[Any]:
    """Interpret an open jaxpr, with arrays or with any facts about its values.

    Args:
      jaxpr: open.
      consts: the arrays or facts of its constants.
      args: the arrays or facts of its arguments.
      equation: takes an equation and those of its operands, and returns those of its results.
      literal: returns that of an operand that is written into an equation.

    Returns:
      The arrays or facts of its results.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of an open or closed jaxpr, and of the jaxprs in its parameters."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations(inner)


def jaxprs_in(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs in an equation's parameters."""
    yield from filter(is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr))


def is_jaxpr(param: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    # `ClosedJaxpr` and `Jaxpr` became one class in JAX 0.11: told by what they have.
    return hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns")


def product_dtypes(jaxpr: Any) -> set[str]:
    """Return the names of the operand dtypes of all products in ``jaxpr``."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return {var.aval.dtype.name for eqn in products for var in eqn.invars[:2]}


def walk(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Return the nodes of a graph that can be reached from ``start``, once."""
    found = dict.fromkeys(start)
    stack = [*found]
    while stack:
        for node in follow(stack.pop()):
            if node not in found:
                found[node] = None
                stack.append(node)
    return found


def cycles(nodes: Sequence[T], inputs_of: Callable[[T], Iterable[T]]) -> list[list[T]]:
    """Return the strongly connected components of a graph with more than one node."""
    from scipy.sparse import coo_array, csgraph

    number = {node: n for n, node in enumerate(nodes)}
    edges = [(number[operand], n) for n, node in enumerate(nodes) for operand in inputs_of(node)]
    if not edges:
        return []
    matrix = coo_array((np.ones(len(edges)), np.array(edges).T), (len(nodes), len(nodes)))
    found: dict[int, list[T]] = {}
    for node, label in zip(nodes, csgraph.connected_components(matrix, connection="strong")[1], strict=True):
        found.setdefault(label, []).append(node)
    return [cycle for cycle in found.values() if len(cycle) > 1]


def nested_cycles(
    nodes: Sequence[T], inputs_of: Callable[[T], Sequence[T]], loop_around: Callable[[T], int | None]
) -> list[list[T]]:
    """Return the :func:`cycles` of a graph, and those of inner loops on their own.

    The cycle of an outer loop often passes through the carry of an inner one, so that both are one component.

    Args:
      nodes: the nodes of the graph.
      inputs_of: the operands of each; the first of a carry's is its value before the loop.
      loop_around: of a carry the number of the loop around its own, larger further inside; None of what is no carry.
    """
    found = cycles(nodes, inputs_of)
    for members in map(frozenset, tuple(found)):
        around = {node: loop for node in members if (loop := loop_around(node)) is not None}
        outermost = min(around.values())
        if outermost == max(around.values()):
            continue
        inside = {
            node: [each for each in inputs_of(node)[: 1 if around.get(node) == outermost else None] if each in members]
            for node in members
        }
        found += nested_cycles([node for node in nodes if node in members], inside.__getitem__, loop_around)
    return found


def turns(
    nodes: Sequence[T], inputs_of: Callable[[T], Sequence[T]], is_carry: Callable[[T], bool]
) -> Sequence[list[T]]:
    """Return the cycles that pass through turns of loops, and not only through initial values of carries.

    Args:
      nodes: the nodes of the graph.
      inputs_of: the operands of each; the first of a carry's is its value before the loop.
      is_carry: tells the carries of loops.
    """
    entered = set[T]()  # carries that a way round an outer loop enters, and leaves before any turn

    def before(node: T) -> Sequence[T]:
        inputs = inputs_of(node)
        return inputs[1:] if node in entered else inputs

    while True:  # what is no way round may have made another look like one
        found, known = cycles(nodes, before), len(entered)
        for cycle in map(frozenset, found):
            entered |= {node for node in cycle if is_carry(node) and cycle.isdisjoint(inputs_of(node)[1:])}
        if len(entered) == known:
            return found


def nearest(
    nodes: Sequence[T],
    beside: Callable[[T], Iterable[T]],
    is_end: Callable[[T], bool],
    known: Mapping[T, T | None] | None = None,
) -> dict[T, T | None]:
    """Return for each node the end that is reached first; ``known`` are the ends of some nodes."""
    found = dict(known or {})
    for node in (*nodes, *nodes):  # once more for what comes round a loop
        for other in beside(node):
            if is_end(other) or other in found:
                found.setdefault(node, other if is_end(other) else found[other])
    return found
