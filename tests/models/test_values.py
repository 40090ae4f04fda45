"""Linen and NNX models under a policy: dtypes of their values, and derivative rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_apis import NNX, Linen, X, each_api, mixed, pure
from linen_zoo import HALVES, products, quick_jit, same_bits, standard_promotion

import jaxmp


@each_api
def test_params_products_and_results_have_the_dtypes_of_the_policy(api):
    policy = jaxmp.get_policy("p=bf16,c=f16,o=f32")
    with standard_promotion():
        for model in (api.dense(), api.WithParam(lambda w, x: x @ w)):
            apply, params = pure(mixed(model, policy), X, abstract=True)
            assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {policy.param_dtype}
            assert jax.eval_shape(apply, params, X).dtype == policy.output_dtype
            assert set(products(apply, params, X)) == {policy.compute_dtype.name}
            # If the output dtype is the compute dtype, the results have the dtype of the computation.
            apply, params = pure(mixed(model, policy.with_output_dtype(policy.compute_dtype)), X, abstract=True)
            assert jax.eval_shape(apply, params, X).dtype == policy.compute_dtype


@pytest.mark.once
@each_api
def test_the_code_of_a_model_sees_float32_whatever_the_dtypes_of_its_parts(api):
    inside = []

    def run(model, x):
        h, f, b = model.half(x), model.full(x), model.brain(x)
        results = [model.full(h), h + f, h * b, jnp.concatenate([h, b]), jnp.where(f > 0, h, f)]
        inside.extend(y.dtype.name for y in (h, f, b, *results))
        return results

    bare = api.named(run, half=api.dense, full=api.dense, brain=api.dense)
    got = pure(mixed(bare, "mixed_float16", {"full": "float32", "brain": "mixed_bfloat16"}), X, abstract=True)
    inside.clear()
    assert products(got.apply, got.params, X.astype("float16")) == ["float16", "float32", "bfloat16", "float32"]
    assert inside == ["float32"] * 8


@each_api
def test_a_float64_part_computes_the_same_under_a_policy(api):
    def run(model, x):
        return model.wide(x), model.other(x.astype("float32"))

    with jax.enable_x64(True), standard_promotion():
        x = jnp.linspace(0, 1, 16, dtype="float64").reshape(2, 8)
        bare = api.named(run, wide=lambda: api.dense(dtype="float64", param_dtype="float64"), other=api.dense)
        got, want = pure(mixed(bare, "p=f32,c=f16,o=f64"), x, abstract=True), pure(bare, x)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(got.params)} == {"float32", "float64"}
        assert products(got.apply, got.params, x) == ["float64", "float16"]
        same_bits(*quick_jit(lambda params: (got.apply(params, x)[0], want.apply(params, x)[0]))(want.params))


class Pair(NamedTuple):
    """A pytree type of the user."""

    x: Any
    extra: Any


@pytest.mark.once
@each_api
def test_pytrees_keep_their_structure_and_integers_bools_and_keys_pass_unchanged(api):
    traced_dtypes = []

    def fun(w, inputs):
        traced_dtypes.append(jax.tree.map(lambda leaf: getattr(leaf, "dtype", leaf), inputs))
        return Pair([inputs.x["a"] @ w, {"unchanged": inputs.extra[1]}], (None, 2, inputs.x["a"]))

    unchanged = {"ids": jnp.arange(3), "mask": jnp.array([True]), "key": jax.random.key(0), "n": 3}
    inputs = Pair({"a": X, "b": [X[0], X[1].astype(jnp.bfloat16)]}, (None, unchanged, 2.5))
    apply, params = pure(mixed(api.WithParam(fun), "p=f32,c=f16,o=bf16"), inputs)
    out = apply(params, inputs)
    float16, float32, bfloat16 = (jnp.dtype(name) for name in ("float16", "float32", "bfloat16"))
    dtypes = {"ids": jnp.dtype("int32"), "mask": jnp.dtype(bool), "key": unchanged["key"].dtype, "n": 3}
    # The code of a module without a dtype field is traced in float32.
    assert traced_dtypes[-1] == Pair({"a": float32, "b": [float32, float32]}, (None, dtypes, 2.5))
    out_dtypes = jax.tree.map(lambda leaf: getattr(leaf, "dtype", leaf), out)
    assert out_dtypes == Pair([bfloat16, {"unchanged": dtypes}], (None, 2, bfloat16))
    assert all(np.all(out.x[1]["unchanged"][name] == unchanged[name]) for name in unchanged)
    same_bits(out.x[0], (X.astype(float16) @ jax.tree.leaves(params)[0].astype(float16)).astype(bfloat16))


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
@pytest.mark.parametrize(("api", "policy"), [(NNX, "mixed_bfloat16"), (Linen, "mixed_float16")])
def test_a_custom_derivative_sees_the_policys_dtype_forward_and_backward(api, policy):
    """Trace the rule in float32, as written, and compute it under the policy."""
    records, half = [], HALVES[policy]
    layer = api.WithParam(product_with_a_derivative_of_its_own(records))
    bare = api.named(lambda model, x: model.layer(x) + model.dense(x), layer=lambda: layer, dense=api.dense)
    got, exact = (pure(model, X) for model in (mixed(bare, policy), bare))
    gradient, exact_gradient = (jax.grad(model.loss(X)) for model in (got, exact))
    assert set(products(gradient, exact.params)) == {half}
    assert {name for name, *_ in records} == {"forward", "backward"}
    is_close(quick_jit(gradient)(exact.params), quick_jit(exact_gradient)(exact.params), policy)


def is_close(got, want, policy):
    """Assert that gradients differ by no more than the rounding of operands explains."""
    got, want = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    bound = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}[policy]
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@pytest.mark.once
@each_api
@pytest.mark.parametrize(("casts_its_weight", "expected"), [(True, 4096), (False, 4800)])
def test_gradients_of_a_weight_are_summed_in_half_only_if_its_author_casts_it(api, casts_its_weight, expected):
    x = jnp.ones((16, 8))

    def total_of_products(w, x):
        h = w.astype("bfloat16") if casts_its_weight else w
        return sum(jnp.sum((x.astype(h.dtype) @ h[:, :4]).astype("float32")) for _ in range(300))

    apply, params = pure(mixed(api.WithParam(total_of_products), "mixed_bfloat16"), x)
    (gradient,) = jax.tree.leaves(quick_jit(jax.grad(lambda params: apply(params, x)))(params))
    assert gradient.dtype == jnp.float32
    # Each of 300 products adds 16. In bfloat16, 4096 + 16 is 4096.
    np.testing.assert_array_equal(gradient[:, :4], np.full((8, 4), expected))
