"""Measure the cost of loss scaling in jaxmp, jmp, flax and optax.

python -m experiments.benchmarks.loss_scaling --models mlp gpt2

A step is forward, backward and AdamW. Steps are warmed up, their state is donated, and the variants take turns. The
cost of scaling is proportional to the number of params. The cost of a step is proportional to params times examples.
The run folder holds loss_scaling.md, .json and .png.
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
from experiments.benchmarks.measure.caches import caches_in
from experiments.benchmarks.measure.turns import Prepared, compared
from experiments.benchmarks.models.mlp import MLP
from experiments.benchmarks.models.workloads import Sizes, workload
from experiments.benchmarks.shared import measurements, records, scaled_steps
from experiments.measure import timing
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table, times
from experiments.training import cli
from experiments.training.environment import environment

REFERENCE = "no scaling"
VARIANTS = {
    REFERENCE: scaled_steps.no_scaling,
    "no scaling, again": scaled_steps.no_scaling,
    "constant scale": scaled_steps.with_constant_scale,
    "jaxmp.loss_scaling": scaled_steps.with_jaxmp,
    "jaxmp, updates checked too": functools.partial(scaled_steps.with_jaxmp, check_updates=True),
    "jmp.DynamicLossScale": scaled_steps.with_jmp,
    "flax DynamicScale": scaled_steps.with_flax,
    "optax.apply_if_finite (no scale)": scaled_steps.with_optax,
}
SIZES = {
    "mlp": (Sizes(8192, 0, 8, 4096), Sizes(8192, 0, 3, 512)),
    "gpt2": (Sizes(16, 1024, vocabulary=50304), Sizes(8, 512, 2, 128, 1024)),
}
"""The sizes on a GPU, and on other devices."""
COLUMNS = ("step", "ms", "quartiles", "ratio", "quartiles of the ratio", "adds", "adds ms")
INTRO = (
    "A ratio is the time of a step divided by the time without scaling in the same round. The median over the rounds "
    "is shown. `no scaling, again` is the step without scaling, compiled a second time. The scale of `constant scale` "
    "never changes, and nothing is checked."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Sized, records.Pieces):
    """Flags of the benchmark."""

    models: tuple[Literal["mlp", "gpt2"], ...] = ("mlp", "gpt2")
    """Models to time."""
    policy: str = "mixed_float16"
    """Policy of the models. The params are float32."""


def build(name: str, config: Config) -> tuple[Any, Any, str]:
    """Return a model under the policy, a random batch, and their description.

    Raises:
      ValueError: ``--width`` is not a valid width of GPT-2.
    """
    sizes = config.sizes(*SIZES[name])
    layers, shape = f"{name}, {sizes.layers} layers of {sizes.width}", f"batch {sizes.batch_size}"
    if name == "mlp":
        model: Any = MLP(sizes.layers, sizes.width)
        rng = np.random.default_rng(0)
        inputs = rng.standard_normal((sizes.batch_size, sizes.width), np.float32)
        batch = {"inputs": inputs, "labels": rng.integers(0, model.classes, sizes.batch_size, np.int32)}
        text = f"{layers}, {shape}"
    else:
        case = workload(name, sizes)
        model, batch = case.model, case.random_batch()
        text = f"{layers}, {sizes.vocabulary} tokens, {shape}×{sizes.length}"
    return jaxmp.linen.apply_policy(model, config.policy), jax.device_put(batch), text


def measure(name: str, config: Config, progress: Progress) -> dict[str, Any]:
    """Time every variant of a model's step.

    Raises:
      FloatingPointError: the step without scaling failed, so there is nothing to compare with.
    """
    model, batch, text = build(name, config)

    def loss_fn(params: Any, model_state: None, batch: Any, rng: None) -> tuple[jax.Array, None]:
        logits = model.apply({"params": params}, batch["inputs"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), model_state

    def init(key: jax.Array) -> tuple[Any, None]:
        return model.init(key, batch["inputs"])["params"], None

    def ready(variant: Any) -> Prepared:
        start, step = variant(loss_fn, optax.adamw(scaled_steps.LEARNING_RATE), init)
        state = start()
        compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        if variant is scaled_steps.with_constant_scale:
            state = scaled_steps.settled(start, compiled, batch)
        turn = timing.turn(compiled, state, batch)
        return Prepared(turn, lambda: float(turn()[1]))

    make = {label: functools.partial(ready, variant) for label, variant in VARIANTS.items()}
    rows = compared(make, config.rounds, config.block_ms, functools.partial(progress.advance, title=name))
    if why := rows[REFERENCE].get("error"):
        raise FloatingPointError(f"{REFERENCE}, which all variants are compared with: {why}")
    return {"model": text, "policy": str(jaxmp.get_policy(config.policy)), "variants": rows}


def table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each variant."""
    rows = []
    for label, row in result["variants"].items():
        if "error" in row:
            rows.append((label, row["error"]))
            continue
        ms, ratio = row["ms"][1], row["ratio"][1]
        rows.append((label, *times(row), f"{100 * (ratio - 1):+.2f} %", f"{ms * (ratio - 1) / ratio:+.3f}"))
    return Table(f"{result['model']}: ms a step", COLUMNS, rows)


def picture(result: dict[str, Any]) -> plots.Panel:
    """Draw each variant's cost in percent of a step without scaling."""
    rows = {name: row["ratio"] for name, row in result["variants"].items() if name != REFERENCE and "ratio" in row}
    dots = {label: tuple(100 * (ratio - 1) for ratio in ratios) for label, ratios in rows.items()}
    return plots.Panel(
        result["model"].split(", batch")[0], f"% added to {REFERENCE}", dots={"": dots}, line=(0, ""), form="+.2f"
    )


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        records.check(config, rounds=2)
        where = environment(("jmp",))
        texts = {name: build(name, config)[2] for name in config.models}
        folder = records.folder_of("loss_scaling", config, rounds=2)
        flags = {name: getattr(config, name) for name in ("policy", "rounds", "block_ms")}
        saved = measurements.Measurements(folder, config.minutes, where, **flags)
        for name, text in texts.items():
            saved.require_alike(f"measured-{name}.json", model=text)
    # The same command finds the compiled programs when it continues.
    cache = caches_in(folder.absolute() / "cache") if config.minutes else contextlib.nullcontext()
    with cache, Progress("loss scaling", len(texts) * config.rounds) as progress:
        measured = [
            saved.get(f"measured-{name}", functools.partial(measure, name, config, progress), model=text)
            for name, text in texts.items()
        ]
    if results := [record for record in measured if record]:
        where = {**measurements.joined(saved.environments), "policy": results[0]["policy"]}
        tables, panels = [*map(table, results)], [[*map(picture, results)]]
        title = "What loss scaling adds to a train step"
        records.record(folder, "loss_scaling", title, where, tables, {"results": results}, [INTRO], "ratios", panels)
    saved.end()
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
