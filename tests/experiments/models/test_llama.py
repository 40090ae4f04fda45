"""The experiments' Llama: its size, its attention, and the dtypes of its products."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.llama import Llama, rotated

TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def shapes_of(model, tokens=TOKENS):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, tokens, method="loss"))["params"]


def test_the_default_sizes_have_the_published_number_of_params():
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes_of(Llama()))) == 8_030_261_248


def test_a_rotation_depends_on_the_distance_of_positions_only():
    q, k = (jax.random.normal(jax.random.key(seed), (1, 1, 1, 16)) for seed in (1, 2))
    scores = jnp.einsum("bqhd,bkhd->qk", rotated(jnp.repeat(q, 9, axis=1)), rotated(jnp.repeat(k, 9, axis=1)))
    for distance in range(-4, 5):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, jnp.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-4)
    assert np.ptp(np.asarray(scores[0])) > 0.1
