"""The dtypes in which products (matrix products and convolutions) compute."""

from __future__ import annotations

from collections.abc import Iterable

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
    """Return the widest dtype: the compute dtype of a product with these operands."""
    return max(dtypes, key=lambda name: np.dtype(name).itemsize)
