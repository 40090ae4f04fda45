"""The decided graphs of autocast calls, and of models under a policy, inside of a planned function."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax

from jaxmp._internals.jax.sources import Names
from jaxmp.base.cache_keys import planned
from jaxmp.engine.graph import Graph

_SCOPE = "jaxmp.inner:"
_numbers = itertools.count()
_collected: ContextVar[dict[str, Graph] | None] = ContextVar("jaxmp_inner_graphs", default=None)


@contextlib.contextmanager
def collecting_graphs() -> Iterator[Mapping[str, Graph]]:
    """Collect the graph of each autocast call, and of each model under a policy, in this context.

    The key of a graph is the scope around the operations that the call emits (see :func:`scope_in`).
    """
    graphs: dict[str, Graph] = {}
    token = _collected.set(graphs)
    try:
        with planned(object()):
            yield graphs
    finally:
        _collected.reset(token)


def is_collecting() -> bool:
    """Return whether graphs are collected."""
    return _collected.get() is not None


@contextlib.contextmanager
def around_emitted(graph: Graph) -> Iterator[None]:
    """Collect a graph, and put a scope around the operations that are emitted for it in this context."""
    graphs = _collected.get()
    if graphs is None:
        yield
        return
    scope = f"{_SCOPE}{next(_numbers)}"
    graphs[scope] = graph
    with jax.named_scope(scope):
        yield


def scope_in(names: Names) -> str:
    """Return the outermost scope of :func:`around_emitted` in these scopes; empty if there is none."""
    return next((name for name in names if name.startswith(_SCOPE)), "")
