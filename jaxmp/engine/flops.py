"""Floating-point operations of an equation, counted from its shapes.

A multiplication and an addition are two operations. A matrix product or a convolution has ``2 · results · terms``
operations, where ``terms`` is the number of terms in the sum of one result. The zeros that a dilation puts between the
elements of an input do not count. Padding counts in a plan, but not in an audit. An elementwise operation counts as one
operation per element, even ``exp``. A reduction counts as one operation per element that it reads. A Fourier transform
counts as the customary ``5 n log2(n)``. Operations on integers, and operations that move, compare or select data, do
not count.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp.program.equations import aval_of, primitive_of
from jaxmp.program.primitives import BOUNDS, COMBINES, Class, Trait, classify, has_trait, with_trait

_OF_UPDATES = with_trait(Trait.SCATTERS) - {"scatter"}
_FREE = COMBINES - BOUNDS - _OF_UPDATES
_PER_RESULT = (Class.POINTWISE, Class.WIDEST, Class.INFER)
_UNKNOWN = (None, Class.LINALG, Class.RECURSE)


def flops_of(eqn: JaxprEqn, counts_padding: bool = True) -> int | None:
    """Return the FLOPs of an equation without bodies; None if no formula is known.

    With ``counts_padding``, the FLOPs of a convolution include its padding.

    >>> import jax
    >>> dot = jax.make_jaxpr(jnp.dot)(jnp.ones((8, 16)), jnp.ones((16, 4))).eqns[0]
    >>> flops_of(dot) == 2 * 8 * 16 * 4
    True
    """
    name = primitive_of(eqn)
    cls = classify(name)
    match name:
        case "dot_general":
            return _flops_of_dot(eqn)
        case "ragged_dot_general":
            return _flops_of_ragged_dot(eqn)
        case "conv_general_dilated":
            return _flops_of_conv(eqn, counts_padding)
        case "fft":
            # The larger side counts, because one side of a real transform is half as long.
            size = max(_elements_in(atom) for atom in (*eqn.invars, *eqn.outvars))
            return round(5 * size * math.log2(max(math.prod(eqn.params["fft_lengths"]), 2)))
    if cls in _UNKNOWN or has_trait(name, Trait.UNCOUNTED):
        return None
    if name in _FREE or not eqn.outvars or not jnp.issubdtype(getattr(eqn.outvars[0].aval, "dtype", int), np.inexact):
        return 0
    if name in _OF_UPDATES:
        return _elements_in(eqn.invars[2])
    if name == "reduce_window_sum":
        return _elements_in(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])
    if cls is Class.ACCUMULATION:
        return _elements_in(eqn.invars[0])
    return _elements_in(eqn.outvars[0]) if cls in _PER_RESULT else 0


def _flops_of_dot(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _elements_in(eqn.outvars[0]) * math.prod(aval_of(eqn.invars[0]).shape[axis] for axis in contracted)


def _flops_of_ragged_dot(eqn: JaxprEqn) -> int:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    known = {*contracted, *batch, *numbers.rhs_group_dimensions}
    columns = [size for axis, size in enumerate(aval_of(eqn.invars[1]).shape) if axis not in known]
    # Each row is multiplied only by the matrix of its group.
    return 2 * _elements_in(eqn.invars[0]) * math.prod(columns)


def _flops_of_conv(eqn: JaxprEqn, counts_padding: bool) -> int:
    params, results = eqn.params, aval_of(eqn.outvars[0]).shape
    image, kernel = (aval_of(atom).shape for atom in eqn.invars)
    numbers = params["dimension_numbers"]
    (out_batch, out_features, *spatial), (_, in_features, *taps) = numbers.out_spec, numbers.rhs_spec
    terms = results[out_batch] * results[out_features] * kernel[in_features]
    for n, (axis, tap, source) in enumerate(zip(spatial, taps, numbers.lhs_spec[2:], strict=True)):
        starts = np.arange(results[axis])[:, None] * params["window_strides"][n] - params["padding"][n][0]
        places = starts + np.arange(kernel[tap]) * params["rhs_dilation"][n]
        dilation = params["lhs_dilation"][n]
        inside = counts_padding | ((places >= 0) & (places <= (image[source] - 1) * dilation))
        terms *= int(np.sum((places % dilation == 0) & inside))
    return int(2 * terms)


def _elements_in(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
