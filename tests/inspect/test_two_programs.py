"""Comparisons of two functions: a model in training, and the one that serves it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen_zoo import numbers, quick_jit

import jaxmp
from jaxmp.inspect import compare, compare_log_probs

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 20, (8, 6))
NEXT = RNG.integers(0, 20, (8, 6))
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


def _loss_of(logits):
    return lambda params, tokens: jnp.mean(logits(params, tokens) ** 2)


def assert_equal_layers(comparison):
    assert _paths(comparison) == PATHS and comparison.unmatched == () and comparison.entered is None
    assert comparison.worst.relative_error < 2**-7  # parts in another order would differ by more than 1


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


def test_a_batch_of_8_is_compared_with_8_batches_of_1():
    def by_ones(params, tokens):
        return jax.lax.map(lambda row: half_logits(params, row[None])[0], tokens)

    def by_twos(params, tokens):
        return jax.lax.map(lambda rows: half_logits(params, rows), tokens.reshape(4, 2, 6)).reshape(8, 6, 20)

    for fun, reference in ((by_ones, half_logits), (half_logits, by_twos)):
        comparison = compare(_loss_of(fun), reference=_loss_of(reference))(PARAMS, TOKENS)
        assert_equal_layers(comparison)
        assert set(_paths(comparison, "backward")) > {*PATHS}


def test_all_tokens_at_once_are_compared_with_one_token_at_a_time():
    def one_of_each(params, tokens):
        return jax.lax.map(lambda column: half_logits(params, column), tokens.T).swapaxes(0, 1)

    def slices(params, tokens):
        columns = tokens.T.reshape(3, 2, 8).swapaxes(1, 2)
        return jax.lax.map(lambda part: half_logits(params, part), columns).swapaxes(0, 1).reshape(8, 6, 20)

    for fun, reference in ((one_of_each, half_logits), (half_logits, slices)):
        assert_equal_layers(compare(fun, reference=reference, grad=False)(PARAMS, TOKENS))


def _recurrent(loop):
    """Return a recurrent layer. ``loop(cell, state, x)`` returns the last state."""

    def fun(params, x):  # x has the axes batch, time, features
        def cell(state, x_t):
            with jax.named_scope("inputs"):
                y = x_t @ params["a"]
            with jax.named_scope("state"):
                return jnp.tanh(state @ params["b"] + y), None

        state = loop(cell, jnp.zeros((x.shape[0], 8)), x)
        with jax.named_scope("head"):
            return state @ params["c"]

    return fun


BACKWARDS = {
    "reverse=True": lambda cell, state, x: jax.lax.scan(cell, state, x.swapaxes(0, 1), reverse=True)[0],
    "flip before swapaxes": lambda cell, state, x: jax.lax.scan(cell, state, x[:, ::-1].swapaxes(0, 1))[0],
    "flip after swapaxes": lambda cell, state, x: jax.lax.scan(cell, state, jnp.flip(x.swapaxes(0, 1), 0))[0],
    "flip twice": lambda cell, state, x: jax.lax.scan(cell, state, x.swapaxes(0, 1)[::-1][::-1], reverse=True)[0],
    "flip before a scaling": lambda cell, state, x: jax.lax.scan(
        cell, state, (1.0 - 0.5 * x[:, ::-1]).swapaxes(0, 1) * -2.0 + 2.0
    )[0],
    "with a counter": lambda cell, state, x: jax.lax.scan(
        lambda state, element: cell(state, element[1]), state, (jnp.arange(6), x[:, ::-1].swapaxes(0, 1))
    )[0],
}


@pytest.mark.parametrize("spelling", BACKWARDS)
def test_loops_over_a_reversed_array_are_compared_by_its_elements(spelling):
    x = RNG.normal(size=(5, 6, 8)).astype(np.float32)
    backwards = _recurrent(BACKWARDS[spelling])
    for fun, reference in (
        (backwards, _recurrent(BACKWARDS["reverse=True"])),
        (_recurrent(BACKWARDS["flip before swapaxes"]), backwards),
    ):
        comparison = compare(_loss_of(fun), reference=_loss_of(reference))(W, x)
        assert _paths(comparison) == ["inputs", "state", "head"] and comparison.entered is None
        assert comparison.worst.relative_error < 1e-5  # iterations in another order would differ by more than 1


def test_a_second_loop_over_the_states_of_a_reversed_loop_is_compared_by_their_elements():
    def fun(params, x, *, reverse):  # x has the axes batch, time, features
        def layer(name, weight):
            def cell(state, x_t):
                with jax.named_scope(name):
                    state = jnp.tanh(state @ params[weight] + x_t)
                return state, state

            return cell

        x = x.swapaxes(0, 1)
        start = jnp.zeros((x.shape[1], 8))
        _, states = jax.lax.scan(layer("first", "a"), start, x if reverse else x[::-1], reverse=reverse)
        state, _ = jax.lax.scan(layer("second", "b"), start, states, reverse=reverse)
        return state

    x = RNG.normal(size=(5, 6, 8)).astype(np.float32)
    comparison = compare(
        lambda params, x: fun(params, x, reverse=False),
        reference=lambda params, x: fun(params, x, reverse=True),
        grad=False,
    )(W, x)
    assert _paths(comparison) == ["first", "second"] and comparison.worst.relative_error < 1e-5


def test_a_loop_over_a_reversed_array_is_compared_with_the_whole_array():
    def over_time(params, tokens):
        logits = jax.lax.map(lambda column: half_logits(params, column), tokens.T[::-1])
        return logits[::-1].swapaxes(0, 1)

    for fun, reference in ((over_time, half_logits), (half_logits, over_time)):
        assert_equal_layers(compare(fun, reference=reference, grad=False)(PARAMS, TOKENS))


def test_an_error_in_a_loop_over_a_reversed_array_enters_where_it_is():
    def loop(cell, state, x):
        def coarse(state, x_t):
            state, _ = cell(state, x_t)
            with jax.named_scope("coarse"):
                return jnp.round(state * 8) / 8, None

        return BACKWARDS["flip before swapaxes"](coarse, state, x)

    def exact(cell, state, x):
        def fine(state, x_t):
            state, _ = cell(state, x_t)
            with jax.named_scope("coarse"):
                return state * 1.0, None

        return BACKWARDS["reverse=True"](fine, state, x)

    x = RNG.normal(size=(5, 6, 8)).astype(np.float32)
    comparison = compare(_recurrent(loop), reference=_recurrent(exact), grad=False)(W, x)
    errors = {row.path: row.relative_error for row in comparison.rows}
    assert comparison.entered == "coarse" and errors["inputs"] < 1e-6


def test_a_loop_that_fits_several_axes_has_no_row():
    def over_time(params, tokens):
        return jax.lax.map(lambda column: half_logits(params, column), tokens.T).swapaxes(0, 1)

    square = RNG.integers(0, 20, (8, 8))
    for fun, reference in ((over_time, half_logits), (half_logits, over_time)):
        comparison = compare(fun, reference=reference, grad=False)(PARAMS, square)
        assert _paths(comparison) == [] and sorted(comparison.unmatched) == sorted(PATHS)
        assert comparison.entered is None and comparison.worst.relative_error < 2**-7
    assert_equal_layers(compare(over_time, reference=half_logits, grad=False)(PARAMS, square[:1]))

    def by_ones(params, x):
        return jax.lax.map(lambda row: _layers(_in_bfloat16)(params, row), x)

    comparison = compare(by_ones, reference=_layers(_in_bfloat16), grad=False)(W, X[:8])
    assert _paths(comparison) == [] and comparison.unmatched == ("a", "b", "c")  # c returns only a cast


def test_an_error_enters_in_a_layer_that_depends_on_the_batch():
    class Scaled(nn.Module):
        """A product of activations with one scale for the whole batch, as in int8."""

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="first")(x)
            with jax.named_scope("scaled"):
                scale = jnp.max(jnp.abs(x)) / 7
                x = jnp.round(x / scale) * scale
            return nn.Dense(8, name="last")(x)

    params = numbers(jax.eval_shape(Scaled().init, jax.random.key(0), X))

    def by_ones(params, x):
        return jax.lax.map(lambda row: Scaled().apply(params, row[None])[0], x)

    for fun, reference in ((Scaled().apply, by_ones), (by_ones, Scaled().apply)):
        comparison = compare(fun, reference=reference, grad=False)(params, X)
        errors = {row.path: row.relative_error for row in comparison.rows}
        assert comparison.entered == "Scaled/scaled" and errors["Scaled/first"] < 1e-6 < 0.01 < errors["Scaled/scaled"]


def test_scopes_without_a_row_are_listed():
    def loop(params, tokens):
        return jnp.concatenate([half_logits(params, tokens[n : n + 1]) for n in range(8)])

    comparison = compare(half_logits, reference=loop, grad=False)(PARAMS, TOKENS)
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


def test_a_function_with_the_name_of_a_dtype_is_another_function():
    def float32(params, x):
        return _layers(jnp.matmul)(params, x)

    comparison = compare(_layers(jnp.matmul), reference=float32, grad=False)(W, X)
    assert comparison.reference == "float32" and comparison.is_of_two_functions
    assert "No policy" not in str(comparison)
    assert not compare(_layers(jnp.matmul), "mixed_bfloat16", grad=False)(W, X).is_of_two_functions


def test_the_dtype_of_a_comparison_is_half_even_if_most_products_are_in_float8():
    def fun(x, w):
        y = jax.lax.dot(x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.float32)
        z = jax.lax.dot(y.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.float32)
        return _in_bfloat16(z, w)

    assert compare(fun, grad=False)(X, W["a"]).dtype == "bfloat16"


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


def _exact_log_probs(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


def test_log_probs_are_compared_as_numpy_does():
    train = RNG.normal(size=(8, 6, 20)).astype(np.float32)
    where = TOKENS > 3
    for scale in (1e-1, 1e-4):  # a divergence of 1e-9 is less than the rounding error of float32 at 1
        serve = train + scale * RNG.normal(size=train.shape).astype(np.float32)
        log_train, log_serve = _exact_log_probs(train), _exact_log_probs(serve)
        divergence = np.sum(np.exp(log_serve) * (log_serve - log_train), -1)
        of_tokens = [np.take_along_axis(logs, NEXT[..., None], -1)[..., 0] for logs in (log_train, log_serve)]
        difference = (of_tokens[0] - of_tokens[1])[where]
        expected = {
            "tokens": where.sum(),
            "rms": np.sqrt(np.mean(difference**2)),
            "mean_absolute_difference": np.mean(np.abs(difference)),
            "largest_difference": np.max(np.abs(difference)),
            "kl": np.mean(divergence[where]),
            "flips": np.mean((np.argmax(train, -1) != np.argmax(serve, -1))[where]),
        }
        from_logits = compare_log_probs(train, serve, NEXT, where=where)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(from_logits, name), value, rtol=5e-3)
        padded = [np.where(where, logs, -np.inf) for logs in of_tokens]
        from_log_probs = compare_log_probs(*padded, where=where)
        np.testing.assert_allclose(from_log_probs.rms, expected["rms"], rtol=1e-9)
        estimate = np.mean(np.exp(difference) - 1 - difference)
        np.testing.assert_allclose(from_log_probs.kl, estimate, rtol=1e-5)
        assert from_log_probs.flips is None and from_log_probs.tokens == expected["tokens"]


def test_the_estimate_from_drawn_tokens_is_near_the_divergence_of_the_logits():
    train = RNG.normal(size=20).astype(np.float32)
    serve = train + 0.1 * RNG.normal(size=20).astype(np.float32)
    tokens = RNG.choice(20, 20_000, p=np.exp(_exact_log_probs(serve)))
    both = [np.broadcast_to(logits, (20_000, 20)) for logits in (train, serve)]
    exact = compare_log_probs(*both, tokens)
    drawn = compare_log_probs(_exact_log_probs(train)[tokens], _exact_log_probs(serve)[tokens])
    np.testing.assert_allclose(drawn.kl, exact.kl, rtol=0.05)


def test_equal_logits_have_no_difference_even_if_tokens_are_masked_out():
    logits = np.where(TOKENS[..., None] == np.arange(20), -np.inf, RNG.normal(size=(8, 6, 20))).astype(np.float32)
    comparison = compare_log_probs(logits, logits, (TOKENS + 1) % 20)
    assert (comparison.rms, comparison.largest_difference, comparison.kl, comparison.flips) == (0, 0, 0, 0)
    assert str(comparison).startswith("The log-probabilities of 48 tokens differ by 0.00e+00 nats (root mean square)")


def test_log_probs_of_large_logits_are_computed_in_float64():
    train = RNG.normal(size=(8, 6, 20))
    serve = train + 1e-5 * RNG.normal(size=train.shape)
    of_tokens = [np.take_along_axis(_exact_log_probs(logits), NEXT[..., None], -1) for logits in (train, serve)]
    comparison = compare_log_probs(train + 1000, serve + 1000, NEXT)
    np.testing.assert_allclose(comparison.rms, np.sqrt(np.mean((of_tokens[0] - of_tokens[1]) ** 2)), rtol=1e-6)


def test_tokens_of_many_logits_are_compared_in_parts(monkeypatch):
    train, serve = RNG.normal(size=(2, 8, 6, 20))
    expected = compare_log_probs(train, serve, NEXT)
    monkeypatch.setattr("jaxmp.inspect._compare.log_probs._LOGITS_AT_ONCE", 7 * 20)  # 48 tokens in parts of 7
    assert compare_log_probs(train, serve, NEXT) == expected


def test_tokens_and_log_probs_that_do_not_count_may_have_any_value():
    counts = NEXT > 3
    logits, log_probs = RNG.normal(size=(8, 6, 20)), -np.ones((8, 6))
    assert compare_log_probs(logits, logits, np.where(counts, NEXT, -100), where=counts).rms == 0
    assert compare_log_probs(np.where(counts, log_probs, 7), log_probs, where=counts).rms == 0
    assert compare_log_probs(log_probs * 0 + 1e-4, log_probs * 0).largest_difference == 1e-4  # a rounding above 0


LOGITS, LOG_PROBS = np.zeros((8, 6, 20)), np.zeros((8, 6))


@pytest.mark.parametrize(
    ("args", "where", "message"),
    [
        ((LOGITS, LOG_PROBS), None, r"equal shapes, got \(8, 6, 20\) and \(8, 6\)"),
        ((LOG_PROBS, LOG_PROBS, TOKENS), None, r"without the vocabulary, \(8,\), got \(8, 6\); .* leave tokens out"),
        ((LOG_PROBS, LOG_PROBS), np.ones(8, bool), r"a boolean for each token, \(8, 6\), .* got \(8,\) with 8"),
        ((LOGITS, LOGITS, TOKENS), LOG_PROBS > 0, r"and one that is True, got \(8, 6\) with 0"),
        ((LOGITS, LOGITS, TOKENS - 20), None, r"tokens need to be from 0 to 19, .* got -\d+; leave out padding"),
        ((LOGITS, LOGITS, TOKENS + 20), None, r"tokens need to be from 0 to 19, .* got \d+; leave out padding"),
        ((LOG_PROBS, LOG_PROBS + 2.5), None, r"need to be at most 0, got 2.5; for logits, pass the tokens too"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args, where, message):
    with pytest.raises(ValueError, match=message):
        compare_log_probs(*args, where=where)


def test_logits_in_a_tuple_or_a_dict_are_refused():
    with pytest.raises(TypeError, match=r"train needs to be an array of .*, got tuple of 2; .* pass the logits alone"):
        compare_log_probs((LOGITS, LOG_PROBS), LOGITS, TOKENS)
    with pytest.raises(TypeError, match=r"serve needs to be an array of .*, got dict; "):
        compare_log_probs(LOGITS, {"logits": LOGITS}, TOKENS)


def test_a_mask_must_be_boolean_and_tokens_must_be_integers():
    with pytest.raises(TypeError, match="where needs booleans, got float64; for a mask of zeros and ones"):
        compare_log_probs(LOG_PROBS, LOG_PROBS, where=LOG_PROBS + 0.01)
    with pytest.raises(TypeError, match="tokens need to be integers, got float64"):
        compare_log_probs(LOGITS, LOGITS, LOG_PROBS)
