"""Memory and traffic of GPT-2's sizes and of a 7B model on several GPUs."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

from experiments.benchmarks.measure.sharded import Way, measure
from experiments.benchmarks.report.goals import Goal
from experiments.benchmarks.shared import measurements, records
from experiments.models import gpt2
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect.compiled import targets

GIB = 2**30
PEAKS, WIRE = {"1558M": 5.7, "7B": 16.8}, 1.02
"""Goals for eight GPUs: the peak in GiB on each GPU, and the bytes that a GPU sends relative to the ideal."""
COLUMNS = ("params", "by", "GPUs", "batch", "peak GiB", "state GiB", "sent GB", "B/param", "ideal", "sent by kind")
ABOUT = (
    "Compiled, not run: forward, backward, clipping and AdamW of GPT-2. The blocks are a loop, and the backward pass "
    "recomputes each block. `by` says how the step was written. Linen and NNX: `make_train_step(sharding=)` with a "
    "model under a policy; autocast: the same with the Linen model under autocast; hand: "
    "experiments/benchmarks/models/stacked.py. All figures are per GPU. `peak`: arguments, temporaries, and results "
    "that do not reuse an argument's memory, without the memory of CUDA and NCCL themselves. `state`: params and "
    "optimizer state in float32. `sent`: bytes sent in a step with ring algorithms. `ideal`: weights gathered twice in "
    "16 bits, gradients reduced once in float32."
)
NAMES: dict[Way, str] = {"linen": "Linen", "autocast": "autocast", "nnx": "NNX", "hand": "hand"}


def mesh_of(text: str, gpus: int) -> dict[str, int]:
    """Return the sizes of the mesh axes in ``text``, by name.

    Raises:
      ValueError: ``text`` does not name mesh axes, or their product is not ``gpus``.
    """
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text or f"fsdp={gpus}")}
    if math.prod(sizes.values()) != gpus or not re.fullmatch(r"(\w+=\d+(,(?=\w)|$))*", text):
        raise ValueError(
            f"--mesh must have all GPUs of --topology, as in data=2,fsdp={-(-gpus // 2)}, got {text!r} for {gpus}"
        )
    return sizes


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each model and cluster, and the goals."""
    cells, goals = [], []
    for row in rows:
        sent, peak, params = row["sent"], row["peak"] / GIB, row["params"]
        cells.append((
            f"{params / 1e6:,.0f}M", NAMES[row["way"]], f"{row['gpus']} ({row['topology']})", row["batch"],
            f"{peak:.1f}",
            f"{(row['by_kind']['params'] + row['by_kind']['optimizer']) / GIB:.1f}", f"{row['wire'] / 1e9:.2f}",
            f"{row['wire'] / params:.2f}", f"{row['ideal'] / params:.2f}",
            ", ".join(f"{name} {wire / 1e9:.2f}" for name, wire in sent.items() if wire >= 1e7),
        ))  # fmt: skip
        name = f"{row['setting']['size']} by {NAMES[row['way']]} on {row['topology']}:"
        if row["gpus"] == 8 and row["setting"]["size"] in PEAKS:
            goals.append(Goal("peak", f"{name} GiB at the peak", peak, PEAKS[row["setting"]["size"]], form=".2f"))
            goals.append(Goal("wire", f"{name} bytes sent / ideal", row["wire"] / row["ideal"], WIRE))
            goals.append(Goal("wide", f"{name} float32 gathers of over 1 MB", row["wide_gathers"], 0, form="d"))
        goals += [Goal("", f"{name} findings of the audit", len(row["findings"]), 0, form="d")]
    return Table("Each GPU", COLUMNS, cells, 4, tuple(goal.sentence() for goal in goals))


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    sizes, ways = list(gpt2.SIZES), list(NAMES)
    return sizes.index(row["setting"]["size"]), row["gpus"], row["topology"], ways.index(row["way"])


def main(config: Any) -> list[dict[str, Any]]:
    """Compile all sizes and ways for each topology, and write the results."""
    with cli.bad_values_end_it():
        target = targets.target_of(config.target)
        meshes = {topology: mesh_of(config.mesh, len(target.devices(topology))) for topology in config.topology}
        folder = records.folder_of("sharded", config)
        saved = measurements.Measurements(folder, 0, environment(target=config.target), smoke=config.smoke)
    with Progress("sharded", len(config.sizes) * len(config.ways) * len(meshes)) as progress:
        for size, way, (topology, mesh) in itertools.product(config.sizes, config.ways, meshes.items()):
            sized = gpt2.sized(None if config.smoke else size)
            find = functools.partial(measure, sized, config.target, topology, mesh, way)
            name = "-".join([size, way, topology.replace(" ", ""), *(f"{axis}{n}" for axis, n in mesh.items())])
            saved.get(name, find, progress, size=size)
    rows = sorted(map(measurements.read, folder.glob("*-*.json")), key=_order)
    where = measurements.joined([row["environment"] for row in rows])
    data = {"smoke": config.smoke, "rows": rows}
    records.record(folder, "sharded", "Train steps compiled for many GPUs", where, [table(rows)], data, [ABOUT])
    return rows
