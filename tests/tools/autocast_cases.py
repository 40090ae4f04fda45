"""Cases for tests of autocast: a function, its inputs, and the allowed error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Tolerance(NamedTuple):
    """The largest allowed error of a result that a product reads.

    The unit is a unit in the last place (ulp) of the compute dtype.

    Attributes:
      ulps: the number of units.
      why: the causes of the error.
      of: the number whose last place is the unit: ``"each"`` number of the result, or its ``"largest"`` number.
    """

    ulps: float
    why: str
    of: str = "each"


EXACT = Tolerance(0, "moves or selects numbers, or computes small integers, so nothing is rounded")
ROUNDED = Tolerance(0.51, "computed in float32, and rounded once at the end: half a unit")
ONE_STEP = Tolerance(1, "one operation in half precision: half a unit by rounding, and half by its kernel")


def steps(count: float, why: str) -> Tolerance:
    """Allow ``count`` units for successive half operations without cancellation."""
    return Tolerance(count, why)


def of_largest(count: float, why: str) -> Tolerance:
    """Allow ``count`` units of the largest number.

    Use it for products, and for sums whose terms may cancel.
    """
    return Tolerance(count, why, "largest")


AROUND = of_largest(0.51, "computed in float32, rounded once; results near zero have the error of cancelled terms")
LOG_CDF = steps(0.76, "float32 itself is off by 0.749 bfloat16 units at 4.53, where it computes log(1 - 3e-6)")
LOGISTIC = of_largest(1.2, "exp(-x) overflows in float16, so the result below -11 is 0 and not 9e-6")


class Case(NamedTuple):
    """A function of ``inputs`` and ``plain`` arguments, and its allowed error.

    Only the ``inputs`` are results of a product.
    """

    name: str
    fun: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    tolerance: Tolerance
    plain: tuple[np.ndarray, ...] = ()


SHAPE = (4, 8)


def exact(x: Any) -> np.ndarray:
    """Round ``x`` to numbers that bfloat16 and float16 both represent."""
    rounded = np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)
    return np.where(np.abs(rounded) < 2.0**-14, 0, rounded).astype(np.float32)


def normal(scale: float = 1, mean: float = 0, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return exact(mean + scale * np.random.default_rng(seed).normal(size=shape))


def uniform(low: float, high: float, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    margin = (high - low) / 64  # keeps the rounded numbers between low and high
    return exact(np.random.default_rng(seed).uniform(low + margin, high - margin, size=shape))


def simplex(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    x = np.exp(np.random.default_rng(seed).normal(size=shape))
    return exact(x / x.sum(-1, keepdims=True))


def integers(stop: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(stop, size=shape).astype(np.int32)


def spread(n: int = 4, seed: int = 0) -> np.ndarray:
    """Return a well-conditioned matrix that is not symmetric."""
    return exact(np.random.default_rng(seed).normal(size=(n, n)) + 4 * np.eye(n))


def positive_definite(n: int = 4, seed: int = 0) -> np.ndarray:
    """Return a symmetric matrix whose eigenvalues are far from each other."""
    x = np.random.default_rng(seed).normal(size=(n, n)) / 4
    return exact(x + x.T + np.diag(2.0 + 2 * np.arange(n)))


A, B = normal(), normal(seed=1)
WIDE = normal(5)
POSITIVE, POSITIVE_B = uniform(0.1, 8), uniform(0.1, 8, seed=1)
UNIT, UNIT_B = uniform(0, 1), uniform(0, 1, seed=1)
SIGNED_UNIT = uniform(-1, 1)
ROW = normal(3, shape=(8,))
LABELS = integers(8, (4,))
ONE_HOT = np.eye(8, dtype=np.float32)[LABELS]
SIGNS = np.where(normal(seed=3) > 0, 1, -1).astype(np.float32)
ZEROS_AND_ONES = (normal(seed=3) > 0).astype(np.float32)
MASK = np.array([[True] * 5 + [False] * 3] * 3 + [[True] * 8])
CAUSAL = np.tril(np.ones((4, 4), bool))
SQUARE = spread()
SYMMETRIC = positive_definite()
