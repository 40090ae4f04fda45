"""Find the gradients that an optimizer discards, such as those of frozen params.

``optax.partition`` with ``optax.set_to_zero`` discards them. A ``set_to_zero`` behind Adam or a clip by the global norm
does not, because the gradients reach the state of Adam, or the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._internals.jax.traces import is_staged, program_so_far
from jaxmp.program.equations import is_literal


def without_discarded(grads: Any, results: Any) -> Any:
    """Return the gradients from which the results of an update are computed.

    If another gradient is not finite, the step need not be skipped. The gradients are found in the program that JAX
    traces. Outside of ``jax.jit``, and inside of ``jax.vmap``, all gradients count. If all count, ``grads`` itself is
    returned.

    Args:
      grads: the gradients that the update took.
      results: the new updates and the new state, or a tree that is computed from both.
    """
    leaves = jax.tree.leaves(grads)
    sources = [leaf for leaf in leaves if is_staged(leaf)]
    results = [leaf for leaf in jax.tree.leaves(results) if is_staged(leaf)]
    program = program_so_far([*sources, *results]) if sources else None
    if program is None:
        return grads
    variables, ends = program.outvars[: len(sources)], program.outvars[len(sources) :]
    reached = _reached(program.eqns, _without_literals(variables), _without_literals(ends))
    discarded = set()
    for leaf, var in zip(sources, variables, strict=True):
        if not is_literal(var) and var not in reached:
            discarded.add(id(leaf))
    return [leaf for leaf in leaves if id(leaf) not in discarded] if discarded else grads


def _reached(eqns: Sequence[Any], sources: set[Any], ends: set[Any]) -> set[Any]:
    """Return the variables from which ``ends`` are computed.

    The search ends at ``sources``. An equation with bodies counts as one operation: all of its results are computed
    from all of its operands.
    """
    reached = set(ends)
    for eqn in reversed(eqns):
        if any(var in reached and var not in sources for var in eqn.outvars):
            reached |= _without_literals(eqn.invars)
    return reached


def _without_literals(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not is_literal(atom)}
