"""``python -m experiments.benchmarks.compile_only``."""

import os

# Before JAX is imported: with its CUDA plugin it would look for a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's notes: that there is none, that it takes long

from experiments.benchmarks.compile_only import run
from experiments.training import cli

cli.main(run.Config, run.main, run.__doc__)
