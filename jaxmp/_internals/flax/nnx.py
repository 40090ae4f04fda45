"""The private names of NNX that jaxmp uses, all of them in this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from flax.errors import TraceContextError
from flax.nnx import reprlib

OWN = "_pytree__"
"""The prefix of the attributes in which NNX keeps its own data about an object."""


def is_pytree_class(cls: Any) -> bool:
    """Return whether instances of a class are pytrees for JAX."""
    return bool(cls._pytree__is_pytree)


def check_may_change(node: Any) -> None:
    """Raise Flax's TraceContextError if an outer transformation made ``node``."""
    node._check_valid_context(lambda: f"Cannot mutate {type(node).__name__} from a different trace level")


class _Note(str):
    """A note of :func:`note_for_changes`."""


@contextlib.contextmanager
def note_for_changes(note: str) -> Iterator[None]:
    """Add a note to Flax's error for an object that code in this context may not change.

    If contexts are nested, only the innermost one adds its note.
    """
    try:
        yield
    except TraceContextError as error:
        if not any(isinstance(other, _Note) for other in getattr(error, "__notes__", ())):
            error.add_note(_Note(note))
        raise


def repr_with(bare: Any, name: str, value: str) -> Callable[[Any], Iterator[Any]]:
    """Return a method for the repr of ``bare`` that shows one more attribute."""

    def parts(self: Any) -> Iterator[Any]:
        yield from bare.__nnx_repr__(self)
        yield reprlib.Attr(name, value)

    return parts
