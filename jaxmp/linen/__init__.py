"""Policies for Flax Linen modules, by module or by operation."""

from jaxmp.linen.policied import apply_policy as apply_policy
from jaxmp.linen.policied import autocast as autocast

__all__ = ["apply_policy", "autocast"]


def __dir__() -> list[str]:
    return __all__
