"""What an instrumented step costs beside a plain one: jaxmp.inspect.numerics on GPT-2.

python -m experiments.benchmarks.numerics --batch 2 --context 256

Both are compiled before, then run in turn; a ratio is one round's time over the same round's time of the plain step,
and the median counts. The plain step is that of `make_train_step` with AdamW; the instrumented one has records of
weights, activations, gradients and updates, and changes nothing. The run folder holds numerics.md and numerics.json.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from experiments.benchmarks.shared import records
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.models import GPT2
from experiments.report.tables import Table, spread
from experiments.training import cli
from experiments.training.runs import run_folder
from jaxmp import inspect

COLUMNS = ("GPT-2", "tensors", "plain ms", "instrumented ms", "ratio", "quartiles")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Config):
    """Flags of the benchmark."""

    layers: int = 12
    """Blocks of GPT-2; 12 of width 768 are its small one."""
    width: int = 768
    """Of the residual stream; heads are 64 wide."""
    vocabulary: int = 50257
    """Tokens."""
    batch: int = 2
    """Sequences."""
    context: int = 256
    """Tokens in each."""
    policy: str = "float32"
    """Of autocast."""
    rounds: int = 3
    """Rounds of timing."""


def measure(config: Config) -> dict[str, Any]:
    """Milliseconds of each step by round, and how many tensors have records."""
    model = GPT2(config.vocabulary, config.context, config.layers, max(1, config.width // 64), config.width)
    shape = (config.batch, config.context + 1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocabulary, shape), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])["params"]

    def loss_fn(params: Any, model_state: Any, tokens: Any, rng: Any) -> Any:
        return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method="loss"), model_state

    tx = optax.adamw(1e-4)
    step = jaxmp.make_train_step(loss_fn, policy=config.policy)
    state = jaxmp.TrainState.create(params=params, tx=tx)
    instrumented = inspect.numerics(loss_fn, policy=config.policy, tx=state.tx)

    def plain() -> None:
        nonlocal state
        state, metrics = step(state, tokens)
        jax.block_until_ready((state, metrics))

    def watched() -> Any:
        return instrumented(state.params, None, tokens, None, opt_state=state.opt_state)

    def timed(run: Callable[[], Any]) -> float:
        started = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - started)

    plain()
    found = watched()
    times: dict[str, list[float]] = {"plain": [], "instrumented": []}
    for _ in range(config.rounds):
        times["plain"].append(timed(plain))
        times["instrumented"].append(timed(watched))
    tensors = sum(len(getattr(found, kind)) for kind in KINDS)
    return {"tensors": tensors, "steps": timing.against(times, "plain")}


KINDS = ("weights", "activations", "activation_gradients", "gradients", "updates")


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        records.check(config, layers=1, width=64, vocabulary=2, batch=1, context=1)
        folder = run_folder("numerics", config.run_dir)
    result = measure(config)
    plain, own = result["steps"]["plain"], result["steps"]["instrumented"]
    label = f"{config.layers} layers of {config.width}, {config.batch}×{config.context} tokens, {config.policy}"
    ms = (f"{row['ms'][1]:.1f}" for row in (plain, own))
    row = (label, str(result["tensors"]), *ms, f"{own['ratio'][1]:.2f}", spread(own["ratio"], ".2f"))
    tables = [Table("An instrumented step", COLUMNS, [row])]
    data = {"config": {name: str(value) for name, value in dataclasses.asdict(config).items()}, **result}
    records.record(folder, "numerics", "What an instrumented step costs", environment(), tables, data)
    return result


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
