"""``jaxmp compare``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxmp.cli.flags import ARRAYS, LOSS_SCALE, NO_GRAD, OVERRIDE, PLOT, POLICY, REFERENCE
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | POLICY | OVERRIDE | REFERENCE | LOSS_SCALE | NO_GRAD | PLOT


def run(options: argparse.Namespace) -> int:
    """Show the errors that policies cause in a function, layer by layer.

    The values and gradients of the function are compared with those of a reference run without policies, or of another
    function. The function may be a train step. With --policy, the compared run is under autocast. The exit code is 1 if
    no policy changes a product, or if values are not compared, such as those inside of while loops. It is 2 if an
    argument is wrong.

    Example:
      jaxmp compare train:loss_fn --args train:example --policy mixed_bfloat16
      jaxmp compare train:log_probs --args train:example --no-grad --reference serve:log_probs
    """
    from jaxmp.cli.loading import function, levels
    from jaxmp.inspect import compare

    settings = {
        "overrides": levels(options.override),
        "grad": not options.no_grad,
        "loss_scale": options.loss_scale,
    }

    def make(fun: Callable[..., Any]) -> Callable[..., Any]:
        reference = function(options.reference) if ":" in options.reference else options.reference
        return compare(fun, options.policy, reference=reference, **settings)

    result = of_arrays(options, make)
    show(options, result, lambda plots: plots.errors(result))
    is_compared = result.is_changed or result.is_of_two_functions
    return 0 if is_compared and not result.not_counted else 1
