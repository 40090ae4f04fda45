"""A training step under autocast against the same step with half precision placed by hand, and against float32.

python -m experiments.benchmarks.autocast --models gpt2 lstm

The models of benchmarks.by_hand three ways, in one process, in turn: float32 throughout, as code that nobody prepared
for half precision; with dtypes placed by hand; and the float32 code under `jaxmp.autocast`. A step is loss, gradients
and AdamW, warm, each turn waited for, every state donated. In every round each variant has its turn; a ratio is one
round's time over the same round's time by hand, and the median over the rounds counts, so that what drifts cancels.
`by hand, again` is the same step compiled once more: its ratio is what noise looks like here. Memory is what the
compiled step needs, and on a GPU the device's peak, each variant in a process of its own. The programs are compared
too: products by dtype and casts, as JAX hands them to XLA and as XLA compiles them (its CPU compiler multiplies in
float32 what is bfloat16, so there the first is what counts). Goals: at most 1 % more time and 2 % more memory than by
hand. The run folder holds autocast.md and autocast.json.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import rich.console
import tyro

import jaxmp
from experiments.benchmarks.shared import by_hand, hlo, scaled_steps
from experiments.benchmarks.shared.workloads import FULL, Sizes, Workload, workload
from experiments.measure import memory, timing
from experiments.measure.environment import environment
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

BY_HAND, AUTOCAST = "by hand", "autocast"
VARIANTS = ("float32", BY_HAND, "by hand, again", AUTOCAST)
TIME_GOAL, MEMORY_GOAL = 1.01, 1.02
COLUMNS = (
    "step",
    "ms",
    "quartiles",
    "time ratio",
    "quartiles of the ratio",
    "compiled MiB",
    "memory ratio",
    "peak MiB",
)
PROGRAM_COLUMNS = ("program", "products by operand dtypes", "casts", "round trips")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark. Sizes of 0 suit the device: GPT-2's 124M at 16×1024 on a GPU, small on a CPU."""

    models: tuple[Literal["gpt2", "bert", "resnet", "lstm"], ...] = ("gpt2", "bert", "resnet", "lstm")
    """Models to time."""
    policy: Literal["mixed_bfloat16", "mixed_float16"] = "mixed_bfloat16"
    """The half precision, by hand and of autocast."""
    rounds: int = 20
    """Rounds of timing; 0 compares the programs only."""
    block_ms: float = 200.0
    """How long a turn should take, in milliseconds."""
    batch_size: int = 0
    """Examples a step; 0 for 16 (gpt2) and 64 (the others) on a GPU, 2 elsewhere."""
    sequence: int = 0
    """Tokens a sequence; 0 for 1024 (gpt2), 512 (bert) and 256 (lstm) on a GPU, 64 elsewhere."""
    layers: int = 0
    """Layers, of a small ResNet blocks a stage; 0 for 12 on a GPU, 2 elsewhere."""
    width: int = 0
    """Width of the transformers and the LSTM; 0 for 768 on a GPU, 64 elsewhere."""
    vocabulary: int = 0
    """Tokens there are; 0 for 50304 on a GPU, 512 elsewhere."""
    image: int = 0
    """Height and width of an image; from 128 on it is a ResNet-50; 0 for 224 on a GPU, 32 elsewhere."""
    hlo: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write each step's HLO, lowered and optimised."""
    peak_of: Literal["", "float32", "by hand", "autocast"] = ""
    """Print the device's peak memory, in bytes, of one variant of one model, and end: what a GPU's peaks come from."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/autocast-TIME)"""


def case_of(name: str, config: Config) -> Workload:
    """A model in the sizes of the flags."""
    gpu = jax.default_backend() == "gpu"
    batch_size = config.batch_size or ((16 if name == "gpt2" else 64) if gpu else 2)
    layers = config.layers or (12 if gpu else 2)
    if name == "resnet":
        image = config.image or (224 if gpu else 32)
        large = dataclasses.replace(FULL["resnet50"], batch_size=batch_size, length=image)
        return workload("resnet50", large if image >= 128 else Sizes(batch_size, image, layers, 16, 10))
    sequence = config.sequence or ({"gpt2": 1024, "bert": 512, "lstm": 256}[name] if gpu else 64)
    width, vocabulary = config.width or (768 if gpu else 64), config.vocabulary or (50304 if gpu else 512)
    return workload(name, Sizes(batch_size, sequence, layers, width, vocabulary))


def step_of(case: Workload, variant: str, policy: str) -> tuple[Any, Any]:
    """``start() -> state`` and ``step(state, batch) -> (state, loss)`` of a variant, jitted; the state is donated."""
    model = by_hand.build(case, jaxmp.get_policy(policy).compute_dtype if variant.startswith(BY_HAND) else None)
    loss_fn = by_hand.loss_fn_of(model)
    if variant == AUTOCAST:
        loss_fn = jaxmp.autocast(loss_fn, policy)
    start, step = scaled_steps.no_scaling(loss_fn, optax.adamw(3e-4), functools.partial(by_hand.init, case, model))
    return start, jax.jit(step, donate_argnums=0)


def compile_step(case: Workload, variant: str, policy: str) -> tuple[Any, Any, Any]:
    """A variant's ``init``, its step as it was lowered, and compiled."""
    init, step = step_of(case, variant, policy)
    lowered = step.lower(jax.eval_shape(init), case.batch)
    return init, lowered, lowered.compile()


def programs_of(lowered: Any, compiled: Any) -> dict[str, dict[str, Any]]:
    """Products, casts and casts that undo one another, in a step as it was lowered and as it was compiled."""
    texts = {"lowered": lowered.as_text("hlo"), "compiled": compiled.as_text()}
    programs = {stage: hlo.Program(text) for stage, text in texts.items()}
    return {
        stage: {"products": program.products(), "casts": program.converts(), "round_trips": program.round_trips()}
        for stage, program in programs.items()
    }


def differences(by_hand: dict[str, dict[str, Any]], autocast: dict[str, dict[str, Any]]) -> list[str]:
    """Where autocast's programs fall behind those by hand, in words; empty if nowhere."""
    found = []
    # A CPU's compiler puts casts of its own around what it cannot do in half precision.
    for stage in by_hand if jax.default_backend() != "cpu" else ("lowered",):
        hand, auto = by_hand[stage], autocast[stage]
        found += [
            f"{stage}: {auto['products'][name]} products {name}, by hand {hand['products'][name]}"
            for name in sorted({*hand["products"], *auto["products"]})
            if hand["products"][name] != auto["products"][name]
        ]
        if auto["round_trips"] > hand["round_trips"]:
            found.append(f"{stage}: {auto['round_trips']} casts undo the cast before, by hand {hand['round_trips']}")
    return found


def measure(name: str, config: Config, progress: Progress, folder: Path) -> dict[str, Any]:
    """Compiles and times every variant of one model's step."""
    case = case_of(name, config)
    batch = jax.device_put(case.random_batch()) if config.rounds else None
    turns, rows, programs = {}, {}, {}
    for variant in VARIANTS:
        progress.advance(0, f"compiling {variant}", name)
        init, lowered, compiled = compile_step(case, variant, config.policy)
        programs[variant] = programs_of(lowered, compiled)
        rows[variant] = {"bytes": memory.of_compiled(compiled)}
        if config.hlo:
            stem = folder / f"{name}-{variant.replace(', ', '_').replace(' ', '_')}"
            stem.with_suffix(".lowered.txt").write_text(lowered.as_text("hlo"))
            stem.with_suffix(".hlo.txt").write_text(compiled.as_text())
        if config.rounds:
            turns[variant] = timing.turn(compiled, init(), batch)
    text = f"{case.text}, {case.sizes.vocabulary} {'classes' if case.unit == 'images' else 'tokens'}"
    result = {"model": text, "policy": str(jaxmp.get_policy(config.policy)), "programs": programs}
    result["differences"] = differences(programs[BY_HAND], programs[AUTOCAST])
    if config.rounds:
        times = timing.interleaved(
            turns,
            config.rounds,
            config.block_ms,
            lambda round_: progress.advance(int(round_ >= 0), "timing, in turn", name),
        )
        result["losses"] = {variant: float(turn()[1]) for variant, turn in turns.items()}
        if bad := [variant for variant, loss in result["losses"].items() if not np.isfinite(loss)]:
            raise FloatingPointError(f"{', '.join(bad)} ended with a loss that is not finite: the times mean nothing")
        for variant, own in times.items():
            ratios = [a / b for a, b in zip(own, times[BY_HAND], strict=True)]
            rows[variant] |= {"milliseconds": own, "ms": timing.quartiles(own), "ratio": timing.quartiles(ratios)}
    turns.clear()
    gc.collect()
    return {**result, "variants": rows}


def peak_in_a_process_of_its_own(name: str, variant: str, config: Config) -> int | None:
    """The device's peak memory over a few steps, where it counts: a process's peak never falls."""
    flags = ["--models", name, "--policy", config.policy, "--peak-of", variant]
    for field in ("batch_size", "sequence", "layers", "width", "vocabulary", "image"):
        flags += [f"--{field.replace('_', '-')}", str(getattr(config, field))]
    command = [sys.executable, "-m", "experiments.benchmarks.autocast", *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    last = done.stdout.split()[-1]
    return None if last == "None" else int(last)


def print_peak(config: Config) -> None:
    """What :func:`peak_in_a_process_of_its_own` reads."""
    (name,) = config.models
    case = case_of(name, config)
    init, step = step_of(case, config.peak_of, config.policy)
    state, batch = init(), jax.device_put(case.random_batch())
    for _ in range(3):
        state, loss = step(state, batch)
    jax.block_until_ready(loss)
    print(memory.device_peak())


def table(result: dict[str, Any]) -> Table:
    """A row a variant, and the goals."""
    rows, variants = [], result["variants"]
    for variant, row in variants.items():
        cells = [variant, "", "", "", "", "", "", ""]
        if "ms" in row:
            (low, ms, high), (ratio_low, ratio, ratio_high) = row["ms"], row["ratio"]
            cells[1:4] = [f"{ms:.4g}", f"{low:.4g} to {high:.4g}", f"{ratio:.4f}"]
            cells[4] = "" if variant == BY_HAND else f"{ratio_low:.4f} to {ratio_high:.4f}"
        if row["bytes"] is not None:
            cells[5:7] = [f"{row['bytes'] / 2**20:.1f}", f"{row['bytes'] / variants[BY_HAND]['bytes']:.4f}"]
        if row.get("peak") is not None:
            cells[7] = f"{row['peak'] / 2**20:.1f}"
        rows.append(tuple(cells))
    return Table(f"{result['model']}: a step", COLUMNS, rows, notes=tuple(goals(result)))


def goals(result: dict[str, Any]) -> list[str]:
    """A sentence a goal: met or not."""
    hand, auto = result["variants"][BY_HAND], result["variants"][AUTOCAST]
    ratios: dict[str, tuple[float, float]] = {}
    if "ratio" in auto:
        ratios["time"] = (auto["ratio"][1], TIME_GOAL)
    if auto["bytes"] is not None:
        ratios["memory of the compiled step"] = (auto["bytes"] / hand["bytes"], MEMORY_GOAL)
    if auto.get("peak") is not None:
        ratios["peak memory of the device"] = (auto["peak"] / hand["peak"], MEMORY_GOAL)
    lines = [
        f"{'met' if ratio <= goal else 'NOT MET'}: {name} is {ratio:.4f} of by hand, the goal at most {goal}"
        for name, (ratio, goal) in ratios.items()
    ]
    behind = "; ".join(result["differences"])
    same = "met: the same products in the same dtypes as by hand, and no casts added that undo one another"
    return [*lines, f"NOT MET: the programs differ: {behind}" if behind else same]


def program_table(result: dict[str, Any]) -> Table:
    """A row a program: what it multiplies and what it casts."""
    rows = [
        (f"{variant}, {stage}", _counts(program["products"]), _counts(program["casts"]), str(program["round_trips"]))
        for variant, stages in result["programs"].items()
        for stage, program in stages.items()
        if variant in ("float32", BY_HAND, AUTOCAST)
    ]
    return Table(f"{result['model']}: the programs", PROGRAM_COLUMNS, rows)


def _counts(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def main(config: Config) -> list[dict[str, Any]]:
    # Before JAX meets the GPU: else this process takes most of its memory, and those that measure peaks find none.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with cli.bad_values_end_it():
        cli.require("--block-ms", config.block_ms, 0.1)
        for flag in ("rounds", "batch_size", "sequence", "layers", "width", "vocabulary", "image"):
            cli.require(f"--{flag.replace('_', '-')}", getattr(config, flag), 0)
        for name in config.models:
            case_of(name, config)
        if config.peak_of:
            print_peak(config)
            return []
        folder = run_folder("autocast", config.run_dir)
    where = environment()
    peaks = {}
    if memory.device_peak() is not None:  # first, while this process has next to nothing on the device
        for name in config.models:
            for variant in ("float32", BY_HAND, AUTOCAST):
                peaks[name, variant] = peak_in_a_process_of_its_own(name, variant, config)
    with Progress("autocast", len(config.models) * config.rounds) as progress:
        results = [measure(name, config, progress, folder) for name in config.models]
    for (name, variant), peak in peaks.items():
        results[config.models.index(name)]["variants"][variant]["peak"] = peak
    tables = [make(result) for result in results for make in (table, program_table)]
    facts = [f"- {name}: {value}" for name, value in {**where, "policy": results[0]["policy"]}.items()]
    intro = (
        "A ratio is a round's time over the same round's time by hand, median over the rounds. `by hand, again` is the "
        "same step compiled once more. Memory is arguments, results and temporaries of the compiled step."
    )
    lines = ["# A training step under autocast, by hand and in float32", "", *facts, "", intro, ""]
    (folder / "autocast.md").write_text("\n".join([*lines, *(each.markdown() for each in tables)]))
    write_json(folder / "autocast.json", {"environment": where, "results": results})
    console = rich.console.Console()
    for each in tables:
        each.show(console if console.is_terminal else rich.console.Console(width=160))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
