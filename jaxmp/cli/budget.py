"""``jaxmp budget``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import ARRAYS, OVERRIDE, PLOT, POLICY
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | POLICY | OVERRIDE | PLOT


def run(options: argparse.Namespace) -> int:
    """Show what the roundings to half precision cost, module by module and line by line.

    The program runs without the roundings of each module and line, and the last lines say what float32 would gain. The
    function may be a train step. The exit code is 1 if operations are not counted, and 2 if an argument
    is wrong.

    Example:
      jaxmp budget train:loss_fn --args train:example --policy mixed_bfloat16
    """
    from jaxmp.cli.loading import levels, usage_errors
    from jaxmp.inspect import error_budget

    overrides = levels(options.override) or None
    with usage_errors(ValueError):
        result = of_arrays(options, lambda fun: error_budget(fun, options.policy, overrides=overrides))
    show(options, result, lambda plots: plots.budget(result))
    return 1 if result.not_counted else 0
