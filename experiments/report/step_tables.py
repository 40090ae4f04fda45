"""Write a sentence and the tables of train steps that were measured on GPUs.

All columns of a measured table come from one device, and all cells of a column from one run. A measured table has the
step time and the peak memory of each row, relative to torch.compile in the same run.
"""

from __future__ import annotations

from pathlib import Path

from experiments.benchmarks.train_step.results import Results
from experiments.benchmarks.train_step.rows import REMAT, ROWS, SETTINGS
from experiments.report.goals import share
from experiments.report.headline import MODELS, Source, all_of, full, steps_of
from experiments.report.tables import Table

OURS, REFERENCE = "jaxmp-bf16", "compile-bf16"
SHOWN = (*SETTINGS, *REMAT, "autocast-bf16", "unprepared-bf16", "hand-bf16", REFERENCE)
"""The rows of a measured table, in this order."""
NOTHING = "–"
DOMINANT = 0.5
"""The share of a step's kernel time from which a single kernel is named below the table."""
NO_TRITON = "no product in Triton"
"""The end of the label of a row without products in Triton."""
_NO_TRITON = 'No product in Triton: `make_train_step(…, compiler_options={"xla_gpu_enable_triton_gemm": False})`.'


def by_device(results: Path) -> dict[str, dict[str, Source]]:
    """Return each device's newest measured train steps of each model, the newest device first."""
    devices: dict[str, dict[str, Source]] = {}
    sources = all_of(results, "train_step", lambda data: any(full(*model) for model in data["models"].items()))
    for source in sorted(sources, key=lambda source: source.where["date"], reverse=True):
        by_model = devices.setdefault(source.where["device"], {})
        for model in MODELS:
            if full(model, source.data["models"].get(model)):
                by_model.setdefault(model, source)
    return devices


def measured(results: Path) -> list[str]:
    """Return a table for each device in Markdown, each after a sentence."""
    lines = []
    for device, by_model in by_device(results).items():
        table = _measured_table(by_model)
        if table:
            title = f"A train step on {device.removesuffix(' (gpu)')}: step time · peak memory, relative to"
            lines += [f"{title} torch.compile AMP in bfloat16 in the same run.", "", *table, ""]
            lines += [_NO_TRITON, ""] if any(NO_TRITON in line for line in table) else []
            lines += [line for note in _dominant_kernels(by_model) for line in (note, "")]
    return lines


def sentence(results: Path) -> list[str]:
    """Return a sentence with the step time and the peak memory of jaxmp, relative to torch.compile in the same run.

    The figures come from the newest device that measured both.
    """
    for device, by_model in by_device(results).items():
        names, times, peaks = [], [], []
        for model in MODELS:
            if model not in by_model:
                continue
            steps = steps_of(by_model[model], model)
            ratio = steps.ratio("train", OURS, REFERENCE)
            memory = share(steps.memory("train", OURS), steps.memory("train", REFERENCE))
            if ratio is not None and memory is not None:
                names.append(MODELS[model].split(",")[0])
                times.append(ratio[1])
                peaks.append(memory)
        if names:
            return [
                f"A train step in bfloat16 takes {min(times):.2f} to {max(times):.2f} times as long as with "
                f"torch.compile AMP, and {min(peaks):.2f} to {max(peaks):.2f} times the memory ({', '.join(names)}; "
                f"{device.removesuffix(' (gpu)')}).",
                "",
            ]
    return []


def _dominant_kernels(by_model: dict[str, Source]) -> list[str]:
    """Return a sentence for each row in which a single kernel takes most of the time."""
    notes = []
    for model, source in by_model.items():
        steps = steps_of(source, model)
        for key in SHOWN:
            kernel = _dominant_kernel(steps, key)
            if kernel:
                row = f"{MODELS[model].split(',')[0]}, {ROWS[key].label}"
                notes.append(f"{row} is not compared, because a single kernel takes most of its time: {kernel}.")
    return notes


def _dominant_kernel(steps: Results, key: str) -> str:
    """Return the kernel that takes most of a row's time, and its share; an empty text if there is none."""
    figures = steps.figures("train", key)
    if not figures.get("kernel_ms"):
        return ""
    name, milliseconds, _ = max(figures["kernels"], key=lambda kernel: kernel[1])
    part = milliseconds / figures["kernel_ms"]
    return f"`{name}`, {part:.0%}" if part > DOMINANT else ""


def _measured_table(by_model: dict[str, Source]) -> list[str]:
    steps = {model: steps_of(by_model[model], model) for model in MODELS if model in by_model}
    rows = []
    for key in SHOWN:
        cells = [_cell(steps[model], key) for model in steps]
        if set(cells) != {NOTHING}:
            rows.append((ROWS[key].label, *cells))
    return _markdown([MODELS[model] for model in steps], rows) if rows else []


def _cell(steps: Results, key: str) -> str:
    """Return the step time and the peak memory of a row, relative to torch.compile.

    A row with a dominant kernel is left out, because such a peer is easy to beat.
    """
    if _dominant_kernel(steps, key):
        return NOTHING
    ratio = steps.ratio("train", key, REFERENCE)
    memory = share(steps.memory("train", key), steps.memory("train", REFERENCE))
    if ratio is None or memory is None:
        return NOTHING
    if key == REFERENCE:
        milliseconds = steps.figures("train", key)["ms"][1]
        return f"{milliseconds:.1f} ms · {(steps.memory('train', key) or 0) / 2**30:.1f} GiB"
    return f"{ratio[1]:.2f} · {memory:.2f}"


def _markdown(models: list[str], rows: list[tuple[str, ...]]) -> list[str]:
    text = Table("", ("", *models), rows).markdown()
    return [line for line in text.splitlines() if line.startswith("|")]
