"""jaxmp.low_precision: bfloat16 params that learn, moments in 16 and 8 bits."""

from __future__ import annotations

import flax.serialization
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
from jaxmp.optim.stochastic_rounding import Draw, stochastic_bfloat16, stochastic_float8
from jaxmp.optim.stored_moments import in_bfloat16, in_float8
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes by itself

DRAWS = 2**20


def draws(value, half=0):
    bits = Draw(3, jnp.int32(7), "w").bits((DRAWS,))[half]
    return jnp.full((DRAWS,), value, jnp.float32), bits


def is_unbiased(values, exact):
    """Within three standard errors of a choice between two neighbours."""
    values = np.asarray(values).astype(np.float64)
    low, high = values.min(), values.max()
    p = (exact - low) / (high - low)
    assert 0 < p < 1 and len(np.unique(values)) == 2
    return abs(values.mean() - exact) < 3 * (high - low) * np.sqrt(p * (1 - p) / DRAWS)


class TestStochasticRounding:
    @pytest.mark.once
    @pytest.mark.parametrize("value", [1.001, -1.001, 0.3, -0.3, 3e-39, -1e-40, 1e30])
    def test_bfloat16_is_unbiased(self, value):
        values, bits = draws(value)
        found = stochastic_bfloat16(values, bits)
        assert is_unbiased(found, float(np.float32(value)))
        assert np.all(np.sign(np.asarray(found, np.float64)) * np.sign(value) >= 0)

    @pytest.mark.once
    @pytest.mark.parametrize("value", [300.3, -300.3, 1.03, 0.01, -0.003, 0.0011, 447.9])
    def test_float8_is_unbiased_and_on_its_grid(self, value):
        found = stochastic_float8(*draws(value, 1))
        np.testing.assert_array_equal(
            np.asarray(found), np.asarray(found.astype(jnp.float8_e4m3fn).astype(jnp.float32))
        )
        assert is_unbiased(found, float(np.float32(value)))

    def test_what_needs_no_rounding_stays(self):
        exact = jnp.asarray([0.0, -0.0, 1.0, -2.5, 2.0**-130, np.inf, -np.inf, np.nan], jnp.float32)
        most = jnp.full(exact.shape, 0xFFFF, jnp.uint32)
        found = np.asarray(stochastic_bfloat16(exact, most).astype(jnp.float32))
        np.testing.assert_array_equal(found, np.asarray(exact))
        assert np.signbit(found[1])
        grid = jnp.asarray([0.0, 448.0, -448.0, 2.0**-9, 1.125], jnp.float32)
        np.testing.assert_array_equal(stochastic_float8(grid, most[:5]), grid)

    @pytest.mark.parametrize("word", [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF])
    def test_a_nan_stays_one_whatever_its_bits(self, word):
        nan = jax.lax.bitcast_convert_type(jnp.uint32(word), jnp.float32)
        assert bool(jnp.isnan(stochastic_bfloat16(nan, jnp.uint32(0xFFFF)).astype(jnp.float32)))

    @pytest.mark.once
    def test_draws_differ_by_seed_update_and_param_and_look_random(self):
        def bits(seed, step, name):
            return np.asarray(Draw(seed, jnp.int32(step), name).bits((256, 256))[0]).astype(np.float64)

        base = bits(0, 0, "w")
        assert abs(base.mean() / 2**16 - 0.5) < 3 / np.sqrt(12 * base.size)
        for other in (bits(1, 0, "w"), bits(0, 1, "w"), bits(0, 0, "v"), bits(2**32, 0, "w"), np.roll(base, 1), base.T):
            assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.012  # 3 / 256

    @pytest.mark.once
    def test_no_two_seeds_share_their_draws(self):
        drawn = {
            np.asarray(Draw(seed, jnp.int32(step), "w").bits((8,))[0]).tobytes()
            for seed in range(8)
            for step in range(8)
        }
        assert len(drawn) == 64

    def test_bits_are_those_of_the_position_on_any_devices(self):
        mesh = jax.make_mesh((4,), ("d",))
        tx = jaxmp.low_precision(optax.adam(1e-3), moments="float8", block=16)
        weights = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.bfloat16)}
        grads = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)), jnp.float32)}
        step = jax.jit(tx.update)
        alone, _ = step(grads, tx.init(weights), weights)
        for spec in (P("d"), P(None, "d")):
            place = NamedSharding(mesh, spec)
            split = {"w": jax.device_put(weights["w"], place)}
            found, _ = step({"w": jax.device_put(grads["w"], place)}, tx.init(split), split)
            np.testing.assert_array_equal(np.asarray(found["w"]), np.asarray(alone["w"]))


def problem(dtype):
    """A linear regression with a batch for each step."""
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
class TestParams:
    def test_they_learn_where_nearest_rounding_stalls(self):
        tx = optax.adam(1e-3)  # steps of 0.001: half a unit in the last place of a weight of 1 is 0.002
        exact = trained(tx, jnp.float32)
        nearest = trained(jaxmp.low_precision(tx, rounding="nearest"), jnp.bfloat16)
        assert nearest > 1.05 * exact
        for rounding_ in ("stochastic", "kahan"):
            assert abs(trained(jaxmp.low_precision(tx, rounding=rounding_), jnp.bfloat16) / exact - 1) < 0.01, rounding_

    @pytest.mark.parametrize("params", ["stochastic", "kahan", "nearest"])
    def test_apply_updates_gives_the_rounded_param(self, params):
        rng = np.random.default_rng(2)
        weights = {"w": jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.integers(-3, 3, 4096), jnp.bfloat16)}
        change = jnp.asarray(rng.normal(size=4096) * 1e-2, jnp.float32)
        tx = jaxmp.low_precision(optax.sgd(1.0), rounding=params)
        updates, _ = tx.update({"w": -change}, tx.init(weights), weights)
        new = optax.apply_updates(weights, updates)["w"]
        exact = np.asarray(weights["w"], np.float64) + np.asarray(change, np.float64)
        below = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
        assert new.dtype == jnp.bfloat16 and updates["w"].dtype == jnp.float32
        if params == "stochastic":
            unit = np.abs(exact) * 2.0**-7
            assert np.all(np.abs(np.asarray(new, np.float64) - exact) <= unit)
        else:
            np.testing.assert_array_equal(np.asarray(new, np.float64), below)
        same = np.asarray(new) == np.asarray(weights["w"])
        assert same.any() and np.all(np.signbit(np.asarray(updates["w"])[same]))

    def test_float32_leaves_are_left_alone(self):
        weights = {"norm": jnp.ones(8), "w": jnp.ones(8, jnp.bfloat16)}
        tx = jaxmp.low_precision(optax.sgd(1e-4))
        updates, _ = tx.update({"norm": jnp.ones(8), "w": jnp.ones(8)}, tx.init(weights), weights)
        np.testing.assert_array_equal(updates["norm"], np.float32(-1e-4))

    def test_kahan_keeps_what_rounding_took(self):
        weights, tx = {"w": jnp.ones((), jnp.bfloat16)}, jaxmp.low_precision(optax.sgd(1.0), rounding="kahan")
        state = tx.init(weights)
        for _ in range(100):
            updates, state = tx.update({"w": jnp.float32(-1e-3)}, state, weights)
            weights = optax.apply_updates(weights, updates)
        assert abs(float(weights["w"]) + float(state.compensation["w"]) - 1.1) < 2e-3

    def test_kahan_takes_params_with_none_and_float32_among_them(self):
        weights = {"w": jnp.ones(4, jnp.bfloat16), "none": None, "norm": jnp.ones(4), "x": jnp.ones(2, jnp.bfloat16)}
        tx = jaxmp.low_precision(optax.sgd(1e-3), rounding="kahan")
        updates, state = tx.update(jax.tree.map(jnp.ones_like, weights), tx.init(weights), weights)
        assert updates["none"] is None and state.compensation["norm"] is None
        np.testing.assert_array_equal(state.compensation["w"], jnp.asarray([-1e-3] * 4, jnp.bfloat16))
        np.testing.assert_array_equal(state.compensation["x"], jnp.asarray([-1e-3] * 2, jnp.bfloat16))

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_what_is_not_finite_is_seen(self, bad):
        weights = {"w": jnp.ones(4, jnp.bfloat16)}
        tx = jaxmp.low_precision(optax.sgd(1.0), moments="float32")
        updates, _ = tx.update({"w": jnp.asarray([bad, 0, 0, 0], jnp.float32)}, tx.init(weights), weights)
        assert not np.isfinite(np.asarray(updates["w"])[0]) and np.isfinite(np.asarray(updates["w"])[1:]).all()

    def test_a_skipped_step_advances_nothing(self):
        tx = jaxmp.loss_scaling(
            jaxmp.low_precision(optax.adam(1e-2), rounding="kahan", moments="float8", block=8), jaxmp.DynamicLossScale()
        )
        weights = {"w": jnp.ones((8, 8), jnp.bfloat16)}
        grads = {"w": jnp.full((8, 8), 32768.0)}
        _, state = tx.update(grads, tx.init(weights), weights)
        updates, skipped = tx.update({"w": grads["w"].at[0, 0].set(np.inf)}, state, weights)
        assert int(skipped.skipped) == 1 and int(state.inner_state.count) == int(skipped.inner_state.count) == 1
        jax.tree.map(np.testing.assert_array_equal, skipped.inner_state, state.inner_state)
        np.testing.assert_array_equal(optax.apply_updates(weights, updates)["w"], weights["w"])


@pytest.mark.once
class TestMoments:
    @pytest.mark.parametrize("moments", ["bfloat16", "float8"])
    def test_training_reaches_the_loss_of_float32_moments(self, moments):
        exact = trained(optax.adam(1e-2), jnp.float32)
        stored = trained(jaxmp.low_precision(optax.adam(1e-2), moments=moments, block=8), jnp.float32)
        assert abs(stored / exact - 1) < 0.05

    def test_each_is_stored_as_the_table_says(self):
        tx = jaxmp.low_precision(optax.chain(optax.clip(1.0), optax.adamw(1e-3)), moments="float8", block=16)
        state = tx.init({"w": jnp.ones((4, 32), jnp.bfloat16), "odd": jnp.ones((4, 20), jnp.bfloat16)})
        adam = state.inner_state[1][0]
        assert adam.mu["w"].codes.dtype == jnp.float8_e4m3fn and adam.mu["w"].scales.shape == (4, 2)
        assert adam.nu["w"].squared and not adam.mu["w"].squared
        assert adam.mu["odd"].dtype == adam.nu["odd"].dtype == jnp.float32
        text = str(tx)
        assert "bfloat16 params rounded stochastically (seed 0)" in text
        assert "mu/w: float8_e4m3fn, rounded stochastically, a scale for 16" in text
        assert "nu/w: root in float8_e4m3fn" in text and "count: as it is" in text

    @pytest.mark.parametrize(
        ("make", "fields"),
        [
            (lambda: optax.sgd(0.1, momentum=0.9), {"trace"}),
            (lambda: optax.lion(1e-3), {"mu"}),
            (lambda: optax.rmsprop(1e-3), {"nu"}),
            (lambda: optax.rmsprop(1e-3, bias_correction=True), {"nu"}),
            (lambda: optax.adadelta(1e-3), {"e_g", "e_x"}),
            (lambda: optax.adan(1e-3), {"m", "v", "n"}),
            (lambda: optax.amsgrad(1e-3), {"mu", "nu"}),
            (lambda: optax.adabelief(1e-3), {"mu", "nu"}),
            (lambda: optax.adagrad(1e-3), {"sum_of_squares"}),
            (lambda: optax.masked(optax.adam(1e-3), {"w": True}), {"mu", "nu"}),
            (lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), {"mu", "nu"}),
        ],
    )
    def test_moments_of_optax_are_known(self, make, fields):
        tx = jaxmp.low_precision(make(), moments="bfloat16")
        weights = {"w": jnp.ones((4, 4), jnp.bfloat16)}
        state = tx.init(weights)
        halves = [path for path, leaf in jax.tree.leaves_with_path(state) if leaf.dtype == jnp.bfloat16]
        assert {str(path[-2]).strip(".'[]") for path in halves} == fields
        _, new = jax.jit(tx.update)({"w": jnp.ones((4, 4))}, state, weights)
        assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(lambda leaf: leaf.dtype, state)

    def test_a_difference_of_moments_is_kept_exact(self):
        """The variance nu - mu² of a centred RMSProp, rounded, would be negative, and every param NaN."""
        tx = optax.rmsprop(1e-3, centered=True)
        with pytest.raises(ValueError, match=r"none that is known \(ScaleByRStdDevState.*leave moments out"):
            jaxmp.low_precision(tx, moments="bfloat16").init({"w": jnp.ones((4, 4))})
        both = jaxmp.low_precision(optax.chain(tx, optax.trace(0.9)), moments="bfloat16").init({"w": jnp.ones((4, 4))})
        assert both.inner_state[0][0].nu["w"].dtype == jnp.float32
        assert both.inner_state[1].trace["w"].dtype == jnp.bfloat16

    @pytest.mark.parametrize("moments", ["float32", "float8"])
    def test_what_the_optimizer_keeps_in_half_stays_as_it_keeps_it(self, moments):
        weights = {"w": jnp.ones((4, 16), jnp.bfloat16)}
        tx = optax.chain(optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.contrib.schedule_free_sgd(1e-3))
        tx = jaxmp.low_precision(tx, moments=moments, block=16)
        state = tx.init(weights)
        schedule_free = state.inner_state[1]
        halved = schedule_free._replace(z=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), schedule_free.z))
        state = state._replace(inner_state=(state.inner_state[0], halved))
        _, new = jax.jit(tx.update)(weights, state, weights)
        assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(lambda leaf: leaf.dtype, state)
        assert new.inner_state[0].mu["w"].dtype == new.inner_state[1].z["w"].dtype == jnp.bfloat16
        assert "0/mu/w: as it is" in str(tx)

    @pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
    def test_params_of_other_dtypes_are_refused(self, dtype):
        with pytest.raises(
            ValueError, match=f"got 'w' of {dtype}, whose range loses small weights; make the params bf"
        ):
            jaxmp.low_precision(optax.sgd(0.1)).init({"w": jnp.ones(4, dtype)})

    @pytest.mark.parametrize("other", [optax.adam(0.1), jaxmp.low_precision(optax.adam(0.1), rounding="kahan")])
    def test_the_state_of_another_optimizer_is_refused(self, other):
        weights = {"w": jnp.ones(4, jnp.bfloat16)}
        with pytest.raises(
            ValueError, match=r"rounding='stochastic'\) needs the state that its own init made, got one of"
        ):
            jaxmp.low_precision(optax.adam(0.1)).update(weights, other.init(weights), weights)

    def test_the_table_of_an_optimizer_that_wants_other_params(self):
        tx = jaxmp.low_precision(optax.masked(optax.adam(1e-3), {"x": True}), moments="bfloat16")
        assert "moments: bfloat16, rounded stochastically; their names depend on the params" in str(tx)

    def test_flax_writes_and_reads_blocks(self):
        tx, weights = jaxmp.low_precision(optax.adam(1e-3), moments="float8", block=2), {"w": jnp.ones((2, 4))}
        _, state = tx.update(weights, tx.init(weights), weights)
        found = flax.serialization.from_bytes(tx.init(weights), flax.serialization.to_bytes(state))
        assert jax.tree.structure(found) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, found, state)

    def test_a_positive_second_moment_never_becomes_0(self):
        values = jnp.asarray([[1e-36, 1e-12, 1e-6, 1.0], [0.0, 1e-36, 1e-37, 2e-38]], jnp.float32)
        for moments in ("bfloat16", "float8"):
            draw = Draw(0, jnp.int32(0), "nu")
            is_half = moments == "bfloat16"
            stored = in_bfloat16(values, True, draw) if is_half else in_float8(values, True, 4, draw)
            decoded = np.asarray(stored_moments.decoded({"nu": stored})["nu"])
            assert np.all((decoded > 0) == (np.asarray(values) > 0)), moments

    def test_codes_are_as_exact_as_their_format(self):
        values = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.float32)
        draw = Draw(0, jnp.int32(0), "mu")
        signed = np.asarray(in_float8(values, False, 256, draw).decoded())
        second = np.asarray(in_float8(values**2, True, 256, draw).decoded())
        exact = np.asarray(values, np.float64)
        assert np.linalg.norm(signed - exact) / np.linalg.norm(exact) < 0.05
        assert np.linalg.norm(second - exact**2) / np.linalg.norm(exact**2) < 0.09
        assert abs(signed.mean() - exact.mean()) < 1e-3

    def test_codes_are_of_the_moments_that_the_update_makes(self):
        rng, block = np.random.default_rng(3), 16
        weights = {"w": jnp.asarray(rng.normal(size=(8, 64)), jnp.bfloat16)}
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
        tx = jaxmp.low_precision(inner, moments="float8", block=block)
        state = tx.init(weights)
        for _ in range(3):
            grads = {"w": jnp.asarray(rng.normal(size=(8, 64)), jnp.float32)}
            _, exact = inner.update(grads, stored_moments.decoded(state.inner_state), weights)
            _, state = jax.jit(tx.update)(grads, state, weights)
            for name, root in (("mu", np.asarray), ("nu", np.sqrt)):
                want, found = (getattr(each[1][0], name)["w"] for each in (exact, state.inner_state))
                above = 2.0 ** (1 + np.floor(np.log2(np.abs(want).reshape(8, 4, block).max(-1))))
                np.testing.assert_array_equal(found.scales, above)
                want = np.abs(root(want)).reshape(8, 4, block) / root(above)[..., None] * 448
                codes = np.abs(np.asarray(found.codes, np.float32).reshape(want.shape))
                step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(codes, 2.0**-6)) - 3), 2.0**-9)
                assert np.all(np.abs(codes - want) <= 2 * step)

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    @pytest.mark.parametrize("kind", ["signed", "second"])
    def test_a_block_with_what_is_not_finite_is_not_finite(self, bad, kind):
        moment = jnp.ones((2, 16)).at[0, 3].set(bad)
        found = in_float8(moment, kind == "second", 16, Draw(0, jnp.int32(1), "w")).decoded()
        assert not np.isfinite(found[0]).any() and np.isfinite(found[1]).all()

    def test_params_and_state_have_the_same_bits_on_any_devices(self):
        rng = np.random.default_rng(0)
        weights, grads = (rng.normal(size=(8, 512)).astype(np.float32) for _ in range(2))
        tx = jaxmp.low_precision(optax.adamw(1e-2), moments="float8", block=128)

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        found = []
        for devices, spec in [(1, P()), (2, P("data")), (4, P("data")), (4, P(None, "data"))]:
            auto = (jax.sharding.AxisType.Auto,)
            mesh = jax.make_mesh((devices,), ("data",), axis_types=auto, devices=jax.devices()[:devices])
            params, own = (jax.device_put(each, NamedSharding(mesh, spec)) for each in (weights, grads))
            params, state = params.astype(jnp.bfloat16), jax.jit(tx.init)(params.astype(jnp.bfloat16))
            for _ in range(4):
                params, state = step(params, state, own)
            found.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))])
        assert all(each == found[0] for each in found)

    def test_bits_a_param(self):
        weights = {"w": jnp.ones((256, 512), jnp.bfloat16)}

        def bytes_a_param(**options):
            state = jax.eval_shape(jaxmp.low_precision(optax.adam(1e-3), **options).init, weights)
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / weights["w"].size

        assert round(bytes_a_param(), 2) == 8.00
        assert round(bytes_a_param(moments="bfloat16"), 2) == 4.00
        assert round(bytes_a_param(moments="float8"), 2) == 2.03
        assert round(bytes_a_param(rounding="kahan", moments="bfloat16"), 2) == 6.00


class TestOfATrainState:
    def test_goes_from_float32_to_low_precision_and_back(self):
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
    def test_nothing_but_loss_scaling_may_stand_around_it(self):
        tx, weights = jaxmp.low_precision(optax.adam(1e-3)), {"w": jnp.ones(4, jnp.bfloat16)}
        inside = jaxmp.loss_scaling(optax.chain(optax.clip(1.0), tx), jaxmp.NoOpLossScale())
        around = optax.chain(jaxmp.loss_scaling(tx, jaxmp.NoOpLossScale()), optax.scale(0.5))
        with pytest.raises(ValueError, match=r"nothing but loss_scaling may stand around it: .* put it outside"):
            inside.init(weights)
        with pytest.raises(ValueError, match="nothing but loss_scaling may stand around it"):
            jaxmp.TrainState.create(params=weights, tx=around)
        with pytest.raises(ValueError, match="nothing but loss_scaling may stand around it"):
            jaxmp.low_precision(tx).init(weights)
        bare = jaxmp.TrainState.create(params=weights, tx=tx)
        assert isinstance(bare.opt_state.inner_state, low_precision.LowPrecisionState)

    def test_with_tx_keeps_what_kahan_kept_and_the_count_of_draws(self):
        kahan = jaxmp.low_precision(optax.sgd(1e-4), rounding="kahan")
        params = {"w": jnp.ones((4, 8), jnp.bfloat16), "b": jnp.ones(8), "none": None}
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

    def test_with_tx_keeps_the_dtype_that_the_optimizer_wants_of_a_moment(self):
        adam = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
        state = jaxmp.TrainState.create(params={"w": jnp.ones(4, jnp.bfloat16)}, tx=jaxmp.low_precision(adam))
        assert state.with_tx(adam).opt_state.inner_state[0].mu["w"].dtype == jnp.bfloat16

    def test_with_tx_goes_on_with_the_norm(self):
        tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.NoOpLossScale(), grad_norm=True)
        state = jaxmp.TrainState.create(params={"w": jnp.ones(4)}, tx=tx)
        assert state.with_tx(jaxmp.low_precision(optax.adam(1e-3))).opt_state.grad_norm.shape == ()

    def test_with_tx_survives_a_step_that_donates(self):
        loss_fn, x, params = problem(jnp.bfloat16)
        tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())
        state = jaxmp.TrainState.create(params=params, tx=tx).with_tx(jaxmp.low_precision(optax.adam(1e-3)))
        state, _ = jaxmp.make_train_step(loss_fn)(state, x)
        assert float(state.tx.init(state.params).loss_scale.loss_scale) == 2.0**15

    @pytest.mark.once
    def test_an_nnx_optimizer_keeps_blocks(self):
        model = nnx.Linear(8, 32, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        tx = jaxmp.low_precision(optax.adam(1e-3), moments="float8", block=16)
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        before = model.kernel[...]
        grads = nnx.grad(lambda model: jnp.mean(model(jnp.ones((4, 8))).astype(jnp.float32) ** 2))(model)
        for count in (1, 2):
            optimizer.update(model, grads)
            state = nnx.as_pure(optimizer.opt_state).inner_state
            assert int(state.count) == count and isinstance(
                state.inner_state[0].mu["kernel"], stored_moments.Float8Blocks
            )
        assert model.kernel[...].dtype == jnp.bfloat16 and np.any(np.asarray(model.kernel[...] != before))

    def test_an_nnx_optimizer_lets_nothing_stand_around_it(self):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        inner = jaxmp.loss_scaling(jaxmp.low_precision(optax.sgd(1.0)), jaxmp.NoOpLossScale())
        with pytest.raises(ValueError, match="nothing but loss_scaling may stand around it"):
            jaxmp.nnx.Optimizer(model, optax.chain(inner, optax.scale(0.5)))

    @pytest.mark.parametrize("block", [16, 64])
    def test_its_blocks_are_split_as_their_param_is(self, block):
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
        tx = jaxmp.loss_scaling(
            jaxmp.low_precision(optax.adam(1e-3), moments="float8", block=block), jaxmp.NoOpLossScale()
        )
        specs = {"rows": P("fsdp"), "columns": P(None, "fsdp")}

        def make_params():
            return {name: jnp.ones((64, 128), jnp.bfloat16) for name in specs}

        def loss_fn(params, model_state, batch, key):
            whole = jaxmp.sharding.gather(params, specs, "bfloat16")
            return jnp.mean((batch @ whole["rows"] * (batch @ whole["columns"])).astype(jnp.float32)), model_state

        state = jaxmp.TrainState.create_sharded(make_params, tx, Sharding(mesh, specs))
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        moments = state.opt_state.inner_state.inner_state[0].mu
        assert moments["rows"].codes.sharding.spec == moments["rows"].scales.sharding.spec == P("fsdp")
        assert moments["columns"].codes.sharding.spec == P(None, "fsdp")
        assert moments["columns"].scales.sharding.spec == (P(None, "fsdp") if block == 16 else P())
        step = jaxmp.make_train_step(loss_fn)
        with jax.set_mesh(mesh):
            batch = jax.device_put(jnp.ones((8, 64), jnp.bfloat16), P("fsdp"))
            for _ in range(2):
                state, _ = step(state, batch)
        assert compiled_once(step)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == places


@pytest.mark.once
class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"rounding": "stochastics"},
                "rounding must be one of 'stochastic', 'kahan', 'nearest', got 'stochastics'",
            ),
            ({"moments": "int8"}, "moments must be one of 'float32', 'bfloat16', 'float8', got 'int8'"),
            ({"block": 0}, "block must be a whole number of at least 1, got 0"),
            ({"block": 2.5}, "block must be a whole number of at least 1, got 2.5"),
            ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ],
    )
    def test_of_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            jaxmp.low_precision(optax.adam(1e-3), **options)

    def test_of_params_and_optimizers(self):
        with pytest.raises(ValueError, match=r"got 'w' of float16, whose range .* make the params bfloat16"):
            jaxmp.low_precision(optax.adam(1e-3)).init({"w": jnp.ones(4, jnp.float16)})
        with pytest.raises(ValueError, match=r"has none that is known \(.*\); leave moments out"):
            jaxmp.low_precision(optax.sgd(0.1), moments="float8").init({"w": jnp.ones(4, jnp.bfloat16)})
        tx = jaxmp.low_precision(optax.sgd(0.1))
        with pytest.raises(ValueError, match="rounds params, got none"):
            tx.update({"w": jnp.ones(4)}, tx.init({"w": jnp.ones(4, jnp.bfloat16)}))
