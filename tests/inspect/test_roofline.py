"""Predictions of times from FLOPs, bytes and launches."""

from __future__ import annotations

import importlib
import json

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp.cli import main
from jaxmp.inspect.compiled import gpu_targets, hlo

module = importlib.import_module("jaxmp.inspect._roofline.roofline")

# A program as XLA compiles it for GPUs. Its products: a float32 product that may run in TF32 and one that may not, a
# half product with a workspace, a causal attention, a convolution and its two derivatives. It also has a loop of three
# turns and an update in place.
TEXT = """HloModule jit_step, is_scheduled=true

%update (p0: f32[1000,64], p1: f32[4,64], p2: s32[4,1]) -> f32[1000,64] {
  %p0 = f32[1000,64]{1,0} parameter(0)
  %p1 = f32[4,64]{1,0} parameter(1)
  %p2 = s32[4,1]{1,0} parameter(2)
  ROOT %scatter = f32[1000,64]{1,0} scatter(%p0, %p2, %p1), to_apply=%add
}

%body (state: f32[256,512]) -> f32[256,512] {
  %state = f32[256,512]{1,0} parameter(0)
  ROOT %turn = f32[256,512]{1,0} fusion(%state), kind=kLoop, calls=%none
}

ENTRY %main (a: f32[256,128], b: f32[128,512], h: bf16[64,32], g: bf16[32,16], q: bf16[2,64,4,32]) -> f32[] {
  %a = f32[256,128]{1,0} parameter(0)
  %b = f32[128,512]{1,0} parameter(1)
  %h = bf16[64,32]{1,0} parameter(2)
  %g = bf16[32,16]{1,0} parameter(3)
  %q = bf16[2,64,4,32]{3,2,1,0} parameter(4)
  %x = bf16[8,14,14,16]{3,2,1,0} parameter(5)
  %k = bf16[3,3,16,24]{3,2,1,0} parameter(6)
  %t = f32[1000,64]{1,0} parameter(7)
  %u = f32[4,64]{1,0} parameter(8)
  %i = s32[4,1]{1,0} parameter(9)
  %tf32 = (f32[256,512]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/jvp(Net)/dense/dot_general"}, backend_config={"lhs_contracting_dimensions":["1"],"operand_precision":["DEFAULT","DEFAULT"]}
  %fp32 = (f32[256,512]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/transpose(jvp(Net))/dense/rematted_computation/dot_general"}, backend_config={"lhs_contracting_dimensions":["1"],"operand_precision":["HIGHEST","HIGHEST"]}
  %half = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%h, %g), custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"],"operand_precision":["DEFAULT","DEFAULT"]}
  %attention = (bf16[2,4,64,32]{3,1,2,0}, f32[2,4,64]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL"}
  %conv = (bf16[8,12,12,24]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %y = bf16[8,12,12,24]{3,2,1,0} get-tuple-element(%conv), index=0
  %dx = (bf16[8,14,14,16]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardInput"
  %dk = (bf16[3,3,16,24]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %gte = f32[256,512]{1,0} get-tuple-element(%tf32), index=0
  %loop = f32[256,512]{1,0} while(%gte), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %embedding = f32[1000,64]{1,0} fusion(%t, %u, %i), kind=kInput, calls=%update
  ROOT %end = f32[] constant(0)
}
"""  # noqa: E501
H200 = module.hardware_of("h200")


def test_flops_and_bytes_are_those_of_the_shapes():
    kernels = {kernel.name: kernel for kernel in module.of_program(hlo.HloProgram(TEXT), H200).kernels}
    dot, conv = 2 * 256 * 128 * 512, 2 * (8 * 12 * 12 * 24) * (3 * 3 * 16)
    flops = {name: (kernel.flops, kernel.dtype) for name, kernel in kernels.items() if kernel.flops}
    assert flops == {
        "tf32": (dot, "tensorfloat32"),
        "fp32": (dot, "float32"),
        "half": (2 * 64 * 32 * 16, "bfloat16"),
        "attention": (2 * 2 * (2 * 64 * 4 * 32) * 64 // 2, "bfloat16"),
        "conv": (conv, "bfloat16"),
        "dx": (conv, "bfloat16"),
        "dk": (conv, "bfloat16"),
    }
    assert kernels["tf32"].bytes == 4 * (256 * 128 + 128 * 512 + 256 * 512)  # without the workspace
    assert kernels["turn"].count == 3 and kernels["turn"].bytes == 3 * 2 * 4 * 256 * 512
    assert kernels["embedding"].bytes == 3 * 4 * 64 * 4 + 4 * 4  # the update, the rows read and written; the indices
    assert kernels["tf32"].path == "Net/dense" and not kernels["tf32"].recomputed and kernels["fp32"].recomputed


def test_the_time_is_that_of_arithmetic_bytes_and_launches():
    roofline = module.of_program(hlo.HloProgram(TEXT), H200)
    kernels = {kernel.name: kernel for kernel in roofline.kernels}
    assert roofline.milliseconds == pytest.approx(sum(kernel.milliseconds for kernel in roofline.kernels))
    assert [kernel.milliseconds for kernel in roofline.kernels] == sorted(
        (k.milliseconds for k in roofline.kernels), reverse=True
    )
    fp32 = kernels["fp32"]
    seconds = fp32.flops / (0.8 * 67e12) + fp32.bytes / (0.9 * 4.8e12) + 2e-6
    assert fp32.milliseconds == pytest.approx(1e3 * seconds)
    assert kernels["embedding"].bound == "launch"
    peaks = {"tensorfloat32": 494.7e12, "bfloat16": 989.4e12}
    least = sum(k.flops / peaks[k.dtype] for k in roofline.kernels if k.flops and not k.recomputed)
    assert roofline.model_flop_utilisation == pytest.approx(1e3 * least / roofline.milliseconds)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "tflops"),
    [
        ("ALG_DOT_F32_F32_F32", "float32", 67.0),
        ("ALG_DOT_TF32_TF32_F32", "tensorfloat32", 494.7),
        ("ALG_DOT_TF32_TF32_F32_X3", "tf32x3", 494.7 / 3),
        ("ALG_DOT_BF16_BF16_F32", "bfloat16", 989.4),
        ("ALG_DOT_BF16_BF16_F32_X3", "bf16x3", 989.4 / 3),
        ("ALG_DOT_BF16_BF16_F32_X6", "bf16x6", 989.4 / 6),
        ("ALG_DOT_BF16_BF16_F32_X9", "bf16x9", 989.4 / 9),
        ("ALG_DOT_F16_F16_F32", "float16", 989.4),
        ("ALG_UNSET", "tensorfloat32", 494.7),
    ],
)
def test_each_algorithm_of_a_product_has_its_rate(algorithm, dtype, tflops):
    in_library = TEXT.replace('"operand_precision":["DEFAULT","DEFAULT"]}', f'"algorithm":"{algorithm}"}}', 1)
    name = algorithm.removeprefix("ALG_").lower()
    in_fusion = TEXT.replace('"operand_precision":["DEFAULT","DEFAULT"]}', f"}}, algorithm={name}", 1)
    for text in (in_library, in_fusion):
        kernels = {kernel.name: kernel for kernel in module.of_program(hlo.HloProgram(text), H200).kernels}
        product = kernels["tf32"]
        seconds = product.flops / (0.8 * tflops * 1e12) + product.bytes / (0.9 * 4.8e12) + 2e-6
        assert product.dtype == dtype and product.milliseconds == pytest.approx(1e3 * seconds)


@pytest.mark.absent_gpu
def test_the_compiler_keeps_the_algorithm_of_a_product():
    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    rates = {}
    for name in ("F32_F32_F32", "TF32_TF32_F32", "BF16_BF16_F32"):
        product = lambda a, b, name=name: jnp.matmul(a, b, precision=jax.lax.DotAlgorithmPreset[name])  # noqa: E731
        (kernel,) = (
            kernel for kernel in jaxmp.inspect.roofline(product, device="h200")(shape, shape).kernels if kernel.flops
        )
        rates[name] = kernel.dtype
    assert rates == {
        "F32_F32_F32": "float32",
        "TF32_TF32_F32": "tensorfloat32",
        "BF16_BF16_F32": "bfloat16",
    }


def test_large_products_are_bound_by_arithmetic_and_moves_by_bytes():
    text = (
        TEXT.replace("[256,128]", "[8192,8192]").replace("[128,512]", "[8192,8192]").replace("[256,512]", "[8192,8192]")
    )
    bounds = {kernel.name: kernel.bound for kernel in module.of_program(hlo.HloProgram(text), H200).kernels}
    assert bounds["fp32"] == bounds["tf32"] == "arithmetic" and bounds["turn"] == "bytes"


def test_without_peak_rates_the_error_names_devices_that_have_them():
    with pytest.raises(
        ValueError,
        match=r"none for 'cpu'; name a known device: device='h200', 'a100', 'v5e'.*; on the command line",
    ):
        jaxmp.inspect.roofline(jnp.tanh)(jnp.ones(3))
    with pytest.raises(ValueError, match="got 'h300'"):
        jaxmp.inspect.roofline(jnp.tanh, device="h300")(jnp.ones(3))


def test_every_described_gpu_has_peak_rates():
    for name in gpu_targets.TARGETS:
        known = module.hardware_of(name)
        assert known.peak_tflops["float16"] > known.peak_tflops["float32"]
        assert known.peak_bandwidth == gpu_targets.TARGETS[name].gpu.bandwidth


def test_the_command_says_in_one_line_what_is_wrong(capsys):
    assert main(["roofline", "jax.numpy:sin", "--arg", "float32[8]"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxmp roofline: error: a predicted time needs") and error.count("\n") == 1


@pytest.mark.absent_gpu
def test_a_step_is_predicted_for_a_gpu_that_is_not_there_and_half_is_faster():
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params) @ params).astype(jnp.float32) ** 2)

    times = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        args = jax.ShapeDtypeStruct((4096, 4096), dtype), jax.ShapeDtypeStruct((8192, 4096), dtype)
        roofline = jaxmp.inspect.roofline(jax.grad(loss), device="h200")(*args)
        products = [kernel for kernel in roofline.kernels if kernel.flops]
        assert sum(kernel.flops for kernel in products) == 5 * 2 * 8192 * 4096**2
        assert all("test_roofline.py:" in kernel.source for kernel in products)
        times[dtype] = roofline.milliseconds
    assert times[jnp.bfloat16] < 0.7 * times[jnp.float32]


def test_operations_that_are_not_counted_are_named():
    text = TEXT.replace(
        "  ROOT %end",
        """  %solved = f32[256,128]{1,0} custom-call(%a), custom_call_target="cusolver_geqrf_ffi"
  %triton = f32[256,128]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"
  %sorted = f32[256,128]{1,0} custom-call(%a), custom_call_target="__cub$DeviceRadixSort"
  %sum = f32[256,128]{1,0} all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%add
  ROOT %end""",
    )
    assert module.of_program(hlo.HloProgram(TEXT), H200).not_counted == ()
    roofline = module.of_program(hlo.HloProgram(text), H200)
    assert roofline.not_counted == (
        "the FLOPs of __gpu$xla.gpu.triton",
        "the FLOPs of cusolver_geqrf_ffi",
        "the time on the network of all-reduce",
    )
    assert f"not counted: {'; '.join(roofline.not_counted)}" in str(roofline).splitlines()
    assert json.loads(roofline.to_json())["not_counted"] == list(roofline.not_counted)


def test_a_loop_of_unknown_length_is_named():
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    text = text.replace(
        "ENTRY",
        """%cond (c: f32[256,512]) -> pred[] {
  %c = f32[256,512]{1,0} parameter(0)
  ROOT %flag = pred[] custom-call(%c), custom_call_target="__cub$"
}

ENTRY""",
    )
    roofline = module.of_program(hlo.HloProgram(text), H200)
    assert roofline.not_counted == ("the iterations of the loop (loop) after the first",)
    assert "so the call takes longer than predicted" in str(roofline).splitlines()
    assert {kernel.count for kernel in roofline.kernels if kernel.name == "turn"} == {1}


@pytest.mark.absent_gpu
def test_the_command_fails_if_a_loop_is_not_counted(capsys):
    arguments = ["--arg", "float32[64,64]", "--device", "h200"]
    assert main(["roofline", f"{__name__}:repeated", *arguments]) == 0
    assert "not counted" not in capsys.readouterr().out
    assert main(["roofline", f"{__name__}:until_large", *arguments]) == 1
    assert "not counted: the iterations of the loop grow (test_roofline.py:" in capsys.readouterr().out


def repeated(x):
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ x), x)


def until_large(x):
    with jax.named_scope("grow"):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e3, lambda x: x @ x, x)
