"""Train steps on a mesh compute the same numbers as on one device."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linen_zoo import numbers, zeros
from mesh_steps import (
    BATCH,
    MODEL,
    VOCABULARY,
    WIDTH,
    after_five,
    differences,
    linen_loss,
    linen_params,
    pair,
    specs_of,
    stacked_loss,
    stacked_params,
    tokens,
    tx_of,
    untyped,
)
from meshes import collectives_in, mesh_of
from nnx_zoo import module_with_numbers
from recompiles import compiled_once

import jaxmp
from jaxmp import sharding
from jaxmp.inspect import audit, memory, numerics
from jaxmp.sharding import Sharding
from jaxmp.sharding.specs import specs_in

pytestmark = pytest.mark.usefixtures("standard_promotion")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SAME_FOR_EXPLICIT = pytest.mark.slow("the same for another type of axes")


@functools.cache
def stacked_params_on_one_device():
    """Return the stacked params after five steps of two microbatches."""
    state = jaxmp.TrainState.create(params=stacked_params(), tx=tx_of())
    step = jaxmp.make_train_step(stacked_loss, accumulate_steps=2, donate=False)
    return five_steps(step, state, tokens()).params


def five_steps(step, state, batch):
    for _ in range(5):
        state, metrics = step(state, batch)
        assert not metrics["skipped"]
    assert compiled_once(step)
    return state


def stacked_state_on(mesh, specs, remat=None, **options):
    """Return the state of the stacked params after the same five steps on a mesh."""
    on_mesh = Sharding(mesh, specs, **options)
    state = jaxmp.TrainState.create_sharded(stacked_params, tx_of(), on_mesh)
    step = jaxmp.make_train_step(stacked_loss, sharding=on_mesh, accumulate_steps=2, remat=remat, donate=False)
    return five_steps(step, state, tokens())


def moved_nearly_alike(states, start):
    moved = [jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, start) for state in states]
    for a, b in zip(*map(jax.tree.leaves, moved), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)


class TestNumbers:
    """Compare the params with those of a train step on one device."""

    def require_one_devices(self, mesh, specs, model=MODEL, more=(), **options):
        """Train on one device and on the mesh; compare params and check their specs."""
        steps, states = pair(lambda: linen_params(model), untyped(linen_loss(model)), mesh, specs, more, **options)
        single_state, sharded_state = after_five(steps, states, tokens())
        assert differences(single_state.params, sharded_state.params) <= 2e-6
        for leaf, spec in zip(jax.tree.leaves(sharded_state.params), specs_in(specs), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)

    @pytest.mark.slow("compiles two steps of a model; layers in a scan are a small one")
    def test_a_linen_model_has_the_numbers_of_one_device(self):
        mesh, model = mesh_of(EXPLICIT), MODEL.clone(layers=2)
        specs, more = specs_of(lambda: linen_params(model), mesh), {"accumulate_steps": 2, "remat": "layers"}
        self.require_one_devices(mesh, specs, model, more=more)

    @pytest.mark.slow("compiles two steps of a model; a dense layer is a small one")
    def test_products_split_over_an_axis_that_splits_no_batch_match_one_device(self):
        mesh = mesh_of(data=1, fsdp=2, tensor=2)
        rules = {
            "**/c_attn/kernel": P("fsdp", "tensor"),
            "**/c_attn/bias": P("tensor"),
            "**/c_fc/kernel": P("fsdp", "tensor"),
            "**/c_proj/kernel": P("tensor", "fsdp"),
            "wte": P("tensor", "fsdp"),
        }
        specs = specs_of(linen_params, mesh, rules=rules)
        self.require_one_devices(mesh, specs, more={"accumulate_steps": 2}, reduce="once")

    @pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=SAME_FOR_EXPLICIT)])
    def test_a_sharding_without_specs_is_data_parallelism_with_the_numbers_of_one_device(self, kind):
        mesh = mesh_of(kind, data=4)
        sharded_state = stacked_state_on(mesh, None)
        assert differences(stacked_params_on_one_device(), sharded_state.params) <= 2e-6
        for leaf in jax.tree.leaves(sharded_state):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P()), leaf.ndim)

    def test_stacked_layers_match_one_device(self):
        mesh = mesh_of(EXPLICIT, data=2, fsdp=2)
        specs = specs_of(stacked_params, mesh, stacked=["layers", "bias"])
        assert specs["layers"]["up"] == P(None, None, "fsdp") and specs["bias"] == P()
        sharded_state = stacked_state_on(mesh, specs, remat="layers", reduce="once")
        assert differences(stacked_params_on_one_device(), sharded_state.params) <= 2e-6

    @pytest.mark.once
    @pytest.mark.parametrize(("kind", "up"), [(EXPLICIT, P(("fsdp", "tensor"))), (AUTO, P(None, "tensor"))])
    def test_a_dense_layer_split_over_a_third_axis_matches_one_device(self, kind, up):
        def make_params():
            rng = np.random.default_rng(0)
            shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
            return {name: jnp.asarray(rng.normal(size=size) / 6, jnp.float32) for name, size in shapes.items()}

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] * factors) ** 2), model_state

        factors = np.linspace(1, 2, WIDTH, dtype=np.float32)  # a constant is not split over any axis
        mesh = mesh_of(kind, data=2, fsdp=1, tensor=2) if kind is EXPLICIT else mesh_of(kind, fsdp=2, tensor=2)
        steps, states = pair(make_params, loss_fn, mesh, {"up": up, "down": P("tensor", "fsdp")})
        batch = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
        single_state, sharded_state = after_five(steps, states, batch)
        assert differences(single_state.params, sharded_state.params) <= 2e-6

    @pytest.mark.once
    @pytest.mark.parametrize(
        ("kind", "reduce"),
        [(AUTO, "once"), pytest.param(EXPLICIT, "each", marks=SAME_FOR_EXPLICIT)],
    )
    def test_a_weight_of_many_uses_matches_one_device(self, kind, reduce):
        """Use a weight in nested calls, loops, a remat, a vmap and a branch."""
        jitted, again = jax.jit(lambda x, w: jnp.tanh(x @ w)), jax.checkpoint(lambda x, w: jnp.sin(x @ w))

        def loss_fn(params, model_state, x, rng):
            w = params["w"]
            x = jitted(jax.jit(lambda x, w: again(jitted(x, w), w))(x, w), w.T)
            x, _ = jax.lax.scan(lambda x, _: (jitted(again(x, w), w), None), x, None, length=2)
            x, _ = jax.lax.scan(lambda x, w: (jitted(jitted(x, w), w), None), x, jnp.stack([w, w]))
            x = jax.vmap(lambda x: jitted(again(x, w), w))(x)
            x = jax.lax.cond(jnp.mean(x) > 0, lambda x, w: again(jitted(x, w), w), lambda x, w: jitted(x, w), x, w)
            return jnp.mean((x @ w) ** 2), model_state

        def make_params():
            return {"w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)) / 4, jnp.float32)}

        batch = np.random.default_rng(1).normal(size=(BATCH, 16)).astype(np.float32)
        mesh, twice = mesh_of(kind), {"accumulate_steps": 2}
        steps, states = pair(make_params, loss_fn, mesh, {"w": P("fsdp")}, twice, reduce=reduce)
        single_state, sharded_state = after_five(steps, states, batch)
        assert differences(single_state.params, sharded_state.params) <= 2e-6

    @pytest.mark.once
    def test_convolutions_and_batch_statistics_match_one_device(self):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Conv(32, (3, 3), use_bias=False)(x)
                x = nn.BatchNorm(use_running_average=False)(x)
                return nn.Dense(8)(nn.relu(x).reshape(len(x), -1))

        def loss_fn(params, model_state, batch, rng):
            logits, new = Net().apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
            return jnp.mean(logits**2), new

        images = np.random.default_rng(0).normal(size=(BATCH, 4, 4, 3)).astype(np.float32)
        shapes = jax.eval_shape(Net().init, jax.random.key(0), images)
        params, model_state = numbers(shapes["params"]), {"batch_stats": zeros(shapes["batch_stats"])}
        mesh = mesh_of()
        specs = specs_of(lambda: params, mesh)
        states = [jaxmp.TrainState.create(params=params, tx=tx_of(), model_state=model_state) for _ in range(2)]
        steps = [
            jaxmp.make_train_step(loss_fn, donate=False, **more) for more in ({}, {"sharding": Sharding(mesh, specs)})
        ]
        single_state, sharded_state = after_five(steps, states, images)
        expected, actual = ((state.params, state.model_state) for state in (single_state, sharded_state))
        assert differences(expected, actual) <= 2e-6

    def test_an_nnx_model_has_the_numbers_of_one_device(self):
        mesh = mesh_of()

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
                self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
                self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

            def __call__(self, ids):
                return self.head(self.norm(self.embed(ids)))

        def model_and_optimizer():
            model = module_with_numbers(lambda: Net(nnx.Rngs(0)))
            return model, jaxmp.nnx.Optimizer(model, optax.sgd(0.5), loss_scale=jaxmp.DynamicLossScale())

        def loss_fn(model, batch):
            return jnp.mean(jaxmp.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:]))

        specs = sharding.fsdp_specs(nnx.eval_shape(lambda: nnx.state(Net(nnx.Rngs(0)), nnx.Param)), mesh, min_size=512)
        trained_params = []
        for options in ({}, {"sharding": Sharding(mesh, specs)}):
            (model, optimizer), step = model_and_optimizer(), jaxmp.nnx.make_train_step(loss_fn, **options)
            for _ in range(5):
                step(model, optimizer, tokens())
            trained_params.append(nnx.as_pure(nnx.state(model, nnx.Param)))
        assert differences(*trained_params) <= 2e-6
        split = [leaf for leaf in jax.tree.leaves(trained_params[1]) if not leaf.sharding.is_fully_replicated]
        assert len(split) == 2

    @pytest.mark.once
    def test_a_sum_of_a_weight_and_a_low_rank_update_is_a_weight(self):
        """Add a low-rank update to a weight.

        The gradient of the update is the gradient of a weight, so it is summed over all rows first.
        """

        def make_params():
            rng = np.random.default_rng(0)
            shapes = {"w": (WIDTH, WIDTH), "a": (WIDTH, 32), "b": (32, WIDTH)}
            return {name: jnp.asarray(rng.normal(size=size) / 6, jnp.float32) for name, size in shapes.items()}

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((batch @ (params["w"] + 0.5 * (params["a"] @ params["b"]))) ** 2), model_state

        mesh = mesh_of()
        steps, states = pair(make_params, loss_fn, mesh, specs_of(make_params, mesh))
        batch = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
        single_state, sharded_state = after_five(steps, states, batch)
        assert differences(single_state.params, sharded_state.params) <= 2e-6

    @pytest.mark.parametrize("how", ["float64", "a derivative and an optimizer"])
    def test_explicit_axes_have_the_numbers_of_one_device(self, how):
        """Use float64, or a custom derivative and an optimizer with products.

        JAX types the loss and the custom derivative, but neither the step's derivatives nor the optimizer.
        """

        @jax.custom_vjp
        def product(x, w):
            return x @ w

        def backward(operands, ct):
            x, w = operands
            replicated = P() if jax.sharding.get_abstract_mesh().explicit_axes else None
            return ct @ w.T, jnp.matmul(x.T, ct, out_sharding=replicated)

        product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

        def loss_fn(params, model_state, batch, rng):
            x = batch @ params["up"] if how == "float64" else product(batch, params["up"])
            return jnp.mean((jnp.tanh(x) @ params["down"]) ** 2).astype("float32"), model_state

        sizes, specs = {"fsdp": 4}, {"up": P("fsdp"), "down": P("fsdp")}
        if how == "float64":
            sizes, specs = {"fsdp": 2, "tensor": 2}, {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
        tx = optax.contrib.muon(0.1) if how != "float64" else optax.sgd(0.1)
        mesh = mesh_of(AxisType.Explicit, **sizes)
        with jax.enable_x64(how == "float64"):
            rng = np.random.default_rng(0)
            dtype = how if how == "float64" else "float32"
            shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
            params = {name: rng.normal(size=size).astype(dtype) / 6 for name, size in shapes.items()}
            batch = rng.normal(size=(BATCH, WIDTH)).astype(dtype)
            single_state = jaxmp.TrainState.create(params=jax.tree.map(jnp.array, params), tx=tx)
            sharded_state = jaxmp.TrainState.create_sharded(lambda: params, tx, Sharding(mesh, specs))
            single_state, _ = jaxmp.make_train_step(loss_fn)(single_state, batch)
            sharded_state, _ = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs))(sharded_state, batch)
        assert differences(single_state.params, sharded_state.params) <= (1e-14 if how == "float64" else 2e-6)
        assert all(sharded_state.params[name].sharding == NamedSharding(mesh, spec) for name, spec in specs.items())

    @pytest.mark.parametrize(
        ("dtype", "spec", "microbatches", "reduce"),
        [
            ("bfloat16", P("fsdp"), 2, "once"),
            ("bfloat16", P(None, "fsdp"), 2, "each"),
            ("float32", P(), 1, "each"),
        ],
    )
    def test_lookups_and_sums_in_jaxs_spelling_for_explicit_axes_are_exact(self, dtype, spec, microbatches, reduce):
        """Use integers, which bfloat16 does not sum exactly above 256."""

        def loss_fn(params, model_state, batch, rng):
            table, w = params["table"].astype(dtype), params["w"].astype(dtype)
            rows = table.at[batch["ids"]].get(out_sharding=P("fsdp"))
            rows = jax.sharding.reshard(rows, P("fsdp", None, None))
            h = (rows @ w).astype("float32")
            loss = jnp.einsum("bse,bse->", h, batch["times"], out_sharding=P())
            return loss, model_state, {"largest": jnp.max(params["table"])}

        def exact(params, ids, times):
            return jnp.sum((params["table"][ids] @ params["w"]) * times)

        rng, mesh = np.random.default_rng(0), mesh_of(AxisType.Explicit)
        params = {"table": np.ones((8, 4), np.float32), "w": np.ones((4, 4), np.float32)}
        batch = {"ids": rng.integers(0, 8, (512, 2)), "times": rng.integers(0, 3, (512, 2, 4)).astype(np.float32)}
        loss, gradient = jax.jit(jax.value_and_grad(exact))(params, **batch)
        on_mesh = Sharding(mesh, {"table": spec, "w": P("fsdp")}, reduce=reduce)
        scale = microbatches
        state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(float(scale)), on_mesh)
        step = jaxmp.make_train_step(loss_fn, sharding=on_mesh, donate=False, accumulate_steps=microbatches)
        new, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss / scale, rtol=1e-6)
        evaluation = jaxmp.make_eval_step(loss_fn)(state, batch)
        np.testing.assert_allclose(evaluation["loss"], loss, rtol=1e-6)
        assert evaluation["largest"] == metrics["largest"] == 1
        for name, leaf in new.params.items():
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, on_mesh.specs[name]), leaf.ndim)
            np.testing.assert_array_equal(params[name] - np.asarray(leaf), gradient[name], err_msg=name)
            assert np.max(gradient[name]) > 257

    @pytest.mark.parametrize(
        ("kind", "tool"),
        [(EXPLICIT, audit), (EXPLICIT, memory), (AUTO, numerics)],
    )
    def test_tools_take_a_state_that_was_never_on_the_mesh_of_its_step(self, kind, tool):
        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((batch @ params["w"]) ** 2), model_state

        mesh, specs = mesh_of(kind), {"w": P("fsdp")}
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs), donate=False)
        state = jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of())
        batch = np.ones((BATCH, WIDTH), np.float32)
        on_mesh = jaxmp.TrainState.create_sharded(
            lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), Sharding(mesh, specs)
        )
        assert str(tool(step)(state, batch)) == str(tool(step)(on_mesh, batch))

    @pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
    def test_the_examples_of_a_batch_that_is_on_no_mesh_are_split_in_every_program(self, kind):
        """Lower steps for an unsharded batch: each device computes its own examples."""

        def loss_fn(params, model_state, batch, rng):
            batch_specs.append(jax.typeof(batch).sharding.spec)
            return jnp.mean((batch @ params["w"]) ** 2), model_state

        batch_specs, mesh, specs = [], mesh_of(kind, data=4), {"w": P()}
        state = jaxmp.TrainState.create_sharded(lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), Sharding(mesh, specs))
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs))
        batch = np.ones((BATCH, WIDTH), np.float32)
        typed = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
        programs = [step.lower(state, typed), step.jitted.lower(state, batch), jax.jit(step).lower(state, batch)]
        if kind is EXPLICIT:
            assert set(batch_specs) == {P("data", None)}
            return
        for program in (step.lower(state, batch), *programs):
            moved = collectives_in(program.compile())
            # The gradient and the mean are reduced. Examples are not moved.
            assert {row.kind for row in moved.rows} == {"all-reduce"}

    def test_sequences_that_are_split_stay_so_in_a_jit_around_a_step(self):
        def loss_fn(params, model_state, batch, rng):
            return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2), model_state

        mesh, specs = mesh_of(AUTO, data=2, seq=2), {"w": P()}
        state = jaxmp.TrainState.create_sharded(lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), Sharding(mesh, specs))
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs))
        flops = {}
        for spec in (P("data"), P("data", "seq")):
            batch = jax.device_put(np.ones((4, 64, WIDTH), np.float32), NamedSharding(mesh, spec))
            flops[spec] = jax.jit(step).lower(state, batch).compile().cost_analysis()["flops"]
        assert flops[P("data", "seq")] < 0.8 * flops[P("data")]

    @pytest.mark.once
    def test_half_policies_stay_near_one_device(self):
        def make_params():
            rng = np.random.default_rng(0)
            shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
            return {name: jnp.asarray(rng.normal(size=size) / 6, jnp.float32) for name, size in shapes.items()}

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2), model_state

        mesh, start = mesh_of(), make_params()
        batch = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
        specs = specs_of(make_params, mesh)
        assert specs["up"] != P() != specs["down"]
        steps, states = pair(make_params, loss_fn, mesh, specs, {"policy": "mixed_bfloat16"})
        states = [step(state, batch)[0] for step, state in zip(steps, states, strict=True)]
        moved_nearly_alike(states, start)

    @pytest.mark.once
    def test_activations_as_large_as_a_weight_are_not_taken_for_weights(self):
        """Use a param per example, and a norm whose scale is a slice of a larger param."""

        def loss_fn(params, model_state, batch, rng):
            h = batch @ params["w"][0]
            h = h * (jax.lax.rsqrt(h.var(0) + 1) * params["w"][1, 0]) + params["each"]
            return jnp.mean(jnp.tanh(h) ** 2), model_state

        rng = np.random.default_rng(0)
        params = {"w": rng.normal(size=(2, WIDTH, WIDTH)), "each": rng.normal(size=(BATCH, WIDTH))}
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        mesh, specs = mesh_of(EXPLICIT), {"w": P(None, None, "fsdp"), "each": P()}
        steps, states = pair(lambda: params, loss_fn, mesh, specs)
        single_state, sharded_state = after_five(steps, states, rng.normal(size=(BATCH, WIDTH)).astype(np.float32))
        assert differences(single_state.params, sharded_state.params) <= 2e-6

    @pytest.mark.once
    def test_named_and_printed_weights_match_one_device(self, capfd):
        def loss_fn(params, model_state, batch, rng):
            jax.debug.print("the mean is {}", jnp.mean(params["w"]))
            w = checkpoint_name(params["w"], "weight")

            def turn(h, x):
                return jnp.tanh(h @ w + x), None

            h, _ = jax.lax.scan(turn, jnp.zeros((BATCH, WIDTH)), jnp.stack([batch, batch]))
            return jnp.mean((h @ w.T) ** 2), model_state

        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)}
        steps, states = pair(lambda: params, untyped(loss_fn), mesh_of(AUTO), {"w": P("fsdp")})
        single_state, sharded_state = after_five(steps, states, rng.normal(size=(BATCH, WIDTH)).astype(np.float32))
        jax.effects_barrier()
        assert differences(single_state.params, sharded_state.params) <= 2e-6
        assert capfd.readouterr().out.count("the mean is") == 10

    def test_an_infinity_in_one_shard_skips_the_step_on_all(self):
        mesh = mesh_of()

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((batch @ params["w"]) ** 2), model_state

        params = {"w": jnp.ones((WIDTH, WIDTH))}
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, {"w": P("fsdp")}), donate=False)
        state = jaxmp.TrainState.create(params=params, tx=tx_of())
        batch = np.ones((BATCH, WIDTH), np.float32)
        batch[-1, 0] = np.inf
        state, _ = step(state, np.ones((BATCH, WIDTH), np.float32))
        after, metrics = step(state, batch)
        scales = [float(snapshot.loss_scale) for snapshot in (state, after)]
        assert metrics["skipped"] and scales[1] == scales[0] / 2
        params_and_optimizer = [(snapshot.params, snapshot.opt_state.inner_state) for snapshot in (state, after)]
        jax.tree.map(np.testing.assert_array_equal, *params_and_optimizer)
