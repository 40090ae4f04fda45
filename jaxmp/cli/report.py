"""``jaxmp report``."""

from __future__ import annotations

import argparse

from jaxmp.cli.flags import AGAINST, OUT, RUN

ARGUMENTS = RUN | AGAINST | OUT


def run(options: argparse.Namespace) -> int:
    """Write a page on a run: verdict, loss, loss scale, underflow, precision, memory.

    The page is one HTML file, which loads nothing from a network. The exit code is 2 if a folder is not the folder of
    a run.

    Example:
      jaxmp report runs/half --against runs/float32
    """
    from jaxmp.cli.loading import usage_errors
    from jaxmp.inspect._report.report import write_report

    with usage_errors(FileNotFoundError, ValueError, ModuleNotFoundError):
        path = write_report(options.run, options.against, options.out)
    print(path)
    return 0
