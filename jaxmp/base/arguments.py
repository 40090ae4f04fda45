"""Error messages for wrong arguments in place of a function, a model or a policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


class ModuleGiven(NamedTuple):
    """A module in the place of a function: what it is in words, and how an instance of it is written."""

    what: str
    instance: str
    is_linen: bool


def module_given(fun: Any) -> ModuleGiven | None:
    """What is known of ``fun`` if it is a module, but for an instance of NNX, which is a function of arrays."""
    cls = fun if isinstance(fun, type) else type(fun)
    linen, nnx = _kinds_of(cls)
    if not ((linen and getattr(fun, "scope", None) is None) or (nnx and cls is fun)):
        return None
    what = f"{'the class' if cls is fun else 'an instance'} {cls.__name__} of {'Linen' if linen else 'NNX'} modules"
    instance = f"{cls.__name__}{'(...)' if linen else '(..., rngs=nnx.Rngs(0))'}" if cls is fun else "model"
    return ModuleGiven(what, instance, linen)


def _kinds_of(cls: type) -> tuple[bool, bool]:
    """Whether ``cls`` is a class of Linen modules, and whether it is one of NNX."""
    # By their names, so that Flax need not be imported.
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    return "flax.linen.module.Module" in bases, "flax.nnx.module.Module" in bases


def require_order(model: Any, policy: Any, call: str) -> None:
    """Raises a TypeError if a module of Flax came in the place of the policy of a ``call``, and none in its own."""
    if model is not None and any(_kinds_of(type(policy))) and not any(_kinds_of(type(model))):
        raise TypeError(
            f"{call} takes (model, policy), got ({_shown(model)}, {_shown(policy)}): the two are swapped; write "
            f"{call}(model, policy)"
        )


def printed(value: Any) -> str:
    """What came, for an error; of what prints more than a line, as a model does with all its arrays, its class."""
    text = repr(value)
    return f"an instance of {type(value).__name__}" if "\n" in text or len(text) > 120 else text


def require_flag(name: str, value: Any, remedy: str) -> None:
    """Raises a TypeError if a ``value`` is neither True nor False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is True or False, got {printed(value)}; {remedy}")


def require_function(fun: Any, name: str) -> None:
    """Raises a TypeError if ``fun``, given to ``jaxmp.<name>``, is no function, or a module called otherwise."""
    if (given := module_given(fun)) is not None:
        model = f"{given.instance}{'.apply' if given.is_linen and name != 'autocast' else ''}"
        adapter = f"{'linen' if given.is_linen else 'nnx'}." if name == "autocast" else ""
        remedy = f"use jaxmp.{adapter}{name}({model}, policy)"
        raise TypeError(f"jaxmp.{name} takes a function of arrays, got {given.what}; {remedy}")
    if not callable(fun):
        raise TypeError(f"jaxmp.{name} takes a function of arrays, got {fun!r}; give it what computes, a loss say")


def takes_a_function(make: F) -> F:
    """``make(fun, policy, …)`` of ``jaxmp``, which says what to write if it is called like a decorator."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            name = f"jaxmp.{make.__name__}"
            if args and callable(args[0]):
                require_function(args[0], make.__name__)
            got = ", ".join([*map(_shown, args), *(f"{key}={_shown(value)}" for key, value in kwargs.items())])
            raise TypeError(
                f"{name}(fun, policy) returns a function, got {name}({got}); write half = {name}(fun, "
                '"mixed_bfloat16") and call half; the context manager is jaxmp.precision("float32")'
            ) from None
        return make(*args, **kwargs)

    return cast(F, told)


def _shown(value: Any) -> str:
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value) if is_plain else getattr(value, "__name__", type(value).__name__)
