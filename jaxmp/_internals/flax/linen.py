"""The private names of Linen that jaxmp uses.

One more is the method ``Module._register_submodules``, which ``jaxmp/linen/policied.py`` extends.
"""

from __future__ import annotations

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
