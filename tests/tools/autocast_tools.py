"""Read the equations of programs under autocast, and compare gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp.program.equations import primitive_of
from jaxmp.program.walk import equations

# Compile quickly, without optimisation, and keep every rounding of the program.
compiled = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
)

HALVES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


def in_turn(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pair each name with one of the two half policies, in turn.

    One policy per name is enough, because the half dtype does not change the decisions.
    """
    return list(zip(names, itertools.cycle(HALVES)))


def half(fun: Any, policy: str = "mixed_bfloat16", overrides: Any = None) -> Any:
    """Return ``fun`` under autocast."""
    return jaxmp.autocast(fun, policy, overrides)


def both(fun: Any, policy: str, *args: Any) -> Any:
    """Return the results of ``fun`` under a policy and without one, in one program."""
    return compiled(lambda *args: (half(fun, policy)(*args), fun(*args)))(*args)


def operations(fun: Any, *args: Any) -> list[tuple[str, str]]:
    """Return the primitive and result dtype of each equation with a floating result.

    The equations are those of the traced ``fun``, including those in bodies.
    """
    names_and_dtypes = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        dtypes = [var.aval.dtype for var in eqn.outvars if hasattr(var.aval, "dtype")]
        if dtypes and jnp.issubdtype(dtypes[0], jnp.floating):
            names_and_dtypes.append((primitive_of(eqn), dtypes[0].name))
    return names_and_dtypes


def dtypes_of(name: str, fun: Any, *args: Any) -> list[str]:
    """Return the result dtypes of the primitive ``name`` in the traced ``fun``."""
    return [dtype for primitive, dtype in operations(fun, *args) if primitive == name]


def products(fun: Any, *args: Any) -> list[str]:
    """Return the operand dtypes of the products in the traced ``fun``, in order.

    Two different dtypes are joined by a plus.
    """
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    operand_dtypes = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name in names:
            operand_dtypes.append("+".join(sorted({var.aval.dtype.name for var in eqn.invars[:2]})))
    return operand_dtypes


def flat(tree: Any) -> np.ndarray:
    """Return all numbers of a tree as one vector."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def cosine(a: Any, b: Any) -> float:
    """Return the cosine between two trees of gradients."""
    x, y = flat(a), flat(b)
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Return normal float32 numbers.

    NumPy draws them, because JAX would compile for each shape.
    """
    return jax.device_put(np.float32(scale) * np.random.default_rng(seed).standard_normal(shape, np.float32))


def layer_norm(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Return a layer normalisation in the style of users."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + epsilon)
