"""``jaxmp fit``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import DEVICE, MARGIN, MEMORY, SHAPES, TOPOLOGY
from jaxmp.cli.inspecting import of_shapes, where
from jaxmp.cli.printing import show

ARGUMENTS = SHAPES | DEVICE | MEMORY | TOPOLOGY | MARGIN


def run(options: argparse.Namespace) -> int:
    """Find the fastest remat, chunks of the loss and microbatches that fit a device.

    The train step is compiled with several options, not run. A compilation takes up to a minute for a large model, and
    there are ten to twenty if the step does not fit as it is. For a TPU, a compilation takes several minutes. --device
    compiles for a GPU or TPU that is not attached, and needs pip install -e '.[compile-only]'. The exit code is 1 if
    nothing fits or something was not counted, and 2 if an argument is wrong or the function fails.

    Example:
      jaxmp fit train:step --args train:shapes --device h100 --memory 40
    """
    from jaxmp.inspect import fit

    memory = None if options.memory is None else int(options.memory * 2**30)
    result = of_shapes(options, lambda step: fit(step, memory=memory, margin=options.margin, **where(options)))
    show(options, result)
    return 0 if result.best is not None and not result.not_counted else 1
