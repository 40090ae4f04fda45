"""The ``jaxmp`` command.

The commands of the tools are derived from the tools of :mod:`jaxmp.inspect`. Each other command has a file.
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jaxmp
from jaxmp.cli import doctor, formats, plan, tools
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import check_plot

_MODULES: dict[str, Any] = {"doctor": doctor, "formats": formats, "plan": plan}
COMMANDS = (*_MODULES, *tools.TOOLS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    By default, ``argv`` comes from ``sys.argv``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack arrows and other characters
    words = sys.argv[1:] if argv is None else [*argv]
    parser = _parser(words[0] if words else "")
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if getattr(options, "plot", None) is not None:
            check_plot(options.plot)
        module = _MODULES.get(options.command)
        code: int = tools.run(options.command, options) if module is None else module.run(options)
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


def _parser(first_word: str) -> argparse.ArgumentParser:
    """Return the parser, in which only the command ``first_word`` has arguments, because tools import JAX."""
    parser = argparse.ArgumentParser(
        prog="jaxmp",
        description="Mixed precision for JAX: inspect devices, number formats and programs.",
        epilog="jaxmp COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxmp {jaxmp.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = _MODULES.get(name)
        text = tools.TOOLS[name].summary if module is None else inspect.cleandoc(module.run.__doc__)
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("--json", action="store_true", help="print JSON, for programs")
        if name != first_word:
            continue
        if module is None:
            tools.add_arguments(name, command)
        elif hasattr(module, "add_arguments"):
            module.add_arguments(command)
    return parser
