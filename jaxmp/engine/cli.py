"""``jaxmp plan``: the plan of a function that is named on the command line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp.dtypes import canonical_dtype, nearest
from jaxmp.engine.plan import CastPlan, cast_plan


class UsageError(ValueError):
    """What was asked for on the command line cannot be done; the text is one line."""


def plan(
    function: str, policy: str, shapes: Sequence[str] = (), example: str | None = None, overrides: Sequence[str] = ()
) -> CastPlan:
    """The plan of a function on abstract arguments; nothing is executed but imports.

    Args:
      function: ``"module:function"``; modules in the current folder go first.
      policy: the name of a policy.
      shapes: the positional arguments, each as ``"float32[8,16]"``; a dtype alone is a scalar, ``"key[]"`` a
        random key.
      example: ``"module:function"`` of a function without arguments that returns the positional arguments as a tuple,
        or the only one; it is traced, not run.
      overrides: ``"KEY=LEVEL"``.

    Raises:
      UsageError: one of them is wrong, or the function cannot be traced with these arguments.

    >>> plan("jax.numpy:matmul", "mixed_bfloat16", ["float32[8,16]", "float32[16,4]"]).summary.product_flops
    1024
    """
    if example is not None and shapes:
        raise UsageError("the arguments come from --arg or from --args, got both")
    for text in overrides:
        if "=" not in text:
            raise UsageError(f"an --override is KEY=LEVEL, such as '**/head=float32', got {text!r}")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        operands: Any = tuple(map(_shape, shapes))
        fun = _function(function)
        with _told(ValueError, TypeError):
            planned = cast_plan(fun, policy, {key: level for key, _, level in (o.rpartition("=") for o in overrides)})
        if example is not None:
            operands = _traced(example, _function(example), ())
            operands = operands if isinstance(operands, tuple) else (operands,)
        _check_count(function, fun, operands)
        with _told(ValueError):
            try:
                return planned(*operands)
            except Exception:
                _traced(function, fun, operands)  # raises what the function itself does wrong
                raise
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextlib.contextmanager
def _told(*kinds: type[Exception], of: str = "") -> Iterator[None]:
    """Makes a UsageError of an error: its first line, after what it is an error ``of`` and its type."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise UsageError(f"{of}: {type(error).__name__}: {line}" if of else line) from error


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"a function is named MODULE:FUNCTION, such as jax.numpy:matmul, got {name!r}")
    with _told(Exception, of=f"importing {module!r} failed"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            where = "in the current folder or where Python looks for modules"
            raise UsageError(f"there is no module {error.name!r} {where}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [other for other in dir(found) if not other.startswith("_")]
            raise UsageError(f"{module!r} has no {attribute!r}; nearest: {nearest(part, known) or 'none'}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"a function is needed, got {name}, which is of type {type(found).__name__!r}")
    function: Callable[..., Any] = found
    return function


def _shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\[\s*((?:\d+(?:\s*,\s*\d+)*)?)\s*\])?\s*", text)
    if match is None:
        raise UsageError(f"an --arg is a dtype and a shape, such as float32[8,16] or int32[], got {text!r}")
    name, sizes = match[1], tuple(int(size) for size in (match[2] or "").split(",") if size)
    if name == "key":
        return jax.ShapeDtypeStruct(sizes, jax.eval_shape(jax.random.key, 0).dtype)
    if re.fullmatch(r"bool|u?int\d+|complex\d+", name) and hasattr(jnp, name):
        return jax.ShapeDtypeStruct(sizes, getattr(jnp, name))
    with _told(ValueError):
        return jax.ShapeDtypeStruct(sizes, canonical_dtype(name))


def _check_count(name: str, fun: Callable[..., Any], operands: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(fun)
    except ValueError:  # written in C
        return
    try:
        signature.bind(*operands)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise UsageError(f"{name} takes ({takes}), got {len(operands)} by --arg or --args: {error}") from error


def _traced(name: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    with _told(Exception, of=f"{name} cannot be traced with these arguments"):
        return jax.eval_shape(function, *operands)
