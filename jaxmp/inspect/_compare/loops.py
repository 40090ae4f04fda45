"""Compare a program that computes a layer at once with one that loops over the batch or over time.

In a loop, such as a ``jax.lax.map`` over the batch, a value has one part of an axis. Its record has the iterations as
the first axis. To compare both programs, the arrays of one program get the layout of the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp.inspect._compare.run import RecordedProgram, Slot


class _Layout(NamedTuple):
    """The shape of a recorded value, which begins with the number of iterations of each scan around the value."""

    shape: tuple[int, ...]
    scans: int

    def axis_in(self, whole: _Layout) -> int | None:
        """Return the axis of the layout ``whole`` over which the outermost scan of this layout loops.

        Return None if the scan does not loop over an axis. If the scan fits several axes, return the first.
        """
        if self.scans != whole.scans + 1:
            return None
        for axis in range(whole.scans, len(self.shape)):
            moved = self._moved(axis)
            if whole.shape in (moved, (*moved[:axis], int(np.prod(moved[axis : axis + 2])), *moved[axis + 2 :])):
                return axis
        return None

    def join(self, array: np.ndarray, whole: _Layout, axis: int) -> np.ndarray:
        """Return an array of this layout in the layout ``whole``."""
        return np.moveaxis(array, 0, axis).reshape(whole.shape)

    def split(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Return an array of the layout that :meth:`join` returns in this layout."""
        return np.moveaxis(array.reshape(self._moved(axis)), axis, 0)

    def _moved(self, axis: int) -> tuple[int, ...]:
        """Return the shape after the axis of iterations has moved to the position ``axis``."""
        return (*self.shape[1 : axis + 1], self.shape[0], *self.shape[axis + 1 :])


def in_layout_of(full: RecordedProgram, half: RecordedProgram) -> RecordedProgram:
    """Return ``half``, with the layout of ``full`` for the values that only one of them computes in a loop."""
    layouts: dict[str, list[_Layout]] = {}
    for path, slot in (*full.returned, *full.passed_in):
        layouts.setdefault(path, []).append(_layout(full, slot))
    forward, backward = dict(half.forward), dict(half.backward)
    for path, slot in (*half.returned, *half.passed_in):
        convert = _conversion(_layout(half, slot), layouts.get(path, []))
        forward[slot] = convert(half.forward[slot])
        if slot in backward:
            backward[slot] = convert(half.backward[slot])
    return dataclasses.replace(half, forward=forward, backward=backward)


def _layout(program: RecordedProgram, slot: Slot) -> _Layout:
    return _Layout(program.forward[slot].shape, len(program.values[slot].scans))


def _conversion(layout: _Layout, others: Sequence[_Layout]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that converts an array to one of the other layouts, if that is needed and possible."""
    if layout not in others:
        for other in others:
            axis = layout.axis_in(other)
            if axis is not None:
                return functools.partial(layout.join, whole=other, axis=axis)
            axis = other.axis_in(layout)
            if axis is not None:
                return functools.partial(other.split, axis=axis)
    return lambda array: array
