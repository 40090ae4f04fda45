"""The private names of Linen that jaxmp uses, all of them in this file."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax.linen import module as _module


def is_checked(module: nn.Module) -> bool:
    """Return whether Linen is only validating the module's ``setup``.

    During this validation, the module has no variables.
    """
    return module.scope is not None and isinstance(module.scope.root, _module.TestScope)


def has_interceptors() -> bool:
    """Return whether the code runs in an ``nn.intercept_methods``."""
    return bool(_module._global_interceptor_stack)


_Object: Any = object  # typed as Any, because `super()` in `Hooks` is the author's class


class Hooks(_Object):
    """A mixin for Linen modules, with a hook for submodules."""

    def jaxmp_register(self) -> None:
        """Run when submodules are registered, before their scopes exist."""
        raise NotImplementedError

    def _register_submodules(self, name: str, value: Any) -> None:
        self.jaxmp_register()
        super()._register_submodules(name, value)
