"""What of a program under ``jax.vmap`` is the same for all examples, and what is another for each.

A program sees the batch of its own arguments only. In the bodies of its equations, which are traced for one example, it
is known from what goes into them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jaxmp._jaxpr.invariant import same_inside, same_values
from jaxmp._jaxpr.reading import Bodies, is_batched, is_literal

Same = Sequence[bool] | None
"""Of operands or arguments, whether all examples share each; None if there is one example."""


class Examples:
    """The examples of the innermost ``jax.vmap`` around a program, which is read equation by equation.

    Attributes:
      are_many: whether anything is another for each.
      same: whether they share each operand of the equation at hand; None if there is one example.
      other: an operand of it that is another for each, None if it has none.
    """

    def __init__(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any], same: Same = None) -> None:
        """``same`` says of the arguments of an open jaxpr what they do not show if it is a body of another."""
        same = [not is_batched(value) for value in args] if same is None else same
        same = [*same, *(not is_batched(value) for value in consts)]
        self.are_many = not all(same)
        self._same = same_values(jaxpr, same) if self.are_many else ()
        self.same: Same = None
        self.other: Any = None

    def at(self, eqn: Any, operands: Sequence[Any]) -> None:
        """Goes to an equation."""
        self.same = tuple([is_literal(atom) or atom in self._same for atom in eqn.invars])
        self.other = next((value for value, same in zip(operands, self.same, strict=True) if not same), None)

    def share(self, atom: Any) -> bool:
        """Whether all read an operand of the equation at hand beside what is another for each."""
        return self.other is not None and not is_literal(atom) and atom in self._same

    def repeated(self, bodies: Bodies | None) -> Collection[int]:
        """The operands of the equation at hand, if it has bodies, that all share and JAX repeats for each.

        What is carried is so if it comes to be another for each; all that branches read, if each example takes its own.
        """
        if self.same is None or bodies is None or bodies.kind == "while":  # which has no cotangents
            return ()
        inside = same_inside(bodies, self.same)[0]
        first = len(self.same) - len(inside)  # an index
        return [n for n, same in enumerate(inside, first) if self.same[n] and not same]


def same_in_bodies(bodies: Bodies, same: Same) -> Sequence[Same]:
    """For each body of an equation which of its arguments all examples share; ``same`` says it of the operands."""
    return [None] * len(bodies.jaxprs) if same is None else same_inside(bodies, same)
