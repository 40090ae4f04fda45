"""Measure what each rule of autocast contributes in programs of real libraries and of papers.

python -m experiments.benchmarks.real_libraries.ablation --libraries diffrax flowjax

The programs are those of `experiments.benchmarks.real_libraries`. Each rule of docs/autocast.md, and each case of a
rule, is switched off alone. If the program changes, three figures are measured with the rule and without it:

- the relative L2 error of the gradient, compared with float32 (the median over five draws of the params)
- the bytes that the forward pass saves for the gradient
- the share of the products' FLOPs that are in half precision

The error and the bytes are also measured without a graph, with the dtype of each operation decided on its own.
`ablation_memory` compiles GPT-2, BERT and ResNet-50 without each rule, to measure their memory.

A rule matters in a program if one of these holds without it: the error is more than 1 % and more than twice as large,
or the forward pass saves at least a tenth more bytes. The run folder holds ablation.md and ablation.json.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxmp
from experiments.benchmarks.real_libraries import collect
from experiments.benchmarks.real_libraries.errors import DRAWS, draw_params, exact_results, median_errors
from experiments.benchmarks.real_libraries.per_operation import autocast_each_operation
from experiments.benchmarks.real_libraries.registry import Program
from experiments.benchmarks.real_libraries.rule_switches import SWITCHES, Switch
from experiments.benchmarks.real_libraries.simulated import half_products
from experiments.benchmarks.shared import records
from experiments.report.tables import Table, percent
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.program.equations import is_literal

WORSE, NOTICEABLE = 2.0, 0.01
MORE_BYTES = 1.1
RULE_COLUMNS = ("rule", "off", "changes", "error matters", "bytes matter", "programs in which it matters")
PROGRAM_COLUMNS = ("program", "error", "of half products", "of each operation alone", "bytes", "bytes of each alone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(collect.Config):
    """Flags of the benchmark."""

    half: Literal["bfloat16", "float16"] = "bfloat16"
    """Half format."""


def measure(program: Program, half: str) -> dict[str, Any]:
    """Return the figures of a program.

    They are measured with all rules, without each rule that changes the program, and without a graph.
    """
    loss, params = program.make()
    draws = [draw_params(params, seed) for seed in range(DRAWS)]
    exact = exact_results(loss, draws)

    def error_of(gradient: Callable[..., Any]) -> float:
        return median_errors(gradient, draws, exact)[1]

    def cast(loss: Callable[..., Any]) -> Callable[..., Any]:
        return jaxmp.autocast(loss, f"mixed_{half}")

    def figures_of_autocast() -> dict[str, Any]:
        summary = jaxmp.cast_plan(loss, f"mixed_{half}")(params).summary
        return {
            "error": error_of(jax.value_and_grad(cast(loss))),
            "bytes": saved_bytes(lambda params: jax.vjp(cast(loss), params)[1], params),
            "half_share": summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0,
        }

    def text() -> str:
        return text_of(jax.value_and_grad(cast(loss)), params)

    with_all = text()
    without: dict[str, Any] = {}
    for switch in switches_that_change(SWITCHES, lambda: text() != with_all):
        with switch.off():
            without[switch.name] = figures_of_autocast()
    gradient, dtype = jax.value_and_grad(loss), jnp.dtype(half)
    forward = autocast_each_operation(lambda params: jax.vjp(loss, params)[1], dtype)
    each_alone = {
        "error": error_of(autocast_each_operation(gradient, dtype)),
        "bytes": saved_bytes(forward, params),
    }
    return {
        "library": program.library,
        "program": program.name,
        "all_rules": figures_of_autocast(),
        "half_products": error_of(half_products(gradient, dtype)),
        "each_alone": each_alone,
        "without": without,
    }


def switches_that_change(switches: tuple[Switch, ...], is_changed: Callable[[], bool]) -> Iterator[Switch]:
    """Yield the switches that change a program.

    The cases of a rule are tried if the rule as a whole changes the program.
    """
    for switch in switches:
        with switch.off():
            changes = is_changed()
        if changes:
            yield switch
            yield from switches_that_change(switch.cases, is_changed)


def text_of(fun: Callable[..., Any], *args: Any) -> str:
    """Return the program of ``fun`` as text, without the addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fun)(*args)))


def saved_bytes(vjp: Callable[..., Any], params: Any) -> int:
    """Return the bytes that a forward pass saves for the gradient, without the params.

    ``vjp`` is a function of the params. It returns the function that computes the gradient.
    """
    jaxpr = jax.make_jaxpr(vjp)(params).jaxpr
    arguments = set(jaxpr.invars)
    saved = {id(atom): atom.aval for atom in jaxpr.outvars if not is_literal(atom) and atom not in arguments}
    return sum(aval.size * aval.dtype.itemsize for aval in saved.values())


def is_worse(before: float, after: float) -> bool:
    """Return whether an error matters that was ``before`` with all rules. A NaN matters."""
    return not after <= max(NOTICEABLE, WORSE * before)


def rules_of_switches() -> list[dict[str, str]]:
    """Return the number and the description of each rule, and the name under which its figures are stored."""
    rules = []
    for switch in SWITCHES:
        rules.append({"rule": switch.rule, "off": switch.name, "name": switch.name})
        rules += [{"rule": case.rule, "off": f"{switch.name}: {case.name}", "name": case.name} for case in switch.cases]
    return rules


def rows_of_rules(
    rules: list[dict[str, str]], rows: list[dict[str, Any]], examples: int | None = None
) -> list[tuple[str, ...]]:
    """Return the cells of the table of rules.

    Args:
      rules: the rules, from :func:`rules_of_switches`.
      rows: the figures of the programs.
      examples: the largest number of programs to name in a cell; None for all.
    """
    table = []
    for rule in rules:
        name = rule["name"]
        changed = [row for row in rows if name in row["without"]]
        by_error = [row for row in changed if _error_matters(row, name)]
        by_bytes = [row for row in changed if _bytes_matter(row, name)]
        shown = [_shown_error(row, name) for row in sorted(by_error, key=lambda row: -_growth(row, name))]
        shown += [_shown_bytes(row, name) for row in by_bytes if row not in by_error]
        counts = [str(len(some)) for some in (changed, by_error, by_bytes)]
        table.append((rule["rule"], rule["off"], *counts, "; ".join(shown[:examples])))
    return table


def _error_matters(row: dict[str, Any], name: str) -> bool:
    return is_worse(row["all_rules"]["error"], row["without"][name]["error"])


def _bytes_matter(row: dict[str, Any], name: str) -> bool:
    return bool(row["without"][name]["bytes"] >= MORE_BYTES * max(row["all_rules"]["bytes"], 1))


def _growth(row: dict[str, Any], name: str) -> float:
    """Return by how much the error grows without a rule."""
    error = row["without"][name]["error"]
    return math.inf if math.isnan(error) else error / max(row["all_rules"]["error"], NOTICEABLE)


def _shown_error(row: dict[str, Any], name: str) -> str:
    before, after = row["all_rules"]["error"], row["without"][name]["error"]
    return f"{row['library']}: {row['program']} ({percent(before)} → {percent(after)})"


def _shown_bytes(row: dict[str, Any], name: str) -> str:
    share = row["without"][name]["bytes"] / max(row["all_rules"]["bytes"], 1)
    return f"{row['library']}: {row['program']} ({share:.2f} times the bytes)"


def _cells_of_program(row: dict[str, Any]) -> tuple[str, ...]:
    errors = [row["all_rules"]["error"], row["half_products"], row["each_alone"]["error"]]
    title = f"{row['library']}: {row['program']}"
    share = row["each_alone"]["bytes"] / max(row["all_rules"]["bytes"], 1)
    return (title, *map(percent, errors), str(row["all_rules"]["bytes"]), f"{share:.2f} ×")


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        folder = records.folder_of("ablation", config)
    setting = {"versions": environment()["versions"], "half": config.half}
    collected = collect.collect(
        folder,
        config,
        setting,
        lambda program: [measure(program, config.half)],
        lambda row: f"{' '.join(_cells_of_program(row))}; changed by: {', '.join(row['without'])}",
    )
    rows = collected.rows
    tables = [
        Table("Rules, each switched off alone", RULE_COLUMNS, rows_of_rules(rules_of_switches(), rows), 2, ()),
        Table(
            "Programs with all rules, and without a graph",
            PROGRAM_COLUMNS,
            list(map(_cells_of_program, rows)),
            1,
            collected.notes(),
        ),
    ]
    data = {
        "rules": rules_of_switches(),
        "programs": rows,
        "not_installed": collected.not_installed,
        "failed": collected.failed,
    }
    records.record(
        folder, "ablation", "The rules of autocast, one by one", {**environment(), "half": config.half}, tables, data
    )
    (folder / collect.PART).unlink(missing_ok=True)
    return data


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
