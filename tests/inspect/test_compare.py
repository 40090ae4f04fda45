"""Comparisons of functions with planted errors, and their numbers against NumPy."""

import functools

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_zoo import numbers

import jaxmp
from jaxmp.inspect import compare

pytestmark = pytest.mark.once  # test_any_function.py compares with the newest JAX

X, *DRAWN = np.split(np.random.default_rng(2).normal(size=(48, 8)).astype(np.float32), [16, 24, 32, 40])
W = {name: drawn / 3 for name, drawn in zip("abcd", DRAWN, strict=True)}


def _exact(x):
    return x


def _chain(planted, at):
    """Return a loss of four layers. The layer ``at`` is followed by ``planted``."""

    def loss(params, x):
        for name in "abcd":
            with jax.named_scope(name):
                x = x @ params[name]
                if name == at:
                    x = planted(x)
        return jnp.mean(x**2)

    return loss


def _cancels(x):
    offset = jnp.sum(jnp.abs(jax.lax.stop_gradient(x))) * 10  # XLA folds constants
    return (x + offset) - offset


@jax.custom_vjp
def _bad_backward(x):
    return x


def _rounded(residuals, ct):
    small, large = ct @ jnp.eye(8), ct @ (1000 * jnp.ones((8, 8)))
    return (((small + large) - large) @ jnp.eye(8),)


_bad_backward.defvjp(lambda x: (x, None), _rounded)


def test_a_reference_that_is_not_finite_has_no_error_and_is_named():
    def loss(x):
        with jax.named_scope("layer"):
            y = x @ W["a"]
        with jax.named_scope("logarithm"):
            return jnp.mean(jnp.log(-jnp.abs(y)))

    comparison = compare(loss, "mixed_bfloat16")(X)
    layer, *_, result = [row for row in comparison.rows if row.phase == "forward"]
    assert 0 < layer.relative_error < 0.01 and np.isnan(result.relative_error) and np.isnan(comparison.worst.cosine)
    assert str(comparison).startswith("The reference is not finite, first in ")
    assert "first_nonfinite" in str(comparison)


def test_no_error_enters_a_clean_function():
    forward = [("a", "forward"), ("b", "forward"), ("c", "forward"), ("d", "forward"), ("", "forward")]
    backward = [(path, "backward") for path in ("d", "c", "b", "a", "params/a", "params/b", "params/c", "params/d")]
    for policy, reference in (("mixed_float16", "float32"), ("mixed_bfloat16", "float64")):
        comparison = compare(_chain(_exact, "a"), policy, reference=reference)(W, X)
        assert comparison.entered is None and comparison.unmatched == ()
        assert [(row.path, row.phase) for row in comparison.rows] == forward + backward


def test_an_error_enters_where_half_cancels():
    for at, policy in (("b", "mixed_float16"), ("c", "mixed_bfloat16")):
        comparison = compare(_chain(_cancels, at), policy, overrides={"class:accumulation": "half"}, grad=False)(W, X)
        assert comparison.entered == at


def test_the_largest_error_is_named_if_the_code_has_no_scopes():
    y = X @ W["a"] * 1.001  # the residuals are smaller than the rounding errors of the product
    comparison = compare(lambda params, x: 10 + jnp.mean((x @ params["a"] - y) ** 2), "mixed_bfloat16")(W, X)
    assert comparison.entered == "" and comparison.rows[0].relative_error < 1e-4
    headline = f"The largest error is {comparison.worst.relative_error:.2e} in params/a, backward; it enters in code "
    assert str(comparison).startswith(f"{headline}without a module or named scope")
    title = jaxmp.inspect.plots.errors(comparison).get_suptitle()
    assert title.startswith("The largest error is ") and " in params/a, backward; it enters in code " in title


def test_an_error_enters_where_half_operands_are_too_coarse():
    def loss(params, x):
        with jax.named_scope("before"):
            x = x @ (params["a"] + 30)
        with jax.named_scope("planted"):
            x = x - jnp.mean(x, axis=1, keepdims=True)
        with jax.named_scope("after"):
            x = x @ params["b"]
        return jnp.mean(x**2)

    assert compare(loss, "mixed_bfloat16", grad=False)(W, X).entered == "planted"


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, planted=None):
        y = nn.Dense(8, name="dense")(x)
        if planted is not None:
            with jax.named_scope("planted"):
                offset = planted * jnp.sum(jnp.abs(jax.lax.stop_gradient(y)))
                y = (y + offset) - offset
        return x + nn.tanh(nn.Dense(8, name="out")(y)), None


class _Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, planted):
        blocks = nn.scan(_Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return blocks(name="blocks")(x, planted)[0]


def test_an_error_enters_in_one_turn_of_a_scan():
    model, none = _Scanned(), concrete.zeros(3)
    params = jax.jit(model.init)(jax.random.key(0), X, none)

    def loss(params, x, planted):
        return jnp.mean(model.apply(params, x, planted) ** 2)

    run = compare(loss, "mixed_bfloat16", overrides={"class:accumulation": "half"}, grad=False)
    assert run(params, X, none).entered is None
    assert run(params, X, none.at[1].set(10.0)).entered == "_Scanned/blocks/planted"


def test_linen_calls_of_one_module_are_rows_of_their_own():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(8, name="layer")
            return nn.remat(_Block)(name="block")(layer(layer(x)))[0]

    model = Model()
    params = numbers(jax.eval_shape(model.init, jax.random.key(0), X))
    comparison = compare(lambda params, x: jnp.mean(model.apply(params, x) ** 2), "mixed_bfloat16")(params, X)
    forward = [row.path for row in comparison.rows if row.phase == "forward"]
    assert forward.count("Model/layer") == 2 and comparison.entered is None
    assert [row.path for row in comparison.rows if row.phase == "backward"].count("Model/layer") == 2


def test_rows_are_what_numpy_computes():
    def loss(params, x):
        with jax.named_scope("layer"):
            y = x @ params["a"]
        return jnp.sum(y * y)

    comparison = compare(loss, "mixed_bfloat16", reference="float64")(W, X)
    row = comparison.rows[0]
    exact = X.astype(np.float64) @ W["a"].astype(np.float64)
    half = np.asarray(jnp.asarray(X, jnp.bfloat16) @ jnp.asarray(W["a"], jnp.bfloat16)).astype(np.float64)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    expected = {
        "relative_error": np.linalg.norm(half - exact) / np.linalg.norm(exact),
        "mean_absolute_difference": np.mean(np.abs(half - exact)),
        "cosine": np.sum(half * exact) / np.linalg.norm(half) / np.linalg.norm(exact),
        "ulps": np.median(np.abs(half - exact) / spacing),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(row, name), value, rtol=1e-9)
    cotangent = next(row for row in comparison.rows if (row.path, row.phase) == ("layer", "backward"))
    np.testing.assert_allclose(
        cotangent.relative_error, np.linalg.norm(2 * half - 2 * exact) / np.linalg.norm(2 * exact), rtol=1e-6
    )
    gradient = 2 * X.astype(np.float64).T @ exact
    half_gradient = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_bfloat16")))(W, X)["a"]
    error = np.linalg.norm(np.asarray(half_gradient, np.float64) - gradient) / np.linalg.norm(gradient)
    np.testing.assert_allclose(comparison.total.relative_error, error, rtol=1e-3)  # compiled separately


def test_scopes_in_a_loops_condition_or_a_shard_map_have_no_rows_and_those_around_have():
    def norm(x):
        with jax.named_scope("norm"):
            return jnp.sum(x * x)

    def fun(x, w):
        with jax.named_scope("doubled"):
            x = jax.lax.while_loop(lambda x: norm(x) < 100, lambda x: x * 2, x)
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.named_scope("mapped"):
            spec = jax.sharding.PartitionSpec("d")
            return jax.shard_map(
                lambda x, w: x @ w * norm(w), mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec
            )(x, w)

    rows = compare(fun, "mixed_bfloat16", grad=False)(concrete.ones((2, 2)), concrete.eye(2)).rows
    assert [row.path for row in rows] == ["doubled", "mapped", ""]


def test_infinities_of_a_mask_are_no_difference():
    def fun(x):
        with jax.named_scope("masked"):
            return jnp.where(x > 0, x @ W["a"], -jnp.inf)

    comparison = compare(fun, "mixed_bfloat16", grad=False)(X)
    assert comparison.worst.relative_error < 2**-7 and comparison.entered is None


def test_a_wrong_reference_and_functions_without_a_loss_or_floating_results_are_refused():
    for wrong in ("float16", jnp.bfloat16, 32):
        with pytest.raises(ValueError, match=r"reference must be one of 'float32', 'float64', got .*"):
            compare(_chain(_exact, "a"), "mixed_bfloat16", reference=wrong)
    with pytest.raises(TypeError, match=r"write compare\(fun, reference=other_fun\)"):
        compare(_chain(_exact, "a"), _chain(_exact, "a"))
    compare(_chain(_exact, "a"), jnp.float32)  # a dtype is a policy
    with pytest.raises(
        TypeError, match=r"a loss must be a floating scalar, got .*, or check only the results: grad=False"
    ):
        compare(lambda x: x @ W["a"], "mixed_bfloat16")(X)
    with pytest.raises(ValueError, match="a function with floating results or gradients, got neither"):
        compare(lambda x: (x @ x).astype(jnp.int32), "mixed_bfloat16", grad=False)(concrete.ones((4, 4)))


class _Served(nn.Module):
    """A model with a table, a norm and a scan over two layers."""

    @nn.compact
    def __call__(self, tokens):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(8)(nn.LayerNorm(name="norm")(x)), None

        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(name="layers")(nn.Embed(8, 8, name="embed")(tokens), None)
        return nn.Dense(8, name="head")(x)


def test_each_linen_model_reads_the_params_as_its_policy_stores_them():
    tokens, half = np.arange(8).reshape(2, 4), "params=bfloat16,compute=bfloat16,output=float32"
    trainer = jaxmp.linen.apply_policy(_Served(), "mixed_bfloat16")
    params = numbers(jax.eval_shape(trainer.init, jax.random.key(0), tokens))
    compiled = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    trained = np.asarray(compiled(trainer.apply)(params, tokens), np.float64)
    as_stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    layers = {**as_stored["params"]["layers"], "norm": params["params"]["layers"]["norm"]}
    but_norms = {"params": {**as_stored["params"], "layers": layers}}
    for policy, overrides, stored in (
        (half, None, as_stored),
        (half, {"**/norm": "float32"}, but_norms),
        ("mixed_bfloat16", None, params),
    ):
        server = jaxmp.linen.apply_policy(_Served(), policy, overrides)
        served = np.asarray(compiled(server.apply)(stored, tokens), np.float64)
        expected = np.linalg.norm(trained - served) / np.linalg.norm(served)
        assert (expected > 0) == (policy == half)
        jitted = jax.jit(server.apply)
        before = jitted(params, tokens)  # JAX keeps this trace
        for reference in (server.apply, jitted):
            comparison = compare(trainer.apply, reference=reference, grad=False)(params, tokens)
            assert comparison.rows[-1].relative_error == pytest.approx(expected, rel=1e-5)
        np.testing.assert_array_equal(jitted(params, tokens), before)
    # Against float32, a function runs with the params that it gets.
    server = jaxmp.linen.apply_policy(_Served(), half)
    in_float32 = np.asarray(compiled(_Served().apply)(params, tokens), np.float64)
    run = compiled(server.apply)(params, tokens)
    comparison = compare(server.apply, grad=False)(params, tokens)
    expected = np.linalg.norm(run - in_float32) / np.linalg.norm(in_float32)
    assert comparison.rows[-1].relative_error == pytest.approx(expected, rel=1e-3)


def small_steps(w, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("flow"):
        for _ in range(12):
            step = jnp.tanh(h @ w)
            h = h + 0.01 * step
    return jnp.mean((h @ w - 1) ** 2)


def deep(w, x):
    h = x @ w
    for number in range(4):
        with jax.named_scope(f"layer_{number}"):
            h = h + jnp.tanh(h @ w)
    return jnp.mean((h @ w) ** 2)


def test_an_error_enters_where_it_grows_in_small_steps():
    w = np.random.default_rng(2).normal(size=(8, 8)).astype("float32") / 4
    comparison = compare(small_steps, "mixed_bfloat16")(w, X)
    assert comparison.entered == "flow"
    assert compare(small_steps, "mixed_bfloat16", overrides={"flow:add": "float32"})(w, X).entered is None
    assert compare(deep, "mixed_bfloat16")(w, X).entered is None


def test_values_that_are_not_compared_and_rounded_arguments_are_named():
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, ct: (saved[1].T @ ct, ct @ saved[0].T))
    w = np.random.default_rng(2).normal(size=(8, 8)).astype("float32")
    rounded = np.asarray(jnp.asarray(X, jnp.bfloat16), "float32")
    comparison = compare(lambda w, x: jnp.sum(product(w, x) ** 2), "mixed_bfloat16")(w, rounded)
    (gap,) = comparison.not_counted
    assert gap.startswith("custom_vjp_call") and gap.endswith(": a function with a custom derivative rule")
    assert comparison.half_arguments == ("x",) and "x has values in half precision" in str(comparison)
    plain = compare(lambda w, x: jnp.sum(jax.nn.relu(x @ w) ** 2), "mixed_bfloat16")(w, X)
    assert plain.not_counted == () and plain.half_arguments == ()
