"""tune finds exactly the planted module that needs float32, with few compilations."""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings

import jaxmp
from jaxmp.inspect import compare, error_budget, tune
from jaxmp.inspect._switched.switched import smallest_prefix
from jaxmp.inspect._tune.candidates import modules_of
from jaxmp.inspect._tune.measurement import Measurement
from jaxmp.policy.policy_map import get_policy
from jaxmp.program.equations import opened
from jaxmp.program.rewriting import Rewriter

pytestmark = pytest.mark.once

SLOW = pytest.mark.slow("compiles a loss many times")
X = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")


def _as_rows(x):
    """Return ``x`` as rows of a table: a stream that begins with them is half, and with an argument it is float32."""
    return x[np.arange(len(x))]


def _flow(x, weight):
    for _ in range(5):
        x = x + 0.004 * jnp.tanh(x @ weight)
    return x


def _overflow(x, weight):
    return jnp.log(jnp.exp(12 * x @ weight) @ jnp.exp(weight)) / 12


PLANTED = {"flow": _flow, "overflow": _overflow}


def _loss(planted, at):
    """Return a loss of one layer for each param; layer ``at`` calls ``planted``."""

    def loss_fn(params, x):
        for n, weight in enumerate(params):
            with jax.named_scope(f"layer_{n}"):
                x = planted(x, weight) if n == at else jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return loss_fn


def _params(count=3):
    return [*np.random.default_rng(1).normal(size=(count, 16, 16)).astype("float32") / 4]


@pytest.mark.parametrize(
    ("planted", "operation", "at", "policy"),
    [("flow", "add", 1, "mixed_bfloat16"), pytest.param("overflow", "dot_general", 1, "mixed_float16", marks=SLOW)],
)
def test_the_planted_operation_is_found_and_no_other(planted, operation, at, policy):
    tuned = tune(_loss(PLANTED[planted], at), policy)(_params(), X)
    assert list(tuned.overrides) == [f"layer_{at}:{operation}"]
    assert tuned.met and tuned.error <= tuned.tolerance < tuned.error_before
    assert tuned.half_flops == (1 if operation == "add" else 0.5) and tuned.evaluations <= 4
    if operation == "add":  # an error needs a finite error without overrides
        assert tuned.rows[0].error <= tuned.tolerance
    assert tuned.rows[0].path == f"layer_{at}:{operation}" and f"These need float32: layer_{at}" in str(tuned)
    assert "overrides:" not in str(tuned)
    assert (tuned.loss_scale is None) == (policy == "mixed_bfloat16")


def _short_step(x, weight):
    return x + 0.004 * jnp.tanh(x @ weight)


def _deep_loss(layers):
    """Return a loss that calls each of ``layers`` in its own scope, with the same param."""

    def loss_fn(weight, x):
        x = _as_rows(x)
        for number, layer in enumerate(layers):
            with jax.named_scope(f"layer_{number}"):
                x = layer(x, weight)
        return jnp.mean(x**2)

    return loss_fn


def _plain(x, weight):
    return jnp.tanh(x @ weight)


def test_many_modules_are_measured_a_few_times():
    loss_fn = _deep_loss([_short_step] * 9 + [_plain])
    tuned = tune(loss_fn, "mixed_bfloat16", operations=False)(_params()[0], X)
    assert len(tuned.rows) == 10 and all(not math.isnan(row.error) for row in tuned.rows)  # each module was tried
    assert tuned.error_before > tuned.tolerance >= tuned.error and 1 < len(tuned.overrides) < 10
    assert tuned.evaluations <= 4


def _blocks_loss(params, x):
    """Return a loss of equal blocks and another layer."""
    x = _as_rows(x)
    for number, weight in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{number}"):
            x = _flow(x, weight)
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ params["head"]) ** 2)


@SLOW
@pytest.mark.parametrize("strong", [range(3), [2]], ids=["all", "one"])
def test_equal_layers_have_one_override(strong):
    """A block without weights adds zeros, which is exact."""
    head, *weights = _params(4)
    blocks = [weight if number in strong else 0 * weight for number, weight in enumerate(weights)]
    tuned = tune(_blocks_loss, "mixed_bfloat16")({"blocks": blocks, "head": head}, X)
    assert list(tuned.overrides) == ["block_*:add"]
    assert tuned.met and tuned.half_flops == 1 and tuned.evaluations <= 4
    assert [row.path for row in tuned.rows if row.is_float32] == ["block_*:add"]


def _scoped(scopes):
    """Return a loss that calls each layer in its scope."""

    def loss_fn(weight, x):
        x = _as_rows(x)
        for scope, layer in scopes:
            with jax.named_scope(scope):
                x = layer(x, weight)
        return jnp.mean(x**2)

    return loss_fn


def _half_modules(loss_fn):
    return modules_of(loss_fn, (_params()[0], X), get_policy("mixed_bfloat16"))


def test_a_pattern_of_equal_layers_covers_no_other_module():
    """An unequal layer matches ``layer_*``, and ``norm_*`` covers the submodule of another."""
    layers = [("layer_0", _flow), ("layer_1", _flow), ("layer_2", _plain), ("layers/0", _flow)]
    norms = [("norm_0", _flow), ("norm_1/inner", _plain), ("norm_2", _flow)]
    blocks = [(f"stack_0/block_{number}/inner", _plain) for number in range(2)]
    modules = _half_modules(_scoped([*layers, *norms, *blocks]))
    assert {module.path: module.layers for module in modules if len(module.layers) > 1} == {
        "stack_0/block_*/inner": ("stack_0/block_0/inner", "stack_0/block_1/inner")
    }
    assert len(modules) == len(layers) + len(norms) + 1


def test_seeds_measure_with_other_keys_and_compile_once():
    traces = []

    def loss_fn(params, x, keys):
        traces.append(1)
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ params[0])
        masks = [jax.random.bernoulli(key, 0.5, x.shape) for key in (keys["one"], *keys["two"])]
        return jnp.mean((x * sum(mask.astype(x.dtype) for mask in masks)) ** 2)

    keys = {"one": jax.random.key(0), "two": jax.random.split(jax.random.key(1))}
    single_seed = tune(loss_fn, "mixed_bfloat16")(_params(), X, keys)
    count = len(traces)
    three_seeds = tune(loss_fn, "mixed_bfloat16", seeds=3)(_params(), X, keys)
    assert len(traces) == 2 * count and three_seeds.evaluations == single_seed.evaluations
    assert three_seeds.floor > single_seed.floor  # the floor is the largest of three
    with pytest.raises(ValueError, match="typed PRNG keys among the arguments, got none"):
        tune(_loss(None, None), "mixed_bfloat16", seeds=2)(_params(), X)


class Flow(nn.Module):
    @nn.compact
    def __call__(self, x):
        field = nn.Dense(16, name="field")
        for _ in range(10):
            x = x + 0.004 * nn.tanh(field(x))
        return x


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Flow(name="flow")(nn.Dense(16, name="encoder")(x))
        return nn.Dense(1, name="head")(x)


def _linen_step(policy):
    model = jaxmp.linen.apply_policy(Net(), policy)

    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(model.apply({"params": params}, batch) ** 2), model_state

    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale(2.0**10))
    state = jaxmp.TrainState.create(params=model.init(jax.random.key(0), X)["params"], tx=tx)
    return jaxmp.make_train_step(loss_fn), state


@pytest.mark.slow("compiles ten steps many times")
def test_a_train_step_is_tuned_and_its_overrides_help_the_model_under_a_policy(tmp_path):
    step, state = _linen_step("mixed_float16")
    tuned = tune(step, "mixed_float16", operations=False)(state, X, batches=[(2 * X,)])
    assert "Net/flow" in tuned.overrides and tuned.loss_scale == 2.0**10
    tuned.save(tmp_path / "policy.txt")
    saved = (tmp_path / "policy.txt").read_text()
    assert jaxmp.get_policy(saved) == tuned.policy
    better, _ = _linen_step(saved)
    before, after = compare(step)(state, X), compare(better)(state, X)
    assert after.total.relative_error < before.total.relative_error / 2


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        query = nn.Dense(16, name="query")(x)
        scores = jnp.einsum("td,sd->ts", query, x)
        with jax.named_scope("mixing"):
            return jnp.einsum("ts,sd->td", nn.tanh(scores), x)


class Encoder(nn.Module):
    def setup(self):
        self.attention = Attention()

    def __call__(self, x):
        return self.attention(x) @ jnp.eye(16)

    def encode(self, x):
        return self(x)


@pytest.mark.parametrize("method", ["__call__", "encode"])
def test_without_operations_all_candidates_are_modules_that_apply_policy_takes(method):
    model, half = Encoder(), get_policy("mixed_bfloat16")
    params = model.init(jax.random.key(0), X)["params"]

    def loss_fn(params, x):
        return jnp.mean(model.apply({"params": params}, x, method=method))

    scopes = {module.path for module in modules_of(loss_fn, (params, X), half)}
    assert any(path.endswith("attention/td,sd->ts") for path in scopes)
    paths = {module.path for module in modules_of(loss_fn, (params, X), half, modules_only=True)}
    prefix = "Encoder" if method == "__call__" else "**"
    assert paths - {"Encoder"} == {f"{prefix}/attention", f"{prefix}/attention/query"}
    for path in paths - {"Encoder"}:
        policied = jaxmp.linen.apply_policy(model, half, {path: "float32"})
        jax.eval_shape(lambda policied=policied: policied.apply({"params": params}, X, method=method))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.Linear(16, 16, rngs=rngs)
        self.field = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = self.encoder(x)
        with jax.named_scope("flow"):
            for _ in range(6):
                x = x + 0.004 * nnx.tanh(self.field(x))
        return x


@SLOW
@pytest.mark.parametrize("put", [jaxmp.nnx.apply_policy, lambda model, policy: model], ids=["policy", "plain"])
def test_an_nnx_step_is_tuned(put):
    model = put(NNXNet(nnx.Rngs(0)), "mixed_bfloat16")
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    tuned = tune(step, "mixed_bfloat16")(model, optimizer, X)
    assert list(tuned.overrides) == ["flow/field", "flow:add"] and tuned.met  # the addition of its bias stays half
    assert "2 overrides: 1 for float32, 1 for submodules that stay half" in str(tuned)


def test_a_plain_nnx_model_is_tuned_and_computes_under_the_saved_policy(tmp_path):
    class Flow(nnx.Module):
        def __init__(self, rngs):
            self.field = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            x = _as_rows(x)
            for _ in range(3):
                x = x + 0.004 * nnx.tanh(self.field(x))
            return x

    def loss_fn(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(Flow(rngs), nnx.Linear(16, 8, use_bias=False, rngs=rngs))
    tuned = tune(loss_fn, "mixed_bfloat16")(model, X)
    assert "layers/0:add" in tuned.overrides and tuned.half_flops == 1
    tuned.save(tmp_path / "policy.txt")
    text = (tmp_path / "policy.txt").read_text()
    half, saved = (jaxmp.nnx.autocast(model, policy) for policy in ("mixed_bfloat16", text))

    @nnx.jit
    def results(model):
        return jax.tree.leaves(nnx.value_and_grad(loss_fn)(model, X))

    def flat_results(model):
        return np.concatenate([np.ravel(leaf) for leaf in results(model)])

    exact, before, after = flat_results(model), flat_results(half), flat_results(saved)
    assert np.linalg.norm(after - exact) < np.linalg.norm(before - exact) / 2


def test_a_loss_scale_that_overflows_is_lowered_first():
    def loss_fn(params, x):
        with jax.named_scope("layer"):
            return 100 * jnp.mean((x @ params) ** 2)

    def step_loss(params, model_state, batch, rng):
        return loss_fn(params, batch), model_state

    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale(2.0**24))
    state = jaxmp.TrainState.create(params=_params()[0], tx=tx)
    tuned = tune(jaxmp.make_train_step(step_loss), "mixed_float16")(state, X)
    assert tuned.overrides == {} and tuned.met and tuned.loss_scale < 2.0**24


def test_an_interrupted_search_meets_the_tolerance_only_by_a_measured_error(monkeypatch):
    def interrupt(measurement, overrides):
        if overrides:
            raise KeyboardInterrupt
        return measured(measurement, overrides)

    measured = Measurement.error
    monkeypatch.setattr(Measurement, "error", interrupt)
    tuned = tune(_loss(_flow, 1), "mixed_bfloat16", operations=False)(_params(), X)
    assert tuned.interrupted and tuned.error <= tuned.tolerance  # predicted
    assert not tuned.met and math.isnan(tuned.loss_error)
    assert "its error is not measured" in str(tuned)


def _policy_gradient(params, batch):
    """Return the clipped loss of a Gaussian policy with a small standard deviation."""
    with jax.named_scope("hidden"):
        h = jnp.tanh(batch["x"] @ params["hidden"])
    with jax.named_scope("head"):
        mean = h @ params["head"]
    log_prob = -jnp.sum(((batch["action"] - mean) / 0.03) ** 2, -1) / 2
    ratio = jnp.exp(log_prob - batch["old"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.mean(jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"]))


def _policy_gradient_args():
    rng = np.random.default_rng(0)
    params = {"hidden": rng.normal(size=(16, 32)) / 4, "head": rng.normal(size=(32, 4)) / 6}
    x, noise = rng.normal(size=(64, 16)), rng.normal(size=(64, 4))
    action = np.tanh(x @ params["hidden"]) @ params["head"] + 0.03 * noise
    batch = {"x": x, "action": action, "old": -np.sum(noise**2, -1) / 2, "advantage": rng.normal(size=64)}
    return jax.tree.map(lambda leaf: leaf.astype("float32"), (params, batch))


def test_a_large_floor_does_not_approve_of_half():
    params, batch = _policy_gradient_args()
    tuned = tune(_policy_gradient, "mixed_bfloat16")(params, batch)
    assert tuned.floor > 0.1 and tuned.error_before > 0.1 and tuned.tolerance == 0.05
    assert tuned.is_too_coarse and tuned.met and tuned.overrides and tuned.error <= 0.05
    assert str(tuned).startswith("bfloat16 itself is too coarse here") and "Nothing needs float32" not in str(tuned)

    def gradient(policy, scale):
        fun = jaxmp.autocast(lambda *args: scale * _policy_gradient(*args), policy)
        return (
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.jit(jax.grad(fun))(params, batch))]) / scale
        )

    exact = gradient("float32", 1)
    error = np.linalg.norm(gradient("mixed_float16", 64) - exact) / np.linalg.norm(exact)
    assert tuned.float16_error == pytest.approx(error, rel=0.2)
    assert f"in float16 the error is {100 * tuned.float16_error:.2g} %" in str(tuned)
    allowed = tune(_policy_gradient, "mixed_bfloat16", tolerance=0.9)(params, batch)
    assert allowed.overrides == {} and not allowed.is_too_coarse and "Nothing needs float32" in str(allowed)
    budget = error_budget(_policy_gradient, "mixed_bfloat16")(params, batch)
    assert any("bfloat16 itself is too coarse here" in sentence for sentence in budget.sentences)
    assert "bfloat16 may be too coarse here" in str(compare(_policy_gradient, "mixed_bfloat16")(params, batch))


def test_a_result_with_few_products_in_half_says_so():
    tuned = tune(_loss(None, None), "mixed_bfloat16")(_params(), X)
    assert tuned.overrides == {} and tuned.met and tuned.half_flops == 1 and "Nothing needs float32" in str(tuned)
    assert "few products" not in str(tuned)
    assert "few products are left in half" in str(dataclasses.replace(tuned, half_flops=0.1))
    assert str(dataclasses.replace(tuned, interrupted=True)).startswith("Interrupted: this is the best result so far")


def test_a_tolerance_below_the_floor_is_an_error_that_states_the_floor():
    loss_fn, args = _loss(None, None), (_params()[:1], X)
    printed = f"{tune(loss_fn, 'mixed_bfloat16')(*args).floor:.2e}"
    for tolerance in (1e-9, 0.99 * float(printed)):
        with pytest.raises(ValueError, match=f"below the floor, got {tolerance:.2e} and a floor of {printed}"):
            tune(loss_fn, "mixed_bfloat16", tolerance=tolerance)(*args)
    assert f"floor {printed}" in str(tune(loss_fn, "mixed_bfloat16", tolerance=float(printed))(*args))


def test_a_tolerance_below_the_floor_is_allowed_if_autocast_keeps_the_inexact_products_in_float32():
    """Autocast keeps the product float32, and so its error is far below the floor."""

    def loss_fn(params, x):
        with jax.named_scope("layer"), jaxmp.precision("float32"):
            x = x @ params
        with jax.named_scope("head"):
            return jnp.mean(x @ jnp.eye(16, dtype=x.dtype)) ** 2 + jnp.mean(x**2)

    tuned = tune(loss_fn, "mixed_bfloat16", tolerance=1e-3)(_params()[0], X)
    assert tuned.met and tuned.overrides == {} and tuned.error < tuned.tolerance


@SLOW
def test_the_default_tolerance_does_not_count_products_that_autocast_keeps_in_float32():
    """The products of the distances cancel. Rounding them would hide the error of the small steps."""
    codes = 6 + _params()[1]

    def loss_fn(params, x):
        with jax.named_scope("flow"):
            x = _flow(_as_rows(x), params)
        with jax.named_scope("distances"):
            x = x + 6
            return jnp.mean(jnp.tanh(jnp.sum(x**2, 1)[:, None] + jnp.sum(codes**2, 1) - 2 * x @ codes.T))

    tuned = tune(loss_fn, "mixed_bfloat16")(_params()[0], X)
    assert list(tuned.overrides) == ["flow:add"] and tuned.met
    assert tuned.floor < tuned.error_before / 2


class _RoundedProducts(Rewriter):
    """The oracle of the floor: it rounds the operands of all products to bfloat16, and nothing else."""

    def evaluate_operation(self, eqn, operands):
        if eqn.primitive.name == "dot_general":
            operands = [jax.lax.reduce_precision(operand, 8, 7) for operand in operands]
        return super().evaluate_operation(eqn, operands)


def test_the_floor_counts_the_products_of_a_loss_with_its_own_derivative():
    def loss_fn(params, x, labels):
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ params["w"])
        with jax.named_scope("loss"):
            return jaxmp.losses.projected_cross_entropy(x, params["head"], labels, chunks=2)

    w, head = jax.random.normal(jax.random.key(0), (2, 16, 16))
    args = {"w": w, "head": head}, X, jnp.arange(len(X)) % 16
    program = jax.make_jaxpr(jax.grad(loss_fn))(*args)
    leaves = jax.tree.leaves(args)
    exact = np.concatenate([np.ravel(leaf) for leaf in Rewriter().evaluate(*opened(program), leaves)])
    rounded = np.concatenate([np.ravel(leaf) for leaf in _RoundedProducts().evaluate(*opened(program), leaves)])
    tuned = tune(loss_fn, "mixed_bfloat16")(*args)
    assert tuned.floor == pytest.approx(np.linalg.norm(rounded - exact) / np.linalg.norm(exact), rel=1e-3)


def test_wrong_arguments_raise():
    loss_fn, params = _loss(None, None), _params()
    for tolerance, remedy in (
        (5, "for 5 %, write tolerance=0.05"),
        (-0.1, "write e.g. 0.01"),
        ("1%", "write e.g. 0.01"),
        (float("nan"), "write e.g. 0.01"),
    ):
        with pytest.raises(ValueError, match=f"from 0 to 1, got {tolerance!r}; {remedy}"):
            tune(loss_fn, "mixed_bfloat16", tolerance=tolerance)
    for policy in ("float32", "O2"):
        with pytest.raises(ValueError, match="one half policy"):
            tune(loss_fn, policy)
    with pytest.raises(ValueError, match="float32 is not finite on batch 1"):
        tune(loss_fn, "mixed_bfloat16")(params, X, batches=[(X * np.inf,)])
    with pytest.raises(ValueError, match="named scopes"):
        tune(lambda params, x: jnp.mean(x @ params), "mixed_bfloat16")(params[0], X)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=30), st.floats(0.1, 20.0))
def test_bisection_finds_the_smallest_number_of_candidates(sizes, tolerance):
    evaluations = []

    def error_of(chosen):
        evaluations.append(chosen)
        return math.sqrt(sum(size**2 for size in order[len(chosen) :]))

    order = sorted(sizes, reverse=True)
    count = smallest_prefix(order, error_of, tolerance)
    assert len(evaluations) <= 6
    assert error_of(order[:count]) <= tolerance and (count == 0 or error_of(order[: count - 1]) > tolerance)


def test_all_operations_of_a_module_have_one_override():
    def update(x, weight):
        return 300 + (jnp.tanh(x) + -300.0) * 1.001

    tuned = tune(_scoped([("first", _plain), ("update", update), ("last", _plain)]), "mixed_bfloat16")(_params()[0], X)
    assert all(path.partition(":")[0] == "update" for path in tuned.overrides) and tuned.met
