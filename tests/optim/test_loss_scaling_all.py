"""Every kind of optax optimizer works inside loss_scaling."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optimizer_tools import same_bits, standard

from jaxmp import DynamicLossScale, loss_scaling

PARAMS = {"w": concrete.array([[1.0, -2.0, 0.5], [0.25, 3.0, -0.125]]), "b": concrete.array([0.5, 1.0])}
GRADS = {"w": concrete.array([[0.5, -1.0, 0.25], [2.0, -0.5, 1.0]]), "b": concrete.array([0.5, -0.25])}


def objective(params):
    return optax.tree.norm(params, squared=True)


KINDS = {
    "factored moments": optax.adafactor(0.01),
    "a key in its state": optax.add_noise(0.01, 0.55, jax.random.key(0)),
    "a branch": optax.conditionally_mask(optax.sgd(0.1, momentum=0.9), lambda step: step % 2 == 0),
    "a gradient for each example": optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)),
    "a schedule": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    "pairs of params": optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5),
    "parts without a param": optax.partition({"a": optax.sgd(0.1), "z": optax.set_to_zero()}, {"w": "a", "b": "z"}),
    "params in its state": optax.contrib.prodigy(0.01),
    "the value": optax.contrib.reduce_on_plateau(),
    "the function": optax.scale_by_backtracking_linesearch(3),
    "a matrix": optax.contrib.scale_by_muon(),
    "a function of its own": optax.contrib.sophia(0.01),
}
# Kinds that need other params and gradients: a pair of params, a gradient for each example, a matrix.
OWN = {
    "pairs of params": (optax.LookaheadParams.init_synced(PARAMS), GRADS),
    "a gradient for each example": (PARAMS, jax.tree.map(lambda g: jnp.stack([g, -3 * g]), GRADS)),
    "a matrix": (PARAMS["w"], GRADS["w"]),
}


def problem_of(name):
    """Return an optimizer, its params, gradients and extra update arguments."""
    params, grads = OWN.get(name, (PARAMS, GRADS))
    extra = {"value": jnp.float32(2), "grad": grads, "value_fn": objective}
    if name == "a function of its own":  # it does not ignore unknown extra arguments
        extra = {"obj_fn": objective}
    return standard(KINDS[name]), params, grads, extra


pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key", 'ignore:"seed" is'),
]


@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_takes_its_usual_step_and_skips_a_bad_step_completely(name):
    plain, params, grads, extra = problem_of(name)
    tx = loss_scaling(plain, DynamicLossScale(2.0**10))

    @jax.jit
    def update(grads, state):
        """Return the updates and the new state, and those of the plain optimizer's first step."""
        more = extra | ({"grad": grads} if "grad" in extra else {})
        of_plain = plain.update(grads, plain.init(params), params, **more)
        return tx.update(grads, state, params, **more), of_plain

    (updates, after), (expected, expected_state) = update(grads, tx.init(params))
    assert after.last_finite and jax.tree.structure(updates) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert jax.tree.structure(after.inner_state) == jax.tree.structure(expected_state)

    bad = jax.tree.map(np.array, grads)
    for leaf in jax.tree.leaves(bad):
        leaf[..., -1] = np.nan
    (updates, skipped), _ = update(bad, after)
    assert all((leaf == 0).all() and np.signbit(leaf).all() for leaf in jax.tree.leaves(updates))
    assert same_bits(optax.apply_updates(params, updates), params)
    assert same_bits(skipped.inner_state, after.inner_state)
    assert (skipped.skipped_steps, skipped.loss_scale.loss_scale) == (1, 2.0**9)


def test_lookahead_trains_its_pair_of_params_on_gradients_of_one():
    tx = loss_scaling(standard(optax.lookahead(optax.sgd(0.5), 2, 0.5)), DynamicLossScale(2.0))
    params = optax.LookaheadParams.init_synced({"w": concrete.ones(2)})
    state = tx.init(params)
    for fast, slow in ((0.5, 1.0), (0.5, 0.5)):  # the second step sets both to 1 + 0.5 * (0 - 1)
        updates, state = tx.update({"w": concrete.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
        assert (params.fast["w"] == fast).all() and (params.slow["w"] == slow).all()
