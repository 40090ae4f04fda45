"""Errors of train steps on a mesh, and what they tell the user to write."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_tools import noted, refused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_steps import BATCH, WIDTH, tx_of, untyped
from meshes import mesh_of, mesh_of_two_types

import jaxmp
from jaxmp import sharding
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")

EXAMPLES = np.ones((BATCH, WIDTH), np.float32)
NAMES_AUTO = "write jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"


def loss_fn(params, model_state, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2), model_state


def step_of(mesh=None, specs=None, loss_fn=loss_fn, reduce_dtype="float32", **options):
    on_mesh = Sharding(mesh or mesh_of(), specs or {"w": P("fsdp")}, reduce_dtype=reduce_dtype)
    return jaxmp.make_train_step(loss_fn, sharding=on_mesh, donate=False, **options)


def a_state():
    return jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of())


def sharded_state(mesh):
    on_mesh = Sharding(mesh, {"w": P("fsdp")})
    return jaxmp.TrainState.create_sharded(lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), on_mesh)


def sums_in_half(kind):
    """Return a step whose ``shard_map`` sums cotangents of the weight in half."""
    mesh = mesh_of(kind)

    def loss(params, model_state, batch, rng):
        split = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
        y = split(params["w"].astype(jnp.bfloat16), batch.astype(jnp.bfloat16))
        return jnp.mean(y.astype(jnp.float32)), model_state

    return step_of(mesh, loss_fn=loss)


def in_groups(params, model_state, batch, rng):
    sizes, weights = jnp.full((1,), BATCH, jnp.int32), params["w"].astype("bfloat16")[None]
    return jnp.mean(jax.lax.ragged_dot(batch.astype("bfloat16"), weights, sizes) ** 2).astype("float32"), None


def gathers_itself(params, model_state, batch, rng):
    return loss_fn(sharding.gather(params, {"w": P("fsdp")}, "float32"), model_state, batch, rng)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: step_of(mesh_of(x=4)), "'data' or 'fsdp' for the batch, got x=4"),
        (lambda: step_of(mesh_of_two_types()), "all of type Explicit, got 'data' of type Auto"),
        (lambda: Sharding(mesh_of(), {}, reduce="twice"), "'each' or 'once', got 'twice'"),
        (lambda: jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh_of(), {}, reduce="once")), "accumulate_steps=1"),
        (lambda: step_of(reduce_dtype="float64"), "one of 'float32', 'bfloat16', 'float16', got 'float64'"),
        (lambda: step_of(reduce_dtype="int8"), "got 'int8'; write e.g. reduce_dtype='float32'"),
    ],
)
def test_a_step_that_cannot_be_made_says_why(make, said):
    with pytest.raises(ValueError, match=said):
        jaxmp.make_train_step(loss_fn, sharding=make())


def test_a_function_that_needs_a_mesh_names_its_arguments():
    mesh, params, specs = mesh_of(), {"w": EXAMPLES}, {"w": P()}
    calls = {
        "Sharding(mesh, specs)": lambda: Sharding(4, {}),
        "fsdp_specs(shapes, mesh)": lambda: jaxmp.sharding.fsdp_specs(mesh, params),
        "describe(shapes, specs, mesh)": lambda: jaxmp.sharding.describe(params, mesh, specs),
    }
    for form, call in calls.items():
        refused(call, TypeError, "mesh must be a jax.sharding.Mesh, got ", f"AxisType.Auto,)), and write {form}")


def test_a_mesh_alone_is_no_sharding():
    with pytest.raises(TypeError, match=r"sharding must be a jaxmp.sharding.Sharding\(mesh, specs\), got Mesh"):
        jaxmp.make_train_step(loss_fn, sharding=mesh_of())


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ({"v": P()}, "none for 'w'; use jaxmp.sharding.fsdp_specs"),
        ({"w": P(), "v": P()}, "one for 'v', which is not in the tree"),
        ({"w": "fsdp"}, "got str for 'w'"),
        ({"w": P("tensor")}, "has the axes 'fsdp', got 'tensor'"),
        ({"w": P(None, None, "fsdp")}, "one entry per axis"),
    ],
)
def test_specs_that_do_not_fit_are_named(specs, said):
    with pytest.raises(ValueError, match=said):
        step_of(specs=specs)(a_state(), EXAMPLES)


def test_a_batch_that_does_not_divide_is_told_one_that_does():
    for size, said in ((6, r"divisible by 4 devices of 'fsdp', got 6 .* a batch of 8"), (0, "a batch of 4")):
        with pytest.raises(ValueError, match=said):
            step_of()(a_state(), np.ones((size, WIDTH), np.float32))
    with pytest.raises(ValueError, match=r"times 2 microbatches, got 12 examples in batch entry 'x'; .* a batch of 16"):
        step_of(accumulate_steps=2)(a_state(), {"x": np.ones((12, WIDTH), np.float32)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: sums_in_half(AxisType.Auto),
            r"of 'w' cannot be summed in float32: shard_map at .*\.py:\d+ .* bfloat16",
        ),
        (lambda: step_of(loss_fn=in_groups), "of 'w' cannot be summed in float32: ragged_dot_general at"),
        (lambda: step_of(mesh_of(AxisType.Explicit), loss_fn=gathers_itself), "already gathers weights, got gather in"),
    ],
)
def test_a_loss_whose_gradient_cannot_be_summed_in_float32_is_refused_with_the_place(make, said):
    with pytest.raises(ValueError, match=said):
        make()(a_state(), EXAMPLES)


def test_a_derivative_of_its_own_in_half_is_refused_unless_gradients_are_reduced_in_half():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda operands, ct: (ct @ operands[1].T, operands[0].T @ ct))

    def loss_fn(params, model_state, batch, rng):
        half = product(batch.astype("bfloat16"), params["w"].astype("bfloat16"))
        return jnp.mean(half.astype("float32") ** 2), model_state

    with pytest.raises(ValueError, match=r"of 'w' cannot be summed in float32: custom_vjp_call at .*py:\d+"):
        step_of(loss_fn=loss_fn)(a_state(), EXAMPLES)
    assert not step_of(loss_fn=loss_fn, reduce_dtype="bfloat16")(a_state(), EXAMPLES)[1]["skipped"]


def test_a_state_that_lies_elsewhere_is_refused_with_both_places():
    mesh = mesh_of()
    elsewhere = [
        (jax.device_put(a_state(), jax.devices()[0]), r"must have the step's sharding .*create_sharded"),
        (
            jax.device_put(a_state(), NamedSharding(mesh, P())),
            r"'params/w' .* must have .*spec=P\('fsdp'.* got NamedSharding",
        ),
        (sharded_state(mesh_of(AxisType.Explicit)), r"must have .*\(Auto,.* got .*\(Explicit,"),
    ]
    for state, said in elsewhere:
        with pytest.raises(ValueError, match=said):
            step_of(mesh)(state, EXAMPLES)


@pytest.mark.parametrize("has_specs", [False, True])
def test_types_that_the_loss_leaves_open_are_jaxs_error_and_each_way_out_of_it_trains(has_specs):
    """Use Flax's dropout, whose mask is not split over any axis."""

    def loss_fn(params, model_state, batch, rng):
        dropped = nn.Dropout(0.5).apply({}, batch @ params["w"], deterministic=False, rngs={"dropout": rng})
        return jnp.mean(dropped**2), model_state

    def loss_on(mesh, loss_fn=loss_fn):
        state = jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of(), rng=0)
        batch = jax.device_put(EXAMPLES, NamedSharding(mesh, P("fsdp")))
        options = {"sharding": Sharding(mesh, {"w": P("fsdp")})} if has_specs else {}
        with jax.set_mesh(mesh):
            return jaxmp.make_train_step(loss_fn, **options)(state, batch)[1]["loss"]

    explicit = mesh_of(AxisType.Explicit)
    error = noted(lambda: loss_on(explicit), "axes of type Explicit", NAMES_AUTO)
    assert type(error).__name__ == "ShardingTypeError" and "select `which` must be scalar" in str(error)
    np.testing.assert_allclose(loss_on(explicit, untyped(loss_fn)), loss_on(mesh_of()), rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_jit_of_the_users_own_knows_the_mesh_by_the_state_or_by_what_is_around(kind):
    mesh = mesh_of(kind)
    step, placed = step_of(mesh), sharded_state(mesh)
    expected = step(placed, EXAMPLES)[1]["loss"]

    def loss(state, batch):
        return step(state, batch)[1]["loss"]

    assert jax.jit(loss)(placed, EXAMPLES) == expected
    with jax.set_mesh(mesh):
        assert jax.jit(loss)(a_state(), EXAMPLES) == expected
    states = jax.jit(lambda state: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state))(placed)
    losses = jax.jit(jax.vmap(loss, (0, None)))(states, EXAMPLES)
    np.testing.assert_allclose(losses, [expected] * 2, rtol=1e-6)
