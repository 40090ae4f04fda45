"""Find out whether a jitted function was compiled again."""

from __future__ import annotations

from typing import Any


def compiled_once(jitted: Any) -> bool:
    """Return whether no second program was compiled for a jitted function, or for the calls of a train step.

    JAX counts none any more in a process that has called 8,192 programs, as one that runs half of the tests has near
    its end; the part for the newest Python has fewer in all.
    """
    program = getattr(jitted, "jitted", jitted)
    return bool(program._cache_size() <= 1)
