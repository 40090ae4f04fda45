"""Find out whether a jitted function was compiled again."""

from __future__ import annotations

from typing import Any


def compiled_once(jitted: Any) -> bool:
    """Return whether a jitted function or train step was compiled at most once.

    In a process that has called 8,192 programs, JAX no longer counts. Then the result is always True. A process that
    runs half of all tests reaches this number near its end.
    """
    program = getattr(jitted, "jitted", jitted)
    return bool(program._cache_size() <= 1)
