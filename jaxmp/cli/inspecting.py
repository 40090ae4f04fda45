"""The commands of :mod:`jaxmp.inspect`: one function each, whose docstring is its help, and what it takes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmp.cli.arguments import (
    ARRAYS,
    AUTOCAST,
    DEVICE,
    LOSS_SCALE,
    NO_GRAD,
    PLOT,
    POLICY,
    REFERENCE,
    RUN,
    SHAPES,
    TOPOLOGY,
    Arguments,
)
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import console, plot, print_json, print_rich, show


def audit(options: argparse.Namespace) -> int:
    """Show which precision each product of a function has, and what is wrong with it; nothing is run but imports.

    The function may be a train step. With --topology, as for jaxmp memory, what devices send each other counts too.
    Exit code 0 if there are no findings, 1 if there are some, 2 if something is wrong with the arguments.

    Example:
      jaxmp audit jax.numpy:matmul --policy mixed_bfloat16 --arg bfloat16[8,16] --arg bfloat16[16,8]
    """
    from jaxmp.inspect import audit

    result = _of_shapes(options, lambda fun: audit(fun, options.policy, **_where(options)))
    show(options, result)
    return 1 if result.findings else 0


def memory(options: argparse.Namespace) -> int:
    """Show the memory that a train step or any function needs, by kind and dtype, from compiling it; nothing is run.

    With --device it is compiled for a GPU that is not there, which needs pip install 'jaxmp[compile-only]'. With
    --topology it is compiled for several of them and told for each, also what it sends: the shapes that --args returns
    have shardings on a jax.sharding.AbstractMesh. With --policy the function is put under autocast, which donates
    nothing. Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp memory train:step --args train:shapes --device h200 --topology 1x1x8
    """
    from jaxmp.inspect import memory

    result = _of_shapes(options, lambda fun: memory(_under(options.policy, fun), **_where(options)))
    show(options, result, lambda plots: plots.memory({options.function: result}))
    return 0


def roofline(options: argparse.Namespace) -> int:
    """Predict the time that a train step or any function takes on a GPU, kernel by kernel; nothing is run.

    With --device it is compiled for a GPU that is not there, which needs pip install 'jaxmp[compile-only]'. With
    --policy the function is put under autocast. Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp roofline train:step --args train:shapes --device h200
    """
    from jaxmp.inspect import roofline

    show(options, _of_shapes(options, lambda fun: roofline(_under(options.policy, fun), device=options.device)))
    return 0


def numerics(options: argparse.Namespace) -> int:
    """Run one step of a loss function and show where its values and gradients underflow or overflow.

    Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp numerics train:loss_fn --args train:params_and_batch --policy mixed_float16 --loss-scale 1024
    """
    from jaxmp.inspect import numerics

    scale = options.loss_scale
    result = _of_arrays(options, lambda fun: numerics(fun, policy=options.policy, loss_scale=scale))
    show(options, result, lambda plots: plots.exponents(result, loss_scale=scale))
    return 0


def blame(options: argparse.Namespace) -> int:
    """Name the operation that made the first infinity or NaN of a loss or its gradients; the function is run.

    The function may be a train step. Exit code 0 if all is finite, 1 if not, 2 if something is wrong with the
    arguments.

    Example:
      jaxmp blame train:loss_fn --args train:bad_batch --policy mixed_float16 --loss-scale 32768
    """
    from jaxmp.inspect import first_nonfinite

    settings = {"grad": not options.no_grad, "loss_scale": options.loss_scale}
    found = _of_arrays(options, lambda fun: first_nonfinite(_under(options.policy, fun), **settings))
    if found is None:
        print("null" if options.json else "All is finite.")
        return 0
    show(options, found)
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
    result = _of_arrays(options, lambda fun: compare(fun, options.policy, **settings))
    show(options, result, lambda plots: plots.errors(result))
    return 0


def watch(options: argparse.Namespace) -> int:
    """Show a run of the experiments as it trains: loss, scale, skips, and how much of each gradient vanishes.

    The run needs --watch N. On a terminal it is drawn again until the run ends; else once, as with --plot. Exit code 2
    if the folder is not that of such a run.
    """
    from jaxmp.cli import watching

    title, rows = watching.watched(Path(options.run))
    plot(options, lambda plots: plots.training(options.run))
    if options.json:
        print_json(rows)
    elif sys.stdout.isatty() and options.plot is None:
        with contextlib.suppress(KeyboardInterrupt):  # the reader has seen enough
            watching.live(console(), Path(options.run))
    else:
        terminal = console()
        print_rich(terminal, watching.picture(terminal.width, title, rows))
    return 0


COMMANDS: dict[Callable[[argparse.Namespace], int], Arguments] = {
    audit: SHAPES | DEVICE | TOPOLOGY | POLICY,
    memory: SHAPES | DEVICE | TOPOLOGY | POLICY | PLOT,
    roofline: SHAPES | DEVICE | POLICY,
    numerics: ARRAYS | POLICY | LOSS_SCALE | PLOT,
    blame: ARRAYS | POLICY | LOSS_SCALE | NO_GRAD,
    compare: ARRAYS | AUTOCAST | REFERENCE | NO_GRAD | PLOT,
    watch: RUN | PLOT,
}
"""What each command takes."""


def _where(options: argparse.Namespace) -> dict[str, Any]:
    return {"device": options.device, "topology": options.topology}


def _under(policy: str | None, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function under autocast with a policy, or as it is."""
    from jaxmp.engine.autocast import autocast
    from jaxmp.inspect.targets import NNXStep, TrainStep

    if policy is not None and isinstance(fun, (TrainStep, NNXStep)):
        raise UsageError(
            f"a train step has the policy that it was made with, got --policy {policy} for one; leave --policy out and "
            "write make_train_step(loss_fn, policy=…), or name the loss function"
        )
    return fun if policy is None else autocast(fun, policy)


def _of_shapes(options: argparse.Namespace, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """What ``make`` of the function says of shapes."""
    import jax

    from jaxmp.cli.loading import in_current_folder, load, told, traced
    from jaxmp.inspect.targets import within_mesh_of

    if options.device is not None:
        jax.config.update("jax_platforms", "cpu")  # with its CUDA plugin JAX would look for a GPU
    with in_current_folder():
        loaded = load(options.function, options.arg, options.args)
        with within_mesh_of(loaded.operands):
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
