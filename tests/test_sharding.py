"""jaxmp.sharding: specs, states made in place, gathers with their reductions, and what crosses the wire."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from recompiles import compiled_once

import jaxmp
from jaxmp import sharding
from jaxmp.inspect import memory, traffic_groups
from jaxmp.inspect.program import compiling, targets
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes by itself

LAYERS, WIDTH, BATCH = 3, 64, 8


def mesh_of(kind=AxisType.Explicit, **sizes):
    sizes = sizes or {"fsdp": 4}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def make_params():
    rng = np.random.default_rng(0)

    def normal(*sizes):
        return jnp.asarray(rng.normal(size=sizes) / math.sqrt(WIDTH), jnp.float32)

    return {
        "up": normal(LAYERS, WIDTH, 2 * WIDTH),
        "down": normal(LAYERS, 2 * WIDTH, WIDTH),
        "bias": jnp.zeros((LAYERS, 2 * WIDTH)),
    }


def loss_on(specs, dtype="bfloat16", **options):
    """A loss over stacked layers that gathers one layer at a time."""
    of_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda leaf: isinstance(leaf, P))

    def loss_fn(params, model_state, batch, rng):
        def layer(x, params):
            whole = sharding.gather(params, of_layer, dtype, **options)
            h = (x.astype(dtype) @ whole["up"].astype(dtype)).astype(jnp.float32) + whole["bias"]
            return (jax.nn.gelu(h).astype(dtype) @ whole["down"].astype(dtype)).astype(jnp.float32), None

        x, _ = jax.lax.scan(layer, batch, params)
        return jnp.mean(x**2), model_state

    return loss_fn


def a_batch():
    return np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)


SPECS = {"up": P(None, None, "fsdp"), "down": P(None, "fsdp"), "bias": P()}
WHOLE = {name: P() for name in SPECS}


class TestSpecs:
    def test_the_largest_axis_that_divides_is_split(self):
        shapes = {"a": shape(512, 1024), "b": shape(1024, 512), "c": shape(510, 1026), "d": shape(2, 300, 1022)}
        found = sharding.fsdp_specs(shapes, mesh_of())
        assert found == {"a": P(None, "fsdp"), "b": P("fsdp"), "c": P(), "d": P(None, "fsdp")}

    def test_of_two_that_are_as_large_the_first(self):
        assert sharding.fsdp_specs({"a": shape(512, 512)}, mesh_of())["a"] == P("fsdp")

    def test_small_leaves_stay_whole(self):
        shapes = {"small": shape(255, 256), "large": shape(256, 256)}
        assert sharding.fsdp_specs(shapes, mesh_of()) == {"small": P(), "large": P("fsdp")}
        assert sharding.fsdp_specs(shapes, mesh_of(), min_size=1)["small"] == P(None, "fsdp")

    def test_axis_0_of_stacked_leaves_is_layers(self):
        shapes = {"blocks": {"w": shape(1024, 64, 128), "b": shape(1024, 128)}, "head": shape(1024, 64)}
        found = sharding.fsdp_specs(shapes, mesh_of(), min_size=8192, stacked=["blocks"])
        assert found == {"blocks": {"w": P(None, None, "fsdp"), "b": P()}, "head": P("fsdp")}

    def test_a_rule_is_the_whole_spec_of_all_below_and_the_first_wins(self):
        mesh = mesh_of(fsdp=2, tensor=2)
        shapes = {"mlp": {"up": shape(512, 1024), "down": shape(1024, 512)}, "head": shape(512, 512)}
        rules = {"mlp/up": P("fsdp", "tensor"), "**/mlp": P("tensor", "fsdp")}
        assert sharding.fsdp_specs(shapes, mesh, rules=rules) == {
            "mlp": {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")},
            "head": P("fsdp"),
        }

    def test_optimizer_and_average_follow_the_params(self):
        shapes = jax.eval_shape(
            lambda: jaxmp.TrainState.create(params=make_params(), tx=optax.adafactor(1e-3), ema=True, rng=0)
        )
        found = sharding.fsdp_specs(shapes, mesh_of(), min_size=1024, stacked=["**"])
        assert found.params == found.ema_params == SPECS
        leaves = jax.tree.leaves_with_path(found.opt_state, is_leaf=lambda leaf: isinstance(leaf, P))
        factored = [spec for path, spec in leaves if "v_row" in jax.tree_util.keystr(path)]
        assert factored and set(factored) == {P()}
        adam = jax.eval_shape(lambda: jaxmp.TrainState.create(params=make_params(), tx=optax.adam(1e-3)))
        inner = sharding.fsdp_specs(adam, mesh_of(), min_size=1024, stacked=["**"]).opt_state.inner_state[0]
        assert (inner.mu, inner.nu, inner.count) == (SPECS, SPECS, P())

    def test_moments_of_a_single_array_follow_it(self):
        shapes = jax.eval_shape(lambda: jaxmp.TrainState.create(params=jnp.ones((256, 256)), tx=optax.adam(1e-3)))
        assert sharding.fsdp_specs(shapes, mesh_of()).opt_state.inner_state[0].mu == P("fsdp")

    def test_one_pattern_is_a_list_of_one(self):
        shapes = {"blocks": shape(512, 256, 256)}
        assert sharding.fsdp_specs(shapes, mesh_of(), stacked="blocks") == {"blocks": P(None, "fsdp")}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"axis": "data"}, "axis must be of the mesh, which has 'fsdp', got 'data'"),
            ({"rules": {"**/kernal": P()}}, r"the pattern '\*\*/kernal' matches no leaf; the nearest paths: .*kernel"),
            ({"stacked": ["blocks"]}, "the pattern 'blocks' matches no leaf"),
            ({"rules": {"type:Dense": P()}}, "got the class pattern 'type:Dense'"),
            ({"rules": {"**/kernel": P("tensor")}}, "which has 'fsdp', got 'tensor'"),
            ({"rules": {"**/kernel": P("fsdp", "fsdp")}}, "names an axis of the mesh once"),
            (
                {"rules": {"**/kernel": P(None, None, "fsdp")}},
                r"an entry for each axis of the array at most.* shape \(6, 512\)",
            ),
            ({"rules": {"**/kernel": P("fsdp")}}, r"must divide an axis .* got 6 over 4 \('fsdp'\) in 'dense/kernel'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            sharding.fsdp_specs({"dense": {"kernel": shape(6, 512)}}, mesh_of(), **options)

    def test_numbers_have_shapes_by_eval_shape(self):
        assert sharding.fsdp_specs(jax.eval_shape(lambda: {"scale": 0.5}), mesh_of()) == {"scale": P()}


class TestDescription:
    def test_bytes_are_those_that_a_device_holds(self):
        mesh = mesh_of(AxisType.Auto, fsdp=2, tensor=2)
        shapes = {"a": shape(16, 8), "b": shape(16, 8, dtype="bfloat16"), "c": shape(3)}
        specs = {"a": P("fsdp", "tensor"), "b": P(("fsdp", "tensor")), "c": P()}
        found = sharding.describe(shapes, specs, mesh)
        arrays = jax.tree.map(
            lambda leaf, spec: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), NamedSharding(mesh, spec)),
            shapes,
            specs,
        )
        held = {name: array.addressable_shards[0].data.nbytes for name, array in arrays.items()}
        assert {row.path: row.bytes for row in found.rows} == held
        assert found.bytes == sum(held.values())
        assert [row.path for row in found.replicated] == ["c"]
        assert "12 in 1 leaves that each one holds whole" in str(found) and "P('fsdp', 'tensor')" in str(found)

    def test_specs_of_another_tree_are_refused(self):
        with pytest.raises(ValueError, match=r"specs are a tree like the arrays, .* got none for 'a'"):
            sharding.describe({"a": shape(4)}, {"b": P()}, mesh_of())


class TestInitialState:
    def test_has_shapes_without_being_made(self):
        state = jax.eval_shape(
            lambda: jaxmp.TrainState.create_sharded(make_params, optax.sgd(1.0), Sharding(mesh_of(), SPECS))
        )
        assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, jax.eval_shape(make_params))

    def test_is_that_of_one_device_in_its_place(self):
        mesh = mesh_of()
        fields = {"rng": 1, "ema": True, "model_state": {"batch_stats": np.arange(3.0, dtype=np.float32)}}
        tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())
        state = jaxmp.TrainState.create_sharded(make_params, tx, Sharding(mesh, SPECS), **fields)
        alone = jaxmp.TrainState.create(params=make_params(), tx=tx, **fields)
        for (path, leaf), other in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(alone), strict=True):
            assert leaf.sharding.mesh.shape == mesh.shape, path
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=str(path))
        inner = state.opt_state.inner_state[0]
        for tree in (state.params, state.ema_params, inner.mu, inner.nu):
            assert tree["up"].addressable_shards[0].data.shape == (LAYERS, WIDTH, 2 * WIDTH // 4)
            assert tree["bias"].sharding.is_fully_replicated

    def test_other_params_than_the_specs_are_refused(self):
        with pytest.raises(ValueError, match="specs are a tree like the arrays"):
            jaxmp.TrainState.create_sharded(make_params, optax.sgd(1.0), Sharding(mesh_of(), {"w": P()}))

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (P("tensor"), "which has 'fsdp', got 'tensor'"),
            (P("fsdp"), r"got 3 over 4 \('fsdp'\) in 'up'"),
            (P(None, None, None, "fsdp"), "an entry for each axis of the array at most"),
        ],
    )
    def test_specs_that_do_not_fit_are_refused(self, spec, message):
        with pytest.raises(ValueError, match=message):
            jaxmp.TrainState.create_sharded(make_params, optax.sgd(1.0), Sharding(mesh_of(), {**SPECS, "up": spec}))

    def test_numbers_of_numpy_are_what_they_are_for_create(self):
        fields = {"rng": np.int64(3), "ema": np.bool_(True)}
        state = jaxmp.TrainState.create_sharded(make_params, optax.sgd(1.0), Sharding(mesh_of(), SPECS), **fields)
        np.testing.assert_array_equal(jax.random.key_data(state.rng), jax.random.key_data(jax.random.key(3)))
        assert state.ema_params is not None


def reshards(jaxpr):
    """The dtypes of all reshards of a program that move data, bodies too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reshard" and eqn.invars[0].aval.ndim:
            found.append((eqn.invars[0].aval.dtype.name, str(eqn.outvars[0].aval)))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += reshards(inner) if hasattr(inner, "eqns") else []
    return found


class TestGather:
    @pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
    def test_weights_travel_in_half_and_gradients_in_what_was_asked(self, reduce_dtype):
        mesh = mesh_of()
        state = jaxmp.TrainState.create_sharded(make_params, optax.sgd(0.1), Sharding(mesh, SPECS))
        loss_fn = loss_on(SPECS, reduce_dtype=reduce_dtype)
        with jax.set_mesh(mesh):
            batch = jax.device_put(a_batch(), P("fsdp"))
            program = jax.make_jaxpr(jax.grad(lambda params: loss_fn(params, None, batch, None)[0]))(state.params)
        found = reshards(program.jaxpr)
        gathered = [dtype for dtype, to in found if "R:fsdp" in to]
        scattered = [dtype for dtype, to in found if "@fsdp" in to]
        assert set(gathered) == {"bfloat16"} and len(gathered) >= 2
        assert scattered == [reduce_dtype] * 2

    @pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "fsdp": 2}])
    @pytest.mark.parametrize("route", ["explicit", "auto", "shard_map"])
    def test_gradients_are_those_of_one_device(self, route, sizes):
        params, batch, axes = make_params(), a_batch(), tuple(sizes)
        alone = jax.jit(jax.grad(lambda params: loss_on(WHOLE, axes=axes)(params, None, batch, None)[0]))
        mesh = mesh_of(AxisType.Explicit if route == "explicit" else AxisType.Auto, **sizes)
        reduce_dtype = "bfloat16" if route == "auto" else "float32"
        loss_fn = loss_on(SPECS, axes=axes, reduce_dtype=reduce_dtype)
        with jax.set_mesh(mesh):
            expected = alone(params)
            if route == "shard_map":

                def gradient(params, batch):
                    return jax.grad(lambda params: loss_fn(params, None, batch, None)[0] / mesh.size)(params)

                fun = jax.shard_map(gradient, in_specs=(SPECS, P(axes)), out_specs=SPECS)
            else:
                params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, SPECS)
                batch = jax.device_put(batch, P(axes))
                fun = jax.grad(lambda params, batch: loss_fn(params, None, batch, None)[0])
            found = jax.jit(fun)(params, batch)
        for name, leaf in found.items():
            assert leaf.dtype == jnp.float32
            error = np.linalg.norm(np.asarray(leaf) - np.asarray(expected[name])) / np.linalg.norm(expected[name])
            assert error < 0.01, (name, error)

    def test_in_shard_map_small_leaves_are_summed_in_float32_too(self):
        mesh, specs = mesh_of(AxisType.Auto), {"bias": P()}

        def gradient(params, batch):
            def loss(params):
                bias = sharding.gather(params, specs, "bfloat16")["bias"].astype(jnp.bfloat16)
                return jnp.sum((bias * batch).astype(jnp.float32))

            return jax.grad(loss)(params)

        fun = jax.shard_map(gradient, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=specs)
        params, parts = {"bias": jnp.ones(8)}, jnp.asarray([256.0, 1.0, 1.0, 1.0], jnp.bfloat16)[:, None]
        assert jax.jit(fun)(params, parts)["bias"][0] == 259  # 256 or 260 in bfloat16

    def test_a_shard_map_that_hides_what_varies_is_refused(self):
        fun = jax.shard_map(
            lambda tree: sharding.gather(tree, {"a": P("fsdp")}, "bfloat16"),
            mesh=mesh_of(AxisType.Auto), in_specs=({"a": P("fsdp")},), out_specs={"a": P()}, check_vma=False,
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"check_vma=False.* hides it; leave"):
            fun({"a": jnp.ones(8)})

    def test_small_and_integer_leaves_are_left_alone(self):
        with jax.set_mesh(mesh_of()):
            tree = {"small": jnp.ones(3), "count": jnp.zeros((4,), jnp.int32)}
            specs = {"small": P(), "count": P("fsdp")}
            found = jax.jit(lambda tree: sharding.gather(tree, specs, "bfloat16"))(tree)
        assert (found["small"].dtype, found["count"].dtype) == (jnp.float32, jnp.int32)

    @pytest.mark.parametrize("place", [P(), P(None, "fsdp")])
    def test_a_weight_that_lies_elsewhere_gets_its_gradient_there(self, place):
        with jax.set_mesh(mesh_of()):
            w, x = jax.device_put(jnp.ones((8, 8)), place), jax.device_put(jnp.ones((8, 8)), P("fsdp"))

            def loss(w):
                return jnp.sum(x @ sharding.gather({"w": w}, {"w": P("fsdp")}, "bf16", axes="fsdp")["w"].astype("f4"))

            found = jax.jit(jax.grad(loss))(w)
        assert found.sharding.is_equivalent_to(w.sharding, 2)
        np.testing.assert_array_equal(np.asarray(found), 8.0)

    @pytest.mark.parametrize(
        ("dtype", "spec", "message"),
        [
            ("int8", P("fsdp"), "dtypes must be floating, got int8"),
            ("bfloat17", P("fsdp"), "unknown dtype 'bfloat17'; known names, nearest first: 'bfloat16'"),
            ("bfloat16", P(None, None, "fsdp"), "an entry for each axis of the array at most"),
            ("bfloat16", P(("fsdp", "tensor")), "which has 'fsdp', got 'tensor'"),
        ],
    )
    def test_dtypes_and_specs_that_are_none(self, dtype, spec, message):
        with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=message):
            sharding.gather({"a": jnp.ones((8, 8))}, {"a": spec}, dtype)

    def test_no_mesh(self):
        with pytest.raises(ValueError, match="over a mesh, and none is set; call the step within"):
            sharding.gather({"a": jnp.ones(4)}, {"a": P("fsdp")}, "bfloat16")

    @pytest.mark.parametrize(
        ("sizes", "kinds", "options", "message"),
        [
            ({"data": 4}, (AxisType.Explicit,), {}, "axes must be of the mesh, which has 'data', got 'fsdp'"),
            (
                {"fsdp": 4},
                (AxisType.Auto,),
                {},
                "XLA reduces gradients in the dtype that they are computed in, got reduce_dtype 'float32' for 'a' "
                "gathered in 'bfloat16'; make the mesh with axis_types=.*Explicit.*, or pass reduce_dtype='bfloat16'",
            ),
            (
                {"data": 2, "fsdp": 2},
                (AxisType.Auto, AxisType.Explicit),
                {"axes": ("data", "fsdp")},
                "must be of one type, got 'data' of type Auto, 'fsdp' of type Explicit",
            ),
            ({"fsdp": 4}, (AxisType.Explicit,), {"axes": ()}, "must be of one type, got none"),
            ({"fsdp": 4}, (AxisType.Explicit,), {"reduce_dtype": "float8_e5m2"}, "half dtype, got .*float8_e5m2"),
            ({"fsdp": 4}, (AxisType.Explicit,), {"reduce_dtype": "float64"}, "half dtype, got .*'float64'; pass"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, sizes, kinds, options, message):
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            jax.jit(lambda tree: sharding.gather(tree, {"a": P("fsdp")}, "bfloat16", **options))({"a": jnp.ones(4)})

    def test_in_shard_map_only_the_last_axes_of_an_axis_are_gathered(self):
        mesh = mesh_of(AxisType.Auto, fsdp=2, tensor=2)
        specs = {"a": P(("fsdp", "tensor"))}
        fun = jax.shard_map(
            lambda tree: sharding.gather(tree, specs, "bfloat16"),
            mesh=mesh,
            in_specs=(specs,),
            out_specs={"a": P("tensor")},
        )
        with pytest.raises(ValueError, match=r"gathered over the last axes .* for 'a' .* put fsdp last"):
            fun({"a": jnp.ones(8)})


class TestTraining:
    def steps(self, state, loss_fn, batches, **options):
        step = jaxmp.make_train_step(loss_fn, donate=False, **options)
        metrics = []
        for batch in batches:
            state, found = step(state, batch)
            metrics.append(found)
        assert compiled_once(step)
        return state, metrics

    def test_float32_params_are_those_of_one_device(self):
        mesh, batches = mesh_of(), [a_batch() * n for n in (1, 2, 3, 4, 5)]
        tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())
        split = jaxmp.TrainState.create_sharded(make_params, tx, Sharding(mesh, SPECS))
        with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
            on_mesh = [jax.device_put(batch, P("fsdp")) for batch in batches]
            split, _ = self.steps(split, loss_on(SPECS, "float32"), on_mesh)
        with jax.default_matmul_precision("highest"), jax.set_mesh(jax.make_mesh((1,), ("fsdp",))):
            alone = jaxmp.TrainState.create(params=make_params(), tx=tx)
            alone, _ = self.steps(alone, loss_on(WHOLE, "float32"), batches)
        for name, leaf in split.params.items():
            assert leaf.sharding.spec == SPECS[name] or leaf.sharding.is_fully_replicated
            own, other = np.asarray(leaf), np.asarray(alone.params[name])
            assert np.linalg.norm(own - other) / max(np.linalg.norm(other), 1e-3) < 2e-6, name

    def test_an_infinity_in_one_shard_skips_the_step_on_all(self):
        mesh, bad = mesh_of(), a_batch()
        bad[BATCH // 2, 0] = np.inf
        tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale(2.0**15))
        state = jaxmp.TrainState.create_sharded(make_params, tx, Sharding(mesh, SPECS))
        with jax.set_mesh(mesh):
            batches = [jax.device_put(batch, P("fsdp")) for batch in (a_batch(), bad)]
            first, _ = self.steps(state, loss_on(SPECS), batches[:1])
            both, metrics = self.steps(state, loss_on(SPECS), batches)
        assert [bool(found["skipped"]) for found in metrics] == [False, True]
        assert float(jaxmp.get_loss_scale(both.opt_state).loss_scale) == 2.0**14
        jax.tree.map(np.testing.assert_array_equal, both.params, first.params)
        jax.tree.map(np.testing.assert_array_equal, both.opt_state.inner_state, first.opt_state.inner_state)


class TestCollectives:
    def test_of_a_gather_and_its_gradient_by_layer(self):
        mesh = mesh_of()
        state = jaxmp.TrainState.create_sharded(make_params, optax.sgd(0.1), Sharding(mesh, SPECS))
        with jax.set_mesh(mesh):
            batch = jax.device_put(a_batch(), P("fsdp"))
            step = jaxmp.make_train_step(loss_on(SPECS, "float32"))
            step(state, batch)
            found = jaxmp.inspect.collectives(step.lower(state, batch).compile())
        weight = 4 * WIDTH * 2 * WIDTH
        gathers = [row for row in found.rows if row.kind == "all-gather" and row.bytes == weight]
        assert sum(row.count for row in gathers) == 2 * LAYERS  # once for two weights in each turn: the result is kept
        assert {(row.dtype, row.axis) for row in found.rows} == {("float32", "fsdp")}
        assert sum(row.wire for row in gathers) == 2 * LAYERS * weight * 3 / 4
        params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        assert found.bytes_per_param(state.params) == found.wire / params
        assert f"{found.wire:,.0f} bytes sent by a device" in str(found)

    @pytest.mark.parametrize(
        ("sizes", "spec", "axes", "expected"),
        [
            ({"fsdp": 8}, P("fsdp"), ("fsdp",), 8 * 7 / 8),
            ({"fsdp": 8}, P(), ("fsdp",), 2 * 4 * 7 / 8),  # one all-reduce
            ({"data": 2, "fsdp": 4}, P("fsdp"), ("data", "fsdp"), 8 * 3 / 4 + 2 * 4 / 4 / 2),
            ({"fsdp": 4, "tensor": 2}, P("fsdp", "tensor"), ("fsdp",), 8 / 2 * 3 / 4),
        ],
    )
    def test_the_ideal_by_hand(self, sizes, spec, axes, expected):
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        leaf = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spec))
        assert jaxmp.inspect.ideal_wire([leaf, leaf], axes) == 2 * 64 * 64 * expected

    @pytest.mark.parametrize(
        ("text", "groups"),
        [
            ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
            ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
            ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
            ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
            ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
            ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
            ("replica_groups={}", []),
            ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ],
    )
    def test_groups_in_each_notation(self, text, groups):
        assert traffic_groups.groups_of(text) == groups

    def test_a_notation_that_is_not_known_is_an_error(self):
        with pytest.raises(ValueError, match=r"XLA's notations .* got replica_groups=<4x2>; take a JAX"):
            traffic_groups.groups_of("all-reduce(%x), replica_groups=<4x2>, to_apply=%add")

    def test_axes_of_groups(self):
        mesh = mesh_of(data=2, fsdp=2)
        assert traffic_groups.axis_of([[0, 1], [2, 3]], mesh) == "fsdp"
        assert traffic_groups.axis_of([[0, 2], [1, 3]], mesh) == "data"
        assert traffic_groups.axis_of([[0, 1, 2, 3]], mesh) == "data+fsdp"
        assert traffic_groups.axis_of([[0, 1], [1, 0]], mesh) == "fsdp"
        assert traffic_groups.axis_of([[0, 1]], None) == "2 devices"


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


@pytest.mark.skipif(targets.missing() is not None, reason="the packages that compile for a GPU are not installed")
class TestForEightGPUs:
    """Compiled for H200s that are not there, where half collectives stay half."""

    def test_weights_cross_the_wire_in_half_and_gradients_in_float32(self, step_and_shapes):
        step, (state, batch) = step_and_shapes
        found = jaxmp.inspect.collectives(compiling.compiled(step, (state, batch), "h200", "1x2x4"))
        weights = sum(leaf.size for name, leaf in state.params.items() if name != "bias")
        moved = {(row.kind, row.dtype): 0.0 for row in found.rows}
        for row in found.rows:
            moved[row.kind, row.dtype] += row.wire
            assert row.axis == "fsdp"
        assert set(moved) == {("all-gather", "bfloat16"), ("reduce-scatter", "float32"), ("all-reduce", "float32")}
        assert moved["reduce-scatter", "float32"] == 4 * weights * 7 / 8
        assert moved["all-gather", "bfloat16"] <= 2 * 2 * weights * 7 / 8

    def test_memory_is_that_of_one_device(self, step_and_shapes):
        step, (state, batch) = step_and_shapes
        plan = memory(step, device="h200")(state, batch)
        held = sharding.describe(state, jax.tree.map(lambda leaf: leaf.sharding.spec, state), batch.sharding.mesh)
        assert sum(plan.by_kind.values()) == plan.peak
        kinds = plan.by_kind["params"] + plan.by_kind["optimizer"]
        assert abs(kinds - held.bytes) < 100  # the key and the counters are of other kinds
        assert plan.by_kind["batch"] == 4 * BATCH * WIDTH

    def test_a_topology_that_does_not_fit_is_refused(self, step_and_shapes):
        step, args = step_and_shapes
        with pytest.raises(ValueError, match=r"must have the GPUs of the mesh, got '1x1x4' of 4 and a mesh of 8"):
            compiling.compiled(step, args, "h200", "1x1x4")
        with pytest.raises(ValueError, match=r"slices × hosts × GPUs of each host, .* got '8'"):
            compiling.compiled(step, args, "h200", "8")
