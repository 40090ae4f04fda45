"""Kernels, products, traffic and memory, read from XLA's programs for GPUs."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from experiments.benchmarks.measure import programs
from jaxmp.cli import main
from jaxmp.inspect.compiled import hlo, memory_of_hlo
from jaxmp.inspect.compiled.kernels import products_of

# A shortened program, as XLA schedules it for GPUs. It has a loop of four products that read slices of their operand, a
# fused attention forward and backward, a transpose and a reduction.
TEXT = """HloModule jit_step, is_scheduled=true

%region_add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%sliced_product (p0: bf16[4,8,16], p1: s32[], p2: bf16[16,16]) -> (bf16[8,16], s8[1024]) {
  %p0 = bf16[4,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[16,16]{1,0} parameter(2)
  %zero.1 = s32[] constant(0)
  %slice.1 = bf16[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %zero.1, %zero.1), dynamic_slice_sizes={1,8,16}
  %bitcast.1 = bf16[8,16]{1,0} bitcast(%slice.1)
  ROOT %gemm.1 = (bf16[8,16]{1,0}, s8[1024]{0}) custom-call(%bitcast.1, %p2), custom_call_target="__cublas$lt$matmul"
}

%exponential (q0: bf16[8,16]) -> bf16[8,16] {
  %q0 = bf16[8,16]{1,0} parameter(0)
  ROOT %exp.1 = bf16[8,16]{1,0} exponential(%q0)
}

%body (state: LOOP) -> LOOP {
  %state = LOOP parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %xs = bf16[4,8,16]{2,1,0} get-tuple-element(%state), index=1
  %w = bf16[16,16]{1,0} get-tuple-element(%state), index=2
  %product.1 = (bf16[8,16]{1,0}, s8[1024]{0}) fusion(%xs, %i, %w), kind=kCustom, calls=%sliced_product
  %product.2 = bf16[8,16]{1,0} get-tuple-element(%product.1), index=0
  %fusion.1 = bf16[8,16]{1,0} fusion(%product.2), kind=kLoop, calls=%exponential, metadata={op_name="step/exp"}
  ROOT %tuple.1 = LOOP tuple(%i, %xs, %w)
}

%condition (state.1: LOOP) -> pred[] {
  %state.1 = LOOP parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %four), direction=LT
}

ENTRY %main (w.1: bf16[16,16], q: bf16[2,8,4,16], x.1: bf16[4,8,16]) -> (bf16[16,16], f32[]) {
  %w.1 = bf16[16,16]{1,0} parameter(0)
  %q = bf16[2,8,4,16]{3,2,1,0} parameter(1)
  %x.1 = bf16[4,8,16]{2,1,0} parameter(2)
  %zero = s32[] constant(0)
  %tuple.2 = LOOP tuple(%zero, %x.1, %w.1)
  %while.1 = LOOP while(%tuple.2), condition=%condition, body=%body, config={"known_trip_count":{"n":"4"}}
  %fmha.1 = (bf16[2,4,8,16], f32[2,4,8], u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %out.1 = bf16[2,4,8,16]{3,1,2,0} get-tuple-element(%fmha.1), index=0
  %sums.1 = f32[2,4,8]{2,1,0} get-tuple-element(%fmha.1), index=1
  %fmha.2 = (bf16[2,4,8,16]) custom-call(%q, %q, %q, %sums.1), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %transpose.1 = bf16[16,16]{0,1} transpose(%w.1), dimensions={1,0}, metadata={op_name="step/transpose"}
  %zero.2 = f32[] constant(0)
  %reduce.1 = f32[] reduce(%sums.1, %zero.2), dimensions={0,1,2}, to_apply=%region_add
  ROOT %tuple.3 = (bf16[16,16]{1,0}, f32[]) tuple(%transpose.1, %reduce.1)
}
"""
PROGRAM = hlo.HloProgram(TEXT.replace("LOOP", "(s32[], bf16[4,8,16]{2,1,0}, bf16[16,16]{1,0})"))


def test_kernels_are_counted_as_often_as_a_loop_repeats_without_its_condition_and_what_they_are_made_of():
    assert programs.launches(PROGRAM) == 4 * len(["product", "exponential"]) + len(
        ["fmha", "fmha", "transpose", "reduce"]
    )


def test_a_product_that_reads_its_slice_itself_is_a_product_and_no_traffic():
    exponentials, transpose, reduction = 4 * 2 * 256, 2 * 512, 64 * 4 + 4 + 4
    assert programs.traffic(PROGRAM) == (exponentials + transpose + reduction, transpose)


TOGETHER = "ROOT %fusion = bf16[1,8,16]{2,1,0} fusion(%x, %j, %z), kind=kLoop, calls=%pick"
APART = """%start = ((bf16[4,8,16], s32[], bf16[1,8,16]), bf16[1,8,16], u32[]) fusion-start(%x, %j, %z), calls=%pick
  ROOT %done = bf16[1,8,16]{2,1,0} fusion-done(%start)"""


def test_a_fusion_reads_only_the_part_that_it_picks_from_an_operand():
    text = """HloModule pick, is_scheduled=true

%pick (p: bf16[4,8,16], i: s32[], y: bf16[1,8,16]) -> bf16[1,8,16] {
  %p = bf16[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = bf16[1,8,16]{2,1,0} parameter(2)
  %slice = bf16[1,8,16]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,8,16}
  ROOT %sum = bf16[1,8,16]{2,1,0} add(%slice, %y)
}

ENTRY %main (x: bf16[4,8,16], i: s32[], y: bf16[1,8,16]) -> bf16[1,8,16] {
  %x = bf16[4,8,16]{2,1,0} parameter(0)
  %j = s32[] parameter(1)
  %z = bf16[1,8,16]{2,1,0} parameter(2)
  CALL
}
"""
    for call in (TOGETHER, APART):
        program = hlo.HloProgram(text.replace("CALL", call))
        assert programs.traffic(program) == (256 + 4 + 256 + 256, 0) and programs.launches(program) == 1


def test_attention_has_two_products_forward_and_five_backward():
    product_flops = 2 * (2 * 8 * 4 * 16) * 8
    kernels = PROGRAM.instructions_by_run(into_fusions=False)
    products = [product for name, kernel, _ in kernels for product in products_of(PROGRAM, name, kernel, masked=False)]
    attention = [product for product in products if product.kind == "attention"]
    assert {product.dtype for product in attention} == {"bfloat16"}
    assert sum(product.flops for product in attention) == 7 * product_flops
    assert programs.products(PROGRAM) == Counter({"dot bf16×bf16": 1, "attention bf16×bf16": 2})


def test_a_program_without_loops_has_a_kernel_for_each_of_its_operations():
    lowered = jax.jit(lambda x: jnp.sin(jnp.exp(x))).lower(jnp.ones(4))
    assert programs.launches(hlo.HloProgram(lowered.as_text("hlo"))) == 2


def test_the_peak_lists_what_is_alive_at_once_with_the_code_that_made_it():
    # The loop's buffers are smaller. Parameters, constants and results do not count.
    assert [
        (buffer.bytes, str(buffer.array), buffer.maker.name) for buffer in memory_of_hlo.buffers_at_peak(PROGRAM)
    ] == [
        (2048, "bf16[2,4,8,16]", "fmha.1"),
        (256, "f32[2,4,8]", "fmha.1"),
    ]


def test_an_elementwise_kernel_writes_into_what_nobody_reads_any_more():
    program = hlo.HloProgram("""HloModule chain, is_scheduled=true

%f (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %e = f32[1024]{0} exponential(%p)
}

ENTRY %main (x: f32[1024]) -> f32[] {
  %x = f32[1024]{0} parameter(0)
  %first = f32[1024]{0} fusion(%x), kind=kLoop, calls=%f
  %second = f32[1024]{0} fusion(%first), kind=kLoop, calls=%f
  %third = f32[1024]{0} fusion(%second), kind=kLoop, calls=%f
  ROOT %last = f32[] fusion(%third), kind=kInput, calls=%f
}
""")
    assert [buffer.bytes for buffer in memory_of_hlo.buffers_at_peak(program)] == [4096]


def test_a_line_that_cannot_be_read_is_counted():
    assert PROGRAM.not_counted == ()
    line = "  %dot = f32[8,8] dot<new>(%a, %b)"
    with pytest.warns(UserWarning, match="not counted: 1 line of the compiled program .*dot<new>.*please report it"):
        program = hlo.HloProgram(TEXT.replace("ENTRY", f"{line}\n\nENTRY"))
    assert program.not_counted == (f"1 line of the compiled program that jaxmp cannot read, such as {line.strip()!r}",)


def matmul(x):
    return x @ x


@pytest.mark.filterwarnings("ignore:not counted")
def test_tools_fail_if_they_cannot_read_a_line(monkeypatch, capsys):
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    whole = jaxmp.inspect.audit(matmul)(half)
    assert whole.not_counted == () and main(["memory", f"{__name__}:matmul", "--arg", "float32[8,8]"]) == 0
    whole.check()
    without_dot = hlo._INSTRUCTION.pattern.replace(r"([\w-]+)\(", r"((?!dot|custom)[\w-]+)\(")
    monkeypatch.setattr(hlo, "_INSTRUCTION", re.compile(without_dot))
    report = jaxmp.inspect.audit(matmul)(half)
    with pytest.raises(jaxmp.inspect.AuditError, match="not-counted: 1 line of the compiled program"):
        report.check()
    for tool in ("audit", "memory"):
        assert main([tool, f"{__name__}:matmul", "--arg", "float32[8,8]"]) == 1
        assert "not counted: 1 line of the compiled program" in capsys.readouterr().out


def test_a_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match=r"XLA program must have an ENTRY, got 'None'; pass compiled.as_text"):
        hlo.HloProgram("None")


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(step)/jvp(Net)/dense/dot_general", "forward"),
        ("jit(step)/transpose(jvp(Net))/dense/dot_general", "backward"),
        ("jit(step)/transpose(jvp(Net))/dense/rematted_computation/dot_general", "recomputed"),
        ("jit(step)/add", ""),
        ("", ""),
    ],
)
def test_the_phase_of_an_instruction_comes_from_its_name(op_name, phase):
    text = f'%add = f32[] add(%a, %b), metadata={{op_name="{op_name}"}}'
    assert hlo.Instruction("add", "add", "f32[]", ("a", "b"), text).phase == phase
