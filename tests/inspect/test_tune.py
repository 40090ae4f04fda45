"""tune finds exactly the planted module that needs float32, with few compilations; policy files."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

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
from jaxmp.inspect._tune.candidates import Candidate, candidates_of, overrides_of
from jaxmp.inspect._tune.measurement import Measurement
from jaxmp.inspect._tune.prediction import Prediction
from jaxmp.inspect._tune.search import search, search_and_measure, with_errors_of_operations
from jaxmp.policy.policy_map import get_policy

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
    assert tuned.half_flops == (1 if operation == "add" else 0.5) and tuned.evaluations <= 6
    if operation == "add":  # an error needs a finite error without overrides
        assert tuned.rows[0].error <= tuned.tolerance
    assert tuned.rows[0].path == f"layer_{at}:{operation}" and f"These need float32: layer_{at}" in str(tuned)
    assert "overrides:" not in str(tuned)
    assert (tuned.loss_scale is None) == (policy == "mixed_bfloat16")


def _short_step(x, weight):
    return x + 0.004 * jnp.tanh(x @ weight)


def _steep(x, weight):
    return x + 100 * (x * (1 + 0.002 * jnp.tanh(x @ weight)) + -x)


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


def test_many_modules_need_no_more_than_six_compilations():
    loss_fn = _deep_loss([_short_step] * 9 + [_plain])
    tuned = tune(loss_fn, "mixed_bfloat16", operations=False)(_params()[0], X)
    assert len(tuned.rows) == 10 and all(not math.isnan(row.error) for row in tuned.rows)  # each module was tried
    assert tuned.error_before > tuned.tolerance >= tuned.error and 1 < len(tuned.overrides) < 10
    assert tuned.evaluations <= 6


def _blocks_loss(params, x):
    """Return a loss of equal blocks and another layer."""
    x = _as_rows(x)
    for number, weight in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{number}"):
            x = _flow(x, weight)
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ params["head"]) ** 2)


@SLOW
@pytest.mark.parametrize(("strong", "paths"), [(range(3), ["block_*:add"]), ([2], ["block_2:add"])], ids=["all", "one"])
def test_equal_layers_that_need_float32_have_one_override_or_few(strong, paths):
    """A block without weights adds zeros, which is exact."""
    head, *weights = _params(4)
    blocks = [weight if number in strong else 0 * weight for number, weight in enumerate(weights)]
    tuned = tune(_blocks_loss, "mixed_bfloat16")({"blocks": blocks, "head": head}, X)
    assert list(tuned.overrides) == paths
    assert tuned.met and tuned.half_flops == 1 and tuned.evaluations <= 6
    assert [row.path for row in tuned.rows if row.is_float32] == paths


def _scoped(scopes):
    """Return a loss that calls each layer in its scope."""

    def loss_fn(weight, x):
        x = _as_rows(x)
        for scope, layer in scopes:
            with jax.named_scope(scope):
                x = layer(x, weight)
        return jnp.mean(x**2)

    return loss_fn


def _half_candidates(loss_fn):
    return candidates_of(loss_fn, (_params()[0], X), get_policy("mixed_bfloat16"))


def test_a_pattern_of_equal_layers_covers_no_other_module():
    """An unequal layer matches ``layer_*``, and ``norm_*`` covers the submodule of another."""
    layers = [("layer_0", _flow), ("layer_1", _flow), ("layer_2", _plain), ("layers/0", _flow)]
    norms = [("norm_0", _flow), ("norm_1/inner", _plain), ("norm_2", _flow)]
    blocks = [(f"stack_0/block_{number}/inner", _plain) for number in range(2)]
    candidates = _half_candidates(_scoped([*layers, *norms, *blocks]))
    assert {candidate.path: candidate.paths for candidate in candidates if candidate.layers} == {
        "stack_0/block_*/inner": ["stack_0/block_0/inner", "stack_0/block_1/inner"]
    }
    assert len(candidates) == len(layers) + len(norms) + 1


def test_equal_layers_need_no_half_operation_in_each():
    """The last addition of a stack is float32, because only float32 operations read it."""

    def block(x, weight):
        with jax.named_scope("inner"):
            step = jnp.tanh(x @ weight)
        return x + step

    candidates = _half_candidates(_scoped([(f"block_{number}", block) for number in range(3)]))
    inner, outer = candidates
    assert (inner.path, len(inner.paths), outer.path, len(outer.paths)) == ("block_*/inner", 3, "block_*", 3)
    [addition] = outer.operations
    assert addition.path == "block_*:add" and len(addition.paths) == 2


def test_layers_are_equal_only_if_their_parents_are():
    """Otherwise the inner layers would be tried together, and their parents one by one."""

    def loss_fn(weight, x):
        x = _as_rows(x)
        for number in range(3):
            with jax.named_scope(f"block_{number}"):
                x = jnp.tanh(x) if number == 0 else x
                with jax.named_scope("inner"):
                    step = jnp.tanh(x @ weight)
                x = x + step
        return jnp.mean(x @ weight)

    paths = {candidate.path for candidate in _half_candidates(loss_fn)}
    assert paths == {f"block_{number}{inner}" for number in range(3) for inner in ("", "/inner")}


@SLOW
def test_no_smaller_set_of_modules_is_enough():
    """The sets are measured one by one, each with a compilation."""
    loss_fn, args, half = _deep_loss([_flow, _steep, _plain]), (_params()[0], X), get_policy("mixed_bfloat16")
    tuned = tune(loss_fn, half, operations=False)(*args)
    measurement, candidates = Measurement(loss_fn, [args], half, 1.0), candidates_of(loss_fn, args, half)
    count = sum(row.is_float32 for row in tuned.rows)
    assert tuned.met and 0 < count < len(candidates)
    for smaller in range(count):
        for chosen in itertools.combinations(candidates, smaller):
            assert measurement.error(overrides_of(candidates, chosen, half)) > tuned.tolerance


def _recurrent(x, weight):
    def step(carry, _):
        carry = carry + 0.004 * jax.nn.silu(carry @ weight)
        return carry, jax.nn.softmax(carry @ weight)

    carry, softmaxes = jax.lax.scan(jax.checkpoint(step), x, None, length=4)
    return carry + 0.1 * softmaxes.mean(0)


_traced_once = jax.jit(_steep)  # JAX traces one body for all layers
_recomputed = jax.checkpoint(_short_step)


@pytest.mark.parametrize(
    ("layers", "policy"),
    [
        ([_flow, _plain], "mixed_bfloat16"),
        pytest.param([_traced_once, _plain, _traced_once], "mixed_bfloat16", marks=SLOW),
        pytest.param([_recomputed, _recomputed, _plain], "mixed_bfloat16", marks=SLOW),
        pytest.param([_flow, _recurrent, _plain], "mixed_float16", marks=SLOW),
        pytest.param([_flow, _plain, _steep, _plain], "mixed_bfloat16", marks=SLOW),
    ],
)
def test_predicted_errors_are_those_that_are_measured(layers, policy):
    loss_fn, args, half = _deep_loss(layers), (_params()[0], X), get_policy(policy)
    measurement, candidates = Measurement(loss_fn, [args], half, 1.0), candidates_of(loss_fn, args, half)
    prediction = measurement.prediction(0)
    assert prediction.is_possible
    additions = [operation for candidate in candidates for operation in candidate.operations if "add" in operation.path]
    for chosen in [frozenset(), *(frozenset([candidate]) for candidate in [*candidates, *additions])]:
        overrides = overrides_of(candidates, chosen, half)
        predicted = measurement.error_of_result(0, prediction.results(overrides))
        assert predicted == pytest.approx(measurement.error(overrides), rel=0.05)


def test_errors_are_measured_if_the_prediction_is_wrong_without_overrides(monkeypatch):
    monkeypatch.setattr(Prediction, "results", lambda prediction, overrides: (0.0, np.zeros(3 * 16 * 16)))
    tuned = tune(_loss(_flow, 1), "mixed_bfloat16", operations=False)(_params(), X)
    # The flow in layer 1 begins with the result of layer 0. If this is float32, the flow stays float32, too.
    assert list(tuned.overrides) == ["layer_0"] and tuned.met and tuned.evaluations > 6


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
    tuned.save(tmp_path / "policy.toml")
    better, _ = _linen_step(str(tmp_path / "policy.toml"))
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

    scopes = {candidate.path for candidate in candidates_of(loss_fn, (params, X), half)}
    assert any(path.endswith("attention/td,sd->ts") for path in scopes)
    paths = {candidate.path for candidate in candidates_of(loss_fn, (params, X), half, modules_only=True)}
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
    tuned.save(tmp_path / "policy.toml")
    half, saved = (jaxmp.nnx.autocast(model, policy) for policy in ("mixed_bfloat16", str(tmp_path / "policy.toml")))

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
    budget = error_budget(_policy_gradient, "mixed_bfloat16", probes=1)(params, batch)
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
    assert tuned.met and tuned.overrides == {} and tuned.error < tuned.tolerance < tuned.floor


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


class _Additive:
    """Errors whose squares add up over the candidates in half."""

    def __init__(self, alone):
        self.alone = alone
        self.count = 0

    def error(self, chosen):
        self.count += 1
        return math.sqrt(sum(error**2 for candidate, error in self.alone.items() if candidate not in chosen))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20), st.floats(0.1, 20.0))
def test_the_search_meets_the_tolerance_with_no_candidate_to_spare(sizes, tolerance):
    candidates = [Candidate(f"layer_{n}", n) for n in range(len(sizes))]
    errors = _Additive(dict(zip(candidates, sizes, strict=True)))
    result = search(candidates, errors.error, tolerance)
    evaluations, limit = errors.count, 2 * len(candidates) + 10
    assert evaluations <= limit
    assert result.error <= tolerance and result.error == errors.error(result.chosen)
    assert not result.interrupted
    for candidate in result.chosen:
        assert errors.error(result.chosen - {candidate}) > tolerance


def _module(path, *additions):
    """Return a module with a product and additions."""
    operations = [Candidate(f"{path}:dot_general", 1), *(Candidate(f"{path}:{name}", 0) for name in additions)]
    return Candidate(path, 1, tuple(operations))


def _half_operations(modules, chosen):
    return [part for module in modules if module not in chosen for part in module.operations if part not in chosen]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-9.0, 9.0), st.floats(-9.0, 9.0)), min_size=1, max_size=9))
def test_no_product_is_float32_if_all_may_stay_half(sizes):
    """Errors have signs, so they cancel: a product in float32 may lower the error most."""
    modules = [_module(f"layer_{n}", "add") for n in range(len(sizes))]
    errors = {}
    for module, size in zip(modules, sizes, strict=True):
        errors |= dict(zip(module.operations, size, strict=True))

    def error_of(chosen):
        return abs(sum(errors[operation] for operation in _half_operations(modules, chosen)))

    additions = frozenset(module.operations[1] for module in modules)
    result = search(modules, error_of, error_of(additions))
    assert result.chosen <= additions and result.error == error_of(result.chosen) <= error_of(additions)


def _errors_by_name(modules, **by_path):
    """Return a function from a choice to its error: the root of the sum of squares over half operations."""

    def error_of(chosen):
        half = [operation.path for operation in _half_operations(modules, chosen)]
        return math.sqrt(sum(by_path.get(path.replace(":", "_"), 0.0) ** 2 for path in half))

    return error_of


def test_only_the_operations_that_need_float32_are_chosen_beside_a_module_that_overflows():
    modules = [_module(name, "add", "mul") for name in ("first", "middle", "last")]
    error_of = _errors_by_name(modules, first_dot_general=math.inf, first_add=1, middle_add=4, middle_dot_general=1)
    result = search(modules, error_of, 2.0)
    assert result.products_stay_half and result.error <= 2
    assert {candidate.path for candidate in result.chosen} == {"first:dot_general", "middle:add"}
    with_errors = with_errors_of_operations(result, error_of)
    assert with_errors.errors[modules[1].operations[1]] == 1  # with the module that overflows in float32
    result = search(modules, error_of, 2.0, operations=False)
    assert {candidate.path for candidate in result.chosen} == {"first", "middle"}


def test_a_module_without_products_is_one_override_if_it_needs_all_its_operations():
    update = Candidate("update", 0, (Candidate("update:add", 0), Candidate("update:tanh", 0)))
    modules = [_module("head", "add"), update]
    error_of = _errors_by_name(modules, update_add=3, update_tanh=3, head_dot_general=1)
    assert search(modules, error_of, 2.0).chosen == {update}
    error_of = _errors_by_name(modules, update_add=3, update_tanh=1, head_dot_general=1)
    assert search(modules, error_of, 2.0).chosen == {update.operations[0]}


def test_of_two_measured_choices_the_one_with_fewer_flops_wins():
    """The first search chooses the product. The measured error shows that two sums are enough."""
    modules = [_module("first", "add"), _module("last", "add", "mul")]
    predict = _errors_by_name(modules, first_dot_general=5, last_add=1.3, last_mul=1.3)
    assert {candidate.path for candidate in search(modules, predict, 2.0).chosen} == {"first:dot_general"}
    result = search_and_measure(modules, predict, lambda chosen: 0.394 * predict(chosen), 2.0)
    assert {candidate.path for candidate in result.chosen} == {"last:add", "last:mul"}


def test_an_interrupt_keeps_the_products_half_if_they_may_stay_half():
    modules = [_module(f"layer_{n}", "add") for n in range(9)]
    predict = _errors_by_name(modules, **{f"layer_{n}_add": 2 for n in range(9)})
    errors = iter([predict(frozenset()), 0.0, 0.0])

    def error_of(_):
        if (error := next(errors, None)) is None:
            raise KeyboardInterrupt
        return error

    result = search(modules, error_of, 1.0)
    assert result.interrupted and result.chosen == {module.operations[1] for module in modules}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=9), st.floats(0.1, 20.0))
def test_a_choice_has_a_pattern_of_equal_layers_or_few_of_the_layers(sizes, tolerance):
    stack, error_of = _stack_and_errors(sizes)
    result = search([stack, Candidate("head", 1)], error_of, tolerance)
    single = result.chosen & {*stack.layers}
    assert result.error == error_of(result.chosen) <= tolerance
    assert not (single and stack in result.chosen) and 2 * len(single) <= len(sizes)
    for candidate in result.chosen:
        assert error_of(result.chosen - {candidate}) > tolerance


def _stack_and_errors(sizes):
    """Return a candidate of equal layers, and a function that returns the error of a choice."""
    layers = tuple(Candidate(f"layer_{n}", 1) for n in range(len(sizes)))
    stack = Candidate("layer_*", len(layers), layers=layers)
    errors = _Additive({**dict(zip(layers, sizes, strict=True)), Candidate("head", 1): 1.0})
    return stack, lambda chosen: errors.error(chosen | {*layers} if stack in chosen else chosen)


@pytest.mark.parametrize(
    ("sizes", "paths"),
    [
        ([0, 5], {"layer_1"}),
        ([5, 5], {"layer_*"}),
        ([0, 5, 0, 5], {"layer_1", "layer_3"}),
        ([5, 5, 0, 0, 5], {"layer_*"}),
    ],
)
def test_single_layers_are_chosen_if_50_percent_of_them_are_enough(sizes, paths):
    stack, error_of = _stack_and_errors(sizes)
    result = search([stack, Candidate("head", 1)], error_of, 2.0)
    assert {candidate.path for candidate in result.chosen} == paths


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9), st.floats(0.1, 20.0), st.sampled_from([0.0, 0.5, 2.0]))
def test_wrong_predictions_are_corrected_by_measured_errors(sizes, tolerance, factor):
    candidates = [Candidate(f"layer_{n}", n) for n in range(len(sizes))]
    errors = _Additive(dict(zip(candidates, sizes, strict=True)))
    result = search_and_measure(candidates, lambda chosen: factor * errors.error(chosen), errors.error, tolerance)
    assert result.error == errors.error(result.chosen) <= tolerance and not result.interrupted


def test_right_predictions_are_measured_once():
    candidates = [Candidate(f"layer_{n}", n) for n in range(9)]
    sizes = dict(zip(candidates, range(1, 10), strict=True))
    predicted, measured = _Additive(sizes), _Additive(sizes)
    result = search_and_measure(candidates, predicted.error, measured.error, 6.0)
    assert measured.count == 1 and result.error <= 6.0 and 0 < len(result.chosen) < 9


def test_of_two_layers_that_help_equally_the_first_is_chosen():
    """Layer 3 reads the last value of layer 2, so float32 in either layer removes the error of this value."""
    candidates = [Candidate(f"layer_{n}", 1) for n in range(4)]

    def error_of(chosen):
        paths = {candidate.path for candidate in chosen}
        return math.hypot(0.0 if "layer_0" in paths else 3.0, 0.0 if {"layer_2", "layer_3"} & paths else 4.0)

    result = search(candidates, error_of, 1.0)
    assert {candidate.path for candidate in result.chosen} == {"layer_0", "layer_2"}


def test_an_interrupt_returns_the_best_choice_so_far():
    candidates = [Candidate("layer_0", 1), Candidate("layer_1", 1)]

    class Interrupted(_Additive):
        def error(self, chosen):
            if self.count == 3:
                raise KeyboardInterrupt
            return super().error(chosen)

    errors = {candidates[0]: 3.0, candidates[1]: 4.0}
    result = search(candidates, Interrupted(errors).error, 2.0)
    assert result.interrupted and result.chosen == frozenset(candidates) and result.error == 0
    assert result.is_measured
    result = search_and_measure(candidates, Interrupted(errors).error, _Additive(errors).error, 2.0)
    assert result.interrupted and result.chosen == frozenset(candidates) and result.error == 0
    assert not result.is_measured


def test_policy_files_are_read_back_and_say_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('policy = "mixed_bfloat16"\n[overrides]\n"**/head" = "float32"\n')
    assert jaxmp.get_policy(file) == jaxmp.PolicyMap("mixed_bfloat16", {"**/head": "float32"})
    file.write_text('policy = "mixed_bfloat16"\n')
    assert jaxmp.get_policy(str(file)) == jaxmp.get_policy("mixed_bfloat16")
    for text, words in [
        ("layers = 1", "got 'layers'"),
        ("", "got none"),
        ("policy", "not a policy file"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            jaxmp.get_policy(str(file))
    with pytest.raises(FileNotFoundError, match="no policy file"):
        jaxmp.get_policy(str(tmp_path / "none.toml"))
