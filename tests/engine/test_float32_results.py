"""The level float32_result: products read half operands and return float32."""

from __future__ import annotations

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from jaxmp.program.reading import read_program

WIDTH, EXPERTS = 16, 4


def normal(shape, seed=0):
    return concrete.array(np.random.default_rng(seed).normal(size=shape), "float32")


X = normal((8, WIDTH))
PARAMS = {"hidden": normal((WIDTH, WIDTH), seed=1), "router": normal((WIDTH, EXPERTS), seed=2)}


def route(params, x):
    """Return the shares of four experts."""
    hidden = jax.nn.relu(x @ params["hidden"])
    with jaxmp.precision("float32_result"):
        logits = hidden @ params["router"]
    return jax.nn.softmax(2 * logits)


def loss_fn(params, x):
    return (route(params, x) ** 2).sum()


def by_hand(half, params, x):
    """Return the same shares, with casts written by hand."""
    hidden = jax.nn.relu(x.astype(half) @ params["hidden"].astype(half))
    return jax.nn.softmax(2 * half_product(hidden, params["router"].astype(half)))


@jax.custom_vjp
def half_product(left, right):
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def backward(operands, cotangent):
    left, right = operands
    cotangent = cotangent.astype(left.dtype)
    return cotangent @ right.T, left.T @ cotangent


half_product.defvjp(lambda left, right: (half_product(left, right), (left, right)), backward)


def products_of(fun, *args):
    """Return the dtypes of each product: of its operands, and of its result."""
    program = read_program(jax.make_jaxpr(fun)(*args).jaxpr)
    products = [equation for equation in program.equations.values() if equation.name == "dot_general"]
    return [
        (*(atom.aval.dtype.name for atom in product.eqn.invars), product.results[0].aval.dtype.name)
        for product in products
    ]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_values_and_gradients_are_those_of_casts_by_hand(half):
    cast = jaxmp.autocast(route, f"mixed_{half}")
    np.testing.assert_array_equal(jax.jit(cast)(PARAMS, X), by_hand(half, PARAMS, X))
    gradients = jax.jit(jax.grad(lambda params: (cast(params, X) ** 2).sum()))(PARAMS)
    expected = jax.grad(lambda params: (by_hand(half, params, X) ** 2).sum())(PARAMS)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=2**-7, atol=1e-6)


def test_only_the_result_is_float32_and_the_backward_pass_is_half():
    cast = jaxmp.autocast(loss_fn, "mixed_bfloat16")
    half = ("bfloat16",) * 3
    assert products_of(cast, PARAMS, X) == [half, ("bfloat16", "bfloat16", "float32")]
    backward = products_of(jax.grad(cast), PARAMS, X)[2:]
    assert backward == [half] * 3
    whole = products_of(jaxmp.autocast(jax.grad(loss_fn), "mixed_bfloat16"), PARAMS, X)
    assert all(product[:2] == half[:2] for product in whole)
    # the marked product and its two derivatives, which are in the same region
    assert [product[2] for product in whole].count("float32") == 3


def test_readers_of_the_result_are_float32_until_the_next_product():
    def fun(params, x):
        with jaxmp.precision("float32_result"):
            logits = jnp.maximum(x @ params["hidden"], x)
        return jnp.tanh(logits * 0.5 + 1) @ params["router"]

    rows = jaxmp.cast_plan(fun, "mixed_bfloat16")(PARAMS, X).rows
    dtypes = {row.primitive: (row.operands, row.result) for row in rows}
    assert dtypes["max"] == (("float32", "float32"), "float32")  # only products read half operands
    assert dtypes["mul"][1] == dtypes["add"][1] == dtypes["tanh"][1] == "float32"
    assert rows[0].why == "region jaxmp.precision('float32_result')"
    assert (rows[0].operands, rows[0].result) == (("bfloat16", "bfloat16"), "float32")
    assert (rows[-1].operands, rows[-1].result) == (("bfloat16", "bfloat16"), "bfloat16")


@pytest.mark.parametrize(
    "overrides",
    [{"router": "float32_result"}, {"router:dot_general": "float32_result"}, {"**/route*": "Float32_Result"}],
)
def test_an_override_of_a_scope_is_the_same_as_a_region(overrides):
    def scoped(params, x):
        hidden = jax.nn.relu(x @ params["hidden"])
        with jax.named_scope("router"):
            logits = hidden @ params["router"]
        return jax.nn.softmax(2 * logits)

    cast = jaxmp.autocast(scoped, "mixed_bfloat16", overrides)
    np.testing.assert_array_equal(jax.jit(cast)(PARAMS, X), jax.jit(jaxmp.autocast(route, "mixed_bfloat16"))(PARAMS, X))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(EXPERTS, use_bias=False, name="router")(nn.relu(nn.Dense(WIDTH, name="hidden")(x)))


class NNX(nnx.Module):
    def __init__(self):
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.router(nnx.relu(self.hidden(x)))


OF_ROUTER = {"**/router:dot_general": "float32_result"}


def test_a_model_routes_in_float32():
    model = jaxmp.linen.apply_policy(Linen(), "mixed_bfloat16", OF_ROUTER)
    variables = model.init(jax.random.key(0), X)
    wide = ("bfloat16", "bfloat16", "float32")
    assert products_of(model.apply, variables, X)[1] == wide
    other = jaxmp.nnx.apply_policy(NNX(), "mixed_bfloat16", OF_ROUTER)
    graphdef, state = nnx.split(other)
    assert products_of(lambda state, x: nnx.merge(graphdef, state)(x), state, X)[1] == wide


def test_transformations_compute_the_same():
    cast = jaxmp.autocast(loss_fn, "mixed_bfloat16")
    expected = jax.jit(jax.grad(cast))(PARAMS, X)["router"]
    remat = jax.jit(jax.grad(jax.checkpoint(cast)))(PARAMS, X)["router"]
    np.testing.assert_array_equal(remat, expected)

    def scanned(params, x):
        rows = x.reshape(2, 4, WIDTH)
        return jax.lax.scan(lambda total, row: (total + loss_fn(params, row), None), jnp.zeros(()), rows)[0]

    looped = jax.jit(jax.grad(jaxmp.autocast(scanned, "mixed_bfloat16")))(PARAMS, X)["router"]
    np.testing.assert_allclose(looped, expected, rtol=0.02, atol=1e-3)
    single = jax.jit(jax.vmap(cast, in_axes=(None, 0)))(PARAMS, X[:, None])
    np.testing.assert_allclose(single.sum(), cast(PARAMS, X), rtol=1e-5)
    tangent = jax.jvp(lambda params: cast(params, X), [PARAMS], [PARAMS])[1]
    inner = sum((jax.grad(cast)(PARAMS, X)[name] * PARAMS[name]).sum() for name in PARAMS)
    np.testing.assert_allclose(tangent, inner, rtol=0.02)


def test_convolutions_and_batched_products_return_float32():
    def conv(kernel, x):
        with jaxmp.precision("float32_result"):
            return jax.lax.conv(x, kernel, (1, 1), "SAME")

    x, kernel = normal((2, 3, 8, 8)), normal((4, 3, 3, 3))
    cast = jaxmp.autocast(conv, "mixed_bfloat16")
    half = jax.lax.conv(
        x.astype("bfloat16"), kernel.astype("bfloat16"), (1, 1), "SAME", preferred_element_type="float32"
    )
    np.testing.assert_array_equal(jax.jit(cast)(kernel, x), half)
    assert np.isfinite(jax.grad(lambda kernel: cast(kernel, x).sum())(kernel)).all()

    def scores(q, k):
        with jaxmp.precision("float32_result"):
            return jnp.einsum("bqd,bkd->bqk", q, k)

    q = normal((2, 8, WIDTH))
    expected = jnp.einsum("bqd,bkd->bqk", *[q.astype("float16")] * 2, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(jaxmp.autocast(scores, "mixed_float16")(q, q), expected)


def test_errors_name_the_line_to_write():
    for key in ("primitive:exp", "head:exp", "primitive:dot_general", "class:half", "class:*"):
        with pytest.raises(ValueError, match=r"'float32_result' is a level of products at a path, got '"):
            jaxmp.autocast(loss_fn, "mixed_bfloat16", {key: "float32_result"})
    with pytest.raises(ValueError, match="'float32_result' in overrides uses the compute dtype of the policy"):
        jaxmp.autocast(loss_fn, "float32", {"router": "float32_result"})
    with pytest.raises(ValueError, match=r"got it for the module '\*\*/router'; write '\*\*/router:dot_general'"):
        jaxmp.linen.apply_policy(Linen(), "mixed_bfloat16", {"**/router": "float32_result"})


def test_outside_of_autocast_and_in_float32_the_region_changes_nothing():
    assert products_of(route, PARAMS, X) == [("float32",) * 3] * 2
    assert products_of(jaxmp.autocast(route, "float32"), PARAMS, X) == [("float32",) * 3] * 2
