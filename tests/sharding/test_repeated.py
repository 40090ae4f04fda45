"""The gradient of a half weight repeated over rows is summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_steps import untyped
from meshes import mesh_of

import jaxmp
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")

SLOW = pytest.mark.slow("compiles a large program; the usual spellings are a small one")
ROWS, FEATURES = 512, 4
EYE = np.eye(2, dtype=np.float32)


def tiled(w, x):
    return jnp.tile(w, (len(x), 1))


SPELLINGS = {
    "tile": lambda w, x: x * tiled(w, x),
    "repeat": lambda w, x: x * jnp.repeat(w[None], len(x), 0),
    "broadcast": lambda w, x: x * jnp.broadcast_to(w, (len(x) // 2, 2, FEATURES)).reshape(x.shape),
    "stack": lambda w, x: x * jnp.concatenate([jnp.stack([w] * 8)] * (len(x) // 8)),
    "class token": lambda w, x: jnp.concatenate([tiled(w, x), x], 1) * jnp.concatenate([x, x], 1),
    "mask": lambda w, x: jnp.where(x > 3, tiled(w, x), x),
    "fixed mask": lambda w, x: x * jnp.where(jnp.arange(len(x))[:, None] % 2 == 0, w, jnp.zeros_like(w)),
    "padding": lambda w, x: x * jnp.pad(tiled(w[:2], x), ((0, 0), (1, 1))),
    "padding value": lambda w, x: jax.lax.pad(x * w, w[0], ((0, 0, 0), (1, 2, 0))),
    "scatter": lambda w, x: x.at[jnp.arange(0, len(x), 2)].set(w) * x,
    "product with ones": lambda w, x: x * (jnp.ones((len(x), 1), x.dtype) @ w[None]),
    "one-hot": lambda w, x: x * (jax.nn.one_hot(jnp.arange(len(x)) % 2, 2, dtype=x.dtype) @ w.reshape(2, 2))[:, :1],
    "lookup": lambda w, x: x * w.reshape(2, 2)[jnp.arange(len(x)) % 2][:, :1],
    "rows": jax.vmap(lambda w, x: jnp.concatenate([w, x]) * jnp.concatenate([x, x]), (None, 0)),
    "einsum": lambda w, x: jnp.einsum("bd,bd->b", tiled(w, x), x),
    "scaled": lambda w, x: x * (2 * tiled(2 * w, x) + w[0]),
    "product": lambda w, x: x * (tiled(w, x)[:, :2] @ EYE.astype(x.dtype))[:, :1],
    "a call of its own": lambda w, x: x * jax.nn.relu(tiled(w, x)),
    "twice": lambda w, x: sum(x * repeated for repeated in [tiled(w, x)] * 2),
    "running sum": lambda w, x: x * jnp.cumsum(jnp.eye(len(x), 1, dtype=x.dtype) * w, 0),
    "slice": lambda w, x: x * jax.lax.dynamic_slice(tiled(w, x), (x[0, 0].astype(int), 0), x.shape),
    "turns": lambda w, x: jax.lax.scan(lambda _, pair: (None, pair[0] * pair[1]), None, (x, tiled(w, x)))[1],
    "branch": lambda w, x: jax.lax.cond(jnp.sum(x) > 0, lambda w: x * tiled(w, x), lambda w: x, w),
    "computed again": lambda w, x: jax.checkpoint(lambda w, x: x * tiled(w, x))(w, x),
}


# The most usual spelling of each kind.
USUAL = (
    "broadcast", "twice",  # repeated by an operation
    "class token", "padding value", "scatter",  # moved to a place among other values
    "product", "lookup", "running sum",
    "turns", "computed again",  # in the body of a loop or of a remat
)  # fmt: skip


def loss_in(dtype):
    """Return a loss that sums the results of all spellings, each with its own param.

    The gradients are integers, which bfloat16 does not represent exactly above 256.
    """

    def loss_fn(params, model_state, batch, rng):
        x = jnp.asarray(batch, dtype)
        results = [SPELLINGS[name](param.astype(dtype), x) for name, param in params.items()]
        return sum(jnp.sum(result.astype(jnp.float32)) for result in results), model_state

    return loss_fn


@pytest.mark.once
@pytest.mark.parametrize(
    ("names", "kind", "steps", "reduce"),
    [
        (USUAL, AxisType.Auto, 1, "each"),
        pytest.param(tuple(SPELLINGS), AxisType.Auto, 1, "each", marks=SLOW),
        pytest.param(tuple(SPELLINGS), AxisType.Explicit, 2, "once", marks=SLOW),
    ],
    ids=["usual", "Auto", "Explicit"],
)
def test_the_gradient_of_a_repeated_weight_is_exact(names, kind, steps, reduce):
    batch = np.random.default_rng(0).integers(1, 13, (ROWS, FEATURES)).astype(np.float32)
    batch[:2] = 0
    params = {name: jnp.ones(FEATURES) for name in names}
    parts = [batch[n::steps] for n in range(steps)]
    gradient = jax.jit(jax.grad(lambda params, batch: loss_in(np.float32)(params, None, batch, None)[0]))
    exact = jax.tree.map(lambda *gradients: np.mean(gradients, axis=0), *(gradient(params, part) for part in parts))
    mesh, specs = mesh_of(kind), {name: P("fsdp" if n % 2 else None) for n, name in enumerate(names)}
    on_mesh = Sharding(mesh, specs, reduce=reduce)
    state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), on_mesh)
    step = jaxmp.make_train_step(untyped(loss_in(jnp.bfloat16)), sharding=on_mesh, accumulate_steps=steps)
    state, _ = step(state, batch)
    for name, leaf in state.params.items():
        np.testing.assert_array_equal(1 - np.asarray(leaf), exact[name], err_msg=name)
        assert exact[name].max() * steps > 257, name
