"""Measure the cost of the roundings of modules and lines."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmp.base import tables
from jaxmp.inspect._switched.sites import Site
from jaxmp.inspect._switched.switched import Mask, SwitchedProgram, smallest_prefix

_MOST_MODULES, _MOST_LINES = 10, 12
_NOTABLE = 0.1
"""The share of the error from which the lines of a module are measured."""


@dataclass(frozen=True)
class BudgetGroup:
    """The roundings of a module or a line.

    Errors of gradients are relative L2 errors of all gradients together; for a function without a loss, of all results.

    Attributes:
      name: the path of the module or scope, or the file and line. A ``*`` stands for the numbers of equal layers. If
        the operations of a line are in several modules or scopes, each of them has a group: the path comes after the
        line.
      operations: the rounded operations of the forward pass, such as ``"15 × add"``.
      sites: the number of roundings in the program; a loop counts once.
      share: the share of the squared error that float32 would remove, from 0 to 1. Shares need not add up to 1, because
        the roundings of several lines may cause the same error.
      error_in_float32: the error of the gradients without these roundings: what remains if this code is float32.
      error_alone: the error of the gradients with only these roundings.
      loss_error_alone: the relative error of the loss with only these roundings.
      underflows: the number of elements that become 0 in float16. Those in while loops are not counted.
      overflows: the number of finite elements that become infinite in float16.
    """

    name: str
    operations: str
    sites: int
    share: float
    error_in_float32: float
    error_alone: float
    loss_error_alone: float
    underflows: int
    overflows: int


class Budget:
    """The errors of a program with some of its roundings.

    Attributes:
      program: the program.
      reference: the results without any rounding.
      error: the error with all roundings.
      loss_error: the relative error of the loss with all roundings.
      lines: the name of each site's line, see :class:`BudgetGroup`.
    """

    def __init__(self, program: SwitchedProgram) -> None:
        self.program = program
        self.sites = program.sites
        self.reference = program.run(program.no_rounding)
        self.underflows, self.overflows = program.counts()
        everything = program.run(~program.no_rounding)
        self.error, self.loss_error = everything.error(self.reference), everything.loss_error(self.reference)
        self.lines = _lines_of(self.sites)

    def error_with(self, mask: Mask) -> float:
        """Return the error with the roundings of a mask."""
        return self.program.run(mask).error(self.reference)

    def error_without(self, numbers: Sequence[int]) -> float:
        """Return the error without the roundings of some sites."""
        return self.error_with(self.program.without(numbers))

    def share_of(self, error: float) -> float:
        """Return the share of the squared error that is gone if ``error`` remains."""
        if not math.isfinite(self.error):
            return float(math.isfinite(error))
        return max(0.0, 1 - (error / self.error) ** 2) if self.error else 0.0

    def by_path(self) -> list[BudgetGroup]:
        """Return a group for each module or scope, the largest share first."""
        return _sorted([self._group(numbers, self._path_of(numbers)) for numbers in self._modules()])

    def by_line(self, modules: Sequence[BudgetGroup]) -> list[BudgetGroup]:
        """Return groups for the lines in the modules that cause a notable share of the error, the largest first.

        If they have many lines, neighbouring lines are measured together first.
        """
        largest = max((module.share for module in modules), default=0.0)
        notable = {module.name for module in modules if module.overflows or module.share > min(_NOTABLE, largest / 2)}
        numbers: list[int] = []
        for of_module in self._modules():
            numbers += of_module if self._path_of(of_module) in notable or not notable else []
        lines = tables.grouped(sorted(numbers), lambda number: self.lines[number])
        if len(lines) > _MOST_LINES:
            size = math.ceil(len(lines) / _MOST_LINES)
            neighbours = [lines[start : start + size] for start in range(0, len(lines), size)]
            neighbours.sort(key=self._cost_of_lines)
            lines = [line for part in neighbours for line in part][:_MOST_LINES]
        return _sorted([self._group(line, self.lines[line[0]]) for line in lines])

    def _cost_of_lines(self, lines: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Return a key that sorts lines: those that overflow first, and then those with the largest share."""
        numbers = [number for line in lines for number in line]
        return -self.overflows[numbers].sum(), -self.share_of(self.error_without(numbers))

    def lines_needed(self, tolerance: float) -> tuple[list[str], float]:
        """Return the lines that must be wide for an error within a tolerance, as few as possible, and the error.

        All other lines round the values that they read, too. The lines that cause the largest error alone come first.
        """
        lines = tables.grouped(range(len(self.sites)), lambda number: self.lines[number])
        lines.sort(key=lambda line: -self.error_with(self.program.only(line)))

        def error_of(needed: Sequence[Sequence[int]]) -> float:
            return self.error_with(~self.program.only([number for line in needed for number in line]))

        needed = lines[: smallest_prefix(lines, error_of, tolerance)]
        return [self.lines[line[0]] for line in needed], error_of(needed)

    def numbers_of_line(self, name: str) -> list[int]:
        """Return the sites of a line."""
        return [number for number, line in enumerate(self.lines) if line == name]

    def _modules(self) -> list[list[int]]:
        """Return the sites of each module. If there are many modules, those in the same parent are one."""
        names = [tables.without_numbers(site.equation.path).split("/") for site in self.sites]
        for depth in range(max(map(len, names), default=1), 0, -1):
            groups = collections.defaultdict[str, list[int]](list)
            for number, name in enumerate(names):
                groups["/".join(name[:depth])].append(number)
            if len(groups) <= _MOST_MODULES:
                break
        return list(groups.values())

    def _path_of(self, numbers: Sequence[int]) -> str:
        """Return the path of a module, with ``*`` for the numbers of equal layers."""
        paths = {self.sites[number].equation.path for number in numbers}
        while len(set(map(tables.without_numbers, paths))) > 1:
            depth = max(path.count("/") for path in paths)
            paths = {"/".join(path.split("/")[:depth]) for path in paths}
        return tables.common_path(sorted(paths))

    def _group(self, numbers: Sequence[int], name: str) -> BudgetGroup:
        alone = self.program.run(self.program.only(numbers))
        remaining = self.error_without(numbers)
        return BudgetGroup(
            name=name,
            operations=operations_of([self.sites[number] for number in numbers]),
            sites=len(numbers),
            share=self.share_of(remaining),
            error_in_float32=remaining,
            error_alone=alone.error(self.reference),
            loss_error_alone=alone.loss_error(self.reference),
            underflows=int(self.underflows[list(numbers)].sum()),
            overflows=int(self.overflows[list(numbers)].sum()),
        )


def operations_of(sites: Sequence[Site]) -> str:
    """Return how often each operation is rounded in the forward pass, or in all if there is none."""
    forward = [site for site in sites if site.phase == "forward"] or list(sites)
    counts = collections.Counter[str]()
    for equation in dict.fromkeys(site.equation for site in forward):
        counts[equation.name] += equation.count or 1
    return ", ".join(f"{count} × {name}" for name, count in counts.most_common())


def _sorted(groups: Sequence[BudgetGroup]) -> list[BudgetGroup]:
    return sorted(groups, key=lambda group: (-group.overflows, -group.share, group.error_in_float32))


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
