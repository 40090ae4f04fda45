"""The overrides that apply to an operation, and the overrides that match no operation of a program.

Overrides of modules are resolved elsewhere, by ``PolicyMap.resolve``: by path and class, before the code of the module
is traced. Here only the scopes of a traced program are known. Both use ``covers`` and ``unmatched`` of
:mod:`jaxmp.policy.patterns`.
"""

from __future__ import annotations

import functools
import glob
from collections.abc import Mapping

from jaxmp._internals.jax.sources import Names
from jaxmp.base.dtypes import closest_names
from jaxmp.engine.marks import path_of
from jaxmp.engine.overrides import Level
from jaxmp.policy.patterns import EVERY, OPERATIONS, better_patterns, covers, path_and_primitive, unmatched
from jaxmp.program.primitives import classify

_NO_SCOPES = (
    "none: the function has no scopes; use jax.named_scope, jaxmp.nnx.autocast for an NNX model, or the overrides of "
    "apply_policy for a model with a policy"
)


class OverrideMatcher:
    """Find the overrides of operations, and record the operations of a program for errors.

    Attributes:
      levels: the levels of paths, primitives and classes, from :func:`jaxmp.engine.overrides.levels_of`.
      in_model: whether the first scope of each path is the model. A key may leave it out.
      paths: the keys that are paths, with or without a primitive.
    """

    def __init__(self, levels: Mapping[str, Level], in_model: bool = False) -> None:
        self.levels, self.in_model = levels, in_model
        self.paths = [key for key in levels if not key.startswith(OPERATIONS)]
        self._keys_of = functools.lru_cache(maxsize=None)(self._find_keys)
        self._matched: set[str] = set()
        self._visited: set[tuple[Names, str]] = set()  # paths and primitives

    def levels_of(self, name: str, names: Names) -> dict[str, Level]:
        """Return the overrides that count for a primitive in these scopes, the strongest first.

        They are the first path that matches, and then the overrides of operations.
        """
        if not self.levels:
            return {}
        paths, operations = self._keys_of(name, path_of(names))
        return {key: self.levels[key] for key in (*paths[:1], *operations)}

    def _find_keys(self, name: str, path: Names) -> tuple[list[str], list[str]]:
        """Return the keys of paths and of operations that match a primitive at a path."""
        paths = []
        for key in self.paths:
            pattern, primitive = path_and_primitive(key)
            is_covered = covers(pattern, path) or (self.in_model and covers(pattern, path[1:]))
            if primitive in ("", name) and is_covered:
                paths.append(key)
        operations = [f"primitive:{name}", f"class:{classify(name)}", EVERY]
        return paths, [key for key in operations if key in self.levels]

    def visit(self, name: str, names: Names) -> None:
        """Record an operation of the program."""
        if self.levels:
            self._visited.add((path_of(names), name))

    def match(self, name: str, names: Names) -> None:
        """Record that the overrides of an operation matched."""
        if self.levels:
            for keys in self._keys_of(name, path_of(names)):
                self._matched.update(keys)

    def check(self) -> None:
        """Raise an UnmatchedOverrideError if an override matched nothing.

        The error lists the nearest names.
        """
        for key in self.levels:
            if key not in self._matched:
                hint = "Autocast sees operations of the derivative only in autocast(grad(f))"
                raise unmatched(key, "an operation", f"{self._nearest(key)}. {hint}")

    def _nearest(self, key: str) -> str:
        """Return the names of the program that are nearest to a key."""
        primitives = sorted({name for _, name in self._visited})
        if key in primitives:
            return f"key: 'primitive:{key}'"
        if key not in self.paths:
            return f"primitives: {closest_names(key.partition(':')[2], primitives)}"
        primitive = path_and_primitive(key)[1]
        visited = {(names, f":{name}" if primitive else "") for names, name in self._visited if names}
        known = sorted(glob.escape("/".join(names)) + name for names, name in visited)
        remedy = "" if primitive else better_patterns(key, [names for names, _ in self._visited])
        return f"paths: {closest_names(key, known) or _NO_SCOPES}{remedy}"
