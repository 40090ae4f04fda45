"""Eager calls of a model, through the cache of ``jax.jit``."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._internals.jax.traces import is_tracing
from jaxmp.base.donation import require_not_deleted
from jaxmp.program.traced_program import arrays_in, is_array

_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, type, np.dtype)
_PLAIN += (enum.Enum, types.FunctionType, types.BuiltinFunctionType, type(jax.jit(len)), jax.custom_jvp, jax.custom_vjp)
_earlier_calls: set[int] = set()
"""The hashes of the keys of earlier calls. A call is compiled when its key comes for the second time, because a number
among its arguments may be another one in each call."""


class NoKey(TypeError):
    """A value that may change without a change of its key."""


def key_of(value: Any, key_of_object: Callable[[Any], Any] | None = None) -> Any:
    """Return a hashable key of a value, with the types of all its parts.

    Args:
      value: a value of a plain type, or a container of such values.
      key_of_object: a function that returns the key of any other value, or None if it has none.

    Raises:
      NoKey: the value has no key, for example because it is an object with attributes that may change.
    """
    inner = functools.partial(key_of, key_of_object=key_of_object)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(inner, value))
    if isinstance(value, Mapping):
        return (type(value), *((inner(name), inner(item)) for name, item in value.items()))
    if isinstance(value, functools.partial):
        return (type(value), inner(value.func), inner(value.args), inner(value.keywords))
    if isinstance(value, types.MethodType):
        return (type(value), inner(value.__func__), inner(value.__self__))
    if isinstance(value, float):
        return (type(value), value.hex())  # 0.0 and -0.0 are equal, but not the same
    if isinstance(value, _PLAIN):
        return (type(value), value)
    key = key_of_object(value) if key_of_object is not None else None
    if key is None:
        raise NoKey(f"a {type(value).__name__} may change without a change of its key")
    return key


def call_eagerly(fun: Callable[..., Any], make_key: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Return ``fun(*args)``; compile it outside of other traces, so that the next call is quick.

    Args:
      fun: a pure function. It must not close over arrays, because the cache keeps it.
      make_key: a function that returns a hashable key of everything that ``fun`` depends on besides its arguments. If
        it raises :class:`NoKey`, ``fun`` is traced in every call.
      args: the arguments, which may also hold other values than arrays.

    Raises:
      RuntimeError: an array among the arguments was deleted.
    """
    leaves, tree = jax.tree.flatten(args)
    operands = arrays_in(leaves)
    if is_tracing() or any(isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) for leaf in operands):
        return fun(*args)
    require_not_deleted(args)
    constants = tuple(None if is_array(leaf) else (leaf,) for leaf in leaves)  # None in the place of an array
    try:
        key = make_key(), key_of(constants), tree
        hash_of_call = hash((key, tuple((operand.shape, operand.dtype) for operand in operands)))
    except TypeError:
        return fun(*args)
    if hash_of_call not in _earlier_calls:
        if len(_earlier_calls) >= 4096:
            _earlier_calls.clear()
        _earlier_calls.add(hash_of_call)
        return fun(*args)
    results = _call_compiled(_StaticPart(key, tree, constants, fun), operands)
    return jax.tree.map(_value_of, results, is_leaf=lambda leaf: isinstance(leaf, _Constant))


@dataclasses.dataclass(frozen=True)
class _StaticPart:
    """A call without its arrays, equal to every other call with the same key."""

    key: Any
    tree: Any = dataclasses.field(compare=False)
    constants: tuple[Any, ...] = dataclasses.field(compare=False)
    fun: Callable[..., Any] = dataclasses.field(compare=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A result that is not an array, such as a text."""

    value: Any


def _value_of(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Constant) else leaf


# Without excess precision, a compiled call rounds as the operations of the first call do.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_allow_excess_precision": False})
def _call_compiled(call: _StaticPart, operands: list[Any]) -> Any:
    arrays = iter(operands)
    leaves = [next(arrays) if constant is None else constant[0] for constant in call.constants]
    results = call.fun(*jax.tree.unflatten(call.tree, leaves))
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else _Constant(leaf), results)
