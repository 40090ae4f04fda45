"""GPT-2 with stacked, gathered blocks on four devices equals the Linen model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from experiments.benchmarks.models import stacked
from experiments.models.gpt2 import GPT2, sized

MODEL = GPT2(vocabulary=96, sequence=32, layers=2, heads=2, width=64)
TOKENS = np.random.default_rng(0).integers(0, 96, (8, 33))
BATCH = {"inputs": TOKENS[:, :-1].astype(np.int32), "labels": TOKENS[:, 1:].astype(np.int32)}


@pytest.fixture(scope="module")
def reference():
    """Return the params of Linen's model, and its loss and stacked gradients."""
    params = jax.jit(MODEL.init)(jax.random.key(0), BATCH["inputs"][:1])["params"]
    fun = jax.value_and_grad(lambda params: MODEL.apply({"params": params}, *BATCH.values(), method="loss"))
    loss, gradients = jax.jit(fun)(params)
    return stacked.stack(params), loss, stacked.stack(gradients)


@pytest.mark.slow("compiles two models")
def test_loss_and_gradients_are_those_of_the_module(reference):
    axes = {"data": 2, "fsdp": 2}
    params, loss, gradients = reference
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    specs = jaxmp.sharding.fsdp_specs(params, mesh, min_size=4096, stacked=["h"])
    assert specs["h"]["mlp"]["c_fc"]["kernel"] == P(None, None, "fsdp") and specs["wte"]["embedding"] == P("fsdp")
    loss_fn = stacked.loss_fn_of(MODEL, specs, tuple(axes), "float32")
    split = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        batch = jax.device_put(BATCH, P(tuple(axes)))
        loss_and_gradients = jax.jit(jax.value_and_grad(lambda params: loss_fn(params, None, batch)[0]))
        sharded_loss, sharded_gradients = loss_and_gradients(split)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    for path, leaf in jax.tree.leaves_with_path(sharded_gradients):
        expected = np.asarray(dict(jax.tree.leaves_with_path(gradients))[path])
        np.testing.assert_allclose(leaf, expected, atol=2e-5 * np.abs(expected).max(), err_msg=str(path))


def test_sizes_are_those_that_were_published():
    shapes = jax.tree.leaves(jax.eval_shape(lambda: stacked.make_params(sized("124M"))))
    # The published count, plus the 47 rows that pad the vocabulary to a multiple of 64.
    assert sum(leaf.size for leaf in shapes) == 124_439_808 + 47 * 768
    assert {leaf.dtype for leaf in shapes} == {jnp.dtype("float32")}
