"""Weakly typed arrays: floating values that take the dtype of the first strongly typed array they meet."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from jaxmp.tree import is_float_array

T = TypeVar("T")


def weaken(tree: T) -> T:
    """``tree`` with its floating arrays weakly typed, as Python scalars are: float32 times float16 is then float16."""
    return _set_weak(tree, True)


def strengthen(tree: T) -> T:
    """``tree`` with its floating arrays strongly typed again, in the dtype they have."""
    return _set_weak(tree, False)


def _set_weak(tree: T, weak: bool) -> T:
    def convert(leaf: Any) -> Any:
        if not is_float_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) or jax.typeof(leaf).weak_type == weak:
            return leaf
        array = jnp.asarray(leaf)  # a NumPy float64 becomes float32 here, unless x64 is on
        return primitives.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=weak, sharding=None)

    return jax.tree.map(convert, tree)


# --- jax.numpy promotes weakly typed operands; jax.lax, which wants equal dtypes, is taught to do the same ------------

_SAME_DTYPE = (
    *("dot_general", "conv_general_dilated", "add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2"),
    *("concatenate", "select_n", "clamp", "pad", "dynamic_update_slice", "scatter", "scatter_add"),
)


class _Promoting(threading.local):
    active = False


_promoting = _Promoting()


@contextlib.contextmanager
def promoting_weak_operands(active: bool) -> Iterator[None]:
    """While ``active``, weakly typed operands of ``jax.lax`` operations take the dtype of the strongly typed ones."""
    before, _promoting.active = _promoting.active, active
    try:
        yield
    finally:
        _promoting.active = before


def _promote(bind: Callable[..., Any], *operands: Any, **params: Any) -> Any:
    if _promoting.active:
        types = [jax.typeof(operand) for operand in operands]
        floats = [aval for aval in types if jnp.issubdtype(aval.dtype, jnp.floating)]
        strong = {aval.dtype for aval in floats if not aval.weak_type}
        if len(strong) == 1 and len({aval.dtype for aval in floats}) > 1:
            (dtype,) = strong
            operands = tuple(
                operand.astype(dtype) if aval in floats and aval.weak_type else operand
                for operand, aval in zip(operands, types, strict=True)
            )
    return bind(*operands, **params)


for _name in _SAME_DTYPE:
    _primitive = getattr(primitives, f"{_name}_p")
    _primitive.bind = functools.partial(_promote, _primitive.bind)
