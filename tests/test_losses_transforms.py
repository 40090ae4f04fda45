"""Cross-entropies under JAX's transformations, autocast and policies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmp
from jaxmp.losses import cross_entropy, projected_cross_entropy

TOKENS, DIM, CLASSES = 12, 8, 10
RNG = np.random.default_rng(0)
X, WEIGHTS = (RNG.normal(size=(rows, DIM)).astype(np.float32) for rows in (TOKENS, CLASSES))
LABELS = RNG.integers(0, CLASSES, TOKENS).astype(np.int32)
LABELS[0] = -100


def naive(x, weights):
    log_softmax = jax.nn.log_softmax(x @ weights.T)
    picked = jnp.take_along_axis(log_softmax, jnp.maximum(LABELS, 0)[:, None], axis=-1)[:, 0]
    return -jnp.where(LABELS < 0, 0, picked).sum() / (TOKENS - 1)


def stored(x, weights):
    return cross_entropy(x @ weights.T, LABELS, ignore_index=-100).sum() / (TOKENS - 1)


def fused(x, weights, softcap=None):
    return projected_cross_entropy(x, weights, LABELS, chunks=5, ignore_index=-100, softcap=softcap)


def fused_and_capped(x, weights):
    return fused(x, weights, 15.0)


def all_of(funs, *args):
    """Return the results of several functions, compiled as one program."""
    return jax.jit(lambda *args: [fun(*args) for fun in funs])(*args)


def assert_close(got, want, tolerance=1e-5):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def equations(jaxpr):
    """Yield the equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
                yield from equations(getattr(param, "jaxpr", param))


@pytest.mark.parametrize("loss", [stored, fused])
def test_the_gradient_has_a_gradient(loss):
    def penalty(loss, x, weights):
        return sum((gradient**2).sum() for gradient in jax.grad(loss, (0, 1))(x, weights))

    penalties = [functools.partial(penalty, fun) for fun in (loss, naive)]
    assert_close(*all_of([jax.grad(fun, (0, 1)) for fun in penalties], X, WEIGHTS))


@pytest.mark.parametrize("loss", [stored, fused])
def test_forward_mode_is_refused(loss):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: loss(x, WEIGHTS), (x,), (x,))).lower(X)


def test_vmap_scan_and_checkpoint_compose():
    xs = np.stack([X, X / 2])

    def one_after_the_other(loss):
        return jax.lax.scan(lambda _, x: (None, jax.checkpoint(loss)(x, WEIGHTS)), None, xs)[1]

    def gradients(loss):
        return jax.vmap(jax.value_and_grad(jax.checkpoint(loss), (0, 1)), (0, None))(xs, WEIGHTS)

    assert_close(*all_of([lambda fun=fun: (one_after_the_other(fun), gradients(fun)) for fun in (fused, naive)]))


def test_a_checkpoint_keeps_no_constant_of_the_size_of_a_chunk_s_logits():
    x, weights, labels = jnp.ones((64, 4), jnp.bfloat16), jnp.ones((30, 4)), jnp.zeros(64, int)

    def loss(x, weights):
        options = {"classes": 29, "chunks": 4, "ignore_index": 1, "label_smoothing": 0.1, "z_loss": 1e-4}
        return projected_cross_entropy(x, weights, labels, softcap=30.0, **options)

    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(loss), (0, 1)))(x, weights).jaxpr
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    assert len(scans) == 2
    shapes = {getattr(var.aval, "shape", ()) for eqn in scans for var in eqn.invars}
    assert (16, 30) not in shapes


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x, weights, labels = X.astype(np.float64), WEIGHTS.astype(np.float64), LABELS.astype(np.int64)

        def loss(x, weights):
            return projected_cross_entropy(x, weights, labels, chunks=5, ignore_index=-100)

        got, want = all_of([jax.value_and_grad(fun, (0, 1)) for fun in (loss, naive)], x, weights)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"float64"}
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-12, atol=1e-14)


# ---- autocast and policies


def hidden(x, layer):
    return jnp.tanh(x @ layer)


LAYER = RNG.normal(size=(DIM, DIM)).astype(np.float32)


def of_float32(loss, half=None):
    """Return a model in float32, or in the half dtype by hand up to the loss."""

    def run(layer, weights):
        if half is None:
            return loss(hidden(X, layer), weights)
        return loss(hidden(X.astype(half), layer.astype(half)), weights)

    return run


@pytest.mark.parametrize("loss", [fused, fused_and_capped])
def test_the_fused_loss_under_autocast_is_that_by_hand_bit_for_bit(loss):
    runs = jaxmp.autocast(of_float32(loss), "mixed_float16"), of_float32(loss, jnp.float16)
    got, want = (jax.jit(jax.value_and_grad(run, (0, 1)))(LAYER, WEIGHTS) for run in runs)
    for ours, by_hand in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, by_hand)


def test_the_fused_loss_under_autocast_multiplies_half_and_sums_in_float32():
    autocast = jaxmp.autocast(of_float32(fused), "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(jax.grad(autocast, (0, 1)))(LAYER, WEIGHTS).jaxpr
    products = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    dtypes = [tuple(var.aval.dtype.name for var in (*eqn.invars, *eqn.outvars)) for eqn in products]
    half, summed = ("bfloat16",) * 3, ("bfloat16", "bfloat16", "float32")
    # The forward pass computes the layer, the logits, and the gradients of x and of the weights.
    # The backward pass computes the gradient of the layer.
    assert sorted(dtypes) == sorted([half, half, summed, summed, half])


@pytest.mark.once
def test_cross_entropy_under_autocast_keeps_the_half_logits():
    autocast = jaxmp.autocast(of_float32(stored), "mixed_bfloat16")
    residuals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(autocast, *args)[1], LAYER, WEIGHTS))
    logits = [leaf.dtype.name for leaf in residuals if leaf.shape == (TOKENS, CLASSES)]
    assert logits == ["bfloat16"]
    gradients = [jax.value_and_grad(fun) for fun in (autocast, of_float32(stored))]
    assert_close(*all_of(gradients, LAYER, WEIGHTS), tolerance=2e-2)


# ---- several devices


def in_numpy(labels):
    """Return the mean loss, and its gradients by ``X`` and ``WEIGHTS``."""
    exponentials = np.exp(X @ WEIGHTS.T)
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    by_logits = (probabilities - np.eye(CLASSES)[labels]) / TOKENS
    loss = -np.log(probabilities[np.arange(TOKENS), labels]).mean()
    return loss, (by_logits @ WEIGHTS, by_logits.T @ X)


def test_tokens_sharded_over_devices_stay_where_they_are():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens, alike = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    run = jax.jit(
        jax.value_and_grad(lambda x, weights, labels: projected_cross_entropy(x, weights, labels, chunks=3), (0, 1))
    )
    labels = abs(LABELS) % CLASSES
    args = jax.device_put((X, WEIGHTS, labels), (tokens, alike, tokens))
    program = run.lower(*args).compile()
    assert "all-gather" not in program.as_text()
    assert_close(program(*args), in_numpy(labels))


def test_the_fused_loss_runs_in_a_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    labels = abs(LABELS) % CLASSES

    def of_this_device(x, weights, labels):
        weights = jax.lax.pcast(weights, "data", to="varying")
        return jax.lax.pmean(projected_cross_entropy(x, weights, labels, chunks=3), "data")

    data = PartitionSpec("data")
    run = jax.shard_map(of_this_device, mesh=mesh, in_specs=(data, PartitionSpec(), data), out_specs=PartitionSpec())
    assert_close(jax.jit(jax.value_and_grad(run, (0, 1)))(X, WEIGHTS, labels), in_numpy(labels))
