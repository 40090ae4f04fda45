"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata
import sys


def of(package: str) -> str:
    """Return the version of a package, or "not installed". jaxmp need not be installed."""
    if package == "jaxmp":
        return str(sys.modules["jaxmp"].__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
