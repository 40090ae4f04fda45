"""``jaxmp roofline``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import DEVICE, POLICY, SHAPES
from jaxmp.cli.inspecting import of_shapes, under
from jaxmp.cli.printing import show

ARGUMENTS = SHAPES | DEVICE | POLICY


def run(options: argparse.Namespace) -> int:
    """Predict the time of a function or train step on a GPU or TPU, kernel by kernel.

    The function is compiled, not run. --device compiles for a GPU or TPU that is not attached, and needs pip install -e
    '.[compile-only]'. The times on a TPU are the compiler's own estimates. With --policy, the function runs under
    autocast. The exit code is 1 if something was not counted, and 2 if an argument is wrong.

    Example:
      jaxmp roofline train:step --args train:shapes --device h200
    """
    from jaxmp.inspect import roofline

    result = of_shapes(options, lambda fun: roofline(under(options.policy, fun), device=options.device))
    show(options, result)
    return 1 if result.not_counted else 0
