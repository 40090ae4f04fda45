"""An NNX model under autocast: what happens when one of its methods is called.

The root's method is traced whole, with the state of the model as an argument and a result. In it the methods of the
modules below put their paths on JAX's name stack, and mark the regions that overrides ask for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxmp.engine.autocast import autocast
from jaxmp.engine.marks import precision
from jaxmp.patterns import Path


class _Running(threading.local):
    def __init__(self) -> None:
        self.roots: list[type] = []
        self.paths: dict[int, tuple[Any, Path]] = {}  # by the ids of modules, which live as long as this has them
        self.callers: list[tuple[Any, Path]] = []


_running = _Running()


def run_autocast(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``method``, a descriptor in the class of ``module``: under autocast if it is called from outside.

    A module below the root that is called by itself, ``model.head(x)``, is a root of its own meanwhile.
    """
    is_root = type(module).jaxmp_decision.is_root
    if _running.roots and (not is_root or type(module) in _running.roots):
        with _scope(module):
            return _bound(method, module)(*args, **kwargs)

    def fun(module: Any, args: Any, kwargs: Any) -> Any:  # copies of them that may change in this trace
        with _root(module), _region(module):
            return _bound(method, module)(*args, **kwargs)

    return autocast(fun, type(module).jaxmp_decision.policy)(module, args, kwargs)


def _bound(method: Any, module: Any) -> Callable[..., Any]:
    bound: Callable[..., Any] = method.__get__(module, type(module))
    return bound


@contextlib.contextmanager
def _root(module: Any) -> Iterator[None]:
    before = _running.paths, _running.callers
    _running.roots.append(type(module))
    _running.paths, _running.callers = _paths(module, ()), [(module, ())]
    try:
        yield
    finally:
        _running.roots.pop()
        _running.paths, _running.callers = before


def _paths(module: Any, path: Path) -> dict[int, tuple[Any, Path]]:
    return {id(node): (node, (*path, *map(str, below))) for below, node in nnx.iter_modules(module)}


@contextlib.contextmanager
def _scope(module: Any) -> Iterator[None]:
    """While a method of ``module`` runs: its path, from that of its caller on, on the name stack; and its region."""
    caller, around = _running.callers[-1] if _running.callers else (None, ())
    known = _running.paths.get(id(module))
    if module is caller or (known is None and type(module) is type(caller)):  # a helper, perhaps in a transform
        yield
        return
    if known is None:  # a copy that a transform has made
        path = (*around, type(module).__name__)
        _running.paths |= _paths(module, path)
    else:
        path = known[1]
    _running.callers.append((module, path))
    inside = path[: len(around)] == around
    try:
        with jax.named_scope("/".join(path[len(around) :] if inside else path)), _region(module):
            yield
    finally:
        _running.callers.pop()


def _region(module: Any) -> contextlib.AbstractContextManager[None]:
    asked = type(module).jaxmp_decision.asked
    return contextlib.nullcontext() if asked is None else precision(asked)
