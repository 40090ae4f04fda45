"""Find while loops that run until a computed value converges.

The condition of such a loop reads a value that each iteration recomputes from products, such as a residual or an error
estimate. A product is a matrix product or a convolution.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.program.equations import Bodies, bodies_of, opened
from jaxmp.program.primitives import CAST, COMBINES, COMPARISONS, PICKS, PRODUCTS, SUMS, Trait, with_trait
from jaxmp.program.walk import equations, interpreted


class _ProductOrigin(enum.IntEnum):
    """The way in which a value in an iteration depends on products."""

    FIXED = 0
    """The value does not depend on products, or only through integers, such as a token or a count."""
    SUM = 1
    """The value is a carry that depends on products, or a sum with such a carry. Example: time plus a step."""
    ANEW = 2
    """The iteration recomputes the value from products. Examples are a residual, a step and an error estimate."""


FIXED, SUM, ANEW = _ProductOrigin
# The result of such an operation has the origin of its operands.
_MOVES = PICKS | COMBINES | with_trait(Trait.EXTREME, Trait.POOLS) | {CAST}


def is_search(bodies: Bodies) -> bool:
    """Return whether a while loop runs until a computed value converges.

    The result is true if the condition reads a value that each iteration recomputes from a product, such as a residual.
    A carry to which each iteration adds something, such as time, does not count as recomputed.
    """
    condition, turn = (opened(jaxpr)[0] for jaxpr in bodies.jaxprs)
    carry = _of_carry(turn, bodies, [FIXED] * bodies.carry)  # ANEW: depends on a product in any iteration
    sums = [SUM if origin is ANEW else FIXED for origin in carry]  # assume that these carries are sums
    carry = _of_carry(turn, bodies, sums)
    return _origins(condition, [*[FIXED] * bodies.consts, *carry])[0] is ANEW


def _of_carry(turn: Any, bodies: Bodies, carry: list[_ProductOrigin]) -> list[_ProductOrigin]:
    """Return the highest origin of each carry over all iterations.

    An origin is a :class:`_ProductOrigin`.
    """
    consts = [FIXED] * (bodies.start - bodies.consts)
    while True:
        results = _origins(turn, [*consts, *carry])
        raised = [max(old, new) for old, new in zip(carry, results, strict=True)]
        if raised == carry:
            return carry
        carry = raised


def _origins(jaxpr: Any, operands: Sequence[_ProductOrigin]) -> list[_ProductOrigin]:
    """Return the origins of the results of an open jaxpr."""
    return interpreted(jaxpr, [FIXED] * len(jaxpr.constvars), operands, _of_equation, lambda _: FIXED)


def _of_equation(eqn: Any, operands: list[_ProductOrigin]) -> list[_ProductOrigin]:
    bodies = bodies_of(eqn)
    if bodies is None:
        results = [_of_operation(eqn.primitive.name, operands)] * len(eqn.outvars)
    elif bodies.kind == "call":
        results = _origins(opened(bodies.jaxprs[0])[0], operands)
    elif bodies.kind == "cond":
        branches = [_origins(opened(branch)[0], operands[1:]) for branch in bodies.jaxprs]
        results = [_selected(operands[0], ends) for ends in zip(*branches, strict=True)]
    else:
        inside = (inner.primitive.name for body in bodies.jaxprs for inner in equations(body))
        is_computed = max(operands, default=FIXED) > FIXED or not PRODUCTS.isdisjoint(inside)
        results = [ANEW if is_computed else FIXED] * len(eqn.outvars)
    return [
        FIXED if jax.numpy.issubdtype(var.aval.dtype, np.integer) else origin
        for var, origin in zip(eqn.outvars, results, strict=True)
    ]


def _of_operation(name: str, operands: Sequence[_ProductOrigin]) -> _ProductOrigin:
    highest = max(operands, default=FIXED)
    if name in PRODUCTS:
        return ANEW
    if name == "select_n":
        return _selected(operands[0], operands[1:])
    if highest is FIXED or name in _MOVES:
        return highest
    if name in SUMS and SUM in operands:
        return SUM
    if name in COMPARISONS and highest is SUM:
        return FIXED
    return ANEW


def _selected(which: _ProductOrigin, cases: Sequence[_ProductOrigin]) -> _ProductOrigin:
    """Return the origin of a value that is selected from several."""
    highest = max(cases)
    return ANEW if which is ANEW and highest is FIXED else highest
