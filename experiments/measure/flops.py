"""Count the FLOPs of a function's products by dtype in its jaxpr.

Also compute the share of FLOPs for tensor cores.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxmp
from jaxmp.engine.flops import flops_of
from jaxmp.program.primitives import PRODUCTS

# The dtypes that tensor cores multiply, from Volta to Blackwell. tensorfloat32 is their format for float32 arrays.
TENSOR_CORE_DTYPES = ("float16", "bfloat16", "tensorfloat32", "float8_e4m3fn", "float8_e5m2")


def count(fun: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Return the FLOPs of the products in a call ``fun(*args)``, by dtype.

    The dtype is that of the operands. Products are matrix products and convolutions. Products count as in
    :func:`jaxmp.cast_plan`:

    - A multiply-add is two FLOPs.
    - Padding counts. The zeros between the elements of a dilated operand (in the gradient of a strided convolution) do
      not count.
    - The body of a scan counts once per iteration, and ``cond`` counts its costliest branch. The body of a ``while``
      loop counts once, because the number of iterations is unknown.
    - Kernels that hide their products (Pallas, cuDNN) count nothing.
    - If the operands have two dtypes, the wider one counts.
    - A product of float32 arrays counts as ``tensorfloat32`` at precision ``high``, and as ``float32`` at ``highest``.
      If the product sets no precision, the default of the device decides.

    Args:
      fun: a function that JAX can trace. It may be jitted.
      *args: arrays or ``jax.ShapeDtypeStruct``. Nothing is computed.
    """
    tf32_by_default = jax.default_backend() == "gpu" and "tensorfloat32" in jaxmp.hardware.detect().tensor_cores
    return dict(_of_jaxpr(jax.make_jaxpr(fun)(*args).jaxpr, "tensorfloat32" if tf32_by_default else "float32"))


def tensor_core_share(flops: dict[str, int]) -> float:
    """Return the share of FLOPs in dtypes that tensor cores multiply.

    The share is 0 if there are no FLOPs.
    """
    total = sum(flops.values())
    return sum(flops.get(dtype, 0) for dtype in TENSOR_CORE_DTYPES) / total if total else 0.0


def _of_jaxpr(jaxpr: Any, default_float32: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        match eqn.primitive.name:
            case name if name in PRODUCTS:
                total[_dtype(eqn, default_float32)] += flops_of(eqn) or 0
            case "cond":
                branches = [_of_jaxpr(branch, default_float32) for branch in _inner(eqn.params["branches"])]
                total.update(max(branches, key=lambda branch: sum(branch.values())))
            case name:
                times = eqn.params["length"] if name == "scan" else 1
                for inner in _inner(tuple(eqn.params.values())):
                    for dtype, flops in _of_jaxpr(inner, default_float32).items():
                        total[dtype] += times * flops
    return total


def _inner(value: Any) -> Iterator[Any]:
    """Yield the jaxprs in an equation's parameter.

    The jaxprs may be open or closed, single or in a tuple.
    """
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _inner(item)
    elif hasattr(value, "eqns"):
        yield getattr(value, "jaxpr", value)


def _dtype(eqn: Any, default_float32: str) -> str:
    dtype = max((var.aval.dtype for var in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
    if dtype != "float32":
        return dtype
    precision = eqn.params["precision"]  # None, a Precision for each operand, or a DotAlgorithmPreset
    name = getattr(precision[0] if isinstance(precision, tuple) else precision, "name", "DEFAULT").split("_")[0]
    named = {"HIGHEST": "float32", "HIGH": "tensorfloat32", "F32": "float32", "TF32": "tensorfloat32"}
    return {**named, "BF16": "bfloat16", "F16": "float16"}.get(name, default_float32)
