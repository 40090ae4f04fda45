"""Record the values at the borders of scopes, and the gradients that reach them.

A tap returns its first argument, and takes a second one that it ignores: the sink. Its derivative rule hands what is
wanted of the cotangent to the sink. So the gradients with respect to all sinks hold the records of all cotangents, and
the program is differentiated once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxmp.inspect.program.borders import AtBorder
from jaxmp.inspect.program.equation_places import Key, equation_places


class Taps(ABC):
    """A :class:`jaxmp.inspect.program.recorded_evaluation.Recorder` of values at borders.

    Attributes:
      borders: the values, with the shape and dtype of one turn.
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
        """Return what is recorded of a value: arrays in a pytree."""

    @abstractmethod
    def tap(self, value: jax.Array, sink: jax.Array) -> jax.Array:
        """Return the value, and give the sink its gradient."""

    @abstractmethod
    def sink(self, aval: Any, turns: tuple[int, ...]) -> jax.Array:
        """Return the sink of a value: zeros for all turns of the loops around it."""

    @abstractmethod
    def merge(self, old: Any, new: Any) -> Any:
        """Return the record of a while loop so far.

        ``old`` is that of the turns before, zeros at the first.
        """

    def sinks(self) -> dict[Key, dict[int, jax.Array]]:
        """Return a sink for each value outside of while loops, which have no gradients."""
        sinks: dict[Key, dict[int, jax.Array]] = {}
        for border, aval in self.borders:
            turns = tuple(turn for turn in border.turns if turn is not None)
            if len(turns) == len(border.turns):
                sinks.setdefault(border.key, {})[border.position] = self.sink(aval, turns)
        return sinks

    def at(
        self, key: Key, eqn: Any, operands: Sequence[Any], results: list[Any], extra: Mapping[int, Any] | None
    ) -> tuple[list[Any], Any]:
        """See :class:`jaxmp.inspect.program.recorded_evaluation.Recorder`."""
        positions = self._positions.get(key)
        if positions is None:
            return results, None
        records = {position: self.record(results[position]) for position in positions}
        tapped = list(results)
        for position, sink in (extra or {}).items():
            tapped[position] = self.tap(results[position], sink)
        return tapped, records

    def merged(self, key: Key, old: Any, new: Any, turn: jax.Array) -> Any:
        """See :class:`jaxmp.inspect.program.recorded_evaluation.Recorder`."""
        return {position: self.merge(old[position], new[position]) for position in new}
