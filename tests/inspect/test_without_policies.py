"""The tools on models under policies and on train steps, against NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linen_zoo import numbers, quick_jit
from optimizer_tools import bits

import jaxmp
from jaxmp.inspect import Watch, audit, compare, first_nonfinite, memory, numerics
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
Y = RNG.normal(size=(16, 4)).astype(np.float32)
W = RNG.normal(size=(8, 4)).astype(np.float32) / 3
BATCH = {"x": X, "y": Y}


@functools.cache
def _by_hand(half):
    """Return the relative errors of layer, loss and gradient with casts by hand."""

    def loss_of(w, dtype):
        y = (jnp.asarray(X, dtype) @ w.astype(dtype)).astype(jnp.float32)
        return jnp.mean((y - Y) ** 2), y

    def error(a, b):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    loss_and_gradient = quick_jit(jax.value_and_grad(loss_of, has_aux=True), static_argnums=1)
    (half_loss, half_output), half_gradient = loss_and_gradient(W, jnp.dtype(half))
    (loss, output), gradient = loss_and_gradient(W, jnp.dtype("float32"))
    return error(half_output, output), error(half_loss, loss), error(half_gradient, gradient)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, use_bias=False, name="layer")(x)


class NNXNet(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.layer.kernel[...] = jnp.asarray(W)

    def __call__(self, x):
        return self.layer(x)


PARAMS = {"layer": {"kernel": jnp.asarray(W)}}


def _loss_fn(model):
    def loss_fn(params, model_state, batch, rng):
        y = model.apply({"params": params}, batch["x"])
        return jnp.mean((y.astype(jnp.float32) - batch["y"]) ** 2), model_state

    return loss_fn


def _nnx_loss(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def _state():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale(2.0**10))
    return jaxmp.TrainState.create(params=jax.tree.map(jnp.copy, PARAMS), tx=tx)


def _linen(policy):
    return _loss_fn(jaxmp.linen.apply_policy(Net(), policy)), (PARAMS, None, BATCH, None)


def _linen_autocast(policy):
    return _loss_fn(jaxmp.linen.autocast(Net(), policy)), (PARAMS, None, BATCH, None)


def _autocast(policy):
    return jaxmp.autocast(_loss_fn(Net()), policy), (PARAMS, None, BATCH, None)


def _region(policy):
    def loss_fn(params, batch):
        with jaxmp.precision("half"):
            y = Net().apply({"params": params}, batch["x"])
        return jnp.mean((y - batch["y"]) ** 2)

    return jaxmp.autocast(loss_fn, policy, {"class:half": "float32"}), (PARAMS, BATCH)


def _wrapped(policy):
    policy = jaxmp.get_policy(policy)

    def loss_fn(params, batch):
        y = policy.wrap(lambda w, x: Net().apply({"params": {"layer": {"kernel": w}}}, x))(
            params["layer"]["kernel"], batch["x"]
        )
        return jnp.mean((y - batch["y"]) ** 2)

    return loss_fn, (PARAMS, BATCH)


def _jitted_before(policy):
    model = jaxmp.linen.apply_policy(Net(), policy)
    forward = jax.jit(lambda params, x: model.apply({"params": params}, x))
    forward(PARAMS, jnp.asarray(X))
    return lambda params, batch: jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2), (PARAMS, BATCH)


def _step(policy):
    return jaxmp.make_train_step(_loss_fn(jaxmp.linen.apply_policy(Net(), policy))), (_state(), BATCH)


def _accumulating_step(policy):
    step = jaxmp.make_train_step(_loss_fn(Net()), policy=policy, accumulate_steps=2, remat="nothing_saveable")
    return step, (_state(), BATCH)


def _nnx(policy):
    return _nnx_loss, (jaxmp.nnx.apply_policy(NNXNet(), policy), BATCH)


def _nnx_autocast(policy):
    return _nnx_loss, (jaxmp.nnx.autocast(NNXNet(), policy), BATCH)


def _nnx_jitted_before(policy):
    model, forward = jaxmp.nnx.apply_policy(NNXNet(), policy), nnx.jit(lambda model, x: model(x))
    forward(model, X)
    return lambda model, batch: jnp.mean((forward(model, batch["x"]) - batch["y"]) ** 2), (model, BATCH)


def _nnx_step(policy):
    model = jaxmp.nnx.apply_policy(NNXNet(), policy)
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.DynamicLossScale(2.0**10))
    return jaxmp.nnx.make_train_step(_nnx_loss), (model, optimizer, BATCH)


# The step with a loss scale is in float16. The step of NNX is in test_every_tool_takes_a_step.
WAYS = {
    _linen_autocast: "mixed_bfloat16",
    _region: "mixed_float16",
    _wrapped: "mixed_bfloat16",
    _jitted_before: "mixed_float16",
    _step: "mixed_float16",
    _accumulating_step: "mixed_bfloat16",
    _nnx: "mixed_bfloat16",
    _nnx_autocast: "mixed_float16",
    _nnx_jitted_before: "mixed_bfloat16",
}


@pytest.mark.parametrize(("way", "policy"), WAYS.items())
def test_a_function_under_a_policy_is_compared_with_itself_without(way, policy):
    fun, args = way(policy)
    comparison = compare(fun)(*args)
    half = policy.removeprefix("mixed_")
    layer, loss, gradient = _by_hand(half)
    result = next(row for row in comparison.rows if row.path == "")
    np.testing.assert_allclose(result.relative_error, loss, rtol=1e-2, atol=3e-7)
    kernel = next(row for row in comparison.rows if "kernel" in row.path)
    # Under autocast and with a loss scale the cotangent may be rounded too.
    assert 0.3 * gradient < kernel.relative_error < 2 * gradient + 2.0 ** (-9 if half == "bfloat16" else -12)
    returned = [row for row in comparison.rows if row.phase == "forward" and row.path.endswith("layer")]
    for row in returned:
        assert row.dtype == half and 0.7 * layer < row.relative_error < 1.3 * layer
    assert returned or way in (_nnx_jitted_before,)
    assert comparison.is_changed and comparison.dtype == half and "No policy" not in str(comparison)


def test_a_function_without_a_policy_is_said_to_have_none():
    comparison = compare(_loss_fn(Net()))(PARAMS, None, BATCH, None)
    assert not comparison.is_changed and comparison.dtype == "float32" and comparison.worst.relative_error < 1e-6
    assert "No policy, region or autocast changes a product here" in str(comparison)


def test_a_policy_is_added_to_those_that_the_function_has():
    fun = _loss_fn(Net())
    added = compare(fun, "mixed_bfloat16")(PARAMS, None, BATCH, None)
    under_autocast, _ = _autocast("mixed_bfloat16")
    assert added.rows == compare(under_autocast)(PARAMS, None, BATCH, None).rows
    with pytest.raises(ValueError, match="overrides need a policy"):
        compare(fun, overrides={"**/layer": "float32"})


def test_params_that_are_stored_in_half_are_widened_in_the_reference():
    policy = "float16"
    model = jaxmp.linen.apply_policy(nn.Embed(8, 4), policy)
    params = numbers(jax.eval_shape(model.init, jax.random.key(0), jnp.arange(8)))["params"]
    compare_embedding = compare(lambda params, i: jnp.sum(model.apply({"params": params}, i).astype(jnp.float32) ** 2))
    assert params["embedding"].dtype == policy
    rows = compare_embedding(params, jnp.arange(8)).rows
    gradient = next(row for row in rows if "embedding" in row.path)
    assert gradient.relative_error < jnp.finfo(policy).eps  # the values are equal, so only the gradient is rounded


class Casting(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (8, 4))
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def test_the_authors_casts_stay_in_the_reference():
    for model in (Casting(), nn.Dense(4, dtype=jnp.bfloat16)):
        params = numbers(jax.eval_shape(model.init, jax.random.key(0), X))["params"]
        half_model = jaxmp.linen.apply_policy(model, "mixed_bfloat16")
        comparison = compare(
            lambda params, x, half_model=half_model: half_model.apply({"params": params}, x), grad=False
        )(params, X)
        assert not comparison.is_changed and comparison.dtype == "bfloat16"


def test_policies_are_back_after_a_comparison_also_if_it_fails():
    linen, _ = _linen("mixed_float16")
    model = jaxmp.nnx.apply_policy(NNXNet(), "mixed_float16")

    def products():
        linen_jaxpr = jax.make_jaxpr(linen)(PARAMS, None, BATCH, None)
        return [linen_jaxpr, jax.make_jaxpr(lambda x: model(x))(X)]

    before = [str(jaxpr) for jaxpr in products()]

    def fails(model, x):
        model(x)
        if model(x).dtype == jnp.float32 and jaxmp.base.cache_keys.policies_off.value:
            raise ZeroDivisionError
        return jnp.sum(model(x))

    compare(_nnx_loss)(model, BATCH)
    with pytest.raises(ZeroDivisionError):
        compare(lambda x: fails(model, x))(X)
    compare(linen)(PARAMS, None, BATCH, None)
    assert [str(jaxpr) for jaxpr in products()] == before and "f16" in before[0] and "f16" in before[1]


@pytest.mark.parametrize("way", [_step, _nnx_step])
def test_every_tool_takes_a_step(way):
    fun, args = way("mixed_float16")
    exact, before = 2 * X.T @ (X @ W - Y) / Y.size, bits(args)
    step_numerics = numerics(fun)(*args)
    (kernel,) = step_numerics.gradients.values()
    assert step_numerics.loss_scale == 2.0**10
    np.testing.assert_allclose(kernel.amax, np.max(np.abs(exact)), rtol=5e-3)
    np.testing.assert_allclose(step_numerics.loss, np.mean((X @ W - Y) ** 2), rtol=5e-3)
    assert first_nonfinite(fun)(*args) is None
    assert {product.operands for product in audit(fun, compile=False)(*args).products} == {("float16", "float16")}
    assert memory(fun)(*args).peak > X.nbytes
    compare(fun)(*args)
    assert bits(args) == before  # nothing was donated or updated


def test_settings_that_a_step_has_itself_are_refused():
    step, args = _step("mixed_float16")
    for tool, settings in (
        (numerics, {"tx": optax.sgd(0.1)}),
        (numerics, {"loss_scale": 8.0}),
        (compare, {"loss_scale": 8.0}),
        (first_nonfinite, {"loss_scale": 8.0}),
        (functools.partial(Watch, every=1), {"tx": optax.sgd(0.1)}),
    ):
        (name,) = settings
        with pytest.raises(ValueError, match=f"a train step uses its own .*, got {name}; leave it out"):
            tool(step, **settings)(*args)
    with pytest.raises(ValueError, match="already has a policy, got policy='mixed_float16'; leave it out"):
        numerics(step.with_options(policy="mixed_float16"), policy="mixed_float16")


def test_a_step_with_a_mesh_is_refused_with_what_to_compare():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), PARAMS)
    step = jaxmp.make_train_step(_loss_fn(Net()), policy="mixed_float16", sharding=Sharding(mesh, specs))
    with pytest.raises(ValueError, match="without a mesh, got one with sharding=; pass the same step without"):
        compare(step)(_state(), BATCH)


class ScannedNet(nnx.Module):
    """Layers in a scan, which copies its modules, and a Linen layer."""

    def __init__(self, linen):
        make = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
        self.layers = make(jax.random.split(jax.random.key(3), 3))
        self.wrapped = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(1)).lazy_init(X)

    def __call__(self, x):
        scan = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.wrapped(scan(x, self.layers))


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(8, name="layer")(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(ScannedBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.jit(nn.Dense)(4)(stack(name="layers")(x, None)[0])


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_transformed_modules_are_without_policies_too(library):
    if library == "linen":
        bare = Scanned()
        params = jax.jit(bare.init)(jax.random.key(0), X)
        model = jaxmp.linen.apply_policy(bare, "mixed_bfloat16")
        fun, args, exact = jax.jit(model.apply), (params, X), jax.jit(bare.apply)(params, X)
    else:
        bare = ScannedNet(nn.Dense(4))
        half = ScannedNet(jaxmp.linen.apply_policy(nn.Dense(4), "mixed_bfloat16"))
        model = jaxmp.nnx.apply_policy(half, "mixed_bfloat16")
        fun, args, exact = nnx.jit(lambda model, x: model(x)), (model, X), nnx.jit(lambda bare, x: bare(x))(bare, X)
    comparison = compare(fun, grad=False)(*args)
    (result,) = [row for row in comparison.rows if row.path == ""]
    expected = np.linalg.norm(fun(*args) - exact) / np.linalg.norm(exact)
    # The comparison records every module, so XLA keeps roundings that it drops in the plain program.
    np.testing.assert_allclose(result.relative_error, expected, rtol=0.1)
    assert expected > 2**-10 and comparison.is_changed


def test_a_loss_scale_keeps_small_gradients_and_the_rows_are_without_it():
    def loss_fn(params, x):
        with jax.named_scope("small"):
            y = x @ params
        return jnp.mean(y) * 1e-6

    unscaled = compare(loss_fn, "mixed_float16")(jnp.asarray(W), X)
    scaled = compare(loss_fn, "mixed_float16", loss_scale=2.0**15)(jnp.asarray(W), X)
    errors = [comparison.rows[-1].relative_error for comparison in (unscaled, scaled)]
    assert errors[0] > 0.05 and errors[1] < 2e-3
    assert scaled.rows[-1].mean_absolute_difference < 1e-9


def _paths_in_float32(report):
    return {product.path for product in report.products if product.operands == ("float32", "float32")}


def test_the_path_that_a_tool_prints_is_what_an_override_takes():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(nn.Dense(8, name="energy")(x))

    variables = numbers(jax.eval_shape(Two().init, jax.random.key(0), X))

    def applied(model):
        return lambda variables, x: model.apply(variables, x)

    def audited(fun):
        return audit(fun, compile=False)(variables, X)

    path = audited(applied(Two())).products[0].path
    assert path == "Two/energy"
    overrides = {path: "float32"}
    for fun in (
        applied(jaxmp.linen.apply_policy(Two(), "mixed_bfloat16", overrides)),
        applied(jaxmp.linen.apply_policy(Two(), f"mixed_bfloat16; {path} -> float32")),
        applied(jaxmp.linen.apply_policy(Two(), "mixed_bfloat16", {"energy": "float32"})),
        applied(jaxmp.linen.autocast(Two(), "mixed_bfloat16", overrides)),
        jaxmp.autocast(applied(Two()), "mixed_bfloat16", overrides),
    ):
        assert _paths_in_float32(audited(fun)) == {path}
    with pytest.raises(ValueError, match="'enrgy' matched none; nearest paths: 'energy'"):
        jaxmp.linen.apply_policy(Two(), "mixed_bfloat16", {"Two/enrgy": "float32"}).apply(variables, X)
