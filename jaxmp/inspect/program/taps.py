"""Record the values that enter and leave scopes, and their gradients.

A tap is a function of a value and a second argument, the sink. It returns the value and ignores the sink. Its custom
derivative rule returns a record of the value's cotangent as the gradient of the sink. So one differentiation with
respect to all sinks returns the records of all cotangents.

A scope is a module or a ``jax.named_scope``. A border is a value that enters or leaves a scope, see ``AtBorder`` in
``borders.py``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmp.inspect.program.borders import AtBorder
from jaxmp.program.values import Key


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(record: Callable[[jax.Array], jax.Array], value: jax.Array, sink: jax.Array) -> jax.Array:
    return value


def _tap_forward(record: Any, value: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return value, None


def _tap_backward(record: Any, _: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent, record(cotangent)


_tap.defvjp(_tap_forward, _tap_backward)


class Taps(ABC):
    """A recorder of the values that enter and leave scopes.

    Attributes:
      borders: the values that are recorded.
    """

    def __init__(self, borders: Sequence[AtBorder]) -> None:
        self.borders = borders
        self._positions: dict[Key, list[int]] = {}
        for border in borders:
            positions = self._positions.setdefault(border.key, [])
            if border.position not in positions:
                positions.append(border.position)

    @abstractmethod
    def record(self, value: jax.Array) -> Any:
        """Return the record of a value: a pytree of arrays."""

    @abstractmethod
    def record_cotangent(self, cotangent: jax.Array) -> jax.Array:
        """Return the record of a cotangent, which becomes the gradient of the sink."""

    @abstractmethod
    def sink(self, aval: Any, lengths: tuple[int, ...]) -> jax.Array:
        """Return the sink of a value: zeros, with the leading axes ``lengths``.

        ``lengths`` has the number of iterations of each scan around the value.
        """

    def sinks(self) -> dict[Key, dict[int, jax.Array]]:
        """Return the sinks by the key of an equation and the position of its result."""
        sinks: dict[Key, dict[int, jax.Array]] = {}
        for border in self.borders:
            sinks.setdefault(border.key, {})[border.position] = self.sink(border.aval, border.lengths)
        return sinks

    def at(self, key: Key, results: list[Any], sinks: Mapping[int, Any] | None) -> tuple[list[Any], Any]:
        """Return the tapped results of an equation, and their records by position.

        If no result is in ``borders``, the results are unchanged and the records are None.

        Args:
          key: the key of the equation.
          results: the traced results of the equation.
          sinks: the sinks of the results by position; in a loop, the sinks of this iteration.
        """
        positions = self._positions.get(key)
        if positions is None:
            return results, None
        records = {position: self.record(results[position]) for position in positions}
        tapped = list(results)
        for position, sink in (sinks or {}).items():
            tapped[position] = _tap(self.record_cotangent, results[position], sink)
        return tapped, records
