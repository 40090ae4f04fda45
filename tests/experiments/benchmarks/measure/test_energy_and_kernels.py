"""The energy that a GPU used, and the kernels in a trace that use tensor cores."""

from __future__ import annotations

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks.measure import energy, power, profiling


def test_kernels_with_tensor_cores_are_told_by_their_names():
    for kernel, half, fp32 in [
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNN", True, True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", True, True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", True, True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128", True, True),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", True, False),
        ("gemm_fusion_dot_42", True, False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", False, False),
        ("ampere_sgemm_128x64_nn", False, False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", False, False),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<...>", False, False),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__half>", False, False),
        ("triton_poi_fused_convolution_relu_3", False, False),
        ("loop_convert_fusion_7", False, False),
        ("MemcpyD2D", False, False),
    ]:
        assert profiling.uses_tensor_cores(kernel) == half, kernel
        assert profiling.uses_tensor_cores(kernel, "fp32") == fp32, kernel


def test_kernels_are_summed_by_name_and_by_module():
    fun = jax.jit(lambda x: jnp.sin(x) @ x)
    x = jnp.ones((64, 64))
    jax.block_until_ready(fun(x))
    events = profiling.of_jax(lambda: fun(x), calls=2)
    kernels = profiling.by_name(events, calls=2)
    total = sum(kernel.ms for kernel in kernels.values())
    assert total == pytest.approx(sum(event.milliseconds for event in events) / 2)
    assert all(kernel.count == 1 for kernel in kernels.values())
    by_module = profiling.by_module(events, fun.lower(x).compile().as_text(), calls=2)
    assert by_module["kinds"]["float32 products"] > 0
    (product,) = [module for module in by_module["modules"] if module["flops"]]
    assert (product["flops"], product["calls"]) == (2 * 64**3, 1)


def test_without_kernels_there_is_no_share_and_no_summary():
    assert profiling.tensor_core_share({}) is None and profiling.summary({}) == {}
    kernels = {"nvjet_hsh": profiling.Kernel(3.0, 2), "loop_add": profiling.Kernel(1.0, 1)}
    assert profiling.tensor_core_share(kernels) == 0.75


def test_kernels_of_both_libraries_are_grouped_by_their_names():
    for kind, kernels in {
        "products": (
            "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm_fusion_dot_general_153", "ampere_sgemm_128x64_nn",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "triton_tem_fused_mm_3",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        ),
        "attention": (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128",
            "void pytorch_flash::flash_bwd_dot_do_o_kernel<...>",
        ),
        "convolutions": (
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", "sm90_xmma_wgrad_implicit_gemm_bf16",
            "void implicit_convolve_sgemm<float, float>",
        ),
        "reductions": (
            "input_convert_reduce_fusion_8", "triton_red_fused__log_softmax_17", "void at::native::reduce_kernel<512>",
            "triton_per_fused__to_copy_add_native_layer_norm_backward_view_9", "void cudnn::bn_fw_tr_1C11_kernel_NCHW",
        ),
        "elementwise": (
            "loop_convert_fusion_7", "loop_multiply_fusion", "wrapped_add", "triton_poi_fused_convolution_relu_3",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
            "input_reduce_window_fusion",
        ),
        "copies and layout": (
            "MemcpyD2D", "Memset (Device)", "loop_transpose_fusion_2", "wrapped_concatenate", "loop_slice_fusion",
            "loop_dynamic_update_slice_fusion_4", "void cudnn::engines_precompiled::nchwToNhwcKernel<__half>",
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>",
        ),
        "optimizer": (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
        ),
        "other": ("fusion_810", "input_scatter_fusion"),
    }.items():  # fmt: skip
        assert {kernel: profiling.group_of(kernel) for kernel in kernels} == dict.fromkeys(kernels, kind)


def test_the_groups_of_a_profile_add_up_to_all_kernels():
    kernels = {f"nvjet_{i}": profiling.Kernel(float(i), 2) for i in range(50)} | {"fusion_1": profiling.Kernel(0.5, 1)}
    summary = profiling.summary(kernels)
    groups = summary["groups"]
    assert groups == {"products": {"ms": sum(range(50)), "count": 100}, "other": {"ms": 0.5, "count": 1}}
    assert summary["kernel_ms"] == sum(group["ms"] for group in groups.values())
    assert summary["kernel_count"] == 101
    assert len(summary["kernels"]) == 40 and summary["kernels"][0] == ["nvjet_49", 49.0, 2]


def test_the_energy_of_a_call_is_that_of_the_counter_or_else_the_power_in_the_time(monkeypatch):
    calls = []
    for joules, expected in ((1200.0, 1200.0), (None, 2.0 * 600.0)):
        reading = power.PowerReading(2.0, 600.0, 700.0, joules, 1500.0, 1980.0, {"power limit": 0.5}, 60.0)
        fake_monitor = types.SimpleNamespace(result=lambda reading=reading: reading)
        monkeypatch.setattr(energy.power, "monitor", lambda fake=fake_monitor: contextlib.nullcontext(fake))
        calls.clear()
        measured = energy.of_call(lambda: calls.append(1), seconds=0.01)
        assert calls and measured["joules"] == pytest.approx(expected / len(calls))
        assert measured["power"]["throttled"] == {"power limit": 0.5}
    monkeypatch.undo()
    nothing = {"joules": None, "power": None}
    assert energy.of_call(lambda: None, 0.0) == energy.of_call(lambda: None, 0.001) == nothing  # here is no GPU
