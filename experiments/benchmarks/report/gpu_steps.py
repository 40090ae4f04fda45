"""Show measured train steps of ResNet-50, BERT and GPT-2 on a GPU, beside torch.compile and the goals."""

from __future__ import annotations

from collections.abc import Iterable
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
UNCHANGED, BY_HAND, FLOAT32 = "unprepared-bf16", "hand-bf16", "hand-fp32"
"""Float32 code that is not written for jaxmp: under jaxmp.autocast, with `dtype=` by hand, and as it is."""
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


def relative(steps: Results, row: str, reference: str = REFERENCE) -> tuple[float, float] | None:
    """Return the step time and the peak memory of a row, relative to another row in the same run."""
    ratio = steps.ratio("train", row, reference)
    memory = share(steps.memory("train", row), steps.memory("train", reference))
    return None if ratio is None or memory is None else (ratio[1], memory)


def name_of(model: str) -> str:
    """Return the name of a model, without its sizes."""
    return MODELS[model].split(",")[0]


def _range(values: Iterable[float], form: str = ".2f") -> str:
    """Return the smallest and the largest value as text, or one number if they look the same."""
    values = list(values)
    ends = [f"{min(values):{form}}", f"{max(values):{form}}"]
    return " to ".join(dict.fromkeys(ends))


def unchanged_sentence(steps: dict[str, Results], device: str) -> str:
    """Return sentences on autocast of float32 code that nobody changed, beside the same code by hand."""
    by_hand = {model: relative(of_model, UNCHANGED, BY_HAND) for model, of_model in steps.items()}
    known = {model: pair for model, pair in by_hand.items() if pair}
    if not known:
        return f"Autocast of unchanged code was not measured on {device} yet."
    text = (
        f"`jaxmp.autocast` of unchanged float32 code ({', '.join(map(name_of, known))}; {device}): a train step in "
        f"bfloat16 takes {_range(time for time, _ in known.values())} times as long as with Flax's `dtype=` by hand, "
        f"and {_range(peak for _, peak in known.values())} times the memory."
    )
    torch = [pair for model in known if (pair := relative(steps[model], UNCHANGED))]
    if torch:
        times, peaks = zip(*torch, strict=True)
        text += f" Relative to torch.compile AMP, it is {_range(times)} times the time and {_range(peaks)} times the "
        text += "memory."
    saved = [saved_memory(steps[model], (UNCHANGED, BY_HAND)) for model in known]
    if all(saved):
        ours, hand = (_range((100 * pair[i] for pair in saved), ".0f") for i in (0, 1))
        text += f" It needs {ours} % less memory than the float32 step; with `dtype=` by hand, it is {hand} % less."
    return text


def saved_memory(steps: Results, rows: Iterable[str]) -> list[float]:
    """Return the share of float32's measured memory that each row saves; an empty list if one is not known."""
    shares = [share(steps.memory("train", row), steps.memory("train", FLOAT32)) for row in rows]
    return [] if None in shares else [1 - needed for needed in shares]


def sentence(steps: dict[str, Results], device: str) -> str:
    """Return a sentence with the smallest and the largest figures of jaxmp's own models in bfloat16."""
    figures = {name_of(model): relative(of_model, OURS) for model, of_model in steps.items()}
    known = {name: pair for name, pair in figures.items() if pair}
    if not known:
        return f"No train step was compared with torch.compile AMP on {device} yet."
    times, peaks = zip(*known.values(), strict=True)
    return (
        "jaxmp's own models have a GELU, a pooling and a loss in chunks that need less memory. Their step in bfloat16 "
        f"takes {_range(times)} times as long as stock models with torch.compile AMP, and {_range(peaks)} times the "
        f"memory ({', '.join(known)}; {device})."
    )


def saved_when_compiled(steps: dict[str, Results], compiled: list[dict[str, Any]], row: str = OURS) -> dict[str, float]:
    """Return the share of memory that a row saves relative to float32 by hand, by name of the model.

    Both steps are compiled, not run.
    """
    peaks = {result["name"]: result["variants"] for result in compiled if result["full"]}
    return {name_of(model): 1 - peaks[model][row]["peak"] / peaks[model][FLOAT32]["peak"] for model in steps}


def memory_sentence(steps: dict[str, Results], compiled: list[dict[str, Any]], target: str) -> str:
    """Return sentences on the memory that the precision alone saves, and that jaxmp's own models save."""
    by_hand, ours = (saved_when_compiled(steps, compiled, row) for row in (BY_HAND, OURS))
    parts = [", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()) for shares in (by_hand, ours)]
    return (
        f"By hand, bfloat16 saves this share of float32's memory: {parts[0]}. This is the part of the precision. "
        f"jaxmp's own models save {parts[1]}: most of the rest comes from their code (compiled for {target}, not run)."
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
    ours, by_hand = (
        ", ".join(f"{name} {value:.0%}" for name, value in saved_when_compiled(steps, compiled, row).items())
        for row in (OURS, BY_HAND)
    )
    note = (
        f"If float32 is compiled too, without cuDNN's workspaces, the memory saved is {ours}. By hand, bfloat16 saves "
        f"{by_hand}: most of the rest comes from the code of jaxmp's own models."
    )
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
