"""Gradients of shared params are summed over devices in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gradient_zoo import drawn
from jax.sharding import Mesh, PartitionSpec

import jaxmp
from jaxmp.program.walk import equations

pytestmark = pytest.mark.usefixtures("standard_promotion")

IDS = np.random.default_rng(0).integers(0, 5, (16, 3))
Apply = Callable[[Any, Any], Any]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None


class InLinen(nn.Module):
    """A table, a scan over rematerialised layers, and a head."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(4)(layers()(nn.Embed(5, 8)(ids), None)[0])


class InNNX(nnx.Module):
    """The same model with one layer and without a norm.

    A norm of NNX would round the gradients of its params.
    """

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(5, 8, rngs=rngs)
        self.layer, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table(ids)
        return self.head(x + nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.layer, x))


def linen_model(policy: str) -> tuple[Apply, Any]:
    model = jaxmp.linen.apply_policy(InLinen(), policy)
    return model.apply, drawn(jax.eval_shape(model.init, jax.random.key(0), IDS))


def nnx_model(policy: str) -> tuple[Apply, Any]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: jaxmp.nnx.apply_policy(InNNX(), policy)))
    return lambda params, ids: nnx.merge(graphdef, params)(ids), drawn(nnx.as_pure(params))


@pytest.mark.parametrize(("make", "policy"), [(linen_model, "mixed_bfloat16"), (nnx_model, "mixed_float16")])
def test_gradients_of_shared_params_are_summed_over_devices_in_float32(make, policy):
    apply, params = make(policy)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(apply(params, ids) * (1 + ids[..., None] / 7))

    mesh = Mesh(jax.devices(), ("d",))
    shared, split = PartitionSpec(), PartitionSpec("d")
    gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(shared, split), out_specs=shared)

    program = jax.make_jaxpr(gradient)(params, IDS)
    sums = [eqn.invars[0].aval.dtype for eqn in equations(program) if eqn.primitive.name.startswith("psum")]
    assert len(sums) == len(jax.tree.leaves(params)) and set(sums) == {np.dtype("float32")}

    of_one = jax.jit(jax.grad(loss))
    on_one_device = [of_one(params, ids) for ids in np.split(IDS, mesh.size)]
    want = jax.tree.map(lambda *parts: sum(np.asarray(part, np.float64) for part in parts), *on_one_device)
    got = jax.jit(gradient)(params, IDS)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * abs(w).max()), got, want)
