"""Trace a call, with a scope for each call of a module."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxmp._internals.flax.nnx import note_for_changes
from jaxmp.base.context_variables import setting
from jaxmp.nnx.run import call_numbers
from jaxmp.program.equations import opened
from jaxmp.program.scopes import CALL_SCOPE

NOTE_FOR_TOOLS = (
    "A tool traces the function, which may change only the NNX models among its arguments. Pass the models:\n"
    "audit(step)(model, ...), without nnx.cached_partial and functools.partial."
)
"""The note for Flax's error if a traced function changes an NNX model that is not an argument."""


def program_of(fun: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Any]:
    """Return the open jaxpr of a call, its constants and its result's structure.

    Each call of a Linen module, or of an NNX module under a policy, has its own scope.

    Args:
      fun: the function.
      args: its positional arguments, arrays or shapes.
    """
    numbers = itertools.count()

    def in_call_scope(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        with jax.named_scope(f"{CALL_SCOPE}{next(numbers)}"):
            return method(*args, **kwargs)

    with setting(call_numbers, numbers), nn.intercept_methods(in_call_scope), note_for_changes(NOTE_FOR_TOOLS):
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return *opened(closed), jax.tree.structure(shapes)
