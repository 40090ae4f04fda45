"""The facts about a program and its call that findings are read from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.inspect.program.equation_places import EquationPlace
from jaxmp.inspect.program.values import Value, Values
from jaxmp.inspect.traffic import Collective

EXACT = {"float16": 2**11, "bfloat16": 2**8}
"""The largest number up to which a half dtype has all integers."""


class Fault(NamedTuple):
    """Something wrong, as a finder reports it.

    Attributes:
      where: the equation, or a path and a source line.
      what: a sentence that says what is wrong.
      remedy: a sentence that says what to do.
    """

    where: EquationPlace | tuple[str, str]
    what: str
    remedy: str


Faults = Iterable[Fault]


def rounded_to(dtype: np.dtype, numbers: Any) -> Any:
    """Return numbers as a half dtype has them, in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(numbers).astype(np.float32).astype(dtype).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Sent:
    """The arrays that devices send each other in one kind of collective.

    Attributes:
      row: the operations.
      weights: bytes of the arrays that have the size of an argument other than the batch, or of one layer of it.
      others: bytes of the rest.
      split: of ``weights``, bytes of those that are split over axes that the operations go over.
    """

    row: Collective
    weights: int
    others: int
    split: int


@dataclasses.dataclass(frozen=True)
class Argument:
    """The role of an argument, ``"params"``, ``"optimizer"`` or ``"statistics"``, and its name."""

    role: str
    path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Audited:
    """The facts that findings are read from.

    Attributes:
      values: the values of the program.
      products: each product's value, and its row in the audit.
      arguments: the role of each argument, or None if it is unknown.
      kinds: the kind of each argument as :func:`jaxmp.inspect.memory` has it, or None if it is unknown.
      weights: which operands of a product may be its weight, see ``weights_in`` in weight_operands.py.
      policy: the policy that the author declares, or None.
      is_loss_scaled: None if no loss scale is among the arguments.
      repeated: tells which casts the compiled program repeats in loops; None if nothing was compiled.
      on_cpu: whether the program is for a CPU.
      sent: collectives over the axes that the batch is split over; empty if nothing was compiled.
    """

    values: Values
    products: list[tuple[Value, Any]]
    arguments: list[Argument | None]
    kinds: Sequence[str | None]
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
        """Return the policies that are declared for a path, whose first names may be scopes around the model.

        For a PolicyMap these are the policies of matching overrides, or its default.
        """
        if self.policy is None:
            return []
        if not hasattr(self.policy, "resolve"):
            return [self.policy]
        resolved = [self.policy.resolve(path[start:]) for start in range(len(path) + 1)]
        return [policy for policy, pattern in resolved if pattern is not None] or [self.policy.root]
