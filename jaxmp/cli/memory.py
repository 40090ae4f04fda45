"""``jaxmp memory``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import DEVICE, PLOT, POLICY, SHAPES, TOPOLOGY
from jaxmp.cli.inspecting import of_shapes, under, where
from jaxmp.cli.printing import show

ARGUMENTS = SHAPES | DEVICE | TOPOLOGY | POLICY | PLOT


def run(options: argparse.Namespace) -> int:
    """Show the memory of a step or function by kind and dtype; it is compiled, not run.

    With --device it is compiled for a GPU that is not there, which needs pip install 'jaxmp[compile-only]'. With
    --topology it is compiled for several of them, and the report says what each device holds and sends: the shapes that
    --args returns have shardings on a jax.sharding.AbstractMesh. With --policy the function is put under autocast,
    which donates nothing. Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp memory train:step --args train:shapes --device h200 --topology 1x1x8
    """
    from jaxmp.inspect import memory

    result = of_shapes(options, lambda fun: memory(under(options.policy, fun), **where(options)))
    show(options, result, lambda plots: plots.memory({options.function: result}))
    return 0
