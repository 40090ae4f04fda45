"""Compare a function with itself without policies, or with another function."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp.base import tables
from jaxmp.base.cache_keys import policies_off, rounded_params
from jaxmp.base.dtypes import dtype_among, is_half
from jaxmp.base.inspection import name_of, tool
from jaxmp.base.trees import widen
from jaxmp.engine.autocast import autocast
from jaxmp.engine.marks import trial_region
from jaxmp.inspect._compare.entry import entered_in, scopes_where_errors_grow
from jaxmp.inspect._compare.rows import (
    ComparedRow,
    matched_pairs,
    numbers_above_rounding,
    rows_of_gradients,
    rows_of_scopes,
    total_row,
)
from jaxmp.inspect._compare.run import RecordedProgram, run_and_record
from jaxmp.inspect.gradient_error import LARGEST_GOOD_ERROR, percent
from jaxmp.inspect.program.calls import (
    argument_paths,
    is_inexact,
    is_step,
    require_policy_of,
)
from jaxmp.inspect.program.half_arguments import half_arguments, sentences_of_half_arguments
from jaxmp.inspect.program.loss_calls import loss_call
from jaxmp.program.primitives import PRODUCTS

_REFERENCES = ("float32", "float64")
_MOST_SCOPES = 2
"""The number of scopes in which the error grows that are tried in float32."""
_MOST_OF_THE_ERROR = 0.5
"""The share of the error that remains if it does not enter in a scope."""
_COLUMNS = ("path", "phase", "dtype", "relative\nerror", "mean\n|difference|", "cosine", "ulps")


@dataclasses.dataclass(frozen=True)
class Comparison(tables.Shown):
    """The effect of policies on a function's numbers, or the differences of two functions.

    The printed table has one row for all rows of the same phase and dtype whose paths differ only in numbers, such as
    those of equal layers. It is the row with the largest relative error.

    Attributes:
      reference: ``"float32"``, ``"float64"``, or the name of the reference function.
      is_of_two_functions: whether the reference is another function.
      dtype: the most common half dtype (float16 or bfloat16) of the function's products, or of the reference's if the
        function has none; ``"float32"`` if no product is half.
      is_changed: whether the products of the two runs differ in number or dtype.
      rows: the compared values. First come the values that modules and named scopes return, in program order, and the
        result. Then come the gradients of these values, in the order of the backward pass, and then the gradients of
        the arguments.
      entered: the path of the module or scope where the error enters, or None if the error enters nowhere. The error
        enters at the first value or gradient whose relative error exceeds two limits: 4 times the largest relative
        error of its inputs, and 4 times the error of one rounding to half. If code between modules computes this value,
        ``entered`` is the path of the module around this code. The path is empty for code outside of all scopes. If
        there is no such value, the error may grow in small steps, as in a sum of many terms. It then enters in the
        first scope of which two things are true: the error grows there by more than these limits, and a run in which
        the operations of the scope, except products, are float32 has less than half of the error of ``total``.
      worst: the row with the largest relative error. Gradients of arguments are left out if they consist of rounding
        errors in any precision, such as the gradient of a bias before a batch norm.
      total: one row for all gradients of arguments together, as one vector; for the results if there are no gradients.
        Its relative error is the error that ``error_budget`` and ``tune`` measure.
      unmatched: the paths of scopes that have values without a row. In one of the runs, the scope returns more or fewer
        values of their shape, or computes them in a loop that fits several axes of the other run's values.
      not_counted: the operations whose inner values are not compared, such as while loops.
      half_arguments: the names of arguments with rounded values; see :class:`jaxmp.inspect.ErrorBudget`.
    """

    reference: str
    is_of_two_functions: bool
    dtype: str
    is_changed: bool
    rows: tuple[ComparedRow, ...]
    entered: str | None
    worst: ComparedRow
    total: ComparedRow
    unmatched: tuple[str, ...]
    not_counted: tuple[str, ...] = ()
    half_arguments: tuple[str, ...] = ()

    def _headline(self) -> str:
        for row in self.rows:
            if math.isnan(row.relative_error):
                return (
                    f"The reference is not finite, first in {row.path or 'the result'}, {row.phase}; "
                    "jaxmp.inspect.first_nonfinite finds the operation"
                )
        if not any(row.relative_error for row in self.rows):
            if self._has_scopes():
                return "All compared numbers are equal"
            return "The results are equal; no values of scopes are compared"
        worst = f"{self.worst.relative_error:.2e} in {self.worst.path or 'the result'}, {self.worst.phase}"
        if self.unmatched and not self._has_scopes():
            return f"The largest error is {worst}; no values of scopes are compared"
        if self.entered == "":
            return f"The largest error is {worst}; it enters in code without a module or named scope"
        where = "nowhere" if self.entered is None else f"in {self.entered}"
        return f"The error enters {where}; worst: {worst}"

    def _has_scopes(self) -> bool:
        """Return whether a value of a module or named scope has a row."""
        return any(row.path for row in self.rows if row.phase == "forward")

    def _shown(self) -> Any:
        cells = []
        for group in tables.grouped((*self.rows, dataclasses.replace(self.total, path="total")), _key_of_row):
            worst_of_group = max(group, key=lambda row: np.nan_to_num(row.relative_error, nan=np.inf))
            _, _, _, *numbers = dataclasses.astuple(worst_of_group)
            path = worst_of_group.path or "result"
            path = path if len(group) == 1 else f"{path} (worst of {len(group)})"
            cells.append((path, worst_of_group.phase, worst_of_group.dtype, *(f"{number:.2e}" for number in numbers)))
        return self._headline(), _COLUMNS, cells, list(self._notes())

    def _notes(self) -> Iterator[str]:
        if not self.is_of_two_functions and LARGEST_GOOD_ERROR < self.total.relative_error < math.inf:
            yield (
                f"The total error of {percent(self.total.relative_error)} is more than {percent(LARGEST_GOOD_ERROR)}: "
                f"{self.dtype} may be too coarse here. jaxmp.inspect.tune measures the ways out."
            )
        yield from sentences_of_half_arguments(self.half_arguments)
        if self.not_counted:
            yield f"not counted: {'; '.join(self.not_counted)}"
        groups = tables.grouped(self.unmatched, tables.without_numbers)
        scopes = ", ".join(tables.common_path(paths) for paths in groups)
        if not self.is_of_two_functions:
            if scopes:
                yield f"scopes without a row, because the policies change how many values they return: {scopes}"
            if not self.is_changed:
                yield "No policy, region or autocast changes a product here; both runs have only the code's casts."
        elif scopes:
            if not self._has_scopes():
                yield "No value of a scope has a match in the other function, so only the results are compared."
                roots = list(dict.fromkeys(path.partition("/")[0] for path in self.unmatched))
                if len(roots) == 2:
                    yield f"Scopes match by path. Rename {roots[0]} or {roots[1]}, so that all paths begin alike."
            yield f"scopes with values without a match, because of their number, shape or loop: {scopes}"


def _key_of_row(row: ComparedRow) -> tuple[str, str, str]:
    """Return a key that is equal for rows of equal layers."""
    return tables.without_numbers(row.path), row.phase, row.dtype


@tool
def compare(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    reference: Literal["float32", "float64"] | DTypeLike | Callable[..., Any] = "float32",
    overrides: Mapping[str, str] | None = None,
    grad: bool = True,
    loss_scale: float = 1.0,
) -> Callable[..., Comparison]:
    """Compare a function with its float32 version or with another function, layer by layer.

    The first run uses ``policy``, and the policies and autocasts in ``fun``. The reference run turns off every policy,
    :func:`jaxmp.precision` region and autocast. Casts in the code of ``fun``, and dtypes that you set on modules, stay
    in both runs. If ``reference`` is a function, the second run calls this function, with its own policies.

    Args:
      fun: a function that returns the loss (a floating scalar), or a tuple whose first element is the loss. With
        ``grad=False``, ``fun`` may return anything. ``fun`` may also be a train step. Then call the returned function
        with the step's arguments. The loss function of the step is compared under the loss scale of the state.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, in addition to the policies in ``fun``.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      reference: the dtype of the reference run. ``"float32"`` casts half arguments to float32 and uses true float32
        products, not TensorFloat-32. ``"float64"`` traces under ``jax.enable_x64`` and casts floating arguments to
        float64, and complex ones to complex128. (Random numbers differ in float64, so turn dropout off.) A function
        of the same arguments runs as it is written: use it to compare a model in training with the one that serves it.
        Pass float32 params: in both functions, a Linen model under a policy rounds them to the policy's param dtype.
        Values of scopes with equal paths and shapes are compared, those of a loop iteration by iteration. The results
        must have equal shapes. For a train step, the reference is a train step with the same ``accumulate_steps``.
      grad: whether to compare gradients too. These are the gradients with respect to all values that scopes return,
        and with respect to the first argument that has floating arrays.
      loss_scale: the factor by which the loss is multiplied before the differentiation. The gradients in the rows are
        divided by this factor.

    Returns:
      A function of ``fun``'s arguments that returns a :class:`Comparison`. Both programs are compiled with
      ``xla_allow_excess_precision=False``, so that XLA keeps all roundings to half precision. All values are copied to
      the host.

    Raises:
      ValueError: the reference is unknown; there are no floating values to compare; the results of ``reference`` have
        other shapes; ``overrides`` is set without a policy; only one of ``fun`` and ``reference`` is a train step, or
        both have different ``accumulate_steps``; a train step is on a mesh; ``loss_scale`` is set for a train step; or
        :func:`jaxmp.autocast` rejects ``policy`` or ``overrides``.
      TypeError: ``policy`` is a function; or ``grad`` is True, and the first result of ``fun`` is not a floating
        scalar.
      RuntimeError: an argument was donated to an earlier step.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("layer"):
    ...         y = x @ params["w"]
    ...     return jnp.mean(y**2)
    >>> x = jax.random.normal(jax.random.key(0), (8, 8))
    >>> comparison = compare(loss_fn, "mixed_bfloat16")({"w": x}, x)
    >>> comparison.entered is None, comparison.rows[0].path, comparison.rows[0].relative_error < 2**-8
    (True, 'layer', True)
    """
    if callable(policy) and not isinstance(policy, type):  # jnp.float32 is a class
        raise TypeError(
            f"the second argument of compare is a policy, got the function {name_of(policy)}; "
            "write compare(fun, reference=other_fun)"
        )
    if callable(reference) and not isinstance(reference, type):
        other, reference_dtype = reference, ""
        _require_same_kind(fun, other)
    else:
        other, reference_dtype = None, dtype_among("reference", reference, _REFERENCES)
    require_policy_of(overrides, policy)

    def run(*args: Any) -> Comparison:
        loss_fn, arrays, scale = loss_call(fun, args, loss_scale)
        paths = argument_paths(loss_fn, arrays)
        cast = loss_fn if policy is None else autocast(loss_fn, policy, overrides)
        with rounded_params(other is not None):  # two models may store the params in other dtypes
            of_fun = run_and_record(cast, arrays, paths, grad, scale)
        if other is not None:
            other_fn, arrays, scale = loss_call(other, args, loss_scale)
            with rounded_params(True):
                of_reference = run_and_record(other_fn, arrays, paths, grad, scale)
            _require_equal_shapes(of_fun, of_reference)
            return _compared(of_fun, of_reference, name_of(other), is_of_two_functions=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(policies_off(True))
            stack.enter_context(jax.default_matmul_precision("highest"))
            if reference_dtype == "float64":
                stack.enter_context(jax.enable_x64(True))
                arrays = jax.tree.map(_in_64_bit_floats, arrays)
            of_reference = run_and_record(loss_fn, widen(arrays), paths, grad, scale)
        comparison = _compared(of_fun, of_reference, reference_dtype, is_of_two_functions=False)
        comparison = dataclasses.replace(comparison, half_arguments=half_arguments(paths, arrays))
        if comparison.entered is not None or not comparison.total.relative_error < math.inf:
            return comparison

        def error_with_float32_in(path: str) -> float:
            """Return the total error if the operations of a scope, except products, are float32."""
            with trial_region(lambda equation: equation.path == path and equation.name not in PRODUCTS):
                of_trial = run_and_record(cast, arrays, paths, grad, scale)
            return total_row(of_trial, of_reference, jnp.finfo(comparison.dtype)).relative_error

        for path in _grown(of_fun, of_reference, jnp.finfo(comparison.dtype)):
            if error_with_float32_in(path) < _MOST_OF_THE_ERROR * comparison.total.relative_error:
                return dataclasses.replace(comparison, entered=path)
        return comparison

    return run


def _require_same_kind(fun: Callable[..., Any], reference: Callable[..., Any]) -> None:
    """Raise a ValueError if two functions cannot be compared.

    Only one is a train step, or two train steps have different microbatches.
    """
    if is_step(fun) != is_step(reference):
        raise ValueError(
            "compare takes two train steps or two other functions, got a train step and another function; pass the "
            "loss functions of both"
        )
    if is_step(fun) and _microbatches(fun) != _microbatches(reference):  # examples are in another order
        raise ValueError(
            "compare needs two train steps with the same accumulate_steps, got "
            f"{_microbatches(fun)} and {_microbatches(reference)}; write step.with_options(accumulate_steps=…)"
        )


def _microbatches(step: Any) -> int:
    count: int = getattr(step, "of_trees", step).update.accumulate_steps
    return count


def _require_equal_shapes(first: RecordedProgram, reference: RecordedProgram) -> None:
    """Raise a ValueError if the results of two functions have different shapes."""
    shapes = [array.shape for _, array in first.results]
    others = [array.shape for _, array in reference.results]
    if shapes != others:
        raise ValueError(
            f"compare needs two functions whose floating results have equal shapes, got {shapes} and {others}; return "
            "the results that correspond"
        )


def _in_64_bit_floats(leaf: Any) -> Any:
    if not is_inexact(leaf):
        return leaf
    return jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)


def _compared(
    first: RecordedProgram, reference: RecordedProgram, name: str, *, is_of_two_functions: bool
) -> Comparison:
    dtype = _half_dtype(first) or _half_dtype(reference) or "float32"
    finfo = jnp.finfo(dtype)
    returned, passed_in, unmatched = matched_pairs(first, reference)
    rows = rows_of_scopes(first, reference, returned, finfo)
    gradients = rows_of_gradients(first, reference, finfo)
    numbers = numbers_above_rounding(reference, float(finfo.eps))
    counted = [*rows, *(row for n, row in gradients.items() if n in numbers)]
    if not counted:
        raise ValueError(
            "compare needs a function with floating results or gradients, got neither; return the floating values from "
            "which the results are computed"
        )
    return Comparison(
        reference=name,
        is_of_two_functions=is_of_two_functions,
        dtype=dtype,
        is_changed=collections.Counter(first.products) != collections.Counter(reference.products),
        rows=(*rows, *gradients.values()),
        entered=entered_in(first, reference, [*returned, *passed_in], numbers, float(finfo.eps) / 2),
        worst=max(counted, key=_size_of_error),
        total=total_row(first, reference, finfo),
        unmatched=unmatched,
        not_counted=first.not_recorded,
    )


def _grown(first: RecordedProgram, reference: RecordedProgram, finfo: Any) -> list[str]:
    """Return the first scopes in which the error grows."""
    returned, passed_in, _ = matched_pairs(first, reference)
    return scopes_where_errors_grow(first, reference, [*returned, *passed_in], float(finfo.eps) / 2)[:_MOST_SCOPES]


def _size_of_error(row: ComparedRow) -> float:
    return float(np.nan_to_num(row.relative_error, nan=np.inf))


def _half_dtype(program: RecordedProgram) -> str | None:
    """Return the most common half dtype of products; None if no product is half."""
    for dtype, _ in collections.Counter(program.products).most_common():
        if is_half(np.dtype(dtype)):
            return dtype
    return None
