"""Products in float8 against casts by hand and float64; the recipe, the policy, the device."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Float8, Policy, PolicyMap, get_policy, hardware
from jaxmp.inspect.program import targets
from jaxmp.policy import float8, float8_product
from jaxmp.sharding import Sharding
from jaxmp.training import loss_function

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
PLAIN = (((1,), (0,)), ((), ()))
RECIPE = Float8()


def drawn(*shape, seed=0, dtype=jnp.bfloat16, spread=1.0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape)), dtype)


def dot(x, w, recipe=RECIPE, dimensions=PLAIN, **options):
    return float8_product.dot_general(x, w, dimensions, recipe, **options)


def exact(x):
    return np.asarray(x, np.float64)


def by_hand(x, dtype=E4M3):
    """What stands for ``x``: the smallest bfloat16 scale with which its largest fits, and a cast."""
    x = np.asarray(x, np.float32)
    scale = np.float32(np.max(np.abs(x))) / np.float32(ml_dtypes.finfo(dtype).max)
    rounded = np.asarray(scale, ml_dtypes.bfloat16)
    if np.float32(rounded) < scale:
        rounded = np.nextafter(rounded, np.asarray(np.inf, ml_dtypes.bfloat16))
    quantised = (x / np.float32(rounded)).astype(dtype)
    return exact(quantised.astype(ml_dtypes.bfloat16) * rounded)  # 4 bits times 8 are rounded once more, as on a TPU


def with_cotangents(fun, operands, cotangent):
    """The result of a function, and the cotangents of its operands; one program."""

    def run(operands, cotangent):
        result, pull = jax.vjp(fun, *operands)
        return result, pull(cotangent)

    return jax.jit(run)(tuple(operands), cotangent)


def off(found, wanted):
    """The relative error of an array, by its norm."""
    wanted = exact(wanted)
    return np.linalg.norm(exact(found) - wanted) / np.linalg.norm(wanted)


ROUNDED = 0.004
"""Of a bfloat16 result."""


@pytest.fixture(scope="module")
def operands():
    return drawn(48, 64), drawn(64, 32, seed=1), drawn(48, 32, seed=2, spread=2.0)


class TestNumbers:
    def test_a_product_is_that_of_operands_cast_by_hand(self, operands):
        x, w, _ = operands
        found = dot(x, w)
        assert found.dtype == jnp.bfloat16
        assert off(found, by_hand(x) @ by_hand(w)) < ROUNDED
        assert 0.01 < off(found, exact(x) @ exact(w)) < 0.06

    @pytest.mark.once
    @pytest.mark.parametrize(
        "recipe",
        [RECIPE, *(Float8(**{name: value}) for name, value in [
            ("gradient", "e4m3"), ("accumulate", "fast"), ("accumulate", "precise"), ("keep", "compute"),
        ])],
        ids=str,
    )  # fmt: skip
    def test_gradients_are_products_of_what_was_cast_and_cotangents_cast_by_hand(self, recipe, operands):
        x, w, g = operands
        _, pull = jax.vjp(functools.partial(dot, recipe=recipe), x, w)
        dx, dw = jax.jit(pull)(g)
        rounded = by_hand(g, E4M3 if recipe.gradient == "float8_e4m3fn" else E5M2)
        assert off(dx, rounded @ by_hand(w).T) < ROUNDED
        assert off(dw, by_hand(x).T @ rounded) < ROUNDED

    @pytest.mark.once
    @pytest.mark.parametrize("weight", ["lhs", "rhs"])
    def test_the_gradient_of_a_weight_may_be_computed_in_bfloat16(self, weight, operands):
        x, w, g = operands
        recipe = Float8(weight_gradient="compute")
        dx, dw = jax.vjp(functools.partial(dot, recipe=recipe, weight=weight), x, w)[1](g)
        rounded = by_hand(g, E5M2)
        of_x, of_w = (g, rounded) if weight == "lhs" else (rounded, g)
        assert off(dx, exact(of_x) @ (exact(w) if weight == "lhs" else by_hand(w)).T) < ROUNDED
        assert off(dw, (exact(x) if weight == "rhs" else by_hand(x)).T @ exact(of_w)) < ROUNDED

    def test_float32_operands_are_rounded_once_and_results_are_float32(self):
        x, w = drawn(48, 64, dtype=jnp.float32), drawn(64, 32, seed=1, dtype=jnp.float32)
        found, pull = jax.vjp(dot, x, w)
        assert found.dtype == jnp.float32 and off(found, by_hand(x) @ by_hand(w)) < 1e-6
        g = drawn(48, 32, seed=2, dtype=jnp.float32)
        dx, dw = pull(g)
        assert dx.dtype == dw.dtype == jnp.float32 and off(dw, by_hand(x).T @ by_hand(g, E5M2)) < ROUNDED
        assert dot(x, w, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16

    @pytest.mark.once
    @pytest.mark.parametrize(("left", "right", "dimensions"), [
        ((4, 16, 64), (64, 32), (((2,), (0,)), ((), ()))),
        ((48, 64), (32, 64), (((1,), (1,)), ((), ()))),
        ((16, 4, 16), (4, 16, 32), (((1, 2), (0, 1)), ((), ()))),
        ((3, 16, 64), (3, 64, 32), (((2,), (1,)), ((0,), (0,)))),
        ((64, 32), (48, 64), (((0,), (1,)), ((), ()))),
    ])  # fmt: skip
    def test_any_dimension_numbers_do(self, left, right, dimensions):
        x, w = drawn(*left), drawn(*right, seed=1)

        def wide(x, w):
            return jax.lax.dot_general(x, w, dimensions, precision="highest", preferred_element_type=jnp.float32)

        stands = [jnp.asarray(by_hand(value), jnp.float32) for value in (x, w)]
        g = drawn(*jax.eval_shape(wide, x, w).shape, seed=2)
        wanted, wants = with_cotangents(wide, stands, jnp.asarray(by_hand(g, E5M2), jnp.float32))
        found, own = with_cotangents(functools.partial(dot, dimensions=dimensions), (x, w), g)
        assert off(found, wanted) < ROUNDED
        for got, want in zip(own, wants, strict=True):
            assert off(got, want) < ROUNDED

    @pytest.mark.once
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_scales_are_bfloat16_numbers_with_which_the_largest_just_fits(self, dtype):
        largest = np.exp2(np.random.default_rng(0).uniform(-80, 120, 500)).astype(np.float32)
        scales = np.array(jax.lax.map(lambda x: float8_product._scale(x, np.dtype(dtype).name), largest[:, None]))
        assert np.array_equal(scales, scales.astype(ml_dtypes.bfloat16).astype(np.float32))
        ratio = largest.astype(np.float64) / float(ml_dtypes.finfo(dtype).max) / scales
        assert ratio.min() > 1 - 2**-7 and ratio.max() <= 1

    @pytest.mark.once
    @pytest.mark.parametrize("size", [1e-40, 1e-37, 1e-20, 1e20, 3e38])
    def test_tiny_and_huge_values_neither_vanish_nor_overflow(self, size):
        x = jnp.asarray(np.diag(np.full(16, size)), jnp.float32)
        found = dot(x, jnp.eye(16))
        assert np.all(np.isfinite(found))
        if size > 1e-38:  # below, XLA's CPU takes numbers for zero
            assert off(found, x) < (0.1 if size < 1e-35 else 2 * 2**-7)  # of both scales, rounded up

    @pytest.mark.once
    def test_zeros_are_finite_with_finite_gradients(self):
        w = drawn(32, 16)
        found, pull = jax.vjp(dot, jnp.zeros((16, 32), jnp.bfloat16), w)
        assert not np.any(found)
        dx, dw = pull(jnp.zeros((16, 16), jnp.bfloat16))
        assert not np.any(dx) and not np.any(dw)
        none, pull = jax.vjp(dot, jnp.zeros((0, 32), jnp.bfloat16), w)
        assert none.shape == (0, 16) and not np.any(pull(none)[1])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("where", ["x", "w", "gradient"])
    def test_what_is_not_finite_stays_so(self, bad, where):
        values = {"x": drawn(16, 32), "w": drawn(32, 48, seed=1), "gradient": drawn(16, 48, seed=2)}
        values[where] = values[where].at[3, 5].set(bad)
        found, pull = jax.vjp(dot, values["x"], values["w"])
        dx, dw = pull(values["gradient"])
        is_finite = [bool(np.all(np.isfinite(exact(each)))) for each in (found, dx, dw)]
        assert (
            is_finite == {"x": [False, True, False], "w": [False, False, True], "gradient": [True, False, False]}[where]
        )

    def test_a_nan_stays_in_its_row(self):
        x = drawn(16, 32).at[3, 5].set(np.nan)
        assert np.isnan(exact(dot(x, drawn(32, 16)))).any(axis=1).nonzero()[0].tolist() == [3]


def loss(x, w, recipe=RECIPE):
    return jnp.sum(jnp.square(dot(x, w, recipe).astype(jnp.float32)))


class TestTransformations:
    def test_members_of_a_vmap_share_a_scale(self, operands):
        _, w, _ = operands
        xs = drawn(3, 48, 64, spread=1.5)
        whole = by_hand(xs)
        assert off(jax.vmap(dot, (0, None))(xs, w), whole @ by_hand(w)) < ROUNDED
        ws = drawn(3, 64, 32, seed=5)
        assert off(jax.jit(jax.vmap(dot))(xs, ws), whole @ by_hand(ws)) < ROUNDED
        nested = jax.vmap(jax.vmap(dot, (0, None)), (0, None))(xs.reshape(3, 2, 24, 64), w)
        assert off(nested.reshape(3, 48, 32), whole @ by_hand(w)) < ROUNDED

    def test_gradients_of_a_vmap_and_a_vmap_of_gradients_share_scales(self, operands):
        _, w, _ = operands
        xs, gs = drawn(3, 48, 64), drawn(3, 48, 32, seed=3)
        wanted = by_hand(xs).transpose(0, 2, 1) @ by_hand(gs, E5M2)

        of_all = jax.jit(lambda x, w, g: jax.vjp(jax.vmap(dot, (0, None)), x, w)[1](g)[1])
        assert off(of_all(xs, w, gs), wanted.sum(0)) < 0.02  # XLA's CPU sums some products in bfloat16
        each = jax.vmap(lambda x, g: jax.vjp(dot, x, w)[1](g)[1])
        assert off(jax.jit(each)(xs, gs), wanted) < ROUNDED

    def test_a_scan_over_layers_gives_what_a_loop_gives(self):
        x, ws = drawn(32, 32), drawn(3, 32, 32, seed=1, spread=0.0) / 8

        def scanned(x, ws):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(dot(x, w)), None), x, ws)[0].astype(jnp.float32))

        def looped(x, ws):
            for w in ws:
                x = jnp.tanh(dot(x, w))
            return jnp.sum(x.astype(jnp.float32))

        for got, want in zip(jax.grad(scanned, (0, 1))(x, ws), jax.grad(looped, (0, 1))(x, ws), strict=True):
            assert off(got, want) < 0.06  # what XLA rounds differently may be quantised differently

    @pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names(float8_product.RESIDUALS)])
    def test_remat_changes_no_bit(self, policy, operands):
        x, w, _ = operands
        wanted = jax.jit(jax.grad(loss, (0, 1)))(x, w)
        found = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(x, w)
        assert all(np.array_equal(got, want) for got, want in zip(found, wanted, strict=True))

    def test_remat_by_name_keeps_the_operands_in_float8_and_quantises_once(self, operands):
        x, w, _ = operands
        policy = loss_function.REMAT["float8"]
        kept = jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x, w: loss(jnp.sin(x), w), policy=policy), (0, 1)))(x, w)
        again = next(eqn for eqn in reversed(kept.eqns) if eqn.primitive.name == "remat2")
        sizes = [atom.aval for atom in again.invars if atom.aval.size > 1]
        assert sorted(f"{aval.dtype}{aval.shape}" for aval in sizes if aval.dtype.itemsize == 1) == [
            "uint8(48, 64)", "uint8(64, 32)",
        ]  # fmt: skip
        assert len(sizes) == 4  # and the arguments

    def test_tangents_are_those_of_the_operands_that_were_cast(self, operands):
        x, w, _ = operands
        dx, dw = drawn(48, 64, seed=7), drawn(64, 32, seed=8)
        found, tangent = jax.jvp(dot, (x, w), (dx, dw))
        assert np.array_equal(found, dot(x, w))
        assert off(tangent, exact(dx) @ by_hand(w) + by_hand(x) @ exact(dw)) < 2 * ROUNDED
        assert off(jax.jvp(lambda w: dot(x, w), (w,), (dw,))[1], by_hand(x) @ exact(dw)) < ROUNDED

    @pytest.mark.parametrize("recipe", [RECIPE, Float8(keep="compute"), Float8(weight_gradient="compute")], ids=str)
    @pytest.mark.parametrize("forward_over", [True, False])
    def test_second_derivatives_are_float64s_but_for_the_rounding(self, forward_over, recipe, operands):
        x, w, _ = operands
        vx, vw = drawn(48, 64, seed=7), drawn(64, 32, seed=8)
        gradient = jax.grad(functools.partial(loss, recipe=recipe), (0, 1))

        def along(scale):
            v = (vx * scale, vw * scale)
            if forward_over:
                return jax.jit(lambda v: jax.jvp(gradient, (x, w), v)[1])(v)

            def inner(x, w):
                return sum(jnp.sum((g * d).astype(jnp.float32)) for g, d in zip(gradient(x, w), v, strict=True))

            return jax.jit(jax.grad(inner, (0, 1)))(x, w)

        x64, w64, vx64, vw64 = map(exact, (x, w, vx, vw))
        y, dy = x64 @ w64, vx64 @ w64 + x64 @ vw64
        wanted = 2 * (dy @ w64.T + y @ vw64.T), 2 * (vx64.T @ y + x64.T @ dy)
        for got, want in zip(along(1), wanted, strict=True):
            assert off(got, want) < 0.1
        for got, want in zip(along(2.0**-40), wanted, strict=True):  # in float8 without a scale it would vanish
            assert off(exact(got) * 2.0**40, want) < 0.1

    def test_what_is_not_differentiated_costs_no_product(self, operands):
        x, w, _ = operands
        for argument in (0, 1):
            program = str(jax.make_jaxpr(jax.grad(loss, argument))(x, w))
            assert len(re.findall(r"\bdot_general\b", program)) == 2

    def test_precise_sums_are_asked_for_where_the_recipe_says(self, operands):
        x, w, _ = operands

        def precisions(accumulate):
            fun = functools.partial(loss, recipe=Float8(accumulate=accumulate))
            programs = [str(jax.make_jaxpr(each)(x, w)) for each in (fun, jax.grad(fun))]
            return [sorted(re.findall(r"precision=\(?\w*\.?(DEFAULT|HIGHEST)", program)) for program in programs]

        assert precisions("fast") == [["DEFAULT"], ["DEFAULT", "DEFAULT"]]
        assert precisions("precise") == [["HIGHEST"], ["HIGHEST", "HIGHEST"]]
        assert precisions("fast_forward") == [["DEFAULT"], ["DEFAULT", "HIGHEST"]]

    def test_donated_operands_do(self, operands):
        x, w, g = operands
        step = jax.jit(lambda w, x, g: w - jax.vjp(dot, x, w)[1](g)[1], donate_argnums=0)
        assert off(step(w.copy(), x, g), exact(w) - by_hand(x).T @ by_hand(g, E5M2)) < 2 * ROUNDED


class TestShards:
    @pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
    def test_shards_of_an_array_have_one_scale(self, spec, operands):
        x, w, g = operands
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        of_both = jax.jit(lambda x, w, g: jax.vjp(dot, x, w)[1](g))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(w, NamedSharding(mesh, P())),
                  jax.device_put(g, NamedSharding(mesh, P("d")))]  # fmt: skip
        for got, want in zip(of_both(*placed), of_both(x, w, g), strict=True):
            assert off(got, exact(want)) < ROUNDED

    @pytest.mark.parametrize("check", [True, False])
    def test_in_shard_map_the_scale_is_that_of_all_shards(self, check, operands):
        x, w, g = operands
        x = x.at[0, 0].set(40)  # so that the other shards' own scales would be smaller
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P("d"), P(), P("d")),
            out_specs=(P("d"), P("d"), P("d")),
            check_vma=check,
        )
        def local(x, w, g):
            w = jax.lax.pcast(w, "d", to="varying") if check else w
            y, pull = jax.vjp(dot, x, w)
            dx, dw = pull(g)
            return y, dx, dw[None]

        y, dx, dw = jax.jit(local)(x, w, g)
        assert off(y, by_hand(x) @ by_hand(w)) < ROUNDED
        assert off(dx, by_hand(g, E5M2) @ by_hand(w).T) < ROUNDED
        assert off(exact(dw).sum(0), by_hand(x).T @ by_hand(g, E5M2)) < ROUNDED

    @pytest.mark.parametrize("check", [True, False])
    @pytest.mark.parametrize("kind", ["cond", "switch", "while"])
    def test_where_one_shard_alone_computes_it_has_a_scale_of_its_own(self, kind, check, operands):
        x, w, g = operands
        x *= jnp.repeat(jnp.asarray([1, 3, 5, 7], x.dtype), 12)[:, None]
        w, g = (jnp.pad(each, ((0, 0), (0, 32))) for each in (w, g))
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check)
        def local(x, w):
            w = jax.lax.pcast(w, "d", to="varying") if check else w
            first = jax.lax.axis_index("d") == 0
            if kind == "cond":
                return jax.lax.cond(first, dot, lambda x, w: x, x, w)
            if kind == "switch":
                return jax.lax.switch(first.astype(int), [lambda x, w: x, dot], x, w)
            turns = first.astype(int)
            return jax.lax.while_loop(lambda turn: turn[0] < turns, lambda turn: (turn[0] + 1, dot(turn[1], w)),
                                      (turns * 0, x))[1]  # fmt: skip

        assert "pmax" not in str(jax.make_jaxpr(local)(x, w))  # for which the first would wait forever
        expected = np.concatenate([by_hand(x[:12]) @ by_hand(w), exact(x[12:])])
        assert off(jax.jit(local)(x, w), expected) < ROUNDED
        if kind != "while":
            dx, _ = jax.jit(lambda x, w: jax.vjp(local, x, w)[1](g))(x, w)
            assert off(dx, np.concatenate([by_hand(g[:12], E5M2) @ by_hand(w).T, exact(g[12:])])) < ROUNDED

    def test_of_a_replicated_weight_the_gradient_is_summed_over_shards(self, operands):
        x, w, g = operands
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        local = jax.shard_map(lambda x, w, g: jax.vjp(lambda w: dot(x, w), w)[1](g)[0], mesh=mesh,
                              in_specs=(P("d"), P(), P("d")), out_specs=P())  # fmt: skip
        assert off(jax.jit(local)(x, w, g), by_hand(x).T @ by_hand(g, E5M2)) < 2 * ROUNDED

    def test_on_a_mesh_with_explicit_axes_results_say_where_they_are(self, operands):
        x, w, g = operands
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            placed = [jax.device_put(each, spec) for each, spec in ((x, P("d")), (w, P()), (g, P("d")))]
            y, pull = jax.vjp(jax.jit(dot), *placed[:2])
            assert jax.typeof(y).sharding.spec == P("d", None)
            dx, _ = pull(placed[2])
            assert off(dx, by_hand(g, E5M2) @ by_hand(w).T) < ROUNDED


SMALL = "compute=bfloat16,output=float32,float8(min_dim=16,min_tokens=16,weight_gradient={})"


class TestTrainSteps:
    """On a mesh each device has some rows, and part of a weight."""

    @staticmethod
    def loss(params, model_state, batch, rng):
        """One whose gradient by the product is given."""
        return jnp.sum((batch["x"] @ params["w"].T).astype(jnp.float32) * batch["g"]), model_state

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("weight_gradient", ["float8", "compute"])
    def test_gradients_are_those_of_one_scale_summed_in_float32(self, weight_gradient, kind, operands, monkeypatch):
        monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
        mesh, specs = jax.make_mesh((4,), ("fsdp",), axis_types=(kind,)), {"w": P(None, "fsdp")}
        # Of one device alone the scale would be another.
        sizes = np.repeat(np.array([1.0, 3.0, 11.0, 50.0], np.float32), 12)[:, None]
        x, g = (np.asarray((each * sizes).astype(jnp.bfloat16), np.float32) for each in map(np.float32, operands[::2]))
        tx = jaxmp.loss_scaling(optax.sgd(1.0), jaxmp.NoOpLossScale())
        state = jaxmp.TrainState.create_sharded(lambda: {"w": jnp.zeros((32, 64))}, tx, Sharding(mesh, specs))
        policy = SMALL.format(weight_gradient)
        step = jaxmp.make_train_step(self.loss, policy=policy, sharding=Sharding(mesh, specs))
        new, _ = step(state, {"x": x, "g": g})
        is_exact = weight_gradient == "compute"
        wanted = exact(g).T @ exact(x) if is_exact else by_hand(g, E5M2).T @ by_hand(x)
        assert off(new.params["w"], -wanted) < (1e-6 if is_exact else ROUNDED)  # XLA's CPU rounds no stand-ins

    @pytest.mark.parametrize(
        ("options", "reduce"),
        [({"remat": "full"}, "each"), ({"accumulate_steps": 2}, "each"), ({"accumulate_steps": 2}, "once")],
        ids=str,
    )
    def test_layers_in_a_scan_give_what_one_device_gives(self, options, reduce, monkeypatch):
        monkeypatch.setenv("JAXMP_FLOAT8", "emulate")

        def loss(params, model_state, x, rng):
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
            return jnp.mean(jnp.square(x @ params["out"])), model_state

        params = {
            name: 0.1 * drawn(*sizes, 32, 32, dtype=jnp.float32) for name, sizes in (("layers", (3,)), ("out", ()))
        }
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
        specs = {"layers": P(None, "fsdp"), "out": P("fsdp")}
        tx = jaxmp.loss_scaling(optax.sgd(1.0), jaxmp.NoOpLossScale())
        x, found = np.asarray(drawn(128, 32, dtype=jnp.float32)), []
        policy = SMALL.format("float8")
        for where in ({}, {"sharding": Sharding(mesh, specs, reduce=reduce)}):
            state = jaxmp.TrainState.create(params=jax.tree.map(jnp.copy, params), tx=tx)
            if where:
                state = jaxmp.TrainState.create_sharded(
                    lambda: jax.tree.map(jnp.copy, params), tx, Sharding(mesh, specs)
                )
            new, metrics = jaxmp.make_train_step(loss, policy=policy, **where, **options)(state, x)
            found.append((jax.tree.map(lambda a, b: exact(a) - exact(b), new.params, params), metrics["loss"]))
        (one, loss_of_one), (many, loss_of_many) = found
        assert abs(float(loss_of_one) / float(loss_of_many) - 1) < 1e-3
        for name in params:
            assert off(many[name], one[name]) < ROUNDED  # the gradients of one device are


@pytest.mark.once
class TestRecipe:
    @pytest.mark.parametrize(("recipe", "text"), [
        (Float8(), "float8"),
        (Float8(min_dim=1024), "float8(min_dim=1024)"),
        (Float8(gradient="e4m3", keep="compute"), "float8(gradient=float8_e4m3fn,keep=compute)"),
    ])  # fmt: skip
    def test_its_text_reads_back(self, recipe, text):
        assert str(recipe) == text and float8.get_recipe(text) == recipe and float8.get_recipe("None") is None
        assert float8.get_recipe(text.replace(",", " , ").upper()) == recipe

    @pytest.mark.parametrize(("given", "message"), [
        ({"forward": "e5m2"}, r"must be float8_e4m3fn, for .*; got forward='float8_e5m2'; leave it 'float8_e4m3fn'"),
        ({"forward": "e5m2", "gradient": "e5m2"}, r"no GPU multiplies two of float8_e5m2"),
        ({"forward": "bfloat16"}, r"forward of a Float8 must be 'float8_e4m3fn', got 'bfloat16'; nearest: 'float8_"),
        ({"gradient": "int8"}, r"gradient of a Float8 must be 'float8_e4m3fn' or 'float8_e5m2', got 'int8'"),
        ({"weight_gradient": "bf16"}, r"weight_gradient of a Float8 must be 'float8' or 'compute', got 'bf16'"),
        ({"accumulate": "quick"}, r"must be 'fast' or 'precise' or 'fast_forward', got 'quick'; nearest: "),
        ({"keep": None}, r"keep of a Float8 must be 'float8' or 'compute', got None"),
        ({"min_dim": 0}, r"min_dim of a Float8 must be a positive integer, .* got 0; 1 takes every size"),
        ({"min_tokens": 2.5}, r"min_tokens of a Float8 must be a positive integer, .* got 2.5"),
        ({"min_dim": True}, r"got True"),
    ])  # fmt: skip
    def test_errors_say_the_rule_what_came_and_the_remedy(self, given, message):
        with pytest.raises(ValueError, match=message):
            Float8(**given)

    @pytest.mark.parametrize(("text", "message"), [
        ("float7", r"named 'float8' or 'float8\(FIELD=VALUE,…\)', got 'float7'"),
        ("float8(", r"got 'float8\('"),
        ("float8(min_dim=16))", r"got 'float8\(min_dim=16\)\)'; write e.g. 'float8\("),
        ("float8(min_dims=3)", r"must be FIELD=VALUE, .* got 'min_dims=3' in .*; fields, nearest first: 'min_dim'"),
        ("float8(min_dim)", r"got 'min_dim' in"),
        ("float8(min_dim=1,min_dim=2)", r"each field once, got 'min_dim=2'"),
        ("float8(min_dim=-1)", r"must be a positive integer, .* got -1"),
        ("float8(min_dim=x)", r"must be a positive integer, .* got 'x'"),
    ])  # fmt: skip
    def test_errors_of_texts(self, text, message):
        with pytest.raises(ValueError, match=message):
            float8.get_recipe(text)
        with pytest.raises(TypeError, match=r"must be a jaxmp.Float8, a text such as .* got 8"):
            float8.get_recipe(8)

    def test_sizes_may_be_numpys(self):
        recipe = Float8(min_dim=np.int64(16), min_tokens=np.uint8(32))
        assert recipe == Float8(min_dim=16, min_tokens=32) and type(recipe.min_dim) is int

    def test_products_that_are_too_small_or_not_aligned_are_refused(self):
        def why(tokens, inner, outer, recipe=RECIPE, **options):
            shapes = jax.ShapeDtypeStruct((tokens, inner), "bfloat16"), jax.ShapeDtypeStruct((inner, outer), "bfloat16")
            return float8.refusal(*shapes, PLAIN, recipe, **options)

        assert why(1024, 1536, 1536) is None
        assert why(1024, 768, 3072) == why(1024, 3072, 768) == "768 < 1536"
        assert why(1024, 2048, 50257) == "50257 % 16" and why(1032, 2048, 2048) == "1032 % 16"
        assert why(512, 2048, 2048) == "512 tokens < 1024"
        assert why(512, 768, 768, Float8(min_dim=512, min_tokens=256)) is None
        assert why(2048, 2048, 1024, weight="lhs") is None and why(1024, 2048, 512, weight="lhs") == "1024 < 1536"
        batched = jax.ShapeDtypeStruct((4, 2048, 2048), "bfloat16")
        assert float8.refusal(batched, batched, (((2,), (1,)), ((0,), (0,))), RECIPE) == "batched"
        heads = jax.ShapeDtypeStruct((8, 256, 16, 128), "bfloat16"), jax.ShapeDtypeStruct((16, 128, 2048), "bfloat16")
        assert float8.refusal(*heads, (((2, 3), (0, 1)), ((), ())), RECIPE) is None


@pytest.mark.once
class TestPolicy:
    def test_its_text_reads_back(self):
        policy = get_policy("mixed_float8")
        assert policy == Policy("float32", "bfloat16", "float32", float8=Float8()) == get_policy("mixed_fp8")
        text = "params=float32,compute=bfloat16,output=float32,float8"
        assert str(policy) == text and get_policy(text) == policy
        own = Policy("f32", "bf16", "f32", matmul_precision="highest", float8="float8(min_dim=1024, gradient=e4m3)")
        assert str(own).endswith(",matmul_precision=highest,float8(gradient=float8_e4m3fn,min_dim=1024)")
        assert get_policy(str(own)) == own == get_policy(str(own).replace(",", " , "))
        assert get_policy("c=bf16,float8(min_dim=1024,keep=compute),o=f32").output_dtype == np.float32
        assert str(jaxmp.jmp.Policy("f32", "bf16", "f32", float8="float8")) == "p=full,c=bf16,o=full,float8"

    def test_maps_carry_it(self):
        policies = PolicyMap(
            "mixed_float8", {"**/head": "mixed_bfloat16", "**/up": "c=bf16,float8(min_dim=1,keep=compute)"}
        )
        assert policies.float8 == Float8() and policies.resolve(("head",))[0].float8 is None
        assert policies.resolve(("up",))[0].float8 == Float8(min_dim=1, keep="compute")
        assert get_policy(str(policies)) == policies
        assert str(PolicyMap("mixed_float8", {"head": "half"}).resolve(("head",))[0]) == str(get_policy("mixed_float8"))

    def test_it_survives_copies(self):
        policy = get_policy("mixed_float8")
        assert pickle.loads(pickle.dumps(policy)) == policy and hash(policy) == hash(get_policy("mixed_float8"))
        assert policy.with_output_dtype("bfloat16").float8 == Float8()
        assert dataclasses.replace(policy, param_dtype="bfloat16").float8 == Float8()
        assert policy != get_policy("mixed_bfloat16") == dataclasses.replace(policy, float8=None)

    @pytest.mark.parametrize("compute", ["float32", "float16"])
    def test_float8_products_go_with_bfloat16_only(self, compute):
        message = rf"float8 goes with compute=bfloat16, got compute={compute}; write e.g. 'mixed_float8'"
        with pytest.raises(ValueError, match=message):
            Policy("float32", compute, "float32", float8="float8")
        with pytest.raises(ValueError, match=message):
            get_policy(f"compute={compute},float8")

    def test_float8_as_a_dtype_is_refused_with_a_word_on_products(self):
        with pytest.raises(ValueError, match="use bfloat16, with float8='float8' for such products"):
            Policy("float32", "float8_e4m3fn", "float32")

    def test_auto_never_picks_it(self):
        for name in hardware.GPUS:
            with hardware.assumed(name):
                assert get_policy("auto").float8 is None


@pytest.mark.once
class TestDevice:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        monkeypatch.delenv("JAXMP_FLOAT8", raising=False)
        monkeypatch.setattr(float8, "_warned", [])

    def test_a_device_without_float8_products_is_warned_of_once(self):
        with pytest.warns(
            UserWarning, match=r"compute capability 8.9 or more, and cpu has none: .* JAXMP_FLOAT8=emulate"
        ):
            assert float8.available() == "no"
        assert float8.available() == "no"  # warnings are errors here

    def test_emulation_is_asked_for_by_a_variable(self, monkeypatch):
        monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
        assert float8.available() == "emulate"
        monkeypatch.setenv("JAXMP_FLOAT8", "1")
        with pytest.raises(ValueError, match=r"JAXMP_FLOAT8 must be 'emulate', .* or unset, got '1'; unset it"):
            float8.available()

    def test_an_assumed_gpu_is_the_device_while_a_function_is_traced(self):
        seen = []
        traced = jax.jit(lambda x: (seen.append(hardware.detect().name), x)[1])
        traced(1.0)
        with hardware.assumed("h200"):
            assert float8.available() == "native"
            traced(1.0)
            with hardware.assumed("l4"):
                assert hardware.detect().name == "NVIDIA L4"
            assert hardware.detect().name == "NVIDIA H200"
        traced(1.0)
        assert seen == ["cpu", "NVIDIA H200"]
        with pytest.raises(ValueError, match=r"one of h200, .*, got 'h20'; nearest: 'h200'"), hardware.assumed("h20"):
            pass

    def test_names_of_gpus_mean_the_same_everywhere(self):
        assert list(hardware.GPUS) == list(targets.TARGETS)
        for name, target in targets.TARGETS.items():
            assert hardware.detect(name).compute_capability == "{}.{}".format(*target.capability)
            assert hardware.detect(name).peak_tflops
