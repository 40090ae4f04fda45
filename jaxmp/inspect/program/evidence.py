"""The facts about a program and its call that the finders of an audit use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.inspect.memory_kinds import Leaf
from jaxmp.inspect.program.equation_places import EquationPlace
from jaxmp.inspect.program.values import Value, Values
from jaxmp.inspect.traffic import Collective

EXACT = {"float16": 2**11, "bfloat16": 2**8}
"""The largest number up to which a half dtype represents all integers."""


class Fault(NamedTuple):
    """A problem, as a finder reports it.

    Attributes:
      where: the equation, or a path and a source line.
      what: a sentence that describes the problem.
      remedy: a sentence with the remedy.
    """

    where: EquationPlace | tuple[str, str]
    what: str
    remedy: str


Faults = Iterable[Fault]


def rounded_to(dtype: np.dtype, numbers: Any) -> Any:
    """Return numbers rounded to a half dtype, in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(numbers).astype(np.float32).astype(dtype).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Sent:
    """The arrays that devices send in equal collective operations.

    Attributes:
      row: the operations, as :func:`jaxmp.inspect.collectives` reports them.
      weights: the bytes of weights. An array counts as a weight if it has the size of an argument other than the batch,
        or of one layer of such an argument.
      others: the bytes of other arrays.
      split: the bytes of weights that are split over the axes of the operations.
    """

    row: Collective
    weights: int
    others: int
    split: int


@dataclasses.dataclass(frozen=True)
class Audited:
    """The facts about a program that the finders use.

    Attributes:
      values: the values of the program.
      products: each product's value, and its row in the audit.
      arguments: the arrays among the arguments, with the kinds of :func:`jaxmp.inspect.memory` or ``"unknown"``.
      weights: a function that returns which operands of a product may be its weight (see weight_operands.py).
      policy: the declared policy, or None.
      is_loss_scaled: whether an argument has a loss scale other than ``NoOpLossScale``; None without any loss scale.
      repeated: a function that returns whether the compiled program repeats a cast in a loop; None if nothing was
        compiled.
      on_cpu: whether the program is for a CPU.
      sent: the collectives over the axes that split the batch; empty if nothing was compiled.
    """

    values: Values
    products: list[tuple[Value, Any]]
    arguments: Sequence[Leaf]
    weights: Callable[[Value], list[int]]
    policy: Any
    is_loss_scaled: bool | None
    repeated: Callable[[Value], bool] | None
    on_cpu: bool
    sent: Sequence[Sent]

    @property
    def has_half_products(self) -> bool:
        """Return whether a product has a half operand."""
        return any(value.is_half for product, _ in self.products for value in product.inputs)

    def policies_of(self, path: tuple[str, ...]) -> list[Any]:
        """Return the declared policies for a path.

        The path may begin with scopes around the model. For a PolicyMap, return the policies of all matching overrides,
        or the policy of its root if no override matches.
        """
        if self.policy is None:
            return []
        if not hasattr(self.policy, "resolve"):
            return [self.policy]
        resolved = [self.policy.resolve(path[start:]) for start in range(len(path) + 1)]
        return [policy for policy, pattern in resolved if pattern is not None] or [self.policy.root]
