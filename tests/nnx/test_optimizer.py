"""jaxmp.nnx.Optimizer and value_and_grad scale losses and skip steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_tools import refused
from flax import nnx
from linen_zoo import data, same_bits
from nnx_zoo import rngs, values
from optimizer_tools import bits

import jaxmp
from jaxmp.nnx import Optimizer, apply_policy, value_and_grad

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("standard_promotion"),  # NNX's norms and optax's Adam mix dtypes
]

X, TARGET = data(4, 8), data(4, 8, seed=8)
BAD = jnp.asarray(np.where(np.arange(4)[:, None] == 1, np.nan, X))
MOMENTUM = optax.sgd(0.1, momentum=0.9)


class Net(nnx.Module):
    """A layer, a norm that keeps statistics, and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(self.linear(x)))


class Small(nnx.Module):
    """A weight and a statistic. It has few operations, for tests without jit."""

    def __init__(self) -> None:
        ones, zeros = (jnp.asarray(np.full(8, value, np.float32)) for value in (1, 0))
        self.weight, self.mean = nnx.Param(ones), nnx.BatchStat(zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x * self.weight
        self.mean[...] = y.mean(0)
        return y


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - TARGET) ** 2)


def gradients(model: Any, optimizer: Any, x: jax.Array) -> Any:
    return value_and_grad(loss_fn, optimizer)(model, x)


def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = gradients(model, optimizer, x)
    optimizer.update(model, grads)
    return loss


# These compile once for all models under equal policies and optimizers with the same optax optimizer.
step, jitted_gradients = nnx.jit(train), nnx.jit(gradients)
jitted_update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))


def setup(tx: Any = None, policy: str = "mixed_float16", scale: Any = 2.0**10, **kwargs: Any) -> tuple[Any, Any]:
    model = apply_policy(Net(rngs()), policy)
    loss_scale = jaxmp.DynamicLossScale(loss_scale=scale)
    return model, Optimizer(model, MOMENTUM if tx is None else tx, loss_scale=loss_scale, **kwargs)


def small(scale: Any = 4.0) -> tuple[Any, Any]:
    model = Small()
    return model, Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.DynamicLossScale(loss_scale=scale))


def without_scale(optimizer: Any) -> Any:
    """Return the state of the wrapped optimizer."""
    return jaxmp.optim.scaling_state.get_loss_scaling_state(nnx.as_pure(optimizer.opt_state)).inner_state


def test_a_skipped_step_changes_only_the_rng_counts_of_the_model():
    model, optimizer = setup()
    step(model, optimizer, X)
    before, state, count = values(model), without_scale(optimizer), int(model.drop.rngs.count[...])
    before, state = jax.tree.map(np.asarray, (before, state))
    assert np.isnan(step(model, optimizer, BAD))
    same_bits(values(model), before)
    same_bits(without_scale(optimizer), state)
    assert int(model.drop.rngs.count[...]) == count + 1
    assert (int(optimizer.skipped_steps), float(optimizer.loss_scale), int(optimizer.step[...])) == (1, 2.0**9, 2)
    step(model, optimizer, X)
    assert not np.array_equal(values(model)["norm"]["mean"], before["norm"]["mean"])
    assert int(optimizer.skipped_steps) == 1


def test_an_overflow_in_the_updates_restores_the_statistics():
    overflow = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * jnp.inf, updates))
    model = Net(rngs())
    tx = jaxmp.loss_scaling(overflow, jaxmp.DynamicLossScale(2.0**10), check_updates=True)
    optimizer = Optimizer(model, tx)
    before = jax.tree.map(np.asarray, values(model))
    assert np.isfinite(nnx.jit(train)(model, optimizer, X))
    same_bits(values(model), before)
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [(lambda model: model, lambda model: model), (lambda model: {"a": (model,)}, lambda tree: tree["a"][0])],
    ids=["modules", "pytrees"],
)
def test_an_overflow_of_the_gradient_norm_restores_the_statistics_of_every_module(wrap, unwrap):
    model, other = Small(), Small()
    optimizer = Optimizer(wrap(model), optax.sgd(0.1), loss_scale=jaxmp.DynamicLossScale(1.0))

    def product_loss(trained, others, x):
        return 1e30 * jnp.mean(unwrap(trained)(x) * unwrap(others)(x))

    before = jax.tree.map(np.asarray, (values(model), values(other)))
    trained = wrap(model)
    _, grads = value_and_grad(product_loss, optimizer)(trained, wrap(other), X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.as_pure(grads)))
    optimizer.update(trained, grads)
    same_bits((values(model), values(other)), before)
    assert int(optimizer.skipped_steps) == 1


def test_a_skipped_step_changes_nothing_if_gradients_and_update_are_jitted_separately():
    model, optimizer = setup()
    for x, skipped in ((X, 0), (BAD, 1), (X, 1)):
        before = jax.tree.map(np.asarray, values(model))
        _, grads = jitted_gradients(model, optimizer, x)
        jitted_update(model, optimizer, grads)
        assert int(optimizer.skipped_steps) == skipped
        assert (bits(values(model)) == bits(before)) == (x is BAD)


def test_a_skipped_step_of_several_microbatches_restores_the_values_before_the_first():
    model, optimizer = setup()
    before = jax.tree.map(np.asarray, values(model))
    grads = [jitted_gradients(model, optimizer, x)[1] for x in (X, BAD, X)]
    jitted_update(model, optimizer, jax.tree.map(lambda *leaves: sum(leaves) / 3, *grads))
    same_bits(values(model), before)
    assert int(optimizer.skipped_steps) == 1


def test_a_run_scaled_by_a_power_of_two_has_the_bits_of_an_unscaled_run_of_flax():
    tx = optax.adamw(1e-2)
    model, twin = Net(rngs()), Net(rngs())
    optimizer = Optimizer(model, tx, loss_scale=jaxmp.StaticLossScale(2.0**7))
    flax_optimizer = nnx.Optimizer(twin, tx, wrt=nnx.Param)

    @nnx.jit
    def by_flax(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    for _ in range(3):
        same_bits(step(model, optimizer, X), by_flax(twin, flax_optimizer, X))
    same_bits(values(model), values(twin))
    same_bits(without_scale(optimizer), nnx.as_pure(flax_optimizer.opt_state))


def test_aux_argnums_and_a_diff_state_are_passed_on():
    model, optimizer = small()

    def with_aux(x: jax.Array, model: Any) -> Any:
        return loss_fn(model, x), {"mean": x.mean()}

    (loss, aux), grads = value_and_grad(with_aux, optimizer, argnums=1, has_aux=True)(X, model)
    only = nnx.DiffState(1, nnx.PathContains("weight"))
    for argnums, is_one in ((jnp.int32(1), True), (np.array([1]), False)):
        _, same = value_and_grad(with_aux, optimizer, argnums=argnums, has_aux=True)(X, model)
        assert isinstance(same, nnx.State) is is_one
    (_, _), part = value_and_grad(with_aux, optimizer, argnums=only, has_aux=True)(X, model)
    assert loss.dtype == jnp.float32 and float(aux["mean"]) == float(X.mean())
    assert set(nnx.as_pure(part)) == {"weight"} == set(nnx.as_pure(grads))


def test_an_optimizer_with_loss_scaling_is_not_wrapped_again():
    model = Small()
    optimizer = Optimizer(model, optax.chain(jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(4.0))))
    assert float(optimizer.loss_scale) == 4.0
    train(model, optimizer, BAD)
    assert int(optimizer.skipped_steps) == 1 and np.all(np.isfinite(model.weight[...]))


@pytest.mark.parametrize("makes_step", [True, False], ids=["make_train_step", "update"])
def test_masks_and_labels_by_path_see_the_paths_of_the_params(makes_step):
    def labels(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key, params)

    def loss_of_bias(model, _):
        return model.bias[...].sum() + 0 * model.kernel[...].sum()

    tx = optax.partition({"kernel": optax.set_to_zero(), "bias": optax.sgd(1.0, momentum=0.9)}, labels)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    kernel, optimizer = np.asarray(model.kernel[...]), Optimizer(model, tx)
    if makes_step:
        jaxmp.nnx.make_train_step(loss_of_bias)(model, optimizer, X)
    else:
        optimizer.update(model, nnx.grad(loss_of_bias)(model, X))
    same_bits((model.kernel[...], model.bias[...]), (kernel, np.full(3, -1, np.float32)))


@pytest.mark.parametrize("moments", [None, "bfloat16", "float8"])
def test_the_state_of_a_param_has_its_metadata(moments):
    model = Small()
    model.weight = nnx.Param(model.weight[...], note="kept")
    tx = MOMENTUM if moments is None else jaxmp.low_precision(MOMENTUM, moments=moments, block=8)
    state = nnx.to_flat_state(nnx.state(Optimizer(model, tx).opt_state))
    with_note = [path[-1] for path, variable in state if variable.get_metadata().get("note") == "kept"]
    assert with_note == ["codes" if moments == "float8" else "weight"]


def test_without_a_loss_scale_non_finite_steps_are_skipped_and_nothing_is_scaled():
    model = Small()
    optimizer = Optimizer(model, optax.sgd(0.1))
    assert isinstance(jaxmp.get_loss_scale(optimizer.opt_state), jaxmp.NoOpLossScale)
    assert (optimizer.loss_scale, optimizer.loss_scale.dtype) == (1, jnp.float32)
    before = jax.tree.map(np.asarray, values(model))
    train(model, optimizer, BAD)
    same_bits(values(model), before)


def test_half_params_are_updated_in_float32_and_rounded_once():
    with pytest.warns(UserWarning, match="updates below 1/4096 of a weight are lost"):
        model, optimizer = setup(optax.sgd(0.5), policy="float16", scale=1.0)
    twin = apply_policy(Net(rngs()), "float16")

    def loss(model: Any) -> jax.Array:
        return loss_fn(model, X).astype("float32")

    grads, scaled = nnx.jit(lambda a, b, o: (nnx.grad(loss)(a), value_and_grad(loss, o)(b)[1]))(twin, model, optimizer)
    optimizer.update(model, scaled)
    want = jax.tree.map(
        lambda p, g: (p.astype("float32") - 0.5 * g.astype("float32")).astype("float16"),
        values(twin, nnx.Param),
        nnx.as_pure(grads),
    )
    same_bits(values(model, nnx.Param), want)


def optimizer_of(model: Any) -> Any:
    return Optimizer(model, optax.sgd(0.1))


def gradient(loss: Any) -> Any:
    """Return the result of value_and_grad of a function of the small model's mean square."""
    model = Small()
    return value_and_grad(lambda model: loss(loss_fn(model, X)), optimizer_of(model))(model)


def update_of_another_model(step: bool) -> None:
    optimizer, other = optimizer_of(Small()), nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    if step:
        jaxmp.nnx.make_train_step(loss_fn)(other, optimizer, X)
    optimizer.update(other, nnx.state(other))


def swapped_update() -> None:
    model, optimizer = small()
    try:
        optimizer.update(value_and_grad(loss_fn, optimizer)(model, X)[1], model)
    finally:
        assert int(optimizer.step[...]) == 0


SCALED, OTHER_MODEL = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale()), "got a model of 2 params in another"
MISTAKES = {
    "two loss scales": (
        lambda: Optimizer(Small(), SCALED, loss_scale=jaxmp.NoOpLossScale()),
        ValueError,
        "tx has a loss scale already, got another one as loss_scale=",
    ),
    "an optimizer of Flax": (
        lambda: value_and_grad(loss_fn, nnx.Optimizer(Small(), optax.sgd(0.1), wrt=nnx.Param)),
        TypeError,
        "Optimizer; write jaxmp",
    ),
    "a model as the loss": (
        lambda: value_and_grad(Small(), optimizer_of(Small())),
        TypeError,
        "takes a loss function, got an instance of Small; pass a function that calls",
    ),
    "another model in update": (lambda: update_of_another_model(False), ValueError, OTHER_MODEL),
    "another model in a step": (lambda: update_of_another_model(True), ValueError, OTHER_MODEL),
    "swapped arguments of update": (swapped_update, TypeError, "takes (model, grads) with an NNX model, got"),
    "a half loss": (lambda: gradient(lambda x: x.astype("float16")), TypeError, "must be float32, got float16"),
    "a pair": (lambda: gradient(lambda x: (x, x)), TypeError, "got tuple of 2; pass has_aux=True"),
}


@pytest.mark.parametrize(("call", "kind", "phrase"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises_an_error_that_says_what_to_write(call, kind, phrase):
    refused(call, kind, phrase)


def test_an_optimizer_that_would_train_nothing_raises_with_the_kinds_of_variables():
    model = Net(rngs())
    kinds = ", ".join(sorted({type(var).__name__ for _, var in nnx.to_flat_state(nnx.state(model))}))
    assert "BatchStat, " in kinds
    for tree in (model, {"first": [model]}, nnx.List([model, model])):
        text = f"wrt=LoRAParam matches no Variable of the model; its kinds of Variables: {kinds}$"
        with pytest.raises(ValueError, match=text):
            Optimizer(tree, optax.adam(0.1), wrt=nnx.LoRAParam)
    with pytest.raises(ValueError, match="wrt=Param matches no Variable of the model; its kinds of Variables: none"):
        Optimizer(nnx.Module(), optax.adam(0.1))
    Optimizer(nnx.LoRALinear(3, 2, lora_rank=1, rngs=rngs()), optax.adam(0.1), wrt=nnx.LoRAParam)


class Buffers(nnx.Module):
    """A module with two arrays that are not Variables; it writes to one of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.mask, self.calls = nnx.Linear(8, 8, rngs=rngs), jnp.tril(jnp.ones((4, 4))), jnp.array(0)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.mask.astype(x.dtype) @ self.linear(x).astype(x.dtype)


def test_a_skipped_step_restores_arrays_that_are_not_variables():
    model = apply_policy(Buffers(rngs()), "mixed_float16")
    optimizer = Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.DynamicLossScale(8.0))

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        _, grads = value_and_grad(lambda model: jnp.mean(model(x) ** 2), optimizer)(model)
        optimizer.update(model, grads)

    step(model, optimizer, TARGET)
    step(model, optimizer, TARGET.at[0].set(jnp.nan))
    assert int(model.calls) == 1 and int(optimizer.skipped_steps) == 1


def test_keyword_arguments_reach_the_loss_function():
    def with_options(model: Any, x: jax.Array, factor: float = 1.0) -> jax.Array:
        return factor * loss_fn(model, x)

    (model, optimizer), (twin, _) = small(), small()
    loss, _ = value_and_grad(with_options, optimizer)(model, x=X, factor=2.0)
    same_bits(loss, 2.0 * loss_fn(twin, X))
    before = jax.tree.map(np.asarray, values(model))
    value_and_grad(with_options, optimizer)(model=model, x=BAD)
    same_bits(values(model), before)


def test_statistics_stay_finite_with_microbatches_in_a_scan_that_does_not_take_the_optimizer():
    model, optimizer = setup()

    @nnx.jit
    def step(model: Any, optimizer: Any, xs: jax.Array) -> None:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def body(model: Any, x: jax.Array) -> Any:
            _, grads = value_and_grad(loss_fn, optimizer)(model, x)
            return model, grads

        _, grads = body(model, xs)
        optimizer.update(model, jax.tree.map(lambda g: g.mean(0), grads))

    step(model, optimizer, jnp.stack([X, BAD]))
    assert int(optimizer.skipped_steps) == 1
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(values(model)))


def test_a_jitted_update_may_donate_the_model_and_the_optimizer():
    model, optimizer = small()
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads), donate_argnums=(0, 1))
    for x in (X, BAD):
        _, grads = value_and_grad(loss_fn, optimizer)(model, x)
        update(model, optimizer, grads)
    assert int(optimizer.skipped_steps) == 1 and np.all(np.isfinite(model.mean[...]))


def test_a_variable_whose_shape_changes_keeps_its_new_value():
    class Remembers(nnx.Module):
        def __init__(self) -> None:
            self.layer, self.last = Small(), nnx.Intermediate(jnp.zeros((4, 8)))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.last.set_value(self.layer(x))
            return self.last[...]

    model = Remembers()
    optimizer = Optimizer(model, optax.sgd(0.1))
    for x in (TARGET, TARGET[:2]):
        _, grads = value_and_grad(lambda model, x=x: jnp.mean(model(x) ** 2), optimizer)(model)
        optimizer.update(model, grads)
    assert model.last[...].shape == (2, 8)
