"""Count the FLOPs of a function's products by dtype in its jaxpr."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax

import jaxmp
from jaxmp.engine.flops import flops_of
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.reading import read_program
from jaxmp.program.values import Body


def count(fun: Callable[..., Any], *args: Any, default_float32: str | None = None) -> dict[str, int]:
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
      default_float32: the name under which float32 products count that set no precision; None for the default of the
        device.
    """
    if default_float32 is None:
        is_tf32 = jax.default_backend() == "gpu" and "tensorfloat32" in jaxmp.hardware.detect().tensor_cores
        default_float32 = "tensorfloat32" if is_tf32 else "float32"
    program = read_program(jax.make_jaxpr(fun)(*args))
    return dict(_of_body(program.body, default_float32))


def _of_body(body: Body, default_float32: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for equation in body.equations:
        if equation.name in PRODUCTS:
            total[_dtype(equation.eqn, default_float32)] += flops_of(equation.eqn) or 0
        of_bodies = [_of_body(inside, default_float32) for inside in equation.inside]
        if equation.bodies is not None and equation.bodies.is_conditional:
            of_bodies = [max(of_bodies, key=lambda flops: sum(flops.values()))]
        iterations = 1 if equation.bodies is None else equation.bodies.iterations
        for flops in of_bodies:
            for dtype, count in flops.items():
                total[dtype] += count * iterations
    return total


def _dtype(eqn: Any, default_float32: str) -> str:
    dtype = max((var.aval.dtype for var in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
    if dtype != "float32":
        return dtype
    precision = eqn.params["precision"]  # None, a Precision for each operand, or a DotAlgorithmPreset
    name = getattr(precision[0] if isinstance(precision, tuple) else precision, "name", "DEFAULT").split("_")[0]
    named = {"HIGHEST": "float32", "HIGH": "tensorfloat32", "F32": "float32", "TF32": "tensorfloat32"}
    return {**named, "BF16": "bfloat16", "F16": "float16"}.get(name, default_float32)
