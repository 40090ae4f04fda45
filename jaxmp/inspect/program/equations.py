"""The equations of a program, each in its place: in which bodies it stands, whose code it is, how often it runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxmp._internals.jax import equations
from jaxmp._internals.jax.equations import Bodies, bodies_of
from jaxmp._internals.jax.sources import Names, scopes_and_transforms, source_of, user_source_of
from jaxmp._internals.jax.walk import interpreted
from jaxmp.nnx import run as nnx_run

Key = tuple[int, ...]
"""Where an equation stands: its number, after those of each equation and body around it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An equation in its place.

    Attributes:
      key: what tells it from all others of the program; keys in order are the equations in program order.
      eqn: the equation.
      names: the scopes around it, those around the bodies that it is in included, and the marks of jaxmp.
      source: the user's file and line, ``"package/module.py:12"``, or that of the library where JAX has forgotten who
        called it (under checkpoint); empty where it knows none.
      phase: ``"forward"``, ``"backward"`` (transposed by ``jax.grad``, with what is computed again for it) or
        ``"update"`` (computed from gradients).
      turns: how often each loop around it turns, outermost first; None where only the run tells.
      bodies: what it consists of; None for one operation.
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
        """The names of modules and scopes around it, ``/`` between."""
        return path_in(self.names)

    @property
    def count(self) -> int | None:
        """How often it runs; None where only the run tells."""
        turns = [turn for turn in self.turns if turn is not None]
        return math.prod(turns) if len(turns) == len(self.turns) else None


def path_in(names: Names) -> str:
    """The path that scopes make, without jaxmp's marks and JAX's own."""
    return "/".join(filter(_is_named, names))


_CALL = "jaxmp.call:"


def _is_named(name: str) -> bool:
    return not name.startswith("jaxmp.") and name not in ("checkpoint", "rematted_computation")


def program_of(fun: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Any]:
    """The open jaxpr of a call, its constants, and the structure of its results; ``args`` may be shapes.

    Each call of a Linen module, and of an NNX one under a policy, stands in a scope of its own, so that two calls of
    one module can be told apart.
    """
    number = itertools.count()

    def called(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        with jax.named_scope(f"{_CALL}{next(number)}"):
            return method(*args, **kwargs)

    token = nnx_run.numbers.set(itertools.count())
    try:
        with nn.intercept_methods(called):
            closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    finally:
        nnx_run.numbers.reset(token)
    return *equations.opened(closed), jax.tree.structure(shapes)


def places(jaxpr: Any) -> list[Place]:
    """Every equation in program order, one with bodies before what is in them.

    The bodies of ``jit``, ``checkpoint``, loops, branches and of functions with derivative rules are looked into; of a
    rule itself the equations are there once the function is differentiated.
    """
    found: list[Place] = []
    opened, _ = equations.opened(jaxpr)
    _collect(opened, _Around(), [False] * len(opened.invars), found)
    return found


class _Around(NamedTuple):
    """What a body has around it."""

    key: Key = ()
    names: Names = ()
    source: str = ""
    phase: str = "forward"
    turns: tuple[int | None, ...] = ()


def _collect(jaxpr: Any, around: _Around, late: Sequence[bool], found: list[Place]) -> list[bool]:
    """Adds the places of a body, some of whose inputs are computed from gradients; returns which of its results are."""
    numbers = itertools.count()

    def equation(eqn: Any, is_late: list[bool]) -> list[bool]:
        names, transforms = scopes_and_transforms(eqn)
        phase = around.phase
        if phase == "forward" and "transpose" in transforms:
            phase = "backward"
        elif phase == "forward" and any(is_late) and "jvp" not in transforms:
            phase = "update"
        bodies = bodies_of(eqn)
        key, names = (*around.key, next(numbers)), (*around.names, *names)
        source = user_source_of(eqn) or around.source or source_of(eqn)
        found.append(Place(key, eqn, names, source, phase, around.turns, bodies))
        results = [phase != "forward"] * len(eqn.outvars)
        for index, inner in enumerate(bodies.jaxprs if bodies else ()):
            body = equations.opened(inner)[0]
            inside = _Around((*key, index), names, source, phase, (*around.turns, *turns_of(eqn)))
            if bodies is not None and bodies.kind == "call" and phase != "backward":
                # A jitted train step is no update as a whole: its operands and results count one by one.
                results = _collect(body, inside._replace(phase=around.phase), is_late, found)
            else:
                within = _collect(body, inside, [False] * len(body.invars), found)
                if bodies is not None and bodies.kind != "call" and len(within) == len(results):  # no condition
                    results = [one or other for one, other in zip(results, within, strict=True)]
        return results

    return interpreted(jaxpr, [False] * len(jaxpr.constvars), late, equation, lambda atom: False)


def turns_of(eqn: Any) -> tuple[int | None, ...]:
    """How often the bodies of an equation turn each time that it runs: nothing for what is no loop."""
    if eqn.primitive.name == "scan":
        return (eqn.params["length"],)
    return (None,) if eqn.primitive.name == "while" else ()


def paths_left(names: Names, readers: Iterable[Names]) -> list[str]:
    """The modules and named scopes that a value leaves on its way to its readers, the innermost first.

    Args:
      names: the scopes in which it is made.
      readers: those of each equation that reads it.
    """
    inside = min((_shared(names, each) for each in readers), default=len(names))
    return [path_in(names[:stop]) for stop in range(len(names), inside, -1) if _is_left(names, stop)]


def is_entered(names: Names, reader: Names) -> bool:
    """Return whether ``reader`` is in a module or named scope that ``names`` is not in."""
    return any(map(_is_named, reader[_shared(names, reader) :]))


def _is_left(names: Names, stop: int) -> bool:
    """Whether who leaves the scope ``names[stop - 1]`` leaves a module or a named scope: of a module its call."""
    own, inner = names[stop - 1], names[stop : stop + 1]
    return own.startswith(_CALL) or (_is_named(own) and not any(name.startswith(_CALL) for name in inner))


def _shared(names: Names, others: Names) -> int:
    """How many scopes two places share."""
    pairs = zip(names, others, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(names), len(others)))
