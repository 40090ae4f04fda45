"""The ``dtype`` and ``param_dtype`` fields of modules: which of them a policy may fill, and when that is in vain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.policy import Policy


def is_floating(dtype: Any) -> bool:
    """Whether ``dtype`` is what a policy may replace: a floating dtype, or None for "infer it"."""
    try:
        return dtype is None or bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def is_default(dtype: Any, default: Any) -> bool:
    """Whether a floating ``dtype`` (or None) is the ``default`` of its field; without a default, None is."""
    if dtype is None or default is None or default is dataclasses.MISSING:
        return dtype is None
    return np.dtype(dtype) == np.dtype(default)


def nothing_in_half(policy: Policy, kept: Mapping[str, str]) -> ValueError:
    """The error of a half ``policy`` that changes no product; ``kept``: modules with products, and why they stay."""
    shown = ", ".join([f"{name} ({reason})" for name, reason in kept.items()][:8]) + (", …" if len(kept) > 8 else "")
    return ValueError(
        f"the policy computes in {policy.compute_dtype.name}, but every product stays as it was: {shown}; to overrule "
        f"a dtype that a module was given, name the module in overrides, e.g. overrides={{'**': '{policy}'}}"
    )
