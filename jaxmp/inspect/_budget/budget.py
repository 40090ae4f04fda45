"""Measure in one pass what each rounding to half precision costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.base import tables
from jaxmp.base.dtypes import is_narrow
from jaxmp.base.inspection import tool
from jaxmp.engine.trial_regions import trial_region
from jaxmp.inspect._budget import sentences
from jaxmp.inspect._budget.gradient_program import GradientProgram, program_of_function, program_of_step
from jaxmp.inspect._budget.reasons import plan_rows, whys_of
from jaxmp.inspect._budget.rows import Budget, BudgetGroup, BudgetRow
from jaxmp.inspect._budget.run import BudgetRun, Effects, RoundedOperands, norm, results_of
from jaxmp.inspect._budget.sites import Site, has_float8, sites_of
from jaxmp.inspect.gradient_error import LARGEST_GOOD_ERROR, percent, sentence_of_coarse_half
from jaxmp.inspect.program.calls import (
    argument_paths,
    is_step,
    loss_of_step,
    require_arguments_not_deleted,
    step_call,
    step_under_policy,
)
from jaxmp.inspect.program.function_leaves import of_arrays
from jaxmp.inspect.program.half_arguments import half_arguments, sentences_of_half_arguments
from jaxmp.inspect.status import status_of
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.reading import read_program
from jaxmp.program.values import Equation, Key, Program, depending_on

_COLUMNS = (
    "share", "gradients (relative)", "loss (absolute)", "sites", "operation", "dtype", "phase", "path", "source", "why"
)  # fmt: skip
_SHOWN = 20
_MOST_OF_A_LINE = 0.8
"""The share of a line's error that its main operations cause."""


@dataclasses.dataclass(frozen=True)
class BudgetTotal:
    """The measured error of a program, or the part of it that the roundings explain.

    Attributes:
      loss_error: the signed change of the loss; NaN for a function without a loss.
      gradient_error: the relative L2 error of all gradients together. For a function without a loss, that of all
        results.
    """

    loss_error: float
    gradient_error: float


@dataclasses.dataclass(frozen=True)
class ErrorBudget(tables.Shown):
    """The error that each rounding to half precision (float16 or bfloat16) causes.

    The errors are exact to first order: they are derivatives of the loss and of the gradients with respect to each
    rounded value, times its rounding error on these arguments. The errors of gradients in ``rows`` and in groups are
    estimates from a few random directions. With 8 directions, they are good to about a factor of two; more ``probes``
    are more exact.

    Attributes:
      rows: the roundings, equal layers together. Rows that overflow in float16 come first, and then rows that
        underflow. The largest share comes first among the others.
      by_path: the roundings of each module or scope, the largest share first.
      by_line: the roundings of each line of your code. If the operations of a line are in several modules or scopes,
        each of them has a group.
      by_rule: the roundings by the reason of autocast.
      predicted: the part of the measured error that all roundings together explain, to first order. For the gradients,
        it is the size of their change along the measured error. If the run under the policy is not finite, it is the
        estimated error by all roundings, without the numbers that overflow.
      measured: the error of a run under the policy, relative to a run in float32.
      loss: the loss in float32; NaN for a function without a loss.
      not_counted: the operations whose roundings, or through which errors, are not counted, with the reasons.
      sentences: the result in words.
      half_arguments: the names of arguments, other than params, whose values are all rounded to half precision. If a
        half program computed them, the float32 reference should not read them: their error is not measured.
    """

    rows: tuple[BudgetRow, ...]
    by_path: tuple[BudgetGroup, ...]
    by_line: tuple[BudgetGroup, ...]
    by_rule: tuple[BudgetGroup, ...]
    predicted: BudgetTotal
    measured: BudgetTotal
    loss: float
    not_counted: tuple[str, ...]
    sentences: tuple[str, ...]
    half_arguments: tuple[str, ...] = ()

    def _shown(self) -> Any:
        cells = []
        for row in self.rows[:_SHOWN]:
            changes = f"{row.gradient_error:.1e}", f"{row.loss_error:+.1e}"
            where = row.operation, row.dtype, row.phase, row.path, row.source, _why_with_counts(row)
            cells.append((f"{row.share:.1%}", *changes, row.sites, *where))
        notes = []
        if len(self.rows) > _SHOWN:
            rest = sum(row.share for row in self.rows[_SHOWN:])
            notes.append(f"… and {len(self.rows) - _SHOWN} rows with {percent(rest)} of the error")
        if self.not_counted:
            notes.append(f"not counted: {'; '.join(self.not_counted)}")
        title = (
            f"The relative error of the gradients is {self.measured.gradient_error:.2e}, predicted "
            f"{self.predicted.gradient_error:.2e}; the loss of {self.loss:.3g} changes by "
            f"{self.measured.loss_error:+.2e}, predicted {self.predicted.loss_error:+.2e}"
        )
        if np.isnan(self.loss):
            title = f"The error is {self.measured.gradient_error:.2e}, predicted {self.predicted.gradient_error:.2e}"
        return title, _COLUMNS, cells, [*notes, *sentences_of_half_arguments(self.half_arguments), *self.sentences]


def _why_with_counts(row: BudgetRow) -> str:
    counts = {"overflow": row.overflows, "underflow": row.underflows}
    texts = [f"{tables.short(count)} {name}" for name, count in counts.items() if count]
    return "; ".join([*texts, row.why])


@tool
def error_budget(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    probes: int = 8,
    seed: int = 0,
    float32: bool = False,
) -> Callable[..., ErrorBudget]:
    """Measure what each rounding to half precision costs, in one backward pass.

    The program of ``fun`` under its policies runs in float32. A tap at each value that the policies round has its
    rounding error on these arguments. Reverse-mode differentiation through the program, and through its gradient, then
    gives the effect of each rounding on the loss and on the gradients. The result names the lines of your code that
    cause the error, and says what float32 would gain there.

    Args:
      fun: a function that returns the loss (a floating scalar), or a tuple whose first element is the loss. It may also
        be a train step; then call the returned function with the step's arguments. For any other function, the errors
        are those of its floating results.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, in addition to the policies in ``fun``. Leave it
        out for a train step that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      probes: the number of random directions in which the errors of the gradients are measured. With more directions,
        the estimates are more exact and take longer.
      seed: the seed of the random directions.
      float32: whether results that stay float32 also get rows, as if they were half: the errors that float32 avoids.

    Returns:
      A function of ``fun``'s arguments that returns an :class:`ErrorBudget`.

    Raises:
      ValueError: the results are not floating, or not finite in float32; the program rounds nothing, or has float8
        values; ``probes`` is less than 1; ``policy`` is set for a train step that has one; or
        :func:`jaxmp.autocast` rejects them.
      RuntimeError: an argument was donated to an earlier step.

    >>> def loss_fn(w, x):
    ...     h = x @ w
    ...     for _ in range(6):
    ...         h = h + 0.01 * jnp.tanh(h @ w)
    ...     return jnp.mean(h**2)
    >>> w = jax.random.normal(jax.random.key(0), (16, 16)) / 4
    >>> budget = error_budget(loss_fn, "mixed_bfloat16")(w, jnp.ones((8, 16)))
    >>> budget.by_line[0].share > 0.5
    True
    """
    if probes < 1:
        raise ValueError(f"probes is the number of random directions, at least 1, got {probes}; leave it out for 8")
    if overrides and policy is None:
        raise ValueError(f"overrides need a policy, got {overrides} and policy=None; pass the policy")

    def run(*args: Any) -> ErrorBudget:
        with status_of("error budget: tracing") as status:
            if is_step(fun):
                step = step_under_policy(fun, policy, overrides)
                call = step_call(step, args)
                trace = functools.partial(program_of_step, call)
                rows = plan_rows(loss_of_step(step), args, None, None)
                plain, arrays = _arguments_of_step, (call.state.params, call.state.model_state, call.batch)
            else:
                require_arguments_not_deleted(fun, args)
                plain, arrays = of_arrays(fun, args)
                trace = functools.partial(program_of_function, plain, arrays, policy, overrides)
                rows = plan_rows(plain, arrays, policy, overrides)
            program = trace()
            read = read_program(program.jaxpr, program.consts)
            if has_float8(read):
                raise ValueError(
                    "an error budget does not cover float8, but this program has float8 values; measure mixed_bfloat16"
                )
            sites = sites_of(read, _half_dtype(read) if float32 else None)
            if not sites:
                raise ValueError(
                    "an error budget needs a program that rounds to half precision, but this one does not; pass a "
                    "policy, such as error_budget(fun, 'mixed_bfloat16')"
                )
            measurement = _Measurement(trace, program, read, sites, BudgetRun(program, sites, probes, seed), status)
            budget = measurement.budget(whys_of(sites, rows))
            return dataclasses.replace(budget, half_arguments=half_arguments(argument_paths(plain, arrays), arrays))

    return run


def _arguments_of_step(params: Any, model_state: Any, batch: Any) -> None:
    """Name the arguments of a train step's loss function."""


def _half_dtype(program: Program) -> np.dtype:
    """Return the half dtype of a program; bfloat16 if it has none."""
    dtypes = [value.dtype for value in program.values if value.is_half]
    return dtypes[0] if dtypes else np.dtype(jnp.bfloat16)


class _Measurement:
    """The measurement of a program's error budget."""

    def __init__(
        self,
        trace: Callable[[], GradientProgram],
        program: GradientProgram,
        read: Program,
        sites: Sequence[Site],
        run: BudgetRun,
        status: Any,
    ) -> None:
        self.trace, self.program, self.read, self.sites, self.run, self.status = (
            trace,
            program,
            read,
            sites,
            run,
            status,
        )
        self.name_of_results = "gradients" if program.has_loss else "results"
        self.half = [number for number, site in enumerate(sites) if not site.is_float32]

    def budget(self, whys: Sequence[str]) -> ErrorBudget:
        """Run the program, and return its budget."""
        self.status.update("error budget: compiling and differentiating")
        self.float32, alone = self.run.alone()
        if not all(np.isfinite(result).all() for result in self.float32):
            raise ValueError(
                "an error budget compares with float32, but float32 is not finite on these arguments; "
                "jaxmp.inspect.first_nonfinite names the operation"
            )
        self.status.update("error budget: running under the policy")
        under_policy = results_of(self.program)
        together, is_finite = alone, all(np.isfinite(result).all() for result in under_policy)
        if is_finite:
            together = self.run.together(self.half, self._differences(under_policy))
        alone, together, unknown = _finite_effects(alone, together)
        budget = Budget(self.sites, whys, alone, together, norm(self._others(self.float32)))
        loss = float(self.float32[0]) if self.program.has_loss else float("nan")
        predicted = BudgetTotal(*(budget.total() if is_finite else budget.errors(self.half)))
        measured = self._measured(under_policy, budget)
        if not self.program.has_loss:
            predicted = dataclasses.replace(predicted, loss_error=float("nan"))
        without_effect = [_gap(self.sites[number].equation, "its effect is not finite") for number in unknown]
        not_counted = tuple(dict.fromkeys([*self._gaps(), *without_effect]))
        return ErrorBudget(
            rows=budget.rows(),
            by_path=budget.by_path(),
            by_line=budget.by_line(),
            by_rule=budget.by_rule(),
            predicted=predicted,
            measured=measured,
            loss=loss,
            not_counted=not_counted,
            sentences=tuple(self._sentences(budget, predicted, measured, has_gaps=bool(not_counted))),
        )

    def _others(self, results: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return the results without the loss."""
        return results[1:] if self.program.has_loss else results

    def _measured(self, results: Sequence[np.ndarray], budget: Budget) -> BudgetTotal:
        """Return the error of results."""
        loss_error = float(results[0] - self.float32[0]) if self.program.has_loss else float("nan")
        return BudgetTotal(loss_error, budget.relative(norm(self._differences(results))))

    def _differences(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the errors of results without the loss."""
        pairs = zip(self._others(results), self._others(self.float32), strict=True)
        return [result - true for result, true in pairs]

    def _sentences(
        self, budget: Budget, predicted: BudgetTotal, measured: BudgetTotal, *, has_gaps: bool
    ) -> Iterator[str]:
        if not self.half:
            yield "The program rounds nothing to half precision."
            return
        error, results = measured.gradient_error, self.name_of_results
        if sentences.is_mismatch(predicted.gradient_error, error):
            yield sentences.sentence_of_mismatch(predicted.gradient_error, error, results, has_gaps=has_gaps)
            results = f"explained {results}" if np.isfinite(error) else results
        self.status.update("error budget: rounding only products")
        floor = self._error_of([], RoundedOperands.OF_ALL, budget)
        if error > LARGEST_GOOD_ERROR and LARGEST_GOOD_ERROR < floor < np.inf:
            half = self.sites[self.half[0]].dtype.name
            yield f"{sentence_of_coarse_half(half, floor)} jaxmp.inspect.tune measures the ways out."
        largest = budget.by_line(self.half)[0]  # values that stay float32 cause no error
        if sentences.is_near_floor(error, floor):
            yield sentences.sentence_of_floor(error, floor)
        elif largest.share < sentences.NOTABLE and not largest.overflows:
            yield sentences.sentence_of_spread(largest, results)
            of_products = [number for number in self.half if self.sites[number].operation in PRODUCTS]
            if of_products:
                after = self._error_of(of_products, RoundedOperands.OF_CHOSEN, budget)
                yield sentences.sentence_of_products(error, after)
        else:
            yield self._advice(budget, largest, error, results)

    def _error_of(self, rounded: Sequence[int], operands: RoundedOperands, budget: Budget) -> float:
        """Return the error of the gradients if only some sites and operands of products are rounded."""
        return self._measured(self.run.results(rounded, operands), budget).gradient_error

    def _advice(self, budget: Budget, line: BudgetGroup, error: float, results: str) -> str:
        """Return a sentence about a line, with an advice whose effect is measured under this advice."""
        self.status.update("error budget: measuring the gain")
        chosen = [self.sites[number] for number in self._main_operations(budget, line)]
        is_shared = line.name != chosen[0].equation.source
        advice = sentences.advice_for(chosen, [self.sites[number] for number in self.half], is_shared=is_shared)
        with trial_region(advice.covers):
            program = self.trace()
        after = self._measured(results_of(program), budget).gradient_error
        return sentences.sentence_of_line(
            sentences.AdviceRun(line, chosen, advice, error, after, self._products_in(advice)), results
        )

    def _products_in(self, advice: sentences.Advice) -> int:
        """Return the number of half products of the forward pass that an advice makes float32."""
        return sum(
            equation.name in PRODUCTS and equation.phase == "forward" and advice.covers(equation)
            for equation in {value.at for value in self.read.values if value.is_half and value.equation is not None}
        )

    def _main_operations(self, budget: Budget, line: BudgetGroup) -> list[int]:
        """Return the sites of the operations that cause most of a line's error: as few operations as possible."""
        on_line = [number for number in self.half if budget.lines[number] == line.name]
        operations = tables.grouped(on_line, lambda number: self.sites[number].operation_in_float32)
        operations.sort(key=lambda group: (-budget.counts(group)[1], -budget.share(group)))
        chosen: list[int] = []
        for group in operations:
            overflows = budget.counts(group)[1]
            if overflows or budget.share(chosen) < _MOST_OF_A_LINE * line.share:
                chosen += group
        return chosen

    def _gaps(self) -> Iterator[str]:
        """Yield the operations through which errors do not pass, if a rounded value leads to them or is in them."""
        values = {(value.key, value.position): value for value in self.read.values if value.is_computed}
        rounded = [values[site.place] for site in self.sites]
        keys_behind = {value.key for value in depending_on(rounded, self.read.values)}
        for key, why in sorted(self.run.gaps.items()):
            inside = any(site.place[0][: len(key)] == key for site in self.sites)
            if inside or key in keys_behind or self._computes_in_half(key):
                yield _gap(self.read.equations[key], why)

    def _computes_in_half(self, key: Key) -> bool:
        return any(is_narrow(value.dtype) for value in self.read.equations[key].results)


def _gap(equation: Equation, why: str) -> str:
    """Return a description of an operation that is not counted."""
    places = ", ".join(filter(None, (equation.path, equation.source)))
    return f"{equation.name}{f' ({places})' if places else ''}: {why}"


def _finite_effects(alone: Effects, together: Effects) -> tuple[Effects, Effects, Sequence[int]]:
    """Return effects with 0 in place of numbers that are not finite, and the numbers of these sites."""
    is_finite = np.ones(alone.loss_changes.shape, bool)
    for effects in (alone, together):
        is_finite &= np.isfinite(effects.loss_changes) & np.isfinite(effects.changes).all(axis=0)
        is_finite &= np.isfinite(effects.parts)
    cleaned = []
    for effects in (alone, together):
        names = "loss_changes", "changes", "parts"
        numbers = {name: np.where(is_finite, getattr(effects, name), 0) for name in names}
        cleaned.append(dataclasses.replace(effects, **numbers))
    return cleaned[0], cleaned[1], np.flatnonzero(~is_finite).tolist()
