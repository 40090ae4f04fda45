"""While loops that run until they converge, told by what their condition depends on.

A loop is one if a product inside it decides, by way of floating values and comparisons of them, whether there is
another turn. What passes through an integer decides too, but does not converge: a decoder that ends when it has chosen
the token for the end runs in half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.walk import equations
from jaxmp.engine.classes import Class, primitives_of

_PRODUCTS = primitives_of(Class.HALF)


def is_search(bodies: reading.Bodies) -> bool:
    """Whether a while loop with these bodies runs until something computed from its products converges."""
    condition, body = (reading.opened(jaxpr)[0] for jaxpr in bodies.jaxprs)
    carried, before = [False] * bodies.carry, None
    while carried != before:
        before = carried
        returned = _follow(body, [*[False] * bodies.body_consts, *carried])
        carried = [old or new for old, new in zip(before, returned, strict=True)]
    return _follow(condition, [*[False] * bodies.consts, *carried])[0]


def _follow(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which results depend on a product, or on those of the inputs that do."""
    depends = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> bool:
        return not reading.is_literal(atom) and depends.get(atom, False)

    for eqn in jaxpr.eqns:
        operands, bodies = [read(atom) for atom in eqn.invars], reading.bodies_of(eqn)
        if bodies is not None and bodies.kind == "call":
            results = _follow(reading.opened(bodies.jaxprs[0])[0], operands)
        else:
            inside = (each for inner in (bodies.jaxprs if bodies else ()) for each in equations(inner))
            found = any(operands) or any(each.primitive.name in _PRODUCTS for each in (eqn, *inside))
            results = [found] * len(eqn.outvars)
        depends.update(
            (var, result and not _is_integer(var.aval)) for var, result in zip(eqn.outvars, results, strict=True)
        )
    return [read(atom) for atom in jaxpr.outvars]


def _is_integer(aval: Any) -> bool:
    return bool(jax.numpy.issubdtype(aval.dtype, np.integer))
