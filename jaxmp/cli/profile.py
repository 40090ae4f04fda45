"""``jaxmp profile``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxmp.cli.flags import CALL, PLOT, POLICY, STEPS
from jaxmp.cli.inspecting import of_arrays, under
from jaxmp.cli.printing import show

ARGUMENTS = CALL | POLICY | STEPS | PLOT


def run(options: argparse.Namespace) -> int:
    """Measure where the time of a function or train step goes on this device.

    The function runs for about a second, then --steps times under JAX's profiler. The report begins with the reasons
    why it is not faster. With --policy, the function is jitted and runs under autocast. The exit code is 1 if something
    was not counted, and 2 if an argument is wrong.

    Example:
      jaxmp profile train:step --args train:state_and_batch
    """
    import jax

    from jaxmp.inspect import Profile, profile

    def make(fun: Callable[..., Any]) -> Callable[..., Profile]:
        if options.policy is not None:
            fun = jax.jit(under(options.policy, fun))
        return profile(fun, steps=options.steps)

    result = of_arrays(options, make)
    show(options, result, lambda plots: plots.profile({options.function: result}))
    return 1 if result.not_counted else 0
