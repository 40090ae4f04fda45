"""Walking a jaxpr with everything nested in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._jaxpr.reading import bodies_of, is_literal, opened

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of ``jaxpr``, open or closed, and of the jaxprs in its equations' parameters."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations(inner)


def jaxprs_in(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    yield from filter(_is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr))


def _is_jaxpr(param: Any) -> bool:
    # `ClosedJaxpr` and `Jaxpr` became one class in JAX 0.11: told by what they have.
    return hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns")


def product_dtypes(jaxpr: Any) -> set[str]:
    """The names of the dtypes that matrix products and convolutions in ``jaxpr`` take as operands."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return {var.aval.dtype.name for eqn in products for var in eqn.invars[:2]}


def follow_products(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which results depend on a product or on those of the inputs, but not by way of integers, as a token is one."""
    depends = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> bool:
        return not is_literal(atom) and depends.get(atom, False)

    for eqn in jaxpr.eqns:
        operands, bodies = [read(atom) for atom in eqn.invars], bodies_of(eqn)
        if bodies is not None and bodies.kind == "call":
            results = follow_products(opened(bodies.jaxprs[0])[0], operands)
        else:
            inside = (each for inner in (bodies.jaxprs if bodies else ()) for each in equations(inner))
            found = any(operands) or any(each.primitive.name in PRODUCTS for each in (eqn, *inside))
            results = [found] * len(eqn.outvars)
        depends |= {
            var: old and not jax.numpy.issubdtype(var.aval.dtype, np.integer)
            for var, old in zip(eqn.outvars, results, strict=True)
        }
    return [read(atom) for atom in jaxpr.outvars]
