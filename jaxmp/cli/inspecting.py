"""Code for the commands that run a tool of :mod:`jaxmp.inspect` on a function."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

from jaxmp.cli.errors import UsageError


def where(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options ``--device`` and ``--topology`` as arguments of a tool."""
    return {"device": options.device, "topology": options.topology}


def under(policy: str | None, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fun`` under autocast, or unchanged if ``policy`` is None."""
    from jaxmp.engine.autocast import autocast
    from jaxmp.inspect.program.calls import is_step

    if policy is None:
        return fun
    if is_step(fun):
        raise UsageError(
            f"--policy cannot set the policy of a train step, got --policy {policy}; write "
            "make_train_step(loss_fn, policy=…), or name the loss function instead of the step"
        )
    return autocast(fun, policy)


def of_shapes(options: argparse.Namespace, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Return the report of ``make(function)`` on shapes from ``--arg`` or ``--args``.

    ``make`` returns the tool's function, which takes the arguments of ``function`` and returns the report.
    """
    import jax

    from jaxmp.base.accelerators import accelerator_named
    from jaxmp.base.hardware import assumed
    from jaxmp.cli.loading import in_current_folder, load, usage_errors
    from jaxmp.inspect.compiled.meshes import within_mesh_of_shapes

    if options.device is not None:
        jax.config.update("jax_platforms", "cpu")  # otherwise JAX's CUDA plugin would look for a GPU
    with in_current_folder():
        loaded = load(options.function, options.arg, options.args)
        device: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if options.device is not None:
            with usage_errors(ValueError):
                accelerator_named(options.device)
            device = assumed(options.device)  # float8 products and warnings depend on the device
        with within_mesh_of_shapes(loaded.operands), device:
            jax.eval_shape(loaded.function, *loaded.operands)  # raises the errors of the function itself
        with usage_errors(FileNotFoundError, ValueError, TypeError, ModuleNotFoundError):
            return make(loaded.function)(*loaded.operands)


def of_arrays(options: argparse.Namespace, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Return the report of ``make(function)`` on the arrays of ``--args``.

    ``make`` is as in :func:`of_shapes`. ``--args`` names a function that returns the arrays. Without ``--args``,
    ``function`` has no arguments.
    """
    from jaxmp.cli.loading import check_count, example_function, function, in_current_folder, usage_errors

    with in_current_folder():
        fun = function(options.function)
        with usage_errors(FileNotFoundError, ValueError, TypeError):
            run = make(fun)
        args: Any = () if options.args is None else example_function(options.args)()
        args = args if isinstance(args, tuple) else (args,)
        check_count(options.function, fun, args)
        return run(*args)
