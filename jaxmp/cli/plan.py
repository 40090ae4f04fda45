"""``jaxmp plan``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

from jaxmp.cli.arguments import add_function, add_settings
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from jaxmp.engine.plan import cast_plan

    add_function(command, runs=False)
    add_settings(command, cast_plan)
    command.add_argument("--operations", action="store_true", help="show each operation, not only each module")


def run(options: argparse.Namespace) -> int:
    """Show autocast's decisions for a function, and the reasons.

    The output has a row for each module or scope: the dtypes of its products and of the results of its other
    operations, and the first reason. --operations gives a row for each operation, and the casts. The function is
    traced, not run. For a train step, the plan is that of its loss function, because autocast decides nothing about
    gradients and the optimizer. In a pipe or a file, the output of --operations is the text of str(plan), which is the
    same on every machine. If you keep this text under version control, a diff shows how a change affects the precision.
    The exit code is 2 if an argument is wrong.

    Example:
      jaxmp plan jax.numpy:matmul --policy mixed_bfloat16 --arg float32[8,16] --arg float32[16,4]
    """
    result = plan(options.function, options.policy, options.arg, options.args, options.overrides)
    is_whole = options.operations or options.json
    show(options, result if is_whole else result.by_module)
    if not is_whole:
        print("--operations shows each operation, and the casts")
    return 0


def plan(
    function: str,
    policy: str | None = None,
    shapes: Sequence[str] = (),
    example: str | None = None,
    overrides: Sequence[str] | None = None,
) -> Any:
    """Return the :class:`jaxmp.CastPlan` of a function on abstract arguments.

    The function is traced, not run. The plan of a train step is that of its loss function.

    Args:
      function, shapes, example: as for :func:`jaxmp.cli.loading.load`.
      policy: the name of a policy; None for the policies of the models that the function calls, or for mixed_bfloat16
        if it calls none.
      overrides: the overrides of the policy, each as ``"KEY=LEVEL"``.

    Raises:
      UsageError: an argument is wrong. Errors of the function itself are not caught.

    >>> plan("jax.numpy:matmul", "mixed_bfloat16", ["float32[8,16]", "float32[16,4]"]).summary.product_flops
    1024
    """
    import jax

    from jaxmp.cli.loading import in_current_folder, levels, load, usage_errors
    from jaxmp.engine.plan import cast_plan
    from jaxmp.inspect.program.calls import is_step, loss_of_step

    exceptions = levels(overrides)
    with in_current_folder():
        loaded = load(function, shapes, example)
        planned_function = loss_of_step(loaded.function) if is_step(loaded.function) else loaded.function
        with usage_errors(ValueError, TypeError):
            planned = cast_plan(planned_function, policy or "mixed_bfloat16", exceptions)
        try:
            if policy is None and not exceptions:
                with contextlib.suppress(ValueError):  # no model under a policy
                    return cast_plan(planned_function)(*loaded.operands)
            return planned(*loaded.operands)
        except ValueError as error:
            jax.eval_shape(loaded.function, *loaded.operands)  # raises the errors of the function itself
            raise UsageError(str(error).partition("\n")[0]) from error
