"""Rebuild equations, with Python functions in place of their bodies.

The jaxprs in an equation are its bodies. This module calls JAX's public functions with the parameters of the equation
and the new bodies. Only ``remat2`` is bound directly, because its parameter ``differentiated`` has no public
equivalent. This module and ``derivative_rules.py`` read these private names:

- ``jvp_jaxpr_fun``, ``fwd_jaxpr_thunk``, ``bwd`` and ``out_trees`` of custom derivative rules
- ``newly_manual_axes`` of shard_map
- ``compiler_options_kvs`` of jit

Tests check these names on every supported version of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxmp.program.derivative_rules import (
    UNCHANGED_RULES,
    Arrays,
    BodyFunction,
    RuleEvaluation,
    call_with_jvp,
    call_with_vjp,
    rename,
)
from jaxmp.program.equations import Array, Bodies, Params, aval_of, opened, params_of, primitive_of
from jaxmp.program.primitives import Trait, with_trait


def rebuild(
    eqn: JaxprEqn, bodies: Bodies, functions: Sequence[BodyFunction], rules: RuleEvaluation = UNCHANGED_RULES
) -> BodyFunction:
    """Return ``eqn`` with other bodies, as a function of its operands.

    Args:
      eqn: an equation that :func:`jaxmp.program.equations.bodies_of` knows.
      bodies: the bodies of ``eqn``, from ``bodies_of``.
      functions: for each body, a function that takes the body's inputs (constants first) and returns a list of results.
      rules: the functions that trace and evaluate the derivative rules of custom_jvp and custom_vjp.

    Returns:
      A function of the operands. The carries among the operands must have the dtypes that the body returns. For ``jit``
      the function is jitted. For a remat, a scan or a conditional, you may pass more operands than ``eqn`` has. Each
      body takes these operands (in a scan, slices of them) after its inputs. It may then return more results.
    """
    params, name = eqn.params, primitive_of(eqn)
    if name in _INLINED:
        return functions[0]
    match name:
        case "jit":
            return _rebuild_jit(params, functions[0])
        case "remat2":
            return functools.partial(_bind_remat, eqn, functions[0])
        case "custom_jvp_call":
            return functools.partial(call_with_jvp, eqn, functions[0], rules)
        case "custom_vjp_call":
            return functools.partial(call_with_vjp, eqn, functions[0], rules)
        case "shard_map":
            return functools.partial(_bind_shard_map, params, functions[0])
        case "scan":
            return functools.partial(_bind_scan, params, bodies, functions[0])
        case "while":
            return functools.partial(_bind_while, bodies, functions)
        case "cond":
            return functools.partial(_bind_cond, params, functions)
    raise AssertionError(f"{name} has bodies, but no case in `rebuild`")


def is_body_alone(eqn: JaxprEqn) -> bool:
    """Return whether an equation does nothing but run its body.

    A ``jit`` without shardings and compiler options is such an equation.
    """
    name = primitive_of(eqn)
    return name in _INLINED or (name == "jit" and not _compile_options(eqn.params))


def _compile_options(params: Params) -> dict[str, Any]:
    """Return the shardings and the compiler options of a ``jit``."""
    options: dict[str, Any] = {}
    for option in ("in_shardings", "out_shardings"):
        if not all(map(_is_unspecified, params[option])):
            options[option] = tuple(None if _is_unspecified(sharding) else sharding for sharding in params[option])
    if params["compiler_options_kvs"]:
        options["compiler_options"] = dict(params["compiler_options_kvs"])
    return options


def _rebuild_jit(params: Params, function: BodyFunction) -> BodyFunction:
    options = {"keep_unused": params["keep_unused"], **_compile_options(params)}
    if params["inline"] is not False and getattr(params["inline"], "name", "") != "AUTO":  # an enum from JAX 0.11.2 on
        options["inline"] = params["inline"]
    # The function returns a tuple, because the shardings of its results are a tuple.
    return jax.jit(rename(lambda *args: tuple(function(*args)), params["name"]), **options)


def _is_unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


def _bind_shard_map(params: Params, function: BodyFunction, *operands: Array) -> list[Array]:
    mapped = jax.shard_map(
        lambda *args: tuple(function(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands))


def _bind_scan(params: Params, bodies: Bodies, function: BodyFunction, *operands: Array) -> list[Array]:
    stop = bodies.start + bodies.carry
    consts, init, xs = operands[: bodies.start], operands[bodies.start : stop], operands[stop:]

    def body(carry: Arrays, xs: Arrays) -> tuple[list[Array], list[Array]]:
        results = function(*consts, *carry, *xs)
        return results[: bodies.carry], results[bodies.carry :]

    # If `jax.export` makes the length symbolic, `jax.lax.scan` must read it from the scanned arrays.
    length = None if xs else params["length"]
    carry, ys = jax.lax.scan(body, list(init), list(xs), length, bodies.reverse, params["unroll"])
    return [*carry, *ys]


def _bind_while(bodies: Bodies, functions: Sequence[BodyFunction], *operands: Array) -> list[Array]:
    consts, body_consts = operands[: bodies.consts], operands[bodies.consts : bodies.start]

    def runs(carry: Arrays) -> Array:
        return functions[0](*consts, *carry)[0]

    def turn(carry: Arrays) -> list[Array]:
        return functions[1](*body_consts, *carry)

    def turn_of_examples(carry: Arrays) -> list[Array]:
        return keep_finished(runs(carry), turn(carry), carry)

    condition, _ = opened(bodies.jaxprs[0])
    if aval_of(condition.outvars[0]).shape:
        return jax.lax.while_loop(lambda carry: runs(carry).any(), turn_of_examples, list(operands[bodies.start :]))
    return jax.lax.while_loop(runs, turn, list(operands[bodies.start :]))


def keep_finished(still_runs: Array, new: Arrays, old: Arrays) -> list[Array]:
    """Return ``new`` for the examples that still run, and ``old`` for the others.

    ``still_runs`` is the condition of a while loop. Under ``jax.vmap``, it may have an element for each example. JAX's
    lowering of such a loop does the same.
    """
    if not still_runs.ndim:
        return list(new)

    def select(new: Array, old: Array) -> Array:
        of_examples = jax.lax.broadcast_in_dim(still_runs, new.shape, range(still_runs.ndim))
        return jax.lax.select(of_examples, new, old)

    return [select(*pair) for pair in zip(new, old, strict=True)]


def _bind_cond(params: Params, functions: Sequence[BodyFunction], *operands: Array) -> list[Array]:
    index, *args = operands
    if platforms := params.get("branches_platforms"):  # a branch for another device may not compile here
        named = {name: function for names, function in zip(platforms, functions, strict=True) for name in names or ()}
        default = functions[platforms.index(None)] if None in platforms else None
        return jax.lax.platform_dependent(*args, default=default, **named)
    return jax.lax.switch(index, list(functions), *args)


# Each of these equations is replaced by its body. Under checkpoint, JAX can then remove single equations of a
# `remat_opt` body if nothing reads their results.
_INLINED = with_trait(Trait.INLINED)


def _bind_remat(eqn: JaxprEqn, function: BodyFunction, *operands: Array) -> list[Array]:
    """Bind a remat with the parameters of ``eqn``.

    The parameter ``differentiated`` decides whether XLA may merge the recomputation with the original computation. A
    hi primitive does not have it.
    """
    params = params_of(eqn)
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):
        prevent_cse += (False,) * (len(operands) - len(prevent_cse))  # for operands that `eqn` does not have
    if "differentiated" not in params:
        checkpointed = jax.checkpoint(lambda *args: function(*args), policy=params["policy"], prevent_cse=prevent_cse)
        return list(checkpointed(*operands))
    jaxpr, consts = opened(jax.make_jaxpr(lambda *args: function(*args))(*operands))
    if isinstance(prevent_cse, tuple):
        prevent_cse = (*(False,) * len(consts), *prevent_cse)
    if jaxpr.constvars:
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    params = {**params, "jaxpr": jaxpr, "prevent_cse": prevent_cse}
    return list(eqn.primitive.bind(*consts, *operands, **params))
