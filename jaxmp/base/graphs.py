"""Search graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

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

    A cycle here is a strongly connected component of more than one node. This is Tarjan's algorithm, without recursion.
    """
    number: dict[T, int] = {}  # in the order of the first visit
    lowest: dict[T, int] = {}  # the smallest number on the stack that can be reached
    stack: dict[T, None] = {}  # the visited nodes without a component
    label: dict[T, int] = {}
    for start in nodes:
        path = [] if start in number else [(start, iter(inputs_of(start)))]
        while path:
            node, operands = path[-1]
            if node not in number:
                number[node] = lowest[node] = len(number)
                stack[node] = None
            for operand in operands:
                if operand not in number:
                    path.append((operand, iter(inputs_of(operand))))
                    break
                if operand in stack:
                    lowest[node] = min(lowest[node], number[operand])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                member = None
                while lowest[node] == number[node] and member is not node:
                    member, _ = stack.popitem()
                    label[member] = number[node]
    cycles_of: dict[int, list[T]] = {}
    for node in nodes:
        cycles_of.setdefault(label[node], []).append(node)
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
