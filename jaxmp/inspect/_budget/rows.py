"""Rows of an error budget: sites with equal operations, lines, modules and rules."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jaxmp.base import tables
from jaxmp.inspect._budget.reasons import rule_of
from jaxmp.inspect._budget.run import Effects
from jaxmp.inspect._budget.sites import Site


@dataclasses.dataclass(frozen=True)
class BudgetRow:
    """The roundings of equal operations.

    ``loss_error`` and ``gradient_error`` are the errors if these values are rounded and all others are float32, to
    first order. The gradient of a sum of rows may be smaller or larger than the sum of their errors.

    Attributes:
      path: the path of the module or scope; ``*`` stands for the numbers of equal layers.
      operation: the primitive that computes the values, or ``"operand of …"`` for casts.
      source: the user's file and line.
      phase: ``"forward"``, ``"backward"`` or ``"update"``.
      dtype: the dtype to which the values are rounded.
      why: the reason of the cast plan.
      sites: the number of roundings in the program; a loop counts once.
      share: the share of the error of the gradients under the policy. All shares add up to 1. A share is negative if
        the roundings happen to cancel others. For a function without a loss, the share of the error of the results.
      loss_error: the signed change of the loss.
      gradient_error: the relative L2 error of all gradients together, or of all results.
      underflows: the number of elements that become 0 in this dtype.
      overflows: the number of finite elements that become infinite in this dtype.
      is_float32: whether the program keeps the values in float32, so that the errors are those that float32 avoids.
    """

    path: str
    operation: str
    source: str
    phase: str
    dtype: str
    why: str
    sites: int
    share: float
    loss_error: float
    gradient_error: float
    underflows: int
    overflows: int
    is_float32: bool


@dataclasses.dataclass(frozen=True)
class BudgetGroup:
    """The roundings of a module, a line or a rule. The fields are those of :class:`BudgetRow`.

    Attributes:
      name: the path, the file and line, or the rule. If the operations of a line are in several modules or scopes, each
        of them has a group: the path comes after the line.
      sites: the number of roundings in the program.
      share: the share of the error of the gradients.
      loss_error: the signed change of the loss.
      gradient_error: the relative L2 error of the gradients.
      underflows: the number of elements that become 0.
      overflows: the number of finite elements that become infinite.
    """

    name: str
    sites: int
    share: float
    loss_error: float
    gradient_error: float
    underflows: int
    overflows: int


class Budget:
    """The sites of a program with their effects.

    Attributes:
      sites: the sites.
      whys: the reason for each site's dtype.
      alone: the effects of the sites if one of them alone is rounded.
      together: the effects if all values are rounded.
      size: the L2 norm of all gradients in float32.
      lines: the name of each site's line, see :class:`BudgetGroup`.
    """

    def __init__(
        self, sites: Sequence[Site], whys: Sequence[str], alone: Effects, together: Effects, size: float
    ) -> None:
        self.sites, self.whys, self.alone, self.together, self.size = sites, whys, alone, together, size
        self.is_rounded = np.array([not site.is_float32 for site in sites])
        self.lines = _lines_of(sites)
        parts = together.parts
        if not parts[self.is_rounded].sum() > 0:  # the run under the policy is not finite, or has no error
            parts = np.mean(np.square(alone.changes), axis=0)
        total = parts[self.is_rounded].sum()
        self.parts = parts / total if total else np.zeros_like(parts)

    def rows(self) -> tuple[BudgetRow, ...]:
        """Return a row for each group of equal operations: overflows first, then underflows, then by share."""
        rows = [self._row(group) for group in tables.grouped(range(len(self.sites)), self._key_of_row)]
        return tuple(sorted(rows, key=lambda row: (-row.overflows, -row.underflows, -row.share, -row.gradient_error)))

    def groups(self, key: Callable[[int], str], numbers: Sequence[int] | None = None) -> tuple[BudgetGroup, ...]:
        """Return a group for each value of ``key``, which takes the number of a site.

        Groups that overflow come first, and then the largest share. ``numbers`` are the sites; by default, all sites.
        """
        groups = []
        for group in tables.grouped(range(len(self.sites)) if numbers is None else numbers, key):
            effects = self.share(group), *self.errors(group), *self.counts(group)
            groups.append(BudgetGroup(key(group[0]), len(group), *effects))
        return tuple(sorted(groups, key=lambda group: (-group.overflows, -group.share)))

    def counts(self, group: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of elements that underflow and overflow at some sites."""
        numbers = list(group)
        return int(self.alone.underflows[numbers].sum()), int(self.alone.overflows[numbers].sum())

    def by_path(self) -> tuple[BudgetGroup, ...]:
        """Return a group for each module or scope."""
        return self.groups(lambda number: self.sites[number].equation.path)

    def by_line(self, numbers: Sequence[int] | None = None) -> tuple[BudgetGroup, ...]:
        """Return a group for each line of the user's code. ``numbers`` are the sites; by default, all sites."""
        return self.groups(lambda number: self.lines[number], numbers)

    def by_rule(self) -> tuple[BudgetGroup, ...]:
        """Return a group for each rule of autocast."""
        return self.groups(lambda number: rule_of(self.whys[number]))

    def share(self, group: Sequence[int]) -> float:
        """Return the share of some sites in the error by all roundings of the program."""
        return float(self.parts[list(group)].sum())

    def errors(self, group: Sequence[int]) -> tuple[float, float]:
        """Return the error of the loss and the relative error of the gradients by some sites alone."""
        numbers = list(group)
        gradient = np.sqrt(_mean_square(self.alone.changes[:, numbers]))
        return float(self.alone.loss_changes[numbers].sum()), self.relative(float(gradient))

    def relative(self, norm: float) -> float:
        """Return a norm of changes, relative to the gradients."""
        return norm / self.size if self.size else float(np.inf if norm else 0.0)

    def total(self) -> tuple[float, float]:
        """Return the change of the loss, and the relative change of the gradients along their measured error.

        The changes are those by all roundings together, to first order.
        """
        loss_error = float(self.together.loss_changes[self.is_rounded].sum())
        return loss_error, self.relative(abs(float(self.together.parts[self.is_rounded].sum())))

    def _key_of_row(self, number: int) -> Hashable:
        site, equation = self.sites[number], self.sites[number].equation
        path = tables.without_numbers(equation.path)
        return path, site.rounded_operation, equation.source, site.phase, site.dtype, site.is_float32

    def _row(self, group: Sequence[int]) -> BudgetRow:
        site = self.sites[group[0]]
        loss_error, gradient_error = self.errors(group)
        underflows, overflows = self.counts(group)
        return BudgetRow(
            path=tables.common_path([self.sites[number].equation.path for number in group]),
            operation=site.rounded_operation,
            source=site.equation.source,
            phase=site.phase,
            dtype=site.dtype.name,
            why=self.whys[group[0]],
            sites=len(group),
            share=self.share(group),
            loss_error=loss_error,
            gradient_error=gradient_error,
            underflows=underflows,
            overflows=overflows,
            is_float32=site.is_float32,
        )


def _lines_of(sites: Sequence[Site]) -> list[str]:
    """Return the name of each site's line; equal layers have the same name."""
    equations = [site.equation for site in sites]
    places = [(equation.source, tables.without_numbers(equation.path)) for equation in equations]
    paths: dict[tuple[str, str], list[str]] = {}
    for place, equation in zip(places, equations, strict=True):
        paths.setdefault(place, []).append(equation.path)
    paths_of_line = collections.Counter(source for source, _ in paths)
    names = {}
    for (source, pattern), of_place in paths.items():
        is_shared = paths_of_line[source] > 1 and pattern
        names[source, pattern] = f"{source} ({tables.common_path(of_place)})" if is_shared else source
    return [names[place] for place in places]


def _mean_square(changes: np.ndarray) -> float:
    """Return the mean square, over random directions, of the summed changes of some sites."""
    return float(np.mean(np.square(changes.sum(axis=1)))) if changes.size else 0.0
