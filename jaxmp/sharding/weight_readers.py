"""The equations that read a weight, and the dtypes in which they read it.

A *move* is an equation that only rearranges a weight, such as a reshape or a slice. The *readers* of a weight are the
equations that use the weight after all moves and casts.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.engine.marks import DECIDED, region_of
from jaxmp.program.equations import bodies_of, is_literal, opened, primitive_of
from jaxmp.program.primitives import Trait, with_trait
from jaxmp.sharding.mesh_plan import COPIES

_REARRANGES = with_trait(Trait.PERMUTES, Trait.REPEATS, Trait.SLICES) | {"separate_cast"}


def only_moves_or_casts(eqn: Any) -> bool:
    """Return whether an equation only moves or casts its operand.

    An equation of ``Plan.copies`` does not count as a move.
    """
    if eqn.primitive.name == "convert_element_type":
        return bool(jnp.issubdtype(eqn.params["new_dtype"], jnp.floating))
    return primitive_of(eqn) in _REARRANGES and len(eqn.invars) == 1 and not is_copying(eqn)


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
        scopes_of_eqn = (*scopes, *names_of(eqn))
        body = _entered_body(eqn, position)
        if body is not None:
            inner_dtypes, inner_results = _dtypes_and_results(body, body.invars[position], scopes_of_eqn)
            dtypes |= inner_dtypes
            followed = [eqn.outvars[n] for n in inner_results]
        elif _is_undecided_lookup(eqn, position, scopes_of_eqn):
            dtypes.add(None)
            continue
        elif _is_lookup(eqn, position) or eqn.primitive.name == "dynamic_slice" or is_copying(eqn):
            followed = eqn.outvars
        else:
            is_repeated_cast = eqn.primitive.name == "cast_repeated"
            dtypes.add(np.dtype(eqn.params["dtype"] if is_repeated_cast else eqn.invars[position].aval.dtype))
            continue
        for moved in followed:
            more_dtypes, more_results = _dtypes_and_results(jaxpr, moved, scopes)
            dtypes |= more_dtypes
            results |= more_results
    return dtypes, results


def _is_lookup(eqn: Any, position: int) -> bool:
    """Return whether an equation looks up rows of its operand at ``position``."""
    return bool(eqn.primitive.name == "gather" and position == 0)


def _is_undecided_lookup(eqn: Any, position: int, scopes: Names) -> bool:
    """Return whether an equation is a lookup whose dtype autocast left unchanged."""
    return _is_lookup(eqn, position) and DECIDED in scopes and region_of(scopes).level is None


def _entered_body(eqn: Any, position: int) -> Any | None:
    """Return the body of a call or a scan that an operand enters, or None.

    The operand is the one at ``position``. In a scan, it is not part of the carry: it is the same in all iterations,
    or each iteration reads a slice.
    """
    bodies = bodies_of(eqn)
    if bodies is None:
        return None
    is_in_scan = bodies.is_loop and bodies.has_gradient and position not in bodies.carries
    return opened(bodies.jaxprs[0])[0] if bodies.is_call or is_in_scan else None


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
