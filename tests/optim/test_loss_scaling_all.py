"""Every optimizer and transform of the installed optax works inside loss_scaling."""

from __future__ import annotations

import inspect

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


def sgd():
    return optax.sgd(0.1, momentum=0.9)


# Arguments for required parameters of factories, by name; SPECIAL has factories that need other arguments.
USUAL = {
    **{"learning_rate": 0.01, "max_norm": 1.0, "max_delta": 1.0, "threshold": 1.0, "decay": 0.9, "step_size": -0.1},
    **{"clipping": 0.1, "max_backtracking_steps": 3, "max_linesearch_steps": 3, "max_consecutive_errors": 3},
    **dict.fromkeys(("inner", "optimizer", "base_optimizer", "tx"), sgd()),
}
SPECIAL = {
    "add_noise": lambda make: make(0.01, 0.55, jax.random.key(0)),
    "chain": lambda make: make(sgd(), optax.scale(0.5)),
    "conditionally_mask": lambda make: make(sgd(), lambda step: step % 2 == 0),
    "conditionally_transform": lambda make: make(sgd(), lambda step: step % 2 == 0),
    "differentially_private_aggregate": lambda make: make(1.0, 0.1, key=jax.random.key(0)),
    "dpsgd": lambda make: make(0.1, 1.0, 0.1, 0),
    "freeze": lambda make: make({"w": True, "b": False}),
    "galore": lambda make: make(0.01, rank=1),
    "inject_hyperparams": lambda make: make(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    "inject_stateful_hyperparams": lambda make: make(optax.adam)(learning_rate=0.1),
    "lookahead": lambda make: make(sgd(), 2, 0.5),
    "masked": lambda make: make(sgd(), {"w": True, "b": False}),
    "measure_with_ema": lambda make: make(lambda tree: jax.tree.map(jnp.abs, tree), 0.9),
    "mechanize": lambda make: make(sgd()),
    "multi_transform": lambda make: make({"a": sgd(), "z": optax.set_to_zero()}, {"w": "a", "b": "z"}),
    "named_chain": lambda make: make(("momentum", sgd()), ("half", optax.scale(0.5))),
    "noisy_sgd": lambda make: make(0.1, key=jax.random.key(0)),
    "partition": lambda make: make({"a": sgd(), "z": optax.set_to_zero()}, {"w": "a", "b": "z"}),
    "sam": lambda make: make(sgd(), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2),
    "scale_by_schedule": lambda make: make(lambda count: 0.1 / (count + 1.0)),
    "schedule_free": lambda make: make(optax.sgd(0.1), 0.1),
    "selective_transform": lambda make: make(sgd(), freeze_mask={"w": True, "b": False}),
    "snapshot": lambda make: make("norm", optax.tree.norm),
    "stateless": lambda make: make(lambda updates, params: jax.tree.map(lambda u: -u, updates)),
    "stateless_with_tree_map": lambda make: make(lambda u, p: -u),
}
# Factories that need other params and gradients: a pair of params, a gradient for each example, a matrix.
OWN = {
    "lookahead": (optax.LookaheadParams.init_synced(PARAMS), GRADS),
    **dict.fromkeys(
        ("differentially_private_aggregate", "dpsgd"), (PARAMS, jax.tree.map(lambda g: jnp.stack([g, -3 * g]), GRADS))
    ),
    "scale_by_muon": (PARAMS["w"], GRADS["w"]),
}


def objective(params):
    return optax.tree.norm(params, squared=True)


ONLY = {"sam": {}, "sophia": {"obj_fn": objective}}  # optimizers that do not ignore unknown extra arguments


def factories():
    by_name = {}
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and "GradientTransformation" in str(inspect.signature(make).return_annotation):
                by_name.setdefault(name, make)
    return by_name


FACTORIES = factories()


def make(name):
    if name in SPECIAL:
        return SPECIAL[name](FACTORIES[name])
    parameters = inspect.signature(FACTORIES[name]).parameters.values()
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return FACTORIES[name](**{argument: USUAL[argument] for argument in needed})


def problem_of(name):
    """Return an optimizer, its params, gradients and extra update arguments."""
    params, grads = OWN.get(name, (PARAMS, GRADS))
    extra = ONLY.get(name, {"value": jnp.float32(2), "grad": grads, "value_fn": objective})
    return standard(make(name)), params, grads, extra


pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key", 'ignore:"seed" is'),
]


@pytest.mark.slow("traces 123 optimizers; those of every kind run below")
def test_every_optimizer_has_the_updates_and_state_that_it_has_without_loss_scaling():
    assert len(FACTORIES) > 100
    for name in FACTORIES:
        plain, params, grads, extra = problem_of(name)
        tx = loss_scaling(plain, DynamicLossScale())

        def both(plain=plain, tx=tx, params=params, grads=grads, extra=extra):
            updates, state = tx.update(grads, tx.init(params), params, **extra)
            return (updates, state.inner_state), plain.update(grads, plain.init(params), params, **extra)

        scaled_shapes, plain_shapes = (
            jax.tree.map(lambda leaf: leaf.shape, results) for results in jax.eval_shape(both)
        )
        assert scaled_shapes == plain_shapes, name


KINDS = {
    "adafactor": "factored moments",
    "add_noise": "a key in its state",
    "conditionally_mask": "a branch",
    "differentially_private_aggregate": "a gradient for each example",
    "inject_hyperparams": "a schedule",
    "lookahead": "pairs of params",
    "multi_transform": "parts without a param",
    "prodigy": "params in its state",
    "reduce_on_plateau": "the value",
    "sam": "no extra argument",
    "scale_by_backtracking_linesearch": "the function",
    "scale_by_muon": "a matrix",
    "sophia": "a function of its own",
}


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
