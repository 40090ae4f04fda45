"""The rows of a plan: dtypes, reasons, sources."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import lax
from plan_tools import MLP, doubled, mlp, plan, rows, shape

import jaxmp


def test_the_rows_of_an_mlp_with_a_softmax_are_those_by_hand():
    half, full = "bfloat16", "float32"
    expected = [  # path, primitive, class, operands, result, why, FLOPs, bytes of casts
        ("hidden", "dot_general", "half", (half, half), half, "product", 2 * 4 * 8 * 16, 2 * (32 + 128)),
        ("hidden", "broadcast_in_dim", "clear", (full,), full, "moves data", 0, 0),
        ("hidden", "add", "widest", (half, half), half, "between dot_general and dot_general of head", 64, 2 * 64),
        ("hidden", "tanh", "infer", (half,), half, "between dot_general and dot_general of head", 64, 0),
        ("head", "dot_general", "half", (half, half), half, "product", 2 * 4 * 16 * 2, 2 * 32),
        ("", "reduce_max", "clear", (half,), half, "moves data", 0, 0),
        ("", "broadcast_in_dim", "clear", (half,), half, "moves data", 0, 0),
        ("", "sub", "pointwise", (full, full), full, "pointwise is float32", 8, 4 * (8 + 8)),
        ("", "exp", "pointwise", (full,), full, "pointwise is float32", 8, 0),
        ("", "reduce_sum", "accumulation", (full,), full, "accumulation is float32", 8, 0),
        ("", "broadcast_in_dim", "clear", (full,), full, "moves data", 0, 0),
        ("", "div", "widest", (full, full), full, "follows float32: exp", 8, 0),
    ]
    keys = ("path", "primitive", "cls", "operands", "result", "why", "flops", "cast_bytes")
    actual = [tuple(getattr(row, key) for key in keys) for row in rows(mlp, *MLP)]
    assert [row[1] for row in actual] == [row[1] for row in expected]
    for number, row in enumerate(expected):
        assert actual[number] == row


def test_sources_are_lines_of_the_users_files():
    line = mlp.__code__.co_firstlineno + 4
    (dot,) = (row for row in rows(mlp, *MLP) if row.path == "head")
    assert dot.source == f"plan_tools.py:{line}"
    params = jax.eval_shape(linen.Dense(4).init, jax.random.key(0), shape(2, 3))
    for row in rows(linen.Dense(4).apply, params, shape(2, 3)):
        assert re.fullmatch(r"flax/linen/linear\.py:\d+", row.source)


def test_the_source_of_a_jax_function_is_the_line_that_calls_it():
    def fun(x, w):
        return jax.nn.log_softmax(x @ w)

    inner = [row for row in rows(fun, shape(4, 8), shape(8, 8)) if row.depth]
    assert inner and all(row.source.startswith("test_plan.py:") for row in inner)


def test_reasons_name_the_rule_or_neighbour():
    def fun(w, x, g, mask):
        y = x @ w
        masked = jnp.where(mask, y, jnp.finfo("float32").min)
        root = lax.rsqrt(lax.reduce_sum(y * y, (1,)) + 1e-12)
        scaled = y * lax.broadcast_in_dim(root, (8, 8), (0,))
        return (scaled @ w + g) * g, lax.exp(masked), g * g

    plan_rows = rows(fun, shape(8, 8), shape(8, 8), shape(8, 8), shape(8, 8, dtype=bool), policy="mixed_float16")
    why = collections.defaultdict(list)
    for row in plan_rows:
        why[row.primitive].append(row.why)
    assert why["select_n"] == ["a constant beyond float16's largest number"]
    after = ["follows float32: broadcast_in_dim", "leads to no product", "no product before it"]
    assert why["mul"] == ["feeds only float32: reduce_sum", *after]
    assert why["add"][0] == "a constant below float16's smallest normal number"
    assert why["add"][1] == "leads to no product"


def test_rows_of_a_body_follow_the_row_of_its_equation():
    def fun(w, x):
        def step(carry, _):
            x, total = carry
            x = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
            return (x, total + 1.0), x[0]

        return lax.scan(step, (x, 0.0), None, length=5)

    plan_rows = rows(fun, shape(4, 4), shape(4, 4))
    scan, cond, product = (
        next(row for row in plan_rows if row.primitive == name) for name in ("scan", "cond", "dot_general")
    )
    assert (scan.cls, scan.depth, cond.depth, product.depth) == ("recurse", 0, 1, 2)
    assert plan_rows.index(scan) < plan_rows.index(cond) < plan_rows.index(product)
    assert scan.result == "float32, float32, float32" and "5 trips" in scan.why
    assert "a state in float32" in scan.why
    assert product.flops == 5 * 2 * 4 * 4 * 4


def test_a_while_loop_counts_one_trip():
    def fun(w, x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    cast_plan = plan(fun, shape(4, 4), shape(4, 4))
    assert cast_plan.summary.product_flops == 2 * 4 * 4 * 4
    assert cast_plan.summary.unknown_trips == 1
    assert "loops of unknown trips, counted as one trip each: 1" in str(cast_plan)


def test_a_plan_shows_the_value_of_a_function_with_a_custom_rule():
    call, dot, mul = rows(doubled, shape(2, 8), shape(8, 8))
    assert (call.cls, call.why) == ("recurse", "decided inside; its derivative rules when they run")
    assert (dot.primitive, dot.operands, mul.primitive) == ("dot_general", ("bfloat16", "bfloat16"), "mul")


def test_a_plan_without_products_says_so():
    cast_plan = plan(lambda x: jnp.sum(lax.exp(x)) + 1, shape(8))
    assert {row.why for row in cast_plan.rows} == {"no product in half: nothing changes"}
    assert (cast_plan.summary.changes, cast_plan.summary.casts, cast_plan.summary.half_flops) == (False, 0, 0)
    assert "\nno product in half: nothing changes\n\nprimitive " in str(cast_plan)
    text = str(plan(lambda x: x, shape(8)))
    assert "\nFLOPs: 0, 0.0 % in half precision\noperations by class: none\n" in text


def test_a_plan_shows_the_decisions_inside_of_a_model_under_a_policy():
    model = jaxmp.nnx.apply_policy(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    cast_plan = plan(lambda x: model(x).sum(), shape(4, 8))
    reasons = {row.primitive: row.why for row in cast_plan.rows}
    assert (reasons["dot_general"], reasons["add"]) == ("product", "leads to no product")
    assert (cast_plan.summary.unknown, cast_plan.summary.uncounted) == ((), ())
    assert cast_plan.summary.changes and cast_plan.summary.casts == 3  # the input, the kernel, and the product


def test_a_plan_without_a_policy_is_that_of_the_models():
    model = jaxmp.nnx.apply_policy(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "mixed_float16")
    cast_plan = jaxmp.cast_plan(lambda x, w: model(x) @ w)(shape(4, 8), shape(4, 4))
    products = [(row.operands[0], row.why) for row in cast_plan.rows if row.primitive == "dot_general"]
    assert products == [("float16", "product"), ("float32", "as it is written")]
    with pytest.raises(ValueError, match="nothing under autocast; write cast_plan\\(fun, 'mixed_bfloat16'\\)"):
        jaxmp.cast_plan(jnp.dot)(shape(4, 8), shape(8, 4))


def test_a_plan_shows_the_decisions_of_an_inner_autocast():
    inner = jaxmp.autocast(lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], "mixed_float16")
    cast_plan = plan(lambda x, w: inner(x, w) @ w, shape(8, 8), shape(8, 8))
    products = [row for row in cast_plan.rows if row.primitive == "dot_general"]
    assert [row.operands[0] for row in products] == ["float16", "bfloat16"]
    assert [row.why for row in products] == ["product", "product"]
    assert [row.flops for row in products] == [3 * 1024, 1024]
    assert cast_plan.summary.half_product_flops == cast_plan.summary.product_flops == 4 * 1024


def test_a_plan_counts_a_jitted_inner_autocast_at_each_call():
    inner = jax.jit(jaxmp.autocast(lambda x, w: x @ w, "mixed_float16"))
    once, twice = (plan(fun, shape(8, 8), shape(8, 8)).summary for fun in (inner, lambda x, w: inner(inner(x, w), w)))
    assert (once.product_flops, once.casts) == (1024, 3)  # the casts of both operands and of the result
    assert (twice.product_flops, twice.casts) == (2 * once.product_flops, 2 * once.casts)
    assert (once.cast_bytes, twice.cast_bytes) == (2 * 128 + 256, 4 * 128 + 2 * 256)


def test_a_plan_of_a_transformed_inner_autocast_counts_what_runs():
    inner = jaxmp.autocast(lambda x, w: jnp.tanh(x @ w).sum(), "mixed_float16")
    for transformed, count in ((jax.grad(inner), 2), (jax.vmap(inner, (0, None)), 1)):
        cast_plan = plan(transformed, shape(4, 8, 8), shape(8, 8))
        assert {row.why for row in cast_plan.rows if row.primitive == "dot_general"} == {
            "decided by the autocast inside"
        }
        assert cast_plan.summary.product_flops == cast_plan.summary.half_product_flops == count * 4096
