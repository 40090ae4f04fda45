"""Patterns on module paths and module classes, for policies and overrides."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping
from typing import Any

from jaxmp.base.arguments import printed

Path = tuple[str, ...]
Pattern = str | type
"""A pattern is one of these:

- a glob on the module path
- ``"type:"``, followed by a glob on the names of a module's class and its base classes
- a module class
"""


OPERATIONS = ("primitive:", "class:")
"""The prefixes of override keys that mean operations, not modules."""
EVERY = "class:*"
"""The override key for all operations that no other key covers."""


def check_pattern(pattern: Any) -> Pattern:
    """Return ``pattern`` if it is valid.

    Raises:
      TypeError: ``pattern`` is neither a string nor a class.
      ValueError: ``pattern`` is a key for operations.
    """
    if isinstance(pattern, str) and pattern.startswith(OPERATIONS):
        raise ValueError(
            f"a pattern of a PolicyMap must match modules, got {pattern!r}, which matches operations; pass it as an "
            "override to apply_policy or autocast"
        )
    if isinstance(pattern, (str, type)):
        return pattern
    raise TypeError(
        f"a pattern must be a glob on the module path, such as '**/BatchNorm_*', or a module class, got "
        f"{printed(pattern)}; for a partial or an instance, write its class"
    )


def path_and_primitive(pattern: Any) -> tuple[Any, str]:
    """Split a pattern for one operation into its path and its primitive.

    For other patterns, return the pattern and an empty string.

    >>> path_and_primitive("encoder/flow:add"), path_and_primitive("encoder/flow"), path_and_primitive("type:Dense")
    (('encoder/flow', 'add'), ('encoder/flow', ''), ('type:Dense', ''))
    """
    if isinstance(pattern, str) and not pattern.startswith((*OPERATIONS, "type:")):
        path, colon, name = pattern.rpartition(":")
        if colon and "/" not in name:
            return path, name
    return pattern, ""


def checked_overrides(overrides: Any) -> dict[Any, Any]:
    """Return overrides as a dict from patterns to policies; None gives an empty dict.

    Raises:
      TypeError: ``overrides`` is not a mapping.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(
            f"overrides must map patterns to policies, got {printed(overrides)}; write e.g. {{'**/head': 'float32'}}"
        )
    return dict(overrides or {})


def is_class_pattern(pattern: Pattern) -> bool:
    """Return whether ``pattern`` matches classes, not paths."""
    return isinstance(pattern, type) or pattern.startswith("type:")


def pattern_text(pattern: Pattern) -> str:
    """Return ``pattern`` as a string; a class becomes ``"type:"`` and its name."""
    return f"type:{pattern.__name__}" if isinstance(pattern, type) else pattern


def matches(pattern: Pattern, path: Path, cls: type | tuple[type, ...] | None) -> bool:
    """Return whether ``pattern`` matches the module at ``path`` of class ``cls``.

    >>> matches("**/Dense_*", ("encoder", "Dense_0"), None), matches("encoder", ("encoder", "Dense_0"), None)
    (True, False)
    """
    if cls is None:
        cls = ()
    classes = cls if isinstance(cls, tuple) else (cls,)
    if isinstance(pattern, type):
        return any(issubclass(visited, pattern) for visited in classes)
    if pattern.startswith("type:"):
        names = [base.__name__ for visited in classes for base in visited.__mro__]
        return any(fnmatch.fnmatchcase(name, pattern.removeprefix("type:")) for name in names)
    return _glob(tuple(part for part in pattern.split("/") if part), path)


@functools.lru_cache(maxsize=4096)
def _glob(pattern: Path, path: Path) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_glob(pattern[1:], path[depth:]) for depth in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _glob(pattern[1:], path[1:])
