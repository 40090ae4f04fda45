"""What loss scaling adds to a train step: jaxmp, jmp, flax and optax, in one process, in turn.

python -m experiments.benchmarks.loss_scaling --models mlp gpt2

The times are of whole steps (forward, backward, AdamW), warm, each turn waited for, every state donated. In every
round each variant has its turn; a ratio is one round's time over the same round's time without scaling, and the median
over the rounds counts, so that what drifts cancels. `no scaling, again` is the same step compiled once more: its ratio
is what noise looks like here. What scaling costs goes with the params, what a step costs with params times examples:
with fewer examples a step (--batch-size) the same cost is a larger share. What was measured of a model stays in the
run folder: --minutes 8 starts nothing new after eight minutes, and the same command goes on from there. The run folder
holds loss_scaling.md, .json and .png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import tyro

import jaxmp
from experiments.benchmarks.shared import kept, scaled_steps
from experiments.benchmarks.train_step.measure import caches_in
from experiments.benchmarks.train_step.rows import peers
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.models import GPT2, MLP
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

REFERENCE = "no scaling"
VARIANTS = {
    REFERENCE: scaled_steps.no_scaling,
    "no scaling, again": scaled_steps.no_scaling,
    "jaxmp.loss_scaling": scaled_steps.with_jaxmp,
    "jaxmp, updates checked too": functools.partial(scaled_steps.with_jaxmp, check_updates=True),
    "jmp.DynamicLossScale": scaled_steps.with_jmp,
    "flax DynamicScale": scaled_steps.with_flax,
    "optax.apply_if_finite (no scale)": scaled_steps.with_optax,
}
COLUMNS = ("step", "ms", "quartiles", "ratio", "quartiles of the ratio", "adds", "adds ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark. Sizes of 0 suit the device: GPT-2's 124M at 16×1024 on a GPU, small on a CPU."""

    models: tuple[Literal["mlp", "gpt2"], ...] = ("mlp", "gpt2")
    """Models to time."""
    policy: str = "mixed_float16"
    """Precision of the models; the params are float32."""
    rounds: int = 30
    """Rounds of timing."""
    block_ms: float = 200.0
    """How long a turn should take, in milliseconds."""
    batch_size: int = 0
    """Examples a step; 0 for 16 (gpt2) and 8192 (mlp) on a GPU, 8 and 8192 elsewhere."""
    sequence: int = 0
    """gpt2: tokens a sequence; 0 for 1024 on a GPU, 512 elsewhere."""
    layers: int = 0
    """Layers; 0 for 12 (gpt2) and 8 (mlp) on a GPU, 2 and 3 elsewhere."""
    width: int = 0
    """Width; 0 for 768 (gpt2) and 4096 (mlp) on a GPU, 128 and 512 elsewhere."""
    vocabulary: int = 0
    """gpt2: tokens; 0 for 50304 on a GPU, 1024 elsewhere."""
    hlo: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write each step's optimised HLO."""
    minutes: float = 0.0
    """Start nothing new after so many minutes; the same command goes on from there. 0 is no limit."""
    run_dir: cli.Folder = None
    """Folder to write to, and to go on from. (default: runs/loss_scaling-TIME)"""


def build(name: str, config: Config) -> tuple[Any, Any, str]:
    """A model under the policy, a batch of random data, and both in words."""
    gpu = jax.default_backend() == "gpu"

    def size(flag: str, on_gpu: int, elsewhere: int) -> int:
        return getattr(config, flag) or (on_gpu if gpu else elsewhere)

    rng = np.random.default_rng(0)
    if name == "mlp":
        batch_size, layers, width = size("batch_size", 8192, 8192), size("layers", 8, 3), size("width", 4096, 512)
        model: Any = MLP(layers, width)
        inputs: Any = jnp.asarray(rng.standard_normal((batch_size, width)), jnp.float32)
        labels = jnp.asarray(rng.integers(0, model.classes, batch_size), jnp.int32)
        text = f"mlp, {layers} layers of {width}, batch {batch_size}"
    else:
        batch_size, sequence = size("batch_size", 16, 8), size("sequence", 1024, 512)
        layers, width, vocabulary = size("layers", 12, 2), size("width", 768, 128), size("vocabulary", 50304, 1024)
        if width % 64:
            raise ValueError(f"--width must be a multiple of 64, the width of GPT-2's heads, got {width}")
        model = GPT2(vocabulary, sequence, layers, width // 64, width)
        tokens = jnp.asarray(rng.integers(0, vocabulary, (batch_size, sequence + 1)), jnp.int32)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        text = f"gpt2, {layers} layers of {width}, {vocabulary} tokens, batch {batch_size}×{sequence}"
    return jaxmp.linen.apply_policy(model, config.policy), {"inputs": inputs, "labels": labels}, text


def measure(name: str, config: Config, progress: Progress, folder: Path, clock: kept.Clock) -> dict[str, Any] | None:
    """Times every variant of one model's step; None if the time was up before all were compiled."""
    model, batch, text = build(name, config)

    def loss_fn(params: Any, model_state: None, batch: Any, rng: None) -> tuple[jax.Array, None]:
        logits = model.apply({"params": params}, batch["inputs"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), model_state

    def init(key: jax.Array) -> tuple[Any, None]:
        return model.init(key, batch["inputs"])["params"], None

    turns = {}
    for label, variant in VARIANTS.items():
        if label.startswith("jmp") and "jmp" not in peers():
            continue
        if clock.late():
            return None
        progress.advance(0, f"compiling {label}", name)
        start, step = variant(loss_fn, optax.adamw(3e-4), init)
        state = start()
        compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        if config.hlo:
            text_file = folder / f"{name}-{label.split(' (')[0].replace(' ', '_')}.hlo.txt"
            text_file.write_text(compiled.as_text())
        turns[label] = timing.turn(compiled, state, batch)
    times = timing.interleaved(
        turns,
        config.rounds,
        config.block_ms,
        lambda round_: progress.advance(int(round_ >= 0), "timing, in turn", name),
    )
    losses = {label: float(turn()[1]) for label, turn in turns.items()}
    if bad := [label for label, loss in losses.items() if not np.isfinite(loss)]:
        raise FloatingPointError(f"{', '.join(bad)} ended with a loss that is not finite: the times mean nothing")
    rows = {}
    for label, own in times.items():
        ratios = [a / b for a, b in zip(own, times[REFERENCE], strict=True)]
        rows[label] = {"milliseconds": own, "ms": timing.quartiles(own), "ratio": timing.quartiles(ratios)}
    return {"model": text, "policy": str(jaxmp.get_policy(config.policy)), "variants": rows, "losses": losses}


def table(result: dict[str, Any]) -> Table:
    """A row a variant."""
    rows = []
    for label, row in result["variants"].items():
        (low, ms, high), (ratio_low, ratio, ratio_high) = row["ms"], row["ratio"]
        reference = label == REFERENCE
        rows.append(
            (
                label,
                f"{ms:.4g}",
                f"{low:.4g} to {high:.4g}",
                f"{ratio:.4f}",
                "" if reference else f"{ratio_low:.4f} to {ratio_high:.4f}",
                "" if reference else f"{100 * (ratio - 1):+.2f} %",
                "" if reference else f"{ms * (ratio - 1) / ratio:+.3f}",
            )
        )
    return Table(f"{result['model']}: ms a step", COLUMNS, rows)


@plots.drawn
def picture(results: list[dict[str, Any]], path: Path, caption: str) -> None:
    """A panel a model: what each variant adds to a step without scaling, in percent, with the rounds' quartiles."""
    figure = plots.figure(4.2 + 3.4 * len(results), 2.9)
    for i, (axes, result) in enumerate(zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True)):
        variants = {label: row for label, row in result["variants"].items() if label != REFERENCE}
        plots.style(axes, result["model"].split(", batch")[0], f"% added to {REFERENCE}")
        axes.axvline(0, color=plots.GREY, linewidth=1)
        for y, row in enumerate(variants.values()):
            low, middle, high = (100 * (ratio - 1) for ratio in row["ratio"])
            axes.plot([low, high], [y, y], color=plots.color(y), linewidth=3, alpha=0.4, solid_capstyle="round")
            axes.plot([middle], [y], "o", color=plots.color(y), markersize=8)
            axes.annotate(f"{middle:+.2f}", (middle, y), (0, 8), textcoords="offset points", ha="center", fontsize=9)
        plots.row_axis(axes, list(variants), named=i == 0, above=0.8, below=0.5)
        axes.margins(x=0.1)
    plots.save(figure, path, caption)


def settings(config: Config, where: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By model, what its figures in one folder have in common."""
    flags = {name: getattr(config, name) for name in ("policy", "rounds", "block_ms")}
    place = {name: where[name] for name in ("device", "versions")}
    return {name: {"model": build(name, config)[2], **flags, **place} for name in config.models}


def main(config: Config) -> list[dict[str, Any]]:
    clock = kept.Clock(config.minutes)
    with cli.bad_values_end_it():
        cli.require("--minutes", config.minutes, 0)
        cli.require("--rounds", config.rounds, 2)
        cli.require("--block-ms", config.block_ms, 0.1)
        for flag in ("batch_size", "sequence", "layers", "width", "vocabulary"):
            cli.require(f"--{flag.replace('_', '-')}", getattr(config, flag), 0)
        where = environment(tuple(name for name in peers() if name == "jmp"))
        setting = settings(config, where)
        folder = run_folder("loss_scaling", config.run_dir)
        files = {name: folder / f"measured-{name}.json" for name in setting}
        for name, file in files.items():
            if file.exists():
                kept.require_alike(file, setting[name])
    # What was compiled is there when the same command goes on.
    cache = caches_in(folder.absolute() / "cache") if config.minutes else contextlib.nullcontext()
    with cache, Progress("loss scaling", len(files) * config.rounds) as progress:
        for name, file in files.items():
            if not file.exists() and (found := measure(name, config, progress, folder, clock)):
                write_json(file, {"setting": setting[name], "environment": where, **found})
    found = [kept.read(file) for file in files.values() if file.exists()]
    results = [{key: each[key] for key in ("model", "policy", "variants", "losses")} for each in found]
    if found:
        report(folder, kept.joined([each["environment"] for each in found]), results)
    if clock.unfinished:
        print(kept.UNFINISHED)
    return results


def report(folder: Path, where: dict[str, str], results: list[dict[str, Any]]) -> None:
    """Writes and shows the tables, and draws the picture."""
    tables = [table(result) for result in results]
    facts = [f"- {name}: {value}" for name, value in {**where, "policy": results[0]["policy"]}.items()]
    intro = (
        "A ratio is a round's time over the same round's time without scaling, median over the rounds. "
        "`no scaling, again` is the same step compiled once more."
    )
    lines = ["# What loss scaling adds to a train step", "", *facts, "", intro, "", "![ratios](loss_scaling.png)", ""]
    (folder / "loss_scaling.md").write_text("\n".join([*lines, *(each.markdown() for each in tables)]))
    write_json(folder / "loss_scaling.json", {"environment": where, "results": results})
    picture(results, folder / "loss_scaling.png", f"{where['device']}, {where['date'][:10]}")
    console = rich.console.Console()
    for each in tables:
        each.show(console if console.is_terminal else rich.console.Console(width=120))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
