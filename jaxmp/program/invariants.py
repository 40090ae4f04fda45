"""Find values that are the same for all examples, and results that are arguments.

An example is one element of the axis over which a ``jax.vmap`` maps. ``SAME_FOR_EXAMPLES`` finds the
values that are equal for all examples, and ``passed_on`` finds the results of a program that are its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jaxmp.program.equations import Bodies, bodies_of, opened, primitive_of
from jaxmp.program.facts import Analysis
from jaxmp.program.primitives import Trait, with_trait


class _SameForExamples(Analysis[bool]):
    """The fact that a value is equal for all examples."""

    constant = True

    def transfer_whole(self, eqn: JaxprEqn, operands: Sequence[bool]) -> Sequence[bool] | None:
        return [False] * len(eqn.outvars) if eqn.primitive.name in _PER_DEVICE else None

    def transfer(self, eqn: JaxprEqn, operands: Sequence[bool]) -> Sequence[bool]:
        if primitive_of(eqn) in _ONE_BY_ONE:
            return operands
        is_same = all(operands) and eqn.primitive.name not in _PER_DEVICE
        return [is_same] * len(eqn.outvars)

    def join(self, first: bool, second: bool) -> bool:
        return first and second

    def select(self, condition: bool, fact: bool) -> bool:
        """Return False if the condition differs: then each example runs all branches."""
        return condition and fact

    def repeat(self, condition: bool, fact: bool) -> bool:
        """Return False if the condition differs: examples differ in their number of iterations."""
        return condition and fact


_ONE_BY_ONE = with_trait(Trait.IDENTITY)
_PER_DEVICE = with_trait(Trait.PER_DEVICE)
SAME_FOR_EXAMPLES = _SameForExamples()


class _Passed(NamedTuple):
    """The number of an argument that is passed on unchanged, whole or by its elements."""

    argument: int
    scans: int = 0  # the number of scans in which an element is picked


class _PassedOn(Analysis[_Passed | None]):
    """The argument that a value equals, or None."""

    constant = None

    def transfer_whole(self, eqn: JaxprEqn, operands: Sequence[_Passed | None]) -> Sequence[_Passed | None] | None:
        bodies = bodies_of(eqn)
        # The body of a `shard_map` has parts of the arrays. A rule may give an identity function another derivative.
        is_opaque = bodies is not None and (bodies.is_per_device or bodies.has_rule)
        return [None] * len(eqn.outvars) if is_opaque else None

    def transfer(self, eqn: JaxprEqn, operands: Sequence[_Passed | None]) -> Sequence[_Passed | None]:
        return [None] * len(eqn.outvars)

    def join(self, first: _Passed | None, second: _Passed | None) -> _Passed | None:
        return first if first == second else None

    def solve_inputs(self, bodies: Bodies, operands: Sequence[_Passed | None]) -> list[list[_Passed | None]]:
        """Forget elements that enter a loop: only the scan that picked an element may stack it again."""
        entering = list(operands)
        for n in range(bodies.carries.stop) if bodies.is_loop else ():
            passed = entering[n]
            entering[n] = None if passed is not None and passed.scans else passed
        return super().solve_inputs(bodies, entering)

    def pick(self, fact: _Passed | None) -> _Passed | None:
        return fact and _Passed(fact.argument, fact.scans + 1)

    def stack(self, fact: _Passed | None) -> _Passed | None:
        return _Passed(fact.argument, fact.scans - 1) if fact and fact.scans else None


_PASSED_ON = _PassedOn()


def passed_on(program: Any) -> list[int | None]:
    """Return for each result of a program the number of the argument that it equals.

    The number is None if the result equals no argument.
    """
    jaxpr, _ = opened(program)
    ends = _PASSED_ON.solve(jaxpr, [_Passed(n) for n in range(len(jaxpr.invars))]).results
    return [None if end is None or end.scans else end.argument for end in ends]
