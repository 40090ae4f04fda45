"""The private names of Linen that jaxmp uses, all of them in this file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.linen import module as _module


def is_checked(module: nn.Module) -> bool:
    """Return whether Linen is only validating the module's ``setup``.

    During this validation, the module has no variables.
    """
    return module.scope is not None and isinstance(module.scope.root, _module.TestScope)


_Object: Any = object  # typed as Any, because `super()` in `Hooks` is the user's module class


class Hooks(_Object):
    """A mixin for Linen modules, with hooks for method calls and submodules."""

    def jaxmp_call(
        self, call: Callable[[], Any], method: Callable[..., Any], args: Any, kwargs: Any, name: str | None
    ) -> Any:
        """Return ``call()``, which calls the method ``name``; a ``functools.partial`` has no name."""
        raise NotImplementedError

    def jaxmp_register(self) -> None:
        """Run when submodules are registered, before their scopes exist."""
        raise NotImplementedError

    def _call_wrapped_method(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Linen calls every method through this one, even a `BaseClass.method` that is passed to `apply`. Only methods
        # of transformed classes are called in another way.
        call = functools.partial(super()._call_wrapped_method, fun, args, kwargs)
        return self.jaxmp_call(call, _module.wrap_method_once(fun), args, kwargs, getattr(fun, "__name__", None))

    def _register_submodules(self, name: str, value: Any) -> None:
        self.jaxmp_register()
        super()._register_submodules(name, value)
