"""Products in equations that autocast does not look into are told."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import half
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxmp
from jaxmp.inspect import AuditError, audit

X = np.ones((32, 32), "float32")
anothers = Primitive("call_of_another_package")
anothers.multiple_results = True
anothers.def_abstract_eval(lambda *args, jaxpr: list(jaxpr.out_avals))
mlir.register_lowering(anothers, mlir.lower_fun(lambda *args, jaxpr: jax.core.eval_jaxpr(jaxpr.jaxpr, [], *args), True))


def another(fun, *args):
    """Call a function in a primitive that the table does not have."""
    return anothers.bind(*args, jaxpr=jax.make_jaxpr(fun)(*args))[0]


def twice(x, w):
    return jnp.tanh(x @ w) @ w


def unread(x, w):
    return another(twice, x, w) @ w


def test_a_product_in_an_unknown_primitive_is_told_at_the_first_trace():
    with pytest.warns(UserWarning, match=r"'call_of_another_package' at .*; products in it that stay float32: 2"):
        jax.make_jaxpr(half(unread))(X, X)


def test_the_remedies_of_the_warning_silence_it():
    def cast(x, w):
        dtype = jaxmp.autocast_dtype()
        return another(twice, x.astype(dtype), w.astype(dtype))

    def in_float32(x, w):
        with jaxmp.precision("float32"):
            x = another(twice, x, w)
        return x @ w

    without_product = half(lambda x, w: another(jnp.add, x, w) @ w)
    for fun in (half(cast), half(in_float32), without_product, jaxmp.autocast(unread, "float32")):
        jax.make_jaxpr(fun)(X, X)  # warnings are errors


def test_a_custom_vmap_is_told_and_a_kernel_or_a_solver_is_not():
    product = jax.custom_batching.custom_vmap(jnp.matmul)
    product.def_vmap(lambda size, in_batched, x, w: (jnp.matmul(x, w), True))
    with pytest.warns(UserWarning, match=r"'custom_vmap_call' at .* stay float32: 1"):
        jax.make_jaxpr(half(lambda x, w: product(x, w) @ w))(X, X)

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def multiplied(x, w):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype))(x, w) @ w

    def solved(x, w):
        return jax.lax.custom_linear_solve(lambda y: x @ y, w, lambda _, b: b @ x, symmetric=True) @ w

    for fun in (multiplied, solved):
        jax.make_jaxpr(half(fun))(X, X)


def test_the_plan_has_rows_for_the_primitive_and_its_products():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = jaxmp.cast_plan(unread, "mixed_bfloat16")(X, X)
    rows = [(row.primitive, row.cls, row.operands[0], row.depth) for row in plan.rows if row.primitive != "tanh"]
    assert rows == [
        ("call_of_another_package", "unknown", "float32", 0),
        ("dot_general", "half", "float32", 1),
        ("dot_general", "half", "float32", 1),
        ("dot_general", "half", "bfloat16", 0),
    ]
    assert plan.summary.unknown == ("call_of_another_package",)


def test_the_audit_refuses_products_in_an_unknown_primitive():
    def fun(x, w):
        return another(twice, x, w)

    x = jax.ShapeDtypeStruct((32, 32), "bfloat16")
    report = audit(fun, compile=False)(x, x)
    assert [finding.kind for finding in report.findings] == ["unknown-primitive"]
    with pytest.raises(AuditError, match="'call_of_another_package' holds products"):
        report.check()
    report.check(allow="unknown-primitive")
    audit(lambda x, w: another(jnp.add, x, w) @ w, compile=False)(x, x).check()
