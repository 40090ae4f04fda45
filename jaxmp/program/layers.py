"""Find the layers of a program: equal parts of a model, such as the blocks of a transformer.

The layers of a stack are scopes whose names differ only in numbers, such as ``Block_0`` and ``Block_1``.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.program import walk
from jaxmp.program.equations import bodies_of, is_literal
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.scopes import named_scopes


class Section(NamedTuple):
    """Consecutive equations of a jaxpr.

    A section has the fields of an equation and of an open jaxpr, so that :func:`jaxmp.program.walk.interpreted` can
    read it as either.

    Attributes:
      invars: the variables that the equations read, and that are computed before them.
      outvars: the variables that the equations compute, and that are read after them.
      eqns: the equations, or sections of them.
      layer: the path of the layer that computes them; empty outside of layers.
    """

    invars: Sequence[Var]
    outvars: Sequence[Var]
    eqns: Sequence[Any]
    layer: Names = ()
    constvars: Sequence[Var] = ()


def sections_of(jaxpr: Jaxpr) -> list[Section]:
    """Split the equations of an open jaxpr into sections, in order.

    Each section is a part of one layer, or lies outside of all layers. If layers are nested, the outermost count. A
    scope is not a layer if all its products are in inner layers and scans, as in a stage of a network.
    """
    paths = [named_scopes(names_of(eqn)) for eqn in jaxpr.eqns]
    layers = _layers(jaxpr.eqns, paths)
    pairs_by_layer = itertools.groupby(zip(jaxpr.eqns, paths, strict=True), lambda pair: _layer_of(pair[1], layers))
    eqns_by_layer = [(layer, [eqn for eqn, _ in pairs]) for layer, pairs in pairs_by_layer]
    sections = []
    read_later = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for layer, eqns in reversed(eqns_by_layer):
        computed = {var: None for eqn in eqns for var in eqn.outvars}
        read = {atom: None for eqn in eqns for atom in eqn.invars if not is_literal(atom)}
        invars = [var for var in read if var not in computed]
        outvars = [var for var in computed if var in read_later]
        sections.append(Section(invars, outvars, eqns, layer))
        read_later.update(invars)
    return sections[::-1]


def count_products(jaxpr: Any) -> int:
    """Return the number of products in a jaxpr or a section, and in the bodies there."""
    return sum(eqn.primitive.name in PRODUCTS for eqn in walk.equations(jaxpr))


def _layers(eqns: Sequence[JaxprEqn], paths: Sequence[Names]) -> Collection[Names]:
    """Return the paths of layers."""
    layers = set(_repeated_scopes(paths))
    products: Counter[Names] = Counter()  # by layer
    products_inside: Counter[Names] = Counter()  # by layer, the products in its inner layers and scans
    for eqn, path in zip(eqns, paths, strict=True):
        count = count_products(Section((), (), [eqn]))
        bodies = bodies_of(eqn)
        is_scan = bodies is not None and bodies.length is not None
        for prefix in _prefixes(path):
            products[prefix] += count
            products_inside[prefix] += count if is_scan else 0
    for layer in sorted(layers, key=len, reverse=True):  # inner layers first
        if products[layer] and products_inside[layer] == products[layer]:
            layers.remove(layer)
        elif products[layer] > 1:  # a scope with one product is a part of a layer, such as a dense layer
            for outer in _prefixes(layer[:-1]):
                products_inside[outer] += products[layer] - products_inside[layer]
    return layers


def _repeated_scopes(paths: Iterable[Names]) -> Iterable[Names]:
    """Return the paths that have a sibling whose name differs only in numbers."""
    siblings: dict[Names, set[Names]] = defaultdict(set)
    for path in set(paths):
        for prefix in _prefixes(path):
            without_numbers = re.sub(r"\d+", "*", prefix[-1])
            if without_numbers != prefix[-1]:
                siblings[(*prefix[:-1], without_numbers)].add(prefix)
    return itertools.chain.from_iterable(group for group in siblings.values() if len(group) > 1)


def _layer_of(path: Names, layers: Collection[Names]) -> Names:
    """Return the outermost layer around a path, or an empty path."""
    return next((prefix for prefix in _prefixes(path) if prefix in layers), ())


def _prefixes(path: Names) -> list[Names]:
    """Return a path and the paths around it, the outermost first."""
    return [path[:stop] for stop in range(1, len(path) + 1)]
