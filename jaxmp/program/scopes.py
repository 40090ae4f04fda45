"""The scopes around equations: module calls and named scopes.

JAX keeps a stack of scopes for each equation. Scopes whose names begin with ``jaxmp.`` are jaxmp's own: marks of
policies and regions, and the calls of modules.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxmp._internals.jax.sources import Names

CALL_SCOPE = "jaxmp.call:"
"""The prefix of the scope around each call of a module. The number after the prefix distinguishes the calls."""
RECOMPUTED = "rematted_computation"
"""The scope of JAX around values that the backward pass computes again."""


def path_in(names: Names) -> str:
    """Join scopes by ``/``, without the scopes that jaxmp and JAX add."""
    return "/".join(named_scopes(names))


def named_scopes(names: Names) -> Names:
    """Return the scopes of modules and of the user, without the scopes that jaxmp and JAX add."""
    return tuple(filter(_is_named, names))


def _is_named(name: str) -> bool:
    return not name.startswith("jaxmp.") and name not in ("checkpoint", RECOMPUTED)


def paths_left(names: Names, readers: Iterable[Names]) -> list[str]:
    """Return the paths of the scopes that return a value, the innermost first.

    These scopes are calls of modules, and scopes that the user named.

    Args:
      names: the scopes in which the value is computed.
      readers: the scopes of each equation that reads the value.
    """
    shared = min((_count_shared_scopes(names, reader) for reader in readers), default=len(names))
    return [path_in(names[:stop]) for stop in range(len(names), shared, -1) if _is_left(names, stop)]


def enters_scope(names: Names, reader: Names) -> bool:
    """Return whether ``reader`` is in a scope that ``names`` is not in.

    Scopes that jaxmp and JAX add do not count.
    """
    return any(map(_is_named, reader[_count_shared_scopes(names, reader) :]))


def _is_left(names: Names, stop: int) -> bool:
    """Return whether ``names[stop - 1]`` is a module call or a named scope.

    The scope of a module's name contains a scope for each call (``CALL_SCOPE``). Of these scopes, only the scope of the
    call counts.
    """
    scope, inner = names[stop - 1], names[stop : stop + 1]
    return scope.startswith(CALL_SCOPE) or (_is_named(scope) and not any(name.startswith(CALL_SCOPE) for name in inner))


def _count_shared_scopes(names: Names, others: Names) -> int:
    """Return how many outermost scopes ``names`` and ``others`` share."""
    count = 0
    while count < min(len(names), len(others)) and names[count] == others[count]:
        count += 1
    return count
