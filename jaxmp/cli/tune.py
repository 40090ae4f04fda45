"""``jaxmp tune``."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxmp.cli.errors import UsageError
from jaxmp.cli.flags import ARRAYS, NO_OPERATIONS, SAVE, SEEDS, TOLERANCE, TUNED_POLICY
from jaxmp.cli.inspecting import of_arrays
from jaxmp.cli.printing import show

ARGUMENTS = ARRAYS | TUNED_POLICY | TOLERANCE | SEEDS | NO_OPERATIONS | SAVE


def run(options: argparse.Namespace) -> int:
    """Find the modules and operations that need float32.

    --save writes a policy file that keeps these modules and operations in float32. The function may be a train step.
    The exit code is 1 if the measured error is above the tolerance or Ctrl-C ended the search, and 2 if an argument is
    wrong or the function fails.

    Example:
      jaxmp tune train:loss_fn --args train:example --policy mixed_float16 --save policy.toml
    """
    from jaxmp.cli.loading import usage_errors
    from jaxmp.inspect import tune

    if options.save is not None and Path(options.save).suffix != ".toml":
        raise UsageError(f"--save needs a file that ends in .toml, got {options.save!r}")
    with usage_errors(ValueError):
        settings = {"tolerance": options.tolerance, "seeds": options.seeds, "operations": not options.no_operations}
        tuned = of_arrays(options, lambda fun: tune(fun, options.policy, **settings))
    show(options, tuned)
    if options.save is not None:
        tuned.save(options.save)
    return 0 if tuned.met and not tuned.interrupted else 1
