"""Load the functions and arguments that a command line names.

:func:`load` imports modules. It traces the function that returns the arguments, and runs no function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jaxmp.base.dtypes import canonical_dtype, closest_names
from jaxmp.cli.errors import UsageError


class Loaded(NamedTuple):
    """A function and its positional arguments, or their shapes."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


@contextlib.contextmanager
def in_current_folder() -> Iterator[None]:
    """Make imports search the current folder first, inside of the context."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def load(name: str, shapes: Sequence[str] = (), example: str | None = None) -> Loaded:
    """Return a function and the shapes of its arguments.

    Args:
      name: the function as ``"module:function"``.
      shapes: the positional arguments, each as a text such as ``"float32[8,16]"``. A dtype alone means a scalar, and
        ``"key[]"`` means a random key.
      example: a function without parameters that returns the positional arguments, as ``"module:function"``. It returns
        a tuple of arguments, or the only argument. The arguments are pytrees of arrays or of ShapeDtypeStructs, which
        may have shardings. The function is traced, not run.

    Raises:
      UsageError: one of the arguments is wrong, or both ``shapes`` and ``example`` are set.
    """
    if example is not None and shapes:
        raise UsageError("the arguments come from --arg or from --args, got both")
    operands: Any = tuple(map(_shape, shapes))
    fun = function(name)
    if example is not None:
        operands = _shapes(example_function(example))
        operands = operands if isinstance(operands, tuple) else (operands,)
    check_count(name, fun, operands)
    return Loaded(fun, operands)


def load_arrays(name: str, example: str | None) -> Loaded:
    """Return a function and its arguments, which the function ``example`` returns; none without an example."""
    fun = function(name)
    operands: Any = () if example is None else example_function(example)()
    operands = operands if isinstance(operands, tuple) else (operands,)
    check_count(name, fun, operands)
    return Loaded(fun, operands)


def _shapes(example: Callable[[], Any]) -> Any:
    """Return the shapes of the arrays that a function returns.

    The function is traced. ShapeDtypeStructs that it returns are unchanged.
    """
    result: Any = None

    def arrays() -> Any:
        nonlocal result
        result = example()
        return jax.tree.map(lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, result)

    shapes = jax.eval_shape(arrays)
    return jax.tree.map(
        lambda shape, leaf: leaf if shape is None else shape, shapes, result, is_leaf=lambda leaf: leaf is None
    )


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Replace errors of these kinds by a UsageError with their first line."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error).partition("\n")[0]) from error


def function(name: str) -> Callable[..., Any]:
    """Import and return the function that ``"module:function"`` names."""
    value = _value(name)
    if not callable(value):
        raise UsageError(f"a function is needed, got {name} of type {type(value).__name__!r}")
    loaded: Callable[..., Any] = value
    return loaded


def example_function(name: str) -> Callable[[], Any]:
    """Import and return the function without parameters that ``--args`` names."""
    value = _value(name)
    rule = "--args must name a function without parameters that returns the arguments"
    remedy = "write e.g. def arguments(): return params, batch"
    if not callable(value):
        raise UsageError(f"{rule}, got {name} of type {type(value).__name__!r}; {remedy}")
    loaded: Callable[[], Any] = value
    try:
        signature = inspect.signature(loaded)
    except ValueError:  # a function that is written in C may have no signature
        return loaded
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"{rule}, got {name}{signature}; {remedy}") from error
    return loaded


def _value(name: str) -> Any:
    """Import the object that ``"module:function"`` names."""
    _leave_out_the_command()
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        importable = module.removeprefix("./").removesuffix(".py").replace("/", ".")
        raise UsageError(f"write a module, not a file: {importable}:{attribute or 'FUNCTION'}, got {name!r}")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise UsageError(f"write a function as MODULE:FUNCTION, such as jax.numpy:matmul, got {name!r}")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        where = "in the current folder or where Python looks for modules"
        raise UsageError(f"there is no module {error.name!r} {where}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            known = [other for other in dir(value) if not other.startswith("_")]
            raise UsageError(f"{module!r} has no {attribute!r}; nearest: {closest_names(part, known) or 'none'}")
        value = getattr(value, part)
    return value


@functools.cache
def _leave_out_the_command() -> None:
    """Hide the script that started the command from the source lines of programs."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script:  # the interactive prompt of Python has no script
        source_info_util.register_exclusion(script)


def _shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\[\s*((?:\d+(?:\s*,\s*\d+)*)?)\s*\])?\s*", text)
    if match is None:
        raise UsageError(f"an --arg must be a dtype and a shape, such as float32[8,16] or int32[], got {text!r}")
    name, sizes = match[1], tuple(int(size) for size in (match[2] or "").split(",") if size)
    if name == "key":
        return jax.ShapeDtypeStruct(sizes, jax.eval_shape(jax.random.key, 0).dtype)
    if re.fullmatch(r"bool|u?int\d+|complex\d+", name) and hasattr(jnp, name):
        dtype = np.dtype(getattr(jnp, name))
    else:
        with usage_errors(ValueError):
            dtype = canonical_dtype(name)
    shape: jax.ShapeDtypeStruct = jax.eval_shape(lambda: jnp.zeros(sizes, dtype))  # JAX warns if it narrows the dtype
    return shape


def check_count(name: str, fun: Callable[..., Any], operands: Sequence[Any]) -> None:
    """Raise a UsageError if a function does not take these positional arguments."""
    try:
        signature = inspect.signature(fun)
    except ValueError:  # a function that is written in C may have no signature
        return
    try:
        signature.bind(*operands)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise UsageError(f"{name} takes ({takes}), got {len(operands)} from --arg or --args: {error}") from error


def levels(overrides: Sequence[str] | None) -> dict[str, str]:
    """Return the overrides ``"KEY=LEVEL"`` as a dict; the last one for a key wins."""
    overridden: dict[str, str] = {}
    for text in overrides or ():
        key, _, level = text.rpartition("=")
        if "=" not in text:
            raise UsageError(f"an override must be KEY=LEVEL, such as '**/head=float32', got {text!r}")
        overridden[key] = level
    return overridden
