"""Predict the errors of a function under overrides, with one compiled program for all overrides."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._internals.jax.sources import origin_of
from jaxmp.engine.plan import PlanRow, cast_plan
from jaxmp.inspect._budget.gradient_program import program_of_function
from jaxmp.inspect._budget.rounding import round_if
from jaxmp.inspect._budget.sites import SUM_OF_COTANGENTS, has_float8, sites_of
from jaxmp.inspect._budget.tapped_evaluation import Changes, evaluate_wide
from jaxmp.inspect.program.calls import in_double_precision, named, options_of_few_runs
from jaxmp.inspect.program.tracing import program_of
from jaxmp.policy.policies import Policy
from jaxmp.program.equations import aval_of, evaluate
from jaxmp.program.reading import read_program
from jaxmp.program.values import Equation, Key, Value

_HALF = {"float16", "bfloat16"}


def named_copy(args: Sequence[Any]) -> Any:
    """Return a copy of arguments in which each call of an NNX module has a scope."""
    leaves, structure = jax.tree.flatten(tuple(args))
    return named(jax.tree.unflatten(structure, leaves))


def is_half_operation(row: PlanRow) -> bool:
    """Return whether an operation of a plan has a half operand or result."""
    return not _HALF.isdisjoint([*row.operands, *row.result.split(", ")])


def _has_half_result(row: PlanRow) -> bool:
    return not _HALF.isdisjoint(row.result.split(", "))


class _Operation(NamedTuple):
    """An operation of the forward pass, or the operations of the backward pass that JAX makes from it.

    Attributes:
      origin: the number of :func:`origin_of`. All calls of a function that JAX traces once have the same numbers.
      path: the path of the module or scope of the call.
    """

    origin: int
    path: str


class _Switch(NamedTuple):
    """A switch for the roundings of an operation, or of a sum of cotangents.

    Attributes:
      operation: the operation. For a sum, it is an operation that reads the value.
      shape: the shape of the value whose cotangents are summed; None for an operation.
    """

    operation: _Operation
    shape: tuple[int, ...] | None


def _operation_of(equation: Equation) -> _Operation:
    return _Operation(origin_of(equation.eqn), equation.path)


def _switch_of(equation: Equation) -> _Switch:
    is_sum = equation.name == SUM_OF_COTANGENTS
    return _Switch(_operation_of(equation), aval_of(equation.eqn.outvars[0]).shape if is_sum else None)


class _Summed(NamedTuple):
    """A value that several operations read, so that their cotangents are summed.

    Attributes:
      producer: the number of the equation that computes the value.
      readers: the numbers of the equations that read it.
    """

    producer: int
    readers: list[int]


def _summed_values(equations: Sequence[Equation]) -> Mapping[tuple[int, tuple[int, ...]], list[_Summed]]:
    """Return the values that several equations read.

    The keys are the number of each reader and the shape of the value.
    """
    numbers = {equation.key: number for number, equation in enumerate(equations)}
    readers = collections.defaultdict[Value, list[int]](list)
    for number, equation in enumerate(equations):
        for operand in equation.operands:
            readers[operand].append(number)
    summed = collections.defaultdict[tuple[int, tuple[int, ...]], list[_Summed]](list)
    for value, read_by in readers.items():
        if len(read_by) < 2 or value.key not in numbers:
            continue
        for number in dict.fromkeys(read_by):
            summed[number, value.shape].append(_Summed(numbers[value.key], read_by))
    return summed


def _is_sum_half(value: _Summed, reader: int, rows: Sequence[PlanRow]) -> bool:
    """Return whether the cotangent that a reader adds is added in half precision.

    The cotangents of a half value are added in half, also those of float32 readers. The half readers of a float32 value
    share a cast, and their cotangents are added in half.
    """
    half_readers = sum(is_half_operation(rows[other]) for other in value.readers)
    return _has_half_result(rows[value.producer]) or (is_half_operation(rows[reader]) and half_readers > 1)


class Prediction:
    """The loss and the gradients under overrides, without a compilation for each.

    The program under the half policy runs in float32, with a switch for the roundings of each operation: those of its
    operands, its results and its derivatives. Overrides change the plan of autocast. If an operation is no longer half
    in the plan, its switch is turned off.

    Args:
      plain: the function without policies.
      args: its arguments.
      half: the half policy.
      loss_scale: the factor by which the loss is multiplied before the differentiation.
    """

    def __init__(self, plain: Callable[..., Any], args: Sequence[Any], half: Policy, loss_scale: float) -> None:
        self._args, self._half, self._loss_scale = args, half, loss_scale
        jaxpr, consts, _ = program_of(plain, *named_copy(args))
        equations = sorted(read_program(jaxpr, consts).equations.values(), key=lambda equation: equation.key)

        def loss_of(*args: Any) -> Any:
            return evaluate(jaxpr, consts, jax.tree.leaves(args))[0]

        self._loss_of = loss_of
        self._rows = self._plan({})
        self._rows_of = collections.defaultdict[_Operation, list[int]](list)
        for number, equation in enumerate(equations):
            self._rows_of[_operation_of(equation)].append(number)
        self._program = program_of_function(loss_of, args, half, None, loss_scale)
        read = read_program(self._program.jaxpr, self._program.consts)
        names = [equation.name for equation in equations]
        self.is_possible = names == [row.primitive for row in self._rows] and not has_float8(read)
        sites = sites_of(read)
        self._dtypes = [site.dtype for site in sites]
        self._sites = {site.place: number for number, site in enumerate(sites)}
        self._switch_at = {key: _switch_of(equation) for key, equation in read.equations.items()}
        self._switches = [self._switch_at[site.place[0]] for site in sites]
        self._position = {switch: position for position, switch in enumerate(dict.fromkeys(self._switches))}
        self._summed = _summed_values(equations)
        self._run = jax.jit(self._results, compiler_options=options_of_few_runs())

    def results(self, overrides: Mapping[str, str]) -> tuple[float, np.ndarray]:
        """Return the loss and the gradients, as one vector, under overrides."""
        rows = self._plan(overrides)
        are_on = np.array([self._is_on(switch, rows) for switch in self._position], bool)
        with jax.default_matmul_precision("highest"):
            loss, *gradients = self._run(self._program.consts, self._program.inputs, are_on)
        flat = [in_double_precision(leaf).ravel() / self._loss_scale for leaf in gradients]
        return float(loss), np.concatenate(flat)

    def _plan(self, overrides: Mapping[str, str]) -> Sequence[PlanRow]:
        return cast_plan(self._loss_of, self._half, overrides)(*self._args).rows

    def _is_on(self, switch: _Switch, rows: Sequence[PlanRow]) -> bool:
        """Return whether a switch is on under a plan. It is on without overrides."""
        numbers = self._rows_of[switch.operation]
        is_known = any(self._rounds(switch, number, self._rows) for number in numbers)
        return not is_known or any(self._rounds(switch, number, rows) for number in numbers)

    def _rounds(self, switch: _Switch, number: int, rows: Sequence[PlanRow]) -> bool:
        """Return whether an operation rounds under a plan.

        An operation that is float32 without overrides rounds if it reads a half value, because the cotangent of this
        value is half.
        """
        summed = () if switch.shape is None else self._summed.get((number, switch.shape), ())
        if summed:
            return any(_is_sum_half(value, number, rows) for value in summed)
        if is_half_operation(self._rows[number]):
            return is_half_operation(rows[number])
        return any(_has_half_result(rows[other]) for other in rows[number].reads)

    def _results(self, consts: Any, inputs: Any, are_on: Any) -> list[Any]:
        """Return the loss and the gradients. ``are_on`` says which switches are on."""

        def at_site(number: int, value: Any) -> Any:
            return round_if(are_on[self._position[self._switches[number]]], self._dtypes[number], value)

        def at_operand(key: Key, eqn: Any, number: int | None, dtype: np.dtype, value: Any) -> Any:
            position = self._position.get(self._switch_at[key])
            return value if position is None else round_if(are_on[position], dtype, value)

        return evaluate_wide(
            self._program.jaxpr, consts, inputs, Changes(self._sites, at_site, at_site, at_operand), {}
        )
