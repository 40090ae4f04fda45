"""jaxmp.low_precision trains bfloat16 params, with moments in fewer bits."""

from __future__ import annotations

import warnings

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recompiles import compiled_once

import jaxmp
from jaxmp.optim import low_precision, stored_moments
from jaxmp.program.walk import equations
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes


def problem(dtype):
    """Return the loss function, the batch and the params of a linear regression."""
    rng = np.random.default_rng(0)
    target = rng.normal(size=(32, 8)).astype(np.float32)
    x = rng.normal(size=(64, 32)).astype(np.float32)

    def loss_fn(params, model_state, batch, key):
        return jnp.mean((batch @ params["w"].astype(jnp.float32) - batch @ target) ** 2), model_state

    return loss_fn, x, {"w": jnp.ones((32, 8), dtype)}


def trained(tx, dtype, steps=300):
    loss_fn, x, params = problem(dtype)
    state = jaxmp.TrainState.create(params=params, tx=jaxmp.loss_scaling(tx, jaxmp.NoOpLossScale()))
    step = jaxmp.make_train_step(loss_fn, donate=False)
    for _ in range(steps):
        state, metrics = step(state, x)
    assert compiled_once(step)
    assert state.params["w"].dtype == dtype
    return float(metrics["loss"])


@pytest.mark.once
def test_bfloat16_params_learn_where_rounding_to_nearest_stalls():
    tx = optax.adam(1e-3)  # near 1, half a unit in the last place of bfloat16 is 0.002, so steps of 0.001 are lost
    exact = trained(tx, jnp.float32)
    with pytest.warns(UserWarning, match="updates below 1/512 of a weight are lost"):
        nearest = trained(tx, jnp.bfloat16)
    assert nearest > 1.05 * exact
    for rounding_ in ("stochastic", "kahan"):
        assert abs(trained(jaxmp.low_precision(tx, rounding=rounding_), jnp.bfloat16) / exact - 1) < 0.01, rounding_


@pytest.mark.once
@pytest.mark.slow("trains three times; the moments are tested by themselves")
def test_training_reaches_the_loss_of_float32_moments():
    exact = trained(optax.adam(1e-2), jnp.float32)
    for moments in ("bfloat16", "float8"):
        stored = trained(jaxmp.low_precision(optax.adam(1e-2), moments=moments, block=8), jnp.float32)
        assert abs(stored / exact - 1) < 0.05, moments


def muon_in_bfloat16(**options):
    muon = optax.contrib.muon(**options)
    return optax.GradientTransformation(muon.init, jaxmp.autocast(muon.update, "mixed_bfloat16"))


def test_under_autocast_muons_products_are_bfloat16_and_its_iterate_is_float32():
    experts = np.random.default_rng(0).normal(size=(2, 24, 16)).astype(np.float32)
    dimension_numbers = {"w": optax.contrib.MuonDimensionNumbers(1, 2)}
    tx = muon_in_bfloat16(learning_rate=-1.0, muon_weight_dimension_numbers=dimension_numbers)
    weights = {"w": experts}
    state = tx.init(weights)
    program = jax.make_jaxpr(tx.update)(weights, state, weights)
    products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
    assert len(products) == 3 and {var.aval.dtype.name for eqn in products for var in eqn.invars} == {"bfloat16"}
    updates, new = jax.jit(tx.update)(weights, state, weights)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(new) if leaf.ndim} == {"float32"}

    def orthogonal(x):
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * (gram @ gram)) @ x
        return np.asarray(x, np.float64).T * np.sqrt(max(1, 16 / 24))  # optax scales the update by the shape

    scaled = [expert.T.astype(np.float64) / np.linalg.norm(expert) for expert in experts]
    want = np.stack([orthogonal(x) for x in scaled])
    half = np.stack([orthogonal(concrete.array(x, jnp.bfloat16)) for x in scaled])
    error, error_of_half = (np.linalg.norm(got - want) for got in (updates["w"], half))
    assert error < 0.04 * np.linalg.norm(want) and error < error_of_half


@pytest.mark.once
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_apply_updates_gives_the_rounded_param(rounding):
    rng = np.random.default_rng(2)
    weights = {"w": concrete.array(rng.normal(size=4096) * 10.0 ** rng.integers(-3, 3, 4096), jnp.bfloat16)}
    change = concrete.array(rng.normal(size=4096) * 1e-2, jnp.float32)
    tx = jaxmp.low_precision(optax.sgd(1.0), rounding=rounding)
    updates, _ = jax.jit(tx.update)({"w": -np.asarray(change)}, tx.init(weights), weights)
    new = optax.apply_updates(weights, updates)["w"]
    exact = np.asarray(weights["w"], np.float64) + np.asarray(change, np.float64)
    below = exact.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    assert new.dtype == jnp.bfloat16 and updates["w"].dtype == jnp.float32
    if rounding == "stochastic":
        unit = np.abs(exact) * 2.0**-7
        assert np.all(np.abs(np.asarray(new, np.float64) - exact) <= unit)
    else:
        np.testing.assert_array_equal(np.asarray(new, np.float64), below)
    same = np.asarray(new) == np.asarray(weights["w"])
    assert same.any() and np.all(np.signbit(np.asarray(updates["w"])[same]))


@pytest.mark.once
def test_float32_leaves_are_left_alone():
    weights = {"norm": concrete.ones(8), "w": concrete.ones(8, jnp.bfloat16)}
    tx = jaxmp.low_precision(optax.sgd(1e-4))
    updates, _ = jax.jit(tx.update)({"norm": concrete.ones(8), "w": concrete.ones(8)}, tx.init(weights), weights)
    np.testing.assert_array_equal(updates["norm"], np.float32(-1e-4))


@pytest.mark.once
def test_kahan_keeps_the_rounding_errors():
    weights, tx = {"w": concrete.ones((), jnp.bfloat16)}, jaxmp.low_precision(optax.sgd(1.0), rounding="kahan")
    state = tx.init(weights)
    for _ in range(100):
        updates, state = tx.update({"w": jnp.float32(-1e-3)}, state, weights)
        weights = optax.apply_updates(weights, updates)
    exact = float(weights["w"]) + float(state.compensation["w"])
    assert abs(exact - 1.1) < 2e-3


@pytest.mark.once
def test_kahan_takes_params_with_none_and_float32_among_them():
    weights = {
        "w": concrete.ones(4, jnp.bfloat16),
        "none": None,
        "norm": concrete.ones(4),
        "x": concrete.ones(2, jnp.bfloat16),
    }
    tx = jaxmp.low_precision(optax.sgd(1e-3), rounding="kahan")
    updates, state = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, weights), tx.init(weights), weights)
    assert updates["none"] is None and state.compensation["norm"] is None
    np.testing.assert_array_equal(state.compensation["w"], concrete.array([-1e-3] * 4, jnp.bfloat16))
    np.testing.assert_array_equal(state.compensation["x"], concrete.array([-1e-3] * 2, jnp.bfloat16))


@pytest.mark.once
def test_a_non_finite_gradient_gives_a_non_finite_update():
    weights = {"w": concrete.ones(4, jnp.bfloat16)}
    tx = jaxmp.low_precision(optax.sgd(1.0), moments="float32")
    for bad in (np.inf, np.nan):
        updates, _ = jax.jit(tx.update)({"w": concrete.array([bad, 0, 0, 0], jnp.float32)}, tx.init(weights), weights)
        assert not np.isfinite(np.asarray(updates["w"])[0]) and np.isfinite(np.asarray(updates["w"])[1:]).all()


@pytest.mark.once
def test_a_skipped_step_changes_neither_count_nor_moments_nor_params():
    tx = jaxmp.loss_scaling(
        jaxmp.low_precision(optax.adam(1e-2), rounding="kahan", moments="float8", block=8), jaxmp.DynamicLossScale()
    )
    weights = {"w": concrete.ones((8, 8), jnp.bfloat16)}
    grads = {"w": concrete.full((8, 8), 32768.0)}
    update = jax.jit(tx.update)
    _, state = update(grads, jax.jit(tx.init)(weights), weights)
    updates, skipped = update({"w": grads["w"].at[0, 0].set(np.inf)}, state, weights)
    assert int(skipped.skipped_steps) == 1 and int(state.inner_state.count) == int(skipped.inner_state.count) == 1
    jax.tree.map(np.testing.assert_array_equal, skipped.inner_state, state.inner_state)
    np.testing.assert_array_equal(optax.apply_updates(weights, updates)["w"], weights["w"])


@pytest.mark.once
@pytest.mark.parametrize(("rounding", "moments"), [("stochastic", "float8"), ("kahan", "float32")])
def test_params_and_state_have_the_same_bits_on_any_devices(rounding, moments):
    rng = np.random.default_rng(0)
    weights, grads = (rng.normal(size=(8, 128)).astype(np.float32) for _ in range(2))
    tx = jaxmp.low_precision(optax.adamw(1e-2), rounding=rounding, moments=moments, block=32)
    tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    runs = []
    for devices, spec in [(1, P()), (4, P(None, "data"))]:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("data",), axis_types=auto, devices=jax.devices()[:devices])
        params, placed_grads = (jax.device_put(array, NamedSharding(mesh, spec)) for array in (weights, grads))
        params, state = params.astype(jnp.bfloat16), jax.jit(tx.init)(params.astype(jnp.bfloat16))
        for _ in range(2):
            params, state = step(params, state, placed_grads)
        runs.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))])
    assert all(run == runs[0] for run in runs)


def rounded_in_shard_map(spec, check_vma=True, moments="float32", **options):
    """Return the new params and the momentum of an update in ``shard_map``, and those of the update under ``jit``."""
    tx = jaxmp.low_precision(optax.sgd(1e-3, momentum=0.9), seed=1, moments=moments, **options)
    weights, grads = {"w": concrete.ones((4, 1000), jnp.bfloat16)}, {"w": concrete.full((4, 1000), 1.1)}

    def step(weights, state, grads):
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates)["w"], state.inner_state[0].trace["w"]

    state = tx.init(weights)
    specs = (spec, jax.tree.map(lambda leaf: spec if leaf.ndim else P(), state), spec)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)
    results = [jax.jit(fun)(weights, state, grads) for fun in (mapped, step)]
    return [[np.asarray(array, np.float32) for array in arrays] for arrays in results]


def test_each_device_of_a_shard_map_draws_its_own_bits_for_its_part():
    (params, momentum), _ = rounded_in_shard_map(P("data"), moments="bfloat16", axis_name="data")
    for rows, share in ((params < 1, 0.28), (momentum > momentum.min(), None)):
        share = rows.mean() if share is None else share  # 0.0011 of the spacing of 0.0039 below 1
        assert 0.02 < share < 0.98 and abs(rows.mean() - share) < 0.03
        agreement = [(rows[m] == rows[n]).mean() for m in range(4) for n in range(m)]
        np.testing.assert_allclose(agreement, share**2 + (1 - share) ** 2, atol=0.06)  # of independent draws


@pytest.mark.once
@pytest.mark.parametrize("options", [{}, {"axis_name": "data"}, {"axis_name": (), "check_vma": False}])
def test_params_that_all_devices_of_a_shard_map_hold_have_the_bits_of_jit(options):
    in_shard_map, in_jit = rounded_in_shard_map(P(), moments="bfloat16", **options)
    jax.tree.map(np.testing.assert_array_equal, in_shard_map, in_jit)


@pytest.mark.once
def test_in_a_shard_map_it_must_be_known_which_params_are_split():
    asked = r"must know whether the axes \('data',\) split 'params/w'; write .*, or axis_name=\(\) if all devices hold"
    for spec, check_vma in ((P("data"), True), (P("data"), False), (P(), False)):
        with pytest.raises(ValueError, match=asked):
            rounded_in_shard_map(spec, check_vma)
    with pytest.raises(ValueError, match=r"must know which params vary, .* write shard_map.*check_vma=True"):
        rounded_in_shard_map(P("data"), check_vma=False, axis_name="data")
    rounded_in_shard_map(P("data"), check_vma=False, rounding="kahan")  # draws no bits


@pytest.mark.once
def test_with_tx_goes_from_float32_to_low_precision_and_back():
    loss_fn, x, params = problem(jnp.float32)
    exact = jaxmp.loss_scaling(optax.adam(1e-2), jaxmp.NoOpLossScale())
    less = jaxmp.loss_scaling(jaxmp.low_precision(optax.adam(1e-2), moments="bfloat16"), jaxmp.NoOpLossScale())
    step = jaxmp.make_train_step(loss_fn, donate=False)
    state, _ = step(jaxmp.TrainState.create(params=params, tx=exact), x)
    there = state.with_tx(less)
    assert there.opt_state.inner_state.inner_state[0].mu["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(there.opt_state.inner_state.inner_state[0].nu["w"], np.float32),
        state.opt_state.inner_state[0].nu["w"],
        rtol=2**-7,
    )
    there, _ = step(there, x)
    back, _ = step(there.with_tx(exact), x)
    assert int(back.step) == 3 and back.opt_state.inner_state[0].mu["w"].dtype == jnp.float32
    assert int(back.opt_state.inner_state[0].count) == 3
    with pytest.raises(ValueError, match="with_tx takes the same optimizer in another precision"):
        state.with_tx(jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale()))


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:low_precision rounds bfloat16 params")  # inside of a chain, it gets float32 params
def test_only_loss_scaling_may_be_around_low_precision():
    tx, weights = jaxmp.low_precision(optax.adam(1e-3)), {"w": concrete.ones(4, jnp.bfloat16)}
    inside = jaxmp.loss_scaling(optax.chain(optax.clip(1.0), tx), jaxmp.NoOpLossScale())
    around = optax.chain(jaxmp.loss_scaling(tx, jaxmp.NoOpLossScale()), optax.scale(0.5))
    with pytest.raises(ValueError, match=r"must be directly inside loss_scaling.*; write"):
        jax.eval_shape(inside.init, weights)
    with pytest.raises(ValueError, match="must be directly inside loss_scaling"):
        jaxmp.TrainState.create(params=weights, tx=around)
    with pytest.raises(ValueError, match="must be directly inside loss_scaling"):
        jaxmp.low_precision(tx).init(weights)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="must be directly inside loss_scaling"):
        jaxmp.nnx.Optimizer(model, around)
    bare = jaxmp.TrainState.create(params=weights, tx=tx)
    assert isinstance(bare.opt_state.inner_state, low_precision.LowPrecisionState)


@pytest.mark.once
@pytest.mark.parametrize("make", ["init", "state", "with_tx", "nnx"])
def test_low_precision_warns_once_if_it_has_no_effect_because_no_param_is_bfloat16(make):
    def warned(dtype, **options):
        params, tx = {"w": concrete.ones((2, 2), dtype)}, jaxmp.low_precision(optax.adam(0.1), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if make == "init":
                jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()).init(params)
            elif make == "state":
                jaxmp.TrainState.create(params=params, tx=tx)
            elif make == "with_tx":
                plain = jaxmp.low_precision(optax.adam(0.1), moments="bfloat16")
                jaxmp.TrainState.create(params=params, tx=plain).with_tx(tx)
            else:
                jaxmp.nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0), param_dtype=dtype), tx)
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    for options in ({"rounding": "kahan", "moments": "bfloat16"}, {"rounding": "stochastic"}, {}):
        (message,) = warned(jnp.float32, **options)
        assert message.startswith("low_precision rounds bfloat16 params, but no param is bfloat16; use a policy with")
    assert warned(jnp.float32, moments="bfloat16") == warned(jnp.bfloat16, rounding="kahan") == []


@pytest.mark.once
@pytest.mark.parametrize("options", [{}, {"moments": "bfloat16"}, {"rounding": "kahan"}])
def test_optax_maps_the_params_in_a_state(options):
    tx, weights = jaxmp.low_precision(optax.adam(1e-3), **options), {"w": concrete.ones(4, jnp.bfloat16)}
    specs = optax.tree_map_params(
        tx, lambda _, spec: spec, tx.init(weights), {"w": P("data")}, transform_non_params=lambda _: P()
    )
    [adam, _] = specs.inner_state
    assert adam.mu == adam.nu == {"w": P("data")} and specs.count == adam.count == P()
    assert specs.compensation == ({"w": P("data")} if options.get("rounding") else None)


def test_with_tx_keeps_the_compensation_and_the_count():
    kahan = jaxmp.low_precision(optax.sgd(1e-4), rounding="kahan")
    params = {"w": concrete.ones((4, 8), jnp.bfloat16), "b": concrete.ones(8), "none": None}
    loss = lambda p, s, b, r: (sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(p)), s)  # noqa: E731
    step = jaxmp.make_train_step(loss, donate=False)
    state = jaxmp.TrainState.create(params=params, tx=kahan)
    for _ in range(5):
        state, _ = step(state, jnp.float32(0))
    assert state.params["w"].min() == 1
    wide = state.replace(params=jaxmp.base.trees.widen(state.params)).with_tx(optax.sgd(1e-4))
    np.testing.assert_allclose(wide.params["w"], 1 - 5e-4, rtol=1e-5)
    again = state.with_tx(jaxmp.low_precision(optax.sgd(1e-4), rounding="kahan"))
    jax.tree.map(np.testing.assert_array_equal, again.opt_state, state.opt_state)
    assert state.with_tx(jaxmp.low_precision(optax.sgd(1e-4))).opt_state.inner_state.count == 5


def test_with_tx_survives_a_step_that_donates():
    loss_fn, x, params = problem(jnp.bfloat16)
    tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())
    with pytest.warns(UserWarning, match=r"write tx = jaxmp.low_precision\(tx\)"):
        state = jaxmp.TrainState.create(params=params, tx=tx)
    state = state.with_tx(jaxmp.low_precision(optax.adam(1e-3)))
    state, _ = jaxmp.make_train_step(loss_fn)(state, x)
    assert float(state.tx.init(state.params).loss_scale.loss_scale) == 2.0**15


@pytest.mark.once
def test_an_nnx_optimizer_keeps_blocks():
    tx = jaxmp.low_precision(optax.sgd(1e-3, momentum=0.9), moments="float8", block=16)

    @nnx.jit
    def make():
        model = nnx.Linear(8, 32, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        return model, jaxmp.nnx.Optimizer(model, tx)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.mean(model(jnp.ones((4, 8))).astype(jnp.float32) ** 2))(model)
        optimizer.update(model, grads)

    model, optimizer = make()
    before = np.asarray(model.kernel[...])
    for count in (1, 2):
        step(model, optimizer)
        state = nnx.as_pure(optimizer.opt_state).inner_state
        assert int(state.count) == count and isinstance(
            state.inner_state[0].trace["kernel"], stored_moments.Float8Blocks
        )
    assert model.kernel[...].dtype == jnp.bfloat16 and np.any(np.asarray(model.kernel[...]) != before)


@pytest.mark.parametrize(
    "kind",
    [
        jax.sharding.AxisType.Auto,
        pytest.param(jax.sharding.AxisType.Explicit, marks=pytest.mark.slow("the same moments on another mesh")),
    ],
)
def test_blocks_are_sharded_like_their_param(kind):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(kind,))
    momentum = optax.sgd(1e-3, momentum=0.9)
    tx = jaxmp.loss_scaling(jaxmp.low_precision(momentum, moments="float8", block=16), jaxmp.NoOpLossScale())
    specs = {"rows": P("fsdp"), "columns": P(None, "fsdp"), "few": P(None, "fsdp")}

    def make_params():
        return {name: jnp.ones((8, 32 if name == "few" else 64), jnp.bfloat16) for name in specs}

    def loss_fn(params, model_state, batch, key):
        products = [batch @ params[name] for name in specs]
        return sum(jnp.mean(product.astype(jnp.float32)) for product in products), model_state

    state = jaxmp.TrainState.create_sharded(make_params, tx, Sharding(mesh, specs))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    moments = state.opt_state.inner_state.inner_state[0].trace
    assert moments["rows"].codes.sharding.spec == moments["rows"].scales.sharding.spec == P("fsdp")
    assert moments["columns"].codes.sharding.spec == moments["few"].codes.sharding.spec == P(None, "fsdp")
    assert moments["columns"].scales.sharding.spec == P(None, "fsdp")
    assert moments["few"].scales.sharding.spec == P()  # four devices cannot share two blocks
    step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs))
    for _ in range(2):
        state, _ = step(state, concrete.ones((8, 8), jnp.bfloat16))
    assert compiled_once(step)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == places


@pytest.mark.once
@pytest.mark.parametrize("moments", ["bfloat16", " BF16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_moments_may_be_any_name_of_a_dtype(moments):
    tx = jaxmp.low_precision(optax.sgd(0.1, momentum=0.9), moments=moments)
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)})
    assert state.inner_state[0].trace["w"].dtype == jnp.bfloat16
    assert jaxmp.low_precision(optax.adam(0.1), moments="fp8").transform.moments == "float8"


@pytest.mark.once
def test_a_mistake_is_refused():
    adam, weights = optax.adam(0.1), {"w": concrete.ones(4, jnp.bfloat16)}
    sgd = jaxmp.low_precision(optax.sgd(0.1))
    kahan = jaxmp.low_precision(adam, rounding="kahan")
    half_moments = jaxmp.low_precision(adam, moments="bfloat16")
    norm = {"w": weights["w"], "norm": concrete.ones(4)}
    state_message = r"rounding='{}', moments='{}'\) needs the state of its own init, and params in the dtypes of"
    for call, phrase in (
        (lambda: jaxmp.low_precision(adam, rounding="stochastics"), "rounding must be one of .*, got 'stochastics'"),
        (
            lambda: jaxmp.low_precision(adam, moments="int8"),
            "moments must be one of .*, got 'int8'; write e.g. moments=",
        ),
        (lambda: jaxmp.low_precision(adam, moments="bfloat61"), "one of .*, got 'bfloat61'; nearest: 'bfloat16'"),
        (
            lambda: jaxmp.low_precision(adam, block=0),
            "block must be a whole number of at least 1, got 0; write block=1 or more",
        ),
        (lambda: jaxmp.low_precision(adam, block=2.5), "block must be a whole number of at least 1, got 2.5"),
        (lambda: jaxmp.low_precision(adam, seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: sgd.init({"w": jnp.ones(4, jnp.float16)}), "'w' of float16, which loses .* make the params bfloat16"),
        (lambda: sgd.init({"w": jnp.ones(4, jnp.float8_e4m3fn)}), "'w' of float8_e4m3fn, which loses"),
        (
            lambda: jaxmp.low_precision(optax.sgd(0.1), moments="float8").init(weights),
            r"needs an optimizer with known moments, .*; leave moments out",
        ),
        (lambda: sgd.update(weights, sgd.init(weights)), "rounds params, got none"),
        (
            lambda: jaxmp.low_precision(adam).update(weights, adam.init(weights), weights),
            state_message.format("stochastic", "float32"),
        ),
        (
            lambda: jaxmp.low_precision(adam).update(weights, kahan.init(weights), weights),
            state_message.format("stochastic", "float32"),
        ),
        (
            lambda: half_moments.update(weights, jaxmp.low_precision(adam).init(weights), weights),
            state_message.format("stochastic", "bfloat16"),
        ),
        (lambda: jaxmp.low_precision(adam, rounding="nearest"), "one of 'stochastic', 'kahan', got 'nearest'"),
        (lambda: jaxmp.low_precision(adam, rounding="split"), "one of 'stochastic', 'kahan', got 'split'"),
        (lambda: jaxmp.low_precision(adam, rounding={"**": "kahan"}), "one of .*, got {'\\*\\*': 'kahan'}; nearest"),
        (
            lambda: kahan.update(norm, kahan.init(norm), {"w": norm["w"], "norm": norm["w"]}),
            state_message.format("kahan", "float32"),
        ),
        (
            lambda: kahan.update(weights, kahan.init(weights), {"w": concrete.ones(4)}),
            state_message.format("kahan", "float32"),
        ),
    ):
        with pytest.raises(ValueError, match=phrase):
            call()
