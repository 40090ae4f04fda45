"""Run a function while threads may still start, before the interpreter exits."""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections.abc import Callable

# A function of the module ``atexit`` would run too late. Before it runs, Python shuts down the pools of
# ``concurrent.futures``, and background work that needs a pool fails. Python calls the functions below in the reverse
# order of their registration. So they run before the function that the module above registered when it was imported.
assert concurrent.futures.thread


def call_before_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when the main thread ends, before any pool of threads shuts down."""
    register = getattr(threading, "_register_atexit")  # noqa: B009  # type checkers do not know the name
    register(function)
