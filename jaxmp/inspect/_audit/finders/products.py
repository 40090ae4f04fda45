"""Find products whose dtypes or dimensions make them slow, or differ from the policy.

A product is a matrix product or a convolution. "Half" means half precision: float16 or bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.engine.marks import region_of
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.inspect._audit.products import work
from jaxmp.inspect._audit.weight_operands import unaligned
from jaxmp.program.primitives import PRODUCTS, classify
from jaxmp.program.values import Equation
from jaxmp.program.walk import equations, jaxprs_in

_FLOAT32_LEVELS = frozenset({"float32", "tensorfloat32"})


def float32_products(audited: Audited) -> Faults:
    """Find unintended float32 products under a half policy.

    A float32 product is intended if a float32 region, an override or a ``precision`` asks for it.
    """
    mixed = {(value.at.path, value.at.source) for value, product in audited.products if _is_mixed(product)}
    for value, product in audited.products:
        equation = value.at
        if set(product.operands) != {"float32"} or product.phase == "update" or _asks_for_float32(equation):
            continue
        if (
            product.phase == "backward" and (equation.path, equation.source) in mixed
        ):  # the derivative of a mixed product
            continue
        half = half_of(audited, equation)
        is_outer_product = value.name == "dot_general" and not equation.eqn.params["dimension_numbers"][0][0]
        if half is None or is_outer_product:
            continue
        yield Fault(
            equation,
            f"a product of float32 operands, although the policy is {half}",
            f"cast both operands to {half}, or override the layer if it has its own dtype=float32; to keep float32, "
            "use an override of this path, jaxmp.precision('float32') or precision='highest'",
        )


def half_products(audited: Audited) -> Faults:
    """Find half products in another dtype than the compute dtype of the declared policy.

    A half product is intended if ``jaxmp.precision("half")`` asks for it.
    """
    for value, product in audited.products:
        equation, dtypes = value.at, set(product.operands)
        policies = audited.policies_of(tuple(equation.path.split("/")))
        expected = sorted({policy.compute_dtype.name for policy in policies})
        if not policies or len(dtypes) > 1 or product.phase == "update" or not dtypes.isdisjoint(expected):
            continue
        region = region_of(equation.names)
        (dtype,) = dtypes
        if dtype not in ("bfloat16", "float16") or (region.level == "half" and region.override is None):
            continue
        yield Fault(
            equation,
            f"a product of {dtype} operands, although the policy computes in {' or '.join(expected)}",
            "put the model under this policy, or audit with the policy of the model, a PolicyMap if it has overrides",
        )


def products_in_unknown_primitives(audited: Audited) -> Faults:
    """Find products in primitives that jaxmp does not know."""
    for equation in audited.program.equations.values():
        if equation.bodies is not None or classify(equation.name) is not None:
            continue
        inner = [eqn for jaxpr in jaxprs_in(equation.eqn) for eqn in equations(jaxpr)]
        if count := sum(eqn.primitive.name in PRODUCTS for eqn in inner):
            yield Fault(
                equation,
                f"the unknown primitive {equation.name!r} holds products ({count}), which autocast leaves as they are, "
                "and which run an unknown number of times",
                "cast their operands to half yourself, then accept the finding: check(allow='unknown-primitive')",
            )


def mixed_products(audited: Audited) -> Faults:
    """Find products whose operands have different dtypes."""
    for value, product in audited.products:
        if _is_mixed(product):
            narrowest = min(map(np.dtype, product.operands), key=_itemsize)
            remedy = f"cast both operands to {narrowest.name}"
            if product.phase == "backward":
                remedy += ", or use autocast, which does so in derivatives"
            yield Fault(value.at, f"a product of {' and '.join(product.operands)} runs in the wider dtype", remedy)


def _is_mixed(product: Any) -> bool:
    """Return whether the operands of a product have different dtypes.

    Two float8 dtypes are not mixed, because a float8 recipe has one dtype for values and another for gradients.
    """
    dtypes = [np.dtype(name) for name in product.operands]
    if len(set(dtypes)) == 1 or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return False
    return max(map(_itemsize, dtypes)) > 1


def unaligned_products(audited: Audited) -> Faults:
    """Find products with a dimension that is not a multiple of 16 bytes.

    Only products of 16 bits or fewer with more than 1 % of the FLOPs are searched.
    """
    total = sum(work(product) for _, product in audited.products)
    for value, product in audited.products:
        size = min(np.dtype(name).itemsize for name in product.operands)
        dims = unaligned(value, audited.weight(value))
        if product.phase != "backward" and size <= 2 and dims and work(product) > 0.01 * total:
            step = 16 // size
            names = " and ".join(f"{name} {number}" for name, number in dims.items())
            yield Fault(
                value.at,
                f"{names}: not a multiple of {step}, which tensor cores need for {product.operands[0]}",
                f"pad to a multiple of {step} (jaxmp.hardware.align_dim)",
            )


def compiled_otherwise(audited: Audited) -> Faults:
    """Find half products that the compiled program computes in a wider dtype."""
    for value, product in audited.products:
        written = max(np.dtype(name).itemsize for name in product.operands)
        if audited.on_cpu or product.ran is None or written > 2 or np.dtype(product.ran).itemsize <= written:
            continue
        yield Fault(
            value.at,
            f"written in {product.operands[0]} and compiled to {product.ran}",
            "check whether the device's library has a kernel for these dtypes, this alignment and this layout",
        )


def _asks_for_float32(equation: Equation) -> bool:
    """Return whether the author asked for a float32 product."""
    precision = equation.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    is_default = all(part is None or str(part).rpartition(".")[2] == "DEFAULT" for part in parts)
    return not is_default or region_of(equation.names).level in _FLOAT32_LEVELS


def half_of(audited: Audited, equation: Equation) -> str | None:
    """Return the half compute dtype of the policy at an equation, or None.

    The result is None if there is no policy, if the policy computes in float32, or if one of several matching policies
    computes in float32.
    """
    if audited.policy is None:
        half = region_of(equation.names).half
        return None if half is None else half.name
    dtypes = {policy.compute_dtype for policy in audited.policies_of(tuple(equation.path.split("/")))}
    half = next((dtype for dtype in dtypes if is_half(dtype)), None)
    return None if half is None or np.dtype(np.float32) in dtypes else half.name


def _itemsize(dtype: np.dtype) -> int:
    return dtype.itemsize
