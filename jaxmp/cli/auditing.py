"""``jaxmp audit``: the audit of a function that is named on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp.cli.planning import UsageError, _check_count, _function, _shape, _told, _traced
from jaxmp.inspect.auditing import Audit, audit


def result(
    function: str, policy: str | None, shapes: Sequence[str] = (), example: str | None = None, device: str | None = None
) -> Audit:
    """The audit of a function on abstract arguments; nothing is executed but imports.

    Args:
      function: ``"module:function"``; modules in the current folder go first.
      policy: the name of a policy, or None.
      shapes: the positional arguments, each as ``"float32[8,16]"``.
      example: ``"module:function"`` of a function without arguments that returns them as a tuple; traced, not run.
      device: None for the attached one, or a name in :data:`jaxmp.inspect.targets.TARGETS`.

    Raises:
      UsageError: one of them is wrong, the function cannot be compiled with these arguments, or packages are missing.

    >>> result("jax.numpy:matmul", None, ["bfloat16[8,16]", "bfloat16[16,8]"]).half_flops
    1.0
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
        with _told(ValueError, TypeError):
            audited = audit(fun, policy, device=device)
        if example is not None:
            operands = _traced(example, _function(example), ())
            operands = operands if isinstance(operands, tuple) else (operands,)
        _check_count(function, fun, operands, "")
        _traced(function, fun, operands)  # raises what the function itself does wrong
        with _told(ValueError, ModuleNotFoundError):
            return audited(*operands)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
