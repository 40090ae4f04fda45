"""The facts about a program that the finders of an audit use.

Each function in ``FINDERS`` (see ``findings.py``) is a finder, and finds the problems of one kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.inspect.compiled.collectives import Collective
from jaxmp.inspect.program.argument_kinds import Leaf
from jaxmp.policy.patterns import is_class_pattern
from jaxmp.program.values import Equation, Program, Value

EXACT = {"float16": 2**11, "bfloat16": 2**8}
"""The largest integer up to which float16 or bfloat16 represents all integers."""


class Fault(NamedTuple):
    """A problem in a program.

    Attributes:
      where: the equation, or a path and a source line.
      what: a sentence that describes the problem.
      remedy: a sentence with the remedy.
    """

    where: Equation | tuple[str, str]
    what: str
    remedy: str


Faults = Iterable[Fault]


def rounded_to(dtype: np.dtype, numbers: Any) -> Any:
    """Round numbers to a half dtype, and return them in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(numbers).astype(np.float32).astype(dtype).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Sent:
    """The bytes that devices send in a group of similar collective operations.

    Attributes:
      row: the operations, as one row of ``Memory.collectives``.
      weights: the bytes of weights. An array counts as a weight if it has the size of an argument that is not the
        batch, or of one layer of that argument.
      others: the bytes of other arrays.
      split: the bytes of weights that are split over the mesh axes of the operations.
    """

    row: Collective
    weights: int
    others: int
    split: int


@dataclasses.dataclass(frozen=True)
class Audited:
    """The facts about a program that the finders use.

    Attributes:
      program: the program.
      products: the result of each product as a value, and the product's row in the audit.
      arguments: the arrays among the arguments, with the kinds of :func:`jaxmp.inspect.memory`.
      weight: a function that returns which operand of a product is its weight (see ``weight_operands.py``).
      policy: the declared policy, or None.
      repeated: a function that returns whether the compiled program repeats a cast in every iteration of a loop; None
        if the program was not compiled.
      on_cpu: whether the program is for a CPU.
      sent: the collective operations over the mesh axes that split the batch; empty if the program was not compiled.
    """

    program: Program
    products: list[tuple[Value, Any]]
    arguments: Sequence[Leaf]
    weight: Callable[[Value], int]
    policy: Any
    repeated: Callable[[Value], bool] | None
    on_cpu: bool
    sent: Sequence[Sent]

    @property
    def has_half_products(self) -> bool:
        """Return whether any product has a half operand."""
        return any(value.is_half for product, _ in self.products for value in product.inputs)

    def policies_of(self, path: tuple[str, ...]) -> list[Any]:
        """Return the declared policies for a path.

        For a PolicyMap, return the policies of all overrides that match, or its root policy if no override matches.
        Every suffix of the path is tried, because the path may begin with scopes around the model.
        """
        if self.policy is None:
            return []
        if not hasattr(self.policy, "resolve"):
            return [self.policy]
        resolved = [self.policy.resolve(path[start:]) for start in range(len(path) + 1)]
        return [policy for policy, pattern in resolved if pattern is not None] or [self.policy.root]

    @property
    def policies_of_classes(self) -> list[Any]:
        """Return the policies of the overrides for classes of modules, whose paths are unknown."""
        overrides = getattr(self.policy, "overrides", ())
        return [override.policy for override in overrides if is_class_pattern(override.pattern)]
