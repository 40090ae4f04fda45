"""Weakly typed arrays: floating values that take the dtype of the first strongly typed array they meet.

``jax.numpy`` promotes them as it does Python scalars, with one exception: ``jnp.matmul``, ``jnp.einsum`` and the like
hand operands of two dtypes to ``lax.dot_general`` as they are. While :func:`promoting_products` is active in a thread,
products take their weakly typed operand in the dtype of the other.

Sharp edge: JAX has no hook for that, so the first use replaces ``bind`` of the product primitives, for good, by a
function that does nothing more unless it is active. Other operations of ``jax.lax`` go on to want equal dtypes.
"""

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


class _Promoting(threading.local):
    active = False


_promoting = _Promoting()


@contextlib.contextmanager
def promoting_products(active: bool = True) -> Iterator[None]:
    """In this context products take a weakly typed operand in the dtype of a strongly typed one, or do not."""
    if active:
        _install()
    before, _promoting.active = _promoting.active, active
    try:
        yield
    finally:
        _promoting.active = before


@functools.cache
def _install() -> None:
    for primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p):
        primitive.bind = functools.partial(_bind_promoted, primitive.bind)


def _bind_promoted(bind: Callable[..., Any], lhs: Any, rhs: Any, **params: Any) -> Any:
    if _promoting.active and is_float_array(lhs) and is_float_array(rhs):
        left, right = jax.typeof(lhs), jax.typeof(rhs)
        if left.weak_type != right.weak_type and left.dtype != right.dtype:
            lhs, rhs = (lhs.astype(right.dtype), rhs) if left.weak_type else (lhs, rhs.astype(left.dtype))
    return bind(lhs, rhs, **params)
