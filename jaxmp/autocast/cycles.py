"""Cycles of the graph: the ways round its loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxmp.autocast.graph import Node


def on_a_cycle_with(starts: Iterable[Node]) -> Iterator[list[Node]]:
    """The strongly connected components of more than one node that the ``starts`` lie in, each once.

    Tarjan, "Depth-first search and linear graph algorithms" (1972), without recursion.
    """
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    on_path: set[Node] = set()
    for start in starts:
        if start in index:
            continue
        work = [(start, iter(start.users))]
        while work:
            node, users = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                path.append(node)
                on_path.add(node)
            for user in users:
                if user not in index:
                    work.append((user, iter(user.users)))
                    break
                if user in on_path:
                    low[node] = min(low[node], index[user])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = path.index(node) if path[-1] is not node else len(path) - 1
                    component, path[cut:] = path[cut:], []
                    on_path.difference_update(component)
                    if len(component) > 1:
                        yield component
