"""Compare a program that takes a whole batch with one that loops over parts of the batch.

In the loop, such as a ``jax.lax.map``, a value has one part of the batch. Its record has the iterations as the first
axis. To compare both programs, the arrays of one program get the layout of the other.
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

    def is_loop_over(self, batch: _Layout) -> bool:
        """Return whether the outermost scan may be a loop over parts of a batch that has the layout ``batch``."""
        if self.scans != batch.scans + 1 or len(self.shape) == self.scans:
            return False
        iterations, *inner = self.shape[: self.scans]
        part, *rest = self.shape[self.scans :]
        return batch.shape == (*inner, iterations * part, *rest)

    def merge(self, array: np.ndarray, batch: _Layout) -> np.ndarray:
        """Return an array of this layout in the layout ``batch``."""
        return np.moveaxis(array, 0, batch.scans).reshape(batch.shape)

    def split(self, array: np.ndarray, batch: _Layout) -> np.ndarray:
        """Return an array of the layout ``batch`` in this layout."""
        iterations, *inner = self.shape[: self.scans]
        return np.moveaxis(array.reshape(*inner, iterations, *self.shape[self.scans :]), batch.scans, 0)


def in_layout_of(full: RecordedProgram, half: RecordedProgram) -> RecordedProgram:
    """Return ``half``, with the layout of ``full`` for the values of scopes that loop over the batch in one of them."""
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
            if layout.is_loop_over(other):
                return functools.partial(layout.merge, batch=other)
            if other.is_loop_over(layout):
                return functools.partial(other.split, batch=layout)
    return lambda array: array
