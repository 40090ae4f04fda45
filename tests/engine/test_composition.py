"""Autocast with JAX's other transformations, and values that it leaves alone."""

from __future__ import annotations

import gc
import threading
import weakref

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, compiled, cosine, half, normal, operations, products
from jax.sharding import NamedSharding, PartitionSpec

import jaxmp
from jaxmp.program.equations import opened
from jaxmp.program.walk import equations

X, W = normal(0, 4, 8), normal(1, 8, 8, scale=0.3)


def network(x, w):
    return jax.nn.softmax(jnp.tanh(x @ w) @ w) @ w


def test_jit_vmap_and_eager_agree():
    expected = half(network)(X, W)
    assert jnp.allclose(jax.jit(half(network))(X, W), expected, atol=1e-2)
    assert jnp.allclose(jax.vmap(half(network), (0, None))(X, W), expected, atol=1e-2)
    assert jnp.allclose(half(jax.vmap(network, (0, None)))(X, W), expected, atol=1e-2)
    assert jnp.allclose(half(jax.jit(network))(X, W), expected, atol=1e-2)


def test_autocast_is_idempotent():
    once, twice = half(network), half(half(network))
    assert operations(twice, X, W) == operations(once, X, W)
    assert jnp.array_equal(twice(X, W), once(X, W))
    gradient = jax.grad(lambda w: half(network)(X, w).sum())
    assert operations(half(gradient), W) == operations(gradient, W)


def test_the_policy_of_an_inner_autocast_wins():
    def fun(x, w):
        return half(lambda x: x @ w @ w, "mixed_bfloat16")(x @ w) @ w

    assert products(half(fun, "mixed_float16"), X, W) == ["float16", "bfloat16", "bfloat16", "float16"]


def test_an_inner_float32_autocast_is_float32_forwards_and_backwards():
    inner = half(lambda x, w: jnp.tanh(x @ w), "float32")

    def fun(x, w):
        return jnp.sum(inner(x @ w, w) @ w)

    assert products(half(fun), X, W) == ["bfloat16", "float32", "bfloat16"]
    for gradient in (jax.grad(half(fun), 1), half(jax.grad(fun, 1))):
        assert sorted(products(gradient, X, W)) == ["bfloat16"] * 5 + ["float32"] * 3


def test_state_is_restored_after_an_exception():
    def broken(x):
        raise KeyError("broken")

    attention = jax.nn.dot_product_attention
    with pytest.raises(KeyError, match="broken"):
        half(broken)(X)
    assert jax.nn.dot_product_attention is attention
    assert jaxmp.autocast_dtype() is None


def test_autocast_dtype_is_the_half_dtype_except_in_float32_regions():
    dtypes = []

    def fun(x):
        dtypes.append(jaxmp.autocast_dtype())
        for level in ("half", "float32"):
            with jaxmp.precision(level):
                dtypes.append(jaxmp.autocast_dtype())
        return x

    jax.eval_shape(half(fun), X)
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, None]


def test_threads_do_not_see_each_other():
    barrier, dtypes = threading.Barrier(2), []

    def fun(x, w):
        barrier.wait(300)
        dtypes.append(jaxmp.autocast_dtype())
        return x @ w

    def inside():
        half(fun)(X, W)

    def outside():
        barrier.wait(300)
        dtypes.append(jaxmp.autocast_dtype())

    threads = [threading.Thread(target=inside), threading.Thread(target=outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(dtypes, key=str) == [None, jnp.bfloat16]


def test_arguments_that_are_not_arrays_stay_python_values():
    def fun(x, flag, *, name, depth, options):
        assert flag is True and name == "tanh" and depth == 2 and options == {"scale": 0.5, "none": None}
        for _ in range(depth):
            x = getattr(jnp, name)(x @ W) * options["scale"]
        return {"x": x, "name": name, "depth": depth}

    fun.__doc__ = "One step."
    assert (half(fun).__name__, half(fun).__doc__) == ("fun", "One step.")
    result = half(fun)(X, True, name="tanh", depth=2, options={"scale": 0.5, "none": None})
    assert (result["name"], result["depth"], result["x"].shape) == ("tanh", 2, X.shape)


def test_arguments_may_be_numpy_arrays_and_results_of_any_kind():
    result = half(lambda x: (x @ W, None, 3, "a", x > 0, x.astype(jnp.int32)))(np.asarray(X))
    assert result[1:4] == (None, 3, "a")
    assert (result[4].dtype, result[5].dtype) == (jnp.bool_, jnp.int32)


def test_random_numbers_and_dropout_masks_do_not_change():
    def fun(key, x, w):
        h = x @ w
        keep = jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.where(keep, h / 0.7, 0) @ w, keep, jax.random.normal(key, (3,)), jax.random.split(key)

    args = jax.random.key(3), X, W
    runs = fun, *(half(fun, policy) for policy in HALVES)
    expected, *results = compiled(lambda *args: [run(*args) for run in runs])(*args)
    for result in results:
        assert jnp.array_equal(result[1], expected[1]) and jnp.array_equal(result[2], expected[2])
        assert result[3].dtype == expected[3].dtype


def test_float64_complex_and_fp8_are_left_alone():
    with jax.enable_x64(True):
        x, w = jnp.asarray(X, jnp.float64), jnp.asarray(W, jnp.float64)
        with pytest.warns(UserWarning, match="products are float64"):
            assert products(half(lambda x, w, y: (jnp.exp(x @ w), y @ y.T)), x, w, X) == ["float64", "bfloat16"]
        with pytest.warns(UserWarning, match="products are float64"):
            assert jnp.array_equal(half(network)(x, w), network(x, w))

    def fun(x, w):
        z = jax.lax.complex(x @ w, x)
        return z @ jax.lax.complex(w, w), (x @ w).astype(jnp.float8_e4m3fn), jnp.abs(jnp.fft.fft(x @ w)) @ w

    results = half(fun)(X, W)
    assert [result.dtype.name for result in results] == ["complex64", "float8_e4m3fn", "float32"]
    assert products(half(fun), X, W) == ["bfloat16", "complex64", "bfloat16", "bfloat16", "bfloat16"]


def test_integer_products_are_left_alone():
    n = concrete.arange(4).reshape(2, 2)
    assert products(half(lambda x, n: (x @ W, n @ n)), X, n) == ["bfloat16", "int32"]

    def masked(x, mask):  # a product of floats with integers
        return jax.lax.dot_general(x @ W, mask, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    assert products(half(masked), X, concrete.eye(8, dtype=jnp.int32)) == ["bfloat16", "float32+int32"]


def test_callbacks_see_the_dtypes_that_the_author_wrote():
    dtypes = []

    def fun(x, w):
        h = x @ w
        jax.debug.callback(lambda value: dtypes.append(value.dtype), h)
        doubled = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
        return doubled @ w

    assert jnp.allclose(jax.jit(half(fun))(X, W), fun(X, W), atol=0.1)
    jax.effects_barrier()
    assert set(dtypes) == {np.dtype("float32")}


def mesh():
    return jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(body):
    spec = PartitionSpec("batch", None)
    return jax.shard_map(body, mesh=mesh(), in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec())


def test_shard_map_may_be_inside_or_around():
    def body(x, w):
        return jax.lax.psum(jnp.sum(jax.nn.relu(x @ w) @ w), "batch")

    gradients = [jax.value_and_grad(fun, 1) for fun in (sharded(body), half(sharded(body)), sharded(half(body)))]
    (value, gradient), *half_results = compiled(lambda x, w: [fun(x, w) for fun in gradients])(X, W)
    for half_value, half_gradient in half_results:
        assert np.isclose(half_value, value, rtol=0.02, atol=0.02)
        assert cosine(half_gradient, gradient) > 0.999
    for fun in gradients[1:]:
        assert set(products(fun, X, W)) == {"bfloat16"}


def test_shardings_of_arguments_are_kept():
    x = jax.device_put(X, NamedSharding(mesh(), PartitionSpec("batch", None)))
    assert jax.jit(half(lambda x: jnp.tanh(x @ W) * x))(x).sharding == x.sharding


def test_functions_may_close_over_differentiated_arrays():
    def loss(w):
        return half(lambda x: jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)[0]))(X)

    def expected(w):
        return jnp.sum(jnp.tanh(jnp.tanh(X @ w) @ w))

    assert cosine(*compiled(lambda w: (jax.grad(loss)(w), jax.grad(expected)(w)))(W)) > 0.999
    assert cosine(jax.grad(loss)(W), jax.grad(expected)(W)) > 0.999


def body(h, _):
    return jnp.tanh(h @ h.T @ h), None


def test_a_second_call_compiles_nothing():
    fun = half(lambda x: jax.nn.relu(jax.lax.scan(body, x, None, length=3)[0] @ W).sum())
    flat = half(lambda x: jnp.sum(jax.nn.softmax(jax.nn.relu(x @ W)) @ W))
    # Without jit, JAX compiles the transpose of a loop in every call, so this test differentiates loops under jit.
    for call in (fun, jax.jit(fun), jax.jit(jax.grad(fun)), jax.grad(flat)):
        with compilations() as first:
            call(X)
        with compilations() as second:
            call(X)
        assert first and not second


class compilations:
    """A context that lists the programs which JAX compiles in it."""

    def __enter__(self):
        self.events: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self.events

    def listen(self, event, duration, **_):
        if "backend_compile" in event:
            self.events.append(event)

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self.listen)


def test_auto_changes_nothing_on_a_device_without_fast_half_precision(monkeypatch):
    monkeypatch.setattr(jaxmp.hardware, "recommended_policy", lambda: "float32")
    assert jnp.array_equal(half(network, "auto")(X, W), network(X, W))


def test_a_default_precision_changes_neither_half_products_nor_a_float32_region():
    def fun(x, w):
        with jaxmp.precision("float32"):
            return x @ w

    for default in ("highest", "BF16_BF16_F32", "tensorfloat32", "bfloat16"):
        with jax.default_matmul_precision(default):
            assert products(half(network), X, W) == ["bfloat16"] * 3, default
            (eqn,) = jax.make_jaxpr(half(fun))(X, W).eqns
        assert eqn.params["precision"] == (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST), default


def test_a_constant_of_the_host_is_cast_once():
    weight = np.asarray(W)
    program = jax.make_jaxpr(half(lambda x: sum(x @ weight for _ in range(10)) @ W))(X)
    assert sum(const.dtype == jnp.bfloat16 for const in program.consts) <= 1
    many = np.ones((8, 9000), np.float32)  # too large for jaxmp to read its elements
    assert products(half(lambda x: x @ many @ many.T), X) == ["bfloat16"] * 2


def test_cached_programs_are_freed_with_the_function():
    fun = half(lambda x: jax.lax.scan(body, x, None, length=3)[0])
    fun(X)
    gone = weakref.ref(fun)
    del fun
    gc.collect()
    assert gone() is None


WITH_DTYPES_OR_SHARDINGS = [
    lambda x, w: jnp.zeros((8, 8)).at[jnp.array([0, 1, 1, 3])].max(x @ w) @ w,
    lambda x, w: jax.ops.segment_min(x @ w, jnp.array([0, 1, 2, 2]), 3) @ w,
    lambda x, w: (x @ w).at[0].apply(lambda v: jnp.tanh(v) * 2) @ w,
    lambda x, w: jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh(), PartitionSpec("batch")))(x, w) @ w,
    lambda x, w: jax.new_ref(x @ w)[...] @ w,
]


def test_parameters_that_hold_dtypes_or_shardings_are_adapted():
    pairs = compiled(lambda *args: [(half(fun)(*args), fun(*args)) for fun in WITH_DTYPES_OR_SHARDINGS])(X, W)
    for number, (result, expected) in enumerate(pairs):
        np.testing.assert_allclose(result, expected, atol=0.05, err_msg=str(number))


def test_a_jit_under_an_outer_vmap_keeps_its_shardings():
    columns = NamedSharding(mesh(), PartitionSpec(None, "batch"))
    layer = jax.jit(lambda table, x: x @ table, out_shardings=columns)
    mapped = jax.vmap(half(lambda w, x: layer(w @ w, x @ w)), (None, 0))  # all examples share `w @ w`
    assert mapped(W, concrete.ones((3, 4, 8))).sharding == NamedSharding(mesh(), PartitionSpec(None, None, "batch"))


def test_layers_that_share_a_jit_still_share_it_under_an_outer_vmap():
    layer = jax.jit(lambda bias, x, w: jnp.tanh(x @ w + bias))

    def fun(w, x):
        bias = w[0] @ w  # computed, and shared by all examples
        return layer(bias, layer(bias, layer(bias, x @ w, w), w), w) @ w

    program = jax.make_jaxpr(jax.vmap(half(fun), (None, 0)))(W, concrete.ones((3, 4, 8)))
    calls = [eqn for eqn in equations(program) if eqn.primitive.name == "jit" and "lambda" in eqn.params["name"]]
    assert len(calls) == 3 and len({id(opened(eqn.params["jaxpr"])[0]) for eqn in calls}) == 1


def test_a_state_that_all_examples_share_is_not_repeated_for_each_example():
    def filtered(w, x):
        def turn(state, measured):
            mean, covariance = state
            covariance = w @ covariance @ w.T + w
            return (jnp.tanh(covariance @ (w @ mean + measured)), covariance), None

        return jax.lax.scan(turn, (w[0] @ w, w @ w), x)[0][0]

    mapped = jax.vmap(half(filtered), (None, 0))
    program = jax.make_jaxpr(jax.grad(lambda w, x: mapped(w, x).sum()))(W, concrete.ones((3, 4, 8)))
    turns = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    carried = [opened(eqn.params["jaxpr"])[0].invars for eqn in turns]
    assert (3, 8, 8) not in [var.aval.shape for inputs in carried for var in inputs]
    assert any(var.aval.shape == (3, 8) for inputs in carried for var in inputs)


def test_code_in_another_half_dtype_is_not_cast_to_the_policys():
    def fun(x, w):
        large = jnp.exp(x @ w + 15)
        return jax.jit(jnp.matmul)(large, w) + large.T.T @ w

    x, w = concrete.zeros((4, 8), jnp.bfloat16), concrete.eye(8, dtype=jnp.bfloat16)
    assert bool(jnp.isfinite(half(fun, "mixed_float16")(x, w)).all())


def test_calls_of_a_jitted_function_in_one_trace_share_a_program():
    @jax.custom_vjp
    def clipped(h, bound):
        return h

    clipped.defvjp(lambda h, bound: (h, bound), lambda bound, dy: (jnp.clip(dy, -bound, bound), None))

    def fun(w, x):
        return clipped(jnp.tanh(x @ w) @ w, x[0, 0]).sum()

    loss = half(jax.jit(fun))

    def step(w, x):
        xs = [x * n for n in range(1, 4)]
        in_loop = jax.lax.scan(lambda _, x: (None, loss(w, x)), None, jnp.stack(xs))[1]
        return [loss(w, x) for x in xs], [jax.value_and_grad(loss)(w, x) for x in xs], list(in_loop)

    def decided_anew(w, x):
        results = [jax.value_and_grad(half(fun))(w, x * n) for n in range(1, 4)]
        return [value for value, _ in results], results, [value for value, _ in results]

    calls = [eqn for eqn in jax.make_jaxpr(step)(W, X).eqns if eqn.primitive.name == "jit"]
    assert len(calls) == 9 and len({id(eqn.params["jaxpr"]) for eqn in calls}) == 3  # the value, and both passes
    jax.tree.map(np.testing.assert_array_equal, *compiled(lambda *args: (step(*args), decided_anew(*args)))(W, X))
    with jax.checking_leaks():
        jax.eval_shape(step, W, X)


def test_a_branch_for_other_platforms_is_not_lowered_for_this_one():
    def other(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def fun(x, w):
        return jax.lax.platform_dependent(x @ w, tpu=other, default=lambda h: jnp.tanh(h) @ w)

    x, w = normal(0, 4, 8), normal(1, 8, 8)
    np.testing.assert_allclose(jax.jit(half(fun))(x, w), jax.jit(fun)(x, w), atol=0.05)
    assert products(half(fun), x, w) == ["bfloat16"] * 2


def test_equal_functions_with_different_constants_do_not_share_a_program():
    above = jax.jit(lambda h, bound: jnp.where(h > bound, 1.0, 0.0))

    def fun(x, w):
        h = x @ w
        return above(h, 0.0) @ w, above(h, 0.3) @ w

    x = concrete.full((4, 8), 0.30078125)  # 0.3 rounded to bfloat16
    np.testing.assert_array_equal(half(fun)(x, concrete.eye(8))[1], 1)


def test_arrays_of_texts_reach_the_function_unchanged():
    batch = {"x": normal(0, 4, 8), "names": np.array(["a", "b"])}
    assert half(lambda batch: (batch["x"] @ jnp.eye(8), batch["names"][1]))(batch)[1] == "b"


def test_eager_calls_keep_no_array_alive_that_the_function_closes_over():
    """Programs of equal layers are cached for later calls."""
    layer, closed_over, references = jax.jit(lambda w, x: jnp.tanh(x @ w)), [], []
    fun = jaxmp.autocast(lambda w, x: layer(w, layer(w, x)) + closed_over[0].sum(), "mixed_bfloat16")
    for size in (2, 3, 3):
        closed_over[:] = [concrete.full((64, 64), float(size))]
        references.append(weakref.ref(closed_over[0]))
        fun(concrete.eye(4), concrete.ones((size, 4)))
    closed_over.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
