"""The values of a program over all its bodies: what each is made of, through calls, branches and loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.engine.rules import COMBINES, PICKS
from jaxmp.inspect.program import Key, Place, places

_READ = 2**16
"""Constants of more elements are weights, and not looked at: it would wait for the device."""
TURN, TURNS, JOIN = "turn", "turns", "join"
MOVES = PICKS | COMBINES | {TURN, TURNS, "stop_gradient", "reduce_max", "reduce_min"}
MOVES |= {"reduce_window_max", "reduce_window_min"}
"""Operations whose results are elements of their operands."""
_ONE_BY_ONE = frozenset({"optimization_barrier"})


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """A value and what makes it.

    Attributes:
      aval: its shape and dtype.
      name: the primitive; ``"argument"``, ``"constant"``; ``TURN``, what one turn of a scan gets of an array, and
        ``TURNS``, the array that all turns make; ``JOIN``, where several become one (a loop's carry, the result of a
        conditional).
      place: the equation; None for arguments, constants, and what loops and conditionals make.
      inputs: what it is made of.
      const: what a constant is, if it is small.
      loops: the bodies of loops that it is computed in, outermost first.
      reader: the first equation that reads it.
    """

    aval: Any
    name: str
    place: Place | None = None
    inputs: list[Value] = dataclasses.field(default_factory=list)
    const: Any = None
    loops: tuple[Key, ...] = ()
    reader: Place | None = None

    @property
    def at(self) -> Place:
        """The equation that computes it; an AssertionError of arguments, constants and what is joined."""
        assert self.place is not None
        return self.place

    @property
    def dtype(self) -> np.dtype:
        """Its dtype; of what has none (a token) that of no number."""
        return np.dtype(getattr(self.aval, "dtype", "V")) if not self.is_key else np.dtype("V")

    @property
    def is_key(self) -> bool:
        """Whether it is a random key."""
        return jax.dtypes.issubdtype(getattr(self.aval, "dtype", None) or np.dtype("V"), jax.dtypes.extended)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def is_float(self) -> bool:
        """Whether it is of a floating dtype."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_half(self) -> bool:
        """Whether it is float16 or bfloat16."""
        return self.dtype.name in ("float16", "bfloat16")

    @property
    def is_move(self) -> bool:
        """Whether its elements are elements of what it is made of, a cast to the same dtype included."""
        return self.name in MOVES or (self.is_cast and self.inputs[0].dtype == self.dtype)

    @property
    def is_cast(self) -> bool:
        """Whether it is a cast."""
        return self.name == "convert_element_type"


@dataclasses.dataclass(frozen=True)
class Values:
    """All values of a program in its order, arguments and results apart, and its equations."""

    all: list[Value]
    arguments: list[Value]
    results: list[Value]
    places: list[Place]


def values_of(jaxpr: Any, consts: Sequence[Any] = ()) -> Values:
    """The values of a program, open or closed."""
    jaxpr, own = reading.opened(jaxpr)
    found = places(jaxpr)
    builder = _Builder({place.key: place for place in found})
    arguments = [builder.add(Value(var.aval, "argument")) for var in jaxpr.invars]
    results = builder.body(jaxpr, consts or own, arguments, (), ())
    return Values(builder.all, arguments, results, found)


def origins(value: Value, goes_on: Callable[[Value], bool] = lambda each: each.is_move) -> Iterator[Value]:
    """What a floating value is made of, each once, behind all that ``goes_on``; what only chooses is left out."""
    stack, seen = [value], {value}
    while stack:
        each = stack.pop()
        if not goes_on(each):
            yield each
            continue
        for one in each.inputs:
            if one.is_float and one not in seen:
                seen.add(one)
                stack.append(one)


def constant(value: Value) -> Any:
    """The elements of a value that is a constant, moved about and cast maybe, as it was written; else None."""
    while value.const is None and (value.is_move or value.is_cast) and len(value.inputs) == 1:
        value = value.inputs[0]
    return value.const


class _Builder:
    def __init__(self, known: dict[Key, Place]) -> None:
        self.known = known
        self.all: list[Value] = []

    def add(self, value: Value) -> Value:
        self.all.append(value)
        return value

    def body(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], key: Key, loops: tuple[Key, ...]
    ) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.add(Value(var.aval, "constant", const=_read(const)))

        def read(atom: Any) -> Value:
            return Value(atom.aval, "constant", const=_read(atom.val)) if reading.is_literal(atom) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            place = self.known[(*key, number)]
            results = self.equation(place, [read(atom) for atom in eqn.invars], loops)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, place: Place, operands: list[Value], loops: tuple[Key, ...]) -> list[Value]:
        eqn, bodies = place.eqn, place.bodies
        if bodies is None:
            for operand in operands:
                operand.reader = operand.reader or place
            given = (
                [[each] for each in operands] if eqn.primitive.name in _ONE_BY_ONE else [operands] * len(eqn.outvars)
            )
            made_of = zip(eqn.outvars, given, strict=True)
            return [self.add(Value(var.aval, eqn.primitive.name, place, of, None, loops)) for var, of in made_of]

        def inner(index: int, inputs: Sequence[Value], around: tuple[Key, ...] = loops) -> list[Value]:
            return self.body(*reading.opened(bodies.jaxprs[index]), inputs, (*place.key, index), around)

        def made(name: str, aval: Any, inputs: list[Value], around: tuple[Key, ...] = loops) -> Value:
            return self.add(Value(aval, name, place, inputs, None, around))

        if bodies.kind == "call":
            return inner(0, operands)
        if bodies.kind == "cond":
            branches = [inner(n, operands[1:]) for n in range(len(bodies.jaxprs))]
            columns = zip(eqn.outvars, zip(*branches, strict=True), strict=True)
            return [made(JOIN, var.aval, list(column)) for var, column in columns]
        start, stop = bodies.start, bodies.start + bodies.carry
        last = len(bodies.jaxprs) - 1
        within = (*loops, (*place.key, last))
        carry = [made(JOIN, each.aval, [each], within) for each in operands[start:stop]]
        if last:
            inner(0, [*operands[: bodies.consts], *carry], (*loops, (*place.key, 0)))
        sliced = reading.opened(bodies.jaxprs[last])[0].invars[stop - bodies.consts :]
        turns = [made(TURN, var.aval, [each], within) for var, each in zip(sliced, operands[stop:], strict=True)]
        results = inner(last, [*operands[bodies.consts : start], *carry, *turns], within)
        for join, value in zip(carry, results, strict=False):
            join.inputs.append(value)
        stacked = [
            made(TURNS, var.aval, [value])
            for var, value in zip(eqn.outvars[bodies.carry :], results[bodies.carry :], strict=True)
        ]
        return [*carry, *stacked]


def _read(value: Any) -> Any:
    if isinstance(value, jax.Array) and (isinstance(value, jax.core.Tracer) or not value.is_fully_addressable):
        return None
    if np.size(value) > _READ or jax.dtypes.issubdtype(getattr(value, "dtype", float), jax.dtypes.extended):
        return None
    return np.asarray(value)
