"""Products in float8 against casts by hand and float64, and their kernels on an H200."""

from __future__ import annotations

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives_in

import jaxmp
from jaxmp import Float8
from jaxmp.inspect.compiled import compiling, targets
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.policy import float8_product, quantisation
from jaxmp.sharding import Sharding
from jaxmp.training import remat

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


def by_hand(x, dtype=E4M3, rounds=True):
    """Round ``x`` to float8, with the smallest bfloat16 scale that avoids overflow.

    With ``rounds``, the dequantised result is rounded to bfloat16, as in the form for GPUs.
    """
    x = np.asarray(x, np.float32)
    scale = np.float32(np.max(np.abs(x))) / np.float32(ml_dtypes.finfo(dtype).max)
    rounded = np.asarray(scale, ml_dtypes.bfloat16)
    if np.float32(rounded) < scale:
        rounded = np.nextafter(rounded, np.asarray(np.inf, ml_dtypes.bfloat16))
    quantised = (x / np.float32(rounded)).astype(dtype)
    return exact(quantised.astype(ml_dtypes.bfloat16) * rounded if rounds else exact(quantised) * exact(rounded))


def with_cotangents(fun, operands, cotangent):
    """Return the result of a function and the cotangents of its operands."""
    return _with_cotangents(fun, tuple(operands), cotangent)


@functools.partial(jax.jit, static_argnums=0)
def _with_cotangents(fun, operands, cotangent):
    result, pull = jax.vjp(fun, *operands)
    return result, pull(cotangent)


def cotangents_of(funs, operands, cotangent):
    """Return the cotangents of each function's operands, computed by one program."""
    return jax.jit(lambda operands, g: [jax.vjp(fun, *operands)[1](g) for fun in funs])(operands, cotangent)


def off(result, wanted):
    """Return the relative L2 error of an array."""
    wanted = exact(wanted)
    return np.linalg.norm(exact(result) - wanted) / np.linalg.norm(wanted)


ROUNDED = 0.004
"""The rounding error of a bfloat16 result."""


@pytest.fixture(params=["gpu", pytest.param("tpu", marks=pytest.mark.slow("the same for the other form"))])
def form(request, monkeypatch):
    """Trace products in the form for GPUs, and in the form for TPUs."""
    if request.param == "tpu":
        with jaxmp.hardware.assumed("tpu7x"):
            yield "tpu"
    else:
        monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
        yield "gpu"


both_forms = pytest.mark.usefixtures("form")


@pytest.fixture(scope="module")
def operands():
    return drawn(48, 64), drawn(64, 32, seed=1), drawn(48, 32, seed=2, spread=2.0)


@both_forms
class TestNumbers:
    @pytest.mark.once
    def test_gradients_equal_products_of_operands_and_cotangents_cast_by_hand(self, operands):
        x, w, g = operands
        stands = by_hand(x), by_hand(w)
        recipes = RECIPE, Float8(gradient="e4m3", accumulate="fast"), Float8(accumulate="precise")
        gradients = cotangents_of([functools.partial(dot, recipe=recipe) for recipe in recipes], (x, w), g)
        for recipe, (dx, dw) in zip(recipes, gradients, strict=True):
            rounded = by_hand(g, E4M3 if recipe.gradient == "float8_e4m3fn" else E5M2)
            assert off(dx, rounded @ stands[1].T) < ROUNDED, recipe
            assert off(dw, stands[0].T @ rounded) < ROUNDED, recipe

    @pytest.mark.once
    def test_the_gradient_of_a_weight_may_be_computed_in_bfloat16(self, operands):
        x, w, g = operands
        recipe, rounded = Float8(weight_gradient="compute"), by_hand(g, E5M2)
        weights = "lhs", "rhs"
        gradients = cotangents_of(
            [functools.partial(dot, recipe=recipe, weight=weight) for weight in weights], (x, w), g
        )
        for weight, (dx, dw) in zip(weights, gradients, strict=True):
            of_x, of_w = (g, rounded) if weight == "lhs" else (rounded, g)
            assert off(dx, exact(of_x) @ (exact(w) if weight == "lhs" else by_hand(w)).T) < ROUNDED, weight
            assert off(dw, (exact(x) if weight == "rhs" else by_hand(x)).T @ exact(of_w)) < ROUNDED, weight

    def test_float32_operands_are_rounded_once_and_results_are_float32(self, form):
        x, w = drawn(48, 64, dtype=jnp.float32), drawn(64, 32, seed=1, dtype=jnp.float32)
        g = drawn(48, 32, seed=2, dtype=jnp.float32)
        result, (dx, dw) = with_cotangents(dot, (x, w), g)
        rounded = functools.partial(by_hand, rounds=form == "gpu")
        assert result.dtype == jnp.float32 and off(result, rounded(x) @ rounded(w)) < 1e-6
        assert dx.dtype == dw.dtype == jnp.float32 and off(dw, by_hand(x).T @ by_hand(g, E5M2)) < ROUNDED

    @pytest.mark.once
    def test_any_dimension_numbers_work(self):
        for left, right, dimensions, subscripts in (
            ((16, 4, 16), (4, 16, 32), (((1, 2), (0, 1)), ((), ())), ("abc", "bcd", "ad")),
            ((3, 16, 64), (3, 64, 32), (((2,), (1,)), ((0,), (0,))), ("abc", "acd", "abd")),
            ((64, 32), (48, 64), (((0,), (1,)), ((), ())), ("ab", "ca", "bc")),
        ):
            x, w = drawn(*left), drawn(*right, seed=1)
            of_x, of_w, of_result = subscripts
            rounded = {of_x: by_hand(x), of_w: by_hand(w)}
            g = drawn(*np.einsum(f"{of_x},{of_w}->{of_result}", *rounded.values()).shape, seed=2)
            rounded[of_result] = by_hand(g, E5M2)
            result, (dx, dw) = with_cotangents(functools.partial(dot, dimensions=dimensions), (x, w), g)
            for got, want in ((result, of_result), (dx, of_x), (dw, of_w)):
                first, second = (of for of in subscripts if of != want)
                wanted = np.einsum(f"{first},{second}->{want}", rounded[first], rounded[second])
                assert off(got, wanted) < ROUNDED

    @pytest.mark.once
    def test_scales_are_the_smallest_bfloat16_numbers_that_avoid_overflow(self):
        largest = np.exp2(np.random.default_rng(0).uniform(-80, 120, 500)).astype(np.float32)
        for dtype in (E4M3, E5M2):
            scale = functools.partial(quantisation._scale, dtype=np.dtype(dtype).name)
            scales = np.array(jax.lax.map(scale, largest[:, None]))
            assert np.array_equal(scales, scales.astype(ml_dtypes.bfloat16).astype(np.float32))
            ratio = largest.astype(np.float64) / float(ml_dtypes.finfo(dtype).max) / scales
            assert ratio.min() > 1 - 2**-7 and ratio.max() <= 1

    @pytest.mark.once
    def test_tiny_and_huge_values_neither_vanish_nor_overflow(self):
        product = jax.jit(dot)
        for size in (1e-40, 1e-37, 1e-20, 1e20, 3e38):
            x = jnp.asarray(np.diag(np.full(16, size)), jnp.float32)
            result = product(x, jnp.eye(16))
            assert np.all(np.isfinite(result)), size
            if size > 1e-38:  # XLA's CPU flushes smaller numbers to zero
                # Both scales are rounded up to bfloat16 numbers.
                assert off(result, x) < (0.1 if size < 1e-35 else 2 * 2**-7), size

    @pytest.mark.once
    def test_zeros_are_finite_with_finite_gradients(self):
        def all_of(rows):
            x, g = np.zeros((rows, 32), jnp.bfloat16), np.zeros((rows, 16), jnp.bfloat16)
            return with_cotangents(dot, (x, drawn(32, 16)), g)

        for rows in (16, 0):
            result, of = all_of(rows)
            assert result.shape == (rows, 16) and not np.any(result)
            assert not np.any(of[0]) and not np.any(of[1])

    def test_non_finite_values_stay_non_finite(self):
        arrays = {"x": drawn(16, 32), "w": drawn(32, 48, seed=1), "gradient": drawn(16, 48, seed=2)}
        expected = {"x": [False, True, False], "w": [False, False, True], "gradient": [True, False, False]}
        for where in arrays:
            for bad in (np.nan, np.inf, -np.inf):
                values = arrays | {where: arrays[where].at[3, 5].set(bad)}
                result, of = with_cotangents(dot, (values["x"], values["w"]), values["gradient"])
                is_finite = [bool(np.all(np.isfinite(exact(value)))) for value in (result, *of)]
                assert is_finite == expected[where], (where, bad)
                if where == "x" and np.isnan(bad):  # a NaN affects only its row
                    assert np.isnan(exact(result)).any(axis=1).nonzero()[0].tolist() == [3]


def loss(x, w, recipe=RECIPE):
    return jnp.sum(jnp.square(dot(x, w, recipe).astype(jnp.float32)))


@both_forms
class TestTransformations:
    def test_the_examples_of_a_vmap_share_a_scale(self, operands):
        _, w, _ = operands
        xs = drawn(3, 48, 64, spread=1.5)
        rounded_xs = by_hand(xs)
        ws = drawn(3, 64, 32, seed=5)

        def all_of(xs, w, ws):
            nested = jax.vmap(jax.vmap(dot, (0, None)), (0, None))(xs.reshape(3, 2, 24, 64), w)
            return jax.vmap(dot, (0, None))(xs, w), jax.vmap(dot)(xs, ws), nested.reshape(3, 48, 32)

        for result, wanted in zip(jax.jit(all_of)(xs, w, ws), (by_hand(w), by_hand(ws), by_hand(w)), strict=True):
            assert off(result, rounded_xs @ wanted) < ROUNDED

    def test_gradients_of_a_vmap_and_a_vmap_of_gradients_share_scales(self, operands):
        _, w, _ = operands
        xs, gs = drawn(3, 48, 64), drawn(3, 48, 32, seed=3)
        wanted = by_hand(xs).transpose(0, 2, 1) @ by_hand(gs, E5M2)

        of_all = jax.jit(lambda x, w, g: jax.vjp(jax.vmap(dot, (0, None)), x, w)[1](g)[1])
        assert off(of_all(xs, w, gs), wanted.sum(0)) < 0.02  # XLA's CPU sums some products in bfloat16
        per_example = jax.vmap(lambda x, g: jax.vjp(dot, x, w)[1](g)[1])
        assert off(jax.jit(per_example)(xs, gs), wanted) < ROUNDED

    def test_remat_by_name_saves_the_operands_in_float8_and_quantises_once(self, operands):
        x, w, _ = operands
        policy = remat.REMAT["float8"]
        fun = jax.checkpoint(lambda x, w: loss(jnp.sin(x), w), policy=policy)
        program = jax.make_jaxpr(jax.grad(fun, (0, 1)))(x, w)
        # JAX's newer checkpoint reads its residuals through a barrier.
        reader = "optimization_barrier" if getattr(jax.config, "jax_remat3", False) else "remat2"
        recomputation = next(eqn for eqn in reversed(program.eqns) if eqn.primitive.name == reader)
        sizes = [atom.aval for atom in recomputation.invars if atom.aval.size > 1]
        assert sorted(f"{aval.dtype}{aval.shape}" for aval in sizes if aval.dtype.itemsize == 1) == [
            "uint8(48, 64)", "uint8(64, 32)",
        ]  # fmt: skip
        assert len(sizes) == 4  # the other two are the arguments

    def test_a_scan_stacks_only_float8_residuals(self):
        def of_layers(x, ws):
            return jnp.sum(jax.lax.scan(lambda x, w: (dot(x, w), None), x, ws)[0].astype(jnp.float32))

        gradient = jax.jit(jax.grad(of_layers, (0, 1)))
        text = gradient.lower(drawn(48, 32), drawn(3, 32, 32)).compile().as_text()
        stacked = set(re.findall(r"(\w+)\[3,48,32\]", text))
        assert "f8e4m3fn" in stacked and stacked.isdisjoint({"bf16", "f32"})

    def test_tangents_multiply_the_cast_operands(self, operands):
        x, w, _ = operands
        dx, dw = drawn(48, 64, seed=7), drawn(64, 32, seed=8)
        result, tangent = jax.jit(lambda *primals: jax.jvp(dot, primals, (dx, dw)))(x, w)
        primal, of_w = jax.jit(lambda w: jax.jvp(lambda w: dot(x, w), (w,), (dw,)))(w)
        assert np.array_equal(result, primal) and off(result, by_hand(x) @ by_hand(w)) < ROUNDED
        assert off(tangent, exact(dx) @ by_hand(w) + by_hand(x) @ exact(dw)) < 2 * ROUNDED
        assert off(of_w, by_hand(x) @ exact(dw)) < ROUNDED

    @pytest.mark.parametrize(
        ("forward_over", "recipe"),
        [(False, RECIPE), (True, RECIPE), (True, Float8(weight_gradient="compute"))],
        ids=str,
    )
    def test_second_derivatives_match_float64_up_to_rounding(self, forward_over, recipe, operands):
        x, w, _ = operands
        vx, vw = drawn(48, 64, seed=7), drawn(64, 32, seed=8)
        gradient = jax.grad(functools.partial(loss, recipe=recipe), (0, 1))

        @jax.jit
        def along(scale):
            v = (vx * scale, vw * scale)
            if forward_over:
                return jax.jvp(gradient, (x, w), v)[1]

            def inner(x, w):
                return sum(jnp.sum((g * d).astype(jnp.float32)) for g, d in zip(gradient(x, w), v, strict=True))

            return jax.grad(inner, (0, 1))(x, w)

        x64, w64, vx64, vw64 = map(exact, (x, w, vx, vw))
        y, dy = x64 @ w64, vx64 @ w64 + x64 @ vw64
        wanted = 2 * (dy @ w64.T + y @ vw64.T), 2 * (vx64.T @ y + x64.T @ dy)
        for got, want in zip(along(jnp.bfloat16(1)), wanted, strict=True):
            assert off(got, want) < 0.1
        for got, want in zip(
            along(jnp.bfloat16(2.0**-40)), wanted, strict=True
        ):  # would underflow in float8 without a scale
            assert off(exact(got) * 2.0**40, want) < 0.1

    def test_an_operand_that_is_not_differentiated_costs_no_product(self, operands):
        x, w, _ = operands
        for argument in (0, 1):
            program = str(jax.make_jaxpr(jax.grad(loss, argument))(x, w))
            assert len(re.findall(r"\bdot_general\b", program)) == 2


def test_the_recipe_sets_the_precision_of_each_product_for_a_gpu(operands):
    x, w, _ = operands

    def precisions(accumulate):
        fun = functools.partial(loss, recipe=Float8(accumulate=accumulate))
        programs = [str(jax.make_jaxpr(function)(x, w)) for function in (fun, jax.grad(fun))]
        return [sorted(re.findall(r"precision=\(?\w*\.?(DEFAULT|HIGHEST)", program)) for program in programs]

    assert precisions("fast") == [["DEFAULT"], ["DEFAULT", "DEFAULT"]]
    assert precisions("precise") == [["HIGHEST"], ["HIGHEST", "HIGHEST"]]
    assert precisions("fast_forward") == [["DEFAULT"], ["DEFAULT", "HIGHEST"]]


@both_forms
class TestShards:
    @pytest.mark.parametrize("check", [True, False])
    def test_in_shard_map_the_scale_is_that_of_all_shards(self, check, operands):
        x, w, g = operands
        x = x.at[0, 0].set(40)  # a scale of one shard would be smaller on the other shards
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

    @pytest.mark.parametrize(("kind", "check"), [("cond", True), ("switch", False), ("while", True)])
    def test_a_product_on_a_single_shard_uses_the_scale_of_that_shard(self, kind, check, operands):
        x, w, g = operands
        x = np.asarray(x) * np.repeat(np.asarray([1, 3, 5, 7], x.dtype), 12)[:, None]
        w, g = (np.pad(operand, ((0, 0), (0, 32))) for operand in (w, g))
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

        assert "pmax" not in str(jax.make_jaxpr(local)(x, w))  # the first shard would wait forever for the others
        expected = np.concatenate([by_hand(x[:12]) @ by_hand(w), exact(x[12:])])
        if kind == "while":
            assert off(jax.jit(local)(x, w), expected) < ROUNDED
        else:
            result, (dx, _) = with_cotangents(local, (x, w), g)
            assert off(result, expected) < ROUNDED
            assert off(dx, np.concatenate([by_hand(g[:12], E5M2) @ by_hand(w).T, exact(g[12:])])) < ROUNDED

    def test_the_gradient_of_a_replicated_weight_is_summed_over_shards(self, operands):
        x, w, g = operands
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        local = jax.shard_map(lambda x, w, g: jax.vjp(lambda w: dot(x, w), w)[1](g)[0], mesh=mesh,
                              in_specs=(P("d"), P(), P("d")), out_specs=P())  # fmt: skip
        assert off(jax.jit(local)(x, w, g), by_hand(x).T @ by_hand(g, E5M2)) < 2 * ROUNDED

    def test_results_on_a_mesh_with_explicit_axes_have_a_sharding(self, operands):
        x, w, g = operands
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            placed = [jax.device_put(operand, spec) for operand, spec in ((x, P("d")), (w, P()), (g, P("d")))]
            y, (dx, _) = with_cotangents(dot, placed[:2], placed[2])
            assert jax.typeof(y).sharding.spec == P("d", None)
            assert off(dx, by_hand(g, E5M2) @ by_hand(w).T) < ROUNDED


SMALL = "compute=bfloat16,output=float32,float8(min_dim=16,min_tokens=16,weight_gradient={})"


class TestTrainSteps:
    """Train steps on a mesh whose devices have some rows and a part of each weight."""

    @staticmethod
    def loss(params, model_state, batch, rng):
        """Return a loss whose gradient with respect to the product is ``batch["g"]``."""
        return jnp.sum((batch["x"] @ params["w"].T).astype(jnp.float32) * batch["g"]), model_state

    @pytest.mark.parametrize(("weight_gradient", "kind"), [("float8", AxisType.Auto), ("compute", AxisType.Explicit)])
    @both_forms
    def test_gradients_are_those_of_one_scale_summed_in_float32(self, weight_gradient, kind, operands):
        mesh, specs = jax.make_mesh((4,), ("fsdp",), axis_types=(kind,)), {"w": P(None, "fsdp")}
        # Each device alone would have a different scale.
        sizes = np.repeat(np.array([1.0, 3.0, 11.0, 50.0], np.float32), 12)[:, None]
        x, g = (
            np.asarray((operand * sizes).astype(jnp.bfloat16), np.float32) for operand in map(np.float32, operands[::2])
        )
        tx = jaxmp.loss_scaling(optax.sgd(1.0), jaxmp.NoOpLossScale())
        state = jaxmp.TrainState.create_sharded(lambda: {"w": jnp.zeros((32, 64))}, tx, Sharding(mesh, specs))
        policy = SMALL.format(weight_gradient)
        step = jaxmp.make_train_step(self.loss, policy=policy, sharding=Sharding(mesh, specs))
        new, _ = step(state, {"x": x, "g": g})
        is_exact = weight_gradient == "compute"
        wanted = exact(g).T @ exact(x) if is_exact else by_hand(g, E5M2).T @ by_hand(x)
        # `by_hand` rounds the dequantised operands to bfloat16, and XLA's CPU does not.
        assert off(new.params["w"], -wanted) < (1e-6 if is_exact else ROUNDED)


# -- compiled for an absent GPU ----------------------------------------------------------------------------------------

T, K, N = 4096, 2048, 8192


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def program(fun, *args):
    return HloProgram(compiling.compiled(jax.jit(fun), args, "h200").as_text())


def calls(program):
    """Count a program's float8 matrix products, and all its matrix products."""
    texts = [
        step.text
        for _, step, _ in program.instructions_by_run(into_fusions=True)
        if step.opcode in ("custom-call", "dot")
    ]
    matches = [re.search(r'custom_call_target="([^"]*)"', text) for text in texts]
    names = [match[1] if match else "dot" for match in matches]
    return sum(name.endswith("matmul$f8") for name in names), sum(
        "matmul" in n or "gemm" in n or n == "dot" for n in names
    )


def kernels(program):
    return sum(step.is_kernel for _, step, _ in program.instructions_by_run(into_fusions=False))


def both_gradients(x, w, g, recipe=RECIPE):
    y, pull = jax.vjp(functools.partial(dot, recipe=recipe), x, w)
    return y, pull(g)


def compiled_step_on_a_mesh(device):
    """Compile a train step for eight devices, each with some rows and a part of the weight."""
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    specs, policy = {"w": P("fsdp")}, "compute=bfloat16,output=float32,float8(min_dim=256,min_tokens=256)"
    tx = jaxmp.loss_scaling(optax.sgd(1.0), jaxmp.NoOpLossScale())

    def placed(leaf):
        spec = P("fsdp") if leaf.ndim else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = {"w": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    state = jax.tree.map(placed, jax.eval_shape(lambda w: jaxmp.TrainState.create(params=w, tx=tx), params))
    batch = {"x": placed(jax.ShapeDtypeStruct((4096, 256), jnp.float32)),
             "g": placed(jax.ShapeDtypeStruct((4096, 512), jnp.float32))}  # fmt: skip
    step = jaxmp.make_train_step(TestTrainSteps.loss, policy=policy, sharding=Sharding(mesh, specs))
    return compiling.compiled(step, (state, batch), device)


def dtypes_of_collectives(executable):
    """Return the dtypes in which weights are gathered and gradients are summed."""
    rows = collectives_in(executable).rows
    return {kind: [row.dtype for row in rows if row.kind == kind] for kind in ("reduce-scatter", "all-gather")}


@pytest.mark.absent_gpu
class TestForAnH200:
    """The kernels of products that are compiled for an absent H200, and XLA's pitfalls."""

    @pytest.mark.parametrize("recipe", [RECIPE, Float8(accumulate="fast", gradient="e4m3")], ids=str)
    def test_a_product_with_its_gradients_is_three_float8_calls_and_at_most_16_kernels(self, recipe):
        hlo_program = program(functools.partial(both_gradients, recipe=recipe), shape(T, K), shape(K, N), shape(T, N))
        assert calls(hlo_program) == (3, 3)
        assert kernels(hlo_program) <= 16

    def test_three_dimensions_and_transposed_weights_are_float8(self):
        def turned(x, w, g):
            y, pull = jax.vjp(functools.partial(dot, dimensions=(((2,), (1,)), ((), ()))), x, w)
            return y, pull(g)

        assert calls(program(turned, shape(4, T // 4, K), shape(N, K), shape(4, T // 4, N))) == (3, 3)

    def test_all_products_are_float8_under_vmap(self):
        def gradient(x, w, g):
            return jax.grad(lambda w: jnp.sum((dot(x, w) * g).astype(jnp.float32)))(w)

        args = shape(4, 1024, K), shape(K, N), shape(4, 1024, N)
        in_float8, in_all = calls(program(jax.vmap(gradient, (0, None, 0)), *args))
        assert in_float8 == in_all >= 1

    def test_on_a_mesh_float8_products_give_float32_gradients(self):
        executable = compiled_step_on_a_mesh("h200")
        assert calls(HloProgram(executable.as_text())) == (2, 2)
        assert dtypes_of_collectives(executable) == {"reduce-scatter": ["float32"], "all-gather": ["bfloat16"]}

    def test_a_gelu_under_scan_compiles(self):
        """XLA must not fuse this GELU into a float8 product, which would crash it.

        The backward pass saves only the input of the GELU, so XLA would use the epilogue ``GELU_AUX``.
        """

        @jax.custom_vjp
        def gelu(x):
            return jax.nn.gelu(x)

        gelu.defvjp(lambda x: (gelu(x), x), lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g))

        def loss(x, up, down):
            def layer(x, w):
                return x + dot(gelu(dot(x, w[0])), w[1]), None

            return jnp.sum(jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32))

        hlo_program = program(jax.grad(loss, (0, 1, 2)), shape(2048, 1024), shape(3, 1024, 4096), shape(3, 4096, 1024))
        in_float8, in_all = calls(hlo_program)
        assert in_float8 == in_all >= 6

    def test_the_scale_that_dequantises_is_the_one_that_quantised(self):
        """XLA does not round the scale to bfloat16 with an error of up to 0.4 %.

        It would do so without excess precision if the scale were not a bfloat16 number already.
        """
        lowered = jax.jit(dot).trace(*targets.on(targets.target_of("h200").devices()[0], (shape(T, K), shape(K, N))))
        options = {**targets.target_of("h200").compiler_options, "xla_allow_excess_precision": False}
        text = lowered.lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()
        assert calls(HloProgram(text)) == (1, 1)
        # These constants round the scales up to bfloat16 numbers, so casts to bfloat16 change no bit of them.
        assert "65520" in text and "4294901760" in text


# -- compiled for an absent TPU ----------------------------------------------------------------------------------------


def formats(program):
    """Count a program's products on a TPU by the dtypes of their operands, sorted."""
    return Counter(
        tuple(sorted(program.dtypes(computation, step)[:2]))
        for computation, step, _ in program.instructions_by_run()
        if step.opcode == "convolution"
    )


@pytest.mark.absent_tpu
class TestForATPU7x:
    def test_a_product_and_its_gradients_multiply_float8_arrays(self):
        args = shape(512, 256), shape(256, 384), shape(512, 384)
        text = compiling.compiled(jax.jit(both_gradients), args, "tpu7x").as_text()
        assert formats(HloProgram(text)) == {("f8e4m3fn", "f8e4m3fn"): 1, ("f8e4m3fn", "f8e5m2"): 2}
        assert len(re.findall(r"= f8e5m2\[512,384\]\S* convert\(", text)) == 1  # the cotangent is quantised once

    def test_on_a_mesh_float8_products_give_float32_gradients(self):
        executable = compiled_step_on_a_mesh("tpu7x:2x2x1")
        assert formats(HloProgram(executable.as_text())) == {("f8e4m3fn", "f8e4m3fn"): 1, ("f8e4m3fn", "f8e5m2"): 1}
        assert dtypes_of_collectives(executable) == {"reduce-scatter": ["float32"], "all-gather": ["bfloat16"]}
