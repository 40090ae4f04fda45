"""The ``jaxmp`` command. Each subcommand is one function, here or in inspecting.py; its docstring is its help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jaxmp
from jaxmp.cli import arguments, inspecting
from jaxmp.cli.errors import UsageError
from jaxmp.cli.printing import check_plot, print_columns, print_json, print_pairs, show

_Run = Callable[[argparse.Namespace], int]
_COMMANDS: dict[str, tuple[_Run, arguments.Arguments]] = {}


def _command(taken: arguments.Arguments) -> Callable[[_Run], _Run]:
    """Registers a subcommand that takes these arguments under its function's name; it returns the exit code."""

    def register(run: _Run) -> _Run:
        _COMMANDS[run.__name__] = run, taken
        return run

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (``sys.argv`` by default) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    word = next((word for word in words if not word.startswith("-")), None)
    if word is not None and word not in _COMMANDS:
        from jaxmp import dtypes

        parser.error(f"there is no command {word!r}; commands, nearest first: {dtypes.nearest(word, _COMMANDS)}")
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if getattr(options, "plot", None) is not None:
            check_plot(options.plot)
        code = _COMMANDS[options.command][0](options)
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


@_command(arguments.WIDTHS)
def doctor(options: argparse.Namespace) -> int:
    """Say what this machine computes fast, which policy suits it, whether training works, and what to fix.

    What float8 would gain is told by a model of transformers of some widths; --width names others.

    Exit code 0 if a mixed-precision training step ran on the device and gave the right numbers, else 1.
    """
    from jaxmp.doctor import diagnose

    report = diagnose(*[options.width] * bool(options.width))
    if options.json:
        print_json(dataclasses.asdict(report))
        return 0 if report.trains else 1
    rows = [("Device", "none: JAX does not start")]
    if report.hardware is not None:
        rows = _describe(report.hardware, report.devices)
        rows.append(("Float8", report.float8))
    rows.append(("Training", report.training))
    rows.append(("Versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report.versions.items())))
    for number, finding in enumerate(report.findings, 1):
        rows.append((f"To fix, {number}", f"{finding.problem}\n→ {finding.remedy}"))
    if not report.findings:
        rows.append(("To fix", "nothing"))
    print_pairs(rows)
    return 0 if report.trains else 1


@_command({})
def formats(options: argparse.Namespace) -> int:
    """Show the table of floating-point formats: bits, range, precision, special values.

    Everything is computed from the dtype's bit patterns. tensorfloat32 is no dtype (it is how tensor cores read float32
    operands): its column is computed from its layout, 1 sign, 8 exponent and 10 mantissa bits.
    """
    from jaxmp.formats import formats as rows

    if options.json:
        print_json([dataclasses.asdict(row) for row in rows()])
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
    print_columns(columns)
    print("\ntensorfloat32 is no dtype: its column is computed from its layout, the others from bit patterns.")
    return 0


@_command(arguments.SHAPES | arguments.AUTOCAST | arguments.PLOT)
def plan(options: argparse.Namespace) -> int:
    """Show what autocast decides for each operation of a function, and why; nothing is run but imports.

    On a terminal it is a table, else the text of str(plan), which is the same on every machine: keep it under version
    control, and a diff shows what a change did to the precision. Exit code 2 if something is wrong with the arguments.

    Example:
      jaxmp plan jax.numpy:matmul --policy mixed_bfloat16 --arg float32[8,16] --arg float32[16,4]
    """
    from jaxmp.cli import planning

    result = planning.plan(options.function, options.policy, options.arg, options.args, options.override)
    show(options, result, lambda plots: plots.casts(result))
    return 0


for _run, _taken in inspecting.COMMANDS.items():
    _command(_taken)(_run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxmp",
        description="Mixed precision for JAX: what this machine computes fast, what the formats can hold, and what "
        "autocast decides.",
        epilog="jaxmp COMMAND --help says more about one command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxmp {jaxmp.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (run, taken) in _COMMANDS.items():
        text = inspect.cleandoc(run.__doc__ or "")
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for argument, settings in (taken | arguments.JSON).items():
            command.add_argument(argument, **settings)
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
