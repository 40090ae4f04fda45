"""``python -m experiments.benchmarks.real_libraries``."""

from experiments.benchmarks.real_libraries import run
from experiments.training import cli

cli.main(run.Config, run.main, run.__doc__)
