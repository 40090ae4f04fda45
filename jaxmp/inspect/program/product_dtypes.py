"""The dtypes in which products (matrix products and convolutions) compute."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jaxmp.program.values import Value


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
