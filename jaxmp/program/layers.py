"""Find the layers of a program: equal parts of a model, such as the blocks of a transformer.

The layers of a stack are scopes whose names differ only in numbers, such as ``Block_0`` and ``Block_1``.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.program.equations import is_literal
from jaxmp.program.scopes import named_scopes


class Section(NamedTuple):
    """Consecutive equations of a jaxpr, with the fields of an open jaxpr without constants.

    Attributes:
      invars: the variables that the equations read, and that are computed before them.
      outvars: the variables that the equations compute, and that are read after them.
      eqns: the equations.
      layer: the path of the layer that computes them; empty outside of layers.
    """

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]
    layer: Names = ()
    constvars: Sequence[Any] = ()


def sections_of(jaxpr: Any) -> list[Section]:
    """Split the equations of an open jaxpr into sections, in order.

    Each section is a part of one layer, or lies outside of all layers. If layers are nested, the outermost count.
    """
    paths = [named_scopes(names_of(eqn)) for eqn in jaxpr.eqns]
    layers = _repeated_scopes(paths)
    parts = itertools.groupby(zip(jaxpr.eqns, paths, strict=True), lambda pair: _layer_of(pair[1], layers))
    runs = [(layer, [eqn for eqn, _ in pairs]) for layer, pairs in parts]
    sections = []
    read_later = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for layer, eqns in reversed(runs):
        computed = [var for eqn in eqns for var in eqn.outvars]
        read = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not is_literal(atom))
        invars = [var for var in read if var not in set(computed)]
        outvars = [var for var in computed if var in read_later]
        sections.append(Section(invars, outvars, eqns, layer))
        read_later.update(invars)
    return sections[::-1]


def _repeated_scopes(paths: Iterable[Names]) -> Collection[Names]:
    """Return the paths that have a sibling whose name differs only in numbers."""
    siblings: dict[Names, set[Names]] = defaultdict(set)
    for path in set(paths):
        for stop, name in enumerate(path, 1):
            without_numbers = re.sub(r"\d+", "*", name)
            if without_numbers != name:
                siblings[(*path[: stop - 1], without_numbers)].add(path[:stop])
    return {path for alike in siblings.values() if len(alike) > 1 for path in alike}


def _layer_of(path: Names, layers: Collection[Names]) -> Names:
    """Return the outermost layer around a path, or an empty path."""
    prefixes = (path[:stop] for stop in range(1, len(path) + 1))
    return next((prefix for prefix in prefixes if prefix in layers), ())
