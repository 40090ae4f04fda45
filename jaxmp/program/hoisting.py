"""Compute the invariant part of a loop's body once, before the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmp._internals.jax.core import partial_eval_jaxpr_custom
from jaxmp._internals.jax.hi_primitives import policy_of_names
from jaxmp.program.equations import evaluate, opened


def hoist(
    fun: Callable[..., Any], fixed: Any, args: tuple[Any, ...], is_kept: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``fun`` as a function of ``args``, and compute its invariant part now.

    The invariant part depends only on ``fixed``, so it can be computed once, before a loop over ``args``. Invariant
    parts of calls, scans and recomputations are included, but not those of custom derivative rules. With the flag
    ``jax_remat3``, those of recomputations are left out, because JAX cannot split the hi primitive.

    Args:
      fun: a function of arrays.
      fixed: the argument that is the same in each iteration. The invariant part is not differentiated with respect to
        ``fixed``.
      args: arguments with the shapes of one iteration.
      is_kept: a policy for ``jax.checkpoint``.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(fixed, *args)
    (jaxpr, consts), known = opened(closed), jax.tree.leaves(fixed)
    varies = [n >= len(known) for n in range(len(jaxpr.invars))]
    before, turn, *_ = partial_eval_jaxpr_custom(jaxpr, varies, True, True, True, policy_of_names(is_kept))
    # Equations without results have effects, such as prints. Each iteration must run these effects.
    before = before.replace(eqns=[eqn for eqn in before.eqns if eqn.outvars])
    before, turn = (dce_jaxpr(body, [True] * len(body.outvars), True)[0] for body in (before, turn))
    results, tree = evaluate(before, consts, known), jax.tree.structure(shapes)
    turn = turn if results else jaxpr  # JAX's split would mark recomputations as differentiated
    return lambda *args: jax.tree.unflatten(tree, evaluate(turn, consts, [*results, *jax.tree.leaves(args)]))
