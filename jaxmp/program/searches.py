"""Find while loops that run until a computed value converges.

The condition of such a loop reads a value that each iteration recomputes from products, such as a residual or an error
estimate. A product is a matrix product or a convolution.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp.program.equations import Bodies, aval_of, primitive_of
from jaxmp.program.facts import Analysis
from jaxmp.program.primitives import CAST, COMPARISONS, MOVES, PRODUCTS, SUMS, Trait, with_trait


class _ProductOrigin(enum.IntEnum):
    """The way in which a value in an iteration depends on products."""

    FIXED = 0
    """The value does not depend on products, or only through integers, such as a token or a count."""
    SUM = 1
    """The value is a carry that depends on products, or a sum with such a carry. Example: time plus a step."""
    SCALED = 2
    """The value is such a sum times a fixed number. Example: the score of a sentence, divided by its length."""
    ANEW = 3
    """The iteration recomputes the value from products. Examples are a residual, a step and an error estimate."""


FIXED, SUM, SCALED, ANEW = _ProductOrigin
# The result of such an operation has the origin of its operands.
_KEEPS_ORIGIN = MOVES | {CAST}
_MULTIPLIES = with_trait(Trait.MULTIPLIES)


class _ProductOrigins(Analysis[_ProductOrigin]):
    """The way in which each value depends on products."""

    constant = FIXED

    def solve_equation(self, eqn: JaxprEqn, operands: Sequence[_ProductOrigin]) -> Sequence[_ProductOrigin]:
        origins = super().solve_equation(eqn, operands)
        are_integers = [jax.numpy.issubdtype(aval_of(var).dtype, np.integer) for var in eqn.outvars]
        return [FIXED if is_integer else origin for is_integer, origin in zip(are_integers, origins, strict=True)]

    def transfer(self, eqn: JaxprEqn, operands: Sequence[_ProductOrigin]) -> Sequence[_ProductOrigin]:
        return [self._of_operation(primitive_of(eqn), operands)] * len(eqn.outvars)

    def _of_operation(self, name: str, operands: Sequence[_ProductOrigin]) -> _ProductOrigin:
        highest = max(operands, default=FIXED)
        if name in PRODUCTS:
            return ANEW
        if name == "select_n":
            return self.select(operands[0], max(operands[1:]))
        if highest is FIXED or name in _KEEPS_ORIGIN:
            return highest
        if name in COMPARISONS and highest is not ANEW:
            return FIXED
        if name in SUMS:
            return self._of_sum(name, operands)
        if name in _MULTIPLIES and highest is not ANEW:
            is_scaled = operands[1] is FIXED if name == "div" else FIXED in operands
            return SCALED if is_scaled else ANEW
        return ANEW

    def _of_sum(self, name: str, operands: Sequence[_ProductOrigin]) -> _ProductOrigin:
        first, second = operands
        is_change = name == "sub" and first is not FIXED and second in (SUM, SCALED)
        if is_change:  # a new value minus the old one, such as a residual
            return ANEW
        return SUM if SUM in operands else max(operands)

    def join(self, first: _ProductOrigin, second: _ProductOrigin) -> _ProductOrigin:
        return max(first, second)

    def select(self, condition: _ProductOrigin, fact: _ProductOrigin) -> _ProductOrigin:
        return ANEW if condition is ANEW and fact is FIXED else fact


_ORIGINS = _ProductOrigins()


def is_search(bodies: Bodies) -> bool:
    """Return whether a while loop runs until a computed value converges.

    The result is true if the condition reads a value that each iteration recomputes from a product, such as a residual.
    A carry to which each iteration adds something, such as time or a sum of log-probabilities, does not count as
    recomputed. The result is false for all equations but while loops.
    """
    if bodies.kind != "while":
        return False
    fixed = [FIXED] * bodies.start
    _, turn = _ORIGINS.solve_inputs(bodies, [*fixed, *[FIXED] * bodies.carry])
    carry = turn[len(turn) - bodies.carry :]  # ANEW: depends on a product in any iteration
    sums = [SUM if origin is ANEW else FIXED for origin in carry]  # assume that these carries are sums
    condition, _ = _ORIGINS.solve_inputs(bodies, [*fixed, *sums])
    return _ORIGINS.solve(bodies.jaxprs[0], condition).results[0] is ANEW
