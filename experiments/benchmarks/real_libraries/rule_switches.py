"""The rules of autocast that the ablation switches off, one at a time.

A switch replaces functions or tables of the engine for a while. The names in the table below are private names of the
engine, so the table changes with the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from jaxmp.engine import (
    activations,
    amplifiers,
    classifier,
    decide,
    distances,
    emit,
    graph,
    loops,
    magnified_differences,
    neighbours,
    reads,
)
from jaxmp.engine.states import Kind, State
from jaxmp.program.primitives import AMPLIFIERS


@dataclasses.dataclass(frozen=True)
class Switch:
    """A rule, or a case of a rule, that can be switched off.

    Attributes:
      rule: the number of the rule in docs/autocast.md.
      name: a description of the rule or of the case.
      replacements: modules of the engine, names in them, and what stands there while the rule is off.
      cases: switches for the cases of the rule. They are tried if the rule as a whole changes a program.
    """

    rule: str
    name: str
    replacements: tuple[tuple[ModuleType, str, Any], ...]
    cases: tuple[Switch, ...] = ()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switch the rule off in this context."""
        with contextlib.ExitStack() as stack:
            for module, name, replacement in self.replacements:
                stack.enter_context(mock.patch.object(module, name, replacement))
            yield


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


_NOTHING = frozenset[str]()
_ALL_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64))


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _none(*_: Any, **__: Any) -> tuple[Any, ...]:
    return ()


def _without(*names: str) -> dict[str, int]:
    return {name: count for name, count in AMPLIFIERS.items() if name not in names}


def _infer_any_constant(*_: Any) -> Any:
    return classifier.OperationKind(Kind.INFER, "")


def _raisers_without(rule: Any) -> tuple[Any, ...]:
    return tuple(raiser for raiser in decide.RAISERS if raiser is not rule)


def _forget_rows(nodes: Any) -> None:
    for node in nodes:
        node.is_looked_up = False


def _only_carries(node: Any, states: Any, _: Any) -> bool:
    return node.name == "carry" and states[node] is State.HALF


def _only_beyond_half(neighbours: Any, operand: Any) -> bool:
    return neighbours.states[operand] is State.BEYOND_HALF


_AMPLIFIERS = (
    Switch("10", "factorisations and solvers", ((amplifiers, "SOLVERS", _NOTHING),)),
    Switch("10", "sin, cos, tan", ((amplifiers, "AMPLIFIERS", _without("sin", "cos", "tan")),)),
    Switch("10", "remainder", ((amplifiers, "AMPLIFIERS", _without("rem")),)),
    Switch(
        "10",
        "acos, acosh, asin, atanh, erf_inv, log1p",
        ((amplifiers, "AMPLIFIERS", _without("acos", "acosh", "asin", "atanh", "erf_inv", "log1p")),),
    ),
    Switch("10", "casts to integers", ((amplifiers, "_QUANTISED", _ALL_INTEGERS),)),
)
_CANCELLATION = (
    Switch("11", "distances", ((distances, "_cancelled_products", _none),)),
    Switch("11", "magnified differences", ((magnified_differences, "_magnified_differences", _none),)),
)
_LOOPS = (
    Switch("12", "all carries by their neighbours", ((loops, "_decide_carries", _do_nothing),)),
    Switch("12", "stacks of layers", ((loops, "_goes_through_layers", _no),)),
    Switch("12", "a weight is a matrix", ((loops, "_is_matrix", _yes),)),
    Switch("12", "a weight is read once", ((loops, "_is_read_once", _yes),)),
    Switch("13", "searches", ((loops, "is_search", _no),)),
)
SWITCHES = (
    Switch("3", "constants beyond half", ((classifier.Classifier, "_kind_by_constants", _infer_any_constant),)),
    Switch("3", "small products", ((graph, "make_sums", _do_nothing),)),
    Switch("3", "joins of constants beyond half", ((decide, "RAISERS", _raisers_without(decide.raise_joins)),)),
    Switch("4", "casts before moves", ((decide, "move_casts", _do_nothing),)),
    Switch("5", "feeds only float32", ((neighbours, "readers_of", _none),)),
    Switch("6", "follows float32", ((neighbours.Neighbours, "_drags", _only_beyond_half),)),
    Switch("6", "nonlinearities read half", ((activations, "_NO_NONLINEARITIES", _Everything()),)),
    Switch("7", "residual streams", ((neighbours, "is_stream", _only_carries),)),
    Switch("7", "rows of a table", ((graph, "mark_looked_up", _forget_rows),)),
    Switch("7", "updated values", ((decide, "RAISERS", _raisers_without(decide.raise_updated)),)),
    Switch(
        "9", "differences of two products are no activations", ((activations, "_is_difference_of_activations", _no),)
    ),
    Switch("10", "amplifiers", ((decide, "RAISERS", _raisers_without(decide.raise_amplified)),), _AMPLIFIERS),
    Switch("11", "cancellation", ((decide, "RAISERS", _raisers_without(decide.raise_cancelled)),), _CANCELLATION),
    Switch("12", "loops", ((decide, "RAISERS", _raisers_without(decide.raise_in_loops)),), _LOOPS),
    Switch("14", "the author's casts of weights", ((graph, "postpone_casts", _do_nothing),)),
    Switch("14", "repeated weights", ((emit, "must_widen", _no),)),
    Switch("14", "operands of all iterations", ((reads, "_repeated_reads", _none),)),
)
