"""jaxmp.pack_small updates small params as one vector, and refuses some optimizers."""

from __future__ import annotations

import concrete
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_tools import refused
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import explicit_mesh, mesh_of
from optimizer_tools import same_bits
from recompiles import compiled_once

import jaxmp
from jaxmp.program.walk import equations
from jaxmp.sharding import Sharding

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]  # optax's Adam mixes dtypes

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"bias": (3,), "scale": (5,), "table": (3, 2), "small": (2, 2), "kernel": (256, 256), "gain": ()}
    return {name: concrete.array(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def after_steps(tx, params, steps=4):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(steps):
        grads = jax.tree.map(lambda leaf, step=step: np.asarray(leaf) * np.float32(step + 0.5), params_of(seed=step))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def loss_fn(params, model_state, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"]) * params["scale"]
    return jnp.mean((hidden - batch["y"]) ** 2), model_state


def network():
    rng = np.random.default_rng(1)
    params = {"kernel": rng.normal(size=(64, 256)), "bias": np.zeros(256), "scale": np.ones(256)}
    batch = {"x": rng.normal(size=(8, 64)), "y": rng.normal(size=(8, 256))}
    return jax.tree.map(lambda array: concrete.array(array, jnp.float32), (params, batch))


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7), actual, expected)


# The update.


TAKEN = {
    "clipping and adamw": CLIPPED,
    "a schedule": optax.lion(optax.cosine_decay_schedule(0.1, 10)),
    "a mask by dimensions": optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    "hyperparams in the state": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "a copy of the params in the state": optax.contrib.schedule_free_adamw(0.1),
    "the largest update": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "accumulation around it": None,
}


@pytest.mark.parametrize("name", TAKEN)
def test_packed_params_get_the_updates_of_single_params(name):
    if name == "accumulation around it":
        tx, packing = optax.MultiSteps(CLIPPED, 2), optax.MultiSteps(jaxmp.pack_small(CLIPPED), 2)
    else:
        tx, packing = TAKEN[name], jaxmp.pack_small(TAKEN[name])
    expected, _ = after_steps(tx, params_of())
    actual, _ = after_steps(packing, params_of())
    assert_close(actual, expected)


def test_small_params_of_one_dtype_and_rank_are_one_vector():
    params = params_of() | {"half": concrete.ones(4, jnp.bfloat16), "half_too": concrete.ones(4, jnp.bfloat16)}
    tx = jaxmp.pack_small(optax.adam(1e-2))
    state = tx.init(params)
    vectors = jax.tree.map(jnp.shape, state.inner_state[0].nu.vectors)
    assert vectors == {"bfloat16_1d": (8,), "float32_1d": (8,), "float32_2d": (1, 10)}
    program = str(jax.make_jaxpr(tx.update)(params, state, params))
    assert program.count(" = sqrt ") == 3 + 2  # three vectors, the kernel and the gain
    assert jaxmp.pack_small(optax.adam(1e-2), below=4).init(params).layout.groups == ()


def test_the_norm_of_a_step_reads_one_vector():
    params, batch = network()
    tx = jaxmp.loss_scaling(jaxmp.pack_small(CLIPPED, below=1000), jaxmp.DynamicLossScale())
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(loss_fn, donate=False)
    reductions = [
        eqn for eqn in equations(jax.make_jaxpr(step.jitted)(state, batch)) if "reduce_sum" in str(eqn.primitive)
    ]
    sums = sum(eqn.invars[0].aval.shape == (512,) for eqn in reductions)
    assert sums == 3  # for the metrics, the test for non-finite gradients and clipping


# With the other parts of the library.


@pytest.mark.parametrize(
    ("scale", "options"),
    [(jaxmp.DynamicLossScale(), {}), (jaxmp.HeadroomLossScale(), {"accumulate_steps": 2}), (None, {"ema_decay": 0.9})],
    ids=["loss scaling", "accumulation", "a moving average"],
)
def test_a_train_step_is_that_of_single_params_and_skips(scale, options):
    params, batch = network()
    bad = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
    states = []
    for tx in (CLIPPED, jaxmp.pack_small(CLIPPED)):
        wrapped = tx if scale is None else jaxmp.loss_scaling(tx, scale, grad_norm=True, check_updates=True)
        state = jaxmp.TrainState.create(params=params, tx=wrapped, ema="ema_decay" in options)
        step = jaxmp.make_train_step(loss_fn, donate=False, **options)
        for examples in (batch, batch, bad, batch):
            before, (state, metrics) = state, step(state, examples)
            if examples is bad:
                assert bool(metrics["skipped"]) and same_bits(state.params, before.params)
                assert same_bits(state.opt_state.inner_state, before.opt_state.inner_state)
        assert compiled_once(step)
        states.append((state.params, state.ema_params, metrics))
    assert_close(states[1], states[0])


def test_an_nnx_optimizer_takes_it():
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    @nnx.jit
    def update(model, optimizer, batch):
        _, grads = jaxmp.nnx.value_and_grad(loss, optimizer)(model, batch)
        optimizer.update(model, grads)

    _, batch = network()
    models = []
    for tx in (CLIPPED, jaxmp.pack_small(CLIPPED, below=1000)):
        model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.LayerNorm(256, rngs=nnx.Rngs(0)))
        optimizer = jaxmp.nnx.Optimizer(model, tx, loss_scale=jaxmp.DynamicLossScale())
        step = jaxmp.nnx.make_train_step(loss)
        for _ in range(3):
            step(model, optimizer, batch)
        update(model, optimizer, batch)
        models.append(nnx.as_pure(nnx.state(model, nnx.Param)))
    assert_close(models[1], models[0])


def test_a_mesh_gives_the_params_of_one_device():
    params, batch = network()
    tx = jaxmp.pack_small(CLIPPED, below=1000)
    single = jaxmp.TrainState.create(params=params, tx=tx)
    single, _ = jaxmp.make_train_step(loss_fn, donate=False)(single, batch)
    for mesh in (mesh_of(fsdp=4), explicit_mesh(fsdp=4)):
        specs = jaxmp.sharding.fsdp_specs(params, mesh, min_size=1000)
        assert specs["kernel"] != P() == specs["bias"]
        sharding = Sharding(mesh, specs)
        state = jaxmp.TrainState.create_sharded(lambda: params, tx, sharding)
        assert state.opt_state.inner_state.inner_state[1][0].mu.separate["kernel"].sharding.spec == specs["kernel"]
        state, _ = jaxmp.make_train_step(loss_fn, donate=False, sharding=sharding)(state, batch)
        assert_close(jax.device_get(state.params), jax.device_get(single.params))


def test_a_saved_state_does_not_depend_on_the_packing():
    packing = jaxmp.pack_small(CLIPPED)
    params, packed = after_steps(packing, params_of())
    single = flax.serialization.from_bytes(CLIPPED.init(params), flax.serialization.to_bytes(packed))
    again = flax.serialization.from_bytes(packing.init(params), flax.serialization.to_bytes(single))
    assert same_bits(again, packed)

    params, batch = network()
    state = jaxmp.TrainState.create(params=params, tx=jaxmp.pack_small(CLIPPED))
    state, _ = jaxmp.make_train_step(loss_fn, donate=False)(state, batch)
    unpacked = state.with_tx(CLIPPED)
    moments = unpacked.opt_state.inner_state[1][0].nu
    assert jax.tree.map(jnp.shape, moments) == jax.tree.map(jnp.shape, params)
    assert same_bits(unpacked.with_tx(state.tx).opt_state, state.opt_state)


# Errors.


def by_path(params):
    return jax.tree.map_with_path(lambda path, _: "adam" if "bias" in str(path) else "sgd", params)


def of_other_powers(updates, params):
    leaves, structure = jax.tree.flatten(updates)
    return structure.unflatten([leaf ** (3 + place) for place, leaf in enumerate(leaves)])


REFUSED = {
    "a norm of each param": (optax.lamb(0.1), "number from single params"),
    "clipping of each param": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "number from single params"),
    "rows and columns": (optax.adafactor(0.1), "its state has another structure"),
    "orthogonal updates": (optax.contrib.muon(0.1), "its state has another structure"),
    "a mean of a param": (optax.chain(optax.centralize(), optax.sgd(0.1)), "'reduce_sum' combines elements"),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)), "combines a param with another array"),
    "noise alone": (
        optax.stateless(
            lambda updates, _: jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape), updates)
        ),
        "depend on the shape of a param, such as noise",
    ),
    "a product of two params": (
        optax.stateless(
            lambda updates, _: jax.tree.map(
                lambda leaf: leaf * jnp.sum(jnp.tensordot(*jax.tree.leaves(updates)[:2], axes=0)), updates
            )
        ),
        "'dot_general' combines a param with another array",
    ),
    "a mask by path": (
        optax.adamw(0.1, mask=lambda params: jax.tree.map_with_path(lambda path, _: "bias" in str(path), params)),
        "by their path, shape or number",
    ),
    "labels by path": (
        optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, by_path),
        "its state has another structure",
    ),
    "a mask of the tree": (
        optax.masked(optax.sgd(0.1), dict.fromkeys(params_of(), True)),
        "its state has another structure",
    ),
    "a mean over the params": (
        optax.stateless(
            lambda updates, _: jax.tree.map(
                lambda leaf: leaf / sum(jnp.linalg.norm(other) for other in jax.tree.leaves(updates)), updates
            )
        ),
        "number from single params",
    ),
    "another number for each param": (
        optax.stateless(
            lambda updates, _: {name: place * leaf for place, (name, leaf) in enumerate(sorted(updates.items()))}
        ),
        "for packed params",
    ),
    "another power for each param": (optax.stateless(of_other_powers), "by their path, shape or number"),
    "accumulation": (optax.MultiSteps(optax.sgd(0.1), 2), "'cond' combines a param with another array"),
}


@pytest.mark.once
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_treats_params_differently_is_refused(name):
    tx, reason = REFUSED[name]
    with pytest.raises(ValueError, match="pack_small takes optimizers that update each element on its own") as error:
        after_steps(jaxmp.pack_small(tx), params_of())
    assert reason in str(error.value)


@pytest.mark.once
def test_mistakes_are_errors():
    tx, params = jaxmp.pack_small(optax.adam(0.1)), params_of()
    state = tx.init(params)
    refused(lambda: jaxmp.pack_small(optax.sgd(0.1), below=0), ValueError, "below must be a whole number")
    refused(lambda: jaxmp.pack_small(0.1), TypeError, "an optimizer must be an optax transform")
    refused(lambda: tx.update(params, state.inner_state, params), TypeError, "updates only its own state")
    less = {name: leaf for name, leaf in params.items() if name != "bias"}
    refused(lambda: tx.update(less, state, less), ValueError, "a tree of 6 leaves, got one of 5")
    other = params | {"bias": concrete.ones(4)}
    refused(lambda: tx.update(other, state, other), ValueError, "shape (3,) for 'bias', got (4,)")
    half = params | {"bias": concrete.ones(3, jnp.bfloat16)}
    refused(lambda: tx.update(half, state, params), ValueError, "packs leaves of one dtype, got bfloat16 and float32")
    inside = jaxmp.pack_small(jaxmp.low_precision(optax.adam(0.1), moments="bfloat16"))
    refused(lambda: inside.init(params), ValueError, "low_precision must be directly inside loss_scaling")
    around = jaxmp.low_precision(tx, moments="bfloat16")
    refused(lambda: around.init(params), ValueError, "leave pack_small out")


def test_a_small_param_that_is_split_over_devices_is_an_error():
    mesh, params = mesh_of(fsdp=4), network()[0]
    split = jax.device_put(params["bias"], NamedSharding(mesh, P("fsdp")))
    tx = jaxmp.pack_small(optax.adam(0.1))
    refused(lambda: tx.init(params | {"bias": split}), ValueError, "'bias', which is split over devices")
    sharding = Sharding(mesh, {"kernel": P(), "bias": P("fsdp"), "scale": P()})
    refused(
        lambda: jaxmp.TrainState.create_sharded(lambda: params, tx, sharding),
        ValueError,
        "'bias', which is split over devices",
    )
