"""Eager calls of a model, through the cache of ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmp._internals.jax.program import arrays_in, is_array
from jaxmp._internals.jax.traces import is_tracing
from jaxmp.base.donation import require_not_deleted


def call_eagerly(fun: Callable[..., Any], key: Any, args: tuple[Any, ...]) -> Any:
    """Return ``fun(*args)``; compile it outside of other traces, so that the next call is quick.

    Args:
      fun: a pure function.
      key: everything that ``fun`` depends on besides its arguments, compared by ``==``. If it has no hash, ``fun`` is
        traced in every call.
      args: the arguments, which may also hold other values than arrays.

    Raises:
      RuntimeError: an array among the arguments was deleted.
    """
    leaves, tree = jax.tree.flatten(args)
    operands = arrays_in(leaves)
    if is_tracing() or any(isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) for leaf in operands):
        return fun(*args)
    require_not_deleted(args)
    constants = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    call = _Call(fun, (key, constants, tree), tree, constants)
    try:
        hash(call)
    except TypeError:  # an argument or a field has no hash
        return fun(*args)
    results = _compiled(call, operands)
    return jax.tree.map(_value_of, results, is_leaf=lambda leaf: isinstance(leaf, _Constant))


class _Call:
    """A function and its arguments without their arrays, equal to every other call with the same key."""

    def __init__(self, fun: Callable[..., Any], key: Any, tree: Any, constants: tuple[Any, ...]) -> None:
        self.fun, self.key, self.tree, self.constants = fun, key, tree, constants

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["value"])
class _Constant:
    """A result that is not an array, such as a text."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _value_of(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Constant) else leaf


@functools.partial(jax.jit, static_argnums=0)
def _compiled(call: _Call, operands: list[Any]) -> Any:
    arrays = iter(operands)
    leaves = [next(arrays) if constant is None else constant[1] for constant in call.constants]
    results = call.fun(*jax.tree.unflatten(call.tree, leaves))
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else _Constant(leaf), results)
