"""Rebuild calls of functions with custom derivative rules.

JAX runs a derivative rule later than the call, and only if the call is differentiated. Then the rule is traced, and
:class:`RuleEvaluation` evaluates its program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0
from jax.extend.core import JaxprEqn
from jax.interpreters.ad import zeros_like_aval

from jaxmp.program.equations import Array, Opened, Params, evaluate, opened, params_of, shape_of

Arrays = Sequence[Array]
BodyFunction = Callable[..., list[Array]]
"""A function of the inputs of a body (constants first), or of the operands of an equation. It returns the results."""


class RuleEvaluation(NamedTuple):
    """Functions that trace and evaluate custom derivative rules."""

    # The arguments are: an open jaxpr and its constants, the operands, and for each result the requested dtype or None.
    evaluate: Callable[[Opened, Arrays, Sequence[np.dtype | None]], list[Array]]
    tracing: Callable[[], contextlib.AbstractContextManager[None]]  # a context in which the user's rule is traced


UNCHANGED_RULES = RuleEvaluation(lambda body, args, _: evaluate(*body, args), contextlib.nullcontext)
"""An evaluation that leaves derivative rules unchanged."""


def rename(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` under another name, for compiled programs and profiles."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


def _function_name(params: Params) -> str:
    """Return the name of a function with a custom derivative rule."""
    jaxpr, _ = opened(params["call_jaxpr"])
    return str(getattr(jaxpr.debug_info, "func_name", "") or "custom_rule")


def _evaluate_rule(
    rules: RuleEvaluation, traced: Opened, args: Arrays, dtypes: Sequence[np.dtype | None]
) -> list[Array]:
    """Evaluate a traced derivative rule.

    From JAX 0.11 on, the constants of the rule are the first arguments of its jaxpr.
    """
    jaxpr, consts = traced
    if jaxpr.constvars:
        return rules.evaluate((jaxpr, consts), args, dtypes)
    return rules.evaluate((jaxpr, []), [*consts, *args], dtypes)


def call_with_jvp(eqn: JaxprEqn, function: BodyFunction, rules: RuleEvaluation, *operands: Array) -> list[Array]:
    """Call ``function`` in place of the body of a custom_jvp, with its rule."""
    params = params_of(eqn)
    # The constants are arrays that the function closes over. A custom_jvp has no derivative with respect to them.
    count = params["num_consts"]
    consts, primals = operands[:count], operands[count:]
    call = jax.custom_jvp(rename(lambda *args: function(*consts, *args), _function_name(params)))

    def jvp(primals: Arrays, tangents: Arrays) -> tuple[list[Array], list[Array]]:
        zeros = [isinstance(tangent, SymbolicZero) for tangent in tangents]
        with rules.tracing():
            jaxpr, rule_consts, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
        results = jax.eval_shape(lambda *args: function(*consts, *args), *primals)
        dtypes = [result.dtype for result in results]
        nonzero = [tangent for tangent in tangents if not isinstance(tangent, SymbolicZero)]
        tangent_dtypes = [dtype for dtype, zero in zip(dtypes, out_zeros, strict=True) if not zero]
        out = _evaluate_rule(rules, (jaxpr, rule_consts), [*primals, *nonzero], [*dtypes, *tangent_dtypes])
        primals_out, tangents_out = out[: len(dtypes)], iter(out[len(dtypes) :])
        return primals_out, [
            SymbolicZero(jax.typeof(primal).to_tangent_aval()) if zero else next(tangents_out)
            for primal, zero in zip(primals_out, out_zeros, strict=True)
        ]

    call.defjvp(jvp, symbolic_zeros=params["symbolic_zeros"])
    return list(call(*primals))


def call_with_vjp(eqn: JaxprEqn, function: BodyFunction, rules: RuleEvaluation, *operands: Array) -> list[Array]:
    """Call ``function`` in place of the body of a custom_vjp, with its rule."""
    params = params_of(eqn)
    count = params["num_consts"]
    consts, primals = operands[:count], operands[count:]
    dtypes = [jax.typeof(primal).dtype for primal in primals]  # a literal may be a Python bool
    call = jax.custom_vjp(rename(lambda *args: function(*consts, *args), _function_name(params)))

    # Which operands are differentiated. An operand may be an array that the function closed over before it was batched;
    # its forward rule raises an error if JAX says that such an array is differentiated.
    perturbed = [True] * len(primals)

    def forward() -> Opened:
        with rules.tracing():
            return params["fwd_jaxpr_thunk"].call_wrapped(*perturbed)

    def fwd(*args: Array) -> tuple[list[Array], list[Array]]:
        perturbed[:] = [arg.perturbed for arg in args]
        args = tuple(arg.value for arg in args)
        jaxpr = forward()  # call `forward` first, because this call fills `out_trees`
        # `forwarded` has positions among the operands of `eqn`, including the constants.
        _, residual_tree, forwarded = params["out_trees"]()
        saved = residual_tree.num_leaves - sum(position is not None for position in forwarded)
        results = jax.eval_shape(lambda *args: function(*consts, *args), *args)
        out = _evaluate_rule(rules, jaxpr, args, [*[None] * saved, *(result.dtype for result in results)])
        new = iter(out[:saved])
        return out[saved:], [next(new) if position is None else args[position - count] for position in forwarded]

    def bwd(residuals: Arrays, cotangents: Arrays) -> tuple[Array | None, ...]:
        new = iter(var.aval for var in forward()[0].outvars)
        _, _, forwarded = params["out_trees"]()
        written: list[Any] = [next(new) if position is None else eqn.invars[position].aval for position in forwarded]
        written += [var.aval.to_ct_aval() for var in eqn.outvars]
        # Symbolic zeros, Python values and the cotangents of integers cannot be operands of a program.
        if not params["symbolic_zeros"]:
            cotangents = [zeros_like_aval(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
        operands = [
            SymbolicZero(aval) if isinstance(value, SymbolicZero) else value
            for value, aval in zip([*residuals, *cotangents], written, strict=True)
        ]
        floating = [n for n, value in enumerate(operands) if isinstance(value, jax.Array) and value.dtype != float0]
        present: list[bool] = []

        def flat(*args: Array) -> list[Array]:
            filled = dict(zip(floating, args, strict=True))
            result = params["bwd"].call_wrapped(*[filled.get(n, value) for n, value in enumerate(operands)])
            cts = result[0] if isinstance(result, tuple) else result  # from JAX 0.11 on, a log is the second result
            present[:] = [isinstance(ct, (jax.Array, np.ndarray)) for ct in cts]
            return [ct for ct, here in zip(cts, present, strict=True) if here]

        avals = [shape_of(written[n]) for n in floating]
        with rules.tracing():
            traced = opened(jax.make_jaxpr(flat)(*avals))
        wanted = [dtype for dtype, here in zip(dtypes, present, strict=True) if here]
        out = iter(rules.evaluate(traced, [operands[n] for n in floating], wanted))
        return tuple(next(out) if here else None for here in present)

    call.defvjp(fwd, bwd, symbolic_zeros=True)
    # A hi primitive keeps these options, which `defvjp` refuses together with symbolic zeros or does not have.
    for option in params.keys() & {"optimize_remat", "generic_batching"}:
        setattr(call, option, params[option])
    return list(call(*primals))
