"""``jaxmp plan``: the plan of a function that is named on the command line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
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
        hint = ""
        if example is not None:
            operands = _traced(example, _function(example), ())
            if not isinstance(operands, tuple):
                got = "an array" if isinstance(operands, jax.ShapeDtypeStruct) else f"a {type(operands).__name__}"
                hint = f"; {example} returned {got}, which is one argument: return several as a tuple"
                operands = (operands,)
        _check_count(function, fun, operands, hint)
        with _told(ValueError):
            try:
                return planned(*operands)
            except Exception:
                _traced(function, fun, operands, hint)  # raises what the function itself does wrong
                raise
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def called(make: Callable[[Callable[..., Any]], Callable[..., Any]], function: str, example: str) -> Any:
    """What ``make`` of a function returns when it is called on the arguments that another one returns.

    Args:
      make: of the function.
      function, example: each ``"module:function"``; modules in the current folder go first.

    Raises:
      UsageError: one of them is wrong, or fails.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        fun, arguments = _function(function), _function(example)
        with _told(ValueError, TypeError):
            made = make(fun)
        with _told(Exception, of=f"{example} failed"):
            operands = arguments()
        operands = operands if isinstance(operands, tuple) else (operands,)
        _check_count(function, fun, operands, "")
        with _told(Exception, of=f"{function} failed"):
            return made(*operands)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextlib.contextmanager
def _told(*kinds: type[Exception], of: str = "", hint: str = "") -> Iterator[None]:
    """Makes a UsageError of an error: its first line, after what it is an error ``of``, its type and its place."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        if of:
            line = f"{line.rstrip('.')}{_place(error)}"
        if isinstance(error, jax.errors.TracerBoolConversionError):
            hint += "; nothing is computed for a plan, as under jax.jit: write jnp.where or jax.lax.cond"
        raise UsageError(f"{of}: {type(error).__name__}: {line}{hint}" if of else line) from error


def _place(error: Exception) -> str:
    """The last line of code outside of JAX, Flax and jaxmp that ``error`` has passed through."""
    packages = [Path(str(package.__file__)).parent for package in (jax, flax, jaxmp)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(package) for package in packages):
            return f" (line {frame.lineno} of {path.name}: {frame.line})"
    return ""


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"a function is named MODULE:FUNCTION, such as jax.numpy:matmul, got {name!r}")
    if len(PurePath(module).parts) > 1 or module.startswith("."):  # PurePath drops a leading ./
        raise UsageError(_file_for_module(module, attribute))
    with _told(Exception, of=f"importing {module!r} failed"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            if module.endswith(".py"):
                raise UsageError(_file_for_module(module, attribute)) from error
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


def _file_for_module(file: str, attribute: str) -> str:
    path, where = PurePath(file).with_suffix(""), ""
    if path.is_absolute() or ".." in path.parts:
        path, where = PurePath(path.name), f" in the folder {path.parent}"
    return (
        f"a function is named MODULE:FUNCTION, with the module as Python imports it, got the file {file!r}; write "
        f"{'.'.join(path.parts)}:{attribute}{where}"
    )


def _shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\[\s*((?:\d+(?:\s*,\s*\d+)*)?)\s*\])?\s*", text)
    if match is None:
        raise UsageError(f"an --arg is a dtype and a shape, such as float32[8,16] or int32[], got {text!r}")
    name, sizes = match[1], tuple(int(size) for size in (match[2] or "").split(",") if size)
    if name == "key":
        return jax.ShapeDtypeStruct(sizes, jax.eval_shape(jax.random.key, 0).dtype)
    config: Any = jax.config
    if re.fullmatch(r"bool|u?int\d+|complex\d+", name) and hasattr(jnp, name):
        dtype = np.dtype(getattr(jnp, name))
    else:
        with _told(ValueError):
            dtype = canonical_dtype(name)
    narrow = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}.get(dtype.name)
    if narrow and not config.jax_enable_x64:
        raise UsageError(
            f"without jax_enable_x64 JAX makes {narrow} of every {dtype.name}, got {text!r}; set JAX_ENABLE_X64=1 in "
            f"the environment, or ask for {narrow}"
        )
    return jax.ShapeDtypeStruct(sizes, dtype)


def _check_count(name: str, fun: Callable[..., Any], operands: Sequence[Any], hint: str) -> None:
    try:
        signature = inspect.signature(fun)
    except ValueError:  # written in C
        return
    parameters = signature.parameters.values()
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if keywords:
        taken = ", ".join([each.name for each in parameters if each.kind is not each.KEYWORD_ONLY] + keywords)
        passed = taken.removesuffix(", ".join(keywords)) + ", ".join(f"{each}={each}" for each in keywords)
        raise UsageError(
            f"--arg and --args pass arguments by position, but {name} takes {', '.join(keywords)} by keyword only; "
            f"name a function that passes them on: lambda {taken}: {name.rpartition(':')[2]}({passed})"
        )
    try:
        signature.bind(*operands)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise UsageError(f"{name} takes ({takes}), got {len(operands)} by --arg or --args: {error}{hint}") from error


def _traced(name: str, function: Callable[..., Any], operands: Sequence[Any], hint: str = "") -> Any:
    with _told(Exception, of=f"{name} cannot be traced with these arguments", hint=hint):
        return jax.eval_shape(function, *operands)
