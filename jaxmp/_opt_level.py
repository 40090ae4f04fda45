"""O1, Apex's name for autocast in float16, as the adapters for Linen and NNX take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxmp.patterns import pattern_text
from jaxmp.policy import Policy, PolicyMap, get_policy, get_policy_map

O1 = get_policy("mixed_float16")


def is_o1(policy: Any) -> bool:
    """Whether ``policy`` asks for autocast and not for dtypes of modules."""
    return isinstance(policy, str) and policy.strip().upper() == "O1"


def o1_map(overrides: Mapping[Any, Any] | None) -> PolicyMap:
    """The exceptions from O1: each pattern's policy computes in float32 or in float16.

    Raises:
      ValueError: one computes in another dtype.
    """
    given = {} if overrides is None else {key: O1 if level == "half" else level for key, level in overrides.items()}
    policies = get_policy_map(O1, given)
    for pattern, policy in policies.overrides:
        if policy.compute_dtype not in (np.float32, np.float16):
            raise ValueError(
                "O1 computes in float16, and where an override says so in float32, but the one for "
                f"{pattern_text(pattern)!r} computes in {policy.compute_dtype.name}; for another half dtype use "
                "jaxmp.autocast(fun, 'mixed_bfloat16')"
            )
    return policies


def level_of(policy: Policy) -> Literal["float32", "half"]:
    """What :func:`jaxmp.precision` calls the compute dtype of an override."""
    return "float32" if policy.compute_dtype == np.float32 else "half"
