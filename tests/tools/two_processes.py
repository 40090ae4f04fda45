"""Train as one of two processes, and write results to a JSON file.

tests/test_processes.py runs this script.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    + ["--xla_force_host_platform_device_count=2"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import sharding
from jaxmp.sharding import Sharding


def main(coordinator: str, process: int, lag: float, output: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process)
    mesh = jax.make_mesh((4,), ("fsdp",))
    rows = NamedSharding(mesh, P("fsdp"))

    def spread(array: np.ndarray, sharding: NamedSharding = rows) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("a", "b")}
    specs, tx = {"a": P("fsdp"), "b": P("fsdp")}, jaxmp.loss_scaling(optax.adam(1e-2), jaxmp.DynamicLossScale(2.0**8))

    def loss_fn(params, model_state, batch, rng):
        gathered = sharding.gather(params, specs, "float16")
        hidden = jnp.tanh((batch.astype("float16") @ gathered["a"]).astype("float32"))
        return jnp.mean((hidden.astype("float16") @ gathered["b"]).astype("float32") ** 2), model_state

    good, bad = rng.normal(size=(8, 16)).astype(np.float32), np.full((8, 16), np.inf, np.float32)
    one_bad = good.copy()
    one_bad[-1, 0] = np.inf  # this row belongs to the second process
    results: dict[str, object] = {"process": process}
    with jax.set_mesh(mesh):
        params = {name: spread(array) for name, array in weights.items()}
        state = jaxmp.TrainState.create(params=params, tx=tx, rng=0)
        results["home"] = len({str(leaf.sharding.mesh) for leaf in jax.tree.leaves(state)})
        created_state = jaxmp.TrainState.create_sharded(
            lambda: jax.tree.map(jnp.asarray, weights), tx, Sharding(mesh, specs), rng=0
        )
        step = jaxmp.make_train_step(loss_fn, max_consecutive_skips=5)
        scales, skips, losses = [], [], []
        for batch in (good, one_bad, good):
            state, metrics = step(state, spread(batch))
            scales.append(float(metrics["loss_scale"]))
            skips.append(bool(metrics["skipped"]))
            losses.append(float(metrics["loss"]))
        results |= {"scales": scales, "skips": skips, "losses": [loss for loss in losses if np.isfinite(loss)]}
        created_state, _ = step(created_state, spread(good))
        try:
            for n in range(60):
                time.sleep(lag * process)
                state, _ = step(state, spread(bad))
                results["last"] = n
        except jaxmp.NonFiniteTrainingError as error:
            results["error"] = str(error)
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
