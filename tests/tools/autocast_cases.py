"""A case of the tables of functions under autocast: a function, its inputs, and the error allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Tolerance(NamedTuple):
    """The largest error where a product reads the result, in units in the last place of the compute dtype.

    Attributes:
      ulps: how many.
      why: what they are made of.
      of: of what the unit is the last place's: of ``"each"`` number, or of the ``"largest"`` of the result.
    """

    ulps: float
    why: str
    of: str = "each"


EXACT = Tolerance(0, "moves or selects numbers, or makes small integers: nothing is rounded")
ROUNDED = Tolerance(0.51, "float32 from its first operation to its last, then rounded once: half a unit")
ONE_STEP = Tolerance(1, "one operation in half precision: half a unit, and as much for its kernel")


def steps(count: float, why: str) -> Tolerance:
    """``count`` units for what stays in half precision, one operation after the other, without cancellation."""
    return Tolerance(count, why)


def of_largest(count: float, why: str) -> Tolerance:
    """Units of the largest number, for sums whose terms cancel and products that sum."""
    return Tolerance(count, why, "largest")


AROUND = of_largest(0.51, "float32 throughout, rounded once; single results near zero may lose what cancels in float32")
LOG_CDF = steps(0.76, "plain float32 errs by 0.749 of bfloat16 at 4.53: it takes log(q) of q = 1 - 3e-6")
LOGISTIC = of_largest(1.2, "float16's own exp(-x) overflows inside: below -11 the result is 0 and not 9e-6")


class Case(NamedTuple):
    """A function of ``inputs``, which come from a product, and of ``plain`` arguments, which do not."""

    name: str
    fun: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    tolerance: Tolerance
    plain: tuple[np.ndarray, ...] = ()


SHAPE = (4, 8)


def exact(x: Any) -> np.ndarray:
    """``x`` rounded to numbers that bfloat16 and float16 both have."""
    rounded = np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)
    return np.where(np.abs(rounded) < 2.0**-14, 0, rounded).astype(np.float32)


def normal(scale: float = 1, mean: float = 0, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return exact(mean + scale * np.random.default_rng(seed).normal(size=shape))


def uniform(low: float, high: float, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    margin = (high - low) / 64  # so that rounding keeps within the borders
    return exact(np.random.default_rng(seed).uniform(low + margin, high - margin, size=shape))


def simplex(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    x = np.exp(np.random.default_rng(seed).normal(size=shape))
    return exact(x / x.sum(-1, keepdims=True))


def integers(stop: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(stop, size=shape).astype(np.int32)


def spread(n: int = 4, seed: int = 0) -> np.ndarray:
    """A well conditioned, not symmetric matrix."""
    return exact(np.random.default_rng(seed).normal(size=(n, n)) + 4 * np.eye(n))


def positive_definite(n: int = 4, seed: int = 0) -> np.ndarray:
    """Symmetric, with eigenvalues far from each other."""
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
