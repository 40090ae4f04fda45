"""Measure what the roundings of each line to half precision cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmp.base import tables
from jaxmp.base.inspection import tool
from jaxmp.engine.marks import trial_region
from jaxmp.inspect._budget import sentences
from jaxmp.inspect._budget.measurement import Budget, BudgetGroup
from jaxmp.inspect._switched.gradient_program import GradientProgram, program_of_function, program_of_step
from jaxmp.inspect._switched.sites import FLOAT64, HALF, Pair
from jaxmp.inspect._switched.switched import SwitchedProgram, results_under_policy
from jaxmp.inspect.gradient_error import LARGEST_GOOD_ERROR, percent, sentence_of_coarse_half
from jaxmp.inspect.program.calls import (
    argument_paths,
    is_step,
    require_arguments_not_deleted,
    require_policy_of,
    step_call,
    step_under_policy,
)
from jaxmp.inspect.program.function_leaves import of_arrays
from jaxmp.inspect.program.half_arguments import half_arguments, sentences_of_half_arguments
from jaxmp.inspect.status import status_of
from jaxmp.policy.policy_map import get_policy

_COLUMNS = "share", "error without", "error alone", "loss alone", "sites", "operations", "path or line"
_SHOWN = 20
_MOST_OF_A_LINE = 0.7
"""The share of a line's error that its main operations cause."""
_MOST_TRIALS = 3
"""The number of lines in which float32 is tried if no line's own roundings cause most of the error."""
_TRUSTED = 2.0
"""The factor between the error of the roundings and the measured error up to which the roundings explain it."""
_ERROR_OF_FLOAT32 = 1e-6
"""The error below which roundings to float32 explain a difference."""


@dataclass(frozen=True)
class BudgetTotal:
    """The error of a program under its policies.

    Attributes:
      loss_error: the relative error of the loss; NaN for a function without a loss.
      gradient_error: the relative L2 error of all gradients together. For a function without a loss, that of all
        results.
    """

    loss_error: float
    gradient_error: float


@dataclass(frozen=True)
class ErrorBudget(tables.Shown):
    """The error that the roundings to half precision (float16 or bfloat16) cause, by module and by line.

    All errors are measured, by runs of the program with some of its roundings.

    Attributes:
      by_path: the roundings of each module or scope. Groups that overflow in float16 come first, and then the largest
        share. Equal layers are one group. If there are many modules, those in the same parent are one group.
      by_line: the roundings of the lines of your code, in the modules that cause a notable share of the error.
      measured: the error of a run under the policy, relative to a run in float32.
      floor: the error of the gradients if only the operands of half products are rounded.
      loss: the loss in float32; NaN for a function without a loss.
      not_counted: the operations whose roundings have no switch, with the reasons. There is another entry if the
        measured error is more than twice that of the roundings, or less than half of it.
      sentences: the result in words.
      half_arguments: the names of arguments, other than params, whose values are all rounded to half precision. If a
        half program computed them, the float32 reference should not read them: their error is not measured.
    """

    by_path: tuple[BudgetGroup, ...]
    by_line: tuple[BudgetGroup, ...]
    measured: BudgetTotal
    floor: float
    loss: float
    not_counted: tuple[str, ...]
    sentences: tuple[str, ...]
    half_arguments: tuple[str, ...] = ()

    def _shown(self) -> Any:
        cells = []
        for group in [*self.by_path, *self.by_line][:_SHOWN]:
            errors = (group.error_in_float32, group.error_alone, group.loss_error_alone)
            counts = {"overflow": group.overflows, "underflow": group.underflows}
            texts = [f"{tables.short(count)} {name}" for name, count in counts.items() if count]
            operations = "; ".join([*texts, group.operations])
            shown = ["" if math.isnan(error) else f"{error:.1e}" for error in errors]
            cells.append((f"{group.share:.1%}", *shown, group.sites, operations, group.name or "outside of modules"))
        measured = self.measured
        title = f"The relative error of the gradients is {measured.gradient_error:.2e}, and of the loss "
        title += f"{measured.loss_error:.2e}; the floor is {self.floor:.2e}"
        if np.isnan(self.loss):
            title = f"The relative error of the results is {measured.gradient_error:.2e}; the floor is {self.floor:.2e}"
        notes = [f"not counted: {'; '.join(self.not_counted)}"] if self.not_counted else []
        return title, _COLUMNS, cells, [*notes, *sentences_of_half_arguments(self.half_arguments), *self.sentences]


@tool
def error_budget(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    tolerance: float | None = None,
) -> Callable[..., ErrorBudget]:
    """Measure what the roundings of each line to half precision cost.

    The program of ``fun`` under its policies, with its gradient, runs in float32. Each of its roundings has a switch.
    For each module, and then for the lines of the modules that matter, one run without their roundings shows what
    float32 would gain there, and one run with only their roundings shows what they cause alone. The last sentence of
    the result says which line to change. Its promise is measured under the very override that it names.

    Args:
      fun: a function that returns the loss (a floating scalar), or a tuple whose first element is the loss. It may also
        be a train step; then call the returned function with the step's arguments. For any other function, the errors
        are those of its floating results.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, in addition to the policies in ``fun``. Leave it
        out for a train step that was made with a policy.
        For a function that computes in float64, ``"float32"`` measures what its lines cost in float32. (Autocast
        itself leaves float64 alone.)
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      tolerance: for float64 and float32: the result names the lines that must stay float64, so that the error is
        within this tolerance if all other lines are float32.

    Returns:
      A function of ``fun``'s arguments that returns an :class:`ErrorBudget`.

    Raises:
      ValueError: the results are not floating, or not finite in float32; the program rounds nothing, or has float8
        values; ``policy`` is set for a train step that has one; or :func:`jaxmp.autocast` rejects them.
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
    require_policy_of(overrides, policy)
    is_float32 = policy is not None and getattr(get_policy(policy), "compute_dtype", None) == np.float32

    def run(*args: Any) -> ErrorBudget:
        with status_of("error budget: tracing") as status:
            if is_step(fun):
                call = step_call(step_under_policy(fun, policy, overrides), args)
                trace = functools.partial(program_of_step, call)
                plain, arrays = _arguments_of_step, (call.state.params, call.state.model_state, call.batch)
            else:
                require_arguments_not_deleted(fun, args)
                plain, arrays = of_arrays(fun, args)
                trace = functools.partial(program_of_function, plain, arrays, policy, overrides)
                if is_float32 and _has_float64(jax.tree.leaves(arrays)):
                    trace = functools.partial(program_of_function, plain, arrays, None, None)
                    return _Measurement(trace, status, FLOAT64).wide_budget(tolerance)
            if tolerance is not None:
                raise ValueError(
                    f"tolerance={tolerance} is for a float64 program under the policy 'float32', but no argument is "
                    "float64; set JAX_ENABLE_X64=1 and pass float64 arrays. For half precision, use jaxmp.inspect.tune"
                )
            rounded = half_arguments(argument_paths(plain, arrays), arrays)
            return _Measurement(trace, status).budget(rounded)

    return run


def _has_float64(leaves: Sequence[Any]) -> bool:
    return any(getattr(leaf, "dtype", None) == np.float64 for leaf in leaves)


def _message_without_roundings(program: GradientProgram) -> str:
    if _has_float64(program.inputs):
        return "this program computes in float64; pass the policy 'float32', and the allowed error as tolerance="
    return "error_budget needs a program that rounds to half precision, but this one does not; pass a half policy"


def _arguments_of_step(params: Any, model_state: Any, batch: Any) -> None:
    """Name the arguments of a train step's loss function."""


class _Measurement:
    """The measurement of a program's error budget.

    Args:
      trace: returns the program under its policies.
      status: shows the stage on the terminal.
      pair: the wide and the narrow dtype.
    """

    def __init__(self, trace: Callable[[], GradientProgram], status: Any, pair: Pair = HALF) -> None:
        self.trace, self.status = trace, status
        self.program = SwitchedProgram(trace(), pair)
        if not self.program.sites:
            raise ValueError(_message_without_roundings(self.program.program))
        self.results = "gradients" if self.program.program.has_loss else "results"

    def wide_budget(self, tolerance: float | None) -> ErrorBudget:
        """Run the program in float64 with roundings to float32, and return its budget."""
        budget = Budget(self.program)
        modules = budget.by_path()
        texts = ["Pass tolerance= to learn which lines need float64."]
        if tolerance is not None:
            self.status.update("error budget: running lines")
            needed, error = budget.lines_needed(tolerance)
            names = ", ".join(sorted(needed)) or "no line"
            texts = [
                f"For a tolerance of {tolerance:.1e}, these lines need float64: {names}. With the other lines in "
                f"float32 the error is {error:.1e}; with all lines in float32 it is {budget.error:.1e}."
            ]
        return ErrorBudget(
            by_path=tuple(modules),
            by_line=tuple(budget.by_line(modules)),
            measured=BudgetTotal(budget.loss_error, budget.error),
            floor=budget.error_with(self.program.operands_of_products),
            loss=budget.reference.loss,
            not_counted=self.program.not_counted,
            sentences=tuple(texts),
        )

    def budget(self, rounded_arguments: tuple[str, ...]) -> ErrorBudget:
        """Run the program, and return its budget."""
        self.status.update("error budget: running modules")
        budget = Budget(self.program)
        if not budget.reference.is_finite:
            raise ValueError(
                "error_budget compares with float32, but float32 is not finite on these arguments; "
                "jaxmp.inspect.first_nonfinite names the operation"
            )
        under_policy = results_under_policy(self.program.program)
        loss_error, error = under_policy.loss_error(budget.reference), under_policy.error(budget.reference)
        floor = budget.error_with(self.program.operands_of_products)
        modules = budget.by_path()
        self.status.update("error budget: running lines")
        lines = budget.by_line(modules)
        return ErrorBudget(
            by_path=tuple(modules),
            by_line=tuple(lines),
            measured=BudgetTotal(loss_error, error),
            floor=floor,
            loss=budget.reference.loss,
            not_counted=self._not_counted(budget.error, error),
            sentences=tuple(self._sentences(budget, floor, lines)),
            half_arguments=rounded_arguments,
        )

    def _not_counted(self, error: float, measured: float) -> tuple[str, ...]:
        """Return what the roundings do not explain, if the measured error differs much from theirs."""
        small, large = sorted((error, measured))
        if large <= _TRUSTED * max(small, _ERROR_OF_FLOAT32):
            return self.program.not_counted
        explained = f"the roundings cause an error of {percent(error)}, but {percent(measured)} is measured"
        return *self.program.not_counted, f"unexplained error: {explained}"

    def _sentences(self, budget: Budget, floor: float, lines: Sequence[BudgetGroup]) -> Iterator[str]:
        error, line = budget.error, lines[0]
        if not math.isfinite(error):
            yield (
                f"The error of the {self.results} is not finite under the policy; jaxmp.inspect.first_nonfinite names "
                "the operation."
            )
        elif error > LARGEST_GOOD_ERROR and floor > LARGEST_GOOD_ERROR:
            half = self.program.sites[0].dtype.name
            yield f"{sentence_of_coarse_half(half, floor)} jaxmp.inspect.tune measures the ways out."
        if sentences.is_near_floor(error, floor):
            yield sentences.sentence_of_floor(error, floor)
            return
        advised = self._advised(budget, line)
        if line.share < sentences.NOTABLE and not line.overflows:
            # An operation that reads a float32 value may become float32 too, and no group of roundings shows this.
            advised = max([advised, *(self._advised(budget, other) for other in lines[1:_MOST_TRIALS])])
            if not advised.is_enough(budget.error):
                of_products = budget.error_with(self.program.mask(lambda site: site.is_of_product))
                yield sentences.sentence_of_spread(line, error, of_products, self.results)
                return
        yield sentences.sentence_of_line(advised, error, self.results)

    def _advised(self, budget: Budget, line: BudgetGroup) -> sentences.AdviceRun:
        """Return a run under an advice about a line."""
        self.status.update("error budget: measuring the gain")
        sites = [self.program.sites[number] for number in self._main_operations(budget, line)]
        is_shared = line.name != sites[0].equation.source
        advice = sentences.advice_for(sites, self.program.sites, is_shared=is_shared)
        with trial_region(advice.covers):
            variant = self.trace()
        after = budget.error_with(self.program.mask_of(variant))
        products = {site.equation for site in self.program.sites if site.is_of_product and advice.covers(site.equation)}
        return sentences.AdviceRun(line, sites, advice, after, max(line.share, budget.share_of(after)), len(products))

    def _main_operations(self, budget: Budget, line: BudgetGroup) -> list[int]:
        """Return the sites of the operations that cause most of a line's error: as few operations as possible."""
        numbers = budget.numbers_of_line(line.name)
        equations = [site.equation for site in budget.sites]
        groups = tables.grouped(numbers, lambda number: (equations[number].path, equations[number].name))
        errors = {id(group): budget.error_without(group) for group in groups if len(groups) > 1}
        groups.sort(key=lambda group: (-budget.overflows[group].sum(), errors.get(id(group), 0.0)))
        chosen: list[int] = []
        for group in groups:
            chosen += group
            is_enough = budget.share_of(budget.error_without(chosen)) >= _MOST_OF_A_LINE * line.share
            if is_enough and not (line.overflows and budget.overflows[chosen].sum() < line.overflows):
                break
        return chosen
