"""The commands of :mod:`jaxmp.inspect`: one function each, whose docstring is its help, and their arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def audit(options: argparse.Namespace) -> int:
    """Show which precision each product of a function has, and what is wrong with it; nothing is run but imports.

    The function may be a train step. Exit code 0 if there are no findings, 1 if there are some, 2 if something is wrong
    with the arguments.

    Example:
      jaxmp audit jax.numpy:matmul --policy mixed_bfloat16 --arg bfloat16[8,16] --arg bfloat16[16,8]
    """
    from jaxmp.inspect import audit

    result = _of_shapes(options, lambda fun: audit(fun, options.policy, device=options.device))
    _show(options, result)
    return 1 if result.findings else 0


def memory(options: argparse.Namespace) -> int:
    """Show the memory that a train step or any function needs, by kind and dtype, from compiling it; nothing is run.

    With --device it is compiled for a GPU that is not there, which needs pip install 'jaxmp[compile-only]'. Exit code 2
    if something is wrong with the arguments.

    Example:
      jaxmp memory train:step --args train:shapes --device h200
    """
    from jaxmp.inspect import memory

    _show(options, _of_shapes(options, lambda fun: memory(fun, device=options.device)))
    return 0


def roofline(options: argparse.Namespace) -> int:
    """Predict the time that a train step or any function takes on a GPU, kernel by kernel; nothing is run.

    With --device it is compiled for a GPU that is not there, which needs pip install 'jaxmp[compile-only]'. Exit code 2
    if something is wrong with the arguments.

    Example:
      jaxmp roofline train:step --args train:shapes --device h200
    """
    from jaxmp.inspect import roofline

    _show(options, _of_shapes(options, lambda fun: roofline(fun, device=options.device)))
    return 0


def numerics(options: argparse.Namespace) -> int:
    """Run one step of a loss function and show where its values and gradients underflow or overflow.

    Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp numerics train:loss_fn --args train:params_and_batch --policy mixed_float16 --loss-scale 1024
    """
    from jaxmp.inspect import numerics

    _show(options, _of_arrays(options, lambda fun: numerics(fun, policy=options.policy, loss_scale=options.loss_scale)))
    return 0


def blame(options: argparse.Namespace) -> int:
    """Name the operation that made the first infinity or NaN of a loss or its gradients; the function is run.

    The function may be a train step. Exit code 0 if all is finite, 1 if not, 2 if something is wrong with the
    arguments.

    Example:
      jaxmp blame train:loss_fn --args train:bad_batch --policy mixed_float16 --loss-scale 32768
    """
    from jaxmp.engine.autocast import autocast
    from jaxmp.inspect import first_nonfinite

    def of(fun: Callable[..., Any]) -> Any:
        fun = fun if options.policy is None else autocast(fun, options.policy)
        return first_nonfinite(fun, grad=not options.no_grad, loss_scale=options.loss_scale)

    found = _of_arrays(options, of)
    if found is None:
        print("null" if options.json else "All is finite.")
        return 0
    _show(options, found)
    return 1


def compare(options: argparse.Namespace) -> int:
    """Show what a policy changes in a function, layer by layer, forward and backward; both are run.

    Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp compare train:loss_fn --args train:example --policy mixed_bfloat16
    """
    from jaxmp.cli.loading import levels
    from jaxmp.inspect import compare

    settings = {"reference": options.reference, "overrides": levels(options.override), "grad": not options.no_grad}
    _show(options, _of_arrays(options, lambda fun: compare(fun, options.policy, **settings)))
    return 0


def watch(options: argparse.Namespace) -> int:
    """Show a run of the experiments as it trains: loss, scale, skips, and how much of each gradient vanishes.

    The run needs --watch N. On a terminal it is drawn again until the run ends; else once. Exit code 2 if the folder is
    not that of such a run.
    """
    from rich.console import Console

    from jaxmp.cli import watching

    title, rows = watching.watched(Path(options.run))
    if options.json:
        print(json.dumps(rows, indent=2, allow_nan=False))
    elif sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):  # the reader has seen enough
            watching.live(Console(), Path(options.run))
    else:
        Console(width=120).print(watching.picture(title, rows))
    return 0


COMMANDS = (audit, memory, roofline, numerics, blame, compare, watch)


def _of_shapes(options: argparse.Namespace, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """What ``make`` of the function says of shapes."""
    import jax

    from jaxmp.cli.loading import in_current_folder, load, told, traced

    if options.device is not None:
        jax.config.update("jax_platforms", "cpu")  # with its CUDA plugin JAX would look for a GPU
    with in_current_folder():
        loaded = load(options.function, options.arg, options.args)
        traced(options.function, *loaded)  # raises what the function itself does wrong
        with told(ValueError, TypeError, ModuleNotFoundError):
            return make(loaded.function)(*loaded.operands)


def _of_arrays(options: argparse.Namespace, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """What ``make`` of the function says of the arrays that another function returns; both are run."""
    from jaxmp.cli.loading import check_count, function, in_current_folder, told

    with in_current_folder():
        fun = function(options.function)
        with told(ValueError, TypeError):
            run = make(fun)
        args: Any = ()
        if options.args is not None:
            with told(Exception, of=f"{options.args} failed"):
                args = function(options.args)()
        args = args if isinstance(args, tuple) else (args,)
        check_count(options.function, fun, args, "")
        with told(Exception, of=f"{options.function} failed with these arguments"):
            return run(*args)


def _show(options: argparse.Namespace, result: Any) -> None:
    """Prints a result: JSON if asked for, a table on a terminal, else text."""
    if options.json:
        print(result.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(result.table())
    else:
        print(result)


def add_arguments(command: argparse.ArgumentParser, name: str, add_function: Callable[..., None]) -> None:
    """Adds what a command takes; ``add_function`` adds a function and its shapes."""
    if name == "watch":
        command.add_argument("run", metavar="RUN", help="the run's folder")
        return
    if name in ("audit", "memory", "roofline"):
        add_function(command)
        command.add_argument("--device", metavar="NAME", help="a GPU that is not there: h200, h100, a100, b200, l4, t4")
    else:
        command.add_argument("function", metavar="MODULE:FUNCTION", help="returns the loss, or a tuple with it first")
        what = "a function that returns the positional arguments as a tuple; run"
        command.add_argument("--args", metavar="MODULE:FUNCTION", help=what)
    if name == "compare":
        command.add_argument("--policy", default="mixed_bfloat16", help="default: mixed_bfloat16")
        command.add_argument("--reference", default="float32", help="float32, as written, or float64; default: float32")
        what = "as for jaxmp plan; repeat for more"
        command.add_argument("--override", action="append", default=[], metavar="KEY=LEVEL", help=what)
    elif name in ("audit", "numerics", "blame"):
        command.add_argument("--policy", help="default: none, the function as it is written")
    if name in ("numerics", "blame"):
        command.add_argument("--loss-scale", type=float, default=1.0, help="default: 1")
    if name in ("blame", "compare"):
        command.add_argument("--no-grad", action="store_true", help="look at the results, not at gradients")
