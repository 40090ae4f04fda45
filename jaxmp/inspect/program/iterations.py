"""The iterations of a program's values, and the order in which they are computed.

A value in the body of a scan represents all iterations. A tool that searches the values of a run follows one iteration
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxmp.program.values import CARRY, ELEMENT, LAST_CARRY, LOOP_CONSTANT, STACKED, Scan, Value

Iteration = tuple[int, ...]
"""The iteration of each scan around a value, as an index into the scan's inputs, outermost first.

A while loop has no index. It counts as one iteration, because the number of its iterations is unknown.
"""


def operands_of(value: Value, iteration: Iteration) -> Iterator[tuple[int, Value, Iteration]]:
    """Yield the operands that an iteration of a value reads.

    Each item is the number of the operand (see ``Value.reads``), the operand, and the operand's iteration.
    """
    for number, operand in value.reads:
        for iteration_of_operand in _iterations_read(value, iteration, number, operand):
            yield number, operand, iteration_of_operand


def _iterations_read(value: Value, iteration: Iteration, number: int, operand: Value) -> list[Iteration]:
    """Return the iterations of an operand that an iteration of a value reads."""
    if value.name == STACKED:
        return [(*iteration, index) for index in range(value.shape[0])]
    scan = _scan_between(value, operand)
    if scan is None:
        return [iteration]
    if value.name == LAST_CARRY:
        return [(*iteration, index) for index in _in_order(scan)[-1:]]  # none if the scan has no iterations
    *around, index = iteration
    if value.name != CARRY:
        return [tuple(around)]
    turn = _in_order(scan).index(index)
    if number == 0:  # the initial carry
        return [tuple(around)] if turn == 0 else []
    return [(*around, _in_order(scan)[turn - 1])] if turn > 0 else []


_AT_BORDERS = frozenset({LOOP_CONSTANT, ELEMENT, CARRY, LAST_CARRY})


def _scan_between(value: Value, operand: Value) -> Scan | None:
    """Return the scan at whose border a value reads an operand, or None."""
    if value.name not in _AT_BORDERS:
        return None
    scans = (*value.scans, *operand.scans)
    return next((scan for scan in scans if scan.depth == len(value.key)), None)


def _in_order(scan: Scan) -> range:
    """Return the indices of the scanned elements in the order in which the scan reads them."""
    indices = range(scan.length)
    return indices[::-1] if scan.reverse else indices


def time_of(value: Value, iteration: Iteration = ()) -> tuple[float, ...]:
    """Return a key that sorts values by the time of their computation, arguments first."""
    numbers: list[float] = [*value.key, math.inf] if value.key else []
    for scan, index in reversed(list(zip(value.scans, iteration, strict=False))):
        numbers.insert(scan.depth, _in_order(scan).index(index))
    return tuple(numbers)
