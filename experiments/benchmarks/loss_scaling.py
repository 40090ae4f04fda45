"""What loss scaling adds to a train step: jaxmp, jmp, flax and optax, in one process, in turn.

python -m experiments.benchmarks.loss_scaling --models mlp gpt2

A step is forward, backward and AdamW, warm, its state donated. What scaling costs goes with the params, what a step
costs with params times examples. The run folder holds loss_scaling.md, .json and .png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from experiments.benchmarks.shared import records, scaled_steps
from experiments.benchmarks.train_step.measure import caches_in
from experiments.benchmarks.train_step.rows import peers
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.models import MLP
from experiments.models.workloads import Sizes, workload
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table, spread
from experiments.training import cli, kept
from experiments.training.runs import run_folder

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
INTRO = (
    "A ratio is a round's time over the same round's time without scaling, median over the rounds. "
    "`no scaling, again` is the same step compiled once more."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed, records.Pieces):
    """Flags of the benchmark. Sizes of 0 suit the device."""

    models: tuple[Literal["mlp", "gpt2"], ...] = ("mlp", "gpt2")
    """Models to time."""
    policy: str = "mixed_float16"
    """Precision of the models; the params are float32."""
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


def build(name: str, config: Config) -> tuple[Any, Any, str]:
    """A model under the policy, a batch of random data, and both in words.

    Raises:
      ValueError: ``--width`` is none that GPT-2 can have.
    """
    gpu = jax.default_backend() == "gpu"

    def size(flag: str, on_gpu: int, elsewhere: int) -> int:
        return getattr(config, flag) or (on_gpu if gpu else elsewhere)

    if name == "mlp":
        batch_size, layers, width = size("batch_size", 8192, 8192), size("layers", 8, 3), size("width", 4096, 512)
        model: Any = MLP(layers, width)
        rng = np.random.default_rng(0)
        inputs = jnp.asarray(rng.standard_normal((batch_size, width)), jnp.float32)
        batch = {"inputs": inputs, "labels": jnp.asarray(rng.integers(0, model.classes, batch_size), jnp.int32)}
        text = f"mlp, {layers} layers of {width}, batch {batch_size}"
    else:
        batch_size, sequence = size("batch_size", 16, 8), size("sequence", 1024, 512)
        layers, width, vocabulary = size("layers", 12, 2), size("width", 768, 128), size("vocabulary", 50304, 1024)
        case = workload("gpt2", Sizes(batch_size, sequence, layers, width, vocabulary))
        model, batch = case.model, jax.device_put(case.random_batch())
        text = f"gpt2, {layers} layers of {width}, {vocabulary} tokens, batch {batch_size}×{sequence}"
    return jaxmp.linen.apply_policy(model, config.policy), batch, text


def measure(name: str, config: Config, progress: Progress, clock: kept.Clock) -> dict[str, Any] | None:
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
        turns[label] = timing.turn(jax.jit(step, donate_argnums=0).lower(state, batch).compile(), state, batch)
    times = timing.interleaved(
        turns, config.rounds, config.block_ms, lambda i: progress.advance(int(i >= 0), "timing, in turn", name)
    )
    losses = {label: float(turn()[1]) for label, turn in turns.items()}
    if bad := [label for label, loss in losses.items() if not np.isfinite(loss)]:
        raise FloatingPointError(f"{', '.join(bad)} ended with a loss that is not finite: the times mean nothing")
    policy = str(jaxmp.get_policy(config.policy))
    return {"model": text, "policy": policy, "variants": timing.against(times, REFERENCE), "losses": losses}


def table(result: dict[str, Any]) -> Table:
    """A row a variant."""
    rows = []
    for label, row in result["variants"].items():
        ms, ratio = row["ms"][1], row["ratio"][1]
        added = (spread(row["ratio"], ".4f"), f"{100 * (ratio - 1):+.2f} %", f"{ms * (ratio - 1) / ratio:+.3f}")
        cells = (label, f"{ms:.4g}", spread(row["ms"], ".4g"), f"{ratio:.4f}")
        rows.append((*cells, *(("",) * 3 if label == REFERENCE else added)))
    return Table(f"{result['model']}: ms a step", COLUMNS, rows)


def picture(result: dict[str, Any]) -> plots.Panel:
    """What each variant adds to a step without scaling, in percent, with the rounds' quartiles."""
    rows = {label: row["ratio"] for label, row in result["variants"].items() if label != REFERENCE}
    dots = {label: tuple(100 * (ratio - 1) for ratio in ratios) for label, ratios in rows.items()}
    return plots.Panel(
        result["model"].split(", batch")[0], f"% added to {REFERENCE}", dots={"": dots}, line=(0, ""), form="+.2f"
    )


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        records.check(config, rounds=2)
        where = environment(tuple(name for name in peers() if name == "jmp"))
        texts = {name: build(name, config)[2] for name in config.models}
        folder = run_folder("loss_scaling", config.run_dir)
        flags = {name: getattr(config, name) for name in ("policy", "rounds", "block_ms")}
        has = kept.Kept(folder, config.minutes, where, **flags)
        for name, text in texts.items():
            has.require_alike(f"measured-{name}.json", model=text)
    # What was compiled is there when the same command goes on.
    cache = caches_in(folder.absolute() / "cache") if config.minutes else contextlib.nullcontext()
    with cache, Progress("loss scaling", len(texts) * config.rounds) as progress:
        found = [
            has.get(f"measured-{name}", functools.partial(measure, name, config, progress, has.clock), model=text)
            for name, text in texts.items()
        ]
    results = [{key: each[key] for key in ("model", "policy", "variants", "losses")} for each in found if each]
    if results:
        joined = kept.joined(has.environments)
        plots.panels(
            [[*map(picture, results)]], folder / "loss_scaling.png", f"{joined['device']}, {joined['date'][:10]}"
        )
        where = {**joined, "policy": results[0]["policy"]}
        title = "What loss scaling adds to a train step"
        tables = [table(result) for result in results]
        records.record(folder, "loss_scaling", title, where, tables, {"results": results}, [INTRO], "ratios")
    has.end()
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
