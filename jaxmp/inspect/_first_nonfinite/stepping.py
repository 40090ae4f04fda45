"""Run a program one equation at a time, and flag results that are not finite.

The flag of a floating result is 0 if all elements are finite, else NaN.

Each equation is compiled separately, and equal equations share a compiled program, so only distinct equations take
compile time. In one program with the flags of all equations, XLA would recompute long chains of operations for each
flag.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmp._internals.jax.rebind import in_place_of
from jaxmp.base.trees import zero_if_finite
from jaxmp.inspect.compiled.meshes import mesh_of
from jaxmp.inspect.program.calls import AS_WRITTEN, is_inexact
from jaxmp.program.binding import bind_equation
from jaxmp.program.equations import aval_of, bodies_of, is_literal, opened
from jaxmp.program.reading import is_whole
from jaxmp.program.running import run_bodies
from jaxmp.program.values import Key
from jaxmp.program.walk import unused_after


class Moment(NamedTuple):
    """An equation and the time at which it runs.

    Attributes:
      key: the position of the equation, as in :class:`jaxmp.program.values.Equation`.
      turns: the iteration of each scan around the equation, as an index into the inputs of the scan, outermost first.
    """

    key: Key = ()
    turns: tuple[int, ...] = ()

    def inside(self, number: int) -> Moment:
        """Return a moment with ``number`` at the end of the key.

        ``number`` is the index of a body in an equation, or of an equation in a body.
        """
        return self._replace(key=(*self.key, number))


Visit = Callable[[Moment, Any, list[Any], list[Any], list[Any]], None]
At = tuple[Key, tuple[int, ...]]
"""The key of an equation, and the iteration of each scan around it."""
Branches = dict[At, set[int]]
"""The branches that each conditional took, by key and iterations. A conditional in a while loop may take several."""


class Stepped(NamedTuple):
    """A run of a program one equation at a time.

    Attributes:
      results: the results.
      branches: the branches that the conditionals took.
      lengths: the largest number of iterations of each while loop that ran, by the key of its equation.
    """

    results: list[Any]
    branches: Branches
    lengths: dict[Key, int]


def step_through(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], visit: Visit) -> Stepped:
    """Run an open jaxpr.

    After each operation, ``visit`` is called with the moment, the equation, its operands, its results, and a flag for
    each result. The flag is None for results that are not floating.
    """
    mesh = mesh_of((*consts, *args))
    stepping = _Stepping(visit, waits=mesh is not None)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        results = stepping.body(jaxpr, consts, args, Moment())
    return Stepped(results, stepping.branches, stepping.lengths)


class _Stepping:
    """A run of a program one equation at a time."""

    def __init__(self, visit: Visit, waits: bool) -> None:
        self.visit = visit
        self.waits = waits
        self.branches: Branches = {}
        self.lengths: dict[Key, int] = {}
        self.compiled: dict[Key, Callable[..., Any]] = {}
        self.unused: dict[Any, list[list[Any]]] = {}

    def body(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], around: Moment) -> list[Any]:
        if jaxpr not in self.unused:
            self.unused[jaxpr] = unused_after(jaxpr)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, aval_of(atom).dtype) if is_literal(atom) else values[atom]

        for number, (eqn, unused) in enumerate(zip(jaxpr.eqns, self.unused[jaxpr], strict=True)):
            results = self.equation(eqn, [read(atom) for atom in eqn.invars], around.inside(number))
            values.update(zip(eqn.outvars, results, strict=True))
            for var in unused:
                del values[var]
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[Any], moment: Moment) -> list[Any]:
        bodies = bodies_of(eqn)
        if bodies is None or is_whole(eqn) or bodies.length == 0:
            return self.operation(eqn, operands, moment)

        def run(number: int, inputs: list[Any], turn: int) -> list[Any]:
            inside = moment
            if bodies.is_conditional:
                self.branches.setdefault((moment.key, moment.turns), set()).add(number)
            elif bodies.is_loop and bodies.length is not None:
                inside = moment._replace(turns=(*moment.turns, turn))
            elif bodies.is_loop:  # the condition also runs after the last iteration
                self.lengths[moment.key] = max(self.lengths.get(moment.key, 0), turn + number)
            return self.body(*opened(bodies.jaxprs[number]), inputs, inside.inside(number))

        return run_bodies(bodies, operands, run)

    def operation(self, eqn: Any, operands: list[Any], moment: Moment) -> list[Any]:
        if moment.key not in self.compiled:
            self.compiled[moment.key] = compiled_operation(Operation(eqn))
        typed = [_typed_as(atom.aval, operand) for atom, operand in zip(eqn.invars, operands, strict=True)]
        results, flags = self.compiled[moment.key](*typed)
        if self.waits:  # on a CPU, collectives of two programs in flight may wait for each other's threads
            jax.block_until_ready((results, flags))
        self.visit(moment, eqn, operands, results, flags)
        return results


class Operation:
    """An equation, equal to others with the same primitive, params and context."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn
        self.identity = (eqn.primitive, tuple(eqn.params.items()), eqn.ctx)

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and self.identity == other.identity


@functools.lru_cache(maxsize=1024)
def compiled_operation(operation: Operation) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Return an operation as a compiled function of its operands.

    The function returns the results and their flags.
    """
    eqn = operation.eqn

    def apply(*operands: Any) -> tuple[list[Any], list[Any]]:
        with in_place_of(eqn):
            results = bind_equation(eqn, operands, eqn.params)
        return results, _flags_of(results)

    return jax.jit(apply, compiler_options=AS_WRITTEN)


def is_finite(value: Any) -> bool:
    """Return whether all elements of a value are finite; True for integers."""
    return not is_inexact(value) or bool(np.asarray(jax.jit(_finite_flag)(value)) == 0)


def _flags_of(results: Sequence[Any]) -> list[Any]:
    """Return a flag for each result; None for results that are not floating."""
    return [_finite_flag(result) if is_inexact(result) else None for result in results]


def _finite_flag(value: Any) -> jax.Array:
    """Return 0 if all elements are finite, else NaN."""
    with jax.sharding.use_abstract_mesh(jax.typeof(value).sharding.mesh):  # with the axis types of the value
        return zero_if_finite(value)


def _typed_as(aval: Any, value: Any) -> Any:
    """Return an array on a mesh with the axis types that ``aval`` has.

    ``jax.jit`` may have changed the axis types.
    """
    sharding = getattr(value, "sharding", None)
    wanted = getattr(getattr(aval, "sharding", None), "mesh", None)
    if wanted is None or wanted.empty or not isinstance(sharding, NamedSharding):
        return value
    mesh = sharding.mesh
    if mesh.axis_types == wanted.axis_types or mesh.axis_names != wanted.axis_names:
        return value
    retyped = Mesh(mesh.devices, mesh.axis_names, axis_types=wanted.axis_types)
    return jax.device_put(value, NamedSharding(retyped, sharding.spec))
