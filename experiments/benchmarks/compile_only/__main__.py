"""``python -m experiments.benchmarks.compile_only``."""

import os

# This must come before JAX is imported, because its CUDA plugin would look for a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hide XLA's notes that there is no GPU and that compiling is slow

from experiments.benchmarks.compile_only import run
from experiments.training import cli

cli.main(run.Config, run.main, run.__doc__)
