"""Weakly typed arrays: floating values that take the dtype of the first strongly typed array they meet."""

from __future__ import annotations

from typing import TypeVar

import jax
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
    def convert(leaf: object) -> object:
        if not is_float_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) or jax.typeof(leaf).weak_type == weak:
            return leaf
        return primitives.convert_element_type_p.bind(
            jax.numpy.asarray(leaf), new_dtype=leaf.dtype, weak_type=weak, sharding=None
        )

    return jax.tree.map(convert, tree)
