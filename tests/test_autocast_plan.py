from __future__ import annotations

import collections
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plan_block
import pytest
from flax import linen
from jax import lax
from rich.console import Console

import jaxmp
from jaxmp._jaxpr import reading
from jaxmp.autocast.plan import CastPlan, Row

HERE = Path(__file__).parent


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def plan(fun, *args, policy="mixed_bfloat16", overrides=None) -> CastPlan:
    return jaxmp.cast_plan(fun, policy, overrides)(*args)


def rows(fun, *args, **options) -> list[Row]:
    return list(plan(fun, *args, **options).rows)


def flops(fun, *args):
    """Primitive and FLOPs of each row that has any."""
    return [(row.primitive, row.flops) for row in rows(fun, *args) if row.flops]


# --- rows


def mlp(w1, b1, w2, x):
    with jax.named_scope("hidden"):
        hidden = lax.tanh(x @ w1 + lax.broadcast_in_dim(b1, (4, 16), (1,)))
    with jax.named_scope("head"):
        logits = hidden @ w2
    top = lax.broadcast_in_dim(lax.reduce_max(logits, (1,)), (4, 2), (0,))
    powers = lax.exp(logits - top)
    return powers / lax.broadcast_in_dim(lax.reduce_sum(powers, (1,)), (4, 2), (0,))


MLP = (shape(8, 16), shape(16), shape(16, 2), shape(4, 8))


def test_rows_of_an_mlp_with_a_softmax_are_what_one_expects():
    half, full = "bfloat16", "float32"
    expected = [  # path, primitive, class, operands, result, why, FLOPs, bytes of casts
        ("hidden", "dot_general", "half", (half, half), half, "product", 2 * 4 * 8 * 16, 2 * (32 + 128)),
        ("hidden", "broadcast_in_dim", "clear", (full,), full, "moves data", 0, 0),
        ("hidden", "add", "widest", (half, half), half, "between dot_general and dot_general of head", 64, 2 * 64),
        ("hidden", "tanh", "infer", (half,), half, "between dot_general and dot_general of head", 64, 0),
        ("head", "dot_general", "half", (half, half), half, "product", 2 * 4 * 16 * 2, 2 * 32),
        ("", "reduce_max", "clear", (half,), half, "moves data", 0, 0),
        ("", "broadcast_in_dim", "clear", (half,), half, "moves data", 0, 0),
        ("", "sub", "widest", (full, full), full, "softmax: feeds only exp", 8, 4 * (8 + 8)),
        ("", "exp", "pointwise", (full,), full, "softmax: pointwise is float32", 8, 0),
        ("", "reduce_sum", "accumulation", (full,), full, "softmax: accumulation is float32", 8, 0),
        ("", "broadcast_in_dim", "clear", (full,), full, "moves data", 0, 0),
        ("", "div", "widest", (full, full), full, "softmax: goes on in float32 after exp", 8, 0),
    ]
    keys = ("path", "primitive", "cls", "operands", "result", "why", "flops", "cast_bytes")
    found = [tuple(getattr(row, key) for key in keys) for row in rows(mlp, *MLP)]
    assert [row[1] for row in found] == [row[1] for row in expected]
    for number, row in enumerate(expected):
        assert found[number] == row


def test_a_flax_layer_norm_between_products_is_an_island_under_its_modules_path():
    model = linen.Sequential([linen.Dense(8, use_bias=False), linen.LayerNorm(), linen.Dense(8, use_bias=False)])
    params = jax.eval_shape(model.init, jax.random.key(0), shape(4, 8))
    found = rows(model.apply, params, shape(4, 8))
    products = [row for row in found if row.primitive == "dot_general"]
    assert [row.path.rpartition("/")[2] for row in products] == ["layers_0", "layers_2"]
    assert all(row.result == "bfloat16" for row in products)
    (root,) = (row for row in found if row.primitive == "rsqrt")
    assert root.path.endswith("layers_1") and root.operands == ("float32",)
    assert root.why == "normalisation: pointwise is float32"
    assert all(row.result == "float32" for row in found if row.primitive == "reduce_sum")


def test_sources_are_files_in_their_packages_and_lines_of_the_user():
    line = mlp.__code__.co_firstlineno + 4
    (dot,) = (row for row in rows(mlp, *MLP) if row.path == "head")
    assert dot.source == f"test_autocast_plan.py:{line}"
    params = jax.eval_shape(linen.Dense(4).init, jax.random.key(0), shape(2, 3))
    for row in rows(linen.Dense(4).apply, params, shape(2, 3)):
        assert re.fullmatch(r"flax/linen/linear\.py:\d+", row.source)


def test_what_jax_traced_before_is_told_by_the_line_that_calls_it():
    def fun(x, w):
        return jax.nn.log_softmax(x @ w)

    inner = [row for row in rows(fun, shape(4, 8), shape(8, 8)) if row.depth]
    assert inner and all(row.source.startswith("test_autocast_plan.py:") for row in inner)


def test_the_reason_names_what_decided():
    def fun(w, x, g, mask):
        y = x @ w
        masked = jnp.where(mask, y, jnp.finfo("float32").min)
        root = lax.rsqrt(lax.reduce_sum(y * y, (1,)) + 1e-12)
        scaled = y * lax.broadcast_in_dim(root, (4, 4), (0,))
        return (scaled @ w + g) * g, lax.exp(masked), g * g

    found = rows(fun, shape(4, 4), shape(4, 4), shape(4, 4), shape(4, 4, dtype=bool), policy="mixed_float16")
    why = collections.defaultdict(list)
    for row in found:
        why[row.primitive].append(row.why)
    assert why["select_n"] == ["a constant beyond float16's largest number"]
    after = ["goes on in float32 after rsqrt", "leads to no product", "no product before it"]
    assert why["mul"] == ["L2 norm: feeds only reduce_sum", *after]
    assert why["add"][0] in ("L2 norm: a constant below float16's smallest normal number", "L2 norm: feeds only rsqrt")
    assert why["add"][1] == "leads to no product"


def test_rows_of_loops_and_branches_follow_the_equation_that_has_them():
    def fun(w, x):
        def step(carry, _):
            x, total = carry
            x = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
            return (x, total + 1.0), x[0]

        return lax.scan(step, (x, 0.0), None, length=5)

    found = rows(fun, shape(4, 4), shape(4, 4))
    scan, cond, product = (
        next(row for row in found if row.primitive == name) for name in ("scan", "cond", "dot_general")
    )
    assert (scan.cls, scan.depth, cond.depth, product.depth) == ("recurse", 0, 1, 2)
    assert found.index(scan) < found.index(cond) < found.index(product)
    assert scan.result == "bfloat16, float32, bfloat16" and "5 trips" in scan.why
    assert "float32: a carry that adds up, with no product on its way round" in scan.why
    assert product.flops == 5 * 2 * 4 * 4 * 4


def test_a_while_loop_counts_one_trip_and_the_summary_says_so():
    def fun(w, x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    found = plan(fun, shape(4, 4), shape(4, 4))
    assert found.summary.product_flops == 2 * 4 * 4 * 4
    assert found.summary.unknown_trips == 1
    assert "loops of unknown trips, counted as one trip each: 1" in str(found)


@jax.custom_vjp
def doubled(x, w):
    return x @ w * 2


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))


def test_a_custom_rule_is_shown_as_it_computes_its_value():
    call, dot, mul = rows(doubled, shape(2, 4), shape(4, 8))
    assert (call.cls, call.why) == ("recurse", "decided inside; its derivative rules when they run")
    assert (dot.primitive, dot.operands, mul.primitive) == ("dot_general", ("bfloat16", "bfloat16"), "mul")


def test_a_function_without_products_keeps_every_operation_and_says_so():
    found = plan(lambda x: jnp.sum(lax.exp(x)) + 1, shape(8))
    assert {row.why for row in found.rows} == {"no product in half: nothing changes"}
    assert (found.summary.changes, found.summary.casts, found.summary.half_flops) == (False, 0, 0)
    assert str(found).endswith("no product in half: nothing changes")


def test_a_function_without_operations_has_a_plan_too():
    text = str(plan(lambda x: x, shape(8)))
    assert "operations: none\nFLOPs: 0, 0.0 % in half precision\n" in text


def test_an_autocast_inside_has_decided():
    inner = jaxmp.autocast(lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], "mixed_float16")
    found = plan(lambda x, w: inner(x, w) @ w, shape(4, 4), shape(4, 4))
    products = [row for row in found.rows if row.primitive == "dot_general"]
    assert [row.operands[0] for row in products] == ["float16", "bfloat16"]
    assert products[0].why == "decided by the autocast inside"
    assert [row.flops for row in products] == [3 * 128, 128]
    assert found.summary.half_product_flops == found.summary.product_flops == 4 * 128


def test_an_unknown_primitive_is_reported():
    from jax.extend.core import Primitive

    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    found = plan(lambda x, w: mystery.bind(x @ w), shape(4, 4), shape(4, 4))
    assert found.rows[1].cls == "unknown" and found.rows[1].operands == ("float32",)
    assert found.rows[1].why == "an unknown primitive keeps its dtypes"
    assert (found.summary.unknown, found.summary.uncounted) == (("mystery",), ("mystery",))
    assert "unknown primitives, which keep their dtypes: mystery" in str(found)


# --- FLOPs


def test_flops_of_products_are_two_for_each_term():
    assert flops(jnp.matmul, shape(8, 16), shape(16, 4)) == [("dot_general", 2 * 8 * 16 * 4)]
    assert flops(jnp.matmul, shape(3, 8, 16), shape(3, 16, 4)) == [("dot_general", 2 * 3 * 8 * 16 * 4)]
    sizes = shape(2, dtype="int32")
    assert flops(lax.ragged_dot, shape(6, 8), shape(2, 8, 4), sizes) == [("ragged_dot_general", 2 * 6 * 8 * 4)]


@pytest.mark.parametrize(
    ("image", "kernel", "options", "expected"),
    [
        # results 1 × 6 × 6 × 16, each of 3 × 3 × 8 terms
        ((1, 8, 8, 8), (3, 3, 8, 16), {}, 2 * 36 * 16 * 72),
        # stride 2 with padding: results 2 × 4 × 4 × 16
        ((2, 8, 8, 8), (3, 3, 8, 16), {"window_strides": (2, 2), "padding": "SAME"}, 2 * 2 * 16 * 16 * 72),
        # four groups: each result reads two of the eight channels
        ((1, 8, 8, 8), (3, 3, 2, 16), {"feature_group_count": 4}, 2 * 36 * 16 * 18),
        # two groups of the batch: half as many images come out
        ((2, 8, 8, 8), (3, 3, 8, 16), {"batch_group_count": 2}, 2 * 36 * 16 * 72),
        # kernel dilated by 2: it spans 5, so 4 × 4 results
        ((1, 8, 8, 8), (3, 3, 8, 16), {"rhs_dilation": (2, 2)}, 2 * 16 * 16 * 72),
        # transposed: each of the 4 × 4 pixels meets the 2 × 2 taps once
        ((1, 4, 4, 8), (2, 2, 8, 16), {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}, 2 * 64 * 16 * 8),
    ],
)
def test_flops_of_a_convolution(image, kernel, options, expected):
    options = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")} | options

    def fun(x, w):
        return lax.conv_general_dilated(x, w, **options)

    assert flops(fun, shape(*image), shape(*kernel)) == [("conv_general_dilated", expected)]


def test_flops_of_other_operations_are_their_elements():
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

    found = plan(fun, shape(4, 4), shape(2, 4))
    assert found.summary.flops == found.summary.half_flops == 3 * 5 * 2 * 2 * 4 * 4
    assert found.summary.half_share == 1


def test_what_has_no_formula_is_named():
    found = plan(lambda x: jnp.linalg.cholesky(x @ x.T), shape(4, 4))
    assert found.summary.uncounted == ("cholesky",)
    assert "FLOPs not counted: cholesky" in str(found)


# --- casts and agreement with what autocast emits


def attention(x, w):
    q = (x @ w).reshape(4, 2, 4)
    scores = jnp.einsum("qhd,khd->hqk", q, q)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), q).reshape(4, 8) @ w


def looped(x, w):
    def step(carry, scale):
        x, total = carry
        x = jax.nn.relu(x @ w) * scale
        return (x, total + jnp.sum(x)), x[0]

    return lax.scan(step, (x, jnp.float32(0)), x[0])


def branched(x, w):
    y = x @ w
    return lax.cond(y[0, 0] > 0, lambda: y @ w, lambda: lax.exp(y)) @ w


def until(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.tanh(c[1] @ w)), (0, x))[1]


def custom(x, w):
    return jnp.sum(jax.nn.silu(x @ w) @ w) + jnp.sum(doubled(x, w))


def cross_entropy(x, w):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.zeros(4, "int32")).mean()


def remat(x, w):
    return jnp.sum(jax.checkpoint(lambda x: lax.tanh(x @ w) @ w)(x))


def shared(x, w):
    y = x @ w
    return lax.exp(y) + lax.log(y) + lax.reduce_sum(y, (0, 1)), y @ w, w + 1.0, x @ w


def clipped(x, w):
    return jnp.clip(x @ w, 0.0, 2.0) @ w  # its bounds are converted from float32 to float32


FUNCTIONS = {
    "clipped": clipped,
    "attention": attention,
    "looped": looped,
    "branched": branched,
    "until": until,
    "custom": custom,
    "cross_entropy": cross_entropy,
    "remat": remat,
    "shared": shared,
    "grad of attention": jax.grad(lambda x, w: jnp.sum(attention(x, w)), (0, 1)),
    "grad of looped": jax.grad(lambda x, w: looped(x, w)[0][1], (0, 1)),
    "grad of custom": jax.grad(custom, (0, 1)),
    "grad of cross_entropy": jax.grad(cross_entropy, 1),
    "grad of remat": jax.grad(remat, (0, 1)),
    "vmap": jax.vmap(attention, (None, 0)),
    "jit": jax.jit(lambda x, w: jax.jit(attention)(x, w) * 2),
}
ARGS = {"vmap": (shape(4, 8), shape(3, 8, 8))}


def leaves(jaxpr):
    """The equations without bodies, those in bodies included."""
    for eqn in jaxpr.eqns:
        bodies = reading.bodies_of(eqn)
        if bodies is None:
            yield eqn
        for body in bodies.jaxprs if bodies is not None else ():
            yield from leaves(reading.opened(body)[0])


def is_cast(eqn):
    """Whether an equation casts one floating dtype to another."""
    dtypes = (
        (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) if eqn.primitive.name == "convert_element_type" else ()
    )
    return len(set(dtypes)) == 2 and all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def emitted(fun, policy, args):
    """Primitive, operand dtypes and result dtypes of what computes floats; and the casts, in bytes."""
    operations, casts = [], []
    for eqn in leaves(jax.make_jaxpr(jaxmp.autocast(fun, policy))(*args)):
        if is_cast(eqn):
            casts.append(eqn.outvars[0].aval.size * eqn.outvars[0].aval.dtype.itemsize)
        elif eqn.primitive.name != "convert_element_type":
            dtypes = (tuple(str(atom.aval.dtype) for atom in atoms) for atoms in (eqn.invars, eqn.outvars))
            operations.append((eqn.primitive.name, *dtypes))
    return collections.Counter(row for row in operations if "float" in str(row)), casts


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_plan_says_what_autocast_emits(name, policy):
    args = ARGS.get(name, (shape(4, 8), shape(8, 8)))
    operations, casts = emitted(FUNCTIONS[name], policy, args)
    found = plan(FUNCTIONS[name], *args, policy=policy)
    half = {"mixed_bfloat16": "bfloat16", "float16": "float16"}[policy]
    said = collections.Counter()
    for row in found.rows:
        if row.cls != "recurse" and row.primitive != "convert_element_type":
            result = row.result
            if "rounded once" in row.why:  # the cast is an equation of its own
                assert result == half
                result = "float32"
            if "float" in f"{row.operands} {result}":
                said[row.primitive, row.operands, tuple(result.split(", "))] += 1
    assert said == operations
    assert not any(is_cast(eqn) for eqn in leaves(jax.make_jaxpr(FUNCTIONS[name])(*args)))  # the author's own
    assert found.summary.casts == len(casts)
    if "scan" not in {row.primitive for row in found.rows}:
        assert found.summary.cast_bytes == sum(casts)


def test_bytes_of_casts_are_what_they_write_and_shared_casts_stand_once():
    def fun(x, w):
        y = x @ w  # x and w: 2 bytes for each of 32 + 64
        return lax.exp(y), lax.log(y), y @ w  # y to float32 once, w again

    dot, exp, log, again = rows(fun, shape(4, 8), shape(8, 8))
    assert (dot.casts, dot.cast_bytes) == (2, 2 * (32 + 64))
    assert (exp.casts, exp.cast_bytes) == (1, 4 * 32)
    assert (log.casts, log.cast_bytes) == (0, 0)
    assert (again.casts, again.cast_bytes) == (1, 2 * 64)
    summary = plan(fun, shape(4, 8), shape(8, 8)).summary
    assert (summary.casts, summary.cast_bytes) == (5, 192 + 128 + 128 + 4 * 32)  # the last result goes to float32


def test_casts_in_a_scan_count_each_trip_and_those_of_its_carry_stand_at_the_scan():
    def fun(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=7)[0]

    scan, dot = rows(fun, shape(4, 8), shape(8, 8))
    assert (scan.casts, scan.cast_bytes) == (1, 2 * 32)
    assert (dot.casts, dot.cast_bytes) == (1, 7 * 2 * 64)


# --- islands and the summary


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


ISLANDS = {
    "softmax": lambda x, w: jax.nn.softmax(x @ w),
    "log-softmax": lambda x, w: jax.nn.log_softmax(x @ w),
    "logsumexp": lambda x, w: jnp.log(jnp.sum(lax.exp(x @ w))),
    "cross-entropy": cross_entropy,
    "normalisation": lambda x, w: jax.nn.standardize(x @ w),
    "variance": lambda x, w: jnp.var(x @ w),
    "standard deviation": lambda x, w: jnp.std(x @ w),
    "squared error": lambda x, w: jnp.mean((x @ w - x) ** 2),
    "L2 norm": lambda x, w: unit(x @ w),
    "cosine similarity": lambda x, w: jnp.sum(unit(x @ w) * unit(x), -1),
    "softplus": lambda x, w: jax.nn.softplus(x @ w),
    "sum of squares": lambda x, w: jnp.sum((x @ w) ** 2),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_an_island_is_found_by_name(name):
    summary = plan(ISLANDS[name], shape(4, 8), shape(8, 8)).summary
    expected = {name: 1}
    if name == "cosine similarity":
        expected["L2 norm"] = 2
    assert summary.islands == expected


@pytest.mark.parametrize("layer", [linen.LayerNorm(), linen.RMSNorm(), linen.GroupNorm(2), linen.BatchNorm(False)])
def test_flax_normalisations_are_islands(layer):
    def fun(x, w):
        return layer.init_with_output(jax.random.key(0), x @ w)[0]

    assert plan(fun, shape(4, 8), shape(8, 8)).summary.islands == {"normalisation": 1}


def test_what_is_no_island_has_no_name():
    def fun(x, w):
        y = x @ w
        return jnp.mean(y), y / (1 + jnp.sum(y)), lax.exp(y), jnp.sum(y * x)

    assert plan(fun, shape(4, 8), shape(8, 8)).summary.islands == {}


def test_products_that_stay_float32_are_told_with_their_reason():
    def fun(x, w):
        with jax.named_scope("head"):
            y = x @ w
        return lax.dot(y, w, precision="highest") @ w

    summary = plan(fun, shape(4, 8), shape(8, 8), overrides={"head": "float32"}).summary
    line = fun.__code__.co_firstlineno + 3
    assert summary.full_products == (
        ("head", "override 'head'"),
        (f"test_autocast_plan.py:{line}", "the author asks for the highest precision"),
    )
    assert (summary.product_flops, summary.half_product_flops) == (3 * 512, 512)
    assert summary.operations == {"half": 3}


# --- text, JSON, table


def test_the_text_of_a_transformer_block_is_the_one_kept():
    found = plan(plan_block.loss, *plan_block.example(), overrides={"**/head": "float32"})
    assert f"{found}\n" == (HERE / "plan_block.txt").read_text()


def test_the_text_is_the_same_in_another_process_folder_and_hash_seed(tmp_path):
    code = f"""
import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import jaxmp, plan_block
print(jaxmp.cast_plan(plan_block.loss, "mixed_bfloat16", {{"**/head": "float32"}})(*plan_block.example()))
"""
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == (HERE / "plan_block.txt").read_text(), done.stderr


def test_one_change_of_precision_changes_its_line_and_the_totals():
    def lines(**overrides):
        return str(plan(mlp, *MLP, **overrides)).splitlines()[3:]

    before, after = lines(), lines()
    assert before == after
    after = [line for line in lines(overrides={"primitive:tanh": "float32"}) if not line.startswith("override")]
    changed = {line.split()[0] for line in set(after) - set(before)}
    assert "tanh" in changed and "exp" not in changed and "sub" not in changed


def test_the_text_holds_no_absolute_path_and_no_id():
    text = str(plan(custom, shape(4, 8), shape(8, 8)))
    assert not re.search(r"0x[0-9a-f]+|\s/\w", text)


def test_json_holds_all_that_the_plan_holds():
    found = plan(looped, shape(4, 8), shape(8, 8))
    read = json.loads(found.to_json())
    assert set(read) == {"policy", "overrides", "rows", "summary"}
    restored = [Row(**{**row, "operands": tuple(row["operands"])}) for row in read["rows"]]
    assert tuple(restored) == found.rows
    assert read["summary"].pop("half_share") == found.summary.half_share
    assert read["summary"] == json.loads(json.dumps(vars(found.summary)))
    assert read["policy"] == str(jaxmp.get_policy("mixed_bfloat16"))


def test_rich_prints_a_table_with_every_row_and_the_totals():
    found = plan(mlp, *MLP)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    text = console.export_text()
    assert all(row.primitive in text for row in found.rows)
    assert "islands in float32: 1 softmax" in text and "softmax: pointwise is float32" in text


# --- nothing runs, overrides, errors


def test_nothing_is_executed():
    huge = shape(1 << 20, 1 << 20)  # 4 TB
    found = plan(lambda x: x @ x, huge)
    assert found.summary.product_flops == 2 * 2**60


def test_arrays_python_values_and_keywords_are_arguments_as_they_are():
    def fun(x, transpose, *, w, name):
        assert transpose is True and name == "w"
        return x @ w.T

    found = jaxmp.cast_plan(fun, "mixed_float16")(np.ones((2, 3), np.float32), True, w=jnp.ones((4, 3)), name="w")
    assert found.rows[-1].operands == ("float16", "float16")


def test_an_override_is_the_reason_it_gives():
    def fun(x, w):
        with jax.named_scope("a"):
            y = lax.exp(x @ w)
        with jaxmp.precision("float32"):
            return y @ w

    found = plan(fun, shape(4, 8), shape(8, 8), overrides={"primitive:exp": "half"})
    exp, last = found.rows[1:]
    assert (exp.path, exp.operands, exp.why) == ("a", ("bfloat16",), "override 'primitive:exp'")
    assert (last.path, last.operands, last.why) == ("", ("float32",) * 2, "region jaxmp.precision('float32')")
    assert "override 'primitive:exp': half" in str(found)


def test_errors_are_those_of_autocast():
    def fun(x, w):
        return x @ w

    with pytest.raises(ValueError, match=r"every override must match an operation .* '\*\*/heed' matched none"):
        plan(fun, shape(4, 8), shape(8, 8), overrides={"**/heed": "float32"})
    with pytest.raises(ValueError, match="names a primitive that does not exist; the nearest: 'exp'"):
        jaxmp.cast_plan(fun, "mixed_bfloat16", {"primitive:expo": "float32"})
    with pytest.raises(ValueError, match="cast_plan needs a policy with a half compute dtype, got float32"):
        jaxmp.cast_plan(fun, "float32")
    with pytest.raises(TypeError, match="autocast takes one policy for a function, got the PolicyMap"):
        jaxmp.cast_plan(fun, "O2")
    with pytest.raises(ValueError, match="unknown policy 'mixed_float61'"):
        jaxmp.cast_plan(fun, "mixed_float61")
