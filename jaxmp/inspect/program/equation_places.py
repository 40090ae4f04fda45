"""The equations of a program, with their scopes, source lines and phases."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxmp._internals.jax.sources import Names, scopes_and_transforms, user_source_of
from jaxmp.nnx import run as nnx_run
from jaxmp.program import equations
from jaxmp.program.equations import Bodies, bodies_of
from jaxmp.program.walk import interpreted

Key = tuple[int, ...]
"""The position of an equation in a program. For example, ``(2, 0, 3)`` is equation 3 in body 0 of equation 2."""

CALL_SCOPE = "jaxmp.call:"
"""The prefix of the scope around each call of a module. The number after the prefix distinguishes the calls."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EquationPlace:
    """An equation and its place in the program.

    Attributes:
      key: the position of the equation; keys sort in program order.
      eqn: the equation.
      names: the scopes around the equation, including jaxmp's own scopes (``"jaxmp.…"``).
      source: the user's file and line, such as ``"package/module.py:12"``. If JAX does not know this line, the source
        is the line of the equation around this equation. It is empty if that line is unknown too.
      phase: ``"forward"``, ``"backward"`` (transposed by ``jax.grad``, or recomputed for the transpose) or ``"update"``
        (computed from gradients).
      turns: the number of iterations of each loop around the equation, outermost first; None for a while loop, whose
        number of iterations is unknown before the run.
      bodies: the bodies of the equation; None for a single operation.
    """

    key: Key
    eqn: Any
    names: Names
    source: str
    phase: str
    turns: tuple[int | None, ...]
    bodies: Bodies | None

    @property
    def path(self) -> str:
        """Return the names of modules and scopes around the equation, joined by ``/``."""
        return path_in(self.names)

    @property
    def count(self) -> int | None:
        """Return how often the equation runs; None inside a while loop."""
        turns = [turn for turn in self.turns if turn is not None]
        return math.prod(turns) if len(turns) == len(self.turns) else None


def path_in(names: Names) -> str:
    """Join scopes by ``/``, without the scopes that jaxmp and JAX add."""
    return "/".join(filter(_is_named, names))


def _is_named(name: str) -> bool:
    return not name.startswith("jaxmp.") and name not in ("checkpoint", "rematted_computation")


def program_of(fun: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Any]:
    """Return the open jaxpr of a call, its constants and its result's structure.

    Each call of a Linen module, or of an NNX module under a policy, has its own scope.

    Args:
      fun: the function.
      args: its positional arguments, arrays or shapes.
    """
    number = itertools.count()

    def in_call_scope(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        with jax.named_scope(f"{CALL_SCOPE}{next(number)}"):
            return method(*args, **kwargs)

    token = nnx_run.run_numbers.set(itertools.count())
    try:
        with nn.intercept_methods(in_call_scope):
            closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    finally:
        nnx_run.run_numbers.reset(token)
    return *equations.opened(closed), jax.tree.structure(shapes)


def equation_places(jaxpr: Any) -> list[EquationPlace]:
    """Return every equation in program order.

    An equation with bodies comes before the equations in its bodies. Such equations are ``jit``, ``checkpoint``, loops,
    conditionals and calls of functions with custom derivative rules. The equations of a derivative rule are included
    only if the program differentiates the function.
    """
    opened, _ = equations.opened(jaxpr)
    collected: list[EquationPlace] = []
    _collect(opened, _Around(), [False] * len(opened.invars), collected)
    return collected


class _Around(NamedTuple):
    """The place of the equation around a body."""

    key: Key = ()
    names: Names = ()
    source: str = ""
    phase: str = "forward"
    turns: tuple[int | None, ...] = ()


def _collect(jaxpr: Any, around: _Around, inputs: Sequence[bool], collected: list[EquationPlace]) -> list[bool]:
    """Collect the places of a body.

    ``inputs`` tells which inputs of the body are computed from gradients. The returned list tells the same about the
    results of the body.
    """
    numbers = itertools.count()

    def equation(eqn: Any, operands: list[bool]) -> list[bool]:
        names, transforms = scopes_and_transforms(eqn)
        place = EquationPlace(
            key=(*around.key, next(numbers)),
            eqn=eqn,
            names=(*around.names, *names),
            source=user_source_of(eqn) or around.source,
            phase=_phase(around.phase, transforms, any(operands)),
            turns=around.turns,
            bodies=bodies_of(eqn),
        )
        collected.append(place)
        return _collect_bodies(place, around.phase, operands, collected)

    return interpreted(jaxpr, [False] * len(jaxpr.constvars), inputs, equation, lambda atom: False)


def _phase(around: str, transforms: Sequence[str], has_gradients: bool) -> str:
    if around != "forward":
        return around
    if "transpose" in transforms:
        return "backward"
    return "update" if has_gradients and "jvp" not in transforms else "forward"


def _collect_bodies(
    place: EquationPlace, phase_around: str, operands: list[bool], collected: list[EquationPlace]
) -> list[bool]:
    """Collect the places of an equation's bodies.

    The returned list tells which results of the equation are computed from gradients.
    """
    results = [place.phase != "forward"] * len(place.eqn.outvars)
    if place.bodies is None:
        return results
    is_call = place.bodies.kind == "call"
    for index, inner in enumerate(place.bodies.jaxprs):
        body, _ = equations.opened(inner)
        turns = (*place.turns, *turns_of(place.eqn))
        inside = _Around((*place.key, index), place.names, place.source, place.phase, turns)
        if is_call and place.phase != "backward":
            # A call that reads gradients may have equations that read none, so each equation gets its own phase.
            results = _collect(body, inside._replace(phase=phase_around), operands, collected)
            continue
        from_body = _collect(body, inside, [False] * len(body.invars), collected)
        is_condition = len(from_body) != len(results)
        if not is_call and not is_condition:
            results = [before or now for before, now in zip(results, from_body, strict=True)]
    return results


def is_whole(eqn: Any) -> bool:
    """Return whether an equation counts as one operation although it has a body."""
    return bool(eqn.primitive.name == "shard_map")


def is_whole_with_rules(eqn: Any) -> bool:
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


def paths_left(names: Names, readers: Iterable[Names]) -> list[str]:
    """Return the paths of the scopes that return a value, the innermost first.

    These scopes are calls of modules, and scopes that the user named.

    Args:
      names: the scopes in which the value is computed.
      readers: the scopes of each equation that reads the value.
    """
    shared = min((_count_shared_scopes(names, reader) for reader in readers), default=len(names))
    return [path_in(names[:stop]) for stop in range(len(names), shared, -1) if _is_left(names, stop)]


def enters_scope(names: Names, reader: Names) -> bool:
    """Return whether ``reader`` is in a scope that ``names`` is not in.

    Scopes that jaxmp and JAX add do not count.
    """
    return any(map(_is_named, reader[_count_shared_scopes(names, reader) :]))


def _is_left(names: Names, stop: int) -> bool:
    """Return whether ``names[stop - 1]`` is a module call or a named scope.

    The scope of a module's name contains a scope for each call (``CALL_SCOPE``). Of these scopes, only the scope of the
    call counts.
    """
    scope, inner = names[stop - 1], names[stop : stop + 1]
    return scope.startswith(CALL_SCOPE) or (_is_named(scope) and not any(name.startswith(CALL_SCOPE) for name in inner))


def _count_shared_scopes(names: Names, others: Names) -> int:
    """Return how many outermost scopes ``names`` and ``others`` share."""
    count = 0
    while count < min(len(names), len(others)) and names[count] == others[count]:
        count += 1
    return count
