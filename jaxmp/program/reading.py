"""Read a jaxpr into equations and values, across calls, scans, whiles and conditionals.

A ``Body`` has a list of ``Equation``, and an ``Equation`` has a ``Body`` for each jaxpr in it. Each result is a
``Value`` that knows its operands. ``values.py`` defines these classes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._internals.jax.sources import Names, scopes_and_transforms
from jaxmp.program.equations import Bodies, bodies_of, is_literal, opened
from jaxmp.program.invariants import unchanged
from jaxmp.program.primitives import Trait, with_trait
from jaxmp.program.values import (
    ARGUMENT,
    BRANCHES,
    CARRY,
    CONSTANT,
    LAST_CARRY,
    LOOP_CONSTANT,
    TURN,
    TURNS,
    Body,
    Equation,
    Key,
    Program,
    Read,
    Scan,
    TurnMap,
    Turns,
    Value,
)
from jaxmp.program.walk import interpreted

_ONE_BY_ONE = with_trait(Trait.IDENTITY)
"""Operations whose nth result depends only on the nth operand."""
_PER_DEVICE = with_trait(Trait.PER_DEVICE)


def _never(eqn: Any, names: Names) -> bool:
    return False


def _no_scopes(eqn: Any) -> Names:
    return ()


def read_program(
    jaxpr: Any,
    consts: Sequence[Any] = (),
    names: Names = (),
    is_whole: Callable[[Any, Names], bool] = _never,
    scopes_inside: Callable[[Any], Names] = _no_scopes,
) -> Program:
    """Return the equations and values of a program.

    Args:
      jaxpr: an open or closed jaxpr.
      consts: the constants of an open jaxpr; empty if they are unknown.
      names: the scopes around the program.
      is_whole: a function that returns whether an equation with bodies counts as one operation. It takes the equation
        and the scopes around it. The equations inside are then left out.
      scopes_inside: a function from an equation to scopes that are added around its bodies.
    """
    jaxpr, closed_consts = opened(jaxpr)
    consts = list(consts or closed_consts or [None] * len(jaxpr.constvars))
    reader = _Reader(is_whole, scopes_inside)
    inputs = [reader.add(Value(var.aval, ARGUMENT, position=n)) for n, var in enumerate(jaxpr.invars)]
    around = _Around(names=names)
    body, _ = reader.body(jaxpr, consts, [_Read(value) for value in inputs], around)
    return Program(body, reader.values, reader.equations)


def is_whole(eqn: Any, names: Names = ()) -> bool:
    """Return whether an equation counts as one operation although it has a body."""
    return bool(eqn.primitive.name == "shard_map")


def is_whole_with_rules(eqn: Any, names: Names = ()) -> bool:
    """Return whether an equation counts as one operation under differentiation.

    This is true for the equations of :func:`is_whole`, for while loops, and for calls of functions with custom
    derivative rules. If the bodies of such functions were evaluated instead, JAX would ignore the rules.
    """
    return is_whole(eqn) or eqn.primitive.name == "while" or eqn.primitive.name.startswith("custom_")


def turns_of(eqn: Any) -> tuple[int | None, ...]:
    """Return the number of iterations of a loop; an empty tuple for other equations."""
    if eqn.primitive.name == "scan":
        return (eqn.params["length"],)
    return (None,) if eqn.primitive.name == "while" else ()


def same_turn(turns: Turns) -> list[Turns]:
    """Map an iteration to itself, for an operand in the same loops as its reader."""
    return [turns]


class _TurnMaps(NamedTuple):
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

    at_end: TurnMap
    in_all: TurnMap
    outside: TurnMap
    at_start: TurnMap
    before: TurnMap


def _maps_across(scan: Scan | None) -> _TurnMaps:
    """Return the maps of iterations for a loop.

    ``scan`` is None for a while loop. A while loop counts as one iteration, because the number of its iterations is
    unknown.
    """
    if scan is None:
        return _TurnMaps(*[same_turn] * 5)
    first, last, back = (scan.length - 1, 0, 1) if scan.reverse else (0, scan.length - 1, -1)
    return _TurnMaps(
        at_end=lambda turns: [(*turns, last)] if scan.length else [],
        in_all=lambda turns: [(*turns, turn) for turn in range(scan.length)],
        outside=lambda turns: [turns[:-1]],
        at_start=lambda turns: [turns[:-1]] if turns[-1] == first else [],
        before=lambda turns: [] if turns[-1] == first else [(*turns[:-1], turns[-1] + back)],
    )


class _Around(NamedTuple):
    """The surroundings of a body."""

    equation: Equation | None = None
    key: Key = ()
    names: Names = ()
    phase: str = "forward"
    turns: tuple[int | None, ...] = ()
    scans: tuple[Scan, ...] = ()
    loops: tuple[Key, ...] = ()


class _Read(NamedTuple):
    """A value that an equation reads, and whether it is computed from gradients in the same body."""

    value: Value
    is_gradient: bool = False


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

    def __init__(self, is_whole: Callable[[Any, Names], bool], scopes_inside: Callable[[Any], Names]) -> None:
        self.is_whole = is_whole
        self.scopes_inside = scopes_inside
        self.values: list[Value] = []
        self.equations: dict[Key, Equation] = {}
        self.first: dict[Hashable, Value] = {}
        self.equal_loops: dict[Hashable, Equation] = {}  # the first loop with equal bodies and operands

    def add(self, value: Value, key: Hashable = None) -> Value:
        """Add a value. It is equal to the first value with the same key."""
        self.values.append(value)
        if key is not None:
            value.same = self.first.setdefault(key, value)
        return value

    def literal(self, atom: Any) -> _Read:
        array = np.asarray(atom.val)
        value = Value(atom.aval, CONSTANT, constant=array)
        value.same = self.first.setdefault((CONSTANT, array.dtype, array.tobytes()), value)
        return _Read(value)

    def body(self, jaxpr: Any, consts: list[Any], inputs: Sequence[_Read], around: _Around) -> tuple[Body, list[_Read]]:
        """Read a body. Also return its results, with whether they are computed from gradients."""
        constants = [
            self.add(Value(var.aval, CONSTANT, constant=const), None if const is None else (CONSTANT, id(const)))
            for var, const in zip(jaxpr.constvars, consts, strict=True)
        ]
        equations: list[Equation] = []

        def read_equation(eqn: Any, operands: list[_Read]) -> list[_Read]:
            names, transforms = scopes_and_transforms(eqn)
            key = (*around.key, len(equations))
            phase = _phase(around.phase, transforms, any([operand.is_gradient for operand in operands]))
            values = [operand.value for operand in operands]
            names = (*around.names, *names)
            equation = Equation(key, eqn, names, phase, around.turns, bodies_of(eqn), around.equation, values)
            equations.append(equation)
            self.equations[key] = equation
            return self.results(equation, operands, around)

        reads = interpreted(jaxpr, [_Read(value) for value in constants], inputs, read_equation, self.literal)
        arguments = [value for value, _ in inputs]
        return Body(jaxpr, consts, constants, arguments, equations, [value for value, _ in reads]), reads

    def results(self, equation: Equation, operands: list[_Read], around: _Around) -> list[_Read]:
        """Read the bodies of an equation, and add its results."""
        bodies = equation.bodies
        are_gradients = [equation.phase != "forward"] * len(equation.eqn.outvars)
        if bodies is None or self.is_whole(equation.eqn, equation.names):
            self.operation(equation, around)
        elif bodies.kind == "call":
            # A call that reads gradients may have equations that read none, so each equation gets its own phase.
            inherits = equation.phase != "backward"
            phase = around.phase if inherits else equation.phase
            reads = self.inside(equation, 0, operands if inherits else _without_gradients(operands), around, phase)
            equation.results.extend(value for value, _ in reads)
            are_gradients = [is_gradient for _, is_gradient in reads] if inherits else are_gradients
        elif bodies.kind == "cond":
            are_gradients = self.conditional(equation, operands, around, are_gradients)
        else:
            are_gradients = self.loop(equation, bodies, around, are_gradients)
        return [_Read(value, flag) for value, flag in zip(equation.results, are_gradients, strict=True)]

    def inside(
        self, equation: Equation, number: int, inputs: Sequence[_Read], around: _Around, phase: str | None = None
    ) -> list[_Read]:
        """Read a body of an equation, and return its results."""
        assert equation.bodies is not None
        here = _Around(
            equation=equation,
            key=(*equation.key, number),
            names=(*equation.names, *self.scopes_inside(equation.eqn)),
            phase=phase or equation.phase,
            turns=(*equation.turns, *turns_of(equation.eqn)),
            scans=around.scans,
            loops=around.loops,
        )
        body, results = self.body(*opened(equation.bodies.jaxprs[number]), inputs, here)
        equation.inside.append(body)
        return results

    def result(self, equation: Equation, name: str, reads: list[Read], around: _Around, key: Hashable = None) -> Value:
        """Add the next result of an equation with bodies."""
        position = len(equation.results)
        aval = equation.eqn.outvars[position].aval
        value = Value(aval, name, equation.key, None, position, around.scans, around.loops, reads=reads)
        equation.results.append(self.add(value, key))
        return value

    def operation(self, equation: Equation, around: _Around) -> None:
        """Add the results of an equation that counts as one operation."""
        eqn, name, operands = equation.eqn, equation.name, equation.operands
        for operand in operands:
            outer = operand.outer
            outer.reader = outer.reader or equation
        reads: list[Read] = [(n, operand, same_turn) for n, operand in enumerate(operands)]
        computation = object() if eqn.effects else _operation_of(eqn)
        equal_operands = [operand.same for operand in operands]
        for n, var in enumerate(eqn.outvars):
            value = Value(var.aval, name, equation.key, equation, n, around.scans, around.loops)
            value.reads = reads[n : n + 1] if name in _ONE_BY_ONE else reads
            equation.results.append(self.add(value, (n, computation, *equal_operands)))

    def conditional(
        self, equation: Equation, operands: list[_Read], around: _Around, are_gradients: list[bool]
    ) -> list[bool]:
        assert equation.bodies is not None
        index, *inputs = _without_gradients(operands)
        count = len(equation.bodies.jaxprs)
        branches = [self.inside(equation, number, inputs, around) for number in range(count)]
        for n in range(len(equation.eqn.outvars)):
            reads: list[Read] = [(count, index.value, same_turn)]
            reads += [(number, results[n].value, same_turn) for number, results in enumerate(branches)]
            self.result(equation, BRANCHES, reads, around, (BRANCHES, *(value.same for _, value, _ in reads)))
        for results in branches:
            are_gradients = [a or b.is_gradient for a, b in zip(are_gradients, results, strict=True)]
        return are_gradients

    def loop(self, equation: Equation, bodies: Bodies, around: _Around, are_gradients: list[bool]) -> list[bool]:
        """Read a loop.

        A while loop counts as one iteration. The values of its condition are not operands of its results.
        """
        eqn, operands, last = equation.eqn, equation.operands, len(bodies.jaxprs) - 1
        scan = None
        if bodies.kind == "scan":
            scan = Scan(len(equation.key), bool(eqn.params["reverse"]), eqn.params["length"])
        maps = _maps_across(scan)
        scans = around.scans if scan is None else (*around.scans, scan)
        inside = around._replace(scans=scans, loops=(*around.loops, (*equation.key, last)))
        in_condition = inside._replace(loops=(*around.loops, (*equation.key, 0)))
        computation = (_computation_of(eqn), *(operand.same for operand in operands))
        equal_loop = self.equal_loops.setdefault(computation, equation)

        def entering(name: str, aval: Any, operand: Value, turns_read: TurnMap) -> Value:
            reads = [(0, operand, turns_read)]
            return Value(aval, name, equation.key, None, -1, inside.scans, inside.loops, reads=reads)

        start, stop = bodies.start, bodies.start + bodies.carry
        fixed = unchanged(bodies)
        constants, carries, elements = list[Value](), list[Value](), list[Value]()
        for n, operand in enumerate(operands[:stop]):
            if n < start or n - start in fixed:
                value = entering(LOOP_CONSTANT, operand.aval, operand, maps.outside)
                value.same = operand.same
            else:
                value = entering(CARRY, operand.aval, operand, maps.at_start)
                self.add(value, (CARRY, n, equal_loop))
            (constants if n < start else carries).append(value)
        scanned = opened(bodies.jaxprs[last])[0].invars[stop - bodies.consts :]
        for var, operand in zip(scanned, operands[stop:], strict=True):
            value = entering(TURN, var.aval, operand, maps.outside)
            elements.append(self.add(value, (TURN, operand.same, scan is None or scan.reverse)))
        if last:
            self.inside(equation, 0, [_Read(value) for value in (*constants[: bodies.consts], *carries)], in_condition)
        inputs = [_Read(value) for value in (*constants[bodies.consts :], *carries, *elements)]
        reads = self.inside(equation, last, inputs, inside)
        results = [value for value, _ in reads]
        for carry, value in zip(carries, results, strict=False):
            if carry.name == CARRY:
                carry.reads.append((1, value, maps.before))
        may_not_run = scan is None or not scan.length
        for n, value in enumerate(results):
            if n in fixed:
                equation.results.append(operands[start + n])
            elif n < bodies.carry:
                first: list[Read] = [(0, operands[start + n], same_turn)] if may_not_run else []
                self.result(equation, LAST_CARRY, [*first, (1, value, maps.at_end)], around, (n, equal_loop))
            else:
                self.result(equation, TURNS, [(1, value, maps.in_all)], around, (n, equal_loop))
        return [a or b.is_gradient for a, b in zip(are_gradients, reads, strict=True)]


def _without_gradients(operands: Sequence[_Read]) -> list[_Read]:
    return [_Read(value) for value, _ in operands]


def _operation_of(eqn: Any) -> Hashable:
    """Return a key that is equal for operations that compute the same from equal operands."""
    key = (eqn.primitive.name, *eqn.params.values())
    try:
        hash(key)
    except TypeError:
        return object()  # equal to nothing else
    return key


def _computation_of(eqn: Any) -> Hashable:
    """Return the key of an operation, or a key of an equation's bodies."""
    bodies = bodies_of(eqn)
    if eqn.effects:
        return object()  # a callback may return other numbers each time
    if bodies is None or eqn.primitive.name in _PER_DEVICE:
        return _operation_of(eqn)
    inner = [(_structure_of(jaxpr), *map(id, consts)) for jaxpr, consts in map(opened, bodies.jaxprs)]
    return eqn.primitive.name, eqn.params.get("length"), eqn.params.get("reverse"), *inner


def _structure_of(jaxpr: Any) -> Hashable:
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
