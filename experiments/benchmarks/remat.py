"""Measure rematerialisation: the memory of a train step, and the largest batch.

python -m experiments.benchmarks.remat --target h200 --run-dir experiments/results/remat

The benchmark compiles the whole train step of GPT-2 (16×1024) and BERT-Base (64×512) for each kind of remat:

- none: nothing is recomputed.
- attention: everything except attention is recomputed.
- dots: everything except matrix products is recomputed.
- full: everything is recomputed.

All figures come from compiling. Near the limit XLA recomputes a part of the step by itself. benchmarks.train_step
measures the time that remat costs.

--target compiles for a GPU that is not attached. The run folder keeps the results, and the same command continues from
there with the same device, versions and --memory-limit. The run folder holds remat.md, .json and .png.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, Literal

import jax

from experiments.benchmarks.measure.turns import OUT_OF_MEMORY, reason
from experiments.benchmarks.models.workloads import FULL, SMOKE, Workload, workload
from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Row
from experiments.measure import memory
from experiments.models.transformer import Remat
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table, titled
from experiments.training import cli
from experiments.training.batch_size import SHARE, free_bytes, read_bytes
from experiments.training.environment import environment, require_gpu
from jaxmp.base import hardware
from jaxmp.inspect.compiled import targets

Policy = Literal["mixed_bfloat16", "mixed_float16", "tensorfloat32", "float32"]
Group = dict[str, Any]
PRECISIONS = {policy: precision for precision, policy in jax_steps.POLICIES.items()}
MIB = 2**20
COLUMNS = ("remat", "step MiB", "memory ÷ none", "largest batch")
NOTE = "Step MiB: peak memory of the compiled step (arguments, results and temporaries)."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Pieces, records.Small):
    """Flags of the benchmark."""

    models: tuple[Literal["gpt2", "bert"], ...] = ("gpt2", "bert")
    """Models to compile."""
    policies: tuple[Policy, ...] = ("mixed_bfloat16", "mixed_float16")
    """Policies of the models. With mixed_float16 the loss scale is dynamic."""
    remats: tuple[Remat, ...] = ("none", "attention", "dots", "full")
    """Kinds of recomputation of the blocks in the backward pass."""
    batch_size: int = 0
    """Sequences per step; 0 for 16 (gpt2) and 64 (bert)."""
    layers: int = 0
    """Blocks; 0 for 12, or 2 with --smoke."""
    memory_limit: str = ""
    """Memory that the step with the largest batch may take, as in 20GB. With --smoke and without this flag, the largest
    batch is not searched. (default: nine tenths of the memory that is free for JAX, which takes 95 % of a GPU's
    memory)"""
    target: Literal["", "h200"] = ""
    """Compile for this GPU, which need not be attached. The packages of the extra compile-only are needed."""


def step_bytes(case: Workload, row: Row, device: str | None = None) -> int:
    """Return the bytes that a step needs on a device.

    See :func:`experiments.measure.memory.of_step`.
    """
    start, step = jax_steps.train_step(case, row)
    return memory.of_step(step, (jax.eval_shape(start), case.batch), device)


def measure(case: Workload, row: Row, device: str | None, limit: int | None) -> dict[str, Any]:
    """Return the memory of a step and the largest batch within ``limit``.

    A missing figure has an ``error``.
    """
    figures: dict[str, Any] = {}
    try:
        figures["step_bytes"] = step_bytes(case, row, device)
    except (RuntimeError, ValueError) as error:  # an error of XLA, or an unknown size
        figures["error"] = _why(error)
    if limit and figures.get("error", OUT_OF_MEMORY) == OUT_OF_MEMORY:
        try:
            largest = largest_batch(case, row, device, limit)
            figures["largest"] = {"batch": largest, "limit": limit} if largest else {"error": "nothing fits"}
        except (RuntimeError, ValueError) as error:
            figures["largest"] = {"error": _why(error)}
    return figures


def largest_batch(case: Workload, row: Row, device: str | None, limit: int) -> int:
    """Return the largest batch whose step needs at most ``limit`` bytes; 0 if nothing fits."""
    case = workload(case.name, case.sizes, batch_size=8)
    start, step = jax_steps.train_step(case, row)
    return memory.largest_batch(step, (jax.eval_shape(start), case.batch), limit, device)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else reason(error)


def limit_of(config: Config) -> int | None:
    """Return the bytes that the largest batch may take.

    The result is None if the largest batch is not searched for.

    Raises:
      ValueError: ``--memory-limit`` is not a number of bytes.
    """
    if config.memory_limit:
        return read_bytes(config.memory_limit)
    if config.smoke:
        return None
    # The same share that the scripts use on an attached GPU.
    return int(SHARE * cli.GPU_SHARE * hardware.GPUS["h200"].memory_bytes) if config.target else free_bytes()


def table(group: Group) -> Table:
    """Return a table with a row for each kind of remat."""
    rows, notes, none = [], [NOTE], group["rows"].get("none", {}).get("step_bytes")
    for kind, row in group["rows"].items():
        need, largest = row.get("step_bytes"), row.get("largest", {})
        share = f"{need / none:.3f}" if need and none else ""
        rows.append((kind, f"{need / MIB:,.0f}" if need else row["error"], share, str(largest.get("batch", ""))))
        notes += [largest["error"]] if "error" in largest else []
        if "limit" in largest:
            notes.append(
                f"Largest batch: the compiled step needs at most {largest['limit'] / MIB:,.0f} MiB. Near this limit "
                "XLA recomputes a part of the step by itself."
            )
    title = titled(f"{group['text']}, {group['policy']}", group["setting"]["smoke"])
    return Table(title, COLUMNS, rows, 1, (*dict.fromkeys(notes),))


def pictures(group: Group) -> list[plots.Panel]:
    """Draw the memory and the largest batch of each kind of remat."""
    rows = group["rows"]
    needs = {kind: row["step_bytes"] / 2**30 if "step_bytes" in row else None for kind, row in rows.items()}
    batches = {kind: row.get("largest", {}).get("batch") for kind, row in rows.items()}
    title = f"{group['text']}, {group['policy']}"
    return [plots.Panel(title, "step, GiB", needs), plots.Panel("", "largest batch", batches, form="d")]


def main(config: Config) -> list[Group]:
    with cli.bad_values_end_it():
        if config.target:
            jax.config.update("jax_platforms", "cpu")  # else JAX would look for a GPU
            targets.target_of(config.target).devices()
        else:
            require_gpu(config.smoke)
        limit = limit_of(config)
        folder = records.folder_of("remat", config)
        setting = {"memory_limit": config.memory_limit or "the device's", "smoke": config.smoke}
        saved = measurements.Measurements(folder, config.minutes, environment(target=config.target), **setting)
        changes = {"batch_size": config.batch_size, "layers": config.layers}
        cases = [workload(name, (SMOKE if config.smoke else FULL)[name], **changes) for name in config.models]
        for case in cases:
            saved.require_alike(f"{case.name}-*.json", sizes=dataclasses.asdict(case.sizes))
    groups = []
    kinds = list(dict.fromkeys(config.remats))
    with Progress("remat", len(cases) * len(config.policies) * len(kinds)) as progress:
        for case, policy in itertools.product(cases, dict.fromkeys(config.policies)):
            sizes, rows = dataclasses.asdict(case.sizes), {}
            for kind in kinds:
                precision: Any = PRECISIONS[policy]
                row = Row(kind, "jaxmp", precision, scaled=precision == "fp16", remat=kind)
                find = functools.partial(measure, case, row, config.target or None, limit)
                if figures := saved.get(f"{case.name}-{policy}-{kind}", find, progress, sizes=sizes):
                    rows[kind] = figures
            group = {**case.facts, "policy": policy, "setting": {"sizes": sizes, **saved.setting}, "rows": rows}
            groups += [group] if rows else []
    if groups:
        where = measurements.joined(saved.environments)
        tables, panels = [*map(table, groups)], [*map(pictures, groups)]
        title, shows = "What rematerialisation saves", "memory and the largest batch"
        records.record(folder, "remat", title, where, tables, {"groups": groups}, (), shows, panels)
    saved.end()
    return groups


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
