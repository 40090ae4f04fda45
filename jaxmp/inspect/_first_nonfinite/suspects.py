"""Search for the origin of infinities and NaNs, starting at the results."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp.inspect._first_nonfinite import stepping
from jaxmp.inspect._first_nonfinite.origins import Origin, on_host, origin_of, where_nan
from jaxmp.inspect.program.iterations import Iteration, operands_of, time_of
from jaxmp.program.equations import primitive_of
from jaxmp.program.values import Value


class Failure(NamedTuple):
    """An operation with results that are not finite."""

    name: str
    bad: set[int]  # the positions of the results that are not finite


class ProgramRun:
    """A program that was run once, operation by operation.

    Attributes:
      inputs: the leaves of the program's arguments.
      results: the leaves of the program's results.
      branches: the branches that the conditionals took.
      lengths: the number of iterations of each while loop, by the key of its equation.
      failures: the operations with results that were not finite, by equation and iteration. All iterations of a while
        loop count as one.
      origins: the origins of the failures that :meth:`look_at` examined.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._jaxpr, self._consts, self.inputs = jaxpr, consts, inputs
        self.failures: dict[stepping.At, Failure] = {}
        self.origins: dict[stepping.At, Origin] = {}

        def visit(moment: stepping.Moment, eqn: Any, operands: list[Any], results: list[Any], flags: list[Any]) -> None:
            bad = _numbers_of_bad(flags)
            if bad:
                failure = Failure(primitive_of(eqn), bad)
                self.failures.setdefault((moment.key, moment.turns), failure)

        self.results, self.branches, self.lengths = stepping.step_through(jaxpr, consts, inputs, visit)

    def look_at(self, wanted: set[stepping.At]) -> None:
        """Run the program again to find the origins of the wanted failures."""

        def visit(moment: stepping.Moment, eqn: Any, operands: list[Any], results: list[Any], flags: list[Any]) -> None:
            at = moment.key, moment.turns
            if at in wanted and at not in self.origins and _numbers_of_bad(flags):
                self.origins[at] = origin_of(primitive_of(eqn), operands, results)

        stepping.step_through(self._jaxpr, self._consts, self.inputs, visit)

    def origin(self, at: stepping.At) -> Origin:
        """Return the origin of a failure.

        If the origin is not known yet, run the program again.
        """
        if at not in self.origins:
            self.look_at({at})
        return self.origins[at]


def _numbers_of_bad(flags: Sequence[Any]) -> set[int]:
    """Return the positions of the results that are not finite."""
    return {number for number, flag in enumerate(flags) if flag is not None and np.asarray(flag) != 0}


class Rank(enum.IntEnum):
    """The order in which suspects are blamed.

    Infinite arguments and constants are often intended, so operations on finite numbers are blamed first.
    """

    BORN = 0  # an infinity or NaN that was computed from finite operands, or an argument or constant with a NaN
    ARGUMENT = 1  # an infinite argument
    MADE = 2  # a NaN that was computed from infinities
    CONSTANT = 3  # an infinite constant


class Suspect(NamedTuple):
    """A value that may be to blame, in one iteration of the scans around it.

    Attributes:
      rank: the rank of the value in the order of blame.
      value: an argument, a constant, or the result of an operation.
      turns: the iterations of the scans around the value.
      reader: for an argument or a constant, the operation that reads the value, and that operation's iterations; None
        if the program returns the value unchanged.
    """

    rank: Rank
    value: Value
    turns: Iteration
    reader: tuple[Value, Iteration] | None

    @property
    def at(self) -> stepping.At:
        """Return the key of the suspect's operation, and its iterations."""
        return self.value.key, self.turns


def first_suspect(starts: Sequence[Value], run: ProgramRun, early: set[Value]) -> Suspect | None:
    """Return the suspect to blame for values that are not finite, or None.

    A failure is an operation with non-finite results. The program must run again to find the origins of failures. To
    save runs, only the earliest failures are examined at first. The search ends when a suspect comes before all
    failures with unknown origins; usually one more run is enough. All failures of ``select_n`` are examined, because
    the search must not follow an infinity that is not selected.

    Args:
      starts: the values that are not finite.
      run: the program that was run.
      early: the values of the forward pass. Among suspects with equal rank, these values come first.
    """
    number_to_examine = 1
    while True:
        suspects, unknown = _search_back(starts, run)
        order = _order_of_suspects(suspects, early)
        first = min(suspects, key=order, default=None)
        earlier = sorted(unknown, key=order)
        if first is not None:
            earlier = [suspect for suspect in earlier if order(suspect) < order(first)]
        selections = [suspect for suspect in unknown if suspect.value.name == "select_n"]
        if not earlier and not selections:
            return first
        run.look_at({suspect.at for suspect in (*earlier[:number_to_examine], *selections)})
        number_to_examine *= 4


def _order_of_suspects(suspects: Sequence[Suspect], early: set[Value]) -> Callable[[Suspect], Any]:
    early = early | {suspect.value for suspect in suspects if not suspect.value.key}

    def order(suspect: Suspect) -> Any:
        return suspect.rank, suspect.value not in early, time_of(suspect.value, suspect.turns)

    return order


def _search_back(starts: Sequence[Value], run: ProgramRun) -> tuple[list[Suspect], list[Suspect]]:
    """Search from ``starts``; return suspects, and failures with unknown origins."""
    suspects: list[Suspect] = []
    unknown: list[Suspect] = []
    stack: list[tuple[Value, Iteration, Any]] = [(value, (), None) for value in starts]
    visited = set()
    while stack:
        value, turns, reader = stack.pop()
        if (value, turns) in visited:
            continue
        visited.add((value, turns))
        followed = None  # the numbers of the operands or branches to follow; None for all
        if not value.key:
            suspects += _suspects_of_input(value, reader, run)
        elif value.equation is None:
            followed = run.branches.get((value.key, turns))
        else:
            failure = run.failures.get((value.key, turns))
            if failure is None or value.position not in failure.bad:
                continue
            reader = value, turns
            origin = run.origins.get((value.key, turns))
            if origin is None:
                unknown.append(Suspect(Rank.BORN, value, turns, None))
            else:
                followed = {number for number, is_through in enumerate(origin.through) if is_through}
                if origin.is_born or origin.makes_nan:
                    suspects.append(Suspect(Rank.BORN if origin.is_born else Rank.MADE, value, turns, None))
        for number, source, source_turns in operands_of(value, turns):
            if followed is None or number in followed:
                stack.append((source, source_turns, reader))
    return suspects, unknown


def _suspects_of_input(value: Value, reader: Any, run: ProgramRun) -> list[Suspect]:
    """Return a list with one suspect, or an empty list if the input is finite."""
    is_argument = value.name == "argument"
    array = run.inputs[value.position] if is_argument else value.constant
    if stepping.is_finite(array):
        return []
    rank = Rank.ARGUMENT if is_argument else Rank.CONSTANT
    if where_nan(on_host(jnp.asarray(array))).any():
        rank = Rank.BORN
    return [Suspect(rank, value, (), reader)]
