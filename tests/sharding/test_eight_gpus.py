"""Train steps on a mesh, compiled for eight absent H200s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives_in
from stacked_layers import BATCH, WIDTH, loss_on, make_params, shape

import jaxmp
from experiments.models.gpt2 import GPT2
from jaxmp import sharding
from jaxmp.inspect import memory
from jaxmp.inspect.compiled import compiling
from jaxmp.sharding import Sharding
from jaxmp.sharding.specs import specs_in

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.absent_gpu,
]


class TestForEightGPUs:
    """Compile train steps with a Sharding."""

    def test_a_device_sends_as_few_bytes_as_possible(self):
        mesh = jax.sharding.AbstractMesh((8,), ("fsdp",), (AxisType.Auto,))
        vocabulary, sequence, width = 2048, 64, 256
        tx = jaxmp.loss_scaling(optax.sgd(1e-3), jaxmp.NoOpLossScale())

        def placed(leaf, spec):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        model = GPT2(vocabulary, sequence, 2, 4, width, "full", loop=True)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, sequence), jnp.int32))["params"]
        model = jaxmp.linen.apply_policy(model, "mixed_bfloat16")

        def loss_fn(params, model_state, batch, rng):
            return model.apply({"params": params}, *batch, method="loss"), model_state

        specs = sharding.fsdp_specs(shapes, mesh, min_size=8192, stacked=["h_0"])
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs))
        state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), shapes)
        state = jax.tree.map(placed, state, sharding.fsdp_specs(state, mesh, min_size=8192, stacked=["h_0"]))
        batch = 2 * (placed(jax.ShapeDtypeStruct((16, sequence), "int32"), P("fsdp")),)
        collectives = collectives_in(compiling.compiled(step, (state, batch), "h200"))
        split = sum(leaf.size for leaf, spec in zip(jax.tree.leaves(shapes), specs_in(specs), strict=True) if spec)
        gathers = [row for row in collectives.rows if row.kind == "all-gather"]
        assert {row.dtype for row in gathers} == {"bfloat16"}
        assert collectives.wire <= 1.02 * 7.00 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
        reduced = [row for row in collectives.rows if row.kind == "reduce-scatter"]
        assert {row.dtype for row in reduced} == {"float32"}
        # Positions are summed over the batch, too.
        assert 4 * split <= sum(row.bytes for row in reduced) <= 4 * (split + sequence * width)

    def test_over_an_axis_that_splits_products_go_sums_of_activations_alone(self):
        """Split one layer by its columns and the next one by its rows.

        Then nothing is gathered over the axis ``tensor``.
        """
        mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
        width = 128
        rules = {"*/up": P("fsdp", "tensor"), "*/down": P("tensor", "fsdp")}
        shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
        params = 2 * [{name: jax.ShapeDtypeStruct(size, "float32") for name, size in shapes.items()}]
        tx = jaxmp.loss_scaling(optax.sgd(1e-3), jaxmp.NoOpLossScale())

        def loss_fn(params, model_state, batch, rng):
            for layer in params:
                batch = batch + jnp.tanh(batch @ layer["up"]) @ layer["down"]
            return jnp.mean(batch**2), model_state

        def placed(leaf, spec):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
        specs = sharding.fsdp_specs(state, mesh, rules=rules)
        state = jax.tree.map(placed, state, specs)
        batch = placed(jax.ShapeDtypeStruct((256, width), "float32"), P("fsdp"))
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs.params), policy="mixed_bfloat16")
        collectives = collectives_in(compiling.compiled(step, (state, batch), "h200"))
        large = [row for row in collectives.rows if row.bytes > 1000]
        # In a ring of 4, each device sends 3/4 of what it gathers twice in 16 bits, and reduces once in 32 bits. The
        # axis ``tensor`` halves each weight.
        ideal = 8 * 3 / 4 * sum(leaf.size for leaf in jax.tree.leaves(params)) / 2
        assert {row.kind for row in large if "tensor" in row.axis} == {"all-reduce"}
        assert sum(row.wire for row in large if row.axis == "fsdp") <= 1.01 * ideal


@pytest.fixture(scope="module")
def step_and_shapes():
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    tx = jaxmp.loss_scaling(optax.adamw(1e-3), jaxmp.DynamicLossScale())
    shapes = jax.eval_shape(lambda: jaxmp.TrainState.create(params=make_params(), tx=tx, rng=0))
    specs = sharding.fsdp_specs(shapes, mesh, min_size=1024, stacked=["**"])

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    loss_fn = jax.checkpoint(loss_on(specs.params), policy=jax.checkpoint_policies.nothing_saveable)
    batch = placed(shape(8 * BATCH, WIDTH), P("fsdp"))
    return jaxmp.make_train_step(loss_fn), (jax.tree.map(placed, shapes, specs), batch)


@pytest.fixture(scope="module")
def plan(step_and_shapes):
    step, args = step_and_shapes
    return memory(step, device="h200", topology="1x2x4")(*args)


class TestGatherForEightGPUs:
    """Compile train steps that call ``gather``; half collectives stay half on a GPU."""

    def test_weights_cross_the_wire_in_half_and_gradients_in_float32(self, plan, step_and_shapes):
        _, (state, _) = step_and_shapes
        weights = sum(leaf.size for name, leaf in state.params.items() if name != "bias")
        moved = {(row.kind, row.dtype): 0.0 for row in plan.collectives.rows}
        for row in plan.collectives.rows:
            moved[row.kind, row.dtype] += row.wire
            assert row.axis == "fsdp"
        assert set(moved) == {("all-gather", "bfloat16"), ("reduce-scatter", "float32"), ("all-reduce", "float32")}
        assert moved["reduce-scatter", "float32"] == 4 * weights * 7 / 8
        assert moved["all-gather", "bfloat16"] <= 2 * 2 * weights * 7 / 8
