"""Bind an equation again, to other operands or in another dtype."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.hi_primitives import bind_to, hi_primitive_of
from jaxmp.program.equations import Array, Params, Precision, in_dtype_of_scatter, primitive_of
from jaxmp.program.primitives import PRODUCTS


def bind_equation(eqn: JaxprEqn, operands: Sequence[Array], params: Params) -> list[Array]:
    """Bind an equation to other operands and parameters, and return its results."""
    if primitive_of(eqn) == "name" and (primitive := hi_primitive_of(eqn)) is not None:
        return [bind_to(primitive, *operands)]  # it has the type of its operand
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def params_in_dtype(eqn: JaxprEqn, dtype: np.dtype, precision: Precision = None) -> Params:
    """Return an equation's parameters for another dtype.

    ``precision`` is the precision of the result if the equation is a float32 product.
    """
    params = dict(eqn.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = in_dtype_of_scatter(params["update_jaxpr"], dtype)
    if eqn.primitive.name in PRODUCTS:
        # A precision or an algorithm (jax.lax.DotAlgorithmPreset) is valid only for the product's original dtypes.
        params["precision"] = precision if dtype == np.float32 else None
    return params
