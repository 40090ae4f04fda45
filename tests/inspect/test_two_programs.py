"""Comparisons of two functions: a model in training, and the one that serves it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen_zoo import numbers, quick_jit

import jaxmp
from jaxmp.inspect import compare

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 20, (8, 6))
X = RNG.normal(size=(16, 8)).astype(np.float32)
W = {name: RNG.normal(size=(8, 8)).astype(np.float32) / 3 for name in "abc"}


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(32, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(16, name="down")(nn.gelu(y)), None


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(20, 16, name="embed")(tokens)
        blocks = nn.scan(_Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(20, name="head")(x)


class ServedNet(Net):
    pass


PARAMS = numbers(jax.eval_shape(Net().init, jax.random.key(0), TOKENS))
PATHS = ["Net/embed", "Net/blocks/norm", "Net/blocks/up", "Net/blocks/down", "Net/blocks", "Net/head", "Net"]


def _logits_of(model):
    return lambda params, tokens: model.apply(params, tokens).astype(jnp.float32)


half_logits = _logits_of(jaxmp.linen.apply_policy(Net(), "mixed_bfloat16"))


def _layers(last):
    """Return a function of three layers. The last is computed by the function ``last``."""

    def fun(params, x):
        for name in "ab":
            with jax.named_scope(name):
                x = x @ params[name]
        with jax.named_scope("c"):
            return last(x, params["c"])

    return fun


def _in_bfloat16(x, w):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def _paths(comparison, phase="forward"):
    return [row.path for row in comparison.rows if row.phase == phase and row.path]


def test_equal_programs_have_no_difference_at_all():
    def loss(params, tokens):
        return jnp.mean(half_logits(params, tokens) ** 2)

    comparison = compare(loss, reference=lambda *args: loss(*args))(PARAMS, TOKENS)
    assert _paths(comparison) == PATHS and len(comparison.rows) > 2 * len(PATHS)
    assert {(row.relative_error, row.mean_absolute_difference, row.ulps) for row in comparison.rows} == {(0, 0, 0)}
    assert comparison.dtype == "bfloat16" and str(comparison).startswith("All compared numbers are equal\n")
    of_results = compare(jnp.sin, reference=lambda x: jnp.sin(x), grad=False)(X)
    assert str(of_results).startswith("The results are equal; no values of scopes are compared\n")


def test_a_difference_enters_in_the_layer_that_the_functions_compute_differently():
    exact, half = _layers(jnp.matmul), _layers(_in_bfloat16)
    for fun, reference in ((exact, half), (half, exact)):
        comparison = compare(fun, reference=reference, grad=False)(W, X)
        errors = {row.path: row.relative_error for row in comparison.rows}
        assert errors["a"] == errors["b"] == 0 < errors["c"] == errors[""]
        assert comparison.dtype == "bfloat16" and comparison.reference == "fun"
        of_both = [np.asarray(quick_jit(f)(W, X), np.float64) for f in (fun, reference)]
        expected = np.linalg.norm(of_both[0] - of_both[1]) / np.linalg.norm(of_both[1])
        np.testing.assert_allclose(errors["c"], expected, rtol=1e-5)
    coarse = _layers(lambda x, w: jnp.round(8 * (x @ w)) / 8)
    assert compare(coarse, "mixed_bfloat16", reference=half, grad=False)(W, X).entered == "c"


def test_scopes_without_a_row_are_listed():
    def loop(params, tokens):
        return jnp.concatenate([half_logits(params, tokens[n : n + 1]) for n in range(8)])

    def by_ones(params, tokens):
        return jax.lax.map(lambda row: half_logits(params, row[None])[0], tokens)

    for reference in (loop, by_ones):
        comparison = compare(half_logits, reference=reference, grad=False)(PARAMS, TOKENS)
        assert _paths(comparison) == [] and comparison.unmatched == tuple(PATHS)
        assert comparison.worst.relative_error < 2**-7
        assert "No value of a scope has a match in the other function" in str(comparison)
        assert "no values of scopes are compared" in str(comparison) and "Rename" not in str(comparison)


def test_models_with_other_class_names_are_told_apart():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="dense")(x)

    class Rewritten(Net):
        pass

    params = numbers(jax.eval_shape(Net().init, jax.random.key(0), X))
    text = str(compare(Net().apply, reference=Rewritten().apply, grad=False)(params, X))
    assert text.startswith("The results are equal; no values of scopes are compared\n")
    assert "Rename Net or Rewritten, so that all paths begin alike." in text

    def with_another_scope(params, x):
        with jax.named_scope("extra_0"):
            x = x + 0.5
        with jax.named_scope("extra_1"):
            x = x - 0.5
        return _layers(jnp.matmul)(params, x)

    comparison = compare(with_another_scope, reference=_layers(jnp.matmul), grad=False)(W, X)
    assert _paths(comparison) == ["a", "b", "c"] and comparison.unmatched == ("extra_0", "extra_1")
    assert str(comparison).splitlines()[-1].endswith("without a match, because of their number, shape or loop: extra_*")


def test_a_model_of_another_class_has_the_same_paths_under_the_same_name():
    served = _logits_of(ServedNet())
    assert "ServedNet/head" in compare(half_logits, reference=served, grad=False)(PARAMS, TOKENS).unmatched
    served = _logits_of(ServedNet(name="Net"))
    comparison = compare(half_logits, reference=served, grad=False)(PARAMS, TOKENS)
    assert _paths(comparison) == PATHS and comparison.unmatched == ()


def test_train_steps_are_compared_under_their_own_policies():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((_layers(jnp.matmul)(params, batch) - 1) ** 2), model_state

    state = jaxmp.TrainState.create(params=W, tx=optax.sgd(0.1))
    policies = "mixed_bfloat16", "mixed_float16"
    steps = [jaxmp.make_train_step(loss_fn, policy=policy, donate=False) for policy in policies]
    comparison = compare(steps[0], reference=steps[1])(state, X)
    of_functions = [jaxmp.autocast(lambda params, x: loss_fn(params, None, x, None)[0], name) for name in policies]
    expected = compare(of_functions[0], reference=of_functions[1])(W, X)
    assert [row.path for row in comparison.rows] == [row.path for row in expected.rows]
    np.testing.assert_allclose(comparison.total.relative_error, expected.total.relative_error, rtol=1e-3)
    assert 1e-4 < comparison.total.relative_error < 2e-2
    with pytest.raises(ValueError, match="got a train step and another function; pass the loss functions of both"):
        compare(steps[0], reference=of_functions[1])
    with pytest.raises(ValueError, match="the same accumulate_steps, got 1 and 2; write"):
        compare(steps[0], reference=steps[1].with_options(accumulate_steps=2))


def test_functions_with_results_of_other_shapes_are_refused():
    fun = _layers(jnp.matmul)
    for reference in (lambda *args: fun(*args)[:, :1], lambda *args: (fun(*args), X)):
        with pytest.raises(ValueError, match=r"floating results have equal shapes, got \[\(16, 8\)\] and \[\(16, "):
            compare(fun, reference=reference, grad=False)(W, X)
