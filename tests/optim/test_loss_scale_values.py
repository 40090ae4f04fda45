"""Loss scales multiply and divide trees; HeadroomLossScale follows gradients."""

from __future__ import annotations

import dataclasses
import math

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loss_scale_tools import ALL, HUGE, assert_same, run

from jaxmp.optim.loss_scale import DynamicLossScale, HeadroomLossScale, LossScale, NoOpLossScale, StaticLossScale

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(StaticLossScale(2.0**15), "float32"), (DynamicLossScale(), "float16"), (HeadroomLossScale(), "complex64")],
)
def test_scale_keeps_the_dtype_and_unscale_widens_half_to_float32(scale: LossScale, dtype: str) -> None:
    tree = {"x": concrete.array([0.5, -1.5], dtype)}
    scaled = scale.scale(tree)["x"]
    back = scale.unscale({"x": scaled})["x"]
    assert scaled.dtype == dtype
    assert back.dtype == (dtype if dtype == "complex64" else "float32")
    np.testing.assert_array_equal(scaled, np.array([0.5, -1.5], dtype) * np.array(2.0**15, dtype))
    np.testing.assert_array_equal(back, [0.5, -1.5])


def test_half_leaves_are_multiplied_in_float32_by_a_scale_that_half_cannot_hold() -> None:
    assert float(StaticLossScale(2.0**20).scale(jnp.float16(2.0**-10))) == 2.0**10
    assert float(DynamicLossScale(1000.1).scale(jnp.bfloat16(1.0))) == float(jnp.bfloat16(1000.1))


def test_values_that_are_not_floating_pass_unchanged() -> None:
    tree = {
        "int": concrete.arange(2),
        "numpy": np.arange(2),
        "bool": True,
        "count": 3,
        "name": "x",
        "none": None,
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
    }
    for scale in ALL[1:]:
        for result in (scale.scale(tree), scale.unscale(tree)):
            assert all(result[name] is tree[name] for name in tree)


def test_no_scaling_returns_the_very_same_objects() -> None:
    scale, tree = NoOpLossScale(), {"x": concrete.ones(2)}
    assert scale.loss_scale == 1
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(False) is scale


def test_unscaling_by_any_power_of_two_loses_no_bit() -> None:
    rng = np.random.default_rng(0)
    unscale = jax.jit(lambda scale, x: scale.unscale(x))
    for exponent in (-126, -30, -1, 0, 15, 24, 126):
        # The true gradients are normal numbers, and so are the scaled ones.
        lowest, highest = max(-126, -126 - exponent), min(127, 127 - exponent)
        grads = np.ldexp(rng.uniform(1, 2, 200).astype(np.float32), rng.integers(lowest, highest, 200))
        scaled = np.ldexp(grads, exponent)
        dynamic = DynamicLossScale(2.0**exponent, min_loss_scale=0, max_loss_scale=HUGE)
        np.testing.assert_array_equal(unscale(dynamic, scaled), grads)
        np.testing.assert_array_equal(dynamic.unscale(scaled), grads)
    for constant in (dynamic, StaticLossScale(2.0**126)):  # XLA may fold the scale
        np.testing.assert_array_equal(jax.jit(constant.unscale)(scaled), grads)


def test_a_scale_whose_reciprocal_is_subnormal_gives_nan() -> None:
    assert jnp.isnan(jax.jit(StaticLossScale(2.0**127).unscale)(concrete.ones(())))


def test_derivatives_pass_through_the_scaled_loss_and_not_into_the_scale() -> None:
    for scale in ALL[1:]:
        factor = float(scale.loss_scale)
        assert jax.grad(scale.scale)(3.0) == factor
        assert jax.grad(scale.unscale)(3.0) == 1 / factor

    def loss(factor: jax.Array, x: jax.Array) -> jax.Array:
        scale = dataclasses.replace(ALL[2], loss_scale=factor)
        return scale.scale(x) + scale.unscale(x)

    assert jax.grad(loss)(2.0, 3.0) == 0


def largest_fitting(grad_max: float, headroom: float, largest: float = 65504.0) -> float:
    return 2.0 ** math.floor(math.log2(largest / 2**headroom / grad_max))


@given(
    headroom=st.sampled_from([0, 4]),
    magnitudes=st.lists(st.floats(-30, 10), min_size=40, max_size=40),
    flags=st.lists(st.sampled_from([True] * 9 + [False]), min_size=40, max_size=40),
)
def test_headroom_is_kept_within_bounds_by_powers_of_two(
    headroom: int, magnitudes: list[float], flags: list[bool]
) -> None:
    grad_max = np.exp2(np.float32(magnitudes))
    start = HeadroomLossScale(headroom, min_loss_scale=2.0**-4)
    states = run(start, flags, np.where(flags, grad_max, np.inf))
    before = np.append(np.float32(start.loss_scale), states.loss_scale[:-1])
    for old, new, running, largest, finite in zip(
        before, states.loss_scale, states.running_max, grad_max, flags, strict=True
    ):
        assert np.frexp(new)[0] == 0.5
        assert 2.0**-4 <= new <= min(2.0**24, 2 * old)
        if finite:
            assert largest <= running
            assert new == 2.0**-4 or new * largest <= 65504 / 2**headroom
        else:
            assert new == max(old / 2, 2.0**-4)


def test_headroom_for_a_steady_gradient_is_the_largest_scale_that_fits() -> None:
    for grad_max in (1e-3, 0.7, 3.0):
        states = run(HeadroomLossScale(headroom=2), [True] * 20, grad_max)
        assert states.loss_scale[-1] == largest_fitting(grad_max, 2)


def test_headroom_drops_at_once_and_returns_after_the_running_maximum_decayed() -> None:
    grad_max = np.array([1.0] * 3 + [64.0] + [1.0] * 100, np.float32)
    scales = run(HeadroomLossScale(period=10), [True] * 104, grad_max).loss_scale
    assert scales[2] == 2048
    assert scales[3] == 32
    assert np.argmax(scales[3:] >= 2048) == pytest.approx(50, abs=1)  # 5 halvings, 10 steps each


def test_a_non_finite_step_backs_headroom_off_for_a_period_though_gradients_look_small() -> None:
    flags = [True] * 3 + [False] + [True] * 30
    scales = run(HeadroomLossScale(period=10), flags, np.where(flags, 1e-3, np.nan)).loss_scale
    assert scales[2] == 2.0**18
    np.testing.assert_array_equal(scales[3:13], 2.0**17)
    np.testing.assert_array_equal(scales[15:22], 2.0**18)


def test_gradients_that_are_all_zero_or_unknown_change_nothing_while_finite() -> None:
    for running_max in (0.0, 0.25):
        scale = HeadroomLossScale(loss_scale=2.0**9, running_max=running_max)
        for grad_max in (0.0, math.nan, math.inf):
            assert_same(scale.adjust(True, grad_max), scale)


def test_headroom_counts_from_the_largest_number_of_the_dtype() -> None:
    for dtype, largest in ((jnp.float16, 65504.0), ("float8_e5m2", 57344.0)):
        scale = HeadroomLossScale(0, dtype=dtype, loss_scale=2.0**20).adjust(True, 1.0)
        assert float(scale.loss_scale) == largest_fitting(1.0, 0, largest)
