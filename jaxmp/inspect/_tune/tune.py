"""Find the parts of a function that need float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import tables
from jaxmp.base.dtypes import is_half
from jaxmp.base.inspection import tool
from jaxmp.inspect._first_nonfinite.first_nonfinite import first_nonfinite
from jaxmp.inspect._numerics.numerics import numerics
from jaxmp.inspect._tune.candidates import half_code_outside, modules_of
from jaxmp.inspect._tune.measurement import Measurement, with_folded_keys, without_policies
from jaxmp.inspect._tune.search import Found, Search
from jaxmp.inspect.gradient_error import LARGEST_GOOD_ERROR, percent, sentence_of_coarse_half
from jaxmp.inspect.program.calls import argument_paths, is_step, require_arguments_not_deleted, step_call
from jaxmp.inspect.program.function_leaves import of_arrays, without_functions
from jaxmp.inspect.program.half_arguments import half_arguments, sentences_of_half_arguments
from jaxmp.inspect.program.loss_calls import loss_of
from jaxmp.optim.checks import as_float
from jaxmp.policy.policies import Policy
from jaxmp.policy.policy_map import PolicyMap, get_policy

_COLUMNS = ("path", "error if float32", "FLOPs", "float32")
_FLOORS_ALLOWED = 2.0
_FEW_IN_HALF = 0.5


@dataclasses.dataclass(frozen=True)
class TunedRow:
    """A module, scope or operation that the search can switch to float32.

    Attributes:
      path: the path in the form of an override's key, such as ``"flow"`` or ``"flow:add"``. A ``*`` stands for the
        numbers of equal layers.
      error: the error of the function without the roundings of this module or operation. NaN if the search did not
        need this error.
      flops: the FLOPs of the products in the module, scope or operation, without products in submodules.
      is_float32: whether the search chose float32.
    """

    path: str
    error: float
    flops: int
    is_float32: bool


@dataclasses.dataclass(frozen=True)
class Tuned(tables.Shown):
    """Overrides that keep the gradients near their float32 values.

    The error of a function is the relative L2 error of all gradients together. It is infinite if the loss is not
    finite.

    Overrides of named scopes need :func:`jaxmp.autocast` of a function, or ``make_train_step(policy=)``.

    Attributes:
      policy: the policy with the overrides. Pass it to ``apply_policy``, ``autocast`` or ``make_train_step(policy=)``.
      overrides: the policies by path; empty if no override is needed. The first override that matches a path applies.
        If a module or its operations need float32, and its submodules do not, the submodules have overrides too: the
        half policy.
      error: the measured error with the overrides. If Ctrl-C ended the search, it may be the predicted error.
      loss_error: the measured change of the loss with the overrides, divided by the absolute value of the loss, or by 1
        if that is larger; NaN if ``error`` is predicted.
      error_before: the measured error without overrides.
      floor: the error if only the operands of half products are rounded to half precision (float16 or bfloat16), and
        all computations are in float32. Products that autocast keeps in float32 do not count.
      tolerance: the largest allowed error.
      met: whether the measured error is at most ``tolerance``; False if the error is only predicted.
      is_too_coarse: whether the floor is above 5 %, and the user allowed no more. The half dtype itself is then too
        coarse for the function, and the overrides set products to float32.
      float16_error: the measured error under ``"mixed_float16"`` without overrides, if bfloat16 is too coarse, and
        float16 is available; else None.
      interrupted: whether Ctrl-C ended the search, so that fewer overrides may be enough.
      half_flops: the share of the products' FLOPs in half precision with the overrides, from 0 to 1.
      loss_scale: a good initial loss scale for float16; None for bfloat16.
      rows: the modules, scopes and operations that the search could switch to float32; those in float32 come first.
      evaluations: the number of programs that were measured in half precision.
      not_counted: if the tolerance is not met, the half operations outside of modules and named scopes, which the
        search cannot set to float32.
      half_arguments: the names of arguments with rounded values; see :class:`jaxmp.inspect.ErrorBudget`.
    """

    policy: PolicyMap
    overrides: Mapping[str, str]
    error: float
    loss_error: float
    error_before: float
    floor: float
    tolerance: float
    met: bool
    is_too_coarse: bool
    float16_error: float | None
    interrupted: bool
    half_flops: float
    loss_scale: float | None
    rows: tuple[TunedRow, ...]
    evaluations: int
    not_counted: tuple[str, ...]
    half_arguments: tuple[str, ...]

    def save(self, file: str | Path) -> None:
        """Write the text of the policy to a file.

        ``Path(file).read_text()`` is the policy: :func:`jaxmp.get_policy` reads it, and so does each ``policy=``.
        """
        Path(file).write_text(f"{self.policy}\n", encoding="utf-8")

    def _shown(self) -> Any:
        cells = []
        for row in self.rows:
            error = "" if np.isnan(row.error) else f"{row.error:.2e}"
            cells.append((row.path, error, tables.short(row.flops), "yes" if row.is_float32 else ""))
        notes = [
            f"error {self.error:.2e}, without overrides {self.error_before:.2e}; tolerance {self.tolerance:.2e}, "
            f"floor {self.floor:.2e}; error of the loss {self.loss_error:.2e}",
            f"{100 * self.half_flops:.1f} % of the products' FLOPs in half; {self.evaluations} evaluations",
        ]
        count_in_half = sum(policy != "float32" for policy in self.overrides.values())
        if count_in_half:
            count = len(self.overrides)
            notes.append(
                f"{count} overrides: {count - count_in_half} for float32, {count_in_half} for submodules that stay half"
            )
        if self.float16_error is not None:
            notes.append(f"in float16 the error is {percent(self.float16_error)}: policy='mixed_float16'")
        if self.half_flops < _FEW_IN_HALF:
            notes.append("few products are left in half: train in float32, or allow a larger error with tolerance=")
        if self.loss_scale is not None:
            notes.append(f"a good first loss scale: {self.loss_scale:g}")
        if self.not_counted:
            notes.append(f"not counted: {'; '.join(self.not_counted)}")
        notes += sentences_of_half_arguments(self.half_arguments)
        return self._title(), _COLUMNS, cells, notes

    def _title(self) -> str:
        if self.interrupted:
            measured = "" if self.met else ", and its error is not measured or above the tolerance"
            return f"Interrupted: this is the best result so far{measured}; fewer overrides may be enough"
        if not self.met:
            return "Tolerance not met, even with all modules in float32: the error comes from code outside of modules"
        if not self.overrides:
            return "Nothing needs float32: no override is needed"
        names = ", ".join(row.path for row in self.rows if row.is_float32)
        if self.is_too_coarse:
            half = self.policy.root.compute_dtype.name
            gain = f"Float32 for these lowers the error to {percent(self.error)}: {names}"
            return f"{sentence_of_coarse_half(half, self.floor)} {gain}"
        return f"These need float32: {names}"


@tool
def tune(
    fun: Callable[..., Any],
    policy: Any,
    *,
    tolerance: float | None = None,
    seeds: int = 1,
    operations: bool = True,
) -> Callable[..., Tuned]:
    """Find the modules and operations that need float32 under a half policy.

    The reference is ``fun`` in float32, without policies and autocast. If the error of ``fun`` under
    :func:`jaxmp.autocast` with ``policy`` is above the tolerance, a search sets operations to float32 instead of half
    precision (float16 or bfloat16), those with the largest gain first. If the tolerance allows it, all products stay
    half. Equal layers have one override. The errors of the search are those of a program in which each rounding has a
    switch, as in :func:`error_budget`. The error of the result is measured in half precision.

    Args:
      fun: a function that returns the loss, or a tuple whose first element is the loss. It may also be a train
        step. Then call the function that ``tune`` returns with the step's arguments.
      policy: a policy that computes in half precision and has no overrides, such as ``"mixed_bfloat16"``.
      tolerance: the largest allowed error relative to float32, such as 0.01 (:class:`Tuned` defines the error). None
        means twice the ``floor``, but at most 5 %. The floor is the error if only the operands of products are rounded
        to half precision. If the floor is above 5 %, products become float32 too, and the error in float16 is measured.
      seeds: the number of measurements of each error, with different random numbers; the largest error counts. The
        first measurement uses the unchanged arguments. Later measurements fold 1, 2, … into each typed PRNG key among
        the arguments.
      operations: whether single operations may have overrides. Pass False to get overrides of modules only. A named
        scope in a module then counts as a part of the module.

    Returns:
      A function of ``fun``'s arguments that returns :class:`Tuned`. You can pass more batches as ``batches=``, a list
      of tuples. Each tuple has all arguments except the first one (the params); for a train step it is ``(batch,)``.
      The largest error of all batches counts. The same arguments give the same result. Interrupt the search with Ctrl-C
      to get the best result so far.

    Raises:
      ValueError: the policy does not compute in half precision, or has overrides; the float32 loss or gradients are not
        finite, or all gradients are zero; the tolerance is not a share from 0 to 1, or is below the floor; no module or
        named scope has an operation in half precision; or ``seeds`` is more than 1, but no argument has a typed PRNG
        key.
      TypeError: the first result of ``fun`` is not a floating scalar; or ``batches`` are not tuples.
      RuntimeError: an argument was donated to an earlier step.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("encoder"):
    ...         x = jnp.tanh(x @ params["w"])
    ...     with jax.named_scope("flow"):
    ...         for _ in range(6):
    ...             x = x + 0.004 * jnp.tanh(x @ params["v"])
    ...     return jnp.mean(x**2)
    >>> w, v = jax.random.normal(jax.random.key(0), (2, 16, 16)) / 4
    >>> x = jax.random.normal(jax.random.key(1), (32, 16))
    >>> tuned = tune(loss_fn, "mixed_bfloat16")({"w": w, "v": v}, x)
    >>> dict(tuned.overrides), tuned.met
    ({'flow:add': 'float32'}, True)
    """
    half = _half_policy(policy)
    _require_share(tolerance)

    def run(*args: Any, batches: Sequence[tuple[Any, ...]] | None = None) -> Tuned:
        more_batches = _checked_batches(batches)
        loss_fn, scale = fun, None
        all_args = [args, *((args[0], *more) for more in more_batches)]
        if is_step(fun):
            call = step_call(fun, args)
            scale = call.loss_scale
            loss_fn, (params, model_state, batch) = loss_of(call)
            all_args = [(params, model_state, *more, call.rng) for more in [(batch,), *more_batches]]
        args = all_args[0]
        require_arguments_not_deleted(loss_fn, args)
        written, (loss_fn, args) = loss_fn, of_arrays(loss_fn, args)
        all_args = [without_functions(args)[1] for args in all_args]
        all_args += [with_folded_keys(args, seed) for seed in range(1, seeds) for args in all_args]
        plain = without_policies(loss_fn)
        if half.compute_dtype != np.float16:
            scale = None
        needs_scale = half.compute_dtype == np.float16 and scale in (None, 1.0)
        if needs_scale:
            scale = numerics(plain)(*args).recommended_scale("float16")
        measurement = Measurement(plain, all_args, half, scale or 1.0)
        if (number := measurement.batch_that_is_not_finite()) is not None:
            blame = first_nonfinite(plain)(*all_args[number])
            raise ValueError(
                f"tune compares with float32, but float32 is not finite on batch {number % (1 + len(more_batches))}. "
                f"{blame}"
            )
        if half.compute_dtype == np.float16:
            measurement.lower_loss_scale()
        floor = measurement.floor()
        if not np.isfinite(floor):
            raise ValueError("tune compares with float32, but the float32 gradient is zero; tune other params or data")
        modules = modules_of(plain, args, half, modules_only=not operations)
        allowed = tolerance
        if allowed is None:
            allowed = min(_FLOORS_ALLOWED * max(floor, _error_of_a_rounding(half)), LARGEST_GOOD_ERROR)
        search = Search(measurement, modules, allowed, operations=operations)
        result = search.found
        is_too_coarse = tolerance is None and floor > allowed and result.error > allowed
        if result.error > allowed:
            if tolerance is not None and allowed < _as_printed(floor):
                raise ValueError(
                    f"the tolerance is below the floor, got {allowed:.2e} and a floor of {floor:.2e}, the error of "
                    "half products alone;\nallow a larger error, or train in float32"
                )
            result = search.run()
        float16_error = None
        if is_too_coarse and half.compute_dtype != np.float16 and not result.interrupted:
            float16_error = _error_in_float16(plain, args, measurement)
        met = result.is_measured and result.error <= allowed
        return _tuned(
            result,
            search.overrides(result.chosen),
            measurement,
            floor=floor,
            tolerance=allowed,
            met=bool(met),
            is_too_coarse=is_too_coarse,
            float16_error=float16_error,
            loss_scale=None if scale is None else measurement.loss_scale,
            not_counted=() if met else half_code_outside(plain, args, half),
            half_arguments=half_arguments(argument_paths(written, args), args),
        )

    return run


def _error_in_float16(plain: Callable[..., Any], args: Sequence[Any], measurement: Measurement) -> float | None:
    """Return the error under ``"mixed_float16"`` with a suitable loss scale; None on a TPU."""
    if jax.default_backend() == "tpu":
        return None
    scale = numerics(plain)(*args).recommended_scale("float16")
    policy = get_policy("mixed_float16")
    assert isinstance(policy, Policy)
    return measurement.error_under(policy, scale)


def _error_of_a_rounding(half: Policy) -> float:
    """Return the typical relative error of one rounding: half of the largest one."""
    return float(jnp.finfo(half.compute_dtype).eps) / 4


def _as_printed(error: float) -> float:
    """Return an error as it is printed, so that you can pass the printed number as the tolerance."""
    return float(f"{error:.2e}")


def _require_share(tolerance: float | None) -> None:
    """Raise a ValueError if a tolerance is not a number between 0 and 1."""
    if tolerance is None:
        return
    number = as_float(tolerance)
    if 0 <= number <= 1:
        return
    remedy = f"for {number:g} %, write tolerance={number / 100:g}" if 1 < number <= 100 else "write e.g. 0.01"
    raise ValueError(f"tolerance is a share of the float32 values, from 0 to 1, got {tolerance!r}; {remedy}")


def _checked_batches(batches: Sequence[tuple[Any, ...]] | None) -> list[tuple[Any, ...]]:
    for batch in batches or ():
        if not isinstance(batch, tuple):
            raise TypeError(f"batches are tuples of arguments, got {type(batch).__name__}; write [(batch,)]")
    return list(batches or ())


def _tuned(result: Found, overrides: Mapping[str, str], measurement: Measurement, **details: Any) -> Tuned:
    """Return the result of ``tune``. ``details`` are fields of :class:`Tuned`."""
    rows = []
    for candidate in result.candidates:
        error = result.errors.get(candidate, np.nan)
        rows.append(TunedRow(candidate.path, error, candidate.flops, candidate in result.chosen))
    rows.sort(key=lambda row: (not row.is_float32, np.nan_to_num(row.error, nan=np.inf)))
    return Tuned(
        policy=PolicyMap(measurement.half, overrides),
        overrides=overrides,
        error=result.error,
        loss_error=measurement.loss_error(overrides) if result.is_measured else float("nan"),
        error_before=result.error_before,
        interrupted=result.interrupted,
        half_flops=measurement.half_flops(overrides),
        rows=tuple(rows),
        evaluations=measurement.evaluations,
        **details,
    )


def _half_policy(policy: Any) -> Policy:
    half = get_policy(policy)
    if not isinstance(half, Policy) or not is_half(half.compute_dtype):
        raise ValueError(
            f"tune finds the overrides of one half policy, got {policy!r}; write 'mixed_bfloat16' or 'mixed_float16'"
        )
    return half
