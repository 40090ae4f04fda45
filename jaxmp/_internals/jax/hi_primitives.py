"""Hi primitives: equations of JAX's newer transforms, in the form of the equations that they replace.

With the flags ``jax_remat3``, ``jax_custom_jvp3`` and ``jax_custom_vjp3``, JAX traces ``jax.checkpoint`` and custom
derivative rules as equations of one primitive. Its parameter is an object, the *hi primitive*, which has the body, the
rules, and the types of the operands. The functions here return the parameters of the older equation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax._src import config
from jax._src.ad_checkpoint import name_p
from jax.custom_derivatives import SymbolicZero
from jax.interpreters.ad import Zero

Params = dict[str, Any]


def hi_primitive_of(eqn: Any) -> Any:
    """Return the hi primitive of an equation; None if the equation has none."""
    return eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None


def bind_to(primitive: Any, operand: Any) -> Any:
    """Bind a named identity (``checkpoint_name``) to an operand in another dtype than the original."""
    return type(primitive)(primitive.name, jax.typeof(operand))(operand)


def expansion_of(primitive: Any) -> Any:
    """Return the jaxpr that JAX compiles in place of a hi primitive.

    The result is None if the hi primitive is always differentiated before it is compiled.
    """

    def expand(*operands: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands))

    try:
        return jax.make_jaxpr(expand)(*primitive.in_avals_flat)
    except NotImplementedError:
        return None


def is_identity(primitive: Any) -> bool:
    """Return whether a hi primitive of one operand returns this operand."""
    cls = type(primitive)
    if cls not in _IDENTITIES:
        jaxpr = expansion_of(primitive)
        _IDENTITIES[cls] = (
            jaxpr is not None and not jaxpr.eqns and list(jaxpr.jaxpr.outvars) == list(jaxpr.jaxpr.invars)
        )
    return _IDENTITIES[cls]


_IDENTITIES: dict[type, bool] = {}


def transposable_checkpoint(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``jax.checkpoint`` of a linear function, as an equation that JAX can transpose.

    JAX 0.12 cannot transpose the hi primitive of ``jax_remat3``.
    """
    flag = getattr(config, "remat3", None)

    def call(*args: Any) -> Any:
        with contextlib.nullcontext() if flag is None else flag(False):
            return jax.checkpoint(fun, prevent_cse=False)(*args)

    return call


def policy_of_names(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy of ``jax.checkpoint`` that also decides on names in hi primitives."""

    def is_kept(primitive: Any, *avals: Any, **params: Any) -> Any:
        fields = getattr(params.get("_prim"), "params", {})
        is_name = fields.keys() == {"name"}
        return policy(name_p, *avals, **fields) if is_name else policy(primitive, *avals, **params)

    return is_kept


def older_params(primitive: Any) -> Params:
    """Return the parameters of a hi primitive, as the primitive that it replaces has them."""
    fields = primitive.params
    if "jvp_rule" in fields:
        return _params_of_custom_jvp(primitive)
    if "bwd" in fields:
        return _params_of_custom_vjp(primitive)
    if "traced_fwd" in fields:  # a forward rule with `optimize_remat`
        return {"fwd_jaxpr": primitive.traced_fwd.jaxpr}
    return dict(fields)


def _params_of_custom_jvp(primitive: Any) -> Params:
    """Return the parameters of a ``jax.custom_jvp``."""

    def trace_rule(*are_zero: bool) -> tuple[Any, list[Any], list[bool]]:
        primals_and_tangents = list(primitive.in_avals_flat)
        for aval, is_zero in zip(primitive.in_avals_flat, are_zero, strict=True):
            if not is_zero:
                primals_and_tangents.append(aval.to_tangent_aval())
        are_results_zero: list[bool] = []

        def rule(*arrays: Any) -> list[Any]:
            primals, nonzero_tangents = arrays[: len(are_zero)], iter(arrays[len(are_zero) :])
            tangents = []
            for aval, is_zero in zip(primitive.in_avals_flat, are_zero, strict=True):
                tangents.append(Zero(aval.to_tangent_aval()) if is_zero else next(nonzero_tangents))
            trees = (jax.tree.unflatten(primitive.in_tree, leaves) for leaves in (primals, tangents))
            results, tangents_out = map(primitive.out_tree.flatten_up_to, primitive.jvp(*trees))
            are_results_zero[:] = [isinstance(tangent, Zero) for tangent in tangents_out]
            return [*results, *(tangent for tangent in tangents_out if not isinstance(tangent, Zero))]

        jaxpr = jax.make_jaxpr(rule)(*primals_and_tangents)
        return jaxpr.jaxpr, list(jaxpr.consts), are_results_zero

    # The rule itself replaces zeros by arrays if its author asked for that.
    return {
        "call_jaxpr": primitive.traced.jaxpr,
        "jvp_jaxpr_fun": _Rule(trace_rule),
        "num_consts": 0,
        "symbolic_zeros": True,
    }


def _params_of_custom_vjp(primitive: Any) -> Params:
    """Return the parameters of a ``jax.custom_vjp``."""
    trees: list[Any] = []  # the tree of the residuals

    def trace_forward(*are_differentiated: bool) -> tuple[Any, list[Any]]:
        differentiated = jax.tree.unflatten(primitive.in_tree, are_differentiated)

        def rule(*operands: Any) -> list[Any]:
            results, residuals = primitive.vjp_fwd(differentiated, *jax.tree.unflatten(primitive.in_tree, operands))
            leaves, tree = jax.tree.flatten(residuals)
            trees[:] = [tree]
            return [*leaves, *primitive.out_tree.flatten_up_to(results)]

        jaxpr = jax.make_jaxpr(rule)(*primitive.in_avals_flat)
        return jaxpr.jaxpr, list(jaxpr.consts)

    def backward(*residuals_and_cotangents: Any) -> list[Any]:
        (tree,) = trees
        residuals = residuals_and_cotangents[: tree.num_leaves]
        cotangents = [
            Zero(cotangent.aval) if isinstance(cotangent, SymbolicZero) else cotangent
            for cotangent in residuals_and_cotangents[tree.num_leaves :]
        ]
        results, _log = primitive.bwd(
            jax.tree.unflatten(tree, residuals), jax.tree.unflatten(primitive.out_tree, cotangents)
        )
        # The first two operands hold arrays that the functions closed over, and have no cotangents.
        closed_over = len(jax.tree.leaves(primitive.in_avals[:2]))
        arguments: Any = jax.tree.structure(primitive.in_avals[2:])
        return [*[None] * closed_over, *arguments.flatten_up_to(results)]

    return {
        # Arrays that only the forward rule reads are operands, but not inputs of the body.
        "call_jaxpr": expansion_of(primitive) if primitive.in_avals[1] else primitive.traced.jaxpr,
        "fwd_jaxpr_thunk": _Rule(trace_forward),
        "bwd": _Rule(backward),
        "out_trees": lambda: (None, trees[0], [None] * trees[0].num_leaves),
        "num_consts": 0,
        "symbolic_zeros": True,
        "optimize_remat": primitive.opt_remat,
        "generic_batching": primitive.generic_batching,
    }


class _Rule(NamedTuple):
    """A function with the method by which JAX calls the functions in an equation."""

    call_wrapped: Callable[..., Any]
