"""``jaxmp budget``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import ARRAYS, FLOAT32_ROWS, OVERRIDE, PLOT, POLICY, PROBES
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | POLICY | OVERRIDE | PROBES | FLOAT32_ROWS | PLOT


def run(options: argparse.Namespace) -> int:
    """Show what each rounding to half precision costs, line by line.

    The errors of the loss and of the gradients are measured in one backward pass, and the last lines say what float32
    would gain. The function may be a train step. The exit code is 1 if operations are not counted, and 2 if an argument
    is wrong.

    Example:
      jaxmp budget train:loss_fn --args train:example --policy mixed_bfloat16
    """
    from jaxmp.cli.loading import levels, usage_errors
    from jaxmp.inspect import error_budget

    settings = {"overrides": levels(options.override) or None, "probes": options.probes, "float32": options.float32}
    with usage_errors(ValueError):
        result = of_arrays(options, lambda fun: error_budget(fun, options.policy, **settings))
    show(options, result, lambda plots: plots.budget(result))
    return 1 if result.not_counted else 0
