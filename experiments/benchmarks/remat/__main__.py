"""``python -m experiments.benchmarks.remat``."""

import os
import sys

if any(arg.split("=")[0] == "--target" for arg in sys.argv):
    # Before JAX is imported: it would look for the GPU that is not there.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own notes

from experiments.benchmarks.remat import run
from experiments.training import cli

cli.main(run.Config, run.main, run.__doc__)
