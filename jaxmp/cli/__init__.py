"""The ``jaxmp`` command.

Each subcommand has a file with its arguments and a function ``run``. The docstring of ``run`` is the help text.
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
import traceback
from collections.abc import Sequence

import jaxmp
from jaxmp.cli import (
    audit,
    blame,
    budget,
    compare,
    doctor,
    fit,
    flags,
    formats,
    memory,
    numerics,
    plan,
    profile,
    roofline,
    tune,
)
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import check_plot

_MODULES = (
    doctor, formats, plan, audit, memory, fit, roofline, profile, numerics, blame, compare, budget, tune,
)  # fmt: skip
_COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    By default, ``argv`` comes from ``sys.argv``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack arrows and other characters
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if getattr(options, "plot", None) is not None:
            check_plot(options.plot)
        code = _COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"jaxmp {options.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        # Python flushes the output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # the user's own code failed
        traceback.print_exc()
        return 2  # because 1 means that a tool has found a problem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxmp",
        description="Mixed precision for JAX: inspect devices, number formats and programs.",
        epilog="jaxmp COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxmp {jaxmp.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in _COMMANDS.items():
        text = inspect.cleandoc(module.run.__doc__ or "")
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for argument, settings in (module.ARGUMENTS | flags.JSON).items():
            command.add_argument(argument, **settings)
    return parser
