"""Checks of arguments, and their error messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def library_of(cls: type) -> str:
    """Return ``"linen"`` or ``"nnx"`` for a module class of Flax, and an empty text for any other class."""
    # The classes are compared by name, because importing Flax is slow.
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    if "flax.linen.module.Module" in bases:
        return "linen"
    return "nnx" if "flax.nnx.module.Module" in bases else ""


def require_order(model: Any, policy: Any, call: str) -> None:
    """Raise a TypeError if a model and a policy were passed in the wrong order.

    ``call`` is the name of the called function, for the error message.
    """
    if model is not None and library_of(type(policy)) and not library_of(type(model)):
        raise TypeError(
            f"{call} takes (model, policy), got ({_printed_argument(model)}, {_printed_argument(policy)}), which are "
            f"swapped; write {call}(model, policy)"
        )


def printed(value: Any) -> str:
    """Return the repr of a value, for an error.

    If the repr is longer than one line, return the name of the class instead.
    """
    text = repr(value)
    return f"an instance of {type(value).__name__}" if "\n" in text or len(text) > 120 else text


def require_no_policy(model: Any, has_policy: bool, call: str) -> None:
    """Raise a ValueError if a model has a policy already.

    A second policy would drop the overrides of the first. ``call`` is the name of the called function.
    """
    if has_policy:
        raise ValueError(
            f"{call} takes a model without a policy, got a {type(model).__name__} that has one (clones, merged models "
            "and submodules keep it);\nuse it as it is, or apply one policy, with all overrides, to the original "
            f"model:\n{call}(model, policy, overrides)"
        )


def require_whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raise a ValueError if a ``value`` is not an integer of at least ``least``."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}, got {value!r}; write {name}={least} or more"
        )


def require_function(
    fun: Any, rule: str, remedy: str, model_remedy: str = "pass model.apply", allows_nnx: bool = True
) -> None:
    """Raise a TypeError if ``fun`` is not a function.

    An instance of a Linen module counts as a function only if it is bound. A module class is not a function.

    Args:
      fun: the value that the user passed as a function.
      rule: the first part of the error message, such as ``"jaxmp.autocast takes a function of arrays"``.
      remedy: the last part of the message, for a value that is not callable.
      model_remedy: the last part of the message for a model.
      allows_nnx: whether an instance of an NNX module counts as a function.
    """
    is_class = isinstance(fun, type)
    library = library_of(fun if is_class else type(fun))
    if is_class and library:
        name = fun.__name__
        raise TypeError(f"{rule}, got the class {name}; pass a function that calls {name}(...)")
    is_unbound_linen = library == "linen" and getattr(fun, "scope", None) is None
    if is_unbound_linen or (library == "nnx" and not allows_nnx):
        raise TypeError(f"{rule}, got an instance of {type(fun).__name__}; {model_remedy}")
    if not callable(fun):
        raise TypeError(f"{rule}, got {printed(fun)}; {remedy}")


def require_step_arguments(args: Sequence[Any], form: str, require_first: Callable[[Any], None]) -> None:
    """Raise a TypeError if the positional arguments of a step are not those that ``form`` names.

    Args:
      args: the arguments.
      form: a text such as ``"(state, batch)"``.
      require_first: a function that raises a TypeError if the first argument is wrong.
    """
    if args:
        require_first(args[0])
    if len(args) != form.count(",") + 1:
        classes = ", ".join(type(arg).__name__ for arg in args)
        raise TypeError(f"a step takes {form}, got ({classes}); write step{form}, with all data in one batch")


def checks_arguments(method: F) -> F:
    """Pass the positional arguments of a method to ``self.require_arguments`` first.

    If keyword arguments are passed too, Python's own error names those that are unknown or missing.
    """

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            self.require_arguments(*args)
        return method(self, *args, **kwargs)

    return cast(F, checked)


def _printed_argument(value: Any) -> str:
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value) if is_plain else getattr(value, "__name__", type(value).__name__)
