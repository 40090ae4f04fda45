"""Mixed precision for Flax Linen modules: ``apply_policy`` and ``autocast``."""

from jaxmp.linen.policied import apply_policy as apply_policy
from jaxmp.linen.policied import autocast as autocast

__all__ = ["apply_policy", "autocast"]


def __dir__() -> list[str]:
    return __all__
