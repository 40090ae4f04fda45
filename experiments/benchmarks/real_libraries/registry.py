"""The list of programs that the benchmark measures."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

PAPER = "paper"
"""The library of programs that papers describe. These programs need JAX only."""
FAMILIES = ("differential", "flows", "probability", "optimisation", "graphs", "agents", "networks", "papers")
"""The modules of programs."""

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

    @property
    def is_installed(self) -> bool:
        """Return whether the package of the library is installed."""
        try:
            return self.library == PAPER or bool(importlib.metadata.version(self.library))
        except importlib.metadata.PackageNotFoundError:
            return False


_PROGRAMS: list[Program] = []


def program(library: str, name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Return a decorator that adds a function to the list of programs."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        _PROGRAMS.append(Program(library, name, make))
        return make

    return add


def programs() -> list[Program]:
    """Return all programs."""
    for family in FAMILIES:
        importlib.import_module(f"experiments.benchmarks.real_libraries.{family}")
    return _PROGRAMS
