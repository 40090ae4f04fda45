"""Set context variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside of the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
