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
    """What stands for the results of an open jaxpr, of what stands for its constants and its arguments.

    Args:
      jaxpr: open.
      consts: what stands for its constants: arrays, or whatever is to be known of values.
      args: the same of its arguments.
      equation: makes of an equation, and of what stands for its operands, what stands for its results.
      literal: makes it of an operand that is written into an equation.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of ``jaxpr``, open or closed, and of the jaxprs in its equations' parameters."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations(inner)


def jaxprs_in(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    yield from filter(is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr))


def is_jaxpr(param: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    # `ClosedJaxpr` and `Jaxpr` became one class in JAX 0.11: told by what they have.
    return hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns")


def product_dtypes(jaxpr: Any) -> set[str]:
    """The names of the dtypes that matrix products and convolutions in ``jaxpr`` take as operands."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return {var.aval.dtype.name for eqn in products for var in eqn.invars[:2]}


def walk(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """The nodes of a graph that one comes to, each once."""
    found = dict.fromkeys(start)
    stack = [*found]
    while stack:
        for node in follow(stack.pop()):
            if node not in found:
                found[node] = None
                stack.append(node)
    return found


def cycles(nodes: Sequence[T], inputs_of: Callable[[T], Iterable[T]]) -> list[list[T]]:
    """The cycles of a graph, each with all that share a node with it: its strongly connected components."""
    from scipy.sparse import coo_array, csgraph

    number = {node: n for n, node in enumerate(nodes)}
    edges = [(number[operand], n) for n, node in enumerate(nodes) for operand in inputs_of(node)]
    matrix = coo_array((np.ones(len(edges)), np.array(edges).T), (len(nodes), len(nodes)))
    found: dict[int, list[T]] = {}
    for node, label in zip(nodes, csgraph.connected_components(matrix, connection="strong")[1], strict=True):
        found.setdefault(label, []).append(node)
    return [cycle for cycle in found.values() if len(cycle) > 1]


def nested_cycles(
    nodes: Sequence[T], inputs_of: Callable[[T], Sequence[T]], loop_around: Callable[[T], int | None]
) -> list[list[T]]:
    """The :func:`cycles` of a graph, and those of each loop inside of another by itself.

    What goes round an outer loop often goes through the carry of an inner one too, so that both are one cycle.

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
    """The cycles that go round loops: each comes to the carries on it by what a turn returns, not from before alone.

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
    """For each node the end of the first way that leads to one; ``known`` are the ends of some."""
    found = dict(known or {})
    for node in (*nodes, *nodes):  # once more for what comes round a loop
        for other in beside(node):
            if is_end(other) or other in found:
                found.setdefault(node, other if is_end(other) else found[other])
    return found
