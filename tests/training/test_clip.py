"""``make_train_step(clip_norm=…)``: gradients are unscaled, tested and then cut by their norm, before the optimizer."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_tools import bits, loss_fn, problem, same_bits, standard, train_loss

import jaxmp
from jaxmp import DynamicLossScale, HeadroomLossScale, StaticLossScale, TrainState, loss_scaling, make_train_step

pytestmark = pytest.mark.once

SHORT = 0.05  # the norm of the problem's gradients is near 1


def state_of(params, *before, scale=None, dtype=jnp.float32, **fields):
    tx = standard(optax.chain(*before, optax.adamw(1e-2)))
    params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype), params)
    return TrainState.create(params=params, tx=loss_scaling(tx, scale or DynamicLossScale()), **fields)


def wide_loss(params, batch):
    """``loss_fn`` without its cast to float32."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.mean((hidden @ params["out"]["w"] - batch["y"]) ** 2)


@pytest.mark.parametrize("clip_norm", [SHORT, 100.0, 1])
@pytest.mark.parametrize("scale", [DynamicLossScale(), StaticLossScale(1000.0), HeadroomLossScale()], ids=repr)
def test_clipping_gives_the_bits_of_optax_inside_loss_scaling(clip_norm, scale):
    params, batch = problem()
    ours, theirs = state_of(params, scale=scale), state_of(params, optax.clip_by_global_norm(clip_norm), scale=scale)
    step, plain = make_train_step(train_loss, clip_norm=clip_norm), make_train_step(train_loss)
    norms = []
    for n in range(4):
        scaled = {**batch, "x": batch["x"] * (np.nan if n == 2 else 1.0 + n)}
        (ours, metrics), (theirs, expected) = step(ours, scaled), plain(theirs, scaled)
        assert bits(metrics) == bits(expected)
        norms.append(float(metrics["grad_norm"]))
    assert same_bits(ours.params, theirs.params)
    assert bits(ours.opt_state) == bits(theirs.opt_state) and int(ours.skipped) == 1
    assert np.isnan(norms[2]) and min(norms[0], norms[3]) > SHORT  # the metric is the norm before


def test_the_step_has_the_length_that_was_asked_for_in_float64():
    params, batch = problem()
    state = TrainState.create(
        params=jax.tree.map(jnp.array, params), tx=loss_scaling(optax.sgd(1.0), DynamicLossScale())
    )
    new, metrics = make_train_step(train_loss, clip_norm=SHORT, accumulate_steps=2)(state, batch)
    with jax.enable_x64(True):
        wide, wide_batch = problem(dtype=jnp.float64)
        grads = jax.grad(wide_loss)(wide, wide_batch)
        norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads)))
        expected = jax.tree.map(lambda p, g: np.asarray(p) - np.asarray(g) * SHORT / norm, wide, grads)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new.params, expected)


def test_half_gradients_are_clipped_in_float32_and_infinite_norms_skip_the_step():
    params, batch = problem(dtype=jnp.float16)
    state, step = state_of(params, dtype=jnp.float16), make_train_step(train_loss, clip_norm=SHORT)
    state, metrics = step(state, batch)
    assert metrics["grad_norm"].dtype == jnp.float32 and not metrics["skipped"]
    # Each gradient is finite, their norm is not: a factor of 0 would make a step of zeros of it.
    huge = TrainState.create(params=jnp.ones(2), tx=optax.sgd(0.1))
    before = np.asarray(huge.params)
    huge, metrics = make_train_step(lambda p, s, b, r: (2e19 * jnp.sum(p), s), clip_norm=SHORT)(huge, jnp.ones(2))
    assert metrics["skipped"] and metrics["grad_norm"] == np.inf and bits(huge.params) == bits(before)


def test_the_program_has_one_sum_of_squares():
    params, batch = problem()

    def reductions(**options):
        traced = make_train_step(train_loss, **options).jitted.trace(state_of(params), batch)
        compiled = re.findall(r"\breduce\(", traced.lower().compile().as_text())
        return str(traced.jaxpr).count("reduce_sum"), len(compiled)

    assert reductions(clip_norm=SHORT) == reductions()


def test_clipping_goes_with_an_update_by_hand_too():
    params, batch = problem()
    tx = loss_scaling(optax.sgd(1.0), StaticLossScale(8.0))
    _, grads = jaxmp.value_and_grad(loss_fn, tx.init(params))(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params, clip_norm=SHORT)
    np.testing.assert_allclose(optax.tree.norm(updates), SHORT, rtol=1e-6)


@pytest.mark.parametrize(
    "wrong", [0, -1.0, float("nan"), float("inf"), "1.0", True, jnp.ones(2), jnp.zeros(())], ids=repr
)
def test_a_norm_that_is_no_length_is_refused(wrong):
    with pytest.raises(ValueError, match=r"clip_norm must be a positive finite number, got .*; pass 1.0, say"):
        make_train_step(train_loss, clip_norm=wrong)


@pytest.mark.parametrize("norm", [np.float32(SHORT), jnp.float32(SHORT), np.asarray(SHORT, np.float32)], ids=repr)
def test_a_norm_may_be_a_scalar_array(norm):
    params, batch = problem()
    new, _ = make_train_step(train_loss, clip_norm=norm)(state_of(params), batch)
    expected, _ = make_train_step(train_loss, clip_norm=float(norm))(state_of(params), batch)
    assert same_bits(new.params, expected.params)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(tx, optax.scale(0.5)),
        lambda tx: optax.GradientTransformation(tx.init, tx.update),  # drops all extra arguments
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    ],
    ids=["chain", "bare", "multi_steps"],
)
def test_clipping_is_refused_where_a_transform_around_loss_scaling_may_drop_it(around):
    params, batch = problem()
    state = TrainState.create(params=params, tx=around(loss_scaling(optax.sgd(0.1), DynamicLossScale())))
    text = r"clip_norm needs loss_scaling as the outermost transform, .*clip inside: jaxmp.loss_scaling\(optax.chain\("
    with pytest.raises(ValueError, match=text):
        make_train_step(train_loss, clip_norm=1.0)(state, batch)
