"""A sum of rows and a largest magnitude as one reduction, and which programs have it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._jaxpr.joint import sum_and_largest
from jaxmp._jaxpr.walk import equations

POLICY = "params=float32,compute=bfloat16,output=float32,matmul=float8(min_dim=16,min_tokens=16)"


def drawn(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(list(shape)).normal(size=shape), dtype)


def naive(value):
    """In float64."""
    value = np.asarray(value, np.float64)
    with np.errstate(invalid="ignore"):  # of two infinities
        return value.reshape(-1, value.shape[-1]).sum(0), np.max(np.abs(value))


def require_equal(found, value):
    summed, largest = naive(value)
    assert [each.dtype for each in found] == [np.float32] * 2
    np.testing.assert_allclose(found[0], summed, rtol=1e-5, atol=1e-5)
    assert np.float64(found[1]) == largest or (np.isnan(largest) and np.isnan(found[1]))


def is_joint(fun, *args):
    """Whether one reduction of complex numbers finds both."""
    text = jax.jit(fun).lower(*args).as_text()
    assert text.count("stablehlo.reduce(") >= 2  # a sum or both by columns, and a maximum
    return "complex" in text


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


class TestNumbers:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("shape", [(48, 24), (4, 12, 24), (24,)])
    def test_they_are_those_of_float64_compiled_or_not(self, shape, dtype):
        value = drawn(*shape, dtype=dtype)
        assert is_joint(sum_and_largest, value)
        require_equal(jax.jit(sum_and_largest)(value), value)
        require_equal(sum_and_largest(value), value)

    @pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [np.nan, np.inf]])
    def test_what_is_not_finite_stays_so_in_its_column_and_in_the_largest(self, bad):
        value = drawn(48, 24).at[3 : 3 + len(bad), 5].set(jnp.asarray(bad, jnp.bfloat16))
        require_equal(jax.jit(sum_and_largest)(value), value)

    def test_of_no_rows_both_are_nothing_larger_than_zero(self):
        for fun in (sum_and_largest, jax.jit(sum_and_largest)):
            summed, largest = fun(jnp.zeros((0, 24), jnp.bfloat16))
            assert not np.any(summed) and largest <= 0


class TestSeveralDevices:
    """XLA ends the process where it should join complex numbers that several devices have found."""

    @pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P(("a", "b")), P("a", "b"), P()])
    def test_of_an_array_that_they_divide_there_are_two_reductions(self, spec, mesh):
        value = drawn(48, 24)
        placed = jax.device_put(value, NamedSharding(mesh, spec))
        assert not is_joint(sum_and_largest, placed)
        require_equal(jax.jit(sum_and_largest)(placed), value)

    @pytest.mark.parametrize("check", [True, False])
    @pytest.mark.parametrize("axes", [("a", "b"), ("a",)])
    def test_in_a_shard_map_over_all_axes_each_shard_has_one(self, axes, check, mesh):
        def local(value):
            summed, largest = sum_and_largest(value)
            return jax.lax.psum(summed, axes), jax.lax.pmax(largest, axes)

        value = drawn(48, 24)
        spec = {"in_specs": P(axes), "out_specs": P(), "axis_names": {*axes}, "check_vma": check}
        mapped = jax.shard_map(local, mesh=mesh, **spec)
        placed = jax.device_put(value, NamedSharding(mesh, P(("a", "b"))))
        assert is_joint(mapped, placed) == (len(axes) == 2)
        require_equal(jax.jit(mapped)(placed), value)

    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
    def test_in_a_shard_map_and_beside_it_each_has_its_own(self, wrap, mesh):
        shared = wrap(sum_and_largest)

        def fun(value):
            inside = jax.shard_map(shared, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(value)
            return inside, shared(value)

        value = drawn(48, 24)
        placed = jax.device_put(value, NamedSharding(mesh, P("a")))
        for found in jax.jit(fun)(placed):
            require_equal(found, value)

    @pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
    def test_on_explicit_axes_results_say_where_they_are(self, spec):
        value, mesh = drawn(48, 24), jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            found = jax.jit(sum_and_largest)(jax.device_put(value, spec))
            assert jax.typeof(found[0]).sharding.spec == P(*spec[1:] or (None,))
        require_equal(found, value)

    def test_on_explicit_axes_members_share_a_largest_and_it_has_no_derivative(self):
        value, mesh = drawn(4, 8, 24, dtype=jnp.float32), jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            placed = jax.device_put(value, P("d"))
            summed, largest = jax.jit(jax.vmap(sum_and_largest))(placed)
            slope = jax.jit(jax.grad(lambda value: sum_and_largest(value)[1]))(placed)
        np.testing.assert_allclose(summed, np.asarray(value, np.float64).sum(1), atol=1e-5)
        assert np.all(np.asarray(largest) == naive(value)[1]) and not np.any(slope)

    @pytest.mark.parametrize(("platforms", "joint"), [(("cpu", "cuda", "rocm"), True), (("cpu", "tpu"), False)])
    def test_a_program_for_several_platforms_has_one_rule(self, platforms, joint):
        value = drawn(48, 24)
        lowered = jax.jit(sum_and_largest).trace(value).lower(lowering_platforms=platforms)
        assert ("complex" in lowered.as_text()) == joint
        require_equal(export.export(jax.jit(sum_and_largest), platforms=platforms)(value).call(value), value)

    def test_what_is_exported_for_one_device_runs_on_four(self, mesh):
        value = drawn(48, 24)
        exported = export.export(jax.jit(sum_and_largest))(value)
        assert "complex" not in exported.mlir_module()
        placed = jax.device_put(value, NamedSharding(mesh, P("a")))
        require_equal(jax.jit(exported.call)(placed), value)


class TestTransformations:
    def test_members_of_a_vmap_have_their_own_sums_and_one_largest(self):
        value = drawn(3, 2, 8, 24)
        summed, largest = jax.jit(jax.vmap(jax.vmap(sum_and_largest), 1))(value)
        np.testing.assert_allclose(summed, np.asarray(value, np.float64).sum(2).swapaxes(0, 1), atol=1e-5)
        assert np.all(np.asarray(largest) == naive(value)[1])

    def test_in_a_scan_each_turn_has_one(self):
        values = drawn(3, 48, 24)
        summed, largest = jax.lax.scan(lambda carry, value: (carry, sum_and_largest(value)), 0, values)[1]
        for n, value in enumerate(values):
            require_equal((summed[n], largest[n]), value)

    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.checkpoint, jax.jit])
    def test_the_sum_has_a_derivative_and_the_largest_has_none(self, wrap):
        value, weights = drawn(8, 24, dtype=jnp.float32), drawn(24, dtype=jnp.float32)

        def fun(value):
            summed, largest = sum_and_largest(value)
            return jnp.sum(summed * weights) + 3 * largest

        assert np.array_equal(jax.grad(wrap(fun))(value), np.broadcast_to(weights, (8, 24)))


def repeated(fun):
    """``fun``, computed in a loop."""

    def loop(params):
        return jax.lax.fori_loop(0, 3, lambda _, found: jax.tree.map(jnp.add, found, fun(params)), zeros(params))

    def zeros(params):
        return jax.tree.map(jnp.zeros_like, params)

    return lambda params: jax.tree.map(lambda total: total / 3, loop(params))


class Layers(nn.Module):
    """Two layers, the second without a bias, or in a residual stream that is normalised."""

    is_normalised: bool = False

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(64)(x)
        if self.is_normalised:
            return nn.LayerNorm()(h[..., :32] + nn.Dense(32)(nn.gelu(h)))
        return nn.Dense(32, use_bias=False)(nn.gelu(h))


class TestBiases:
    """What is summed for a bias and cast for a float8 product."""

    @pytest.fixture(autouse=True)
    def emulated(self, monkeypatch):
        monkeypatch.setenv("JAXMP_FLOAT8", "emulate")

    X = np.random.default_rng(0).normal(size=(4, 16, 32)).astype(np.float32)

    def gradient(self, policy=POLICY, **options):
        model = Layers(**options)
        trained = jaxmp.linen.apply_policy(model, policy)
        params = jaxmp.get_policy(policy).cast_to_param(model.init(jax.random.key(0), self.X))
        return jax.grad(lambda params: jnp.mean(jnp.square(trained.apply(params, self.X)))), params

    def found(self, *args, **options):
        fun, params = self.gradient(*args, **options)
        return [eqn for eqn in equations(jax.make_jaxpr(fun)(params)) if eqn.primitive.name == "sum_and_largest"]

    def test_both_are_asked_of_one_gradient(self):
        one, other = self.found()
        assert [len(each.invars) for each in (one, other)] == [1, 1] and one.invars[0].aval.shape == (4, 16, 64)

    @pytest.mark.parametrize(("policy", "options", "count"), [
        ("mixed_bfloat16", {}, 0),
        (POLICY.replace("params=float32", "params=bfloat16"), {}, 0),
        (POLICY.replace("min_dim=16", "min_dim=64"), {}, 0),
        (POLICY, {"is_normalised": True}, 2),  # those of the first layer
    ])  # fmt: skip
    def test_nothing_is_where_nobody_wants_both_of_one_kernel(self, policy, options, count):
        with jax.numpy_dtype_promotion("standard"):  # which Flax's LayerNorm wants
            assert len(self.found(policy, **options)) == count

    def test_the_gradients_are_those_of_two_reductions(self, monkeypatch):
        fun, params = self.gradient()
        found = jax.jit(fun)(params)
        monkeypatch.setattr("jaxmp._float8_products.Asked.find_bias", lambda *_: None)
        fun, _ = self.gradient()
        assert "sum_and_largest" not in str(jax.make_jaxpr(fun)(params))
        for got, wanted in zip(*map(jax.tree.leaves, (found, jax.jit(fun)(params))), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)

    def test_sharded_tokens_give_what_one_device_gives(self, mesh):
        model, params = Layers(), Layers().init(jax.random.key(0), self.X)
        trained = jaxmp.linen.apply_policy(model, POLICY)
        fun = jax.jit(jax.grad(lambda params, x: jnp.mean(jnp.square(trained.apply(params, x)))))
        placed = jax.device_put(self.X, NamedSharding(mesh, P("a", "b")))
        for got, wanted in zip(*map(jax.tree.leaves, (fun(params, placed), fun(params, self.X))), strict=True):
            assert np.linalg.norm(got - wanted) < 0.01 * np.linalg.norm(wanted)  # XLA's CPU rounds otherwise

    @pytest.mark.parametrize("wrap", [jax.checkpoint, repeated])
    def test_remat_and_loops_compute_the_same(self, wrap):
        fun, params = self.gradient()
        assert "sum_and_largest" in str(jax.make_jaxpr(wrap(fun))(params))
        for got, wanted in zip(*map(jax.tree.leaves, (jax.jit(wrap(fun))(params), jax.jit(fun)(params))), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-4)
