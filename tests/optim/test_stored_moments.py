"""Moments of an optimizer are found and stored in 16 or 8 bits."""

from __future__ import annotations

import functools

import concrete
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp.optim import stored_moments
from jaxmp.optim.stochastic_rounding import Draw
from jaxmp.optim.stored_moments import as_float8_blocks, in_bfloat16

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]  # optax's Adam mixes dtypes


def test_float8_blocks_store_moments_whose_last_axis_they_divide():
    tx = jaxmp.low_precision(optax.chain(optax.clip(1.0), optax.adamw(1e-3)), moments="float8", block=16)
    weights = {"w": concrete.ones((4, 32), jnp.bfloat16), "odd": concrete.ones((4, 20), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, weights)
    adam = state.inner_state[1][0]
    assert adam.mu["w"].codes.dtype == jnp.float8_e4m3fn and adam.mu["w"].scales.shape == (4, 2)
    assert adam.nu["w"].squared and not adam.mu["w"].squared
    assert adam.mu["odd"].dtype == adam.nu["odd"].dtype == jnp.float32


KNOWN = [
    (optax.sgd(0.1, momentum=0.9), {"trace"}),
    (optax.lion(1e-3), {"mu"}),
    (optax.rmsprop(1e-3), {"nu"}),
    (optax.rmsprop(1e-3, bias_correction=True), {"nu"}),
    (optax.adadelta(1e-3), {"e_g", "e_x"}),
    (optax.adan(1e-3), {"m", "v", "n"}),
    (optax.contrib.muon(1e-3), {"mu"}),
    (optax.amsgrad(1e-3), {"mu", "nu"}),
    (optax.adabelief(1e-3), {"mu", "nu"}),
    (optax.adagrad(1e-3), {"sum_of_squares"}),
    (optax.masked(optax.adam(1e-3), {"w": True}), {"mu", "nu"}),
    (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), {"mu", "nu"}),
]


def test_moments_of_optax_are_known():
    weights = {"w": concrete.ones((4, 4), jnp.bfloat16)}
    for inner, fields in KNOWN:
        tx = jaxmp.low_precision(inner, moments="bfloat16")
        state = jax.eval_shape(tx.init, weights)
        halves = [path for path, leaf in jax.tree.leaves_with_path(state) if leaf.dtype == jnp.bfloat16]
        assert {str(path[-2]).strip(".'[]") for path in halves} == fields
        _, new = jax.eval_shape(tx.update, {"w": concrete.ones((4, 4))}, state, weights)
        assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_moments_whose_difference_is_used_stay_float32():
    """Keep a centred RMSProp's moments: if rounded, nu - mu² may be negative."""
    weights = {"w": concrete.ones((4, 4))}
    tx = optax.rmsprop(1e-3, centered=True)
    with pytest.raises(ValueError, match=r"known moments.*leave moments out"):
        jax.eval_shape(jaxmp.low_precision(tx, moments="bfloat16").init, weights)
    both = jax.eval_shape(jaxmp.low_precision(optax.chain(tx, optax.trace(0.9)), moments="bfloat16").init, weights)
    assert both.inner_state[0][0].nu["w"].dtype == jnp.float32
    assert both.inner_state[1].trace["w"].dtype == jnp.bfloat16


def test_flax_writes_and_reads_blocks():
    tx, weights = jaxmp.low_precision(optax.adam(1e-3), moments="float8", block=2), {"w": concrete.ones((2, 4))}
    _, state = jax.jit(tx.update)(weights, jax.jit(tx.init)(weights), weights)
    restored = flax.serialization.from_bytes(jax.jit(tx.init)(weights), flax.serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@functools.partial(jax.jit, static_argnames=("squared", "block", "name"))
def stored_and_read(values, squared, block=None, name="mu"):
    """Store a moment as float8 blocks, or as bfloat16 without ``block``; read it."""
    draw = Draw(0, jnp.int32(0), name)
    stored = as_float8_blocks(values, squared, block, draw) if block else in_bfloat16(values, draw)
    return stored_moments.decoded({name: stored})[name]


def test_a_positive_second_moment_never_becomes_0():
    values = concrete.array([[1e-36, 1e-12, 1e-6, 1.0], [0.0, 1e-36, 1e-37, 2e-38]], jnp.float32)
    for block in (None, 4):
        decoded = stored_and_read(values, True, block, "nu")
        assert np.all((np.asarray(decoded) > 0) == (np.asarray(values) > 0)), block


def test_codes_are_those_of_the_new_moments():
    rng, block = np.random.default_rng(3), 16
    weights = {"w": concrete.array(rng.normal(size=(8, 64)), jnp.bfloat16)}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    tx = jaxmp.low_precision(inner, moments="float8", block=block)
    state = jax.jit(tx.init)(weights)
    update = jax.jit(tx.update)
    exactly = jax.jit(lambda grads, state: inner.update(grads, stored_moments.decoded(state), weights))
    for _ in range(2):
        grads = {"w": concrete.array(rng.normal(size=(8, 64)), jnp.float32)}
        _, exact = exactly(grads, state.inner_state)
        _, state = update(grads, state, weights)
        for name, root in (("mu", np.asarray), ("nu", np.sqrt)):
            want, stored = (getattr(inner_state[1][0], name)["w"] for inner_state in (exact, state.inner_state))
            above = 2.0 ** (1 + np.floor(np.log2(np.abs(want).reshape(8, 4, block).max(-1))))
            np.testing.assert_array_equal(stored.scales, above)
            want = np.abs(root(want)).reshape(8, 4, block) / root(above)[..., None] * 448
            codes = np.abs(np.asarray(stored.codes, np.float32).reshape(want.shape))
            step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(codes, 2.0**-6)) - 3), 2.0**-9)
            assert np.all(np.abs(codes - want) <= 2 * step)


def test_a_block_with_a_non_finite_number_is_not_finite():
    for bad, squared in ((np.inf, False), (np.nan, False), (np.inf, True), (np.nan, True)):
        decoded = stored_and_read(concrete.ones((2, 16)).at[0, 3].set(bad), squared, 16)
        assert not np.isfinite(decoded[0]).any() and np.isfinite(decoded[1]).all()
