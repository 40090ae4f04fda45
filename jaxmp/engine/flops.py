"""Floating-point operations of an equation, counted from its shapes.

A multiplication and an addition are two. A matrix product or a convolution counts ``2 · results · terms``, padding
included, but without the zeros that a dilated input consists of; an operation that computes its elements one by one
counts one for each (``exp`` as much as ``add``), a reduction one for each element that it reads, a Fourier transform
the customary ``5 n log2(n)``. What moves, compares or selects data counts nothing, and integers are no floating point.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.engine.classes import Class, classify

_FREE = frozenset({"select_n", "concatenate", "stack", "pad", "dynamic_update_slice", "scatter", "ragged_all_to_all"})
_OF_UPDATES = frozenset({"scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
_PER_RESULT = (Class.POINTWISE, Class.WIDEST, Class.INFER)


def flops_of(eqn: Any) -> int | None:
    """The floating-point operations of an equation without bodies; None if no formula is known (a kernel, a solver).

    >>> import jax
    >>> dot = jax.make_jaxpr(jnp.dot)(jnp.ones((8, 16)), jnp.ones((16, 4))).eqns[0]
    >>> flops_of(dot) == 2 * 8 * 16 * 4
    True
    """
    name, cls = eqn.primitive.name, classify(eqn.primitive.name)
    if name in _PRODUCTS:
        return int(_PRODUCTS[name](eqn))
    if name == "fft":
        lengths = eqn.params["fft_lengths"]
        size = math.prod(lengths)
        batch = max(_size(atom.aval) for atom in (*eqn.invars, *eqn.outvars)) / math.prod(lengths[-1:])
        rows = max(1, round(batch / math.prod(lengths[:-1])))
        return round(5 * rows * size * math.log2(max(size, 2)))
    if cls is None or cls is Class.LINALG or name in _KERNELS:
        return None
    if name in _FREE or not _is_inexact(eqn.outvars[0].aval if eqn.outvars else None):
        return 0
    if name in _OF_UPDATES:
        return _size(eqn.invars[2].aval)
    if name in ("reduce_window_sum", "cumlogsumexp"):
        return _size(eqn.outvars[0].aval) * math.prod(eqn.params.get("window_dimensions", ()))
    if name.startswith(("bcoo_", "bcsr_", "coo_", "csr_")):
        return None
    if cls is Class.ACCUMULATION:
        return _size(eqn.invars[0].aval)
    return _size(eqn.outvars[0].aval) if cls in _PER_RESULT else 0


_KERNELS = frozenset(
    {"pallas_call", "core_map", "mpmd_map", "custom_fusion", "fusible", "ffi_call", "tpu_custom_call", "mosaic_gpu_p"}
    | {"custom_partitioning", "call_exported", "io_callback", "pure_callback", "cudnn_fusion", "scaled_dot"}
    | {"scaled_matmul", "scaled_matmul_wrapper", "rnn_fwd", "rnn_bwd", "reduce", "reduce_window", "select_and_scatter"}
    | {"custom_lin", "custom_vmap_call", "linear_call"}
    | {f"dot_product_attention_{kind}{end}" for kind in ("fwd", "bwd") for end in ("", "_wrapper")}
    | {f"dot_product_attention_fp8_{kind}{end}" for kind in ("fwd", "bwd") for end in ("", "_wrapper")}
)


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0].aval) * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)


def _ragged_dot(eqn: Any) -> int:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    known = {*contracted, *batch, *numbers.rhs_group_dimensions}
    columns = [size for axis, size in enumerate(eqn.invars[1].aval.shape) if axis not in known]
    return 2 * _size(eqn.invars[0].aval) * math.prod(columns)  # each row meets the matrix of its own group only


def _conv(eqn: Any) -> int:
    params, kernel = eqn.params, eqn.invars[1].aval.shape
    _, in_features, *spatial = params["dimension_numbers"].rhs_spec
    out_batch, out_features, *out_spatial = params["dimension_numbers"].out_spec
    shape = eqn.outvars[0].aval.shape
    terms = 1
    for axis, (size, taps) in enumerate(
        zip((shape[n] for n in out_spatial), (kernel[n] for n in spatial), strict=True)
    ):
        dilation = params["lhs_dilation"][axis]
        starts = np.arange(size)[:, None] * params["window_strides"][axis] - params["padding"][axis][0]
        terms *= int(np.sum((starts + np.arange(taps) * params["rhs_dilation"][axis]) % dilation == 0))
    return 2 * shape[out_batch] * shape[out_features] * terms * kernel[in_features]


_PRODUCTS = {"dot_general": _dot, "ragged_dot_general": _ragged_dot, "conv_general_dilated": _conv}


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, np.inexact))
