"""Rebuild equations, with Python functions in place of their inner jaxprs.

The jaxprs in an equation are its bodies. This module calls JAX's public functions with the parameters of the equation
and the new bodies. Only ``remat2`` is bound directly, because its parameter ``differentiated`` has no public
equivalent. The module reads these private names:

- ``jvp_jaxpr_fun``, ``fwd_jaxpr_thunk``, ``bwd`` and ``out_trees`` of custom derivative rules
- ``newly_manual_axes`` of shard_map
- ``compiler_options_kvs`` of jit

Tests check these names on every supported version of JAX.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from jaxmp.program.equations import (
    Bodies,
    Opened,
    evaluate,
    in_dtype_of_scatter,
    opened,
    shape_of,
)
from jaxmp.program.primitives import PRODUCTS, Trait, with_trait

Arrays = Sequence[Any]
BodyFunction = Callable[..., list[Any]]


class RuleEvaluation(NamedTuple):
    """Functions that trace and evaluate custom derivative rules."""

    # The arguments are: an open jaxpr and its constants, the operands, and for each result the requested dtype or None.
    evaluate: Callable[[Opened, Arrays, Sequence[Any]], list[Any]]
    tracing: Callable[[], contextlib.AbstractContextManager[None]]  # a context in which the user's rule is traced


UNCHANGED_RULES = RuleEvaluation(lambda body, args, _: evaluate(*body, args), contextlib.nullcontext)
"""An evaluation that leaves derivative rules unchanged."""


def rebuilt(eqn: Any, bodies: Bodies, functions: Sequence[BodyFunction], rule: RuleEvaluation) -> BodyFunction:
    """Return ``eqn`` with other bodies, as a function of its operands.

    Args:
      eqn: an equation that :func:`jaxmp.program.equations.bodies_of` knows.
      bodies: the bodies of ``eqn``, from ``bodies_of``.
      functions: for each body, a function that takes the body's inputs (constants first) and returns a list of results.
      rule: the functions that evaluate the derivative rules of custom_jvp and custom_vjp.

    Returns:
      A function of the operands. The carries among the operands must have the dtypes that the body returns. For ``jit``
      the function is jitted.
    """
    params, name = eqn.params, eqn.primitive.name
    if name in _INLINED:
        return functions[0]
    match name:
        case "jit":
            return _rebuilt_jit(params, functions[0])
        case "remat2":
            return functools.partial(_remat, eqn, functions[0])
        case "custom_jvp_call":
            return functools.partial(_custom_jvp, eqn, functions[0], rule)
        case "custom_vjp_call":
            return functools.partial(_custom_vjp, eqn, functions[0], rule)
        case "shard_map":
            return functools.partial(_shard_map, params, functions[0])
        case "scan":
            return functools.partial(_rebuilt_scan, params, bodies, functions[0])
        case "while":
            return functools.partial(_while, bodies, functions)
        case "cond":
            return functools.partial(_cond, params, functions)
    raise AssertionError(f"{name} has no bodies that can be rebuilt")


def bind_equation(eqn: Any, operands: Arrays, params: Any) -> list[Any]:
    """Bind an equation to other operands and parameters, and return its results."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def params_in_dtype(eqn: Any, dtype: np.dtype, precision: Any = None) -> dict[str, Any]:
    """Return an equation's parameters for another dtype.

    ``precision`` is the precision of the result if the equation is a float32 product.
    """
    params = dict(eqn.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = in_dtype_of_scatter(params["update_jaxpr"], dtype)
    if eqn.primitive.name in PRODUCTS:
        # A precision or an algorithm (jax.lax.DotAlgorithmPreset) is valid only for the product's original dtypes.
        params["precision"] = precision if dtype == np.float32 else None
    return params


def is_body_alone(eqn: Any) -> bool:
    """Return whether an equation does nothing but run its body.

    A ``jit`` without shardings and compiler options is such an equation.
    """
    return eqn.primitive.name in _INLINED or (eqn.primitive.name == "jit" and not _compiled_as(eqn.params))


def _compiled_as(params: Any) -> dict[str, Any]:
    """Return the shardings and the compiler options of a ``jit``."""
    options: dict[str, Any] = {}
    for option in ("in_shardings", "out_shardings"):
        if not all(map(_is_unspecified, params[option])):
            options[option] = tuple(None if _is_unspecified(sharding) else sharding for sharding in params[option])
    if params["compiler_options_kvs"]:
        options["compiler_options"] = dict(params["compiler_options_kvs"])
    return options


def _rebuilt_jit(params: Any, function: BodyFunction) -> BodyFunction:
    options = {"keep_unused": params["keep_unused"], **_compiled_as(params)}
    if params["inline"] is not False and getattr(params["inline"], "name", "") != "AUTO":  # an enum from JAX 0.11.2 on
        options["inline"] = params["inline"]
    # The function returns a tuple, because the shardings of its results are a tuple.
    return jax.jit(renamed(lambda *args: tuple(function(*args)), params["name"]), **options)


def _is_unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` under another name, for compiled programs and profiles."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


def function_name(eqn: Any) -> str:
    """Return the name of a function with a custom derivative rule."""
    jaxpr, _ = opened(eqn.params["call_jaxpr"])
    return str(getattr(jaxpr.debug_info, "func_name", "") or eqn.primitive.name)


def _shard_map(params: Any, function: BodyFunction, *operands: Any) -> list[Any]:
    mapped = jax.shard_map(
        lambda *args: tuple(function(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands))


def _rebuilt_scan(params: Any, bodies: Bodies, function: BodyFunction, *operands: Any) -> list[Any]:
    stop = bodies.start + bodies.carry
    consts, init, xs = operands[: bodies.start], operands[bodies.start : stop], operands[stop:]

    def body(carry: Arrays, xs: Arrays) -> tuple[list[Any], list[Any]]:
        results = function(*consts, *carry, *xs)
        return results[: bodies.carry], results[bodies.carry :]

    # If `jax.export` makes the length symbolic, `jax.lax.scan` must read it from the scanned arrays.
    length = None if xs else params["length"]
    carry, ys = jax.lax.scan(body, list(init), list(xs), length, params["reverse"], params["unroll"])
    return [*carry, *ys]


def _while(bodies: Bodies, functions: Sequence[BodyFunction], *operands: Any) -> list[Any]:
    consts, body_consts = operands[: bodies.consts], operands[bodies.consts : bodies.start]
    condition, _ = opened(bodies.jaxprs[0])
    is_batched = bool(condition.outvars[0].aval.shape)

    def runs(carry: Arrays) -> Any:
        return functions[0](*consts, *carry)[0]

    def turn(carry: Arrays) -> list[Any]:
        return functions[1](*body_consts, *carry)

    def turn_of_examples(carry: Arrays) -> list[Any]:
        """Run one iteration, and keep its results only for the examples that still run.

        JAX's lowering of a batched condition does the same.
        """
        still_runs = runs(carry)

        def select(new: Any, old: Any) -> Any:
            of_examples = jax.lax.broadcast_in_dim(still_runs, new.shape, range(still_runs.ndim))
            return jax.lax.select(of_examples, new, old)

        return [select(new, old) for new, old in zip(turn(carry), carry, strict=True)]

    if is_batched:
        return jax.lax.while_loop(lambda carry: runs(carry).any(), turn_of_examples, list(operands[bodies.start :]))
    return jax.lax.while_loop(runs, turn, list(operands[bodies.start :]))


def _cond(params: Any, functions: Sequence[BodyFunction], *operands: Any) -> list[Any]:
    index, *args = operands
    if platforms := params.get("branches_platforms"):  # a branch for another device may not compile here
        named = {name: function for names, function in zip(platforms, functions, strict=True) for name in names or ()}
        default = functions[platforms.index(None)] if None in platforms else None
        return jax.lax.platform_dependent(*args, default=default, **named)
    return jax.lax.switch(index, list(functions), *args)


# Each of these equations is replaced by its body. Under checkpoint, JAX can then remove single equations of a
# `remat_opt` body if nothing reads their results.
_INLINED = with_trait(Trait.INLINED)


def _remat(eqn: Any, function: BodyFunction, *operands: Any) -> list[Any]:
    """Bind a remat with the parameters of ``eqn``.

    The parameter ``differentiated`` decides whether XLA may merge the recomputation with the original computation.
    """
    jaxpr, consts = opened(jax.make_jaxpr(lambda *args: function(*args))(*operands))
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, tuple):
        more = len(operands) - len(prevent_cse)  # the number of operands that `eqn` does not have
        prevent_cse = (*(False,) * len(consts), *prevent_cse, *(False,) * more)
    if jaxpr.constvars:
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    params = {**eqn.params, "jaxpr": jaxpr, "prevent_cse": prevent_cse}
    return list(eqn.primitive.bind(*consts, *operands, **params))


def _evaluate_rule(rule: RuleEvaluation, traced: Opened, args: Arrays, dtypes: Sequence[Any]) -> list[Any]:
    """Evaluate a traced derivative rule.

    From JAX 0.11 on, the constants of the rule are the first arguments of its jaxpr.
    """
    jaxpr, consts = traced
    if jaxpr.constvars:
        return rule.evaluate((jaxpr, consts), args, dtypes)
    return rule.evaluate((jaxpr, []), [*consts, *args], dtypes)


def _custom_jvp(eqn: Any, function: BodyFunction, rule: RuleEvaluation, *operands: Any) -> list[Any]:
    params = eqn.params
    # The constants are arrays that the function closes over. A custom_jvp has no derivative with respect to them.
    count = params["num_consts"]
    consts, primals = operands[:count], operands[count:]
    call = jax.custom_jvp(renamed(lambda *args: function(*consts, *args), function_name(eqn)))

    def jvp(primals: Arrays, tangents: Arrays) -> tuple[list[Any], list[Any]]:
        zeros = [isinstance(tangent, SymbolicZero) for tangent in tangents]
        with rule.tracing():
            jaxpr, rule_consts, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
        results = jax.eval_shape(lambda *args: function(*consts, *args), *primals)
        dtypes = [result.dtype for result in results]
        nonzero = [tangent for tangent in tangents if not isinstance(tangent, SymbolicZero)]
        tangent_dtypes = [dtype for dtype, zero in zip(dtypes, out_zeros, strict=True) if not zero]
        out = _evaluate_rule(rule, (jaxpr, rule_consts), [*primals, *nonzero], [*dtypes, *tangent_dtypes])
        primals_out, tangents_out = out[: len(dtypes)], iter(out[len(dtypes) :])
        return primals_out, [
            SymbolicZero(jax.typeof(primal).to_tangent_aval()) if zero else next(tangents_out)
            for primal, zero in zip(primals_out, out_zeros, strict=True)
        ]

    call.defjvp(jvp, symbolic_zeros=params["symbolic_zeros"])
    return list(call(*primals))


def _custom_vjp(eqn: Any, function: BodyFunction, rule: RuleEvaluation, *operands: Any) -> list[Any]:
    params = eqn.params
    count = params["num_consts"]
    consts, primals = operands[:count], operands[count:]
    dtypes = [jax.typeof(primal).dtype for primal in primals]  # a literal may be a Python bool
    call = jax.custom_vjp(renamed(lambda *args: function(*consts, *args), function_name(eqn)))

    symbolic = params["symbolic_zeros"]
    perturbed = [True] * len(primals)

    def forward() -> tuple[Any, list[Any]]:
        with rule.tracing():
            return params["fwd_jaxpr_thunk"].call_wrapped(*perturbed)

    def fwd(*args: Any) -> tuple[list[Any], list[Any]]:
        if symbolic:
            perturbed[:] = [arg.perturbed for arg in args]
            args = tuple(arg.value for arg in args)
        jaxpr = forward()  # call `forward` first, because this call fills `out_trees`
        # `forwarded` has positions among the operands of `eqn`, including the constants.
        _, residual_tree, forwarded = params["out_trees"]()
        saved = residual_tree.num_leaves - sum(position is not None for position in forwarded)
        results = jax.eval_shape(lambda *args: function(*consts, *args), *args)
        out = _evaluate_rule(rule, jaxpr, args, [*[None] * saved, *(result.dtype for result in results)])
        new = iter(out[:saved])
        return out[saved:], [next(new) if position is None else args[position - count] for position in forwarded]

    def bwd(residuals: Arrays, cotangents: Arrays) -> tuple[Any, ...]:
        new = iter(var.aval for var in forward()[0].outvars)
        _, _, forwarded = params["out_trees"]()
        written = [next(new) if position is None else eqn.invars[position].aval for position in forwarded]
        written += [var.aval.to_ct_aval() for var in eqn.outvars]
        # Symbolic zeros, Python values and the cotangents of integers cannot be operands of a program.
        operands = [
            SymbolicZero(aval) if isinstance(value, SymbolicZero) else value
            for value, aval in zip([*residuals, *cotangents], written, strict=True)
        ]
        floating = [n for n, value in enumerate(operands) if isinstance(value, jax.Array) and value.dtype != float0]
        present: list[bool] = []

        def flat(*args: Any) -> list[Any]:
            filled = dict(zip(floating, args, strict=True))
            result = params["bwd"].call_wrapped(*[filled.get(n, value) for n, value in enumerate(operands)])
            cts = result[0] if isinstance(result, tuple) else result  # from JAX 0.11 on, a log is the second result
            present[:] = [isinstance(ct, (jax.Array, np.ndarray)) for ct in cts]
            return [ct for ct, here in zip(cts, present, strict=True) if here]

        avals = [shape_of(written[n]) for n in floating]
        with rule.tracing():
            traced = opened(jax.make_jaxpr(flat)(*avals))
        wanted = [dtype for dtype, here in zip(dtypes, present, strict=True) if here]
        out = iter(rule.evaluate(traced, [operands[n] for n in floating], wanted))
        return tuple(next(out) if here else None for here in present)

    call.defvjp(fwd, bwd, symbolic_zeros=symbolic)
    return list(call(*primals))
