"""Autocast of models, as the adapters for Linen and NNX take it; in float16 it is O1, as Apex calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxmp.dtypes import is_half
from jaxmp.engine.autocast import checked_policy
from jaxmp.patterns import pattern_text
from jaxmp.policy import Policy, PolicyMap, get_policy, get_policy_map

O1 = get_policy("mixed_float16")


def is_o1(policy: Any) -> bool:
    """Whether ``policy`` asks for autocast and not for dtypes of modules."""
    return isinstance(policy, str) and policy.strip().upper() == "O1"


def autocast_map(policy: Any, overrides: Mapping[Any, Any] | None) -> PolicyMap:
    """The policy of a model under autocast, and the exceptions from it.

    Args:
      policy: whatever :func:`jaxmp.get_policy` reads, or ``"O1"``.
      overrides: pattern to ``"float32"``, to ``"half"`` or to a policy that computes in one of them.

    Raises:
      ValueError: the policy is none that autocast takes, or an exception computes in neither float32 nor its compute
        dtype.
    """
    default = get_policy_map(O1 if is_o1(policy) else policy)
    checked_policy(default.root)
    given = {key: default.root if level == "half" else level for key, level in (overrides or {}).items()}
    policies = PolicyMap(default, given)
    half = policies.root.compute_dtype
    if not is_half(half):
        raise ValueError(
            f"a model under autocast needs a policy with a half compute dtype, got {half.name}; use 'mixed_bfloat16' "
            "or 'mixed_float16'"
        )
    for pattern, exception in (*policies.overrides, *default.overrides):
        if exception.compute_dtype not in (np.float32, half):
            raise ValueError(
                f"under autocast a model computes in its policy's {half.name}, and in float32 where an override says "
                f"so, but the one for {pattern_text(pattern)!r} computes in {exception.compute_dtype.name}; write "
                "'float32' or 'half' there"
            )
    return policies


def level_of(policy: Policy) -> Literal["float32", "half"]:
    """What :func:`jaxmp.precision` calls the compute dtype of an override."""
    return "float32" if policy.compute_dtype == np.float32 else "half"
