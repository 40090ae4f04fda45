"""States that are created with their sharding, not moved to it later."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import explicit_mesh
from stacked_layers import LAYERS, SPECS, WIDTH, make_params

import jaxmp
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes


def test_a_state_is_that_of_one_device_in_its_place():
    mesh = explicit_mesh()
    fields = {
        "rng": np.int64(1),
        "ema": np.bool_(True),
        "model_state": {"batch_stats": np.arange(3.0, dtype=np.float32)},
    }
    tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())
    state = jaxmp.TrainState.create_sharded(make_params, tx, Sharding(mesh, SPECS), **fields)
    single_state = jaxmp.TrainState.create(params=make_params(), tx=tx, **fields)
    for (path, leaf), expected in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(single_state), strict=True):
        assert leaf.sharding.mesh.shape == mesh.shape, path
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, expected = jax.random.key_data(leaf), jax.random.key_data(expected)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected), err_msg=str(path))
    inner = state.opt_state.inner_state[0]
    for tree in (state.params, state.ema_params, inner.mu, inner.nu):
        assert tree["up"].addressable_shards[0].data.shape == (LAYERS, WIDTH, 2 * WIDTH // 4)
        assert tree["bias"].sharding.is_fully_replicated
