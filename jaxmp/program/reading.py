"""Read a jaxpr into equations and values, across calls, scans, whiles and conditionals.

A ``Body`` has a list of ``Equation``, and an ``Equation`` has a ``Body`` for each jaxpr in it. Each result is a
``Value`` that knows its operands. ``values.py`` defines these classes. This scan, for example::

    last, sums = scan(body, 1.0, xs)

    def body(h, x):
        y = h * w
        return y, h + x

has these values, besides ``1.0``, ``w``, ``xs``, and ``y`` and ``h + x`` in the body:

- ``w`` in the body is a loop constant. It is the same as ``w`` outside.
- ``x`` is an element. It reads ``xs``.
- ``h`` is a carry. In the first iteration, it reads ``1.0``. In every other iteration, it reads ``y`` of the iteration
  before.
- ``last`` is a last carry. It reads ``y`` of the last iteration.
- ``sums`` is stacked. It reads ``h + x`` of all iterations.

Equal operations on equal operands have equal results (``Value.same``). The reader finds equal values by a
*fingerprint*: a hashable object that is equal for values that are computed in the same way. Values of two loops are
never equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmp._internals.jax.sources import Names, scopes_and_transforms
from jaxmp.program.equations import Array, Bodies, Literal, bodies_of, opened
from jaxmp.program.scopes import RECOMPUTED
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
    Key,
    Program,
    Read,
    Scan,
    Value,
)
from jaxmp.program.walk import interpreted


def _never(eqn: JaxprEqn, names: Names) -> bool:
    return False


def _no_scopes(eqn: JaxprEqn) -> Names:
    return ()


def read_program(
    jaxpr: Jaxpr | ClosedJaxpr,
    consts: Sequence[Array] = (),
    names: Names = (),
    counts_as_one: Callable[[JaxprEqn, Names], bool] = _never,
    scopes_inside: Callable[[JaxprEqn], Names] = _no_scopes,
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
    return Program(reader.read_body(jaxpr, consts, inputs, around), reader.values, reader.equations)


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


class _Around(NamedTuple):
    """The surroundings of a body.

    Attributes:
      equation: the equation that has the body; None for the program.
      key: the key of the body: that of the equation, and the number of the body.
      names: the scopes around the body.
      phase: the phase of all equations in the body; ``"forward"`` if each equation has its own.
      lengths: the number of iterations of each loop around the body; None for a while loop.
      scans: the scans around the body.
      loops: the keys of the loop bodies around the body, which may be a loop body itself.
      transforms: JAX's transformations of the equations around the body. JAX does not list them again in the body.
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
      equation: the equation of the loop.
      bodies: the bodies of the equation.
      scan: the iterations; None for a while loop.
    """

    equation: Equation
    bodies: Bodies
    scan: Scan | None


def _phase(around: str, transforms: Sequence[str], has_gradients: bool) -> str:
    """Return the phase of an equation.

    Args:
      around: the phase of the equations around it. They decide, unless it is ``"forward"``.
      transforms: JAX's transformations of the equation, and of the equations around it. ``"transpose"`` is the backward
        pass of a derivative, and ``"jvp"`` without it is the forward pass.
      has_gradients: whether an operand is computed from gradients. The equation then belongs to an update, unless it is
        differentiated itself, as the loss at an adversarial input.
    """
    if around != "forward":
        return around
    if "transpose" in transforms:
        return "backward"
    return "update" if has_gradients and "jvp" not in transforms else "forward"


def _nested(around: Names, names: Names) -> Names:
    """Return all scopes of an equation in a body, including those around the body.

    With the flag ``jax_remat3``, JAX lists the scopes around a recomputation again in its body.
    """
    outer = len(around) - 1
    is_listed_again = around[-1:] == (RECOMPUTED,) and names[:outer] == around[:-1]
    return (*around, *names[outer:]) if is_listed_again else (*around, *names)


_ENTERS = -1
"""The ``position`` of a value that enters a body. Results have their position among the results."""


def _at_border(equation: Equation, name: str, aval: Any, position: int, reads: list[Read], around: _Around) -> Value:
    """Return a value that enters or leaves a body of an equation. No operation computes it."""
    return Value(aval, name, equation.key, None, position, around.scans, around.loops, None, reads)


class _Reader:
    """A reader that collects the values of a program, body by body.

    ``read_body`` reads the equations of a body, and ``read_equation`` adds the results of one equation: it reads the
    bodies of a loop, a conditional or a call, and adds the results of an operation.
    """

    def __init__(
        self, counts_as_one: Callable[[JaxprEqn, Names], bool], scopes_inside: Callable[[JaxprEqn], Names]
    ) -> None:
        self.counts_as_one = counts_as_one
        self.scopes_inside = scopes_inside
        self.values: list[Value] = []
        self.equations: dict[Key, Equation] = {}
        self.gradients = set[Value]()  # values that are computed from gradients
        self.first: dict[Hashable, Value] = {}  # the first value with each fingerprint

    # -- values --------------------------------------------------------------------------------------------------------

    def add(self, value: Value, fingerprint: Hashable = None) -> Value:
        """Add a value.

        It is equal to the first value with the same fingerprint. Without a fingerprint, it is equal to no other value.
        """
        self.values.append(value)
        if fingerprint is not None:
            value.same = self.first.setdefault(fingerprint, value)
        return value

    def read_literal(self, literal: Literal) -> Value:
        """Return the value of a literal, which is not listed among the values of the program."""
        array = np.asarray(literal.val)
        value = Value(literal.aval, CONSTANT, constant=array)
        value.same = self.first.setdefault((CONSTANT, array.dtype, array.tobytes()), value)
        return value

    def add_result(
        self,
        equation: Equation,
        name: str,
        position: int,
        reads: list[Read],
        around: _Around,
        fingerprint: Hashable = None,
    ) -> Value:
        """Add a result of an equation with bodies."""
        value = _at_border(equation, name, equation.eqn.outvars[position].aval, position, reads, around)
        if equation.phase != "forward" or any(operand in self.gradients for _, operand in reads):
            self.gradients.add(value)
        return self.add(value, fingerprint)

    # -- bodies and equations ------------------------------------------------------------------------------------------

    def read_body(self, jaxpr: Jaxpr, consts: list[Array], inputs: Sequence[Value], around: _Around) -> Body:
        """Read a body."""
        constants = [
            self.add(Value(var.aval, CONSTANT, constant=const), None if const is None else (CONSTANT, id(const)))
            for var, const in zip(jaxpr.constvars, consts, strict=True)
        ]
        equations: list[Equation] = []

        def read(eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
            names, transforms = scopes_and_transforms(eqn)
            key = (*around.key, len(equations))
            phase = _phase(around.phase, (*around.transforms, *transforms), not self.gradients.isdisjoint(operands))
            names = _nested(around.names, names)
            equation = Equation(key, eqn, names, phase, around.lengths, bodies_of(eqn), around.equation, operands)
            equations.append(equation)
            self.equations[key] = equation
            self.read_equation(equation, around)
            return equation.results

        results = interpreted(jaxpr, constants, inputs, read, self.read_literal)
        return Body(jaxpr, consts, constants, inputs, equations, results)

    def read_equation(self, equation: Equation, around: _Around) -> None:
        """Read the bodies of an equation, and add its results."""
        bodies = equation.bodies
        if bodies is None or self.counts_as_one(equation.eqn, equation.names):
            self.add_operation(equation, around)
        elif bodies.is_per_device:
            self.read_shard_map(equation, bodies, around)
        elif bodies.is_call:
            equation.results = self.read_call(equation, equation.operands, around).results
        elif bodies.is_conditional:
            self.read_conditional(equation, bodies, around)
        else:
            self.read_loop(equation, bodies, around)

    def add_operation(self, equation: Equation, around: _Around) -> None:
        """Add the results of an equation that counts as one operation."""
        for operand in equation.operands:
            if operand.outer.reader is None:
                operand.outer.reader = equation
        fingerprint = (_fingerprint_of_operation(equation.eqn), *[operand.same for operand in equation.operands])
        results = []
        for n, var in enumerate(equation.eqn.outvars):
            value = Value(var.aval, equation.name, equation.key, equation, n, around.scans, around.loops)
            results.append(self.add(value, (*fingerprint, n)))
        equation.results = results
        if equation.phase != "forward":
            self.gradients.update(results)

    def read_body_of(self, equation: Equation, number: int, inputs: Sequence[Value], around: _Around) -> Body:
        """Read a body of an equation. ``around`` describes the place of the equation."""
        assert equation.bodies is not None
        _, transforms = scopes_and_transforms(equation.eqn)
        around_body = around._replace(
            equation=equation,
            transforms=(*around.transforms, *transforms),
            key=(*equation.key, number),
            names=(*equation.names, *self.scopes_inside(equation.eqn)),
            lengths=(*equation.lengths, equation.bodies.length) if equation.bodies.is_loop else equation.lengths,
        )
        body = self.read_body(*opened(equation.bodies.jaxprs[number]), inputs, around_body)
        equation.inside = (*equation.inside, body)
        return body

    # -- calls and conditionals ----------------------------------------------------------------------------------------

    def read_call(self, equation: Equation, inputs: Sequence[Value], around: _Around) -> Body:
        """Read the body of a call. Its values are those of the program around it."""
        # A call that reads gradients may have equations that read none, so each equation gets its own phase.
        phase = "backward" if equation.phase == "backward" else around.phase
        return self.read_body_of(equation, 0, inputs, around._replace(phase=phase))

    def read_shard_map(self, equation: Equation, bodies: Bodies, around: _Around) -> None:
        """Read a body that has parts of the arrays. A part is never the same as another value."""
        parts = []
        for operand, var in zip(equation.operands, opened(bodies.jaxprs[0])[0].invars, strict=True):
            reads: list[Read] = [(0, operand)]
            part = _at_border(equation, PART, var.aval, _ENTERS, reads, around)
            parts.append(self.add(part))
            if operand in self.gradients:
                self.gradients.add(part)
        results = self.read_call(equation, parts, around).results
        equation.results = [
            self.add_result(equation, WHOLE, n, [(0, value)], around) for n, value in enumerate(results)
        ]

    def read_conditional(self, equation: Equation, bodies: Bodies, around: _Around) -> None:
        """Read the branches. A result reads the result of each branch, and the index that selects a branch."""
        index, *inputs = equation.operands
        in_branch = around._replace(phase=equation.phase)
        branches = []
        for number in range(len(bodies.jaxprs)):
            branches.append(self.read_body_of(equation, number, inputs, in_branch).results)
        results = []
        for n in range(len(equation.eqn.outvars)):
            reads: list[Read] = [(len(branches), index)]
            reads += [(number, branch[n]) for number, branch in enumerate(branches)]
            fingerprint = (BRANCHES, *[value.same for _, value in reads])
            results.append(self.add_result(equation, BRANCHES, n, reads, around, fingerprint))
        equation.results = results

    # -- loops ---------------------------------------------------------------------------------------------------------

    def read_loop(self, equation: Equation, bodies: Bodies, around: _Around) -> None:
        """Read a loop.

        A while loop counts as one iteration. It has two bodies: the condition, whose values are not operands of the
        loop's results, and the body that returns the carries.
        """
        scan = None
        if bodies.length is not None:
            scan = Scan(len(equation.key), bodies.reverse, bodies.length)
        scans = around.scans if scan is None else (*around.scans, scan)

        def around_body(number: int) -> _Around:
            return around._replace(phase=equation.phase, scans=scans, loops=(*around.loops, (*equation.key, number)))

        loop = _LoopReading(equation, bodies, scan)
        last = len(bodies.jaxprs) - 1
        entered = self.enter_loop(loop, around_body(last))
        for number in range(last + 1):
            body = self.read_body_of(equation, number, bodies.inputs(number, entered), around_body(number))
        equation.results = self.leave_loop(loop, entered, body.results, around)

    def enter_loop(self, loop: _LoopReading, around: _Around) -> list[Value]:
        """Return the values that enter the body of a loop: constants, carries, and elements of scanned arrays."""
        equation, bodies = loop.equation, loop.bodies

        def entering(name: str, aval: jax.core.AbstractValue, operand: Value) -> Value:
            return _at_border(equation, name, aval, _ENTERS, [(0, operand)], around)

        # The types of constants and carries are those of the operands. An element has the type that the body takes. The
        # body does not take the constants of the condition, which are the first operands.
        first_element = bodies.carries.stop
        avals = [atom.aval for atom in equation.eqn.invars[:first_element]]
        avals += [var.aval for var in opened(bodies.jaxprs[-1])[0].invars[first_element - bodies.consts :]]
        entered = []
        for n, (operand, aval) in enumerate(zip(equation.operands, avals, strict=True)):
            if n < bodies.start:
                value = entering(LOOP_CONSTANT, aval, operand)
                value.same = operand.same
            else:
                name = CARRY if n in bodies.carries else ELEMENT
                value = self.add(entering(name, aval, operand))
            entered.append(value)
        return entered

    def leave_loop(
        self, loop: _LoopReading, entered: Sequence[Value], returned: Sequence[Value], around: _Around
    ) -> list[Value]:
        """Return the results of a loop: last carries and stacked arrays.

        Args:
          loop: the loop.
          entered: the values that entered the body. Each carry also reads what the body returns for it.
          returned: the results of the body.
          around: the place of the loop.
        """
        equation, bodies = loop.equation, loop.bodies
        may_not_run = loop.scan is None or not loop.scan.length
        results = []
        for n, value in enumerate(returned):
            position = bodies.start + n  # for a carry, its position among the operands
            if position in bodies.carries:
                name = LAST_CARRY
                entered[position].reads.append((1, value))
                reads = [(1, value)]
                if may_not_run:  # then the last carry is the initial carry
                    reads.insert(0, (0, equation.operands[position]))
            else:
                name = STACKED
                reads = [(1, value)]
            results.append(self.add_result(equation, name, n, reads, around))
        return results


# -- fingerprints ------------------------------------------------------------------------------------------------------


def _fingerprint_of_operation(eqn: JaxprEqn) -> Hashable:
    """Return an object that is equal for operations that compute the same from equal operands."""
    if eqn.effects:  # a callback may return other numbers each time
        return object()
    fingerprint = eqn.primitive.name, *eqn.params.values()
    try:
        hash(fingerprint)
    except TypeError:  # a parameter is not hashable
        return object()
    return fingerprint
