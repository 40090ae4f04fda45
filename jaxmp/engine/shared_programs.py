"""The work that several calls of a function under autocast share.

Calls share the decisions about a program that is one call of a jitted function. JAX traces such a function once for
equal shapes, so both programs have the same jaxpr. Calls also share the rewritten bodies of equations if the equations
and the decisions about them are equal (see ``emit.py``). JAX then also differentiates these bodies once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from jaxmp._internals.jax.sources import names_of
from jaxmp._internals.jax.traces import is_tracing, staging_trace
from jaxmp.policy import float8
from jaxmp.program.equations import Array, bodies_of

Programs = dict[Any, Any]
"""Decisions and rewritten bodies, by their keys."""


class SharedPrograms:
    """The caches of a function: one for calls outside of traces, and one for calls in the latest trace.

    A body that is rewritten in a trace may keep values of this trace alive, in closures of derivative rules. So each
    trace has a new cache, and calls share nothing while JAX checks for leaked tracers.

    Outside of traces, there is one cache for each value of ``JAXMP_FLOAT8``. JAX does not know this variable, but it
    traces jitted functions again for each of its own settings on which decisions depend.
    """

    def __init__(self) -> None:
        self._outside: dict[str, Programs] = {}
        self._latest: tuple[weakref.ref[Any] | None, Programs] = (None, {})

    def of_trace(self) -> Programs:
        """Return the cache of the trace around the call."""
        if not is_tracing():
            return self._outside.setdefault(float8.emulation(), {})
        config: Any = jax.config  # its flags have no types
        trace = staging_trace()
        if trace is None or config.jax_check_tracer_leaks:
            return {}
        latest, programs = self._latest  # one attribute, because several threads may trace
        if latest is None or latest() is not trace:
            programs = {}
            self._latest = weakref.ref(trace), programs
        return programs


def remember(programs: Programs, key: Any, value: Any) -> None:
    """Store a value under a key. If the cache is full, drop everything else first."""
    if len(programs) >= 256:  # each entry keeps the constants of its program alive
        programs.clear()
    programs[key] = value


def key_of_jitted_call(jaxpr: Jaxpr, operands: Sequence[Array], dtypes: Sequence[np.dtype | None]) -> Any:
    """Return a key of the decisions about an open jaxpr, or None.

    The jaxpr has a key if it does nothing but call a jitted function with its own arguments. Everything else on which
    the decisions depend, such as the mesh and the region around the call, is part of the key under which JAX stores the
    trace of the jitted function.

    Args:
      jaxpr: an open jaxpr.
      operands: its arguments, whose dtypes may differ from the traced dtypes.
      dtypes: the requested dtype of each result, or None.
    """
    if len(jaxpr.eqns) != 1 or jaxpr.constvars:
        return None
    (eqn,) = jaxpr.eqns
    bodies = bodies_of(eqn)
    passes_arguments = list(eqn.invars) == list(jaxpr.invars) and list(eqn.outvars) == list(jaxpr.outvars)
    if bodies is None or not bodies.is_jitted or not passes_arguments:
        return None
    arrive_in = tuple(jax.typeof(operand).dtype for operand in operands)
    return ("decisions", *eqn.params.values(), names_of(eqn), arrive_in, tuple(dtypes))
