"""Solve for a fact about each value of a program.

A fact is, for example, whether a value is the same for all examples of a ``jax.vmap``. An :class:`Analysis` says how an
operation changes facts. This file follows the facts through calls, scans, whiles and conditionals.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from functools import reduce
from typing import Any, Generic, TypeVar

from jax.extend.core import JaxprEqn, Var

from jaxmp.program.equations import Bodies, bodies_of, opened
from jaxmp.program.walk import interpreted

Fact = TypeVar("Fact")


@dataclasses.dataclass(frozen=True, eq=False)
class Facts(Generic[Fact]):
    """The facts about the values of a jaxpr.

    Attributes:
      variables: the facts of the variables.
      results: the facts of the results.
    """

    variables: dict[Var, Fact]
    results: list[Fact]


class Analysis(Generic[Fact]):
    """A question about each value of a program.

    Subclass it, and write :meth:`transfer` and :meth:`join`. Facts are hashable. ``join`` must be monotone on a small
    set of facts, such as booleans or an enum, so that loops reach a fixed point.

    >>> class DependsOnSine(Analysis[bool]):
    ...     constant = False
    ...     def transfer(self, eqn, operands):
    ...         return [eqn.primitive.name == "sin" or any(operands)] * len(eqn.outvars)
    ...     def join(self, first, second):
    ...         return first or second
    >>> def fun(x):
    ...     return jax.lax.scan(lambda carry, _: (jnp.sin(carry), carry), x, length=3), x
    >>> DependsOnSine().solve(jax.make_jaxpr(fun)(1.0), [False]).results
    [True, True, False]
    """

    constant: Fact
    """The fact of a literal and of a constant."""

    def __init__(self) -> None:
        self._known: Any = weakref.WeakKeyDictionary()  # equal layers share a jaxpr

    def transfer(self, eqn: JaxprEqn, operands: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the results of an operation without bodies."""
        raise NotImplementedError

    def join(self, first: Fact, second: Fact) -> Fact:
        """Return the fact of a value that is one of two values."""
        raise NotImplementedError

    def transfer_whole(self, eqn: JaxprEqn, operands: Sequence[Fact]) -> Sequence[Fact] | None:
        """Return the facts of the results of an equation whose bodies are not read.

        Return None for an equation whose bodies are read.
        """
        return None

    def select(self, condition: Fact, fact: Fact) -> Fact:
        """Return the fact of a value that enters or leaves a branch.

        ``condition`` is the fact of the index that selects a branch.
        """
        return fact

    def repeat(self, condition: Fact, fact: Fact) -> Fact:
        """Return the fact of the carry of a while loop with this condition."""
        return fact

    def pick(self, fact: Fact) -> Fact:
        """Return the fact of the elements of a scanned array."""
        return fact

    def stack(self, fact: Fact) -> Fact:
        """Return the fact of an array that a scan stacks."""
        return fact

    def solve(self, jaxpr: Any, inputs: Sequence[Fact]) -> Facts[Fact]:
        """Return the facts of a jaxpr, open or closed, for the facts of its arguments."""
        jaxpr, _ = opened(jaxpr)
        known, key = self._known.setdefault(jaxpr, {}), tuple(inputs)
        if key not in known:
            variables: dict[Var, Fact] = {}
            constants = [self.constant] * len(jaxpr.constvars)
            results = interpreted(jaxpr, constants, inputs, self.solve_equation, lambda _: self.constant, variables)
            known[key] = Facts(variables, results)
        facts: Facts[Fact] = known[key]
        return facts

    def solve_equation(self, eqn: JaxprEqn, operands: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the results of an equation."""
        bodies = bodies_of(eqn)
        if bodies is None:
            return self.transfer(eqn, operands)
        results = self.transfer_whole(eqn, operands)
        return self.solve_bodies(bodies, operands) if results is None else results

    def solve_bodies(self, bodies: Bodies, operands: Sequence[Fact]) -> list[Fact]:
        """Return the facts of the results of an equation with bodies."""
        inputs = self.solve_inputs(bodies, operands)
        ends = [self.solve(jaxpr, facts).results for jaxpr, facts in zip(bodies.jaxprs, inputs, strict=True)]
        if bodies.kind == "call":
            return ends[0]
        if bodies.kind == "cond":
            joined = [reduce(self.join, column) for column in zip(*ends, strict=True)]
            return [self.select(operands[0], fact) for fact in joined]
        first = bodies.start - bodies.consts  # of the carries among the arguments of the body
        carry = inputs[-1][first : first + bodies.carry]
        return [*carry, *map(self.stack, ends[-1][bodies.carry :])]

    def solve_inputs(self, bodies: Bodies, operands: Sequence[Fact]) -> list[list[Fact]]:
        """Return the facts of the arguments of each body.

        The fact of a loop's carry holds before and after each iteration.
        """
        if bodies.kind == "call":
            return [list(operands)]
        if bodies.kind == "cond":
            index, *entering = operands
            return [[self.select(index, fact) for fact in entering]] * len(bodies.jaxprs)
        before, constants = list(operands[: bodies.consts]), list(operands[bodies.consts : bodies.start])
        stop = bodies.start + bodies.carry
        carry, elements = list(operands[bodies.start : stop]), [self.pick(fact) for fact in operands[stop:]]
        while True:
            inputs = [*constants, *carry, *elements]
            results = self.solve(bodies.jaxprs[-1], inputs).results
            joined = [self.join(old, new) for old, new in zip(carry, results, strict=False)]
            if bodies.kind == "while":
                (condition,) = self.solve(bodies.jaxprs[0], [*before, *joined]).results
                joined = [self.repeat(condition, fact) for fact in joined]
            if joined == carry:
                return [inputs] if bodies.kind == "scan" else [[*before, *carry], inputs]
            carry = joined
