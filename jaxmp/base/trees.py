"""Casts, finiteness, selection and search over pytrees."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

T = TypeVar("T")


def cast(tree: T, dtype: Any) -> T:
    """Cast the floating arrays of ``tree`` to ``dtype``, and change nothing else.

    JAX arrays (including tracers), NumPy arrays and ``jax.ShapeDtypeStruct`` of a floating dtype are cast. Integers,
    bools, complex numbers, PRNG keys, ``None`` and Python scalars are unchanged. A leaf that already has the dtype is
    not copied. NumPy arrays stay NumPy arrays, and shardings are kept.

    >>> cast({"w": jnp.ones(2), "n": 3}, jnp.float16)["w"].dtype
    dtype('float16')
    """
    dtype = np.dtype(dtype)

    def cast_leaf(leaf: Any) -> Any:
        if not is_float_array(leaf) or leaf.dtype == dtype:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=dtype)
        return leaf.astype(dtype)

    return jax.tree.map(cast_leaf, tree)


def is_float_array(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array of a floating dtype.

    A ``jax.ShapeDtypeStruct`` counts as an array.
    """
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    return isinstance(leaf, arrays) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def widen(tree: T) -> T:
    """Cast floating arrays of fewer than 32 bits to float32.

    Other leaves are unchanged.
    """

    def widen_leaf(leaf: Any) -> Any:
        return cast(leaf, jnp.float32) if is_float_array(leaf) and leaf.dtype.itemsize < 4 else leaf

    return jax.tree.map(widen_leaf, tree)


def all_finite(tree: Any) -> jax.Array:
    """Return whether all leaves of ``tree`` are finite, as a bool scalar.

    Only floating and complex leaves are tested. The test sums ``x - x`` over all leaves and checks the sum: ``x - x``
    is 0 if x is finite, and NaN otherwise. XLA can fuse this sum with the operations that compute the leaves. On
    sharded arrays, the test needs one all-reduce of a scalar, and gathers nothing.

    >>> all_finite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])})
    Array(False, dtype=bool)
    """
    sums = [zero_if_finite(leaf) for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]
    return is_finite_sum(reduce(jnp.add, sums)) if sums else jnp.array(True)


def is_finite_sum(total: jax.Array) -> jax.Array:
    """Return whether a sum that is not negative is finite, as a bool scalar."""
    # On CPUs, XLA repeats cheap scalar operations in each fusion that reads them, here once for each leaf of the new
    # state. The program would be quadratic in the number of leaves. XLA for CPUs does not repeat a square root.
    return jnp.isfinite(jnp.sqrt(jax.lax.stop_gradient(total)))


def non_finite(tree: Any) -> list[str]:
    """Return the names of the leaves that have an infinity or a NaN.

    >>> non_finite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])})
    ['b']
    """
    return [path_name(path) for path, leaf in jax.tree.leaves_with_path(tree) if not bool(all_finite(leaf))]


def zero_if_finite(leaf: ArrayLike) -> jax.Array:
    """Return a float32 scalar: zero if every element is finite, else NaN."""
    array = widen(jnp.asarray(leaf))
    if jnp.iscomplexobj(array):
        return zero_if_finite(array.real) + zero_if_finite(array.imag)
    # The cast from float64 to float32 does not change 0 and NaN. In place of the difference, `array * 0` would
    # waste memory: XLA would keep an array of zeros, as large as the largest leaf, during the whole step.
    return jnp.sum((array - array).astype(jnp.float32))


def sum_of_squares(tree: Any) -> jax.Array:
    """Sum the squared magnitudes of all floating and complex leaves.

    The sum is a float32 scalar, or a float64 scalar if a leaf has 64-bit floats. Half-precision leaves are squared in
    float32. Leaves that are neither floating nor complex are ignored. The sum is finite only if every element and every
    square is finite: 2e19 is finite in float32, but its square is not. XLA can fuse the sum with the operations that
    compute the leaves. Sharded arrays need one all-reduce of a scalar.

    >>> sum_of_squares({"a": jnp.array([3.0, 4.0]), "n": 5})
    Array(25., dtype=float32)
    """
    sums = [
        jnp.sum(_squared_magnitudes(widen(jnp.asarray(leaf)))) for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)
    ]
    dtype = np.result_type(np.float32, *(part.dtype for part in sums))
    return reduce(jnp.add, [part.astype(dtype) for part in sums], jnp.zeros((), dtype))


def _squared_magnitudes(array: jax.Array) -> jax.Array:
    return array.real**2 + array.imag**2 if jnp.iscomplexobj(array) else array**2


def max_abs(tree: Any) -> jax.Array:
    """Return the largest magnitude of the elements of a tree, as a float32 scalar.

    The result is NaN if any element is NaN. Only floating and complex leaves count.

    >>> max_abs([jnp.array([1.0, -3.0]), jnp.array(2.0)])
    Array(3., dtype=float32)
    """
    largest = [
        jnp.max(jnp.abs(leaf), initial=0).astype(jnp.float32) for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)
    ]
    return reduce(jnp.maximum, largest, jnp.float32(0))


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, (float, complex)) or (
        hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
    )


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """Return ``on_true`` if ``pred`` is true, else ``on_false``, bit for bit.

    ``pred`` is a bool scalar. If a leaf is the same object in both trees, this object is returned. The result has the
    dtypes of ``on_false``, so a state keeps its dtypes from step to step.

    Raises:
      ValueError: the trees differ in structure.
      TypeError: two leaves differ in shape, or a leaf is complex in ``on_true`` but not in ``on_false``.

    >>> select_tree(jnp.array(False), {"a": jnp.ones(2)}, {"a": jnp.zeros(2)})["a"]
    Array([0., 0.], dtype=float32)
    """

    def select_leaf(new: Any, old: Any) -> Any:
        if new is old:
            return old
        new, old = jnp.asarray(new), jnp.asarray(old)
        sharding = jax.typeof(old).sharding
        if new.shape == old.shape and jax.typeof(new).sharding.spec != sharding.spec:  # on a mesh with explicit axes
            new = jax.sharding.reshard(new, sharding)
        if jnp.iscomplexobj(new) and not jnp.iscomplexobj(old):
            raise TypeError(
                f"a real leaf must stay real, got {new.dtype} for {old.dtype}; start with a complex leaf, or return "
                "its real part"
            )
        # `jnp.where` would broadcast. PRNG keys have no `astype`, but their dtypes are equal.
        return jax.lax.select(jnp.asarray(pred), new if new.dtype == old.dtype else new.astype(old.dtype), old)

    return jax.tree.map(select_leaf, on_true, on_false)


def is_key(leaf: Any) -> bool:
    """Return whether ``leaf`` is a typed random key."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_traced(tree: Any) -> bool:
    """Return whether a leaf of ``tree`` is a tracer."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def nodes_of_type(tree: Any, types: type | tuple[type, ...]) -> list[Any]:
    """Return the nodes and leaves of these types in a tree, without those inside of another one."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, types))
    return [node for node in nodes if isinstance(node, types)]


def map_nodes_of_type(fun: Callable[[Any], Any], tree: Any, types: type | tuple[type, ...]) -> Any:
    """Return a tree with ``fun(node)`` in place of each node or leaf of these types."""

    def is_of_type(node: Any) -> bool:
        return isinstance(node, types)

    return jax.tree.map(lambda node: fun(node) if is_of_type(node) else node, tree, is_leaf=is_of_type)


def require_no_raw_bytes(tree: Any) -> None:
    """Raise a TypeError if an array of ``tree`` has a dtype of raw bytes, such as ``|V2``."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        is_of_bytes = isinstance(leaf, np.ndarray) and leaf.dtype.type is np.void and leaf.dtype.names is None
        if is_of_bytes:
            dtype = "bfloat16" if leaf.dtype.itemsize == 2 else "float8_e4m3fn"
            raise TypeError(
                f"{path_name(path)!r} has the dtype {leaf.dtype.str}, raw bytes: np.savez forgets {dtype};\n"
                f"write array.view(ml_dtypes.{dtype}) after np.load"
            )


def path_name(path: tuple[Any, ...]) -> str:
    """Return a JAX key path as users write it: ``encoder/Dense_0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def path_parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names along a JAX key path, for patterns."""
    return tuple(path_name(path).split("/")) if path else ()
