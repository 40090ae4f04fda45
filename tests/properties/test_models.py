"""Linen and NNX models have properties 1 to 9 of tests/README.md."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_zoo import HALVES, products, quick_jit, rngs, same_bits, standard_promotion
from properties_zoo import NNX, Linen, X, each_api, mixed, pure

import jaxmp
from jaxmp.linen import run as linen_run
from jaxmp.nnx import run as nnx_run

# --- 1 ----------------------------------------------------------------------------------------------------------------


@each_api
def test_every_layer_computes_and_returns_in_the_dtypes_that_were_declared(api):
    names = itertools.cycle(["mixed_float16", "p=bf16,c=f16,o=f32", "float32", "p=bf16,c=f16,o=f32"])
    with standard_promotion():
        for (model, x), name in zip(api.layers().values(), names, strict=False):
            policy = jaxmp.get_policy(name)
            apply, params = pure(mixed(model, policy), x, abstract=True)
            assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {policy.param_dtype}
            assert jax.eval_shape(apply, params, x).dtype == policy.output_dtype
            assert set(products(apply, params, x)) <= {policy.compute_dtype.name}
            # If the output dtype is the compute dtype, the results have the dtype of the computation.
            apply, params = pure(mixed(model, policy.with_output_dtype(policy.compute_dtype)), x, abstract=True)
            assert jax.eval_shape(apply, params, x).dtype == policy.compute_dtype


# --- 3 and 4: operands of different dtypes ----------------------------------------------------------------------------


@pytest.mark.once
@each_api
def test_the_code_of_a_model_sees_float32_whatever_the_dtypes_of_its_parts(api):
    inside = []

    def fun(half, full, brain, x):
        h, f, b = half(x), full(x), brain(x)
        results = [full(h), h + f, h * b, jnp.concatenate([h, b]), jnp.where(f > 0, h, f)]
        inside.extend(y.dtype.name for y in (h, f, b, *results))
        return results

    overrides = {api.part.format(1): "float32", api.part.format(2): "mixed_bfloat16"}
    model = mixed(api.Calls([api.dense() for _ in range(3)], fun), "mixed_float16", overrides)
    got = pure(model, X, abstract=True)
    inside.clear()
    assert products(got.apply, got.params, X.astype("float16")) == ["float16", "float32", "bfloat16", "float32"]
    assert inside == ["float32"] * 8


@each_api
def test_a_float64_part_computes_the_same_under_a_policy(api):
    def fun(wide, other, x):
        return wide(x), other(x.astype("float32"))

    with jax.enable_x64(True), standard_promotion():
        x = jnp.linspace(0, 1, 16, dtype="float64").reshape(2, 8)
        bare = api.Calls([api.dense(dtype="float64", param_dtype="float64"), api.dense()], fun)
        got, want = pure(mixed(bare, "p=f32,c=f16,o=f64"), x, abstract=True), pure(bare, x)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(got.params)} == {"float32", "float64"}
        assert products(got.apply, got.params, x) == ["float64", "float16"]
        same_bits(*quick_jit(lambda params: (got.apply(params, x)[0], want.apply(params, x)[0]))(want.params))


@pytest.mark.once
@each_api
def test_integers_bools_and_keys_pass_unchanged(api):
    extras = {"ids": jnp.arange(3), "mask": jnp.array([True]), "key": jax.random.key(0), "n": 3, "none": None}
    apply, params = pure(
        mixed(api.Calls([api.dense()], lambda part, x, unchanged: (part(x), unchanged)), "float16"), X, extras
    )
    _, passed = apply(params, X, extras)
    assert passed["n"] == 3 and passed["none"] is None
    for name in ("ids", "mask", "key"):
        assert passed[name].dtype == extras[name].dtype and (passed[name] == extras[name]).all()


# --- 6, 7, 8 and 9: nesting, derivatives, pytrees, recomputation ------------------------------------------------------


@pytest.mark.once
@each_api
def test_a_nested_policy_ends_with_its_model_also_after_an_exception(api):
    def fail(part, x):
        part(x)
        raise RuntimeError("the user's own")

    def fun(before, inner, failing, after, x):
        x = inner(before(x))
        try:
            failing(x)
        except RuntimeError as error:
            assert str(error) == "the user's own"
        return after(x)

    inner = mixed(api.Calls([api.dense()], lambda part, x: part(x)), "mixed_bfloat16")
    failing = mixed(api.Calls([api.dense()], fail), "float32")
    model = mixed(api.Calls([api.dense(), inner, failing, api.dense()], fun), "mixed_float16")
    apply, params = pure(model, X)
    with standard_promotion():
        dtypes = products(apply, params, X)
    # The products of `failing` are dead code.
    assert [name for name in dtypes if name != "float32"] == ["float16", "bfloat16", "float16"]
    with pytest.raises(RuntimeError, match="the user's own"):
        failing.init(rngs(), X) if api is Linen else failing(X)
    assert jax.config.jax_default_matmul_precision is None
    assert linen_run.current_run() is None
    assert nnx_run._run.get() is None
    assert products(*pure(api.dense(), X), X) == ["float32"]


def product_with_a_derivative_of_its_own(records):
    """Return a product whose derivative rule records its dtypes.

    The rule doubles the gradient of ``w``.
    """

    @jax.custom_vjp
    def product(w, x):
        return x @ w

    def forward(w, x):
        records.append(("forward", w.dtype.name, x.dtype.name))
        return product(w, x), (w, x)

    def backward(residuals, cotangent):
        w, x = residuals
        records.append(("backward", w.dtype.name, x.dtype.name, cotangent.dtype.name))
        return 2 * (x.T @ cotangent), cotangent @ w.T

    product.defvjp(forward, backward)
    return product


@pytest.mark.once
@pytest.mark.parametrize(
    ("api", "kind", "policy"), [(NNX, "Own", "mixed_bfloat16"), (Linen, "Beside", "mixed_float16")]
)
def test_a_custom_derivative_sees_the_policys_dtype_forward_and_backward(api, kind, policy):
    """Trace the rule in float32, as written, and compute it under the policy."""
    records, half, make = [], HALVES[policy], getattr(api, kind)
    product = product_with_a_derivative_of_its_own(records)
    got, bare = pure(mixed(make(product), policy), X, abstract=True), pure(make(product), X)
    gradient, exact = (jax.grad(pure_model.loss(X)) for pure_model in (got, bare))
    assert set(products(gradient, bare.params)) == {half}
    assert {name for name, *_ in records} == {"forward", "backward"}
    is_close(quick_jit(gradient)(bare.params), quick_jit(exact)(bare.params), policy)


def is_close(got, want, policy):
    """Assert that gradients differ by no more than the rounding of operands explains."""
    got, want = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    bound = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}[policy]
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@pytest.mark.parametrize(("api", "policy"), [(Linen, "mixed_float16"), (NNX, "mixed_bfloat16")])
def test_derivatives_of_jaxs_own_custom_rules_are_half_where_products_are(api, policy):
    def fun(w, x):
        return jax.nn.relu(x @ w) + jax.nn.gelu(x @ w) + jax.nn.softmax(x @ w) + jax.nn.logsumexp(x @ w)

    got, bare = pure(mixed(api.Own(fun), policy), X, abstract=True), pure(api.Own(fun), X)
    gradients = [jax.grad(pure_model.loss(X)) for pure_model in (got, bare)]
    assert set(products(gradients[0], bare.params)) == {HALVES[policy]}
    is_close(*(quick_jit(gradient)(bare.params) for gradient in gradients), policy)


class Pair(NamedTuple):
    """A pytree type of the user."""

    x: Any
    extra: Any


@pytest.mark.once
@each_api
def test_pytrees_keep_their_structure(api):
    traced_dtypes = []

    def fun(w, inputs):
        traced_dtypes.append(jax.tree.map(lambda leaf: getattr(leaf, "dtype", leaf), inputs))
        return Pair([inputs.x["a"] @ w, {"ids": inputs.extra[1]}], (None, 2, inputs.x["a"]))

    inputs = Pair({"a": X, "b": [X[0], X[1].astype(jnp.bfloat16)]}, (None, jnp.arange(3), 2.5))
    apply, params = pure(mixed(api.Own(fun), "p=f32,c=f16,o=bf16"), inputs)
    out = apply(params, inputs)
    float16, int32, bfloat16 = (jnp.dtype(name) for name in ("float16", "int32", "bfloat16"))
    float32 = jnp.dtype("float32")  # the code of a module without a dtype field is traced in float32
    assert traced_dtypes[-1] == Pair({"a": float32, "b": [float32, float32]}, (None, int32, 2.5))
    dtypes = jax.tree.map(lambda leaf: getattr(leaf, "dtype", leaf), out)
    assert dtypes == Pair([bfloat16, {"ids": int32}], (None, 2, bfloat16))
    same_bits(out.x[0], (X.astype(float16) @ jax.tree.leaves(params)[0].astype(float16)).astype(bfloat16))


@pytest.mark.once
@pytest.mark.parametrize(("api", "policy"), [(Linen, "mixed_bfloat16"), (NNX, "mixed_float16")])
def test_recomputed_values_have_the_dtypes_and_bits_of_the_forward_pass(api, policy):
    def model(remat):
        parts = [api.dense(), api.dense(dtype="float32")]

        def block(layer, x):
            return jnp.tanh(layer(jnp.tanh(x)))

        return mixed(api.Calls(parts, lambda a, b, x: b(remat(block)(a, x))), policy)

    plain, again = pure(model(lambda fun: fun), X), pure(model(api.remat), X, abstract=True)
    half = HALVES[policy]
    gradient, gradient_again = (jax.grad(pure_model.loss(X)) for pure_model in (plain, again))
    once, twice = products(gradient, plain.params), products(gradient_again, plain.params)
    assert products(again.apply, plain.params, X) == [half, "float32"]
    assert (twice.count(half), twice.count("float32")) == (once.count(half) + 1, once.count("float32"))
    same_bits(quick_jit(gradient_again)(plain.params), quick_jit(gradient)(plain.params))
