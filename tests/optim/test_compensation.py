"""The compensation of bfloat16 params, in 16 and in 8 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.optim.compensation import compensation_of, read_compensation

pytestmark = pytest.mark.once


def test_a_split_master_weight_has_the_24_bits_of_the_nearest_number():
    rng = np.random.default_rng(0)
    size = 4096
    normal = rng.normal(size=size) * 10.0 ** rng.integers(-30, 30, size)
    halfway = np.float32([1, -1]) * (1 + 2.0**-8)  # between two bfloat16 numbers
    rounded_up = np.float32([2, -2]) * (1 - 2.0**-24)  # the bfloat16 number has the next exponent
    masters = np.concatenate([normal, halfway, rounded_up, [0.0, -0.0]]).astype(np.float32)
    weights = masters.astype(jnp.bfloat16).astype(np.float32)

    @jax.jit
    def stored_and_read(masters, weights):
        bits = compensation_of(masters, weights, jnp.int8)
        return bits, weights + read_compensation(weights, bits)

    bits, read = stored_and_read(masters, weights)
    assert bits.dtype == jnp.int8
    exact = masters.astype(np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 15)  # of 16 significant bits
    # A master weight halfway between two bfloat16 numbers needs +128, which int8 does not have.
    allowed = np.where(np.abs(exact - weights) < 127.5 * unit, unit / 2, unit)
    assert np.all(np.abs(np.asarray(read, np.float64) - exact) <= allowed)
