"""Policies: their text form, presets, equality, errors, maps, and casts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from linen_zoo import products

import jaxmp
from jaxmp import Policy, PolicyMap, get_policy
from jaxmp.policy.policy_map import PRESETS

pytestmark = pytest.mark.once

F32, F16, BF16 = (np.dtype(dtype) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16))


class Norm:
    pass


class BatchNorm(Norm):
    pass


def dtypes(policy: Any) -> tuple[np.dtype, np.dtype, np.dtype]:
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


# --- reading ----------------------------------------------------------------------------------------------------------

READ = {
    "float32": (F32, F32, F32),
    "O0": (F32, F32, F32),
    "tensorfloat32": (F32, F32, F32),
    "TF32": (F32, F32, F32),
    "mixed_float16": (F32, F16, F32),
    "mixed_bfloat16": (F32, BF16, F32),
    "float16": (F16, F16, F16),
    "O3": (F16, F16, F16),
    "bfloat16": (BF16, BF16, BF16),
    "full": (F32, F32, F32),
    "params=float32,compute=float16,output=float32": (F32, F16, F32),
    "p=f32,c=f16,o=f32": (F32, F16, F32),
    "p=f32,c=bf16": (F32, BF16, BF16),
    "p=f16": (F16, F16, F16),
    "c=bf16": (F32, BF16, BF16),
    "o=f16": (F32, F32, F16),
    "p=f32, c=half, o=full": (F32, F16, F32),
    " Params = Float32 ,\n COMPUTE=BFloat16, output = F16 ": (F32, BF16, F16),
    "MIXED_Float16": (F32, F16, F32),
    " o3 ": (F16, F16, F16),
}


def test_a_policy_is_read_from_text_in_any_case_and_spacing():
    assert {text: dtypes(get_policy(text)) for text in READ} == READ


def test_jmp_reads_texts_in_the_same_way_and_its_policies_are_accepted():
    for text in ("p=f32,c=f16,o=f32", "params=float16", "p=bf16,c=f32", "float16", "float32", "bfloat16"):
        theirs = jmp.get_policy(text)
        assert dtypes(get_policy(text)) == tuple(np.dtype(dtype) for dtype in dtypes(theirs)), text
        assert dtypes(get_policy(theirs)) == dtypes(get_policy(text))


def test_a_policy_as_text_reads_back_to_an_equal_one():
    policies = [get_policy(name) for name in (*PRESETS, "p=f32,c=f16,o=bf16", "p=f16,m=high", "float64")]
    read = [get_policy(str(policy)) for policy in policies]
    assert read == policies and [hash(policy) for policy in read] == [hash(policy) for policy in policies]


def test_a_policy_is_written_with_its_dtypes_and_a_map_that_is_a_preset_by_its_name():
    assert str(get_policy("mixed_float16")) == "params=float32,compute=float16,output=float32"
    assert str(get_policy("O0")) == "params=float32,compute=float32,output=float32,matmul_precision=highest"
    assert str(get_policy("O2")) == "O2"


MAPS = [
    PolicyMap("mixed_float16"),
    PolicyMap("mixed_float16", {"**/BatchNorm_*": "float32"}),
    PolicyMap("mixed_float16", {"a": "float32", "type:*Norm": "mixed_bfloat16", "**": "p=f32,c=f16,o=f16"}),
    PolicyMap("O2", {"head": "float32"}),
    PolicyMap(PolicyMap("mixed_float16", {"a": "float32", "b": "float16"}), {"a": "mixed_bfloat16", "c": "float32"}),
    PolicyMap(PolicyMap("O2", {"a": "float32"}), {"b": "mixed_bfloat16"}),
]


def test_a_map_as_text_reads_back_to_an_equal_one():
    for policies in MAPS:
        read = get_policy(str(policies))
        assert PolicyMap(read) == policies
        assert read == policies or not policies.overrides


def test_the_text_of_a_map_has_its_overrides_in_matching_order():
    lenient = PolicyMap("mixed_float16", {"a": "float16"}, strict=False)
    assert str(PolicyMap(lenient, {"b": "bfloat16"})) == (
        "params=float32,compute=float16,output=float32; b -> params=bfloat16,compute=bfloat16,output=bfloat16; "
        "a -> params=float16,compute=float16,output=float16"
    )
    assert str(PolicyMap("O2", {BatchNorm: "p=f32,c=f32"})) == (
        "O2; type:BatchNorm -> params=float32,compute=float32,output=float32"
    )


def test_policies_are_hashed_pickled_and_copied():
    for policies in (*MAPS, get_policy("mixed_float16"), get_policy("O2")):
        for other in (pickle.loads(pickle.dumps(policies)), copy.deepcopy(policies)):
            assert other == policies and hash(other) == hash(policies)


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_policy("mixed_float16").compute_dtype = jnp.float32


def test_a_policy_may_be_any_spelling_of_its_dtypes():
    spellings = [("float32", "float16", "float32"), (jnp.float32, jnp.float16, "f32"), (F32, np.float16, " FP32 ")]
    assert len({Policy(*spelling) for spelling in spellings}) == 1


def test_auto_is_the_recommended_policy_of_the_attached_device():
    assert get_policy("auto") == get_policy(jaxmp.hardware.recommended_policy())


def test_the_names_of_lightning_and_accelerate_are_read():
    names = {
        "mixed_float16": ("mixed_fp16", "Mixed_F16", "16-mixed", "fp16-mixed"),
        "mixed_bfloat16": ("mixed_bf16", "bf16-mixed"),
        "float16": ("16-true", "O3"),
        "bfloat16": ("bf16-true", " BFloat16 "),
        "float32": ("32-true", "O0"),
        "float64": ("64-true",),
    }
    for preset, aliases in names.items():
        assert {get_policy(name) for name in aliases} == {get_policy(preset)}


def test_a_map_has_the_dtypes_of_its_root():
    policies = PolicyMap("O2", {"**/head": "bfloat16"})
    for name in ("param_dtype", "compute_dtype", "output_dtype", "matmul_precision"):
        assert getattr(policies, name) == getattr(policies.root, name)


@pytest.mark.parametrize("policy", ["bfloat16", "O2"])
def test_half_in_an_override_has_the_dtypes_of_the_map(policy):
    policies = PolicyMap(PolicyMap(policy, {"body": "float32"}), {"body/head": "half"})
    assert policies.resolve(("body", "head"))[0] == policies.root == PolicyMap(policy).root
    text = "mixed_bfloat16; body/head -> half; body -> float32"
    assert get_policy(text).resolve(("body", "head"))[0] == get_policy("mixed_bfloat16")
    assert get_policy(str(get_policy(text))) == get_policy(text) != get_policy(text.replace("half", "mixed_bfloat16"))


def test_a_policy_as_a_static_argument_compiles_once_for_equal_ones():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def cast(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    for text in ("mixed_float16", "p=f32,c=f16,o=f32", "mixed_bfloat16", "mixed_float16"):
        assert cast(get_policy(text), concrete.ones(2)).dtype == get_policy(text).compute_dtype
    assert len(traces) == 2


def test_the_output_dtype_can_be_changed():
    assert get_policy("mixed_float16").with_output_dtype("f16") == get_policy("p=f32,c=f16,o=f16")
    assert get_policy("float32").with_output_dtype(jnp.bfloat16).matmul_precision == "highest"


# --- texts that cannot be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("mixed_flaot16", r"unknown policy 'mixed_flaot16'; known policies, nearest first: 'mixed_float16', "),
        ("", "unknown policy ''"),
        ("p=fp8", r"float8 could mean .*, got 'fp8'; write one of them"),
        ("p=f32,c=f8", r"got 'f8'; .* 'mixed_float8'"),
        ("p=f32,z=f16", r"unknown key 'z' in policy 'p=f32,z=f16'; known keys, nearest first: .*'params'"),
        ("params=f32,p=f16", "each dtype once, got 'p' twice"),
        ("p=f32,c=float17", r"unknown dtype 'float17'; known names, nearest first: 'float"),
        ("p=f32,c=", r"KEY=DTYPE or .*, got 'c=' in"),
        ("p=f32,c=int8", r"got int8: integers, .* use one of float64, float32, bfloat16, float16$"),
        ("complex64", "must be floating, got complex64"),
        (
            "p=f32,m=sharp",
            r"matmul_precision must be .* got 'sharp'; nearest: 'high', .*; for true float32 use 'highest'",
        ),
        ("p=f32,m=ANY_F8_ANY_F8_F32", r"got 'ANY_F8_ANY_F8_F32'; nearest: 'F16_F16_F32'"),
        ("O1", r"O1 is autocast, not a policy; write jaxmp\.linen\.autocast\(model, 'mixed_float16'\)"),
        (" F16", r"could mean two policies; write 'mixed_float16' .*, or 'float16'"),
        ("BF16", r"could mean two policies; write 'mixed_bfloat16' .*, or 'bfloat16'"),
        ("mixed_float16; a float32", r"'pattern -> policy', each pattern once, got 'a float32'"),
        ("mixed_float16; a -> float32; a -> float16", "each pattern once, got 'a -> float16'"),
        ("float8_e4m3fn", "16 bits or more, got param_dtype=float8_e4m3fn; use bfloat16 or float16"),
    ],
)
def test_the_error_for_an_unreadable_policy_names_readable_ones(text, phrase):
    with pytest.raises(ValueError, match=phrase):
        get_policy(text)


@pytest.mark.parametrize(
    ("call", "error", "phrase"),
    [
        (
            lambda: get_policy(jnp.float8_e5m2),
            ValueError,
            "got param_dtype=float8_e5m2; use bfloat16 or float16",
        ),
        (
            lambda: get_policy(jnp.bfloat16),  # as torch.autocast(dtype=torch.bfloat16)
            ValueError,
            "the dtype bfloat16 could mean two policies; write 'mixed_bfloat16' .*, or 'bfloat16' for params",
        ),
        (
            lambda: get_policy({"**/head": "float32"}),
            TypeError,
            r"a policy comes before its overrides, got the overrides {'\*\*/head': 'float32'} as the policy",
        ),
        (
            lambda: PolicyMap("mixed_float16", {"**/head": "flaot32"}),
            ValueError,
            r"the override '\*\*/head': unknown policy 'flaot32'; known policies, nearest first: 'float32'",
        ),
        (
            lambda: Policy("float32", "e4m3", "float32"),
            ValueError,
            "compute_dtype=float8_.*use bfloat16 or float16 .*'mixed_float8'",
        ),
        (
            lambda: PolicyMap("float32", {"**/head": "half"}),
            ValueError,
            r"'half'.*computes in float32; for '\*\*/head' write a policy",
        ),
        (
            lambda: PolicyMap("mixed_float16", {"a": "O2"}),
            TypeError,
            "an override must be a single policy, got the PolicyMap",
        ),
    ],
)
def test_the_error_for_an_invalid_policy_or_map_says_why(call, error, phrase):
    with pytest.raises(error, match=phrase):
        call()


def test_the_error_for_an_object_that_is_not_a_policy_names_the_presets():
    with_a_dtype = [
        concrete.ones(2),
        np.float16(1),
        jax.ShapeDtypeStruct((2,), jnp.bfloat16),
        nn.Dense(3, dtype=jnp.float16),
    ]
    for what in (None, 16, ("float32",), object(), jnp.int8, *with_a_dtype):
        with pytest.raises(
            TypeError, match=r"a policy must be the name of a preset, a text .*, got .*; presets: float32, "
        ):
            get_policy(what)


# --- maps -------------------------------------------------------------------------------------------------------------


def compute(policies: PolicyMap, text: str, classes: Any = None) -> str:
    return policies.resolve(tuple(filter(None, text.split("/"))), classes)[0].compute_dtype.name


def test_the_first_pattern_that_matches_wins_and_covers_the_modules_below():
    policies = PolicyMap("mixed_float16", {"a/b": "mixed_bfloat16", "a": "float32", "**/head": "float64"})
    got = {
        path: compute(policies, path) for path in ("", "a", "a/x", "a/b", "a/b/c/d", "head/x", "x/head", "a/head", "b")
    }
    assert got == {
        **{"": "float16", "a": "float32", "a/x": "float32", "a/b": "bfloat16", "a/b/c/d": "bfloat16"},
        **{"head/x": "float64", "x/head": "float64", "a/head": "float32", "b": "float16"},
    }


def test_a_pattern_on_a_class_covers_the_modules_below_an_instance():
    policies = PolicyMap("mixed_float16", {Norm: "float32"})
    classes = {(): object, ("n",): BatchNorm, ("n", "x"): object}
    assert [compute(policies, path, classes) for path in ("", "n", "n/x")] == ["float16", "float32", "float32"]
    assert policies.resolve(("n",), classes)[1] is Norm
    assert policies.resolve((), classes) == (get_policy("mixed_float16"), None)


def test_the_overrides_of_a_map_come_before_those_of_its_default_map():
    inner = PolicyMap("mixed_float16", {"a": "float32", "b": "float32"})
    outer = PolicyMap(inner, {"a": "mixed_bfloat16", "**": "float16"})
    assert [compute(outer, path) for path in ("a", "b")] == ["bfloat16", "float16"]
    assert outer.root == get_policy("mixed_float16")
    assert outer == PolicyMap("mixed_float16", {"a": "mixed_bfloat16", "**": "float16", "b": "float32"})
    assert PolicyMap(inner) == inner


def test_O2_makes_norms_float32_and_accepts_a_model_without_norms():
    policies = get_policy("O2")
    assert compute(policies, "n", {("n",): BatchNorm}) == "float32"
    assert compute(policies, "n", {("n",): Norm}) == "float16"
    policies.check({("n",): object}, [("n", "kernel")])
    with pytest.raises(ValueError, match="'head' matched none"):
        PolicyMap("O2", {"head": "float32"}).check({("n",): object}, [("n", "kernel")])


def test_bfloat16_sr_stores_all_but_norms_in_bfloat16():
    policies = get_policy("bfloat16_sr")
    assert str(policies) == "bfloat16_sr"
    assert policies.param_dtype == policies.compute_dtype == "bfloat16" and policies.output_dtype == "float32"
    assert compute(policies, "n", {("n",): BatchNorm}) == "float32"
    assert compute(policies, "n", {("n",): Norm}) == "bfloat16"


def test_a_pattern_that_matches_nothing_raises_with_the_nearest_paths_or_classes():
    modules: dict[Any, type] = {(): object, ("encoder",): Norm, ("encoder", "Dense_0"): BatchNorm}
    variables = [("encoder", "Dense_0", "kernel"), ("decoder", "bias")]

    def check(pattern: Any, complete: bool = True) -> None:
        PolicyMap("mixed_float16", {pattern: "float32"}).check(modules, variables, complete)

    for pattern in ("encoder", "**/Dense_*", "decoder", "**", "type:Norm", BatchNorm):
        check(pattern)
    with pytest.raises(ValueError, match=r"'encodr' matched none; nearest paths: 'encoder', 'decoder', "):
        check("encodr")
    with pytest.raises(ValueError, match=r"'type:LayerNorm' matched none; nearest classes: 'Norm', 'BatchNorm'"):
        check("type:LayerNorm")
    check("type:LayerNorm", complete=False)
    with pytest.raises(ValueError, match=r"'\*/bias' matched none; nearest paths: "):
        check("*/bias")
    with pytest.raises(ValueError, match="matched none"):
        check("encodr", complete=False)
    with pytest.raises(ValueError, match="nearest paths: none, the model has no submodules"):
        PolicyMap("mixed_float16", {"a": "float32"}).check({(): object}, [])


# --- casting ----------------------------------------------------------------------------------------------------------


def test_floating_arrays_of_every_kind_are_cast_and_nothing_else():
    policy = get_policy("mixed_float16")
    key = jax.random.key(0)
    tree = {
        "jax": concrete.ones(2),
        "numpy": np.ones(2),
        "scalar": np.float32(1),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "bfloat16": concrete.ones(2, jnp.bfloat16),
        "rest": [
            concrete.arange(2),
            np.arange(2),
            concrete.ones(2, bool),
            key,
            None,
            1.5,
            2,
            True,
            "text",
            concrete.ones(2, jnp.complex64),
        ],
    }
    cast = policy.cast_to_compute(tree)
    assert {cast[name].dtype for name in ("jax", "numpy", "scalar", "shape", "bfloat16")} == {F16}
    assert isinstance(cast["numpy"], np.ndarray)
    assert isinstance(cast["shape"], jax.ShapeDtypeStruct)
    assert all(got is leaf for got, leaf in zip(cast["rest"], tree["rest"], strict=True))


def test_a_cast_to_the_same_dtype_is_not_an_operation():
    policy = get_policy("p=f32,c=f16,o=bf16")
    for cast, dtype in ((policy.cast_to_param, F32), (policy.cast_to_compute, F16), (policy.cast_to_output, BF16)):
        for x in (concrete.ones(3, dtype), np.ones(3, dtype), jax.ShapeDtypeStruct((3,), dtype)):
            assert cast(x) is x
        assert not jax.make_jaxpr(cast)(concrete.ones(3, dtype)).eqns


def test_casts_can_be_differentiated_and_batched():
    policy = get_policy("mixed_float16")
    gradient = jax.grad(lambda x: policy.cast_to_output(policy.cast_to_compute(x) * 2).sum())(concrete.ones(2))
    assert gradient.dtype == F32
    assert jax.vmap(policy.cast_to_compute)(concrete.ones((3, 2))).dtype == F16


def test_wrap_casts_arguments_to_the_compute_dtype_and_results_to_the_output_dtype():
    @get_policy("p=f32,c=f16,o=bf16").wrap
    def dot(params, x, n, nothing=None, *, scale, flag):
        """Multiply, with a docstring of its own."""
        assert (params["w"].dtype, x.dtype, scale.dtype) == (F16, F16, F16)
        assert (params["n"].dtype, n, nothing, flag) == (jnp.int32, 3, None, True)
        return {"y": x @ params["w"] * scale, "n": params["n"], "none": None}

    params = {"w": concrete.ones((2, 2)), "n": concrete.arange(2)}
    out = dot(params, np.ones((1, 2), np.float32), 3, scale=np.float32(2), flag=True)
    assert (out["y"].dtype, out["n"].dtype, out["none"]) == (BF16, jnp.int32, None)
    assert (dot.__name__, dot.__doc__) == ("dot", "Multiply, with a docstring of its own.")


def test_wrap_gives_the_gradients_of_casts_by_hand_in_the_dtype_of_the_params():
    policy, w, x = get_policy("mixed_float16"), concrete.full((2, 2), 1 / 3), concrete.full((1, 2), 1 / 7)
    got = jax.grad(lambda w: policy.wrap(jnp.dot)(x, w).sum())(w)
    want = jax.grad(lambda w: jnp.dot(x.astype(F16), w.astype(F16)).astype(F32).sum())(w)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == F32


@pytest.mark.parametrize(
    ("policy", "precision"),
    [("float32", "HIGHEST"), ("mixed_float16", None), ("tensorfloat32", "HIGH")],
)
def test_wrap_sets_the_precision_of_the_policy(policy, precision):
    x = concrete.ones((2, 2))
    fun = get_policy(policy).wrap(jnp.dot)
    (eqn,) = (eqn for eqn in jax.make_jaxpr(fun)(x, x).eqns if eqn.primitive.name == "dot_general")
    params = eqn.params["precision"]
    assert (params and params[0].name) == precision
    assert products(fun, x, x) == [get_policy(policy).compute_dtype.name]


def test_the_precision_is_restored_after_an_exception():
    def fail():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        get_policy("float32").wrap(fail)()
    assert jax.config.jax_default_matmul_precision is None
