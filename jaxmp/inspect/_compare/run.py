"""Run one program of a comparison, and record its values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.trees import widen
from jaxmp.inspect.program.borders import AtBorder, not_recorded, passed_in, read_for_recording, returned
from jaxmp.inspect.program.calls import (
    AS_WRITTEN,
    RESULTS_ONLY,
    differentiated,
    in_double_precision,
    is_inexact,
    loss_and_rest,
    named,
    with_leaves,
)
from jaxmp.inspect.program.product_dtypes import multiplied, widest
from jaxmp.inspect.program.recorded_evaluation import evaluate_and_record
from jaxmp.inspect.program.taps import Taps
from jaxmp.inspect.program.tracing import program_of
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.values import Key, Value, leading_to

Slot = tuple[Key, int]
"""The key of an equation, and the position of one of its results."""


class Gradient(NamedTuple):
    """The gradient of one array among the arguments."""

    path: str
    array: np.ndarray
    dtype: str


@dataclass(frozen=True)
class RecordedProgram:
    """A program that was run, with the values that enter and leave its scopes.

    All arrays are NumPy arrays in float64, or in complex128 for complex values.

    Attributes:
      values: the values on which the results depend, by slot.
      returned: the paths and slots of values that scopes return, in program order.
      passed_in: the paths and slots of values that are passed into scopes, in program order.
      forward: the arrays of the values in ``returned`` and ``passed_in``, by slot.
      backward: the gradients with respect to the values in ``forward``, by slot.
      results: the floating and complex results to compare: the loss, or all results if there is no loss.
      gradients: the gradients of arguments, by the index of the argument's leaf.
      products: the compute dtype of each product in the forward pass.
      not_recorded: the operations whose inner values are not recorded.
    """

    values: dict[Slot, Value]
    returned: list[tuple[str, Slot]]
    passed_in: list[tuple[str, Slot]]
    forward: dict[Slot, np.ndarray]
    backward: dict[Slot, np.ndarray]
    results: list[tuple[Value, np.ndarray]]
    gradients: dict[int, Gradient]
    products: list[str]
    not_recorded: tuple[str, ...]


def run_and_record(
    fun: Callable[..., Any],
    args: Sequence[Any],
    paths: Sequence[str],
    grad: bool,
    loss_scale: float,
) -> RecordedProgram:
    """Run a function, and record the values that enter and leave its scopes.

    Args:
      fun: a function that returns the loss, or a tuple that begins with the loss. If ``grad`` is False, ``fun`` may
        return anything.
      args: the arguments of ``fun``.
      paths: the paths of the arguments' leaves.
      grad: whether to differentiate.
      loss_scale: the factor by which the loss is multiplied before the differentiation. Recorded gradients are divided
        by this factor.
    """

    def separate_loss(*args: Any) -> Any:
        result = fun(*named(args))
        return loss_and_rest(result, RESULTS_ONLY) if grad else ((), result)

    jaxpr, consts, structure = program_of(separate_loss, *args)
    loss, aux = map(jax.tree.leaves, jax.tree.unflatten(structure, range(len(jaxpr.outvars))))
    ends = [n for n in loss or aux if is_inexact(jaxpr.outvars[n].aval)]
    is_end = [n in ends for n in range(len(jaxpr.outvars))]
    program = read_for_recording(jaxpr, consts)
    leaving, entering = returned(program, is_end), passed_in(program, is_end)
    taps = _ValueTaps((*leaving, *entering))
    inputs = jax.tree.leaves(tuple(args))
    numbers = differentiated(args) if grad else []

    scale = loss_scale if grad else None
    results, records, grads, cotangents = _run_with_taps(jaxpr, consts, inputs, numbers, taps, scale)
    leading = [value for value in leading_to(program.results) if value.is_computed]
    values = {(value.key, value.position): value for value in leading}

    def arrays_by_slot(records: dict[Key, dict[int, Any]], scale: float = 1.0) -> dict[Slot, np.ndarray]:
        arrays = {}
        for key, of_equation in records.items():
            for position, record in of_equation.items():
                arrays[key, position] = in_double_precision(record) / scale
        return arrays

    return RecordedProgram(
        values=values,
        returned=_paths_and_slots(leaving),
        passed_in=_paths_and_slots(entering),
        forward=arrays_by_slot(records),
        backward=arrays_by_slot(cotangents, loss_scale),
        results=[(program.results[n], in_double_precision(results[n])) for n in ends],
        gradients={
            n: Gradient(paths[n], in_double_precision(gradient) / loss_scale, str(gradient.dtype))
            for n, gradient in zip(numbers, grads, strict=True)
        },
        products=[widest(map(multiplied, value.inputs[:2])) for value in program.values if value.name in PRODUCTS],
        not_recorded=not_recorded(program),
    )


def _run_with_taps(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], numbers: Sequence[int], taps: Taps, scale: float | None
) -> tuple[Any, Any, Any, Any]:
    """Return results, records, gradients of inputs, and gradients of sinks.

    Sinks are explained in ``program/taps.py``. The first result times ``scale`` is differentiated with respect to the
    sinks and the inputs that ``numbers`` lists. If ``scale`` is None, nothing is differentiated.
    """

    def run(leaves: Sequence[Any], sinks: Any, consts: Any, inputs: Any) -> Any:
        all_inputs = with_leaves(inputs, numbers, leaves)
        results, records = evaluate_and_record(jaxpr, consts, all_inputs, taps, sinks)
        if scale is None:
            return 0.0, (results, records)
        return results[0] if scale == 1 else widen(results[0]) * scale, (results, records)

    leaves = [inputs[n] for n in numbers]
    if scale is None:
        _, (results, records) = jax.jit(run, compiler_options=AS_WRITTEN)(leaves, None, consts, inputs)
        return results, records, [], {}
    call = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True), compiler_options=AS_WRITTEN)
    (_, (results, records)), (grads, cotangents) = call(leaves, taps.sinks(), consts, inputs)
    return results, records, grads, cotangents


class _ValueTaps(Taps):
    """Taps that record whole values, and their gradients in float32 or wider."""

    def record(self, value: jax.Array) -> jax.Array:
        return value

    def record_cotangent(self, cotangent: jax.Array) -> jax.Array:
        return widen(cotangent)

    def sink(self, aval: Any, lengths: tuple[int, ...]) -> jax.Array:
        zeros: jax.Array = widen(jnp.zeros((*lengths, *aval.shape), aval.dtype))
        return zeros


def _paths_and_slots(borders: Sequence[AtBorder]) -> list[tuple[str, Slot]]:
    return [(border.path, (border.key, border.position)) for border in borders]
