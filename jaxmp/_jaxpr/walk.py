"""Walking a jaxpr with everything nested in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

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
