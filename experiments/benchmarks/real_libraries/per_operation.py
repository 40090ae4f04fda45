"""Mixed precision without a graph: the dtype of each operation depends on its own operands only.

Products have half operands and half results. The operations that are float32 in jaxmp's table of primitives read
float32 operands. All other operations promote their operands, as JAX does, and loops keep the dtypes of their carries.
Weights are cast where they are used. PyTorch's autocast follows the same principle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.dtypes import is_castable
from jaxmp.program.bodies import UNCHANGED_RULES, bind_equation, params_in_dtype, rebuilt
from jaxmp.program.equations import Bodies, bodies_of, is_literal, names_a_dtype, opened
from jaxmp.program.primitives import Class, classify
from jaxmp.program.walk import interpreted

_FLOAT32 = np.dtype(np.float32)
_IN_FLOAT32 = (Class.POINTWISE, Class.ACCUMULATION, Class.LINALG)


def autocast_each_operation(fun: Callable[..., Any], half: Any) -> Callable[..., Any]:
    """Return ``fun`` with the dtype of each operation decided on its own."""

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _evaluate(np.dtype(half), program, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _evaluate(half: np.dtype, program: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr, consts = opened(program)
    return interpreted(jaxpr, consts, args, functools.partial(_results, half), _array_of_literal)


def _array_of_literal(atom: Any) -> Any:
    return jnp.asarray(atom.val, atom.aval.dtype)


def _results(half: np.dtype, eqn: Any, operands: list[Any]) -> Sequence[Any]:
    bodies = bodies_of(eqn)
    if bodies is not None:
        return _results_of_bodies(half, eqn, bodies, operands)
    dtype = _compute_dtype(half, eqn, operands)
    if dtype is None:
        return bind_equation(eqn, _cast_all(operands, [atom.aval.dtype for atom in eqn.invars]), eqn.params)
    params = params_in_dtype(eqn, dtype, is_exact=False)
    return bind_equation(eqn, _cast_all(operands, [dtype] * len(operands)), params)


def _compute_dtype(half: np.dtype, eqn: Any, operands: Sequence[Any]) -> np.dtype | None:
    """Return the dtype in which an operation computes; None if it keeps its original dtypes."""
    cls = classify(eqn.primitive.name)
    is_fixed = cls in (Class.OPAQUE, Class.RECURSE, None) or names_a_dtype(eqn)
    if is_fixed or not any(is_castable(var.aval) for var in eqn.outvars):
        return None
    if cls is Class.HALF:
        return half
    if cls in _IN_FLOAT32:
        return _FLOAT32
    pairs = zip(operands, eqn.invars, strict=True)
    dtypes = [value.dtype for value, atom in pairs if is_castable(jax.typeof(value)) and not is_literal(atom)]
    return functools.reduce(np.promote_types, dtypes) if dtypes else None


def _results_of_bodies(half: np.dtype, eqn: Any, bodies: Bodies, operands: list[Any]) -> Sequence[Any]:
    functions = [lambda *args, body=body: _evaluate(half, body, args) for body in bodies.jaxprs]
    if bodies.kind == "call":
        return functions[0](*operands)
    results = [var.aval.dtype for var in eqn.outvars]
    if bodies.kind == "cond":
        functions = [_returning(results, function) for function in functions]
    else:  # a carry keeps its dtype
        stop = bodies.start + bodies.carry
        dtypes = [atom.aval.dtype for atom in eqn.invars[bodies.start : stop]]
        operands[bodies.start : stop] = _cast_all(operands[bodies.start : stop], dtypes)
        functions[-1] = _returning(results[: bodies.carry], functions[-1])
    return rebuilt(eqn, bodies, functions, UNCHANGED_RULES)(*operands)


def _returning(dtypes: Sequence[Any], function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return ``function`` with its first results cast to ``dtypes``."""

    def call(*args: Any) -> list[Any]:
        results = function(*args)
        return [*_cast_all(results[: len(dtypes)], dtypes), *results[len(dtypes) :]]

    return call


def _cast_all(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Cast float values to float dtypes, and leave all other values unchanged."""
    pairs = zip(values, dtypes, strict=True)
    return [value.astype(dtype) if is_castable(jax.typeof(value)) else value for value, dtype in pairs]
