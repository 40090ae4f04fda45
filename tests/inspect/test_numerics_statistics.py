"""Counts of values in other formats, against NumPy."""

import dataclasses
import math

import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from jaxmp.base import dtypes, formats
from jaxmp.inspect.counts import counting
from jaxmp.inspect.counts.statistics import merged_statistics, statistics_of

pytestmark = pytest.mark.once

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# All arrays have this size, so the counting of each dtype is compiled once.
SIZE = 256


@st.composite
def numbers(draw, dtype):
    """Draw bit patterns, half of them close to powers of two, where formats round."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits, mantissa = 8 * np.dtype(dtype).itemsize, formats.format_of(dtype).mantissa_bits
    steps = [0, 1, -1, 2, -2, *(sign * (1 << k) for k in range(mantissa) for sign in (1, -1))]
    powers = (rng.integers(0, 1 << (bits - 1 - mantissa), SIZE) << mantissa) + rng.choice(steps, SIZE)
    patterns = np.where(rng.random(SIZE) < 0.5, powers, rng.integers(0, 1 << (bits - 1), SIZE))
    patterns = (patterns + (rng.integers(0, 2, SIZE) << (bits - 1))) % (1 << bits)
    patterns = np.where(rng.random(SIZE) < 0.05, 0, patterns)
    return patterns.astype(f"uint{bits}").view(dtype)


def oracle(x, dtype, scale=1.0):
    """Return the counts of an array times ``scale`` in ``dtype``, by binary exponents in NumPy."""
    form = formats.format_of(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.abs(x.astype(np.float64)) * scale
    finite = np.isfinite(wide)
    exponents = np.frexp(wide[finite & (wide != 0)])[1] - 1
    vanished = int((exponents < form.min_exponent - form.mantissa_bits - 1).sum())
    beyond = int((exponents > form.max_exponent).sum())
    return {
        "count": x.size,
        "zeros": int((wide == 0).sum()),
        "vanished": vanished,
        "below_normal": int((exponents < form.min_exponent).sum()) - vanished,
        "overflow": int((~finite).sum()) + max(beyond, int(np.max(wide[finite], initial=0) > form.largest)),
    }


def counts(statistics):
    return {name: getattr(statistics, name) for name in ("count", "zeros", "vanished", "below_normal", "overflow")}


def check_sizes(statistics, x):
    """Check that the histogram and the sizes are those of the finite values."""
    with np.errstate(invalid="ignore"):
        wide = abs(x.astype(np.float64))
    wide = wide[np.isfinite(wide)]
    nonzero = wide[wide != 0]
    exponents, n = np.unique(np.floor(np.log2(nonzero)).astype(int) if len(nonzero) else [], return_counts=True)
    assert statistics.histogram == dict(zip(exponents.tolist(), n.tolist(), strict=True))
    assert statistics.amax == (wide.max() if len(wide) else 0)
    assert statistics.amin == (nonzero.min() if len(nonzero) else 0)
    without_subnormal = np.where(wide < 2.0**-126, 0, wide)  # a device may flush subnormals to zero
    lower, upper = (sizes.mean() if len(wide) else 0.0 for sizes in (without_subnormal, wide))
    assert lower * (1 - 1e-6) <= statistics.mean_abs <= upper * (1 + 1e-6)


@pytest.mark.parametrize(
    "stored_dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_values_and_their_sizes_in_another_format_and_scale_are_counted_by_exponent(stored_dtype, data):
    x = data.draw(numbers(stored_dtype))
    statistics = statistics_of(x)
    check_sizes(statistics, x)
    assert counts(statistics) == oracle(x, stored_dtype) | {"vanished": 0}
    for name in FORMATS:
        exponent = data.draw(st.integers(-40, 40))
        dtype = jnp.dtype(name)
        assert counts(statistics.under(name, 2.0**exponent)) == oracle(x, dtype, 2.0**exponent), (name, exponent)
        assert counts(statistics.under(name)) == oracle(x, dtype)


def test_counts_differ_from_a_cast_by_at_most_one_percent_of_a_binade():
    x = np.exp2(np.random.default_rng(0).uniform(-30, 17, 200_000)).astype(np.float32)
    in_a_binade = x.size / 47
    for name in ("bfloat16", "float16", "float8_e5m2"):
        statistics, form = statistics_of(x).under(name), formats.format_of(name)
        with np.errstate(over="ignore"):
            converted = x.astype(jnp.dtype(name)).astype(np.float64)
        expected = {
            "vanished": (converted == 0).sum(),
            "below_normal": ((converted != 0) & (converted < form.smallest_normal)).sum(),
            "overflow": (~np.isfinite(converted)).sum(),
        }
        share = 0.01 if name != "float8_e5m2" else 0.3  # of its 2 bits, an eighth of the last binade rounds up
        for kind, count in expected.items():
            assert abs(getattr(statistics, kind) - count) <= share * in_a_binade, (name, kind)


def test_an_overflow_of_the_largest_value_alone_is_counted():
    assert statistics_of(np.float32([1, 65535])).under("float16").overflow == 1
    assert statistics_of(np.float32([1, 470])).under("float8_e4m3fn").overflow == 1
    assert statistics_of(np.float32([1, 448])).under("float8_e4m3fn").overflow == 0


def test_a_scale_moves_sizes_and_the_histogram():
    statistics = statistics_of(np.float32([0.75, -3, 0])).under("float16", 8)
    assert (statistics.amax, statistics.amin, statistics.mean_abs, statistics.histogram) == (24, 6, 10, {2: 1, 4: 1})
    assert statistics.dtype == "float16" and statistics.under("float16", 1 / 8).histogram == {-1: 1, 1: 1}


def test_a_record_that_went_through_a_cotangent_is_the_same_also_beyond_what_a_float32_holds():
    values = np.float32([0, 1e-45, 2e-39, -3e-8, 0.1, 7, -65520, 1e38, np.inf, np.nan])
    nearly_full = jnp.full(counting.COUNTERS, 2**32 - 3, jnp.uint32)
    for sent_counts in (
        counting.counts_of(values),
        counting.Counts(nearly_full, jnp.uint32([2**31 + 1, 7]), jnp.float32(0.1)),
    ):
        unpacked_counts = counting.unpacked(np.asarray(counting.packed(sent_counts)))[0]
        for expected, actual in zip(sent_counts, unpacked_counts, strict=True):
            np.testing.assert_array_equal(expected, actual)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_lost_updates_are_below_half_the_spacing_of_their_weight(data):
    weight, update = data.draw(numbers(np.float32)), data.draw(numbers(np.float32))
    near = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-30, 3, SIZE)
    with np.errstate(all="ignore"):
        close = np.ldexp(np.where(np.isfinite(weight), weight, 1), near).astype(np.float32)
    update = np.where(np.arange(SIZE) % 2, update, close)
    lost = np.asarray(counting.distance_moved(jnp.asarray(update), jnp.asarray(weight))[0])
    for name in FORMATS:
        form = formats.format_of(name)
        with np.errstate(all="ignore"):
            magnitude = abs(weight.astype(np.float64))
            exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, -2000)
            ulp = 2.0 ** (np.maximum(exponent, form.min_exponent) - form.mantissa_bits)
            is_in_range = np.isfinite(magnitude) & (exponent <= form.max_exponent)
            expected = is_in_range & (abs(update.astype(np.float64)) < ulp / 2)
        assert lost[dtypes.NAMES.index(name)] == expected.sum(), name


def test_statistics_of_several_tensors_are_those_of_all_values():
    parts = [np.float32([1, 2, 0]), np.float32([1e-9, np.inf]), np.float32([])]
    merged, expected = (
        merged_statistics([statistics_of(part) for part in parts]),
        statistics_of(np.concatenate(parts)),
    )
    np.testing.assert_allclose(merged.mean_abs, expected.mean_abs, rtol=1e-6)
    merged = dataclasses.replace(merged, mean_abs=expected.mean_abs)
    assert (merged, merged.under("float16")) == (expected, expected.under("float16"))


def test_other_dtypes_and_scales_that_are_no_power_of_two_are_refused():
    statistics = statistics_of(np.float32([1]))
    for dtype, shown in (("float64", "'float64'"), (jnp.int32, ".*int32.*")):
        message = f"dtype must be one of 'float32', 'bfloat16', 'float16', .*, got {shown}; write e.g. dtype='float32'"
        with pytest.raises(ValueError, match=message):
            statistics.under(dtype)
    for scale in (3.0, 0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="loss_scale must be a power of two here"):
            statistics.under("float16", scale)
    with pytest.raises(ValueError, match="these are not updates"):
        statistics.lost("float16")
