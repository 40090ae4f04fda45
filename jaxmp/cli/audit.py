"""``jaxmp audit``."""

from __future__ import annotations

import argparse
import sys

from jaxmp.cli.flags import DEVICE, EXPECTED_POLICY, MIN_HALF, SHAPES, TOPOLOGY
from jaxmp.cli.inspecting import of_shapes, where
from jaxmp.cli.printing import show

ARGUMENTS = SHAPES | DEVICE | TOPOLOGY | EXPECTED_POLICY | MIN_HALF


def run(options: argparse.Namespace) -> int:
    """Show the precision of each product of a function, and precision problems.

    The function is compiled, not run. It may be a train step. With --topology (see jaxmp memory --help), the function
    is compiled for several GPUs, and the audit includes the data that the GPUs send to each other. The exit code is 0
    if no problem is found. It is 1 if there is a finding, if something was not counted, or if less than --min-half of
    the products' FLOPs are in half precision. It is 2 if an argument is wrong or the function fails.

    Example:
      jaxmp audit jax.numpy:matmul --policy mixed_bfloat16 --arg bfloat16[8,16] --arg bfloat16[16,8]
    """
    from jaxmp.inspect import audit

    result = of_shapes(options, lambda fun: audit(fun, options.policy, **where(options)))
    show(options, result)
    too_little_half = result.faults_of_flops(options.min_half)
    print(*too_little_half, sep="\n", end="\n" * len(too_little_half), file=sys.stderr)
    return 1 if result.findings or result.not_counted or too_little_half else 0
