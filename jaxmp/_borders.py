"""What becomes of values at the borders of modules under a policy, for both adapters.

A module with a ``dtype`` field computes as it is written. One that has params and no such field is traced in float32,
and the engine decides what in it is half: half values are widened on their way into it, which the engine sees through,
and what it computes leaves it in its compute dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import tree as _tree
from jaxmp._jaxpr.reading import loop_of
from jaxmp.dtypes import is_half
from jaxmp.engine.marks import widened


def widen(value: Any) -> Any:
    """A leaf for code that is traced in float32: half arrays are widened."""
    return widened(jnp.asarray(value)) if _tree.is_float_array(value) and is_half(value.dtype) else value


def narrow(value: Any, dtype: np.dtype) -> Any:
    """A leaf as code that is traced in float32 hands it out: in the compute dtype of its module, where that is half."""
    return (
        value.astype(dtype) if _tree.is_float_array(value) and value.dtype == np.float32 and is_half(dtype) else value
    )


def carried_by(args: Any, around: list[Any]) -> Any | None:
    """The first of the arguments of a module's method if it is the carry of a loop, whose body calls the method.

    Args:
      args: the positional arguments.
      around: the traces that the method which called was in: in a loop among them it was the body, not this one.
    """
    loop = loop_of(jax.tree.leaves(args[0])) if args else None
    return args[0] if loop is not None and all(loop is not trace for trace in around) else None


def as_carry(result: Any, carry: Any) -> Any:
    """The ``result`` of a loop's body with the new carry, all of it or its first part, in the dtypes of ``carry``."""
    if same_structure(result, carry):
        return jax.tree.map(like, result, carry)
    if isinstance(result, tuple) and result and same_structure(result[0], carry):
        return (jax.tree.map(like, result[0], carry), *result[1:])
    return result


def same_structure(tree: Any, other: Any) -> bool:
    """Whether two pytrees have the same structure."""
    structure: Any = jax.tree.structure
    return bool(structure(tree) == structure(other))


def like(new: Any, old: Any) -> Any:
    """``new`` in the dtype of ``old``, if that is a floating array."""
    return _tree.cast(new, old.dtype) if _tree.is_float_array(old) else new
