"""Run a program one equation at a time, with a switch at each rounding.

Each equation is compiled separately, and equal equations share a compiled program. One program with thousands of
switches would take minutes to compile. A loop is compiled as a whole.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.rebind import in_place_of
from jaxmp.inspect._switched.evaluation import Place, SwitchedEvaluation, Switches, in_float32
from jaxmp.inspect._switched.sites import Site
from jaxmp.inspect.program.calls import options_of_few_runs
from jaxmp.inspect.program.recorded_evaluation import Records
from jaxmp.program.binding import bind_equation
from jaxmp.program.equations import Bodies, bodies_of, is_literal, opened
from jaxmp.program.values import Key
from jaxmp.program.walk import unused_after

Step = Callable[..., tuple[list[Any], Records]]
"""A compiled equation: a function of its operands and its switches that returns its results and counts."""
Sites = Mapping[Place, Site]
"""The sites of a program or an equation, by place."""


class SteppedProgram:
    """A program that runs one equation at a time.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      sites: the sites; None to run the program as it is, without switches.
      are_counted: whether to count underflows and overflows.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], sites: Sites | None, *, are_counted: bool = False) -> None:
        self._jaxpr, self._consts, self._sites, self._are_counted = jaxpr, consts, sites, are_counted
        self._places = collections.defaultdict[Key, list[Place]](list)  # of an equation, and of those in its bodies
        for place in sites or ():
            for length in range(1, len(place[0]) + 1, 2):
                self._places[place[0][:length]].append(place)
        self._steps: dict[Key, Step | None] = {}
        self._unused: dict[Any, list[list[Any]]] = {}
        self._literals: dict[int, Any] = {}

    def run(self, args: Sequence[Any], are_on: Mapping[Place, bool]) -> tuple[list[Any], Records]:
        """Return the results for arguments and switches, and the counts by the keys of equations."""
        records: Records = {}
        return self._run_body(self._jaxpr, self._consts, args, (), are_on, records), records

    def _run_body(
        self, jaxpr: Any, consts: Any, args: Any, around: Key, are_on: Mapping[Place, bool], records: Records
    ) -> list[Any]:
        if jaxpr not in self._unused:
            self._unused[jaxpr] = unused_after(jaxpr)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), map(self._widened, (*consts, *args)), strict=True))

        def read(atom: Any) -> Any:
            return self._literal(atom) if is_literal(atom) else values[atom]

        for number, (eqn, unused) in enumerate(zip(jaxpr.eqns, self._unused[jaxpr], strict=True)):
            key, operands = (*around, number), [read(atom) for atom in eqn.invars]
            if key not in self._steps:
                self._steps[key] = self._step(eqn, key)
            step = self._steps[key]
            if step is None:
                (body,) = cast(Bodies, bodies_of(eqn)).jaxprs
                results = self._run_body(*opened(body), operands, (*key, 0), are_on, records)
            else:
                results, inside = step(operands, [are_on[place] for place in self._places.get(key, ())])
                records |= {(*key, *rest): counts for (_, *rest), counts in inside.items()}
            values.update(zip(eqn.outvars, results, strict=True))
            for var in unused:
                del values[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, eqn: Any, key: Key) -> Step | None:
        """Return an equation as a compiled function; None for a call, whose body runs in its place."""
        bodies = bodies_of(eqn)
        if bodies is not None and bodies.is_call and not bodies.is_per_device:
            return None
        if self._sites is None:
            return _compiled(_Equation(eqn, None, False))
        sites = []
        for place in self._places.get(key, ()):
            sites.append((((0, *place[0][len(key) :]), place[1]), self._sites[place].dtype))
        return _compiled(_Equation(eqn, tuple(sites), self._are_counted))

    def _literal(self, atom: Any) -> Any:
        if id(atom) not in self._literals:
            self._literals[id(atom)] = self._widened(jnp.asarray(atom.val, atom.aval.dtype))
        return self._literals[id(atom)]

    def _widened(self, value: Any) -> Any:
        return value if self._sites is None else in_float32(value)


class _Equation:
    """An equation with switches, equal to others with the same primitive, params, context, types and switches.

    Attributes:
      sites: the places and dtypes of the switches; None to keep the equation as it is. The equation has the key (0,).
    """

    def __init__(self, eqn: Any, sites: tuple[tuple[Place, np.dtype], ...] | None, are_counted: bool) -> None:
        self.eqn, self.sites, self.are_counted = eqn, sites, are_counted
        types = tuple(atom.aval for atom in (*eqn.invars, *eqn.outvars))
        self.identity = eqn.primitive, tuple(eqn.params.items()), eqn.ctx, types, sites, are_counted

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equation) and self.identity == other.identity


@functools.lru_cache(maxsize=4096)
def _compiled(equation: _Equation) -> Step:
    eqn, sites = equation.eqn, equation.sites

    def apply(operands: list[Any], are_on: list[Any]) -> tuple[list[Any], Records]:
        with in_place_of(eqn):
            if sites is None:
                return bind_equation(eqn, operands, eqn.params), {}
            dtypes, switches = dict(sites), dict(zip(dict(sites), are_on, strict=True))
            evaluation = SwitchedEvaluation(Switches(dtypes, switches, are_counted=equation.are_counted))
            return evaluation.evaluate_equation(eqn, operands), evaluation.records

    return jax.jit(apply, compiler_options=options_of_few_runs())
