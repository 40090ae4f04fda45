"""Evaluate a program with other equations.

Subclass :class:`Rewriter` to rewrite a program: override only what differs from the program as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.rebind import in_place_of
from jaxmp.program.binding import bind_equation
from jaxmp.program.bodies import rebuild
from jaxmp.program.derivative_rules import UNCHANGED_RULES, BodyFunction, RuleEvaluation
from jaxmp.program.equations import Array, Bodies, Literal, bodies_of, opened
from jaxmp.program.walk import interpreted


class Rewriter:
    """An evaluation of a program, in which subclasses change equations.

    The bodies of equations are evaluated by the same rewriter. Each equation is bound with its source line, its context
    and its scopes, inside of the current scopes. Values are usually arrays. A subclass may use other values if it
    overrides :meth:`evaluate_operation` and :meth:`evaluate_bodies`.

    Example::

        class DoubledSines(Rewriter):
            def evaluate_operation(self, eqn, operands):
                results = super().evaluate_operation(eqn, operands)
                return [2 * result for result in results] if eqn.primitive.name == "sin" else results
    """

    def evaluate(self, jaxpr: Any, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        """Return the results of an open jaxpr for its constants and arguments."""

        def evaluate_equation(eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
            with in_place_of(eqn):
                return self.evaluate_equation(eqn, operands)

        return interpreted(jaxpr, consts, args, evaluate_equation, self.evaluate_literal)

    def evaluate_literal(self, atom: Literal) -> Array:
        """Return the value of a literal."""
        return atom.val

    def evaluate_equation(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        """Return the results of an equation.

        The default calls :meth:`evaluate_bodies` if the bodies of the equation can be rebuilt, and
        :meth:`evaluate_operation` otherwise.
        """
        bodies = bodies_of(eqn)
        if bodies is None:
            return self.evaluate_operation(eqn, operands)
        return self.evaluate_bodies(eqn, bodies, operands)

    def evaluate_operation(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        """Return the results of an equation without bodies.

        The default binds the equation unchanged.
        """
        return bind_equation(eqn, operands, eqn.params)

    def evaluate_bodies(self, eqn: JaxprEqn, bodies: Bodies, operands: list[Array]) -> list[Array]:
        """Return the results of an equation with bodies.

        The default rebuilds the equation with the results of :meth:`evaluate_body`.
        """
        return list(self.rebuild(eqn, bodies)(*operands))

    def rebuild(self, eqn: JaxprEqn, bodies: Bodies) -> BodyFunction:
        """Return an equation with rewritten bodies, as a function of its operands.

        JAX calls :meth:`evaluate_body` when it traces the bodies, and may do so several times or later.
        """
        functions = [functools.partial(self.evaluate_body, eqn, bodies, n) for n in range(len(bodies.jaxprs))]
        return rebuild(eqn, bodies, functions, self.make_rule_evaluation(eqn))

    def evaluate_body(self, eqn: JaxprEqn, bodies: Bodies, number: int, *args: Array) -> list[Array]:
        """Return the results of body ``number`` of an equation.

        The results at the positions ``bodies.joined(number)`` must have the types of their joins. They have these types
        if the rewriting changes no types.
        """
        return self.evaluate(*opened(bodies.jaxprs[number]), args)

    def make_rule_evaluation(self, eqn: JaxprEqn) -> RuleEvaluation:
        """Return the functions that evaluate the derivative rule of an equation.

        By default they leave the rule unchanged.
        """
        return UNCHANGED_RULES
