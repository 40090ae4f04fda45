"""Weights are gathered in half, and gradients are reduced in ``reduce_dtype``."""

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
    VOCABULARY,
    WIDTH,
    specs_of,
    stacked_loss,
    stacked_params,
    tokens,
    tx_of,
    untyped,
    where,
    wire,
)
from meshes import mesh_of

import jaxmp
from jaxmp.engine import separate_casts
from jaxmp.program.walk import equations
from jaxmp.sharding import Sharding
from jaxmp.sharding.specs import specs_in

pytestmark = pytest.mark.usefixtures("standard_promotion")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BOTH = pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
SLOW = pytest.mark.slow("the same for axes that the loss makes Auto: compiles a large program")


class Net(nn.Module):
    """A table, two layers and a head."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCABULARY, WIDTH)
        return nn.Dense(VOCABULARY)(nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(4 * WIDTH, name="up")(embed(ids)))))


def net_params():
    return Net().init(jax.random.key(0), tokens())["params"]


def net_loss(model):
    def loss_fn(params, model_state, batch, rng):
        logits = model.apply({"params": params}, batch[:, :-1])
        return jnp.mean(jaxmp.losses.cross_entropy(logits, batch[:, 1:])), model_state

    return loss_fn


WIDE, HALF = 16, "bfloat16"


def in_a_scan(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x, stack.reshape(2, 2, WIDE, WIDE))[0]


def in_a_loop(x, w, batch):
    first = jax.lax.fori_loop(0, 2, lambda _, w: 0.9 * w, w[0]).astype(HALF)
    return jnp.tanh((x * w[1, 0].astype(HALF)) @ first @ w[2].astype(HALF))


WAYS = {
    "a jitted cast": lambda x, w, batch: in_a_scan(x, jax.jit(lambda w: w.reshape(2, 2, -1).astype(HALF))(w)),
    "slices of what was reshaped": lambda x, w, batch: in_a_scan(x, w.reshape(2, 2, WIDE, WIDE).astype(HALF)),
    "a scan that casts": lambda x, w, batch: in_a_scan(x, jax.lax.map(lambda w: w.astype(HALF), w)),
    "an index": lambda x, w, batch: jax.lax.fori_loop(0, 4, lambda n, x: jnp.tanh(x @ w[n].astype(HALF)), x),
    "a factor of the batch": lambda x, w, batch: jnp.tanh(
        x @ (w[0] * (1 + jnp.mean(batch))).astype(HALF) @ w[1].astype(HALF)
    ),
    "a loop": in_a_loop,
}


def loss_of_ways(params, model_state, batch, rng):
    results = [way(batch.astype(HALF), params[name], batch) for name, way in WAYS.items()]
    return sum(jnp.mean(result.astype("float32") ** 2) for result in results), model_state


def step_of_ways(kind):
    """Return a train step for WAYS, its state, its batch and its mesh."""
    mesh, rng = mesh_of(kind), np.random.default_rng(0)
    params = {name: (rng.normal(size=(4, WIDE, WIDE)) / WIDE**0.5).astype(np.float32) for name in WAYS}
    on_mesh = Sharding(mesh, dict.fromkeys(WAYS, P(None, "fsdp")))
    state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), on_mesh)
    step = jaxmp.make_train_step(loss_of_ways, sharding=on_mesh, donate=False)
    return step, state, rng.normal(size=(BATCH, WIDE)).astype(np.float32), mesh


class TestDtypes:
    """Look at traced programs, because a CPU widens half-precision collectives."""

    @pytest.mark.parametrize(("how", "reduce_dtype"), [("linen", "float32"), ("autocast", "bfloat16")])
    def test_weights_are_gathered_in_half_and_gradients_reduced_as_asked(self, how, reduce_dtype):
        mesh, specs = mesh_of(), specs_of(net_params, mesh_of())
        options = {"sharding": Sharding(mesh, specs, reduce_dtype=reduce_dtype)}
        if how == "linen":
            model = jaxmp.linen.apply_policy(Net(), "mixed_bfloat16", {"up": "float32"})
            step = jaxmp.make_train_step(net_loss(model), **options)
        else:
            step = jaxmp.make_train_step(net_loss(Net()), policy="mixed_bfloat16", **options)
        state = jax.eval_shape(lambda: jaxmp.TrainState.create_sharded(net_params, tx_of(), Sharding(mesh, specs)))
        batch = tokens(12)  # so no activation has the shape of a weight
        gathers, reductions = wire(step, state, batch, mesh)
        shapes = {leaf.shape for leaf, spec in zip(jax.tree.leaves(state.params), specs_in(specs), strict=True) if spec}
        layers = {(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH, VOCABULARY)}
        assert shapes == layers | {(VOCABULARY, WIDTH)}
        overridden = {(WIDTH, 4 * WIDTH): {"float32"}} if how == "linen" else {}
        assert {size: gathers[size] for size in layers} == {**{size: {"bfloat16"} for size in layers}, **overridden}
        assert reductions == {reduce_dtype}

    @pytest.mark.parametrize("device", ["h200", "v5e"])
    def test_a_weight_whose_cast_a_tpu_keeps_is_gathered_in_half_and_summed_in_float32(self, device, monkeypatch):
        monkeypatch.setattr(separate_casts, "_SHARE", 0)  # every weight is large
        mesh, specs = mesh_of(), specs_of(net_params, mesh_of())
        step = jaxmp.make_train_step(net_loss(Net()), sharding=Sharding(mesh, specs), policy="mixed_bfloat16")
        state = jax.eval_shape(lambda: jaxmp.TrainState.create_sharded(net_params, tx_of(), Sharding(mesh, specs)))
        with jaxmp.hardware.assumed(device):
            gathers, reductions = wire(step, state, tokens(12), mesh)
            with jax.set_mesh(mesh):
                program = jax.make_jaxpr(step.update)(state, tokens(12))
        layers = {(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH, VOCABULARY)}
        assert {size: gathers[size] for size in layers} == {size: {"bfloat16"} for size in layers}
        assert reductions == {"float32"}
        products = [eqn.outvars[0].aval for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        assert {aval.dtype.name for aval in products if aval.shape in layers} == {"float32"}  # of a device's tokens
        casts = [eqn for eqn in equations(program) if eqn.primitive.name == "separate_cast"]
        assert bool(casts) == (device == "v5e")

    def test_slices_of_a_scan_are_gathered_in_its_body(self):
        mesh = mesh_of(EXPLICIT)
        specs = specs_of(stacked_params, mesh, stacked=["layers", "bias"])
        step = jaxmp.make_train_step(stacked_loss, sharding=Sharding(mesh, specs), policy="mixed_bfloat16")
        state = jaxmp.TrainState.create_sharded(stacked_params, tx_of(), Sharding(mesh, specs))
        batch = jax.device_put(tokens(), NamedSharding(mesh, P("fsdp")))
        gathers, reductions = wire(step, state, batch, mesh)
        assert gathers[WIDTH, 2 * WIDTH] == gathers[VOCABULARY, WIDTH] == {"bfloat16"}
        assert (LAYERS, WIDTH, 2 * WIDTH) not in gathers and reductions == {"float32"}

    @BOTH
    def test_a_weight_that_passes_through_other_code_is_one_still(self, kind):
        """Check that each device sums its rows of the gradient in float32."""
        step, state, batch, mesh = step_of_ways(kind)
        with jax.set_mesh(mesh):
            program = jax.make_jaxpr(step.update)(state, batch)
        products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        of_weights = [eqn.outvars[0].aval for eqn in products if set(eqn.outvars[0].aval.shape) == {WIDE}]
        assert len(of_weights) == 2 * len(WAYS) - 1  # the loop over an index has only one product
        assert {aval.dtype.name for aval in of_weights} == {"float32"}

    @pytest.mark.once
    @pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=SLOW)])
    def test_weights_of_several_uses_are_gathered_once_in_a_pass(self, kind):
        """Count the gathers of each weight, which is recognised by its shape.

        With ``reduce="once"``, a weight is gathered once for both passes of all microbatches.
        """

        def layer(x, w):
            return jnp.sin(jnp.tanh(x @ w))

        @jax.custom_vjp
        def double(x):
            return 2 * x

        double.defvjp(lambda x: (double(x), None), lambda _, cotangent: (2 * cotangent,))
        jitted, again = jax.jit(layer), jax.checkpoint(layer)
        twice = jax.jit(lambda x, w: jitted(jitted(x, w), w))

        def applied_twice(apply):
            return lambda x, w: apply(apply(x, w), w)

        def of_linen(x, w):
            model = jaxmp.linen.apply_policy(nn.Dense(len(w), use_bias=False), "mixed_bfloat16")
            return jnp.sin(model.apply({"params": {"kernel": w}}, x))

        def of_nnx(x, w):
            linear = nnx.eval_shape(lambda: nnx.Linear(*w.shape, use_bias=False, rngs=nnx.Rngs(0)))
            graphdef, _ = nnx.split(jaxmp.nnx.apply_policy(linear, "mixed_bfloat16"))
            return jnp.sin(nnx.merge(graphdef, {"kernel": w})(x))

        uses = {
            "side by side": (applied_twice(layer), 2),
            "einsum": (applied_twice(lambda x, w: jnp.sin(jnp.einsum("bi,ij->bj", x, w))), 2),
            "calls of calls": (lambda x, w: twice(twice(x, w), w), 2),
            "calls and computed again": (
                lambda x, w: twice(jax.jit(lambda x, w: again(jitted(x, w), w))(x, w), w),
                2,
            ),
            "computed again": (applied_twice(again), 1),  # it has the weight at hand
            "turns of a loop": (
                lambda x, w: jax.lax.scan(lambda x, _: (again(jitted(x, w), w), None), x, None, length=2)[0],
                1,
            ),
            "a loop over layers": (lambda x, w: jax.lax.scan(lambda x, w: (twice(x, w), None), x, w)[0], 2),
            "each example": (applied_twice(jax.vmap(jitted, (0, None))), 2),
            "around code of its own": (applied_twice(lambda x, w: double(jitted(double(x), w))), 2),
            "tied": (lambda x, w: jnp.sin(w[jnp.arange(len(x))]) @ w.T, 1),
            "linen": (applied_twice(of_linen), 2),
            "nnx": (applied_twice(of_nnx), 2),
        }
        widths = {name: 4 * n + 12 for n, name in enumerate(uses)}

        def loss_fn(params, model_state, x, rng):
            total = 0.0
            for name, (use, _) in uses.items():
                dtype = "float32" if name in ("linen", "nnx") else "bfloat16"
                y = use(x[:, : widths[name]].astype(dtype), params[name].astype(dtype))
                total += jnp.mean(y.astype("float32") ** 2)
            return total, model_state

        mesh, looped = mesh_of(kind), "a loop over layers"
        specs = {name: P(None, "fsdp") if name == looped else P("fsdp") for name in uses}
        shapes = {name: (LAYERS, n, n) if name == looped else (n, n) for name, n in widths.items()}
        state = jaxmp.TrainState.create_sharded(
            lambda: {name: jnp.ones(size) for name, size in shapes.items()}, tx_of(), Sharding(mesh, specs)
        )
        batch = jax.device_put(np.ones((8, max(widths.values())), np.float32), NamedSharding(mesh, P("fsdp")))
        settings = ((1, "each"), (2, "once")) if kind is AUTO else ((2, "each"),)
        for microbatches, reduce in settings:
            step = jaxmp.make_train_step(
                loss_fn, sharding=Sharding(mesh, specs, reduce=reduce), accumulate_steps=microbatches
            )
            with jax.set_mesh(mesh):
                program = jax.make_jaxpr(step.update)(state, batch)
            moved = [eqn for eqn in equations(program) if eqn.primitive.name == "sharding_constraint"]
            moved = [eqn.outvars[0].aval for eqn in moved if not any(where(eqn))]
            gathered, expected = {}, {}
            for name, size in shapes.items():
                gathered_shape = size if reduce == "once" else size[-2:]
                gathered[name] = [aval.dtype.name for aval in moved if aval.shape == gathered_shape]
                expected[name] = (1 if reduce == "once" else uses[name][1]) * ["bfloat16"]
            assert gathered == expected, (microbatches, reduce)

    def test_autocast_gathers_a_weight_of_two_uses_once_in_a_pass(self):
        def loss_fn(params, model_state, x, rng):
            return jnp.mean(jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(x @ params["w"])) @ params["w"])) ** 2), model_state

        mesh, specs = mesh_of(), {"w": P("fsdp")}
        on_mesh = Sharding(mesh, specs)
        state = jaxmp.TrainState.create_sharded(lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), on_mesh)
        step = jaxmp.make_train_step(loss_fn, sharding=on_mesh, policy="mixed_bfloat16")
        with jax.set_mesh(mesh):
            program = jax.make_jaxpr(step.update)(state, np.ones((BATCH, WIDTH), np.float32))
        moved = [
            eqn for eqn in equations(program) if eqn.primitive.name == "sharding_constraint" and not any(where(eqn))
        ]
        assert [eqn.outvars[0].aval.dtype.name for eqn in moved if eqn.outvars[0].aval.shape == (WIDTH, WIDTH)] == 2 * [
            "bfloat16"
        ]

    @pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=SLOW)])
    def test_sums_of_gradients_are_those_of_float32(self, kind):
        """Use integers: bfloat16 holds each device's sum, but not the total."""
        eye = np.eye(4, dtype=np.float32)

        def looped(turn, x, weight, half, turns=2):
            """Return the sum of the products of ``x`` with a carried weight."""

            def added(carry, _):
                total, weight = carry
                return (total + (x @ weight.astype(half)).astype("float32"), turn(weight)), None

            return jax.lax.scan(added, (jnp.zeros_like(x, "float32"), weight), None, length=turns)[0][0]

        def convolution(groups, half):
            def run(w, x):
                x = x.reshape((-1, 2, 2, 1) if groups > 1 else (1, -1, 4, 1))
                numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "batch_group_count": groups}
                return jax.lax.conv_general_dilated(x, w.reshape(2, 2, 1, 4).astype(half), (1, 1), "SAME", **numbers)

            return run

        def ways(half, zeros):
            def inner(w):
                return lambda c: jax.lax.scan(lambda c, _: (c + w, None), c, None, length=1)[0]

            def one_of_two(w, x):
                return x @ jax.lax.cond(jnp.sum(x) > 0, lambda w: 1 * w, lambda w: 2 * w, w).astype(half)

            return {
                "a convolution of one example": convolution(1, half),
                "a convolution of groups of examples": convolution(4, half),
                "carried": lambda w, x: looped(lambda c: 2 * c, x, w, half),
                "carried in half": lambda w, x: looped(lambda c: 2 * c, x, w.astype(half), half, 1),
                "changed by what is carried": lambda w, x: looped(lambda c: eye @ c + w, x, zeros, half),
                "from zeros": lambda w, x: looped(lambda c: c + w, x, zeros, half),
                "in a loop in a loop": lambda w, x: looped(inner(w), x, zeros, half),
                "times a constant": lambda w, x: x @ (eye @ w).astype(half),
                "one of two": one_of_two,
                "used in a branch": lambda w, x: jax.lax.cond(
                    jnp.sum(x) > 0, lambda x: x @ w.astype(half), lambda x: x, x
                ),
            }

        def loss_of(half):
            def loss_fn(params, model_state, batch, rng):
                results = [way(params[name], batch.astype(half)) for name, way in ways(half, jnp.zeros((4, 4))).items()]
                return sum(jnp.sum(result.astype("float32")) for result in results), model_state

            return loss_fn

        names, mesh = list(ways("float32", None)), mesh_of(kind)
        params, on_mesh = dict.fromkeys(names, jnp.zeros((4, 4))), Sharding(mesh, dict.fromkeys(names, P("fsdp")))
        batch = np.random.default_rng(0).integers(0, 3, (512, 4)).astype(np.float32)
        exact = jax.jit(jax.grad(lambda params: loss_of("float32")(params, None, batch, None)[0]))(params)
        exact["carried in half"] = exact["carried in half"].astype("bfloat16").astype("float32")
        state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), on_mesh)
        state, _ = jaxmp.make_train_step(loss_of("bfloat16"), sharding=on_mesh)(state, batch)
        for name in names:
            np.testing.assert_array_equal(-np.asarray(state.params[name]), exact[name], err_msg=name)
            assert exact[name].max() > 257, name

    def test_rows_looked_up_for_each_example_are_no_weights(self):
        """Broadcast positions and types over the batch, as models of transformers do."""

        def loss_of(half):
            def loss_fn(params, model_state, batch, rng):
                tables = {name: table.astype(half) for name, table in params.items()}
                ids, places = batch["ids"], jnp.broadcast_to(jnp.arange(2), batch["ids"].shape)
                h = tables["token"][ids] + tables["place"][places] + tables["type"][jnp.zeros_like(ids)]
                return jnp.sum((h @ tables["w"]).astype("float32") * batch["times"]), model_state

            return loss_fn

        params = {name: jnp.ones((4, 4)) for name in ("token", "place", "type", "w")}
        mesh, specs = mesh_of(), {name: P("fsdp") for name in params}
        rng = np.random.default_rng(0)
        batch = {"ids": rng.integers(0, 4, (516, 2)), "times": rng.integers(0, 3, (516, 2, 4)).astype(np.float32)}
        exact = jax.jit(jax.grad(lambda params: loss_of("float32")(params, None, batch, None)[0]))(params)
        state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), Sharding(mesh, specs))
        state, _ = jaxmp.make_train_step(untyped(loss_of("bfloat16")), sharding=Sharding(mesh, specs))(state, batch)
        for name, gradient in exact.items():
            np.testing.assert_array_equal(1 - np.asarray(state.params[name]), gradient)
