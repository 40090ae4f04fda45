"""The audit of products: its contents, its output, its check and its errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.cli import main
from jaxmp.inspect import AuditError, audit
from jaxmp.inspect._audit.compiled import CastsInLoops, dtypes_that_ran
from jaxmp.inspect._audit.evidence import Audited
from jaxmp.inspect._audit.findings import findings
from jaxmp.inspect.compiled import hlo
from jaxmp.inspect.program.argument_kinds import Leaf
from jaxmp.program.reading import read_program

pytestmark = pytest.mark.once

BF16, F32 = jnp.bfloat16, jnp.float32


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


HALF = shape(16, 32, dtype=BF16), shape(32, 8, dtype=BF16)


def test_a_product_says_where_it_is_and_what_it_takes() -> None:
    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.sum((x @ w).astype(F32))

    report = audit(jax.grad(loss), device="h200", compile=False)(HALF[1], HALF[0])
    forward, backward = report.products
    assert (forward.path, forward.primitive, forward.phase, backward.phase) == (
        "layer", "dot_general", "forward", "backward"
    )  # fmt: skip
    assert forward.source == f"test_audit.py:{line_of(loss, 'x @ w')}"
    assert forward.operands == ("bfloat16", "bfloat16")
    assert (forward.result, forward.ran, forward.count, forward.aligned) == ("bfloat16", None, 1, True)
    assert forward.flops == backward.flops == 2 * 16 * 32 * 8
    assert forward.bytes == 2 * (16 * 32 + 32 * 8 + 16 * 8)
    assert forward.bound == "bytes"
    assert report.flops == {"bfloat16": 1.0}
    assert (report.half_flops, report.memory, report.findings) == (1.0, None, ())
    large = audit(jnp.matmul, device="h200", compile=False)(*[shape(8192, 8192, dtype=BF16)] * 2)
    assert large.products[0].bound == "arithmetic"


def line_of(function: Any, text: str) -> int:
    import inspect

    lines, first = inspect.getsourcelines(function)
    return next(n for n, line in enumerate(lines, first) if text in line)


def test_flops_of_convolutions_count_neither_padding_nor_the_zeros_of_dilations() -> None:
    x, kernel = shape(2, 3, 7, 8), shape(5, 3, 3, 3)
    pads, causal, none = [(1, 2), (2, 1)], [(2, 0), (2, 0)], [(0, 0), (0, 0)]
    for strides, padding, dilations in (
        ((2, 2), pads, {}),
        ((2, 2), causal, {}),
        ((1, 1), pads, {"rhs_dilation": (2, 2)}),
        ((1, 1), none, {"lhs_dilation": (2, 3)}),
    ):
        conv = functools.partial(
            jax.lax.conv_general_dilated, window_strides=strides, padding=padding, **dilations
        )  # fmt: skip
        # If all operands are ones, each result is its number of nonzero terms.
        terms = float(jnp.sum(conv(jnp.ones(x.shape), jnp.ones(kernel.shape))))
        (product,) = audit(conv, compile=False)(x, kernel).products
        assert product.flops == 2 * terms
        # A plan counts padding too, but not the zeros of a dilation.
        planned = jaxmp.cast_plan(conv, "mixed_bfloat16")(x, kernel).summary.product_flops
        assert planned > product.flops if padding != none else planned == product.flops


def test_products_in_loops_branches_kernels_and_rules_are_counted() -> None:
    def fun(x: Any, w: Any, flag: Any) -> Any:
        y = jax.lax.scan(lambda c, _: (jax.lax.fori_loop(0, 3, lambda _, c: c @ w, c), None), x, None, length=4)[0]
        y = jax.lax.cond(flag, lambda y: y @ w, lambda y: y, y)
        y = jax.lax.while_loop(lambda y: y[0, 0] > 0, lambda y: jax.checkpoint(jnp.matmul)(y, w), y)
        return jax.lax.custom_linear_solve(lambda v: w @ v, y, lambda _, b: b, symmetric=True)

    report = audit(fun, compile=False)(shape(8, 8), shape(8, 8), shape(dtype=jnp.bool_))
    assert [product.count for product in report.products[:3]] == [12, 1, None]
    assert {product.count for product in report.products[3:]} == {None}
    assert len(report.products) > 3
    assert audit(jnp.sin, compile=False)(shape(3)).half_flops is None


def test_the_grid_of_a_kernel_multiplies_its_products() -> None:
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        def turn(_: Any, total: Any) -> Any:
            return total + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

        out_ref[...] = jax.lax.fori_loop(0, 3, turn, jnp.zeros((64, 64)))

    def fun(rows: Any, x: Any, w: Any, h: Any) -> Any:
        blocks = [pl.BlockSpec((64, 512), lambda i, j: (i, 0)), pl.BlockSpec((512, 64), lambda i, j: (0, j))]
        block = pl.BlockSpec((64, 64), lambda i, j: (i, j))
        out = jax.ShapeDtypeStruct((512, 512), F32)
        return pl.pallas_call(kernel, out, grid=(rows, 8), in_specs=blocks, out_specs=block)(x, w), h @ h

    wide, half = shape(512, 512), shape(512, 512, dtype=BF16)
    report = audit(functools.partial(fun, 8), compile=False)(wide, wide, half)
    assert [product.count for product in report.products] == [1, 8 * 8 * 3]
    assert report.half_flops == 0.25 and report.not_counted == ()
    report.check(min_half_flops=0.25)

    report = audit(fun, compile=False)(shape(dtype=jnp.int32), wide, wide, half)  # a grid of unknown size
    assert [product.count for product in report.products] == [1, None]
    with pytest.raises(
        AuditError, match=r"1 fault:\nnot-counted: the executions of the float32 product .*test_audit.py"
    ):
        report.check()


def test_products_in_a_loop_of_unknown_length_are_not_counted() -> None:
    def fun(x: Any, w: Any, h: Any) -> Any:
        def turn(carry: Any) -> Any:
            return carry[0] + 1, carry[1] @ w

        return jax.lax.while_loop(lambda carry: carry[0] < 100, turn, (0, x)), h @ h

    wide, half = shape(8, 8), shape(64, 64, dtype=BF16)
    report = audit(fun, compile=False)(wide, wide, half)
    (name,) = report.not_counted
    assert f"not counted: {name}" in str(report).splitlines() and "no findings" in str(report)
    with pytest.raises(AuditError, match="not-counted: the executions of the float32 product"):
        report.check()
    report.check(allow="not-counted")
    half_loop = audit(fun, compile=False)(*[shape(8, 8, dtype=BF16)] * 2, half)  # its share is 100 %
    assert half_loop.not_counted == ()
    half_loop.check()


@pytest.mark.parametrize(
    ("algorithm", "operands", "half"),
    [("BF16_BF16_F32", F32, 1.0), ("BF16_BF16_F32_X3", F32, 0.0), ("F32_F32_F32", BF16, 0.0), (None, BF16, 1.0)],
)
def test_the_algorithm_of_a_product_decides_its_dtype(algorithm: Any, operands: Any, half: float) -> None:
    precision = algorithm and jax.lax.DotAlgorithmPreset[algorithm]
    product = functools.partial(jnp.matmul, precision=precision, preferred_element_type=F32)
    report = audit(product, expect="mixed_bfloat16", compile=False)(*[shape(8, 8, dtype=operands)] * 2)
    assert report.half_flops == half and report.findings == ()


def test_the_policy_is_what_a_map_an_override_or_a_region_says() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(8, dtype=BF16, use_bias=False)(x).astype(F32)
            return nn.Dense(8, use_bias=False, name="head")(x)

    model = Model()
    args = jax.eval_shape(model.init, jax.random.key(0), shape(8, 8)), shape(8, 8)

    def kinds_and_paths(policy: Any, fun: Any = model.apply) -> list[tuple[str, str]]:
        return [(finding.kind, finding.path) for finding in audit(fun, expect=policy, compile=False)(*args).findings]

    assert kinds_and_paths("mixed_bfloat16") == [("float32-product", "Model/head")]
    assert kinds_and_paths(jaxmp.PolicyMap("mixed_bfloat16", {"head": "float32"})) == []
    assert kinds_and_paths(None) == []
    assert kinds_and_paths("float32") == [("half-product", "Model/Dense_0")]
    assert kinds_and_paths(jaxmp.PolicyMap("float32", {"Dense_0": "mixed_bfloat16"})) == []
    assert kinds_and_paths("mixed_float16") == [("float32-product", "Model/head"), ("half-product", "Model/Dense_0")]

    def region(variables: Any, x: Any) -> Any:
        with jaxmp.precision("float32"):
            return model.apply(variables, x)

    def highest(variables: Any, x: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return model.apply(variables, x)

    assert kinds_and_paths("mixed_bfloat16", region) == kinds_and_paths("mixed_bfloat16", highest) == []


def test_an_nnx_step_has_the_paths_of_a_model_without_a_policy_and_the_errors_of_a_real_step() -> None:
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = jnp.tanh(block(x))
            return x

    model = Network(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2), policy="mixed_bfloat16")
    report = audit(step, expect="mixed_bfloat16", compile=False)(model, optimizer, jnp.ones((4, 8)))
    assert {product.path for product in report.products} == {"blocks/0", "blocks/1"}
    recomputing = step.with_options(remat="layers")  # which finds layers by scopes, and the step has none
    for run in (recomputing, audit(recomputing, compile=False)):
        with pytest.raises(ValueError, match="the loss function has none"):
            run(model, optimizer, jnp.ones((4, 8)))


def test_written_infinities_and_what_the_dtype_holds_are_no_findings() -> None:
    def fun(x: Any, mask: Any) -> Any:
        x = jnp.where(mask, x, -jnp.inf) + 1e-6
        x = x + np.where(np.arange(256) < 8, -np.inf, 0).astype(jnp.float16)
        x = sum([jnp.maximum(x, jnp.finfo(x.dtype).min), x])  # which adds to 0
        gelu = jax.nn.gelu(x, approximate=False) + jax.nn.gelu(x) + jax.nn.sigmoid(x) * jnp.tanh(x)
        few = jnp.arange(256).astype(BF16)
        return jnp.sum((gelu + few.astype(jnp.float16)).astype(F32)), x

    args = shape(256, dtype=jnp.float16), shape(256, dtype=jnp.bool_)
    assert audit(jax.grad(fun, has_aux=True), expect="mixed_float16", compile=False)(*args).findings == ()


def test_check_lists_each_fault_with_its_remedy() -> None:
    def fun(x: Any, w: Any) -> Any:
        with jax.named_scope("a"):
            y = jnp.exp(x)
        with jax.named_scope("b"):
            return jnp.exp(y) @ w

    report = audit(fun, expect="mixed_bfloat16", compile=False)(*HALF)
    with pytest.raises(
        AuditError, match=r"found 2 faults:\nhalf-exponential: a \(.*test_audit.py:\d+\): exp in bfloat16.*; cast to"
    ):
        report.check()
    with pytest.raises(AuditError, match=r"1 fault:\nhalf-exponential: b [^\n]*\nto accept .*allow=\['half-exp"):
        report.check(allow=[("half-exponential", "a")])
    report.check(allow=["half-exponential"])
    report.check(allow="half-exponential")
    report.check(allow=[("half-exponential", "*")])
    with pytest.raises(
        ValueError, match="unknown kind of finding 'half-exp'; kinds, nearest first: 'half-exponential'"
    ):
        report.check(allow=["half-exp"])
    wide = audit(jnp.matmul, compile=False)(shape(8, 8), shape(8, 8))
    with pytest.raises(
        AuditError,
        match=r"half_flops: 0.0% .* not 80.0% \(float32 100.0%\); the largest products in wider dtypes: \(no scope\) "
        r"\(no line known\); cast their operands to half, put the model under a policy, or lower min_half_flops$",
    ):
        wide.check()
    wide.check(min_half_flops=0)

    def layer(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(x @ w)

    both_passes = audit(jax.grad(layer, (0, 1)), compile=False)(shape(8, 8), shape(8, 8))
    with pytest.raises(AuditError, match=r"in wider dtypes: layer \([^,]*\); cast"):
        both_passes.check()
    with pytest.raises(AuditError, match=r"memory: 2 KiB at the peak, more than 1 KiB; use a smaller batch"):
        dataclasses.replace(report, memory=types.SimpleNamespace(peak=2048)).check(
            allow=["half-exponential"], max_bytes=1024, min_half_flops=0
        )
    with pytest.raises(ValueError, match="min_half_flops is a share from 0 to 1, got 99; write"):
        wide.check(min_half_flops=99)


def test_a_program_without_products_fails_a_check_that_asks_for_half_products():
    report = audit(jnp.sin, compile=False)(shape(8))
    with pytest.raises(AuditError, match="half_flops: the program has no products"):
        report.check(min_half_flops=0.99)
    report.check(min_half_flops=0)


def test_a_check_of_a_float32_policy_asks_for_no_half_products():
    wide = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    report = jaxmp.inspect.audit(jnp.matmul, expect="float32", compile=False)(wide, wide)
    report.check(allow=["float32-product"] if report.findings else [])
    with pytest.raises(jaxmp.inspect.AuditError, match="half_flops"):
        report.check(min_half_flops=0.8)


def test_equal_layers_share_a_row_of_the_printed_table() -> None:
    def fun(x: Any, weights: Any) -> Any:
        for number, w in enumerate(weights):
            with jax.named_scope(f"layer_{number}/dense_1"):
                x = x @ w
        return x

    report = audit(fun, compile=False)(shape(8, 8), [shape(8, 8)] * 3 + [shape(8, 16)])
    first, second = (line.split() for line in str(report).splitlines()[2:4])
    assert (first[0], first[-1]) == ("layer_*/dense_1", "3")
    assert (second[0], second[-1]) == ("layer_3/dense_1", "1")  # it has other FLOPs
    assert [product.path for product in report.products] == [f"layer_{number}/dense_1" for number in range(4)]


def test_the_dtype_that_ran_is_read_from_the_compiled_program() -> None:
    def fun(x: Any, w: Any) -> Any:
        with jax.named_scope("loop"):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    report = audit(fun)(shape(8, 8), shape(8, 8))
    assert [product.ran for product in report.products] == ["float32"]
    # A product that is written in bfloat16, but that a GPU's library runs in float32.
    values = read_program(jax.make_jaxpr(fun)(*[jnp.ones((8, 8), BF16)] * 2))
    (value,) = (value for value in values.values if value.name == "dot_general")
    program = hlo.HloProgram("""HloModule m

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %y = (f32[8,8]{1,0}, s8[4]) custom-call(%x, %x), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/loop/while/body/dot_general"}
}""")  # noqa: E501
    assert dtypes_that_ran(program, values.values) == {value: "float32"}
    assert not CastsInLoops(program)(value)
    product = dataclasses.replace(report.products[0], operands=("bfloat16", "bfloat16"))
    for on_cpu, kinds in ((False, ["compiled-otherwise"]), (True, [])):
        arguments = [Leaf(argument, "batch", "", False, None) for argument in values.arguments]
        audited = Audited(values, [(value, product)], arguments, lambda value: 1, None, None, on_cpu, ())
        assert [finding.kind for finding in findings(audited)] == kinds


def test_a_device_or_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a known GPU or TPU, got 'h20'; nearest: 'h200'"):
        audit(jnp.matmul, device="h20")
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        audit(jnp.matmul, expect="mixed_bfloat")


def faulty(x: Any) -> Any:
    return jnp.exp(x)


def two() -> Any:
    return (jnp.ones((16, 32), BF16), jnp.ones((32, 8), BF16))


def test_the_command_line_audits_a_function(capsys: Any) -> None:
    assert main(["audit", "jax.numpy:matmul", "--expect", "mixed_bfloat16", "--args", f"{__name__}:two"]) == 0
    assert "no findings" in capsys.readouterr().out
    wide = ["audit", "jax.numpy:matmul", "--arg", "float32[8,8]", "--arg", "float32[8,8]"]
    assert main(wide) == 0
    assert "no product is in half precision (float16 or bfloat16)\nno findings" in capsys.readouterr().out
    assert main([*wide, "--min-half", "0.5"]) == 1
    assert "half_flops: 0.0% of the products' FLOPs are in 16 bits or fewer, not 50.0%" in capsys.readouterr().err
    assert main(["audit", "jax.numpy:matmul", "--args", f"{__name__}:two", "--min-half", "1"]) == 0
    assert main([*wide, "--min-half", "50"]) == 2
    assert "--min-half needs a share from 0 to 1, got 50.0; write e.g. 0.8" in capsys.readouterr().err
    assert main(["audit", f"{__name__}:faulty", "--arg", "bfloat16[8]", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "half-exponential"
    assert main(["audit", "jax.numpy:matmul", "--arg", "float32[8,8]", "--arg", "float32[8,8]", "--device", "x"]) == 2
    assert capsys.readouterr().err.startswith("jaxmp audit: error: device must be None, for the attached device")
    assert main(["audit", "jax.numpy:matmul", "--arg", "float32[8,8]", "--arg", "float32[7,8]"]) == 2
    assert "TypeError: dot_general" in capsys.readouterr().err  # JAX's own error
