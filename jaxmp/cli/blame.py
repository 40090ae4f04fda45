"""``jaxmp blame``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import ARRAYS, LOSS_SCALE, NO_GRAD, POLICY
from jaxmp.cli.inspecting import of_arrays, under
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | POLICY | LOSS_SCALE | NO_GRAD


def run(options: argparse.Namespace) -> int:
    """Find the operation that produced the first infinity or NaN.

    The loss and its gradients are checked. The function may be a train step. The exit code is 0 if all values are
    finite, 1 if a value is not finite, and 2 if an argument is wrong or the function fails.

    Example:
      jaxmp blame train:loss_fn --args train:bad_batch --policy mixed_float16 --loss-scale 32768
    """
    from jaxmp.inspect import first_nonfinite

    settings = {"grad": not options.no_grad, "loss_scale": options.loss_scale}
    blame = of_arrays(options, lambda fun: first_nonfinite(under(options.policy, fun), **settings))
    if blame is None:
        print("null" if options.json else "All values are finite, operation by operation and compiled.")
        return 0
    show(options, blame)
    return 1
