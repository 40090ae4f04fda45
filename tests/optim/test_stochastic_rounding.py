"""Stochastic rounding is unbiased; seeds, updates and params have their own bits."""

from __future__ import annotations

import functools

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.optim import stochastic_rounding
from jaxmp.optim.stochastic_rounding import Draw

DRAWS = 2**18

# One program each, instead of one for each operation.
stochastic_bfloat16 = jax.jit(stochastic_rounding.stochastic_bfloat16)
stochastic_float8 = jax.jit(stochastic_rounding.stochastic_float8)


@functools.partial(jax.jit, static_argnames="half")
def draws(value, half=0):
    bits = Draw(3, jnp.int32(7), "w").bits((DRAWS,))[half]
    return jnp.full((DRAWS,), value, jnp.float32), bits


def is_unbiased(values, exact):
    """Return whether two values occur, and their mean is within 3 standard errors."""
    values = np.asarray(values).astype(np.float64)
    low, high = values.min(), values.max()
    p = (exact - low) / (high - low)
    assert 0 < p < 1 and len(np.unique(values)) == 2
    return abs(values.mean() - exact) < 3 * (high - low) * np.sqrt(p * (1 - p) / DRAWS)


@pytest.mark.once
def test_bfloat16_is_unbiased():
    for value in (1.001, -0.3, 3e-39, -1e-40, 1e30):
        rounded = stochastic_bfloat16(*draws(value))
        assert is_unbiased(rounded, float(np.float32(value))), value
        assert np.all(np.sign(np.asarray(rounded, np.float64)) * np.sign(value) >= 0)


@pytest.mark.once
def test_float8_is_unbiased_and_on_its_grid():
    for value in (300.3, -1.03, 0.01, -0.003, 0.0011, 447.9):
        rounded = stochastic_float8(*draws(value, 1))
        np.testing.assert_array_equal(rounded, rounded.astype(jnp.float8_e4m3fn).astype(jnp.float32))
        assert is_unbiased(rounded, float(np.float32(value))), value


def test_numbers_that_need_no_rounding_stay():
    exact = concrete.array([0.0, -0.0, 1.0, -2.5, 2.0**-130, np.inf, -np.inf, np.nan], jnp.float32)
    most = concrete.full(exact.shape, 0xFFFF, jnp.uint32)
    rounded = np.asarray(stochastic_bfloat16(exact, most).astype(jnp.float32))
    np.testing.assert_array_equal(rounded, np.asarray(exact))
    assert np.signbit(rounded[1])
    grid = concrete.array([0.0, 448.0, -448.0, 2.0**-9, 1.125], jnp.float32)
    np.testing.assert_array_equal(stochastic_float8(grid, most[:5]), grid)


def test_a_number_above_the_largest_bfloat16_becomes_infinite_or_is_rounded_down():
    largest = concrete.full(4, np.finfo(np.float32).max, jnp.float32)
    rounded = stochastic_bfloat16(largest, concrete.array([0, 1, 2, 0xFFFF], jnp.uint32))
    np.testing.assert_array_equal(np.asarray(rounded), [float(jnp.finfo(jnp.bfloat16).max), np.inf, np.inf, np.inf])


def test_a_nan_stays_a_nan_whatever_its_bits():
    words = concrete.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], jnp.uint32)
    nans = jax.lax.bitcast_convert_type(words, jnp.float32)
    rounded = stochastic_bfloat16(nans, concrete.full(3, 0xFFFF, jnp.uint32))
    assert np.isnan(np.asarray(rounded, np.float32)).all()


@pytest.mark.once
def test_draws_differ_by_seed_update_and_param_and_look_random():
    def bits(seed, step, name):
        return np.asarray(Draw(seed, jnp.int32(step), name).bits((256, 256))[0]).astype(np.float64)

    base = bits(0, 0, "w")
    assert abs(base.mean() / 2**16 - 0.5) < 3 / np.sqrt(12 * base.size)
    for other in (bits(1, 0, "w"), bits(0, 1, "w"), bits(0, 0, "v"), bits(2**32, 0, "w"), np.roll(base, 1), base.T):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.012  # 3 / 256
