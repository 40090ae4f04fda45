"""The dtypes in which products (matrix products and convolutions) compute."""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jaxmp.program.values import Value

_ALGORITHM = re.compile(r"(bf16|f16|tf32|f32|f64)_\1_.*?(?:_x(\d))?")
_NAMES = {"bf16": "bfloat16", "f16": "float16", "tf32": "tensorfloat32", "f32": "float32", "f64": "float64"}


def algorithm_dtype(algorithm: str) -> str | None:
    """Return the dtype in which an algorithm of ``jax.lax.DotAlgorithmPreset`` multiplies.

    The name of an algorithm that splits each operand has the number of its products, such as ``"bf16x3"``. Return None
    for an algorithm that multiplies operands in their own dtypes, and for other precisions.

    >>> algorithm_dtype("BF16_BF16_F32"), algorithm_dtype("TF32_TF32_F32_X3"), algorithm_dtype("ANY_F8_ANY_F8_F32")
    ('bfloat16', 'tf32x3', None)
    """
    match = _ALGORITHM.fullmatch(algorithm.lower())
    if match is None:
        return None
    return f"{match[1]}x{match[2]}" if match[2] else _NAMES[match[1]]


def operand_dtypes(product: Value) -> tuple[str, str]:
    """Return the dtypes in which a traced product multiplies its two operands.

    The algorithm of the product decides, or else the dtypes of the operands. TensorFloat-32, and an algorithm that
    splits float32 operands, count as float32.
    """
    dtype = algorithm_dtype(getattr(product.at.eqn.params.get("precision"), "name", ""))
    if dtype is None:
        left, right = product.inputs[:2]
        return multiplied(left), multiplied(right)
    dtype = dtype if dtype in ("bfloat16", "float16", "float64") else "float32"
    return dtype, dtype


def multiplied(operand: Value) -> str:
    """Return the dtype in which a product multiplies an operand.

    An operand that is a float8 value times a scale counts as float8.
    """
    if operand.name == "mul":
        for factor in operand.inputs:
            if factor.is_cast and factor.inputs[0].dtype.name.startswith("float8"):
                return factor.inputs[0].dtype.name
    return operand.dtype.name


def widest(dtypes: Iterable[str]) -> str:
    """Return the widest dtype: the compute dtype of a product with these operands.

    Of two float8 dtypes, the one with the larger range is wider.

    >>> widest(["float8_e4m3fn", "float8_e5m2"]), widest(["bfloat16", "float32"])
    ('float8_e5m2', 'float32')
    """
    return max(dtypes, key=_width)


def _width(name: str) -> tuple[int, float]:
    dtype = np.dtype(name)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return dtype.itemsize, float(jnp.finfo(dtype).max) if is_float else 0.0
