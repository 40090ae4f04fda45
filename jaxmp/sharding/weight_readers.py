"""The equations that read a weight, and the dtypes in which they read it.

A *move* is an equation that only rearranges a weight, such as a reshape or a slice. The *readers* of a weight are the
equations that use the weight after all moves and casts.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.equations import Bodies, bodies_of, is_literal, opened
from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.engine.marks import DECIDED, region_of
from jaxmp.sharding.mesh_plan import COPIES

_MOVES = frozenset({"reshape", "transpose", "squeeze", "rev", "copy", "name", "broadcast_in_dim", "slice", "split"})


def only_moves_or_casts(eqn: Any) -> bool:
    """Return whether an equation only moves or casts its operand.

    An equation of ``Plan.copies`` does not count as a move.
    """
    if eqn.primitive.name == "convert_element_type":
        return bool(jnp.issubdtype(eqn.params["new_dtype"], jnp.floating))
    return eqn.primitive.name in _MOVES and len(eqn.invars) == 1 and not is_copying(eqn)


def is_copying(eqn: Any) -> bool:
    """Return whether an equation comes from ``Plan.copies``."""
    return eqn.primitive.name == "broadcast_in_dim" and COPIES in names_of(eqn)


def has_one_reader(jaxpr: Any, var: Any) -> bool:
    """Return whether a weight has only one reader, and is not a result of the body."""
    readers = _readers(jaxpr, var)
    return len(readers) == 1 and readers[0][0] is not None


def dtypes_read(jaxpr: Any, var: Any) -> set[Any]:
    """Return the dtypes in which equations read a weight, or rows of the weight.

    Moves, casts and calls are followed to the equations that read their results. None stands for a lookup whose dtype
    autocast left unchanged. Such a lookup may be computed in float16 or bfloat16.
    """
    dtypes, results = _dtypes_and_results(jaxpr, var)
    return dtypes | {np.dtype(jaxpr.outvars[n].aval.dtype) for n in results}


def _dtypes_and_results(jaxpr: Any, var: Any, scopes: Names = ()) -> tuple[set[Any], set[int]]:
    """Return the dtypes in which a body reads a weight.

    Also return the positions of the body's results that are the weight itself.
    """
    dtypes, results = set[Any](), set[int]()
    for eqn, position in _readers(jaxpr, var):
        if eqn is None:
            results.add(position)
            continue
        dtype, passed_on = _read_by(eqn, position, (*scopes, *names_of(eqn)))
        dtypes |= dtype
        for moved in passed_on:
            more_dtypes, more_results = _dtypes_and_results(jaxpr, moved, scopes)
            dtypes |= more_dtypes
            results |= more_results
    return dtypes, results


def _read_by(eqn: Any, position: int, scopes: Names) -> tuple[set[Any], list[Any]]:
    """Return the dtypes in which an equation reads a weight.

    Also return the results that the caller must follow to their readers, such as the results of a lookup.
    """
    is_lookup = eqn.primitive.name == "gather" and position == 0
    if is_lookup and DECIDED in scopes and region_of(scopes).level is None:
        return {None}, []
    if is_lookup or eqn.primitive.name == "dynamic_slice" or is_copying(eqn):
        return set(), eqn.outvars
    bodies = bodies_of(eqn)
    if bodies is not None and (bodies.kind == "call" or _enters_scan(bodies, position)):
        inner, _ = opened(bodies.jaxprs[0])
        dtypes, results = _dtypes_and_results(inner, inner.invars[position], scopes)
        return dtypes, [eqn.outvars[n] for n in results]
    operand = eqn.invars[position].aval.dtype
    return {np.dtype(eqn.params["dtype"] if eqn.primitive.name == "cast_repeated" else operand)}, []


def _readers(jaxpr: Any, var: Any) -> list[tuple[Any, int]]:
    """Return the equations that read a weight after all its moves and casts.

    Each equation comes with the position of the weight among its operands. If the body returns the weight, the list has
    None in place of an equation, and the position of the result.
    """
    moved, readers = {var}, list[tuple[Any, int]]()
    for eqn in jaxpr.eqns:
        for position, atom in enumerate(eqn.invars):
            if is_literal(atom) or atom not in moved:
                continue
            if only_moves_or_casts(eqn):
                moved.update(eqn.outvars)
            else:
                readers.append((eqn, position))
    for n, atom in enumerate(jaxpr.outvars):
        if not is_literal(atom) and atom in moved:
            readers.append((None, n))
    return readers


def _enters_scan(bodies: Bodies, position: int) -> bool:
    """Return whether an operand enters a scan, but not as part of its carry.

    Such an operand is the same in all iterations, or each iteration reads a slice of it.
    """
    return bodies.kind == "scan" and not bodies.start <= position < bodies.start + bodies.carry
