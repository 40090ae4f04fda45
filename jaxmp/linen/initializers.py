"""Run initializers of Linen modules in float32 where needed.

JAX cannot run some initializers in half precision, such as the orthogonal one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmp._internals.jax.walk import equations
from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import is_half
from jaxmp.engine.classes import Class, classify
from jaxmp.engine.module_border import widen_for_float32_code


def run_initializers_in_float32(module: Any, is_wide: bool) -> None:
    """Replace ``module.param`` so that initializers run in float32 where needed.

    Args:
      module: a module that is bound to a scope.
      is_wide: whether half-precision params are cast to float32, because the module is traced in float32.
    """
    make = type(module).param
    reference = weakref.ref(module)  # a strong reference to the module would be a cycle, which keeps tracers alive

    def param(name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
        value = make(reference(), name, functools.partial(_init, init_fn), *args, **kwargs)
        return jax.tree.map(widen_for_float32_code, value) if is_wide else value

    object.__setattr__(module, "param", param)


def _init(init_fn: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an initializer, in float32 if it factorises a matrix.

    JAX cannot factorise a half-precision matrix.
    """
    half = next((np.dtype(arg) for arg in jax.tree.leaves((args, kwargs)) if _is_half_dtype(arg)), None)
    if half is None:
        return init_fn(key, *args, **kwargs)
    wide_args, wide_kwargs = jax.tree.map(lambda arg: np.float32 if _is_half_dtype(arg) else arg, (args, kwargs))

    def make_wide(key: Any) -> Any:
        return init_fn(key, *wide_args, **wide_kwargs)

    return _tree.cast(make_wide(key), half) if _factorises(make_wide, key) else init_fn(key, *args, **kwargs)


def _is_half_dtype(arg: Any) -> bool:
    """Return whether an argument of an initializer is a half-precision dtype."""
    return isinstance(arg, (type, np.dtype)) and is_half(arg)


def _factorises(make: Callable[[Any], Any], key: Any) -> bool:
    """Return whether ``make`` factorises a matrix.

    For example, the orthogonal initializer computes a QR factorisation.
    """
    try:
        program = jax.make_jaxpr(make)(key)
    except Exception:  # the initializer fails or cannot be traced; calling it will raise its own error
        return False
    return any(classify(eqn.primitive.name) is Class.LINALG for eqn in equations(program))
