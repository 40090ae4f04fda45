"""The plan matches the program that autocast emits, and names float32 patterns."""

from __future__ import annotations

import collections
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from plan_tools import custom, doubled, looped, plan, rows, shape

import jaxmp
from jaxmp.program.equations import bodies_of, opened


def attention(x, w):
    q = (x @ w).reshape(4, 2, 4)
    scores = jnp.einsum("qhd,khd->hqk", q, q)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), q).reshape(4, 8) @ w


def branched(x, w):
    y = x @ w
    return lax.cond(y[0, 0] > 0, lambda: y @ w, lambda: lax.exp(y)) @ w


def until(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.tanh(c[1] @ w)), (0, x))[1]


def cross_entropy(x, w):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.zeros(4, "int32")).mean()


def remat(x, w):
    return jnp.sum(jax.checkpoint(lambda x: lax.tanh(x @ w) @ w)(x))


def shared(x, w):
    y = x @ w
    return lax.exp(y) + lax.log(y) + lax.reduce_sum(y, (0, 1)), y @ w, w + 1.0, x @ w


def clipped(x, w):
    return jnp.clip(x @ w, 0.0, 2.0) @ w  # its bounds are converted from float32 to float32


def biased(x, w):
    return (x @ w + w[:1]) @ w  # JAX broadcasts the bias implicitly


def embedded(x, w):
    return w.astype("bfloat16")[jnp.array([0, 3, 3])] @ w.astype("bfloat16")


def embedded_and_biased(x, w):
    table = w.astype("bfloat16")
    return (table[jnp.array([0, 3, 3])] @ table + table[:1]) @ table


def cast_outside_a_loop(x, w):
    x, w = x.astype("bfloat16"), w.astype("bfloat16")
    return lax.scan(lambda x, scale: (x @ w * scale, x[0]), x, w)


def gathered_into_a_rule(x, w):
    return doubled(w.astype("bfloat16")[jnp.array([0, 3, 3])], w.astype("bfloat16"))


def cast_outside_a_branch(x, w):
    half = w.astype("bfloat16")
    return lax.cond(x[0, 0] > 0, lambda: half @ half, lambda: half)


def cast_and_widened(x, w):
    return x @ w.astype("bfloat16").astype("float32") @ w


def cast_to_another_dtype(x, w):
    y = x @ w
    halves = y.astype("float16").astype("float32") @ w, y.astype("bfloat16").astype("float32") @ w
    return *halves, y.astype("float8_e4m3fn").astype("float32") @ w, y.astype("int32"), y.astype("complex64")


FUNCTIONS = {
    "embedded": embedded,
    "embedded and biased": embedded_and_biased,
    "cast outside a loop": cast_outside_a_loop,
    "gathered into a rule": gathered_into_a_rule,
    "cast outside a branch": cast_outside_a_branch,
    "grad of embedded": jax.grad(lambda x, w: jnp.sum(embedded(x, w), dtype="float32"), 1),
    "cast and widened": cast_and_widened,
    "cast to another dtype": cast_to_another_dtype,
    "grad of biased": jax.grad(lambda x, w: jnp.sum(biased(x, w)), (0, 1)),
    "clipped": clipped,
    "branched": branched,
    "until": until,
    "shared": shared,
    "grad of attention": jax.grad(lambda x, w: jnp.sum(attention(x, w)), (0, 1)),
    "grad of looped": jax.grad(lambda x, w: looped(x, w)[0][1], (0, 1)),
    "grad of custom": jax.grad(custom, (0, 1)),
    "grad of cross_entropy": jax.grad(cross_entropy, 1),
    "remat": remat,
    "grad of remat": jax.grad(remat, (0, 1)),
    "jit and vmap": jax.vmap(jax.jit(lambda x, w: jax.jit(attention)(x, w) * 2), (None, 0)),
}
ARGS = {"jit and vmap": (shape(4, 8), shape(3, 8, 8))}


def leaves(jaxpr, trips=1):
    """Yield the innermost equations with their trip counts."""
    for eqn in jaxpr.eqns:
        bodies = bodies_of(eqn)
        if bodies is None:
            yield eqn, trips
        for body in bodies.jaxprs if bodies is not None else ():
            yield from leaves(opened(body)[0], trips * eqn.params.get("length", 1))


def is_cast(eqn):
    """Return whether an equation casts one floating dtype to another."""
    dtypes = (
        (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) if eqn.primitive.name == "convert_element_type" else ()
    )
    return len(set(dtypes)) == 2 and all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def emitted(fun, policy, args):
    """Return the floating operations with their dtypes, and the bytes of each cast."""
    operations, casts = [], []
    for eqn, trips in leaves(jax.make_jaxpr(jaxmp.autocast(fun, policy))(*args)):
        if is_cast(eqn) or eqn.primitive.name == "cast_repeated":  # cast_repeated casts too
            casts.append(eqn.invars[0].aval.size * eqn.outvars[0].aval.dtype.itemsize * trips)
        elif eqn.primitive.name != "convert_element_type":
            dtypes = (tuple(str(atom.aval.dtype) for atom in atoms) for atoms in (eqn.invars, eqn.outvars))
            operations.append((eqn.primitive.name, *dtypes))
    return collections.Counter(row for row in operations if "float" in str(row)), casts


def casts_by_author(fun, args, cast_plan):
    """Return the bytes of the author's casts."""
    written = [leaf for leaf in leaves(jax.make_jaxpr(fun)(*args)) if leaf[0].primitive.name == "convert_element_type"]
    shown = [row for row in cast_plan.rows if row.primitive == "convert_element_type"]
    return [
        eqn.outvars[0].aval.size * jnp.dtype(row.result).itemsize * trips
        for (eqn, trips), row in zip(written, shown, strict=True)
        if is_cast(eqn) and row.operands != (row.result,)
    ]


@pytest.mark.parametrize(("name", "policy"), list(zip(FUNCTIONS, itertools.cycle(["float16", "mixed_bfloat16"]))))
def test_the_plan_matches_the_emitted_program(name, policy):
    args = ARGS.get(name, (shape(4, 8), shape(8, 8)))
    operations, casts = emitted(FUNCTIONS[name], policy, args)
    cast_plan = plan(FUNCTIONS[name], *args, policy=policy)
    half = {"mixed_bfloat16": "bfloat16", "float16": "float16"}[policy]
    said = collections.Counter()
    for row in cast_plan.rows:
        if row.cls != "recurse" and row.primitive != "convert_element_type":
            result = row.result
            if "rounded once" in row.why:  # autocast emits the rounding as a separate cast
                assert result == half
                result = "float32"
            if "float" in f"{row.operands} {result}":
                said[row.primitive, row.operands, tuple(result.split(", "))] += 1
    assert said == operations
    by_author = casts_by_author(FUNCTIONS[name], args, cast_plan)
    assert cast_plan.summary.casts == len(casts) - len(by_author)
    assert cast_plan.summary.cast_bytes == sum(casts) - sum(by_author)


def test_casts_count_the_bytes_they_write_and_shared_casts_count_once():
    def fun(x, w):
        y = x @ w  # x and w: 2 bytes for each of 32 + 64
        z = lax.exp(y)  # y to float32
        return lax.log(y), z @ w, z @ w  # y to float32 again, z to half once, w to half twice

    dot, exp, log, first, second = rows(fun, shape(4, 8), shape(8, 8))
    assert (dot.casts, dot.cast_bytes) == (2, 2 * (32 + 64))
    assert (exp.casts, exp.cast_bytes) == (1, 4 * 32)
    assert (log.casts, log.cast_bytes) == (1, 4 * 32)
    assert (first.casts, first.cast_bytes) == (2, 2 * (32 + 64))
    assert (second.casts, second.cast_bytes) == (1, 2 * 64)
    summary = plan(fun, shape(4, 8), shape(8, 8)).summary
    casts = 192 + 128 + 128 + 192 + 128
    assert (summary.casts, summary.cast_bytes) == (9, casts + 2 * 4 * 32)  # the last two results go to float32


def test_the_cast_of_a_repeated_weight_writes_the_weight_once():
    *_, add, _ = rows(biased, shape(4, 8), shape(8, 8))
    assert (add.operands, add.casts, add.cast_bytes) == (("bfloat16", "bfloat16"), 1, 2 * 8)


def test_casts_in_a_scan_count_each_trip_and_casts_of_its_carry_count_for_the_scan():
    def fun(x, w):
        return lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    scan, dot = rows(fun, shape(4, 8), shape(7, 8, 8))
    assert (scan.casts, scan.cast_bytes) == (1, 2 * 32)
    assert (dot.casts, dot.cast_bytes) == (1, 7 * 2 * 64)


# --- the summary


def test_the_summary_lists_float32_products_with_their_reasons():
    def fun(x, w):
        with jax.named_scope("head"):
            y = x @ w
        return lax.dot(y, w, precision="highest") @ w

    summary = plan(fun, shape(4, 8), shape(8, 8), overrides={"head": "float32"}).summary
    line = fun.__code__.co_firstlineno + 3
    assert summary.full_products == (
        ("head", "override 'head'"),
        (f"test_plan_casts.py:{line}", "the author asks for the highest precision"),
    )
    assert (summary.product_flops, summary.half_product_flops) == (3 * 512, 512)
    assert summary.operations == {"half": 3}
