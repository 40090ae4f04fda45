"""The list of programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Made = tuple[Callable[[Any], Any], Any]
"""A function of params that returns a loss, and the params."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a library.

    Attributes:
      library: the name of its package on PyPI.
      name: what the program is.
      make: makes the function and its params; it imports the library.
    """

    library: str
    name: str
    make: Callable[[], Made]


PROGRAMS: list[Program] = []


def program(library: str, name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Add the decorated function to the list."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS.append(Program(library, name, make))
        return make

    return add
