"""With ``mean_over``, microbatches with different numbers of valid tokens give the step of the whole batch."""

from __future__ import annotations

import warnings

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from jaxmp.losses import projected_cross_entropy
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.once

EXAMPLES, TOKENS, WIDTH, CLASSES, IGNORED = 8, 6, 8, 11, -100


def batches():
    """Return three batches. In the second one, a microbatch of four, and a device of four, have no valid token."""
    rng = np.random.default_rng(0)
    made = []
    for n in range(3):
        x = rng.normal(size=(EXAMPLES, TOKENS, WIDTH)).astype(np.float32)
        y = rng.integers(0, CLASSES, (EXAMPLES, TOKENS)).astype(np.int32)
        y[rng.random((EXAMPLES, TOKENS)) < 0.4] = IGNORED
        if n == 1:
            y[1::4] = y[:2] = IGNORED
        made.append({"x": x, "y": y})
    return made


def params(dtype=np.float32):
    rng = np.random.default_rng(1)
    shapes = {"w": (WIDTH, WIDTH), "table": (CLASSES, WIDTH)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def hidden(params, batch):
    return jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"])


def token_losses(params, batch):
    """Return the losses, times 0 for ignored tokens."""
    logs = jax.nn.log_softmax(hidden(params, batch) @ params["table"].T)
    losses = -jnp.take_along_axis(logs, jnp.maximum(batch["y"], 0)[..., None], axis=-1)[..., 0]
    return losses * is_valid(batch).astype(losses.dtype)


def is_valid(batch):
    return batch["y"] != IGNORED


def count(batch):
    return is_valid(batch).sum().astype(jnp.float32)


def projected(params, batch):
    x, y = hidden(params, batch).reshape(-1, WIDTH), batch["y"].reshape(-1)
    loss = projected_cross_entropy(x, params["table"], y, chunks=2, ignore_index=IGNORED)
    return loss, metrics(params, batch, 1)


def masked(params, batch):
    """Return the mean by hand, which is 0 / 0 without a valid token, as are its gradients."""
    losses = token_losses(params, batch)
    return losses.sum() / is_valid(batch).sum().astype(losses.dtype), metrics(params, batch, 0)


def metrics(params, batch, least):
    hits = (hidden(params, batch) @ params["table"].T).argmax(-1).astype(np.int32) == batch["y"]
    accuracy = hits.sum().astype(jnp.float32) / jnp.maximum(count(batch), least)
    return {"tokens": is_valid(batch).sum(), "accuracy": accuracy}


def train(loss_fn, dtype=np.float32, all_batches=None, **options):
    """Train for three steps; return the params and the metrics of all steps."""
    tx = jaxmp.loss_scaling(optax.sgd(0.1, momentum=0.9), jaxmp.StaticLossScale(1.0))
    state = jaxmp.TrainState.create(params=params(dtype), tx=tx)
    step = jaxmp.make_train_step(loss_fn, **options)
    reports = []
    for batch in all_batches or batches():
        state, report = step(state, batch)
        reports.append(jax.device_get(report))
    return jax.device_get(state.params), reports


def assert_equal(run, expected, rtol=2e-6, atol=2e-6):
    for leaf, wanted in zip(jax.tree.leaves(run), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol, atol)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("loss_fn", [projected, masked])
def test_loss_metrics_and_params_are_those_of_the_whole_batch(loss_fn, count):
    expected = train(loss_fn, mean_over="tokens")
    assert_equal(train(loss_fn, mean_over="tokens", accumulate_steps=count), expected)
    tokens = [report["tokens"] for report in expected[1]]
    assert tokens == [is_valid(batch).sum() for batch in batches()]


def test_params_are_those_of_the_whole_batch_in_float64():
    def masked_in_float64(params, batch):
        loss, metrics = masked(params, batch)
        return loss, {"tokens": metrics["tokens"]}

    with jax.enable_x64(True):
        expected, _ = train(masked_in_float64, np.float64)
        found, _ = train(masked_in_float64, np.float64, mean_over="tokens", accumulate_steps=4)
        assert found["w"].dtype == np.float64
        assert_equal(found, expected, rtol=1e-13, atol=1e-13)


def test_without_it_the_step_warns_once_and_has_other_params():
    expected, _ = train(masked)
    with pytest.warns(UserWarning, match=r"divides its loss .*\n.*mean_over='count'") as caught:
        found, _ = train(projected, accumulate_steps=2)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert np.abs(found["table"] - expected["table"]).max() > 1e-3


def test_in_a_batch_without_valid_tokens_the_step_is_that_of_the_whole_batch():
    empty = {**batches()[0], "y": np.full((EXAMPLES, TOKENS), IGNORED, np.int32)}
    sequence = [batches()[0], empty]
    expected = train(projected, all_batches=sequence, mean_over="tokens")
    assert expected[1][1]["loss"] == 0 and not expected[1][1]["skipped"]
    assert_equal(train(projected, all_batches=sequence, mean_over="tokens", accumulate_steps=2), expected)


def test_a_nan_in_a_microbatch_with_valid_tokens_skips_the_step():
    bad = batches()[:1]
    bad[0]["x"][0] = np.nan
    _, (report,) = train(masked, all_batches=bad, mean_over="tokens", accumulate_steps=4)
    assert report["skipped"] and np.isnan(report["loss"])


def test_a_nan_as_the_count_is_not_hidden():
    def loss_fn(params, batch):
        return token_losses(params, batch).mean(), {"tokens": jnp.sqrt(jnp.float32(-1) - batch["x"].max())}

    _, reports = train(loss_fn, mean_over="tokens", accumulate_steps=2)
    assert all(report["skipped"] for report in reports)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("reduce", ["each", "once"])
def test_on_a_mesh_the_step_is_that_of_the_whole_batch(kind, reduce):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))
    sharding = Sharding(mesh, {"w": PartitionSpec("fsdp"), "table": PartitionSpec(None, "fsdp")}, reduce=reduce)
    expected = train(projected)
    # Two devices have 4 examples of the batch each, and 1 example of each of four microbatches.
    assert_equal(train(projected, sharding=sharding, accumulate_steps=4, mean_over="tokens"), expected)


def test_an_nnx_model_trains_as_on_the_whole_batch():
    def loss_fn(model, batch):
        return masked({"w": model["w"][...], "table": model["table"][...]}, batch)

    results = []
    for options in ({}, {"accumulate_steps": 4, "mean_over": "tokens"}):
        model = nnx.Dict({name: nnx.Param(array) for name, array in params().items()})
        optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9))
        step = jaxmp.nnx.make_train_step(loss_fn, **options)
        reports = [jax.device_get(step(model, optimizer, batch)) for batch in batches()]
        results.append((jax.device_get(nnx.as_pure(nnx.state(model))), reports))
    assert_equal(results[1], results[0])


# ---- the warning


def reciprocal(params, batch):
    return token_losses(params, batch).sum() * (1 / count(batch))


def inside_of_calls(params, batch):
    return jax.jit(jax.checkpoint(lambda params: token_losses(params, batch).sum() / count(batch)))(params)


def mean_where(params, batch):
    return token_losses(params, batch).mean(where=is_valid(batch))


def mean_of_all(params, batch):
    return token_losses(params, batch).mean()


def mean_of_sequences(params, batch):
    counts = jnp.maximum(is_valid(batch).sum(1), 1).astype(jnp.float32)
    return (token_losses(params, batch).sum(1) / counts).mean()


def divided_by_a_param(params, batch):
    return token_losses(params, batch).mean() / jnp.exp(params["w"][0, 0])


def projected_without_ignored(params, batch):
    x, y = hidden(params, batch).reshape(-1, WIDTH), jnp.abs(batch["y"]).reshape(-1) % CLASSES
    return projected_cross_entropy(x, params["table"], y, chunks=2)


@pytest.mark.parametrize(
    ("loss_fn", "number"),
    [
        *((loss_fn, 1) for loss_fn in (reciprocal, inside_of_calls, mean_where)),
        *((loss_fn, 0) for loss_fn in (mean_of_all, mean_of_sequences, divided_by_a_param, projected_without_ignored)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"policy": "mixed_bfloat16", "remat": "dots"}])
def test_only_a_division_by_a_count_of_the_microbatch_is_reported(loss_fn, number, options):
    state = jaxmp.TrainState.create(params=params(), tx=optax.sgd(0.1))
    batch = batches()[0]
    step = jaxmp.make_train_step(loss_fn, accumulate_steps=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step._warn(step.jitted.trace(state, batch), state)
    assert sum("divides its loss" in str(warning.message) for warning in caught) == number


@pytest.mark.parametrize(
    ("name", "metrics", "error", "text"),
    [
        ("tokens", {"accuracy": 1.0}, ValueError, r"must be a metric of the loss function, got \['accuracy'\]; return"),
        ("tokens", {"tokens": np.ones(3)}, ValueError, "must be a number, got float32 of shape"),
        ("tokens", {"tokens": True}, ValueError, "must be a number, got bool"),
    ],
)
def test_wrong_counts_are_errors(name, metrics, error, text):
    state = jaxmp.TrainState.create(params=concrete.ones(2), tx=optax.sgd(0.1))
    with pytest.raises(error, match=text):
        jaxmp.make_train_step(lambda params, x: (jnp.sum(params), metrics), mean_over=name)(state, concrete.ones(2))
