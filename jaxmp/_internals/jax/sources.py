"""The origin of an equation: its scopes, transformations, file and line."""

from __future__ import annotations

import functools
import linecache
import os
from pathlib import Path
from typing import Any

from jax._src import source_info_util

Names = tuple[str, ...]


def names_of(eqn: Any) -> Names:
    """Return the modules and named scopes around an equation, outermost first."""
    return _scopes(eqn.source_info.name_stack)


def current_names() -> Names:
    """Return the scopes around the running code, except those outside of a ``jit``."""
    return _scopes(source_info_util.current_name_stack())


def scopes_and_transforms(eqn: Any) -> tuple[Names, tuple[str, ...]]:
    """Return the scopes around an equation, and the transformations that made it.

    A transformation is, for example, ``"jvp"``. If code is recomputed under checkpoint, JAX lists its scopes again
    inside of the transpose. This function returns each scope once.
    """
    return _scopes_and_transforms(eqn.source_info.name_stack)


def is_transformed_around(eqn: Any, scope: str) -> bool:
    """Return whether a transformation outside of a scope, such as a derivative, made an equation."""
    for entry in eqn.source_info.name_stack.stack:
        if not isinstance(entry, source_info_util.Scope):
            return True
        if scope in entry.name.split("/"):
            return False
    return False


@functools.lru_cache(maxsize=4096)
def _scopes_and_transforms(stack: Any) -> tuple[Names, tuple[str, ...]]:
    names: Names = ()
    part: list[str] = []
    transforms = []
    for entry in (*stack.stack, None):
        if isinstance(entry, source_info_util.Scope):
            part += entry.name.split("/")
            continue
        names = tuple(part) if tuple(part[: len(names)]) == names else (*names, *part)
        part = []
        transforms += [entry.name] if entry is not None else []
    return names, tuple(transforms)


@functools.lru_cache(maxsize=4096)
def _scopes(stack: Any) -> Names:
    """Return the scopes on a name stack, without transformations."""
    scopes = (entry for entry in stack.stack if isinstance(entry, source_info_util.Scope))
    return tuple(part for scope in scopes for part in scope.name.split("/"))


def origin_of(eqn: Any) -> int:
    """Return a number that an equation shares with the equations that are made from it.

    These are its derivatives, and the equations that a program has in its place after it was evaluated or rewritten.
    """
    return id(eqn.source_info.traceback)


def source_of(eqn: Any) -> str:
    """Return the file and line of an equation, as ``"package/module.py:12"``.

    The result names the innermost stack frame outside of JAX and jaxmp; without such a frame, the result is empty. The
    path begins at the outermost package of the file, so that the path is the same on every machine.
    """
    return next((_shown(*place) for place in _places(eqn)), "")


def user_source_of(eqn: Any) -> str:
    """Return the user's file and line of an equation.

    The search is that of :func:`source_of`, but skips the frames of installed libraries.
    """
    return source_among(_places(eqn))


def user_line_of(eqn: Any) -> str:
    """Return the text of the user's line that wrote an equation; empty if the file cannot be read."""
    for file, line in _places(eqn):
        if _is_users(file):
            return linecache.getline(file, line).strip()
    return ""


def _places(eqn: Any) -> list[tuple[str, int]]:
    """Return the files and lines of an equation, innermost first."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return [(frame.file_name, frame.start_line) for frame in frames]


def _shown(file: str, line: int) -> str:
    return f"{_from_package(file)}:{line}"


def _is_users(file: str) -> bool:
    """Return whether a file belongs to the user, not to an installed library."""
    return not _INSTALLED.intersection(Path(file).parts)


def source_among(places: list[tuple[str, int]]) -> str:
    """Return the user's innermost file and line among ``places``.

    ``places`` are the files and lines that a program names for an operation, innermost first.
    """
    return next((_shown(file, line) for file, line in places if _is_users(file)), "")


@functools.cache
def _from_package(file: str) -> str:
    """Return the path of a file, beginning at its outermost package."""
    *folders, top = Path(file).parents
    outside = (folder for folder in folders if not (folder / "__init__.py").exists())
    return Path(file).relative_to(next(outside, top)).as_posix()


_INSTALLED = frozenset({"site-packages", "dist-packages"})
# JAX excludes its own files and Python's library from the sources of a program. Exclude jaxmp's files too, and the
# modules that are frozen into Python, such as runpy.
source_info_util.register_exclusion(str(Path(__file__).parents[2]) + os.sep)  # the folder of jaxmp
source_info_util.register_exclusion("<frozen ")
