"""Settings of float8 products, policies with them, and devices for them."""

from __future__ import annotations

import dataclasses
import pickle
import re

import jax
import numpy as np
import pytest

import jaxmp
from jaxmp import Float8, Policy, PolicyMap, get_policy, hardware
from jaxmp.inspect.compiled import gpu_targets, targets
from jaxmp.policy import float8

PLAIN = (((1,), (0,)), ((), ()))
RECIPE = Float8()
pytestmark = pytest.mark.once


class TestRecipe:
    def test_its_text_reads_back(self):
        for recipe, text in (
            (Float8(), "float8"),
            (Float8(min_dim=1024), "float8(min_dim=1024)"),
            (Float8(gradient="e4m3", accumulate="fast"), "float8(gradient=float8_e4m3fn,accumulate=fast)"),
        ):
            assert str(recipe) == text and float8.get_recipe(text) == recipe and float8.get_recipe("None") is None
            assert float8.get_recipe(text.replace(",", " , ").upper()) == recipe

    def test_errors_name_the_field_its_value_and_the_allowed_values(self):
        for name, value, words in (
            ("gradient", "float8", "could mean 'float8_e4m3fn' or 'float8_e5m2', got 'float8'; write one of them"),
            ("gradient", "int8", "'float8_e4m3fn', 'float8_e5m2', got 'int8'"),
            ("weight_gradient", "bf16", "'float8' or 'compute', got 'bf16'"),
            ("accumulate", "quick", "got 'quick'; nearest: "),
            ("accumulate", None, "got None"),
            ("min_dim", 0, "got 0; it is the minimum size"),
            ("min_tokens", 2.5, "got 2.5"),
            ("min_dim", True, "got True"),
        ):
            with pytest.raises(ValueError, match=f"{name}.*{re.escape(words)}"):
                Float8(**{name: value})

    def test_errors_for_texts_name_the_wrong_part(self):
        for text, words in {
            "float7": "got 'float7'",
            "float8(": "got 'float8('",
            "float8(min_dim=16))": "got 'float8(min_dim=16))'; write e.g.",
            "float8(min_dims=3)": "fields, nearest first: 'min_dim'",
            "float8(min_dim)": "got 'min_dim' in",
            "float8(min_dim=1,min_dim=2)": "each field once, got 'min_dim=2'",
            "float8(min_dim=-1)": "got -1",
            "float8(min_dim=x)": "got 'x'",
        }.items():
            with pytest.raises(ValueError, match=re.escape(words)):
                float8.get_recipe(text)
        with pytest.raises(TypeError, match=r"a text such as .* got 8"):
            float8.get_recipe(8)

    def test_sizes_may_be_numpy_integers(self):
        recipe = Float8(min_dim=np.int64(16), min_tokens=np.uint8(32))
        assert recipe == Float8(min_dim=16, min_tokens=32) and type(recipe.min_dim) is int

    def test_products_that_are_too_small_or_not_aligned_are_not_float8(self):
        def why(tokens, inner, outer, recipe=RECIPE, **options):
            shapes = jax.ShapeDtypeStruct((tokens, inner), "bfloat16"), jax.ShapeDtypeStruct((inner, outer), "bfloat16")
            return float8.refusal(*shapes, PLAIN, recipe, **options)

        assert why(1024, 1536, 1536) is None
        assert why(1024, 768, 3072) == why(1024, 3072, 768) == "768 < 1536"
        assert why(1024, 2048, 50257) == "50257 % 16" and why(1032, 2048, 2048) == "1032 % 16"
        assert why(512, 2048, 2048) == "512 tokens < 1024"
        with jaxmp.hardware.assumed("tpu7x"):
            assert why(1024, 4096, 8192) is None and why(1024, 2048, 8192) == "2048 < 4096"
            assert why(1024, 2048, 8192, Float8(min_dim=2048)) is None
        assert why(512, 768, 768, Float8(min_dim=512, min_tokens=256)) is None
        assert why(2048, 2048, 1024, weight="lhs") is None and why(1024, 2048, 512, weight="lhs") == "1024 < 1536"
        heads = jax.ShapeDtypeStruct((8, 256, 16, 128), "bfloat16"), jax.ShapeDtypeStruct((16, 128, 2048), "bfloat16")
        assert float8.refusal(*heads, (((2, 3), (0, 1)), ((), ())), RECIPE) is None


class TestPolicy:
    def test_its_text_reads_back(self):
        policy = get_policy("mixed_float8")
        assert policy == Policy("float32", "bfloat16", "float32", float8=Float8()) == get_policy("mixed_fp8")
        text = "params=float32,compute=bfloat16,output=float32,float8"
        assert str(policy) == text and get_policy(text) == policy
        custom = Policy("f32", "bf16", "f32", matmul_precision="highest", float8="float8(min_dim=1024, gradient=e4m3)")
        assert str(custom).endswith(",matmul_precision=highest,float8(gradient=float8_e4m3fn,min_dim=1024)")
        assert get_policy(str(custom)) == custom == get_policy(str(custom).replace(",", " , "))
        assert get_policy("c=bf16,float8(min_dim=1024,accumulate=fast),o=f32").output_dtype == np.float32
        assert str(jaxmp.jmp.Policy("f32", "bf16", "f32", float8="float8")) == "p=full,c=bf16,o=full,float8"

    def test_policy_maps_have_float8_settings(self):
        policies = PolicyMap(
            "mixed_float8", {"**/head": "mixed_bfloat16", "**/up": "c=bf16,float8(min_dim=1,accumulate=fast)"}
        )
        assert policies.float8 == Float8() and policies.resolve(("head",))[0].float8 is None
        assert policies.resolve(("up",))[0].float8 == Float8(min_dim=1, accumulate="fast")
        assert get_policy(str(policies)) == policies
        assert str(PolicyMap("mixed_float8", {"head": "half"}).resolve(("head",))[0]) == str(get_policy("mixed_float8"))

    def test_copies_keep_the_settings(self):
        policy = get_policy("mixed_float8")
        assert pickle.loads(pickle.dumps(policy)) == policy and hash(policy) == hash(get_policy("mixed_float8"))
        assert policy.with_output_dtype("bfloat16").float8 == Float8()
        assert dataclasses.replace(policy, param_dtype="bfloat16").float8 == Float8()
        assert policy != get_policy("mixed_bfloat16") == dataclasses.replace(policy, float8=None)

    def test_float8_products_need_bfloat16_and_float8_is_not_a_compute_dtype(self):
        for call in (
            lambda: Policy("float32", "float16", "float32", float8="float8"),
            lambda: get_policy("compute=float32,float8"),
        ):
            with pytest.raises(ValueError, match="float8 must have compute=bfloat16, got compute=float"):
                call()
        with pytest.raises(ValueError, match="for float8 products, 'mixed_float8'"):
            Policy("float32", "float8_e4m3fn", "float32")

    def test_auto_never_means_a_policy_with_float8(self):
        for name in hardware.GPUS:
            with hardware.assumed(name):
                assert get_policy("auto").float8 is None


class TestDevice:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        monkeypatch.delenv("JAXMP_FLOAT8", raising=False)
        monkeypatch.setattr(float8, "_warned", [])

    def test_a_device_without_float8_products_gives_one_warning(self):
        with pytest.warns(UserWarning, match="got cpu: .* JAXMP_FLOAT8=emulate") as caught:
            assert float8.available() == "no"
        assert caught[0].filename == __file__
        assert float8.available() == "no"  # a second warning would raise

    def test_an_environment_variable_turns_emulation_on(self, monkeypatch):
        monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
        assert float8.available() == "emulate"
        monkeypatch.setenv("JAXMP_FLOAT8", "1")
        with pytest.raises(ValueError, match=r"JAXMP_FLOAT8 must be unset or 'emulate', got '1'; JAXMP_FLOAT8=emulate"):
            float8.available()

    def test_a_function_is_traced_again_for_an_assumed_gpu(self):
        names = []
        traced = jax.jit(lambda x: (names.append(hardware.detect().name), x)[1])
        traced(1.0)
        with hardware.assumed("h200"):
            assert float8.available() == "native"
            traced(1.0)
            with hardware.assumed("l4"):
                assert hardware.detect().name == "NVIDIA L4"
            assert hardware.detect().name == "NVIDIA H200"
        traced(1.0)
        assert names == ["cpu", "NVIDIA H200"]
        with (
            pytest.raises(ValueError, match=r"a known GPU or TPU, got 'h20'; nearest: 'h200'"),
            hardware.assumed("h20"),
        ):
            pass

    def test_names_of_gpus_mean_the_same_everywhere(self):
        for name, target in gpu_targets.TARGETS.items():
            assert target.gpu is hardware.GPUS[name] and targets.target_of(name) == target
            assert hardware.detect(name).compute_capability == target.gpu.compute_capability
