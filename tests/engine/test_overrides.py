"""Regions and overrides, which of them wins, and the errors of autocast."""

from __future__ import annotations

import re

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import dtypes_of, half, normal, products
from flax import nnx

import jaxmp
from jaxmp.engine.overrides import UnknownOperationError, primitives_named_by
from jaxmp.program.primitives import Class, of_class

pytestmark = pytest.mark.once

X, W = normal(0, 4, 8), normal(1, 8, 8, scale=0.3)
HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
HIGH = (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH)
BF16X3, THREE_PRODUCTS = "matmul_precision=BF16_BF16_F32_X3", jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


def model(x, w):
    with jax.named_scope("encoder"):
        for n in range(2):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.exp(-(x @ w))
    with jax.named_scope("head"):
        return x @ w


def precisions(fun):
    eqns = jax.make_jaxpr(fun)(X, W).eqns
    return [eqn.params["precision"] for eqn in eqns if eqn.primitive.name == "dot_general"]


# -- keys and regions ------------------------------------------------------------------------------------------------


def test_a_path_covers_everything_below_and_the_first_match_wins():
    for overrides, expected in (
        ({"encoder": "float32"}, ["float32", "float32", "bfloat16"]),
        ({"**/layer_1": "float32"}, ["bfloat16", "float32", "bfloat16"]),
        ({"**/head": "float32"}, ["bfloat16", "bfloat16", "float32"]),
        ({"**/layer_0": "half", "encoder": "float32"}, ["bfloat16", "float32", "bfloat16"]),
    ):
        assert products(half(model, overrides=overrides), X, W) == expected
    # The pattern of all paths also covers operations outside of any scope.
    assert products(half(lambda x, w: x @ w, overrides={"**": "float32"}), X, W) == ["float32"]


def test_a_path_with_an_operation_matches_only_that_operation():
    for overrides, expected in (
        ({"encoder:dot_general": "float32"}, ["float32", "float32", "bfloat16"]),
        ({"encoder/layer_0": "half", "encoder:dot_general": "float32"}, ["bfloat16", "float32", "bfloat16"]),
        ({"**/layer_1:dot_general": "half", "primitive:dot_general": "float32"}, ["float32", "bfloat16", "float32"]),
    ):
        assert products(half(model, overrides=overrides), X, W) == expected
    assert dtypes_of("exp", half(model, overrides={"**/layer_0:exp": "half"}), X, W) == ["bfloat16", "float32"]
    policy = jaxmp.PolicyMap("mixed_bfloat16", {"head:dot_general": "float32"})
    assert products(jaxmp.autocast(model, policy), X, W) == ["bfloat16", "bfloat16", "float32"]
    with pytest.raises(jaxmp.UnmatchedOverrideError, match="'heat:dot_general' matched none; nearest paths: 'head:d"):
        half(model, overrides={"heat:dot_general": "float32"})(X, W)
    with pytest.raises(ValueError, match="move data, are opaque or have a body"):
        half(model, overrides={"head:transpose": "float32"})
    layers, policy = nn.Sequential([nn.Dense(8), nn.Dense(8)]), {"Sequential/layers_0:dot_general": "float32"}
    for under in (("mixed_bfloat16", policy), (jaxmp.PolicyMap("mixed_bfloat16", policy),)):
        network = jaxmp.linen.apply_policy(layers, *under)
        params = network.init(jax.random.key(0), X)
        assert products(network.apply, params, X) == ["float32", "bfloat16"]


def test_a_path_applies_to_the_gradient():
    def loss(w):
        return jnp.sum(model(X, w))

    override = {"**/head": "float32"}
    for gradient in (jax.grad(half(loss, overrides=override)), half(jax.grad(loss), overrides=override)):
        assert sorted(products(gradient, W)) == ["bfloat16"] * 5 + ["float32"] * 3


def test_an_override_may_name_a_primitive_or_a_class():
    assert set(dtypes_of("exp", half(model), X, W)) == {"float32"}
    for level in ("half", "HALF", " half "):  # case and spaces are ignored, as in the names of policies
        assert set(dtypes_of("exp", half(model, overrides={"primitive:exp": level}), X, W)) == {"bfloat16"}
    assert set(dtypes_of("exp", half(model, overrides={"class:pointwise": "half"}), X, W)) == {"bfloat16"}
    assert products(half(model, overrides={"primitive:dot_general": "float32"}), X, W) == ["float32"] * 3
    assert precisions(half(model, overrides={"class:half": "float32"})) == [HIGHEST] * 3  # true float32
    # An override applies even if the function has no product.
    assert dtypes_of("exp", half(jnp.exp, overrides={"primitive:exp": "half"}), X) == ["bfloat16"]
    assert primitives_named_by("primitive:scatter-add") == {"scatter-add"}
    assert primitives_named_by("class:accumulation") == of_class(Class.ACCUMULATION)


def test_paths_win_over_primitives_over_classes_over_all_classes():
    overrides = {"class:half": "half", "primitive:dot_general": "float32"}
    assert products(half(model, overrides=overrides), X, W) == ["float32"] * 3
    assert products(half(model, overrides={**overrides, "**/head": "half"}), X, W) == ["float32", "float32", "bfloat16"]
    overrides = {"head": "half", "class:*": "float32"}
    assert products(half(model, overrides=overrides), X, W) == ["float32", "float32", "bfloat16"]
    assert products(half(model, overrides={**overrides, "class:half": "half"}), X, W) == ["bfloat16"] * 3


def test_a_region_wins_over_overrides_and_over_outer_regions():
    def fun(x, w):
        with jax.named_scope("head"), jaxmp.precision("float32"):
            x = x @ w
            with jaxmp.precision("half"):
                x = x @ w
            return x @ w

    for overrides in (None, {"**/head": "half", "primitive:dot_general": "half"}):
        assert products(half(fun, overrides=overrides), X, W) == ["float32", "bfloat16", "float32"]


def test_a_region_applies_to_gradients_loops_and_jitted_functions():
    @jax.jit
    def block(x, w):
        with jaxmp.precision("float32"):
            return jnp.tanh(x @ w)

    def fun(w):
        return jnp.sum(jax.lax.scan(lambda x, _: (block(x, w) @ w, None), X, None, length=2)[0])

    block(X, W)
    assert products(half(fun), W) == ["float32", "bfloat16"]
    assert sorted(products(jax.grad(half(fun)), W)) == ["bfloat16"] * 3 + ["float32"] * 3


def _calls_under_a_policy():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) @ w)

    layers = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    variables = layers.init(jax.random.key(0), X)
    linen = jaxmp.linen.apply_policy(layers, "mixed_bfloat16", {"layers_1": "float32"})
    of_nnx = jaxmp.nnx.apply_policy(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    step = jaxmp.make_train_step(loss, policy="mixed_bfloat16", donate=False)
    state = jaxmp.TrainState.create(params=W, tx=optax.sgd(0.1))
    return {
        "autocast of jit": (half(jax.jit(loss)), W, X),
        "jit of gradient": (jax.jit(jax.grad(half(loss))), W, X),
        "linen": (linen.apply, variables, X),
        "nnx": (lambda x: of_nnx(x), X),
        "train step": (step, state, X),
    }


def test_a_region_applies_to_functions_models_and_steps_under_a_policy_of_their_own():
    for name, (fun, *args) in _calls_under_a_policy().items():

        def in_region(*args, fun=fun):
            with jaxmp.precision("half"), jaxmp.precision("float32"):
                return fun(*args)

        before = products(fun, *args)
        assert "bfloat16" in before, name
        with jaxmp.precision("float32"):
            assert set(products(fun, *args)) == {"float32"}, name
        assert set(products(half(in_region), *args)) == {"float32"}, name
        assert products(fun, *args) == before, name
    with jaxmp.precision("float32"):
        plan = jaxmp.cast_plan(half(lambda w: X @ w))(W)
        assert [row.why for row in plan.rows if row.cls == "half"] == ["region jaxmp.precision('float32')"]


def test_a_region_changes_nothing_outside_of_autocast():
    def fun(x):
        with jaxmp.precision("half"):
            return x @ W

    assert products(fun, X) == ["float32"]
    with pytest.raises(ValueError, match=r"'half' .* or 'float32_result', or a float32 policy, got 'bfloat16'"):
        jaxmp.precision("bfloat16")


def test_an_override_may_be_a_policy():
    def of_the_head(level):
        fun = half(model, overrides={"encoder": "float32", "**/head": level})
        return products(fun, X, W)[-1], precisions(fun)[-1]

    assert of_the_head("float32") == of_the_head(jaxmp.get_policy("float32")) == ("float32", HIGHEST)
    assert of_the_head("tensorfloat32") == of_the_head("params=float32,compute=float32") == ("float32", None)
    for level in ("half", "bfloat16", jaxmp.get_policy("mixed_bfloat16")):
        assert of_the_head(level)[0] == "bfloat16"


def test_factorisations_below_a_half_path_stay_float32_unless_named():
    def fun(w):
        with jax.named_scope("head"):
            return jnp.sum(jax.lax.linalg.cholesky(w @ w.T + jnp.eye(8)))

    for named, result in ({}, "float32"), ({"primitive:cholesky": "half"}, "bfloat16"):
        plan = jaxmp.cast_plan(fun, "mixed_bfloat16", {"**/head": "half", **named})(W)
        assert [row.result for row in plan.rows if row.primitive == "cholesky"] == [result]
    assert np.isfinite(jaxmp.autocast(fun, "mixed_bfloat16", {"**/head": "half"})(W))


def test_a_custom_linear_solve_keeps_its_dtypes():
    def solved(b):
        return jax.lax.custom_linear_solve(lambda x: 2 * x, b, lambda _, b: b @ (W / 2).astype(b.dtype))

    def written_half(b):
        return solved(b.astype(jnp.bfloat16))

    assert products(half(solved), X) == ["float32"]
    with pytest.raises(ValueError, match="keeps the dtypes of its author"):
        half(solved, overrides={"primitive:custom_linear_solve": "half"})
    assert products(half(written_half), X) == ["bfloat16"]
    assert np.isfinite(half(written_half)(X)).all()


# -- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "precision"), [("float32", "highest"), ("tensorfloat32", "tensorfloat32")])
def test_a_float32_policy_only_sets_the_precision_of_products(policy, precision):
    program = jax.make_jaxpr(half(model, policy))(X, W)
    with jax.default_matmul_precision(precision):
        assert str(program) == str(jax.make_jaxpr(model)(X, W))
    assert jnp.array_equal(half(model, policy)(X, W), model(X, W))
    assert half(model, "params=float32,compute=float32,output=bfloat16")(X, W).dtype == jnp.bfloat16
    assert half(lambda x: (x, "text", 3), policy)(X)[1:] == ("text", 3)


def test_the_paths_of_a_policy_map_are_overrides():
    policies = jaxmp.PolicyMap("mixed_bfloat16", {"**/head": "float32", "**/layer_0": "float32"})
    assert products(half(model, policies), X, W) == ["float32", "bfloat16", "float32"]
    plan = jaxmp.cast_plan(model, policies)(X, W)
    assert plan.overrides == {"**/head": "float32", "**/layer_0": "float32"}


def test_a_float32_function_may_have_half_paths():
    def fun(x, w):
        return jnp.tanh(model(x, w) @ w)  # this product is in no scope

    program = jax.make_jaxpr(half(fun, jaxmp.PolicyMap("float32", {"**/head": "mixed_bfloat16"})))(X, W)
    dots = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.invars[0].aval.dtype for eqn in dots] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]
    assert {eqn.params["precision"] for eqn in dots if eqn.invars[0].aval.dtype == jnp.float32} == {HIGHEST}
    got = half(fun, "float32", {"**/head": "mixed_bfloat16"})(X, W)
    assert jnp.array_equal(got, half(fun, "mixed_bfloat16", {"**/head": "half", "**": "float32"})(X, W))
    assert got.dtype == jnp.float32 and jnp.allclose(got, fun(X, W), rtol=0.02, atol=0.01)
    assert not jnp.array_equal(got, half(fun, "float32")(X, W))


def test_a_float32_function_may_have_products_of_another_precision():
    for policy, overrides, expected in (
        ("float32", {"encoder": "tensorfloat32"}, [None, None, HIGHEST]),
        ("float32", {"primitive:dot_general": "tensorfloat32", "head": "float32"}, [None, None, HIGHEST]),
        ("float32", {"class:half": "tensorfloat32"}, [None] * 3),
        (jaxmp.PolicyMap("float32", {"**/layer_0": "tensorfloat32"}), None, [None, HIGHEST, HIGHEST]),
        ("tensorfloat32", {"head": "float32"}, [None, None, HIGHEST]),
        ("params=float32,compute=float32,output=float32", {"head": "float32"}, [None, None, HIGHEST]),
        ("float32", {"head": "bfloat16", "class:half": "tensorfloat32"}, [None] * 3),
        ("params=float32,matmul_precision=high", {"head": "tensorfloat32"}, [HIGH, HIGH, None]),
        ("float32", {"head": BF16X3}, [HIGHEST, HIGHEST, THREE_PRODUCTS]),
        (BF16X3, {"head": "float32"}, [THREE_PRODUCTS, THREE_PRODUCTS, HIGHEST]),
        (BF16X3, {"primitive:dot_general": "tensorfloat32"}, [None] * 3),
    ):
        assert precisions(jaxmp.autocast(model, policy, overrides)) == expected


def test_an_algorithm_holds_for_the_products_of_an_override_and_their_gradients():
    fun = half(model, overrides={"**/head": BF16X3})
    assert precisions(fun) == [None, None, THREE_PRODUCTS]
    gradient = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(fun(x, w)), argnums=(0, 1)))(X, W)
    dots = [eqn for eqn in gradient.eqns if eqn.primitive.name == "dot_general"]
    of_float32 = [eqn.params["precision"] for eqn in dots if eqn.invars[0].aval.dtype == jnp.float32]
    assert of_float32 == [THREE_PRODUCTS] * 3


def test_an_algorithm_holds_in_a_region_and_in_a_derivative_rule():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda rest, ct: (ct @ rest[1].T, rest[0].T @ ct))

    def fun(x, w):
        with jaxmp.precision(BF16X3):
            return jnp.sum(product(x, w))

    assert precisions(jax.value_and_grad(half(fun), argnums=(0, 1))) == [THREE_PRODUCTS] * 3
    plan = jaxmp.cast_plan(fun, "mixed_bfloat16")(X, W)
    assert "region jaxmp.precision('matmul_precision=BF16_BF16_F32_X3')" in {row.why for row in plan.rows}


def test_a_precision_of_the_author_wins_over_the_precision_of_an_override():
    def fun(x, w):
        return jnp.dot(x, w, precision="highest")

    assert precisions(half(fun, overrides={"**": BF16X3})) == [HIGHEST]


def test_convolutions_have_no_algorithms_and_are_true_float32():
    def fun(x, w):
        return jax.lax.conv(x, w, (1,), "SAME")

    program = jax.make_jaxpr(half(fun, overrides={"**": BF16X3}))(concrete.ones((1, 2, 8)), concrete.ones((2, 2, 3)))
    (convolution,) = [eqn for eqn in program.eqns if eqn.primitive.name == "conv_general_dilated"]
    assert convolution.params["precision"] == HIGHEST


def test_a_float32_policy_with_overrides_casts_results_to_the_output_dtype():
    policy = "params=float32,compute=float32,output=bfloat16,matmul_precision=highest"
    assert half(model, policy, {"head": "tensorfloat32"})(X, W).dtype == jnp.bfloat16
    doubled = half(lambda x: (x * 2, "text"), "float32", {"**": "tensorfloat32"})
    assert doubled(jnp.float16(1)) == (jnp.float32(2), "text")


# -- errors ----------------------------------------------------------------------------------------------------------


def test_invalid_overrides_raise():
    for overrides, error, text in (
        ({"**/haed": "float32"}, ValueError, "'**/haed' matched none; nearest paths: 'head'"),
        ({"layer_1": "float32"}, ValueError, "; write '**/layer_1'. Autocast sees"),
        ({"layer": "float32"}, ValueError, "; write '**/layer_*'. Autocast sees"),
        ({"dot_general": "float32"}, ValueError, "'dot_general' matched none; nearest key: 'primitive:dot_general'"),
        ({"class:linalg": "half"}, ValueError, "'class:linalg' stays float32"),
        ({"primitive:log": "half"}, ValueError, "'primitive:log' matched none; nearest primitives: "),
        ({"primitive:transpose": "half"}, ValueError, "an override must name operations that compute"),
        ({"class:clear": "float32"}, ValueError, "'class:clear': all_gather, all_gather_invariant, "),
        ({"primitive:scatter-add": "half"}, ValueError, "of the derivative only in autocast(grad(f))"),
        ({"**/head": "float16"}, ValueError, "or a policy that computes in float32 or bfloat16, got 'float16'"),
        ({"**/head": "matmul_precision=BF16_F32_X3"}, ValueError, "got 'BF16_F32_X3'; nearest: 'BF16_BF16_F32_X3'"),
        ({"**/head": "policy;nonsense"}, ValueError, "got 'policy;nonsense'; write one of these"),
        ({jnp.tanh: "half"}, TypeError, "so its overrides are for paths such as '**/head'"),
        ({"type:Dense": "half"}, TypeError, "for classes of modules use jaxmp.linen.autocast or jaxmp.nnx.autocast"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            half(model, overrides=overrides)(X, W)
    with pytest.raises(jaxmp.UnmatchedOverrideError, match=r"'haed' matched none; nearest paths: .*'head'"):
        half(model, "float32", {"haed": "tensorfloat32"})(X, W)


def test_overrides_of_unknown_operations_raise_before_the_call():
    for key, text in (
        ("primitive:expp", "'primitive:expp' names a primitive that does not exist; the nearest: 'exp'"),
        ("primitive:scatter_add", "the nearest: 'scatter-add',"),
        ("class:accumulate", "names a class that does not exist; the nearest: 'accumulation',"),
    ):
        with pytest.raises(UnknownOperationError, match=re.escape(text)):
            half(model, overrides={key: "half"})


def test_the_error_for_a_path_in_a_function_without_scopes_says_how_to_add_them():
    with pytest.raises(jaxmp.UnmatchedOverrideError, match=r"none: the function has no scopes; use jax.named_scope"):
        half(lambda x, w: x @ w, overrides={"**/head": "float32"})(X, W)


def test_invalid_policies_raise():
    for policy, overrides, error, text in (
        ("float64", None, ValueError, "autocast must compute in float16, bfloat16 or float32, got fl"),
        (
            "O2",
            None,
            TypeError,
            "got 'type:*BatchNorm'; for classes of modules use jaxmp.linen.autocast or jaxmp.nnx.autocast",
        ),
        ("mixed_bf61", None, ValueError, "unknown policy 'mixed_bf61'"),
        (
            jaxmp.PolicyMap("float32", {"head": "mixed_bfloat16", "encoder": "mixed_float16"}),
            None,
            ValueError,
            "or a policy that computes in float32 or bfloat16, got an instance of Policy",
        ),
        (
            "float32",
            {"head": "half"},
            ValueError,
            "'half' in overrides uses the compute dtype of the policy, but that is",
        ),
        ("float32", {"head": " HALF"}, ValueError, "'half' in overrides uses the compute dtype of the policy"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            half(model, policy, overrides)


def test_float16_raises_on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    state = jaxmp.TrainState.create(params=W, tx=optax.sgd(0.1))
    step = jaxmp.make_train_step(lambda w, x: jnp.sum(model(x, w) ** 2), policy="mixed_float16")
    for call in (half(model, "mixed_float16"), jaxmp.cast_plan(model, "mixed_float16"), lambda x, _: step(state, x)):
        with pytest.raises(ValueError, match="got float16 on a TPU, which only has bfloat16 products; use 'mixed_bf"):
            call(X, W)
    assert products(half(model), X, W) == ["bfloat16"] * 3


def test_overrides_must_be_a_mapping():
    for overrides in ("**/encoder", [("**/encoder", "float32")]):
        for make in (
            lambda overrides: jaxmp.autocast(model, "mixed_bfloat16", overrides),
            lambda overrides: jaxmp.PolicyMap("mixed_bfloat16", overrides),
            lambda overrides: jaxmp.linen.apply_policy(nn.Dense(2), "mixed_bfloat16", overrides),
            lambda overrides: jaxmp.linen.autocast(nn.Dense(2), "mixed_bfloat16", overrides),
        ):
            with pytest.raises(
                TypeError, match=r"overrides must map patterns to policies, got .*; write e.g. {'.*': '"
            ):
                make(overrides)


def test_autocast_takes_functions_and_callable_modules_only():
    for transform in (jaxmp.autocast, jaxmp.cast_plan):
        for module, phrase in (
            (nn.Dense(3), "got an instance of Dense; "),
            (nn.Dense, "got the class Dense; pass a function that calls Dense(...)"),
            (3, "got 3; pass e.g. a loss function"),
        ):
            text = f"jaxmp.{transform.__name__} takes a function of arrays, {phrase}"
            with pytest.raises(TypeError, match=re.escape(text)):
                transform(module, "mixed_bfloat16")
    with pytest.raises(TypeError, match=r"takes arrays, got ShapeDtypeStruct.*use jaxmp\.cast_plan"):
        half(model)(jax.ShapeDtypeStruct((4, 8), jnp.float32), W)
    module, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), concrete.ones((1, 8))
    bound = nn.Dense(8).bind({"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    for fun in (module, bound):
        assert "bfloat16" in str(jax.make_jaxpr(jaxmp.autocast(fun, "mixed_bfloat16"))(x))


def test_autocast_as_a_context_manager_or_decorator_raises_with_a_remedy():
    for args in (["mixed_float16"], [jnp.sin], ["cuda", jnp.float16]):
        with pytest.raises(TypeError, match=r"wraps a function .* write half = .* context manager jaxmp\.precision"):
            jaxmp.autocast(*args)


@pytest.mark.parametrize(("override", "dtype"), [("mixed_bfloat16", "float32"), ("half", "bfloat16")])
def test_the_rules_decide_under_a_policy_on_a_path_but_not_under_half(override, dtype):
    def fun(w, x):
        with jax.named_scope("head"):
            return jax.nn.softmax(x @ w) @ w

    square = concrete.ones((8, 8))
    plan = jaxmp.cast_plan(fun, "mixed_bfloat16", {"head": override})(square, square)
    assert [row.result for row in plan.rows if row.primitive == "exp"] == [dtype]
    assert {row.result for row in plan.rows if row.primitive == "dot_general"} == {"bfloat16"}


def test_a_question_mark_stands_for_a_colon_in_the_name_of_a_scope():
    def fun(w, x):
        with jax.named_scope("stage:1"):
            return jnp.sum(jnp.tanh(x @ w))

    x = concrete.ones((4, 4))
    plan = jaxmp.cast_plan(fun, "mixed_bfloat16", {"stage?1": "float32"})(x, x)
    assert {row.result for row in plan.rows if row.path} == {"float32"}
    plan = jaxmp.cast_plan(fun, "mixed_bfloat16", {"stage?1:dot_general": "float32"})(x, x)
    assert [row.result for row in plan.rows if row.primitive == "dot_general"] == ["float32"]
    with pytest.raises(UnknownOperationError, match="'primitive:1' names a primitive that does not exist"):
        jaxmp.cast_plan(fun, "mixed_bfloat16", {"stage:1": "float32"})
