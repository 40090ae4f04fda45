"""A state is converted to the policy, the loss scale and the optimizer of the new run."""

from __future__ import annotations

import dataclasses

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_tools import refused
from flax import nnx
from optimizer_tools import bits, replace_element
from saved_runs import ADAM, BATCH, linen_run, nnx_loss, nnx_run

import jaxmp
from jaxmp import checkpoint
from jaxmp.base.trees import cast

pytest.importorskip("orbax.checkpoint")
pytestmark = [
    pytest.mark.once,  # test_saving.py saves and restores with the newest JAX
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:updates below"),  # of half params without low_precision
    pytest.mark.filterwarnings("ignore:the loss has float16 products and no loss scale"),
]
OTHER_DTYPES = pytest.mark.slow("the same with other dtypes")


@pytest.fixture(scope="module")
def trained(standard_promotion):
    """Return the state of a Linen run after three steps. No test donates it."""
    state, loss_fn = linen_run()
    step = jaxmp.make_train_step(loss_fn, ema_decay=0.9, donate=False)
    for _ in range(3):
        state, _ = step(state, BATCH)
    return state


def restored(folder, state, like, capsys, **settings):
    """Save ``state``, and return what ``like`` becomes, and the line that is printed."""
    checkpoint.save(folder, state, **settings)
    capsys.readouterr()
    new = checkpoint.restore(folder, like)
    assert jax.tree.structure(new) == jax.tree.structure(like)
    line = capsys.readouterr().out
    assert line.startswith("restored step ") and line.count("\n") == 1
    return new, line


@pytest.mark.parametrize("policy", ["bfloat16", pytest.param("mixed_bfloat16", marks=OTHER_DTYPES)])
def test_params_are_cast_once_to_the_dtypes_of_another_policy(policy, trained, tmp_path, capsys):
    state = trained
    like, loss_fn = linen_run(policy, jaxmp.NoOpLossScale(), seed=3)
    new, line = restored(tmp_path, state, like, capsys)
    dtype = jaxmp.get_policy(policy).param_dtype
    assert bits(new.params) == bits(cast(state.params, dtype))
    for name in ("ema_params", "step", "rng"):
        assert bits(getattr(new, name)) == bits(getattr(state, name))
    assert bits(new.opt_state.inner_state) == bits(state.opt_state.inner_state)
    assert line.startswith(f"restored step 3 of {tmp_path}: the loss scale DynamicLossScale -> NoOpLossScale starts fr")
    assert (f"params float32 -> {dtype}" in line) == (dtype != jnp.float32)
    new, metrics = jaxmp.make_train_step(loss_fn, ema_decay=0.9)(new, BATCH)
    assert new.step == 4 and not metrics["skipped"]

    like, _ = linen_run(seed=4)
    back, line = restored(tmp_path / "back", new, like, capsys)
    assert bits(back.params) == bits(cast(new.params, jnp.float32))
    assert back.loss_scale == 2.0**10 and "NoOpLossScale -> DynamicLossScale starts fresh" in line


def test_a_finite_param_that_is_not_finite_in_the_new_dtype_is_refused(tmp_path):
    state, _ = linen_run()
    kernel = replace_element(state.params["Dense_1"], 1, 1e5)["kernel"]
    state = state.replace(params={**state.params, "Dense_1": {**state.params["Dense_1"], "kernel": kernel}})
    checkpoint.save(tmp_path, state)
    refused(
        lambda: checkpoint.restore(tmp_path, linen_run("float16")[0]),
        ValueError,
        "'params/Dense_1/kernel' has numbers above 65504, the largest number of float16;\nrestore it as float32",
    )
    like = jax.device_put(linen_run("float16")[0], jax.devices()[1])
    with pytest.raises(ValueError, match="above 65504"):
        checkpoint.restore(tmp_path, like)
    checkpoint.restore(tmp_path, linen_run("bfloat16")[0])


def test_numbers_that_become_zero_in_the_new_dtype_are_counted(tmp_path, capsys):
    state, _ = linen_run()
    kernel = state.params["Dense_1"]["kernel"]
    small = jnp.zeros_like(kernel).at[0].set(1e-9).at[1, 0].set(6e-8)  # float16's smallest number is 6e-8
    state = state.replace(params={**state.params, "Dense_1": {**state.params["Dense_1"], "kernel": small}})
    new, line = restored(tmp_path / "float16", state, linen_run("float16")[0], capsys)
    assert f"; {kernel.shape[1]} numbers of params become 0 in float16" in line
    assert new.params["Dense_1"]["kernel"][1, 0] > 0
    for policy in ("bfloat16", "mixed_float16"):
        assert "become 0" not in restored(tmp_path / policy, state, linen_run(policy)[0], capsys)[1]


def with_counters(state, **counters):
    """Return the state with other counters of skipped steps."""
    counters = {name: jnp.int32(count) for name, count in counters.items()}
    return state.replace(opt_state=state.opt_state._replace(**counters))


def test_a_loss_scale_of_the_same_class_continues_with_the_settings_of_the_new_run(trained, tmp_path, capsys):
    like, _ = linen_run(scale=jaxmp.DynamicLossScale(8.0, period=7, hysteresis=2))
    new, line = restored(tmp_path, with_counters(trained, consecutive_skipped=4), like, capsys)
    before, after = (jaxmp.get_loss_scale(x.opt_state) for x in (trained, new))
    assert (after.loss_scale, after.counter, after.period) == (before.loss_scale, before.counter, 7)
    assert after.countdown == 2 and new.opt_state.consecutive_skipped == 4
    assert line == f"restored step 3 of {tmp_path}\n"

    state, _ = linen_run(scale=jaxmp.HeadroomLossScale(running_max=3.0, dtype="bfloat16"))
    like, _ = linen_run(scale=jaxmp.HeadroomLossScale())
    new, _ = restored(tmp_path / "headroom", state, like, capsys)
    after = jaxmp.get_loss_scale(new.opt_state)
    assert after.running_max == 3 and after.dtype == "float16"


@pytest.mark.parametrize(
    ("saved", "new", "scale", "changes"),
    [
        (
            jaxmp.DynamicLossScale(2.0**20),
            jaxmp.DynamicLossScale(2.0**8, max_loss_scale=2.0**12),
            2.0**12,
            ["loss_scale 1048576.0 -> 4096.0"],
        ),
        (
            jaxmp.DynamicLossScale(2.0),
            jaxmp.DynamicLossScale(min_loss_scale=2.0**4),
            2.0**4,
            ["loss_scale 2.0 -> 16.0"],
        ),
        (
            jaxmp.DynamicLossScale(hysteresis=50),
            jaxmp.DynamicLossScale(hysteresis=2),
            2.0**15,
            ["countdown 50 -> 2"],
        ),
        (
            jaxmp.HeadroomLossScale(loss_scale=2.0**20),
            jaxmp.HeadroomLossScale(max_loss_scale=2.0**16),
            2.0**16,
            ["loss_scale 1048576.0 -> 65536.0"],
        ),
        (jaxmp.DynamicLossScale(2.0**12, period=9), jaxmp.DynamicLossScale(max_loss_scale=2.0**15), 2.0**12, []),
    ],
    ids=["above the maximum", "below the minimum", "a long countdown", "headroom", "allowed"],
)
def test_a_restored_loss_scale_stays_within_the_bounds_of_the_new_run(saved, new, scale, changes, tmp_path, capsys):
    state, line = restored(tmp_path, linen_run(scale=saved)[0], linen_run(scale=new)[0], capsys)
    after = jaxmp.get_loss_scale(state.opt_state)
    assert after.loss_scale == scale and getattr(after, "countdown", None) in (None, 2)
    listed = "".join(f": the loss scale's {change}, within the bounds of the new run" for change in changes)
    assert line == f"restored step 0 of {tmp_path}{listed}\n"
    dataclasses.replace(after)  # the constructor accepts it


def test_a_loss_scale_of_another_class_starts_fresh_and_so_does_the_count_of_skips_in_a_row(trained, tmp_path, capsys):
    like, _ = linen_run(scale=jaxmp.HeadroomLossScale(loss_scale=2.0**5))
    saved = with_counters(trained, consecutive_skipped=9, skipped_steps=11)
    new, line = restored(tmp_path, saved, like, capsys)
    assert new.loss_scale == 2.0**5 and new.opt_state.consecutive_skipped == 0 and new.skipped_steps == 11
    assert "the loss scale DynamicLossScale -> HeadroomLossScale starts fresh" in line


def test_a_moving_average_and_a_random_key_may_begin_or_end(trained, tmp_path, capsys):
    state = trained.replace(ema_params=None)
    new, line = restored(tmp_path / "a", state, linen_run("float16", seed=2)[0], capsys)
    assert bits(new.ema_params) == bits(state.params) and bits(new.params) == bits(cast(state.params, jnp.float16))
    assert "the moving average starts at the params" in line
    new, _ = restored(tmp_path / "same", state, linen_run(seed=2)[0], capsys)
    jaxmp.make_train_step(linen_run()[1], ema_decay=0.9)(new, BATCH)  # donates the params and the average

    new, line = restored(tmp_path / "b", trained, linen_run(ema=False, rng=None)[0], capsys)
    assert new.ema_params is None and new.rng is None and bits(new.params) == bits(trained.params)
    assert "the moving average is dropped; the random key is dropped" in line
    like, _ = linen_run(seed=2)
    again, line = restored(tmp_path / "c", new, like, capsys)
    assert bits(again.rng) == bits(like.rng) and "the random key starts fresh" in line


def test_a_new_moving_average_keeps_its_own_place(tmp_path):
    def run(**fields):
        return jaxmp.TrainState.create(params={"w": concrete.arange(4.0)}, tx=optax.sgd(0.1), **fields)

    checkpoint.save(tmp_path, run())
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    sharded, on_one = jax.NamedSharding(mesh, jax.P("fsdp")), jax.sharding.SingleDeviceSharding(jax.devices()[1])
    like = run(ema=True)
    like = like.replace(params=jax.device_put(like.params, sharded))
    new = checkpoint.restore(tmp_path, like)
    assert new.params["w"].sharding == sharded and not new.ema_params["w"].committed
    assert new.ema_params["w"].devices() == {jax.devices()[0]}
    new = checkpoint.restore(tmp_path, like.replace(ema_params=jax.device_put(like.ema_params, on_one)))
    assert new.ema_params["w"].sharding == on_one and bits(new.ema_params) == bits(new.params)
    shapes = jax.eval_shape(lambda: run(ema=True))
    assert bits(checkpoint.restore(tmp_path, shapes).ema_params) == bits(new.params)


@pytest.mark.parametrize("place", [None, 1])
def test_an_integer_or_a_float64_number_that_does_not_fit_is_refused(place, tmp_path):
    def like(dtype):
        array = concrete.zeros(2, dtype)
        return {"a": array if place is None else jax.device_put(array, jax.devices()[place])}

    checkpoint.save(tmp_path, {"a": np.array([2**40, -1])}, step=1)
    texts = "'a' has integers outside int32, which has -2147483648 to 2147483647;\nrestore it as int64"
    refused(lambda: checkpoint.restore(tmp_path, like("int32")), ValueError, texts)
    checkpoint.save(tmp_path, {"a": np.array([1e300, 1])}, step=2)
    refused(lambda: checkpoint.restore(tmp_path, like("float32")), ValueError, "the largest number of float32")
    checkpoint.save(tmp_path, {"a": np.array([2**31 - 1, -1])}, step=3)
    assert checkpoint.restore(tmp_path, like("int32"))["a"].tolist() == [2**31 - 1, -1]
    refused(lambda: checkpoint.restore(tmp_path, like("uint32")), ValueError, "'a' has integers outside uint32")
    checkpoint.save(tmp_path, {"a": concrete.array([7, 200], jnp.int32)}, step=4)
    refused(lambda: checkpoint.restore(tmp_path, like("int8")), ValueError, "'a' has integers outside int8")
    checkpoint.save(tmp_path, {"a": np.array([1 + 2j, 1e300j])}, step=5)
    refused(lambda: checkpoint.restore(tmp_path, like("complex64")), ValueError, "the largest number of complex64")


def test_python_numbers_restore_from_arrays_and_into_arrays(tmp_path, capsys):
    new, line = restored(
        tmp_path / "a", {"step": jnp.int32(7), "rate": jnp.float32(0.5)}, {"step": 0, "rate": 0.1}, capsys, step=1
    )
    assert new == {"step": 7, "rate": 0.5} and type(new["step"]) is int and line.endswith("/a\n")
    new, line = restored(tmp_path / "b", {"step": 7}, {"step": jnp.int32(0)}, capsys, step=1)
    assert new["step"].dtype == jnp.int32 and new["step"] == 7 and "step int64 -> int32" in line


def test_keys_of_another_implementation_are_restored_as_they_were(tmp_path, capsys):
    rbg = jax.random.key(1, impl="rbg")
    new, _ = restored(tmp_path / "a", linen_run(rng=rbg)[0], linen_run()[0], capsys)
    assert str(jax.random.key_impl(new.rng)) == "rbg" and bits(new.rng) == bits(rbg)
    raw, _ = restored(tmp_path / "b", linen_run(rng=1)[0], linen_run(rng=jax.random.PRNGKey(5))[0], capsys)
    assert bits(raw.rng) == bits(jax.random.PRNGKey(1))


@pytest.mark.parametrize("rounding", ["kahan", pytest.param("stochastic", marks=OTHER_DTYPES)])
def test_the_optimizer_may_gain_or_lose_low_precision(rounding, trained, tmp_path, capsys):
    def half_run(seed):
        tx = jaxmp.low_precision(ADAM, rounding=rounding)
        return linen_run("bfloat16", jaxmp.NoOpLossScale(), tx, seed)

    state = trained
    like, _ = half_run(seed=2)
    new, line = restored(tmp_path / "a", state, like, capsys)
    expected = cast(state, jnp.bfloat16).params
    assert bits(new.params) == bits(expected) and "; low_precision starts; " in line
    assert bits(new.opt_state.inner_state.inner_state) == bits(state.opt_state.inner_state)

    @jax.jit
    def update(state):
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params), ema_decay=0.9)

    for _ in range(3):
        new = update(new)
    assert new.step == 6

    back, line = restored(tmp_path / "b", new, linen_run(seed=3)[0], capsys)
    assert "; low_precision is dropped; " in line
    assert bits(back.opt_state.inner_state) == bits(new.opt_state.inner_state.inner_state)
    assert bits(back.params) == bits(cast(new.params, jnp.float32))
    same = checkpoint.restore(tmp_path / "b", half_run(seed=4)[0])
    whole = same.replace(params=cast(same.params, jnp.float32)).with_tx(ADAM)
    assert (bits(whole.params) != bits(back.params)) == (rounding == "kahan")
    assert ("the compensation of the params is dropped" in line) == (rounding == "kahan")

    other = {"stochastic": "kahan", "kahan": "stochastic"}[rounding]
    like, _ = linen_run("bfloat16", jaxmp.NoOpLossScale(), jaxmp.low_precision(ADAM, rounding=other))
    rounded, line = restored(tmp_path / "c", new, like, capsys)
    assert bits(rounded.params) == bits(new.params) and rounded.opt_state.inner_state.count == 3
    assert f"the compensation of the params {'starts at 0' if other == 'kahan' else 'is dropped'}" in line
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rounded.opt_state.inner_state.compensation))
    like, _ = linen_run("bfloat16", jaxmp.NoOpLossScale(), optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"'opt_state/inner_state/inner_state/0/count' int32\[\] is in .*not in the state"
    ):
        checkpoint.restore(tmp_path / "c", like)


def test_each_param_may_gain_or_lose_its_compensation(tmp_path, capsys):
    def run(first, second):
        params = {"a": concrete.ones(4, first), "b": concrete.ones(4, second)}
        return jaxmp.TrainState.create(params=params, tx=jaxmp.low_precision(ADAM, rounding="kahan"))

    for first, end in (("bfloat16", "starts at 0"), ("float32", "is dropped")):
        second = "float32" if first == "bfloat16" else "bfloat16"
        new, line = restored(tmp_path / first, run("bfloat16", second), run(first, "bfloat16"), capsys)
        compensation = new.opt_state.inner_state.compensation
        assert (compensation["a"] is None) == (first == "float32") and not np.any(compensation["b"])
        assert f"the compensation of the params {end}" in line


@pytest.mark.parametrize("like", ["kahan", "stochastic", None])
def test_split_master_weights_are_refused(like, tmp_path):
    def run(tx):
        return jaxmp.TrainState.create(params={"w": concrete.ones(4, jnp.bfloat16)}, tx=tx)

    state = run(jaxmp.low_precision(optax.sgd(1e-3), rounding="kahan"))
    inner_state = state.opt_state.inner_state._replace(compensation={"w": concrete.ones(4, jnp.int8)})
    checkpoint.save(tmp_path, state.replace(opt_state=state.opt_state._replace(inner_state=inner_state)))
    tx = optax.sgd(1e-3) if like is None else jaxmp.low_precision(optax.sgd(1e-3), rounding=like)
    with pytest.raises(
        ValueError, match=r"compensation/w' in .* is a part of split master weights \(rounding='split'\)"
    ):
        checkpoint.restore(tmp_path, run(tx))


def test_an_nnx_model_is_restored_under_another_policy_and_loss_scale(tmp_path, capsys):
    step = jaxmp.nnx.make_train_step(nnx_loss, ema_decay=0.9)
    model, optimizer = nnx_run()
    step(model, optimizer, BATCH)
    saved = nnx.as_pure(nnx.state(model, nnx.Param))
    checkpoint.save(tmp_path, (model, optimizer))
    other, other_optimizer = nnx_run("bfloat16", jaxmp.NoOpLossScale(), seed=3, ema=False)
    checkpoint.restore(tmp_path, (other, other_optimizer))
    assert bits(nnx.as_pure(nnx.state(other, nnx.Param))) == bits(cast(saved, jnp.bfloat16))
    assert other_optimizer.loss_scale == 1 and other_optimizer.step[...] == 1 and other_optimizer.ema is None
    line = capsys.readouterr().out
    for text in ("params float32 -> bfloat16 (6 arrays)", "NoOpLossScale starts fresh", "moving average is dropped"):
        assert text in line
    jaxmp.nnx.make_train_step(nnx_loss)(other, other_optimizer, BATCH)


def test_another_model_or_optimizer_is_refused_with_the_first_path(tmp_path):
    state, _ = linen_run()
    checkpoint.save(tmp_path, state)

    def like(**params):
        return jaxmp.TrainState.create(params=params, tx=state.tx, model_state=state.model_state, rng=0, ema=True)

    remedy = "restore into the model and the optimizer that were saved"
    saved = dict(state.params)
    bias, integers = concrete.zeros(3), jax.tree.map(lambda x: concrete.array(x, jnp.int32), saved["Dense_0"])
    for other, *texts in [
        (like(**saved, Dense_2={"bias": bias}), "'params/Dense_2/bias' float32[3] is in the state that you "),
        (like(**{name: saved[name] for name in saved if name != "Dense_0"}), "'params/Dense_0/bias' float32[6] is in "),
        (like(**{**saved, "Dense_0": {"bias": concrete.zeros(7), "kernel": saved["Dense_0"]["kernel"]}}),
         f"'params/Dense_0/bias' is float32[6] in {tmp_path}/0, but float32[7] in the state that you passed"),
        (linen_run(tx=optax.sgd(0.1))[0], "'opt_state/inner_state/0/count' int32[] is in ", "but not in the state "),
        (like(**{**saved, "Dense_0": integers}), "float32[6]", "but int32[6] in the state that you passed"),
    ]:  # fmt: skip
        refused(lambda other=other: checkpoint.restore(tmp_path, other), ValueError, *texts, remedy)

    shapes = jax.eval_shape(lambda: linen_run(scale=jaxmp.NoOpLossScale(), rng=None)[0])
    checkpoint.restore(tmp_path, with_counters(shapes, consecutive_skipped=0))
    shapes = jax.eval_shape(lambda: linen_run(scale=jaxmp.HeadroomLossScale())[0])
    refused(
        lambda: checkpoint.restore(tmp_path, shapes),
        ValueError,
        "'opt_state/loss_scale/loss_scale' was not saved, so it needs a value, but the state that you passed",
    )
