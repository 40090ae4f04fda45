"""Gathers in half with gradients reduced in float32, and training with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import explicit_mesh, mesh_of, mesh_of_two_types
from stacked_layers import SPECS, WHOLE, a_batch, loss_on, make_params

import jaxmp
from jaxmp import sharding
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes


def reshards(jaxpr):
    """Return each reshard's operand dtype and result type, also those in bodies.

    Reshards of scalars are left out.
    """
    moves = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reshard" and eqn.invars[0].aval.ndim:
            moves.append((eqn.invars[0].aval.dtype.name, str(eqn.outvars[0].aval)))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            moves += reshards(inner) if hasattr(inner, "eqns") else []
    return moves


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_weights_travel_in_half_and_gradients_in_what_was_asked(reduce_dtype):
    mesh = explicit_mesh()
    state = jaxmp.TrainState.create_sharded(make_params, optax.sgd(0.1), Sharding(mesh, SPECS))
    loss_fn = loss_on(SPECS, reduce_dtype=reduce_dtype)
    with jax.set_mesh(mesh):
        batch = jax.device_put(a_batch(), P("fsdp"))
        program = jax.make_jaxpr(jax.grad(lambda params: loss_fn(params, None, batch, None)[0]))(state.params)
    moves = reshards(program.jaxpr)
    gathered = [dtype for dtype, to in moves if "R:fsdp" in to]
    scattered = [dtype for dtype, to in moves if "@fsdp" in to]
    assert set(gathered) == {"bfloat16"} and len(gathered) >= 2
    assert scattered == [reduce_dtype] * 2


@pytest.fixture(scope="module")
def gradients_on_one_device():
    with jax.set_mesh(jax.make_mesh((1,), ("fsdp",))):
        return jax.jit(jax.grad(lambda params: loss_on(WHOLE)(params, None, a_batch(), None)[0]))(make_params())


@pytest.mark.once
@pytest.mark.parametrize(
    ("route", "sizes"),
    [
        ("explicit", {"data": 2, "fsdp": 2}),
        ("auto", {"fsdp": 4}),
        ("shard_map", {"data": 2, "fsdp": 2}),
    ],
)
def test_gradients_are_those_of_one_device(route, sizes, gradients_on_one_device):
    params, batch, axes, expected = make_params(), a_batch(), tuple(sizes), gradients_on_one_device
    mesh = mesh_of(AxisType.Explicit if route == "explicit" else AxisType.Auto, **sizes)
    reduce_dtype = "bfloat16" if route == "auto" else "float32"
    loss_fn = loss_on(SPECS, axes=axes, reduce_dtype=reduce_dtype)
    with jax.set_mesh(mesh):
        if route == "shard_map":

            def gradient(params, batch):
                return jax.grad(lambda params: loss_fn(params, None, batch, None)[0] / mesh.size)(params)

            fun = jax.shard_map(gradient, in_specs=(SPECS, P(axes)), out_specs=SPECS)
        else:
            params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, SPECS)
            batch = jax.device_put(batch, P(axes))
            fun = jax.grad(lambda params, batch: loss_fn(params, None, batch, None)[0])
        gradients = jax.jit(fun)(params, batch)
    for name, leaf in gradients.items():
        assert leaf.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(leaf) - np.asarray(expected[name])) / np.linalg.norm(expected[name])
        assert error < 0.01, (name, error)


def test_in_shard_map_small_leaves_are_summed_in_float32_too():
    mesh, specs = mesh_of(), {"bias": P()}

    def gradient(params, batch):
        def loss(params):
            bias = sharding.gather(params, specs, "bfloat16")["bias"].astype(jnp.bfloat16)
            return jnp.sum((bias * batch).astype(jnp.float32))

        return jax.grad(loss)(params)

    fun = jax.shard_map(gradient, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=specs)
    params, parts = {"bias": jnp.ones(8)}, jnp.asarray([256.0, 1.0, 1.0, 1.0], jnp.bfloat16)[:, None]
    assert jax.jit(fun)(params, parts)["bias"][0] == 259  # 256 or 260 in bfloat16


def test_small_and_integer_leaves_are_left_alone():
    with jax.set_mesh(explicit_mesh()):
        tree = {"small": jnp.ones(3), "count": jnp.zeros((4,), jnp.int32)}
        specs = {"small": P(), "count": P("fsdp")}
        gathered = jax.jit(lambda tree: sharding.gather(tree, specs, "bfloat16"))(tree)
    assert (gathered["small"].dtype, gathered["count"].dtype) == (jnp.float32, jnp.int32)


@pytest.mark.parametrize("place", [P(), P(None, "fsdp")])
def test_a_weight_that_lies_elsewhere_gets_its_gradient_there(place):
    with jax.set_mesh(explicit_mesh()):
        w, x = jax.device_put(jnp.ones((8, 8)), place), jax.device_put(jnp.ones((8, 8)), P("fsdp"))

        def loss(w):
            return jnp.sum(x @ sharding.gather({"w": w}, {"w": P("fsdp")}, "bf16", axes="fsdp")["w"].astype("f4"))

        gradient = jax.jit(jax.grad(loss))(w)
    assert gradient.sharding.is_equivalent_to(w.sharding, 2)
    np.testing.assert_array_equal(np.asarray(gradient), 8.0)


SPLIT, ALIKE = P("fsdp"), P()


def gather_of_a(mesh, spec=SPLIT, dtype="bfloat16", **options):
    with jax.set_mesh(mesh):
        sharding.gather({"a": jnp.ones((8, 8))}, {"a": spec}, dtype, **options)


def in_shard_map(mesh, spec=SPLIT, to=ALIKE, **options):
    def gathered(tree):
        return sharding.gather(tree, {"a": spec}, "bfloat16")

    jax.shard_map(gathered, mesh=mesh, in_specs=({"a": spec},), out_specs={"a": to}, **options)({"a": jnp.ones(8)})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gather_of_a(explicit_mesh(), dtype="int8"), "must be floating, got int8"),
        (lambda: gather_of_a(explicit_mesh(), P(("fsdp", "tensor"))), "which has the axes 'fsdp', got 'tensor'"),
        (lambda: gather_of_a(explicit_mesh(data=4)), "axes must be in the mesh, which has the axes 'data', got 'fsdp'"),
        (
            lambda: gather_of_a(mesh_of()),
            "got reduce_dtype 'float32' for 'a' gathered in 'bfloat16'; create the mesh with axis_types=.*Explicit",
        ),
        (
            lambda: gather_of_a(mesh_of_two_types(), axes=("data", "fsdp")),
            "have the same type, got 'data' of type Auto, 'fsdp'",
        ),
        (lambda: gather_of_a(explicit_mesh(), axes=()), "have the same type, got none"),
        (lambda: gather_of_a(explicit_mesh(), reduce_dtype="float64"), "'bfloat16', 'float16', got 'float64'; write"),
        (lambda: sharding.gather({"a": jnp.ones(4)}, {"a": P("fsdp")}, "bfloat16"), "needs a mesh, and none is set"),
        (lambda: in_shard_map(mesh_of(), check_vma=False), "check_vma=False.* hides this; remove"),
        (
            lambda: in_shard_map(mesh_of(fsdp=2, tensor=2), P(("fsdp", "tensor")), P("tensor")),
            "must be the last ones .* for 'a' .* put fsdp last",
        ),
    ],
)
def test_invalid_gathers_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
