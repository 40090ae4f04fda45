"""The tools of :mod:`jaxmp.inspect` as commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

from jaxmp.cli.arguments import add_function, add_settings, description
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import show


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool as a command. The command and its arguments have the names of the tool and its parameters.

    Attributes:
      summary: the line of ``jaxmp --help``.
      example: the arguments of an example.
      failure: the reason for the exit code 1.
      runs: whether the function is run on arrays. Otherwise it is traced on shapes.
      has_failed: a function of the result that returns whether the exit code is 1.
      draw: a function of ``jaxmp.inspect.plots``, the result and the options, which returns a figure.
    """

    summary: str
    example: str
    failure: str = "something was not counted"
    runs: bool = False
    has_failed: Callable[[Any], Any] = lambda result: result.not_counted
    draw: Callable[[Any, Any, argparse.Namespace], Any] | None = None


TOOLS = {
    "audit": Tool(
        "Show the precision of each product, and precision problems.",
        "jax.numpy:matmul --expect mixed_bfloat16 --arg bfloat16[8,16] --arg bfloat16[16,8]",
        "there is a finding, something was not counted, or less than --min-half of the FLOPs is half",
        has_failed=lambda result: result.findings or result.not_counted,
    ),
    "memory": Tool(
        "Show the memory of a function or train step, by kind and dtype.",
        "train:step --args train:shapes --device h200 --topology 1x1x8",
        draw=lambda plots, result, options: plots.memory({options.function: result}),
    ),
    "fit": Tool(
        "Find the fastest options with which a train step fits a device.",
        "train:step --args train:shapes --device h100 --memory 40",
        "nothing fits, or something was not counted",
        has_failed=lambda result: result.best is None or result.not_counted,
    ),
    "roofline": Tool(
        "Predict the time of a function on a GPU or TPU, kernel by kernel.",
        "train:step --args train:shapes --device h200",
    ),
    "profile": Tool(
        "Measure where the time of a function goes on this device.",
        "train:step --args train:state_and_batch",
        runs=True,
        draw=lambda plots, result, options: plots.profile({options.function: result}),
    ),
    "numerics": Tool(
        "Show where values and gradients underflow or overflow.",
        "train:loss_fn --args train:params_and_batch --policy mixed_float16 --loss-scale 1024",
        runs=True,
        draw=lambda plots, result, options: plots.exponents(result, loss_scale=options.loss_scale),
    ),
    "first_nonfinite": Tool(
        "Find the operation that produced the first infinity or NaN.",
        "train:loss_fn --args train:bad_batch --policy mixed_float16 --loss-scale 32768",
        "a value is not finite",
        runs=True,
        has_failed=lambda result: result is not None,
    ),
    "compare": Tool(
        "Show the errors that policies cause in a function, layer by layer.",
        "train:log_probs --args train:example --no-grad --reference serve:log_probs",
        "no policy changes a product, or values are not compared",
        runs=True,
        has_failed=lambda result: result.not_counted or not (result.is_changed or result.is_of_two_functions),
        draw=lambda plots, result, options: plots.errors(result),
    ),
    "error_budget": Tool(
        "Show what each rounding to half precision costs, line by line.",
        "train:loss_fn --args train:example --policy mixed_bfloat16",
        "something was not counted, or the measured error is not that of the counted roundings",
        runs=True,
        draw=lambda plots, result, options: plots.budget(result),
    ),
    "tune": Tool(
        "Find the modules and operations that need float32.",
        "train:loss_fn --args train:example --policy mixed_float16 --save policy.txt",
        "the measured error is above the tolerance, or Ctrl-C ended the search",
        runs=True,
        has_failed=lambda result: not result.met or result.interrupted,
    ),
}
_LEFT_OUT = ("tx", "memory")
"""Parameters that have no flag, or another unit."""


def _function_of(name: str) -> Callable[..., Any]:
    """Return a tool of jaxmp.inspect, which imports JAX."""
    import jaxmp.inspect

    fun: Callable[..., Any] = getattr(jaxmp.inspect, name)
    return fun


def add_arguments(name: str, command: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of a tool to the parser of its command."""
    tool, fun = TOOLS[name], _function_of(name)
    command.description = (
        f"{description(fun)}\n\nThe exit code is 1 if {tool.failure}, and 2 if an argument is wrong or the function "
        f"fails.\n\nExample:\n  jaxmp {name} {tool.example}"
    )
    add_function(command, tool.runs)
    add_settings(command, fun, _LEFT_OUT)
    if name == "audit":
        text = "the smallest share of the products' FLOPs in half precision, such as 0.8"
        command.add_argument("--min-half", type=float, default=0.0, metavar="SHARE", help=text)
    if name == "fit":
        text = "the limit of each device in GiB; default: the share that JAX takes"
        command.add_argument("--memory", type=float, metavar="GIB", help=text)
    if name == "tune":
        text = "also write the text of the policy to this file"
        command.add_argument("--save", metavar="FILE", help=text)
    if tool.draw is not None:
        command.add_argument("--plot", metavar="FILE", help="also write a picture: .png, .pdf or .svg")


def run(name: str, options: argparse.Namespace) -> int:
    """Run a tool, show its result, and return the exit code."""
    tool, fun = TOOLS[name], _function_of(name)
    if name == "audit" and not 0 <= options.min_half <= 1:
        raise UsageError(f"--min-half needs a share from 0 to 1, got {options.min_half}; write e.g. 0.8 for 80 %")
    result = _result(fun, tool, options)
    if result is None:
        print("null" if options.json else "All values are finite, operation by operation and compiled.")
        return 0
    draw = tool.draw
    show(options, result, None if draw is None else lambda plots: draw(plots, result, options))
    has_failed = bool(tool.has_failed(result))
    if name == "audit":
        faults = result.faults_of_flops(options.min_half)
        print(*faults, sep="\n", end="\n" * len(faults), file=sys.stderr)
        has_failed = has_failed or bool(faults)
    if name == "tune" and options.save is not None:
        result.save(options.save)
    return int(has_failed)


def _result(fun: Callable[..., Any], tool: Tool, options: argparse.Namespace) -> Any:
    """Return the result of a tool on the function and the arguments that the options name."""
    import jax

    from jaxmp.base.accelerators import accelerator_named
    from jaxmp.base.hardware import assumed
    from jaxmp.cli.loading import function as load_function
    from jaxmp.cli.loading import in_current_folder, levels, load, load_arrays, usage_errors
    from jaxmp.inspect.compiled.meshes import within_mesh_of_shapes

    device = getattr(options, "device", None)
    if device is not None:
        jax.config.update("jax_platforms", "cpu")  # otherwise JAX's CUDA plugin would look for a GPU
        with usage_errors(ValueError):
            accelerator_named(device)
    parameters = list(inspect.signature(fun).parameters)[1:]
    settings = {name: getattr(options, name) for name in parameters if name not in _LEFT_OUT}
    settings |= {"overrides": levels(options.overrides) or None} if "overrides" in settings else {}
    if getattr(options, "memory", None) is not None:
        settings["memory"] = int(options.memory * 2**30)
    with in_current_folder():
        if ":" in str(settings.get("reference")):
            settings["reference"] = load_function(settings["reference"])
        if tool.runs:
            loaded = load_arrays(options.function, options.args)
        else:
            loaded = load(options.function, options.arg, options.args)
        try:
            return fun(loaded.function, **settings)(*loaded.operands)
        except (FileNotFoundError, ValueError, TypeError, ModuleNotFoundError) as error:
            context = contextlib.nullcontext() if device is None else assumed(device)
            with within_mesh_of_shapes(loaded.operands), context:
                jax.eval_shape(loaded.function, *loaded.operands)  # raises the errors of the function itself
            raise UsageError(str(error).partition("\n")[0]) from error
