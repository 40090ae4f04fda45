"""Order the iterations of a loop by the positions of the elements that they read.

A scan over ``x[::-1]`` and a scan over ``x`` with ``reverse=True`` read the elements of ``x`` in the same order, but
count the iterations in opposite directions. To compare them, an iteration is counted by its position in ``x``.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxmp.program.values import ELEMENT, STACKED, Key, Program, Value, depending_on


def scans_of_reversed_arrays(program: Program) -> set[Key]:
    """Return the keys of the scans over reversed arrays.

    In such a scan, iteration 0 reads the last element of each scanned array that depends on the program's arguments.
    """
    data = set(depending_on(program.arguments, program.values))
    arrays: dict[Key, list[Value]] = {}
    for value in program.values:
        if value.name == ELEMENT and value in data:
            arrays.setdefault(value.key, []).extend(value.inputs)
    scans: set[Key] = set()
    for key in sorted(arrays):  # in program order, because a scan may read what an earlier scan stacked
        if all(_is_reversed(array, scans) for array in arrays[key]):
            scans.add(key)
    return scans


def _is_reversed(array: Value, earlier_scans: Collection[Key]) -> bool:
    """Return whether axis 0 of an array is an axis of another array in reverse.

    Transposes, casts, reshapes and elementwise functions of one array and of scalars may lie between them. The results
    of a scan over a reversed array are reversed, too.
    """
    axis, is_reversed = 0, False
    while array.equation is not None:
        params, sources = array.at.eqn.params, [value for value in array.inputs if value.shape]
        if len(sources) != 1:
            break
        [source] = sources
        if array.name == "rev":
            is_reversed ^= axis in params["dimensions"]
        elif array.name == "transpose":
            axis = params["permutation"][axis]
        elif array.shape[: axis + 1] != source.shape[: axis + 1]:
            break
        array = source
    is_of_reversed_scan = array.name == STACKED and axis == 0 and array.key in earlier_scans
    return is_reversed != is_of_reversed_scan


def count_backwards(program: Program, scans: Collection[Key]) -> None:
    """Count the iterations of scans from the last to the first, in all values of the program."""
    for value in program.values:
        value.scans = tuple(
            scan._replace(reverse=not scan.reverse) if is_counted else scan
            for scan, is_counted in zip(value.scans, _are_among(value, scans), strict=True)
        )


def counted_backwards(array: np.ndarray, value: Value, scans: Collection[Key]) -> np.ndarray:
    """Return the record of a value with its iterations in the reverse order.

    In the record, the iterations of these scans are counted from the first to the last.
    """
    axes = tuple(axis for axis, is_counted in enumerate(_are_among(value, scans)) if is_counted)
    return np.flip(array, axes) if axes else array


def _are_among(value: Value, scans: Collection[Key]) -> list[bool]:
    """Return for each scan around a value whether its key is among those of ``scans``."""
    return [value.key[: scan.depth] in scans for scan in value.scans]
