"""A program in a wide dtype, with a switch at each of its roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp.base.dtypes import is_narrow
from jaxmp.inspect._switched.evaluation import Place, has_fixed_dtypes
from jaxmp.inspect._switched.gradient_program import GradientProgram
from jaxmp.inspect._switched.operations import Operations
from jaxmp.inspect._switched.rounding import has_small_range
from jaxmp.inspect._switched.sites import HALF, OPERANDS, Pair, Site, has_float8, sites_of
from jaxmp.inspect._switched.stepping import SteppedProgram
from jaxmp.inspect.gradient_error import relative_error
from jaxmp.inspect.program.calls import in_double_precision
from jaxmp.inspect.program.recorded_evaluation import Records
from jaxmp.program.reading import read_program
from jaxmp.program.values import leading_to

T = TypeVar("T")
Mask = np.ndarray
"""A boolean for each site: whether its rounding is on."""


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a run.

    Attributes:
      loss: the loss; NaN for a function without one.
      gradients: all gradients, or all results of a function without a loss, as one vector in double precision.
    """

    loss: float
    gradients: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Return whether all numbers are finite. A function may have no loss."""
        return bool(np.isfinite(self.gradients).all()) and not np.isinf(self.loss)

    def error(self, reference: Results) -> float:
        """Return the relative error of the gradients; infinite if the loss or a gradient is not finite."""
        return relative_error(self.gradients, reference.gradients) if self.is_finite else np.inf

    def loss_error(self, reference: Results) -> float:
        """Return the relative change of the loss: divided by the loss, or by 1 if that is larger."""
        return abs(self.loss - reference.loss) / max(abs(reference.loss), 1.0)


class SwitchedProgram:
    """A program in a wide dtype, with a switch for each of its roundings.

    All runs share the compiled equations of the program.

    Args:
      program: the program under its policies.
      pair: the wide and the narrow dtype.

    Attributes:
      read: the program, read into equations.
      sites: the roundings, each with a switch.
      not_counted: descriptions of the operations that compute in half precision without a switch.

    Raises:
      ValueError: the program has float8 values.
    """

    def __init__(self, program: GradientProgram, pair: Pair = HALF) -> None:
        self.program = program
        self.read = read_program(program.jaxpr, program.consts)
        if has_float8(self.read):
            raise ValueError(
                "float8 has no switches, but this program has float8 values; measure 'mixed_bfloat16' instead"
            )
        self._operations = Operations(self.read)
        self.sites: Sequence[Site] = sites_of(self.read, self._operations, pair)
        self.not_counted = tuple(dict.fromkeys(self._without_switches()))
        self._by_place = {(site.key, site.position): site for site in self.sites}
        self._run = runner(program, self._by_place)

    def mask(self, is_on: Callable[[Site], bool]) -> Mask:
        """Return the mask in which the switches of the sites for which ``is_on`` is true are on."""
        return np.array([is_on(site) for site in self.sites], bool)

    def only(self, numbers: Sequence[int]) -> Mask:
        """Return the mask in which only the switches of these sites are on."""
        mask = self.no_rounding
        mask[list(numbers)] = True
        return mask

    def without(self, numbers: Sequence[int]) -> Mask:
        """Return the mask in which the switches of these sites are off.

        As under autocast, an operation that reads a float32 value does not round this operand, unless it is a product.
        """
        mask = self.mask(lambda site: site.position != OPERANDS or site.is_of_product)
        mask[list(numbers)] = False
        return mask

    @property
    def no_rounding(self) -> Mask:
        """Return the mask of the reference."""
        return self.mask(lambda site: False)

    @property
    def operands_of_products(self) -> Mask:
        """Return the mask of the floor."""
        return self.mask(lambda site: site.is_operand_of_product)

    def mask_of(self, variant: GradientProgram) -> Mask:
        """Return the mask of the same function under other policies or overrides.

        A switch is on if its part is half in the variant.
        """
        operations = Operations(read_program(variant.jaxpr, variant.consts))
        parts, names = operations.half_parts(), operations.names()
        return self.mask(lambda site: site.part in parts or site.part.operation not in names)

    def run(self, mask: Mask, inputs: Sequence[Any] | None = None) -> Results:
        """Return the results of a run with a mask, for the program's inputs or others with their shapes."""
        are_on = dict(zip(self._by_place, mask.tolist(), strict=True))
        values, _ = self._run(self.program.inputs if inputs is None else inputs, are_on)
        return results_from(self.program, values)

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how many elements underflow and overflow at each site in float16, in a run without rounding."""
        counts = np.zeros((2, len(self.sites)))
        if not any(has_small_range(site.dtype) for site in self.sites):
            return counts[0], counts[1]
        run = runner(self.program, self._by_place, are_counted=True)
        _, records = run(self.program.inputs, dict.fromkeys(self._by_place, False))
        for number, site in enumerate(self.sites):
            if site.key in records:  # not in while loops
                of_iterations = records[site.key].get(site.position, np.zeros(2))
                counts[:, number] = np.asarray(of_iterations, np.float64).reshape(-1, 2).sum(0)
        return counts[0], counts[1]

    def _without_switches(self) -> Iterator[str]:
        leading = leading_to(self.read.results)
        for equation in self.read.equations.values():
            values = [*equation.operands, *equation.results]
            is_half = any(is_narrow(value.dtype) for value in values) and not leading.isdisjoint(equation.results)
            if equation.bodies is None and is_half and has_fixed_dtypes(equation.eqn):
                places = ", ".join(filter(None, (equation.path, equation.source)))
                yield f"{equation.name}{f' ({places})' if places else ''}: computes in its own dtypes"


def results_under_policy(program: GradientProgram, inputs: Sequence[Any] | None = None) -> Results:
    """Return the results of a program as it is, in half precision, for its inputs or others with their shapes."""
    values, _ = runner(program, None)(program.inputs if inputs is None else inputs, {})
    return results_from(program, values)


def runner(
    program: GradientProgram, sites: Mapping[Place, Site] | None, *, are_counted: bool = False
) -> Callable[..., tuple[list[Any], Records]]:
    """Return a function that runs a program for arguments and switches, and returns its results and counts."""
    stepped = SteppedProgram(program.jaxpr, program.consts, sites, are_counted=are_counted)

    def run(inputs: Sequence[Any], are_on: Mapping[Place, bool]) -> tuple[list[Any], Records]:
        with program.context(), jax.default_matmul_precision("highest"):
            return stepped.run(inputs, are_on)

    return run


def results_from(program: GradientProgram, values: Sequence[Any]) -> Results:
    """Return the results of a program from its values."""
    arrays = [in_double_precision(value) for value in values]
    loss = float(arrays.pop(0)) if program.has_loss else float("nan")
    return Results(loss, np.concatenate([array.ravel() for array in arrays]))


def smallest_prefix(
    order: Sequence[T], error_of: Callable[[Sequence[T]], float], tolerance: float, least: int = 0
) -> int:
    """Return the smallest number of first items whose error is within the tolerance, by bisection.

    The result is at least ``least``, and the number of all items if no smaller number is enough.
    """
    too_few, enough = least - 1, len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if error_of(order[:middle]) <= tolerance:
            enough = middle
        else:
            too_few = middle
    return enough
