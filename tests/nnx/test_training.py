"""jaxmp.nnx.make_train_step gives the results of loops written by hand."""

from __future__ import annotations

import inspect
from typing import Any

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_tools import noted
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from linen_zoo import data, same_bits
from nnx_zoo import rngs, values
from optimizer_tools import bits
from recompiles import compiled_once

import jaxmp
from jaxmp.nnx import Optimizer, apply_policy, make_train_step, value_and_grad
from jaxmp.program.walk import product_dtypes

ROWS = {"x": data(8, 8), "y": data(8, 8, seed=5)}
BAD = {**ROWS, "x": jnp.asarray(np.where(np.arange(8)[:, None] == 3, np.inf, ROWS["x"]))}
MOMENTUM, SGD = optax.sgd(0.1, momentum=0.9), optax.sgd(0.1)


pytestmark = pytest.mark.usefixtures("standard_promotion")  # NNX's norms and optax's Adam mix dtypes


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def mlp(seed: int = 0, **dtypes: Any) -> nnx.Sequential:
    layers = nnx.Linear(8, 8, rngs=rngs(seed), **dtypes), nnx.tanh, nnx.Linear(8, 8, rngs=rngs(seed + 1), **dtypes)
    return nnx.Sequential(*layers)


def setup(model: Any = None, policy: str = "mixed_float16", scale: Any = None, tx: Any = None, **kwargs: Any) -> Any:
    model = apply_policy(Net() if model is None else model, policy)
    loss_scale = scale or jaxmp.DynamicLossScale(2.0**10)
    return model, Optimizer(model, tx or MOMENTUM, loss_scale=loss_scale, **kwargs)


step_of_loss = make_train_step(loss_fn)  # compiles once for all equal models with the same optimizer


def host(*trees: Any) -> Any:
    return jax.tree.map(np.array, trees)


def close(got: Any, want: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)


# ---- the same numbers


@pytest.mark.once
def test_a_step_gives_the_same_numbers_as_value_and_grad_and_update():
    (model, optimizer), (twin, twin_optimizer) = setup(), setup()

    for batch in (ROWS, BAD, ROWS):
        metrics = step_of_loss(model, optimizer, batch)
        np.testing.assert_allclose(metrics["loss"], hand_written_step(twin, twin_optimizer, batch), rtol=1e-3)
    close(values(model), values(twin), rtol=2e-3, atol=1e-4)
    counts = [nnx.as_pure(nnx.state(node, nnx.RngCount)) for node in (model, twin)]
    assert bits(counts[0]) == bits(counts[1])
    assert (int(optimizer.step[...]), int(optimizer.skipped_steps), float(optimizer.loss_scale)) == (3, 1, 512.0)
    assert (int(twin_optimizer.step[...]), int(twin_optimizer.skipped_steps)) == (3, 1)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, name="norm")(nn.Dense(8, name="one")(x))
        return nn.Dense(8, name="two")(nn.relu(x))


class NNXNet(nnx.Module):
    def __init__(self) -> None:
        self.one, self.two = nnx.Linear(8, 8, rngs=rngs()), nnx.Linear(8, 8, rngs=rngs(1))
        self.norm = nnx.BatchNorm(8, momentum=0.9, epsilon=1e-5, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.two(nnx.relu(self.norm(self.one(x))))


class Net(NNXNet):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nnx.Dropout(0.5, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.drop(x))


@pytest.mark.once
def test_steps_give_the_same_numbers_as_the_linen_step_on_the_same_weights():
    policy = "float32"
    options: Any = {"accumulate_steps": 2, "ema_decay": 0.9}
    model, linen = apply_policy(NNXNet(), policy), jaxmp.linen.apply_policy(LinenNet(), policy)
    tx = jaxmp.loss_scaling(optax.sgd(0.1, momentum=0.9), jaxmp.DynamicLossScale(2.0**10))

    def linen_loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        out, new = linen.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new, {"largest": jnp.max(out)}

    def nnx_loss(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), {"largest": jnp.max(out)}

    params, stats = (
        jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model, kind))) for kind in (nnx.Param, nnx.BatchStat)
    )
    state = jaxmp.TrainState.create(params=params, tx=tx, model_state={"batch_stats": stats}, ema=True)
    optimizer = Optimizer(model, tx, ema=True)
    step, linen_step = make_train_step(nnx_loss, **options), jaxmp.make_train_step(linen_loss, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    for batch in (ROWS, BAD, ROWS):
        metrics, (state, expected) = step(model, optimizer, batch), linen_step(state, batch)
        close(metrics, expected, **tolerance)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), state.params, **tolerance)
    close(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), state.model_state["batch_stats"], **tolerance)
    close(nnx.to_pure_dict(optimizer.ema), state.ema_params, **tolerance)
    assert int(optimizer.skipped_steps) == int(state.skipped_steps) == 1


@pytest.mark.once
@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_loss_function_that_writes_to_a_trained_param_raises_and_works_in_a_step_by_hand(norm):
    normed = norm(nnx.Linear(8, 8, rngs=rngs()), rngs=rngs())
    model, optimizer = setup(nnx.Sequential(normed, nnx.tanh, nnx.Linear(8, 8, rngs=rngs(1))), "float32", tx=SGD)
    message = r"got a write to 'layers/0/layer_instance/kernel', .*\nwrite your own step with jaxmp.nnx.value_and_grad"
    for accumulate_steps in (1, 2):
        with pytest.raises(ValueError, match=message):
            make_train_step(loss_fn, accumulate_steps=accumulate_steps)(model, optimizer, ROWS)
    losses = [float(hand_written_step(model, optimizer, ROWS)) for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_the_moving_average_is_float32_and_steps_do_not_delete_the_model_with_it():
    model, optimizer = setup(nnx.Linear(8, 8, rngs=rngs()), "bfloat16", tx=optax.sgd(0.5), ema=True)
    step = make_train_step(lambda model, batch: loss_fn(model, batch).astype(jnp.float32), ema_decay=0.75)
    average = np.asarray(model.kernel[...], np.float64)
    for _ in range(2):
        step(model, optimizer, ROWS)
        average = 0.75 * average + 0.25 * np.asarray(model.kernel[...], np.float64)
    assert optimizer.ema["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(optimizer.ema["kernel"], average, atol=2e-3)  # only the params are rounded
    copy = optimizer.ema_model(model)
    same_bits(copy.kernel[...], optimizer.ema["kernel"].astype(jnp.bfloat16))
    expected = copy(ROWS["x"])
    step(model, optimizer, ROWS)
    same_bits(copy(ROWS["x"]), expected)
    assert type(copy) is type(model) and copy.kernel is not model.kernel


@pytest.mark.once
def test_only_the_variables_that_wrt_selects_are_trained_and_averaged():
    base = nnx.Linear(8, 8, rngs=rngs())
    model = apply_policy(nnx.LoRA(8, 2, 8, base_module=base, rngs=rngs()), "mixed_bfloat16")
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam, ema=True)
    before = np.array(base.kernel[...])
    make_train_step(loss_fn, ema_decay=0.5)(model, optimizer, ROWS)
    same_bits(base.kernel[...], before)
    assert np.any(model.lora_b[...] != 0) and set(optimizer.ema) == {"lora_a", "lora_b"}


def test_a_shared_layer_is_trained_once_and_stays_shared():
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.one = nnx.Linear(8, 8, rngs=rngs())
            self.again = self.one

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again(nnx.tanh(self.one(x)))

    model, optimizer = setup(Tied(), "mixed_bfloat16", tx=optax.sgd(0.1))
    before = np.array(model.one.kernel[...])
    make_train_step(lambda model, x: jnp.mean(model(x) ** 2))(model, optimizer, ROWS["x"])
    assert model.again is model.one and np.any(np.asarray(model.one.kernel[...]) != before)


# ---- one program


def test_a_step_with_other_options_checks_the_policy_again():
    step, losses = make_train_step(loss_fn), []
    for other in (step.with_options(policy="float32"), make_train_step(loss_fn, policy="float32")):
        model = mlp()
        optimizer = Optimizer(model, optax.sgd(0.1))
        losses.append(float(other(model, optimizer, ROWS)["loss"]))
    assert losses[0] == losses[1]
    jaxmp.nnx.apply_policy(model, "mixed_bfloat16")  # returns another model
    with pytest.raises(ValueError, match="apply_policy"):
        make_train_step(loss_fn, policy="float32").with_options(policy=None)(model, optimizer, ROWS)


class Blocks(nnx.Module):
    """Two blocks in a loop, with or without ``nnx.remat``."""

    def __init__(self, remat: bool) -> None:
        self.first, self.remat = nnx.Linear(8, 8, rngs=rngs()), remat
        self.norms = nnx.vmap(lambda _: nnx.BatchNorm(8, rngs=rngs()), in_axes=0, out_axes=0)(jnp.arange(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        def block(norm: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(norm(x))

        block = nnx.remat(block) if self.remat else block
        first = nnx.remat(nnx.Linear.__call__) if self.remat else nnx.Linear.__call__
        return nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.norms, first(self.first, x))


@pytest.mark.once
def test_params_that_remat_and_scan_return_count_as_written_only_if_their_values_change():
    outcomes = {}
    for remat in (False, True):
        model, optimizer = setup(Blocks(remat), "float32", jaxmp.NoOpLossScale(), SGD)
        step = make_train_step(lambda model, batch: jnp.mean(model(batch["x"]) ** 2), accumulate_steps=2)
        outcomes[remat] = [step(model, optimizer, ROWS)["loss"] for _ in range(3)], values(model)
    assert bits(outcomes[True]) == bits(outcomes[False]) and compiled_once(step.of_trees)

    def nudged(layer: Any, x: jax.Array) -> jax.Array:
        layer.bias[...] += 1
        return layer(x)

    def writes(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(nnx.remat(nudged)(getattr(model, "first", model), batch["x"]) ** 2)

    # remat returns some of the first model's params, and all params of the second.
    for layers, written in ((Blocks(True), "first/bias"), (Blocks(True).first, "bias")):
        model, optimizer = setup(layers, "float32", tx=optax.sgd(0.0))
        with pytest.raises(ValueError, match=f"got a write to '{written}'"):
            make_train_step(writes, accumulate_steps=2)(model, optimizer, ROWS)


@pytest.mark.once
def test_autocast_of_the_loss_function_makes_products_half_and_keeps_writes_to_variables():
    model = Net()
    optimizer = Optimizer(model, SGD)
    step = make_train_step(loss_fn, policy="mixed_bfloat16", accumulate_steps=2, remat="nothing_saveable")
    assert " dot_general" not in (text := step.lower(model, optimizer, ROWS).as_text()) and "bf16" in text
    before = np.array(model.norm.mean[...])
    assert np.isfinite(step(model, optimizer, ROWS)["loss"]) and int(model.drop.rngs.count[...]) == 2
    assert np.any(np.asarray(model.norm.mean[...]) != before) and model.norm.mean[...].dtype == jnp.float32
    with pytest.raises(ValueError, match="names a class that does not exist"):
        make_train_step(loss_fn, policy="mixed_bfloat16", overrides={"class:nothing": "float32"})(
            model, optimizer, ROWS
        )


@pytest.mark.once
def test_steps_compile_once_do_not_wait_and_reuse_the_memory_of_the_model():
    model, optimizer = setup(nnx.Sequential(mlp(), nnx.Dropout(0.5, rngs=rngs())), ema=True)
    kernel, moment = (
        model.layers[0].layers[0].kernel[...],
        jax.tree.leaves(nnx.as_pure(optimizer.opt_state.inner_state))[1],
    )
    step = make_train_step(loss_fn, ema_decay=0.9, accumulate_steps=2)
    step(model, optimizer, ROWS)
    with jax.transfer_guard("disallow"):
        for batch in (BAD, ROWS, ROWS):
            step(model, optimizer, batch)
    assert compiled_once(step.of_trees) and kernel.is_deleted() and moment.is_deleted()


@pytest.mark.once
def test_without_donation_an_earlier_clone_stays_alive():
    model, optimizer = setup(mlp(), tx=SGD)
    twin = nnx.clone(model)
    make_train_step(loss_fn, donate=False)(model, optimizer, ROWS)
    kernel, old = (np.asarray(node.layers[0].kernel[...]) for node in (model, twin))
    assert np.all(np.isfinite(old)) and np.any(kernel != old)
    step_of_loss(model, optimizer, ROWS)
    stale = nnx.clone(model)
    step_of_loss(model, optimizer, ROWS)
    with pytest.raises(RuntimeError, match=r"'params/layers/0/bias' was donated .*donate=False"):
        step_of_loss(stale, optimizer, ROWS)


@pytest.mark.once
def test_a_target_network_in_the_batch_may_be_a_clone():
    def distance(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["target"](batch["x"]) - 1) ** 2)

    def train(donate: bool) -> list[float]:
        model, optimizer = setup(mlp(), tx=SGD)
        target, step = nnx.clone(model), make_train_step(distance, donate=donate)
        return [float(step(model, optimizer, {"x": ROWS["x"], "target": target})["loss"]) for _ in range(3)]

    assert train(donate=True) == train(donate=False)


def test_a_step_works_inside_of_nnx_jit():
    model, optimizer = setup(mlp(), tx=optax.sgd(0.1))
    step = make_train_step(loss_fn)
    before = np.array(model.layers[0].kernel[...])
    metrics = nnx.jit(lambda model, optimizer, batch: step(model, optimizer, batch))(model, optimizer, ROWS)
    assert np.isfinite(metrics["loss"]) and np.any(np.asarray(model.layers[0].kernel[...]) != before)


@pytest.mark.once
def test_a_sharded_batch_beside_a_replicated_model_compiles_once():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    model, optimizer = setup(mlp(), tx=SGD)
    replicated, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("d",)))
    nnx.update(model, jax.device_put(nnx.state(model), replicated))
    (twin, twin_optimizer), step = setup(mlp(), tx=SGD), make_train_step(loss_fn)
    for n in (1, np.inf, 2):
        metrics = step(model, optimizer, jax.device_put({**ROWS, "x": n * ROWS["x"]}, rows))
    assert compiled_once(step.of_trees) and metrics["loss_scale"] == 512 and int(optimizer.skipped_steps) == 1
    for n in (1, np.inf, 2):
        step_of_loss(twin, twin_optimizer, {**ROWS, "x": n * ROWS["x"]})
    close(values(model), values(twin), rtol=2e-2, atol=2e-3)
    assert model.layers[0].kernel[...].sharding.is_equivalent_to(replicated, 2)


def test_the_arrays_of_an_optimizer_are_not_those_of_the_model():
    """Copy arrays: two results of ``jax.device_put`` may share a donated buffer."""

    def update(grads: Any, first_params: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda grad: -0.1 * grad, grads), first_params

    model = mlp()
    keeps_first_params = optax.GradientTransformation(lambda params: params, update)  # as optax.contrib.dog does
    optimizer = jaxmp.nnx.Optimizer(model, keeps_first_params, ema=True)
    of_model, of_optimizer = (jax.tree.leaves(nnx.as_pure(nnx.state(node))) for node in (model, optimizer))
    assert not {*map(id, of_model)} & {*map(id, of_optimizer)}
    replicated = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec())
    for node in (model, optimizer):
        nnx.update(node, jax.device_put(nnx.state(node), replicated))
    step = make_train_step(loss_fn, ema_decay=0.9)
    assert all(np.isfinite(step(model, optimizer, ROWS)["loss"]) for _ in range(2))


# ---- random numbers and skipped steps


class Masks(nnx.Module):
    def __init__(self) -> None:
        self.linear, self.drop = nnx.Linear(64, 64, rngs=rngs()), nnx.Dropout(0.5, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(jnp.ones((64,))) * self.linear(x)


def test_every_microbatch_of_every_step_has_a_different_dropout_mask():
    def loss_fn(model: Any, x: jax.Array) -> Any:
        mask = model.drop(jnp.ones(64))
        return jnp.mean(model.linear(x) * mask), {"mask": mask}

    model, optimizer = setup(Masks(), "float32", tx=optax.sgd(0.0))
    step = make_train_step(loss_fn, accumulate_steps=2)
    masks = [np.asarray(step(model, optimizer, concrete.full((2, 64), x))["mask"]) for x in (1.0, np.nan, 1.0)]
    # A mask has entries 0 and 2. If the mean of two masks has a 1, the masks differ.
    assert all(set(np.unique(mask)) == {0, 1, 2} for mask in masks)
    assert len({mask.tobytes() for mask in masks}) == 3 and int(model.drop.rngs.count[...]) == 6


@pytest.mark.once
def test_a_skipped_step_changes_only_the_scale_the_counters_and_the_rng_counts():
    accumulate_steps = 2
    model, optimizer = setup(ema=True)
    step = make_train_step(loss_fn, ema_decay=0.9, accumulate_steps=accumulate_steps)
    step(model, optimizer, ROWS)
    before = host(values(model), nnx.as_pure(optimizer.opt_state).inner_state, optimizer.ema)
    metrics = step(model, optimizer, BAD)
    assert metrics["skipped"] and np.isnan(metrics["loss"]) and metrics["loss_scale"] == 2.0**10
    same_bits((values(model), nnx.as_pure(optimizer.opt_state).inner_state, optimizer.ema), before)
    assert int(model.drop.rngs.count[...]) == 2 * accumulate_steps
    assert (int(optimizer.skipped_steps), float(optimizer.loss_scale), int(optimizer.step[...])) == (1, 512.0, 2)
    step(model, optimizer, ROWS)
    assert np.any(np.asarray(model.norm.mean[...]) != before[0]["norm"]["mean"]) and int(optimizer.skipped_steps) == 1


@pytest.mark.once
def test_a_saved_optimizer_resumes_bit_for_bit():
    (model, optimizer), (twin, twin_optimizer) = (
        setup(nnx.Sequential(mlp(), nnx.Dropout(0.5, rngs=rngs())), ema=True) for _ in range(2)
    )
    step = make_train_step(loss_fn, ema_decay=0.9)
    for n in (1, np.nan):
        step(model, optimizer, {**ROWS, "x": n * ROWS["x"]})
    saved = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    nnx.update((twin, twin_optimizer), saved)
    for pair in ((model, optimizer), (twin, twin_optimizer)):
        step(*pair, ROWS)
    assert bits(nnx.state((twin, twin_optimizer))) == bits(nnx.state((model, optimizer)))


# ---- errors


@pytest.mark.once
def test_invalid_results_of_a_loss_function_are_errors():
    model, optimizer = setup(mlp())
    for result, text in (
        (lambda loss: jnp.stack([loss, loss]), r"got float32 of shape \(2,\); take its mean: jnp.mean"),
        (lambda loss: (loss, {}, {}), r"got tuple of 3; return loss, or \(loss, metrics\), in this order"),
        (lambda loss: ({}, loss), r"got dict; return loss, or \(loss, metrics\), in this order"),
        (lambda loss: loss.astype(jnp.int32), r"got int32 of shape \(\); compute it from floating values"),
        (lambda loss: (loss, loss), r"the metrics of a loss function are a dict, got float32 of shape \(\)"),
        (lambda loss: loss.astype(jnp.float16), "must be float32, got float16"),
    ):
        with pytest.raises(TypeError, match=text):
            make_train_step(lambda model, batch, result=result: result(loss_fn(model, batch)))(model, optimizer, ROWS)


@pytest.mark.once
def test_invalid_arguments_are_errors():
    with pytest.raises(TypeError, match=r"takes \(model, batch\), got one of \(p, s, b, r\); write def loss_fn"):
        make_train_step(lambda p, s, b, r: p)
    with pytest.raises(TypeError, match=r"is a function, got None; write def loss_fn\(model, batch\)$"):
        make_train_step(None)
    with pytest.raises(ValueError, match="accumulate_steps must be a whole number"):
        make_train_step(loss_fn, accumulate_steps=0)
    model, _ = setup(mlp())
    takes_other = r"\(model, optimizer\) takes a jaxmp\.nnx\.Optimizer, got flax\.nnx\.\S*Optimizer; "
    with pytest.raises(TypeError, match=takes_other):
        make_train_step(loss_fn)(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), ROWS)
    optimizer = Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.StaticLossScale(2.0))
    with pytest.raises(TypeError, match=r"batch statistics would be lost;\nwrite jaxmp\.nnx\.value_and_grad"):
        jaxmp.value_and_grad(loss_fn, optimizer.opt_state)(nnx.BatchNorm(8, rngs=rngs()), ROWS)
    assert jaxmp.value_and_grad(loss_fn, optimizer.opt_state)(model, ROWS)[0].dtype == jnp.float32
    model, optimizer = setup(mlp())
    state, variable = nnx.state(model), nnx.Param(concrete.ones(2))
    plain = nnx.to_pure_dict(state), nnx.split(model), concrete.ones(2), {"a": state}, [], nnx.Rngs(0), variable
    for wrong in (optimizer, nn.Dense(2), None, state, *plain):
        came = rf"with an NNX model, got \S*\.{type(wrong).__name__}; "
        with pytest.raises(TypeError, match=rf"step takes \(model, optimizer, batch\) {came}"):
            make_train_step(loss_fn)(wrong, optimizer, ROWS)
        with pytest.raises(TypeError, match=rf"jaxmp\.nnx\.Optimizer takes \(model, tx\) {came}"):
            jaxmp.nnx.Optimizer(wrong, optax.sgd(0.1))
        for put in (jaxmp.nnx.apply_policy, jaxmp.nnx.autocast):
            with pytest.raises(TypeError, match=rf"takes a flax\.nnx\.Module, got \S*\.{type(wrong).__name__}; "):
                put(wrong, "mixed_bfloat16")
    with pytest.raises(TypeError, match="with an NNX model, got the class Linear; "):
        jaxmp.nnx.Optimizer(nnx.Linear, optax.sgd(0.1))

    for_nnx, general = (inspect.signature(make).parameters for make in (make_train_step, jaxmp.make_train_step))
    assert list(for_nnx) == list(general) and "sharding" in for_nnx
    assert all(for_nnx[name] == general[name] for name in general if name != "loss_fn")
    with pytest.raises(TypeError, match="unexpected keyword argument 'accumulate'"):
        make_train_step(loss_fn, accumulate=2)


jitted_loss = nnx.jit(loss_fn)


@nnx.jit
def hand_written_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    """Take a step that is written as in the guide."""
    loss, grads = value_and_grad(loss_fn, optimizer)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def flax_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    """Take a step with the gradients of ``nnx.value_and_grad``."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def jaxmp_step(*args: Any) -> jax.Array:
    return step_of_loss(*args)["loss"]


@pytest.mark.parametrize(
    ("step", "adapter"),
    [(jaxmp_step, apply_policy), (hand_written_step, jaxmp.nnx.autocast), (flax_step, apply_policy)],
)
def test_training_the_original_model_in_place_of_its_copy_raises(step, adapter):
    net = mlp()
    model, scale = adapter(net, "mixed_bfloat16"), jaxmp.NoOpLossScale()
    before = host(values(net))
    for optimizer in (
        Optimizer(model, SGD, loss_scale=scale),
        Optimizer(net, SGD, loss_scale=scale),
    ):
        with pytest.raises(ValueError, match="training needs the model that apply_policy or autocast returned"):
            step(net, optimizer, ROWS)
        same_bits(host(values(net)), before)
        loss_in_half = jitted_loss(model, ROWS)
        assert float(step(model, optimizer, ROWS)) == pytest.approx(float(loss_in_half), rel=1e-3)
        before = host(values(net))


@pytest.mark.once
def test_the_original_of_an_evaluation_copy_trains_under_an_explicit_float32_policy():
    net, twin = mlp(), mlp()
    apply_policy(net, "bfloat16")
    model = apply_policy(net, "float32")
    for trained in (model, twin):
        jaxmp_step(trained, Optimizer(trained, optax.sgd(0.1)), ROWS)
    close(values(net), values(twin))


@pytest.mark.once
def test_the_original_of_a_copy_trains_only_in_a_step_that_has_a_policy():
    net = mlp()
    apply_policy(net, "bfloat16")
    optimizer, step = Optimizer(net, optax.sgd(0.1)), make_train_step(loss_fn, policy="mixed_bfloat16")
    assert np.isfinite(step(net, optimizer, ROWS)["loss"])
    clone = nnx.clone(net)  # has copies of the arrays
    assert np.isfinite(make_train_step(loss_fn)(clone, Optimizer(clone, optax.sgd(0.1)), ROWS)["loss"])

    net = mlp()
    optimizer = Optimizer(net, optax.sgd(0.1))
    apply_policy(net, "mixed_bfloat16")
    with pytest.raises(ValueError, match="training needs the model that apply_policy or autocast returned"):
        make_train_step(loss_fn)(net, optimizer, ROWS)


@pytest.mark.once
def test_a_tree_of_models_or_variables_can_be_trained_like_a_model():
    for model in ([nnx.Linear(2, 1, rngs=nnx.Rngs(0))], {"kernel": nnx.Param(concrete.ones((2, 1)))}):
        optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
        step = make_train_step(lambda model, x: jnp.sum(x @ jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))[-1]))
        assert jnp.isfinite(step(model, optimizer, concrete.ones((3, 2)))["loss"]) and int(optimizer.skipped_steps) == 0


@pytest.mark.once
def test_a_moving_average_without_a_decay_and_a_decay_without_an_average_raise():
    model, optimizer = setup(mlp())
    with pytest.raises(ValueError, match=r"ema_decay needs a moving average .*jaxmp.nnx.Optimizer\(..., ema=True\)"):
        make_train_step(loss_fn, ema_decay=0.9)(model, optimizer, ROWS)
    with pytest.raises(ValueError, match=r"ema_model needs a moving average: jaxmp.nnx.Optimizer\(model, tx, ema=True"):
        optimizer.ema_model(model)
    model, optimizer = setup(mlp(), ema=True)
    with pytest.raises(ValueError, match="that this step would never update; pass make_train_step"):
        make_train_step(loss_fn)(model, optimizer, ROWS)
    with pytest.raises(
        ValueError, match=r"update does not update a moving average.*make_train_step\(loss_fn, ema_decay"
    ):
        optimizer.update(model, nnx.state(model, nnx.Param))


def test_a_loss_function_that_changes_more_than_values_of_variables_raises():
    def sows(model: Any, batch: Any) -> jax.Array:
        model.seen = nnx.Intermediate(batch["x"])
        return loss_fn(model, batch)

    def pops(model: Any, batch: Any) -> jax.Array:
        loss = sows(model, batch)
        nnx.pop(model, nnx.Intermediate)
        return loss

    def counts(model: Any, batch: Any) -> jax.Array:
        model.calls = 1
        return loss_fn(model, batch)

    def lists(model: Any, batch: Any) -> jax.Array:
        model.seen = ("a",)
        return loss_fn(model, batch)

    def reshapes(model: Any, batch: Any) -> jax.Array:
        loss = loss_fn(model, batch)
        model.layers[0].bias.set_value(jnp.ones(1))
        return loss

    model, optimizer = setup(mlp())
    for changes in (sows, counts, lists):
        with pytest.raises(ValueError, match=r"added, removed or changed\nother attributes\. .*\n.*: nnx.pop\(model"):
            make_train_step(changes)(model, optimizer, ROWS)
    make_train_step(pops)(model, optimizer, ROWS)
    with pytest.raises(ValueError, match="got a write to 'layers/0/bias'"):
        make_train_step(reshapes)(model, optimizer, ROWS)


def test_the_error_for_arrays_that_a_step_deleted_in_another_model_says_to_copy_them():
    def distance(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["target"](batch["x"])) ** 2)

    (model, optimizer), (target, other) = (setup(mlp(seed), tx=SGD) for seed in (0, 1))
    step, follow, batch = step_of_loss, make_train_step(distance), {**ROWS, "target": target}
    nnx.update(target, nnx.state(model))
    step(model, optimizer, ROWS)
    with pytest.raises(RuntimeError, match="was donated to an earlier step, which deleted it; before the step, copy"):
        step(target, other, ROWS)
    for graph in (True, False):
        with (
            nnx.set_graph_mode(graph),
            pytest.raises(RuntimeError, match=r"'layers/0/bias' was donated .*; before the step, copy"),
        ):
            target(ROWS["x"])

    def mean(target: Any) -> jax.Array:
        return jnp.mean(target(ROWS["x"]))

    for gradient in (nnx.grad(mean), value_and_grad(mean, optimizer)):
        error = noted(lambda gradient=gradient: gradient(target), "write make_train_step(..., donate=False)")
        assert "has been deleted" in str(error)
    nnx.update(target, jax.tree.map(jnp.copy, nnx.state(model)))
    follow(model, optimizer, batch)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(values(target)))


@pytest.mark.once
def test_a_loss_function_that_sets_the_mode_of_the_model_raises():
    def trains(model: Any, batch: Any) -> jax.Array:
        model.train()
        return loss_fn(model, batch)

    model = apply_policy(nnx.Sequential(mlp(), nnx.Dropout(0.5, rngs=rngs())), "mixed_bfloat16")
    optimizer, step = Optimizer(model, optax.sgd(0.1)), make_train_step(trains)
    model.eval()
    with pytest.raises(ValueError, match=r"Call model.train\(\) or model.eval\(\) before the step,"):
        step(model, optimizer, ROWS)
    model.train()
    assert np.isfinite(step(model, optimizer, ROWS)["loss"])


def test_a_loss_function_cannot_write_to_objects_in_the_batch():
    def updates(model: Any, batch: Any) -> jax.Array:
        loss = loss_fn(model, batch)
        batch["metric"].update(values=loss)
        return loss

    def draws(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"])) * batch["rngs"].uniform()

    batch = {**ROWS, "metric": nnx.metrics.Average(), "rngs": nnx.Rngs(0)}
    for loss, options in ((updates, {}), (draws, {}), (updates, {"policy": "mixed_bfloat16"})):
        model = mlp() if options else apply_policy(mlp(), "mixed_bfloat16")
        with pytest.raises(TraceContextError, match="Cannot mutate") as error:
            make_train_step(loss, **options)(model, Optimizer(model, optax.sgd(0.1)), batch)
        assert any("put both models into one module" in note for note in error.value.__notes__)


def test_the_products_of_a_model_under_a_policy_have_its_compute_dtype():
    model, optimizer = setup(mlp(), "mixed_float16")
    step = make_train_step(loss_fn, accumulate_steps=2)
    program = jax.make_jaxpr(lambda batch: step(*nnx.clone((model, optimizer)), batch))(ROWS)
    assert product_dtypes(program) == {"float16"}
