"""The policies of a Linen module, and the flags that mark the modules below it.

Linen passes the flags of a scope on to every scope below, also through lifted transforms. They are part of the cache
key of ``nn.jit``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core import Scope

from jaxmp.engine.overrides import Level
from jaxmp.engine.rules import Rules
from jaxmp.policy.patterns import Path
from jaxmp.policy.policy_map import PolicyMap

ROOT_FLAG = "jaxmp_root"  # the hash of the root of a scope
OUTER_FLAG = "jaxmp_outer"  # the hash of the root around it
POLICY_FLAG = "jaxmp_policy"  # keeps nn.jit from sharing a trace between modules of different policies


@dataclasses.dataclass(frozen=True)
class Root:
    """The policies of a module.

    Attributes:
      policies: the policies, or the overrides of autocast.
      prefix: the path of the module, if it is an attribute of a bound parent.
      autocast: whether autocast decides, which does not change fields or params.
      operations: the overrides of operations under autocast.
    """

    policies: PolicyMap
    prefix: Path = ()
    autocast: bool = False
    operations: tuple[tuple[str, Level], ...] = ()

    def rules(self, decided: Callable[[Any], object]) -> Rules:
        """Return the rules for the engine.

        Except under autocast, each module has its own half dtype.
        """
        if not self.autocast:
            return Rules(None, decided=decided)
        recipe = self.policies.root.float8
        return Rules(self.policies.compute_dtype, dict(self.operations), float8=recipe, decided=decided)

    def mark(self, module: nn.Module) -> None:
        """Mark the scope of ``module`` as part of this root.

        Scopes that are created below it inherit the mark.
        """
        scope: Any = module.scope
        if scope.flags.get(ROOT_FLAG, hash(self)) != hash(self):
            set_flag(scope, OUTER_FLAG, scope.flags[ROOT_FLAG])
        set_flag(scope, ROOT_FLAG, hash(self))


def set_flag(scope: Scope, name: str, value: int) -> None:
    """Set a flag of a scope; scopes that are created below it will inherit the flag."""
    if scope.flags.get(name) != value:
        scope.flags = scope.flags.copy({name: value})
