"""Roots, and the flags of Linen scopes that show to which root a module belongs.

A root is a module to which the user applied policies or autocast. Linen copies the flags of a scope to every scope that
is created below this scope, even in lifted transforms. The flags are part of the cache key of ``nn.jit``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import flax.linen as nn
from flax.core import Scope

from jaxmp.engine.overrides import Level
from jaxmp.engine.rules import Rules
from jaxmp.policy.policy_map import PolicyMap

ROOTS_FLAG = "jaxmp_roots"  # the hashes of the roots around the scope, outermost first
POLICY_FLAG = "jaxmp_policy"  # keeps nn.jit from sharing a trace between modules of different policies


@dataclasses.dataclass(frozen=True)
class Root:
    """The policies of a root: a module to which the user applied them.

    Attributes:
      policies: the policy of the root and its overrides for modules.
      autocast: whether the root runs under autocast, which does not change fields and params.
      operations: the overrides for operations under autocast.
    """

    policies: PolicyMap
    autocast: bool = False
    operations: tuple[tuple[str, Level], ...] = ()

    def rules(self, decided: Callable[[Any], object]) -> Rules:
        """Return the rules for the engine.

        Under autocast, the rules name one half-precision dtype for the whole model. Otherwise they name none, because
        each module has its own dtype.
        """
        if not self.autocast:
            return Rules(None, decided=decided)
        recipe = self.policies.root.float8
        return Rules(self.policies.compute_dtype, dict(self.operations), float8=recipe, decided=decided)

    def mark(self, module: nn.Module) -> None:
        """Add this root to the flag of the scope of ``module``.

        Scopes that are created below this scope inherit the flag.
        """
        scope: Any = module.scope
        roots = scope.flags.get(ROOTS_FLAG, ())
        if roots[-1:] != (hash(self),):
            set_flag(scope, ROOTS_FLAG, (*roots, hash(self)))


def set_flag(scope: Scope, name: str, value: Hashable) -> None:
    """Set a flag of a scope; scopes that are created below it later inherit the flag."""
    if scope.flags.get(name) != value:
        scope.flags = scope.flags.copy({name: value})
