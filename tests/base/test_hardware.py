from __future__ import annotations

import types

import jax
import numpy as np
import pytest

import jaxmp
from jaxmp import hardware
from jaxmp.base.hardware import align_dim, detect, recommended_policy
from jaxmp.inspect.compiled import targets

pytestmark = pytest.mark.once


def gpu(name="NVIDIA Test", capability="8.0", platform="gpu"):
    return types.SimpleNamespace(device_kind=name, platform=platform, compute_capability=capability)


VOLTA = ("float16",)
TURING = (*VOLTA, "int8")
AMPERE = (*TURING, "bfloat16", "tensorfloat32")
HOPPER = (*AMPERE, "float8_e4m3fn", "float8_e5m2")
BLACKWELL = (*HOPPER, "mxfp8", "float4_e2m1fn")


def test_tensor_cores_and_policy_follow_the_compute_capability():
    expected = {
        **dict.fromkeys(("3.5", "6.0"), ((), "float32")),
        "7.0": (VOLTA, "mixed_float16"),
        **dict.fromkeys(("7.2", "7.5"), (TURING, "mixed_float16")),
        **dict.fromkeys(("8.0", "8.6", "8.7"), (AMPERE, "mixed_bfloat16")),
        **dict.fromkeys(("8.9", "9.0", "9.0a"), (HOPPER, "mixed_bfloat16")),
        **dict.fromkeys(("10.0", "10.3", "12.0", "12.1"), (BLACKWELL, "mixed_bfloat16")),
    }
    detected = {capability: detect(gpu(capability=capability)) for capability in expected}
    assert {name: (device.tensor_cores, device.recommended_policy) for name, device in detected.items()} == expected
    assert all(device.compute_capability == name for name, device in detected.items())
    assert all(recommended_policy(gpu(capability=name)) == policy for name, (_, policy) in expected.items())


def test_float16_is_recommended_with_the_loss_scale_it_needs_and_bfloat16_without():
    assert "jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())" in detect(gpu("Tesla T4", "7.5")).reason
    assert "no loss scale is needed" in detect(gpu("NVIDIA H200", "9.0")).reason


def test_turing_parts_without_tensor_cores_are_known_by_name():
    for name in ("NVIDIA GeForce GTX 1650", "NVIDIA T1000", "Quadro T2000", "NVIDIA GeForce MX450"):
        device = detect(gpu(name, "7.5"))
        assert (device.tensor_cores, device.recommended_policy) == ((), "float32")
        assert device.reason == f"{name} has no tensor cores: half precision would save memory, but no time"
    for name in ("Tesla T4", "NVIDIA TITAN RTX", "Quadro RTX 5000", "NVIDIA GeForce RTX 2060"):
        assert detect(gpu(name, "7.5")).tensor_cores == TURING


def test_an_unknown_device_gets_float32_and_is_told_why():
    capabilities = ("gfx942", "gfx942:sramecc+:xnack-", None, "", "9", object())
    other_devices = [
        gpu("Apple M3", None, platform="METAL"),
        types.SimpleNamespace(device_kind="NPU", platform="neuron"),
        types.SimpleNamespace(device_kind=None, platform=None),
    ]
    for device in (*(gpu("mystery", capability) for capability in capabilities), *other_devices):
        detected = detect(device)
        assert detected.recommended_policy == "float32"
        assert "jaxmp does not know which dtypes are fast" in detected.reason
        assert (detected.tensor_cores, detected.peak_tflops, detected.peak_bandwidth) == ((), {}, None)


def test_the_capability_of_another_backend_is_reported_unchanged():
    assert detect(gpu("AMD Instinct MI300X", "gfx942")).compute_capability == "gfx942"
    assert detect(types.SimpleNamespace(device_kind="NPU", platform="neuron")).compute_capability is None


def test_the_cpu_of_this_machine_gets_float32():
    detected = detect()
    assert detected == detect(jax.devices("cpu")[0])
    assert detected.memory_bytes is None
    assert (detected.platform, detected.compute_capability, detected.tensor_cores) == ("cpu", None, ())
    assert detected.recommended_policy == recommended_policy() == "float32"
    assert detected.reason == "a CPU computes half precision more slowly than float32"
    assert hash(detected) == hash(detect())


def test_the_memory_of_a_known_gpu_is_that_of_its_kind_and_of_another_device_its_limit():
    assert detect("h200").memory_bytes == detect(gpu("NVIDIA H200", "9.0")).memory_bytes == 141 * 2**30
    unknown = types.SimpleNamespace(device_kind="NPU", platform="neuron", memory_stats=lambda: {"bytes_limit": 2**30})
    assert detect(unknown).memory_bytes == 2**30
    for name, row in hardware.GPUS.items():
        assert detect(name).memory_bytes == row.memory_bytes


def test_tpus_train_in_bfloat16_whether_or_not_their_generation_is_known():
    known = detect(types.SimpleNamespace(device_kind="TPU v5 lite", platform="tpu"))
    new = detect(types.SimpleNamespace(device_kind="TPU v99", platform="tpu"))
    assert known.recommended_policy == new.recommended_policy == "mixed_bfloat16"
    assert known.tensor_cores == ("bfloat16", "int8") and new.tensor_cores == ("bfloat16",)
    assert known.peak_tflops == {"bfloat16": 197.0, "int8": 393.0} and known.peak_bandwidth == 819e9
    assert (new.peak_tflops, new.peak_bandwidth) == ({}, None)


def test_peak_rates_are_the_datasheets_for_the_whole_device_only():
    h200 = detect(gpu("NVIDIA H200", "9.0"))
    assert h200.peak_tflops["bfloat16"] == h200.peak_tflops["float16"] == 989.4
    assert h200.peak_tflops["float8_e4m3fn"] == pytest.approx(2 * 989.4, rel=1e-3)
    assert (h200.peak_tflops["float32"], h200.peak_bandwidth) == (67, 4.8e12)
    assert detect(gpu("NVIDIA H200 MIG 1g.18gb", "9.0")).peak_tflops == {}
    assert detect(gpu("Tesla V100-SXM2-16GB", "7.0")).peak_tflops == {"float32": 15.7, "float16": 125.0}


def test_every_known_device_multiplies_faster_in_fewer_bits():
    order = ("float32", "tensorfloat32", "float16", "bfloat16", "float8_e4m3fn", "int8")
    for name, device in [(name, detect(name)) for name in (*hardware.GPUS, *hardware.TPUS)]:
        known = [device.peak_tflops[dtype] for dtype in order if dtype in device.peak_tflops]
        assert known and known == sorted(known), name
        assert 1e11 < device.peak_bandwidth < 1e13, name


def test_each_row_of_the_table_of_gpus_is_consistent():
    kinds = [row.device_kind for row in hardware.GPUS.values()]
    assert len({*kinds}) == len(kinds)
    for name, row in hardware.GPUS.items():
        of_chip = 2 * row.cores * row.architecture.fpus * row.clock_ghz / 1000
        assert row.float32 == pytest.approx(of_chip, rel=0.02), name
        assert row.half >= 1.9 * row.float32 and row.source, name
        assert 10 < row.memory_gib < 300 and 4 <= row.l2_mib < 256, name
        cores = detect(name).tensor_cores
        for dtype in ("tensorfloat32", "float8_e4m3fn", "int8"):
            assert (dtype in row.tflops) == (dtype in cores), (name, dtype)


def test_a_gpu_is_found_by_its_short_and_its_full_name_in_any_spelling():
    names = {
        "4090": ("RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"),
        "l40s": ("L40S", "NVIDIA L40S"),
        "a10": ("A10",),
    }
    for name in ("TPU v5 lite", "tpu v5e", "V5E", "v5e:4x4"):
        assert detect(name).name == "TPU v5 lite"
    assert detect("Trillium").name == "TPU v6 lite" and detect("Ironwood").name == "TPU7x"
    with pytest.raises(ValueError, match=r"got 'v5-16'.* A slice of TPUs is written as in 'v5e:4x4'"):
        detect("v5-16")
    names |= {"h100-pcie": ("H100 PCIe", "h100_pcie"), "a100-40gb": ("A100 40GB", "NVIDIA A100-SXM4-40GB")}
    for short, spellings in names.items():
        for name in spellings:
            assert detect(name).name == hardware.GPUS[short].device_kind
            assert targets.target_of(name).gpu is hardware.GPUS[short]
    with pytest.raises(
        ValueError, match=r"got 'RTX 4900'; nearest: '4090'.* add a row to jaxmp/base/gpus.py or tpus.py"
    ):
        detect("RTX 4900")


def test_a_gpu_for_which_cuda_no_longer_compiles_has_rates_but_no_target():
    assert detect("v100").peak_tflops["float16"] == 125
    with pytest.raises(ValueError, match=r"capability 7.5 or later, got 'v100' with 7.0; name a newer GPU"):
        targets.target_of("v100")


def test_the_recommended_policy_is_one_that_get_policy_reads():
    for device in (gpu(capability="7.0"), gpu(capability="8.0"), gpu(capability=None)):
        assert jaxmp.get_policy(recommended_policy(device)).param_dtype == np.float32


def test_align_dim_rounds_up_to_a_multiple_of_eight_unless_told_otherwise():
    aligned = {(1, 8): 8, (8, 8): 8, (9, 8): 16, (50257, 8): 50264, (50257, 128): 50304, (5, 1): 5, (3, 2): 4}
    assert {(n, divisor): align_dim(n, divisor) for n, divisor in aligned} == aligned
    assert align_dim(np.int32(9), np.int64(8)) == 16
    assert align_dim(33) == 40
