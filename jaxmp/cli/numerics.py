"""``jaxmp numerics``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import ARRAYS, LOSS_SCALE, PLOT, POLICY
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | POLICY | LOSS_SCALE | PLOT


def run(options: argparse.Namespace) -> int:
    """Show where a loss function's values and gradients underflow or overflow.

    The function and its gradient run once. The exit code is 1 if values are not counted, such as those inside of while
    loops, and 2 if an argument is wrong.

    Example:
      jaxmp numerics train:loss_fn --args train:params_and_batch --policy mixed_float16 --loss-scale 1024
    """
    from jaxmp.inspect import numerics

    scale = options.loss_scale
    result = of_arrays(options, lambda fun: numerics(fun, policy=options.policy, loss_scale=scale))
    show(options, result, lambda plots: plots.exponents(result, loss_scale=scale))
    return 1 if result.not_counted else 0
