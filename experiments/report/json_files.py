"""Strict JSON files, which every JSON parser reads.

nan and infinities are written as strings.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON atomically.

    Non-finite numbers become strings ("nan", "inf", "-inf").
    """
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(_strict(value), indent=2, default=str) + "\n")
    new.replace(path)


def strict_json(value: Any) -> Any:
    """Return ``value`` as a JSON parser would read it after :func:`write_json`."""
    return json.loads(json.dumps(_strict(value), default=str))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def numbers(value: Any) -> Any:
    """Return ``value`` with "nan", "inf" and "-inf" turned back into numbers."""
    if isinstance(value, dict):
        return {key: numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [numbers(inner) for inner in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
