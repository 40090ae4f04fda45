"""Patterns on module paths and module classes, for policies and overrides."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmp.base.arguments import library_of, printed
from jaxmp.base.dtypes import closest_names

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

ALL = "**"
"""The pattern that matches every module and every param."""


class UnmatchedOverrideError(ValueError):
    """An override matched no module of the model, or no operation of the function."""


def unmatched(pattern: Pattern, subject: str, nearest: str) -> UnmatchedOverrideError:
    """Return the error for an override that matched nothing.

    Args:
      pattern: the key of the override.
      subject: what it must match, such as ``"a module"``.
      nearest: the kind of the nearest names, and the names.
    """
    return UnmatchedOverrideError(
        f"every override must match {subject}, but {pattern_text(pattern)!r} matched none; nearest {nearest}"
    )


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


def covers(pattern: Pattern, path: Path, classes: Mapping[Path, type | tuple[type, ...]] | None = None) -> bool:
    """Return whether ``pattern`` matches the module at ``path`` or a module above it.

    ``classes`` has the classes of these modules, by path.

    >>> covers("encoder", ("encoder", "Dense_0")), covers("Dense_0", ("encoder", "Dense_0"))
    (True, False)
    """
    above = [path[:depth] for depth in range(len(path) + 1)]
    return any(matches(pattern, module, (classes or {}).get(module)) for module in above)


def require_param_pattern(pattern: Any) -> None:
    """Raise a ValueError if a pattern is not a glob on the paths of params."""
    if not isinstance(pattern, str) or is_class_pattern(pattern):
        raise ValueError(f"a pattern of params must be a path, got {printed(pattern)}; write e.g. '**/kernel'")


def require_param_match(pattern: str, paths: Sequence[Path]) -> None:
    """Raise a ValueError if a pattern covers none of these paths of params."""
    require_param_pattern(pattern)
    if not any(covers(pattern, path) for path in paths):
        raise ValueError(
            f"the pattern {pattern!r} matches no leaf; the nearest paths: "
            f"{closest_names(pattern, ['/'.join(path) for path in paths])}"
        )


def require_first_matches(patterns: Iterable[str], paths: Sequence[Path]) -> None:
    """Raise a ValueError if a pattern is the first match of none of these paths of params.

    The first match wins. ``"**"`` may match nothing, because it is the default for all other params.
    """
    patterns = list(patterns)
    first_matches = {path: first_match(patterns, path) for path in paths}
    for pattern in patterns:
        if pattern == ALL or pattern in first_matches.values():
            continue
        require_param_match(pattern, paths)
        earlier = [first for path, first in first_matches.items() if covers(pattern, path)]
        # A pattern can be put last if it is the default, or if it also matches other params.
        movable = [first for path, first in first_matches.items() if first == ALL or not covers(pattern, path)]
        broader = [first for first in earlier if first in movable]
        remedy = f"put {broader[0]!r} last, or leave {pattern!r} out" if broader else "leave one of the two out"
        raise ValueError(
            f"the first match wins, but {pattern!r} comes after {(broader or earlier)[0]!r}, which matches the same "
            f"params; {remedy}"
        )


def first_match(patterns: Iterable[str], path: Path) -> str | None:
    """Return the first pattern that covers a param, or None."""
    return next((pattern for pattern in patterns if covers(pattern, path)), None)


def better_patterns(pattern: Pattern, paths: Iterable[Path], classes: Iterable[type] = ()) -> str:
    """Return the remedy for a pattern that matches nothing, as the end of an error message.

    Three mistakes have a remedy: a path that leaves out the modules above it, a path that is the name of a class, and a
    class of the other library of Flax. For other patterns, the result is empty.

    Args:
      pattern: the pattern.
      paths: the paths of the modules.
      classes: the classes of the modules.

    >>> better_patterns("LayerNorm", [("encoder", "LayerNorm_0")])
    "; write '**/LayerNorm_*'"
    """
    if isinstance(pattern, type):
        return _remedy_for_other_library(pattern, classes)
    if pattern.startswith("type:"):
        return ""
    name = pattern.rpartition("/")[2].rpartition(".")[2]
    globs = [f"**/{pattern}", f"**/{name}_*"]
    known = [path for path in paths if path]
    better = [glob for glob in globs if any(matches(glob, path, None) for path in known)][:1]
    if name in {base.__name__ for cls in classes for base in cls.__mro__}:
        better.append(f"type:{name}")
    return f"; write {' or '.join(map(repr, better))}" if better else ""


def _remedy_for_other_library(pattern: type, classes: Iterable[type]) -> str:
    library = library_of(pattern)
    others = {library_of(cls) for cls in classes} - {""}
    if not library or library in others or not others:
        return ""
    [other] = others
    return f"; it is a class of flax.{library}, but the model is of flax.{other}: write a class of flax.{other}"


@functools.lru_cache(maxsize=4096)
def _glob(pattern: Path, path: Path) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_glob(pattern[1:], path[depth:]) for depth in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _glob(pattern[1:], path[1:])
