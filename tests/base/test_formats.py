from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.base.formats import format_of, formats, ieee_format

pytestmark = pytest.mark.once

NAMES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def test_limits_and_special_values_are_those_of_all_patterns_together():
    for name in NAMES[2:]:
        row = format_of(name)
        patterns = np.arange(2**row.bits, dtype=f"uint{row.bits}")
        with np.errstate(invalid="ignore"):  # signalling NaNs are among them
            values = patterns.view(getattr(jnp, name)).astype(np.float64)
        finite = values[np.isfinite(values)]
        assert row.largest == finite.max() == -finite.min()
        assert row.smallest_subnormal == finite[finite > 0].min()
        assert row.eps == finite[finite > 1].min() - 1
        assert row.has_infinity == np.isinf(values).any()
        assert row.has_nan == np.isnan(values).any()
        assert 2.0**row.max_exponent <= row.largest < 2.0 ** (row.max_exponent + 1)
        assert row.bits == 1 + row.exponent_bits + row.mantissa_bits == 8 * jnp.dtype(name).itemsize
        assert row.smallest_normal == 2.0**row.min_exponent == 2.0 ** (1 - row.bias)


def test_the_ieee_formulas_give_the_numbers_of_finfo():
    for name in ("float64", "float32", "bfloat16", "float16", "float8_e5m2"):
        row = format_of(name)
        assert ieee_format(name, row.exponent_bits, row.mantissa_bits) == row


def test_tensorfloat32_has_the_range_of_float32_and_the_precision_of_float16():
    rows = {row.name: row for row in formats()}
    tf32, f32, f16 = rows["tensorfloat32"], rows["float32"], rows["float16"]
    assert tf32.bits == 19
    assert (tf32.exponent_bits, tf32.bias, tf32.smallest_normal) == (f32.exponent_bits, f32.bias, f32.smallest_normal)
    assert (tf32.mantissa_bits, tf32.eps, tf32.digits) == (f16.mantissa_bits, f16.eps, f16.digits)
    assert 3.40e38 < tf32.largest < f32.largest


def test_the_table_has_the_figures_that_users_know():
    rows = {row.name: row for row in formats()}
    assert rows["float16"].largest == 65504
    assert rows["float16"].smallest_subnormal == 2.0**-24
    assert rows["float8_e4m3fn"].largest == 448
    assert (rows["float8_e4m3fn"].has_infinity, rows["float8_e4m3fn"].has_nan) == (False, True)
    assert (rows["float8_e4m3fn"].smallest_normal, rows["float8_e4m3fn"].smallest_subnormal) == (2.0**-6, 2.0**-9)
    assert (rows["float8_e5m2"].largest, rows["float8_e5m2"].smallest_subnormal) == (57344, 2.0**-16)
    assert [round(rows[name].digits, 1) for name in ("float32", "float16", "bfloat16")] == [7.2, 3.3, 2.4]


def test_rows_come_widest_first_are_json_and_do_not_depend_on_x64():
    rows = formats()
    assert [row.bits for row in rows] == [64, 32, 19, 16, 16, 8, 8]
    assert len({row.name for row in rows}) == len(rows)
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows], allow_nan=False))[1]["name"] == "float32"
    with jax.enable_x64(True):
        assert formats() == rows


def test_an_unusual_dtype_is_read_too():
    row = format_of(jnp.float8_e4m3b11fnuz)  # its only NaN is the pattern of minus zero
    assert (row.bias, row.largest, row.has_infinity, row.has_nan) == (11, 30.0, False, True)


def test_a_format_without_a_leading_sign_bit_is_refused_with_the_rule():
    with pytest.raises(ValueError, match="with a sign bit, got float8_e8m0fnu; formats"):
        format_of(jnp.float8_e8m0fnu)
    with pytest.raises(ValueError, match="with a sign bit, got float4_e2m1fn"):
        format_of(jnp.float4_e2m1fn)
    with pytest.raises(ValueError, match="must be floating, got int32"):
        format_of("int32")


def test_digits_are_the_logarithm_of_the_significand():
    for row in formats():
        assert math.isclose(10**row.digits, 2 ** (row.mantissa_bits + 1))
