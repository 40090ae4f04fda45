"""What an instrumented step costs beside a plain one: jaxmp.inspect.numerics on GPT-2.

python -m experiments.benchmarks.numerics --batch 2 --context 256

Both are compiled before, then run in turn; a ratio is one round's time over the same round's time of the plain step,
and the median counts. The plain step is that of `make_train_step` with AdamW; the instrumented one has records of
weights, activations, gradients and updates, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxmp
from experiments.measure.environment import environment
from experiments.models import GPT2
from jaxmp import inspect


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
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
    run_dir: Path | None = None
    """Folder for numerics.json."""


def measure(config: Config) -> dict[str, Any]:
    """Seconds of each step by round, of the wall clock and of all cores."""
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

    def timed(run: Callable[[], Any]) -> tuple[float, float]:
        wall, cores = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - wall, time.process_time() - cores

    plain()
    found = watched()
    rounds = [(timed(plain), timed(watched)) for _ in range(config.rounds)]
    ratios = {
        name: float(np.median([watched[n] / plain[n] for plain, watched in rounds]))
        for n, name in enumerate(("wall", "cores"))
    }
    tensors = sum(len(getattr(found, kind)) for kind in ("weights", "activations", "gradients", "updates"))
    return {
        "config": {name: str(value) for name, value in dataclasses.asdict(config).items()},
        "seconds (wall, cores) of a plain and an instrumented step": rounds,
        "ratio": ratios,
        "tensors": tensors + len(found.activation_gradients),
        "environment": environment(),
    }


if __name__ == "__main__":
    config = tyro.cli(Config, description=__doc__)
    text = json.dumps(measure(config), indent=2, default=str)
    print(text)
    if config.run_dir:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "numerics.json").write_text(text + "\n")
