"""Weights are gathered in half where they are used, once a pass, and gradients are reduced in the dtype asked for."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_steps import (
    BATCH,
    LAYERS,
    MODEL,
    VOCABULARY,
    WIDTH,
    differences,
    linen_loss,
    linen_params,
    mesh_of,
    pair,
    specs_of,
    stacked_loss,
    stacked_params,
    tokens,
    tx_of,
    untyped,
    where,
    wire,
)

import jaxmp
from jaxmp._internals.jax.walk import equations
from jaxmp.sharding import Sharding
from jaxmp.sharding.specs import specs_in

pytestmark = pytest.mark.usefixtures("standard_promotion")

once = pytest.mark.once


class TestDtypes:
    """In the program: a CPU widens half collectives."""

    @pytest.mark.parametrize("how", ["linen", "autocast"])
    @pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
    def test_weights_are_gathered_in_half_and_gradients_reduced_as_asked(self, how, reduce_dtype):
        mesh, specs = mesh_of(), specs_of(linen_params, mesh_of())
        options = {"sharding": Sharding(mesh, specs, reduce_dtype=reduce_dtype)}
        if how == "linen":
            step = jaxmp.make_train_step(linen_loss(jaxmp.linen.apply_policy(MODEL, "mixed_bfloat16")), **options)
        else:
            step = jaxmp.make_train_step(linen_loss(), policy="mixed_bfloat16", **options)
        state = jaxmp.TrainState.create_sharded(linen_params, tx_of(), Sharding(mesh, specs))
        gathers, reductions = wire(step, state, tokens(), mesh)
        shapes = {leaf.shape for leaf, spec in zip(jax.tree.leaves(state.params), specs_in(specs), strict=True) if spec}
        split = {(VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)}
        assert shapes == split
        for size in split:
            assert gathers[size] == {"bfloat16"}, size
        assert reductions == {reduce_dtype}

    def test_an_override_to_float32_is_gathered_in_float32(self):
        mesh, specs = mesh_of(), specs_of(linen_params, mesh_of())
        model = jaxmp.linen.apply_policy(MODEL, "mixed_bfloat16", {"h_0/mlp/c_fc": "float32"})
        step = jaxmp.make_train_step(linen_loss(model), sharding=Sharding(mesh, specs))
        state = jaxmp.TrainState.create_sharded(linen_params, tx_of(), Sharding(mesh, specs))
        gathers, _ = wire(step, state, tokens(), mesh)
        assert gathers[WIDTH, 4 * WIDTH] == {"float32"} and gathers[4 * WIDTH, WIDTH] == {"bfloat16"}

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_slices_of_a_scan_are_gathered_in_its_body(self, kind):
        mesh = mesh_of(kind)
        specs = specs_of(stacked_params, mesh, stacked=["layers", "bias"])
        step = jaxmp.make_train_step(stacked_loss, sharding=Sharding(mesh, specs), policy="mixed_bfloat16")
        state = jaxmp.TrainState.create_sharded(stacked_params, tx_of(), Sharding(mesh, specs))
        batch = jax.device_put(tokens(), NamedSharding(mesh, P("fsdp")))
        gathers, reductions = wire(step, state, batch, mesh)
        assert gathers[WIDTH, 2 * WIDTH] == gathers[VOCABULARY, WIDTH] == {"bfloat16"}
        assert (LAYERS, WIDTH, 2 * WIDTH) not in gathers and reductions == {"float32"}

    @pytest.mark.parametrize(
        "how",
        [
            "a jitted cast",
            "slices of what was reshaped",
            "a scan that casts",
            "an index",
            "a factor of the batch",
            "a loop",
        ],
    )
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_weight_that_passes_through_other_code_is_one_still(self, how, kind):
        """Each device sums its rows of the gradient in float32, not in the dtype of the product."""

        def loss_fn(params, model_state, batch, rng):
            w, x = params["w"], batch.astype("bfloat16")
            if how == "an index":
                x = jax.lax.fori_loop(0, 4, lambda n, x: jnp.tanh(x @ w[n].astype("bfloat16")), x)
            elif how == "a loop":
                first = jax.lax.fori_loop(0, 2, lambda _, w: 0.9 * w, w[0]).astype("bfloat16")
                x = jnp.tanh((x * w[1, 0].astype("bfloat16")) @ first @ w[2].astype("bfloat16"))
            elif how == "a factor of the batch":
                x = jnp.tanh(x @ (w[0] * (1 + jnp.mean(batch))).astype("bfloat16") @ w[1].astype("bfloat16"))
            else:
                if how == "slices of what was reshaped":
                    stack = w.reshape(2, 2, WIDTH, WIDTH).astype("bfloat16")
                elif how == "a jitted cast":
                    stack = jax.jit(lambda w: w.reshape(2, 2, WIDTH, WIDTH).astype("bfloat16"))(w)
                else:
                    stack = jax.lax.map(lambda w: w.astype("bfloat16"), w).reshape(2, 2, WIDTH, WIDTH)
                x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x, stack)
            return jnp.mean(x.astype("float32") ** 2), model_state

        mesh, specs = mesh_of(kind), {"w": P(None, "fsdp")}
        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.normal(size=(4, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)}
        batch = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        steps, states = pair(lambda: params, loss_fn, mesh, specs)
        with jax.set_mesh(mesh):
            program = jax.make_jaxpr(steps[1]._step)(states[1], batch)
        products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        of_weights = [eqn.outvars[0].aval for eqn in products if set(eqn.outvars[0].aval.shape) == {WIDTH}]
        assert {aval.dtype.name for aval in of_weights} == {"float32"}
        (one, seen), (many, _) = (step(state, batch) for step, state in zip(steps, states, strict=True))
        assert differences(one.params, many.params) <= 1e-3 and not seen["skipped"]

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize(
        ("how", "count"),
        [
            ("side by side", 2),
            ("einsum", 2),
            ("calls of calls", 2),
            ("calls and computed again", 2),
            ("computed again", 1),  # it has the weight at hand
            ("turns of a loop", 1),
            ("a loop over layers", 2),
            ("each example", 2),
            ("around code of its own", 2),
            ("tied", 1),  # rows are looked up without the table's gradient
            ("autocast", 2),
            ("linen", 2),
            ("nnx", 2),
        ],
    )
    def test_weights_of_several_uses_are_gathered_once_in_a_pass(self, how, count, kind):
        """Once for all passes if the gradients of microbatches are reduced once."""

        def layer(x, w):
            return jnp.sin(jnp.tanh(x @ w))

        @jax.custom_vjp
        def own(x):
            return 2 * x

        own.defvjp(lambda x: (own(x), None), lambda _, cotangent: (2 * cotangent,))
        jitted, again, shape = jax.jit(layer), jax.checkpoint(layer), (WIDTH, WIDTH)
        twice = jax.jit(lambda x, w: jitted(jitted(x, w), w))
        model = jaxmp.linen.apply_policy(nn.Dense(WIDTH, use_bias=False), "mixed_bfloat16")
        linear = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
        graphdef, _ = nnx.split(jaxmp.nnx.apply_policy(linear, "mixed_bfloat16"))
        apply = {
            "linen": lambda x, w: jnp.sin(model.apply({"params": {"kernel": w}}, x)),
            "nnx": lambda x, w: jnp.sin(nnx.merge(graphdef, {"kernel": w})(x)),
            "einsum": lambda x, w: jnp.sin(jnp.einsum("bi,ij->bj", x, w)),
            "each example": jax.vmap(jitted, (0, None)),
            "around code of its own": lambda x, w: own(jitted(own(x), w)),
            "computed again": again,
        }.get(how, layer)

        def loss_fn(params, model_state, x, rng):
            w = params["w"] if how in ("autocast", "linen", "nnx") else params["w"].astype("bfloat16")
            x = x if how in ("autocast", "linen", "nnx") else x.astype("bfloat16")
            if how == "tied":
                x = jnp.sin(w[jnp.arange(len(x))]) @ w.T
            elif how == "calls of calls":
                x = twice(twice(x, w), w)
            elif how == "calls and computed again":
                x = twice(jax.jit(lambda x, w: again(jitted(x, w), w))(x, w), w)
            elif how == "turns of a loop":
                x, _ = jax.lax.scan(lambda x, _: (again(jitted(x, w), w), None), x, None, length=2)
            elif how == "a loop over layers":
                x, _ = jax.lax.scan(lambda x, w: (twice(x, w), None), x, params["w"].astype("bfloat16"))
            else:
                x = apply(apply(x, w), w)
            return jnp.mean(x.astype("float32") ** 2), model_state

        mesh, specs, more = mesh_of(kind), {"w": P("fsdp")}, {}
        if how == "a loop over layers":
            shape, specs = (LAYERS, *shape), {"w": P(None, "fsdp")}
        if how == "autocast":
            more = {"policy": "mixed_bfloat16"}
        state = jaxmp.TrainState.create_sharded(lambda: {"w": jnp.ones(shape)}, tx_of(), Sharding(mesh, specs))
        batch = jax.device_put(np.ones((2 * BATCH, WIDTH), np.float32), NamedSharding(mesh, P("fsdp")))
        for microbatches, reduce, expected in ((1, "each", count), (2, "each", count), (2, "once", 1)):
            own_sharding = Sharding(mesh, specs, reduce=reduce)
            step = jaxmp.make_train_step(loss_fn, sharding=own_sharding, accumulate_steps=microbatches, **more)
            with jax.set_mesh(mesh):
                program = jax.make_jaxpr(step._step)(state, batch)
            last = shape if reduce == "once" else shape[-2:]
            moved = [eqn for eqn in equations(program) if eqn.primitive.name == "sharding_constraint"]
            moved = [eqn for eqn in moved if eqn.outvars[0].aval.shape == last and not any(where(eqn))]
            assert [eqn.outvars[0].aval.dtype.name for eqn in moved] == expected * ["bfloat16"], (microbatches, reduce)

    @pytest.mark.parametrize(
        "how",
        [
            "a convolution of one example",
            "a convolution of groups of examples",
            "carried",
            "carried in half",
            "changed by what is carried",
            "from zeros",
            "in a loop in a loop",
            "times a constant",
            "one of two",
            "used in a branch",
        ],
    )
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_sums_of_gradients_are_those_of_float32(self, how, kind):
        """Of integers, which bfloat16 does not hold from 257 on: what each device adds it does."""

        def loss_of(half):
            def looped(turn, x, weight):
                """The sum of the products with what is carried."""

                def added(carry, _):
                    total, weight = carry
                    return (total + (x @ weight.astype(half)).astype("float32"), turn(weight)), None

                start = jnp.zeros_like(x, "float32"), weight
                return jax.lax.scan(added, start, None, length=1 if how == "carried in half" else 2)[0][0]

            def loss_fn(params, model_state, batch, rng):
                w, x, zeros = params["w"], batch.astype(half), jnp.zeros((4, 4))
                if how.startswith("a convolution"):
                    groups = 4 if how.endswith("examples") else 1
                    x = x.reshape((-1, 2, 2, 1) if groups > 1 else (1, -1, 4, 1))
                    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "batch_group_count": groups}
                    weight = w.reshape(2, 2, 1, 4).astype(half)
                    y = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", **numbers)
                elif how == "times a constant":
                    y = x @ (np.eye(4, dtype=np.float32) @ w).astype(half)
                elif how == "one of two":
                    y = x @ jax.lax.cond(jnp.sum(batch) > 0, lambda w: 1 * w, lambda w: 2 * w, w).astype(half)
                elif how == "used in a branch":
                    y = jax.lax.cond(jnp.sum(batch) > 0, lambda x: x @ w.astype(half), lambda x: x, x)
                elif how == "in a loop in a loop":
                    y = looped(lambda c: jax.lax.scan(lambda c, _: (c + w, None), c, None, length=1)[0], x, zeros)
                else:
                    turn = {
                        "changed by what is carried": lambda c: np.eye(4, dtype=np.float32) @ c + w,
                        "from zeros": lambda c: c + w,
                    }.get(how, lambda c: 2 * c)
                    start = w if how.startswith("carried") else zeros
                    y = looped(turn, x, start.astype(half if how == "carried in half" else "float32"))
                return jnp.sum(y.astype("float32")), model_state

            return loss_fn

        params, mesh, specs = {"w": jnp.zeros((4, 4))}, mesh_of(kind), {"w": P("fsdp")}
        batch = np.random.default_rng(0).integers(0, 3, (512, 4)).astype(np.float32)
        exact = jax.grad(lambda params: loss_of("float32")(params, None, batch, None)[0])(params)["w"]
        exact = exact.astype("bfloat16").astype("float32") if how == "carried in half" else exact
        state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), Sharding(mesh, specs))
        state, _ = jaxmp.make_train_step(loss_of("bfloat16"), sharding=Sharding(mesh, specs))(state, batch)
        np.testing.assert_array_equal(-np.asarray(state.params["w"]), exact)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_rows_looked_up_for_each_example_are_no_weights(self, kind):
        """Positions and types of tokens, spread over the batch as the models of transformers do."""

        def loss_of(half):
            def loss_fn(params, model_state, batch, rng):
                tables = {name: table.astype(half) for name, table in params.items()}
                ids, places = batch["ids"], jnp.broadcast_to(jnp.arange(2), batch["ids"].shape)
                h = tables["token"][ids] + tables["place"][places] + tables["type"][jnp.zeros_like(ids)]
                return jnp.sum((h @ tables["w"]).astype("float32") * batch["times"]), model_state

            return loss_fn

        params = {name: jnp.ones((4, 4)) for name in ("token", "place", "type", "w")}
        mesh, specs = mesh_of(kind), {name: P("fsdp") for name in params}
        rng = np.random.default_rng(0)
        batch = {"ids": rng.integers(0, 4, (516, 2)), "times": rng.integers(0, 3, (516, 2, 4)).astype(np.float32)}
        exact = jax.grad(lambda params: loss_of("float32")(params, None, batch, None)[0])(params)
        state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), Sharding(mesh, specs))
        state, _ = jaxmp.make_train_step(untyped(loss_of("bfloat16")), sharding=Sharding(mesh, specs))(state, batch)
        for name, gradient in exact.items():
            np.testing.assert_array_equal(1 - np.asarray(state.params[name]), gradient)

    def test_what_sums_cotangents_of_a_half_weight_by_itself_is_an_error(self):
        def in_groups(params, model_state, batch, rng):
            weights = params["w"].astype("bfloat16")[None]
            sizes = jnp.full((1,), BATCH, jnp.int32)
            return jnp.mean(jax.lax.ragged_dot(batch.astype("bfloat16"), weights, sizes) ** 2).astype("float32"), None

        state = jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of())
        step = jaxmp.make_train_step(in_groups, sharding=Sharding(mesh_of(), {"w": P("fsdp")}))
        with pytest.raises(ValueError, match="gradient of 'w' cannot be summed in float32: ragged_dot_general at"):
            step(state, np.ones((BATCH, WIDTH), np.float32))
