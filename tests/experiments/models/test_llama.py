"""The experiments' Llama: its size, its attention, and the dtypes of its products."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from experiments.models.llama import Block, Llama, rotated
from jaxmp.program.walk import equations

TINY = Llama(vocabulary=64, sequence=8, layers=2, heads=4, groups=2, width=32, hidden=48)
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


def test_a_group_of_heads_shares_keys_and_values():
    block = Block(heads=4, width=32, groups=2, hidden=48)
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    params = block.init(jax.random.key(1), x.reshape(16, 32), 2)
    q, k, v = (part.reshape(2, 8, 4, 8) for part in block.apply(params, x, method="before"))
    for shared in (k, v):
        np.testing.assert_array_equal(shared[:, :, 0], shared[:, :, 1])
        np.testing.assert_array_equal(shared[:, :, 2], shared[:, :, 3])
        assert not np.allclose(shared[:, :, 1], shared[:, :, 2])
    assert not np.allclose(q[:, :, 0], q[:, :, 1])


def test_products_are_half_under_a_policy_and_the_rotation_is_float32():
    model = jaxmp.linen.apply_policy(TINY, "mixed_bfloat16")
    program = jax.make_jaxpr(lambda p: model.apply({"params": p}, TOKENS, TOKENS, method="loss"))(shapes_of(TINY))
    operands = {
        atom.aval.dtype.name for eqn in equations(program) if eqn.primitive.name == "dot_general" for atom in eqn.invars
    }
    assert operands == {"bfloat16"}
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(program) if eqn.primitive.name == "sin"} == {"float32"}
