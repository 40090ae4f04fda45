"""Policies: how they are written, read back, compared and kept, and what they cast."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
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


@pytest.mark.parametrize("text", READ)
def test_a_policy_is_read_from_text_in_any_case_and_spacing(text):
    assert dtypes(get_policy(text)) == READ[text]


@pytest.mark.parametrize(
    "text", ["p=f32,c=f16,o=f32", "params=float16", "p=bf16,c=f32", "float16", "float32", "bfloat16"]
)
def test_text_means_to_jmp_what_it_means_here_and_its_objects_are_taken(text):
    theirs = jmp.get_policy(text)
    assert dtypes(get_policy(text)) == tuple(np.dtype(dtype) for dtype in dtypes(theirs))
    assert dtypes(get_policy(theirs)) == dtypes(get_policy(text))


@pytest.mark.parametrize("name", [*PRESETS, "p=f32,c=f16,o=bf16", "p=f16,m=high", "float64"])
def test_a_policy_as_text_reads_back_to_an_equal_one(name):
    policy = get_policy(name)
    assert get_policy(str(policy)) == policy
    assert hash(get_policy(str(policy))) == hash(policy)


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


@pytest.mark.parametrize("policies", MAPS)
def test_a_map_as_text_reads_back_to_an_equal_one(policies):
    read = get_policy(str(policies))
    assert PolicyMap(read) == policies
    assert read == policies or not policies.overrides


def test_a_map_as_text_has_its_rules_in_the_order_in_which_they_are_tried():
    lenient = PolicyMap("mixed_float16", {"a": "float16"}, strict=False)
    assert str(PolicyMap(lenient, {"b": "bfloat16"})) == (
        "params=float32,compute=float16,output=float32; b -> params=bfloat16,compute=bfloat16,output=bfloat16; "
        "a -> params=float16,compute=float16,output=float16"
    )
    assert str(PolicyMap("O2", {BatchNorm: "p=f32,c=f32"})) == (
        "O2; type:BatchNorm -> params=float32,compute=float32,output=float32"
    )


@pytest.mark.parametrize("policies", [*MAPS, get_policy("mixed_float16"), get_policy("O2")])
def test_policies_are_hashed_pickled_and_copied(policies):
    for other in (pickle.loads(pickle.dumps(policies)), copy.deepcopy(policies), dataclasses.replace(policies)):
        assert other == policies
        assert hash(other) == hash(policies)


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_policy("mixed_float16").compute_dtype = jnp.float32


def test_a_policy_may_be_any_spelling_of_its_dtypes():
    spellings = [("float32", "float16", "float32"), (jnp.float32, jnp.float16, "f32"), (F32, np.float16, " FP32 ")]
    assert len({Policy(*spelling) for spelling in spellings}) == 1


def test_auto_is_what_suits_the_attached_device():
    assert get_policy("auto") == get_policy(jaxmp.hardware.recommended_policy())


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        (("mixed_fp16", "Mixed_F16", "16-mixed", "fp16-mixed"), "mixed_float16"),
        (("mixed_bf16", "bf16-mixed"), "mixed_bfloat16"),
        (("16-true", "O3"), "float16"),
        (("bf16-true", " BFloat16 "), "bfloat16"),
        (("32-true", "O0"), "float32"),
        (("64-true",), "float64"),
    ],
)
def test_the_names_of_lightning_and_accelerate_are_read(names, preset):
    assert {get_policy(name) for name in names} == {get_policy(preset)}


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, "float8_e5m2", "e4m3"])
def test_a_policy_in_float8_is_refused_with_a_remedy(dtype):
    for fields in ((dtype,) * 3, ("float32", dtype, "float32")):
        with pytest.raises(ValueError, match=r"16 bits or more, got .*_dtype=float8_.*needs a scale.*use bfloat16"):
            Policy(*fields)


def test_a_map_has_the_dtypes_of_its_root():
    policies = PolicyMap("O2", {"**/head": "bfloat16"})
    for name in ("param_dtype", "compute_dtype", "output_dtype", "matmul_precision"):
        assert getattr(policies, name) == getattr(policies.root, name)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "O2"])
def test_half_in_an_override_is_the_policy_at_hand(policy):
    policies = PolicyMap(PolicyMap(policy, {"body": "float32"}), {"body/head": "half"})
    assert policies.resolve(("body", "head"))[0] == policies.root == PolicyMap(policy).root
    assert get_policy("mixed_bfloat16; body/head -> half; body -> float32").resolve(("body", "head"))[0] == get_policy(
        "mixed_bfloat16"
    )


def test_half_in_an_override_of_a_policy_without_one_is_refused():
    with pytest.raises(ValueError, match=r"'half'.*computes in float32; for '\*\*/head' name a policy"):
        PolicyMap("float32", {"**/head": "half"})


def test_a_policy_as_a_static_argument_compiles_once_for_equal_ones():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def cast(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    for text in ("mixed_float16", "p=f32,c=f16,o=f32", "mixed_bfloat16", "mixed_float16"):
        assert cast(get_policy(text), jnp.ones(2)).dtype == get_policy(text).compute_dtype
    assert len(traces) == 2


def test_the_output_dtype_can_be_changed():
    assert get_policy("mixed_float16").with_output_dtype("f16") == get_policy("p=f32,c=f16,o=f16")
    assert get_policy("float32").with_output_dtype(jnp.bfloat16).matmul_precision == "highest"


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mixed_flaot16", r"unknown policy 'mixed_flaot16'; known policies, nearest first: 'mixed_float16', "),
        ("", r"unknown policy ''; known policies"),
        ("O4", r"unknown policy 'O4'; known policies, nearest first: 'O\d'"),
        ("f4", r"unknown policy 'f4'; known policies"),
        ("7-true", r"unknown policy '7-true'; known policies"),
        ("p=f32,c=f8", r"float8 is two dtypes, 'float8_e4m3fn' and 'float8_e5m2', got 'f8'; .* 'mixed_float8'"),
        ("p=fp8", r"float8 is two dtypes, .*, got 'fp8'; write the one that is meant"),
        ("fp8", r"unknown policy 'fp8'; known policies, nearest first: 'mixed_float8'"),
        ("p=f32,z=f16", r"unknown key 'z' in policy 'p=f32,z=f16'; known keys, nearest first: .*'params'"),
        ("mixed_float8(min_dim=16)", r"unknown key 'mixed_float8\(min_dim' in policy"),
        ("p=f32,comptue=f16", r"unknown key 'comptue'.*nearest first: 'compute', "),
        ("p=f32,p=f16", r"a policy names each dtype once, got 'p' twice in 'p=f32,p=f16'; remove one of them"),
        ("params=float32,p=f16", r"got 'p' twice"),
        ("p=f32,c=float17", r"unknown dtype 'float17'; known names, nearest first: 'float1?6?32|'float16'"),
        ("p=f32,c=", r"part of a policy is KEY=DTYPE or .*, got 'c=' in"),
        (
            "p=f32,c=int8",
            r"a policy's dtypes must be floating, got int8: integers, bools and keys are never cast; use one",
        ),
        ("int32", r"must be floating, got int32"),
        ("complex64", r"must be floating, got complex64"),
        ("bool", r"must be floating, got bool"),
        ("p=f32,m=sharp", r"matmul_precision must be one that .* takes, got 'sharp'; use 'highest' for true float32"),
        (
            "O1",
            r"it is no policy but autocast; write jaxmp\.linen\.autocast\(model, 'mixed_float16'\)",
        ),
        *[
            (name, rf"{name}' could mean two policies; write 'mixed_{half}' .*, or '{half}' for params in {half} too")
            for name, half in (("fp16", "float16"), (" F16", "float16"), ("half", "float16"), ("BF16", "bfloat16"))
        ],
        ("mixed_float16; a float32", r"rules 'pattern -> policy', each pattern once, got 'a float32'; write e\.g\. "),
        ("mixed_float16; a -> float32; a -> float16", r"each pattern once, got 'a -> float16'"),
        ("mixed_float16; a -> half_float", r"unknown policy 'half_float'"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_can(text, said):
    with pytest.raises(ValueError, match=said):
        get_policy(text)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("form", [str, lambda name: getattr(jnp, name), jnp.dtype])
def test_float8_is_refused_with_its_reason_in_every_form(dtype, form):
    with pytest.raises(ValueError, match=f"16 bits or more, got param_dtype={dtype}: a float8 product needs a scale"):
        get_policy(form(dtype))


@pytest.mark.parametrize("dtype", [jnp.float4_e2m1fn, ml_dtypes.float6_e2m3fn])
def test_other_formats_below_16_bits_are_not_told_of_float8(dtype):
    text = r"16 bits or more, got compute_dtype=float[46]_\w+: no product here computes in it; use bfloat16 or float16$"
    with pytest.raises(ValueError, match=text):
        Policy("float32", dtype, "float32")


def test_what_is_proposed_in_place_of_an_integer_is_no_float8():
    with pytest.raises(ValueError, match=r"got int8: .* use one of float64, float32, bfloat16, float16$"):
        get_policy("int8")


@pytest.mark.parametrize(
    ("name", "preset"),
    [("fp16_mixed", "mixed_float16"), ("bf16_mixed", "mixed_bfloat16"), ("amp", "mixed_float16"),
     ("fp8", "mixed_float8"), ("mixed_flaot16", "mixed_float16")],
)  # fmt: skip
def test_the_nearest_preset_comes_first_by_its_aliases_too(name, preset):
    with pytest.raises(ValueError, match=rf"unknown policy '{name}'; known policies, nearest first: '{preset}', "):
        get_policy(name)


HAS_A_DTYPE = [jnp.ones(2), np.float16(1), jax.ShapeDtypeStruct((2,), jnp.bfloat16), nn.Dense(3, dtype=jnp.float16)]


@pytest.mark.parametrize("what", [None, 16, ("float32",), object(), jnp.int8, *HAS_A_DTYPE])
def test_what_is_no_policy_is_named_with_the_presets(what):
    with pytest.raises(
        TypeError, match=r"a policy is a preset's name, a string such as .*, got .*; presets: float32, "
    ):
        get_policy(what)


# --- maps -------------------------------------------------------------------------------------------------------------


def compute(policies: PolicyMap, text: str, classes: Any = None) -> str:
    return policies.resolve(tuple(filter(None, text.split("/"))), classes)[0].compute_dtype.name


def test_the_first_pattern_that_matches_wins_and_covers_what_is_below():
    policies = PolicyMap("mixed_float16", {"a/b": "mixed_bfloat16", "a": "float32", "**/head": "float64"})
    got = {
        path: compute(policies, path) for path in ("", "a", "a/x", "a/b", "a/b/c/d", "head/x", "x/head", "a/head", "b")
    }
    assert got == {
        **{"": "float16", "a": "float32", "a/x": "float32", "a/b": "bfloat16", "a/b/c/d": "bfloat16"},
        **{"head/x": "float64", "x/head": "float64", "a/head": "float32", "b": "float16"},
    }


def test_a_pattern_on_a_class_covers_what_is_below_an_instance():
    policies = PolicyMap("mixed_float16", {Norm: "float32"})
    classes = {(): object, ("n",): BatchNorm, ("n", "x"): object}
    assert [compute(policies, path, classes) for path in ("", "n", "n/x")] == ["float16", "float32", "float32"]
    assert policies.resolve(("n",), classes)[1] is Norm
    assert policies.resolve((), classes) == (get_policy("mixed_float16"), None)


def test_a_map_over_a_map_is_tried_before_it():
    inner = PolicyMap("mixed_float16", {"a": "float32", "b": "float32"})
    outer = PolicyMap(inner, {"a": "mixed_bfloat16", "**": "float16"})
    assert [compute(outer, path) for path in ("a", "b")] == ["bfloat16", "float16"]
    assert outer.root == get_policy("mixed_float16")
    assert outer == PolicyMap("mixed_float16", {"a": "mixed_bfloat16", "**": "float16", "b": "float32"})
    assert PolicyMap(inner) == inner


def test_O2_is_a_map_that_makes_norms_float32_and_does_not_miss_those_that_are_not_there():
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
    with pytest.raises(
        ValueError, match=r"'type:LayerNorm' matched none; nearest classes: 'Norm', 'BatchNorm'|'BatchNorm'"
    ):
        check("type:LayerNorm")
    check("type:LayerNorm", complete=False)
    with pytest.raises(ValueError, match=r"'\*/bias' matched the variable 'decoder/bias', .* write 'decoder'"):
        check("*/bias")
    with pytest.raises(ValueError, match=r"'bias' matched the variable 'bias', .* write '\*\*'"):
        PolicyMap("mixed_float16", {"bias": "float32"}).check({(): object}, [("bias",)])
    with pytest.raises(ValueError, match="matched none"):
        check("encodr", complete=False)
    with pytest.raises(ValueError, match="nearest paths: none, the model has no submodules"):
        PolicyMap("mixed_float16", {"a": "float32"}).check({(): object}, [])


@pytest.mark.parametrize("policy", ["O2", PolicyMap("mixed_float16", {"a": "float32"})])
def test_an_override_is_one_policy(policy):
    with pytest.raises(TypeError, match="an override names one policy for what its pattern covers, got the PolicyMap"):
        PolicyMap("mixed_float16", {"a": policy})


# --- casting ----------------------------------------------------------------------------------------------------------


def test_floating_arrays_of_every_kind_are_cast_and_nothing_else():
    policy = get_policy("mixed_float16")
    key = jax.random.key(0)
    tree = {
        "jax": jnp.ones(2),
        "numpy": np.ones(2),
        "scalar": np.float32(1),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "rest": [
            jnp.arange(2),
            np.arange(2),
            jnp.ones(2, bool),
            key,
            None,
            1.5,
            2,
            True,
            "text",
            jnp.ones(2, jnp.complex64),
        ],
    }
    cast = policy.cast_to_compute(tree)
    assert {cast[name].dtype for name in ("jax", "numpy", "scalar", "shape", "bfloat16")} == {F16}
    assert isinstance(cast["numpy"], np.ndarray)
    assert isinstance(cast["shape"], jax.ShapeDtypeStruct)
    assert all(got is given for got, given in zip(cast["rest"], tree["rest"], strict=True))


def test_a_cast_to_the_dtype_it_has_is_no_operation():
    policy = get_policy("p=f32,c=f16,o=bf16")
    for cast, dtype in ((policy.cast_to_param, F32), (policy.cast_to_compute, F16), (policy.cast_to_output, BF16)):
        x = jnp.ones(3, dtype)
        assert cast(x) is x
        assert not jax.make_jaxpr(cast)(x).eqns


def test_shardings_are_kept():
    mesh = jax.make_mesh((4,), ("data",))
    x = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, PartitionSpec("data")))
    assert get_policy("mixed_bfloat16").cast_to_compute(x).sharding.is_equivalent_to(x.sharding, x.ndim)


def test_casting_is_differentiated_and_batched():
    policy = get_policy("mixed_float16")
    gradient = jax.grad(lambda x: policy.cast_to_output(policy.cast_to_compute(x) * 2).sum())(jnp.ones(2))
    assert gradient.dtype == F32
    assert jax.vmap(policy.cast_to_compute)(jnp.ones((3, 2))).dtype == F16


def test_wrap_casts_arguments_to_the_compute_dtype_and_results_to_the_output_dtype():
    @get_policy("p=f32,c=f16,o=bf16").wrap
    def dot(params, x, n, nothing=None, *, scale, flag):
        """Of its own."""
        assert (params["w"].dtype, x.dtype, scale.dtype) == (F16, F16, F16)
        assert (params["n"].dtype, n, nothing, flag) == (jnp.int32, 3, None, True)
        return {"y": x @ params["w"] * scale, "n": params["n"], "none": None}

    params = {"w": jnp.ones((2, 2)), "n": jnp.arange(2)}
    out = dot(params, np.ones((1, 2), np.float32), 3, scale=np.float32(2), flag=True)
    assert (out["y"].dtype, out["n"].dtype, out["none"]) == (BF16, jnp.int32, None)
    assert (dot.__name__, dot.__doc__) == ("dot", "Of its own.")


def test_wrap_gives_the_gradients_of_casts_by_hand_in_the_dtype_of_the_params():
    policy, w, x = get_policy("mixed_float16"), jnp.full((2, 2), 1 / 3), jnp.full((1, 2), 1 / 7)
    got = jax.grad(lambda w: policy.wrap(jnp.dot)(x, w).sum())(w)
    want = jax.grad(lambda w: jnp.dot(x.astype(F16), w.astype(F16)).astype(F32).sum())(w)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == F32


@pytest.mark.parametrize(
    ("policy", "precision"),
    [("float32", "HIGHEST"), ("mixed_float16", None), ("p=f32,m=high", "HIGH"), ("tensorfloat32", "HIGH")],
)
def test_wrap_asks_for_the_precision_of_the_policy(policy, precision):
    x = jnp.ones((2, 2))
    fun = get_policy(policy).wrap(jnp.dot)
    (eqn,) = (eqn for eqn in jax.make_jaxpr(fun)(x, x).eqns if eqn.primitive.name == "dot_general")
    asked = eqn.params["precision"]
    assert (asked and asked[0].name) == precision
    assert products(fun, x, x) == [get_policy(policy).compute_dtype.name]


def test_the_precision_ends_with_an_exception():
    def fail():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        get_policy("float32").wrap(fail)()
    assert jax.config.jax_default_matmul_precision is None
