"""Regions and overrides, the most specific first, and the errors of autocast."""

from __future__ import annotations

import inspect
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import dtypes_of, half, normal, products
from flax import nnx

import jaxmp
from jaxmp.overrides import UnknownOperationError

pytestmark = pytest.mark.once

X, W = normal(0, 4, 8), normal(1, 8, 8, scale=0.3)
HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def model(x, w):
    with jax.named_scope("encoder"):
        for n in range(2):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.exp(-(x @ w))
    with jax.named_scope("head"):
        return x @ w


def test_a_path_covers_what_lies_below_it():
    assert products(half(model, overrides={"encoder": "float32"}), X, W) == ["float32", "float32", "bfloat16"]
    assert products(half(model, overrides={"**/layer_1": "float32"}), X, W) == ["bfloat16", "float32", "bfloat16"]
    assert products(half(model, overrides={"**/head": "float32"}), X, W) == ["bfloat16", "bfloat16", "float32"]


def test_the_first_path_that_matches_wins():
    overrides = {"**/layer_0": "half", "encoder": "float32"}
    assert products(half(model, overrides=overrides), X, W) == ["bfloat16", "float32", "bfloat16"]


def test_a_path_holds_in_the_gradient():
    def loss(w):
        return jnp.sum(model(X, w))

    override = {"**/head": "float32"}
    for gradient in (jax.grad(half(loss, overrides=override)), half(jax.grad(loss), overrides=override)):
        assert sorted(products(gradient, W)) == ["bfloat16"] * 5 + ["float32"] * 3


def test_primitives_and_classes():
    assert set(dtypes_of("exp", half(model), X, W)) == {"float32"}
    assert set(dtypes_of("exp", half(model, overrides={"primitive:exp": "half"}), X, W)) == {"bfloat16"}
    assert set(dtypes_of("exp", half(model, overrides={"class:pointwise": "half"}), X, W)) == {"bfloat16"}
    assert products(half(model, overrides={"primitive:dot_general": "float32"}), X, W) == ["float32"] * 3
    assert products(half(model, overrides={"class:half": "float32"}), X, W) == ["float32"] * 3


def test_a_primitive_goes_before_its_class_and_a_path_before_both():
    overrides = {"class:half": "half", "primitive:dot_general": "float32"}
    assert products(half(model, overrides=overrides), X, W) == ["float32"] * 3
    assert products(half(model, overrides={**overrides, "**/head": "half"}), X, W) == ["float32", "float32", "bfloat16"]


def test_a_region_goes_before_all_overrides_and_the_inner_one_wins():
    def fun(x, w):
        with jax.named_scope("head"), jaxmp.precision("float32"):
            x = x @ w
            with jaxmp.precision("half"):
                x = x @ w
            return x @ w

    for overrides in (None, {"**/head": "half", "primitive:dot_general": "half"}):
        assert products(half(fun, overrides=overrides), X, W) == ["float32", "bfloat16", "float32"]


def test_a_region_holds_in_gradients_loops_and_functions_that_were_jitted_before():
    @jax.jit
    def block(x, w):
        with jaxmp.precision("float32"):
            return jnp.tanh(x @ w)

    def fun(w):
        return jnp.sum(jax.lax.scan(lambda x, _: (block(x, w) @ w, None), X, None, length=2)[0])

    block(X, W)
    assert products(half(fun), W) == ["float32", "bfloat16"]
    assert sorted(products(jax.grad(half(fun)), W)) == ["bfloat16"] * 3 + ["float32"] * 3


def test_products_that_are_asked_to_be_float32_are_true_float32():
    (eqn,) = (e for e in jax.make_jaxpr(half(lambda x, w: x @ w, overrides={"class:half": "float32"}))(X, W).eqns)
    assert eqn.params["precision"] == HIGHEST


def test_a_region_changes_nothing_outside_of_autocast():
    def fun(x):
        with jaxmp.precision("half"):
            return x @ W

    assert products(fun, X) == ["float32"]


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        ({"**/haed": "float32"}, ValueError, "'**/haed' matched none; nearest paths: 'head'"),
        ({"primitive:log": "half"}, ValueError, "'primitive:log' matched none; nearest primitives: "),
        ({"primitive:expp": "half"}, UnknownOperationError, "'primitive:expp' names a primitive that does not exist"),
        ({"class:nope": "half"}, UnknownOperationError, "'class:nope' names a class that does not exist"),
        (
            {"class:clear": "float32"},
            ValueError,
            "'class:clear': all_gather, all_gather_invariant, all_gather_reduced move",
        ),
        ({"primitive:transpose": "half"}, ValueError, "an override names operations that compute in a dtype"),
        ({"primitive:scatter-add": "half"}, ValueError, "its derivative are seen in autocast(grad(f)) only"),
        (
            {"**/head": "float16"},
            ValueError,
            "in 'half' (the policy's compute dtype) or by a policy that computes in float32 or bfloat16, got 'float16'",
        ),
        ({"**/head": "O2"}, ValueError, "or by a policy that computes in float32 or bfloat16, got 'O2'"),
        (
            {"Primitive:exp": "float32"},
            UnknownOperationError,
            "an override is a path, or by operation 'primitive:<name>'",
        ),
        ({"op:exp": "float32"}, UnknownOperationError, "such as 'primitive:exp' or 'class:accumulation', got 'op:exp'"),
        ({"**/head": "policy;nonsense"}, ValueError, "got 'policy;nonsense'; write one of these"),
        (
            {"**/head": "params=float32,compute=float32,matmul_precision=high"},
            ValueError,
            "float32 products are those of 'float32' or of 'tensorfloat32', got a policy with matmul_precision='high'",
        ),
        ({jnp.tanh: "half"}, TypeError, "an override of autocast is a path such as '**/head'"),
        ({"type:Dense": "half"}, TypeError, "a function has no modules; jaxmp.linen.autocast and jaxmp.nnx.autocast"),
    ],
)
def test_overrides_that_mean_nothing_raise(overrides, error, text):
    with pytest.raises(error) as raised:
        half(model, overrides=overrides)(X, W)
    assert text in str(raised.value)


def test_a_path_of_a_function_without_scopes_is_told_what_makes_them():
    with pytest.raises(jaxmp.UnmatchedOverrideError) as raised:
        half(lambda x, w: x @ w, overrides={"**/head": "float32"})(X, W)
    assert (
        "nearest paths: none: no scope is in it; jax.named_scope makes paths, and an NNX model has its own by "
        "jaxmp.nnx.autocast. Operations of its derivative"
    ) in str(raised.value)

    def named(x, w):
        with jax.named_scope("head"):
            return x @ w

    half(named, overrides={"**/head": "float32"})(X, W)


def test_wrong_overrides_raise_before_the_call():
    with pytest.raises(UnknownOperationError):
        half(model, overrides={"primitive:expp": "half"})


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("float64", ValueError, "autocast computes in float16, bfloat16 or float32, got the compute dtype float64"),
        ("O2", TypeError, "has no modules, got 'O2' with one for 'type:*BatchNorm'; use 'mixed_float16' (autocast k"),
        ("mixed_bf61", ValueError, "unknown policy 'mixed_bf61'"),
        (
            jaxmp.PolicyMap("float32", {"head": "mixed_bfloat16", "encoder": "mixed_float16"}),
            ValueError,
            "or by a policy that computes in float32 or bfloat16, got an instance of Policy",
        ),
    ],
)
def test_policies_that_mean_nothing_for_a_function_raise(policy, error, text):
    with pytest.raises(error) as raised:
        half(model, policy)
    assert text in str(raised.value)


def test_a_float32_policy_too_says_which_override_matched_nothing():
    for policy in ("float32", "tensorfloat32", jaxmp.PolicyMap("float32", {"haed": "float32"})):
        overrides = None if isinstance(policy, jaxmp.PolicyMap) else {"haed": policy}
        with pytest.raises(jaxmp.UnmatchedOverrideError, match=r"'haed' matched none; nearest paths: .*'head'"):
            half(model, policy, overrides)(X, W)
    agreeing = half(model, "float32", {"head": "float32"})
    assert jnp.array_equal(agreeing(X, W), half(model, "float32")(X, W)) and products(agreeing, X, W) == ["float32"] * 3


def test_half_under_float32_raises():
    with pytest.raises(ValueError, match=r"'half' in overrides is the compute dtype .*, but that is float32"):
        half(model, "float32", {"head": "half"})


@pytest.mark.parametrize(("policy", "precision"), [("float32", "highest"), ("tensorfloat32", "tensorfloat32")])
def test_float32_is_the_function_itself_under_its_precision_of_products(policy, precision):
    program = jax.make_jaxpr(half(model, policy))(X, W)
    with jax.default_matmul_precision(precision):
        assert str(program) == str(jax.make_jaxpr(model)(X, W))
    assert jnp.array_equal(half(model, policy)(X, W), model(X, W))
    assert half(model, "params=float32,compute=float32,output=bfloat16")(X, W).dtype == jnp.bfloat16
    assert half(lambda x: (x, "text", 3), policy)(X)[1:] == ("text", 3)


def test_the_paths_of_a_policy_map_are_overrides():
    policies = jaxmp.PolicyMap("mixed_bfloat16", {"**/head": "float32", "**/layer_0": "float32"})
    assert products(half(model, policies), X, W) == ["float32", "bfloat16", "float32"]
    assert products(half(model, policies, {"**/head": "half"}), X, W) == ["float32", "bfloat16", "bfloat16"]
    assert products(half(model, "mixed_bfloat16; **/head -> float32"), X, W) == ["bfloat16", "bfloat16", "float32"]
    plan = jaxmp.cast_plan(model, policies)(X, W)
    assert plan.overrides == {"**/head": "float32", "**/layer_0": "float32"}


def test_a_float32_function_may_have_half_paths():
    def fun(x, w):
        return jnp.tanh(model(x, w) @ w)  # under no scope

    program = jax.make_jaxpr(half(fun, jaxmp.PolicyMap("float32", {"**/head": "mixed_bfloat16"})))(X, W)
    dots = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.invars[0].aval.dtype for eqn in dots] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]
    assert {eqn.params["precision"] for eqn in dots if eqn.invars[0].aval.dtype == jnp.float32} == {HIGHEST}
    got = half(fun, "float32", {"**/head": "mixed_bfloat16"})(X, W)
    assert jnp.array_equal(got, half(fun, "mixed_bfloat16", {"**/head": "half", "**": "float32"})(X, W))
    assert got.dtype == jnp.float32 and jnp.allclose(got, fun(X, W), rtol=0.02, atol=0.01)
    assert not jnp.array_equal(got, half(fun, "float32")(X, W))
    cheaper = half(fun, "tensorfloat32", {"**/head": "bfloat16"})
    assert "HIGHEST" not in str(jax.make_jaxpr(cheaper)(X, W)) and cheaper(X, W).dtype == jnp.float32
    only = half(lambda x, w: model(x, w), "float32", {"encoder": "mixed_float16", "head": "mixed_float16"})
    assert products(only, X, W) == ["float16"] * 3


def test_the_pattern_of_all_paths_covers_what_stands_in_no_scope():
    assert products(half(lambda x, w: x @ w, overrides={"**": "float32"}), X, W) == ["float32"]


def test_an_override_may_be_a_policy_and_tensorfloat32_is_the_cheaper_float32():
    def precisions(level):
        eqns = jax.make_jaxpr(half(model, overrides={"**/head": level}))(X, W).eqns
        dots = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
        assert dots[-1].invars[0].aval.dtype == jnp.float32
        return dots[-1].params["precision"]

    assert precisions("float32") == precisions(jaxmp.get_policy("float32")) == HIGHEST
    assert precisions("tensorfloat32") is precisions("params=float32,compute=float32") is None
    for level in ("half", "bfloat16", jaxmp.get_policy("mixed_bfloat16")):
        assert products(half(model, overrides={"encoder": "float32", "**/head": level}), X, W)[-1] == "bfloat16"


def precisions(fun):
    eqns = jax.make_jaxpr(fun)(X, W).eqns
    return [eqn.params["precision"] for eqn in eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize(
    ("policy", "overrides", "expected"),
    [
        ("float32", {"encoder": "tensorfloat32"}, [None, None, HIGHEST]),
        ("float32", {"primitive:dot_general": "tensorfloat32", "head": "float32"}, [None, None, HIGHEST]),
        ("float32", {"class:half": "tensorfloat32"}, [None] * 3),
        (jaxmp.PolicyMap("float32", {"**/layer_0": "tensorfloat32"}), None, [None, HIGHEST, HIGHEST]),
        ("tensorfloat32", {"head": "float32"}, [None, None, HIGHEST]),
        ("params=float32,compute=float32,output=float32", {"head": "float32"}, [None, None, HIGHEST]),
        ("float32", {"head": "bfloat16", "class:half": "tensorfloat32"}, [None] * 3),
    ],
)
def test_a_float32_function_may_have_products_of_another_precision(policy, overrides, expected):
    assert precisions(jaxmp.autocast(model, policy, overrides)) == expected
    step = jaxmp.make_train_step(loss_of_model, policy=policy, overrides=overrides)
    state = jaxmp.TrainState.create(params=W, tx=optax.sgd(0.1))
    dots = [eqn for eqn in step.jitted.trace(state, X).jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.params["precision"] for eqn in dots[:3]] == expected


def loss_of_model(params, model_state, x, rng):
    return jnp.sum(model(x, params)), model_state


def test_overrides_of_a_float32_function_that_change_nothing_leave_it_as_it_is_and_others_keep_its_results():
    assert str(jax.make_jaxpr(half(model, "float32", {"head": "float32"}))(X, W)) == str(
        jax.make_jaxpr(half(model, "float32"))(X, W)
    )
    narrow = half(
        model, "params=float32,compute=float32,output=bfloat16,matmul_precision=highest", {"head": "tensorfloat32"}
    )
    assert narrow(X, W).dtype == jnp.bfloat16
    assert half(lambda x: (x * 2, "text"), "float32", {"**": "tensorfloat32"})(jnp.float16(1)) == (
        jnp.float32(2),
        "text",
    )
    with pytest.raises(jaxmp.UnmatchedOverrideError, match="'haed' matched none; nearest paths: 'head'"):
        half(model, "float32", {"haed": "tensorfloat32"})(X, W)


def test_a_plan_shows_the_products_of_a_float32_function_with_overrides():
    plan = jaxmp.cast_plan(model, "float32", {"head": "tensorfloat32"})(X, W)
    assert [row.operands for row in plan.rows if row.primitive == "dot_general"] == [("float32", "float32")] * 3


def test_every_operation_that_no_key_names_is_a_class():
    overrides = {"head": "half", "class:*": "float32"}
    assert products(half(model, overrides=overrides), X, W) == ["float32", "float32", "bfloat16"]
    assert products(half(model, overrides={**overrides, "class:half": "half"}), X, W) == ["bfloat16"] * 3


def test_float16_raises_on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match="got float16 on a TPU, whose matrix unit has bfloat16 only; use 'mixed_bf"):
        half(model, "mixed_float16")(X, W)


def test_a_region_of_no_level_raises():
    with pytest.raises(ValueError, match="in 'float32', in 'tensorfloat32' or in 'half'"):
        jaxmp.precision("bfloat16")


def test_o1_is_mixed_float16():
    assert products(half(model, "O1"), X, W) == ["float16"] * 3


def test_what_is_asked_for_happens_without_a_product_too():
    assert dtypes_of("exp", half(jnp.exp, overrides={"primitive:exp": "half"}), X) == ["bfloat16"]


def test_a_shape_is_no_argument():
    with pytest.raises(TypeError, match=r"takes arrays, got ShapeDtypeStruct.*use jaxmp\.cast_plan"):
        half(model)(jax.ShapeDtypeStruct((4, 8), jnp.float32), W)


@pytest.mark.parametrize("transform", [jaxmp.autocast, jaxmp.cast_plan])
@pytest.mark.parametrize(
    ("module", "phrase"),
    [
        (nn.Dense(3), "got an instance of Dense; "),
        (nn.Dense, "got the class Dense; pass a function that calls Dense(...)"),
        (nnx.Linear, "got the class Linear; pass a function that calls Linear(...)"),
    ],
)
def test_a_module_in_place_of_a_function_is_refused(transform, module, phrase):
    with pytest.raises(TypeError, match=re.escape(f"jaxmp.{transform.__name__} takes a function of arrays, {phrase}")):
        transform(module, "mixed_bfloat16")


def test_autocast_called_like_a_context_manager_or_a_decorator_says_what_to_write():
    def loss(x):
        return x @ x

    autocast: Any = jaxmp.autocast
    for call, came in (
        (lambda: autocast("mixed_float16"), "'mixed_float16'"),
        (lambda: autocast(policy="O1"), "policy='O1'"),
        (lambda: autocast(loss), "loss"),
        (lambda: autocast(dtype=jnp.bfloat16), "dtype=bfloat16"),
        (lambda: autocast("cuda", enabled=True), "'cuda', enabled=True"),
        (lambda: autocast(loss, "O1", override={}), "loss, 'O1', override=dict"),
    ):
        text = f"jaxmp.autocast wraps a function, got jaxmp.autocast({came}); write half = "
        with pytest.raises(TypeError, match=f"^{re.escape(text)}.*context manager jaxmp.precision"):
            call()
    assert list(inspect.signature(autocast).parameters) == ["fun", "policy", "overrides"]


def notes_of(fun, *args):
    with pytest.raises((jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)) as raised:
        fun(*args)
    return [note for note in getattr(raised.value, "__notes__", ()) if note.startswith("jaxmp")]


def test_what_needs_numbers_under_autocast_has_a_note_of_what_to_write_unless_the_users_jit_traces_it():
    rule, x = "jaxmp: nothing is computed while jaxmp traces a function, as under jax.jit: ", jnp.ones((3, 3))
    for fun, remedy in (
        (
            lambda x: x * float(jnp.sum(x @ x)),
            "leave an array an array, and let numbers that a shape depends on be no ",
        ),
        (lambda x: x if x.sum() > 0 else -x, "write jnp.where or jax.lax.cond"),
        (lambda x: jnp.asarray(np.sort(np.asarray(x))), "write jnp in place of np"),
    ):
        half = jaxmp.autocast(fun, "mixed_bfloat16")
        for call in (half, jaxmp.autocast(half, "mixed_bfloat16"), jax.vmap(half)):
            (note,) = notes_of(call, x)
            assert note.startswith(rule + remedy)
        for call in (jax.jit(half), jaxmp.autocast(jax.jit(fun), "mixed_bfloat16")):
            assert notes_of(call, x) == []


def test_what_cannot_be_called_is_refused_and_modules_that_can_are_taken():
    with pytest.raises(TypeError, match="takes a function of arrays, got 3; pass a loss function"):
        jaxmp.autocast(3, "mixed_bfloat16")
    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    bound = nn.Dense(2).bind({"params": {"kernel": model.kernel[...], "bias": model.bias[...]}})
    for fun in (model, bound):
        assert "bfloat16" in str(jax.make_jaxpr(jaxmp.autocast(fun, "mixed_bfloat16"))(x))


@pytest.mark.parametrize("overrides", [["**/encoder"], "**/encoder", {"**/encoder"}, 3, [("**/encoder", "float32")]])
def test_overrides_are_a_mapping(overrides):
    module = nn.Dense(2)
    for make in (
        lambda: jaxmp.autocast(model, "mixed_bfloat16", overrides),
        lambda: jaxmp.PolicyMap("mixed_bfloat16", overrides),
        lambda: jaxmp.linen.apply_policy(module, "mixed_bfloat16", overrides),
        lambda: jaxmp.linen.autocast(module, "mixed_bfloat16", overrides),
    ):
        with pytest.raises(
            TypeError, match=r"overrides map patterns to policies, got .*; write {'\*\*/head': 'float32'}"
        ):
            make()


@pytest.mark.parametrize("level", ["HALF", " half "])
def test_levels_are_read_as_policies_are(level):
    fun = jaxmp.autocast(lambda x, w: jnp.exp(x @ w) @ w, "mixed_bfloat16", {"primitive:exp": level})
    assert dtypes_of("exp", fun, X, W) == ["bfloat16"]
    with pytest.raises(ValueError, match="'half' in overrides is the compute dtype of the policy, but that is float32"):
        jaxmp.autocast(model, "float32", {"**/encoder": level})  # and no policy of that name


@pytest.mark.parametrize("more", [{}, {"primitive:cholesky": "float32"}])
def test_a_half_path_leaves_factorisations_float32_unless_they_are_named_as_half(more):
    def fun(w):
        with jax.named_scope("head"):
            return jnp.sum(jax.lax.linalg.cholesky(w @ w.T + jnp.eye(8)))

    overrides = {"**/head": "half", **more}
    (row,) = [row for row in jaxmp.cast_plan(fun, "mixed_bfloat16", overrides)(W).rows if row.primitive == "cholesky"]
    assert row.result == "float32" and np.isfinite(jaxmp.autocast(fun, "mixed_bfloat16", overrides)(W))
