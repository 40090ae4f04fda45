"""The words of the graph: which dtypes it speaks of, and what an operation is."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from jax.numpy import bfloat16

REAL = frozenset(np.dtype(dtype) for dtype in (np.float32, np.float16, bfloat16))


class Kind(enum.IntEnum):
    """What a node is before its neighbours have a say; the first four also what a value brings along to its readers."""

    SOURCE = 0
    """An argument, a constant, or what is made of such only."""
    HALF = 1
    """A matrix product or convolution."""
    FULL = 2
    """Computed in float32."""
    STRICT = 3
    """Computed in float32, and its value may not exist in half precision: the mask's ``finfo.min``."""
    INFER = 4
    """Takes the colour that is inferred from where it stands."""
    CLEAR = 5
    """Moves data: the colour of its neighbours."""
    JOIN = 6
    """Several values become one: a loop's carry, a conditional's result."""
    KEPT = 7
    """Keeps the dtypes it was written with."""


def is_real(aval: Any) -> bool:
    """Whether autocast may change the dtype of such a value: float32 and the two half formats, and nothing else."""
    # A reference has the dtype of what it refers to, and all who read and write it agree on that.
    return getattr(aval, "dtype", None) in REAL and not hasattr(aval, "inner_aval")
