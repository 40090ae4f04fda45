"""The energy that a GPU used, and the kernels in a trace that use tensor cores."""

from __future__ import annotations

import types
from collections import namedtuple

import jax
import jax.numpy as jnp
import pytest

from experiments.measure import energy, profiling


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


def test_a_traces_kernels_are_those_in_the_streams_of_gpus():
    Named, Event = namedtuple("Named", "name planes lines events"), namedtuple("Event", "name duration_ns")
    kernels = [Event("nvjet_hsh", 2e6), Event("loop_add", 1e6), Event("nvjet_hsh", 1e6)]
    lines = [Named("Stream #7(Compute)", 0, 0, kernels), Named("XLA Ops", 0, 0, [Event("dot.3", 9e6)])]
    planes = [Named("/device:GPU:0", 0, lines, 0), Named("/host:CPU", 0, lines, 0)]
    kernel_ms = profiling.kernels_of(types.SimpleNamespace(planes=planes))
    assert kernel_ms == {"nvjet_hsh": 3.0, "loop_add": 1.0}
    assert profiling.tensor_core_share(kernel_ms) == 0.75


def test_a_trace_of_a_cpu_has_no_kernels_and_no_share():
    fun = jax.jit(lambda x: x @ x)
    assert profiling.of_jax(lambda: fun(jnp.ones((4, 4))), calls=1) == {}
    assert profiling.tensor_core_share({}) is None


class NVML:
    """A fake NVML. GPUs 3 and GPU-1234 have a counter, GPU-old has none."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        handle._obj.value = {b"GPU-1234": 1234, b"GPU-old": 99}.get(name)
        return 0 if handle._obj.value else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, millijoules):
        millijoules._obj.value = {3: 2500, 1234: 7000}.get(handle.value, 0)
        return 3 if handle.value == 99 else 0


def test_energy_is_what_the_counter_moved_read_in_joules_by_index_or_name(monkeypatch):
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: NVML())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert energy.counter()() == 2.5
    assert energy.counter("GPU-1234")() == 7.0
    assert energy.counter("GPU-old") is None and energy.counter("GPU-none") is None

    def missing(_):
        raise OSError("no such file")

    for library in (lambda _: types.SimpleNamespace(), missing):
        monkeypatch.setattr(energy.ctypes, "CDLL", library)
        assert energy.counter() is None

    calls = []
    used = energy.joules(lambda: calls.append(1), lambda: 100.0 + 0.5 * len(calls), seconds=0.01)
    assert used == pytest.approx(0.5) and calls
