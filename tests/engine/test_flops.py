"""FLOPs of the rows of a plan."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from plan_tools import flops, plan, shape


def test_a_product_counts_two_flops_per_term():
    assert flops(jnp.matmul, shape(8, 16), shape(16, 4)) == [("dot_general", 2 * 8 * 16 * 4)]
    assert flops(jnp.matmul, shape(3, 8, 16), shape(3, 16, 4)) == [("dot_general", 2 * 3 * 8 * 16 * 4)]
    sizes = shape(2, dtype="int32")
    assert flops(lax.ragged_dot, shape(6, 8), shape(2, 8, 4), sizes) == [("ragged_dot_general", 2 * 6 * 8 * 4)]


def test_flops_of_a_convolution_are_those_counted_by_hand():
    for image, kernel, options, expected in (
        # results 1 × 6 × 6 × 16, each of 3 × 3 × 8 terms
        ((1, 8, 8, 8), (3, 3, 8, 16), {}, 2 * 36 * 16 * 72),
        # stride 2 with padding: results 2 × 4 × 4 × 16
        ((2, 8, 8, 8), (3, 3, 8, 16), {"window_strides": (2, 2), "padding": "SAME"}, 2 * 2 * 16 * 16 * 72),
        # four groups: each result reads two of the eight channels
        ((1, 8, 8, 8), (3, 3, 2, 16), {"feature_group_count": 4}, 2 * 36 * 16 * 18),
        # two groups of the batch: the result has half as many images
        ((2, 8, 8, 8), (3, 3, 8, 16), {"batch_group_count": 2}, 2 * 36 * 16 * 72),
        # kernel dilated by 2: it spans 5, so 4 × 4 results
        ((1, 8, 8, 8), (3, 3, 8, 16), {"rhs_dilation": (2, 2)}, 2 * 16 * 16 * 72),
        # transposed: each of the 4 × 4 pixels is multiplied by each of the 2 × 2 taps once
        ((1, 4, 4, 8), (2, 2, 8, 16), {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}, 2 * 64 * 16 * 8),
    ):
        plain = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        fun = functools.partial(lax.conv_general_dilated, **{**plain, **options})
        assert flops(fun, shape(*image), shape(*kernel)) == [("conv_general_dilated", expected)], options


def test_other_operations_count_one_flop_per_element():
    x, i = shape(4, 8), shape(4, 8, dtype="int32")
    assert flops(lambda x: lax.exp(x) + x, x) == [("exp", 32), ("add", 32)]
    assert flops(lambda x: lax.reduce_sum(x, (0,)), x) == [("reduce_sum", 32)]
    assert flops(lambda x: x.T.reshape(-1)[3:], x) == []
    assert flops(lambda i: i * i + 1, i) == []
    assert flops(lambda x: x.at[jnp.array([0, 0])].add(x[:2]), x)[-1] == ("scatter-add", 16)
    assert flops(lambda x: jnp.fft.fft(x), shape(3, 8))[-1] == ("fft", 5 * 3 * 8 * 3)
    assert flops(lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID"), x) == [
        ("reduce_window_sum", 8 * 4)
    ]


def test_flops_in_a_scan_count_each_trip():
    def fun(w, x):
        return lax.scan(lambda x, _: (lax.scan(lambda x, _: (x @ w, None), x, None, 3)[0], None), x, None, 5)[0]

    cast_plan = plan(fun, shape(8, 8), shape(2, 8))
    assert cast_plan.summary.flops == cast_plan.summary.half_flops == 3 * 5 * 2 * 2 * 8 * 8
    assert cast_plan.summary.half_share == 1


def test_flops_of_complex_numbers_are_not_half():
    summary = plan(lambda x, w: jnp.fft.fft(x @ w), shape(2, 8), shape(8, 8)).summary
    assert (summary.flops, summary.half_flops) == (2 * 2 * 8 * 8 + 5 * 2 * 8 * 3, 2 * 2 * 8 * 8)


def test_operations_without_a_formula_are_listed():
    cast_plan = plan(lambda x: jnp.linalg.cholesky(x @ x.T), shape(4, 4))
    assert cast_plan.summary.uncounted == ("cholesky",)
    assert "FLOPs not counted: cholesky" in str(cast_plan)
