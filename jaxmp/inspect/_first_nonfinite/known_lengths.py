"""Replace while loops by scans, once a run has counted their iterations.

The search follows the iterations of a scan one by one. Those of a while loop are unknown before the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp.program.bodies import keep_finished, rebuild
from jaxmp.program.equations import Bodies, opened
from jaxmp.program.reading import is_whole
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.values import Key


def with_known_lengths(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], lengths: Mapping[Key, int]
) -> tuple[Any, list[Any]]:
    """Return an open jaxpr with scans in place of while loops, and its constants.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      args: its arguments.
      lengths: the largest number of iterations of each while loop, by the key of its equation.
    """

    def evaluate(*args: Any) -> list[Any]:
        return [jnp.asarray(result) for result in _WithScans(lengths).evaluate(jaxpr, consts, args)]

    program, consts = opened(jax.make_jaxpr(evaluate)(*args))
    return program, list(consts)


class _WithScans(Rewriter):
    def __init__(self, lengths: Mapping[Key, int], around: Key = ()) -> None:
        """Evaluate a body. ``around`` is the key of the body."""
        self.lengths, self.around = lengths, around
        self._numbers = itertools.count()
        self._key: Key = ()

    def evaluate_equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        self._key = (*self.around, next(self._numbers))
        if is_whole(eqn):
            return self.evaluate_operation(eqn, operands)
        return super().evaluate_equation(eqn, operands)

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        key = self._key

        def run(number: int, *args: Any) -> list[Any]:
            return _WithScans(self.lengths, (*key, number)).evaluate(*opened(bodies.jaxprs[number]), args)

        def function(number: int) -> Any:
            return lambda *args: run(number, *args)

        if not bodies.is_loop or bodies.length is not None:
            return list(rebuild(eqn, bodies, [function(number) for number in range(len(bodies.jaxprs))])(*operands))
        fixed, start = operands[: bodies.start], list(map(jnp.asarray, operands[bodies.start :]))

        def iteration(carry: list[Any], _: None) -> tuple[list[Any], None]:
            before = [*fixed, *carry]
            (goes_on,) = run(0, *bodies.inputs(0, before))

            def next_carry(carry: list[Any]) -> list[Any]:
                return keep_finished(goes_on, run(1, *bodies.inputs(1, [*fixed, *carry])), carry)

            return jax.lax.cond(jnp.any(goes_on), next_carry, lambda carry: carry, carry), None

        carry, _ = jax.lax.scan(iteration, start, None, length=self.lengths.get(key, 0))
        return list(carry)
