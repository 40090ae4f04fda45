"""``jaxmp compare``."""

from __future__ import annotations

import argparse

from jaxmp.cli.arguments import ARRAYS, AUTOCAST, NO_GRAD, PLOT, REFERENCE
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | AUTOCAST | REFERENCE | NO_GRAD | PLOT


def run(options: argparse.Namespace) -> int:
    """Show what a policy changes in a function, layer by layer, forward and backward; both are run.

    Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp compare train:loss_fn --args train:example --policy mixed_bfloat16
    """
    from jaxmp.cli.loading import levels
    from jaxmp.inspect import compare

    settings = {"reference": options.reference, "overrides": levels(options.override), "grad": not options.no_grad}
    result = of_arrays(options, lambda fun: compare(fun, options.policy, **settings))
    show(options, result, lambda plots: plots.errors(result))
    return 0
