"""``jaxmp memory`` and ``jaxmp roofline``: what compiling a function that is named on the command line tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp.cli.planning import UsageError, _check_count, _function, _shape, _told, _traced


def result(
    inspect: Callable[..., Any], function: str, shapes: Sequence[str], example: str | None, device: str | None
) -> Any:
    """What ``inspect``, ``jaxmp.inspect.memory`` or the like, says of a function on abstract arguments.

    Args:
      inspect: takes the function and ``device=``, returns a function of the arguments.
      function: ``"module:function"``; modules in the current folder go first.
      shapes: the positional arguments, each as ``"float32[8,16]"``.
      example: ``"module:function"`` of a function without arguments that returns them as a tuple; traced, not run.
      device: None for the attached one, or a name.

    Raises:
      UsageError: one of them is wrong, the function cannot be compiled with these arguments, or packages are missing.
    """
    if example is not None and shapes:
        raise UsageError("the arguments come from --arg or from --args, got both")
    if device is not None:
        jax.config.update("jax_platforms", "cpu")  # with its CUDA plugin JAX would look for a GPU
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        operands: Any = tuple(map(_shape, shapes))
        fun = _function(function)
        if example is not None:
            operands = _traced(example, _function(example), ())
            operands = operands if isinstance(operands, tuple) else (operands,)
        _check_count(function, fun, operands, "")
        _traced(function, fun, operands)  # raises what the function itself does wrong
        with _told(ValueError, ModuleNotFoundError):
            return inspect(fun, device=device)(*operands)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
