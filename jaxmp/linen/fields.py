"""Fill the ``dtype`` and ``param_dtype`` fields of Linen modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np

from jaxmp.engine.module_border import is_default, is_floating
from jaxmp.policy.policies import Policy

_REPLACED = "_jaxmp_replaced"  # the attribute that stores the original values of a module's replaced fields


def replaced_fields(module: nn.Module) -> dict[str, Any]:
    """Return the original values of the fields of ``module`` that a policy replaced."""
    return vars(module).get(_REPLACED, {})


def replace_field(module: nn.Module, name: str, value: Any) -> None:
    """Set a field of ``module``, and remember its original value."""
    vars(module).setdefault(_REPLACED, {}).setdefault(name, getattr(module, name))
    object.__setattr__(module, name, value)


def fill_dtypes(
    module: Any, defaults: Mapping[str, Any], policy: Policy, overridden: bool, container: bool
) -> dict[str, np.dtype]:
    """Set dtype fields to the policy's dtypes, unless the author set them.

    A field counts as set by the author if its value is not the default. If the policy comes from an override, such
    fields are replaced too. In a container, a ``dtype`` of None stays None, so that each submodule gets its own dtype.

    Args:
      module: a module that is bound to a scope.
      defaults: the defaults of the module's fields.
      policy: the module's policy.
      overridden: whether the policy comes from an override.
      container: whether the module has submodules and no params of its own.

    Returns:
      The dtypes of the fields ``param_dtype`` and ``dtype``. A field is left out if it does not exist, is not a
      floating dtype, or stays None.
    """
    dtypes = {}
    for name, dtype in (("param_dtype", policy.param_dtype), ("dtype", policy.compute_dtype)):
        if name not in defaults or not is_floating(getattr(module, name)):
            continue
        value = getattr(module, name)
        if name == "dtype" and value is None and container:
            continue
        if overridden or is_default(value, defaults[name]):
            replace_field(module, name, dtype)
        dtypes[name] = np.dtype(getattr(module, name))
    return dtypes
