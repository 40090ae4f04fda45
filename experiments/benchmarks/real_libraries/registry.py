"""The list of programs that the benchmark measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

PAPER = "paper"
"""The library of programs that papers describe. These programs need JAX only."""

Made = tuple[Callable[[Any], Any], Any]
"""A pair: a function of params that returns a loss, and the params."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a library or of a paper.

    Attributes:
      library: the name of its package on PyPI, or `PAPER`.
      name: a description of the program.
      make: imports the library, and makes the loss function and its params.
    """

    library: str
    name: str
    make: Callable[[], Made]


PROGRAMS: list[Program] = []


def program(library: str, name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Return a decorator that adds a function to the list of programs."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS.append(Program(library, name, make))
        return make

    return add
