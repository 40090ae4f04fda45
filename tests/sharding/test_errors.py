"""What a train step on a mesh cannot do is an error that says what to do."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_steps import BATCH, WIDTH, mesh_of, tx_of, untyped

import jaxmp
from jaxmp import sharding
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")

once = pytest.mark.once


class TestErrors:
    def loss(self, params, model_state, batch, rng):
        return jnp.mean((batch @ params["w"]) ** 2), model_state

    def step(self, specs=None, mesh=None, **options):
        sharding = Sharding(mesh or mesh_of(), specs or {"w": P("fsdp")})
        return jaxmp.make_train_step(self.loss, sharding=sharding, **options)

    def state(self):
        return jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"reduce": "twice"}, "reduce must be 'each' or 'once', got 'twice'"),
            ({"reduce": "once"}, r"sums the gradients of several microbatches, got accumulate_steps=1"),
            (
                {"reduce_dtype": "float64"},
                r"reduced in float32 or in a half dtype",
            ),
            ({"reduce_dtype": "float8_e4m3fn"}, "or in a half dtype, got reduce_dtype='float8_e4m3fn'"),
            ({"reduce_dtype": "int8"}, "dtypes must be floating, got int8"),
        ],
    )
    def test_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            jaxmp.make_train_step(self.loss, sharding=Sharding(mesh_of(), {}, **options))

    def test_a_mesh_alone_is_no_sharding(self):
        with pytest.raises(TypeError, match=r"sharding is a jaxmp.sharding.Sharding\(mesh, specs\), got Mesh"):
            jaxmp.make_train_step(self.loss, sharding=mesh_of())

    def test_a_mesh_without_axes_for_the_batch(self):
        with pytest.raises(ValueError, match="'data' and 'fsdp', got a mesh of x=4"):
            self.step(mesh=mesh_of(x=4))

    def test_axes_of_two_types(self):
        kinds = (AxisType.Auto, AxisType.Explicit)
        mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=kinds)
        with pytest.raises(ValueError, match="all of type Explicit, got 'data' of type Auto"):
            self.step(mesh=mesh)

    @pytest.mark.parametrize(
        ("specs", "message"),
        [
            ({"v": P()}, r"got none for 'w'; take jaxmp.sharding.fsdp_specs"),
            ({"w": P(), "v": P()}, r"got one for 'v', which is no array of them; take jaxmp.sharding.fsdp_specs"),
            ({"w": "fsdp"}, r"got str for 'w'"),
            ({"w": P("tensor")}, r"which has 'fsdp', got 'tensor'"),
            ({"w": P(None, None, "fsdp")}, r"an entry for each axis of the array at most"),
        ],
    )
    def test_specs_that_do_not_fit(self, specs, message):
        with pytest.raises(ValueError, match=message):
            self.step(specs)(self.state(), np.ones((BATCH, WIDTH), np.float32))

    def test_a_batch_that_does_not_divide(self):
        with pytest.raises(
            ValueError, match=r"the 4 devices of 'fsdp' must divide the batch, got 6 .* use a batch of 8"
        ):
            self.step()(self.state(), np.ones((6, WIDTH), np.float32))
        with pytest.raises(ValueError, match=r"must divide the batch, got 0 examples; use a batch of 4, say"):
            self.step()(self.state(), np.ones((0, WIDTH), np.float32))
        with pytest.raises(ValueError, match=r"batch, got 6 examples; use a batch of 8"):
            self.step()(self.state(), np.ones((6, WIDTH), np.float32))
        message = (
            r"must divide the batch for each of 2 microbatches, got 12 examples in batch entry 'x'; use .* 16, say"
        )
        with pytest.raises(ValueError, match=message):
            self.step(accumulate_steps=2)(self.state(), {"x": np.ones((12, WIDTH), np.float32)})

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_shard_map_that_sums_in_half(self, kind):
        mesh = mesh_of(kind)

        def loss(params, model_state, batch, rng):
            split = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
            y = split(params["w"].astype(jnp.bfloat16), batch.astype(jnp.bfloat16))
            return jnp.mean(y.astype(jnp.float32)), model_state

        step = jaxmp.make_train_step(loss, sharding=Sharding(mesh, {"w": P("fsdp")}))
        with pytest.raises(
            ValueError, match=r"gradient of 'w' cannot be summed in float32: shard_map at .*\.py:\d+ .* in bfloat16"
        ):
            step(self.state(), np.ones((BATCH, WIDTH), np.float32))

    def test_a_state_on_one_device(self):
        state = jax.device_put(self.state(), jax.devices()[0])
        with pytest.raises(ValueError, match=r"does not lie as the mesh and specs .*create_sharded"):
            self.step()(state, np.ones((BATCH, WIDTH), np.float32))

    def test_a_state_that_lies_elsewhere(self):
        mesh = mesh_of()
        state = jax.device_put(self.state(), NamedSharding(mesh, P()))
        with pytest.raises(
            ValueError, match=r"'params/w' .* does not lie as .*spec=P\('fsdp'.* but NamedSharding.*create_sharded"
        ):
            self.step(mesh=mesh)(state, np.ones((BATCH, WIDTH), np.float32))

    def test_a_state_on_axes_of_another_type(self):
        state = jaxmp.TrainState.create_sharded(
            lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), Sharding(mesh_of(), {"w": P("fsdp")})
        )
        message = r"does not lie as .* say, .*axis_types=\(Explicit,.* but .*axis_types=\(Auto,"
        with pytest.raises(ValueError, match=message):
            self.step(mesh=mesh_of(AxisType.Explicit))(state, np.ones((BATCH, WIDTH), np.float32))

    def test_weights_that_the_loss_gathers_by_itself(self):
        def loss_fn(params, model_state, batch, rng):
            return self.loss(sharding.gather(params, {"w": P("fsdp")}, "float32"), model_state, batch, rng)

        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh_of(AxisType.Explicit), {"w": P("fsdp")}))
        with pytest.raises(ValueError, match="gathers weights itself, got gather in its loss function"):
            step(self.state(), np.ones((BATCH, WIDTH), np.float32))

    def test_a_gradient_that_comes_in_half_from_code_of_its_own(self):
        @jax.custom_vjp
        def product(x, w):
            return x @ w

        product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))

        def loss_fn(params, model_state, batch, rng):
            half = product(batch.astype("bfloat16"), params["w"].astype("bfloat16"))
            return jnp.mean(half.astype("float32") ** 2), model_state

        batch = np.ones((BATCH, WIDTH), np.float32)
        with pytest.raises(ValueError, match=r"of 'w' cannot be summed in float32: custom_vjp_call at .*py:\d+"):
            jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh_of(), {"w": P("fsdp")}))(self.state(), batch)
        reduced_in_half = Sharding(mesh_of(), {"w": P("fsdp")}, reduce_dtype="bfloat16")
        step = jaxmp.make_train_step(loss_fn, sharding=reduced_in_half)
        assert not step(self.state(), batch)[1]["skipped"]

    @pytest.mark.parametrize("has_specs", [False, True])
    def test_types_that_the_loss_leaves_open_are_jaxs_error_and_each_way_out_of_it_trains(self, has_specs):
        """Dropout of Flax makes a mask that lies on no axis."""

        def loss_fn(params, model_state, batch, rng):
            dropped = nn.Dropout(0.5).apply({}, batch @ params["w"], deterministic=False, rngs={"dropout": rng})
            return jnp.mean(dropped**2), model_state

        def loss_on(mesh, loss_fn=loss_fn):
            state = jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of(), rng=0)
            batch = jax.device_put(np.ones((BATCH, WIDTH), np.float32), NamedSharding(mesh, P("fsdp")))
            options = {"sharding": Sharding(mesh, {"w": P("fsdp")})} if has_specs else {}
            with jax.set_mesh(mesh):
                return jaxmp.make_train_step(loss_fn, **options)(state, batch)[1]["loss"]

        explicit = mesh_of(AxisType.Explicit)
        with pytest.raises(Exception, match=r"select `which` must .* have the same sharding as cases") as caught:
            loss_on(explicit)
        assert type(caught.value).__name__ == "ShardingTypeError"
        np.testing.assert_allclose(loss_on(explicit, untyped(loss_fn)), loss_on(mesh_of()), rtol=1e-5)

    def test_a_lookup_that_leaves_its_type_open_is_jaxs_error(self):
        def loss_fn(params, model_state, batch, rng):
            return jnp.mean(params["table"][batch] ** 2), model_state

        mesh, params = mesh_of(AxisType.Explicit), {"table": jnp.ones((WIDTH, WIDTH))}
        step = jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, {"table": P("fsdp")}))
        with pytest.raises(Exception, match=r"Use `.at\[...\].get\(out_sharding=\)`"):
            step(jaxmp.TrainState.create(params=params, tx=tx_of()), np.zeros(BATCH, np.int32))

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_jit_of_the_users_own_knows_the_mesh_by_the_state_or_by_what_is_around(self, kind):
        mesh, batch = mesh_of(kind), np.ones((BATCH, WIDTH), np.float32)
        step = self.step(mesh=mesh, donate=False)
        placed = jaxmp.TrainState.create_sharded(
            lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), Sharding(mesh, {"w": P("fsdp")})
        )
        expected = step(placed, batch)[1]["loss"]

        def loss(state, batch):
            return step(state, batch)[1]["loss"]

        assert jax.jit(loss)(placed, batch) == expected
        with jax.set_mesh(mesh):
            assert jax.jit(loss)(self.state(), batch) == expected
        states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), placed)
        np.testing.assert_allclose(jax.jit(jax.vmap(loss, (0, None)))(states, batch), [expected] * 2, rtol=1e-6)
