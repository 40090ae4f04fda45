"""``jaxmp memory``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import DEVICE, PLOT, POLICY, SHAPES, TOPOLOGY
from jaxmp.cli.inspecting import of_shapes, under, where
from jaxmp.cli.printing import show

ARGUMENTS = SHAPES | DEVICE | TOPOLOGY | POLICY | PLOT


def run(options: argparse.Namespace) -> int:
    """Show the memory of a function or train step, by kind and dtype.

    The function is compiled, not run. --device compiles for a GPU or TPU that is not attached, and needs pip install -e
    '.[compile-only]'. --topology compiles for several such GPUs, and --device v5e:4x4 for a slice of TPUs. The report
    then shows the memory and the traffic of each device, and the shapes from --args must have shardings on a
    jax.sharding.AbstractMesh. A train step takes minutes to compile for a TPU; its program is kept for the next
    command. With --policy, the function is compiled under autocast, and no argument is donated. The exit code is 1 if
    something was not counted, and 2 if an argument is wrong.

    Example:
      jaxmp memory train:step --args train:shapes --device h200 --topology 1x1x8
      jaxmp memory train:step --args train:shapes --device v5e:4x4
    """
    from jaxmp.inspect import memory

    result = of_shapes(options, lambda fun: memory(under(options.policy, fun), **where(options)))
    show(options, result, lambda plots: plots.memory({options.function: result}))
    return 1 if result.not_counted else 0
