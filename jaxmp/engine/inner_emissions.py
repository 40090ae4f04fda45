"""The emissions of autocast calls, and of models under a policy, inside of a planned function."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax

from jaxmp._internals.jax.sources import Names
from jaxmp.base.cache_keys import planned
from jaxmp.base.context_variables import setting
from jaxmp.engine.emit import Emission

_SCOPE = "jaxmp.inner:"
_numbers = itertools.count()
_collected: ContextVar[dict[str, Emission] | None] = ContextVar("jaxmp_inner_emissions", default=None)


@contextlib.contextmanager
def collecting_emissions() -> Iterator[Mapping[str, Emission]]:
    """Collect the emission of each autocast call, and of each model under a policy, in this context.

    The key of an emission is the scope around the operations that the call emits (see :func:`scope_in`).
    """
    emissions: dict[str, Emission] = {}
    with setting(_collected, emissions), planned(object()):
        yield emissions


def is_collecting() -> bool:
    """Return whether emissions are collected."""
    return _collected.get() is not None


@contextlib.contextmanager
def around_emitted(emission: Emission) -> Iterator[None]:
    """Collect an emission, and put a scope around the operations that it emits in this context."""
    emissions = _collected.get()
    if emissions is None:
        yield
        return
    scope = f"{_SCOPE}{next(_numbers)}"
    emissions[scope] = emission
    with jax.named_scope(scope):
        yield


def scope_in(names: Names) -> str:
    """Return the outermost scope of :func:`around_emitted` in these scopes; empty if there is none."""
    return next((name for name in names if name.startswith(_SCOPE)), "")
