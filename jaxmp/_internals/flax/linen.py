"""The private names of Linen that jaxmp uses, all of them in this file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
from flax.linen import module as _module


def children_of(module: Any) -> Mapping[str | None, Any]:
    """Return the submodules and variables of a module by name.

    The name of a variable maps to the name of its collection.
    """
    children: Mapping[str | None, Any] = module._state.children
    return children


def mutable_collection(module: nn.Module, name: str) -> Any:
    """Return a collection of variables of a module, to write to."""
    scope: Any = module.scope
    return scope._mutable_collection(name)


def is_checked(module: nn.Module) -> bool:
    """Return whether Linen is only validating the module's ``setup``.

    During this validation, the module has no variables.
    """
    return module.scope is not None and isinstance(module.scope.root, _module.TestScope)


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """Hide the method calls inside of this context from ``nn.tabulate``."""
    context = _module._context
    table, context.call_info_stack = context.call_info_stack, []
    try:
        yield
    finally:
        context.call_info_stack = table


_Object: Any = object  # typed as Any, because `super()` in `Hooks` is the user's module class


class Hooks(_Object):
    """A mixin for Linen modules, with hooks for method calls and submodules."""

    def jaxmp_call(self, call: Callable[[], Any], method: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        """Return ``call()``, which calls the method ``name``."""
        raise NotImplementedError

    def jaxmp_register(self) -> None:
        """Run when submodules are registered, before their scopes exist."""
        raise NotImplementedError

    def _call_wrapped_method(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Linen calls every method through this one, even a `BaseClass.method` that is passed to `apply`. Only methods
        # of transformed classes are called in another way.
        call = functools.partial(super()._call_wrapped_method, fun, args, kwargs)
        return self.jaxmp_call(call, _module.wrap_method_once(fun), args, kwargs, fun.__name__)

    def _register_submodules(self, name: str, value: Any) -> None:
        self.jaxmp_register()
        super()._register_submodules(name, value)
