"""Tests that compile for TPUs that are not attached.

A program for a TPU takes seconds to compile, so the programs here are small and serve several tests.
"""

from __future__ import annotations

import functools
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp.cli import main
from jaxmp.inspect import audit, memory, roofline
from jaxmp.inspect.compiled import compiling, kernels, stored_programs, targets, tpu_targets
from jaxmp.inspect.compiled.collectives import collectives_of
from jaxmp.inspect.compiled.hlo import Array, HloProgram

pytestmark = pytest.mark.usefixtures("standard_promotion")
absent_tpu = pytest.mark.absent_tpu


@pytest.fixture(autouse=True, scope="module")
def _folder_of_programs(tmp_path_factory):
    """Keep compiled programs in a folder of this run."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def shape(*sizes, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256, name="encoder")(x))
        return nn.Dense(128, name="head")(x)


@functools.cache
def step_and_shapes():
    """Return a train step in bfloat16 with a head in float32, and the shapes of its arguments."""
    model = jaxmp.linen.apply_policy(Net(), "mixed_bfloat16", {"**/head": "float32"})

    def loss_fn(params, model_state, batch, rng):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), model_state

    batch = {"x": shape(512, 256), "y": shape(512, dtype="int32")}
    params = jax.eval_shape(model.init, jax.random.key(0), batch["x"])["params"]

    def create():
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        return jaxmp.TrainState.create(params=zeros, tx=optax.sgd(1e-3))

    return jaxmp.make_train_step(loss_fn), (jax.eval_shape(create), batch)


# Names and slices, without a compiler.


def test_a_slice_has_as_many_axes_as_the_torus_of_its_generation():
    assert targets.target_of("v5p:4x4x4").slice_shape == (4, 4, 4)
    assert targets.target_of("TPU v5 lite").slice_shape == ()
    for name, suggestion in {"v5e:16": "v5e:4x4", "v5p:4x4": "v5p:2x2x4", "tpu7x:2": "tpu7x:2x2x4"}.items():
        with pytest.raises(ValueError, match=f"axes of chips, got '{name}'; write e.g. '{suggestion}'"):
            targets.target_of(name)
    cloud = {"v5e-16": "v5e:4x4", "v5litepod-8": "v5e:2x4", "v6e-256": "v6e:16x16", "v5p-8": "v5p:2x2x1"}
    for name, suggestion in cloud.items():
        with pytest.raises(ValueError, match=f"chips along each axis, got '{name}'; write '{suggestion}'"):
            targets.target_of(name)
    for name in ("h200:2x2", "h200:", "v5e:banana", "h200-8"):
        with pytest.raises(ValueError, match=f"known GPU or TPU, got '{name}'"):
            jaxmp.hardware.detect(name)


def test_the_mesh_must_have_the_devices_of_the_slice():
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    for name, slice_of_mesh in {"v5e": "v5e:2x4", "v5p:4x4x4": "v5p:2x2x2", "tpu7x:2x2x2": "tpu7x:2x2x1"}.items():
        with pytest.raises(ValueError, match=rf"a mesh with 8 \(fsdp=8\); write e.g. device='{slice_of_mesh}'"):
            targets.target_of(name).mesh(mesh)
    with pytest.raises(ValueError, match=r"describes GPUs, got '1x1x8' for v5e; write the slice .*='v5e:2x4'"):
        targets.target_of("v5e").mesh(mesh, "1x1x8")


def test_the_installed_libtpu_must_be_the_one_that_jax_names(monkeypatch):
    monkeypatch.setattr(tpu_targets.importlib.util, "find_spec", lambda name: None)
    assert tpu_targets.missing().startswith(
        "to compile for a TPU, JAX needs the package libtpu, which is not installed"
    )
    monkeypatch.setattr(tpu_targets.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tpu_targets.importlib.metadata, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    for installed, is_right in {"0.0.42.1": True, "0.0.421": False, "0.0.52": False}.items():
        monkeypatch.setattr(tpu_targets.importlib.metadata, "version", lambda name, installed=installed: installed)
        assert (tpu_targets.missing() is None) == is_right
    assert f"got 0.0.52: pip install 'jax[tpu]=={jax.__version__}'" in tpu_targets.missing()


def test_an_array_is_padded_to_tiles_and_those_in_the_core_take_no_memory():
    assert Array("bf16", (10, 3), "{1,0:T(8,128)(2,1)}").memory_bytes == 2 * 16 * 128
    assert Array("f32", (3, 10, 5), "{0,2,1:T(8,128)}").memory_bytes == 4 * 10 * 8 * 128
    assert Array("f32", (5,), "{0:T(128)}").memory_bytes == 4 * 128
    assert Array("f32", (8, 128), "{1,0:T(8,128)S(1)}").memory_bytes == 0
    assert Array("f32", (8, 128), "{1,0:T(8,128)S(5)}").memory_bytes == Array("f32", (8, 128), "{1,0}").bytes


@pytest.mark.parametrize(
    ("start", "step", "limit", "trips"), [(0, 1, 7, 7), (2, 3, 12, 4), (5, 1, 5, 0), (0, -1, 7, None), (0, 1, "", None)]
)
def test_the_trips_of_a_loop_are_read_from_its_counter(start, step, limit, trips):
    limit_text = f"s32[] constant({limit})" if limit else "s32[] get-tuple-element(%a), index=1"
    text = f"""HloModule jit_f
%cond (a: (s32[], s32[])) -> pred[] {{
  %a = (s32[], s32[]) parameter(0)
  %limit = {limit_text}
  %i = s32[] get-tuple-element(%a), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}}
%body (b: (s32[], s32[])) -> (s32[], s32[]) {{
  %b = (s32[], s32[]) parameter(0)
  %one = s32[] constant({step})
  %j = s32[] get-tuple-element(%b), index=0
  %copy = s32[] copy(%j)
  %next = s32[] add(%copy, %one)
  %n = s32[] get-tuple-element(%b), index=1
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}}
ENTRY %main (n: s32[]) -> s32[] {{
  %n0 = s32[] parameter(0)
  %start = s32[] constant({start})
  %carry = (s32[], s32[]) tuple(%start, %n0)
  %while = (s32[], s32[]) while(%carry), condition=%cond, body=%body
  ROOT %r = s32[] get-tuple-element(%while), index=0
}}
"""
    program = HloProgram(text)
    assert program.trips(program.computations["main"]["while"]) == trips


def program_of(body):
    """Return a program for four devices, whose entry calls the computation ``f`` with this body."""
    return HloProgram(
        "HloModule jit_f, num_partitions=4, entry_computation_layout={(f32[8,128]{1,0:T(8,128)})->f32[8,128]{1,0}}\n"
        f"%f (p: f32[8,128], i: s32[]) -> f32[8,128] {{\n{body}}}\n"
        "ENTRY %main (x: f32[8,128], n: s32[]) -> f32[8,128] {\n"
        "  %x = f32[8,128]{1,0:T(8,128)} parameter(0)\n  %n = s32[]{:T(128)} parameter(1)\n"
        "  ROOT %r = f32[8,128]{1,0:T(8,128)} fusion(%x, %n), kind=kCustom, calls=%f\n}\n"
    )


def test_a_sum_in_the_form_of_a_scatter_or_a_gather_is_told_as_what_it_is():
    groups = "replica_groups={{0,1,2,3}}, to_apply=%add"
    parameters = "  %p = f32[8,128]{1,0:T(8,128)} parameter(0)\n  %i = s32[]{:T(128)} parameter(1)\n"
    whole = f"  ROOT %s = f32[8,128]{{1,0:T(8,128)}} all-reduce(%p), {groups}\n"
    scattered = (
        f"  %s = f32[8,128]{{1,0:T(8,128)}} all-reduce(%p), {groups}\n"
        "  ROOT %d = f32[2,128]{1,0:T(8,128)} dynamic-slice(%s, %i, %i), dynamic_slice_sizes={2,128}\n"
    )
    gathered = (
        "  %z = f32[]{:T(128)} constant(0)\n  %zeros = f32[8,128]{1,0:T(8,128)} broadcast(%z), dimensions={}\n"
        "  %u = f32[8,128]{1,0:T(8,128)} dynamic-update-slice(%zeros, %p, %i, %i)\n"
        f"  ROOT %s = f32[8,128]{{1,0:T(8,128)}} all-reduce(%u), {groups}\n"
    )
    size = 8 * 128 * 4
    expected = {whole: ("all-reduce", 1.5), scattered: ("reduce-scatter", 0.75), gathered: ("all-gather", 1.5)}
    for body, (kind, share) in expected.items():
        program = program_of(parameters + body)
        compiled = stored_programs.StoredProgram("", {}, None, None, ())
        (row,) = collectives_of(compiled, program).rows
        assert (row.kind, row.bytes, row.wire) == (kind, size, share * size)


def test_the_precision_of_a_product_is_its_own_and_not_that_of_a_scope():
    expected = {
        "": "bfloat16",
        ", operand_precision={high,high}": "bf16x3",
        ", operand_precision={highest,highest}": "float32",
    }
    for precision, dtype in expected.items():
        product = "%c = f32[8,128]{1,0:T(8,128)} convolution(%p, %p), dim_labels=bf_io->bf"
        scope = ', metadata={op_name="jit(f)/highest_layer/dot_general"}'
        program = program_of(f"  %p = f32[8,128]{{1,0:T(8,128)}} parameter(0)\n  ROOT {product}{precision}{scope}\n")
        instruction = program.computations["f"]["c"]
        (kernel_product,) = kernels.products_of(program, "f", instruction)
        assert kernel_product.dtype == dtype
    tpu = jaxmp.hardware.detect("v5e")
    rates = [tpu.product_rate(dtype) for dtype in ("bfloat16", "float16", "float8_e4m3fn", "bf16x3", "float32")]
    assert rates == pytest.approx([197, 197, 197, 197 / 3, 197 / 6])


# Compiled for TPUs.


@absent_tpu
@pytest.mark.parametrize("device", ["v5e", "v6e"])
def test_float32_means_the_highest_precision_and_half_stays_half(device):
    step, shapes = step_and_shapes()
    report = audit(step, device=device)(*shapes)
    for product in report.products:
        expected = "float32" if product.path == "Net/head" else "bfloat16"
        assert product.operands == (expected, expected) and product.ran == expected
    assert {product.phase for product in report.products} == {"forward", "backward"}
    assert "have float32 operands" not in str(report)
    program = HloProgram(compiling.compiled(step, shapes, device).as_text())
    sums = [i for _, i, _ in program.instructions_by_run() if i.opcode == "reduce"]
    assert sums and {array.dtype for i in sums for array in i.arrays} <= {"f32", "s32", "pred"}


@absent_tpu
def test_a_product_that_the_author_wrote_in_float32_is_said_to_run_in_bfloat16():
    args = shape(256, 128), shape(128, 256)
    report = audit(lambda x, w: (x @ w).sum(), device="v5e")(*args)
    assert [product.ran for product in report.products] == ["bfloat16"]
    assert "1 of the products have float32 operands and ran in bfloat16" in str(report)


@absent_tpu
def test_memory_and_time_of_a_step_are_what_the_compiler_says():
    step, shapes = step_and_shapes()
    compiled = compiling.compiled(step, shapes, "v5e")
    sizes = compiled.memory_analysis()
    used = memory(step, device="v5e")(*shapes)
    assert used.device == "TPU v5 lite" and used.batch == 512
    assert sum(used.by_kind.values()) == sum(used.by_dtype.values()) == used.peak
    arguments = used.by_kind["params"] + used.by_kind["batch"] + used.by_kind["optimizer"] + used.by_kind["other"]
    assert sizes.argument_size_in_bytes <= used.peak and arguments == pytest.approx(
        sizes.argument_size_in_bytes, rel=0.05
    )

    times = roofline(step, device="v5e")(*shapes)
    assert times.milliseconds == max(times.parts.values()) and times.parts["links"] == 0
    cycles = sum(kernel.cycles for kernel in times.kernels if kernel.cycles is not None)
    assert cycles == pytest.approx(times.parts["kernels"] * 1.5e6, rel=0.01)
    assert 0 < cycles <= sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text())))
    products = 2 * 512 * (3 * 256 * 128 + 2 * 256 * 256)  # no derivative by the batch
    assert sum(kernel.flops for kernel in times.kernels) == products
    assert "cycles estimated by the compiler, not run" in str(times)


@absent_tpu
def test_the_peak_of_a_loop_is_the_compilers_peak_and_not_the_sum_of_its_sizes(monkeypatch):
    raw, facts = [], stored_programs._facts
    monkeypatch.setattr(stored_programs, "_facts", lambda compiled: raw.append(compiled) or facts(compiled))

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    def loss(layers, x):
        return jnp.square(jax.lax.scan(layer, x, layers)[0].astype(jnp.float32)).mean()

    layers, x = shape(6, 2048, 2048), shape(16384, 2048, dtype="bfloat16")
    used = memory(jax.grad(loss), device="v5e")(layers, x)
    (compiled,) = raw
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    assert used.peak == sizes.peak_memory_in_bytes < 0.95 * total
    assert used.peak > 6 * (2 * 2048**2 * 4 + 16384 * 2048 * 2)  # params, gradients and the inputs of layers


@absent_tpu
def test_the_body_of_a_scan_counts_for_each_layer_and_reads_one_layer_at_a_time():
    def f(x, layers):
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, layers)[0]

    times = roofline(f, device="v5e")(shape(256, 256, dtype="bfloat16"), shape(5, 256, 256, dtype="bfloat16"))
    assert sum(kernel.flops for kernel in times.kernels) == 5 * 2 * 256**3
    (kernel,) = (kernel for kernel in times.kernels if kernel.flops)
    assert kernel.count == 5 and kernel.bytes <= 2 * 2 * 5 * 256**2


@absent_tpu
def test_a_program_is_compiled_once_and_read_from_the_disk_afterwards(monkeypatch):
    def f(x, w):
        return jnp.tanh(x) @ w

    args = shape(128, 128), shape(128, 128)
    first = compiling.compiled(f, args, "v5e")
    monkeypatch.setattr(stored_programs, "_facts", lambda compiled: pytest.fail("compiled again"))
    again = compiling.compiled(f, args, "v5e")
    assert again.as_text() == first.as_text() and vars(again.memory_analysis()) == vars(first.memory_analysis())
    for file in stored_programs.folder().glob("jaxmp-*"):
        file.write_bytes(file.read_bytes()[:100])  # as after a full disk
    monkeypatch.undo()
    assert compiling.compiled(f, args, "v5e").as_text() == first.as_text()


@absent_tpu
def test_two_tools_read_the_same_program_wherever_they_are_called(monkeypatch):
    args = shape(8, 128), shape(128, 256)
    memory(jnp.matmul, device="v5e")(*args)
    monkeypatch.setattr(stored_programs, "_facts", lambda compiled: pytest.fail("compiled again"))
    roofline(jnp.matmul, device="v5e")(*args)  # the call is on another line


@absent_tpu
def test_a_program_with_other_options_is_another_program(monkeypatch):
    def f(x, w):
        return jnp.tanh(x) @ w

    args = shape(128, 128), shape(128, 128)
    compiling.compiled(f, args, "v5e")
    number = len([*stored_programs.folder().glob("jaxmp-*")])
    compiling.compiled(jax.jit(f, compiler_options={"xla_tpu_scoped_vmem_limit_kib": "4096"}), args, "v5e")
    assert len([*stored_programs.folder().glob("jaxmp-*")]) == number + 1
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=2048")
    compiling.compiled(f, args, "v5e")
    assert len([*stored_programs.folder().glob("jaxmp-*")]) == number + 2


@absent_tpu
def test_a_program_that_does_not_fit_is_an_error_that_says_how_much_it_needs():
    with pytest.raises(ValueError, match=r"needs 18\.\d+ GiB, but TPU v5 lite has 15\.75 GiB; find settings that fit"):
        memory(lambda x: x.sum(), device="v5e")(shape(150_000, 65_536, dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"needs 1,[\d.]+ GiB, but TPU v5 lite has 15\.75 GiB"):
        memory(lambda x: x.sum(), device="v5e")(shape(9_000_000, 65_536, dtype="bfloat16"))
    with pytest.raises(
        ValueError, match="a slice of TPUs needs arguments on a mesh, got 'v5e:4x4' and no NamedSharding"
    ):
        memory(jnp.sin, device="v5e:4x4")(shape(8))


@absent_tpu
def test_a_slice_reports_the_traffic_of_each_chip_in_half_precision():
    mesh = jax.sharding.AbstractMesh((4,), ("fsdp",))
    rows = jax.NamedSharding(mesh, jax.P("fsdp"))

    def loss(w, x):
        return jnp.square(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).mean()

    fun = jax.jit(jax.grad(loss))
    args = shape(256, 512, sharding=rows), shape(1024, 256, sharding=rows)
    used = memory(fun, device="v5e:2x2")(*args)
    assert used.devices == 4 and used.collectives.wire > 0
    assert used.by_kind["params"] == 4 * 256 * 512 // 4
    assert {row.axis for row in used.collectives.rows} == {"fsdp"}
    times = roofline(fun, device="v5e:2x2")(*args)
    assert times.parts["links"] == pytest.approx(1e3 * used.collectives.wire / 200e9)


@absent_tpu
def test_the_commands_take_a_tpu(capsys):
    for command in ("memory", "roofline", "audit"):
        arguments = [command, "jax.numpy:matmul", "--arg", "float32[256,128]", "--arg", "float32[128,256]"]
        assert main([*arguments, "--device", "v5e", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    assert main(["memory", "jax.numpy:sin", "--arg", "float32[8]", "--device", "v5e:3"]) == 2
    assert "a slice of v5e has 2 axes of chips, got 'v5e:3'" in capsys.readouterr().err


def test_float16_on_a_tpu_is_warned_of_once():
    model = jaxmp.linen.apply_policy(nn.Dense(128), "mixed_float16")

    def loss_fn(params, model_state, batch, rng):
        return jnp.square(model.apply({"params": params}, batch)).mean(), model_state

    params = {"kernel": jnp.zeros((128, 128)), "bias": jnp.zeros(128)}
    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(loss_fn)
    warning = "a TPU multiplies float16 no faster than bfloat16; use mixed_bfloat16"
    with jaxmp.hardware.assumed("v5e"), pytest.warns(UserWarning, match=warning):
        state, _ = step(state, np.ones((8, 128), np.float32))
    with jaxmp.hardware.assumed("v5e"):
        step(state, np.ones((8, 128), np.float32))  # no second warning, which would be an error
