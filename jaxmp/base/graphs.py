"""Search graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)


def reachable(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> dict[T, None]:
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
