"""Find the sums in half precision in a program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmp.program.equations import bodies_of, opened
from jaxmp.program.walk import equations


class Sum(NamedTuple):
    """A sum in half precision, with its number of terms."""

    primitive: str
    dtype: str
    terms: float


def half_sums(jaxpr: Any, least: int = 257) -> list[Sum]:
    """Return the half sums of at least ``least`` terms in a program.

    A sum is over axes, over windows, over the indices of a scatter, or over the iterations of a loop.
    """
    sums = [item for eqn in equations(jaxpr) for item in (*_sums_over_axes(eqn), *_sums_over_iterations(eqn))]
    return [item for item in sums if item.terms >= least]


def half_additions(jaxpr: Any) -> int:
    """Count the additions of two half cotangents."""
    additions = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "add_any"]
    return sum(_is_half(eqn.outvars[0]) for eqn in additions)


def _is_half(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _sums_over_axes(eqn: Any) -> Iterator[Sum]:
    name, params, terms = eqn.primitive.name, eqn.params, 1
    if name == "reduce_sum":
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in params["axes"])
    elif name == "cumsum":
        terms = eqn.invars[0].aval.shape[params["axis"]]
    elif name == "reduce_window_sum":
        terms = math.prod(params["window_dimensions"])
    elif name in ("scatter-add", "scatter_add") and not params["unique_indices"]:
        terms = math.prod(eqn.invars[1].aval.shape[:-1])
    if terms > 1 and _is_half(eqn.outvars[0]):
        yield Sum(name, eqn.outvars[0].aval.dtype.name, terms)


def _sums_over_iterations(eqn: Any) -> Iterator[Sum]:
    """Yield the half carries of a loop to which each iteration only adds."""
    bodies = bodies_of(eqn)
    if bodies is None or bodies.kind not in ("scan", "while"):
        return
    body = opened(bodies.jaxprs[-1])[0]
    carries = body.invars[bodies.start - bodies.consts :]
    count = bodies.carry if bodies.kind == "scan" else len(body.outvars)
    for carry, result in zip(carries[:count], body.outvars[:count], strict=True):
        additions = _additions(body, carry, result)
        if additions and _is_half(result):
            yield Sum(eqn.primitive.name, result.aval.dtype.name, additions * eqn.params.get("length", math.inf))


def _additions(body: Any, carry: Any, result: Any) -> int:
    """Return how often an iteration adds to a carry, or 0 if it does anything else with it."""
    count = 0
    while carry is not result:
        readers = [eqn for eqn in body.eqns for atom in eqn.invars if atom is carry]
        if len(readers) != 1 or readers[0].primitive.name not in ("add", "add_any"):
            return 0
        carry, count = readers[0].outvars[0], count + 1
    return count
