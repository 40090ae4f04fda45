"""JAX's transformations work around and inside a model under a policy."""

from __future__ import annotations

import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn
from jax import lax
from linen_zoo import (
    MLP,
    Linear,
    data,
    is_as_by_hand,
    model_products,
    numbers,
    of_dtype,
    products,
    quick_jit,
    same_bits,
    shapes,
    standard_promotion,
    written,
)

from jaxmp.linen import apply_policy

X = data(2, 8)
kernel = nn.initializers.lecun_normal()

INSIDE = {
    "lax.scan": lambda x, w: lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=3)[0],
    "lax.fori_loop": lambda x, w: lax.fori_loop(0, 3, lambda _, carry: jnp.tanh(carry @ w), x),
    "lax.cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.tanh(x @ w), x),
    "jax.checkpoint": lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    "jax.grad": lambda x, w: jax.grad(lambda x: jnp.sum(x @ w))(x),
}


def product_is_half_inside(inside: str) -> None:
    """Assert that products inside a transformation are half in both passes."""
    mixed = inside in ("lax.fori_loop", "jax.grad")

    class WithParam(nn.Module):
        @nn.compact
        def __call__(self, x):
            if mixed:
                nn.Dense(8)(x)
            return INSIDE[inside](x, self.param("w", kernel, (8, 8)))

    model = apply_policy(WithParam(), "mixed_float16")
    assert set(model_products(model, X)) == {"float16"}
    gradient = jax.grad(lambda variables: jnp.sum(model.apply(variables, X)))
    if inside != "lax.fori_loop":
        assert set(products(gradient, shapes(model, X))) == {"float16"}


def test_a_product_of_input_and_param_is_half_inside():
    for inside in INSIDE:
        product_is_half_inside(inside)


def maps_and_loops_give_the_bits_of_calls(inputs: str) -> None:
    """Assert that maps and loops give the same results as single calls."""
    model, batches = apply_policy(MLP(), "mixed_float16"), of_dtype(data(3, 2, 8), inputs)

    @quick_jit
    def run(variables):
        def add(total, batch):
            out = model.apply(variables, batch)
            return total + out, out

        want = jnp.stack([model.apply(variables, batches[i]) for i in range(3)])
        mapped = jax.vmap(model.apply, in_axes=(None, 0))(variables, batches)
        looped = lax.map(lambda batch: model.apply(variables, batch), batches)
        total, outs = lax.scan(add, jnp.zeros_like(want[0]), batches)
        total_of_loop = lax.fori_loop(0, 3, lambda i, total: add(total, batches[i])[0], jnp.zeros_like(total))
        return (mapped, looped, outs, total, total_of_loop), (want, want, want, *[want[0] + want[1] + want[2]] * 2)

    same_bits(*run(numbers(shapes(model, X))))


def test_a_model_works_in_vmap_map_scan_and_fori_loop():
    with standard_promotion():
        maps_and_loops_give_the_bits_of_calls("float16")


@pytest.mark.once
def test_no_tracer_is_leaked():
    model = apply_policy(nn.Sequential([nn.remat(MLP)((8,)), Linear(8), nn.jit(nn.Dense)(8)]), "mixed_float16")
    variables = shapes(model, X)
    with jax.checking_leaks():
        jax.eval_shape(jax.value_and_grad(lambda variables: model.apply(variables, X).sum()), variables)


def test_the_modules_of_a_trace_are_freed():
    modules = []

    class Recorded(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, ())
            modules.append(weakref.ref(self))
            return Linear()(x) * scale

    model = apply_policy(nn.Sequential([Recorded(), nn.Dense(8)]), "mixed_float16")
    variables = shapes(model, X)
    modules.clear()
    jax.eval_shape(model.apply, variables, X)
    gc.collect()  # Linen's lifting of methods leaves reference cycles
    assert [module() for module in modules] == [None]


def test_partitioned_params_keep_their_names_through_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            return carry @ self.param("w", nn.with_partitioning(kernel, (None, "model")), (8, 8)), None

    metadata = {nn.PARTITION_NAME: "layers"}
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3, "metadata_params": metadata}
    model = apply_policy(nn.scan(Layer, **options)(), "mixed_float16")
    assert shapes(model, X, None)["params"]["w"].names == ("layers", None, "model")
    assert model_products(model, X, None) == ["float16"]


def test_a_bound_model_keeps_its_policies_in_every_call():
    class Outer(nn.Module):
        def setup(self):
            self.inner = MLP()

        def __call__(self, x):
            return self.inner(x)

    model = apply_policy(nn.Sequential([Outer(), Linear()]), "mixed_float16", {Outer: "mixed_bfloat16"})
    bound = model.bind(numbers(shapes(model, X)))
    for _ in range(2):
        assert products(lambda x: bound(x), X) == ["bfloat16", "bfloat16", "float16"]
        assert products(lambda x: bound.layers[0](x), X) == ["float32", "float32"]


def test_float8_operations_inside_a_layer_are_the_same_as_with_dtype_set_by_hand():
    def make(**hand):
        return nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp, **hand)

    x = data(4, 16)  # few elements, so that sums are computed in the same order as in the model with dtype=
    model = apply_policy(make(), "mixed_bfloat16")
    with standard_promotion():
        assert shapes(model, x) == shapes(make(), x)
        assert set(model_products(model, x)) == set(model_products(make(dtype="bfloat16"), x))
        is_as_by_hand(written(make(), "mixed_bfloat16"), make(dtype="bfloat16"), shapes(make(), x), x)


def test_a_model_with_a_factorisation_after_a_layer_is_initialised_as_without_a_policy():
    class Factored(nn.Module):
        @nn.compact
        def __call__(self, x, scale):
            h = nn.Dense(8)(x)
            return scale * jnp.linalg.cholesky(h @ h.T + jnp.eye(8, dtype=h.dtype))

    x, bare = data(8, 8), Factored()
    model = apply_policy(bare, "mixed_float16")
    got, want = jax.jit(lambda key: [m.init(key, x, scale=2) for m in (model, bare)])(jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


SOLVERS = {
    "solve": lambda h: jnp.linalg.solve(h, h[0]),
    "cg": lambda h: jax.scipy.sparse.linalg.cg(h @ h.T + jnp.eye(8, dtype=h.dtype), h[0])[0],
}


@pytest.mark.parametrize(("solver", "policy"), in_turn(SOLVERS))
def test_a_solver_after_a_layer_runs_in_float32_also_in_its_derivative_and_in_vmap(solver, policy):
    class Solved(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, use_bias=False, name="layer")(x)
            return SOLVERS[solver](h + 4 * jnp.eye(8, dtype=h.dtype))

    model, x, weights = apply_policy(Solved(), policy), data(8, 8), data(8, 8) / 4
    half = policy.removeprefix("mixed_")

    def by_hand(weights):
        h = (x.astype(half) @ weights.astype(half) + 4 * jnp.eye(8, dtype=half)).astype(jnp.float32)
        return SOLVERS[solver](h)

    def run(weights):
        return model.apply({"params": {"layer": {"kernel": weights}}}, x)

    @quick_jit
    def together(weights):
        both = [jax.value_and_grad(lambda w, f=f: f(w).sum())(weights) for f in (run, by_hand)]
        return both, jax.vmap(run)(jnp.stack([weights, weights]))[1], run(weights)

    with standard_promotion():
        (got, expected), member, alone = together(weights)
    tolerance = 0.02 if half == "bfloat16" else 0.003
    assert np.allclose(got[0], expected[0], rtol=tolerance, atol=tolerance)
    assert np.allclose(got[1], expected[1], rtol=tolerance, atol=10 * tolerance * np.abs(expected[1]).max())
    assert np.allclose(member, alone, rtol=tolerance, atol=tolerance)
