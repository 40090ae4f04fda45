"""Checks of arguments, and their error messages."""

from __future__ import annotations

from typing import Any

import numpy as np


def _kinds_of(cls: type) -> tuple[bool, bool]:
    """Return whether ``cls`` is a Linen module class, and whether it is an NNX one."""
    # The classes are compared by name, because importing Flax is slow.
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    return "flax.linen.module.Module" in bases, "flax.nnx.module.Module" in bases


def require_order(model: Any, policy: Any, call: str) -> None:
    """Raise a TypeError if a model and a policy were passed in the wrong order.

    ``call`` is the name of the called function, for the error message.
    """
    if model is not None and any(_kinds_of(type(policy))) and not any(_kinds_of(type(model))):
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


def require_flag(name: str, value: Any, remedy: str) -> None:
    """Raise a TypeError if a ``value`` is neither True nor False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {printed(value)}; {remedy}")


def require_no_policy(model: Any, has_policy: bool, call: str, is_submodule: bool = False) -> None:
    """Raise a ValueError if a model has a policy already.

    A second policy would drop the overrides of the first.

    Args:
      model: the model.
      has_policy: whether it has a policy.
      call: the name of the called function.
      is_submodule: whether the policy was applied to a larger model that contains ``model``.
    """
    if not has_policy:
        return
    name = type(model).__name__
    if is_submodule:
        raise ValueError(
            f"{call} takes a model without a policy, got a {name} with the policy of a larger model;\n"
            "use it as it is, or name it in the overrides of the larger model:\n"
            f"{call}(model, policy, {{'path/of/the/module': 'float32'}})"
        )
    raise ValueError(
        f"{call} takes a model without a policy, got a {name} that has one (clones and merged models keep it);\n"
        "use it as it is, or apply one policy, with all overrides, to the original model:\n"
        f"{call}(model, policy, overrides)"
    )


def require_whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raise a ValueError if a ``value`` is not an integer of at least ``least``."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}, got {value!r}; write {name}={least} or more"
        )


def require_function(fun: Any, name: str) -> None:
    """Raise a TypeError if ``fun`` is not a function of arrays.

    ``name`` is the name of the called function of jaxmp, for the error message.
    """
    is_class = isinstance(fun, type)
    is_linen, is_nnx = _kinds_of(fun if is_class else type(fun))
    if is_class and (is_linen or is_nnx):
        raise TypeError(
            f"jaxmp.{name} takes a function of arrays, got the class {fun.__name__}; pass a function that calls "
            f"{fun.__name__}(...)"
        )
    if is_linen and getattr(fun, "scope", None) is None:
        remedy = "use jaxmp.linen.autocast(model, policy)" if name == "autocast" else "pass model.apply"
        raise TypeError(f"jaxmp.{name} takes a function of arrays, got an instance of {type(fun).__name__}; {remedy}")
    if not callable(fun):
        raise TypeError(f"jaxmp.{name} takes a function of arrays, got {printed(fun)}; pass e.g. a loss function")


def _printed_argument(value: Any) -> str:
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value) if is_plain else getattr(value, "__name__", type(value).__name__)
