"""Measure the errors of autocast in programs of real libraries and of papers.

python -m experiments.benchmarks.real_libraries --libraries diffrax flowjax

Each program is a loss from a library's documentation or examples, or a loss of a paper, at small size. Its value and
gradient are computed in float32, under `jaxmp.autocast`, and by two simple rules, T and N. T rounds the operands of
products to half precision and leaves everything else in float32. N rounds every value to half precision. An error is
the relative L2 error compared with float32. The error of the gradient is over all params together. Each error is the
median over five draws of the params, because the error of a single draw is random in programs with kinks.

T has the error that half-precision products cannot avoid. If T has a large error, the program is ill-conditioned, and
the table marks it. The table also has the share of FLOPs in half precision. Libraries that are not installed are left
out and listed. Install them with `pip install .[experiments,real-libraries]`. The run folder holds real_libraries.md
and real_libraries.json.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxmp
from experiments.benchmarks.real_libraries.errors import DRAWS, draw_params, exact_results, median_errors
from experiments.benchmarks.real_libraries.registry import Program, programs
from experiments.benchmarks.real_libraries.simulated import half_everything, half_products
from experiments.benchmarks.shared import records
from experiments.report.tables import Table, percent
from experiments.training import cli
from experiments.training.environment import environment

COLUMNS = ("program", "half", "value", "T", "N", "gradient", "T", "N", "half FLOPs", "")
ILL_CONDITIONED = 0.1
FACTOR, ABSOLUTE = 3.0, 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Config):
    """Flags of the benchmark."""

    libraries: tuple[str, ...] = ()
    """Libraries to measure, by their names on PyPI, or paper for programs of papers. (default: all)"""
    programs: tuple[str, ...] = ()
    """Measure the programs whose names contain one of these texts. (default: all)"""
    halves: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    """Half formats."""


def measure(program: Program, halves: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a program's errors, a dictionary for each half-precision format."""
    loss, params = program.make()
    draws = [draw_params(params, seed) for seed in range(DRAWS)]
    exact = exact_results(loss, draws)
    rows = []
    for half in halves:
        policy = f"mixed_{half}"
        dtype = jnp.dtype(half)
        ways = {
            "autocast": jax.value_and_grad(jaxmp.autocast(loss, policy)),
            "T": half_products(jax.value_and_grad(loss), dtype),
            "N": half_everything(jax.value_and_grad(loss), dtype),
        }
        row: dict[str, Any] = {"library": program.library, "program": program.name, "half": half}
        for way, fun in ways.items():
            row[way] = median_errors(fun, draws, exact)
        summary = jaxmp.cast_plan(loss, policy)(params).summary
        products = summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0
        rows.append({**row, "half_share": products, "verdict": _verdict(row)})
    return rows


def _verdict(row: dict[str, Any]) -> str:
    pairs = zip(row["autocast"], row["T"], strict=True)
    if all(error <= ABSOLUTE or error <= FACTOR * of_t for error, of_t in pairs):
        return ""
    return "worse than T" if row["T"][1] <= ILL_CONDITIONED else "ill-conditioned"


def chosen(config: Config) -> list[Program]:
    """Return the programs that the flags choose."""
    return [
        program
        for program in programs()
        if not config.libraries or program.library in config.libraries
        if not config.programs or any(part in program.name for part in config.programs)
    ]


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        folder = records.folder_of("real_libraries", config)
    rows: list[dict[str, Any]] = []
    absent, failed = set[str](), dict[str, str]()
    for program in chosen(config):
        if not program.is_installed:
            absent.add(program.library)
            continue
        started = time.perf_counter()
        try:
            measured = measure(program, config.halves)
        except Exception as error:  # if one program fails, the others still run
            title = f"{program.library}: {program.name}"
            failed[title] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{title}: {failed[title]}", flush=True)
            continue
        rows += measured
        for row in measured:
            print(*_cells(row), f"({time.perf_counter() - started:.0f} s)", flush=True)
    notes = [f"not installed: {', '.join(sorted(absent))}"] if absent else []
    notes += [f"failed: {title}: {text}" for title, text in failed.items()]
    table = Table("Relative errors to float32", COLUMNS, [_cells(row) for row in rows], 2, tuple(notes))
    data = {"programs": rows, "not_installed": sorted(absent), "failed": failed}
    records.record(folder, "real_libraries", "Programs of real libraries", environment(), [table], data)
    return data


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    figures = [percent(row[way][of]) for of in (0, 1) for way in ("autocast", "T", "N")]
    title = f"{row['library']}: {row['program']}"
    return (title, row["half"], *figures, f"{100 * row['half_share']:.0f} %", row["verdict"])
