"""Attention under autocast: kernels of cuDNN where they exist, or half products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import half, normal, products

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
        jax.nn, "dot_product_attention", lambda *args, **kw: biases.append(args[3]) or record(*args, **kw)
    )
    bias = jnp.full((1, 1, 8, 8), jnp.finfo(jnp.float32).min)
    program = jax.make_jaxpr(half(lambda q, b: jax.nn.dot_product_attention(q, q, q, b), "mixed_float16"))(QUERY, bias)
    assert biases[0].dtype == jnp.float16 and "65504" in str(program)


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
