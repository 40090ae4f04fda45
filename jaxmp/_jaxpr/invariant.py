"""What is the same in all turns of a loop, computed once before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src.interpreters.partial_eval import partial_eval_jaxpr_custom
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmp._jaxpr.reading import evaluate, opened


def hoisted(
    fun: Callable[..., Any], fixed: Any, args: tuple[Any, ...], is_kept: Callable[..., Any]
) -> Callable[..., Any]:
    """``fun(fixed, *args)`` for a loop over ``args``: what ``is_kept`` names of ``fixed`` alone is computed once, here.

    It is found in calls, in scans and in what is computed again as well, but for what has a derivative rule around it.

    Args:
      fun: a function of arrays.
      fixed: the argument that is the same in each turn. No derivative by it leads through what is computed here.
      args: arguments like those of a turn.
      is_kept: a policy, as ``jax.checkpoint`` takes it.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(fixed, *args)
    (jaxpr, consts), known = opened(closed), jax.tree.leaves(fixed)
    varies = [n >= len(known) for n in range(len(jaxpr.invars))]
    before, turn, *_ = partial_eval_jaxpr_custom(jaxpr, varies, True, True, True, is_kept)
    before, turn = (dce_jaxpr(each, [True] * len(each.outvars), True)[0] for each in (before, turn))
    kept, tree = evaluate(before, consts, known), jax.tree.structure(shapes)
    turn = turn if kept else jaxpr  # JAX's splitting marks what is computed again as differentiated
    return lambda *args: jax.tree.unflatten(tree, evaluate(turn, consts, [*kept, *jax.tree.leaves(args)]))
