"""What findings are read from: a program, and what else is known of its call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxmp.inspect.program.equations import Place
from jaxmp.inspect.program.values import Value, Values
from jaxmp.inspect.traffic import Collective

EXACT = {"float16": 2**11, "bfloat16": 2**8}
"""Up to where a half dtype has all integers."""
Found = Iterable[tuple[Place | tuple[str, str], str, str]]
"""Of each finding its place, or its path and source, what is wrong, and the remedy."""


def rounded_to(dtype: np.dtype, numbers: Any) -> Any:
    """Numbers, or one, as a half dtype has them, in float64."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(numbers).astype(np.float32).astype(dtype).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Sent:
    """What devices send each other.

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
    """What an argument of the program is: ``"params"``, ``"optimizer"`` or ``"statistics"``, and its name."""

    role: str
    path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Audited:
    """What findings are read from.

    Attributes:
      values: of the program.
      products: each product's value, and what the audit says of it.
      arguments: what each argument is, None where nothing tells.
      kinds: of each argument its kind as :func:`jaxmp.inspect.memory` has it; None where nothing tells.
      weights: which operands of a product may be its weight, see :func:`jaxmp.inspect.program.products.weights_in`.
      policy: what the author declares; None for nothing.
      has_loss_scale: None where no loss scale is among the arguments.
      repeated: the casts in loops of the compiled program; None where there is none.
      on_cpu: whether it was compiled for one.
      sent: over the axes that the batch is split over; nothing where nothing was compiled.
    """

    values: Values
    products: list[tuple[Value, Any]]
    arguments: list[Argument | None]
    kinds: Sequence[str | None]
    weights: Callable[[Value], list[int]]
    policy: Any
    has_loss_scale: bool | None
    repeated: Callable[[Value], bool] | None
    on_cpu: bool
    sent: Sequence[Sent]

    @property
    def has_half_products(self) -> bool:
        """Whether a product has a half operand."""
        return any(value.is_half for product, _ in self.products for value in product.inputs)

    def policies_of(self, path: tuple[str, ...]) -> list[Any]:
        """The policies that are declared for a path, whose first names may be scopes around the model.

        Of a PolicyMap those of overrides, or its default; nothing where nothing is declared.
        """
        if not hasattr(self.policy, "resolve"):
            return [] if self.policy is None else [self.policy]
        found = [self.policy.resolve(path[start:]) for start in range(len(path) + 1)]
        return [policy for policy, pattern in found if pattern is not None] or [self.policy.root]
