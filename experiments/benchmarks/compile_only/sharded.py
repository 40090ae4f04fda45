"""Memory, traffic and cycles of GPT-2's sizes and of Llama 3 8B on several GPUs or on slices of TPUs."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from typing import Any, Literal, get_args

from experiments import language_modeling
from experiments.benchmarks.measure.sharded import Way, measure
from experiments.benchmarks.shared import measurements, records
from experiments.models import gpt2
from experiments.models.llama import Llama
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect.compiled import targets

Size = Literal[language_modeling.Size, "llama-8B"]
"""A size of GPT-2 by number of params, or Llama 3 with 8 billion params."""
GIB = 2**30
COLUMNS = ("params", "by", "policy", "devices", "mesh", "batch", "peak GiB", "state GiB", "sent GB", "B/param", "ideal")
TPU_COLUMNS = ("kernels ms", "memory ms", "links ms", "tokens/s at best")
LAST_COLUMNS = ("gathered in", "sent by kind")
ABOUT = (
    "Compiled, not run: forward, backward, clipping and AdamW of GPT-2. The blocks are a loop, and the backward pass "
    "recomputes each block. `by` says how the step was written. Linen and NNX: `make_train_step(sharding=)` with a "
    "model under a policy; autocast: the same with the Linen model under autocast. All figures are "
    "per device. `peak`: arguments, temporaries, and results that do not reuse an argument's memory, without the "
    "memory of CUDA and NCCL themselves. `state`: params and optimizer state in float32. `sent`: bytes sent in a step "
    "with ring algorithms. `ideal`: weights gathered twice in 16 bits, gradients reduced once in float32. `gathered "
    "in`: the dtypes of the all-gathers, by their share of the bytes."
)
SLICES = "tpu_slices"
"""The name of the files with the results for slices of TPUs."""
ABOUT_SLICES = (
    "On TPUs, `kernels ms` is the compiler's own estimate of the cycles of all kernels, divided by the clock. `memory "
    "ms` is the time in which the peak bandwidth moves all bytes, and `links ms` the time in which all links of a "
    "device send its bytes. The three run at the same time, so the step takes at least the longest of them: `tokens/s "
    "at best` is for the whole slice. Cycles estimated by the compiler, not run."
)
NAMES: dict[Way, str] = {"linen": "Linen", "autocast": "autocast", "nnx": "NNX"}


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


def model_of(size: Size, smoke: bool = False) -> gpt2.GPT2 | Llama:
    """Return a model of this size, or with ``smoke`` a small one."""
    if size != "llama-8B":
        return gpt2.sized(None if smoke else size)
    return Llama(vocabulary=96, sequence=32, layers=2, heads=4, groups=2, width=64, hidden=96) if smoke else Llama()


def table(rows: list[dict[str, Any]], of_tpus: bool) -> Table:
    """Return a table with a row for each model and cluster or slice.

    The findings of the audit are below the table.
    """
    cells, notes = [], []
    for row in rows:
        params, state = row["params"], row["by_kind"]["params"] + row["by_kind"]["optimizer"]
        cells.append((
            _params_of(row), NAMES[row["way"]], row["policy"], f"{row['gpus']} ({row['topology']})", _mesh_text(row),
            row["batch"], f"{row['peak'] / GIB:.2f}", f"{state / GIB:.2f}", f"{row['wire'] / 1e9:.2f}",
            f"{row['wire'] / params:.2f}", f"{row['ideal'] / params:.2f}",
            *(_best_case(row) if of_tpus else ()),
            _dtypes_of_gathers(row["sent"]),
            ", ".join(f"{name} {wire / 1e9:.2f}" for name, wire in row["sent"].items() if wire >= 1e7),
        ))  # fmt: skip
        name = f"{row['setting']['size']} by {NAMES[row['way']]} on {row['topology']}"
        notes += [f"{name}: {finding}" for finding in row["findings"]]
    columns = (*COLUMNS, *(TPU_COLUMNS if of_tpus else ()), *LAST_COLUMNS)
    return Table("Each device", columns, cells, 6, tuple(notes))


def _best_case(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the milliseconds of a step's parts on TPUs, and the tokens per second if the slowest part decides."""
    parts = row["parts"]
    milliseconds = (f"{parts[part]:,.0f}" for part in ("kernels", "memory", "links"))
    return *milliseconds, f"{1e3 * row['tokens'] / max(parts.values()):,.0f}"


def is_slice(topology: str) -> bool:
    """Return whether a text names a slice of TPUs, such as ``"v5e:4x4"``, and not a cluster of GPUs."""
    return ":" in topology


def devices_of(target: str, topology: str) -> int:
    """Return the number of devices of a cluster of the GPU ``target``, or of a slice of TPUs."""
    if is_slice(topology):
        return len(targets.target_of(topology).devices())
    return len(targets.target_of(target).devices(topology))


def _mesh_text(row: dict[str, Any]) -> str:
    """Return the axes of a row's mesh and their sizes."""
    return ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())


def _dtypes_of_gathers(sent: dict[str, float]) -> str:
    """Return the dtypes of all-gathers with their shares of the bytes, largest first.

    Args:
      sent: the bytes by the kind, the dtype and the mesh axes of the collective operations.
    """
    bytes_of = Counter[str]()
    for name, wire in sent.items():
        kind, dtype, _ = name.split(" ")
        if kind == "all-gather":
            bytes_of[dtype] += wire
    return ", ".join(f"{dtype} {wire / bytes_of.total():.0%}" for dtype, wire in bytes_of.most_common())


def _params_of(row: dict[str, Any]) -> str:
    """Return the number of params, and the name of the model if it is not GPT-2."""
    name = " (Llama 3)" if row["setting"]["size"] == "llama-8B" else ""
    return f"{row['params'] / 1e6:,.0f}M{name}"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    sizes, ways = get_args(Size), list(NAMES)
    mesh = row.get("mesh", {})  # older rows of GPUs do not have it
    return sizes.index(row["setting"]["size"]), row["gpus"], row["topology"], len(mesh), ways.index(row["way"])


def main(config: Any) -> list[dict[str, Any]]:
    """Compile all sizes and ways for each topology, and write the results."""
    with cli.bad_values_end_it():
        of_tpus = all(map(is_slice, config.topology))
        if not of_tpus and any(map(is_slice, config.topology)):
            raise ValueError("--topology has clusters of GPUs and slices of TPUs; compile them with two commands")
        if "llama-8B" in config.sizes and (others := set(config.ways) - {"linen", "autocast"}):
            raise ValueError(f"--ways of llama-8B are linen and autocast, got {' '.join(sorted(others))}")
        if "tensor=" in config.mesh and (others := set(config.sizes) - {"llama-8B"}):
            raise ValueError(f"--mesh with the axis tensor needs --sizes llama-8B, got {' '.join(sorted(others))}")
        meshes = {topology: mesh_of(config.mesh, devices_of(config.target, topology)) for topology in config.topology}
        folder = records.folder_of(SLICES if of_tpus else "sharded", config)
        where_now = environment(("libtpu",)) if of_tpus else environment(target=config.target)
        saved = measurements.Measurements(folder, 0, where_now, smoke=config.smoke)
    with Progress("sharded", len(config.sizes) * len(config.ways) * len(meshes)) as progress:
        for size, way, (topology, mesh) in itertools.product(config.sizes, config.ways, meshes.items()):
            sized = model_of(size, config.smoke)
            device, cluster = (topology, None) if is_slice(topology) else (config.target, topology)
            find = functools.partial(measure, sized, device, cluster, mesh, way)
            place = topology.replace(" ", "").replace(":", "-")
            name = "-".join([size, way, place, *(f"{axis}{n}" for axis, n in mesh.items())])
            saved.get(name, find, progress, size=size)
    rows = sorted(map(measurements.read, folder.glob("*-*.json")), key=_order)
    where = measurements.joined([row["environment"] for row in rows])
    data = {"smoke": config.smoke, "rows": rows}
    title = f"Train steps compiled for {'slices of TPUs' if of_tpus else 'many GPUs'}"
    about = [ABOUT, ABOUT_SLICES] if of_tpus else [ABOUT]
    records.record(folder, SLICES if of_tpus else "sharded", title, where, [table(rows, of_tpus)], data, about)
    return rows
