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
import importlib
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from experiments.benchmarks.real_libraries.registry import PAPER, PROGRAMS, Program
from experiments.benchmarks.real_libraries.simulated import half_everything, half_products
from experiments.benchmarks.shared import records
from experiments.measure.environment import environment
from experiments.report.json_files import write_json
from experiments.report.tables import Table
from experiments.training import cli

FAMILIES = ("differential", "flows", "probability", "optimisation", "graphs", "agents", "networks", "papers")
DRAWS = 5
COLUMNS = ("program", "half", "value", "T", "N", "gradient", "T", "N", "half FLOPs", "")
ILL_CONDITIONED = 0.1
FACTOR, ABSOLUTE = 3.0, 0.01
# XLA may not leave out a rounding. LLVM's optimizations would take longer than they save, because a program runs only
# five times.
_AS_WRITTEN = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
Results = tuple[np.ndarray, np.ndarray]  # the value, and the gradient as one vector


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
    draws = [_drawn(params, seed) for seed in range(DRAWS)]
    exact = _computed(jax.value_and_grad(loss), draws)
    if not all(np.isfinite(result).all() for results in exact for result in results):
        raise ValueError("value or gradient is not finite in float32")
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
            row[way] = _errors(fun, draws, exact)
        summary = jaxmp.cast_plan(loss, policy)(params).summary
        products = summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0
        rows.append({**row, "half_share": products, "verdict": _verdict(row)})
    return rows


def _drawn(params: Any, seed: int) -> Any:
    """Add noise to the params, of 1/20 of each array's root mean square.

    With seed 0, the params are returned unchanged.
    """
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        leaf + 0.05 * jnp.sqrt(jnp.mean(leaf**2)) * jax.random.normal(key, leaf.shape, leaf.dtype) if seed else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def _errors(fun: Callable[..., Any], draws: Sequence[Any], exact: Sequence[Results]) -> list[float]:
    """Return the errors of the value and of the gradient.

    Each error is the median over all draws of the params.
    """
    try:
        results = _computed(fun, draws)
    except jax.errors.JaxRuntimeError:  # the program itself raised an error, as a solver may
        return [math.inf, math.inf]
    errors = [[_error(*pair) for pair in zip(*both, strict=True)] for both in zip(results, exact, strict=True)]
    return [float(np.median(column)) for column in zip(*errors, strict=True)]


def _computed(fun: Callable[..., Any], draws: Sequence[Any]) -> list[Results]:
    compiled = jax.jit(fun, compiler_options=_AS_WRITTEN)
    results = []
    for params in draws:
        value, gradient = compiled(params)
        leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]
        results.append((np.asarray(value, np.float64), np.concatenate(leaves)))
    return results


def _error(result: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def _verdict(row: dict[str, Any]) -> str:
    pairs = zip(row["autocast"], row["T"], strict=True)
    if all(error <= ABSOLUTE or error <= FACTOR * of_t for error, of_t in pairs):
        return ""
    return "worse than T" if row["T"][1] <= ILL_CONDITIONED else "ill-conditioned"


def main(config: Config) -> dict[str, Any]:
    for family in FAMILIES:
        importlib.import_module(f"experiments.benchmarks.real_libraries.{family}")
    with cli.bad_values_end_it():
        folder = records.folder_of("real_libraries", config)
    chosen = [program for program in PROGRAMS if not config.libraries or program.library in config.libraries]
    chosen = [
        program for program in chosen if not config.programs or any(part in program.name for part in config.programs)
    ]
    part = folder / "part.json"  # the rows so far, for the next command if this one is stopped
    setting = {"versions": environment()["versions"], "halves": list(config.halves)}
    rows = _rows_of(part, setting)
    finished = {(row["library"], row["program"]) for row in rows}
    absent: set[str] = set()
    failures: dict[str, str] = {}
    for program in chosen:
        title = f"{program.library}: {program.name}"
        if not _is_installed(program.library):
            absent.add(program.library)
            continue
        if (program.library, program.name) in finished:
            continue
        started = time.perf_counter()
        try:
            measured = measure(program, config.halves)
        except Exception as error:  # if one program fails, the others still run
            failures[title] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{title}: {failures[title]}", flush=True)
            continue
        rows += measured
        write_json(part, {"setting": setting, "programs": rows})
        for row in measured:
            print(*_cells(row), f"({time.perf_counter() - started:.0f} s)", flush=True)
    notes = [f"not installed: {', '.join(sorted(absent))}"] if absent else []
    notes += [f"failed: {title}: {text}" for title, text in failures.items()]
    table = Table("Relative errors to float32", COLUMNS, [_cells(row) for row in rows], 2, tuple(notes))
    data = {"programs": rows, "not_installed": sorted(absent), "failed": failures}
    records.record(folder, "real_libraries", "Programs of real libraries", environment(), [table], data)
    part.unlink(missing_ok=True)
    return data


def _rows_of(part: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a stopped run.

    The result is empty if the run had other versions or other half-precision formats.
    """
    stopped = json.loads(part.read_text()) if part.is_file() else {}
    if stopped.get("setting") != setting:
        return []
    rows: list[dict[str, Any]] = stopped["programs"]
    for row in rows:
        for way in ("autocast", "T", "N"):
            row[way] = [float(error) for error in row[way]]  # infinity is stored as a string
    return rows


def _is_installed(library: str) -> bool:
    if library == PAPER:
        return True
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    figures = [f"{100 * row[way][of]:.2g} %" for of in (0, 1) for way in ("autocast", "T", "N")]
    title = f"{row['library']}: {row['program']}"
    return (title, row["half"], *figures, f"{100 * row['half_share']:.0f} %", row["verdict"])
