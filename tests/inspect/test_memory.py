"""The memory of a program: the compiler's figure, by kind, and the largest batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.cli import main
from jaxmp.inspect import memory
from jaxmp.inspect.compiled import gpu_targets, memory_of_hlo, targets
from jaxmp.inspect.compiled.hlo import HloProgram

KINDS = {"params", "optimizer", "model_state", "batch", "activations", "temporaries", "other"}
F32 = jnp.float32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def peak_of(compiled):
    stats = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def gradients(params, batch):
    return jax.value_and_grad(lambda params: jnp.sum(jnp.tanh(jnp.tanh(batch @ params) @ params)))(params)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(1)(x)


def training():
    model = Net()
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 16)))

    def loss_fn(params, model_state, batch, rng):
        y, model_state = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return jnp.mean(y**2), model_state

    def state():
        ready = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
        tx = jaxmp.loss_scaling(optax.sgd(0.1, momentum=0.9), jaxmp.DynamicLossScale())
        return jaxmp.TrainState.create(
            params=ready["params"], tx=tx, model_state={"batch_stats": ready["batch_stats"]}, rng=0
        )

    return jaxmp.make_train_step(loss_fn), jax.eval_shape(state), {"x": shape(8, 16)}


def test_the_peak_is_the_compilers_and_the_kinds_of_a_train_step_sum_to_it():
    step, state, batch = training()
    plan = memory(step)(state, batch)
    assert plan.peak == peak_of(step.lower(state, batch).compile())
    assert set(plan.by_kind) == KINDS
    assert sum(plan.by_kind.values()) == sum(plan.by_dtype.values()) == plan.peak
    params = 4 * (16 * 32 + 32 + 2 * 32 + 32 + 1)
    assert plan.by_kind["params"] == params
    assert params <= plan.by_kind["optimizer"] <= params + 64  # with the loss scale
    assert plan.by_kind["model_state"] == 4 * 2 * 32 and plan.by_kind["batch"] == 4 * 8 * 16
    assert plan.batch == 8
    assert sum(array.bytes for array in plan.at_peak) <= plan.peak
    kernel = next(array for array in plan.at_peak if array.path == "state/params/Dense_0/kernel")
    assert (kernel.bytes, kernel.dtype, kernel.shape, kernel.kind) == (2048, "float32", (16, 32), "params")


def test_a_donated_argument_counts_once():
    def update(params, batch):
        return params - gradients(params, batch)[1]

    args = shape(64, 64), shape(8, 64)
    plain, donated = memory(update)(*args), memory(jax.jit(update, donate_argnums=0))(*args)
    assert plain.peak >= donated.peak
    assert plain.by_kind["other"] - donated.by_kind["other"] == 64 * 64 * 4
    assert donated.by_kind["params"] == 64 * 64 * 4


def test_by_position_the_first_argument_is_the_params_and_activations_are_what_the_backward_pass_reads():
    plan = memory(gradients)(shape(64, 64), shape(256, 64))
    assert plan.by_kind["params"] == 64 * 64 * 4 and plan.by_kind["batch"] == 256 * 64 * 4
    assert plan.by_kind["activations"] >= 256 * 64 * 4
    assert any(array.kind == "activations" and array.source.startswith("test_memory.py:") for array in plan.at_peak)
    forward = memory(lambda params, batch: jnp.tanh(batch @ params))(shape(64, 64), shape(256, 64))
    assert forward.by_kind["activations"] == 0


def test_values_that_a_scan_keeps_for_its_backward_pass_are_activations():
    def layer(h, w):
        return jnp.tanh(h @ w) * jnp.sin(h), None

    args = shape(6, 64, 64), shape(1024, 64)
    stack = 6 * 1024 * 64 * 4
    # With remat, only the carry is saved. Without it, the tangents of both functions and their results are saved too.
    for body, least, most in ((jax.checkpoint(layer), 1, 1), (layer, 3, 9)):
        plan = memory(jax.grad(lambda params, batch, body=body: jnp.sum(jax.lax.scan(body, batch, params)[0])))(*args)
        stacked_arrays = [array for array in plan.at_peak if array.bytes == stack]
        assert least <= len(stacked_arrays) <= most
        assert {(array.kind, array.source.partition(":")[0]) for array in stacked_arrays} == {
            ("activations", "test_memory.py")
        }
    forward = memory(lambda *args: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), args[1], args[0])[1] * 2)(*args)
    assert forward.by_kind["activations"] == 0


def test_a_buffer_that_a_loop_passes_on_is_not_made_by_the_loop():
    program = HloProgram("""HloModule loop, is_scheduled=true

%body (carry: (s32[], f32[8], f32[16])) -> (s32[], f32[8], f32[16]) {
  %carry = (s32[], f32[8]{0}, f32[16]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%carry), index=0
  %same = f32[8]{0} get-tuple-element(%carry), index=1
  %old = f32[16]{0} get-tuple-element(%carry), index=2
  %new = f32[16]{0} negate(%old)
  ROOT %next = (s32[], f32[8]{0}, f32[16]{0}) tuple(%turn, %same, %new)
}

%stops (state: (s32[], f32[8], f32[16])) -> pred[] {
  %state = (s32[], f32[8]{0}, f32[16]{0}) parameter(0)
  ROOT %stop = pred[] constant(false)
}

ENTRY %main (x: f32[]) -> f32[24] {
  %x = f32[] parameter(0)
  %zero = s32[] constant(0)
  %first = f32[8]{0} broadcast(%x), dimensions={}, metadata={op_name="jit(f)/first"}
  %second = f32[16]{0} broadcast(%x), dimensions={}, metadata={op_name="jit(f)/second"}
  %init = (s32[], f32[8]{0}, f32[16]{0}) tuple(%zero, %first, %second)
  %loop = (s32[], f32[8]{0}, f32[16]{0}) while(%init), condition=%stops, body=%body, metadata={op_name="jit(f)/while"}
  %one = f32[8]{0} get-tuple-element(%loop), index=1
  %two = f32[16]{0} get-tuple-element(%loop), index=2
  ROOT %both = f32[24]{0} concatenate(%one, %two), dimensions={0}
}
""")
    made_by = {str(buffer.array): buffer.maker.op_name for buffer in memory_of_hlo.buffers_at_peak(program)}
    assert made_by["f32[8]"] == "jit(f)/first" and made_by["f32[16]"] == "jit(f)/while"


@pytest.mark.slow("a process of its own, whose stack has no line of a test")
def test_sources_are_lines_of_the_users_program_alone(tmp_path):
    (tmp_path / "command").write_text("import sys\nfrom jaxmp.cli import main\nsys.exit(main())\n")
    (tmp_path / "train.py").write_text(
        "import jax.numpy as jnp, optax, jaxmp\n"
        "def loss_fn(params, model_state, batch, rng):\n"
        "    return jnp.mean(jnp.tanh(batch @ params) ** 2), model_state\n"
        "def shapes():\n"
        "    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))\n"
        "    return jaxmp.TrainState.create(params=jnp.ones((256, 256)), tx=tx), jnp.ones((64, 256))\n"
        "step = jaxmp.make_train_step(loss_fn)\n"
    )
    words = ["memory", "train:step", "--args", "train:shapes", "--json"]
    process = subprocess.run(
        [sys.executable, "command", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    sources = {array["source"].partition(":")[0] for array in json.loads(process.stdout)["at_peak"]}
    assert sources <= {"train.py", ""} and sources


def test_kinds_are_known_from_what_holds_them():
    for fun, args, expected in (
        (lambda params, batch: params["params"] * params["batch_stats"] * batch,
         ({"params": shape(4), "batch_stats": shape(4)}, shape(4)), {"params": 16, "model_state": 16, "batch": 16}),
        (lambda w, opt, x: w * opt[0].mu * x, (shape(4), jax.eval_shape(optax.adam(1e-3).init, shape(4)),
         shape(4)), {"params": 16, "optimizer": 16, "batch": 16}),
        (lambda batch, w: w.fast * w.slow * batch,
         (shape(4), optax.LookaheadParams(shape(4), shape(4))), {"params": 32, "batch": 16}),
        (lambda w, x, rng: w * x + jax.random.normal(rng, (4,)),
         (shape(4), shape(4), jax.eval_shape(jax.random.key, 0)), {"params": 16, "batch": 16}),
    ):  # fmt: skip
        plan = memory(fun)(*args)
        kinds = {kind: size for kind, size in plan.by_kind.items() if kind not in ("other", "temporaries")}
        assert kinds == {**dict.fromkeys(kinds, 0), **expected}
        assert sum(plan.by_kind.values()) == plan.peak


def test_python_values_among_the_arguments_stay_what_they_are():
    def fun(params, batch, train):
        return batch @ params if train else batch

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert [memory(fun)(x, x, train).by_kind["params"] for train in (True, False)] == [64, 0]


def test_the_memory_of_nnx_models_and_optimizers_has_their_kinds():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    plan = memory(step)(model, optimizer, shape(8, 16))
    size = 4 * (16 * 4 + 4)
    assert plan.by_kind["params"] == size and plan.by_kind["batch"] == 8 * 16 * 4
    assert size <= plan.by_kind["optimizer"] <= size + 8
    jaxmp_optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9))
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    plan = memory(step)(model, jaxmp_optimizer, jnp.ones((8, 16)))
    assert plan.by_kind["params"] == size and size <= plan.by_kind["optimizer"] <= size + 64


@pytest.mark.once
def test_the_largest_batch_fits_and_one_more_does_not():
    args = shape(64, 64), shape(256, 64)
    plan = memory(gradients)(*args)
    limit = 1_000_000
    size = plan.largest_batch(limit)
    assert memory(gradients)(args[0], shape(size, 64)).peak <= limit
    assert memory(gradients)(args[0], shape(size + 1, 64)).peak > limit
    assert plan.largest_batch(limit, multiple_of=8) == size // 8 * 8
    assert plan.largest_batch(1000) == 0


def test_the_search_compiles_few_sizes_and_trusts_no_line():
    compiled = []

    def peak(bytes_of):
        def known(size):
            compiled.append(size)
            return bytes_of(size)

        return known

    plan = memory(lambda params, batch: batch @ params)(shape(4), shape(32, 4))

    def with_a_dip(n):
        return 1000 + 100 * n - (900 if 33 <= n < 50 else 0)

    for limit, bytes_of in (
        (20_000, lambda n: 1000 + 100 * n),
        (20_000, lambda n: 1000 + 100 * n + (5000 if n > 77 else 0)),
        (20_000, lambda n: 1000 + n * n),
        (20_000, lambda n: 1000 + 256 * (n // 16) * 16),
        (4_500, with_a_dip),
        (5_000, with_a_dip),
    ):
        compiled.clear()
        case = type(plan)("cpu", bytes_of(32), {}, {}, (), 32, peak(bytes_of))
        size = case.largest_batch(limit)
        assert bytes_of(size) <= limit < bytes_of(size + 1), size
        assert len(compiled) <= 16
        compiled.clear()
        assert case.largest_batch(limit, at_most=40) == min(size, 40) and max(compiled) <= 40
    assert compiled_for_a_line(1000, 30, 100_000) == 4


def compiled_for_a_line(constant, bytes_per_example, limit):
    """Return how many sizes the search compiles if the peak is linear in the batch size."""
    compiled = []

    def peak(size):
        compiled.append(size)
        return constant + bytes_per_example * size

    case = type(memory(lambda params, batch: batch @ params)(shape(4), shape(2, 4)))
    case("cpu", peak(512), {}, {}, (), 512, peak).largest_batch(limit)
    return len(compiled)


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match=r"device must be None, .* GPU or TPU, got 'h300'; nearest: 'h200', 'h100', "):
        memory(gradients, device="h300")(shape(4, 4), shape(4, 4))
    with pytest.raises(
        ValueError, match="scales axis 0 of the batch, but no argument is a batch; pass the batch after"
    ):
        memory(lambda params: params * 2)(shape(4)).largest_batch(100)
    with pytest.raises(ValueError, match="needs memory that depends on the batch"):
        constant = memory(lambda params, batch: batch @ params)(shape(4), shape(2, 4))
        type(constant)("cpu", 10, {}, {}, (), 2, lambda size: 10).largest_batch(100)
    monkeypatch.setattr(gpu_targets, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(ModuleNotFoundError, match="compile-only"):
        memory(gradients, device="h200")(shape(4, 4), shape(4, 4))


def test_it_is_shown_as_text_a_table_and_json():
    plan = memory(gradients)(shape(64, 64), shape(256, 64))
    assert str(plan).startswith("288.0 KiB at the peak on cpu, batch of 256\nby kind: params 16.0, batch 64.0")
    assert plan.table().row_count <= 20
    plain = json.loads(plan.to_json())
    assert plain["peak"] == plan.peak and plain["by_kind"] == plan.by_kind and "_peak_with" not in plain


def test_on_a_cpu_the_result_says_that_half_arrays_are_stored_in_float32():
    def product(x):
        return x @ x

    half, wide = (jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    result = memory(jax.jit(product))(half)
    (note,) = result.notes
    assert "A CPU stores most half-precision arrays in float32" in note
    assert "device='h200'" in note and "compile-only" in note
    assert note in str(result).splitlines()
    assert memory(jax.jit(product))(wide).notes == ()


def test_the_command_prints_it_and_says_in_one_line_what_is_wrong(capsys):
    assert main(["memory", "jax.numpy:matmul", "--arg", "float32[8,16]", "--arg", "float32[16,4]", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["by_kind"]["params"] == 512 and plain["by_kind"]["batch"] == 256
    for arguments, phrase in (
        (["--arg", "float32[4,8]", "--device", "h300"], "got 'h300'"),
        ([], "takes (a, b"),
    ):
        assert main(["memory", "jax.numpy:matmul", "--arg", "float32[8,4]", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("jaxmp memory: error: ") and phrase in error and error.count("\n") == 1


@pytest.mark.absent_gpu
@pytest.mark.parametrize("name", gpu_targets.TARGETS)
def test_for_each_described_gpu_it_is_what_the_compiler_reports(name):
    fun = jax.jit(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T).sum())  # it has few kernels
    args = shape(16, 32), shape(8, 16)
    plan = memory(fun, device=name)(*args)
    target = gpu_targets.TARGETS[name]
    with jaxmp.hardware.assumed(name):
        lowered = fun.trace(*targets.on(target.devices()[0], args)).lower(lowering_platforms=("cuda",))
    assert plan.peak == peak_of(lowered.compile(compiler_options=dict(target.compiler_options)))
    assert sum(plan.by_kind.values()) == sum(plan.by_dtype.values()) == plan.peak
    assert plan.device == target.name


@pytest.mark.absent_gpu
@pytest.mark.parametrize("platforms", [None, "cuda", "cpu"])
def test_a_described_gpu_needs_neither_cudnn_nor_a_platform_that_is_named(platforms):
    code = (
        "import jax, jax.numpy as jnp, sys\n"
        "if sys.argv[1:]: jnp.ones(3).sum()\n"  # JAX loads its plugins, but not the one that lacks cuDNN
        "from jaxmp.inspect import memory\n"
        "shapes = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)\n"
        "print(memory(lambda p, x: (x @ p).sum(), device='h200')(*shapes).by_kind['params'])\n"
        "if sys.argv[1:]: print(float(jnp.ones(3).sum()))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env |= {"JAX_PLATFORMS": platforms} if platforms else {}
    after = [] if platforms == "cuda" else ["after"]
    process = subprocess.run([sys.executable, "-c", code, *after], env=env, capture_output=True, text=True, check=False)
    assert process.stdout.split() == ["8192", *(["3.0"] if after else [])], process.stderr
    if platforms == "cpu":
        assert "cuDNN" not in process.stderr
