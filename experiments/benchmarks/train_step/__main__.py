"""``python -m experiments.benchmarks.train_step``."""

from experiments.benchmarks.train_step import run
from experiments.training import cli

cli.main(run.Config, run.main, run.__doc__)
