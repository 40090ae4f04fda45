"""The numerics of a step, against NumPy's counts of separately computed arrays."""

import json

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from linen_zoo import numbers

import jaxmp
from jaxmp.inspect import numerics
from jaxmp.inspect.counts.statistics import statistics_of

pytestmark = pytest.mark.once

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


def same(statistics, x):
    """Return whether the statistics are those of an array, the mean to float32."""
    expected = statistics_of(x)
    names = ("count", "zeros", "overflow", "below_normal", "amax", "amin", "histogram")
    np.testing.assert_allclose(statistics.mean_abs, expected.mean_abs, rtol=1e-5)
    wide = np.asarray(x, np.float64)
    assert (statistics.count, statistics.zeros) == (wide.size, int((wide == 0).sum()))
    assert [getattr(statistics, name) for name in names] == [getattr(expected, name) for name in names]
    half, expected_half = statistics.under("float16", 8), expected.under("float16", 8)
    names = ("vanished", "below_normal", "overflow")
    return [getattr(half, name) for name in names] == [getattr(expected_half, name) for name in names]


def mlp(params, x, extra=(0.0, 0.0)):
    """Return a loss of two layers in scopes; ``extra`` is added to their results.

    So the gradients of ``extra`` are the gradients of the activations.
    """
    with jax.named_scope("one"):
        y = x @ params["w"]
    y = y + extra[0]
    with jax.named_scope("two"):
        z = jnp.tanh(y) @ params["v"]
    z = z + extra[1]
    return 1e-6 * jnp.sum(z**2)


W = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)


def quadratic_loss(w, x):
    """Return a loss whose gradient is ``w``."""
    return jnp.sum(w * w) / 2


@pytest.fixture(scope="module")
def params():
    w, v = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)
    return {"w": jnp.asarray(w), "v": jnp.asarray(v)}


@pytest.fixture(scope="module")
def step_numerics(params):
    return numerics(mlp, tx=optax.sgd(2.0))(params, X)


def test_all_kinds_are_those_of_a_float32_step(params, step_numerics):
    extra = concrete.zeros((6, 8)), concrete.zeros((6, 8))
    loss, (grads, inner) = jax.jit(jax.value_and_grad(mlp, (0, 2)))(params, X, extra)
    assert step_numerics.loss == pytest.approx(float(loss), rel=1e-6)
    assert set(step_numerics.weights) == set(step_numerics.gradients) == set(step_numerics.updates) == {"w", "v"}
    for name in params:
        assert same(step_numerics.weights[name], params[name])
        assert same(step_numerics.gradients[name], grads[name])
        assert same(step_numerics.updates[name], -2 * grads[name])
        norms = np.linalg.norm(2 * grads[name]) / np.linalg.norm(params[name])
        assert step_numerics.updates[name].ratio == pytest.approx(norms, rel=1e-5)
    assert list(step_numerics.activations) == list(step_numerics.activation_gradients) == ["one", "two"]
    assert same(step_numerics.activations["one"], jax.jit(jnp.matmul)(X, params["w"]))
    assert step_numerics.activations["one"].by_turn is None
    for name, gradient in zip(("one", "two"), inner, strict=True):
        assert same(step_numerics.activation_gradients[name], gradient)


def test_gradients_are_without_the_scale_and_vanish_in_half_as_they_do_with_it(params):
    def loss_fn(params, x):
        with jax.named_scope("half"):
            y = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
        return 1e-7 * jnp.sum(y.astype(jnp.float32) * params["v"][:6])

    for scale in (1.0, 2.0**15):
        step_numerics = numerics(loss_fn, loss_scale=scale)(params, X)
        cotangent = (np.float32(1e-7 * scale) * np.asarray(params["v"][:6])).astype(np.float16)
        half_gradients = step_numerics.activation_gradients["half"]
        assert half_gradients.zeros == (cotangent == 0).sum() and half_gradients.dtype == "float16"
        assert half_gradients.below_normal == ((cotangent != 0) & (abs(cotangent) < 2**-14)).sum()
        assert half_gradients.amax == pytest.approx(abs(cotangent.astype(np.float64)).max() / scale)
        assert step_numerics.loss_scale == scale and (half_gradients.zeros > 0) == (scale == 1.0)


def test_updates_that_would_be_lost_in_half_are_counted(params, step_numerics):
    grads = jax.jit(jax.grad(mlp))(params, X)
    for name, update in step_numerics.updates.items():
        weight = np.asarray(params[name].astype(jnp.bfloat16), np.float64)
        ulp = 2.0 ** (np.floor(np.log2(abs(weight))) - 7)
        assert update.lost("bfloat16") == (abs(2 * np.asarray(grads[name], np.float64)) < ulp / 2).sum() > 0
        assert update.lost("float32") < update.lost("float16") < update.lost("bfloat16")


def test_an_optimizer_in_loss_scaling_gets_gradients_of_its_own_scale():
    tx = jaxmp.loss_scaling(optax.sgd(2.0), jaxmp.DynamicLossScale())
    step_numerics = numerics(quadratic_loss, tx=tx, loss_scale=4.0)(W, X)
    assert same(step_numerics.updates[""], -2 * W)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(8, name="dense", use_bias=False)(jnp.tanh(x)), None


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layers(name="blocks")(x, None)[0]


def written_out(extra, kernels, x):
    """Return the loss of ``Layers`` and the dense layers' results, without a loop.

    The gradients of ``extra`` are the gradients of the dense layers' results.
    """
    returned = []
    for kernel, added in zip(kernels, extra, strict=True):
        returned.append(jnp.tanh(x) @ kernel + added)
        x = x + returned[-1]
    return jnp.mean(x**2), returned


def test_the_turns_of_a_scan_are_the_layers_of_the_model_written_out():
    model = Layers()
    params = numbers(jax.eval_shape(model.init, jax.random.key(0), X))["params"]
    step_numerics = numerics(lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2))(params, X)
    kernels = params["blocks"]["dense"]["kernel"]
    gradients, activations = jax.jit(jax.grad(written_out, has_aux=True))(np.zeros((2, 6, 8), np.float32), kernels, X)
    path = next(path for path in step_numerics.activations if path.endswith("dense"))
    for kind, layers in (("activations", activations), ("activation_gradients", gradients)):
        all_turns, turns = getattr(step_numerics, kind)[path], getattr(step_numerics, kind)[path].by_turn
        assert len(turns) == 2
        for turn, layer in zip(turns, map(statistics_of, layers), strict=True):
            np.testing.assert_allclose(
                [turn.amax, turn.amin, turn.mean_abs], [layer.amax, layer.amin, layer.mean_abs], rtol=1e-4
            )
            assert turn.count == layer.count
        assert all_turns.count == sum(turn.count for turn in turns)
        assert all_turns.amax == max(turn.amax for turn in turns)
        assert all_turns.under("float16", 4).by_turn == tuple(turn.under("float16", 4) for turn in turns)
    assert step_numerics.weights["blocks/dense/kernel"].count == 2 * 64


def test_a_module_that_is_called_twice_has_the_values_of_both_calls():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8, name="dense", use_bias=False)
            return dense(jnp.tanh(dense(x)))

    params = numbers(jax.eval_shape(Twice().init, jax.random.key(0), X))["params"]
    step_numerics = numerics(lambda params, x: jnp.sum(Twice().apply({"params": params}, x)))(params, X)
    first = X @ np.asarray(params["dense"]["kernel"])
    second = np.tanh(first) @ params["dense"]["kernel"]
    activations = step_numerics.activations["Twice/dense"]
    assert activations.count == 96
    np.testing.assert_allclose(activations.mean_abs, abs(np.concatenate([first, second])).mean(), rtol=1e-5)
    assert step_numerics.activation_gradients["Twice/dense"].count == 96


def test_under_a_policy_activations_have_its_dtype():
    model = nn.Sequential([nn.Dense(8, use_bias=False)])
    params = numbers(jax.eval_shape(model.init, jax.random.key(0), X))["params"]

    def loss_fn(params, x):
        return 1e-4 * jnp.mean(model.apply({"params": params}, x) ** 2), {"more": x}

    step_numerics = numerics(loss_fn, policy="mixed_bfloat16")(params, X)
    path = "Sequential/layers_0"
    assert step_numerics.activations[path].dtype == step_numerics.activation_gradients[path].dtype == "bfloat16"
    kernel = "layers_0/kernel"
    assert step_numerics.weights[kernel].dtype == step_numerics.gradients[kernel].dtype == "float32"


def test_an_nnx_model_has_the_paths_of_its_modules():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs)])
            self.norm = nnx.BatchNorm(8, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.layers[0](jnp.tanh(self.layers[0](x))))

    model = Model(nnx.Rngs(0))
    classes, mean = [type(module) for _, module in nnx.iter_modules(model)], np.asarray(model.norm.mean[...])
    step_numerics = numerics(lambda model, x: jnp.mean(model(x) ** 3), tx=optax.sgd(0.1))(model, X)
    assert set(step_numerics.weights) == set(step_numerics.updates) == {"layers/0/kernel", "norm/scale"}
    first = X @ model.layers[0].kernel[...]
    both = np.concatenate([first, np.tanh(first) @ model.layers[0].kernel[...]])
    activation, size = step_numerics.activations["layers/0"], abs(both)
    sizes = [activation.mean_abs, activation.amax, activation.amin]
    np.testing.assert_allclose(sizes, [size.mean(), size.max(), size.min()], rtol=1e-4)
    assert step_numerics.activations["layers/0"].count == step_numerics.activation_gradients["layers/0"].count == 96
    assert [type(module) for _, module in nnx.iter_modules(model)] == classes
    np.testing.assert_array_equal(model.norm.mean[...], mean)


def test_values_in_a_while_loop_are_not_counted():
    def loss_fn(params, x):
        def turn(carry):
            with jax.named_scope("inner"):
                y = carry[1] * 2
            return carry[0] + 1, y + 1

        with jax.named_scope("loop"):
            doubled = jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, jax.lax.stop_gradient(x)))[1]
        return jnp.sum(doubled @ params["w"])

    step_numerics = numerics(loss_fn)({"w": concrete.ones((8, 2))}, np.ones((6, 8), np.float32))
    assert step_numerics.activations.keys() == {"loop"}
    assert step_numerics.activations["loop"].amax == 15


def test_a_branch_that_is_not_taken_has_no_values():
    def loss_fn(params, x):
        def times_three(y):
            with jax.named_scope("one"):
                y = y * 3
            return y + 1

        def times_five(y):
            with jax.named_scope("two"):
                y = y * 5
            return y - 1

        return jnp.sum(jax.lax.cond(x[0, 0] > 0, times_three, times_five, x * params))

    step_numerics = numerics(loss_fn)(jnp.float32(1.0), concrete.ones((2, 2)))
    assert (step_numerics.activations["one"].count, step_numerics.activations["two"].count) == (4, 0)
    assert (step_numerics.activation_gradients["one"].amax, step_numerics.activation_gradients["two"].count) == (1, 0)


def test_recommended_scale_loses_fewest_gradients_and_keeps_two_binary_orders(step_numerics):
    gradients = [*step_numerics.activation_gradients.values(), *step_numerics.gradients.values()]
    largest = max(gradient.amax for gradient in gradients)

    def lost(scale):
        return sum(gradient.under("float16", scale).vanished for gradient in gradients)

    scale = step_numerics.recommended_scale("float16")
    possible = [2.0**n for n in range(25) if largest * 2.0**n * 4 <= 65504]
    assert scale == min(possible, key=lambda candidate: (lost(candidate), candidate))
    assert scale > 1 and lost(scale) < lost(1) and lost(scale / 2) > lost(scale)
    assert step_numerics.recommended_scale("bfloat16") == 1
    nothing_lost = numerics(lambda params, x: 0 * jnp.mean(params * x))(jnp.float32(1.0), X)
    assert str(nothing_lost).splitlines()[0].endswith("; recommended for float16: 1 (equally good up to 16777216)")


def test_a_scale_at_which_gradients_are_infinite_is_not_recommended():
    def loss_fn(w):
        return jnp.sum(w.astype(jnp.float16) * np.float16([1e-4, 1e-4, 100]))

    overflowing = numerics(loss_fn, loss_scale=1024.0)(concrete.ones(3))
    assert overflowing.gradients[""].overflow == 1
    assert overflowing._good_scales("float16")[-1] <= 1024 / 4
    finite = numerics(loss_fn, loss_scale=8.0)(concrete.ones(3))
    assert finite._good_scales("float16")[-1] * 4 * 100 <= 65504 < finite._good_scales("float16")[-1] * 8 * 100
    text = str(numerics(lambda w: jnp.sum(jnp.sqrt(w)))(concrete.array(np.float32([0, 1]))))
    assert "1 gradients are not finite at loss scale 1, so no loss scale helps" in text


def test_values_that_are_not_counted_are_named():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))

    def loss_fn(w, x):
        with jax.named_scope("layer"):
            y = product(x, w)
        fixed = jax.lax.stop_gradient(w)
        _, z = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ fixed), (0, jax.lax.stop_gradient(y)))
        return jnp.sum(y * z)

    w = np.eye(8, dtype="float32")
    by_rule, by_loop = numerics(loss_fn)(w, X).not_counted
    assert by_rule.startswith("custom_vjp_call (layer, ") and by_rule.endswith(
        ": a function with a custom derivative rule"
    )
    assert by_loop.startswith("while (test_numerics.py:") and by_loop.endswith(": a while loop")
    assert f"not counted: {by_rule}; {by_loop}" in str(numerics(loss_fn)(w, X))
    step = jaxmp.make_train_step(lambda params, model_state, batch, rng: (loss_fn(params, batch), model_state))
    state = jaxmp.TrainState.create(params=jnp.asarray(w), tx=optax.sgd(0.1))
    assert len(numerics(step.with_options(accumulate_steps=2))(state, X).not_counted) == 2
    assert numerics(lambda w, x: jnp.sum(jax.nn.relu(x @ w)))(w, X).not_counted == ()  # no scope is in relu


def test_the_error_for_a_function_that_changes_other_objects_says_what_to_pass():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def own_step(model, optimizer, x):
        loss, grads = jaxmp.nnx.value_and_grad(lambda model, x: model(x).sum(), optimizer)(model, x)
        optimizer.update(model, grads)
        return loss

    def changes_another(model, norm, x):
        return jnp.mean(norm(model(x)))

    calls = [(own_step, optimizer, "pass its loss"), (changes_another, nnx.BatchNorm(2, rngs=nnx.Rngs(0)), "eval()")]
    for fun, other, remedy in calls:
        with pytest.raises(TraceContextError) as error:
            numerics(fun)(model, other, concrete.ones((3, 4)))
        (note,) = [note for note in error.value.__notes__ if "JAX has removed" not in note]
        assert remedy in note


def test_numerics_are_shown_as_text_table_and_json(step_numerics):
    text = str(step_numerics)
    assert "\nactivation gradients\n  " in text and "at loss scale 1;" in text
    assert step_numerics.table().row_count == len(list(step_numerics.rows())) + 5  # one more line for each kind
    fields = json.loads(step_numerics.to_json())
    assert fields["gradients"]["w"]["count"] == 64 and "_fine" not in fields["gradients"]["w"]
    assert sum(fields["weights"]["w"]["histogram"].values()) == 64


def test_the_table_counts_gradients_under_the_loss_scale_of_the_step():
    def loss_fn(w):
        return 1e-9 * jnp.sum(w)

    for scale, share in ((1.0, "100.0%"), (2.0**10, "0.0%")):
        text = str(numerics(loss_fn, loss_scale=scale)(concrete.ones(4)))
        assert text.split("\ngradients\n")[1].splitlines()[0].endswith(share)


@pytest.mark.once
def test_errors_say_what_is_wanted(params):
    with pytest.raises(ValueError, match=r"loss_scale must be a power of two here.*got 1000; use 1024"):
        numerics(mlp, loss_scale=1000)
    with pytest.raises(TypeError, match=r"a loss must be a floating scalar, got float32 of shape \(6, 8\)"):
        numerics(lambda params, x: x @ params["w"])(params, X)
