"""What is given in the place of a function, told in a sentence."""

from __future__ import annotations

import inspect
from typing import Any

_RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def require_function(fun: Any, name: str) -> None:
    """Raises a TypeError if ``fun``, given to ``jaxmp.<name>``, is no function, or a module called otherwise."""
    cls = fun if isinstance(fun, type) else type(fun)
    # By their names, so that Flax need not be imported.
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    linen = "flax.linen.module.Module" in bases
    if (linen and getattr(fun, "scope", None) is None) or ("flax.nnx.module.Module" in bases and cls is fun):
        adapter, make = ("linen", "(...)") if linen else ("nnx", "(..., rngs=nnx.Rngs(0))")
        what = f"{'the class' if cls is fun else 'an instance'} {cls.__name__} of {'Linen' if linen else 'NNX'} modules"
        instance = f"{cls.__name__}{make}" if cls is fun else "model"
        model = f"{instance}{'.apply' if linen and name != 'autocast' else ''}"
        remedy = f"use jaxmp.{f'{adapter}.' if name == 'autocast' else ''}{name}({model}, policy)"
        raise TypeError(f"jaxmp.{name} takes a function of arrays, got {what}; {remedy}")
    if any(is_later(fun) for is_later in _RUN_LATER):
        raise TypeError(
            f"jaxmp.{name} takes a function that returns arrays, got {fun!r}, whose code runs when its coroutine or "
            "generator does; give it what computes in it, a loss say"
        )
    if not callable(fun):
        raise TypeError(f"jaxmp.{name} takes a function of arrays, got {fun!r}; give it what computes, a loss say")
