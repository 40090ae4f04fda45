"""The policies of a Linen module, and the flags that mark what belongs to it.

Linen hands the flags of a scope on to every scope below, through lifted transforms too, and ``nn.jit`` keys its cache
with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core import Scope

from jaxmp.engine.rules import Rules
from jaxmp.policy.patterns import Path
from jaxmp.policy.policy_map import PolicyMap

ROOT_FLAG = "jaxmp_root"  # the hash of the root that a scope belongs to
OUTER_FLAG = "jaxmp_outer"  # the hash of the root around that one
POLICY_FLAG = "jaxmp_policy"  # what nn.jit may not share between modules


@dataclasses.dataclass(frozen=True)
class Root:
    """The policies of a module.

    Attributes:
      policies: the policies; under autocast its exceptions.
      prefix: the path of the module, if it was reached through a bound parent.
      autocast: whether autocast decides, which changes no field and no param.
      operations: the overrides of operations under autocast.
    """

    policies: PolicyMap
    prefix: Path = ()
    autocast: bool = False
    operations: tuple[tuple[str, str], ...] = ()

    def rules(self, decided: Callable[[Any], object]) -> Rules:
        """Return the rules for the engine. Except under autocast, each module has its own half dtype."""
        if not self.autocast:
            return Rules(None, decided=decided)
        recipe = self.policies.root.float8
        return Rules(self.policies.compute_dtype, dict(self.operations), float8=recipe, decided=decided)

    def mark(self, module: nn.Module) -> None:
        """Mark the scope of ``module``, and every scope made below it from now on, as part of this root."""
        scope: Any = module.scope
        if scope.flags.get(ROOT_FLAG, hash(self)) != hash(self):
            set_flag(scope, OUTER_FLAG, scope.flags[ROOT_FLAG])
        set_flag(scope, ROOT_FLAG, hash(self))


def set_flag(scope: Scope, name: str, value: int) -> None:
    """Set a flag of a scope, which scopes made below it will inherit."""
    if scope.flags.get(name) != value:
        scope.flags = scope.flags.copy({name: value})
