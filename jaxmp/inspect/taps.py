"""Record the values at the borders of scopes, and their gradients.

A tap returns its first argument and ignores the second one, the sink. Its custom derivative rule returns a record of
the cotangent as the gradient of the sink. So the gradients with respect to all sinks are the records of all cotangents,
and the program is differentiated once.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmp.inspect.program.borders import AtBorder
from jaxmp.inspect.program.equation_places import Key, equation_places


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(record: Callable[[jax.Array], jax.Array], value: jax.Array, sink: jax.Array) -> jax.Array:
    return value


def _tap_forward(record: Any, value: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return value, None


def _tap_backward(record: Any, _: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent, record(cotangent)


_tap.defvjp(_tap_forward, _tap_backward)


class Taps(ABC):
    """A recorder of the values at the borders of scopes.

    Attributes:
      borders: the values, with the shape and dtype of one iteration.
    """

    def __init__(self, jaxpr: Any, borders: Sequence[AtBorder]) -> None:
        avals = {place.key: [var.aval for var in place.eqn.outvars] for place in equation_places(jaxpr)}
        self.borders = [(border, avals[border.key][border.position]) for border in borders]
        self._positions: dict[Key, list[int]] = {}
        for border in borders:
            positions = self._positions.setdefault(border.key, [])
            if border.position not in positions:
                positions.append(border.position)

    @abstractmethod
    def record(self, value: jax.Array) -> Any:
        """Return the record of a value: arrays in a pytree."""

    @abstractmethod
    def record_cotangent(self, cotangent: jax.Array) -> jax.Array:
        """Return the record of a cotangent: the gradient of the value's sink."""

    @abstractmethod
    def sink(self, aval: Any, turns: tuple[int, ...]) -> jax.Array:
        """Return the sink of a value: zeros for all iterations of the loops around it."""

    @abstractmethod
    def merge(self, old: Any, new: Any) -> Any:
        """Return the record of a while loop so far.

        ``old`` is the record of earlier iterations, zeros at first.
        """

    def sinks(self) -> dict[Key, dict[int, jax.Array]]:
        """Return a sink for each value outside of while loops, which have no gradients."""
        sinks: dict[Key, dict[int, jax.Array]] = {}
        for border, aval in self.borders:
            turns = tuple(turn for turn in border.turns if turn is not None)
            if len(turns) == len(border.turns):
                sinks.setdefault(border.key, {})[border.position] = self.sink(aval, turns)
        return sinks

    def at(self, key: Key, results: list[Any], sinks: Mapping[int, Any] | None) -> tuple[list[Any], Any]:
        """Return the results of an equation to continue with, and their records by position.

        Without a border at the equation, the records are None.

        Args:
          key: the key of the equation.
          results: its results, traced.
          sinks: the sinks of its results by position; in a loop, those of this iteration.
        """
        positions = self._positions.get(key)
        if positions is None:
            return results, None
        records = {position: self.record(results[position]) for position in positions}
        tapped = list(results)
        for position, sink in (sinks or {}).items():
            tapped[position] = _tap(self.record_cotangent, results[position], sink)
        return tapped, records

    def merged(self, old: Any, new: Any) -> Any:
        """Return the records of an equation in a while loop after an iteration.

        ``old`` is zeros in the first iteration.
        """
        return {position: self.merge(old[position], new[position]) for position in new}
