"""Read a jaxpr into equations and values, across calls, scans, whiles and conditionals.

A ``Body`` has a list of ``Equation``, and an ``Equation`` has a ``Body`` for each jaxpr in it. Each result is a
``Value`` that knows its operands. ``values.py`` defines these classes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jaxmp._internals.jax.sources import Names, scopes_and_transforms
from jaxmp.program.equations import Bodies, bodies_of, is_literal, opened
from jaxmp.program.invariants import unchanged
from jaxmp.program.primitives import Trait, with_trait
from jaxmp.program.values import (
    ARGUMENT,
    BRANCHES,
    CARRY,
    CONSTANT,
    ELEMENT,
    LAST_CARRY,
    LOOP_CONSTANT,
    PART,
    STACKED,
    WHOLE,
    Body,
    Equation,
    IterationMap,
    Key,
    Program,
    Read,
    Scan,
    Value,
    same_iteration,
)
from jaxmp.program.walk import interpreted

_PER_DEVICE = with_trait(Trait.PER_DEVICE)


def _never(eqn: JaxprEqn, names: Names) -> bool:
    return False


def _no_scopes(eqn: JaxprEqn) -> Names:
    return ()


def read_program(
    jaxpr: Jaxpr,
    consts: Sequence[Any] = (),
    names: Names = (),
    counts_as_one: Callable[[Any, Names], bool] = _never,
    scopes_inside: Callable[[Any], Names] = _no_scopes,
) -> Program:
    """Return the equations and values of a program.

    Args:
      jaxpr: an open or closed jaxpr.
      consts: the constants of an open jaxpr; empty if they are unknown.
      names: the scopes around the program.
      counts_as_one: a function that returns whether an equation with bodies counts as one operation. It takes the
        equation and the scopes around it. The equations inside are then left out.
      scopes_inside: a function from an equation to scopes that are added around its bodies.
    """
    jaxpr, closed_consts = opened(jaxpr)
    consts = list(consts or closed_consts or [None] * len(jaxpr.constvars))
    reader = _Reader(counts_as_one, scopes_inside)
    inputs = [reader.add(Value(var.aval, ARGUMENT, position=n)) for n, var in enumerate(jaxpr.invars)]
    around = _Around(names=names)
    return Program(reader.body(jaxpr, consts, inputs, around), reader.values, reader.equations)


def is_whole(eqn: JaxprEqn, names: Names = ()) -> bool:
    """Return whether an equation counts as one operation although it has a body."""
    bodies = bodies_of(eqn)
    return bodies is not None and bodies.is_per_device


def is_whole_with_rules(eqn: JaxprEqn, names: Names = ()) -> bool:
    """Return whether an equation counts as one operation under differentiation.

    This is true for the equations of :func:`is_whole`, for while loops, and for calls of functions with custom
    derivative rules. If the bodies of such functions were evaluated instead, JAX would ignore the rules.
    """
    bodies = bodies_of(eqn)
    return bodies is not None and (bodies.is_per_device or bodies.has_rule or not bodies.has_gradient)


class _IterationMaps(NamedTuple):
    """The maps of iterations for values in a loop, and for results of the loop.

    Each map takes an iteration of a value, and returns the iterations of an operand that the value reads.

    Attributes:
      at_end: for the last carry. Outside the loop, it reads the last iteration.
      in_all: for a stacked output. Outside the loop, it reads all iterations.
      outside: for a constant or a scanned element. In the loop, it reads a value outside the loop.
      at_start: for a carry in the loop. In the first iteration, it reads the initial carry, outside the loop. In other
        iterations, it reads nothing.
      before: for a carry in the loop. It reads the iteration before. In the first iteration, it reads nothing.
    """

    at_end: IterationMap
    in_all: IterationMap
    outside: IterationMap
    at_start: IterationMap
    before: IterationMap


def _maps_across(scan: Scan | None) -> _IterationMaps:
    """Return the maps of iterations for a loop.

    ``scan`` is None for a while loop. A while loop counts as one iteration, because the number of its iterations is
    unknown.
    """
    if scan is None:
        return _IterationMaps(*[same_iteration] * 5)
    first, last, back = (scan.length - 1, 0, 1) if scan.reverse else (0, scan.length - 1, -1)
    return _IterationMaps(
        at_end=lambda iteration: [(*iteration, last)] if scan.length else [],
        in_all=lambda iteration: [(*iteration, index) for index in range(scan.length)],
        outside=lambda iteration: [iteration[:-1]],
        at_start=lambda iteration: [iteration[:-1]] if iteration[-1] == first else [],
        before=lambda iteration: [] if iteration[-1] == first else [(*iteration[:-1], iteration[-1] + back)],
    )


class _Around(NamedTuple):
    """The surroundings of a body.

    ``transforms`` are those of the equations around the body. JAX does not list them again in the body.
    """

    equation: Equation | None = None
    key: Key = ()
    names: Names = ()
    phase: str = "forward"
    lengths: tuple[int | None, ...] = ()
    scans: tuple[Scan, ...] = ()
    loops: tuple[Key, ...] = ()
    transforms: tuple[str, ...] = ()


class _LoopReading(NamedTuple):
    """A loop that is being read.

    Attributes:
      equation, bodies: the equation of the loop.
      scan: the iterations; None for a while loop.
      maps: the maps of iterations across the border of the loop.
      constants: the positions of the operands that no iteration changes.
      equal_loop: the first loop that computes the same from equal operands.
    """

    equation: Equation
    bodies: Bodies
    scan: Scan | None
    maps: _IterationMaps
    constants: Collection[int]
    equal_loop: Equation


def _phase(around: str, transforms: Sequence[str], has_gradients: bool) -> str:
    if around != "forward":
        return around
    if "transpose" in transforms:
        return "backward"
    return "update" if has_gradients and "jvp" not in transforms else "forward"


class _Reader:
    """A reader that collects the values of a program, body by body.

    Values with equal keys in ``first`` are equal.
    """

    def __init__(self, counts_as_one: Callable[[Any, Names], bool], scopes_inside: Callable[[Any], Names]) -> None:
        self.counts_as_one = counts_as_one
        self.scopes_inside = scopes_inside
        self.values: list[Value] = []
        self.gradients = set[Value]()  # values that are computed from gradients
        self.equations: dict[Key, Equation] = {}
        self.first: dict[Hashable, Value] = {}
        self.computations: dict[Hashable, object] = {}
        self.equal_loops: dict[Hashable, Equation] = {}  # the first loop with equal bodies and operands

    def add(self, value: Value, key: Hashable = None) -> Value:
        """Add a value. It is equal to the first value with the same key."""
        self.values.append(value)
        if key is not None:
            value.same = self.first.setdefault(key, value)
        return value

    def literal(self, atom: Any) -> Value:
        array = np.asarray(atom.val)
        value = Value(atom.aval, CONSTANT, constant=array)
        value.same = self.first.setdefault((CONSTANT, array.dtype, array.tobytes()), value)
        return value

    def body(self, jaxpr: Jaxpr, consts: list[Any], inputs: Sequence[Value], around: _Around) -> Body:
        """Read a body."""
        constants = [
            self.add(Value(var.aval, CONSTANT, constant=const), None if const is None else (CONSTANT, id(const)))
            for var, const in zip(jaxpr.constvars, consts, strict=True)
        ]
        equations: list[Equation] = []

        def read_equation(eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
            names, transforms = scopes_and_transforms(eqn)
            key = (*around.key, len(equations))
            phase = _phase(around.phase, (*around.transforms, *transforms), not self.gradients.isdisjoint(operands))
            names = (*around.names, *names)
            equation = Equation(key, eqn, names, phase, around.lengths, bodies_of(eqn), around.equation, operands)
            equations.append(equation)
            self.equations[key] = equation
            self.read_results(equation, around)
            return equation.results

        results = interpreted(jaxpr, constants, inputs, read_equation, self.literal)
        return Body(jaxpr, consts, constants, inputs, equations, results)

    def read_results(self, equation: Equation, around: _Around) -> None:
        """Read the bodies of an equation, and add its results."""
        bodies = equation.bodies
        if bodies is None or self.counts_as_one(equation.eqn, equation.names):
            self.operation(equation, around)
        elif bodies.is_per_device:
            self.shard_map(equation, bodies, around)
        elif bodies.is_call:
            equation.results = self.call(equation, equation.operands, around).results
        elif bodies.is_conditional:
            self.conditional(equation, bodies, around)
        else:
            self.loop(equation, bodies, around)

    def inside(self, equation: Equation, number: int, inputs: Sequence[Value], around: _Around) -> Body:
        """Read a body of an equation."""
        assert equation.bodies is not None
        _, transforms = scopes_and_transforms(equation.eqn)
        here = around._replace(
            equation=equation,
            transforms=(*around.transforms, *transforms),
            key=(*equation.key, number),
            names=(*equation.names, *self.scopes_inside(equation.eqn)),
            lengths=(*equation.lengths, equation.bodies.length) if equation.bodies.is_loop else equation.lengths,
        )
        body = self.body(*opened(equation.bodies.jaxprs[number]), inputs, here)
        equation.inside = (*equation.inside, body)
        return body

    def call(self, equation: Equation, inputs: Sequence[Value], around: _Around) -> Body:
        # A call that reads gradients may have equations that read none, so each equation gets its own phase.
        phase = "backward" if equation.phase == "backward" else around.phase
        return self.inside(equation, 0, inputs, around._replace(phase=phase))

    def shard_map(self, equation: Equation, bodies: Bodies, around: _Around) -> None:
        """Read a body that has parts of the arrays. A part is never the same as another value."""
        parts = []
        for operand, var in zip(equation.operands, opened(bodies.jaxprs[0])[0].invars, strict=True):
            reads: list[Read] = [(0, operand, same_iteration)]
            part = Value(var.aval, PART, equation.key, None, -1, around.scans, around.loops, None, reads)
            parts.append(self.add(part))
            if operand in self.gradients:
                self.gradients.add(part)
        results = []
        for n, value in enumerate(self.call(equation, parts, around).results):
            result = self.result(equation, WHOLE, n, [(0, value, same_iteration)], around, None)
            if value in self.gradients:
                self.gradients.add(result)
            results.append(result)
        equation.results = results

    def operation(self, equation: Equation, around: _Around) -> None:
        """Add the results of an equation that counts as one operation."""
        eqn, operands = equation.eqn, equation.operands
        for operand in operands:
            if operand.outer.reader is None:
                operand.outer.reader = equation
        computation = (self.computation_of(eqn), *[operand.same for operand in operands])
        results = []
        for n, var in enumerate(eqn.outvars):
            value = Value(var.aval, equation.name, equation.key, equation, n, around.scans, around.loops)
            results.append(self.add(value, (*computation, n)))
        equation.results = results
        if equation.phase != "forward":
            self.gradients.update(results)

    def computation_of(self, eqn: JaxprEqn) -> object:
        """Return the same object for operations that compute the same from equal operands."""
        computation = object()
        if eqn.effects:  # a callback may return other numbers each time
            return computation
        try:
            return self.computations.setdefault(_operation_of(eqn), computation)
        except TypeError:  # a parameter is not hashable
            return computation

    def result(
        self, equation: Equation, name: str, position: int, reads: list[Read], around: _Around, key: Hashable
    ) -> Value:
        """Add a result of a loop or a conditional."""
        aval = equation.eqn.outvars[position].aval
        value = Value(aval, name, equation.key, None, position, around.scans, around.loops, None, reads)
        if equation.phase != "forward":
            self.gradients.add(value)
        return self.add(value, key)

    def conditional(self, equation: Equation, bodies: Bodies, around: _Around) -> None:
        count, (index, *inputs) = len(bodies.jaxprs), equation.operands
        inside = around._replace(phase=equation.phase)
        # In a branch, values from outside do not count as gradients.
        gradients, self.gradients = self.gradients, set()
        branches = [self.inside(equation, number, inputs, inside).results for number in range(count)]
        of_branches, self.gradients = self.gradients, gradients
        results = []
        for n in range(len(equation.eqn.outvars)):
            reads: list[Read] = [(count, index, same_iteration)]
            reads += [(number, branch[n], same_iteration) for number, branch in enumerate(branches)]
            key = (BRANCHES, *[value.same for _, value, _ in reads])
            value = self.result(equation, BRANCHES, n, reads, around, key)
            if not of_branches.isdisjoint([branch[n] for branch in branches]):
                self.gradients.add(value)
            results.append(value)
        equation.results = results

    def loop(self, equation: Equation, bodies: Bodies, around: _Around) -> None:
        """Read a loop.

        A while loop counts as one iteration. The values of its condition are not operands of its results.
        """
        last = len(bodies.jaxprs) - 1
        scan = None
        if bodies.length is not None:
            scan = Scan(len(equation.key), bodies.reverse, bodies.length)
        scans = around.scans if scan is None else (*around.scans, scan)
        inside = around._replace(phase=equation.phase, scans=scans, loops=(*around.loops, (*equation.key, last)))
        in_condition = inside._replace(loops=(*around.loops, (*equation.key, 0)))
        computation = (_computation_of(equation.eqn), *[operand.same for operand in equation.operands])
        equal_loop = self.equal_loops.setdefault(computation, equation)
        constants = {bodies.start + n for n in unchanged(bodies)}.union(range(bodies.start))
        loop = _LoopReading(equation, bodies, scan, _maps_across(scan), constants, equal_loop)
        entered = self.enter_loop(loop, inside)
        for number in range(last):
            self.inside(equation, number, bodies.inputs(number, entered), in_condition)
        body = self.inside(equation, last, bodies.inputs(last, entered), inside)
        equation.results = self.leave_loop(loop, entered, body.results, around)

    def enter_loop(self, loop: _LoopReading, inside: _Around) -> list[Value]:
        """Return the values that enter the body of a loop: constants, carries, and elements of scanned arrays."""
        equation, bodies, maps = loop.equation, loop.bodies, loop.maps

        def entering(name: str, aval: Any, operand: Value, map_iteration: IterationMap) -> Value:
            reads = [(0, operand, map_iteration)]
            return Value(aval, name, equation.key, None, -1, inside.scans, inside.loops, None, reads)

        avals = [atom.aval for atom in equation.eqn.invars[: bodies.carries.stop]]
        avals += [var.aval for var in opened(bodies.jaxprs[-1])[0].invars[bodies.carries.stop - bodies.consts :]]
        entered = []
        for n, (operand, aval) in enumerate(zip(equation.operands, avals, strict=True)):
            if n in loop.constants:
                value = entering(LOOP_CONSTANT, aval, operand, maps.outside)
                value.same = operand.same
            elif n in bodies.carries:
                value = self.add(entering(CARRY, aval, operand, maps.at_start), (CARRY, n, loop.equal_loop))
            else:
                key = (ELEMENT, operand.same, bodies.reverse)
                value = self.add(entering(ELEMENT, aval, operand, maps.outside), key)
            entered.append(value)
        return entered

    def leave_loop(
        self, loop: _LoopReading, entered: Sequence[Value], returned: Sequence[Value], around: _Around
    ) -> list[Value]:
        """Return the results of a loop: constants, last carries, and stacked arrays.

        Args:
          loop: the loop.
          entered: the values that entered the body. Each carry also reads what the body returns for it.
          returned: the results of the body.
          around: the place of the loop.
        """
        equation, bodies, maps = loop.equation, loop.bodies, loop.maps
        may_not_run = loop.scan is None or not loop.scan.length
        results = []
        for n, value in enumerate(returned):
            place = bodies.start + n
            if place in loop.constants:
                results.append(equation.operands[place])
                continue
            reads = [(1, value, maps.in_all)]
            if place in bodies.carries:
                entered[place].reads.append((1, value, maps.before))
                before = [(0, equation.operands[place], same_iteration)] if may_not_run else []
                reads = [*before, (1, value, maps.at_end)]
            name = LAST_CARRY if place in bodies.carries else STACKED
            result = self.result(equation, name, n, reads, around, (n, loop.equal_loop))
            if value in self.gradients:
                self.gradients.add(result)
            results.append(result)
        return results


def _operation_of(eqn: JaxprEqn) -> Hashable:
    return eqn.primitive.name, *eqn.params.values()


def _computation_of(eqn: JaxprEqn) -> Hashable:
    """Return a key that is equal for equations that compute the same from equal operands.

    Equal bodies have equal keys, even if they are different jaxprs.
    """
    if eqn.effects:
        return object()
    bodies = bodies_of(eqn)
    if bodies is not None and eqn.primitive.name not in _PER_DEVICE:
        inner = [(_structure_of(jaxpr), *map(id, consts)) for jaxpr, consts in map(opened, bodies.jaxprs)]
        roles = bodies.length, bodies.reverse, bodies.consts, bodies.start, bodies.carry
        return bodies.primitive, *roles, *inner
    try:
        hash(_operation_of(eqn))
    except TypeError:
        return object()
    return _operation_of(eqn)


def _structure_of(jaxpr: Jaxpr) -> Hashable:
    """Return a key that is equal for open jaxprs with equal equations."""
    if jaxpr not in _STRUCTURES:
        numbers = {var: n for n, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

        def number_of(atom: Any) -> Hashable:
            if is_literal(atom):
                array = np.asarray(atom.val)
                return array.dtype, array.tobytes()
            return numbers[atom]

        equations = []
        for eqn in jaxpr.eqns:
            equations.append((_computation_of(eqn), *map(number_of, eqn.invars)))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
        _STRUCTURES[jaxpr] = (*equations, tuple(map(number_of, jaxpr.outvars)))
    return _STRUCTURES[jaxpr]


_STRUCTURES: Any = weakref.WeakKeyDictionary()  # equal layers share a jaxpr
