"""One Linen module under a policy: its fields and its params. What its author gave stays known."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxmp._borders import widen
from jaxmp._dtype_fields import is_default, is_floating
from jaxmp.policy import Policy

_GIVEN = "_jaxmp_given"  # where a module keeps the fields that its author gave and a policy replaced


def given_fields(module: nn.Module) -> dict[str, Any]:
    """The fields of ``module`` that a policy replaced, as its author gave them."""
    return vars(module).get(_GIVEN, {})


def has_dtype(module: Any) -> bool:
    """Whether ``module`` has a ``dtype`` field, and so says itself what it computes in."""
    return any(field.name == "dtype" for field in dataclasses.fields(module)) and is_floating(module.dtype)


def fill_dtypes(module: Any, policy: Policy, overridden: bool, container: bool) -> tuple[np.dtype | None, np.dtype]:
    """Fills the ``dtype`` and ``param_dtype`` fields of ``module`` that have their defaults.

    Args:
      module: its fields are set in place.
      policy: says what to.
      overridden: whether an override covers the module: then they are set whatever its author gave.
      container: whether a ``dtype`` of None is left alone.

    Returns:
      The dtype that the module computes in, None if it has no say in it, and the one that its params are stored in.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(module)}
    dtypes: dict[str, np.dtype | None] = {}
    for name, dtype in (("param_dtype", policy.param_dtype), ("dtype", policy.compute_dtype)):
        if name not in defaults or not is_floating(getattr(module, name)):
            continue
        given = getattr(module, name)
        if name == "dtype" and given is None and container:
            continue
        if overridden or is_default(given, defaults[name]):
            vars(module).setdefault(_GIVEN, {}).setdefault(name, given)
            object.__setattr__(module, name, dtype)
        dtypes[name] = np.dtype(getattr(module, name))
    return dtypes.get("dtype"), dtypes.get("param_dtype") or policy.param_dtype


def widen_params(module: Any) -> None:
    """Makes ``module.param`` return half params widened, for a module that is traced in float32."""
    make = type(module).param
    reference = weakref.ref(module)  # a cycle would keep tracers alive

    def param(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(widen, make(reference(), *args, **kwargs))

    object.__setattr__(module, "param", param)
