"""The models' GELU and max-pool, compared with float64 and with Flax's."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled

import jaxmp
from experiments.models.activations import gelu
from experiments.models.pooling import max_pool


def saved(fun, *args):
    """Return the shape and dtype of the arrays that are saved for the gradient."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
    return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves if leaf.ndim)


def with_gradient(fun, x, cotangent):
    def both(x, cotangent):
        y, vjp = jax.vjp(fun, x)
        return y, vjp(cotangent)[0]

    return compiled(both)(x, cotangent)


# ---- GELU

X = np.concatenate([np.linspace(-12, 12, 2001), [-1e4, 1e4]])


def naive_gelu(x, approximate):
    """Compute GELU in float64, without the cancellation of ``jax.nn.gelu`` below -5."""
    if approximate:
        return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * jax.scipy.special.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize(("approximate", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_gelu_and_its_gradient_are_those_of_float64_rounded(approximate, dtype):
    x, cotangent = jnp.asarray(X, dtype), jnp.asarray(np.linspace(0.5, 2, len(X)), dtype)
    got = with_gradient(lambda x: gelu(x, approximate), x, cotangent)
    with jax.enable_x64(True):
        x, cotangent = x.astype(jnp.float64), cotangent.astype(jnp.float64)
        want = with_gradient(lambda x: naive_gelu(x, approximate), x, cotangent)
    # Half a unit in the last place, plus float32's error: of the gradient near its zero, and of 1 + erf in the tail.
    relative = 2e-5 if dtype == jnp.float32 else 0.51 * float(jnp.finfo(dtype).eps)
    absolute = 3e-7 if dtype == jnp.float32 else 1e-6
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(exact), relative, absolute)


def test_gelu_keeps_its_half_input_alone_and_under_autocast_computes_in_float32():
    for approximate in [True, False]:
        x = jnp.ones((3, 4), jnp.bfloat16)
        assert saved(functools.partial(gelu, approximate=approximate), x) == [((3, 4), "bfloat16")]

    x, w = jax.random.normal(jax.random.key(0), (3, 8)), jax.random.normal(jax.random.key(1), (8, 8))

    def model(w, x, gelu=gelu):
        return gelu(x @ w, True) @ w

    half = jaxmp.autocast(model, "mixed_bfloat16")
    assert ((3, 8), "float32") not in saved(lambda w: half(w, x), w)

    def in_half(x):
        return model(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    got, by_hand = (with_gradient(fun, x, x) for fun in (lambda x: half(w, x), in_half))
    for ours, wanted in zip(got, by_hand, strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gelu_for_a_gpu_is_a_formula_in_half_precision_with_the_gradient_of_other_devices(dtype):
    x, cotangent = jnp.asarray(X, dtype), jnp.asarray(np.linspace(0.5, 2, len(X)), dtype)
    expected, gradient = with_gradient(gelu, x, cotangent)
    with jaxmp.hardware.assumed("h200"):
        program = jax.make_jaxpr(gelu)(x)
        actual, gradient_for_gpu = with_gradient(gelu, x, cotangent)
    assert "f32" not in str(program)
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=0.02, atol=0.02)
    np.testing.assert_array_equal(gradient_for_gpu, gradient)


def test_gelu_of_huge_numbers_has_the_gradients_0_and_1():
    for approximate in [True, False]:
        x = jnp.array([-3e38, 3e38])
        np.testing.assert_array_equal(
            with_gradient(functools.partial(gelu, approximate=approximate), x, jnp.ones(2))[1], [0, 1]
        )


# ---- max pooling


def flax_max_pool(x, window=3, stride=2, padding=1):
    return nn.max_pool(x, (window,) * 2, (stride,) * 2, padding=((padding, padding),) * 2)


def numbers(shape, dtype, low=-3, high=4, seed=0):
    """Return a few different integers, so that windows have ties.

    Their sums are exact in every dtype.
    """
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), dtype)


GEOMETRIES = [(3, 2, 1), (4, 3, 3)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_max_pool_and_its_gradient_are_flax_s_bit_for_bit_with_ties(geometry):
    odd = GEOMETRIES.index(geometry) % 2
    size, dtype = [((7, 10), jnp.bfloat16), ((8, 5), jnp.float32)][odd]
    x = numbers((2, *size, 3), dtype)
    cotangent = numbers(flax_max_pool(x, *geometry).shape, dtype, -8, 9, seed=1)
    want = with_gradient(lambda x: flax_max_pool(x, *geometry), x, cotangent)
    got = with_gradient(lambda x: max_pool(x, *geometry), x, cotangent)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, theirs)


def test_max_pool_is_flax_s_on_a_tpu():
    x = numbers((2, 7, 10, 3), jnp.bfloat16)
    with jaxmp.hardware.assumed("v5e"):
        jaxpr = jax.make_jaxpr(max_pool)(x)
        assert saved(max_pool, x) == saved(flax_max_pool, x)
    assert str(jaxpr) == str(jax.make_jaxpr(flax_max_pool)(x))


def test_padding_never_wins_a_dtype_may_lack_infinity_and_nan_passes_on():
    x = np.full((1, 4, 4, 1), np.finfo(np.float16).min)
    y, gradient = with_gradient(max_pool, x, np.ones((1, 2, 2, 1), np.float16))
    assert (y == x[0, 0, 0, 0]).all()
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])

    x = numbers((1, 5, 5, 2), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(max_pool(x).astype(jnp.float32), flax_max_pool(x.astype(jnp.float32)))

    x = numbers((1, 6, 6, 1), jnp.float32).at[0, 2, 3, 0].set(jnp.nan)
    np.testing.assert_array_equal(jax.jit(max_pool)(x), flax_max_pool(x))


def test_max_pool_adds_the_gradients_of_overlapping_windows_in_float32():
    dtype = jnp.bfloat16
    x = jnp.zeros((1, 3, 3, 1), dtype).at[0, 1, 1, 0].set(1)  # the maximum of all four windows
    eps = float(jnp.finfo(dtype).eps)
    cotangent = jnp.asarray([[1, eps / 2], [eps / 2, eps / 2]], dtype)[None, :, :, None]
    gradient = with_gradient(max_pool, x, cotangent)[1]
    assert gradient[0, 1, 1, 0] == jnp.asarray(1 + 1.5 * eps, dtype)


def test_max_pool_keeps_a_byte_for_each_window_and_not_its_input_and_scatters_nothing():
    x = jnp.ones((1, 8, 8, 2), jnp.bfloat16)
    assert saved(max_pool, x) == [((1, 4, 4, 2), "uint8")]
    w = jnp.eye(2)

    def model(x):
        return max_pool(x @ w) @ w

    shapes = [shape for shape, dtype in saved(jaxmp.autocast(model, "mixed_float16"), x.astype(jnp.float32))]
    assert (1, 8, 8, 2) not in shapes and (1, 4, 4, 2) in shapes

    text = jax.jit(jax.grad(lambda x: max_pool(x).sum())).lower(jnp.ones((1, 8, 8, 2))).as_text()
    assert "scatter" not in text and "gather" not in text


def test_max_pool_works_under_vmap_jit_and_checkpoint():
    x = numbers((3, 2, 6, 7, 2), jnp.float32)

    def loss(x):
        return (max_pool(x) ** 2).sum()

    got = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(x)
    _, gradient = with_gradient(flax_max_pool, x[1], 2 * jax.jit(flax_max_pool)(x[1]))
    np.testing.assert_array_equal(got[1], gradient)
