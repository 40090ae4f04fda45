"""Run a program and measure what each of its roundings changes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.inspect._budget import rounding
from jaxmp.inspect._budget.gradient_program import GradientProgram
from jaxmp.inspect._budget.sites import Site
from jaxmp.inspect._budget.tapped_evaluation import Changes, evaluate_wide
from jaxmp.inspect.program.calls import in_double_precision, options_of_few_runs
from jaxmp.program.equations import evaluate
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.values import Key

_FEWER_BYTES = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""The compiler option with which XLA orders the operations so that they need less memory, not to run them together."""


class RoundedOperands(enum.IntEnum):
    """The half products whose operands are rounded, beside the casts among the sites."""

    NONE = 0
    OF_CHOSEN = 1
    """Those whose result is rounded."""
    OF_ALL = 2


@dataclass(frozen=True, eq=False)
class Effects:
    """The effect of each site on the results of a program, to first order.

    Each array has one number for each site; ``changes`` has the shape (directions, sites).

    Attributes:
      loss_changes: the signed change of the loss.
      changes: the change of the other results along random directions of normal numbers. The mean of the squares
        estimates the squared L2 norm of the change.
      parts: the change of the other results along the direction of a known error; see :meth:`BudgetRun.together`.
      underflows, overflows: the numbers of elements that underflow and overflow.
    """

    loss_changes: np.ndarray
    changes: np.ndarray
    parts: np.ndarray
    underflows: np.ndarray
    overflows: np.ndarray


class BudgetRun:
    """The runs of a program that measure the effects of its sites.

    All runs use one compiled program.

    Attributes:
      gaps: the reasons why errors do not pass through an equation, by the equation's key; known after the first run.
    """

    def __init__(self, program: GradientProgram, sites: Sequence[Site], probes: int, seed: int) -> None:
        self.program, self.sites, self.gaps = program, sites, dict[Key, str]()
        self._numbers = {site.place: number for number, site in enumerate(sites)}
        self._probes, self._key = probes, jax.random.key(seed)
        self._loss_passes = [0] if program.has_loss else []
        options = options_of_few_runs()
        if jax.default_backend() == "cpu":
            options = options | _FEWER_BYTES
        self._tapped_run = jax.jit(self._results_and_summaries, compiler_options=options)

    def results(self, rounded: Collection[int], operands: RoundedOperands = RoundedOperands.NONE) -> list[np.ndarray]:
        """Return the results if only the sites with these numbers are rounded, and all others are float32."""
        return self._run(rounded, (), operands=operands)[0]

    def alone(self) -> tuple[list[np.ndarray], Effects]:
        """Return the results in float32, and the effect of each site if it alone is rounded."""
        results, summaries = self._run((), [*self._loss_passes, *range(1, 1 + self._probes)])
        return results, self._effects_of(summaries)

    def together(self, rounded: Collection[int], error: Sequence[np.ndarray]) -> Effects:
        """Return the effect of each site if the sites with these numbers are rounded.

        Only ``loss_changes`` and ``parts`` are computed. ``error`` is an error of the results, without the loss. The
        parts of the sites add up to its L2 norm, if the roundings explain it.
        """
        size = norm(error)
        direction = [array / size if size else array for array in error]
        _, summaries = self._run(rounded, [*self._loss_passes, 1 + self._probes], direction)
        return self._effects_of(summaries)

    def _run(
        self,
        rounded: Collection[int],
        passes: Collection[int],
        direction: Sequence[np.ndarray] = (),
        operands: RoundedOperands = RoundedOperands.NONE,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the results, and the summaries of all sites for each of the backward passes in ``passes``."""
        avals = self.program.others
        direction = direction or [np.zeros(aval.shape) for aval in avals]
        along = [np.asarray(array, aval.dtype) for array, aval in zip(direction, avals, strict=True)]
        is_rounded, is_wanted = np.zeros(len(self.sites), np.float32), np.zeros(2 + self._probes, bool)
        is_rounded[list(rounded)] = 1
        is_wanted[list(passes)] = True
        arguments = along, is_rounded, is_wanted, int(operands), self._key
        results, summaries = self._call(self._tapped_run, *arguments)
        return list(results), summaries

    def _effects_of(self, summaries: np.ndarray) -> Effects:
        largest = summaries.max(axis=0)  # each pass has the same counts; a pass that did not run has zeros
        counts = np.zeros((2, len(self.sites)))
        first = []  # the position of each site's change
        position = 0
        for number, site in enumerate(self.sites):
            first.append(position)
            size = rounding.sink_of(site.dtype).size
            counts[: size - 1, number] = largest[position + 1 : position + size]
            position += size
        loss_changes, *changes, parts = summaries[:, first]
        return Effects(loss_changes, np.array(changes), parts, *counts)

    def _results_and_summaries(
        self,
        consts: Any,
        inputs: Any,
        direction: Any,
        is_rounded: Any,
        is_wanted: Any,
        rounded_operands: Any,
        key: Any,
    ) -> Any:
        """Return the results, and the summaries of all sites for each backward pass.

        The first pass is for the loss, the last one along ``direction``, and the others along random directions.
        """
        masks = [number.reshape(()) for number in jax.lax.split(is_rounded, [1] * is_rounded.size)]

        def results_of(sinks: Sequence[Any]) -> list[Any]:
            def at_site(number: int, value: Any) -> Any:
                return rounding.tap(self.sites[number].dtype, value, masks[number], sinks[number])

            def at_site_without_gradient(number: int, value: Any) -> Any:
                return rounding.round_if(masks[number] == 1, self.sites[number].dtype, value)

            def at_operand(key: Key, eqn: Any, number: int | None, dtype: np.dtype, value: Any) -> Any:
                if eqn.primitive.name not in PRODUCTS:
                    return value
                is_chosen = number is None or masks[number] == 1
                is_rounded = (rounded_operands == RoundedOperands.OF_CHOSEN) & is_chosen
                return rounding.round_if(is_rounded | (rounded_operands == RoundedOperands.OF_ALL), dtype, value)

            changes = Changes(self._numbers, at_site, at_site_without_gradient, at_operand)
            return evaluate_wide(self.program.jaxpr, consts, inputs, changes, self.gaps)

        sinks = [rounding.sink_of(site.dtype) for site in self.sites]
        results, pull_back = jax.vjp(results_of, sinks)

        def summaries_of(cotangents: Any) -> Any:
            (summaries,) = pull_back(cotangents)
            return jnp.concatenate(summaries)

        def summaries_if_wanted(number: Any) -> Any:
            zeros = jnp.zeros(sum(sink.size for sink in sinks))
            # Inside of the branch, XLA would draw the numbers again in each kernel that reads a cotangent.
            cotangents = self._cotangents(results, number, key, direction)
            return jax.lax.cond(is_wanted[number], summaries_of, lambda _: zeros, cotangents)

        return results, jax.lax.map(summaries_if_wanted, jnp.arange(2 + self._probes))

    def _cotangents(self, results: Sequence[Any], number: Any, key: Any, direction: Sequence[Any]) -> list[Any]:
        """Return the cotangents of all results in a backward pass."""
        key = jax.random.fold_in(key, number)
        is_loss, is_last = number == 0, number == 1 + self._probes
        others, cotangents = results, []
        if self.program.has_loss:
            others, cotangents = results[1:], [jnp.where(is_loss, 1, 0).astype(results[0].dtype)]
        for position, (result, along) in enumerate(zip(others, direction, strict=True)):
            drawn = _normal(jax.random.fold_in(key, position), result)
            cotangent = jnp.where(is_last, along.astype(drawn.dtype), drawn)
            cotangents.append(jnp.where(is_loss, 0, cotangent).astype(result.dtype))
        return cotangents

    def _call(self, run: Any, *arguments: Any) -> Any:
        return _call(self.program, run, *arguments)


def results_of(program: GradientProgram) -> list[np.ndarray]:
    """Return the results of a program under its policies."""
    run = jax.jit(functools.partial(evaluate, program.jaxpr), compiler_options=options_of_few_runs())
    results: list[np.ndarray] = _call(program, run)
    return results


def _call(program: GradientProgram, run: Any, *arguments: Any) -> Any:
    with program.context(), jax.default_matmul_precision("highest"):
        results = run(program.consts, program.inputs, *arguments)
    return jax.tree.map(in_double_precision, results)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Return the L2 norm of all arrays together."""
    return float(np.sqrt(sum(float(np.sum(np.abs(array) ** 2)) for array in arrays)))


def _normal(key: Any, like: Any) -> Any:
    """Return normal numbers with unit variance, also for each part of complex numbers."""
    if jnp.iscomplexobj(like):
        return jax.lax.complex(*jax.random.normal(key, (2, *like.shape), jnp.float32))
    return jax.random.normal(key, like.shape, jnp.float32)
