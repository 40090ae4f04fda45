"""Loops of Linen and NNX models under a policy: the dtypes of their carries."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_apis import NNX, SEQUENCE, Linen, each_api, mixed, pure
from flax import nnx
from linen_zoo import HALVES, data, products, quick_jit, same_bits, standard_promotion

import jaxmp
from jaxmp.program.walk import equations

pytestmark = pytest.mark.once


def step_of_a_cell(carry, w, u, x):
    carry = jnp.tanh(carry @ w + x @ u)
    return carry, carry * 2


class LinenCell(nn.Module):
    """A recurrent cell without a ``dtype``."""

    @nn.compact
    def __call__(self, carry: Any, x: jax.Array) -> Any:
        w, u = (self.param(name, nn.initializers.lecun_normal(), (8, 8)) for name in "wu")
        return step_of_a_cell(carry, w, u, x)


class NNXCell(nnx.Module):
    """:class:`LinenCell` in NNX."""

    def __init__(self):
        self.w, self.u = (nnx.Param(data(8, 8, seed=seed)) for seed in range(2))

    def __call__(self, carry: Any, x: jax.Array) -> Any:
        return step_of_a_cell(carry, self.w[...], self.u[...], x)


class LinenLoop(nn.Module):
    """An RNN of a Linen cell, or a scan of LinenCell, with the carry as argument."""

    cell: str

    @nn.compact
    def __call__(self, carry: Any, x: jax.Array) -> Any:
        if self.cell != "own":
            return nn.RNN(getattr(nn, self.cell)(8), return_carry=True)(x, initial_carry=carry)
        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(LinenCell, in_axes=1, out_axes=1, **options)()(carry, x)


class NNXLoop(nnx.Module):
    """A scan of NNXCell with the carry as argument."""

    def __init__(self):
        self.cell = NNXCell()

    def __call__(self, carry: Any, x: jax.Array) -> Any:
        scan = nnx.scan(lambda cell, carry, x: cell(carry, x), in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
        return scan(self.cell, carry, x)


# Pairs of a policy and the dtype of a carry. Each half dtype and float32 occurs as the compute and the carry dtype.
CARRIES = [
    ("mixed_float16", "float32"),
    ("mixed_float16", "bfloat16"),
    ("mixed_bfloat16", "bfloat16"),
    ("float32", "float16"),
]


@pytest.mark.parametrize(("api", "cell"), [(NNX, "own"), (Linen, "LSTMCell")])
def test_a_loop_takes_a_carry_of_any_dtype_and_products_have_the_dtype_of_the_policy(api, cell):
    model = LinenLoop(cell) if api is Linen else NNXLoop()
    # Library cells: the usual float32 carry, and a half carry beside float32 products.
    for policy, dtype in CARRIES if cell == "own" else CARRIES[::3]:
        state = jnp.zeros((2, 8), dtype)
        carry = (state, state) if "LSTM" in cell else state
        with standard_promotion():
            pure_model = pure(mixed(model, policy), carry, SEQUENCE, abstract=True)
            jaxpr = jax.make_jaxpr(pure_model.apply)(pure_model.params, carry, SEQUENCE)
            (loop,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
            carries = [var.aval.dtype.name for var in loop.outvars if var.aval.shape == state.shape]
            # A carry that reaches only products may also be in the compute dtype.
            half = jaxmp.get_policy(policy).compute_dtype.name
            assert set(carries) <= {"float32", half}
            assert jax.eval_shape(pure_model.apply, pure_model.params, carry, SEQUENCE)[1].dtype == jnp.float32
            gradient = jax.grad(pure_model.loss(carry, SEQUENCE))
            assert set(products(gradient, pure_model.params)) == {half}


@pytest.mark.parametrize(("api", "policy"), [(Linen, "mixed_bfloat16"), (NNX, "mixed_float16")])
def test_a_loop_gives_the_bits_of_steps_with_casts_by_hand(api, policy):
    half, carry = HALVES[policy], jnp.ones((2, 8))
    got = pure(mixed(LinenLoop("own") if api is Linen else NNXLoop(), policy), carry, SEQUENCE)
    u, w = jax.tree.leaves(got.params)

    def by_hand(carry, x):
        new, y = step_of_a_cell(*(value.astype(half) for value in (carry, w, u, x)))
        return new.astype(carry.dtype), y

    end, ys = quick_jit(lambda carry, xs: jax.lax.scan(by_hand, carry, xs))(carry, jnp.swapaxes(SEQUENCE, 0, 1))
    same_bits(quick_jit(got.apply)(got.params, carry, SEQUENCE), (end, jnp.swapaxes(ys, 0, 1).astype(jnp.float32)))


@each_api
def test_in_a_loop_a_float32_head_is_not_rounded_and_the_carry_keeps_its_dtype(api):
    def run(model, x):
        y = model.layer(x)
        first = model.head(y)  # Linen creates no params inside of a loop of JAX's own
        return first, jax.lax.scan(lambda h, row: (model.layer(h), model.head(row)), x, y)[1]

    model = mixed(api.named(run, layer=api.dense, head=api.dense), "mixed_bfloat16", {"head": "float32"})
    x = SEQUENCE[0]
    apply, params = pure(model, x)
    (layer_bias, layer), (head_bias, head) = (jax.tree.leaves(params[name]) for name in ("layer", "head"))
    y = (x.astype("bfloat16") @ layer.astype("bfloat16")).astype("float32") + layer_bias
    want = np.asarray(y, np.float64) @ np.asarray(head, np.float64) + np.asarray(head_bias)
    for got in quick_jit(apply)(params, x):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
