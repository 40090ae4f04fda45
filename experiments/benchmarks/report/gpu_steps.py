"""Show measured train steps of ResNet-50, BERT and GPT-2 on a GPU, beside torch.compile and the goals."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks.compile_only import report as compile_only_report
from experiments.benchmarks.report.goals import Goal, share
from experiments.benchmarks.train_step import goals as train_step_goals
from experiments.benchmarks.train_step.goals import RECORDED
from experiments.benchmarks.train_step.results import Results
from experiments.benchmarks.train_step.rows import REMAT, ROWS, SETTINGS
from experiments.report.tables import markdown

MODELS = {"resnet50": "ResNet-50, 256×224×224", "bert": "BERT-Base, 64×512", "gpt2": "GPT-2 124M, 16×1024"}
OURS, REFERENCE = "jaxmp-bf16", "compile-bf16"
SHOWN = (*SETTINGS, *REMAT, "autocast-bf16", "unprepared-bf16", "hand-bf16", REFERENCE)
"""The rows of the table of measured steps."""
DOMINANT = 0.5
"""A row is not compared if a single kernel takes a larger share of its time, because such a peer is easy to beat."""
GOALS = {
    "time": "step time, relative to torch.compile AMP",
    "memory": "peak memory, relative to torch.compile AMP",
    "remat_memory": "peak memory with remat, relative to torch.compile AMP",
    "remat_time": "step time with remat, relative to torch.compile AMP",
    "over_fp32": "speed-up over float32 without tensor cores",
    "over_tf32": "speed-up over TF32",
    "saved": "memory saved, relative to float32",
    "scaling": "step time of fp16 with dynamic scaling, relative to a constant scale",
    "autocast_by_hand": "step time of autocast, relative to code by hand",
    "autocast": "step time of autocast, relative to a policy",
    "half": "FLOPs of products in half on tensor cores",
}
"""The rows of the table of goals, by the key of the goal."""
PERCENT = {"saved": ".0%", "half": ".1%"}
COMPILED, TYPED = "ᶜ", "ʳ"
NONE = "–"


def read(model: str, data: dict[str, Any]) -> Results:
    """Return the train steps of a model, from the result of the benchmark `train_step`."""
    rows = data["models"][model]
    alone = {key: {"train": row} for key, row in rows.get("train", {}).items()}
    return Results({"model": model}, alone, rows.get("turns", {}), {})


def relative(steps: Results, row: str) -> tuple[float, float] | None:
    """Return the step time and the peak memory of a row, relative to torch.compile in the same run."""
    ratio = steps.ratio("train", row, REFERENCE)
    memory = share(steps.memory("train", row), steps.memory("train", REFERENCE))
    return None if ratio is None or memory is None else (ratio[1], memory)


def sentence(steps: dict[str, Results], device: str) -> str:
    """Return a sentence with the smallest and the largest figures of jaxmp in bfloat16."""
    figures = {MODELS[model].split(",")[0]: relative(of_model, OURS) for model, of_model in steps.items()}
    known = {name: pair for name, pair in figures.items() if pair}
    if not known:
        return f"No train step was compared with torch.compile AMP on {device} yet."
    times, peaks = zip(*known.values(), strict=True)
    return (
        f"A train step in bfloat16 takes {min(times):.2f} to {max(times):.2f} times as long as with torch.compile AMP, "
        f"and {min(peaks):.2f} to {max(peaks):.2f} times the memory ({', '.join(known)}; {device})."
    )


def saved_when_compiled(steps: dict[str, Results], compiled: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of memory that jaxmp in bfloat16 saves, by name of the model.

    Both jaxmp's step and the float32 step in plain JAX are compiled, not run.
    """
    shares = {}
    for model, of_model in steps.items():
        goal, _ = goals(of_model, compiled)["saved_compiled"]
        shares[MODELS[model].split(",")[0]] = goal.value
    return shares


def memory_sentence(steps: dict[str, Results], compiled: list[dict[str, Any]], target: str) -> str:
    """Return a sentence with the smallest and the largest share of memory that jaxmp in bfloat16 saves."""
    shares = saved_when_compiled(steps, compiled)
    return (
        f"A train step in bfloat16 needs {100 * min(shares.values()):.0f} % to {100 * max(shares.values()):.0f} % less "
        f"memory than a step in float32 without jaxmp ({', '.join(shares)}; compiled for {target}, not run)."
    )


def table(steps: dict[str, Results]) -> str:
    """Return a table of the rows that were measured, relative to torch.compile."""
    rows = []
    for key in SHOWN:
        cells = [_cell(of_model, key) for of_model in steps.values()]
        if set(cells) != {NONE}:
            rows.append((ROWS[key].label, *cells))
    return markdown(("", *(MODELS[model] for model in steps)), rows)


def _cell(steps: Results, row: str) -> str:
    pair, figures = relative(steps, row), steps.figures("train", row)
    if pair is None:
        return NONE
    if figures.get("kernel_ms"):
        name, milliseconds, _ = max(figures["kernels"], key=lambda kernel: kernel[1])
        if milliseconds > DOMINANT * figures["kernel_ms"]:
            return f"not compared: `{name}` takes {milliseconds / figures['kernel_ms']:.0%}"
    if row == REFERENCE:
        return f"{figures['ms'][1]:.1f} ms · {(steps.memory('train', row) or 0) / 2**30:.1f} GiB"
    return f"{pair[0]:.2f} · {pair[1]:.2f}"


def goals(steps: Results, compiled: list[dict[str, Any]]) -> dict[str, tuple[Goal, str]]:
    """Return a model's goals by key, each with the mark for its table cell.

    A measured figure has no mark. Where no figure was measured, the figure of the compiled step is used.

    Args:
      steps: the measured steps of the model.
      compiled: the results of the benchmark `compile_only`.
    """
    torch, float32 = (steps.memory("train", key) for key in (steps.reference("train") or "", "hand-fp32"))
    judged = {goal.key: (goal, "") for goal in train_step_goals.goals(steps)}
    for result in compiled:
        if result["name"] != steps.about["model"] or not result["full"]:
            continue
        for goal in compile_only_report.goals(result, torch, float32):
            if goal.key not in judged or judged[goal.key][0].value is None:
                peak = float32 if goal.key == "saved" else torch
                typed = goal.key in ("memory", "remat_memory", "saved") and not peak
                judged[goal.key] = goal, COMPILED + TYPED * typed
    return judged


def goals_table(steps: dict[str, Results], compiled: list[dict[str, Any]], groups: list[dict[str, Any]]) -> str:
    """Return a table of the figures with their goals, without the rows that have no figure.

    Args:
      steps: the measured steps of each model.
      compiled: the results of the benchmark `compile_only`.
      groups: the groups of the benchmark `remat`.
    """
    judged = {model: goals(of_model, compiled) for model, of_model in steps.items()}
    rows = []
    for key, name in GOALS.items():
        figures = [judged[model].get(key) for model in steps]
        cells = [
            goal.cell(PERCENT.get(key, ""), mark) if goal else NONE for goal, mark in (f or (None, "") for f in figures)
        ]
        if not set(cells) <= {"", NONE}:
            rows.append((name, *(cell or "not measured" for cell in cells)))
    rows.append(("largest batch, without → with remat", *(_largest(model, groups) for model in steps)))
    saved = ", ".join(f"{name} {value:.0%}" for name, value in saved_when_compiled(steps, compiled).items())
    note = f"If float32 is compiled too, without cuDNN's workspaces, the memory saved is {saved}."
    return f"{markdown(('', *(MODELS[model] for model in steps)), rows)}\n\n{note}"


def _largest(model: str, groups: list[dict[str, Any]]) -> str:
    """Return the largest batch without remat and with it. With remat, everything except attention is recomputed."""
    for group in groups:
        if (group["model"], group["policy"]) == (model, "mixed_bfloat16"):
            plain, remat = (group["rows"][kind]["largest"]["batch"] for kind in ("none", "attention"))
            return f"{plain} → {remat}{COMPILED if 'target' in group['setting'] else ''}"
    return NONE


def recorded_peaks() -> str:
    """Return a note on the peaks that compiled steps are compared with where none was measured."""
    peaks = ", ".join(
        f"{name.split(',')[0]} {RECORDED[model].torch:,} and {RECORDED[model].float32:,}"
        for model, name in MODELS.items()
    )
    return (
        f"{TYPED} relative to peaks that were measured once on one H200 with torch 2.11.0+cu130, in MiB for "
        f"torch.compile AMP and for float32 in plain JAX: {peaks}. If you run "
        "`python -m experiments.benchmarks.train_step`, its peaks are used in their place."
    )
