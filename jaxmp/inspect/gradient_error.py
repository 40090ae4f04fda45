"""The error that ``compare``, ``error_budget`` and ``tune`` measure, and when it is too large.

It is the relative L2 error of all gradients together. (For a function without a loss, it is that of all results.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LARGEST_GOOD_ERROR = 0.05
"""The error above which no tool says that nothing needs float32, unless the user allows more."""


def relative_error(value: Any, true: Any) -> float:
    """Return the L2 norm of the difference, divided by the L2 norm of the true value.

    The error is infinite if the difference is not finite, or if the true value is zero and the difference is not.
    """
    difference, size = float(np.linalg.norm(np.subtract(value, true))), float(np.linalg.norm(true))
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf


def percent(share: float) -> str:
    """Return a share as a percentage with two digits.

    >>> percent(0.00642), percent(0.84)
    ('0.64 %', '84 %')
    """
    if not math.isfinite(share):
        return "infinite"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def sentence_of_coarse_half(half: str, floor: float) -> str:
    """Return a sentence about a half dtype whose error is too large in products alone."""
    return (
        f"{half} itself is too coarse here: if only the operands of products are rounded, the gradients' error is "
        f"{percent(floor)}, more than {percent(LARGEST_GOOD_ERROR)}."
    )
