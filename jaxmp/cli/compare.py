"""``jaxmp compare``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import ARRAYS, LOSS_SCALE, NO_GRAD, OVERRIDE, PLOT, POLICY, REFERENCE
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | POLICY | OVERRIDE | REFERENCE | LOSS_SCALE | NO_GRAD | PLOT


def run(options: argparse.Namespace) -> int:
    """Show the errors that policies cause in a function, layer by layer.

    The values and gradients of the function are compared with those of a reference run without policies. The function
    may be a train step. With --policy, the compared run is under autocast. The exit code is 2 if an argument is wrong.

    Example:
      jaxmp compare train:loss_fn --args train:example --policy mixed_bfloat16
    """
    from jaxmp.cli.loading import levels
    from jaxmp.inspect import compare

    settings = {
        "reference": options.reference,
        "overrides": levels(options.override),
        "grad": not options.no_grad,
        "loss_scale": options.loss_scale,
    }
    result = of_arrays(options, lambda fun: compare(fun, options.policy, **settings))
    show(options, result, lambda plots: plots.errors(result))
    return 0
