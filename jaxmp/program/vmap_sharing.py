"""Find the values of a program under ``jax.vmap`` that all examples share.

An example is one element of the axis over which a ``jax.vmap`` maps. JAX shows only which arguments of the outermost
program are batched. The bodies of the program's equations are traced for one example. So an argument of a body is
classified by the operand that the equation passes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from jaxmp._internals.jax.traces import batches_around, is_batched
from jaxmp.program.equations import Array, Atom, Bodies, is_literal
from jaxmp.program.invariants import SAME_FOR_EXAMPLES

Same = Sequence[Sequence[bool]]
"""For each ``jax.vmap`` around the program, whether its examples share each operand or argument."""


class Examples:
    """The examples of each ``jax.vmap`` around a program.

    The program is read equation by equation, with :meth:`at`.

    Attributes:
      are_many: whether any value differs between examples.
      same: for each ``jax.vmap``, whether its examples share each operand of the current equation.
      others: the operands of the current equation that differ between the examples of some ``jax.vmap``.
    """

    def __init__(self, jaxpr: Jaxpr, args: Sequence[Array], consts: Sequence[Array], same: Same | None = None) -> None:
        """Classify the arguments and constants of a jaxpr.

        Pass ``same`` only if the jaxpr is a body of another program. It says for each ``jax.vmap`` which of the
        arguments and constants all examples share. Otherwise JAX's traces give this information.
        """
        self._batches = batches_around() if same is None else []
        if same is None:
            same = [[not is_batched(value, batch) for value in (*args, *consts)] for batch in self._batches]
        self.are_many = not all(map(all, same))
        self._facts = []
        if self.are_many and not self._batches:
            count = len(jaxpr.invars)
            self._facts = [SAME_FOR_EXAMPLES.solve(jaxpr, of_batch[:count]) for of_batch in same]
        self.same: Same = ()
        self.others: Sequence[Array] = ()

    def at(self, eqn: JaxprEqn, operands: Sequence[Array]) -> None:
        """Make ``eqn`` the current equation."""
        columns = [self._who_share(atom, value) for atom, value in zip(eqn.invars, operands, strict=True)]
        self.same = tuple(zip(*columns, strict=True))
        self.others = [value for value, same in zip(operands, columns, strict=True) if not all(same)]

    def _who_share(self, atom: Atom, value: Array) -> list[bool]:
        """Return for each ``jax.vmap`` whether its examples share the value ``atom``."""
        if self._batches:
            return [not is_batched(value, batch) for batch in self._batches]
        return [is_literal(atom) or facts.variables[atom] for facts in self._facts]

    def meets_batched(self, atom: Atom, value: Array) -> bool:
        """Return whether the current equation combines a shared value with batched ones."""
        if not self.others:
            return False
        pairs = zip(self.same, self._who_share(atom, value), strict=True)
        return any([is_batched and False in same for same, is_batched in pairs])

    def repeated(self, bodies: Bodies | None) -> Collection[int]:
        """Return the positions of the shared operands that JAX repeats for each example.

        JAX repeats a carry that an iteration makes batched. If the index of a conditional is batched, JAX repeats all
        operands of the branches.
        """
        if bodies is None or bodies.kind == "while":  # a while loop has no cotangents
            return ()
        numbers = set[int]()
        for same in self.same:
            inside = SAME_FOR_EXAMPLES.solve_inputs(bodies, same)[0]
            first = len(same) - len(inside)  # 1 for a conditional, whose first operand is the index
            numbers.update(n for n, stays in enumerate(inside, first) if same[n] and not stays)
        return numbers


def same_in_bodies(bodies: Bodies, same: Same) -> list[Same]:
    """Return for each body of an equation which arguments all examples share."""
    answers = [SAME_FOR_EXAMPLES.solve_inputs(bodies, of_one) for of_one in same]
    return [[answer[number] for answer in answers] for number in range(len(bodies.jaxprs))]
