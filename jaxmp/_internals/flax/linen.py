"""What jaxmp uses of Linen that is not public: every private name of it stands here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
from flax.linen import module as _module


def children_of(module: Any) -> Mapping[str | None, Any]:
    """What is registered under names in a module: submodules, and for each variable the name of its collection."""
    children: Mapping[str | None, Any] = module._state.children
    return children


def mutable_collection(module: nn.Module, name: str) -> Any:
    """A collection of variables of a module, to be written to."""
    scope: Any = module.scope
    return scope._mutable_collection(name)


def is_checked(module: nn.Module) -> bool:
    """Whether Linen runs the module's ``setup``, without its variables, to see that it would."""
    return module.scope is not None and isinstance(module.scope.root, _module.TestScope)


def is_watched() -> bool:
    """Whether someone wants to see each call of a method: a table, an interceptor of the user's."""
    return bool(_module._context.call_info_stack) or bool(_module._global_interceptor_stack)


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """While this lasts, calls are not listed by ``nn.tabulate``."""
    context = _module._context
    table, context.call_info_stack = context.call_info_stack, []
    try:
        yield
    finally:
        context.call_info_stack = table


_Object: Any = object  # the class that it is mixed into comes after it


class Hooks(_Object):
    """Mixed into a class of modules: what happens when a method is called, and when submodules are registered."""

    def jaxmp_call(self, call: Callable[[], Any], method: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        """``call()``, which calls ``method`` of this name."""
        raise NotImplementedError

    def jaxmp_register(self) -> None:
        """Comes before the scopes of submodules exist."""
        raise NotImplementedError

    def _call_wrapped_method(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Methods of Linen modules come through here, also `BaseClass.method` handed to `apply`; transformed ones do
        # not.
        call = functools.partial(super()._call_wrapped_method, fun, args, kwargs)
        return self.jaxmp_call(call, _module.wrap_method_once(fun), args, kwargs, fun.__name__)

    def _register_submodules(self, name: str, value: Any) -> None:
        self.jaxmp_register()
        super()._register_submodules(name, value)
