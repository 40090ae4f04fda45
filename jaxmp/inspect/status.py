"""Show the current stage of a tool on the terminal."""

from __future__ import annotations

import sys
from typing import Any


def status_of(stage: str) -> Any:
    """Return a context that shows a stage on standard error, if that is a terminal.

    Call ``update(stage)`` of the context for each later stage.
    """
    from rich.console import Console

    return Console(stderr=True, quiet=not sys.stderr.isatty()).status(stage)
