"""Compare a program that computes a layer at once with one that loops over the batch or over time.

In a loop, such as a ``jax.lax.map`` over the batch, a value has one part of an axis. Its record has the iterations as
the first axis. To compare both programs, the arrays of one program get the layout of the other. If the iterations fit
several axes, as for 8 sequences of 8 tokens, the axis is unknown, and the value is not compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp.inspect._compare.run import RecordedProgram, Slot


class _Layout(NamedTuple):
    """The shape of a recorded value. It begins with the iterations of each scan around the value."""

    shape: tuple[int, ...]
    scans: int

    def axes_in(self, whole: _Layout) -> list[int]:
        """Return the axes of the layout ``whole`` over which the outermost scan of this layout may loop."""
        if self.scans != whole.scans + 1:
            return []
        axes = []
        for axis in range(whole.scans, len(self.shape)):
            moved = self._moved(axis)
            if whole.shape in (moved, (*moved[:axis], int(np.prod(moved[axis : axis + 2])), *moved[axis + 2 :])):
                axes.append(axis)
        return axes[:1] if self.shape[0] == 1 else axes  # one iteration gives the same array at each axis

    def join(self, array: np.ndarray, whole: _Layout, axis: int) -> np.ndarray:
        """Return an array of this layout in the layout ``whole``."""
        return np.moveaxis(array, 0, axis).reshape(whole.shape)

    def split(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Return an array of the layout that :meth:`join` returns in this layout."""
        return np.moveaxis(array.reshape(self._moved(axis)), axis, 0)

    def _moved(self, axis: int) -> tuple[int, ...]:
        """Return the shape after the axis of iterations has moved to the position ``axis``."""
        return (*self.shape[1 : axis + 1], self.shape[0], *self.shape[axis + 1 :])


def in_layout_of(reference: RecordedProgram, first: RecordedProgram) -> RecordedProgram:
    """Return ``first`` with the layout of ``reference`` for values that only one computes in a loop.

    Values that fit the layout of ``reference`` in several ways are left out of ``returned`` and ``passed_in``.
    """
    layouts: dict[str, set[_Layout]] = {}
    for path, slot in (*reference.returned, *reference.passed_in):
        layouts.setdefault(path, set()).add(_layout(reference, slot))
    forward, backward = dict(first.forward), dict(first.backward)

    def convert(slots: Sequence[tuple[str, Slot]]) -> list[tuple[str, Slot]]:
        """Convert the arrays of values, and return the values without those that fit in several ways."""
        comparable = []
        for path, slot in slots:
            conversions = _conversions(_layout(first, slot), layouts.get(path, set()))
            if len(conversions) > 1:
                continue
            comparable.append((path, slot))
            for to_layout_of_reference in conversions:
                forward[slot] = to_layout_of_reference(first.forward[slot])
                if slot in backward:
                    backward[slot] = to_layout_of_reference(first.backward[slot])
        return comparable

    returned, passed_in = convert(first.returned), convert(first.passed_in)
    return dataclasses.replace(first, forward=forward, backward=backward, returned=returned, passed_in=passed_in)


def _layout(program: RecordedProgram, slot: Slot) -> _Layout:
    return _Layout(program.forward[slot].shape, len(program.values[slot].scans))


def _conversions(layout: _Layout, others: Collection[_Layout]) -> list[Callable[[np.ndarray], np.ndarray]]:
    """Return functions that convert an array to one of the other layouts.

    A layout that is among the others needs none.
    """
    if layout in others:
        return []
    conversions: list[Callable[[np.ndarray], np.ndarray]] = []
    for other in others:
        for axis in layout.axes_in(other):
            conversions.append(functools.partial(layout.join, whole=other, axis=axis))
        for axis in other.axes_in(layout):
            conversions.append(functools.partial(other.split, axis=axis))
    return conversions
