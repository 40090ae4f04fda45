"""The ``jaxmp`` command. Each subcommand is one function here; its docstring is its help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jaxmp
from jaxmp.cli import inspecting
from jaxmp.cli.errors import UsageError

_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {}


def _command(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Registers a subcommand under its function's name; it returns the exit code."""
    _COMMANDS[run.__name__] = run
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (``sys.argv`` by default) and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    if word is not None and word not in _COMMANDS:
        from jaxmp import dtypes

        parser.error(f"there is no command {word!r}; commands, nearest first: {dtypes.nearest(word, _COMMANDS)}")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"jaxmp {options.command}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None:  # not the output
            raise
        # Nothing may be flushed into it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            return 0
        print(f"jaxmp {options.command}: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


@_command
def doctor(options: argparse.Namespace) -> int:
    """Say what this machine computes fast, which policy suits it, whether training works, and what to fix.

    Exit code 0 if a mixed-precision training step ran on the device and gave the right numbers, else 1.
    """
    from jaxmp.doctor import diagnose

    report = diagnose()
    if options.json:
        _print_json(dataclasses.asdict(report))
        return 0 if report.trains else 1
    rows = [("Device", "none: JAX does not start")]
    if report.hardware is not None:
        rows = _describe(report.hardware, report.devices)
    rows.append(("Training", report.training))
    rows.append(("Versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report.versions.items())))
    for number, finding in enumerate(report.findings, 1):
        rows.append((f"To fix, {number}", f"{finding.problem}\n→ {finding.remedy}"))
    if not report.findings:
        rows.append(("To fix", "nothing"))
    _print_pairs(rows)
    return 0 if report.trains else 1


@_command
def formats(options: argparse.Namespace) -> int:
    """Show the table of floating-point formats: bits, range, precision, special values.

    Everything is computed from the dtype's bit patterns. tensorfloat32 is no dtype (it is how tensor cores read float32
    operands): its column is computed from its layout, 1 sign, 8 exponent and 10 mantissa bits.
    """
    from jaxmp.formats import formats as rows

    if options.json:
        _print_json([dataclasses.asdict(row) for row in rows()])
        return 0
    columns = [
        {
            "": row.name,
            "bits": str(row.bits),
            "exponent bits": str(row.exponent_bits),
            "mantissa bits": str(row.mantissa_bits),
            "bias": str(row.bias),
            "exponents": f"{row.min_exponent} to {row.max_exponent}",
            "decimal digits": f"{row.digits:.1f}",
            "largest": _number(row.largest),
            "smallest normal": _number(row.smallest_normal),
            "smallest subnormal": _number(row.smallest_subnormal),
            "spacing at 1": _number(row.eps),
            "infinities": "yes" if row.has_infinity else "no",
            "NaN": "yes" if row.has_nan else "no",
        }
        for row in rows()
    ]
    _print_columns(columns)
    print("\ntensorfloat32 is no dtype: its column is computed from its layout, the others from bit patterns.")
    return 0


@_command
def plan(options: argparse.Namespace) -> int:
    """Show what autocast decides for each operation of a function, and why; nothing is run but imports.

    On a terminal it is a table, else the text of str(plan), which is the same on every machine: keep it under version
    control, and a diff shows what a change did to the precision. Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp plan jax.numpy:matmul --policy mixed_bfloat16 --arg float32[8,16] --arg float32[16,4]
    """
    from jaxmp.cli import planning

    result = planning.plan(options.function, options.policy, options.arg, options.args, options.override)
    if options.json:
        print(result.to_json())
    elif sys.stdout.isatty():
        _print(_console(), result)
    else:
        print(result)
    return 0


for _run in inspecting.COMMANDS:
    _command(_run)


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    _add_function(command)
    command.add_argument("--policy", default="mixed_bfloat16", help="default: mixed_bfloat16")
    command.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=LEVEL",
        help="such as '**/head=float32' or 'primitive:exp=half'; repeat for more",
    )


def _add_function(command: argparse.ArgumentParser) -> None:
    command.add_argument("function", metavar="MODULE:FUNCTION", help="any function that JAX can trace")
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="DTYPE[SHAPE]",
        help="a positional argument, such as float32[8,16], int32[] or key[] (a random key); repeat for more",
    )
    command.add_argument(
        "--args",
        metavar="MODULE:FUNCTION",
        help="a function that returns the positional arguments as a tuple (pytrees, for instance); traced, not run",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxmp",
        description="Mixed precision for JAX: what this machine computes fast, what the formats can hold, and what "
        "autocast decides.",
        epilog="jaxmp COMMAND --help says more about one command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxmp {jaxmp.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, run in _COMMANDS.items():
        text = inspect.cleandoc(run.__doc__ or "")
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == "plan":
            _add_plan_arguments(command)
        elif run in inspecting.COMMANDS:
            inspecting.add_arguments(command, name, _add_function)
        command.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _describe(hardware: Any, devices: int) -> list[tuple[str, str]]:
    rates = [f"{dtype} {rate:g} TFLOP/s" for dtype, rate in hardware.peak_tflops.items()]
    if hardware.peak_bandwidth is not None:
        rates.append(f"memory {hardware.peak_bandwidth / 1e9:g} GB/s")
    return [
        ("Device", f"{hardware.name} on platform {hardware.platform}; {devices} in this process"),
        ("Compute capability", hardware.compute_capability or "none: not an NVIDIA GPU"),
        ("Tensor cores", ", ".join(hardware.tensor_cores) or "none that jaxmp knows of"),
        ("Peak rates", ", ".join(rates) or "not known"),
        ("Policy", f"{hardware.recommended_policy}: {hardware.reason}"),
    ]


def _number(value: float) -> str:
    """``value`` in full where that is short, else with three significant digits."""
    text = f"{value:.0f}" if value.is_integer() and value < 1e6 else repr(value)
    return text if len(text) <= 9 else f"{value:.2e}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _console() -> Any:
    from rich.console import Console

    # A pipe or a file has no width: whoever reads it wraps it. COLUMNS and a terminal's own width are obeyed.
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 10_000
    return Console(width=width, markup=False, emoji=False, highlight=False)


def _print(console: Any, renderable: Any) -> None:
    """Prints without the blanks that pad a table's lines."""
    with console.capture() as capture:
        console.print(renderable)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)


def _print_pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Names and texts side by side, the texts wrapped; one under the other where the width is too small for that."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = _console()
    label = max(len(name) for name, _ in rows)
    if console.width < 2 * label + 20:
        for name, text in rows:
            _print(console, Text(name, style="bold"))
            _print(console, Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    _print(console, table)


def _print_columns(columns: Sequence[dict[str, str]]) -> None:
    """A table with one column per entry, in as many blocks as the width asks for: no value is ever cut."""
    from rich.table import Table

    console = _console()
    label = max(len(name) for name in columns[0]) + 2
    widths = [max(map(len, column.values())) + 2 for column in columns]
    console.width = max(console.width, label + max(widths))
    while columns:
        fitting = 1
        while fitting < len(columns) and label + sum(widths[: fitting + 1]) <= console.width:
            fitting += 1
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("", style="bold", no_wrap=True)
        for column in columns[:fitting]:
            table.add_column(column[""], no_wrap=True)
        for name in list(columns[0])[1:]:
            table.add_row(name, *(column[name] for column in columns[:fitting]))
        _print(console, table)
        columns, widths = columns[fitting:], widths[fitting:]
        if columns:
            print()
