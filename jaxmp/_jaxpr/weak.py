"""Weakly typed arrays: floating values that take the dtype of the first strongly typed array they meet.

``jax.numpy`` promotes them as it does Python scalars, with one exception: ``jnp.matmul``, ``jnp.einsum`` and the like
hand operands of two dtypes to ``lax.dot_general`` as they are. And some functions drop the mark on the way to a
product. So while :func:`products_in` is active in a thread, products of two floating dtypes are computed in the one it
names.

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
from jax._src.lax.lax import ragged_dot_general_p  # jax.extend has all primitives but this one
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


class _Products(threading.local):
    dtype: Any = None


_products = _Products()


@contextlib.contextmanager
def products_in(dtype: Any) -> Iterator[None]:
    """In this context products of two floating dtypes are computed in ``dtype``; None leaves them to JAX."""
    if dtype is not None:
        _install()
    before, _products.dtype = _products.dtype, dtype
    try:
        yield
    finally:
        _products.dtype = before


@functools.cache
def _install() -> None:
    for primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p, ragged_dot_general_p):
        primitive.bind = functools.partial(_bind, primitive.bind)


def _bind(bind: Callable[..., Any], lhs: Any, rhs: Any, *others: Any, **params: Any) -> Any:
    dtype = _products.dtype
    if dtype is not None and is_float_array(lhs) and is_float_array(rhs) and lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    return bind(lhs, rhs, *others, **params)
