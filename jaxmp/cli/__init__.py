"""The ``jaxmp`` command. Each subcommand has a file: what it takes, and what runs, whose docstring is its help."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence

import jaxmp
from jaxmp.cli import (
    arguments,
    audit,
    blame,
    compare,
    doctor,
    formats,
    memory,
    numerics,
    plan,
    roofline,
    watch,
)
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import check_plot

_MODULES = (doctor, formats, plan, audit, memory, roofline, numerics, blame, compare, watch)
_COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (``sys.argv`` by default) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not sys.stdout:  # None where the shell has closed it
        print("jaxmp: error: the output cannot be written: it is closed; write it to a file", file=sys.stderr)
        return 1
    parser = _parser()
    word = next((word for word in words if not word.startswith("-")), None)
    if word is not None and word not in _COMMANDS:
        from jaxmp import dtypes

        parser.error(f"there is no command {word!r}; commands, nearest first: {dtypes.nearest(word, _COMMANDS)}")
    options, rest = parser.parse_known_args(words)
    if rest:
        taken = f"jaxmp {options.command or 'COMMAND'} --help"
        parser.error(f"unrecognized arguments: {' '.join(rest)}; {taken} lists those that there are")
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
    except OSError as error:
        if error.filename is not None or error.errno is None:  # of the user's code, not of the output
            raise
        # Nothing may be flushed into it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            return 0
        print(f"jaxmp {options.command}: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxmp",
        description="Mixed precision for JAX: what this machine computes fast, what the formats can hold, and what "
        "autocast decides.",
        epilog="jaxmp COMMAND --help says more about one command.",
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
        for argument, settings in (module.ARGUMENTS | arguments.JSON).items():
            command.add_argument(argument, **settings)
    return parser
