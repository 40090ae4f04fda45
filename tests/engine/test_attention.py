"""Attention under autocast: kernels of cuDNN where they exist, or half products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled, half, normal, products

import jaxmp
from jaxmp._internals.jax.patches import with_cudnn

QUERY = normal(0, 2, 8, 2, 8)


@pytest.fixture
def calls(monkeypatch):
    """Record the operand dtypes and the implementation of each call on a fake GPU."""
    calls, original = [], jax.nn.dot_product_attention

    def record(query, key, value, *args, implementation=None, **kwargs):
        calls.append((query.dtype.name, value.dtype.name, implementation))
        if implementation == "cudnn" and query.shape[-1] % 8:
            raise NotImplementedError("head dim")
        return jnp.zeros_like(query) if implementation == "cudnn" else original(query, key, value, *args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return calls


def attend(q, **kwargs):
    return jax.nn.dot_product_attention(q, q * 2, q + 1, **kwargs)


def test_a_float32_call_reaches_cudnn_in_half_on_a_gpu(calls):
    program = jax.make_jaxpr(half(lambda q: attend(q, is_causal=True)))(QUERY)
    assert ("bfloat16", "bfloat16", "cudnn") in calls
    assert program.out_avals[0].dtype == jnp.float32


def test_a_call_that_names_cudnn_reaches_it_on_any_backend(calls, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    jax.make_jaxpr(half(lambda q: attend(q, implementation="cudnn"), "mixed_float16"))(QUERY)
    assert calls == [("float16", "float16", "cudnn")]


def test_a_head_size_without_a_cudnn_kernel_runs_unchanged(calls):
    jax.make_jaxpr(half(attend))(normal(0, 2, 6, 2, 7))
    assert calls[-1] == ("float32", "float32", None)


def test_a_jitted_call_is_traced_separately_inside_and_outside_of_autocast(calls):
    jitted = jax.jit(attend)
    for fun, dtype in (
        (jitted, "float32"),
        (half(jitted), "bfloat16"),
        (jitted, "float32"),
        (half(jitted), "bfloat16"),
    ):
        program = str(jax.make_jaxpr(fun)(QUERY))
        assert ("bf16" in program) == (dtype == "bfloat16")


def in_region(q):
    with jaxmp.precision("float32"):
        return attend(q)


def in_scope(q):
    with jax.named_scope("att"):
        return attend(q)


def test_regions_overrides_and_the_authors_choice_keep_a_call_in_float32(calls):
    for fun, overrides in (
        (in_region, None),
        (in_scope, {"**/att": "float32"}),
        (attend, {"class:half": "float32"}),
        (attend, {"primitive:dot_general": "float32"}),
        (lambda q: attend(q, implementation="xla"), None),
        (half(attend, "float32"), None),
    ):
        calls.clear()
        jax.make_jaxpr(half(lambda q, fun=fun: fun(q @ jnp.eye(8)) @ jnp.eye(8), overrides=overrides))(QUERY)
        assert {call[0] for call in calls} == {"float32"} and "cudnn" not in {call[2] for call in calls}


def test_a_bias_that_masks_stays_finite(monkeypatch, calls):
    biases, record = [], jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, **kw: biases.append(kw["bias"]) or record(*args, **kw)
    )
    bias = jnp.full((1, 1, 8, 8), jnp.finfo(jnp.float32).min)
    program = jax.make_jaxpr(half(lambda q, b: jax.nn.dot_product_attention(q, q, q, b), "mixed_float16"))(QUERY, bias)
    assert biases[0].dtype == jnp.float16 and "65504" in str(program)


LENGTH, SLOPES = 600, np.array([0.3, 0.1], np.float32)
POSITIONS = np.arange(LENGTH, dtype=np.float32)
LATER = SLOPES[:, None, None] * np.broadcast_to(POSITIONS, (LENGTH, LENGTH))  # ALiBi on the positions of keys
MASKED = np.where(POSITIONS < 40, LATER, -np.inf).astype(np.float32)
NOTHING = np.where(POSITIONS[:, None] < 3, -np.inf, LATER).astype(np.float32)  # some queries may read no key
# The bias, other arguments, and the keys that each query may read.
BIASES = {
    "every key": (LATER, {}, np.full((LENGTH, LENGTH), True)),
    "four axes and a window of the past": (
        -LATER[None],
        {"is_causal": True, "local_window_size": (8, 0)},
        np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-9, dtype=bool),
    ),
    "a mask": (LATER, {"mask": (POSITIONS < 20)[None, None, None].repeat(LENGTH, 2)}, POSITIONS < 20),
    "padding of two examples": (LATER, {"key_value_seq_lengths": np.array([30, 34], np.int32)}, POSITIONS < 30),
    "an infinite bias": (MASKED, {}, POSITIONS < 40),
    "queries without a key": (NOTHING, {}, (POSITIONS >= 0) & (POSITIONS[:, None] >= 3)),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_reaches_cudnn_as_exactly_as_its_weights_need(monkeypatch, name):
    bias, options, is_read = BIASES[name]
    biases = []

    def fused(query, key, value, bias=None, mask=None, **kwargs):
        assert bias.dtype == jnp.bfloat16 and kwargs["implementation"] == "cudnn"
        assert bias.shape == (1, 2, LENGTH, LENGTH)  # a bias for each example would need more memory
        biases.append(bias)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)

    def attend(q, bias):
        attended = jax.nn.dot_product_attention(q, q, q, bias, implementation="cudnn", **options)
        return attended, biases[-1].astype(jnp.float32)

    query = normal(0, len(options.get("key_value_seq_lengths", [1])), LENGTH, 2, 8)
    _, rounded = compiled(half(attend))(query, bias)
    expected, weights = weights_of(bias, is_read), weights_of(rounded, is_read)
    has_keys = np.broadcast_to(is_read, (LENGTH, LENGTH)).any(-1)
    assert np.abs(weights - expected)[..., has_keys, :].max() < 0.01
    assert np.isfinite(rounded).all()


def test_a_padded_example_does_not_shift_the_bias_of_the_others(monkeypatch):
    """The bias is causal. In the padded example, it hides all keys that the mask leaves to the first queries."""
    bias = jnp.where(np.tri(16, dtype=bool), normal(1, 1, 1, 16, 16), -1e9)
    mask = np.arange(16) >= np.array([0, 8])[:, None, None, None]
    biases = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda query, *_, bias, **__: biases.append(bias.astype(jnp.float32)) or query
    )

    def attend(q):
        return jax.nn.dot_product_attention(q, q, q, bias, mask, implementation="cudnn"), biases[-1]

    _, rounded = compiled(half(attend))(normal(0, 2, 16, 2, 8))
    np.testing.assert_allclose(weights_of(rounded[:1], True), weights_of(bias, True), atol=0.01)


def test_each_query_has_a_shift_of_a_bias_of_keys(monkeypatch):
    bias, causal = LATER[None, :, :1], np.tri(LENGTH, dtype=bool)
    biases = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda query, *_, bias, **__: biases.append(bias.astype(jnp.float32)) or query
    )

    def attend(q):
        return jax.nn.dot_product_attention(q, q, q, bias, causal[None, None], implementation="cudnn"), biases[-1]

    _, rounded = compiled(half(attend))(normal(0, 1, LENGTH, 2, 8))
    np.testing.assert_allclose(weights_of(rounded, causal), weights_of(bias, causal), atol=0.01)


def weights_of(bias, is_read):
    """Return the softmax of a bias in float64, over the keys that each query may read."""
    scores = np.where(is_read, np.asarray(bias, np.float64), -np.inf)
    largest = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    return exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-300)


@pytest.mark.usefixtures("standard_promotion")
def test_the_gradient_of_a_bias_and_the_log_sums_are_those_without_a_shift(monkeypatch):
    original = jax.nn.dot_product_attention

    def fused(query, key, value, bias=None, mask=None, implementation=None, **kwargs):
        return original(query, key, value, bias, mask, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    bias, query = normal(1, 1, 2, 8, 8), normal(0, 1, 8, 2, 8)

    def attend(q, bias):
        return jax.nn.dot_product_attention(q, q, q, bias, implementation="cudnn", return_residual=True)

    def loss(q, bias):
        return (attend(q, bias)[0] ** 2).sum()

    gradient = jax.jit(jax.grad(half(loss), 1))(query, bias)
    np.testing.assert_allclose(gradient, jax.grad(loss, 1)(query, bias), atol=0.03)
    np.testing.assert_allclose(half(attend)(query, bias + 40)[1], attend(query, bias + 40)[1], atol=0.03)


def test_outside_of_autocast_nothing_is_changed(calls):
    attend(QUERY)
    assert calls == [("float32", "float32", None)]


def test_attention_is_half_on_a_cpu():
    fun = half(lambda q: attend(q, is_causal=True), "mixed_float16")
    assert set(products(fun, QUERY)) == {"float16"}
    assert np.allclose(jax.jit(fun)(QUERY), attend(QUERY, is_causal=True), atol=0.05)
    gradient = jax.jit(jax.grad(lambda q: fun(q).sum()))(QUERY)
    assert bool(jnp.isfinite(gradient).all())


def test_with_cudnn_sets_the_version_that_jax_assumes_and_restores_it():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    original, query = fused.check_cudnn_version, QUERY.astype(jnp.bfloat16)
    with pytest.raises(KeyError), with_cudnn((9, 19, 0)):
        assert fused.check_cudnn_version() == 91900
        # cuDNN is not installed here, so JAX would refuse this call without `with_cudnn`.
        assert jax.eval_shape(lambda q: attend(q, implementation="cudnn"), query).shape == query.shape
        raise KeyError
    assert fused.check_cudnn_version is original
