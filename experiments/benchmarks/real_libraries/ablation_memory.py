"""Measure how much memory each rule of autocast saves in GPT-2, BERT and ResNet-50.

python -m experiments.benchmarks.real_libraries.ablation_memory

The gradient of each model's loss is compiled for an H200, which need not be attached. Each rule of docs/autocast.md is
switched off alone, as in `ablation`. If the program changes, its peak of memory is compared with the peak under all
rules. The last row of a model is without a graph: the dtype of each operation is decided on its own. The models have
their usual widths, but few layers and examples. The vocabularies are as much smaller as the number of layers, so that
the logits have their usual share. Compiling needs `pip install .[compile-only]`. The run folder holds
ablation_memory.md and ablation_memory.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from experiments.benchmarks.models.workloads import SMOKE, Workload, workload
from experiments.benchmarks.real_libraries.ablation import switches_that_change, text_of
from experiments.benchmarks.real_libraries.per_operation import autocast_each_operation
from experiments.benchmarks.real_libraries.rule_switches import SWITCHES
from experiments.benchmarks.shared import records
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.environment import environment

COLUMNS = ("model", "rule", "off", "peak in MiB", "compared with all rules")
ALL_RULES, EACH_ALONE = "all rules", "each operation alone"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small):
    """Flags of the benchmark."""


def workloads(smoke: bool) -> list[Workload]:
    """Return the models to compile."""
    if smoke:
        return [workload(name, SMOKE[name]) for name in ("gpt2", "resnet50")]
    return [
        workload("gpt2", layers=2, batch_size=8, vocabulary=50257 // 6),
        workload("bert", layers=2, batch_size=16, vocabulary=30522 // 6),
        workload("resnet50", layers=1, batch_size=32),
    ]


def measure(work: Workload) -> list[dict[str, Any]]:
    """Return a row with the peak of memory for each way to compute the gradient of a model."""
    params, state = jax.eval_shape(work.init, jax.random.key(0))

    def gradient(cast: Callable[..., Any]) -> Callable[..., Any]:
        def loss(params: Any, state: Any, batch: Any) -> Any:
            return work.loss_fn()(params, state, batch)[0]

        return jax.value_and_grad(cast(loss))

    def under_autocast() -> Callable[..., Any]:
        return gradient(lambda loss: jaxmp.autocast(loss, "mixed_bfloat16"))

    def row(rule: str, name: str, fun: Callable[..., Any]) -> dict[str, Any]:
        peak = jaxmp.inspect.memory(fun, device="h200")(params, state, work.batch).peak
        print(f"{work.text}: {name}: {peak / 2**20:.0f} MiB", flush=True)
        return {"model": work.text, "rule": rule, "off": name, "peak": peak}

    args = params, state, work.batch
    with_all = text_of(under_autocast(), *args)
    rows = [row("", ALL_RULES, under_autocast())]
    for switch in switches_that_change(SWITCHES, lambda: text_of(under_autocast(), *args) != with_all):
        with switch.off():
            rows.append(row(switch.rule, switch.name, under_autocast()))
    alone = autocast_each_operation(gradient(lambda loss: loss), jnp.bfloat16)
    return [*rows, row("", EACH_ALONE, alone)]


def _cells(row: dict[str, Any], of_all_rules: int) -> tuple[str, ...]:
    peak = row["peak"]
    return (row["model"], row["rule"], row["off"], f"{peak / 2**20:.0f}", f"{peak / of_all_rules:.3f}")


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        folder = records.folder_of("ablation_memory", config)
    rows: list[dict[str, Any]] = []
    for work in workloads(config.smoke):
        rows += measure(work)
    peaks = {row["model"]: row["peak"] for row in rows if row["off"] == ALL_RULES}
    cells = [_cells(row, peaks[row["model"]]) for row in rows]
    table = Table("Peaks of memory, compiled for an H200", COLUMNS, cells, 3, ())
    where = {**environment(), "target": "H200 (not attached)"}
    records.record(folder, "ablation_memory", "The memory that each rule saves", where, [table], {"rows": rows})
    return {"rows": rows}


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
