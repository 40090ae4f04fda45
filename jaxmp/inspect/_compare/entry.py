"""Find the scope where the error of a comparison enters.

A node is a value in one iteration of the scans around it. The error enters at the first node whose relative error
exceeds two limits: 4 times the largest relative error of its inputs, and 4 times the error of one rounding to half
precision. The nodes of the forward pass are searched first, in program order. Then the gradients of the nodes are
searched, in reverse order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp._internals.jax.sources import Names
from jaxmp.inspect._compare.rows import Pair, relative_error
from jaxmp.inspect._compare.run import RecordedProgram
from jaxmp.inspect.program.iterations import Iteration, operands_of, time_of
from jaxmp.program.values import Value

_Node = tuple[Value, Iteration]
_GROWTH = 4


def entered_in(
    first: RecordedProgram, reference: RecordedProgram, pairs: Sequence[Pair], numbers: Collection[int], rounding: float
) -> str | None:
    """Return the path where the error enters.

    Return None if the error enters nowhere, and an empty path if it enters outside of all scopes.

    Args:
      first: the program that is compared with the reference.
      reference: the same function without policies, or another function.
      pairs: the values that both programs have.
      numbers: the indices of the argument leaves whose gradients are searched.
      rounding: the relative error of one rounding to half precision.
    """
    return _Entry(first, reference, pairs, numbers, rounding).path()


def scopes_where_errors_grow(
    first: RecordedProgram, reference: RecordedProgram, pairs: Sequence[Pair], rounding: float
) -> list[str]:
    """Return the paths of scopes in which the error grows, in program order.

    In each of them, a value has a relative error that exceeds two limits: 4 times the largest relative error of the
    values that enter the scope, and 4 times the error of one rounding. The error may grow by less in each operation, as
    in a sum of many terms. The arguments are those of :func:`entered_in`.
    """
    return _Entry(first, reference, pairs, (), rounding).paths_of_growth()


class _Entry:
    def __init__(
        self,
        first: RecordedProgram,
        reference: RecordedProgram,
        pairs: Sequence[Pair],
        numbers: Collection[int],
        rounding: float,
    ) -> None:
        self.rounding = rounding
        self.paths: dict[Value, str] = {}
        self.forward: dict[_Node, float] = {}
        self.backward: dict[_Node, float] = {}
        for pair in pairs:
            value = reference.values[pair.reference]
            if value not in self.paths:
                self.paths[value] = pair.path
                self.forward |= _errors_by_turn(value, first.forward[pair.first], reference.forward[pair.reference])
                if pair.reference in reference.backward:
                    self.backward |= _errors_by_turn(
                        value, first.backward[pair.first], reference.backward[pair.reference]
                    )
        for (_, of_first), (value, of_reference) in zip(first.results, reference.results, strict=True):
            if value not in self.paths:
                self.paths[value] = ""
                self.forward |= _errors_by_turn(value, of_first, of_reference)
        self.names = {value: tuple(filter(None, path.split("/"))) for value, path in self.paths.items()}
        self.sources = {node: list(_nearest(*node, self.forward)) for node in self.forward}
        self.readers: dict[_Node, list[_Node]] = {}
        for node, sources in self.sources.items():
            for source in sources:
                self.readers.setdefault(source, []).append(node)
        for value in dict.fromkeys(value for value, _ in self.readers if value.name == "argument"):
            if value.position in numbers:
                gradients = first.gradients[value.position].array, reference.gradients[value.position].array
                self.backward |= _errors_by_turn(value, *gradients)

    def path(self) -> str | None:
        for node in sorted(self.forward, key=_time):
            if self.is_forward_entry(node):
                return self.paths[node[0]]
        for node in sorted(self.backward, key=_time, reverse=True):
            if self.is_backward_entry(node):
                first_reader, _ = min(self.readers[node], key=_time)
                return self.paths[first_reader]
        return None

    def paths_of_growth(self) -> list[str]:
        """Return the paths of the scopes in which the error of the forward pass grows."""
        paths = dict[str, None]()
        errors_before: dict[tuple[_Node, Names], float] = {}  # the largest error of values that enter a scope
        for node in sorted(self.forward, key=_time):
            names = self.names[node[0]]
            for depth in range(len(names) + 1):
                scope = names[:depth]
                before = 0.0
                for source in self.sources[node]:
                    is_inside = source in self.forward and self.names[source[0]][:depth] == scope
                    error = errors_before[source, scope] if is_inside else self.forward.get(source, 0.0)
                    before = max(before, error)
                errors_before[node, scope] = before
            if self.forward[node] > _GROWTH * max(self.rounding, before):
                paths[self.paths[node[0]]] = None
        return list(paths)

    def is_forward_entry(self, node: _Node) -> bool:
        before = [self.forward.get(source, 0.0) for source in self.sources[node]]
        return self.forward[node] > _GROWTH * max(self.rounding, *before, 0.0)

    def is_backward_entry(self, node: _Node) -> bool:
        """Return whether the error enters at the gradient of a node.

        Each operation that reads a value contributes to the value's gradient. The contribution is computed from the
        operation's operands, its results, and the gradients of its results.
        """
        readers = self.readers.get(node, [])
        before = []
        for reader in readers:
            before += [self.backward.get(reader, 0.0), self.forward.get(reader, 0.0)]
            before += [self.forward.get(source, 0.0) for source in self.sources[reader]]
        return bool(readers) and self.backward[node] > _GROWTH * max(self.rounding, *before)


def _time(node: _Node) -> Any:
    value, turns = node
    return time_of(value, turns)


def _errors_by_turn(value: Value, first: np.ndarray, reference: np.ndarray) -> dict[_Node, float]:
    turns_of_all_scans = np.ndindex(reference.shape[: len(value.scans)])
    return {(value, turns): relative_error(first[turns], reference[turns]) for turns in turns_of_all_scans}


def _nearest(value: Value, turns: Iteration, known: Collection[_Node]) -> Iterator[_Node]:
    """Yield the nearest nodes on which a value depends.

    Only arguments and nodes in ``known`` are yielded. The search goes on through other nodes.
    """
    stack, visited = [(value, turns)], {(value, turns)}
    while stack:
        value, turns = stack.pop()
        for _, operand, operand_turns in operands_of(value, turns):
            source = operand, operand_turns
            if source in visited:
                continue
            visited.add(source)
            if source in known or operand.name == "argument":
                yield source
            else:
                stack.append(source)
