"""Match the values of two recorded programs, and measure their differences.

In this file, ``first`` is the program that is compared with the program ``reference``. The reference is the same
function without policies, or another function. A ``Slot`` identifies a value in a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp.inspect import gradient_error
from jaxmp.inspect._compare.run import RecordedProgram, Slot
from jaxmp.inspect.program.iterations import time_of


@dataclass(frozen=True)
class ComparedRow:
    """A value or a gradient of the first run, compared with the reference.

    All iterations of a loop are compared together.

    Attributes:
      path: the module or scope that returns the value; empty for the result of the function. For the gradient of an
        argument, the path of the argument.
      phase: ``"forward"`` for a value, ``"backward"`` for the gradient with respect to a value or an argument.
      dtype: the dtype of the value or of the gradient in the first run. A module may compute in another dtype than that
        of the value it returns.
      relative_error: the L2 norm of the difference, divided by the L2 norm of the reference. It is NaN, like the next
        three numbers, if the reference has a NaN or no finite element, because then nothing can be compared.
      mean_absolute_difference: the mean absolute difference of the elements.
      cosine: the cosine of the angle between the value and the reference, as vectors.
      ulps: the median absolute difference of the elements, in ulps. An ulp is the distance between neighbouring numbers
        in the dtype :attr:`Comparison.dtype`, at the magnitude of the reference.

    A complex array is compared as the vector of its real and imaginary parts. Absolute values are those of the complex
    elements.
    """

    path: str
    phase: str
    dtype: str
    relative_error: float
    mean_absolute_difference: float
    cosine: float
    ulps: float


class Pair(NamedTuple):
    """A value that a scope returns or reads, with its slot in each program."""

    path: str
    first: Slot
    reference: Slot


def matched_pairs(first: RecordedProgram, reference: RecordedProgram) -> tuple[list[Pair], list[Pair], tuple[str, ...]]:
    """Match the values of two programs by path and shape.

    If several values in a program have the same path and shape, they are matched in program order.

    Returns:
      Three items:

      - the pairs of values that scopes return, in program order;
      - the pairs of values that are passed into scopes, in program order;
      - the paths of scopes that return more values of some shape in one program than in the other.
    """
    returned, unmatched = _match(first, reference, first.returned, reference.returned)
    passed_in, _ = _match(first, reference, first.passed_in, reference.passed_in)
    return returned, passed_in, unmatched


def _match(
    first: RecordedProgram,
    reference: RecordedProgram,
    first_slots: Sequence[tuple[str, Slot]],
    reference_slots: Sequence[tuple[str, Slot]],
) -> tuple[list[Pair], tuple[str, ...]]:
    groups: dict[tuple[str, Any], tuple[list[Slot], list[Slot]]] = {}
    for path, slot in first_slots:
        groups.setdefault((path, first.forward[slot].shape), ([], []))[0].append(slot)
    for path, slot in reference_slots:
        groups.setdefault((path, reference.forward[slot].shape), ([], []))[1].append(slot)
    pairs: list[Pair] = []
    unmatched = []
    for (path, _), (of_first, of_reference) in groups.items():
        # a scope may return both a half value and its cast to float32
        if len(of_first) > len(of_reference):
            of_first = _without_casts(first, of_first)
        elif len(of_reference) > len(of_first):
            of_reference = _without_casts(reference, of_reference)
        if len(of_first) == len(of_reference):
            pairs += [Pair(path, *slots) for slots in zip(of_first, of_reference, strict=True)]
        else:
            unmatched.append(path)

    def in_program_order(pair: Pair) -> tuple[Any, int]:
        return time_of(reference.values[pair.reference]), -len(pair.path)

    return sorted(pairs, key=in_program_order), tuple(dict.fromkeys(unmatched))


def _without_casts(program: RecordedProgram, slots: list[Slot]) -> list[Slot]:
    """Return the slots of values other than casts, or all slots if all are casts."""
    return [slot for slot in slots if not program.values[slot].is_cast] or slots


def compared_row(
    path: str, phase: str, dtype: str, first: np.ndarray, reference: np.ndarray, finfo: Any
) -> ComparedRow:
    """Return the row of a value, with ulps of the dtype that ``finfo`` describes."""
    if np.isnan(reference).any() or (reference.size and not np.isfinite(reference).any()):
        return ComparedRow(path, phase, dtype, *[float("nan")] * 4)
    first, reference, difference = _differences(first, reference)
    norms = np.linalg.norm(first.ravel()) * np.linalg.norm(reference.ravel())
    with np.errstate(invalid="ignore"):  # the cosine is NaN if a value is infinite
        cosine = (
            float(np.vdot(first, reference).real / norms) if norms else float(not first.any() and not reference.any())
        )
    exponents = np.maximum(np.frexp(np.abs(reference))[1] - 1, int(finfo.minexp))
    distances = np.abs(difference)
    ulps = distances / 2.0 ** (exponents - int(finfo.nmant))
    return ComparedRow(
        path,
        phase,
        dtype,
        relative_error(first, reference),
        float(np.mean(distances)) if distances.size else 0.0,
        cosine,
        float(np.median(ulps)) if ulps.size else 0.0,
    )


def relative_error(first: np.ndarray, reference: np.ndarray) -> float:
    """Return the relative error of a value, without the infinities and NaNs that the reference has too."""
    first, reference, _ = _differences(first, reference)
    return gradient_error.relative_error(first, reference)


def rows_of_scopes(
    first: RecordedProgram, reference: RecordedProgram, pairs: Sequence[Pair], finfo: jnp.finfo
) -> list[ComparedRow]:
    """Return rows for the results, for values that scopes return, and for gradients.

    The gradients are with respect to the values that scopes return.
    """
    rows = []
    for pair in pairs:
        arrays = first.forward[pair.first], reference.forward[pair.reference]
        rows.append(compared_row(pair.path, "forward", first.values[pair.first].dtype.name, *arrays, finfo))
    for (value, of_first), (_, of_reference) in zip(first.results, reference.results, strict=True):
        rows.append(compared_row("", "forward", value.dtype.name, of_first, of_reference, finfo))
    for pair in reversed(pairs):
        if pair.reference in reference.backward:
            arrays = first.backward[pair.first], reference.backward[pair.reference]
            rows.append(compared_row(pair.path, "backward", first.values[pair.first].dtype.name, *arrays, finfo))
    return rows


def rows_of_gradients(first: RecordedProgram, reference: RecordedProgram, finfo: jnp.finfo) -> dict[int, ComparedRow]:
    """Return a row for the gradient of each argument leaf, by the leaf's index."""
    return {
        n: compared_row(gradient.path, "backward", gradient.dtype, gradient.array, reference.gradients[n].array, finfo)
        for n, gradient in first.gradients.items()
    }


def numbers_above_rounding(reference: RecordedProgram, eps: float) -> set[int]:
    """Return the indices of the gradients that are larger than rounding errors.

    The root mean square of such a gradient is more than ``eps`` times that of the largest gradient. A smaller gradient
    consists of rounding errors in any precision, such as the gradient of a bias before a batch norm.
    """
    sizes: dict[int, float] = {}
    for n, (_, gradient, _) in reference.gradients.items():
        sizes[n] = float(np.sqrt(np.mean(np.square(np.abs(gradient))))) if gradient.size else 0.0
    largest = max((size for size in sizes.values() if np.isfinite(size)), default=0.0)
    return {n for n, size in sizes.items() if size > eps * largest or np.isnan(size)}


def total_row(first: RecordedProgram, reference: RecordedProgram, finfo: jnp.finfo) -> ComparedRow:
    """Return one row for all gradients of arguments together; for all results if there are no gradients."""

    def all_numbers(program: RecordedProgram) -> np.ndarray:
        arrays = [gradient.array for gradient in program.gradients.values()]
        arrays = arrays or [array for _, array in program.results]
        return np.concatenate([array.ravel() for array in arrays] or [np.zeros(0)])

    phase = "backward" if first.gradients else "forward"
    return compared_row("", phase, "", all_numbers(first), all_numbers(reference), finfo)


def _differences(first: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return both arrays and their difference.

    An element that is the same infinity in both arrays, or NaN in both, is replaced by 0 in both. Masks contain such
    elements.
    """
    is_same = ~np.isfinite(reference) & ((first == reference) | (np.isnan(first) & np.isnan(reference)))
    first, reference = np.where(is_same, 0, first), np.where(is_same, 0, reference)
    return first, reference, first - reference
