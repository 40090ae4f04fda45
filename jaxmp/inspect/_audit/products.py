"""Describe the matrix products and convolutions of an audited program."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp.base.hardware import Hardware
from jaxmp.engine.flops import flops_of
from jaxmp.inspect._audit.weight_operands import unaligned
from jaxmp.inspect.program.product_dtypes import algorithm_dtype, operand_dtypes, widest
from jaxmp.program.equations import asks_for_highest, bodies_of, opened
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.values import ARGUMENT, Program, Value
from jaxmp.program.walk import jaxprs_in


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution in a program.

    Attributes:
      path: the modules and scopes around the product, joined by ``/``.
      source: the file and line in the user's code.
      primitive: the name of JAX's primitive.
      operands: the dtypes in which the traced program multiplies the two operands. Operands that are float8 values
        times a scale count as float8. A product with an ``algorithm`` of JAX has the dtype of this algorithm.
      result: the dtype of the result.
      ran: the wider dtype of the operands in the compiled program; None if this dtype is unknown.
      flops: the FLOPs of one execution. A multiplication and an addition count as two. Padding, and the zeros of a
        dilated convolution, do not count.
      count: the number of executions; None if the number is known only at run time.
      bytes: the bytes of the operands and the result.
      bound: ``"arithmetic"`` or ``"bytes"`` (memory traffic): the one that takes longer at the device's peak rates.
        None if these rates are unknown.
      aligned: whether the contracted dimension and the output features are multiples of 16 bytes (of 8 values in half
        precision).
      phase: ``"forward"``, ``"backward"`` or ``"update"``.
    """

    path: str
    source: str
    primitive: str
    operands: tuple[str, str]
    result: str
    ran: str | None
    flops: int
    count: int | None
    bytes: int
    bound: str | None
    aligned: bool
    phase: str


def product_of(value: Value, ran: str | None, device: Hardware, weight: int) -> Product:
    """Return the product that computes a value.

    Args:
      value: the result of the product.
      ran: as in :class:`Product`.
      device: the hardware that determines ``bound``.
      weight: the position of the operand that is the product's weight.
    """
    equation, (left, right) = value.at, value.inputs[:2]
    operands = operand_dtypes(value)
    flops = flops_of(equation.eqn, counts_padding=False) or 0
    size = 0
    for array, dtype in zip((left, right, value), (*operands, value.dtype.name), strict=True):
        size += math.prod(array.shape) * np.dtype(dtype).itemsize
    return Product(
        path=equation.path,
        source=equation.source,
        primitive=equation.eqn.primitive.name,
        operands=operands,
        result=value.dtype.name,
        ran=ran,
        flops=flops,
        count=equation.count,
        bytes=size,
        bound=_bound_by(flops, size, _rate_name(widest(operands), equation.eqn, device), device),
        aligned=not unaligned(value, weight),
        phase=equation.phase,
    )


def _rate_name(dtype: str, eqn: JaxprEqn, device: Hardware) -> str:
    """Return the name of a product's rate for :meth:`Hardware.product_rate`."""
    precision = eqn.params.get("precision")
    algorithm = algorithm_dtype(getattr(precision, "name", ""))
    if algorithm is not None:
        return algorithm
    rounded = "bfloat16" if device.platform == "tpu" else "tensorfloat32"
    is_rounded = dtype == "float32" and rounded in device.peak_tflops and not asks_for_highest(precision)
    return rounded if is_rounded else dtype


def _bound_by(flops: int, size: int, rate_name: str, device: Hardware) -> str | None:
    rate = device.product_rate(rate_name)
    if rate is None or device.peak_bandwidth is None:
        return None
    return "arithmetic" if flops / (rate * 1e12) >= size / device.peak_bandwidth else "bytes"


def products_in_kernels(program: Program, device: Hardware) -> Iterator[Product]:
    """Yield the products inside equations that count as one operation.

    Examples of these equations are kernels and solvers. The grid of a Pallas kernel and the loops in it multiply the
    ``count`` of a product. The ``count`` is None inside a solver, whose number of iterations is unknown.
    """
    for equation in program.equations.values():
        if equation.bodies is not None:
            continue
        for eqn, lengths in _products_inside(equation.eqn, equation.lengths):
            operands = [Value(atom.aval, ARGUMENT) for atom in eqn.invars]
            in_kernel = dataclasses.replace(equation, eqn=eqn, lengths=lengths, operands=operands)
            value = Value(eqn.outvars[0].aval, eqn.primitive.name, equation=in_kernel)
            yield product_of(value, None, device, 1)


def _products_inside(
    eqn: JaxprEqn, lengths: tuple[int | None, ...]
) -> Iterator[tuple[JaxprEqn, tuple[int | None, ...]]]:
    """Yield the products in the jaxprs of an equation, each with the lengths of the loops around it."""
    lengths = (*lengths, *_lengths_of(eqn))
    for jaxpr in jaxprs_in(eqn):
        for inner in opened(jaxpr)[0].eqns:
            if inner.primitive.name in PRODUCTS:
                yield inner, lengths
            yield from _products_inside(inner, lengths)


def _lengths_of(eqn: JaxprEqn) -> tuple[int | None, ...]:
    """Return how often an equation runs its jaxprs, as factors; None for an unknown factor."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", None)
    if grid is not None:  # a Pallas kernel, whose grid may have sizes that are known only at run time
        return tuple(size if isinstance(size, int) else None for size in grid)
    bodies = bodies_of(eqn)
    if bodies is None:
        return (None,)
    return (bodies.length if bodies.is_loop else 1,)


def uncounted(products: Sequence[Product]) -> tuple[str, ...]:
    """Return a sentence for each product whose number of executions is unknown.

    The result is empty if all products have the same compute dtype, because their shares are then known.
    """
    if len({widest(product.operands) for product in products}) < 2:
        return ()
    sentences = []
    for product in products:
        if product.count is None:
            where = f"{product.path or '(no scope)'} ({product.source or 'no line known'})"
            dtype = widest(product.operands)
            sentences.append(f"the executions of the {dtype} product {where}, in a loop or a kernel of unknown length")
    return tuple(dict.fromkeys(sentences))


def work(product: Product) -> int:
    """Return the FLOPs of all executions of a product.

    If the number of executions is unknown, return the FLOPs of one execution.
    """
    return int(product.flops * (product.count or 1))


def shares_of_flops(products: Sequence[Product]) -> dict[str, float]:
    """Return the share of the products' FLOPs in each compute dtype, largest first."""
    flops = Counter[str]()
    for product in products:
        flops[widest(product.operands)] += work(product)
    total = flops.total()
    return {dtype: count / total for dtype, count in flops.most_common()} if total else {}
