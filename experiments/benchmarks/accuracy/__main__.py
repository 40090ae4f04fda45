"""``python -m experiments.benchmarks.accuracy``."""

from experiments.benchmarks.accuracy import run
from experiments.training import cli

cli.main(run.Config, run.main, run.__doc__)
