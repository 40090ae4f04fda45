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
from jaxmp.program.binding import bind_equation, params_in_dtype
from jaxmp.program.equations import Bodies, is_literal, names_a_dtype, opened
from jaxmp.program.primitives import Class, classify
from jaxmp.program.rewriting import Rewriter

_FLOAT32 = np.dtype(np.float32)
_IN_FLOAT32 = (Class.POINTWISE, Class.ACCUMULATION, Class.LINALG)


def autocast_each_operation(fun: Callable[..., Any], half: Any) -> Callable[..., Any]:
    """Return ``fun`` with the dtype of each operation decided on its own."""

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _OperationRewriter(np.dtype(half)).evaluate(*opened(program), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


class _OperationRewriter(Rewriter):
    """A rewriter that decides the dtype of each operation."""

    def __init__(self, half: np.dtype) -> None:
        self.half = half

    def evaluate_literal(self, atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype)

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        dtype = _compute_dtype(self.half, eqn, operands)
        if dtype is None:
            return bind_equation(eqn, _cast_all(operands, [atom.aval.dtype for atom in eqn.invars]), eqn.params)
        params = params_in_dtype(eqn, dtype)
        return bind_equation(eqn, _cast_all(operands, [dtype] * len(operands)), params)

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        if bodies.is_call:
            return self.evaluate_body(eqn, bodies, 0, *operands)
        carries = [eqn.invars[n].aval.dtype if n in bodies.carries else None for n in range(len(operands))]
        return super().evaluate_bodies(eqn, bodies, _cast_all(operands, carries))

    def evaluate_body(self, eqn: Any, bodies: Bodies, number: int, *args: Any) -> list[Any]:
        """Return the results of a body, with those that are joined in their dtypes."""
        results = super().evaluate_body(eqn, bodies, number, *args)
        joined = bodies.joined(number)
        return _cast_all(results, [eqn.outvars[n].aval.dtype if n in joined else None for n in range(len(results))])


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


def _cast_all(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Cast float values to float dtypes, and leave all other values unchanged.

    The dtype None leaves a value unchanged.
    """
    pairs = zip(values, dtypes, strict=True)
    return [
        value if dtype is None or not is_castable(jax.typeof(value)) else value.astype(dtype) for value, dtype in pairs
    ]
