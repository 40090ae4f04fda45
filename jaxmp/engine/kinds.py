"""The words of the graph: which dtypes it speaks of, what a value is, and what it brings along."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from jax.numpy import bfloat16

REAL = frozenset(np.dtype(dtype) for dtype in (np.float32, np.float16, bfloat16))


class Kind(enum.IntEnum):
    """What a node is before its neighbours have a say."""

    SOURCE = 0
    """An argument or a constant."""
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


class Asked(enum.StrEnum):
    """What asks for the kind of an operation in place of its class."""

    NOTHING = ""
    REGION = "region"
    PATH = "path"
    PRIMITIVE = "primitive"
    CLASS = "class"
    """An override of its class."""
    EPSILON = "epsilon"
    """A constant below the half dtype's smallest normal number, which would vanish."""


class State(enum.IntEnum):
    """What a value brings along to the operations that read it."""

    NEUTRAL = 0
    """An argument, or made from arguments only."""
    HALF = 1
    FULL = 2
    STRICT = 3


def is_real(aval: Any) -> bool:
    """Whether autocast may change the dtype of such a value: float32 and the two half formats, and nothing else."""
    # A reference has the dtype of what it refers to, and all who read and write it agree on that.
    return getattr(aval, "dtype", None) in REAL and not hasattr(aval, "inner_aval")
