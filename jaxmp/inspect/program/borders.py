"""Find the values that enter or leave modules and named scopes.

A scope is the call of a module, or a ``jax.named_scope``. A key is the position of an equation in the program.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.base import tables
from jaxmp.inspect.program.calls import is_inexact
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.reading import is_whole_with_rules, read_program
from jaxmp.program.scopes import enters_scope, named_scopes, paths_left
from jaxmp.program.values import Equation, Key, Program, Value, leading_to
from jaxmp.program.walk import equations


class AtBorder(NamedTuple):
    """A floating or complex value that enters or leaves a module or a named scope.

    Attributes:
      key: the key of the equation that computes the value.
      position: the position of the value among the results of the equation.
      path: the path of the scope. If nested scopes return the same value, there is an ``AtBorder`` for each scope.
      lengths: the number of iterations of each scan around the equation, outermost first.
      aval: the shape and dtype of the value in one iteration.
    """

    key: Key
    position: int
    path: str
    lengths: tuple[int, ...]
    aval: Any


def read_for_recording(jaxpr: Any, consts: Sequence[Any] = ()) -> Program:
    """Read a program as :func:`returned` and :func:`passed_in` need it.

    The equations of :func:`jaxmp.program.reading.is_whole_with_rules` count as one operation.
    """
    return read_program(jaxpr, consts, counts_as_one=is_whole_with_rules)


def returned(program: Program, roots: Sequence[bool] | None = None) -> list[AtBorder]:
    """Return the values that are computed inside a scope and used outside the scope.

    The values are in program order. ``jit`` and ``checkpoint`` are not scopes: a value in their body has the key of the
    equation in the body. The result of a loop or a conditional has the key of the loop or the conditional. Values
    inside an equation that counts as one operation are left out, such as values in a while loop
    (:func:`jaxmp.program.reading.is_whole_with_rules`).

    Args:
      program: a program from :func:`read_for_recording`.
      roots: a boolean for each result of the program; None means all True. Values are left out if they affect only
        results that are False here, such as new statistics.
    """
    return [
        at_border(equation, position, path)
        for equation, position, readers in _read_numbers(program, roots)
        for path in paths_left(equation.names, readers)
    ]


def passed_in(program: Program, roots: Sequence[bool] | None = None) -> list[AtBorder]:
    """Return the values that a scope reads but code outside the scope computes.

    The path of such a value is the path of the code that computes it. Values that a scope returns are left out, because
    :func:`returned` returns them. The arguments are those of :func:`returned`.
    """
    values = []
    for equation, position, readers in _read_numbers(program, roots):
        is_read_inside = any(enters_scope(equation.names, names) for names in readers)
        if is_read_inside and not paths_left(equation.names, readers):
            values.append(at_border(equation, position, equation.path))
    return values


def not_recorded(program: Program) -> tuple[str, ...]:
    """Return the operations whose inner values are left out, with the reasons.

    They count as one operation although they contain scopes or products.
    """
    texts: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for equation in program.equations.values():
        if equation.bodies is None or equation.inside or not _has_values_to_record(equation):
            continue
        reason = "a function with a custom derivative rule" if equation.bodies.has_rule else "a while loop"
        reason = "it runs on each device" if equation.bodies.is_per_device else reason
        key = equation.name, tables.without_numbers(equation.path), equation.source
        texts.setdefault(key, (reason, []))[1].append(equation.path)
    described = []
    for (name, _, source), (reason, paths) in texts.items():
        places = ", ".join(filter(None, (tables.common_path(paths), source)))
        described.append(f"{name}{f' ({places})' if places else ''}: {reason}")
    return tuple(described)


def _has_values_to_record(equation: Equation) -> bool:
    """Return whether a scope or a product is in the bodies of an equation."""
    assert equation.bodies is not None
    around = named_scopes(equation.names)
    for jaxpr in equation.bodies.jaxprs:
        for eqn in equations(jaxpr):
            scopes = named_scopes(names_of(eqn))
            if eqn.primitive.name in PRODUCTS or (scopes and scopes != around):
                return True
    return False


def at_border(equation: Equation, position: int, path: str) -> AtBorder:
    """Return the description of a result of an equation, which leaves or enters the scope ``path``."""
    lengths = tuple(length for length in equation.lengths if length is not None)
    return AtBorder(equation.key, position, path, lengths, equation.eqn.outvars[position].aval)


def _read_numbers(program: Program, roots: Sequence[bool] | None) -> Iterator[tuple[Equation, int, list[Names]]]:
    """Yield the floating and complex values that affect the results that ``roots`` marks.

    The values are in program order. Each item is the equation of a value, the value's position among the equation's
    results, and the scopes of the equations that read the value.
    """
    ends = [value for n, value in enumerate(program.results) if roots is None or roots[n]]
    readers = collections.defaultdict[Value, list[Names]](list)
    for value in ends:
        readers[value].append(())
    sources = leading_to(ends)
    for value in sources:
        for _, operand in value.reads:
            readers[operand].append(program.equations[value.key].names)
    for value in sorted(sources, key=_position):
        if value.is_computed and is_inexact(value):
            yield program.equations[value.key], value.position, readers[value]


def _position(value: Value) -> tuple[Key, int]:
    return value.key, value.position
