"""Functions and their arguments, by the names and shapes of a command line; nothing is run but imports."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

import jaxmp
from jaxmp._functions import module_given
from jaxmp._jaxpr.program import remedy_of
from jaxmp._placement import is_of_jax
from jaxmp.cli.errors import UsageError
from jaxmp.dtypes import canonical_dtype, nearest


class Loaded(NamedTuple):
    """A function and its positional arguments, arrays or shapes; ``hint`` is for errors of calling it with them."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    hint: str


@contextlib.contextmanager
def in_current_folder() -> Iterator[None]:
    """Within it modules in the current folder go first."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def load(name: str, shapes: Sequence[str] = (), example: str | None = None) -> Loaded:
    """A function and its arguments.

    Args:
      name: ``"module:function"``.
      shapes: the positional arguments, each as ``"float32[8,16]"``; a dtype alone is a scalar, ``"key[]"`` a
        random key.
      example: ``"module:function"`` of a function without arguments that returns the positional arguments as a tuple,
        or the only one, arrays or ShapeDtypeStructs, which may lie on a mesh; it is traced, not run.

    Raises:
      UsageError: one of them is wrong.
    """
    if example is not None and shapes:
        raise UsageError("the arguments come from --arg or from --args, got both")
    operands: Any = tuple(map(_shape, shapes))
    fun, hint = function(name), ""
    if example is not None:
        operands = _shapes(example, arguments_function(example))
        if not isinstance(operands, tuple):
            got = "an array" if isinstance(operands, jax.ShapeDtypeStruct) else f"a {type(operands).__name__}"
            hint = f"; {example} returned {got}, which is one argument: return several as a tuple"
            operands = (operands,)
    check_count(name, fun, operands, hint)
    return Loaded(fun, operands, hint)


def _shapes(example: str, fun: Callable[[], Any]) -> Any:
    """The shapes of what a function returns; ShapeDtypeStructs as they are."""
    given: Any = None

    def arrays() -> Any:
        nonlocal given
        given = fun()
        check_arguments(example, given, may_be_shapes=True)
        return jax.tree.map(lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, given)

    with told(Exception, of=f"{example}, traced for the arguments, failed"):
        found = jax.eval_shape(arrays)
    return jax.tree.map(
        lambda leaf, own: own if leaf is None else leaf, found, given, is_leaf=lambda leaf: leaf is None
    )


def check_arguments(example: str, given: Any, may_be_shapes: bool) -> None:
    """Raises a UsageError if ``example`` gave what is no argument, or a shape in a dtype that JAX narrows."""
    rule = (
        "an array, a number or a jax.ShapeDtypeStruct"
        if may_be_shapes
        else "an array or a number, as the function is run"
    )
    for path, leaf in jax.tree.leaves_with_path(given):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        got = f"one of type {type(leaf).__name__!r} in {example}(){jax.tree_util.keystr(path)}"
        if is_shape and may_be_shapes:
            _check_dtype(leaf.dtype, got)
        elif is_shape or not is_of_jax(leaf):
            remedy = "return the array" if is_shape else "name a function that takes the others and passes this one on"
            raise UsageError(f"each argument is {rule}, got {got}; {remedy}")


@contextlib.contextmanager
def told(*kinds: type[Exception], of: str = "", hint: str = "", about: str = "") -> Iterator[None]:
    """Makes a UsageError of an error: its first line, after what it is an error ``of``, its type and its place.

    The ``hint`` is added where the error says something ``about`` that.
    """
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        if of:
            line = f"{line.rstrip('.')}{_place(error)}"
        hint = hint if not about or re.search(rf"\b{about}\b", str(error)) else ""
        if remedy := remedy_of(error, "for a plan"):
            hint += f"; {remedy}"
        raise UsageError(f"{of}: {type(error).__name__}: {line}{hint}" if of else line) from error


def _place(error: Exception) -> str:
    """The last line of code outside of JAX, Flax, jaxmp and importlib that ``error`` has passed through."""
    packages = [Path(str(package.__file__)).parent for package in (jax, flax, jaxmp, importlib)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(package) for package in packages):
            return f" (line {frame.lineno} of {path.name}: {frame.line})"
    return ""


def arguments_function(name: str) -> Callable[[], Any]:
    """The function of a module that returns the arguments of another."""
    attribute = name.rpartition(":")[2]
    fun = function(name, f"write a function that returns it (def arguments(): return {attribute}) and name that")
    try:
        signature = inspect.signature(fun)
    except ValueError:  # written in C
        return fun
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(
            f"the function that --args names is called without arguments, got {name}, which takes "
            f"({', '.join(signature.parameters)}); give each parameter a default"
        ) from error
    return fun


def function(name: str, remedy: str = "name one, such as jax.numpy:matmul") -> Callable[..., Any]:
    """The function of a module; ``remedy`` is for the error of what can't be called."""
    _leave_out_the_command()
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        rule = f"a function is named MODULE:FUNCTION, such as jax.numpy:matmul, got {name!r}"
        raise UsageError(f"{rule}{'' if ':' in name or name.endswith('.py') else _with_colon(name)}")
    if len(PurePath(module).parts) > 1 or module.startswith("."):  # PurePath drops a leading ./
        raise UsageError(_file_for_module(module, attribute))
    with told(Exception, of=f"importing {module!r} failed"):
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
        raise UsageError(f"a function is needed, got {name}, which is of type {type(found).__name__!r}; {remedy}")
    if (given := module_given(found)) is not None:
        model = given.instance if isinstance(found, type) else attribute
        takes, call = ("variables, x", f"{model}.apply") if given.is_linen else ("x", model)
        raise UsageError(
            f"a function of arrays is needed, got {name}, {given.what}; write one that calls it, def forward({takes}): "
            f"return {call}({takes}), and name that: {module}:forward"
        )
    named: Callable[..., Any] = found
    return named


@functools.cache
def _leave_out_the_command() -> None:
    """Keep the script that started the command out of the sources of programs."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script:  # Python's prompt has none
        source_info_util.register_exclusion(script)


def _with_colon(name: str) -> str:
    """The remedy for a dotted name of what is in a module; nothing for that of a module."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        with contextlib.suppress(Exception):  # of the module's code, or there is none
            if importlib.util.find_spec(".".join(parts[:n])):
                return f"; write {'.'.join(parts[:n])}:{'.'.join(parts[n:])}" if n < len(parts) else ""
    return ""


def _file_for_module(file: str, attribute: str) -> str:
    rule = "a function is named MODULE:FUNCTION, with the module as Python imports it"
    if file.endswith(".py") and not Path(file).is_file():
        return f"{rule}, got the file {file!r}, which is not there; name a module that is there"
    path, where = PurePath(file).with_suffix(""), ""
    if path.is_absolute() or ".." in path.parts:
        path, where = PurePath(path.name), f" in the folder {path.parent}"
    return f"{rule}, got the file {file!r}; write {'.'.join(path.parts)}:{attribute}{where}"


def _shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\[\s*((?:\d+(?:\s*,\s*\d+)*)?)\s*\])?\s*", text)
    if match is None:
        raise UsageError(f"an --arg is a dtype and a shape, such as float32[8,16] or int32[], got {text!r}")
    name, sizes = match[1], tuple(int(size) for size in (match[2] or "").split(",") if size)
    if name == "key":
        return jax.ShapeDtypeStruct(sizes, jax.eval_shape(jax.random.key, 0).dtype)
    if re.fullmatch(r"bool|u?int\d+|complex\d+", name) and hasattr(jnp, name):
        dtype = np.dtype(getattr(jnp, name))
    else:
        with told(ValueError):
            dtype = canonical_dtype(name)
    _check_dtype(dtype, repr(text))
    return jax.ShapeDtypeStruct(sizes, dtype)


def _check_dtype(dtype: Any, got: str) -> None:
    config: Any = jax.config
    narrow = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}.get(dtype.name)
    if narrow and not config.jax_enable_x64:
        raise UsageError(
            f"without jax_enable_x64 JAX makes {narrow} of every {dtype.name}, got {got}; set JAX_ENABLE_X64=1 in "
            f"the environment, or ask for {narrow}"
        )


def check_count(name: str, fun: Callable[..., Any], operands: Sequence[Any], hint: str) -> None:
    """Raises a UsageError if a function does not take so many arguments by position."""
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
        hint = hint or _to_pass(name, fun, takes)
        raise UsageError(f"{name} takes ({takes}), got {len(operands)} by --arg or --args: {error}{hint}") from error


def _to_pass(name: str, fun: Any, takes: str) -> str:
    """What helps where a function takes another number of arguments than it was given."""
    module, _, attribute = name.rpartition(":")
    if isinstance(fun, type):
        return f"; name a function that calls an instance, def forward(x): return {attribute}(…)(x): {module}:forward"
    if not takes:
        return "; leave them out"
    return f"; name a function that returns these, def arguments(): return {takes}, as --args {module}:arguments"


def levels(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides that are written ``"KEY=LEVEL"``."""
    found: dict[str, str] = {}
    for text in overrides:
        key, _, level = text.rpartition("=")
        if "=" not in text:
            raise UsageError(f"an --override is KEY=LEVEL, such as '**/head=float32', got {text!r}")
        if key in found:
            raise UsageError(f"each --override has a key of its own, got {key!r} twice; leave one of them out")
        found[key] = level
    return found


def traced(name: str, fun: Callable[..., Any], operands: Sequence[Any], hint: str = "") -> Any:
    """The shapes of what a function returns; what it does wrong is a UsageError, with the hint if a list was wrong."""
    kind = type(operands[0]).__name__ if hint else ""  # the number of arguments was right: no error tells of a shape
    with told(Exception, of=f"{name} cannot be traced with these arguments", hint=hint, about=kind):
        return jax.eval_shape(fun, *operands)
